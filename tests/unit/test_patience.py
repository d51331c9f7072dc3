"""Looking again at what another host wrote: the loop itself, and the places where one more look is enough."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distckpt import catalog, leases, ownership
from distckpt.durable import REAL, Files
from distckpt.errors import RootInUse
from distckpt.layout import Layout, Naming
from distckpt.marker import FileEntry
from distckpt.ordered import make_dir
from distckpt.patience import PASSING, Patience
from distckpt.reader import Root
from distckpt.removal import remove_tree
from distckpt.rootdir import make_root
from distckpt.saving.compare import compare
from distckpt.testing import faults, stalefs
from distckpt.testing.clock import VirtualRuntime
from distckpt.testing.stalefs import Server
from tests.support import ROOT, crash_disk, make_checkpoint, open_owned, record_root

STEP = Naming.parse("step-{step}")


class Absent(Files):
    """A client that remembers for good that ``path`` was absent, until its directory is listed."""

    def __init__(self, path: str) -> None:
        self.path, self.remembered = path, True

    def _ask(self, path: str) -> None:
        if self.remembered and path == self.path:
            raise FileNotFoundError(errno.ENOENT, "remembered as absent", path)

    def scan(self, path: str) -> Any:
        if path == os.path.dirname(self.path):
            self.remembered = False
        return super().scan(path)

    def read(self, path: str, limit: int) -> bytes:
        self._ask(path)
        return super().read(path, limit)

    def is_dir(self, path: str) -> bool:
        return super().is_dir(path) and not (self.remembered and path == self.path)


class Network(faults.FaultyFiles):
    def is_network(self, path: str) -> bool:
        return True


def test_the_last_look_comes_at_the_deadline_and_none_is_waited_for_without_one() -> None:
    runtime, moved = VirtualRuntime(), []
    looks = sum(1 for _ in Patience(runtime, 90.0, lambda: moved.append(1)).looks())
    assert 90.0 <= runtime.slept <= 90.1 and 90 <= looks <= 105 and len(moved) == looks - 1
    assert sum(1 for _ in Patience(runtime, 0.0).looks()) == 1 and runtime.slept <= 90.1
    sum(1 for _ in Patience(runtime, 0.0).looks(at_least=2.0))
    assert 92.0 <= runtime.slept <= 92.2


@pytest.mark.parametrize("number, asked", [*((n, 3) for n in PASSING), (errno.EIO, 1), (errno.EACCES, 1)])
def test_only_errors_that_may_pass_are_asked_again(number: int, asked: int) -> None:
    answers: list[Any] = [OSError(number, "x"), OSError(number, "x"), 7]
    count = len(answers)

    def ask() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    patience = Patience(VirtualRuntime(), 60.0)
    if asked == 1:
        with pytest.raises(OSError):
            patience.again(ask)
    else:
        assert patience.again(ask) == 7
    assert count - len(answers) == asked


def test_an_error_that_does_not_pass_is_raised_after_the_deadline() -> None:
    runtime = VirtualRuntime()
    with pytest.raises(FileNotFoundError, match="gone"):
        Patience(runtime, 60.0).again(lambda: REAL.stat("/gone"))
    assert 60 <= runtime.slept < 61


def test_a_root_that_is_reached_through_a_link_is_on_the_file_system_that_the_link_leads_to(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """~/scratch -> /lustre/me: it passed for a local disk, and nobody waited for anything."""
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:5 / {tmp_path}/far\\040off rw,relatime - lustre l:/x rw,flock\n")
    real_open = open

    def opened(path: Any, *args: Any, **more: Any) -> Any:
        return real_open(str(mounts) if path == "/proc/self/mountinfo" else path, *args, **more)

    monkeypatch.setattr("builtins.open", opened)
    (tmp_path / "far off").mkdir()
    (tmp_path / "near").symlink_to("far off")
    assert [REAL.is_network(f"{tmp_path}{name}") for name in ("/near/run", "/far off", "")] == [True, True, False]
    mount = REAL.mount(f"{tmp_path}/near/run")
    assert mount is not None and (mount.kind, mount.options) == ("lustre", "rw,relatime,flock")


def test_an_error_that_cannot_pass_ends_the_comparison_at_once_and_is_no_ranks_fault(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"abc")
    runtime = VirtualRuntime()
    files = faults.FaultyFiles(REAL, faults.fail(errno.EIO, op="stat", path="a.bin", forever=True))
    acked, hosts = {0: [], 1: [FileEntry("a.bin", 3, None, 1)]}, {0: "here", 1: "there"}
    with pytest.raises(OSError) as caught:
        compare(files, str(tmp_path), acked, hosts, Patience(runtime, 60.0))
    assert caught.value.errno == errno.EIO and runtime.slept == 0
    assert compare(REAL, str(tmp_path), acked, hosts, Patience(runtime, 60.0)) == ([], None)


def test_a_record_that_is_remembered_as_absent_is_no_new_run(tmp_path: Path) -> None:
    layout = record_root(str(tmp_path), run="the-run")
    record = catalog.read_record(Absent(layout.record), layout)
    assert record is not None and record.run == "the-run"
    os.unlink(layout.record)
    assert catalog.read_record(Absent(layout.record), layout) is None


def test_a_marker_that_is_remembered_as_absent_is_a_checkpoint(tmp_path: Path) -> None:
    make_checkpoint(str(tmp_path), 5)
    layout = Layout.at(tmp_path)
    found = catalog.scan(Absent(f"{layout.final('step-5')}/commit.json"), layout, STEP)
    assert [(entry.name, entry.committed) for entry in found] == [("step-5", True)]


def test_a_marker_that_is_listed_and_stays_unseen_is_no_proof(tmp_path: Path) -> None:
    make_checkpoint(str(tmp_path), 5)
    layout = Layout.at(tmp_path)
    files = faults.FaultyFiles(REAL, faults.fail(errno.ENOENT, op="read", path="commit.json", forever=True))
    assert [(e.committed, e.certain) for e in catalog.scan(files, layout, STEP)] == [(False, False)]


def test_an_old_size_is_no_damage_when_a_fresh_open_says_otherwise(tmp_path: Path) -> None:
    marker = make_checkpoint(str(tmp_path), 5)
    server = Server(REAL)
    there, here = VirtualRuntime(host="b"), VirtualRuntime(host="a")
    path = f"{tmp_path}/step-5/{marker.files[0].path}"
    client = server.client("a", here, sizes=60.0)
    server.sizes[path] = stalefs._Size("b", there.monotonic(), 1, 0)
    assert client.stat(path).size == 0 and catalog.check_files(client, f"{tmp_path}/step-5", marker.files) == []
    Path(path).write_bytes(b"short")
    assert "has 5 bytes" in catalog.check_files(client, f"{tmp_path}/step-5", marker.files)[0].what


def test_a_root_that_was_looked_for_too_early_opens(tmp_path: Path) -> None:
    make_checkpoint(str(tmp_path / "run"), 5)
    assert Root(tmp_path / "run", Absent(str(tmp_path / "run"))).latest_step() == 5


@pytest.mark.parametrize("op, path", [("scan", "/sub"), ("unlink", "/sub/a"), ("stat", "/sub"), ("rmdir", "/sub")])
def test_what_another_client_removed_while_a_tree_goes_is_no_error(tmp_path: Path, op: str, path: str) -> None:
    """ESTALE for what is gone: the rest goes all the same."""
    top = tmp_path / "victim"
    (top / "sub").mkdir(parents=True)
    for name in ("sub/a", "b"):
        (top / name).write_text("x")

    def vanish(operation: faults.Operation) -> None:
        (top / "sub" / "a").unlink(missing_ok=True)
        (top / "sub").rmdir()

    files = faults.FaultyFiles(REAL, faults.call(vanish, op=op, path=path), faults.fail(errno.ESTALE, op=op, path=path))
    remove_tree(files, str(tmp_path), str(top))
    assert files.fired and list(tmp_path.iterdir()) == []


def test_a_stale_mount_is_no_removal(tmp_path: Path) -> None:
    (tmp_path / "victim" / "sub").mkdir(parents=True)
    everything = faults.fail(errno.ESTALE, op=("scan", "unlink", "rmdir", "stat"), path="victim", forever=True)
    files = faults.FaultyFiles(REAL, everything)
    with pytest.raises(OSError):
        remove_tree(files, str(tmp_path), str(tmp_path / "victim"))
    assert (tmp_path / "victim" / "sub").is_dir()


@pytest.mark.parametrize("beats", [False, True])
def test_an_owner_whose_beat_is_stale_for_a_while_is_still_judged_by_it(beats: bool) -> None:
    disk, here = crash_disk(), VirtualRuntime(host="a", boot="1")
    disk.network = True
    open_owned(disk, here)
    there, layout = VirtualRuntime(here.clock, host="b", boot="2"), Layout.at(ROOT)
    stale = faults.fail(errno.ESTALE, 2, op="read", path=".beat", forever=True)
    files = faults.FaultyFiles(disk, stale)

    def pass_by(now: float) -> None:
        if there.slept > 60:
            files.faults.clear()
            if beats:
                disk.overwrite(layout.owner(1, "beat"), b"%020d" % 7)

    there.hooks.append(pass_by)
    if beats:
        with pytest.raises(RootInUse):
            ownership.Ownership.claim(files, layout, there)
    else:
        assert ownership.Ownership.claim(files, layout, there).generation == 2 and there.slept >= 90
    assert stale.fired


def test_an_owner_whose_beat_nobody_can_read_is_not_taken_for_dead() -> None:
    """Stale for longer than an owner may be silent: no look showed that the counter stood still."""
    disk, here = crash_disk(), VirtualRuntime(host="a", boot="1")
    disk.network = True
    open_owned(disk, here)
    there, layout, said = VirtualRuntime(here.clock, host="b", boot="2"), Layout.at(ROOT), set[str]()
    files = faults.FaultyFiles(disk, faults.fail(errno.ESTALE, 3, op="read", path=".beat", forever=True))
    with pytest.raises(OSError) as caught:
        ownership.Ownership.claim(files, layout, there, waiting=said.add)
    assert caught.value.errno == errno.ESTALE and ".beat" in str(caught.value) and 90 <= there.slept < 200
    assert ownership.highest(disk, layout) == 1 and any("is stale here; looking again for up to 90 s" in text for text in said)


def test_a_directory_that_another_host_made_is_waited_for_and_a_file_on_a_local_disk_is_not(tmp_path: Path) -> None:
    runtime = VirtualRuntime()
    (tmp_path / "made").mkdir()
    hidden: Callable[..., Any] = lambda: faults.fail(errno.ENOENT, op="stat", path="made", forever=True)  # noqa: E731
    files = faults.FaultyFiles(REAL, hidden())
    runtime.hooks.append(lambda now: files.faults.clear() if runtime.slept > 60 else None)
    assert make_dir(files, str(tmp_path / "made"), Patience(runtime, 90.0)) is False and runtime.slept < 65
    files.faults.append(hidden())
    runtime.hooks.clear()
    with pytest.raises(FileExistsError, match="another host made it, and 90 s later this one does not see a directory there"):
        make_dir(files, str(tmp_path / "made"), Patience(runtime, 90.0))
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        make_dir(REAL, str(tmp_path / "file"))


def test_a_root_that_another_host_has_just_made_is_waited_for(tmp_path: Path) -> None:
    layout, runtime = record_root(str(tmp_path)), VirtualRuntime()
    for hidden in (layout.home(), layout.home("owner")):
        files = Network(REAL, faults.fail(errno.ENOENT, op="stat", path=lambda p, h=hidden: p == h, forever=True))
        began = runtime.slept
        runtime.hooks[:] = [lambda now, f=files, b=began: f.faults.clear() if runtime.slept > b + 60 else None]
        make_root(files, layout, runtime)
        assert began + 60 < runtime.slept < began + 65


def test_a_lease_outlasts_a_directory_that_goes_between_two_looks(tmp_path: Path) -> None:
    """Another reader's release takes the directory away after ``mkdir`` said that it exists."""
    marker = make_checkpoint(str(tmp_path), 5)
    layout = record_root(str(tmp_path))
    path = layout.leases(marker.head.attempt)
    os.mkdir(path)
    files = faults.FaultyFiles(REAL, faults.call(lambda operation: os.rmdir(path), op="stat", path=marker.head.attempt))
    leases.take(files, layout, VirtualRuntime(), "step-5", marker.head.attempt, "test", None).release()
    assert files.fired


