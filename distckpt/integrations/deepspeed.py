"""DeepSpeed's configuration, with a block of ours in it: ``"distckpt": {"root": "/data/run", "save_every": 500}``.

DeepSpeed passes over blocks that it does not know.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping
from typing import Any

from distckpt.errors import ConfigError
from distckpt.manager import CheckpointManager
from distckpt.options import Timeouts

BLOCK = "distckpt"

_OBJECTS = ("self", "group", "retention", "seams")  # what JSON has no words for


def manager_from(config: Any, **more: Any) -> CheckpointManager:
    """The manager that the block asks for. Collective; make it when the engine exists.

    ``config``: the engine, or its configuration as a dict or as the path of a JSON file. The block holds arguments of
    CheckpointManager, ``timeouts`` as a block of its own; ``more`` goes over it. ConfigError for a block or a key that is none.
    """
    block = _block(config)
    known = [name for name in inspect.signature(CheckpointManager.__init__).parameters if name not in _OBJECTS]
    unknown = sorted(set(block) - set(known))
    if unknown:
        raise ConfigError(f"the block {BLOCK!r} of the DeepSpeed configuration has the key {unknown[0]!r}, which is none; it "
                          f"takes {', '.join(known)}")
    arguments = {**block, **more}
    if isinstance(arguments.get("timeouts"), Mapping):
        try:
            arguments["timeouts"] = Timeouts(**arguments["timeouts"])
        except TypeError as error:
            raise ConfigError(f"the timeouts in the block {BLOCK!r} of the DeepSpeed configuration: {error}") from error
    if "root" not in arguments:
        raise ConfigError(f"the block {BLOCK!r} of the DeepSpeed configuration has no root, and root= was not passed: say which "
                          "directory the checkpoints go to")
    return CheckpointManager(**arguments)


def _block(config: Any) -> dict[str, Any]:
    if isinstance(config, (str, os.PathLike)):
        try:
            with open(config, encoding="utf-8") as file:
                config = json.load(file)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the DeepSpeed configuration {os.fspath(config)}: {error}") from error
    found = config if isinstance(config, Mapping) else getattr(config, "config", None)
    if isinstance(found, (str, os.PathLike)):
        return _block(found)
    if not isinstance(found, Mapping):
        raise ConfigError(f"manager_from takes a DeepSpeed engine, its configuration, or the path of it, not a "
                          f"{type(config).__name__}")
    block = found.get(BLOCK, {})
    if not isinstance(block, Mapping):
        raise ConfigError(f"the block {BLOCK!r} of the DeepSpeed configuration must be an object, not {block!r}")
    return dict(block)
