"""``distckpt prune``: retention by hand, with the reason for every checkpoint."""

from __future__ import annotations

import argparse
from collections import Counter

from distckpt import catalog, human, retention, rotation
from distckpt.catalog import Entry
from distckpt.checkpoint import Checkpoint
from distckpt.cli import claim, exits, latest, output, target
from distckpt.cli.output import Output
from distckpt.cli.target import UsageError
from distckpt.errors import ConfigError, MarkerError, StepNotFound
from distckpt.leases import Watch
from distckpt.marker import FileEntry, Marker
from distckpt.owned import OwnedRoot
from distckpt.reader import Root
from distckpt.retention import KeepBest, Policy
from distckpt.rotation import Context, Verdict

FLAGS = "--keep-last N [--keep-every K] [--keep-best N --best-metric M --best-mode min|max]"


def run(args: argparse.Namespace, out: Output) -> int:
    given = _given(args)
    root = target.open_root(args.root, args.series)
    if args.dry_run:
        plan = Plan(root, args.series, given, None)
        _report(out, plan, [v.entry.name for v in plan.victims], dry=True)
        return exits.OK
    with claim.claimed(root.files, root.layout, root.runtime, out) as owned:
        plan = Plan(Root(root.layout.root, root.files, root.runtime), args.series, given, owned)
        owned.rotate(args.series, plan.policy, plan.context)
        standing = {e.head.attempt for e in owned.entries() if e.head is not None}
        gone = [v.entry.name for v in plan.victims if v.entry.head is not None and v.entry.head.attempt not in standing]
        left = claim.drain(owned, out)
    _report(out, plan, gone, dry=False)
    if left:
        out.note(f"{output.plural(len(left), 'entry')} in trash could not be deleted yet; 'distckpt gc {root.layout.root}' tries "
                 "again")
    if len(gone) < len(plan.victims):
        out.note(f"{len(plan.victims) - len(gone)} of {output.plural(len(plan.victims), 'checkpoint')} to remove still stand: "
                 "the warnings above say why; run this again")
        return exits.FAILED
    return exits.FAILED if left else exits.OK


class Plan:
    """What retention decides now: by the same ``rotation.plan`` as a live run, which also keeps what resume would choose.

    It reads every checkpoint whole before that one counts; what survives is synced by the owner before a victim moves.
    """

    def __init__(self, root: Root, series: str, given: Policy | None, owned: OwnedRoot | None) -> None:
        self.root, self.series = root, series
        chosen = latest.choose(root, series)
        if chosen is None:
            raise StepNotFound(f"{root.layout.root} has no checkpoint of series {series!r}: there is nothing to prune")
        self.policy, self.source = (given, "given") if given is not None else (_recorded(chosen), f"recorded in {chosen.name}")
        entries = root.entries()
        run = owned.record.run if owned is not None else root.record.run if root.record is not None else chosen.marker.head.run
        watch = owned.watch if owned is not None else Watch(root.files, root.layout, root.runtime)
        protected = rotation.protected_now(root.files, root.layout, entries, watch)
        protected[chosen.attempt] = "; ".join(filter(None, (protected.get(chosen.attempt), "resume would choose it")))
        ignored = {a: f"rejected: {why}" for a, why in catalog.rejections(root.files, root.layout).items()}
        ignored.update({e.head.attempt: f"it is {e.head.share}" for e in entries if e.head is not None and e.head.of > 1})
        self.context = Context(protected, ignored, line=((chosen.marker.branch, chosen.seq), *chosen.marker.lineage),
                               origin=chosen.marker.parent, fresh=_since_resume(root, entries, chosen))
        self.sizes: dict[str, int] = {}
        self._files: dict[str, tuple[FileEntry, ...]] = {}
        metrics: set[str] = set()

        def read(entry: Entry) -> Marker:
            found = owned.examine(entry) if owned is not None else _read(root, entry)
            self.sizes[entry.name] = found.size
            self._files[entry.name] = found.files
            metrics.update(found.metrics)
            return found

        self.verdicts = rotation.plan(series, entries, run, self.policy, self.context, read)
        if given is not None:
            _check_metric(given, metrics)
        self._linked = {v.entry.name: catalog.linked(root.files, root.layout.final(v.entry.name), self._files[v.entry.name])
                        for v in self.victims}

    def freed(self, names: list[str]) -> int:
        """Bytes that the disk has back when ``names`` are gone: a linked file goes with its last name, and counts once."""
        total, counts = sum(self.sizes.get(name, 0) for name in names), Counter[tuple[int, int]]()
        known: dict[tuple[int, int], tuple[int, int, int]] = {}
        for name in names:
            for inode, (size, here, links) in self._linked[name].items():
                counts[inode] += here
                known[inode] = size, here, links
        return total - sum(size * (counts[inode] - (counts[inode] >= links)) for inode, (size, _, links) in known.items())

    @property
    def victims(self) -> list[Verdict]:
        return [v for v in self.verdicts if not v.keep]


