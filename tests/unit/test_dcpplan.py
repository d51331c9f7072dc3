"""DCP's plans kept from save to save: what is written is what DCP without any cache would write, whatever changes in between."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

import distckpt
from distckpt.errors import SaveError
from distckpt.manager import CheckpointManager
from distckpt.payloads.dcpplan import AsBefore, Kept, Planner

State = dict[str, Any]


def save(planners: list[Any], states: list[State]) -> tuple[list[SavePlan], list[SavePlan], Any]:
    """As DCP's save drives them, with everything pickled on its way: what the ranks sent, what each writes, the metadata."""
    sent = []
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        planner.set_up_planner(state_dict=state, storage_meta=None, is_coordinator=rank == 0)
        sent.append(pickle.loads(pickle.dumps(planner.create_local_plan())))
    plans, metadata = planners[0].create_global_plan(sent)
    plans = FileSystemWriter("/nowhere").prepare_global_plan(plans)
    return sent, [p.finish_plan(pickle.loads(pickle.dumps(plan))) for p, plan in zip(planners, plans, strict=True)], metadata


class Job:
    """The ranks of one manager. ``save`` compares with DCP without a cache; what that refuses is refused, and forgotten."""

    def __init__(self, world: int = 2) -> None:
        self.kept: list[Kept | None] = [None] * world

    def save(self, *states: State) -> list[SavePlan]:
        planners = [Planner(kept) for kept in self.kept]
        try:
            _, expected, without = save([DefaultSavePlanner() for _ in states], list(states))
        except AssertionError:  # a tensor on one rank, a number under the same name on another
            with pytest.raises(AssertionError):
                save(planners, list(states))
            self.kept = [None] * len(states)
            return []
        sent, written, metadata = save(planners, list(states))
        assert [(p.items, [i.index.index for i in p.items], p.storage_data) for p in written] == [
            (p.items, [i.index.index for i in p.items], p.storage_data) for p in expected]
        assert metadata == without
        self.kept = [planner.kept for planner in planners]
        return sent


def plain(count: int = 3) -> State:
    return {"net": {"w": torch.ones(4, 2), "b": torch.ones(count)}, "n": 5}


def test_what_has_not_changed_is_neither_sent_nor_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    assert not [p for p in job.save(plain(), plain()) if isinstance(p, AsBefore)]
    planned: list[int] = []
    real = Planner._create_global_plan
    monkeypatch.setattr(Planner, "_create_global_plan", lambda self, plans: (planned.append(1), real(self, plans))[1])
    for _ in range(3):
        assert [type(p) for p in job.save(plain(), plain())] == [AsBefore, AsBefore]
    assert not planned
    assert [type(p) for p in job.save(plain(), {**plain(), "more": torch.ones(9)})] == [AsBefore, SavePlan]
    assert planned == [1]
    assert [type(p) for p in job.save(plain(), {**plain(), "more": torch.ones(9)})] == [AsBefore, AsBefore]


CHANGES: dict[str, Callable[[], State]] = {
    "a shape": lambda: plain(4),
    "another name": lambda: {**plain(), "new": torch.ones(2)},
    "a name less": lambda: {"net": plain()["net"]},
    "the order": lambda: dict(reversed(plain().items())),
    # torch's own comparison sees neither of these
    "the type of numbers": lambda: {**plain(), "net": {"w": torch.ones(4, 2, dtype=torch.bfloat16), "b": torch.ones(3)}},
    "the nesting of the same names": lambda: {"net.w": torch.ones(4, 2), "net.b": torch.ones(3), "n": 5},
    "a value in the place of a tensor": lambda: {**plain(), "net": {"w": 7, "b": torch.ones(3)}},
}


