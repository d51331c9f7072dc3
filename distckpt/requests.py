"""An operator's wishes: files in ``requests/`` that the owner of a root takes away when it sees them.

Anybody who may write there may ask; nothing is claimed. A file of any other name counts too (``touch`` is enough).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from distckpt import catalog
from distckpt.durable import Files
from distckpt.layout import Layout
from distckpt.ordered import move, unlink_if_there, write_new
from distckpt.runtime import Runtime

_UNDER_WAY = ".tmp"
_LIMIT = 500


def ask(files: Files, layout: Layout, runtime: Runtime, reason: str) -> str:
    """Leave the wish for a save, whole or not at all; the path of its file."""
    path = layout.home("requests", f"save-{runtime.token(8)}.json")
    temporary = path + _UNDER_WAY
    identity = runtime.identity()
    wish = {"reason": reason, "time": runtime.time(), "host": identity.host, "pid": identity.pid}
    write_new(files, temporary, json.dumps(wish).encode() + b"\n")
    move(files, temporary, path)
    return path


def take(files: Files, layout: Layout) -> list[str]:
    """The reasons of all wishes that are there, each taken away; empty text for one that gives none."""
    found = []
    for item in sorted(files.scan(layout.home("requests")), key=lambda i: i.name):
        if item.kind != "file" or item.name.endswith(_UNDER_WAY):
            continue
        path = layout.home("requests", item.name)
        try:
            value: Any = catalog.read_json(files, path)
        except OSError:
            value = None  # somebody else's file, not for us to read: it is a wish all the same
        reason = value.get("reason") if isinstance(value, Mapping) else None
        unlink_if_there(files, path)
        found.append(_one_line(reason) if isinstance(reason, str) else "")
    return found


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text[:_LIMIT]).strip()
