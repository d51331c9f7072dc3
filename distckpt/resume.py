"""Where the run goes on: one answer on every rank.

Rank 0 picks a candidate, every rank looks at its share of the files, and one disagreement moves everybody to the next
older one. Only positive evidence rejects (a wrong size or digest, an absence that lasted); a rank that cannot tell makes
resume an error, because "I could not look" must never discard the newest checkpoint (S23).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from distckpt import catalog, selection
from distckpt.catalog import Entry, Problem
from distckpt.checkpoint import Checkpoint
from distckpt.coordination.group import Group
from distckpt.coordination.rounds import Call, Report, require_same
from distckpt.domains.domains import Domains, ranks_text
from distckpt.domains.standing import Abroad
from distckpt.durable import Files
from distckpt.errors import (
    DistckptError,
    MarkerError,
    NoUsableCheckpoint,
    RankFailure,
    ResumeError,
    StepNotFound,
    from_wire,
    to_wire,
)
from distckpt.layout import MARKER, Layout, Naming
from distckpt.marker import FileEntry, Marker
from distckpt.owned import OwnedRoot
from distckpt.ownership import STILL
from distckpt.patience import PASSING, Patience
from distckpt.runtime import Runtime
from distckpt.saving.lineage import Lineage
from distckpt.saving.piecewriter import PeerFailed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumed:
    """``checkpoint`` is None for a fresh start; ``skipped`` maps every name that was passed over to the reason."""

    checkpoint: Checkpoint | None
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def step(self) -> int | None:
        return self.checkpoint.step if self.checkpoint else None


@dataclass(frozen=True)
class Wish:
    """What the caller asked for."""

    series: str
    step: int | None
    verify: str
    allow_fresh: bool
    fingerprint: str | None
    source: bool = False


class Chooser:
    """Rank 0's side. ``owned`` is None when the candidates stand in another root (a warm start). ``abroad``: what other nodes'
    disks hold and rank 0's does not."""

    def __init__(self, files: Files, layout: Layout, naming: Naming, run: str | None, owned: OwnedRoot | None,
                 lineage: Lineage, wish: Wish, abroad: Abroad | None = None) -> None:
        self._files, self._layout, self._naming, self._run = files, layout, naming, run
        self._owned, self._lineage, self._wish, self._abroad = owned, lineage, wish, abroad or Abroad()
        self._found: selection.Candidates | None = None
        self._entries: list[Entry] = []
        self._queue: list[Entry] = []
        self._now: tuple[Entry, Marker] | None = None

    def pick(self, reports: dict[int, Report]) -> Report:
        """The next candidate, or the end: fresh, or the error."""
        wish = self._wish
        require_same(reports, {"wish": "what to resume from"}, "resume")
        try:
            if self._found is None:
                self._look()
            while self._queue:
                entry = self._queue.pop(0)
                reason = self._open(entry)
                if reason is None:
                    assert self._now is not None
                    self._check_fingerprint(self._now[1])
                    return {"try": entry.name, "attempt": self._now[1].head.attempt}
                self._reject(entry, reason)
        except DistckptError:
            raise  # StepNotFound is an OSError too
        except OSError as error:
            raise ResumeError(f"resume: {self._layout.root} cannot be read on rank 0: {error}; not starting fresh, because this "
                              "is no proof that there is nothing", step=wish.step) from error
        assert self._found is not None
        if wish.step is not None or (self._found.skipped and not wish.allow_fresh):
            raise self._none_usable()
        traces = [] if wish.allow_fresh or wish.source else [
            *selection.traces(self._files, self._layout, self._entries), *self._abroad.traces]
        if wish.source or traces:
            raise ResumeError(f"resume: {self._layout.root} holds no checkpoint of series {wish.series!r}, but it had one "
                              f"({'; '.join(traces) or 'it was named as the source'}); not starting fresh silently. Restore it, "
                              "or say allow_fresh=True, or use an empty root", step=wish.step)
        if self._owned is not None:
            if wish.allow_fresh and self._entries:
                self._owned.record_rollback(-1)
            self._lineage.resumed(self._owned.runtime.token(8), None)
        return {"fresh": True, "skipped": self._found.skipped}

    def _look(self) -> None:
        wish = self._wish
        self._entries = catalog.scan(self._files, self._layout, self._naming)
        rejected = catalog.rejections(self._files, self._layout)
        if self._owned is not None:
            self._owned.foreign(self._entries)
            rejected = {**rejected, **self._owned.in_doubt}
        ranges = selection.abandoned(self._files, self._layout)
        self._found = selection.candidates(self._entries, wish.series, self._run, rejected, ranges,
                                           selection.recorded(self._files, self._layout))
        self._found.skipped.update({name: why for series, name, why in self._abroad.missing if series == wish.series})
        self._queue = list(self._found.usable)
        apart = self._owned.apart if self._owned is not None else ()
        if self._found.legacy:
            names = self._found.legacy
            log.warning("%d director%s in %s never committed or not written by distckpt (%s), passed over: 'distckpt adopt %s "
                        "%s' makes a checkpoint of one that you know to be whole", len(names),
                        "y was" if len(names) == 1 else "ies were", self._layout.root, ", ".join(names[:4]),
                        self._layout.root, names[0])
        unsure = [e for e in self._entries if e.series == wish.series and not e.certain and wish.step in (None, e.step)]
        if unsure and not wish.allow_fresh:
            raise ResumeError(f"resume: rank 0 cannot tell whether {unsure[0].name} is a checkpoint: {unsure[0].problem}; not "
                              "falling back on a guess. Check the storage on that host and start again", step=unsure[0].step)
        if wish.step is not None:
            self._queue = [e for e in self._entries if e.series == wish.series and e.step == wish.step and e.committed
                           and e.head is not None and (self._run is None or e.head.run == self._run)
                           and e.head.attempt not in apart]
            if not self._queue:
                have = [e.step for e in self._found.usable]
                here = self._layout.root
                why = next((f": {r}" for n, r in self._found.skipped.items()
                            if self._naming.of_series(wish.series).step_of(n) == wish.step), "")
                raise StepNotFound(f"resume: step {wish.step} is not a committed checkpoint of {here}{why}; committed steps "
                                   f"are {have[:20]}", step=wish.step)

    def _open(self, entry: Entry) -> str | None:
        self._now = None
        try:
            self._now = entry, catalog.read_marker(self._files, self._layout.final(entry.name))
        except MarkerError as error:
            return next(iter(error.files.values()))
        return catalog.identity_problem(self._now[1].head, entry.name, (entry.series, entry.step))

    def _check_fingerprint(self, found: Marker) -> None:
        mine = self._wish.fingerprint
        if mine is not None and found.fingerprint is not None and mine != found.fingerprint:
            raise ResumeError(f"resume: {found.head.name} was saved with fingerprint {found.fingerprint!r}, this run has "
                              f"{mine!r}: another model or configuration; use another root, or the same fingerprint",
                              step=found.head.step)

    def _none_usable(self) -> NoUsableCheckpoint:
        assert self._found is not None
        skipped = self._found.skipped
        shown = "; ".join(f"{name}: {why}" for name, why in list(skipped.items())[:6])
        return NoUsableCheckpoint(f"resume: {self._layout.root} has {len(skipped)} candidates and none can be used - {shown}. "
                                  "'distckpt verify' shows each; adopt or repair one, or say allow_fresh=True to start over",
                                  step=self._wish.step, rejected=dict(skipped))

    def _reject(self, entry: Entry, reason: str) -> None:
        assert self._found is not None and entry.head is not None
        self._found.skipped[entry.name] = reason
        log.warning("%s cannot be used (%s); trying the next older one", entry.name, reason)
        if self._owned is None:
            return
        try:
            self._owned.reject(entry.head.attempt, entry.name, reason)
        except OSError as error:
            log.warning("could not record that %s is bad: %s", entry.name, error)

    def judge(self, reports: dict[int, Report]) -> Report:
        """Accept the candidate, move on, or give up because a rank could not look."""
        assert self._now is not None and self._found is not None
        entry, found = self._now
        unsure = {rank: report["unsure"] for rank, report in reports.items() if report.get("unsure")}
        bad = {rank: report["bad"] for rank, report in reports.items() if report.get("bad")}
        moved = {rank: report["moved"] for rank, report in reports.items() if report.get("moved")}
        if moved:
            raise ResumeError(f"resume: {entry.name} is whole, and its files are on other nodes than the ranks that wrote "
                              f"them: {'; '.join(moved[rank] for rank in sorted(moved)[:4])}. Start the job with its nodes in "
                              "the order of the save (a host file, or srun --distribution)", step=entry.step)
        if bad:
            rank = min(bad)
            self._reject(entry, f"{bad[rank]} (seen by rank {rank})")
            if self._wish.step is not None:
                raise self._none_usable()
            return {"next": True}
        if unsure:
            raise ResumeError(f"resume: rank {min(unsure)} cannot tell whether {entry.name} is whole: {unsure[min(unsure)]}; not "
                              "falling back on a guess. Check the storage on that host and start again", step=entry.step)
        if self._owned is not None:
            self._accept(entry, found)
        return {"accepted": True, "skipped": self._found.skipped}

    def _accept(self, entry: Entry, found: Marker) -> None:
        owned, wish = self._owned, self._wish
        assert owned is not None and self._found is not None
        ranges = selection.abandoned(self._files, self._layout)
        if wish.step is not None and selection.abandon(ranges, found.head.seq, owned.highest_seq) != ranges:
            owned.record_rollback(found.head.seq)
        try:
            owned.vouch(entry)
        except (OSError, MarkerError) as error:
            log.warning("%s could not be made durable anew: %s", entry.name, error)
        self._lineage.resumed(owned.runtime.token(8), found)
        log.info("resuming from %s: step %d, saved by %d ranks", entry.name, found.head.step, found.world)
        owned.journal.event("resumed", name=entry.name, step=found.head.step, attempt=found.head.attempt,
                            skipped=self._found.skipped)


