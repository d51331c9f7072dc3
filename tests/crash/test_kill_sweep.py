"""SIGKILL at every operation that writes or orders, of either rank, of real processes that save.

Each sweep runs the same program again and again on the same root, kills one rank before its n-th operation, and starts
the program anew with all ranks: exactly one of the old newest and the new one is newest, whole, bit by bit; nothing
partial is to be seen; nothing had to be done by hand; the next save works; and what the dead attempt took is given back.
A sweep ends with the first n that is beyond the last operation; below it, every kill must have happened.
"""

from __future__ import annotations

import importlib
import itertools
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import distckpt
from distckpt import catalog
from distckpt.durable import REAL
from distckpt.layout import Layout
from distckpt.options import Seams, Timeouts
from distckpt.testing.faults import FaultyFiles, kill
from tests.crash.forks import Ended, Place, alone, group, zygote
from tests.onerank import quick_folder, unclean

OLD, NEW, NEXT = 2.0, 3.0, 9.0
WIDE = 20_000
"""Numbers in a tensor. Smaller ones are gathered into one write, and nobody could be killed in the middle of a file."""
PROMPT = 8.0
"""Seconds after which a rank that was left behind must have ended, the other one's whole life included."""


@dataclass(frozen=True)
class Case:
    """What is killed. ``first``: the save is the first of its root. ``begin``: only the save's operations and those after
    it are counted, not the start's. ``every``: only each so many-th operation."""

    world: int
    victim: int = 0
    step: int = 3
    rule: str = "error"
    first: bool = False
    begin: bool = True
    payload: str = "shards"
    every: int = 1


@dataclass
class Found:
    """What the sweep of one case found: ``newest`` per n, and how long the longest survivor took."""

    newest: list[float | None] = field(default_factory=list)
    ends: dict[str, int] = field(default_factory=dict)
    slowest: float = 0.0


def _state(value: float, place: Place) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(int(value) * 100 + place.rank)
    return {"w": torch.rand(WIDE, generator=generator), "value": torch.tensor(value)}


class _Sharded:
    """One tensor over the ranks, as FSDP2 holds its parameters, for DCP."""

    def __init__(self, value: float, place: Place) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = init_device_mesh("cpu", (place.world,))
        mine = _state(value, place)
        self.tensor = DTensor.from_local(mine["w"], mesh, [Shard(0)])
        self.value = mine["value"].clone()

    @property
    def payload(self) -> distckpt.DCP:
        return distckpt.DCP(state={"w": self.tensor, "value": self.value})

    def local(self) -> dict[str, torch.Tensor]:
        return {"w": self.tensor.to_local(), "value": self.value}


def _manager(place: Place, root: str, case: Case, files: FaultyFiles | None = None) -> distckpt.CheckpointManager:
    torch.set_num_threads(1)
    seams = Seams(files=files or REAL)
    if case.payload == "dcp":
        place.gloo()
    elif place.world > 1:
        seams = Seams(files=files or REAL, bootstrap=place.bootstrap())
    return distckpt.CheckpointManager(root, keep_last=2, seams=seams, timeouts=Timeouts(arrive=20, progress=20, close=20))


def _save(manager: distckpt.CheckpointManager, place: Place, step: int, value: float, case: Case, rule: str = "error") -> None:
    payload = _Sharded(value, place).payload if case.payload == "dcp" else distckpt.Shards(_state(value, place))
    manager.save(step, payload, meta={"value": value}, on_exists=rule)


def _load(manager: distckpt.CheckpointManager, place: Place, case: Case) -> float | None:
    """The value resumed from, once every byte of it was compared."""
    found = manager.resume(verify="digest")
    assert not found.skipped, found.skipped
    if found.checkpoint is None:
        return None
    value = float(found.checkpoint.meta["value"])
    if case.payload == "dcp":
        holder = _Sharded(0.0, place)
        assert manager.restore(holder.payload) == found.checkpoint.step
        loaded = holder.local()
    else:
        loaded = {"w": torch.zeros(WIDE), "value": torch.zeros(())}
        assert manager.restore(distckpt.Shards(loaded)) == found.checkpoint.step
    wanted = _state(value, place)
    assert all(torch.equal(loaded[name], wanted[name]) for name in wanted), f"not the bytes of {value}"
    return value


# -- the ranks' programs --------------------------------------------------------------------------------------------------

