"""Digests of files. XXH3-128 keeps up with memory and finds damage; SHA-256 also finds who exchanges files on purpose."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from distckpt.durable import Files, Opened
from distckpt.errors import ConfigError

XXH3 = "xxh3-128"
SHA256 = "sha256"
_READ = 512 << 10
"""Bytes read at a time to be digested: they are still in the core's own cache when the digest comes by."""
_STATES = 1 << 14


class Hasher(Protocol):
    def update(self, data: bytes | bytearray | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...
    def copy(self) -> Hasher: ...


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

    def copy(self) -> Running:
        """Another one that has been shown the same bytes."""
        twin = copy.copy(self)
        twin._hash = self._hash.copy()
        return twin

    @property
    def text(self) -> str:
        return f"{self._algorithm}:{self._hash.hexdigest()}"


class Trail:
    """The states that the digest of one file of ``size`` bytes went through, before each ``piece``. 0.7 KB each, 12 MB in all."""

    def __init__(self, size: int) -> None:
        self.piece = _READ
        while size > self.piece * _STATES:
            self.piece *= 2
        self._states: list[Running] = []

    def add(self, running: Running) -> None:
        self._states.append(running.copy())

    def passes(self, index: int, piece: memoryview) -> bool:
        """Whether these are the bytes that the digest was shown as this piece."""
        running = self._states[index].copy()
        running.update(piece)
        return running.text == self._states[index + 1].text


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
            size: int = _READ, trail: Trail | None = None) -> tuple[int, str]:
    """(size, digest) of an open file from its start to its end; ``size``: about how much that is. ``trail`` is filled."""
    file.seek(0)
    return _of(_pieces(file, min(_READ, size) if trail is None else min(trail.piece, size)), between, algorithm, trail)


def _pieces(file: Opened, size: int) -> Iterator[memoryview]:
    view = memoryview(bytearray(max(size, 4096)))
    while count := file.readinto(view):  # fewer than asked for only at the end
        yield view[:count]


def _of(pieces: Iterable[memoryview], between: Callable[[int], None] | None, algorithm: str,
        trail: Trail | None = None) -> tuple[int, str]:
    running, size = Running(algorithm), 0
    if trail is not None:
        trail.add(running)
    for piece in pieces:
        running.update(piece)
        size += len(piece)
        if trail is not None:
            trail.add(running)
        if between is not None:
            between(size)
    return size, running.text
