"""``dedup="link"``: what did not change gets one more name, and is as safe as what is written (S25)."""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import distckpt
from distckpt import catalog, journal
from distckpt.durable import REAL, Files
from distckpt.errors import ConfigError, DiskFull, SaveError
from distckpt.layout import Layout
from distckpt.manager import CheckpointManager
from distckpt.payloads import pieces
from distckpt.payloads.base import Ranks
from distckpt.saving import links
from distckpt.saving.files import RankFiles
from distckpt.saving.piecewriter import PieceWriter
from distckpt.testing.crashfs import CrashFiles
from distckpt.testing.faults import Fault, FaultyFiles, call, fail, refuse, resend
from tests.onerank import Machine, close, tidy
from tests.support import ROOT, Command, crash_disk, found, make_checkpoint, restore, standing


class Layers:
    """Named bytes, a file each. ``during`` is called when all are written."""

    collective = False
    members: list[str] = []

    def __init__(self, during: Callable[[RankFiles], object] = lambda files: None, **layers: bytes) -> None:
        self.layers, self.during = layers, during

    def check(self) -> None:
        return None

    def write(self, files: RankFiles, ranks: Ranks) -> None:
        for name, data in self.layers.items():
            files.put(f"{name}.bin", _pour(data))
        self.during(files)

    def load(self, checkpoint: Any, ranks: Ranks) -> None:
        raise NotImplementedError


def _pour(data: bytes) -> Callable[[PieceWriter], object]:
    return lambda out: [out.write(data[:7]), out.write(data[7:])]


FROZEN, ONE, TWO = b"the backbone, frozen" * 9, b"the head, at one" * 5, b"the head, at two" * 5


def path(step: int, name: str) -> str:
    return f"{ROOT}/step-{step}/{name}.rank-00000-of-00001.bin"


def same(files: Files, name: str, one: int, other: int) -> bool:
    """Whether two checkpoints have one file under two names."""
    return files.stat(path(one, name)).inode == files.stat(path(other, name)).inode


class Lab:
    """Step 1 of a frozen and a changing file, on a disk in memory."""

    def __init__(self, *faults: Fault, **options: Any) -> None:
        self.disk, self.machine = crash_disk(), Machine()
        self.files = FaultyFiles(self.disk, *faults)
        self.manager = self.machine.boot(self.files, dedup="link", **options)
        self.manager.save(1, Layers(frozen=FROZEN, head=ONE))

    def second(self, **more: Any) -> None:
        self.manager.save(2, Layers(frozen=FROZEN, head=TWO, **more))

    def whole(self) -> None:
        """Every checkpoint has the bytes that its marker says, after a restart too."""
        before = standing(self.disk)
        close(self.machine.boot(self.disk))
        assert standing(self.disk) == before


@pytest.fixture
def lab() -> Lab:
    return Lab()


# -- what is linked ------------------------------------------------------------------------------------------------------


def test_what_did_not_change_is_linked_and_what_did_is_written(lab: Lab) -> None:
    assert not any("/staging/" in o.other for o in lab.files.operations("link")), "there was nothing to link"
    lab.second()
    assert same(lab.disk, "frozen", 1, 2) and not same(lab.disk, "head", 1, 2)
    assert lab.disk.read(path(2, "head"), 1000) == TWO
    lab.manager.save(3, Layers(frozen=FROZEN, head=TWO))
    assert same(lab.disk, "frozen", 2, 3) and same(lab.disk, "head", 2, 3)
    tidy(lab.manager)
    assert not lab.disk.is_dir(f"{ROOT}/step-1"), "rotation takes a name away"
    lab.whole()


def test_off_by_default() -> None:
    lab = Lab()
    manager = lab.machine.boot(lab.files)
    manager.save(2, Layers(frozen=FROZEN, head=ONE))
    assert not same(lab.disk, "frozen", 1, 2)


