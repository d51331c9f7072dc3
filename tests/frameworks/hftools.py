"""What the tests of Accelerate and Transformers share: writers that go wrong, and a process that cannot import distckpt."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem

from distckpt.saving.piecewriter import PieceWriter

Save = Callable[..., None]
Act = Callable[[Save, Any, Any], None]
Faults = dict[int, tuple[int, Callable[[], AbstractContextManager[Any]], str]]
"""By step: who, what goes wrong there, what every rank is told."""


def name_of(where: Any) -> str:
    """Of what a writer was given: a path, or our file."""
    return os.path.basename(str(getattr(where, "path", where)))


@contextmanager
def instead(owner: Any, name: str, act: Callable[..., Any]) -> Iterator[None]:
    """``owner.name(...)`` does ``act(real, ...)``."""
    real = getattr(owner, name)

    @wraps(real)
    def other(*args: Any, **options: Any) -> Any:
        return act(real, *args, **options)

    setattr(owner, name, other)
    try:
        yield
    finally:
        setattr(owner, name, real)


def saving(part: str, act: Act) -> AbstractContextManager[None]:
    """``torch.save`` of a file with ``part`` in its name does ``act(real, value, where)``."""
    def save(real: Save, value: Any, f: Any, *args: Any, **options: Any) -> None:
        if part in name_of(f):
            act(real, value, f)
        else:
            real(value, f, *args, **options)

    return instead(torch, "save", save)


@contextmanager
def counted(*save_files: tuple[Any, str]) -> Iterator[list[tuple[str, bool, str]]]:
    """The calls of the real writers, (file's name, whether it was a file of ours, its directory): torch.save, and safetensors'
    save_file where ``save_files``, (module, name), hold it."""
    calls: list[tuple[str, bool, str]] = []

    def counting(real: Save) -> Save:
        def save(value: Any, where: Any, *args: Any, **options: Any) -> None:
            calls.append((name_of(where), isinstance(where, PieceWriter), os.path.dirname(getattr(where, "path", where))))
            real(value, where, *args, **options)

        return save

    places = [(torch, "save"), *save_files]
    reals = [getattr(module, name) for module, name in places]
    for (module, name), real in zip(places, reals, strict=True):
        setattr(module, name, counting(real))
    try:
        yield calls
    finally:
        for (module, name), real in zip(places, reals, strict=True):
            setattr(module, name, real)


def full(real: Save, value: Any, where: Any) -> None:
    with open(where, "wb") if isinstance(where, (str, os.PathLike)) else nullcontext(where) as out:
        out.write(b"PK")
    raise OSError(errno.ENOSPC, "No space left on device", name_of(where))


def broken(real: Save, *ignored: Any, **options: Any) -> None:
    raise RuntimeError("a bug in the framework")


def short(real: Save, value: Any, where: Any) -> None:
    """Success, though the last bytes never came."""
    whole = io.BytesIO()
    real(value, whole)
    with open(where, "wb") if isinstance(where, (str, os.PathLike)) else nullcontext(where) as out:
        out.write(whole.getbuffer()[:-20])


def lost(real: Save, value: Any, where: Any) -> None:
    """Success, and no file, or nothing in it."""


# -- DCP's writer, where a strategy shards ---------------------------------------------------------------------------------


def full_shard() -> AbstractContextManager[None]:
    """The disk takes nothing of this rank's shards."""
    @contextmanager
    def onto_a_full_disk(real: Any, self: Any, path: Any, mode: str) -> Iterator[Any]:
        with open("/dev/full" if str(path).endswith(".distcp") else path, mode, buffering=0) as stream:
            yield stream

    return instead(FileSystem, "create_stream", onto_a_full_disk)


def broken_shard() -> AbstractContextManager[None]:
    return instead(FileSystemWriter, "write_data", broken)


def short_shard(part: float | int) -> AbstractContextManager[None]:
    """Success, though the last bytes (or this part of the file) never came."""
    def cut(real: Any, self: Any, *args: Any) -> Any:
        answer = real(self, *args)
        path = Path(self.path, f"__{dist.get_rank()}_0.distcp")
        size = path.stat().st_size
        os.truncate(path, size - (part if isinstance(part, int) else int(size * part)))
        return answer

    return instead(FileSystemWriter, "write_data", cut)


def short_metadata() -> AbstractContextManager[None]:
    """Rank 0's list of what is where, without its end."""
    def cut(real: Any, self: Any, *args: Any, **options: Any) -> None:
        real(self, *args, **options)
        path = Path(self.path, ".metadata")
        os.truncate(path, path.stat().st_size - 3)

    return instead(FileSystemWriter, "finish", cut)


def hashes(folder: str | Path) -> dict[str, str]:
    """Of every file below ``folder``."""
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(Path(folder).rglob("*"))
            if p.is_file() and p.name != "commit.json"}


def without_us() -> None:
    """From here on this process cannot import distckpt, and has forgotten it."""
    for name in [n for n in sys.modules if n.partition(".")[0] == "distckpt"]:
        del sys.modules[name]
    sys.modules["distckpt"] = None  # type: ignore[assignment]
