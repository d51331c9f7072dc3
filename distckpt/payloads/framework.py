"""State whose files a framework writes itself, under names of its own: what Accelerate's and Transformers' payloads share.

Each rank gives the framework a directory of its own and takes over the files it finds there; what the framework's writers are
told to write there by torch.save goes into the checkpoint's file at once. So it is known who wrote what: that rank makes its
files durable, two ranks on one name are found out, and a file that a rank owes is missed at once. Nothing is serialised again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from distckpt.checkpoint import Checkpoint
from distckpt.durable import PIECE
from distckpt.errors import ConfigError
from distckpt.payloads import torchfile, whole
from distckpt.payloads.base import Payload, Ranks
from distckpt.payloads.memory import Memory
from distckpt.payloads.scratch import Scratch, default
from distckpt.payloads.standin import Answer, WriterCall, standing_in
from distckpt.saving.files import RankFiles
from distckpt.saving.piecewriter import PeerFailed, as_file


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


def _as_it_is(call: WriterCall) -> None:
    call.into(call.where)


@contextmanager
def holding(answer: Answer = _as_it_is) -> Iterator[Held]:
    """Inside, torch.save and safetensors' save_file do not raise on this thread, and are ``answer``'s; their first error is
    ``held.error``."""
    held = Held()
    with standing_in(partial(held.run, answer)):
        yield held


class FrameworkFiles:
    """A payload of files that ``write(directory, held)`` makes.

    ``write`` runs on every rank, with a directory of that rank's own, and may run collectives. ``load(checkpoint, ranks)``
    reads them, where the framework does not do that by itself. ``inside``: the sub-directory of ``directory`` that holds the
    checkpoint's files. ``owed``: names that this rank must have written. ``alike``: names that every rank writes with the
    same content; rank 0's are kept. Of a background save, ``memory`` has copies of the large states, written later by the
    framework's writers, and ``scratch`` the other files until they are in the checkpoint (default: memory as well).
    """

    collective = True
    members: list[str] = []

    def __init__(self, write: Callable[[str, Held], None], load: Callable[[Checkpoint, Ranks], None] | None = None, *,
                 inside: str = "", owed: Collection[str] = (), alike: Callable[[str], bool] | None = None,
                 scratch: str | None = None, memory: Memory | None = None) -> None:
        self._write, self._load, self._inside, self._owed, self._alike = write, load, inside, owed, alike
        self._where, self._memory = scratch, memory or Memory()
        self._staged: _Waiting | None = None

    def check(self) -> None:
        """Nothing: the framework's writer says what is wrong."""

    def write(self, files: RankFiles, ranks: Ranks) -> None:
        passed: set[str] = set()

        def place(call: WriterCall, name: str) -> None:
            if name in passed:
                passed.remove(name)
                files.drop(name)
            if call.takes_files:
                passed.add(name)
                _through(call, files, name)
            else:
                call.into(call.where)
                files.begin(os.fspath(call.where))

        with files.paced():
            source = self._run(files.private(), ranks.rank, place)
        names = self._names(source, passed)
        for name in passed.intersection(names):  # written again, by other means
            files.drop(name)
        files.take(source, leave=self._left_out(names, ranks.rank))

    def tree(self) -> Any:
        """Nothing to copy: what has to be copied is, when the framework writes it, and ``of`` has it."""
        if self._staged is not None:
            self._staged.close()
        rank = dist.get_rank() if dist.is_initialized() else 0
        memory, scratch = self._memory, Scratch(self._where or default())
        staged = self._staged = _Waiting(scratch)
        memory.begin()

        def place(call: WriterCall, name: str) -> None:
            copied = memory.copy(call.value)
            if copied is None:
                call.into(call.where)
            else:
                call.value = copied
                staged.calls[name] = call

        try:
            source = self._run(scratch.path, rank, place)
            names = self._names(source, staged.calls)
            for name in staged.calls.keys() & set(names):  # written again, by other means
                del staged.calls[name]
            left_out = self._left_out(names, rank)
            scratch.seal(source, [n for n in names if n not in left_out])
        except Exception as error:
            full = scratch.full()
            staged.close()
            if full:
                raise OSError(28, f"no room for the files of a background save: give scratch= another directory, or save with "
                                  f"background=False ({type(error).__name__}: {error})", scratch.where) from error
            raise
        memory.end()
        return {}

    def of(self, tree: Any) -> Payload:
        assert self._staged is not None
        return self._staged

    def load(self, checkpoint: Checkpoint, ranks: Ranks) -> None:
        if self._load is None:
            raise ConfigError("this state is loaded by its framework, not by restore")
        try:
            self._load(checkpoint, ranks)
        except CheckpointException as error:
            raise own_failure(error, ranks.rank) from error

    def _run(self, folder: str, rank: int, place: Callable[[WriterCall, str], None]) -> str:
        """Where the files stand that the framework has written into ``folder``; ``place(call, name)`` is asked instead of
        its writers."""
        source = os.path.join(folder, self._inside) if self._inside else folder

        def answer(call: WriterCall) -> None:
            name = _below(source, call.where)
            if name is None:
                call.into(call.where)
            elif not self._left_out([name], rank):
                with suppress(FileNotFoundError):
                    os.unlink(call.where)  # the writer replaces what stands there
                place(call, name)

        with holding(answer) as held:
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
        os.makedirs(source, exist_ok=True)
        return source

    def _names(self, source: str, elsewhere: Collection[str]) -> list[str]:
        """The files below ``source``; OSError when one is missing there and ``elsewhere``, or is not whole."""
        names = sorted(os.path.relpath(os.path.join(top, name), source) for top, _, found in os.walk(source) for name in found)
        for name in self._owed:
            if name not in names and name not in elsewhere:
                raise FileNotFoundError(2, "the framework reported success and did not write this file of this rank's",
                                        os.path.join(source, name))
        for name in names:
            if os.path.isfile(os.path.join(source, name)):
                whole.check(os.path.join(source, name))
        return names

    def _left_out(self, names: Collection[str], rank: int) -> set[str]:
        return {name for name in names if rank != 0 and self._alike is not None and self._alike(name)}


