"""What all ranks agree on about one save: what is asked for, what rank 0 answers, and the one error that they share."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

from distckpt.coordination.group import Group
from distckpt.coordination.rounds import Call, Report
from distckpt.errors import ConfigError, DiskFull, DistckptError, RankFailure, SaveError
from distckpt.saving.piecewriter import PeerFailed

BLOCK = object()
"""In place of a payload: the caller writes, in a ``saving`` block."""


@dataclass(frozen=True)
class Request:
    """What is to be saved, as far as all ranks must agree on it."""

    step: int
    series: str
    on_exists: str
    name: str
    collective: bool = False
    discardable: bool = False
    blocked: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    links: bool = False


@dataclass(frozen=True)
class Go:
    """Rank 0's answer to begin. ``source``: (name, attempt) of the checkpoint whose files may be linked."""

    attempt: str
    name: str
    generation: int
    seq: int
    replace: bool = False
    discard: bool = False
    existing: str | None = None
    source: tuple[str, str] | None = None


def save_error(step: int, attempt: str | None, failures: dict[int, RankFailure], world: int,
               outcome: str = "aborted") -> SaveError:
    """The one error that every rank raises, with the causes of all failing ranks."""
    first = failures[min(failures)]
    full = next((f for _, f in sorted(failures.items()) if f.disk_full), None)
    causes = "; ".join(str(f) for _, f in sorted(failures.items())[:4]) + (" ..." if len(failures) > 4 else "")
    after = ("nothing was published and the checkpoints before it are untouched" if outcome == "aborted" else
             "its outcome is unknown: it does not count, nothing is rotated, and the next begin or start settles it")
    where = f"save of step {step}" + (f" (attempt {attempt})" if attempt else "")
    common: dict[str, Any] = {"step": step, "attempt": attempt, "background": False, "failures": failures, "outcome": outcome}
    if full is not None:
        room = f"{full.free} bytes are free"
        if full.needed:  # judging by the last checkpoint; a save that grew may fill a disk that looked roomy
            room += (f", about {full.needed} are needed" if full.free is None or full.needed > full.free else
                     f", which was not enough (the last checkpoint took {full.needed})")
        return DiskFull(f"{where}: the disk is full on rank {full.rank} ({full.host}) at {full.path or 'its staging directory'}: "
                        f"{room}; {after}. Free space, lower keep_last, or save elsewhere. Causes: {causes}",
                        needed=full.needed, free=full.free, path=full.path, **common)
    many = f"{len(failures)} of {world} ranks" if len(failures) > 1 else f"rank {first.rank}"
    return SaveError(f"{where} failed on {many}; {after}. Causes: {causes}", **common)


def both_wrote(path: str, one: int, other: int) -> str:
    return (f"ranks {one} and {other} both wrote {path!r}: use files.mine for a file per rank, or files.writes with files.shared "
            "for one that is the same on all")


def raise_failures(step: int | None, reports: dict[int, Report], world: int) -> None:
    """The SaveError of ranks that failed before anything was written (a ``state_dict()`` that raised, say), if any did. A rank
    that a peer stopped is to blame only where nobody else is."""
    for part in ("failure", "stopped"):
        failures = {rank: RankFailure(**report[part]) for rank, report in reports.items() if part in report}
        if failures:
            break
    if failures:
        assert step is not None
        raise save_error(step, None, failures, world)


def refuse(call: Call, group: Group, error: Exception, arrive: float) -> NoReturn:
    """This rank cannot even begin: every rank hears why in the begin round, before any I/O, instead of waiting for it."""
    if isinstance(error, ConfigError):
        call.refuse(error, arrive)
    stopped = isinstance(error, PeerFailed)
    failure = RankFailure.of(error.__cause__ or error if stopped else error, rank=group.rank, host=group.identity.host,
                             pid=group.identity.pid, phase="prepare")

    def decide(reports: dict[int, Report]) -> Report:
        raise_failures(call.step, reports, group.world)
        raise AssertionError("this rank's own report is a failure")

    try:
        call.round({"stopped" if stopped else "failure": asdict(failure)}, decide, arrive)
    except DistckptError as told:
        raise told from error
    raise error
