"""Whether a file that a framework wrote ends where its own format says that it ends.

A writer that reports success although the disk took half of the file leaves nothing that size or digest could show, since
both are taken from what is there. The formats that frameworks write say themselves how long they are.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import zipfile

_ZIP = b"PK\x03\x04"
_HEADER_LIMIT = 100_000_000


def check(path: str) -> None:
    """OSError (EIO) when the file at ``path`` is shorter than its format says: torch's and numpy's zip files, safetensors,
    JSON. Files of other kinds pass, empty ones do not. Reads heads and directories only. Local."""
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
    return None


def _zip_problem(path: str) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            archive.infolist()
    except zipfile.BadZipFile as error:
        return f"the archive is cut off ({error})"
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
