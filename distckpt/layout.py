"""Every name on disk. Pure: no I/O.

A name is ours only if all of it matches (``checkpoint-200-rolling-tmp`` is nobody's); steps are compared as numbers.
"""

from __future__ import annotations

import operator
import os
import re
from dataclasses import dataclass

from distckpt.errors import ConfigError

MARKER = "commit.json"
HOME = ".distckpt"
POINTER = "latest"
MAIN = "main"
PATH_DEPTH = 32

_STEP = "{step}"
_SERIES = re.compile(r"[A-Za-z0-9_]{1,64}")
_PADDED = re.compile(r"\{step(?::0(\d+)d?)?\}")
ATTEMPT = re.compile(r"[0-9a-f]{16}")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
_TAKEN = re.compile(r"taken-[a-z]+-\d+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_DOTS = re.compile(r"(?:^|/)\.{0,2}(?:/|$)")


@dataclass(frozen=True)
class Naming:
    """A template with one ``{step}``; ``{step:08d}`` pads. Parsing takes the whole name, padded or not."""

    prefix: str
    suffix: str
    width: int = 0

    @classmethod
    def parse(cls, template: str) -> Naming:
        """The naming that ``template`` describes; ConfigError when it does not name steps apart inside one directory."""
        if not isinstance(template, str):
            raise ConfigError(f"naming must be text with one {{step}}, not {type(template).__name__}")
        found = _PADDED.findall(template)
        if len(found) != 1 or template.count("{") != 1 or template.count("}") != 1:
            raise ConfigError(f"naming {template!r} must hold {{step}} exactly once, as in 'step-{{step}}' or "
                              "'step-{step:08d}', and no other braces")
        match = _PADDED.search(template)
        assert match is not None
        naming = cls(template[:match.start()], template[match.end():], int(match.group(1) or 0))
        bare = naming.prefix + naming.suffix
        if "/" in bare or "\0" in bare or "\n" in bare or bare != bare.strip():
            raise ConfigError(f"naming {template!r} must be one plain directory name without '/', newlines or outer spaces")
        if naming.prefix.startswith("."):
            raise ConfigError(f"naming {template!r} must not begin with a dot: hidden names are this library's own")
        if naming.prefix[-1:].isdigit() or naming.suffix[:1].isdigit():
            raise ConfigError(f"naming {template!r} puts a digit beside {{step}}, so that steps cannot be told apart")
        if naming.width > 20:
            raise ConfigError(f"naming {template!r} pads to more than 20 digits")
        return naming

    @property
    def template(self) -> str:
        step = f"{{step:0{self.width}d}}" if self.width else _STEP
        return f"{self.prefix}{step}{self.suffix}"

    def format(self, step: int) -> str:
        return f"{self.prefix}{step:0{self.width}d}{self.suffix}"

    def step_of(self, name: str) -> int | None:
        """The step that ``name`` stands for, or None when it is not, whole, a name of this template."""
        if len(name) <= len(self.prefix) + len(self.suffix):
            return None
        if not name.startswith(self.prefix) or not name.endswith(self.suffix):
            return None
        digits = name[len(self.prefix):len(name) - len(self.suffix)]
        return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 20 else None

    def of_series(self, series: str) -> Naming:
        """The naming of a further series: its name is added at the end."""
        if series == MAIN:
            return self
        return Naming(self.prefix, f"{self.suffix}-{series}", self.width)

    def overlaps(self, other: Naming) -> bool:
        """Whether one name could belong to both, as ``run-3-of-7`` does to ``run-{step}-of-7`` and ``run-3-of-{step}``."""
        short, long = sorted((self, other), key=lambda n: len(n.prefix))
        if not long.prefix.startswith(short.prefix):
            return False
        rest = long.prefix[len(short.prefix):]
        if not rest:
            return short.suffix == long.suffix
        tail = rest.lstrip("0123456789")  # no digit stands beside {step}, so the short one's step ends exactly here
        return tail != rest and Naming(tail, long.suffix).step_of(short.suffix) is not None


def check_series(name: str) -> str:
    if not isinstance(name, str) or not _SERIES.fullmatch(name):
        raise ConfigError(f"series {name!r} must be 1 to 64 letters, digits or underscores")
    return name


def check_step(step: object) -> int:
    """``step`` as an int; a bool, a float or a negative number is a ConfigError."""
    try:
        if isinstance(step, bool):
            raise TypeError
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"step must be an int (optimizer steps done), not {type(step).__name__} {step!r}") from None
    if not 0 <= number < 10**18:
        raise ConfigError(f"step must be from 0 to 10**18, not {number}")
    return number


def series_of(naming: Naming, name: str) -> tuple[str, int] | None:
    """(series, step) that ``name`` stands for under this root's template, whichever series it is."""
    step = naming.step_of(name)
    if step is not None:
        return MAIN, step
    head, dash, series = name.rpartition("-")
    if not dash or not _SERIES.fullmatch(series):
        return None
    step = naming.step_of(head)
    return None if step is None else (series, step)