@pytest.mark.parametrize("options, words", [({"dedup": "link", "digest": None}, "by their digest"), ({"dedup": True}, "dedup")])
def test_what_cannot_be_asked_for(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        CheckpointManager(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_it_is_this_seriess_newest_commit_that_is_linked(lab: Lab) -> None:
    rolling = lab.manager.series("rolling", keep_last=1)
    rolling.save(1, Layers(frozen=FROZEN, head=ONE))
    name = f"{ROOT}/step-1-rolling/frozen.rank-00000-of-00001.bin"
    assert lab.disk.stat(name).inode != lab.disk.stat(path(1, "frozen")).inode
    lab.second()
    assert same(lab.disk, "frozen", 1, 2)


def test_after_a_restart_the_inherited_one_is_linked(lab: Lab) -> None:
    close(lab.manager)
    manager = lab.machine.boot(lab.disk, dedup="link")
    manager.save(2, Layers(frozen=FROZEN, head=TWO))
    assert same(lab.disk, "frozen", 1, 2)


def test_a_save_of_the_same_step_links_what_it_replaces(lab: Lab) -> None:
    inode = lab.disk.stat(path(1, "frozen")).inode
    lab.manager.save(1, Layers(frozen=FROZEN, head=TWO), on_exists="replace")
    assert lab.disk.stat(path(1, "frozen")).inode == inode
    assert lab.disk.read(path(1, "head"), 1000) == TWO
    lab.whole()


# -- what is not ---------------------------------------------------------------------------------------------------------


def _damage(disk: CrashFiles, name: str, data: bytes) -> None:
    disk._find(name).data[:] = data


def test_a_twin_that_lost_bytes_is_not_linked(lab: Lab) -> None:
    _damage(lab.disk, path(1, "frozen"), FROZEN[:-1])
    lab.second()
    assert not same(lab.disk, "frozen", 1, 2)
    assert lab.disk.read(path(2, "frozen"), 1000) == FROZEN


def test_what_was_removed_from_the_twin_is_written_again(lab: Lab) -> None:
    """README's way to be rid of a damaged file while the job runs."""
    lab.second()
    damaged = lab.disk.stat(path(2, "frozen")).inode
    lab.disk.unlink(path(2, "frozen"))
    lab.manager.save(3, Layers(frozen=FROZEN, head=TWO))
    assert lab.disk.stat(path(3, "frozen")).inode != damaged


def test_a_file_that_was_rewritten_as_a_link_somewhere_is_not_followed(tmp_path: Path) -> None:
    state = {"w": torch.randn(1 << 19)}
    with CheckpointManager(tmp_path / "run", dedup="link") as manager:
        manager.save(1, distckpt.Shards(state))
        twin = tmp_path / "run" / "step-1" / "shard.part-00001.rank-00000-of-00001.pt"
        twin.rename(tmp_path / "elsewhere.pt")
        twin.symlink_to(tmp_path / "elsewhere.pt")
        manager.save(2, distckpt.Shards(state))
    again = tmp_path / "run" / "step-2" / twin.name
    assert not again.is_symlink() and again.stat().st_nlink == 1


def test_damage_is_found_under_every_name_and_the_next_save_after_that_is_a_fresh_copy(lab: Lab) -> None:
    lab.second()
    _damage(lab.disk, path(1, "frozen"), b"x" + FROZEN[1:])
    layout = lab.machine.layout
    for step in (1, 2):
        directory = layout.final(f"step-{step}")
        marker = catalog.read_marker(lab.disk, directory)
        assert [p.path for p in catalog.check_files(lab.disk, directory, marker.files, digest=True)] == [
            "frozen.rank-00000-of-00001.bin"], step
        if step == 2:
            lab.manager._owned.reject(marker.head.attempt, "step-2", "found bad")  # type: ignore[union-attr]
    lab.manager.save(3, Layers(frozen=FROZEN, head=TWO))
    assert not same(lab.disk, "frozen", 1, 3), "step 1 may have the same bad file, as it has here"
    assert lab.disk.read(path(3, "frozen"), 1000) == FROZEN
    lab.manager.save(4, Layers(frozen=FROZEN, head=TWO))
    assert same(lab.disk, "frozen", 3, 4)


def test_what_is_in_doubt_is_not_linked(lab: Lab) -> None:
    owned = lab.manager._owned
    assert owned is not None
    owned.in_doubt[catalog.read_marker(lab.disk, f"{ROOT}/step-1").head.attempt] = "its outcome is unknown"
    lab.second()
    assert not same(lab.disk, "frozen", 1, 2)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EMLINK, errno.EXDEV, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_links_gets_the_bytes(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*args: Any, **more: Any) -> None:
        raise OSError(number, os.strerror(number))

    state = {"w": torch.randn(1 << 19), "b": torch.zeros(1)}
    with CheckpointManager(tmp_path, dedup="link") as manager:
        manager.save(1, distckpt.Shards(state))
        monkeypatch.setattr(os, "link", cannot)
        manager.save(2, distckpt.Shards(state))
    assert all(file.stat().st_nlink == 1 for file in (tmp_path / "step-2").iterdir())
    assert restore(tmp_path, distckpt.Shards({"w": torch.zeros(1 << 19), "b": torch.zeros(1)})) == 2


def test_the_disk_in_memory_may_lack_links_too() -> None:
    lab = Lab(refuse("link"))
    lab.second()
    assert not same(lab.disk, "frozen", 1, 2)
    lab.whole()


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ESTALE])
def test_a_source_that_is_taken_away_under_us_is_written(number: int) -> None:
    lab = Lab(fail(number, op="link", path="frozen"))
    lab.second()
    assert lab.files.faults[0].fired and not same(lab.disk, "frozen", 1, 2)
    lab.whole()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("op", ["link", "fsync_file"])
