"""Whether a file that a framework wrote ends where its own format says that it ends.

A writer that reports success although the disk took half of the file leaves nothing that size or digest could show, since
both are taken from what is there. The formats that frameworks write say themselves how long they are.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import struct
import zipfile
from typing import Any

_ZIP = b"PK\x03\x04"
_ZIP_LAST, _ZIP_END = b"PK\x05\x06", 22
_HEADER_LIMIT = 100_000_000


def check(path: str) -> None:
    """OSError (EIO) when the file at ``path`` is shorter than its format says: torch's and numpy's zip files, DCP's shards (one
    such file per tensor, one after the other) and its ``.metadata``, safetensors, JSON. Files of other kinds pass, empty ones
    do not. Of what holds tensors, heads and directories are read only. Local."""
    problem = _problem(path)
    if problem is not None:
        raise OSError(errno.EIO, f"the framework's writer reported success and {problem}", path)


def _problem(path: str) -> str | None:
    size = os.stat(path).st_size
    if size == 0:
        return None if os.path.basename(path) == "__init__.py" else "wrote nothing into this file"
    with open(path, "rb") as file:
        head = file.read(8)
    if head.startswith(_ZIP) or _ZIP.startswith(head):
        return _zip_problem(path)
    if path.endswith(".safetensors"):
        return _safetensors_problem(path, head, size)
    if path.endswith(".json"):
        return _json_problem(path)
    if os.path.basename(path) == ".metadata":
        return _pickle_problem(path)
    return None


def _zip_problem(path: str) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            last = _ZIP_END + len(archive.comment)
    except zipfile.BadZipFile as error:
        return f"the archive is cut off ({error})"
    with open(path, "rb") as file:
        file.seek(-last, os.SEEK_END)
        if file.read(len(_ZIP_LAST)) != _ZIP_LAST:  # zipfile is content with the end of an archive before the one that is cut off
            return "the archive is cut off (there is more behind its end)"
    return None


class _Anything:
    """In the place of whatever a pickle names, so that it can be read to its end and nothing of it runs."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...
    def __call__(self, *args: object, **kwargs: object) -> _Anything:
        return self

    def __setstate__(self, state: object) -> None: ...
    def __setitem__(self, key: object, value: object) -> None: ...
    def append(self, value: object) -> None: ...
    def add(self, value: object) -> None: ...
    def extend(self, values: object) -> None: ...


class _ToItsEnd(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Anything


def _pickle_problem(path: str) -> str | None:
    with open(path, "rb") as file:
        try:
            _ToItsEnd(file).load()
        except (EOFError, pickle.UnpicklingError) as error:
            return f"the pickle is cut off ({error})"
    return None


def _safetensors_problem(path: str, head: bytes, size: int) -> str | None:
    if len(head) < 8:
        return "its header is cut off"
    length = struct.unpack("<Q", head)[0]
    if length > _HEADER_LIMIT or 8 + length > size:
        return "its header is cut off"
    with open(path, "rb") as file:
        file.seek(8)
        tensors = json.loads(file.read(length))
    end = max((entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"), default=0)
    return None if 8 + length + end == size else f"{size} bytes of {8 + length + end} are there"


def _json_problem(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            json.load(file)
    except ValueError as error:
        return f"the JSON is cut off ({error})"
    return None
