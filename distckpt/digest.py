"""Digests of files. XXH3-128 keeps up with memory and finds damage; SHA-256 also finds who exchanges files on purpose."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from distckpt.durable import PIECE, Files, Opened
from distckpt.errors import ConfigError

XXH3 = "xxh3-128"
SHA256 = "sha256"


class Hasher(Protocol):
    def update(self, data: bytes | bytearray | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


class Running:
    """A digest that grows with the bytes it is shown; ``text`` is what stands in a manifest."""

    def __init__(self, algorithm: str = XXH3) -> None:
        self._algorithm = algorithm
        self._hash: Hasher
        if algorithm == SHA256:
            self._hash = hashlib.sha256()
        elif algorithm == XXH3:
            import xxhash  # a compiled wheel; `distckpt ls` never needs it

            self._hash = xxhash.xxh3_128()
        else:
            raise ConfigError(f"digest {algorithm!r} is not known; use {XXH3!r}, {SHA256!r} or None")

    def update(self, data: bytes | bytearray | memoryview) -> None:
        self._hash.update(data)

    @property
    def text(self) -> str:
        return f"{self._algorithm}:{self._hash.hexdigest()}"


def check_algorithm(algorithm: str | None) -> str | None:
    if algorithm not in (None, XXH3, SHA256):
        raise ConfigError(f"digest must be {XXH3!r}, {SHA256!r} or None, not {algorithm!r}")
    return algorithm


def algorithm_of(text: str) -> str:
    """Which digest ``text`` of a manifest is; one that this version does not know is a ConfigError in ``Running``."""
    return text.partition(":")[0]


def of_file(files: Files, path: str, between: Callable[[int], None] | None = None, algorithm: str = XXH3) -> tuple[int, str]:
    """(size, digest) of a file as it reads now. ``between`` is called with the bytes so far after each piece."""
    return _of(files.pieces(path), between, algorithm)


def of_open(file: Opened, between: Callable[[int], None] | None = None, algorithm: str = XXH3,
            size: int = PIECE) -> tuple[int, str]:
    """(size, digest) of an open file from its start to its end; ``size``: about how much that is."""
    file.seek(0)
    return _of(_pieces(file, size), between, algorithm)


def _pieces(file: Opened, size: int) -> Iterator[memoryview]:
    view = memoryview(bytearray(max(min(PIECE, size), 4096)))
    while count := file.readinto(view):
        yield view[:count]


def _of(pieces: Iterable[memoryview], between: Callable[[int], None] | None, algorithm: str) -> tuple[int, str]:
    running, size = Running(algorithm), 0
    for piece in pieces:
        running.update(piece)
        size += len(piece)
        if between is not None:
            between(size)
    return size, running.text
