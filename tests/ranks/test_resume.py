"""Where the run goes on: one answer on every rank, by evidence (S23), within one lineage (S24); with threads as ranks."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import distckpt
from distckpt import catalog
from distckpt.coordination.bootstrap import Bootstrap
from distckpt.durable import REAL, Files
from distckpt.errors import (
    ConfigError,
    MemberMissing,
    NoUsableCheckpoint,
    ResumeError,
    StepNotFound,
    WorldMismatch,
)
from distckpt.marker import FileEntry
from distckpt.options import Seams
from distckpt.resume import Looker, share
from distckpt.testing.clock import VirtualRuntime
from distckpt.testing.faults import FaultyFiles, fail
from tests.inprocess import Job, Threads, content, holds, same_error, tree, values, write
from tests.support import make_checkpoint, make_marker


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def saved(root: Path, *steps: int, world: int = 2, **options: Any) -> None:
    """A run of ``world`` ranks that saved ``steps`` and ended well."""
    def save(manager: distckpt.CheckpointManager) -> None:
        for step in steps:
            write(manager, step)

    values(Job(root, world, **options).run(save))


def resumed(root: Path, world: int = 2, files: dict[int, Files] | None = None, step: int | None = None, verify: str = "size",
            **options: Any) -> list[distckpt.Checkpoint | Any]:
    """What every rank of a new job resumes from."""
    outcomes = Job(root, world, files=files, **options).run(lambda m: m.resume(step, verify=verify))
    found = values(outcomes)
    assert len({(r.step, tuple(sorted(r.skipped.items()))) for r in found}) == 1, "the ranks were told different things"
    return found


def rejected(root: Path) -> dict[str, str]:
    return {catalog.read_json(REAL, str(p))["name"]: catalog.read_json(REAL, str(p))["reason"]  # type: ignore[index]
            for p in root.glob(".distckpt/rejected/*.json")}


def rank_file(root: Path, step: int, rank: int, world: int = 2) -> Path:
    return root / f"step-{step}" / f"data.rank-{rank:05d}-of-{world:05d}.bin"


# -- the three outcomes ----------------------------------------------------------------------------------------------


def test_P6_fresh_resumed_and_an_error_are_three_different_things(root: Path) -> None:
    assert [r.checkpoint for r in resumed(root)] == [None, None]
    saved(root, 1, 2)
    found = resumed(root)
    assert [r.step for r in found] == [2, 2] and found[1].skipped == {}
    one = found[1].checkpoint
    assert one.path == str(root / "step-2") and one.name == "step-2" and one.world == 2 and one.seq == 2
    assert Path(one.mine("data.bin")).read_bytes() == content(2, 1)
    (root / "step-2" / "commit.json").write_bytes(b"{")
    (root / "step-1" / "commit.json").unlink()
    for error in same_error(Job(root).run(lambda m: m.resume()), NoUsableCheckpoint):
        assert sorted(error.rejected) == ["step-1", "step-2"] and "no commit.json" in error.rejected["step-1"]
        assert "allow_fresh=True" in str(error)
    fresh = values(Job(root).run(lambda m: m.resume(allow_fresh=True)))
    assert [r.checkpoint for r in fresh] == [None, None] and sorted(fresh[0].skipped) == ["step-1", "step-2"]


def test_what_is_saved_for_all_and_by_each_rank_is_found_again(root: Path) -> None:
    def save(manager: distckpt.CheckpointManager) -> None:
        with manager.saving(1, metrics={"loss": torch.tensor(0.5)}, meta={"note": "ü"}) as files:
            Path(files.mine("sub/optim.pt")).write_bytes(b"%d" % manager.rank)
            if files.writes("vocab.json"):
                Path(files.shared("vocab.json")).write_text("[]")

    values(Job(root).run(save))
    for rank, found in enumerate(resumed(root)):
        one = found.checkpoint
        assert Path(one.mine("sub/optim.pt")).read_bytes() == b"%d" % rank
        assert Path(one.mine("sub/optim.pt", rank=0)).read_bytes() == b"0"
        assert Path(one.shared("vocab.json")).read_text() == "[]"
        assert one.metrics == {"loss": 0.5} and one.meta == {"note": "ü"}
        with pytest.raises(MemberMissing, match="holds no file 'nothing'"):
            one.shared("nothing")


def test_an_explicit_step_is_that_one_or_an_error(root: Path) -> None:
    saved(root, 1, 2, 3)
    assert [r.step for r in resumed(root, step=2)] == [2, 2]
    for error in same_error(Job(root).run(lambda m: m.resume(7)), StepNotFound):
        assert isinstance(error, FileNotFoundError) and "step 7 is not a committed checkpoint" in str(error)
        assert "[2, 1]" in str(error) or "[3, 2, 1]" in str(error)
    os.truncate(rank_file(root, 1, 0), 3)
    for error in same_error(Job(root).run(lambda m: m.resume(1)), NoUsableCheckpoint):
        assert "step-1" in error.rejected


def test_another_fingerprint_is_refused_and_none_is_not_compared(root: Path) -> None:
    saved(root, 1, fingerprint="gpt-a")
    assert [r.step for r in resumed(root, fingerprint="gpt-a")] == [1, 1]
    assert [r.step for r in resumed(root)] == [1, 1]
    for error in same_error(Job(root, fingerprint="gpt-b").run(lambda m: m.resume()), ResumeError):
        assert "'gpt-a'" in str(error) and "'gpt-b'" in str(error) and error.step == 1


def test_S7_a_root_that_had_a_checkpoint_is_never_a_silent_fresh_start(root: Path) -> None:
    """All step directories are gone: ``latest`` and the journal remember."""
    saved(root, 1)
    os.rename(root / "step-1", root.parent / "elsewhere")
    for error in same_error(Job(root).run(lambda m: m.resume()), ResumeError):
        assert "not starting fresh silently" in str(error) and "allow_fresh=True" in str(error)
    assert [r.checkpoint for r in values(Job(root).run(lambda m: m.resume(allow_fresh=True)))] == [None, None]


def test_legacy_directories_are_told_once_with_the_command_that_adopts_them(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(root, 3)
    for step in (4, 5):
        (root / f"step-{step}").mkdir()
        (root / f"step-{step}" / "model.pt").write_bytes(b"x")
    with caplog.at_level("WARNING"):
        found = resumed(root)
    assert [r.step for r in found] == [3, 3] and sorted(found[0].skipped) == ["step-4", "step-5"]
    lines = [r.getMessage() for r in caplog.records if "adopt" in r.getMessage()]
    assert len(lines) == 1 and "step-5, step-4" in lines[0] and f"'distckpt adopt {root} step-5'" in lines[0]


def test_a_stale_marker_cannot_vouch_for_a_half_written_rewrite(root: Path) -> None:
    """replace writes beside, never into: a job that dies in the middle of it leaves the old one, whole."""
    saved(root, 1)
    before = tree(root)
    job = Job(root)
    job.start()

    def replace(manager: distckpt.CheckpointManager) -> None:
        with manager.saving(1, on_exists="replace") as files:
            Path(files.mine("data.bin")).write_bytes(b"half")
            raise KeyboardInterrupt

    for outcome in job.each(replace):
        assert isinstance(outcome.error, KeyboardInterrupt)
    assert tree(root) == before

    inside = threading.Barrier(3)

    def hang(manager: distckpt.CheckpointManager) -> None:
        with manager.saving(1, on_exists="replace") as files:
            Path(files.mine("data.bin")).write_bytes(b"half")
            inside.wait(10)
            threading.Event().wait()

    for manager in job.managers.values():
        threading.Thread(target=hang, args=(manager,), daemon=True).start()
    inside.wait(10)
    job.crash()
    assert [r.step for r in resumed(root)] == [1, 1]
    assert tree(root) == before and holds(root, 1, 2)


# -- S23 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("digest", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 9])
def test_S23_every_file_is_looked_at_by_exactly_one_rank_whatever_the_number(world: int, digest: bool) -> None:
    files = tuple(FileEntry(f"f{n}", 10 * n, None, n % 4) for n in range(11))
    found = make_marker(1, 1, world=4)
    found = type(found)(**{**vars(found), "files": files})
    looked = [entry.path for rank in range(world) for entry in share(found, rank, world, digest)]
    assert sorted(looked) == sorted(entry.path for entry in files)
    if digest:  # reading is dealt by size: no rank has more than its fair share and the largest file
        loads = [sum(e.size for e in share(found, rank, world, True)) for rank in range(world)]
        assert max(loads) <= sum(f.size for f in files) / world + 100


@pytest.mark.parametrize("world", [1, 2, 3, 6])
@pytest.mark.parametrize("how", ["short", "absent", "a symlink"])
def test_S23_a_bad_file_of_any_rank_is_found_and_all_fall_back_to_the_next_older(world: int, how: str, root: Path) -> None:
    saved(root, 1, 2, world=4)
    bad = rank_file(root, 2, 3, 4)
    if how == "short":
        os.truncate(bad, 5)
    else:
        bad.unlink()
        if how == "a symlink":
            bad.symlink_to(rank_file(root, 1, 3, 4))
    found = resumed(root, world)
    assert [r.step for r in found] == [1] * world
    reason = found[-1].skipped["step-2"]
    assert "data.rank-00003-of-00004.bin" in reason and "seen by rank" in reason
    assert {"short": "has 5 bytes", "absent": "is missing", "a symlink": "is a link"}[how] in reason
    assert list(rejected(root)) == ["step-2"]
    again = resumed(root, world)
    assert [r.step for r in again] == [1] * world and "verify --digest' clears it" in again[0].skipped["step-2"]


@pytest.mark.parametrize(("rank", "op", "path", "number"), [
    (1, "stat", "step-2/data.rank-00001", errno.EIO), (1, "stat", "step-2/data.rank-00001", errno.EACCES),
    (1, "read", "step-2/commit.json", errno.EIO), (1, "read", "step-2/commit.json", errno.ESTALE),
    (1, "scan", "root", errno.EACCES), (0, "stat", "step-2/data.rank-00000", errno.EIO),
    (0, "read", "step-2/commit.json", errno.EIO), (0, "scan", "root", errno.EIO),
])
def test_S23_a_rank_that_cannot_tell_makes_resume_an_error_and_rejects_nothing(rank: int, op: str, path: str, number: int,
                                                                              root: Path) -> None:
    """An unreadable newest checkpoint is not a bad one: no falling back, no fresh start, on any rank."""
    saved(root, 1, 2)
    disk = FaultyFiles(REAL)
    job = Job(root, 2, files={rank: disk})
    job.start()
    disk.faults.append(fail(number, op=op, path=lambda p: p.endswith(path) or (path != "root" and path in p), forever=True))
    for error in same_error(job.each(lambda m: m.resume()), ResumeError):
        assert not isinstance(error, NoUsableCheckpoint) and f"rank {rank}" in str(error)
    assert disk.fired and rejected(root) == {}
    disk.faults.clear()
    assert [r.step for r in values(job.each(lambda m: m.resume()))] == [2, 2]
    job.finish()


def test_S23_positive_evidence_of_one_rank_beats_the_doubt_of_another(root: Path) -> None:
    saved(root, 1, 2)
    os.truncate(rank_file(root, 2, 0), 3)
    disk = FaultyFiles(REAL, fail(errno.EIO, op="stat", path="step-2/data.rank-00001", forever=True))
    assert [r.step for r in resumed(root, files={1: disk})] == [1, 1]


def test_S23_a_flipped_byte_is_caught_by_digest_only_and_the_reading_is_shared(root: Path) -> None:
    saved(root, 1, 2, world=4)
    path = rank_file(root, 2, 2, 4)
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)
    assert [r.step for r in resumed(root, 4)] == [2] * 4
    disks = {rank: FaultyFiles(REAL) for rank in range(3)}
    found = resumed(root, 3, dict(disks), verify="digest")
    assert [r.step for r in found] == [1] * 3 and "has digest" in found[0].skipped["step-2"]
    read = [os.path.relpath(o.path, root) for disk in disks.values() for o in disk.reads if o.op == "read" and ".bin" in o.path]
    wanted = [str(rank_file(root, step, rank, 4).relative_to(root)) for step in (1, 2) for rank in range(4)]
    assert sorted(read) == wanted, "each file is read by one rank"
    assert min(sum(1 for o in disk.reads if o.op == "read" and ".bin" in o.path) for disk in disks.values()) >= 2


def test_S23_bytes_without_a_digest_cannot_be_verified_which_is_no_rejection(root: Path) -> None:
    saved(root, 1, digest=None)
    assert [r.step for r in resumed(root)] == [1, 1]
    for error in same_error(Job(root).run(lambda m: m.resume(verify="digest")), ResumeError):
        assert "has no digest in the marker" in str(error)
    assert rejected(root) == {}


def test_S23_absence_on_a_network_file_system_counts_only_after_ninety_seconds(tmp_path: Path) -> None:
    """A name may be remembered as absent for a minute: re-list and look again."""
    class Network(Files):
        def is_network(self, path: str) -> bool:
            return True

    entry = FileEntry("late.bin", 4, None, 0)
    pulse = type("P", (), {"phase": staticmethod(lambda text: None)})
    group: Any = type("G", (), {"pulse": pulse, "rank": 0, "world": 1, "identity": VirtualRuntime().identity()})
    for appears, expected in ((60.0, None), (200.0, "is missing")):
        directory = tmp_path / f"at-{appears:.0f}"
        directory.mkdir()
        runtime = VirtualRuntime()
        begun = runtime.monotonic()

        def show(now: float, clock: VirtualRuntime = runtime, there: Path = directory, when: float = begun + appears) -> None:
            if clock.monotonic() >= when:
                (there / "late.bin").write_bytes(b"1234")

        runtime.hooks.append(show)
        problems = Looker(Network(), str(tmp_path), group, runtime, 120.0)._problems(str(directory), [entry] * 5, False)
        assert {problem.what for problem in problems} == ({expected} if expected else set())
        assert expected is None or 90 <= runtime.slept <= 130, "all files share one deadline"


def test_a_marker_of_another_attempt_counts_only_when_it_has_lasted(tmp_path: Path) -> None:
    """The step was replaced, and this host's cache still leads to the old one."""
    class Network(Files):
        def is_network(self, path: str) -> bool:
            return True

    pulse = type("P", (), {"phase": staticmethod(lambda text: None)})
    runtime, wanted = VirtualRuntime(), "b" * 16
    group: Any = type("G", (), {"pulse": pulse, "rank": 0, "world": 1, "identity": runtime.identity()})
    make_checkpoint(str(tmp_path), 1, 2, attempt=wanted)
    (tmp_path / "step-1").rename(tmp_path / "aside")
    make_checkpoint(str(tmp_path), 1, 1, attempt="c" * 16)
    begun = runtime.monotonic()

    def swap(now: float) -> None:
        if runtime.monotonic() >= begun + 60 and (tmp_path / "aside").exists():
            shutil.rmtree(tmp_path / "step-1")
            (tmp_path / "aside").rename(tmp_path / "step-1")

    runtime.hooks.append(swap)
    looker = Looker(Network(), str(tmp_path), group, runtime, 120.0)
    assert looker.look("step-1", wanted, False)[1] == {} and 60 <= runtime.slept < 70
    unsure = looker.look("step-1", "d" * 16, False)[1]["unsure"]
    assert f"is of attempt {wanted}, rank 0 sees {'d' * 16} on host-a, and that for 120 s" in unsure


