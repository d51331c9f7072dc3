"""What an ``on_commit`` hook is told about a checkpoint. Plain: no torch, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class CommitRecord:
    """One committed and published checkpoint, as this rank saw its save. Immutable; every hook gets a copy of its own.

    ``blocked_seconds``: how long the training thread of this rank stood still for it; ``background_seconds``: what this rank's
    finaliser took after that, 0 for a synchronous save. ``bytes`` and ``files`` are of all ranks together;
    ``slowest_rank`` took ``slowest_seconds`` to write its own and make them durable.
    """

    step: int
    series: str
    path: str
    attempt: str
    seq: int
    metrics: dict[str, float] = field(default_factory=dict)
    bytes: int = 0
    files: int = 0
    blocked_seconds: float = 0.0
    background_seconds: float = 0.0
    slowest_rank: int = 0
    slowest_seconds: float = 0.0
