"""State whose files a framework writes itself, under names of its own: what Accelerate's and Transformers' payloads share.

Each rank gives the framework a directory of its own and takes over the files it finds there. So it is known who wrote what:
that rank makes its files durable, two ranks on one name are found out, and a file that a rank owes is missed at once.
Nothing is serialised again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from distckpt.checkpoint import Checkpoint
from distckpt.durable import PIECE
from distckpt.errors import ConfigError
from distckpt.payloads import whole
from distckpt.payloads.base import Payload, Ranks
from distckpt.payloads.scratch import Scratch, default
from distckpt.saving.files import PeerFailed, RankFiles


class Held:
    """The first error of a framework's file writers on this rank, kept until its collectives are over: raised at once it
    would leave the other ranks in a barrier that this one never reaches."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def run(self, write: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """What ``write`` gives; None when it failed."""
        try:
            return write(*args, **options)
        except Exception as error:  # raised by ``FrameworkFiles`` when the framework has returned
            self.error = self.error or error
            return None


@contextmanager
def holding() -> Iterator[Held]:
    """Inside, ``torch.save`` on this thread does not raise; its first error is ``held.error``."""
    held, real, here = Held(), torch.save, threading.get_ident()

    def save(*args: Any, **options: Any) -> None:
        if threading.get_ident() != here:
            real(*args, **options)
        else:
            held.run(real, *args, **options)

    torch.save = save
    try:
        yield held
    finally:
        torch.save = real


class FrameworkFiles:
    """A payload of files that ``write(directory, held)`` makes.

    ``write`` runs on every rank, with a directory of that rank's own, and may run collectives. ``load(checkpoint, ranks)``
    reads them, where the framework does not do that by itself. ``inside``: the sub-directory of ``directory`` that holds the
    checkpoint's files. ``owed``: names that this rank must have written. ``alike``: names that every rank writes with the
    same content; rank 0's are kept. ``scratch``: where the files of a background save stand until they are in the checkpoint
    (default: memory).
    """

    collective = True
    members: list[str] = []

    def __init__(self, write: Callable[[str, Held], None], load: Callable[[Checkpoint, Ranks], None] | None = None, *,
                 inside: str = "", owed: Collection[str] = (), alike: Callable[[str], bool] | None = None,
                 scratch: str | None = None) -> None:
        self._write, self._load, self._inside, self._owed, self._alike = write, load, inside, owed, alike
        self._where = scratch
        self._staged: Scratch | None = None

    def check(self) -> None:
        """Nothing: the framework's writer says what is wrong."""

    def write(self, files: RankFiles, ranks: Ranks) -> None:
        folder = files.private()
        source = self._run(folder, ranks.rank)
        files.take(source, leave=self._left_out(self._names(source), ranks.rank))

    def tree(self) -> Any:
        """Nothing to copy: the framework writes its files to memory here, on the training thread, and ``of`` has them."""
        if self._staged is not None:
            self._staged.close()
        rank = dist.get_rank() if dist.is_initialized() else 0
        scratch = self._staged = Scratch(self._where or default())
        try:
            source = self._run(scratch.path, rank)
            names = self._names(source)
            left_out = self._left_out(names, rank)
            scratch.seal(source, [n for n in names if n not in left_out])
        except Exception as error:
            full = scratch.full()
            scratch.close()
            if full:
                raise OSError(28, f"no room for the files of a background save: give scratch= another directory, or save with "
                                  f"background=False ({type(error).__name__}: {error})", scratch.where) from error
            raise
        return {}

    def of(self, tree: Any) -> Payload:
        assert self._staged is not None
        return _Waiting(self._staged)

    def load(self, checkpoint: Checkpoint, ranks: Ranks) -> None:
        if self._load is None:
            raise ConfigError("this state is loaded by its framework, not by restore")
        try:
            self._load(checkpoint, ranks)
        except CheckpointException as error:
            raise own_failure(error, ranks.rank) from error

    def _run(self, folder: str, rank: int) -> str:
        """Where the files stand that the framework has written into ``folder``."""
        with holding() as held:
            try:
                self._write(folder, held)
            except CheckpointException as error:
                raise held.error or own_failure(error, rank) from error
            except Exception as error:
                if held.error is not None:
                    raise held.error from error
                if _peer_gone(error):
                    raise PeerFailed from error
                raise
        if held.error is not None:
            raise held.error
        return os.path.join(folder, self._inside) if self._inside else folder

    def _names(self, source: str) -> list[str]:
        """The files below ``source``; OSError when one is missing or not whole."""
        names = sorted(os.path.relpath(os.path.join(top, name), source) for top, _, found in os.walk(source) for name in found)
        for name in self._owed:
            if name not in names:
                raise FileNotFoundError(2, "the framework reported success and did not write this file of this rank's",
                                        os.path.join(source, name))
        for name in names:
            if os.path.isfile(os.path.join(source, name)):
                whole.check(os.path.join(source, name))
        return names

    def _left_out(self, names: list[str], rank: int) -> set[str]:
        return {name for name in names if rank != 0 and self._alike is not None and self._alike(name)}


class _Waiting:
    """Files that the framework wrote, on their way from memory to the checkpoint."""

    collective = False
    members: list[str] = []

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch

    def check(self) -> None:
        """They were checked when they were written."""

    def write(self, files: RankFiles, ranks: Ranks) -> None:
        try:
            for name, source in self._scratch.files.items():
                with files.writer(name, exact=True) as out:
                    while piece := source.read(PIECE):
                        out.write(piece)
        finally:
            self._scratch.close()

    def load(self, checkpoint: Checkpoint, ranks: Ranks) -> None:
        raise ConfigError("a staged copy is written, not loaded into")


def all_or_none(error: Exception | None, ranks: Ranks) -> None:
    """Raise ``error`` here and ``PeerFailed`` on the other ranks, before any of them enters a framework's collectives.
    Collective."""
    if ranks.world > 1:
        failed: list[bool] = [False] * ranks.world
        dist.all_gather_object(failed, error is not None, group=ranks.gloo())
        if error is None and any(failed):
            raise PeerFailed
    if error is not None:
        raise error


def own_failure(error: CheckpointException, rank: int) -> Exception:
    """What this rank itself raised inside DCP's collective; a rank that did not fail only stops.

    DCP's own error derives from BaseException and comes up on every rank alike, which would blame all of them.
    """
    own = error.failures.get(rank)
    if own is None:
        return PeerFailed()
    cause = own[0]
    return cause if isinstance(cause, Exception) else RuntimeError(str(cause))


def _peer_gone(error: Exception) -> bool:
    """Whether a collective ended because a peer did; gloo says so in a plain RuntimeError."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error))
