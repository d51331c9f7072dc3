"""Ways to break the library on purpose, inside the rank that is to be broken: the loops must turn red for each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any


def _ack_without_fsync() -> None:
    """A rank acks whatever fsync said."""
    from distckpt.saving.piecewriter import PieceWriter

    def close(self: Any) -> None:
        if not self._closed:
            self._closed = True
            self.flush()
            with suppress(OSError):
                self._out.fsync()
            self._out.close()
            self.durable = True

    PieceWriter.close = close  # type: ignore[method-assign]


def _close_unchecked() -> None:
    """A rank swallows what close reports."""
    from distckpt.saving.piecewriter import PieceWriter

    def close(self: Any) -> None:
        if not self._closed:
            self._closed = True
            self.flush()
            self._out.fsync()
            with suppress(OSError):
                self._out.close()
            self.durable = True

    PieceWriter.close = close  # type: ignore[method-assign]


def _silent_failure() -> None:
    """A rank that failed raises and tells nobody."""
    from distckpt.saving.transaction import Transaction

    real: Callable[..., Any] = Transaction.finish

    def finish(self: Any, files: Any, error: BaseException | None) -> Any:
        if error is not None:
            raise error
        return real(self, files, error)

    Transaction.finish = finish  # type: ignore[method-assign]


def _makes_its_way() -> None:
    """A rank makes the directories that it misses."""
    import os

    from distckpt.durable import Files

    real = Files.open

    def open_there(self: Files, path: str) -> Any:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return real(self, path)

    Files.open = open_there  # type: ignore[method-assign]


def _rotate_first() -> None:
    """Rank 0 rotates before it commits."""
    from distckpt.retention import KeepLast
    from distckpt.saving.committer import Committer

    real: Callable[..., Any] = Committer.commit

    def commit(self: Any, go: Any, *rest: Any, **how: Any) -> Any:
        self.rotate(self.request.series, KeepLast(1))
        return real(self, go, *rest, **how)

    Committer.commit = commit  # type: ignore[method-assign, assignment]


def _publish_first() -> None:
    """Rank 0 publishes and then writes the marker: what stands under the final name is no checkpoint yet."""
    from distckpt.saving import commit

    module: Any = commit
    real = module.write_new

    def write_new(files: Any, path: str, data: bytes) -> None:
        staged, _, name = path.rpartition("/")
        outer, _, step = staged.rpartition("/")
        root = outer.partition("/.distckpt/")[0]
        files.rename(staged, f"{root}/{step}")
        real(files, f"{root}/{step}/{name}", data)
        files.rename(f"{root}/{step}", staged)

    module.write_new = write_new


def no_fence() -> None:
    """A rank's optimizer steps before its state is copied: the copy waits for the first step after the save's call."""
    import threading

    from torch.optim.optimizer import register_optimizer_step_post_hook

    from distckpt.saving.staging import Copy

    begin, real, stepped = Copy.begin, Copy.finish, threading.Event()

    def begun(self: Copy, *args: Any) -> Any:
        stepped.clear()
        return begin(self, *args)

    def finish(self: Copy) -> None:
        stepped.wait(10.0)
        real(self)

    Copy.begin = begun  # type: ignore[method-assign]
    Copy.wait = lambda self, gone: None  # type: ignore[method-assign]
    Copy.finish = finish  # type: ignore[method-assign]
    register_optimizer_step_post_hook(lambda *ignored: stepped.set())


def _link_without_fsync() -> None:
    """A rank acks a link to a file that is not durable: whatever the fsync through its new name said."""
    from distckpt.durable import Files
    from distckpt.saving.links import Twins

    real = Twins.link

    def link(self: Twins, files: Files, *what: Any) -> bool:
        try:
            return real(self, files, *what)
        except OSError:
            return True

    Twins.link = link  # type: ignore[method-assign]


MUTANTS: dict[str, Callable[[], None]] = {
    "ack without fsync": _ack_without_fsync,
    "close unchecked": _close_unchecked,
    "silent failure": _silent_failure,
    "makes its way": _makes_its_way,
    "rotate first": _rotate_first,
    "publish first": _publish_first,
    "no fence": no_fence,
    "link without fsync": _link_without_fsync,
}


def apply(name: str) -> None:
    if name:
        MUTANTS[name]()