def _given(args: argparse.Namespace) -> Policy | None:
    """The policy of the flags, None without any."""
    extra = [args.keep_every, args.keep_best]
    if args.keep_best is None and (args.best_metric is not None or args.best_mode is not None):
        raise UsageError("--best-metric and --best-mode go with --keep-best N")
    if args.keep_best is not None and args.best_metric is None:
        raise UsageError("--keep-best needs --best-metric M: the name of a recorded metric; 'distckpt ls' shows them")
    if args.keep_last is None and all(value is None for value in extra):
        return None
    if any(value is not None and value < 1 for value in (args.keep_last, *extra)):
        raise UsageError("limits of prune are 1 or more; leave a rule out to not have it")
    if args.keep_last is None:
        raise UsageError("--keep-every and --keep-best add to --keep-last; without it there is no limit and nothing goes: "
                         f"give {FLAGS}")
    return retention.from_limits(args.keep_last, args.keep_every, args.keep_best, args.best_metric or "loss",
                                 args.best_mode or "min")


def _check_metric(policy: Policy, recorded: set[str]) -> None:
    """A metric that no checkpoint has is a slip of the pen, and would let the best ones go."""
    for part in policy.parts:
        if isinstance(part, KeepBest) and part.metric not in recorded:
            raise ConfigError(f"no checkpoint here records the metric {part.metric!r}, so the best cannot be told: nothing is "
                              f"removed; recorded are: {', '.join(sorted(recorded)) or 'none'}")


def _recorded(chosen: Checkpoint) -> Policy:
    if chosen.marker.retention is None:
        raise ConfigError(f"{chosen.name} records no retention policy, so prune does not know what may go: give {FLAGS}")
    return retention.parse(chosen.marker.retention)


def _read(root: Root, entry: Entry) -> Marker:
    """The marker of ``entry``, whole and with every file of its size; MarkerError otherwise."""
    directory = root.layout.final(entry.name)
    found = catalog.read_marker(root.files, directory)
    problems = catalog.check_files(root.files, directory, found.files)
    if problems:
        raise MarkerError(f"{problems[0].path} {problems[0].what}", files={p.path: p.what for p in problems})
    return found


def _since_resume(root: Root, entries: list[Entry], chosen: Checkpoint) -> set[str]:
    """The attempts committed since the resume that ``chosen`` comes from: until enough of them stand, its origin stays."""
    found: set[str] = set()
    if chosen.marker.parent is None:
        return found
    for entry in entries:
        if entry.series == chosen.series and entry.committed and entry.head is not None:
            try:
                if catalog.read_marker(root.files, root.layout.final(entry.name)).parent == chosen.marker.parent:
                    found.add(entry.head.attempt)
            except (MarkerError, OSError):
                continue  # damaged: the plan says so, and it cannot stand in for the origin
    return found


def _report(out: Output, plan: Plan, gone: list[str], dry: bool) -> None:
    root, rows, size, document = plan.root, [], 0, []
    for verdict in plan.verdicts:
        entry = verdict.entry
        goes = not verdict.keep
        word = "keep" if verdict.keep else "remove" if dry else "removed" if entry.name in gone else "STANDS"
        seen = plan.sizes.get(entry.name)
        if entry.name in gone:
            size += seen or 0
        rows.append((entry.name, str(entry.step), human.size(seen) if seen is not None else "-", word, verdict.reason))
        document.append({"name": entry.name, "step": entry.step, "bytes": seen, "keep": verdict.keep,
                         "removed": goes and not dry and entry.name in gone, "reason": verdict.reason})
    freed = plan.freed(gone)
    out.document({"root": root.layout.root, "series": plan.series, "policy": plan.policy.spec, "source": plan.source,
                  "dry_run": dry, "checkpoints": document, "bytes": size, "freed": freed})
    out.line(f"{root.layout.root}, series {plan.series}: retention {plan.policy.spec} ({plan.source})")
    out.table(("NAME", ">STEP", ">SIZE", "VERDICT", "WHY"), rows)
    verb = "would remove" if dry else "removed"
    committed = sum(v.entry.committed for v in plan.verdicts)
    shared = f", which frees {human.size(freed)}: shared files are there once" if freed < size else ""
    out.line(f"{verb} {len(gone)} of {output.plural(committed, 'checkpoint')}, {human.size(size)}{shared}"
             + ("; nothing was changed (--dry-run)" if dry else ""))