def number_of(text: str) -> int | None:
    """The generation that a name stands for, written as we write it; None for ``007``, ``²`` and all other names."""
    return int(text) if _NUMBER.fullmatch(text) else None


def is_taken(name: str) -> bool:
    """Whether ``name`` is a directory that a takeover moved aside and has yet to empty."""
    return _TAKEN.fullmatch(name) is not None


@dataclass(frozen=True)
class Layout:
    """Where everything of one root stands."""

    root: str

    @classmethod
    def at(cls, root: str | os.PathLike[str]) -> Layout:
        text = os.fspath(root)
        if not isinstance(text, str) or not text or "\0" in text:
            raise ConfigError(f"root must be a directory path, not {root!r}")
        if "://" in text:
            raise ConfigError(f"root {text!r} is a URL; this release writes to mounted file systems only")
        return cls(os.path.abspath(os.path.expanduser(text)))

    def final(self, name: str) -> str:
        return os.path.join(self.root, name)

    def home(self, *parts: str) -> str:
        return os.path.join(self.root, HOME, *parts)

    @property
    def pointer(self) -> str:
        return os.path.join(self.root, POINTER)

    @property
    def record(self) -> str:
        return self.home("root.json")

    def owner(self, generation: int, kind: str = "json") -> str:
        return self.home("owner", f"{generation}.{kind}")

    def staging(self, generation: int, *parts: str) -> str:
        return self.home("staging", str(generation), *parts)

    def trash(self, generation: int, *parts: str) -> str:
        return self.home("trash", str(generation), *parts)

    def leases(self, *parts: str) -> str:
        return self.home("leases", *parts)

    def rejected(self, attempt: str) -> str:
        return self.home("rejected", f"{attempt}.json")

    @property
    def rollback(self) -> str:
        return self.home("rollback.json")

    def journal(self, generation: int) -> str:
        return self.home("journal", f"{generation}.jsonl")


SUBDIRECTORIES = ("owner", "staging", "trash", "leases", "rejected", "journal", "requests")


def rank_name(name: str, rank: int, world: int) -> str:
    """``optim.pt`` as rank 3 of 16 writes it: ``optim.rank-00003-of-00016.pt`` (the suffix stays last)."""
    check_member_path(name)
    stem, suffix = os.path.splitext(name)
    return f"{stem}.rank-{rank:05d}-of-{world:05d}{suffix}"


def check_member_path(path: str) -> str:
    """``path`` if it may stand in a checkpoint: relative, no ``..``, no control characters, not the marker."""
    problem = member_path_problem(path)
    if problem:
        raise ConfigError(f"file name {path!r} cannot stand in a checkpoint: {problem}")
    return path


def check_run_id(run: str | None) -> str | None:
    """``run`` if it can stand in a marker: 1 to 255 printable characters."""
    if run is not None and (not isinstance(run, str) or run_problem(run)):
        raise ConfigError(f"run_id {run!r} must be 1 to 255 printable characters")
    return run


def run_problem(run: str) -> str | None:
    return None if 0 < len(run) <= 255 and run.isprintable() else "its run is not 1 to 255 printable characters"


def name_problem(name: str, series: str) -> str | None:
    """Why ``name`` and ``series`` cannot be a checkpoint's: it must be one plain component, for it is made a path of."""
    if member_path_problem(name) or "/" in name:
        return f"its name {name!r} is not one plain directory name"
    return None if _SERIES.fullmatch(series) else f"its series is {series!r}"


_HARMLESS = re.compile(r"(?:[\w=+,@ -][\w.=+,@ -]*/){0,16}[\w=+,@ -][\w.=+,@ -]*", re.ASCII)


def member_path_problem(path: object) -> str | None:
    if isinstance(path, str) and len(path) < 64 and path != MARKER and _HARMLESS.fullmatch(path):
        return None  # nearly every name; the rest is asked in full
    if not isinstance(path, str) or not path:
        return "it is empty or not text"
    if len(path) > 1024:
        return "it is longer than 1024 characters"
    if path.startswith("/"):
        return "it is absolute"
    if _CONTROL.search(path):
        return "it holds a control character, such as a newline"
    if _SURROGATE.search(path):
        return "it is not valid UTF-8"
    if _DOTS.search(path):
        return "it has an empty, '.' or '..' component"
    if path == MARKER:
        return f"{MARKER} is the marker's own name"
    parts = path.split("/")
    if len(parts) > PATH_DEPTH:
        return f"it is more than {PATH_DEPTH} directories deep"
    if any(len(part) > 63 and len(part.encode()) > 255 for part in parts):
        return "it has a component of more than 255 bytes"
    return None
