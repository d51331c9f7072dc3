"""The disk begins with files of other writers while they grow, so that the fsync at the end finds little left to write.

A thread looks at what this process has open below the attempt's directory (a framework's writer may work under a name of its
own, and give the file its size at once), and starts write-back of it. What other processes write is not seen, and is begun when
it is whole.

It starts and never waits: a call that waits for pages is told their write errors, once, and the fsync that follows, by a
descriptor opened later, would succeed over what was lost; one that starts takes no error from anybody
(tests/crash/test_lost_writeback.py). To wait would hold the framework up in nothing anyway.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from distckpt.durable import Files
from distckpt.runtime import Runtime

log = logging.getLogger(__name__)

_EVERY = 0.02
_SHARE = 20
"""Looking takes at most this part of one core, however many descriptors there are."""


@contextmanager
def paced(files: Files, runtime: Runtime, directory: str, ours: Callable[[str], bool]) -> Iterator[None]:
    """Inside, what this process writes below ``directory`` is on its way to the disk, but for files that are ``ours``, which pace
    themselves. Nothing is under way any more behind it; an error that the kernel told is raised there. Local."""
    if not files.sees_open:
        yield
        return
    done, failed = runtime.event(), list[BaseException]()

    def look() -> None:
        pause = _EVERY
        try:
            while not done.wait(pause):
                begun = runtime.monotonic()
                found = files.held_open(directory)
                pause = max(_EVERY, _SHARE * (runtime.monotonic() - begun))
                for path in found:
                    if not ours(path):
                        files.start_writeback(path)
        except BaseException as error:  # raised again below, on the caller's thread
            failed.append(error)

    try:
        helper = runtime.thread("pacing", look)
    except RuntimeError as error:
        log.debug("no thread to pace the disk by: %s", error)
        yield
        return
    try:
        yield
    finally:
        done.set()
        helper.join()
    if failed:
        raise failed[0]
