"""``distckpt pin`` and ``unpin``: keep a checkpoint from rotation, by hand."""

from __future__ import annotations

import argparse

from distckpt import leases
from distckpt.catalog import Entry
from distckpt.cli import exits, output, target
from distckpt.cli.output import Output
from distckpt.reader import Root


def run(args: argparse.Namespace, out: Output) -> int:
    wanted = target.needed(args)
    root = target.open_root(wanted.path, args.series)
    assert wanted.step is not None
    entry = target.entry_at(root, wanted.step, args.series)
    assert entry.head is not None
    attempt = entry.head.attempt
    said = _pin(root, entry, attempt, args.reason) if args.command == "pin" else _unpin(root, attempt)
    held = root.leases_on(attempt)
    out.document({"name": entry.name, "attempt": attempt, "pins": [h.reason for h in held if h.ttl is None],
                  "leases": [h.reason for h in held if h.ttl is not None]})
    out.line(f"{entry.name}: {said}")
    return exits.OK


def _pin(root: Root, entry: Entry, attempt: str, reason: str) -> str:
    if any(h.ttl is None and h.reason == reason for h in root.leases_on(attempt)):
        return f"already pinned ({reason})"
    # Without a ttl nothing has to live on to renew it: the file alone is the pin, and it outlasts this process.
    leases.take(root.files, root.layout, root.runtime, entry.name, attempt, reason, None)
    return f"pinned ({reason}); rotation leaves it alone until 'distckpt unpin {root.layout.root}@{entry.step}'"


def _unpin(root: Root, attempt: str) -> str:
    pins = [h for h in root.leases_on(attempt) if h.ttl is None]
    for pin in pins:
        leases.drop(root.files, root.layout, attempt, pin.id)
    readers = [h for h in root.leases_on(attempt) if h.ttl is not None]
    stays = f"; {output.plural(len(readers), 'lease')} of readers stay" if readers else ""
    return (f"{output.plural(len(pins), 'pin')} removed: retention decides about it again" if pins else "was not pinned") + stays
