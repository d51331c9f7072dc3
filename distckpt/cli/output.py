"""Everything the command prints, and how numbers look to people.

A command says each thing twice: in lines and tables for people, and once as a document for scripts (``--json``);
this module prints the one that was asked for. Errors, warnings and notes go to stderr, one line each, so that stdout
holds the answer and nothing else.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from distckpt.marker import Head

Row = Sequence[str]

_RIGHT = ">"


class Output:
    """One run of the command: either for people or, with ``as_json``, for scripts."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json

    def line(self, text: str = "") -> None:
        """One line for people."""
        if not self.as_json:
            _print(sys.stdout, text)

    def table(self, columns: Sequence[str], rows: Sequence[Row], bold: int | None = None, indent: str = "") -> None:
        """Aligned columns for people; a heading that begins with ``>`` is aligned to the right. ``bold``: a row's index."""
        right = [name.startswith(_RIGHT) for name in columns]
        self._aligned([[name.lstrip(_RIGHT) for name in columns], *rows], right, None if bold is None else bold + 1, indent)

    def pairs(self, rows: Sequence[Row], indent: str = "  ") -> None:
        """Aligned columns without a heading."""
        self._aligned(rows, [False] * max((len(row) for row in rows), default=0), None, indent)

    def _aligned(self, rows: Sequence[Row], right: Sequence[bool], bold: int | None, indent: str) -> None:
        if self.as_json:
            return
        body = [[clean(cell) for cell in row] for row in rows]
        widths = [max(len(row[i]) for row in body) for i in range(len(right))]
        for index, row in enumerate(body):
            cells = [cell.rjust(width) if flush else cell.ljust(width)
                     for cell, width, flush in zip(row, widths, right, strict=True)]
            text = indent + "  ".join(cells).rstrip()
            _print(sys.stdout, text, bold=index == bold)

    def document(self, value: Any) -> None:
        """The whole answer for scripts: one JSON value; numbers that are not finite become text, as in the marker."""
        if self.as_json:
            _print(sys.stdout, json.dumps(_finite(value), indent=2, allow_nan=False), control=True)

    def path(self, path: str) -> None:
        """A path for a script to use as it is: its exact bytes, whatever the locale."""
        if not self.as_json:
            sys.stdout.flush()
            sys.stdout.buffer.write(os.fsencode(path) + b"\n")
            sys.stdout.buffer.flush()

    def note(self, text: str) -> None:
        """One line on stderr, in both modes."""
        _print(sys.stderr, f"distckpt: {text}")

    def progress(self, text: str) -> None:
        """A line on a terminal's stderr that the next one replaces; nothing where nobody watches."""
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{clean(text)}")
            sys.stderr.flush()


def complain(text: str) -> None:
    """An error as one clear line on stderr."""
    _print(sys.stderr, f"distckpt: {text}")


class Logged(logging.Handler):
    """What the library logs (a removal that failed, what recovery published), in the command's own form."""

    def emit(self, record: logging.LogRecord) -> None:
        word = "warning: " if record.levelno >= logging.WARNING else ""
        _print(sys.stderr, f"distckpt: {word}{record.getMessage()}")


def hush() -> None:
    """The reader of our output went away: send the rest, the interpreter's last flush included, nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def clean(text: str) -> str:
    """``text`` in one line that cannot steer a terminal: control characters are shown, not sent."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _print(stream: TextIO, text: str, bold: bool = False, control: bool = False) -> None:
    shown = text if control else clean(text)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    shown = shown.encode(encoding, "backslashreplace").decode(encoding)
    if bold and stream.isatty() and "NO_COLOR" not in os.environ:
        shown = f"\x1b[1m{shown}\x1b[0m"
    print(shown, file=stream)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


# -- how things look ---------------------------------------------------------------------------------------------------

def age(now: float, then: float) -> str:
    """How long ago: ``3 h ago``. A clock ahead of ours is said to be ahead, an unknown time is ``-``."""
    if then <= 0:
        return "-"
    seconds = abs(now - then)
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if seconds >= 2 * length or length == 1:
            amount = f"{int(seconds // length)} {unit}"
            break
    return f"{amount} ago" if now >= then or seconds < 1 else f"{amount} ahead"


def shares(heads: Iterable[Head | None]) -> str | None:
    """What to say where a root holds one node's shares of checkpoints."""
    some = next((head for head in heads if head is not None and head.of > 1), None)
    if some is None:
        return None
    return (f"this is one of {some.of} nodes' own disks (share {some.part + 1}): a checkpoint can be used only if the other "
            f"{some.of - 1} have their shares as well, which this command does not see")


def metrics(values: Mapping[str, float], limit: int = 3) -> str:
    """``loss=0.512 acc=0.9``, the first few."""
    shown = [f"{name}={value:.6g}" for name, value in list(values.items())[:limit]]
    return " ".join(shown) + (" ..." if len(values) > limit else "") or "-"


def plural(count: int, word: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{count} {word}" if count == 1 else f"{count} {word[:-1]}ies" if word.endswith("y") else f"{count} {word}s"