def test_S23_a_load_that_fails_on_one_rank_fails_on_all(root: Path) -> None:
    class State:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def state_dict(self) -> Any:
            return {"w": torch.ones(2)}

        def load_state_dict(self, state: Any) -> None:
            if self.rank == 1:
                raise RuntimeError("size mismatch for w")

    values(Job(root).run(lambda m: m.save(1, State(m.rank))))
    job = Job(root)
    outcomes = job.run(lambda m: m.restore(State(m.rank)))
    for error in same_error(outcomes, ResumeError):
        assert "restore of step-1 failed: rank 1 on host-a" in str(error) and "size mismatch for w" in str(error)
        assert "No rank may train on" in str(error)
    assert isinstance(outcomes[1].error.__cause__, RuntimeError)  # type: ignore[union-attr]


def test_shards_refuse_another_number_of_ranks_on_every_rank(root: Path) -> None:
    values(Job(root).run(lambda m: m.save(1, {"w": torch.ones(2)})))
    for error in same_error(Job(root, 3).run(lambda m: m.restore({"w": torch.zeros(2)})), WorldMismatch):
        assert (error.saved, error.now, error.step) == (2, 3, 1)
    one = values(Job(root, 1).run(lambda m: m.resume()))[0].checkpoint
    with pytest.raises(WorldMismatch):
        one.mine("state.pt")
    assert os.path.exists(one.mine("state.pt", rank=1))


