"""Which line of commits this run is on: where it was resumed from, and what it committed since. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from distckpt.marker import Marker
from distckpt.rotation import in_line

_END = 1 << 62


@dataclass
class Lineage:
    """``known`` once resume has said where the run goes on; before that every checkpoint counts as this run's own line."""

    branch: str
    known: bool = False
    parent: str | None = None
    ancestors: tuple[tuple[str, int], ...] = ()
    fresh: list[str] = field(default_factory=list)

    def resumed(self, branch: str, origin: Marker | None) -> None:
        """Go on from ``origin`` (None: from nothing) as a new branch."""
        self.branch, self.known, self.fresh = branch, True, []
        self.parent = origin.head.attempt if origin else None
        self.ancestors = ((origin.branch, origin.head.seq), *origin.lineage) if origin else ()

    @property
    def line(self) -> tuple[tuple[str, int], ...] | None:
        return ((self.branch, _END), *self.ancestors) if self.known else None

    def holds(self, found: Marker) -> bool:
        """Whether ``found`` is on this run's line, so that ``skip`` is satisfied by it (S24)."""
        return in_line(found, self.line)
