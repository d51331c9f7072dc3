"""torch.save straight from tensor memory into a digesting writer, and back."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import get_crc32_options, set_crc32_options

from distckpt.checkpoint import Checkpoint
from distckpt.durable import Opened
from distckpt.errors import DistckptError
from distckpt.saving.piecewriter import PieceWriter, as_file

log = logging.getLogger(__name__)

_crc = threading.Lock()
_META = hasattr(torch.serialization, "_is_meta_location")
"""Whether this torch reads no bytes for the device "meta" and says where they are. An older one does in fake mode alone, whose
first use imports the compiler: a second of the first load in a process."""


def write(value: Any, out: PieceWriter) -> None:
    """``value`` in torch.save's format.

    The zip's own CRC-32 costs five times our digest of the same bytes, which is at least as strong and stands in the
    manifest; so it is left out where there is a digest (``torch.load`` does not read it). The switch is torch's and
    belongs to the process: another thread's torch.save at the same moment may lack its CRC as well.
    """
    with without_crc(out.digest is not None):
        torch.save(value, as_file(out))


@contextmanager
def without_crc(digested: bool) -> Iterator[None]:
    """Inside, torch.save leaves the CRC out, if there is a digest of what it writes. See ``write``. No collectives inside."""
    if not digested:
        yield
        return
    with _crc:
        before = get_crc32_options()
        set_crc32_options(False)
        try:
            yield
        finally:
            set_crc32_options(before)


def read(checkpoint: Checkpoint, name: str) -> Any:
    """What ``write`` wrote, on the CPU, after its bytes were found to be the marker's; nothing is executed by loading it."""
    with checkpoint.open(name) as file:
        return whole(file)


def whole(file: Opened) -> Any:
    """What an open file holds, on the CPU; nothing is executed by loading it."""
    file.seek(0)
    return torch.load(file, weights_only=True, map_location="cpu")


def describe(file: Opened) -> Any:
    """What an open file holds, for ``inplace.read``; None when its bytes are not those of tensors in this machine's memory, or
    torch can only load it."""
    if not _as_in_memory(file):
        return None
    file.seek(0)
    try:
        with nullcontext() if _META else FakeTensorMode():
            return torch.load(file, weights_only=True, map_location="meta" if _META else "cpu")
    except (DistckptError, OSError):
        raise
    except Exception as error:  # not all that torch saves can be so described; a load as a whole says what is wrong with it
        log.debug("it is loaded as a whole: %s", error)
        return None


def _as_in_memory(file: Opened) -> bool:
    """Whether the bytes of its tensors stand in ``file`` as they would in this machine's memory. ``torch.load`` reads a zip that
    somebody compressed, and other byte orders, as well."""
    file.seek(0)
    try:
        if torch._C.PyTorchFileReader(file).get_record("byteorder") != sys.byteorder.encode():
            return False
        file.seek(0)
        with ZipFile(file) as archive:
            return all(entry.compress_type == ZIP_STORED for entry in archive.infolist())
    except (RuntimeError, BadZipFile):  # it names no order, or is of torch.save's format before the zip
        return False