# -- S24 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_exists", ["skip", "error"])
def test_S24_skip_and_error_hold_within_the_lineage_only(on_exists: str, root: Path) -> None:
    """After going back to step 1, the stale branch's steps 2 and 3 are replaced, whatever ``on_exists`` says; step 1 is ours."""
    saved(root, 1, 2, 3)
    job = Job(root)
    job.start()
    assert [r.step for r in values(job.each(lambda m: m.resume(step=1)))] == [1, 1]
    values(job.each(lambda m: write(m, 2, "new", on_exists=on_exists)))
    assert holds(root, 2, 2, "new") and holds(root, 3, 2)
    assert [h.skipped for h in values(job.each(lambda m: m.save(1, {"w": 1}, on_exists="skip")))] == [True, True]
    assert [h.skipped for h in values(job.each(lambda m: m.save(2, {"w": 1}, on_exists="skip")))] == [True, True]
    job.finish()
    assert holds(root, 1, 2) and holds(root, 2, 2, "new")
    found = resumed(root)
    assert [r.step for r in found] == [2, 2] and "rollback" in found[0].skipped["step-3"]


def test_S24_a_rollback_survives_a_crash_before_its_first_save(root: Path) -> None:
    saved(root, 1, 2, 3)
    job = Job(root)
    job.start()
    values(job.each(lambda m: m.resume(step=1)))
    job.crash()
    found = resumed(root)
    assert [r.step for r in found] == [1, 1]
    assert sorted(found[0].skipped) == ["step-2", "step-3"] and "left behind by a rollback" in found[0].skipped["step-3"]
    assert [r.step for r in resumed(root, step=3)] == [3, 3], "a stale step can be named"
    assert [r.step for r in resumed(root)] == [3, 3], "and is the line again"


