"""Which ranks see one and the same disk under the root."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Ranges = list[list[int]]


@dataclass(frozen=True)
class Domains:
    """``all``: the ranks of each domain, each in order, by their lowest; that one is its committer. ``rank``: who asks."""

    all: tuple[tuple[int, ...], ...]
    rank: int
    hosts: Mapping[int, str]

    @property
    def index(self) -> int:
        return next(number for number, ranks in enumerate(self.all) if self.rank in ranks)

    @property
    def mine(self) -> tuple[int, ...]:
        return self.all[self.index]

    @property
    def leads(self) -> bool:
        """Whether this rank is its domain's committer."""
        return self.rank == self.mine[0]

    @property
    def committers(self) -> list[int]:
        return [ranks[0] for ranks in self.all]

    def host(self, index: int) -> str:
        """For people: the hosts of a domain's ranks."""
        return ", ".join(dict.fromkeys(self.hosts[rank] for rank in self.all[index]))

    def name(self, index: int) -> str:
        return f"{self.host(index)} ({ranks_text(self.all[index])})"


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0-3, 8``."""
    parts = [str(low) if low == high else f"{low}-{high}" for low, high in ranges(ranks)]
    return f"rank{'s' if len(parts) > 1 or '-' in parts[0] else ''} {', '.join(parts)}"


def ranges(ranks: Iterable[int]) -> Ranges:
    """Sorted ``ranks`` as [low, high] pairs: few, whatever the number of ranks."""
    found: Ranges = []
    for rank in sorted(ranks):
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return found


def joined(seen: Mapping[int, Sequence[Sequence[int]]]) -> list[list[int]]:
    """The domains, from which ranks' probe files each rank saw (as ``ranges``).

    Seeing is proof and not seeing is none (a cache may hide a file for a minute), so one sight in either direction joins
    two ranks: on shared storage nobody becomes a second committer because one look came too early (S10).
    """
    parent = {rank: rank for rank in seen}

    def top(rank: int) -> int:
        while parent[rank] != rank:
            parent[rank] = rank = parent[parent[rank]]
        return rank

    def join(one: int, two: int) -> None:
        low, high = sorted((top(one), top(two)))
        parent[high] = low

    within: set[tuple[int, int]] = set()
    for rank, pairs in seen.items():
        for low, high in pairs:
            join(rank, low)
            if (low, high) not in within:
                within.add((low, high))
                for other in range(low + 1, high + 1):
                    join(low, other)
    found: dict[int, list[int]] = {}
    for rank in sorted(seen):
        found.setdefault(top(rank), []).append(rank)
    return list(found.values())