class Looker:
    """Every rank's side: sees the marker, then its share of the files."""

    def __init__(self, files: Files, root: str, group: Group, runtime: Runtime, visible: float,
                 domains: Domains | None = None) -> None:
        self._files, self._root, self._group, self._domains = files, root, group, domains
        self._patience = Patience.towards(files, runtime, root, max(visible, STILL), lambda: group.pulse.phase(self._phase))
        self._phase = ""

    def look(self, name: str, attempt: str, digest: bool) -> tuple[Marker | None, Report]:
        """(the marker, {} | {"bad": ...} | {"unsure": ...} | {"moved": ...})."""
        directory = f"{self._root}/{name}"
        self._phase = f"looking at {name}"
        self._group.pulse.phase(self._phase)
        for _ in self._patience.looks():
            found, unsure, passing = self._marker(directory, attempt)
            if not passing:
                break
        if found is None:
            return None, {"unsure": unsure + self._waited(passing)}
        if found.head.of > 1:
            problem = self._elsewhere(found)
            if problem:
                return None, problem
        mine = share(found, self._group.rank, self._group.world, digest, self._domains.mine if self._domains else ())
        seen = self._problems(directory, mine, digest)
        certain = [p for p in seen if p.certain]
        if certain:
            return found, {"bad": f"{certain[0].path} {certain[0].what}{self._waited(True)}"}
        if seen:
            return found, {"unsure": f"{seen[0].path} {seen[0].what}{self._waited(seen[0].passing)}"}
        return found, {}

    def _elsewhere(self, found: Marker) -> Report:
        """Empty when this rank's disk has the share that this rank wrote into."""
        rank, host = self._group.rank, self._group.identity.host
        if self._domains is None:
            return {"unsure": f"it is {found.head.share}"}
        if found.world == self._group.world and rank not in found.domains[found.head.part][1]:
            writer = next((name for name, ranks in found.domains if rank in ranks), "an unknown node")
            return {"moved": f"rank {rank} runs on {host} and wrote on {writer}; {host} has the files of "
                             f"{ranks_text(found.domains[found.head.part][1])}"}
        return {}

    def _waited(self, passing: bool) -> str:
        where = f" on {self._group.identity.host}"
        return where + (f", and that for {self._patience.seconds:.0f} s" if passing and self._patience.seconds else "")

    def _marker(self, directory: str, attempt: str) -> tuple[Marker | None, str, bool]:
        """(the marker, why it is not the one that rank 0 sees, whether another look may show it)."""
        try:
            self._files.scan(self._root)  # an absence may be remembered, which a fresh listing ends
            found = catalog.read_marker(self._files, directory)
        except MarkerError as error:
            return None, f"its {MARKER} does not read as on rank 0 ({next(iter(error.files.values()))})", True
        except OSError as error:
            return None, f"its {MARKER} cannot be read ({error})", error.errno in PASSING
        if found.head.attempt != attempt:
            return None, f"its {MARKER} is of attempt {found.head.attempt}, rank 0 sees {attempt}", True
        return found, "", False

    def _problems(self, directory: str, entries: list[FileEntry], digest: bool) -> list[Problem]:
        """What is wrong with these files, as often looked at as another look may see it otherwise."""
        for _ in self._patience.looks():
            seen = [(e, p) for e in entries if (p := catalog.check_file(self._files, directory, e, digest)) is not None]
            if not seen or not all(problem.certain or problem.passing for _, problem in seen):
                break
            entries = [entry for entry, _ in seen]
            try:
                self._files.scan(directory)
            except OSError:
                continue  # the next look says what is wrong
        return [problem for _, problem in seen]


