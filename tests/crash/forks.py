"""A zygote for tests: one rank of ``tests.harness`` (torch is loaded, no thread runs) that forks the ranks of many runs.

What it is asked to do is a module-level function that calls ``group`` or ``alone`` of ``distckpt.testing.forks`` again and
again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from distckpt.testing.forks import Ended, Place, Stuck, alone, group
from tests.harness import run, values

__all__ = ["Ended", "Place", "Stuck", "alone", "group", "zygote"]


def zygote(target: Callable[..., Any], *args: Any, timeout: float = 300.0) -> Any:
    """What ``target(*args)`` returns in a zygote. Call it from a test."""
    return values(run(1, _in_zygote, target, args, init=False, timeout=timeout))[0]


def _in_zygote(rank: int, world: int, target: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    logging.getLogger().setLevel(logging.INFO)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    return target(*args)
