"""What the tests of Accelerate and Transformers share: writers that go wrong, and a process that cannot import distckpt."""

from __future__ import annotations

import errno
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

Save = Callable[..., None]
Act = Callable[[Save, Any, str], None]


@contextmanager
def saving(part: str, act: Act) -> Iterator[None]:
    """``torch.save`` of a file with ``part`` in its name does ``act(real, value, path)``."""
    real = torch.save

    def save(value: Any, f: Any, *args: Any, **options: Any) -> None:
        if part in os.path.basename(str(f)):
            act(real, value, str(f))
        else:
            real(value, f, *args, **options)

    torch.save = save
    try:
        yield
    finally:
        torch.save = real


def full(real: Save, value: Any, path: str) -> None:
    Path(path).write_bytes(b"PK")
    raise OSError(errno.ENOSPC, "No space left on device", path)


def broken(real: Save, value: Any, path: str) -> None:
    raise RuntimeError("a bug in the framework")


def short(real: Save, value: Any, path: str) -> None:
    """Success, though the last bytes never came."""
    real(value, path)
    os.truncate(path, os.path.getsize(path) - 20)


def lost(real: Save, value: Any, path: str) -> None:
    """Success, and no file."""


def hashes(folder: str | Path) -> dict[str, str]:
    """Of every file below ``folder``."""
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(Path(folder).rglob("*"))
            if p.is_file() and p.name != "commit.json"}


def without_us() -> None:
    """From here on this process cannot import distckpt, and has forgotten it."""
    for name in [n for n in sys.modules if n.partition(".")[0] == "distckpt"]:
        del sys.modules[name]
    sys.modules["distckpt"] = None  # type: ignore[assignment]
