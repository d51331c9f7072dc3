"""Adoption: what speaks against a directory refuses it, and a crash leaves what was there or a checkpoint."""

from __future__ import annotations

import os

import pytest

from distckpt import adopt, catalog
from distckpt import marker as _marker
from distckpt.adopt import Candidate, examine
from distckpt.durable import Files
from distckpt.errors import ConfigError, IntegrityError
from distckpt.layout import MARKER, Layout
from distckpt.testing.clock import VirtualRuntime
from distckpt.testing.crashfs import CrashFiles, write_payload
from distckpt.testing.faults import FaultyFiles, Killed, die, fail
from tests.support import ROOT, RUN, STEP, crash_disk, make_checkpoint, open_owned

LAYOUT = Layout.at(ROOT)


def disk_with(name: str = "step-100", **payload: bytes) -> CrashFiles:
    disk = crash_disk()
    for path, data in (payload or {"model.pt": b"weights"}).items():
        write_payload(disk, f"{ROOT}/{name}/{path}", data)
    return disk


def refusal(files: Files, name: str = "step-100", run: str | None = RUN) -> str:
    with pytest.raises(ConfigError) as caught:
        examine(files, LAYOUT, STEP, run, name)
    assert str(caught.value).startswith(f"{name} cannot be adopted: ")
    return str(caught.value)


def test_a_plain_directory_is_a_candidate() -> None:
    disk = disk_with(**{"model.pt": b"weights", "sub/optim.pt": b"1234"})
    found = examine(disk, LAYOUT, STEP, RUN, "step-100")
    assert found == Candidate("step-100", 100, "main", (("model.pt", 7), ("sub/optim.pt", 4)), 1) and found.size == 11
    assert examine(disk_with("step-5-rolling"), LAYOUT, STEP, RUN, "step-5-rolling").series == "rolling"


def test_file_names_tell_the_ranks() -> None:
    names = [f"optim.rank-{r:05d}-of-00003.pt" for r in range(3)]
    assert examine(disk_with(**dict.fromkeys([*names, "shared.json"], b"x")), LAYOUT, STEP, RUN, "step-100").world == 3
    assert "3 ranks, and there is no file of rank 1" in refusal(disk_with(**{names[0]: b"x", names[2]: b"x"}))
    assert "saves by 3 and by 4 ranks" in refusal(disk_with(**dict.fromkeys([*names, "o.rank-00000-of-00004.pt"], b"x")))