def share(found: Marker, rank: int, world: int, digest: bool, mine: Sequence[int] = ()) -> list[FileEntry]:
    """The files that ``rank`` looks at: all files are dealt out, whatever the number of ranks (S23). ``mine``: the ranks that
    see this disk, where not all do.

    By size each rank looks at its own; reading for digests is dealt so that every rank reads about as much.
    """
    if not digest and found.world == world and (found.head.of > 1 or not mine):
        return [e for e in found.files if e.rank == rank]
    if mine:
        rank, world = list(mine).index(rank), len(mine)
    if not digest:
        return [e for e in found.files if e.rank % world == rank]
    loads = [0] * world
    dealt = []
    for entry in sorted(found.files, key=lambda e: (-e.size, e.path)):
        lightest = loads.index(min(loads))
        loads[lightest] += entry.size + 4096
        if lightest == rank:
            dealt.append(entry)
    return dealt


def agree(call: Call, group: Group, chooser: Chooser | None, looker: Looker, wish: Wish, root: str, files: Files,
          arrive: float, progress: float) -> Resumed:
    """The rounds of resume, inside a collective call."""
    digest = wish.verify == "digest"
    report: dict[str, Any] = {"wish": [wish.series, wish.step, wish.verify, wish.allow_fresh, root if wish.source else ""]}
    while True:
        verdict = call.round(report, chooser.pick if chooser else _never, arrive)
        if verdict.get("fresh"):
            return Resumed(None, verdict["skipped"])
        found, seen = looker.look(verdict["try"], verdict["attempt"], digest)
        answer = call.round(seen, chooser.judge if chooser else _never, progress, progress=True)
        if answer.get("accepted"):
            assert found is not None
            checkpoint = Checkpoint(f"{root}/{verdict['try']}", found, rank=group.rank, world=group.world, files=files)
            return Resumed(checkpoint, answer["skipped"])


