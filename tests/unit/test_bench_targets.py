"""Every target of issue 7 that ``scripts/bench`` holds, without measuring: one that is deleted or loosened is red here."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks import (
    background,
    coordination,
    digest,
    frameworks,
    link,
    loop,
    memory,
    reading,
    rotation,
    save,
    simulated,
    small,
    startup,
)
from scripts.benchmarks.report import DISK, LATENCY, Row, missed

MB = 1 << 20
Wanted = dict[str, tuple[float | None, float | None, int]]


def held(rows: Iterable[Row]) -> Wanted:
    """{name: (target, limit, least)} of the rows that have one. Every row with figures has the rounds it asks for."""
    rows = list(rows)
    assert not [why for why in missed(rows) if "rounds, at least" in why], "a full run that makes too few rounds"
    promised = [row for row in rows if row.target is not None or row.limit is not None]
    assert len({row.name for row in promised}) == len(promised), "two rows of one name"
    return {row.name: (row.target, row.limit, row.least) for row in promised}


def same(*names: str, rounds: int = DISK) -> dict[str, Any]:
    return {name: [(1.0,) * 5] * rounds for name in names}


def alike(*names: str, rounds: int = DISK) -> dict[str, list[float]]:
    return {name: [1.0] * rounds for name in names}


@pytest.mark.parametrize(("world", "plain"), [(1, 0.85), (2, 1.05), (4, 1.05)])
def test_durable_saves(world: int, plain: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def ranks(target: Any, place: str, size: int, turns: int, world: int) -> Any:
        assert size == 512 * MB
        return same("Shards", "DCP", "write", "write, unsynced", "torch.save", "dcp.save", "dcp.save, plan cache",
                    "dcp.save, unsynced", rounds=turns)

    monkeypatch.setattr(save, "ranks", ranks)
    where = f"512 MB, {world} rank{'s' if world > 1 else ''}"
    assert held(save.run(tmp_path, False, f"save-{world}")) == {
        f"Durable Shards, {where} / write + fsync": (plain, None, 9),
        f"Durable Shards, {where} / torch.save + fsync": (1.0, None, 9),
        f"Durable DCP, {where} / dcp.save + fsync": (1 / 1.25, None, 9),
        f"Durable DCP, {where} / dcp.save, plan cache, + fsync": (1.0, None, 9)}


def test_durable_saves_of_frameworks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measure(name: str, folder: Path, megabytes: int, turns: int, world: int = 2) -> Any:
        assert megabytes == 512
        return same("sync", "background", "overlap", "own", rounds=turns)

    monkeypatch.setattr(frameworks, "measure", measure)
    monkeypatch.setattr(frameworks, "absent", lambda name: None)
    for world in (1, 4):
        found = held(save.run(tmp_path, False, f"deepspeed-{world}"))
        assert [*found.values()] == [(1.0, None, 9)]
    found = held(frameworks.run(tmp_path, False, ""))
    every = "ddp fsdp2 deepspeed deepspeed-zero3 accelerate transformers lightning-ddp lightning-fsdp2"
    for name in every.split():
        assert found.pop(f"{name}: durable save / own + fsync") == (1.0, None, 9)
    assert found == {"deepspeed: save returns / own": (0.2, None, 20), "deepspeed: overlap, call + fence / own": (0.2, None, 20)}


def test_a_framework_that_is_not_installed_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(frameworks.importlib.util, "find_spec", lambda name: None)
    (row,) = frameworks.run(tmp_path, True, "accelerate")
    assert row.absent and row.name == "beside accelerate" and "did not install" in row.note
    (row,) = save.run(tmp_path, True, "save-deepspeed-1")
    assert row.absent and row.name == "beside deepspeed"


def _background(monkeypatch: pytest.MonkeyPatch, place: Path, scenario: str, *names: str, rounds: int = DISK) -> Wanted:
    monkeypatch.setattr(background, "ranks", lambda *args: same(*names, rounds=rounds))
    return held(getattr(background, scenario)(256 * MB, place, False))


def test_stalls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ("memcpy", "thread", "process")
    assert _background(monkeypatch, tmp_path, "_stall", *names, rounds=LATENCY) == {
        name: (1.25, None, 20) for writer in ("thread", "process") for name in (
            f"background save returns, 256 MB, 2 ranks, writer={writer!r} / warm memcpy",
            f"the same in CPU time, writer={writer!r}")}
    names = ("memcpy", "none", "copy", "overlap", "dcp, thread", "dcp, process", "dcp, thread, async staging")
    assert _background(monkeypatch, tmp_path, "_overlap", *names, rounds=LATENCY) == {
        "staging='overlap', 256 MB: stall / dcp, thread, the best that copies in it": (1 / 40, 3e-3, 20),
        "staging='overlap', 256 MB: stall / dcp, thread, async staging": (1.0, None, 20),
        "staging='overlap', 256 MB: fence / warm memcpy": (None, 5e-3, 20)}


def test_the_first_save(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def ranks(target: Any, folder: str, size: int, turn: int, which: str) -> Any:
        return same(*(("ours", "memcpy", "steady") if which == "ours" else (which,)), rounds=1)

    monkeypatch.setattr(background, "ranks", ranks)
    assert held(background._first(256 * MB, tmp_path, False)) == {
        "first save of a manager returns, 256 MB / its third": (1.25, None, 20),
        "the same in CPU time of the training thread": (1.25, None, 20),
        "first save durable, 256 MB / first dcp.async_save, thread": (1 / 1.6, None, 9),
        "first save durable, 256 MB / first dcp.async_save, process": (1 / 1.6, None, 9)}


def test_background_saves_until_durable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert _background(monkeypatch, tmp_path, "_dcp", "ours", "sync", "dcp.save", "thread", "process") == {
        "save durable, 256 MB / our synchronous save": (1.15, None, 9),
        "save durable, 256 MB / dcp.async_save, thread": (1 / 1.25, None, 9),
        "save durable, 256 MB / dcp.async_save, process": (1 / 2, None, 9)}


def test_what_a_loop_pays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pairs = [(f"ours, {ours}", f"dcp, {theirs}") for ours in ("copy", "overlap", "process")
             for theirs in ("thread", "thread, kept stager", "process, kept stager")]
    found = {"none": [(10.0, 8.0)] * DISK, **{name: [(12.0, 8.0)] * DISK for pair in pairs for name in pair}}
    rows = list(loop.rows(found, "256 MB"))
    assert held(rows) == {f"overhead per save in a loop: {ours} / {theirs}": (1.0, None, 9) for ours, theirs in pairs}
    assert all(row.ours == [1.0] * DISK for row in rows if row.target), "(with - without) / saves"
    assert rows[0].ratios == [1.2] * DISK
    names = ("ours, thread", "ours, process", "ours, overlap", "dcp, thread", "dcp, process")
    slow = _background(monkeypatch, tmp_path, "_slowdown", *names)
    assert slow == {f"{what}: {ours} / {theirs}": (1.0, None, 9) for ours in names[:3] for theirs in names[3:]
                    for what in ("training lost per save", "slowdown of a step beside it")}


def test_coordination() -> None:
    alone = "the two rounds of a save alone"
    for world in (2, 4, 8, 16, 32, 64):
        rows = coordination.coordination_rows(world, alike(*coordination._KINDS, rounds=LATENCY))
        barrier = {f"{alone}, {world} ranks / one gloo barrier": (1.0, None, 20)} if world >= 4 else {}
        most = {f"{alone}, 64 ranks / DCP's 4 object collectives": (1 / 30, None, 20)} if world == 64 else {}
        assert held(rows) == {**most, **barrier}


def test_no_rank_is_ever_blocked() -> None:
    calls = [(1e-4, 9e-5)] * 197 + [(3e-4, 2.5e-4)] * 3
    rows = {row.name: row for row in coordination.block_rows(2, calls)}
    name = "a background save without payload blocks a rank other than 0, 2 ranks"
    core = "of that on a core, 2 ranks: p99"
    assert held(rows.values()) == {name: (None, 0.2e-3, 20), f"{name}: p99": (None, 0.2e-3, 1), core: (None, 0.2e-3, 1)}
    assert missed([rows[name]]) == [] and rows[f"{name}: p99"].ours == [3e-4] and missed([rows[f"{name}: p99"], rows[core]])
    assert "the longest 300 µs, 250 µs of it on a core" in rows[f"{name}: p99"].note
    assert not missed(coordination.block_rows(2, calls[:198])), "one call in a hundred may be the scheduler's"


def test_rank_0s_work() -> None:
    work = {(world, tcp): [(1.0, 0.5)] * DISK for world in (64, 512, 4096, 16_384, 1024) for tcp in (False, True)}
    assert held(simulated.rows(work, [1.0] * DISK, 64)) == {
        "rank 0's work in a save of 16384 ranks": (None, 0.5, 9),
        "rank 0's work in a save of 16384 ranks by a real TCPStore": (None, 0.5, 9),
        "linear: time per rank at 16384 ranks / at 512": (1.5, None, 9),
        "linear: time per rank at 16384 ranks / at 512, by a real TCPStore": (1.5, None, 9),
        "rank 0's work / DCP's planner, 1024 ranks x 500 tensors": (1 / 500, None, 9)}
    linear = next(row for row in simulated.rows(work, [1.0] * DISK, 64) if row.name.startswith("linear"))
    assert linear.ratios == [1 / 32] * DISK


def test_loads() -> None:
    names = ("read", "load", "verify", "dcp", "torch.load", "readers")
    assert held(reading.load_rows(alike(*names), True, "512 MB")) == {
        "verified load (Shards), cold, 512 MB / plain read into memory": (1.15, None, 9),
        "verified load (Shards), cold, 512 MB / dcp.load, which verifies nothing": (1 / 1.4, None, 9),
        "distckpt verify --digest, cold, 512 MB / plain read into memory": (1.1, None, 9)}
    warm = list(reading.load_rows(alike(*names, rounds=LATENCY), False, "512 MB"))
    assert held(warm) == {"verified load (Shards), warm, 512 MB / dcp.load, which verifies nothing": (1 / 1.4, None, 20)}
    assert any("plain read by 4 threads" in row.name for row in warm)
    assert reading.resume_row(1000, 10_000, [1.0] * 20, []).limit == 0.08 and reading.resume_row(1000, 9, [], []).limit == 0.08


def test_rotation() -> None:
    assert held(rotation.caller_rows("1 GB", *alike("a", "b", "c", "d", rounds=LATENCY).values())) == {
        "rotation of 1 GB: the caller's part / until deleted": (None, 1e-3, 20)}
    beside = [[1.0] * 19 + [2.5]] * LATENCY
    rows = list(rotation.step_rows("1 GB", beside, [[1.0] * 20] * LATENCY))
    assert held(rows) == {"longest step beside the rotation of 1 GB / at rest": (2.0, None, 20)}
    assert missed(rows), "one stalled step of twenty is one"
    writers = ("plain writes", "our own writer's")
    assert held(rotation.deletion_rows("1 GB", {how: ([1.0] * DISK, [1.0] * DISK) for how in writers})) == {
        f"deletion of 1 GB, {how}, in the background / shutil.rmtree": (1 / 1.6, None, 9) for how in writers}


def test_links_digests_and_what_is_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = list(link.rows(same("linked", "full", "dcp", "unsynced", "all changed", "linked dcp"), "512 MB"))
    assert held(rows) == {
        "linked save, 512 MB / dcp.save + fsync": (0.25, None, 9), "disk growth / bytes changed, linked": (1.1, None, 9),
        "linked save of a DCP payload / dcp.save + fsync": (0.5, None, 9),
        "disk growth / bytes changed, linked dcp": (1.1, None, 9)}
    monkeypatch.setattr(digest, "ranks", lambda *args: same("on", "off", rounds=args[-1]))
    assert held(digest._digest(tmp_path, False)) == {"digest on / off, 512 MB, 2 ranks": (1.05, None, 9)}

    monkeypatch.setattr(small, "in_turns", lambda turns, jobs: alike(*jobs))
    assert held(small._tensors(tmp_path, True)) == {"1000 tensors of 4 KB, durable: Shards / dcp.save": (1 / 10, None, 9)}
    (tmp_path / "files").mkdir()
    assert held(small._files(tmp_path / "files", True)) == {
        "200 files of 4 KB, durable: files.writer / a loop that syncs each": (1 / 8, None, 9),
        "200 files of 4 KB, durable: files.mine and open / the same loop": (1 / 8, None, 9)}


@pytest.mark.parametrize("kind", memory.KINDS)
def test_memory(kind: str) -> None:
    over = "memory over a state of 512 MB"
    found = [{"save": 1.0, "load": 1.0, "background": 1.0, "growth": 1.0}] * 3
    growth = f"{kind}: growth over 50 more background saves, of 32 MB each"
    assert held(memory.rows(kind, 512_000_000, 50, found)) == {
        f"{kind}: save, {over}": (None, 16e6, 3), f"{kind}: verified load, {over}": (None, 16e6, 3),
        f"{kind}: background save, memory over the state / state": (1.02, None, 3),
        **({growth: (None, 16e6, 3)} if kind in ("Shards", "overlap", "writer='process'") else {})}


def test_what_costs_nothing() -> None:
    rows = list(startup.poll_rows([1e-7] * 50, 500_000, 0))
    assert held(rows) == {"one poll in peace": (None, 2e-6, 20), "messages of 500000 polls in peace": (None, 0.0, 1)}
    assert not missed(rows) and missed(startup.poll_rows([1e-7] * 50, 500_000, 1)), "one message is a miss"
    found = {**alike("ours", "help", "bare", "slow", rounds=LATENCY), "orbax": [0.5] * LATENCY}
    assert held(startup.import_rows(found)) == {
        "import distckpt / python alone": (None, 0.15, 20), "distckpt --help / python alone": (None, 0.15, 20),
        "import distckpt / import orbax": (1 / 15, None, 20)}


def test_a_peer_without_an_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "environment", lambda folder, packages: "pip says\nno")
    monkeypatch.setattr(startup, "_HERE", ("json", "nowhere.to.be.found"))
    found, absent = startup._peers()
    assert list(found) == ["json"]
    assert {row.name: row.absent for row in absent} == {f"beside import {name}": True for name in (
        "nowhere.to.be.found", *startup._APART.values())}
    assert "pip says no" in absent[-1].note