def test_two_that_claim_at_once_on_hosts_that_do_not_see_each_other_s_record_do_not_spin(tmp_path: Path) -> None:
    layout, here = record_root(str(tmp_path)), VirtualRuntime(host="a", boot="1")
    other = VirtualRuntime(here.clock, host="b", boot="2")

    class Blind(Network):
        """Lists no trace of an owner for a minute."""

        def scan(self, path: str) -> Any:
            found = super().scan(path)
            return found if here.slept > 60 or not path.endswith(("/owner", "/staging", "/trash")) else []

    open_owned(REAL, other, root=layout.root).close()
    files = Blind(REAL)
    owned = open_owned(files, here, root=layout.root)
    assert owned.generation == 2 and len(files.reads) < 2000 and 60 < here.slept < 100


def test_a_directory_that_cannot_be_looked_at_is_an_error_at_once(tmp_path: Path) -> None:
    runtime = VirtualRuntime()
    files = faults.FaultyFiles(REAL, faults.fail(errno.EIO, op="stat", path="there", forever=True))
    (tmp_path / "there").mkdir()
    with pytest.raises(OSError) as caught:
        make_dir(files, str(tmp_path / "there"), Patience(runtime, 60.0))
    assert caught.value.errno == errno.EIO and runtime.slept == 0
