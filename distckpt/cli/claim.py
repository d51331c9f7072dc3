"""Owning a root for the time of one command: what ``prune``, ``gc`` and ``adopt`` share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from distckpt.cli.leftovers import size_of
from distckpt.cli.output import Output, plural
from distckpt.durable import Files
from distckpt.layout import Layout, Naming
from distckpt.owned import OwnedRoot
from distckpt.ownership import STILL
from distckpt.runtime import Runtime

_EVERY = 20.0
_SLACK = 60.0


@contextmanager
def claimed(files: Files, layout: Layout, runtime: Runtime, out: Output, naming: Naming | None = None) -> Iterator[OwnedRoot]:
    """The root, owned until the block ends; RootInUse while another writer lives. Claiming recovers what crashes left."""
    owned = OwnedRoot.open(files, layout, runtime, naming, waiting=_seldom(runtime, out))
    try:
        yield owned
    finally:
        owned.close()


def _seldom(runtime: Runtime, out: Output) -> Callable[[str], None]:
    last = [-_EVERY]

    def say(text: str) -> None:
        now = runtime.monotonic()
        if now - last[0] >= _EVERY:
            last[0] = now
            out.note(text)

    return say


def drain(owned: OwnedRoot, out: Output) -> list[str]:
    """Wait until what was moved to trash is deleted; gives what could not be, which the next claim tries again.

    On a network file system the janitor looks once more for leases 90 s after a move, before the bytes go (S22). There
    it is given up only when no byte went for a minute: many small files take their time.
    """
    files, trash = owned.files, owned.layout.trash(owned.generation)
    say = _seldom(owned.runtime, out)
    network = files.is_network(owned.layout.root)
    seen = -1
    deadline = owned.runtime.monotonic() + (STILL + _SLACK if network else 0.0)
    while True:
        while not owned.janitor.wait(_EVERY):
            say(f"still deleting in {trash}")
        left = owned.janitor.leftovers()
        if not left:
            return left
        now = owned.runtime.monotonic()
        if now >= deadline:
            before, seen = seen, size_of(files, trash)
            if not network or seen == before:
                return left
            deadline = now + _SLACK
        say(f"on a network file system a reader's lease may show up late: {plural(len(left), 'entry')} in trash "
            f"must wait {STILL:.0f} s")
        owned.runtime.sleep(1.0)
