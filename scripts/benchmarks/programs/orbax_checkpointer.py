"""Orbax on a tree of numpy arrays: a new directory per step."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import orbax.checkpoint as ocp
from common import Peer, Pending, State, main


def start(place: str, state: State) -> Peer:
    checkpointer = ocp.Checkpointer(ocp.StandardCheckpointHandler())
    behind = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())

    def sync(path: str, turn: int) -> None:
        checkpointer.save(path, args=ocp.args.StandardSave(state))

    def background(path: str, turn: int) -> Pending:
        behind.save(path, args=ocp.args.StandardSave(state))
        return Pending(behind.wait_until_finished)

    return Peer(ocp.__version__, {"sync": sync, "background": background}, close=behind.close)


if __name__ == "__main__":
    main(start)
