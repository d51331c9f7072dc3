"""``distckpt request-save``: ask the run that writes to a root for a checkpoint now."""

from __future__ import annotations

import argparse

from distckpt import ownership, requests
from distckpt.cli import exits, target
from distckpt.cli.output import Output
from distckpt.errors import DistckptError
from distckpt.runtime import Identity


def run(args: argparse.Namespace, out: Output) -> int:
    root = target.open_root(args.root)
    owner, alive = ownership.owner_now(root.files, root.layout, root.runtime)
    if alive is False:
        raise DistckptError(f"nobody writes to {root.layout.root} now{_last(owner)}, so no run would see a request; start the "
                            "run first. Nothing was left there")
    path = requests.ask(root.files, root.layout, root.runtime, args.reason)
    out.document({"request": path, "reason": args.reason, "live": alive, "owner": owner.to_json() if owner else None})
    out.line(f"requested a save of {root.layout.root}" + (f" ({args.reason})" if args.reason else ""))
    if alive:
        out.line(f"the run that writes there lives ({_who(owner)}): it looks every few seconds, and saves at a step that all its "
                 "ranks poll")
    else:
        out.note(f"whether the run that writes there ({_who(owner)}) still lives cannot be told from this machine; if it does, "
                 f"{path} goes within seconds")
    return exits.OK


def _who(owner: Identity | None) -> str:
    if owner is None:
        return "unknown process"
    return f"pid {owner.pid} on {owner.host}" + (f", job {owner.job}" if owner.job else "")


def _last(owner: Identity | None) -> str:
    return f" (the last to do so was {_who(owner)})" if owner else ""
