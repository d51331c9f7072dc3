"""Which root and which checkpoint the user means."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

from distckpt.catalog import Entry
from distckpt.cli.exits import UsageError as UsageError
from distckpt.durable import GONE, REAL
from distckpt.errors import ConfigError, StepNotFound
from distckpt.layout import HOME, MAIN, MARKER, check_series
from distckpt.reader import Root, warned


@dataclass(frozen=True)
class Target:
    """``ROOT@STEP`` taken apart."""

    path: str
    step: int | None = None


def parse(text: str, step: int | None = None) -> Target:
    """The root and the step of ``text``; a directory of exactly that name wins over an ``@`` in it."""
    head, at, tail = text.rpartition("@")
    if not at or not head or not (tail.isascii() and tail.isdigit()) or len(tail) > 18 or REAL.is_dir(text):
        return Target(text, step)
    if step is not None and step != int(tail):
        raise UsageError(f"{text} says step {int(tail)} and --step says {step}: give one of them")
    return Target(head, int(tail))


def of(args: argparse.Namespace) -> Target:
    """The target of a command that takes ROOT[@STEP]."""
    return parse(args.root, args.step)


def needed(args: argparse.Namespace) -> Target:
    """The target of a command that must be told a step."""
    found = of(args)
    if found.step is None:
        raise UsageError(f"'{args.command}' needs a step: {found.path}@STEP or --step N; 'distckpt ls {found.path}' shows them")
    return found


def open_root(path: str, series: str | None = None) -> Root:
    """The root at ``path``; ConfigError with a way out when it is none. A copied root without ``.distckpt`` is one too."""
    if series is not None:
        check_series(series)
    if is_checkpoint(path):
        raise ConfigError(f"{path} is a checkpoint, not a root: it holds a {MARKER}; its root is the directory above it")
    root = warned(Root(path))
    if not root.files.is_dir(root.layout.home()) and not root.entries():
        raise ConfigError(f"{root.layout.root} is not a checkpoint root: it has no {HOME}, and nothing in it is named like "
                          f"{root.naming.template!r}; check the path, or 'distckpt adopt --naming' takes in directories "
                          "that something else wrote")
    return root


def is_checkpoint(path: str) -> bool:
    """Whether ``path`` itself is one checkpoint's directory."""
    try:
        return REAL.stat(os.path.join(path, MARKER)).kind == "file"
    except OSError as error:
        if error.errno in GONE:
            return False
        raise


def entry_at(root: Root, step: int, series: str | None) -> Entry:
    """The committed checkpoint of ``step``; without ``series`` the main one goes before others. StepNotFound otherwise."""
    there = [e for e in root.entries(series) if e.step == step]
    found = sorted((e for e in there if e.committed), key=lambda e: e.series != MAIN)
    if found:
        return found[0]
    reason = f"{there[0].name} is not committed: {there[0].problem}" if there else "there is nothing of that step"
    where = root.layout.root + (f" (series {series})" if series else "")
    raise StepNotFound(f"step {step} is not a committed checkpoint of {where}: {reason}; 'distckpt ls {root.layout.root}' "
                       "shows what is", step=step)
