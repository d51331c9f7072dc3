"""Per-rank state as first-class members: RNG, a data loader, a scheduler, counters.

Nothing here is taken for replicated by guess (FIELD_CASES B134): each rank saves its own and loads its own. At another
number of ranks each member follows its rule.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from distckpt.checkpoint import Checkpoint
from distckpt.errors import ConfigError, MemberMissing, WorldMismatch
from distckpt.layout import rank_name
from distckpt.payloads import kinds, loadable, torchfile
from distckpt.payloads.base import Ranks
from distckpt.payloads.live import Live, of_value
from distckpt.payloads.rng import Rng
from distckpt.saving.files import RankFiles

log = logging.getLogger(__name__)

_FILE = "members.pt"
Rule = str | Callable[[list[Any]], Any]


class Member:
    """A member with its rule for another number of ranks.

    ``on_world_change``: "error" (default), "rank0" (every rank takes rank 0's state: right for what is the same on all),
    "drop" (start without), or a function from the old states, by old rank, to this rank's new one.
    """

    def __init__(self, value: Any, on_world_change: Rule = "error") -> None:
        if not callable(on_world_change) and on_world_change not in ("error", "rank0", "drop"):
            raise ConfigError(f"on_world_change must be 'error', 'rank0', 'drop' or a function, not {on_world_change!r}")
        self.value, self.rule = value, on_world_change


class _Frozen:
    """A member's state, copied."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state: Any) -> None:
        raise ConfigError("a staged copy is written, not loaded into")


class Members:
    """A payload of named per-rank members, one file per rank."""

    collective = False

    def __init__(self, members: Mapping[str, Any]) -> None:
        self._members: dict[str, Member] = {}
        for name, value in members.items():
            member = value if isinstance(value, Member) else Member(value)
            inner = member.value
            lacks = kinds.lacking(inner, ("state_dict", "load_state_dict"))
            if lacks and not isinstance(inner, dict):
                raise ConfigError(f"member {name!r} is a {type(inner).__name__}, which lacks {lacks}: give it both, or save a "
                                  "dict of JSON values, which is updated in place on load")
            self._members[name] = member

    @property
    def members(self) -> list[str]:
        return sorted(self._members)

    parts = members

    def _states(self) -> dict[str, Any]:
        return {name: m.value if isinstance(m.value, dict) else m.value.state_dict() for name, m in self._members.items()}

    def check(self) -> None:
        for name, state in self._states().items():
            loadable.check(state, name)

    def write(self, files: RankFiles, ranks: Ranks) -> None:
        files.note("members", self.members)
        with files.writer(_FILE) as out:
            torchfile.write(self._states(), out)

    def live(self) -> Live:
        """All of it may change at any time (a loader's position does, in the forward pass), so nothing is left for later. Of
        other objects nothing is asked before a save: their ``state_dict`` may be slow."""
        known = [of_value(m.value) for m in self._members.values() if isinstance(m.value, (dict, torch.nn.Module, Rng))]
        return Live(moving=[t for part in known for t in (*part.steady, *part.moving)])

    def tree(self) -> Any:
        return self._states()

    def of(self, tree: Any) -> Members:
        return Members({name: _Frozen(state) for name, state in tree.items()})

    def load(self, checkpoint: Checkpoint, ranks: Ranks) -> None:
        wanted = [n for n in self._members if ranks.only is None or n in ranks.only]
        if not wanted:
            return
        same = checkpoint.world == ranks.world
        readers = [ranks.rank] if same else list(range(checkpoint.world))
        missing_files = [rank_name(_FILE, r, checkpoint.world) for r in readers
                         if not checkpoint.has(rank_name(_FILE, r, checkpoint.world))]
        if missing_files:
            self._lacking(checkpoint, wanted, ranks)
            return
        states = [torchfile.read(checkpoint, checkpoint.name_of(_FILE, rank=r)) for r in readers]
        lacking = [n for n in wanted if any(n not in s for s in states)]
        if lacking:
            self._lacking(checkpoint, lacking, ranks)
        for name in wanted:
            if name in lacking:
                continue
            if same:
                self._put(name, states[0][name])
            else:
                self._convert(name, [s[name] for s in states], checkpoint, ranks)

    def _lacking(self, checkpoint: Checkpoint, names: list[str], ranks: Ranks) -> None:
        text = (f"{checkpoint.name} has no state for {', '.join(sorted(names))} (it has: "
                f"{', '.join(checkpoint.marker.payload.get('members', [])) or 'no members'})")
        if ranks.strict:
            raise MemberMissing(f"{text}; resuming without would repeat or skip data or random numbers: leave it out of the "
                                "state, or pass strict=False to go on with what it has now", step=checkpoint.step,
                                members=sorted(names))
        log.warning("%s; going on with what it has now (strict=False)", text)

    def _put(self, name: str, state: Any) -> None:
        value = self._members[name].value
        if isinstance(value, dict):
            loadable.fill(value, state, name)
        else:
            value.load_state_dict(state)

    def _convert(self, name: str, states: list[Any], checkpoint: Checkpoint, ranks: Ranks) -> None:
        member = self._members[name]
        if isinstance(member.value, Rng) and member.rule == "error":
            member.value.reseed(states, ranks.rank, ranks.world)
        elif member.rule == "rank0":
            self._put(name, states[0])
        elif member.rule == "drop":
            log.warning("member %s starts anew: saved by %d ranks, loaded by %d", name, checkpoint.world, ranks.world)
        elif callable(member.rule):
            self._put(name, member.rule(states))
        else:
            raise WorldMismatch(f"{checkpoint.name} was saved by {checkpoint.world} ranks and is loaded by {ranks.world}: the "
                                f"per-rank member {name!r} has no rule for that; give one with Member({name}, "
                                "on_world_change='rank0' | 'drop' | function of the old states)", step=checkpoint.step,
                                saved=checkpoint.world, now=ranks.world)
