"""One thing done to many files, several at a time: a disk that is asked for one fsync after the other is idle in between.

A journal commits, and a disk flushes its cache, for all who wait at that moment at once, so a thousand fsyncs by sixteen threads
take a tenth of their time, and each still reports the errors of its own file (``syncfs`` would report them for all files, and
write everybody else's data as well).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from distckpt.runtime import Runtime

T = TypeVar("T")
R = TypeVar("R")

_FEW = 16
_HELPERS = 15


def together(runtime: Runtime, do: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """What ``do`` gives for each item, in their order. Few are done one by one.

    When one fails, no other is begun, and its error is raised, of several the first item's. Nothing is under way any more when
    this returns or raises (S21).
    """
    if len(items) < _FEW:
        return [do(item) for item in items]
    turns = iter(range(len(items)))
    results: dict[int, R] = {}
    failed: dict[int, BaseException] = {}

    def work() -> None:
        for turn in turns:
            try:
                results[turn] = do(items[turn])
            except BaseException as error:  # raised again below, on the caller's thread
                failed[turn] = error
            if failed:
                return

    helpers = []
    try:
        for _ in range(_HELPERS):
            helpers.append(runtime.thread("together", work))
    except RuntimeError:
        pass  # no more threads here: those that there are, and this one, do it
    work()
    for helper in helpers:
        helper.join()
    if failed:
        raise failed[min(failed)]
    return [results[turn] for turn in range(len(items))]
