"""What ``trainer.save_checkpoint`` would write, as a payload: Lightning's own dump, written by Lightning's own writers.

``trainer.save_checkpoint`` itself ends in a barrier of the training's process group, where the others would wait for a rank
whose dump or writer had failed. So its two halves are called apart: the dump before the save begins, where its error is told
to every rank, and the strategy's writer inside the attempt.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Any

import torch

from distckpt.checkpoint import Checkpoint
from distckpt.errors import ConfigError, MemberMissing
from distckpt.payloads import whole
from distckpt.payloads.base import Payload, Ranks
from distckpt.payloads.dcp import _Staged, write_state
from distckpt.payloads.dcpread import METADATA, unpickled
from distckpt.payloads.members import Members
from distckpt.payloads.standin import standing_in_for_dcp
from distckpt.saving.files import RankFiles

NAME = "checkpoint.ckpt"

_REST = "meta.pt"  # what Lightning's sharded strategies call the part that is not tensors of the model or an optimizer


class Lightning:
    """The trainer's checkpoint and this rank's ``members``. ``found``: the checkpoint that ``load`` was shown.

    The trainer's part is loaded by ``fit(ckpt_path=...)``; ``load`` loads the members and sees that the rest is there.
    """

    def __init__(self, trainer: Any, members: Mapping[str, Any]) -> None:
        self._trainer = trainer
        self._members = Members(members) if members else None
        self._dumped: dict[str, Any] | None = None
        self.found: Checkpoint | None = None

    @property
    def collective(self) -> bool:
        return not _by_rank0(self._trainer.strategy)

    @property
    def members(self) -> list[str]:
        return ["lightning", *(self._members.members if self._members else [])]

    def check(self) -> None:
        self._dumped = self._dump()
        if self._members is not None:
            self._members.check()

    def _dump(self) -> dict[str, Any]:
        dumped: dict[str, Any] = self._trainer._checkpoint_connector.dump_checkpoint(False)
        return dumped

    def write(self, files: RankFiles, ranks: Ranks) -> None:
        dumped, self._dumped = self._dumped, None
        assert dumped is not None, "check comes first"
        strategy = self._trainer.strategy
        if _by_rank0(strategy):
            path = files.claim(NAME) if ranks.rank == 0 else os.path.join(files.directory, NAME)
        else:
            path = os.path.join(files.path, NAME)
        # Lightning's DCP call digests nothing, computes a CRC and syncs before we can digest beside the disk's work
        with standing_in_for_dcp(path, lambda state, group: write_state(state, files.below(NAME), ranks, group)), files.paced():
            strategy.save_checkpoint(dumped, path)
        if os.path.isdir(path):
            _claim_shards(files, path, ranks.rank)
        if ranks.rank == 0:
            _require_whole(path)
        if self._members is not None:
            self._members.write(files, ranks)

    def tree(self) -> Any:
        _writer_of(self._trainer.strategy)
        dumped = self._dump()
        if _by_rank0(self._trainer.strategy) and not self._trainer.is_global_zero:
            dumped = {}  # the others dump it because a hook may be collective, and have nothing to write
        return {"lightning": dumped, "members": self._members.tree() if self._members is not None else {}}

    def of(self, tree: Any) -> Payload:
        members = self._members.of(tree["members"]) if self._members is not None else None
        return _Copied(self._trainer.strategy, tree["lightning"], members, self.members)

    def load(self, checkpoint: Checkpoint, ranks: Ranks) -> None:
        if not any(entry.path == NAME or entry.path.startswith(NAME + "/") for entry in checkpoint.marker.files):
            raise MemberMissing(f"{checkpoint.name} holds no {NAME}: it was not saved from a Lightning trainer",
                                step=checkpoint.step, members=["lightning"])
        self.found = checkpoint
        if self._members is not None:
            self._members.load(checkpoint, ranks)


def _claim_shards(files: RankFiles, directory: str, rank: int) -> None:
    """Say whose the files are that DCP's writer names by rank, so that each rank digests and syncs its own; what else a strategy
    wrote stays unclaimed."""
    claimed = {path for path, *_ in files.written()}  # with the sizes that were counted, or as links, by who wrote them for DCP
    for name in sorted(os.listdir(directory)):
        if f"{NAME}/{name}" in claimed:
            continue
        if (name.startswith(f"__{rank}_") and name.endswith(".distcp")) or (rank == 0 and name in (METADATA, _REST)):
            files.claim(f"{NAME}/{name}")


class _Copied:
    """A copy of a dump, on its way to disk behind the training: no collective of the training's process group may run here."""

    def __init__(self, strategy: Any, dumped: dict[str, Any], members: Payload | None, names: list[str]) -> None:
        self._strategy, self._dumped, self._members, self._names = strategy, dumped, members, names
        self._key = _writer_of(strategy)

    @property
    def collective(self) -> bool:
        return bool(self._key)

    @property
    def members(self) -> list[str]:
        return self._names

    def check(self) -> None:
        if self._members is not None:
            self._members.check()

    def write(self, files: RankFiles, ranks: Ranks) -> None:
        if self._key:
            self._write_shards(files.below(NAME), ranks)
        elif ranks.rank == 0:
            path = files.claim(NAME)
            with files.paced():
                self._strategy.checkpoint_io.save_checkpoint(self._dumped, path)
            _require_whole(path)
        if self._members is not None:
            self._members.write(files, ranks)

    def _write_shards(self, files: RankFiles, ranks: Ranks) -> None:
        """As the strategy lays them out, by torch's DCP, on a process group of our own."""
        rest = dict(self._dumped)
        shards = {self._key: rest.pop("state_dict")}
        shards.update({f"optimizer_{index}": state for index, state in enumerate(rest.pop("optimizer_states", []))})
        _Staged(shards).write(files, ranks)
        if ranks.rank == 0:
            path = files.claim(_REST)
            torch.save(rest, path)
            _require_whole(path)

    def load(self, checkpoint: Checkpoint, ranks: Ranks) -> None:
        raise ConfigError("a staged copy is written, not loaded into")


