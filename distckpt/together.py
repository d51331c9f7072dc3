"""One thing done to many files, several at a time: a disk that is asked for one fsync after the other is idle in between.

A journal commits, and a disk flushes its cache, for all who wait at that moment at once, so a thousand fsyncs by sixteen threads
take a tenth of their time, and each still reports the errors of its own file (``syncfs`` would report them for all files, and
write everybody else's data as well).
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from distckpt.runtime import Runtime, Thread

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

_INTERRUPT = -1
SCARCE = (errno.EMFILE, errno.ENFILE)
"""Opening says so, and a sync never does: nothing of it was synced yet, so it may be done again."""


def together(runtime: Runtime, do: Callable[[T], R], items: Sequence[T], threads: int = 16) -> list[R]:
    """What ``do`` gives for each item, in their order. Fewer than ``threads`` are done one by one.

    When one fails, no other is begun, and its error is raised, of several the first item's; the others are logged. Nothing is
    under way any more when this returns or raises (S21), also where no more threads can be made, or the caller is interrupted.
    Where descriptors run out, fewer threads do it.
    """
    if len(items) < threads:
        return [do(item) for item in items]
    turns = iter(range(len(items)))
    results: dict[int, R] = {}
    failed: dict[int, BaseException] = {}
    again: list[int] = []

    def work() -> None:
        turn = _INTERRUPT
        try:
            for turn in turns:
                if failed:
                    return
                results[turn] = do(items[turn])
        except Exception as error:  # raised again below, on the caller's thread
            if isinstance(error, OSError) and error.errno in SCARCE:
                again.append(turn)
            else:
                failed[turn] = error
        except BaseException as error:  # likewise, before any other
            failed[_INTERRUPT] = error

    helpers: list[Thread] = []
    try:
        for _ in range(threads - 1):
            helpers.append(runtime.thread("together", work))
    except RuntimeError as error:
        log.debug("%d threads instead of %d: %s", len(helpers) + 1, threads, error)
    except BaseException as error:  # an interrupt, raised again below
        failed[_INTERRUPT] = error
    work()
    for helper in helpers:
        try:
            helper.join()
        except BaseException as error:  # an interrupt, raised again below: the others begin nothing more, and then it is over
            failed[_INTERRUPT] = error
            helper.join()
    if failed:
        first, *others = sorted(failed)
        for turn in others:
            log.error("another one failed as well: %s: %s", type(failed[turn]).__name__, failed[turn])
        raise failed[first]
    for turn in [*again, *turns]:
        results[turn] = do(items[turn])
    return [results[turn] for turn in range(len(items))]