def test_a_disk_that_fails_ends_the_save_and_the_next_one_works(op: str, number: int) -> None:
    lab = Lab(fail(number, op=op, path=lambda p: "/staging/" in p and p.endswith("frozen.rank-00000-of-00001.bin")))
    with pytest.raises(SaveError):
        lab.second()
    assert standing(lab.disk).keys() == {"step-1"}
    lab.second()
    assert same(lab.disk, "frozen", 1, 2)
    lab.whole()


def test_a_call_that_nfs_sent_again_was_ours() -> None:
    lab = Lab(resend(op="link", path="frozen"))
    lab.second()
    assert lab.files.faults[0].fired and same(lab.disk, "frozen", 1, 2)


def test_what_stands_under_the_name_and_is_no_link_of_ours_ends_the_save(lab: Lab) -> None:
    """Somebody else's code wrote it, and nobody claimed it."""

    class Theirs(Layers):
        def write(self, files: RankFiles, ranks: Ranks) -> None:
            files._files.open(f"{files.path}/frozen.rank-00000-of-00001.bin").close()
            super().write(files, ranks)

    with pytest.raises(SaveError, match="FileExists"):
        lab.manager.save(2, Theirs(frozen=FROZEN, head=TWO))
    lab.whole()


# -- order ---------------------------------------------------------------------------------------------------------------


def test_the_name_and_the_bytes_are_synced_before_the_marker(lab: Lab) -> None:
    lab.files.log.clear()
    lab.second()
    seen = [(o.op, o.path) for o in lab.files.log]
    linked = next(i for i, o in enumerate(lab.files.log) if o.op == "link" and "frozen" in o.other)
    target = lab.files.log[linked].other
    marked = next(i for i, (op, p) in enumerate(seen) if op == "open" and p.endswith("commit.json"))
    assert ("fsync_file", target) in seen[linked:marked]
    assert ("fsync_dir", os.path.dirname(target)) in seen[linked:marked]


