"""SLURM's compressed lists of nodes: ``n[003-010,12]-ib,m1``. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from distckpt.errors import ConfigError

_PART = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_BRACKET = re.compile(r"([^\[]*)\[([^\]]*)\](.*)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def expand(text: str, variable: str = "SLURM_JOB_NODELIST") -> Iterator[str]:
    """The names, in the order of the list, as ``scontrol show hostnames`` gives them. ConfigError for what is no such list."""
    found = _PART.findall(text.strip())
    if not found or ",".join(found) != text.strip():
        raise _no_list(text, variable)
    for part in found:
        yield from _expand_one(part, text, variable)


def first(text: str, variable: str = "SLURM_JOB_NODELIST") -> str:
    """The first name: where the first task runs."""
    return next(expand(text, variable))


def _expand_one(part: str, text: str, variable: str) -> Iterator[str]:
    match = _BRACKET.fullmatch(part)
    if match is None:
        yield part
        return
    before, ranges, after = match.groups()
    for item in ranges.split(","):
        span = _RANGE.fullmatch(item)
        if span is None or int(span[2] or span[1]) < int(span[1]):
            raise _no_list(text, variable)
        for number in range(int(span[1]), int(span[2] or span[1]) + 1):
            for rest in _expand_one(after, text, variable):
                yield f"{before}{number:0{len(span[1])}d}{rest}"


def _no_list(text: str, variable: str) -> ConfigError:
    return ConfigError(f"{variable}={text!r} is no list of nodes as SLURM writes it; set MASTER_ADDR to the first node")