@pytest.mark.parametrize(("names", "world"), [
    (["rng_state_0.pth", "rng_state_1.pth"], 2),
    (["rng_state.pth"], 1),
    (["random_states_0.pkl"], 1),
    (["random_states_0.pkl", "random_states_1.pkl", "random_states_2.pkl"], 3),
    ([f"global_step4/bf16_zero_pp_rank_{r}_mp_rank_0{m}_optim_states.pt" for r in range(2) for m in range(2)], 4),
    (["rng_state_0.pth", "rng_state_1.pth", *(f"g/zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in range(2))], 2),
])
def test_frameworks_own_file_names_tell_the_ranks_too(names: list[str], world: int) -> None:
    """A Trainer's directory of two ranks is resumed by two; by its files' number of one it would be a WorldMismatch."""
    assert examine(disk_with(**dict.fromkeys([*names, "model.safetensors"], b"x")), LAYOUT, STEP, RUN, "step-100").world == world


@pytest.mark.parametrize(("names", "text"), [
    (["rng_state_0.pth"], "2 ranks, and there is no file of rank 1;"),
    (["rng_state_99999.pth"], "100000 ranks, and there is no file of rank 0, 1, 2, 3, 4, 5, 6, 7 ...;"),
    (["random_states_1.pkl"], "2 ranks, and there is no file of rank 0;"),
    (["zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_01_optim_states.pt"],
     "4 ranks, and there is no file of rank 0 mp 1, 1 mp 0;"),
    (["rng_state_0.pth", "rng_state_1.pth", "zero_pp_rank_0_mp_rank_00_optim_states.pt"], "saves by 1 and by 2 ranks"),
])
def test_a_directory_that_lacks_a_ranks_file_of_a_framework_is_refused(names: list[str], text: str) -> None:
    assert text in refusal(disk_with(**dict.fromkeys(names, b"x")))


def test_what_speaks_against_it_refuses_it() -> None:
    assert "it is not named like 'step-{step}'" in refusal(disk_with("other-1"), "other-1")
    assert "does not exist" in refusal(disk_with(), "step-7")
    disk = disk_with()
    disk.mkdir(f"{ROOT}/step-8")
    assert "there is no file in it" in refusal(disk, "step-8")
    write_payload(disk, f"{ROOT}/step-9", b"a file")
    assert "it is a file, not a directory" in refusal(disk, "step-9")
    assert "it holds a control character" in refusal(disk_with(**{"a\nb": b"x"}))


def test_links_and_special_files_refuse_it(tmp_path: object) -> None:
    root = str(tmp_path)
    os.mkdir(f"{root}/step-1")
    os.symlink("/etc/passwd", f"{root}/step-1/model.pt")
    os.mkdir(f"{root}/step-2")
    os.mkfifo(f"{root}/step-2/pipe")
    os.symlink("step-1", f"{root}/step-3")
    for name, why in (("step-1", "model.pt in it is a symlink"), ("step-2", "pipe in it is a special file"),
                      ("step-3", "it is a symlink, not a directory")):
        with pytest.raises(ConfigError, match=why):
            examine(Files(), Layout.at(root), STEP, RUN, name)


def test_a_marker_that_is_there_decides() -> None:
    disk = crash_disk()
    make_checkpoint(disk, 100, 1)
    assert "it is a checkpoint of this run already" in refusal(disk)
    assert "it is a checkpoint of this run already" in refusal(disk, run=None)
    made = make_checkpoint(disk, 200, 2, run="run-z")
    assert examine(disk, LAYOUT, STEP, RUN, "step-200").former == made
    disk.unlink(f"{ROOT}/step-200/model.pt")
    assert "its marker says that it is damaged: model.pt is missing" in refusal(disk, "step-200")
    disk.unlink(f"{ROOT}/step-100/{MARKER}")
    write_payload(disk, f"{ROOT}/step-100/{MARKER}", b'{"head":')
    assert "its commit.json is not usable" in refusal(disk)


def adopted(files: Files, name: str = "step-100", **more: object) -> _marker.Marker:
    root = open_owned(files, VirtualRuntime())
    return adopt.adopt(root, examine(files, LAYOUT, STEP, RUN, name), "f" * 16, **more)  # type: ignore[arg-type]


def test_the_marker_says_what_is_known_and_that_it_was_adopted() -> None:
    disk = disk_with(**{"o.rank-00000-of-00002.pt": b"0", "o.rank-00001-of-00002.pt": b"1", "sub/c.json": b"{}"})
    made = adopted(disk, metrics={"loss": 1})
    seen = catalog.read_marker(disk, f"{ROOT}/step-100")
    assert seen == made and not catalog.check_files(disk, f"{ROOT}/step-100", seen.files, digest=True)
    head = seen.head
    assert (head.seq, head.step, head.name, head.series, head.run, head.generation) == (0, 100, "step-100", "main", RUN, 1)
    assert seen.world == 2 and seen.branch == "f" * 16 and seen.metrics == {"loss": 1.0} and seen.payload == {"adopted": True}
    assert [(f.path, f.rank) for f in seen.files] == [
        ("o.rank-00000-of-00002.pt", 0), ("o.rank-00001-of-00002.pt", 1), ("sub/c.json", 0)]


def test_another_runs_marker_hands_on_what_it_knows() -> None:
    disk = crash_disk()
    former = make_checkpoint(disk, 100, 7, run="run-z", world=4, metrics={"loss": 2.0}, meta={"lr": 1}, fingerprint="f", host="h",
                             time=5.0, retention="last=1")
    made = adopted(disk, metrics={"acc": 1})
    assert made.head.attempt != former.head.attempt and made.head.seq == 0 and made.head.run == RUN
    assert (made.world, dict(made.metrics), dict(made.meta), made.fingerprint, made.time, made.retention) == (
        4, {"loss": 2.0, "acc": 1.0}, {"lr": 1}, "f", 5.0, None)


def test_bytes_that_differ_from_a_former_marker_refuse_it() -> None:
    disk = crash_disk()
    make_checkpoint(disk, 100, 7, run="run-z", payload={"a": b"right"})
    before = disk.read(f"{ROOT}/step-100/{MARKER}", 10_000)
    disk.unlink(f"{ROOT}/step-100/a")
    write_payload(disk, f"{ROOT}/step-100/a", b"wrong")
    with pytest.raises(IntegrityError, match="its former marker says"):
        adopted(disk)
    assert disk.read(f"{ROOT}/step-100/{MARKER}", 10_000) == before


def test_a_file_that_changes_meanwhile_refuses_it() -> None:
    disk = disk_with()
    root = open_owned(disk, VirtualRuntime())
    found = Candidate("step-100", 100, "main", (("model.pt", 6),), 1)
    with pytest.raises(ConfigError, match="model.pt changes: it had 6 bytes and now 7"):
        adopt.adopt(root, found, "f" * 16)
    assert not any(item.name == MARKER for item in disk.scan(f"{ROOT}/step-100"))


def unsynced() -> CrashFiles:
    """A legacy directory that somebody else wrote and nobody synced."""
    disk = crash_disk()
    open_owned(disk, VirtualRuntime()).close()
    for path in ("model.pt", "sub/optim.pt"):
        write_payload(disk, f"{ROOT}/step-100/{path}", b"bytes of " + path.encode(), durable=False)
    return disk


def test_a_cut_leaves_no_marker_or_a_whole_checkpoint() -> None:
    """Cut the power after each operation of an adoption: a marker that can be read speaks for bytes that are all there."""
    committed, cuts = 0, 0
    while True:
        disk = unsynced()
        root = open_owned(disk, VirtualRuntime())
        found = examine(disk, LAYOUT, STEP, RUN, "step-100")
        root.files = FaultyFiles(disk, die(cuts + 1))
        try:
            adopt.adopt(root, found, "f" * 16)
            ended = True
        except Killed:
            ended = False
        for state in disk.crash_states(limit=50):
            entries = [e for e in catalog.scan(state, LAYOUT, STEP) if e.committed]
            committed += len(entries)
            for entry in entries:
                seen = catalog.read_marker(state, LAYOUT.final(entry.name))
                assert not catalog.check_files(state, LAYOUT.final(entry.name), seen.files, digest=True), state.snapshot()
            assert entries or not ended, "what was reported as adopted is gone"
        if ended:
            break
        cuts += 1
    assert cuts > 8 and committed


def test_the_name_of_what_is_adopted_is_durable_though_it_came_after_the_root_was_opened() -> None:
    disk = crash_disk()
    root = open_owned(disk, VirtualRuntime())
    write_payload(disk, f"{ROOT}/step-100/model.pt", b"bytes", durable=False)
    adopt.adopt(root, examine(disk, LAYOUT, STEP, RUN, "step-100"), "f" * 16)
    for state in disk.crash_states():
        assert [e.name for e in catalog.scan(state, LAYOUT, STEP) if e.committed] == ["step-100"]


def test_a_failed_sync_adopts_nothing() -> None:
    for op in ("fsync", "fsync_dir", "rename"):
        disk = unsynced()
        root = open_owned(disk, VirtualRuntime())
        found = examine(disk, LAYOUT, STEP, RUN, "step-100")
        root.files = FaultyFiles(disk, fail(5, op=op))
        with pytest.raises(OSError):
            adopt.adopt(root, found, "f" * 16)
        assert not [e for e in catalog.scan(disk, LAYOUT, STEP) if e.committed], op
