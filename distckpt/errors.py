"""Everything distckpt raises, in one tree.

::

    DistckptError
      ConfigError (ValueError)              wrong arguments or a contradicting environment, before any I/O
      RootInUse                             another live writer owns the root: who, since when
      LeaseLost                             a lease could not be renewed in time; the checkpoint may go at any moment
      CoordinationError
        RankDisagreement      .values       ranks called with different steps, roots or options
        RankTimeout (TimeoutError)          .missing, .phase: who did not arrive, and where each was last seen
          RankLost                          the same, known at once: the process has ended, or left its manager
        CoordinatorLost                     rank 0, or the way to it, is gone
      SaveError               .failures     one save failed; .outcome says aborted or unknown
        DiskFull              .needed .free
        StepAlreadyExists (FileExistsError)
      ResumeError                           no trustworthy answer to "where do we go on"
        NoUsableCheckpoint    .rejected     candidates exist, none can be used
        StepNotFound (FileNotFoundError)    the step asked for is not committed here
        WorldMismatch         .saved .now   written by another number of ranks, and the payload cannot reshard
        MemberMissing         .members      a per-rank member has no state in the checkpoint
      ExportError                           a checkpoint's weights cannot be made whole, or not be written
      IntegrityError          .files        bytes differ from what the marker promises
        MarkerError                         commit.json is torn, forged, or from a newer format

A message has one shape: what failed; where (step, attempt, rank, host); what was seen; what to do.
Every class survives ``pickle`` and the control plane's JSON, so that all ranks can raise the same one.
"""

from __future__ import annotations

import errno
import traceback as _traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

Wire = dict[str, Any]

_TRACEBACK_LIMIT = 8_000
_MESSAGE_LIMIT = 4_000
_TOLD_WHOLE = 64
_TOLD_SHORT = 300


@dataclass(frozen=True)
class RankFailure:
    """What went wrong on one rank, as every other rank gets to see it."""

    rank: int
    type: str
    message: str
    host: str
    pid: int
    phase: str
    traceback: str = ""
    path: str | None = None
    disk_full: bool = False
    free: int | None = None
    needed: int | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid}, {self.phase}): {self.type}: {self.message}"

    @classmethod
    def of(cls, error: BaseException, *, rank: int, host: str, pid: int, phase: str, free: int | None = None,
           needed: int | None = None, where: str | None = None) -> RankFailure:
        """The record of ``error``. ``free``: bytes left in ``where`` it was writing, if known."""
        root = _first_os_error(error)
        text = "".join(_traceback.format_exception(error))
        return cls(rank=rank, type=type(error).__name__, message=str(error)[:_MESSAGE_LIMIT], host=host, pid=pid,
                   phase=phase, traceback=text[-_TRACEBACK_LIMIT:],
                   path=str(root.filename) if root is not None and root.filename is not None else where or None,
                   disk_full=is_disk_full(error, free), free=free, needed=needed)


def _first_os_error(error: BaseException) -> OSError | None:
    seen: set[int] = set()
    here: BaseException | None = error
    while here is not None and id(here) not in seen:
        seen.add(id(here))
        if isinstance(here, OSError) and here.errno is not None:
            return here
        here = here.__cause__ or here.__context__
    return None


def is_disk_full(error: BaseException, free: int | None = None) -> bool:
    """Whether ``error`` means a full disk or quota.

    Native writers (torch's zip writer, safetensors) lose the errno: their text is looked at, and for torch's,
    which has none, how much room was left (``free`` bytes) where it was writing.
    """
    root = _first_os_error(error)
    if root is not None:
        return root.errno in (errno.ENOSPC, errno.EDQUOT)
    text = str(error)
    if "No space left on device" in text or "Disk quota exceeded" in text:
        return True
    from_torch = "PytorchStreamWriter" in text or "inline_container.cc" in text
    return from_torch and free is not None and free < (1 << 20)


class DistckptError(Exception):
    """Base of all errors of this library."""

    _fields: ClassVar[tuple[str, ...]] = ()

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        unknown = set(fields) - set(self._fields)
        if unknown:
            raise TypeError(f"{type(self).__name__} has no {sorted(unknown)}")
        self.message = message
        for name in self._fields:
            setattr(self, name, fields.get(name))

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return from_wire, (to_wire(self),)


class ConfigError(DistckptError, ValueError):
    """Wrong arguments, or an environment that contradicts itself; raised before anything is touched."""


class RootInUse(DistckptError):
    """Another live writer owns this root."""

    _fields = ("host", "pid", "job", "age", "generation")
    host: str
    pid: int
    job: str | None
    age: float
    generation: int


