"""``distckpt verify``: whether the bytes on disk are the bytes that were committed."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from distckpt import catalog, human, trust
from distckpt.catalog import Entry
from distckpt.cli import exits, output, survey, target
from distckpt.cli.output import Output
from distckpt.durable import GONE, REAL, Files
from distckpt.errors import MarkerError, StepNotFound
from distckpt.layout import HOME
from distckpt.marker import FileEntry, Marker
from distckpt.ordered import unlink_if_there
from distckpt.reader import Root

OK, DAMAGED, SKIPPED = "ok", "DAMAGED", "skipped"
_SHOWN = 10
_READERS = 8


@dataclass
class Result:
    """What verification found about one directory."""

    name: str
    path: str
    status: str
    marker: Marker | None = None
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def run(args: argparse.Namespace, out: Output) -> int:
    results = []
    for result in _results(args, out):
        results.append(result)
        _show(out, result, args.digest)
    bad = [r for r in results if r.status == DAMAGED]
    done = [r for r in results if r.status != SKIPPED]
    out.document({"digest": args.digest, "ok": not bad, "checkpoints": [_document(r) for r in results]})
    if not done:
        raise StepNotFound(f"{args.root} has no committed checkpoint to verify")
    how = "every byte" if args.digest else "markers and sizes; --digest reads every byte"
    total = sum(r.marker.size for r in done if r.marker is not None)
    out.line(f"{output.plural(len(done), 'checkpoint')} verified ({how}), {human.size(total)}: "
             + (f"{len(bad)} damaged" if bad else "all ok"))
    shares = output.shares(r.marker.head for r in done if r.marker is not None)
    if shares:
        out.line(shares)
    return exits.DAMAGED if bad else exits.OK


def _results(args: argparse.Namespace, out: Output) -> Iterator[Result]:
    wanted = target.of(args)
    if target.is_checkpoint(wanted.path):
        if wanted.step is not None:
            raise target.UsageError(f"{wanted.path} is one checkpoint; a step (or @STEP) goes with a root")
        yield _alone(REAL.real(wanted.path), args.digest, out)  # a link that the user names is meant; others are not followed
        return
    root = target.open_root(wanted.path, args.series)
    entries = [e for e in root.entries(args.series) if wanted.step in (None, e.step)]
    if wanted.step is not None and not entries:
        target.entry_at(root, wanted.step, args.series)
    rejected = catalog.rejections(root.files, root.layout)
    for entry in entries:
        if survey.never_committed(root, entry):
            yield Result(entry.name, root.layout.final(entry.name), SKIPPED, remarks=[entry.problem or ""])
            continue
        result = _check(root.files, root.layout.final(entry.name), entry, args.digest, out)
        if result.status == DAMAGED and not _stands(root, entry):
            result = Result(entry.name, result.path, SKIPPED, remarks=["it was removed or replaced while it was read"])
        _settle_rejection(root, result, rejected, args.digest)
        yield result


def _alone(path: str, digest: bool, out: Output) -> Result:
    """One directory by its path. Where it stands in its own root, its rejection is settled too."""
    parent, name = os.path.split(path)
    result = _check(REAL, path, None, digest, out)
    if result.marker is not None and REAL.is_dir(os.path.join(parent, HOME)):
        root = Root(parent)
        if result.marker.head.name == name:
            _settle_rejection(root, result, catalog.rejections(root.files, root.layout), digest)
    return result


def _check(files: Files, path: str, entry: Entry | None, digest: bool, out: Output) -> Result:
    name = os.path.basename(path)
    result = Result(name, path, OK)
    if entry is not None and entry.problem:
        result.problems.append(entry.problem)
    else:
        try:
            result.marker = catalog.read_marker(files, path)
        except MarkerError as error:
            result.problems += error.files.values()
        except OSError as error:
            result.problems.append(f"its marker cannot be read: {error.strerror or error}")
    if result.marker is not None:
        if result.marker.head.name != name:
            result.remarks.append(f"it is a copy of {result.marker.head.name}: verified against its own marker")
        problems = _digests(files, path, result.marker, out) if digest else catalog.check_files(files, path, result.marker.files)
        result.problems += [f"{p.path} {p.what}" for p in problems]
        strange = catalog.strangers(files, path, (f.path for f in result.marker.files)) if not problems else []
        if result.marker.signed and trust.key() is None:
            result.remarks.append(f"it is signed, and without {trust.KEY_VARIABLE} nobody has checked by whom")
        if strange:
            result.remarks.append(f"{output.plural(len(strange), 'file')} beside the manifest, such as {strange[0]}: not "
                                  "verified")
    if result.problems:
        result.status = DAMAGED
    return result


def _digests(files: Files, path: str, found: Marker, out: Output) -> list[catalog.Problem]:
    """Every byte, several files at a time: one reader leaves most file systems idle."""
    from concurrent.futures import ThreadPoolExecutor

    ended = False

    def between(_: int) -> None:
        if ended:
            raise KeyboardInterrupt  # nobody waits for the rest of a large file

    def one(entry: FileEntry) -> catalog.Problem | None:
        return catalog.check_file(files, path, entry, digest=True, between=between)

    problems, done = [], 0
    pool = ThreadPoolExecutor(_READERS)
    try:
        for entry, problem in zip(found.files, pool.map(one, found.files), strict=True):
            done += entry.size
            out.progress(f"{found.head.name}: {human.size(done)} of {human.size(found.size)}")
            if problem is not None:
                problems.append(problem)
    finally:
        ended = True
        pool.shutdown(cancel_futures=True)
        out.progress("")
    return problems


def _stands(root: Root, entry: Entry) -> bool:
    """Whether it is still the same checkpoint: a live run may rotate one away while it is read, which is no damage."""
    now = catalog.look(root.files, root.layout.root, entry.name, _kind(root, entry.name), (entry.series, entry.step))
    return now is not None and now.head == entry.head


def _kind(root: Root, name: str) -> str:
    try:
        return root.files.stat(root.layout.final(name)).kind
    except OSError as error:
        if error.errno in GONE:
            return "dir"
        raise


def _settle_rejection(root: Root, result: Result, rejected: dict[str, str], digest: bool) -> None:
    """Clear the rejection of a checkpoint whose every byte was found right; say what holds it otherwise."""
    attempt = result.marker.head.attempt if result.marker is not None else None
    if attempt is None or attempt not in rejected:
        return
    if result.status != OK or not digest:
        how = "" if digest else "; --digest clears it if every byte is right"
        result.remarks.append(f"rejected earlier: {rejected[attempt]}{how}")
        return
    try:
        unlink_if_there(root.files, root.layout.rejected(attempt))
        root.files.fsync_dir(root.layout.home("rejected"))
        result.remarks.append(f"its rejection is cleared ({rejected[attempt]}): resume may use it again")
    except OSError as error:
        result.remarks.append(f"its rejection could not be cleared: {error.strerror or error}")


def _show(out: Output, result: Result, digest: bool) -> None:
    text = f"{result.status:<8} {result.name}"
    if result.status == OK and result.marker is not None:
        text += f"  {output.plural(len(result.marker.files), 'file')}, {human.size(result.marker.size)}"
        text += ", every digest right" if digest else ""
    elif result.status == DAMAGED:
        text += f"  {output.plural(len(result.problems), 'problem')}"
    elif result.status == SKIPPED:
        text += f"  {'; '.join(result.remarks)}"
    out.line(text)
    for problem in result.problems[:_SHOWN]:
        out.line(f"         - {problem}")
    if len(result.problems) > _SHOWN:
        out.line(f"         - and {len(result.problems) - _SHOWN} more (--json lists all)")
    for remark in result.remarks if result.status != SKIPPED else ():
        out.line(f"         {remark}")


def _document(result: Result) -> dict[str, Any]:
    return {"name": result.name, "path": result.path, "status": result.status.lower(), "problems": result.problems,
            "remarks": result.remarks, "step": result.marker.head.step if result.marker else None,
            "files": len(result.marker.files) if result.marker else None, "bytes": result.marker.size if result.marker else None}
