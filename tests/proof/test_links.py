"""S25 of DESIGN section 12, with the whole library in the simulation: files that are names of a checkpoint's before."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from distckpt.durable import Files
from distckpt.marker import FileEntry
from distckpt.owned import OwnedRoot
from distckpt.saving.links import Twins
from distckpt.testing.checker import COMMITTED
from distckpt.testing.crashfs import CrashFiles
from distckpt.testing.simulation import ROOT, Beside, Simulation, State, Told
from scripts.proof.l0 import Case, sweep
from scripts.proof.scenarios import bytes_of, linking
from tests.proof.stories import all_well, well

FROZEN = "data.rank-00000-of-00002.bin"


def one_file(disk: CrashFiles, *steps: int) -> bool:
    return len({disk.stat(f"{ROOT}/step-{step}/{FROZEN}").inode for step in steps}) == 1


def test_S25_what_is_linked_is_one_file() -> None:
    simulation = Simulation(2, seed=1, dedup="link", keep=3)
    well(simulation.job(linking))
    assert one_file(simulation.files, 1, 2, 3)
    well(simulation.job(lambda manager, rank: manager.save(4, State(bytes_of(rank, 4 if rank else 0)))))
    assert one_file(simulation.files, 2, 3, 4), "and of the job before"


@pytest.mark.parametrize("scenario", ["linking", "relinking", "local-linking"])
def test_S25_killed_and_failing_at_many_operations(scenario: str) -> None:
    all_well(sweep(scenario, 2, ["kill", "fail"], 29, seed=3, offset=7))


@pytest.mark.parametrize("scenario", ["linking", "relinking", "linking-nfs", "local-linking"])
def test_S25_the_power_goes_at_many_operations(scenario: str) -> None:
    all_well(sweep(scenario, 2, ["power"], 17, seed=2, offset=3))


def test_S25_a_reply_that_is_lost_and_a_rank_that_stops() -> None:
    all_well(sweep("linking", 2, ["lost", "stop"], 37, seed=5, offset=2))


def test_S25_the_power_goes_and_what_is_left_is_linked_again() -> None:
    """The job after the cut goes on with the same frozen rank; whatever of it the cut left, nothing broken is linked."""
    base = Case("linking").run()
    for at in range(40, base.total, 61):
        simulation = Simulation(2, seed=at, dedup="link")
        run = simulation.job(linking, [f"power@{at}"])
        assert not run.violations
        before = list(simulation.saves)
        for disk in list(simulation.files.crash_states(24, at))[1:3]:
            simulation.files, simulation.saves = disk, list(before)

            def again(manager: Told, rank: int) -> None:
                manager.resume(verify="digest")
                for step in (11, 12):
                    manager.save(step, State(bytes_of(rank, step if rank else 0)))

            well(simulation.job(again))
            assert {verdict for save in simulation.saves[-2:] for verdict in save.told.values()} == {COMMITTED}
            assert one_file(simulation.files, 11, 12)
            well(simulation.restart())


@pytest.mark.parametrize("seed", range(4))
def test_S25_another_job_takes_the_root_over_while_files_are_linked(seed: int) -> None:
    """The zombie wakes with a link to make; its staging is gone, and the taker has rotated what it would link."""
    def taker(me: Beside) -> str:
        me.runtime.sleep(1.0)
        with me.manager() as manager:
            found = manager.resume()
            for step in (10, 11):
                manager.save((found.step or 0) + step, State(b"the taker's %d" % step))
        return "took over"

    for at in range(110 + seed * 5, 330, 31):
        simulation = Simulation(1, seed=seed, dedup="link", keep=1)

        def program(manager: Told, rank: int) -> None:
            for step in (1, 2, 3):
                manager.save(step, State(b"frozen, all of it"))

        well(simulation.job(program, [f"stop:0@{at}:150"], beside={"taker": taker}))
        well(simulation.restart())


# -- broken on purpose ---------------------------------------------------------------------------------------------------


def _not_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entries of the links are never durable."""
    whole = CrashFiles.fsync_dir

    def fsync_dir(self: CrashFiles, path: str) -> None:
        if "/staging/" not in path or not path.rsplit("/", 1)[-1].startswith("step-"):
            whole(self, path)

    monkeypatch.setattr(CrashFiles, "fsync_dir", fsync_dir)


def _believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What had this name before has its bytes now."""
    def link(self: Twins, files: Files, relative: str, size: int, digest: str, path: str) -> bool:
        assert self._entries is not None
        self._entries[relative] = FileEntry(relative, size, digest, 0)
        return real(self, files, relative, size, digest, path)

    real = Twins.link
    monkeypatch.setattr(Twins, "link", link)


@pytest.mark.parametrize("break_it, kinds", [(_not_synced, ["power"]), (_believed, ["slow"])])
def test_S25_a_broken_order_is_seen(break_it: Callable[[pytest.MonkeyPatch], None], kinds: list[str],
                                    monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch)
    assert any(case.run().violations for case in sweep("linking", 2, kinds, 7, seed=2))


def test_S25_without_the_hold_the_source_is_rotated_away_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost by it: the link fails, and the bytes are written."""
    monkeypatch.setattr(OwnedRoot, "linked_by", lambda self, attempt: [])
    all_well(sweep("relinking", 2, ["slow"], 61, seed=1))
