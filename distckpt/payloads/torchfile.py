"""torch.save straight from tensor memory into a digesting writer, and back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from distckpt.checkpoint import Checkpoint
from distckpt.payloads import inplace, loadable
from distckpt.saving.piecewriter import PieceWriter, as_file

_crc = threading.Lock()


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


def read_into(checkpoint: Checkpoint, name: str, target: dict[Any, Any]) -> None:
    """What ``read`` gives, put into ``target``: tensors in place."""
    with checkpoint.open(name) as file:
        if inplace.fill(target, file, "state"):
            return
        file.seek(0)
        loadable.fill(target, torch.load(file, weights_only=True, map_location="cpu"), "state")


def read(checkpoint: Checkpoint, name: str) -> Any:
    """What ``write`` wrote, on the CPU, after its bytes were found to be the marker's; nothing is executed by loading it."""
    with checkpoint.open(name) as file:
        return torch.load(file, weights_only=True, map_location="cpu")
