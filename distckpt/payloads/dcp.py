"""Sharded model and optimizer by torch.distributed.checkpoint: FSDP2, FSDP1, DDP and plain modules.

Layout, planning and resharding are DCP's. What is ours: the directory, the files, their durability, and not believing DCP's word:
it returns success although a writer thread failed (FIELD_CASES B89), and fsyncs its metadata before the buffer is
flushed. Here every planned item must have been written, and every file is synced and measured again by path.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter  # type: ignore[attr-defined]
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from distckpt.checkpoint import Checkpoint
from distckpt.errors import ConfigError, MemberMissing
from distckpt.payloads import loadable, optim, pieces
from distckpt.payloads.base import Payload, Ranks
from distckpt.payloads.dcpplan import planning
from distckpt.payloads.dcpread import METADATA, Planner, Reader, metadata_of, unpickled
from distckpt.payloads.framework import own_failure
from distckpt.payloads.live import Live, joined, of_value
from distckpt.payloads.torchfile import without_crc
from distckpt.saving.files import RankFiles
from distckpt.saving.piecewriter import PeerFailed, PieceWriter

log = logging.getLogger(__name__)


class _Open:
    """``out`` as DCP's stream."""

    def __init__(self, out: PieceWriter) -> None:
        self.write, self.tell = out.write, out.tell
        self.close = out.flush  # DCP's, when the file is whole; whose ``out`` is closes that

    def flush(self) -> None:
        """DCP's, behind every tensor: not yet."""


class _Streams(FileSystem):
    """DCP's file system; while ``into`` is set, its files are ours: digested as they are written, paced, synced when closed."""

    into: Callable[[str], _Open] | None = None

    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Any:
        return super().create_stream(path, mode) if self.into is None else nullcontext(self.into(os.path.basename(path)))


class _Writer(FileSystemWriter):
    """DCP's own file writer into our files, which notices what it did not write.

    ``held``: an error from before DCP's collectives, raised inside the first of them, where DCP brings it to every rank.
    """

    def __init__(self, files: RankFiles, held: Exception | None) -> None:
        # One thread: DCP drops the errors of the others. No fsync of its own: ours is where the file is closed.
        super().__init__(files.directory, sync_files=False, thread_count=1)
        self._claims, self._held = files, held
        self._streams = self.fs = _Streams()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The directory is there already and is never made on the way: a fenced-off zombie must get ENOENT (S5)."""
        if self._held is not None:
            raise self._held
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        with without_crc(self._claims.algorithm is not None):  # of each tensor, which is an archive of its own in DCP's files
            for part in _parts(plan) if self._claims.linking else [plan]:
                results += self._write(part, planner)
        written = {result.index for result in results}
        missing = [item.index for item in plan.items if item.index not in written]
        if missing:
            raise OSError(5, f"DCP reported success without writing {len(missing)} of {len(plan.items)} items, such as "
                             f"{missing[0].fqn}: a writer thread failed", self._claims.directory)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """``plan`` into its one file, or as one more name of the same bytes in the checkpoint before: the name carries the rank,
        and no other rank's DCP opens it (S25)."""
        found: list[WriteResult] = []
        own = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"

        def pour(out: PieceWriter) -> None:
            def into(name: str) -> _Open:
                assert name == own, f"DCP writes {name}, not {own}"
                return _Open(out)

            self._streams.into = into
            try:
                found[:] = super(_Writer, self).write_data(plan, planner).wait()
            finally:
                self._streams.into = None

        self._claims.put(own, pour, exact=True)
        return found

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        with open(self._claims.claim(METADATA), "rb") as written:
            unpickled(written)  # no size is told for it: a short one, or one that no load would take, ends the save here


def _parts(plan: SavePlan) -> Iterator[SavePlan]:
    """``plan``, in as many files as tell what changed from what did not."""
    sized = [(item, item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize if item.tensor_data else 0)
             for item in plan.items]
    left, groups = pieces.grouped(sized)
    for number, items in enumerate([left, *groups]):
        if items:
            prefix = f"{plan.storage_data.prefix}{number}_"
            yield replace(plan, items=items, storage_data=replace(plan.storage_data, prefix=prefix))


def write_state(state: dict[str, Any], files: RankFiles, ranks: Ranks, group: Any, held: Exception | None = None) -> None:
    """``state`` by DCP's save into ``files``' directory. Collective over ``group``. ``held``: what this rank has failed with
    already. Raises this rank's own error, PeerFailed where another rank's ended it."""
    try:
        with _quietly(), planning(ranks.kept, files.prefix) as planner:
            save(state, storage_writer=_Writer(files, held), planner=planner, process_group=group)
    except CheckpointException as error:
        raise own_failure(error, ranks.rank) from error
    except RuntimeError as error:  # what a rank raises comes as the above: this is the collective itself, without a peer
        raise PeerFailed from error