def test_a_rank_syncs_the_directories_of_its_links_before_it_acks(lab: Lab) -> None:
    """Its own host's view of them: rank 0 may be another host."""
    attempt = catalog.read_marker(lab.disk, f"{ROOT}/step-1").head.attempt
    lab.disk.mkdir("/disk/staged")
    mine = RankFiles(lab.files, "/disk/staged", 0, 1, algorithm="xxh3-128", aborted=lambda: False,
                     twins=links.Twins(f"{ROOT}/step-1", attempt))
    mine.put("frozen.bin", _pour(FROZEN))
    assert mine.bytes_linked == len(FROZEN)
    lab.files.log.clear()
    assert [(e.path, e.size) for e in mine.finish()] == [("frozen.rank-00000-of-00001.bin", len(FROZEN))]
    assert [(o.op, o.path) for o in lab.files.log] == [("fsync_dir", "/disk/staged")]


def test_S8_what_was_copied_into_the_root_is_on_the_disk_before_it_is_relied_on() -> None:
    """Its bytes were never synced: in every state that a power cut leaves, the checkpoint that links them is whole."""
    disk, machine = crash_disk(), Machine()
    close(machine.boot(disk, run_id="run-a"))
    make_checkpoint(disk, 1, 1, payload={"frozen.rank-00000-of-00001.bin": FROZEN}, durable=False)
    manager = machine.boot(disk, dedup="link", run_id="run-a")
    manager.save(2, Layers(frozen=FROZEN))
    assert same(disk, "frozen", 1, 2)
    states = list(disk.crash_states(400))
    assert len(states) > 10
    for state in states:
        marker = catalog.read_marker(state, f"{ROOT}/step-2")
        assert catalog.check_files(state, f"{ROOT}/step-2", marker.files, digest=True) == []


def test_a_cut_at_any_operation_of_a_linking_save(lab: Lab) -> None:
    """Before each operation that orders something: what stood stands, and the links of what did not end take nothing away."""
    disk = lab.disk
    after: list[CrashFiles] = []
    lab.files.faults.append(call(lambda operation: after.extend(disk.crash_states(40)), forever=True,
                                 op=("fsync", "fsync_file", "fsync_dir", "unlink", "rmdir")))
    lab.second()
    after += disk.crash_states(40)
    seen = set()
    for state in after:
        manager = lab.machine.boot(state, dedup="link")
        there = tuple(sorted(standing(state)))
        seen.add(there)
        resumed = manager.resume(verify="digest")
        assert not resumed.skipped and "step-1" in there
        tidy(manager)
        manager.save(3, Layers(frozen=FROZEN, head=TWO))
        assert state.read(path(3, "frozen"), 1000) == FROZEN
        close(manager)
    assert seen == {("step-1",), ("step-1", "step-2")}


# -- rotation and replace ------------------------------------------------------------------------------------------------


def test_rotation_leaves_the_source_alone_while_it_may_be_linked() -> None:
    """Another manager of the root in this process commits and rotates between rank 0's choice and the link."""
    lab = Lab(keep_last=1)
    beside = lab.machine.boot(lab.files, same=True, dedup="link", keep_last=1)
    stood = []

    def meanwhile(files: RankFiles) -> None:
        beside.save(10, Layers(other=ONE))
        beside.save(11, Layers(other=TWO))
        stood.append(lab.disk.is_dir(f"{ROOT}/step-1"))

    lab.manager.save(2, Layers(meanwhile, frozen=FROZEN, head=TWO))
    assert stood == [True]
    beside.save(12, Layers(other=TWO))
    assert not lab.disk.is_dir(f"{ROOT}/step-1"), "and no longer"
    assert lab.manager._owned is not None and len(lab.manager._owned.sources) <= 2, "it does not grow"
    lab.whole()