def _below(source: str, where: Any) -> str | None:
    """The name under ``source`` of the file that a writer was told to write; None for a file object or another place."""
    if not isinstance(where, (str, os.PathLike)):
        return None
    name = os.path.relpath(os.path.abspath(where), source)
    return None if name.partition(os.sep)[0] == os.pardir else name


def _through(call: WriterCall, files: RankFiles, name: str) -> None:
    """The framework's writer into our file, so that digest, write-back and writing overlap and nothing is read again."""
    with files.writer(name, exact=True) as out, torchfile.without_crc(out.digest is not None):
        call.into(as_file(out))
    whole.check(out.path)


class _Waiting:
    """What the framework wrote, on its way from memory to the checkpoint: ``calls`` of its writers that are still to be made,
    by file name, and the other files in ``scratch``."""

    collective = False
    members: list[str] = []

    def __init__(self, scratch: Scratch) -> None:
        self.scratch = scratch
        self.calls: dict[str, WriterCall] = {}
        self._busy = threading.Lock()
        self._closed = False

    def check(self) -> None:
        """What is there was checked when it was written."""

    def close(self) -> None:
        """Give the memory back; when it is being written, by another manager, only then."""
        with self._busy:
            self._drop()

    def _drop(self) -> None:
        self._closed, self.calls = True, {}
        self.scratch.close()

    def write(self, files: RankFiles, ranks: Ranks) -> None:
        with self._busy:
            self._write(files)

    def _write(self, files: RankFiles) -> None:
        if self._closed:
            raise ConfigError("this state was saved again before its background save was written: two managers that save one "
                              "Accelerator need a Checkpointing, or an AcceleratorState, each")
        try:
            for name, source in self.scratch.files.items():
                with files.writer(name, exact=True) as out:
                    while piece := source.read(PIECE):
                        out.write(piece)
            for name, call in self.calls.items():
                if call.takes_files:
                    _through(call, files, name)
                else:
                    files.stop_if_aborted()
                    path = files.claim_new(name)
                    with files.paced():
                        call.into(path)
                    whole.check(path)
                    files.begin(path)
        finally:
            self._drop()

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
