"""Where one rank runs alone, it must not talk to the others, which do not listen (FIELD_CASES B58).

A collective of one rank waits until the process group gives up, half an hour by default, or is met by the next one that the
others' training makes, and both sides get a wrong result. So it is refused before anything is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from distckpt.errors import ConfigError

_GROUPS = ("process_group", "group_name")


@contextmanager
def alone(what: str, remedy: str) -> Iterator[None]:
    """While it lasts, a collective of torch that the calling thread makes with other ranks is a ConfigError. ``what`` runs, and
    ``remedy`` says what to do instead. A group that holds this rank only may be used, and other threads may do as they like."""
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    # Not ``with _Alone()``: that also keeps a note for all threads, and puts back what it found. The training thread may enter a
    # mode of its own before and leave it meanwhile, and the note would then say for ever that there is one: nothing is compiled.
    _push_mode(_Alone(what, remedy))
    try:
        yield
    finally:
        _pop_mode()


class _Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Whoever makes a collective (torch.distributed, DeepSpeed, FSDP, DTensor), it passes the dispatcher, and so this."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._what, self._remedy = what, remedy

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # a compiled model stays compiled

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in function.namespace:
            size = _members(function, args, kwargs or {})
            if size != 1:
                name = f"{function.namespace}.{function.overloadpacket.__name__}"
                raise ConfigError(f"{self._what}, and it called {name} in a group of {size} ranks: the others do not, and would "
                                  f"take it for a word of their training. Nothing was sent; {self._remedy}")
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it makes collectives of its own on the way, and those come here
        return function(*args, **(kwargs or {}))


def _members(function: Any, args: Any, kwargs: Any) -> int:
    """How many ranks the collective is for; 1 where it belongs to no group (a wait for one that is under way)."""
    given = {**{parameter.name: value for parameter, value in zip(function._schema.arguments, args, strict=False)}, **kwargs}
    group = next((given[name] for name in _GROUPS if name in given), None)
    if group is None:
        return 1
    if isinstance(group, str):
        group = _resolve_process_group(group)  # type: ignore[arg-type]
    return int((dist.ProcessGroup.unbox(group) if isinstance(group, torch.ScriptObject) else group).size())
