"""The functions by which frameworks write their large files, for a while with somebody in their place.

torch.save, safetensors' save_file and DCP's save are looked up by their callers at each call, under the names below. A caller
that holds them under another name is not seen: it writes as it always does.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any

import torch
from torch.distributed import checkpoint

_SAVE_FILE = (("safetensors.torch", "save_file"), ("accelerate.utils.other", "safe_save_file"),
              ("transformers.modeling_utils", "safe_save_file"), ("peft.peft_model", "safe_save_file"))


class WriterCall:
    """One call: ``value`` is to go into ``where``. ``takes_files``: whether the writer writes into file objects as well."""

    def __init__(self, write: Callable[..., Any], takes_files: bool, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._write, self.takes_files = write, takes_files
        self._value, self._where = list(signature(write).parameters)[:2]
        self._bound = signature(write).bind(*args, **options)
        self.value, self.where = self._bound.arguments[self._value], self._bound.arguments[self._where]

    def into(self, where: Any) -> None:
        """The call as it was made, into ``where``, of what ``value`` is now."""
        self._bound.arguments.update({self._value: self.value, self._where: where})
        self._write(*self._bound.args, **self._bound.kwargs)


Answer = Callable[[WriterCall], None]
DCPAnswer = Callable[[dict[str, Any], Any], None]
"""Given the state and the process group."""


@contextmanager
def standing_in(answer: Answer) -> Iterator[None]:
    """Inside, a call of this thread's is ``answer(call)``; other threads write as they always do."""
    here = threading.get_ident()

    def instead_of(write: Callable[..., Any], takes_files: bool) -> Callable[..., Any]:
        def stand_in(*args: Any, **options: Any) -> None:
            if threading.get_ident() != here:
                write(*args, **options)
            else:
                answer(WriterCall(write, takes_files, args, options))

        return stand_in

    with ExitStack() as undo:
        for module, name, takes_files in [(torch, "save", True), *((sys.modules.get(m), n, False) for m, n in _SAVE_FILE)]:
            real = getattr(module, name, None)
            if real is not None:
                setattr(module, name, instead_of(real, takes_files))
                undo.callback(setattr, module, name, real)
        yield


@contextmanager
def standing_in_for_dcp(path: str, answer: DCPAnswer) -> Iterator[None]:
    """Inside, a call of this thread's of ``torch.distributed.checkpoint.save`` for ``path``, with no writer or planner of the
    caller's own, is ``answer(state, process_group)``."""
    here = threading.get_ident()
    dcp: Any = checkpoint
    real = dcp.save

    def stand_in(state_dict: dict[str, Any], **options: Any) -> Any:
        group = options.get("process_group")
        simple = {name for name, value in options.items() if value is not None} <= {"checkpoint_id", "process_group"}
        if threading.get_ident() == here and simple and os.fspath(options.get("checkpoint_id") or "") == path:
            return answer(state_dict, group)
        return real(state_dict, **options)

    dcp.save = stand_in
    try:
        yield
    finally:
        dcp.save = real
