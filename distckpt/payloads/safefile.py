"""A file of safetensors' format, described for ``inplace.read``, and loaded by safetensors itself."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from distckpt.durable import Opened
from distckpt.payloads import inplace

_LONGEST = 100_000_000
_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
          "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
          "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


def whole(file: Opened, path: str) -> dict[str, torch.Tensor]:
    """What the open file at ``path`` holds."""
    from safetensors.torch import load_file  # an extra

    return load_file(f"/dev/fd/{file.fileno()}" if os.path.isdir("/dev/fd") else path)


def describe(file: Opened) -> Any:
    """What an open file holds; None when it has anything unusual: safetensors says what is wrong with it, or knows it."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    start = 8 + int.from_bytes(file.read(8), "little")
    if sys.byteorder != "little" or start > min(size, _LONGEST):
        return None
    found = {}
    try:
        for name, entry in json.loads(file.read(start - 8)).items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            tensor = torch.empty(entry["shape"], dtype=_TYPES[entry["dtype"]], device="meta")
            if end - begin != tensor.nbytes or not 0 <= begin <= end <= size - start:
                return None
            found[name] = inplace.beginning(tensor, start + begin)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError):  # among them RecursionError, and torch's for a shape
        return None
    return found
