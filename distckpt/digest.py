"""Digests of files: XXH3-128, which keeps up with memory. Integrity, not authenticity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from distckpt.durable import Files
from distckpt.errors import ConfigError

XXH3 = "xxh3-128"


class Hasher(Protocol):
    def update(self, data: bytes | bytearray | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


class Running:
    """A digest that grows with the bytes it is shown; ``text`` is what stands in a manifest."""

    def __init__(self, algorithm: str = XXH3) -> None:
        import xxhash  # a compiled wheel; `distckpt ls` never needs it

        if algorithm != XXH3:
            raise ConfigError(f"digest {algorithm!r} is not known; use {XXH3!r} or None")
        self._hash: Hasher = xxhash.xxh3_128()

    def update(self, data: bytes | bytearray | memoryview) -> None:
        self._hash.update(data)

    @property
    def text(self) -> str:
        return f"{XXH3}:{self._hash.hexdigest()}"


def check_algorithm(algorithm: str | None) -> str | None:
    if algorithm not in (None, XXH3):
        raise ConfigError(f"digest must be {XXH3!r} or None, not {algorithm!r}")
    return algorithm


def of_file(files: Files, path: str, between: Callable[[int], None] | None = None) -> tuple[int, str]:
    """(size, digest) of a file as it reads now. ``between`` is called with the bytes so far after each piece."""
    running = Running()
    size = 0
    for piece in files.pieces(path):
        running.update(piece)
        size += len(piece)
        if between is not None:
            between(size)
    return size, running.text