def _prepare(place: Place, root: str, case: Case) -> list[str]:
    """A root with the steps 1 and 2; the modules that it took to save and load."""
    with _manager(place, root, case) as manager:
        for step in (1, 2):
            _save(manager, place, step, float(step), case)
        _load(manager, place, case)
    return sorted(sys.modules)


def _victim(place: Place, root: str, case: Case, n: int) -> int:
    """Start, save and end, with the ``n``-th operation of the victim its last; how many operations there were."""
    files = FaultyFiles(REAL)
    if place.rank == case.victim and not case.begin:
        files.faults.append(kill(n))
    with _manager(place, root, case, files) as manager:
        _load(manager, place, case)
        if place.rank == case.victim and case.begin:
            files.faults.append(kill(n))
        _save(manager, place, case.step, NEW, case, case.rule)
        os.close(os.open(f"{root}.acked", os.O_CREAT | os.O_WRONLY))
    return files.count


def _restart(place: Place, root: str, case: Case) -> float | None:
    """The same program started again: no hand work, and the next save works."""
    with _manager(place, root, case) as manager:
        value = _load(manager, place, case)
        _save(manager, place, 9, NEXT, case)
    return value


# -- the sweep, in the zygote ---------------------------------------------------------------------------------------------

def _all_ranks(case: Case, target: Any, *args: Any) -> list[Ended]:
    if case.world == 1:
        return [alone(target, Place(0, 1, 0, -1), *args)]
    return group(case.world, target, *args)


def _values(ends: list[Ended]) -> list[Any]:
    assert all(end.ok for end in ends), "\n".join(map(str, ends))
    return [end.value for end in ends]


def _made(case: Case, folder: Path) -> Path:
    template = folder / "template"
    for module in _values(_all_ranks(case, _prepare, str(template), case))[0]:
        with suppress(Exception):
            importlib.import_module(module)  # once, here, and not again in every rank
    return template


def sweep(case: Case, folder: str) -> Found:
    if case.payload == "dcp":
        pass  # once, and not in every rank
    found = Found()
    template = _made(case, Path(folder))
    for n in itertools.count(1, case.every):
        root = Path(folder) / f"n{n}"
        if not case.first:
            shutil.copytree(template, root)
        ends = _all_ranks(case, _victim, str(root), case, n)
        killed = ends[case.victim].killed == signal.SIGKILL
        _judge_survivors(case, n, ends, killed, found)
        newest = judge(case, str(root), f"{case} n={n}:\n" + "\n".join(map(str, ends)))
        if os.path.exists(f"{root}.acked"):
            assert newest == NEW, f"{case} n={n}: save() had returned, and {newest} was resumed from"
            os.unlink(f"{root}.acked")
        shutil.rmtree(root)
        if not killed:
            operations = _values(ends)[case.victim]
            assert case.begin or operations < n <= operations + case.every, "every operation had its kill"
            return found
        found.newest.append(newest)
    raise AssertionError("the loop has no other end")


def _judge_survivors(case: Case, n: int, ends: list[Ended], killed: bool, found: Found) -> None:
    """Whoever was left behind learned of it and ended, within the limit and with an error that names it."""
    for rank, end in enumerate(ends):
        if rank == case.victim:
            continue
        found.slowest = max(found.slowest, end.seconds)
        assert end.seconds < PROMPT, f"{case} n={n}: rank {rank} took {end.seconds:.1f} s\n{end}"
        expected = ("CoordinatorLost", "") if case.victim == 0 else ("RankLost", "SaveError")
        if not killed:
            expected = ("",)
        assert end.error in expected, f"{case} n={n}: rank {rank} ended with {end}"
        found.ends[end.error] = found.ends.get(end.error, 0) + 1


def judge(case: Case, root: str, story: str) -> float | None:
    """What a reader sees, then what a restart makes of it."""
    layout = Layout.at(root)
    try:
        _all_whole(layout)
        values = set(_values(_all_ranks(case, _restart, root, case)))
        assert len(values) == 1, f"the ranks resumed from different checkpoints: {values}"
        newest = values.pop()
        assert newest in ((None, NEW) if case.first else (OLD, NEW)), newest
        names = _all_whole(layout)
        older = {None: [], OLD: ["step-2"], NEW: [f"step-{case.step}"]}[newest]
        assert names == sorted(["step-9", *older]), names
        assert not unclean(REAL, layout), unclean(REAL, layout)
        latest = distckpt.open(root).latest()
        assert latest is not None and latest.step == 9
    except AssertionError as error:
        raise AssertionError(f"{error}\n--- {story}") from error
    return newest


