"""The writer process (``writer="process"``): the writing of background saves, off the interpreter lock of the training process.

The state is staged into memory that both processes map; the job says where each tensor stands in it. The child runs no
collective and knows no other rank: this process still reports for it. Payloads that run collectives (DCP) are written by the
finaliser's thread as always, since the process group belongs to this process.

The child is a fresh interpreter, started by ``exec``: it neither forks a process that has threads and a GPU, nor runs the
program's main module a second time. What passes between the two is pickled; it never leaves this machine or this user.
"""

from __future__ import annotations

import io
import logging
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from distckpt.checkpoint import Checkpoint
from distckpt.durable import REAL
from distckpt.patience import Patience
from distckpt.payloads.base import Parts, Payload, Ranks, Several
from distckpt.payloads.members import Members
from distckpt.payloads.shards import Shards
from distckpt.runtime import SYSTEM
from distckpt.saving.arena import Arena
from distckpt.saving.files import RankFiles
from distckpt.saving.links import Twins
from distckpt.saving.piecewriter import PeerFailed

log = logging.getLogger(__name__)

_LOOK = 0.2
_SAY = 0.5
_GRACE = 10.0
_ORPHANED = 5.0

_CHILD = """\
import signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)  # sent to the whole process group; the end of the channel ends this process
sys.path[:0] = {path!r}
from distckpt.saving.writer import serve
serve({channel})
"""


class WriterDied(Exception):
    """The writer process ended while it wrote. Comes up as the cause of the rank's SaveError."""


class WriterProcess:
    """One child at a time; a dead one is replaced by the next save."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._child: subprocess.Popen[bytes] | None = None
        self._channel: Connection | None = None
        self._known = 0
        self._complained = False

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    def start(self) -> None:
        """Start a child unless one lives. Returns at once: it takes a second or two to come up."""
        if self._child is not None and self._child.poll() is None:
            return
        self.close(0.0)
        ours, theirs = socket.socketpair()
        with theirs:
            code = _CHILD.format(path=[os.path.abspath(p) for p in sys.path], channel=theirs.fileno())
            env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            self._child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                                           env=env)
        self._channel, self._known = Connection(ours.detach()), 0

    def close(self, timeout: float) -> None:
        """End the child; one that does not go in ``timeout`` seconds is killed."""
        if self._channel is not None:
            self._channel.close()
        if self._child is not None:
            try:
                self._child.wait(timeout)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
        self._child = self._channel = None

    def around(self, part: Payload) -> Payload:
        """``part``, to be written by the child if it can be; itself otherwise."""
        return ByProcess(self, part) if not part.collective and _known_kind(part) else part

    def pack(self, part: Payload) -> bytes | None:
        """``part`` with its tensors named by where they stand; None when it holds what another process cannot use."""
        into = io.BytesIO()
        try:
            _Packer(into, self._arena).dump(part)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            if not self._complained:
                self._complained = True
                log.warning("this state cannot be handed to the writer process and is written by a thread: %s", error)
            return None
        return into.getvalue()

    def write(self, packed: bytes, files: RankFiles, ranks: Ranks) -> None:
        """Have the child write it into ``files``; returns when it has left, whatever became of it (S21)."""
        self.start()
        try:
            self._order(packed, files, ranks)
            self._follow(files)
        except (EOFError, ConnectionError) as error:
            raise self._death() from error

    def _order(self, packed: bytes, files: RankFiles, ranks: Ranks) -> None:
        channel, child, arena = self._channel, self._child, self._arena
        assert channel is not None and child is not None
        if self._known != arena.version:
            channel.send(("block", arena.size))
            if arena.size:
                send_handle(channel, arena.handle, child.pid)
            self._known = arena.version
        channel.send(("write", packed, files.directory, ranks.rank, ranks.world, files.algorithm, files.first, files.patience,
                      files.twins, files.kept))

    def _follow(self, files: RankFiles) -> None:
        channel, child = self._channel, self._child
        assert channel is not None and child is not None
        stopping: PeerFailed | None = None
        until = 0.0
        sentinel = os.pidfd_open(child.pid)
        try:
            while True:
                ready = wait_for([channel, sentinel], _LOOK)
                if channel in ready:
                    kind, *told = channel.recv()
                    if kind == "bytes":
                        files.elsewhere = told[0]
                    else:
                        break
                elif sentinel in ready:
                    raise EOFError("the writer process has ended")
                if stopping is None:
                    try:
                        files.stop_if_aborted()
                    except PeerFailed as error:
                        stopping, until = error, time.monotonic() + _GRACE
                        channel.send(("stop",))
                elif time.monotonic() > until:
                    child.kill()  # it is stuck, and this rank must not say that its writers have left while it may go on
        finally:
            os.close(sentinel)
            files.elsewhere = 0
        if kind == "failed":
            raise told[0]
        if kind == "stopped" or stopping is not None:
            raise stopping or PeerFailed()
        written, notes = told
        for entry in written:
            files.adopt(*entry)
        for key, value in notes.items():
            files.note(key, value)

    def _death(self) -> WriterDied:
        child = self._child
        assert child is not None
        try:
            code: int | None = child.wait(_GRACE)
        except subprocess.TimeoutExpired:
            code = None
        pid = child.pid
        self.close(0.0)
        if code is None:
            how = "does not answer any more, and was killed"
        elif code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            how = f"was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        else:
            how = f"ended with exit code {code}"
        return WriterDied(f"the writer process (pid {pid}) {how} while it wrote; the next save starts another")


class ByProcess:
    """A staged payload that the writer process writes."""

    collective = False

    def __init__(self, writer: WriterProcess, part: Payload) -> None:
        self._writer, self._part = writer, part

    @property
    def members(self) -> list[str]:
        return self._part.members

    def check(self) -> None:
        self._part.check()

    def write(self, files: RankFiles, ranks: Ranks) -> None:
        packed = self._writer.pack(self._part)
        if packed is None:
            self._part.write(files, ranks)
        else:
            self._writer.write(packed, files, ranks)

    def load(self, checkpoint: Checkpoint, ranks: Ranks) -> None:
        self._part.load(checkpoint, ranks)


def _known_kind(part: Any) -> bool:
    """Whether another process can be told what ``part`` is: a program's own classes live in its main module."""
    if type(part) in (Parts, Several):
        return all(_known_kind(inner) for inner in part.inner)
    return type(part) in (Shards, Members)