class LeaseLost(DistckptError):
    """A lease could not be renewed; rotation may remove its checkpoint."""


class CoordinationError(DistckptError):
    """The ranks could not agree, or could not reach each other."""


class RankDisagreement(CoordinationError):
    """Ranks made different calls; ``values`` says which, by rank."""

    _fields = ("values",)
    values: dict[int, Any]


class RankTimeout(CoordinationError, TimeoutError):
    """Ranks did not arrive in time; ``missing`` maps each to its last heartbeat."""

    _fields = ("missing", "phase")
    missing: dict[int, Any]
    phase: str


class RankLost(RankTimeout):
    """Ranks whose process has ended, or that left their manager; noticed at once, without waiting for a deadline."""


class CoordinatorLost(CoordinationError):
    """Rank 0's store is gone, and with it every decision."""


class SaveError(DistckptError):
    """A save failed, on every rank alike. ``outcome``: aborted (as if it never was) or unknown (settled later)."""

    _fields = ("step", "attempt", "background", "failures", "outcome", "needed", "free", "path")
    step: int
    attempt: str | None
    background: bool
    failures: dict[int, RankFailure]
    outcome: str


class DiskFull(SaveError):
    """No room on some rank's disk: ``path``, ``needed`` and ``free`` (bytes) of the first such rank."""

    needed: int | None
    free: int | None
    path: str | None


class StepAlreadyExists(SaveError, FileExistsError):
    """The step is committed (or its name is taken) and ``on_exists`` is "error"."""


class ResumeError(DistckptError):
    """There is no trustworthy answer to "where do we go on"."""

    _fields: ClassVar[tuple[str, ...]] = ("step",)
    step: int | None


class NoUsableCheckpoint(ResumeError):
    """Candidates exist and none can be used; ``rejected`` maps each name to its reason."""

    _fields = ("step", "rejected")
    rejected: dict[str, str]


class StepNotFound(ResumeError, FileNotFoundError):
    """The step asked for is not a committed checkpoint of this root."""


class WorldMismatch(ResumeError):
    """Saved by ``saved`` ranks, loaded by ``now``, and the payload cannot reshard."""

    _fields = ("step", "saved", "now")
    saved: int
    now: int


class MemberMissing(ResumeError):
    """A per-rank member that the state has is not in the checkpoint."""

    _fields = ("step", "members")
    members: list[str]


class ExportError(DistckptError):
    """The weights of a checkpoint cannot be made whole, or not be written; the checkpoint is as it was."""


class IntegrityError(DistckptError):
    """Bytes on disk are not the bytes that were committed; ``files`` maps path to what is wrong."""

    _fields = ("files",)
    files: dict[str, str]


class MarkerError(IntegrityError):
    """commit.json cannot be trusted: torn, altered, or written by a newer version."""


def _all_classes(base: type[DistckptError]) -> dict[str, type[DistckptError]]:
    found = {base.__name__: base}
    for child in base.__subclasses__():
        found.update(_all_classes(child))
    return found


_RANK_KEYED = ("values", "missing", "failures")


def to_wire(error: DistckptError) -> Wire:
    """``error`` as bounded JSON values. Of many failures (a full disk fails on every rank of ten thousand) the first are told
    whole, and the others without traceback: each rank's log has its own."""
    fields: dict[str, Any] = {}
    for name in error._fields:
        value = getattr(error, name)
        if name == "failures" and value is not None:
            value = {str(r): asdict(f if n < _TOLD_WHOLE else replace(f, traceback="", message=f.message[:_TOLD_SHORT]))
                     for n, (r, f) in enumerate(sorted(value.items()))}
        elif name in _RANK_KEYED and value is not None:
            value = {str(r): v for r, v in value.items()}
        fields[name] = value
    return {"type": type(error).__name__, "message": error.message, "fields": fields}


def from_wire(wire: Mapping[str, Any]) -> DistckptError:
    """The error that ``to_wire`` was given; an unknown type becomes the base class, what is no error a CoordinationError."""
    try:
        cls = _all_classes(DistckptError).get(str(wire["type"]), DistckptError)
        fields = {k: v for k, v in dict(wire.get("fields") or {}).items() if k in cls._fields}
        for name in _RANK_KEYED:
            if fields.get(name) is not None:
                fields[name] = {int(r): v for r, v in fields[name].items()}
        if fields.get("failures") is not None:
            fields["failures"] = {r: RankFailure(**f) for r, f in fields["failures"].items()}
        return cls(str(wire["message"]), **fields)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        return CoordinationError(f"an error was told that cannot be read ({type(error).__name__}: {error}): {wire!r:.300}")
