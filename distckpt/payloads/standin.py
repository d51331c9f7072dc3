"""The functions by which frameworks write their large files, for a while with somebody in their place.

torch.save and safetensors' save_file are looked up by their callers at each call, under the names below. A caller that holds
them under another name is not seen: it writes as it always does.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any

import torch

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