def end_load(call: Call, group: Group, checkpoint: Checkpoint, error: Exception | None, progress: float) -> None:
    """The last round of a restore: a load that failed on one rank failed on all (S23). Collective."""
    report: Report = {}
    if isinstance(error, DistckptError):
        report = {"error": to_wire(error)}
    elif error is not None and not isinstance(error, PeerFailed):
        failure = RankFailure.of(error, rank=group.rank, host=group.identity.host, pid=group.identity.pid,
                                 phase=group.pulse.current_phase)
        report = {"failure": asdict(failure)}

    def decide(reports: dict[int, Report]) -> Report:
        for rank in sorted(reports):
            if "error" in reports[rank]:
                raise from_wire(reports[rank]["error"])
        failures = [RankFailure(**reports[r]["failure"]) for r in sorted(reports) if "failure" in reports[r]]
        if failures:
            raise ResumeError(f"restore of {checkpoint.name} failed: {'; '.join(map(str, failures[:4]))}. No rank may train on: "
                              "the state is partly loaded. 'distckpt verify --digest' tells whether the files are whole",
                              step=checkpoint.step)
        return {}

    try:
        call.round(report, decide, progress, progress=True)
    except DistckptError as raised:
        raise raised from error


def _never(reports: dict[int, Report]) -> Report:
    raise AssertionError("only rank 0 decides")


