"""What somebody who may write in the root cannot make us read or delete (RELIABILITY.md, 3.7). Deleting each
check in turn is the business of the mutants (``scripts/proof/guards.py``)."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import distckpt
from distckpt import beneath, catalog, marker, trust
from distckpt.checkpoint import Checkpoint
from distckpt.durable import REAL, Access, Files
from distckpt.errors import ConfigError, IntegrityError
from distckpt.layout import MARKER, Layout, Naming
from distckpt.removal import discard, remove_tree
from distckpt.testing.faults import FaultyFiles, call
from tests.inprocess import Job, Threads, same_error, values, write
from tests.support import Command, crash_disk, found, make_checkpoint, make_marker, same_size

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user or to mount")
PAYLOAD = {"model.pt": b"weights", "sub/optim.pt": b"moments"}


@pytest.fixture(params=["openat2", "walk"])
def opening(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to open below a directory."""
    if request.param == "walk":
        monkeypatch.setattr(beneath, "_SYSCALL", None)
    return str(request.param)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    make_checkpoint(str(tmp_path / "run"), 1, payload=PAYLOAD, durable=False)
    return tmp_path / "run" / "step-1"


def problems(directory: Path, digest: bool = True) -> list[str]:
    whole = catalog.read_marker(REAL, str(directory))
    return [f"{p.path} {p.what}" for p in catalog.check_files(REAL, str(directory), whole.files, digest)]


def within(seconds: float, act: Any) -> Any:
    """What ``act()`` gives; AssertionError when it blocks."""
    outcomes = Threads(1).run(lambda rank: act(), seconds)
    if outcomes[0].error is not None:
        raise outcomes[0].error
    return outcomes[0].value


# -- members -----------------------------------------------------------------------------------------------------------


def test_whole_members_are_read_either_way(opening: str, checkpoint: Path) -> None:
    assert problems(checkpoint) == []
    with found(checkpoint).open("sub/optim.pt") as file:
        assert file.read() == b"moments"


