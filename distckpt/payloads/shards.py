"""One file per rank (several with ``dedup="link"``), in a standard format: torch.save's or safetensors'. Readable without us."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from distckpt.checkpoint import Checkpoint
from distckpt.durable import Opened
from distckpt.errors import ConfigError
from distckpt.layout import check_member_path
from distckpt.payloads import inplace, loadable, pieces, safefile, torchfile
from distckpt.payloads.base import Ranks
from distckpt.payloads.live import Live, of_value
from distckpt.saving.files import RankFiles
from distckpt.saving.piecewriter import PieceWriter

_SUFFIX = {"torch": "pt", "safetensors": "safetensors"}


class Shards:
    """Every rank's own state: a state dict, or an object with ``state_dict`` and ``load_state_dict``.

    ``format="torch"`` (default) writes torch.save's zip; ``"safetensors"`` a flat dict of tensors. Loads with
    ``weights_only=True`` into the same objects, tensors in place. It does not reshard: another number of ranks at load
    is a WorldMismatch.
    """

    collective = False
    members: list[str] = []

    def __init__(self, state: Any, name: str = "shard", format: str = "torch") -> None:
        if format not in _SUFFIX:
            raise ConfigError(f"format must be 'torch' or 'safetensors', not {format!r}")
        if not isinstance(state, Mapping) and not hasattr(state, "state_dict"):
            raise ConfigError(f"Shards takes a dict or an object with state_dict(), not {type(state).__name__}")
        self._state, self._format = state, format
        self._name = name
        self._file = check_member_path(f"{name}.{_SUFFIX[format]}")

    def _value(self) -> Any:
        return self._state if isinstance(self._state, Mapping) else self._state.state_dict()

    def check(self) -> None:
        value = self._value()
        if self._format == "torch":
            loadable.check(value, "state")
            return
        for key, item in value.items():
            if not isinstance(item, torch.Tensor):
                raise ConfigError(f"state[{key!r}] is {type(item).__name__}; safetensors stores a flat dict of tensors only: use "
                                  "format='torch'")

    def write(self, files: RankFiles, ranks: Ranks) -> None:
        value = self._value()
        if files.linking:
            for index, piece in enumerate(pieces.split(value)):
                files.put(pieces.name(self._file, index), self._pour(piece))
            return
        if self._format == "safetensors":
            from safetensors.torch import save_file  # an extra

            path = files.mine(self._file)
            with open(path, "xb") as out:
                mode = os.fstat(out.fileno()).st_mode
            with files.paced():
                save_file({k: v.contiguous() for k, v in value.items()}, path)
            os.chmod(path, mode & 0o7777)  # it renames a temporary of mode 0600 over; umask and the directory's ACL must hold
            return
        with files.writer(self._file) as out:
            torchfile.write(value, out)

    def _pour(self, value: Any) -> Callable[[PieceWriter], object]:
        if self._format == "torch":
            return partial(torchfile.write, value)
        from safetensors.torch import save  # an extra

        data = save({k: v.contiguous() for k, v in value.items()})
        return lambda out: out.write(data)

    def live(self) -> Live:
        return of_value(self._state)

    def tree(self) -> Any:
        return self._value()

    def of(self, tree: Any) -> Shards:
        return Shards(tree, self._name, self._format)

    def load(self, checkpoint: Checkpoint, ranks: Ranks) -> None:
        if isinstance(self._state, Mapping) and not isinstance(self._state, dict):
            raise ConfigError(f"cannot load in place into a {type(self._state).__name__}; pass a dict")
        with ExitStack() as opened:
            # All are open, and their digests found right, before any of them is loaded: one that is damaged touches nothing.
            files: dict[str, Opened] = {}
            for name in pieces.names(checkpoint, self._file):
                files[name] = checkpoint.open(name, digest=self._format == "torch")
                opened.enter_context(files[name])
            first, *more = self._read(checkpoint, files)
        value = first
        for piece in more:
            pieces.merge(value, piece)
        if isinstance(self._state, dict):
            loadable.fill(self._state, value, "state")
        else:
            self._state.load_state_dict(value)

    def _read(self, checkpoint: Checkpoint, files: Mapping[str, Opened]) -> list[Any]:
        """What the files hold. safetensors' hold no code, so resume's ``verify`` decides about their digests."""
        torchs = self._format == "torch"
        found = inplace.read(self._waiting(), list(files.values()), torchfile.describe if torchs else safefile.describe)
        if found is not None:
            return found
        return [torchfile.whole(file) if torchs else safefile.whole(file, checkpoint.shared(name))
                for name, file in files.items()]

    def _waiting(self) -> Mapping[Any, Any]:
        """The tensors that may be read into, under the names that they have in the file. Of a module those that its own
        ``load_state_dict`` would copy into; it is called all the same, and finds its own tensors, which it leaves alone."""
        if isinstance(self._state, torch.nn.Module):
            return {**dict(self._state.named_parameters(remove_duplicate=False)),
                    **dict(self._state.named_buffers(remove_duplicate=False))}
        return self._state if isinstance(self._state, dict) else {}