def test_nobody_replaces_the_source_while_it_may_be_linked() -> None:
    """Its name would mean other bytes, under the digests that were read before."""
    lab = Lab()
    beside = lab.machine.boot(lab.files, same=True)
    refused: list[str] = []

    class Slow(Layers):
        def write(self, files: RankFiles, ranks: Ranks) -> None:
            assert files.twins is not None and files.twins.has(files._files, "frozen.rank-00000-of-00001.bin")
            with pytest.raises(SaveError, match="another save links its files") as caught:
                beside.save(1, Layers(frozen=FROZEN[::-1], head=ONE), on_exists="replace")
            refused.append(str(caught.value))
            super().write(files, ranks)

    lab.manager.save(2, Slow(frozen=FROZEN, head=TWO))
    assert refused and same(lab.disk, "frozen", 1, 2)
    beside.save(1, Layers(frozen=FROZEN, head=TWO), on_exists="replace")
    lab.whole()


# -- nobody writes through a link ----------------------------------------------------------------------------------------


def test_S25_the_path_of_a_linked_file_is_not_given_out(lab: Lab) -> None:
    def careless(files: RankFiles) -> None:
        for get in (files.mine, files.writer):
            with pytest.raises(FileExistsError):
                get("frozen.bin")
        with pytest.raises(FileExistsError):
            files.claim("frozen.rank-00000-of-00001.bin")
        with pytest.raises(FileExistsError):
            files.put("frozen.bin", _pour(b"other bytes"))

    lab.second(during=careless)
    assert same(lab.disk, "frozen", 1, 2)
    lab.whole()


def test_S25_a_name_that_was_given_out_before_is_not_linked(lab: Lab) -> None:
    class First(Layers):
        def write(self, files: RankFiles, ranks: Ranks) -> None:
            files.mine("frozen.bin")
            super().write(files, ranks)

    lab.manager.save(2, First(frozen=FROZEN, head=TWO))
    assert not same(lab.disk, "frozen", 1, 2)


def test_S25_a_framework_that_truncates_its_files_hits_none_of_ours(tmp_path: Path) -> None:
    """It writes into the directory under names of its own, as in every save; they are never links."""
    state = {"w": torch.randn(1 << 19)}
    with CheckpointManager(tmp_path, dedup="link") as manager:
        for step in (1, 2):
            with manager.saving(step) as files:
                distckpt.Shards(state).write(files, Ranks(0, 1, lambda: None))
                for name in (f"{files.path}/theirs.bin", files.mine("mine.bin")):
                    with open(name, "wb") as out:
                        out.write(b"all the same")
        for name in ("theirs.bin", "mine.rank-00000-of-00001.bin"):
            assert (tmp_path / "step-2" / name).stat().st_nlink == 1
        assert (tmp_path / "step-2" / "shard.part-00001.rank-00000-of-00001.pt").stat().st_nlink == 2


# -- room ----------------------------------------------------------------------------------------------------------------


def test_room_is_asked_for_what_is_written() -> None:
    lab = Lab(keep_last=None)
    lab.second()
    lab.disk.room = len(TWO) + 10
    lab.manager.save(3, Layers(frozen=FROZEN, head=ONE))
    lab.disk.room = 10
    with pytest.raises(DiskFull):
        lab.manager.save(4, Layers(frozen=FROZEN, head=TWO))
    lab.disk.room = len(TWO) + 10
    close(lab.manager)
    manager = lab.machine.boot(lab.files, dedup="link", keep_last=None)
    manager.save(4, Layers(frozen=FROZEN, head=TWO))


def test_the_journal_says_how_much_is_linked(lab: Lab) -> None:
    lab.second()
    assert [e.get("linked") for e in journal.read(lab.disk, lab.machine.layout) if e["event"] == "committed"] == [
        0, len(FROZEN)]


# -- Shards in pieces ----------------------------------------------------------------------------------------------------


def _big(value: float) -> torch.Tensor:
    return torch.full((1 << 19,), value)