@pytest.mark.parametrize("digest", [False, True])
def test_no_link_stands_for_a_member_or_for_a_directory_on_the_way(opening: str, digest: bool, checkpoint: Path,
                                                                   tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.move(checkpoint / "sub", elsewhere)
    os.symlink(elsewhere, checkpoint / "sub")  # the same bytes, so only the way there can be refused
    assert problems(checkpoint, digest) == ["sub/optim.pt is reached through a symlink"]
    with pytest.raises(IntegrityError, match="reached through a symlink"):
        found(checkpoint).open("sub/optim.pt")
    os.unlink(checkpoint / "sub")
    os.mkdir(checkpoint / "sub")
    os.symlink(elsewhere / "optim.pt", checkpoint / "sub" / "optim.pt")
    assert problems(checkpoint, digest) == ["sub/optim.pt is a link, not a regular file"]
    with pytest.raises(IntegrityError, match="is a link"):
        found(checkpoint).open("sub/optim.pt")


def test_a_file_is_checked_without_being_opened_too(checkpoint: Path) -> None:
    here = found(checkpoint)
    here.check("model.pt")
    same_size(checkpoint / "model.pt", b"evil")
    here.check("model.pt", digest=False)
    with pytest.raises(IntegrityError, match="has digest"):
        here.check("model.pt")
    os.unlink(checkpoint / "model.pt")
    with pytest.raises(IntegrityError, match="is missing"):
        here.check("model.pt", digest=False)


def test_a_checkpoint_that_is_a_link_itself_is_none(opening: str, checkpoint: Path) -> None:
    os.rename(checkpoint, checkpoint.parent / "real")
    os.symlink("real", checkpoint)
    entries = catalog.scan(REAL, Layout.at(checkpoint.parent), Naming.parse("step-{step}"))
    assert [(e.committed, e.problem) for e in entries] == [(False, "it is a symlink, not a directory")]
    assert problems(checkpoint, False) == [f"{path} is reached through a symlink" for path in PAYLOAD]


def test_a_fifo_or_a_socket_blocks_nobody(opening: str, checkpoint: Path) -> None:
    os.unlink(checkpoint / "model.pt")
    os.mkfifo(checkpoint / "model.pt")
    assert within(5, lambda: problems(checkpoint)) == ["model.pt is a other, not a regular file"]
    for use in (lambda: REAL.member(str(checkpoint), "model.pt"), lambda: REAL.read(str(checkpoint / "model.pt"), 9),
                lambda: list(REAL.pieces(str(checkpoint / "model.pt")))):
        with pytest.raises(OSError, match="not a regular file"):
            within(5, use)
    with pytest.raises(OSError):
        within(5, lambda: REAL.fsync(str(checkpoint / "model.pt")))
    for write_to in (REAL.append, REAL.overwrite):
        with pytest.raises(OSError):
            within(5, partial(write_to, str(checkpoint / "model.pt"), b"x"))


def test_no_terminal_that_stands_for_a_file_becomes_ours(tmp_path: Path) -> None:
    """A session without one, as a daemon's is, gets the first that it opens, and with it the signals of who types there."""
    keyboard, terminal = os.openpty()
    child = os.fork()
    if child == 0:
        ended = 1
        try:
            os.setsid()
            with suppress(OSError):
                REAL.read(os.ttyname(terminal), 9)
            os.close(os.open("/dev/tty", os.O_RDWR))
        except OSError as error:
            ended = 0 if error.errno == errno.ENXIO else 2
        finally:
            os._exit(ended)
    assert os.waitpid(child, 0)[1] == 0
    os.close(terminal)
    os.close(keyboard)


def test_a_hard_link_to_a_foreign_file_is_judged_by_its_bytes_and_only_its_name_goes(checkpoint: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"weights")
    os.unlink(checkpoint / "model.pt")
    os.link(foreign, checkpoint / "model.pt")
    assert problems(checkpoint) == [], "saves with dedup='link' make some"
    foreign.write_bytes(b"forgery")
    os.chmod(foreign, 0o4755)
    (wrong,) = problems(checkpoint)
    assert wrong.startswith("model.pt has digest")
    discard(REAL, str(checkpoint.parent), str(checkpoint), MARKER)
    seen = foreign.stat()
    assert (foreign.read_bytes(), seen.st_mode & 0o7777, seen.st_nlink) == (b"forgery", 0o4755, 1) and not checkpoint.exists()


def test_what_is_read_is_the_file_that_was_checked(opening: str, checkpoint: Path) -> None:
    """The name is swapped when the file is open and not yet checked: the descriptor stays with what was checked."""
    def swap(_: Any) -> None:
        os.rename(checkpoint / "model.pt", checkpoint / "old")
        (checkpoint / "model.pt").write_bytes(b"evil!!!")

    files = FaultyFiles(REAL, call(swap, op="read", path="model.pt", after=True))
    with Checkpoint(str(checkpoint), catalog.read_marker(REAL, str(checkpoint)), files=files).open("model.pt") as file:
        assert files.fired and file.read() == b"weights"


def test_a_directory_swapped_for_a_link_in_a_loop_never_leads_out(opening: str, checkpoint: Path, tmp_path: Path) -> None:
    evil = tmp_path / "evil"
    evil.mkdir()
    (evil / "optim.pt").write_bytes(b"forgery")
    stop = threading.Event()

    def swap() -> None:
        os.symlink(evil, checkpoint / "link")
        os.rename(checkpoint / "sub", checkpoint / "real")
        while not stop.is_set():
            os.rename(checkpoint / "real", checkpoint / "sub")
            os.rename(checkpoint / "sub", checkpoint / "real")
            os.rename(checkpoint / "link", checkpoint / "sub")
            os.rename(checkpoint / "sub", checkpoint / "link")

    thread = threading.Thread(target=swap, daemon=True)
    thread.start()
    read = 0
    try:
        for _ in range(3000):
            try:
                with REAL.member(str(checkpoint.parent), "step-1/sub/optim.pt") as file:
                    assert file.read() == b"moments"
                    read += 1
            except OSError as error:
                assert error.errno in (errno.ELOOP, errno.ENOENT, errno.ENOTDIR, errno.EAGAIN), error
    finally:
        stop.set()
        thread.join(5)
    assert read > 0


@pytest.mark.parametrize("below", ["../evil", "sub/../../evil", "/etc/passwd"])
def test_no_name_leads_out_of_the_directory(opening: str, below: str, checkpoint: Path) -> None:
    (checkpoint.parent / "evil").write_bytes(b"x")
    for use in (REAL.member, REAL.look, REAL.folder):
        with pytest.raises(OSError) as caught:
            use(str(checkpoint), below)
        assert caught.value.errno == errno.EXDEV


def test_a_marker_that_changed_between_two_looks_leads_nowhere(checkpoint: Path) -> None:
    """Its head said step-1 when it was listed; the one that is read whole says another name, which is made a path of."""
    from distckpt.resume import Chooser

    layout = Layout.at(checkpoint.parent)
    (entry,) = catalog.scan(REAL, layout, Naming.parse("step-{step}"))
    (checkpoint / MARKER).write_bytes(marker.build(make_marker(7)))
    chooser = Chooser(REAL, layout, Naming.parse("step-{step}"), None, None, Any, Any)  # type: ignore[arg-type]
    assert "belongs to 'step-7'" in (chooser._open(entry) or "")


# -- deletion ----------------------------------------------------------------------------------------------------------


def test_a_link_in_what_is_deleted_goes_and_what_it_names_stays(opening: str, tmp_path: Path) -> None:
    keep = tmp_path / "keep"
    keep.mkdir()
    (keep / "precious").write_bytes(b"x")
    victim = tmp_path / "root" / "trash" / "v"
    (victim / "sub").mkdir(parents=True)
    os.symlink(keep, victim / "sub" / "link")
    os.symlink(keep, victim / "link")
    discard(REAL, str(tmp_path / "root"), str(victim), MARKER)
    assert not victim.exists() and (keep / "precious").exists()
    os.symlink(keep, victim)
    discard(REAL, str(tmp_path / "root"), str(victim), MARKER)
    assert not victim.is_symlink() and (keep / "precious").exists()


def test_a_directory_that_becomes_a_link_between_look_and_delete_leads_nowhere(opening: str, tmp_path: Path) -> None:
    """Swapped after its listing said "a directory" and before it is entered."""
    keep, victim = tmp_path / "keep", tmp_path / "root" / "v"
    keep.mkdir()
    (keep / "precious").write_bytes(b"x")
    (victim / "sub").mkdir(parents=True)
    (victim / "sub" / "mine").write_bytes(b"y")

    def swap(_: Any) -> None:
        os.rename(victim / "sub", tmp_path / "aside")
        os.symlink(keep, victim / "sub")

    files = FaultyFiles(REAL, call(swap, op="stat", path="v/sub"))
    remove_tree(files, str(tmp_path / "root"), str(victim))
    assert files.fired and not victim.exists() and (keep / "precious").exists()


def test_a_directory_that_becomes_a_link_while_it_is_emptied_leads_nowhere(opening: str, tmp_path: Path) -> None:
    """Swapped when it is open already: what goes on being removed is what was opened."""
    keep, victim = tmp_path / "keep", tmp_path / "root" / "v"
    keep.mkdir()
    (victim / "sub").mkdir(parents=True)
    for name in ("a", "b"):
        (keep / name).write_bytes(b"precious")
        (victim / "sub" / name).write_bytes(b"y")

    def swap(_: Any) -> None:
        os.rename(victim / "sub", victim / "aside")
        os.symlink(keep, victim / "sub")

    files = FaultyFiles(REAL, call(swap, at=1, op="unlink", path="v/sub/a"))
    with pytest.raises(OSError):  # what was put there meanwhile is left to the next try
        remove_tree(files, str(tmp_path / "root"), str(victim))
    assert files.fired and sorted(os.listdir(keep)) == ["a", "b"] and not (victim / "aside" / "b").exists()


def test_trash_that_is_a_link_itself_is_not_emptied(opening: str, tmp_path: Path) -> None:
    (tmp_path / "keep" / "v").mkdir(parents=True)
    (tmp_path / "root").mkdir()
    os.symlink(tmp_path / "keep", tmp_path / "root" / "trash")
    for remove in (lambda r, p: remove_tree(REAL, r, p), lambda r, p: discard(REAL, r, p, MARKER)):
        with pytest.raises(OSError) as caught:
            remove(str(tmp_path / "root"), str(tmp_path / "root" / "trash" / "v"))
        assert caught.value.errno == errno.ELOOP
    assert (tmp_path / "keep" / "v").exists()


@pytest.mark.parametrize("which", ["v", "v/step-1"])
def test_trash_that_becomes_a_link_before_its_marker_goes_leads_to_no_other_run(opening: str, which: str, tmp_path: Path) -> None:
    """Swapped when its listing was read: the marker is unlinked by name, which would go through the link."""
    root, victim = tmp_path / "root", tmp_path / "root" / "v"
    make_checkpoint(str(tmp_path), 1, directory=str(victim / "step-1"), durable=False)
    make_checkpoint(str(tmp_path / "other"), 1, durable=False)

    def swap(_: Any) -> None:
        os.rename(root / which, root / "aside")
        os.symlink(tmp_path / "other" / "step-1", root / which)

    files = FaultyFiles(REAL, call(swap, op="scan", path="root/v", after=True))
    with pytest.raises(OSError) as caught:  # the next try finds a link, and removes that
        discard(files, str(root), str(victim), MARKER)
    assert files.fired and caught.value.errno == errno.ELOOP and (tmp_path / "other" / "step-1" / MARKER).exists()


@pytest.fixture(params=["tmpfs", "bind"])
def mounted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """``root/v`` with something precious mounted on ``root/v/m``."""
    point, source = tmp_path / "root" / "v" / "m", tmp_path / "source"
    point.mkdir(parents=True)
    source.mkdir()
    how = ["-t", "tmpfs", "none", str(point)] if request.param == "tmpfs" else ["--bind", str(source), str(point)]
    if os.geteuid() != 0 or subprocess.run(["mount", *how], capture_output=True).returncode != 0:
        pytest.skip("cannot mount here")
    for name in ("precious", MARKER):
        (point / name).write_bytes(b"x")
    yield tmp_path / "root"
    subprocess.run(["umount", str(point)], check=True)


@pytest.mark.root_only
def test_nothing_is_deleted_across_a_mount_point(opening: str, mounted: Path) -> None:
    (mounted / "v" / MARKER).write_bytes(b"{}")
    with pytest.raises(OSError, match="something is mounted there"):
        discard(REAL, str(mounted), str(mounted / "v"), MARKER)
    assert sorted(os.listdir(mounted / "v" / "m")) == [MARKER, "precious"]
    assert not (mounted / "v" / MARKER).exists(), "the marker goes first, whatever comes then"


def test_a_stalled_owner_takes_no_marker_from_a_checkpoint_that_was_put_back() -> None:
    """It had looked into its trash before it was taken over. Its unlink goes by name, so the fence holds it (S5)."""
    disk = crash_disk()
    make_checkpoint(disk, 1, root="/disk/run", directory="/disk/run/.distckpt/trash/1/step-1")

    def take_over(_: Any) -> None:
        disk.rename("/disk/run/.distckpt/trash/1/step-1", "/disk/run/step-1")

    files = FaultyFiles(disk, call(take_over, op="unlink", path=MARKER))
    discard(files, "/disk/run", "/disk/run/.distckpt/trash/1/step-1", MARKER)
    whole = catalog.read_marker(disk, "/disk/run/step-1")
    assert files.fired and catalog.check_files(disk, "/disk/run/step-1", whole.files) == []


# -- shared roots ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("access", "text"), [
    (Access(1000, 1000, 0o777), "every user may write"), (Access(0, 1000, 0o2777), "every user may write"),
    (Access(1001, 1000, 0o755), "belongs to uid 1001"), (Access(1000, 0, 0o755), "belongs to uid 1000"),
    (Access(1000, 1000, 0o1777), None), (Access(0, 1000, 0o2775), None), (Access(1000, 1000, 0o2770), None)])
