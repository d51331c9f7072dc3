"""DCP's save plan, sent and made again only when it has changed since the save before.

Rank 0's planning is what grows in DCP with ranks and tensors. torch's own cache (``enable_plan_caching``, 2.13) is not used: it
belongs to the class, so to every manager and group of the process, and a rank 0 that has no plans takes "as before" for a plan
of nothing, so that the metadata lacks that rank's tensors; it compares neither dtypes nor the nesting of names, and commits the
old ones; and it outlives a save that failed on some ranks.

Here each manager keeps its own (``Ranks.kept``), and why no stale plan is ever written (tests/unit/test_dcpplan.py,
tests/ranks/test_dcp_plans.py):

* *Equal means equal.* A rank compares its whole plan, made anew for each save, with ``==``. A plan holds no data: what is written
  is looked up in the state of this save.
* *All or none.* When one rank's plan has changed, or one does not know the last, all are planned anew, and every rank is sent its
  plan.
* *The same save.* "As before" carries the number of the save in which rank 0 made the plan. Rank 0 refuses another one on every
  rank, and the next save plans anew.
* *Nothing survives a failure.* What is kept is taken out at the begin and put back by a save that DCP ended well.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from distckpt.coordination.collector import held_off


@dataclass(frozen=True)
class AsBefore(SavePlan):
    """In the place of a plan, to rank 0 and back: the one of the save ``number``."""

    number: str = ""


@dataclass(frozen=True)
class Kept:
    """Of the last save: what this rank planned and what it was told to write. On rank 0 all plans and the metadata as well,
    pickled: a million objects would be a burden to each run of the garbage collector."""

    number: str
    local: SavePlan
    final: SavePlan
    plans: bytes
    metadata: bytes


class Planner(DefaultSavePlanner):
    """Of one save; ``before`` is what the one before it kept, ``kept`` what this one does."""

    def __init__(self, before: Kept | None) -> None:
        super().__init__()
        self._before = before
        self._plans = self._metadata = b""
        self.kept: Kept | None = None

    def create_local_plan(self) -> SavePlan:
        self._local = super().create_local_plan()
        before = self._before
        return AsBefore([], number=before.number) if before is not None and before.local == self._local else self._local

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        tensors = max(sum(len(plan.items) for plan in all_plans), len(self._before.metadata) >> 7 if self._before else 0)
        with held_off(tensors):
            return self._create(all_plans)

    def _create(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        before = self._before
        unknown = [rank for rank, plan in enumerate(all_plans)
                   if isinstance(plan, AsBefore) and (before is None or not before.plans or plan.number != before.number)]
        if unknown:
            raise RuntimeError(f"ranks {unknown} plan as in a save that this rank 0 does not know; the next save plans anew")
        if before is not None and all(isinstance(plan, AsBefore) for plan in all_plans):
            self._plans, self._metadata = before.plans, before.metadata
            self.metadata = pickle.loads(before.metadata)
            return all_plans, self.metadata
        last = pickle.loads(before.plans) if before is not None and before.plans else all_plans
        whole = [last[rank] if isinstance(plan, AsBefore) else plan for rank, plan in enumerate(all_plans)]
        plans, metadata = super().create_global_plan(whole)
        self._plans, self._metadata = pickle.dumps(whole), pickle.dumps(metadata)
        number = uuid4().hex
        return [replace(plan, planner_data=number) for plan in plans], metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if isinstance(new_plan, AsBefore):
            assert self._before is not None
            # where to is the storage writer's word, of this save as of every other
            self.plan, number = replace(self._before.final, storage_data=new_plan.storage_data), new_plan.number
        else:
            self.plan, number = super().finish_plan(new_plan), new_plan.planner_data
        self.kept = Kept(number, self._local, self.plan, self._plans, self._metadata)
        return self.plan


@contextmanager
def planning(kept: MutableMapping[Any, Any], name: str) -> Iterator[Planner]:
    """The planner of one save of what is called ``name``. It is kept in ``kept`` when the block ends well."""
    planner = Planner(kept.pop((Planner, name), None))
    yield planner
    kept[Planner, name] = planner.kept