def _state() -> dict[str, Any]:
    model: OrderedDict[str, Any] = OrderedDict((f"layer.{i}.{kind}", _big(i) if kind == "weight" else torch.full((3,), 0.5))
                                              for i in range(3) for kind in ("weight", "bias"))
    model["tied"] = model["layer.0.weight"]
    model._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    return {"model": model, "optim": {"state": {0: {"step": torch.tensor(3.0), "m": _big(7)}}, "param_groups": [{"lr": 0.1}]},
            "epoch": 4, "empty": {}, "list": [torch.ones(2)]}


def test_a_split_state_is_the_state_again() -> None:
    state = _state()
    first, *more = pieces.split(state)
    assert [sorted(p) for p in more] == [["model"]] * 3 + [["optim"]]
    assert list(more[0]["model"]) == ["layer.0.weight", "tied"], "one memory stays in one file"
    assert not any(t.numel() > 3 for t in first["model"].values()) and first["model"]._metadata == state["model"]._metadata
    assert first["list"] is state["list"] and first["empty"] == {} and first["optim"]["param_groups"] == [{"lr": 0.1}]
    for piece in more:
        pieces.merge(first, piece)
    assert set(first["model"]) == set(state["model"]) and first["optim"]["state"][0].keys() == {"step", "m"}
    assert all(first["model"][k] is v for k, v in state["model"].items())


@pytest.mark.parametrize("state", [{}, [torch.ones(3)], {"a": 1}, {"a": torch.ones(3)}, torch.ones(3), 5])
def test_what_is_small_or_no_dict_is_not_split(state: Any) -> None:
    assert len(pieces.split(state)) == 1 and pieces.split(state)[0] is state


def test_many_small_tensors_are_a_few_files() -> None:
    state = {f"t{i}": torch.zeros(1 << 14) for i in range(200)}
    parts = pieces.split(state)
    assert 10 < len(parts) < 15
    assert [name for part in [*parts[1:], parts[0]] for name in part] == list(state), "in their order, what is left in the first"


def test_shapes_alone_say_what_goes_where() -> None:
    one, other = _state(), _state()
    other["model"]["layer.1.weight"] = _big(5)
    assert [str(_shape(p)) for p in pieces.split(one)] == [str(_shape(p)) for p in pieces.split(other)]


def _shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _shape(v) for k, v in value.items()}
    return tuple(value.shape) if isinstance(value, torch.Tensor) else value


def _shards(root: Path, step: int) -> dict[str, int]:
    return {file.name: file.stat().st_ino for file in (root / f"step-{step}").iterdir() if file.name != "commit.json"}


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("writer", ["thread", "process"])
def test_a_changed_layer_is_the_only_one_written(writer: str, background: bool, tmp_path: Path) -> None:
    state = _state()
    with CheckpointManager(tmp_path, dedup="link", writer=writer) as manager:
        manager.save(1, distckpt.Shards(state), background=background)
        manager.wait()
        state["model"]["layer.1.weight"].add_(1)
        state["model"]["layer.1.weight"][0] = 0.25
        manager.save(2, distckpt.Shards(state), background=background)
        manager.wait()
    one, two = _shards(tmp_path, 1), _shards(tmp_path, 2)
    assert {name for name in one if one[name] != two[name]} == {"shard.part-00002.rank-00000-of-00001.pt"}
    linked = [e["linked"] for e in journal.read(REAL, Layout.at(tmp_path)) if e["event"] == "committed"]
    assert linked == [0, sum((tmp_path / "step-2" / name).stat().st_size for name in two if one[name] == two[name])]
    fresh = _state()
    assert restore(tmp_path, distckpt.Shards(fresh), dedup=None) == 2
    assert torch.equal(fresh["model"]["layer.1.weight"], state["model"]["layer.1.weight"])
    assert fresh["optim"]["state"][0]["step"] == 3


