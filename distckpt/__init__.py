"""distckpt: a checkpoint exists only when every rank's bytes are durable.

The names below are the whole public surface. All but the errors are imported when they are first used, so that the command
and readers of a root feel instant, and nobody waits for torch who does not need it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from distckpt.errors import (
    ConfigError,
    CoordinationError,
    CoordinatorLost,
    DiskFull,
    DistckptError,
    ExportError,
    IntegrityError,
    LeaseLost,
    MarkerError,
    MemberMissing,
    NoUsableCheckpoint,
    RankDisagreement,
    RankFailure,
    RankLost,
    RankTimeout,
    ResumeError,
    RootInUse,
    SaveError,
    StepAlreadyExists,
    StepNotFound,
    WorldMismatch,
)

if TYPE_CHECKING:
    from distckpt.checkpoint import Checkpoint
    from distckpt.leases import Lease
    from distckpt.manager import CheckpointManager
    from distckpt.options import Timeouts
    from distckpt.payloads.dcp import DCP
    from distckpt.payloads.members import Member
    from distckpt.payloads.shards import Shards
    from distckpt.payloads.train_state import TrainState
    from distckpt.reader import Root
    from distckpt.reader import open_root as open
    from distckpt.record import CommitRecord
    from distckpt.retention import KeepAll, KeepBest, KeepEvery, KeepLast
    from distckpt.steps import Todo, Tolerate

__version__ = "0.1.0"

_LAZY = {
    "Checkpoint": "distckpt.checkpoint",
    "KeepAll": "distckpt.retention",
    "KeepBest": "distckpt.retention",
    "KeepEvery": "distckpt.retention",
    "KeepLast": "distckpt.retention",
    "Lease": "distckpt.leases",
    "Root": "distckpt.reader",
    "open": "distckpt.reader",
    "CheckpointManager": "distckpt.manager",
    "Timeouts": "distckpt.options",
    "CommitRecord": "distckpt.record",
    "Todo": "distckpt.steps",
    "Tolerate": "distckpt.steps",
    "TrainState": "distckpt.payloads.train_state",
    "Shards": "distckpt.payloads.shards",
    "DCP": "distckpt.payloads.dcp",
    "Member": "distckpt.payloads.members",
}


def __getattr__(name: str) -> Any:
    if name == "launch":  # distckpt.launch.ignore_stop_signals, before any manager is made
        return import_module("distckpt.launch")
    if name not in _LAZY:
        raise AttributeError(f"module 'distckpt' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), "open_root" if name == "open" else name)


__all__ = [
    "Checkpoint", "CheckpointManager", "CommitRecord", "ConfigError", "CoordinationError", "CoordinatorLost", "DCP", "DiskFull",
    "DistckptError", "ExportError", "IntegrityError", "KeepAll", "KeepBest", "KeepEvery", "KeepLast", "Lease", "LeaseLost",
    "MarkerError", "Member", "MemberMissing", "NoUsableCheckpoint", "RankDisagreement", "RankFailure", "RankLost",
    "RankTimeout", "ResumeError", "Root", "RootInUse", "SaveError", "Shards", "StepAlreadyExists", "StepNotFound",
    "Timeouts", "Todo", "Tolerate", "TrainState", "WorldMismatch", "open",
]
