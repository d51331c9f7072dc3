"""Every schedule within a bound, one after the other, and every fault at every place.

Bounded by delays: the thread that runs goes on until it waits, then who was woken first; a delay passes one thread over at one
point. All schedules with at most ``bound`` delays are all ways to interfere ``bound`` times, which is where the bugs are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from distckpt.testing.scheduler import Delays, Policy

Delayed = Mapping[int, int]


def first_job(delays: Delayed) -> tuple[Callable[[int], Policy], Delays]:
    """A ``policy`` for ``Simulation`` that delays the first job and leaves the restart alone; and what it saw."""
    policy = Delays(delays)
    made: list[Policy] = []

    def make(seed: int) -> Policy:
        made.append(policy if not made else Delays({}))
        return made[-1]

    return make, policy


def schedules(bound: int, width: Callable[[Delayed], list[int]], stride: int = 1, offset: int = 0) -> Iterator[Delayed]:
    """Every set of at most ``bound`` delays, the empty one first. ``width(delays)`` runs that schedule and says how many threads
    could have gone on, point by point. ``stride``: only one in so many of those with one delay, from ``offset`` on."""

    def below(delays: dict[int, int], left: int, step: int) -> Iterator[Delayed]:
        seen = width(delays)
        yield delays
        if not left:
            return
        last = max(delays, default=-1)
        choices = [(at, pick) for at in range(last + 1, len(seen)) for pick in range(1, seen[at])]
        for at, pick in choices[offset % step if step > 1 else 0::step]:
            yield from below({**delays, at: pick}, left - 1, 1)

    yield from below({}, bound, stride)