class _Packer(pickle.Pickler):
    def __init__(self, into: io.BytesIO, arena: Arena) -> None:
        super().__init__(into, protocol=pickle.HIGHEST_PROTOCOL)
        self._arena = arena

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, DTensor) or type(value).__name__ == "ShardedTensor":
            raise pickle.PicklingError(f"it holds a {type(value).__name__}, which needs this process's groups")
        if type(value) is torch.Tensor:
            offset = self._arena.offset(value)
            if offset is not None:
                return offset, value.dtype, tuple(value.shape)
        return None


# -- the child ---------------------------------------------------------------------------------------------------------

class _Unpacker(pickle.Unpickler):
    def __init__(self, data: bytes, block: mmap.mmap) -> None:
        super().__init__(io.BytesIO(data))
        self._block = block
        self._twins: dict[Any, torch.Tensor] = {}

    def persistent_load(self, where: Any) -> torch.Tensor:
        if where not in self._twins:  # tied weights stay tied
            offset, dtype, shape = where
            count = torch.Size(shape).numel() * dtype.itemsize
            flat = torch.frombuffer(self._block, dtype=torch.uint8, offset=offset, count=count)
            self._twins[where] = flat.view(dtype).view(shape)
        return self._twins[where]


def serve(descriptor: int) -> None:
    """Write what comes in over the channel until its other end is gone."""
    torch.set_num_threads(1)
    channel = Connection(descriptor)
    block: Any = None
    parent = os.getppid()
    with suppress(EOFError, ConnectionError, KeyboardInterrupt):
        while True:
            while not channel.poll(_ORPHANED):
                if os.getppid() != parent:  # a worker that the dead parent forked may hold the channel open
                    return
            kind, *told = channel.recv()
            if kind == "block":
                block = None
                if told[0]:
                    handle = recv_handle(channel)
                    block = mmap.mmap(handle, told[0])
                    os.close(handle)
            elif kind == "write":
                channel.send(_serve_one(channel, block, *told))


def _serve_one(channel: Connection, block: Any, packed: bytes, directory: str, rank: int, world: int,
               algorithm: str | None, first: int, patience: float, twins: Twins | None, kept: bool) -> tuple[Any, ...]:
    said = [time.monotonic()]

    def between() -> bool:
        """Called after each piece: say how far it is, and whether anything came in, which can only be the word to stop."""
        if time.monotonic() - said[0] >= _SAY:
            said[0] = time.monotonic()
            channel.send(("bytes", files.bytes_written))
        return channel.poll(0)

    files = RankFiles(REAL, directory, rank, world, algorithm=algorithm, aborted=between, first=first,
                      patience=Patience(SYSTEM, patience), twins=twins, kept=kept)
    try:
        _Unpacker(packed, block).load().write(files, Ranks(rank, world, lambda: None))
        files.unsynced.sync()
    except PeerFailed:
        return ("stopped",)
    except Exception as error:  # raised again over there, as this rank's failure
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return "failed", RuntimeError(f"{type(error).__name__}: {error}")
        return "failed", error
    finally:
        files.unsynced.release()
    return "done", files.written(), files.notes
