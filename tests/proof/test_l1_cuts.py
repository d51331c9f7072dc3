"""Which cuts there are, and which disks at one: on runs small enough to know the answer."""

from __future__ import annotations

from distckpt.testing.crashfs import CrashFiles
from distckpt.testing.replay import Mark, Run, Step, compile_run
from distckpt.testing.trace import parse
from scripts.proof.l1_cuts import cuts, understand
from scripts.proof.l1_scenarios import Scenario
from scripts.proof.l1_survivors import survivors

BASE, ROOT = "/b", "/b/run"


def _lagging(*lines: str) -> set[frozenset[str]]:
    """What stands in ``BASE`` at each lagging cut of two ranks, processes 10 and 11, that do ``lines``."""
    start = ['10  write(1023, "RANK 0", 6) = -1 EBADF (x)', '11  write(1023, "RANK 1", 6) = -1 EBADF (x)']
    run = compile_run(parse([*start, *lines]), BASE)
    return {frozenset(path.rpartition("/")[2] for path in cut.disk.snapshot() if path.startswith(BASE + "/"))
            for cut in cuts(understand(run, Scenario(BASE, 2, 1, ()), {})) if cut.lags}


def _says(rank: int, text: str) -> str:
    return f'1{rank}  write(1023, "{text}", {len(text)}) = -1 EBADF (x)'


def _makes(rank: int, name: str) -> str:
    return f'1{rank}  mkdir("{BASE}/{name}", 0777) = 0'


def test_a_rank_lags_as_far_as_nobody_was_told() -> None:
    told = _lagging(_makes(0, "x"), _says(0, "HB send k"), _says(1, "HB recv k"), _makes(1, "y"), _makes(0, "z"))
    assert told == {frozenset("xz")}  # y follows from x; z follows from nothing of rank 1's
    assert _lagging(_makes(0, "x"), _makes(1, "y"), _makes(0, "z")) == {frozenset("y"), frozenset("xz")}


def test_what_a_message_cannot_have_told_does_not_hold_a_rank_back() -> None:
    late = _lagging(_says(0, "HB send k"), _makes(0, "x"), _says(1, "HB recv k"), _makes(1, "y"))
    assert late == {frozenset("y")}  # the message went before x was made: the mistake that only this kind of cut shows


def test_a_rank_cannot_work_in_what_another_has_not_made_yet() -> None:
    assert _lagging(_makes(0, "x"), _makes(1, "x/y"), _makes(0, "z")) == {frozenset("xz")}


def test_nobody_lags_over_the_end_of_a_job() -> None:
    assert _lagging(_makes(0, "x"), '9  write(1023, "PHASE", 5) = -1 EBADF (x)', _makes(1, "y")) == set()


def test_every_disk_that_the_other_enumeration_finds_is_found() -> None:
    disk = CrashFiles(ROOT)
    for name in ("step-1", "step-2"):
        disk.mkdir(f"{ROOT}/{name}")
        for file in ("a", "b"):
            out = disk.open(f"{ROOT}/{name}/{file}")
            out.write(f"{file} of {name}".encode())
            if file == "a":
                out.fsync()
    disk.rename(f"{ROOT}/step-1", f"{ROOT}/step-3")
    wanted = {_tree(state) for state in disk.crash_states(100_000)}
    found = {_tree(one.build(0)) for one in survivors(disk, ROOT, 100_000, 0)}
    assert len(wanted) > 100 and found >= wanted


def test_disks_have_one_key_exactly_when_the_next_start_sees_the_same() -> None:
    disk = CrashFiles(f"{ROOT}/.distckpt/journal", f"{ROOT}/step-1")
    disk.append(f"{ROOT}/.distckpt/journal/1.jsonl", b"promises nothing")
    for name in ("a", "b"):
        out = disk.open(f"{ROOT}/step-1/{name}")
        out.write(b"bytes")
    keys: dict[int, set[object]] = {}
    for one in survivors(disk, ROOT, 10_000, 0):
        tree = frozenset(item for item in _tree(one.build(0)) if "journal" not in item[0])
        keys.setdefault(one.key, set()).add(tree)
    assert len(keys) == 36 and all(len(trees) == 1 for trees in keys.values())  # each absent, or with one of five contents
    assert len(set(map(frozenset, keys.values()))) == 36


def _tree(disk: CrashFiles) -> frozenset[tuple[str, bytes | None]]:
    return frozenset(disk.snapshot().items())


def test_marks_alone_change_no_disk() -> None:
    steps: list[Step] = [Mark(1, 1, "HB send k")]
    run = Run(BASE, CrashFiles(BASE), steps)
    assert run.end().snapshot() == run.disk.snapshot()