def test_S24_managers_of_one_root_in_one_process_share_owner_and_seq(root: Path) -> None:
    def single(**options: Any) -> distckpt.CheckpointManager:
        source = Threads(1).source
        return distckpt.CheckpointManager(str(root), seams=Seams(bootstrap=Bootstrap("single", 0, 1, source)), **options)

    first, second = single(keep_last=5), single()
    for step in range(1, 5):
        write(first if step % 2 else second, step)
    assert [c.seq for c in first.checkpoints()] == [4, 3, 2, 1] and {c.marker.head.generation for c in first.checkpoints()} == {1}
    with pytest.raises(ConfigError, match="cannot be used beside it"):
        single(naming="other-{step}")
    with pytest.raises(ConfigError, match="open in this process as run"):
        single(run_id="another")
    first.close()
    write(second, 5)
    second.close()
    third = single()
    write(third, 6)
    assert third.checkpoints()[0].seq == 6 and third.checkpoints()[0].marker.head.generation == 2
    third.close()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "other"


def test_a_warm_start_takes_the_state_of_another_root_and_none_of_its_lineage(root: Path, other: Path) -> None:
    values(Job(other, fingerprint="big").run(lambda m: m.save(9, {"w": torch.full((2,), 9.0)})))
    job = Job(root, fingerprint="small")
    job.start()
    states = [{"w": torch.zeros(2)} for _ in range(2)]
    assert values(job.each(lambda m: m.restore(states[m.rank], source=other))) == [9, 9]
    assert [float(s["w"][0]) for s in states] == [9.0, 9.0]
    values(job.each(lambda m: write(m, 1)))
    found = values(job.each(lambda m: m.resume()))[0].checkpoint
    assert found.step == 1 and found.marker.parent is None and found.marker.lineage == ()
    for error in same_error(job.each(lambda m: m.restore(states[m.rank], source=root.parent / "nowhere")), ConfigError):
        assert "is not a directory" in str(error)
    for error in same_error(job.each(lambda m: m.restore(states[m.rank], source=other, step=4)), StepNotFound):
        assert error.step == 4
    (root.parent / "bare").mkdir()
    for error in same_error(job.each(lambda m: m.restore(states[m.rank], source=root.parent / "bare")), ResumeError):
        assert "holds no checkpoint" in str(error)
    job.finish()
    assert not (root.parent / "bare" / ".distckpt").exists(), "a source is only read"