class DCP:
    """Model and optimizer (or any state dict of tensors and stateful objects), written and resharded by DCP.

    ``DCP(model, optimizer)``; ``optimizer`` may be a list. ``DCP(state={"name": tensor, module or stateful, ...})`` for the rest.
    Collective on save and load; needs a torch process group when there are several ranks. Plain
    ``torch.distributed.checkpoint.load`` reads the directory.
    """

    collective = True
    members: list[str] = []

    def __init__(self, model: Any = None, optimizer: Any = None, *, state: Mapping[str, Any] | None = None) -> None:
        if model is None and state is None:
            raise ConfigError("DCP needs a model, or state={...}")
        if model is None and optimizer is not None:
            raise ConfigError("DCP needs the model of the optimizer: its state is stored by parameter name")
        if model is not None and not (hasattr(model, "named_parameters") and hasattr(model, "state_dict")):
            raise ConfigError(f"DCP takes a torch module, not {type(model).__name__}")
        self._model: Any = model
        self._extra: dict[str, Any] = state if isinstance(state, dict) else dict(state or {})
        clash = {"model", "optimizer"} & set(self._extra)
        if clash:
            raise ConfigError(f"state may not use the name {sorted(clash)[0]!r}: it is the model's or the optimizer's own")
        self._optimizers = [] if optimizer is None else list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]

    def check(self) -> None:
        """Nothing yet: what the state holds is asked for once, in ``write``."""

    @property
    def parts(self) -> list[str]:
        return [*(["model"] if self._model is not None else []), *(["optimizer"] if self._optimizers else []), *self._extra]

    def _state(self, wanted: Collection[str], optimizers: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        state = {name: _state_of(value) for name, value in self._extra.items() if name in wanted}
        if "model" in wanted:
            state["model"] = get_model_state_dict(self._model)
        if "optimizer" in wanted:
            state["optimizer"] = optimizers()
        return state

    def write(self, files: RankFiles, ranks: Ranks) -> None:
        state, held = _try(self._checked)
        write_state(state, files, ranks, ranks.gloo(), held)

    def _checked(self) -> dict[str, Any]:
        """The state, after every value in it that DCP pickles was found to be one that can be loaded again."""
        state = self.tree()
        _check_values(state, "state")
        return state

    def live(self) -> Live:
        values = [*([self._model] if self._model is not None else []), *self._optimizers, *self._extra.values()]
        return joined(of_value(value) for value in values)

    def tree(self) -> dict[str, Any]:
        return self._state(self.parts, lambda: optim.state_of(self._model, self._optimizers))

    def of(self, tree: Any) -> Payload:
        return _Staged(tree)

    def load(self, checkpoint: Checkpoint, ranks: Ranks) -> None:
        wanted = [name for name in self.parts if ranks.only is None or name in ranks.only]
        found = Metadata(state_dict_metadata={})

        def prepare() -> dict[str, Any]:
            nonlocal found
            found = metadata_of(checkpoint)
            stored = found.state_dict_metadata
            state = self._state(wanted, lambda: optim.room_for(self._model, self._optimizers, stored, "optimizer"))
            _leave_out_lacking(state, found, checkpoint, ranks.strict)
            return state

        state, held = _try(prepare)
        try:
            with _quietly():
                load(state, storage_reader=Reader(checkpoint, found, held), planner=Planner(), process_group=ranks.gloo())
        except CheckpointException as error:
            raise own_failure(error, ranks.rank) from error
        self._take(state)

    def _take(self, state: dict[str, Any]) -> None:
        if "model" in state:
            set_model_state_dict(self._model, state["model"])
        if "optimizer" in state:
            optim.put_back(self._model, self._optimizers, state["optimizer"])
        for name, value in self._extra.items():
            if name not in state:
                continue
            if isinstance(value, torch.nn.Module):
                set_model_state_dict(value, state[name])
            elif isinstance(value, Stateful):
                value.load_state_dict(state[name])
            elif not hasattr(value, "copy_"):
                self._extra[name] = state[name]


class _Staged(DCP):
    """A copy of a state, on its way to disk."""

    def __init__(self, tree: dict[str, Any]) -> None:
        super().__init__(state={})
        self._tree = tree

    def tree(self) -> dict[str, Any]:
        return self._tree


def _state_of(value: Any) -> Any:
    """A module's state as it is sharded and by the names it has without its wrappers; another's by ``state_dict``."""
    if isinstance(value, torch.nn.Module):
        return get_model_state_dict(value)
    return value.state_dict() if isinstance(value, Stateful) else value


def _leave_out_lacking(state: dict[str, Any], found: Metadata, checkpoint: Checkpoint, strict: bool) -> None:
    """A part of which the checkpoint holds nothing: MemberMissing, or a warning and it stays as it is."""
    there = {str(path[0]) for path in (found.planner_data or {}).values()}
    empty = [name for name, value in state.items() if isinstance(value, Mapping) and not value]
    lacking = sorted(set(state) - there - set(empty))
    if not lacking:
        return
    text = f"{checkpoint.name} has no state for {', '.join(lacking)} (it has: {', '.join(sorted(there)) or 'nothing'})"
    if strict:
        raise MemberMissing(f"{text}; leave it out of the state, or pass strict=False to go on with what it has now",
                            step=checkpoint.step, members=lacking)
    log.warning("%s; going on with what it has now (strict=False)", text)
    for name in lacking:
        del state[name]


def _check_values(value: Any, where: str) -> None:
    if isinstance(value, torch.Tensor):
        return
    if isinstance(value, (Mapping, list, tuple)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            _check_values(item, f"{where}[{key!r}]")
        return
    loadable.check(value, where)


def _try(make: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], Exception | None]:
    """What ``make`` gives, or its error, to be held until this rank is inside the collective that brings it to all."""
    try:
        return make(), None
    except Exception as error:
        return {}, error


@contextmanager
def _quietly() -> Iterator[None]:
    """Without DCP's warning that one process is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