def test_who_shares_a_root(access: Access, text: str | None, tmp_path: Path) -> None:
    class Owned(Files):
        def access(self, path: str) -> Access:
            return access

    problem = trust.sharers(Owned(), str(tmp_path))
    assert (problem is None) == (text is None) and (text or "") in (problem or "")


def test_a_root_that_everybody_may_write_in_is_refused_on_every_rank_and_can_be_allowed(tmp_path: Path) -> None:
    root = tmp_path / "r"
    root.mkdir()
    os.chmod(root, 0o777)
    for error in same_error(Job(root).run(lambda m: None), ConfigError):
        assert "is shared" in str(error) and "allow_shared_root=True" in str(error)
    assert os.listdir(root) == [], "nothing was made in it"
    assert values(Job(root, allow_shared_root=True).run(lambda m: write(m, 1))) == [None, None]
    os.chmod(root, 0o1777)
    assert values(Job(root).run(lambda m: write(m, 2))) == [None, None]


def test_a_root_that_our_own_umask_opens_to_everybody_is_refused(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        same_error(Job(tmp_path / "r").run(lambda m: None), ConfigError)
    finally:
        os.umask(before)
    os.chmod(tmp_path / "r", 0o755)
    assert values(Job(tmp_path / "r").run(lambda m: write(m, 1))) == [None, None], "and no owner was left behind"


@root_only
def test_a_root_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    os.chown(tmp_path / "r", 12345, -1)
    with pytest.raises(ConfigError, match="belongs to uid 12345"):
        distckpt.CheckpointManager(tmp_path / "r")
    distckpt.CheckpointManager(tmp_path / "r", allow_shared_root=True).close()


def test_readers_of_a_shared_root_are_warned_and_served(checkpoint: Path, caplog: pytest.LogCaptureFixture,
                                                        command: Command) -> None:
    os.chmod(checkpoint.parent, 0o777)
    assert distckpt.open(checkpoint.parent).latest() is not None
    assert "every user may write in it" in caplog.text
    said = command("ls", checkpoint.parent)
    assert said.code == 0 and "every user may write in it" in said.err