def test_the_digest_is_of_the_memory_now(tmp_path: Path) -> None:
    """One value of a large tensor changes, in place: its size, its address and its version tell nothing."""
    state = {"w": _big(1)}
    with CheckpointManager(tmp_path, dedup="link") as manager:
        manager.save(1, distckpt.Shards(state))
        state["w"].numpy()[-1] = 5.0
        manager.save(2, distckpt.Shards(state))
    assert torch.load(tmp_path / "step-2" / "shard.part-00001.rank-00000-of-00001.pt")["w"][-1] == 5.0
    assert torch.load(tmp_path / "step-1" / "shard.part-00001.rank-00000-of-00001.pt")["w"][-1] == 1.0


def test_safetensors_are_linked_and_read_by_its_own_library(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    state = {"a": _big(1), "b": _big(2), "c": torch.ones(3)}
    with CheckpointManager(tmp_path, dedup="link") as manager:
        for step in (1, 2):
            state["b"].fill_(step + 5)
            manager.save(step, distckpt.Shards(state, format="safetensors"))
    one, two = _shards(tmp_path, 1), _shards(tmp_path, 2)
    assert sorted(name for name in one if one[name] == two[name]) == [
        "shard.part-00001.rank-00000-of-00001.safetensors", "shard.rank-00000-of-00001.safetensors"]
    joined = {k: v for name in two for k, v in load_file(tmp_path / "step-2" / name).items()}
    assert joined.keys() == state.keys() and torch.equal(joined["b"], _big(7))
    fresh = {k: torch.zeros_like(v) for k, v in state.items()}
    assert restore(tmp_path, distckpt.Shards(fresh, format="safetensors")) == 2
    assert torch.equal(fresh["b"], _big(7)) and torch.equal(fresh["c"], torch.ones(3))


def test_each_file_is_one_of_torchs_and_together_they_are_the_state(tmp_path: Path) -> None:
    """As README shows it, without us."""
    from functools import reduce

    with CheckpointManager(tmp_path, dedup="link") as manager:
        manager.save(1, distckpt.Shards(_state()))
    parts = [torch.load(file) for file in sorted((tmp_path / "step-1").glob("shard*.pt"), reverse=True)]
    state: dict[str, Any] = reduce(pieces.merge, parts)
    assert state["epoch"] == 4 and state["model"]["tied"].data_ptr() == state["model"]["layer.0.weight"].data_ptr()


# -- DCP -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
def test_what_dcp_wrote_is_linked_where_it_is_the_same(background: bool, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    state = {"a": _big(1), "b": _big(2), "c": torch.ones(3), "n": 5}
    with CheckpointManager(tmp_path, dedup="link") as manager:
        for step in (1, 2):
            state["b"].fill_(step + 5)
            manager.save(step, distckpt.DCP(state={"net": state}), background=background)
            manager.wait()
    one, two = _shards(tmp_path, 1), _shards(tmp_path, 2)
    assert {name for name in one if one[name] == two[name]} == {"__0_0_0.distcp", "__0_1_0.distcp"}, one.keys()
    assert one.keys() == two.keys() == {"__0_0_0.distcp", "__0_1_0.distcp", "__0_2_0.distcp", ".metadata"}
    fresh = {"a": torch.zeros(1 << 19), "b": torch.zeros(1 << 19), "c": torch.zeros(3), "n": 0}
    dcp.load({"net": fresh}, checkpoint_id=tmp_path / "step-2")
    assert torch.equal(fresh["b"], _big(7)) and torch.equal(fresh["a"], _big(1)), "plain dcp.load reads it"
    assert restore(tmp_path, distckpt.DCP(state={"net": fresh})) == 2


def test_a_train_state_is_linked_by_layers(tmp_path: Path, command: Command) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(600, 600, bias=False) for _ in range(4)))
    for layer in list(model)[:3]:
        layer.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    state = distckpt.TrainState(model=model, optimizer=optimizer, progress={"epoch": 0})
    with CheckpointManager(tmp_path / "run", dedup="link") as manager:
        for step in (1, 2):
            model(torch.ones(1, 600)).sum().backward()
            optimizer.step()
            manager.save(step, state)
    two = [file for file in (tmp_path / "run" / "step-2").iterdir() if file.stat().st_nlink == 2]
    assert sum(file.stat().st_size for file in two) > 3 * 600 * 600 * 4
    assert command("export", tmp_path / "run", tmp_path / "model.safetensors", "--part", "model").code == 0
    assert command("verify", "--digest", tmp_path / "run").code == 0


