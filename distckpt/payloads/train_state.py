"""The short way: everything a training loop holds, and the payload for each part."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from distckpt.checkpoint import Checkpoint
from distckpt.coordination.bootstrap import alone
from distckpt.errors import ConfigError
from distckpt.payloads import kinds
from distckpt.payloads.base import Parts, Payload, Ranks, stageable
from distckpt.payloads.dcp import DCP
from distckpt.payloads.live import Live, joined, live_of
from distckpt.payloads.members import Member, Members
from distckpt.payloads.rng import Rng
from distckpt.payloads.shards import Shards
from distckpt.saving.files import RankFiles


class TrainState:
    """All of a loop's state as one payload: ``TrainState(model=..., optimizer=..., scheduler=..., loader=..., rng=True)``.

    The model (plain, DDP, FSDP1 or FSDP2) and the optimizer, or a list of them, go through DCP, which reshards on load; so do
    further modules and dicts of DTensors (an average of the weights, say); several ranks without a torch process group (an MPI
    program, srun) each write their own shard. A framework's engine as the model goes through its own payload. ``rng=True``
    adds this rank's random states. Schedulers and GradScalers are the same on all ranks and are taken from rank 0 at another
    world size; every other keyword is a per-rank member: an object with ``state_dict`` and ``load_state_dict``, a dict of JSON
    values that is updated in place on load, or ``Member(value, on_world_change=...)``. ConfigError for anything else.
    """

    def __init__(self, *, model: Any = None, optimizer: Any = None, scheduler: Any = None, loader: Any = None,
                 rng: bool = False, **members: Any) -> None:
        given: dict[str, Any] = {**members, "loader": loader, "scheduler": scheduler}
        named: dict[str, Any] = {name: value for name, value in given.items() if value is not None or name in members}
        if rng:
            if "rng" in named:
                raise ConfigError("rng is given twice")
            named["rng"] = Rng()
        engines = [name for name, value in named.items() if kinds.engine_of(value) is not None]
        if engines:
            raise ConfigError(f"TrainState({engines[0]}=...): a {type(named[engines[0]]).__name__} goes under model=; several "
                              'of them into a mapping of payloads, {"actor": engine, "critic": other, "rest": TrainState(...)}')
        self._engine = kinds.engine_of(model)
        self._model = model if self._engine is None else None
        self._optimizer = optimizer
        if model is None and optimizer is not None:
            raise ConfigError("TrainState(optimizer=...) needs model= as well: optimizer state is stored by parameter name")
        if self._engine is not None and optimizer is not None:
            raise ConfigError(f"TrainState(optimizer=...): a {type(model).__name__} saves its optimizer itself; leave it out")
        if self._model is not None:
            kinds.check_module(model, "TrainState(model=...)")
        kinds.check_optimizers(optimizer, "TrainState(optimizer=...)")
        self._sharded = {name: value for name, value in named.items() if kinds.is_sharded(value)}
        self._own = {name: _with_rule(name, value) for name, value in named.items() if name not in self._sharded}
        Members(self._own)  # it refuses what is none
        if model is None and not named:
            raise ConfigError("TrainState holds nothing: give it a model, or members")

    def _parts(self) -> dict[str, Payload]:
        parts: dict[str, Payload] = {}
        own = dict(self._own)
        if self._engine is not None:
            parts["engine"] = self._engine
        if self._by_dcp():
            parts["model"] = DCP(self._model, self._optimizer, state=self._sharded)
        else:
            own |= self._sharded
            if self._model is not None:
                parts["model"] = Shards(self._model, name="model")
            several = isinstance(self._optimizer, (list, tuple))
            for index, optimizer in enumerate(self._optimizer if several else [self._optimizer]):
                if optimizer is not None:
                    name = f"optimizer-{index}" if several else "optimizer"
                    parts[name] = Shards(optimizer, name=name)
        if own:
            parts["members"] = Members(own)
        return parts

    def _by_dcp(self) -> bool:
        return (self._model is not None or bool(self._sharded)) and (dist.is_initialized() or alone())

    @property
    def collective(self) -> bool:
        return self._by_dcp() or self._engine is not None and self._engine.collective

    @property
    def members(self) -> list[str]:
        return [*(["model"] if self._model is not None or self._engine is not None else []),
                *(["optimizer"] if self._optimizer is not None else []), *sorted([*self._own, *self._sharded])]

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
        return Parts(staged, any(part.collective for part in staged.values()), self.members)

    def load(self, checkpoint: Checkpoint, ranks: Ranks) -> None:
        for name, part in self._parts().items():
            if ranks.only is None or name == "members" or set(getattr(part, "parts", [_keyword(name)])) & set(ranks.only):
                part.load(checkpoint, ranks)


def _with_rule(name: str, value: Any) -> Member:
    if isinstance(value, Member):
        return value
    return Member(value, on_world_change="rank0" if name == "scheduler" or kinds.is_alike(value) else "error")


def _keyword(part: str) -> str:
    """The keyword of ``TrainState`` that a part is of."""
    return {"engine": "model"}.get(part, part.partition("-")[0])