def _all_whole(layout: Layout) -> list[str]:
    """The checkpoints in the root. Whatever has a checkpoint's name is one, to the last byte."""
    if not os.path.isdir(layout.root):
        return []
    names = sorted(set(os.listdir(layout.root)) - {".distckpt", "latest"})
    for name in names:
        marker = catalog.read_marker(REAL, layout.final(name))
        problems = catalog.check_files(REAL, layout.final(name), marker.files, digest=True)
        assert not problems and not catalog.strangers(REAL, layout.final(name), [f.path for f in marker.files]), (name, problems)
    return names


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[str]:
    with quick_folder(tmp_path) as made:
        yield str(made)


CASES = {
    "one rank: its whole life, the takeover and the rotation included": Case(1, begin=False),
    "one rank: the first save of a root": Case(1, first=True, begin=False, step=1),
    "one rank: a replace": Case(1, rule="replace", step=2),
    "two ranks: rank 0 in a save that rotates": Case(2),
    "two ranks: rank 1 in a save that rotates": Case(2, victim=1, begin=False),
    "two ranks: rank 0 in a replace": Case(2, rule="replace", step=2),
    "two ranks: rank 1 in a replace": Case(2, victim=1, rule="replace", step=2),
    "two ranks: rank 0 in the first save of a root": Case(2, first=True, begin=False, step=1),
    "two ranks: rank 0 with DCP": Case(2, payload="dcp", every=2),
    "two ranks: rank 1 with DCP": Case(2, victim=1, payload="dcp", begin=False),
}


@pytest.mark.parametrize("name", CASES)
def test_a_kill_at_any_operation_leaves_the_old_or_the_new(name: str, folder: str) -> None:
    case = CASES[name]
    found: Found = zygote(sweep, case, folder)
    old, count = None if case.first else OLD, len(found.newest)
    print(f"{name}: {count} kills; ends of the others {found.ends}, the slowest after {found.slowest:.2f} s")
    first = found.newest.index(NEW) if NEW in found.newest else count
    assert found.newest == [old] * first + [NEW] * (count - first), "once committed, it stays"
    assert first * case.every > 6 and (count > first) == (case.victim == 0), "an open, three writes, syncs and a close"


# -- kills during the recovery from a kill --------------------------------------------------------------------------------

@dataclass(frozen=True)
class Left:
    """A dead process's leftovers: what it was killed before, and what every later start must find newest."""

    op: str
    path: str
    newest: float
    step: int = 3
    rule: str = "error"


LEFT = {
    "a half-written attempt": Left("fsync", "shard.rank-00000", OLD),
    "an attempt that is committed and not published": Left("rename", "/step-3", NEW),
    "the old half of a replace under a valid marker in staging": Left("rename", "/trash/", NEW, step=2, rule="replace"),
    "a half-deleted checkpoint in trash": Left("rmdir", "/trash/", NEW),
}


def _die_at(place: Place, root: str, case: Case, left: Left) -> None:
    files = FaultyFiles(REAL)
    with _manager(place, root, case, files) as manager:
        manager.resume()
        files.faults.append(kill(op=left.op, path=left.path))
        _save(manager, place, left.step, NEW, case, left.rule)


def _only_start(place: Place, root: str, case: Case, n: int) -> int:
    files = FaultyFiles(REAL, kill(n))
    with _manager(place, root, case, files) as manager:
        manager.resume()
    return files.count


def recovery_sweep(left: Left, folder: str) -> int:
    """How many kills there were."""
    case = Case(1, step=left.step, rule=left.rule)
    place, template = Place(0, 1, 0, -1), _made(case, Path(folder))
    end = alone(_die_at, place, str(template), case, left)
    assert end.killed == signal.SIGKILL, end
    for n in itertools.count(1):
        root = Path(folder) / f"n{n}"
        shutil.copytree(template, root)
        end = alone(_only_start, place, str(root), case, n)
        newest = judge(case, str(root), f"{left} n={n}:\n{end}")
        assert newest == left.newest, f"{left} n={n}: {newest}"
        shutil.rmtree(root)
        if not end.killed:
            assert end.ok and n == end.value + 1, end
            return n - 1
    raise AssertionError("the loop has no other end")


@pytest.mark.parametrize("name", LEFT)
def test_a_kill_at_any_operation_of_the_recovery_is_recovered_from(name: str, folder: str) -> None:
    count = zygote(recovery_sweep, LEFT[name], folder)
    print(f"{name}: {count} kills")
    assert count > 60