def test_what_resume_is_given_wrongly_is_a_config_error_on_every_rank_at_once(root: Path) -> None:
    job = Job(root)
    job.start()
    for act in (lambda m: m.resume(step=-1), lambda m: m.resume(step=True), lambda m: m.resume(verify="bytes"),
                lambda m: m.restore(None), lambda m: m.restore({"w": 1}, only=["w"]), lambda m: m.restore({"w": 1}, only="w")):
        same_error(job.each(act), ConfigError)
        for wrong, right in same_pair(job, act):
            assert isinstance(wrong, ConfigError) and isinstance(right, ConfigError)
    job.finish()


def same_pair(job: Job, act: Any) -> list[tuple[Any, Any]]:
    """``act`` on one rank alone, where the other makes a call that is right; both errors, for either rank."""
    pairs = []
    for bad in (0, 1):
        def one(manager: distckpt.CheckpointManager, bad: int = bad) -> Any:
            if manager.rank == bad:
                return act(manager)
            return manager.resume() if "resume" in act.__code__.co_names else manager.restore({"w": 1})

        outcomes = job.each(one)
        pairs.append((outcomes[bad].error, outcomes[1 - bad].error))
    return pairs


def test_S15_a_torn_marker_under_a_good_head_does_not_keep_a_run_from_starting(root: Path) -> None:
    """The newest orders by its head; that its body is torn is found out by resume, which passes over it."""
    saved(root, 1, 2)
    marker = root / "step-2" / "commit.json"
    marker.write_bytes(marker.read_bytes()[:-120])
    found = resumed(root, keep_last=1)
    assert [r.step for r in found] == [1, 1] and "truncated" in found[0].skipped["step-2"]
