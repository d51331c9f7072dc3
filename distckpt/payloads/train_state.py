"""The short way: everything a training loop holds, and the payload for each part."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from distckpt.checkpoint import Checkpoint
from distckpt.coordination.bootstrap import alone
from distckpt.errors import ConfigError
from distckpt.payloads.base import Parts, Payload, Ranks, stageable
from distckpt.payloads.dcp import DCP
from distckpt.payloads.live import Live, joined, live_of
from distckpt.payloads.members import Member, Members
from distckpt.payloads.rng import Rng
from distckpt.payloads.shards import Shards
from distckpt.saving.files import RankFiles


class TrainState:
    """All of a loop's state as one payload: ``TrainState(model=..., optimizer=..., scheduler=..., loader=..., rng=True)``.

    The model (plain, DDP, FSDP1 or FSDP2) and the optimizer go through DCP, which reshards on load; several ranks without a
    torch process group (an MPI program, srun) each write their own shard. ``rng=True`` adds this rank's random states. The
    scheduler is the same on all ranks and is taken from rank 0 at another world size; every other keyword is a per-rank
    member: an object with ``state_dict`` and ``load_state_dict``, a dict of JSON values that is updated in place on load,
    or ``Member(value, on_world_change=...)``.
    """

    def __init__(self, *, model: Any = None, optimizer: Any = None, scheduler: Any = None, loader: Any = None,
                 rng: bool = False, **members: Any) -> None:
        named: dict[str, Any] = dict(members)
        if loader is not None:
            named["loader"] = loader
        if scheduler is not None:
            named["scheduler"] = scheduler if isinstance(scheduler, Member) else Member(scheduler, on_world_change="rank0")
        if rng:
            if "rng" in named:
                raise ConfigError("rng is given twice")
            named["rng"] = Rng()
        self._model, self._optimizer = model, optimizer
        self._members = Members(named) if named else None
        if model is None and optimizer is not None:
            raise ConfigError("TrainState(optimizer=...) needs model= as well: optimizer state is stored by parameter name")
        if model is not None and not (hasattr(model, "named_parameters") and hasattr(model, "state_dict")):
            raise ConfigError(f"TrainState(model=...) takes a torch module (plain, DDP or FSDP), not {type(model).__name__}")
        if type(model).__module__.partition(".")[0] == "deepspeed":
            raise ConfigError("TrainState cannot save a DeepSpeed engine (it shards its optimizer state in its own way): use "
                              "manager.saving(step) and engine.save_checkpoint(files.path, save_latest=False) in the block")
        if model is None and not named:
            raise ConfigError("TrainState holds nothing: give it a model, or members")

    def _parts(self) -> dict[str, Payload]:
        parts: dict[str, Payload] = {}
        if self._model is not None:
            if self.collective:
                parts["model"] = DCP(self._model, self._optimizer)
            else:
                parts["model"] = Shards(self._model, name="model")
                if self._optimizer is not None:
                    parts["optimizer"] = Shards(self._optimizer, name="optimizer")
        if self._members is not None:
            parts["members"] = self._members
        return parts

    @property
    def collective(self) -> bool:
        return self._model is not None and (dist.is_initialized() or alone())

    @property
    def members(self) -> list[str]:
        return [*(["model"] if self._model is not None else []), *(["optimizer"] if self._optimizer is not None else []),
                *(self._members.members if self._members else [])]

    parts = members

    def check(self) -> None:
        for part in self._parts().values():
            part.check()

    def write(self, files: RankFiles, ranks: Ranks) -> None:
        for part in self._parts().values():
            part.write(files, ranks)

    def live(self) -> Live:
        return joined(live_of(part) for part in self._parts().values())

    def tree(self) -> Any:
        return {name: stageable(part).tree() for name, part in self._parts().items()}

    def of(self, tree: Any) -> Payload:
        staged = {name: stageable(part).of(tree[name]) for name, part in self._parts().items()}
        return Parts(staged, self.collective, self.members)

    def load(self, checkpoint: Checkpoint, ranks: Ranks) -> None:
        for name, part in self._parts().items():
            if ranks.only is None or name == "members" or set(getattr(part, "parts", [name])) & set(ranks.only):
                part.load(checkpoint, ranks)
