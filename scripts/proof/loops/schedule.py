"""Which runs there are, in which order. The number of a run in that order is its seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from scripts.proof.loops import traced
from scripts.proof.loops.judge import WORLD, Item, Known
from scripts.proof.loops.strikes import ERRNOS, Strike, every

MARGIN = 3
"""So many n beyond the last operation, to see that a loop has come to its end: threads take turns as they like."""

_READS_VARY = 6
"""Which rank reads a thing that two may read is a matter of luck: a manifest is five reads, of one rank or of the other."""
WHOLE = "sync"
_ONE_ERRNO_EACH = {("error", False): 8, ("error", True): 8, ("late error", False): 4, ("read error", False): 2,
                   ("read error", True): 2, ("lie", True): 8, ("stop", False): 4, ("slow", False): 8}
_SAMPLE = 8
_MOST = 640
_FIRST = 152


def stride(program: str, kind: str, forever: bool) -> int:
    """Every so many-th operation. One program meets all there is at every n; two meet every n, each with some errno; where
    torch's collectives make a run slow, a sample."""
    if program == WHOLE:
        return 1
    return _SAMPLE if program.startswith("dcp") else _ONE_ERRNO_EACH.get((kind, forever), 1)


def margin(strike: Strike) -> int:
    return MARGIN + (_READS_VARY if strike.kind == "read error" else 0)


def runs(programs: list[str]) -> list[Item]:
    """All runs, and more: n goes up to a limit that no program reaches, so that a seed means the same wherever it is run.
    The first ones meet every kind of fault, the next ones every kind in every program on every rank."""
    found = [item for name in programs for item in _of(name)]
    random.Random(20).shuffle(found)
    for key in (_place, _kind):  # stable: what comes first of each key goes to the front
        found = _first_of_each(found, key)
    return found


def fitted(item: Item, seed: int, known: Known) -> Item | None:
    """``item`` if this program has such an operation. Of the first ones, that are to meet every kind, another n is taken."""
    count, strike = known.count(item.strike), item.strike
    if strike.n <= count + (0 if item.traced else margin(strike)):
        return item
    return replace(item, strike=replace(strike, n=1 + strike.n % count)) if seed < _FIRST and count else None


def fitting(items: list[Item], known: dict[str, Known]) -> dict[int, Item]:
    """By number, the runs that there are here, each once."""
    blind = traced.missing() is not None
    found = {seed: fit for seed, item in enumerate(items) if not (item.traced and blind)
             and (fit := fitted(item, seed, known[item.program])) is not None}
    return {seed: item for item, seed in {item: seed for seed, item in reversed(found.items())}.items()}


def order(numbers: Iterable[int], items: list[Item], whole: bool, start: int) -> list[int]:
    """The first ones first; then the program that is walked ``whole``, or those from ``start`` on and round."""
    return sorted(numbers, key=lambda n: (0, n) if n < _FIRST else (1 + (items[n].program != WHOLE), n) if whole
                  else (1, (n - start) % len(items)))


def _of(name: str) -> Iterator[Item]:
    for rank in range(WORLD):
        for index, (kind, number, forever) in enumerate(every()):
            step = stride(name, kind, forever)
            phase = ERRNOS.index(number) if number else index
            for n in range(1, _MOST + 1):
                if n % step == phase % step:
                    yield Item(name, Strike(rank, kind, n, number, forever))
        for index, (kind, number) in enumerate(traced.KINDS if name in traced.PROGRAMS else ()):
            for n in range(1, _MOST + 1):
                if n % traced.PROGRAMS[name] == index % traced.PROGRAMS[name]:
                    yield Item(name, Strike(rank, kind, n, number), traced=True)


def _kind(item: Item) -> tuple[str, str, bool, bool]:
    return item.strike.kind, item.strike.number, item.strike.forever, item.traced


def _place(item: Item) -> tuple[str, int, str, bool]:
    return item.program, item.strike.rank, item.strike.kind, item.traced


def _first_of_each(items: list[Item], key: Callable[[Item], object]) -> list[Item]:
    seen: set[object] = set()
    first: list[Item] = []
    rest: list[Item] = []
    for item in items:
        (rest if key(item) in seen else first).append(item)
        seen.add(key(item))
    return first + rest


def complaint(item: Item, known: Known, fired: bool, reached: int) -> str | None:
    """A run whose fault never fired proves nothing; a loop whose last fault fired has not come to its end. Writes are as many in
    every run; of reads the struck rank's own count says how many there were to strike: ``reached``."""
    strike = item.strike
    count, n = known.count(strike), strike.n
    if not fired and n <= (reached if strike.kind == "read error" else count):
        return "its fault never fired"
    if fired and (n > count + margin(strike) - 1 or count > _MOST - margin(strike)):
        return f"there are more operations than the {count} that were counted"
    return None