def test_what_was_written_stays_where_the_link_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*args: Any, **more: Any) -> None:
        raise OSError(errno.EMLINK, "too many links")

    with CheckpointManager(tmp_path, dedup="link") as manager:
        manager.save(1, distckpt.DCP(state={"a": _big(1)}))
        monkeypatch.setattr(os, "link", cannot)
        manager.save(2, distckpt.DCP(state={"a": _big(1)}))
    assert sorted(_shards(tmp_path, 2)) == sorted(_shards(tmp_path, 1))
    assert distckpt.open(tmp_path).verify(found(tmp_path / "step-2"), digest=True) == []


# -- the command ---------------------------------------------------------------------------------------------------------


def test_the_command_says_what_is_shared(tmp_path: Path, command: Command) -> None:
    state = {"a": _big(1), "b": _big(2)}
    with CheckpointManager(tmp_path, dedup="link") as manager:
        for step in (1, 2, 3):
            state["b"].fill_(step + 5)
            manager.save(step, distckpt.Shards(state))
    size, one = found(tmp_path / "step-1").size, (tmp_path / "step-1" / "shard.part-00001.rank-00000-of-00001.pt").stat().st_size
    assert "of it linked by other checkpoints" in command("show", tmp_path).out
    said = command("prune", "--keep-last", 1, "--dry-run", tmp_path)
    assert "which frees" in said.out
    shared = one + (tmp_path / "step-1" / "shard.rank-00000-of-00001.pt").stat().st_size
    said = command("prune", "--keep-last", 1, "--json", tmp_path)
    assert (said.json["bytes"], said.json["freed"]) == (2 * size, 2 * (size - shared))
    assert command("verify", "--digest", tmp_path).code == 0


def test_two_that_share_files_with_each_other_alone_give_them_back_once(tmp_path: Path, command: Command) -> None:
    with CheckpointManager(tmp_path, dedup="link") as manager:
        manager.save(1, distckpt.Shards({"a": _big(1)}))
        manager.save(2, distckpt.Shards({"a": _big(1)}))
        manager.save(3, distckpt.Shards({"a": _big(3), "b": 1}))
    said = command("prune", "--keep-last", 1, "--json", tmp_path)
    assert said.json["bytes"] == 2 * said.json["freed"]


def test_an_export_joins_the_pieces(tmp_path: Path, command: Command) -> None:
    from safetensors.torch import load_file

    state = {"a": _big(1), "b": _big(2), "c": torch.ones(3)}
    with CheckpointManager(tmp_path / "run", dedup="link") as manager:
        manager.save(1, distckpt.Shards(state, name="model"))
    said = command("export", tmp_path / "run", tmp_path / "model.safetensors")
    assert said.code == 0, said.err
    assert load_file(tmp_path / "model.safetensors").keys() == state.keys()


def test_a_link_to_another_checkpoint_than_the_one_that_was_chosen(lab: Lab) -> None:
    """Its directory is taken for the source only as long as the marker in it is the source's."""
    for attempt in ("f" * 16, None):
        twins = links.Twins(f"{ROOT}/step-1", attempt)
        assert not twins.has(lab.disk, "frozen.rank-00000-of-00001.bin")
    assert not links.Twins(f"{ROOT}/step-9", "f" * 16).has(lab.disk, "frozen.rank-00000-of-00001.bin")


def test_a_link_on_a_real_disk_keeps_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"bytes")
    assert REAL.link(str(tmp_path / "a"), str(tmp_path / "b"))
    seen = REAL.stat(str(tmp_path / "b"))
    assert seen.links == 2 and seen.inode == REAL.stat(str(tmp_path / "a")).inode
