"""The manager's arguments, checked before anything is touched."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import Any

from distckpt.coordination.bootstrap import Bootstrap
from distckpt.durable import REAL, Files
from distckpt.errors import ConfigError
from distckpt.retention import KeepAll, Policy, from_limits
from distckpt.runtime import SYSTEM, Runtime

log = logging.getLogger(__name__)

ON_EXISTS = ("error", "skip", "replace")
VERIFY = ("size", "digest")
IN_FLIGHT = ("wait", "skip", "error")
WRITERS = ("thread", "process")
STORAGE = ("shared", "node-local")
DEDUP = (None, "link")
PAGE_CACHE = ("drop", "keep")


@dataclass(frozen=True)
class Timeouts:
    """Deadlines in seconds.

    ``arrive``: until every rank has made a collective call. ``progress``: since a rank's last new bytes (slow is no
    timeout). ``visible``: until a directory that rank 0 made is seen by all (network file systems cache for a minute).
    ``close``: for saying goodbye and deleting what is in trash.
    """

    arrive: float = 600.0
    progress: float = 600.0
    visible: float = 120.0
    close: float = 300.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ConfigError(f"timeout {name} must be a positive number of seconds, not {value!r}")


@dataclass(frozen=True)
class Seams:
    """The ways out of the library, for a simulation or a fault test to replace. ``bootstrap``: None finds one."""

    files: Files = REAL
    runtime: Runtime = SYSTEM
    bootstrap: Bootstrap | None = None


def policy(retention: Policy | None, keep_last: int | None, keep_every: int | None, keep_best: int | None, best_metric: str,
            best_mode: str) -> Policy:
    limits = from_limits(keep_last, keep_every, keep_best, best_metric, best_mode)
    if retention is None:
        if isinstance(limits, KeepAll) and (keep_every or keep_best):
            log.warning("keep_every and keep_best add to keep_last, and without keep_last nothing is ever deleted: set "
                        "keep_last, or pass retention=KeepBest(...)")
        return limits
    if keep_last or keep_every or keep_best:
        raise ConfigError("pass either retention=... or keep_last, keep_every, keep_best, not both")
    if not isinstance(retention, Policy):
        raise ConfigError(f"retention must be a policy such as KeepLast(3) | KeepEvery(1000), not {type(retention).__name__}")
    return retention


def choice(name: str, value: Any, allowed: tuple[str | None, ...]) -> str:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")
    return str(value)


def links(dedup: Any, digest: str | None) -> bool:
    """Whether unchanged files are linked."""
    choice("dedup", dedup, DEDUP)
    if dedup is not None and digest is None:
        raise ConfigError("dedup='link' tells unchanged files by their digest: leave digest at 'xxh3-128', or pass 'sha256'")
    return dedup is not None