def _by_rank0(strategy: Any) -> bool:
    """Whether rank 0 alone writes, one file by the CheckpointIO, as in every strategy that leaves that to Lightning's base."""
    from lightning.pytorch.strategies import Strategy

    return type(strategy).save_checkpoint is Strategy.save_checkpoint


def _writer_of(strategy: Any) -> str:
    """Empty when the CheckpointIO writes one file on rank 0; else the name of the model's part in the strategy's shards.

    ConfigError for a strategy that nobody here knows how to write without collectives of the training's process group.
    """
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

    if _by_rank0(strategy):
        return ""
    if isinstance(strategy, ModelParallelStrategy):
        return "state_dict" if strategy._save_distributed_checkpoint else ""
    if isinstance(strategy, FSDPStrategy):
        return "model" if strategy._state_dict_type == "sharded" else ""
    raise ConfigError(f"{type(strategy).__name__} writes with collectives of the training's process group, so it cannot be saved "
                      "behind the training: use background=False")


def _require_whole(path: str) -> None:
    """OSError unless what the framework says it wrote is there and not cut short: its return value is not trusted."""
    if os.path.isdir(path):
        if not os.path.exists(os.path.join(path, METADATA)):
            return  # not DCP's: DeepSpeed, say
        _require_shards(path)
        path = os.path.join(path, _REST)
    if not os.path.exists(path):
        raise OSError(errno.ENOENT, "Lightning reported success and wrote nothing", path)
    whole.check(path)


def _require_shards(path: str) -> None:
    ends: dict[str, int] = {}
    with open(os.path.join(path, METADATA), "rb") as file:
        stored = unpickled(file).storage_data or {}
    for piece in stored.values():
        ends[piece.relative_path] = max(ends.get(piece.relative_path, 0), piece.offset + piece.length)
    for name, end in ends.items():
        size = os.stat(os.path.join(path, name)).st_size
        if size < end:
            raise OSError(errno.EIO, f"DCP reported success and {size} of {end} bytes are there", os.path.join(path, name))