@pytest.mark.parametrize("where", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("what", CHANGES)
def test_a_state_that_changed_is_planned_anew(what: str, where: tuple[int, ...]) -> None:
    job = Job()
    job.save(plain(), plain())
    for _ in range(2):
        job.save(*(CHANGES[what]() if rank in where else plain() for rank in range(2)))
    job.save(plain(), plain())


def test_a_rank_that_forgot_is_planned_for_and_a_rank_0_that_forgot_refuses_once() -> None:
    """A collective that ended on some ranks only is what makes such a thing. Nothing stale is written in any case."""
    job = Job(3)
    job.save(plain(), plain(), plain())
    job.kept[2] = None
    assert [type(p) for p in job.save(plain(), plain(), plain())] == [AsBefore, AsBefore, SavePlan]
    older = job.kept[1]
    job.save(plain(), plain(), plain(7))
    for forgotten in (0, 1):
        if forgotten == 0:
            job.kept[0] = None
        else:
            job.kept[1] = older
        with pytest.raises(RuntimeError, match="the next save plans anew"):
            job.save(plain(), plain(), plain(7))
        job.kept = [None] * 3
        job.save(plain(), plain(), plain(7))


NAMES = st.sampled_from(["a", "b.c", "d"])
VALUES = st.builds(lambda size, dtype: torch.ones(size, dtype=dtype), st.integers(1, 3),
                   st.sampled_from([torch.float32, torch.bfloat16])) | st.integers(0, 1)
NESTED = st.fixed_dictionaries({"b": st.dictionaries(st.just("c"), VALUES, min_size=1)})
STATES = st.dictionaries(NAMES, VALUES, max_size=3) | NESTED


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(STATES, STATES, STATES, st.sampled_from([None, 1, 2])), min_size=2, max_size=6))
def test_whatever_changes_what_is_written_is_what_dcp_would_write(saves: list[Any]) -> None:
    job = Job(3)
    for *states, forgets in saves:
        job.save(*states)
        job.save(*states)
        if forgets is not None:
            job.kept[forgets] = None


# -- through a manager ---------------------------------------------------------------------------------------------------


def _planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    planned: list[int] = []
    real = Planner._create_global_plan
    monkeypatch.setattr(Planner, "_create_global_plan", lambda self, plans: (planned.append(1), real(self, plans))[1])
    return planned


def test_roots_kinds_of_saves_and_parts_have_plans_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = _planned(monkeypatch)
    shapes = {"a": 3, "b": 5}
    managers = {name: CheckpointManager(tmp_path / name, dedup="link" if name == "b" else None) for name in shapes}
    for step in (1, 2, 3):
        for name, manager in managers.items():
            state = {"t": torch.full((shapes[name],), float(step))}
            both = {"one": distckpt.DCP(state=state), "two": distckpt.DCP(state={"n": step, "u": torch.ones(step)})}
            manager.save(step, both, background=step == 2)
            manager.wait()
    for name, manager in managers.items():
        manager.close()
        for step in (1, 2, 3):
            fresh: State = {"t": torch.zeros(shapes[name])}
            dcp.load(fresh, checkpoint_id=tmp_path / name / f"step-{step}" / "one")
            assert torch.equal(fresh["t"], torch.full((shapes[name],), float(step)))
            fresh = {"n": 0, "u": torch.zeros(step)}
            dcp.load(fresh, checkpoint_id=tmp_path / name / f"step-{step}" / "two")
            assert fresh["n"] == step and float(fresh["u"].sum()) == step
    assert len(planned) == 2 * (1 + 3), "the first parts once, the second ones, which grow, each time"


def test_a_save_that_failed_leaves_no_plan_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = _planned(monkeypatch)

    def broken(self: Any, plan: Any, planner: Any) -> Any:
        raise ValueError("a bug in the writer")

    with CheckpointManager(tmp_path) as manager:
        manager.save(1, distckpt.DCP(state={"t": torch.ones(3)}))
        with monkeypatch.context() as patch:
            patch.setattr(FileSystemWriter, "write_data", broken)
            with pytest.raises(SaveError, match="a bug in the writer"):
                manager.save(2, distckpt.DCP(state={"t": torch.ones(4)}))
        assert len(planned) == 2
        for step in (2, 3):
            manager.save(step, distckpt.DCP(state={"t": torch.full((4,), 7.0, dtype=torch.bfloat16)}))
        assert len(planned) == 3
    fresh = {"t": torch.zeros(4)}
    dcp.load(fresh, checkpoint_id=tmp_path / "step-3")
    assert torch.equal(fresh["t"], torch.full((4,), 7.0))
    assert FileSystemReader(tmp_path / "step-3").read_metadata().state_dict_metadata["t"].properties.dtype == torch.bfloat16
