"""What somebody who may write in the root cannot make us do (RELIABILITY.md, 3.7). Each check here was deleted once and
turned the test beside it red."""

from __future__ import annotations

import ast
import errno
import json
import os
import pickle
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distckpt
from distckpt import DCP, Shards, TrainState, beneath, catalog, marker, ordered, trust
from distckpt.checkpoint import Checkpoint
from distckpt.coordination.gate import Act
from distckpt.coordination.store import Client, decode
from distckpt.durable import REAL, Access, Files
from distckpt.errors import (
    ConfigError,
    CoordinationError,
    IntegrityError,
    MarkerError,
    NoUsableCheckpoint,
    RankDisagreement,
    ResumeError,
)
from distckpt.layout import MARKER, PATH_DEPTH, Layout, Naming, member_path_problem
from distckpt.marker import FileEntry
from distckpt.payloads import dcpread
from distckpt.removal import discard, remove_tree
from distckpt.testing.crashfs import CrashFiles, write_payload
from distckpt.testing.faults import FaultyFiles, call
from tests.inprocess import Job, Threads, same_error, values, write
from tests.support import Command, crash_disk, make_checkpoint, make_marker, record_root

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


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(trust.KEY_VARIABLE, raising=False)


def found(directory: Path) -> Checkpoint:
    return Checkpoint(str(directory), catalog.read_marker(REAL, str(directory)))


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
    with pytest.raises(OSError):
        within(5, lambda: REAL.append(str(checkpoint / "model.pt"), b"x"))


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


# -- unpickling --------------------------------------------------------------------------------------------------------


class Evil:
    """A pickle that runs code when it is loaded: it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self._path,)


def saved(root: Path, state: Any, **options: Any) -> Path:
    with distckpt.CheckpointManager(root, **options) as manager:
        manager.save(1, state)
    return root / "step-1"


def restore(root: Path, state: Any, **options: Any) -> Any:
    with distckpt.CheckpointManager(root, **options) as manager:
        return manager.restore(state)


def model() -> dict[str, Any]:
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(2)).sum().backward()
    optimizer.step()
    return {"model": layer, "optimizer": optimizer}


def same_size(path: Path, data: bytes) -> None:
    size = path.stat().st_size
    assert len(data) <= size
    path.write_bytes(data.ljust(size, b"\0"))


def reseal(directory: Path, **changed: bytes) -> None:
    """A marker that is right about the changed files: the forgery that digests alone cannot find."""
    whole = catalog.read_marker(REAL, str(directory))
    entries = []
    for entry in whole.files:
        data = (directory / entry.path).read_bytes()
        running = distckpt.digest.Running(distckpt.digest.algorithm_of(entry.digest)) if entry.digest else None
        if running is not None:
            running.update(data)
        entries.append(FileEntry(entry.path, len(data), running.text if running else None, entry.rank))
    import dataclasses

    (directory / MARKER).write_bytes(marker.build(dataclasses.replace(whole, files=tuple(entries))))


def test_a_torch_file_is_digested_before_it_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = saved(tmp_path / "r", Shards({"a": torch.ones(3)}))
    monkeypatch.setattr(torch, "load", lambda *a, **k: pytest.fail("it was unpickled"))
    same_size(directory / "shard.rank-00000-of-00001.pt", pickle.dumps(Evil(tmp_path / "ran")))
    with pytest.raises(IntegrityError, match="has digest"):
        restore(tmp_path / "r", Shards({"a": torch.zeros(3)}))


def test_per_rank_members_are_digested_before_they_are_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = saved(tmp_path / "r", TrainState(progress={"n": 1}))
    monkeypatch.setattr(torch, "load", lambda *a, **k: pytest.fail("it was unpickled"))
    same_size(directory / "members.rank-00000-of-00001.pt", b"")
    with pytest.raises(IntegrityError, match="has digest"):
        restore(tmp_path / "r", TrainState(progress={"n": 0}))


def test_the_metadata_of_dcp_is_digested_before_it_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = saved(tmp_path / "r", DCP(**model()))
    monkeypatch.setattr(dcpread._Unpickler, "load", lambda self: pytest.fail("it was unpickled"))
    same_size(directory / ".metadata", pickle.dumps(Evil(tmp_path / "ran")))
    with pytest.raises(IntegrityError, match="has digest"):
        restore(tmp_path / "r", DCP(**model()))


@pytest.mark.parametrize("digest", ["xxh3-128", None])
def test_metadata_that_is_more_than_metadata_runs_nothing(digest: str | None, tmp_path: Path) -> None:
    """Under a marker that was forged with it, or that has no digests, it is the names that are refused."""
    directory = saved(tmp_path / "r", DCP(**model()), digest=digest)
    (directory / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    reseal(directory)
    with pytest.raises(IntegrityError, match="it names (posix|os).mkdir"):
        restore(tmp_path / "r", DCP(**model()), digest=digest)
    assert not (tmp_path / "ran").exists()


def test_a_getattr_in_metadata_reaches_nothing_but_the_memory_formats(tmp_path: Path) -> None:
    text = b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\nMetadata\nV__init__\ntR."
    directory = saved(tmp_path / "r", DCP(**model()))
    (directory / ".metadata").write_bytes(text)
    reseal(directory)
    with pytest.raises(IntegrityError, match="asks for an attribute"):
        dcpread.metadata_of(found(directory))


def test_metadata_cannot_send_a_rank_to_other_files(tmp_path: Path) -> None:
    directory = saved(tmp_path / "r", DCP(**model()))
    whole = dcpread.metadata_of(found(directory))
    for info in whole.storage_data.values():
        info.relative_path = "../../../etc/hostname"
    (directory / ".metadata").write_bytes(pickle.dumps(whole))
    reseal(directory)
    with pytest.raises(distckpt.MemberMissing, match="holds no file '../../../etc/hostname'"):
        restore(tmp_path / "r", DCP(**model()))


def test_a_value_in_a_dcp_file_runs_nothing(tmp_path: Path) -> None:
    """A forged value under a marker that was forged with it: DCP's own planner would have run it."""
    import io

    state = {"note": "n" * 4000}
    directory = saved(tmp_path / "r", DCP(state=state))
    data = directory / "__0_0.distcp"
    out = io.BytesIO()
    torch.save(Evil(tmp_path / "ran"), out)
    whole = dcpread.metadata_of(found(directory))
    (info,) = whole.storage_data.values()
    info.offset, info.length = 0, len(out.getvalue())
    data.write_bytes(out.getvalue())
    (directory / ".metadata").write_bytes(pickle.dumps(whole))
    reseal(directory)
    with pytest.raises(ResumeError, match="[Ww]eights"):
        restore(tmp_path / "r", DCP(state={"note": ""}))
    assert not (tmp_path / "ran").exists()


class Odd:
    """A value of a class of the user's own."""


def test_a_value_that_could_not_be_loaded_again_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    with pytest.raises(distckpt.SaveError, match=r"state\['deep'\]\['odd'\] is a .*Odd, which torch.load"):
        saved(tmp_path / "r", DCP(state={"deep": {"odd": Odd(), "fine": torch.ones(1)}}))


# -- limits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "why"), [
    ("/".join("d" * (PATH_DEPTH + 1)), "directories deep"), ("x" * 256, "more than 255 bytes"),
    ("ä" * 128, "more than 255 bytes"), ("a/" + "x" * 1100, "longer than 1024")])
def test_a_path_is_neither_too_deep_nor_too_long(path: str, why: str) -> None:
    assert why in (member_path_problem(path) or "")
    with pytest.raises(MarkerError, match=why):
        marker.parse(marker.build(make_marker(1, payload={path: b""})))
    with pytest.raises(MarkerError):
        marker.glance(marker.build(make_marker(1, payload={path: b""})))
    assert member_path_problem("/".join("d" * PATH_DEPTH)) is None and member_path_problem("ä" * 127) is None


def test_a_manifest_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    data = marker.build(make_marker(1, payload={f"f{n}": b"" for n in range(11)}))
    monkeypatch.setattr(marker, "FILES_LIMIT", 10)
    for read in (marker.parse, marker.glance):
        with pytest.raises(MarkerError, match="11 files, more than 10"):
            read(data)
    with pytest.raises(ConfigError, match="more than 10 files"):
        marker.build(make_marker(1, payload={f"f{n}": b"" for n in range(11)}))


def test_no_marker_is_built_that_would_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marker, "SIZE_LIMIT", 5000)
    with pytest.raises(ConfigError, match="more than 5000"):
        marker.build(make_marker(1, meta={"long": "x" * 5000}))
    monkeypatch.setattr(marker, "META_LIMIT", 100)
    with pytest.raises(ConfigError, match="more than 100"):
        marker.check_meta({"a": "x" * 100})
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ConfigError, match="JSON"):
        marker.check_meta({"a": deep})


@pytest.mark.parametrize("text", [b"NaN", b"-Infinity", b"1e999", b'"\\ud800"', b'"\xed\xa0\x80"'])
def test_what_is_read_can_be_written_again(text: bytes) -> None:
    """Recovery does so: it must not end in an error that nobody expects."""
    fine = marker.build(make_marker(1, meta={"x": "here", "fine": "\\ud800 \U0001f600"}))
    assert marker.build(marker.parse(fine)) == fine
    plain = marker.build(make_marker(1, meta={"x": "here"}))
    evil = plain.replace(b'"here"', text).rpartition(b',\n"seal":')[0]
    import hashlib

    evil += b',\n"seal":"sha256:' + hashlib.sha256(evil).hexdigest().encode() + b'"}\n'
    for read in (marker.parse, marker.glance):
        with pytest.raises(MarkerError, match="not JSON"):
            read(evil)


@pytest.mark.parametrize("name", ["../step-1", "a/step-1", "..", "step-1\n", "\ud800", "", "n" * 300])
def test_the_name_in_a_head_is_one_plain_component(name: str) -> None:
    """It is made a path of: what is leased and stands in trash is moved back to that name."""
    head = {"format": 1, "seq": 1, "step": 1, "attempt": "0" * 16, "name": name, "series": "main", "run": "r", "generation": 1}
    with pytest.raises(MarkerError, match="not one plain directory name"):
        marker.parse_head(b'{"head":' + json.dumps(head).encode())
    for bad in ({"series": "../x"}, {"run": "\x1b[2J"}, {"run": ""}, {"seq": 1 << 63}, {"step": 10**30}):
        with pytest.raises(MarkerError):
            marker.parse_head(b'{"head":' + json.dumps({**head, "name": "step-1", **bad}).encode())


@pytest.mark.parametrize("run", ["", "a\nb", "r" * 256, "\x1b[31m"])
def test_a_run_id_that_no_marker_may_carry_is_refused_at_once(run: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run_id"):
        distckpt.CheckpointManager(tmp_path / "r", run_id=run)
    assert not (tmp_path / "r").exists()


def test_a_tree_without_an_end_is_an_error_and_no_crash() -> None:
    disk = CrashFiles("/d/v")
    path = "/d/v"
    for _ in range(80):
        path += "/x"
        disk.mkdir(path)
    with pytest.raises(OSError, match="nested more than"):
        list(ordered.walk(disk, "/d/v"))
    with pytest.raises(OSError, match="nested more than"):
        remove_tree(disk, "/d", "/d/v")


def test_a_record_of_brackets_is_torn_and_no_crash(tmp_path: Path) -> None:
    layout = record_root(str(tmp_path / "r"))
    Path(layout.home("leases", "x.json")).write_bytes(b"[" * 200_000)
    assert catalog.read_json(REAL, layout.home("leases", "x.json")) is None
    Path(layout.home("journal", "1.jsonl")).write_bytes(b"[" * 200_000 + b'\n{"event":"committed"}\n')
    assert distckpt.journal.ever_committed(REAL, layout)
    Path(layout.record).write_bytes(b"[" * 200_000)
    with pytest.raises(MarkerError):
        catalog.read_record(REAL, layout)


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


@pytest.fixture(params=["tmpfs", "bind"])
def mounted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """``root/v`` with something precious mounted on ``root/v/m``."""
    point, source = tmp_path / "root" / "v" / "m", tmp_path / "source"
    point.mkdir(parents=True)
    source.mkdir()
    how = ["-t", "tmpfs", "none", str(point)] if request.param == "tmpfs" else ["--bind", str(source), str(point)]
    if os.geteuid() != 0 or subprocess.run(["mount", *how], capture_output=True).returncode != 0:
        pytest.skip("cannot mount here")
    (point / "precious").write_bytes(b"x")
    yield tmp_path / "root"
    subprocess.run(["umount", str(point)], check=True)


@pytest.mark.root_only
def test_nothing_is_deleted_across_a_mount_point(opening: str, mounted: Path) -> None:
    (mounted / "v" / MARKER).write_bytes(b"{}")
    with pytest.raises(OSError, match="something is mounted there"):
        discard(REAL, str(mounted), str(mounted / "v"), MARKER)
    assert (mounted / "v" / "m" / "precious").read_bytes() == b"x"
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


# -- signed markers ----------------------------------------------------------------------------------------------------

KEY, OTHER = b"k" * 32, b"o" * 32


def use_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, secret: bytes = KEY) -> None:
    path = tmp_path / f"key-{secret[:1].decode()}"
    path.write_bytes(secret + b"\n")
    monkeypatch.setenv(trust.KEY_VARIABLE, str(path))


def candidates(root: Path) -> tuple[list[int], dict[str, str]]:
    seen = distckpt.open(root).candidates()
    return [e.step for e in seen.usable], seen.skipped


@pytest.fixture
def signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with the signed checkpoints of steps 1 and 2."""
    use_key(monkeypatch, tmp_path)
    root = tmp_path / "r"
    with distckpt.CheckpointManager(root, digest="sha256") as manager:
        for step in (1, 2):
            manager.save(step, {"a": torch.full((3,), float(step))})
    return root


def test_a_signed_marker_reads_back_and_binds_every_byte(signed: Path) -> None:
    data = (signed / "step-1" / MARKER).read_bytes()
    assert data.count(b"\n") == 4 and marker.parse(data, key=KEY).signed
    assert marker.parse(data) == marker.parse(data, key=KEY), "without a key it is a marker like any other"
    assert candidates(signed) == ([2, 1], {})
    for read in (marker.parse, marker.glance):
        with pytest.raises(MarkerError, match="not by the key"):
            read(data, key=OTHER)
        with pytest.raises(MarkerError, match="not signed"):
            read(marker.build(make_marker(1)), key=KEY)


def forged(directory: Path, **head: Any) -> None:
    """A marker edited by somebody without the key, who keeps the signature and seals anew."""
    whole = marker.parse((directory / MARKER).read_bytes())
    data = (directory / MARKER).read_bytes()
    mac = data.rpartition(b',\n"seal":')[0].rpartition(b',\n"mac":')[2]
    import hashlib

    plain = marker.build(marker.renamed(whole, **head)).rpartition(b',\n"seal":')[0]
    text = plain + b',\n"mac":' + mac
    (directory / MARKER).write_bytes(text + b',\n"seal":"sha256:' + hashlib.sha256(text).hexdigest().encode() + b'"}\n')


@pytest.mark.parametrize("change", [{"seq": 9}, {"attempt": "f" * 16}, {"run": "other"}, {"generation": 7}])
def test_no_part_of_the_identity_can_be_edited(change: dict[str, Any], signed: Path) -> None:
    forged(signed / "step-1", **change)
    usable, skipped = candidates(signed)
    assert usable == [2] and "not by the key" in skipped["step-1"]


def test_a_second_body_behind_the_signature_is_seen(signed: Path) -> None:
    """JSON's last key wins: with a signature that is merely found somewhere, an unsigned manifest would count."""
    import hashlib

    data = (signed / "step-1" / MARKER).read_bytes()
    sealed = data.rpartition(b',\n"seal":')[0]
    body = json.loads(data)["body"]
    body["files"] = [["evil.pt", 1, None, 0]]
    text = sealed + b',"body":' + json.dumps(body).encode()
    evil = text + b',\n"seal":"sha256:' + hashlib.sha256(text).hexdigest().encode() + b'"}\n'
    assert marker.parse(evil).files[0].path == "evil.pt", "the seal alone does not mind"
    for read in (marker.parse, marker.glance):
        with pytest.raises(MarkerError, match="not by the key"):
            read(evil, key=KEY)


def test_an_unsigned_checkpoint_is_none_where_there_is_a_key(signed: Path) -> None:
    run = json.loads((signed / ".distckpt" / "root.json").read_text())["run"]
    make_checkpoint(str(signed), 3, seq=99, run=run, durable=False)
    usable, skipped = candidates(signed)
    assert usable == [2, 1] and "not signed" in skipped["step-3"]
    with distckpt.CheckpointManager(signed, digest="sha256", keep_last=1) as manager:
        resumed = manager.resume()
        assert resumed.step == 2 and "not signed" in resumed.skipped["step-3"]
        assert manager.all_steps() == [1, 2] and manager.latest_step() == 2
        with pytest.raises(distckpt.StepAlreadyExists):
            manager.save(3, {"a": torch.zeros(3)})
        manager.save(4, {"a": torch.zeros(3)})  # rotates: what does not count goes neither
    assert sorted(p.name for p in signed.glob("step-*")) == ["step-3", "step-4"]


def test_a_marker_of_another_checkpoint_is_none(signed: Path) -> None:
    shutil.copy(signed / "step-2" / MARKER, signed / "step-1" / MARKER)
    shutil.copytree(signed / "step-2", signed / "step-7")
    usable, skipped = candidates(signed)
    assert usable == [2] and "belongs to 'step-2'" in skipped["step-1"] and "belongs to 'step-2'" in skipped["step-7"]


def test_an_older_commit_of_the_step_put_back_is_passed_over(signed: Path, tmp_path: Path) -> None:
    shutil.copytree(signed / "step-2", tmp_path / "old")
    with distckpt.CheckpointManager(signed, digest="sha256") as manager:
        manager.save(2, {"a": torch.zeros(3)}, on_exists="replace")
    shutil.rmtree(signed / "step-2")
    os.rename(tmp_path / "old", signed / "step-2")
    usable, skipped = candidates(signed)
    assert usable == [1] and "an older checkpoint was put back" in skipped["step-2"]
    with distckpt.CheckpointManager(signed, digest="sha256") as manager:
        assert manager.resume().step == 1 and manager.resume(step=2).step == 2, "an operator may mean it"


def test_a_file_exchanged_under_a_signed_marker_is_found(signed: Path) -> None:
    path = signed / "step-2" / "state.rank-00000-of-00001.pt"
    same_size(path, b"evil")
    with pytest.raises(IntegrityError, match="has digest sha256:"):
        restore(signed, {"a": torch.zeros(3)}, digest="sha256")


def test_ranks_with_different_keys_or_none_do_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import distckpt.start as start

    ids = iter(["a", "b"])
    monkeypatch.setattr(start, "key_id", lambda secret: next(ids))
    for error in same_error(Job(tmp_path / "r").run(lambda m: None), RankDisagreement):
        assert trust.KEY_VARIABLE in str(error)
    reports = iter([{"key": None}, {"key_problem": "it cannot be read here"}])
    monkeypatch.setattr(start, "_key_report", lambda: next(reports))
    for error in same_error(Job(tmp_path / "r").run(lambda m: None), ConfigError):
        assert "it cannot be read here" in str(error) and str(error).startswith("rank ")


@pytest.mark.parametrize(("content", "mode", "text"), [(None, 0o600, "cannot be read"), (b"short", 0o600, "holds 5 bytes"),
                                                      (KEY, 0o606, "can be written by every user")])
def test_a_key_that_is_no_good_is_an_error_on_every_rank(content: bytes | None, mode: int, text: str, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
        os.chmod(path, mode)
    monkeypatch.setenv(trust.KEY_VARIABLE, str(path))
    for error in same_error(Job(tmp_path / "r").run(lambda m: None), ConfigError):
        assert text in str(error)


def test_a_marker_is_compared_in_constant_time() -> None:
    """An ordinary comparison would tell a forger how much of a signature is right."""
    tree = ast.parse(Path(marker.__file__).read_text())
    check = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "_signature_problem")
    names = {n.attr for n in ast.walk(check) if isinstance(n, ast.Attribute)}
    assert "compare_digest" in names and not any(isinstance(n, ast.Compare) for n in ast.walk(check))


def test_a_key_and_a_digest_that_anybody_can_match_are_warned_of(signed: Path, caplog: pytest.LogCaptureFixture) -> None:
    distckpt.CheckpointManager(signed).close()
    assert "cannot tell files that were exchanged on purpose" in caplog.text
    caplog.clear()
    distckpt.CheckpointManager(signed, digest="sha256").close()
    assert "exchanged on purpose" not in caplog.text


def test_verify_says_that_nobody_checked_the_signature(signed: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert command("verify", signed, "--digest").code == 0
    monkeypatch.delenv(trust.KEY_VARIABLE)
    assert "nobody has checked by whom" in command("verify", signed).out


def test_recovery_and_adoption_sign_what_they_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    from distckpt import recovery
    from tests.support import STEP, stage_attempt

    use_key(monkeypatch, tmp_path)
    layout = record_root(str(tmp_path / "r"))
    for kind in ("staging", "trash"):
        os.mkdir(layout.home(kind, "1"))
    whole = stage_attempt(REAL, 5, 5, root=layout.root)
    path = Path(layout.staging(1, whole.head.attempt, "step-5", MARKER))
    path.write_bytes(marker.build(whole, KEY))
    assert recovery.recover(REAL, layout, STEP, 1).published == ["step-5"]
    write_payload(REAL, layout.final("step-4") + "/w.pt", b"w", durable=False)
    assert command("adopt", layout.root, "step-4").code == 0
    usable, skipped = candidates(Path(layout.root))
    assert (usable, skipped) == ([5, 4], {})


def test_a_root_where_nothing_is_signed_is_no_fresh_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "r", {"a": torch.ones(1)})
    use_key(monkeypatch, tmp_path)
    with pytest.raises(NoUsableCheckpoint, match="not signed"):
        restore(tmp_path / "r", {"a": torch.ones(1)})


# -- the control plane -------------------------------------------------------------------------------------------------

FORBIDDEN = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}


def sources(part: str = "") -> list[Path]:
    return sorted((Path(distckpt.__file__).parent / part).rglob("*.py"))


def test_the_control_plane_knows_no_pickle() -> None:
    for path in sources("coordination") + sources("saving") + [Path(distckpt.__file__).parent / f"{n}.py" for n in (
            "errors", "manager", "ending", "background", "behind", "resume", "start", "marker", "catalog", "leases", "owned")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if path.name == "writer.py" and path.parent.name == "saving":
                continue  # it talks to its own child over a pipe of its own, and to no rank
            names = [a.name for a in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not FORBIDDEN & {part for name in names for part in name.split(".")}, f"{path}:{getattr(node, 'lineno', 0)}"
            word = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            assert not (word.endswith("_object") or "_object_" in word and "list" in word) or word == "_object", f"{path}: {word}"
            assert word not in ("eval", "exec", "__import__"), f"{path}: {word}"


def test_unpickling_is_restricted_wherever_it_is_done() -> None:
    """``torch.load`` says ``weights_only=True``; ``pickle`` is used by the modules named here and by no other."""
    own_child = {"saving/writer.py", "testing/forks.py"}  # a socket pair or a pipe with a process that it started itself
    allowed = {"payloads/dcpread.py", "payloads/loadable.py", *own_child}
    home = Path(distckpt.__file__).parent
    for path in sources():
        name = str(path.relative_to(home))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("load", "loads"):
                owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
                assert owner != "pickle" or name in own_child, f"{name}:{node.lineno}"
                if owner == "torch":
                    given = {k.arg: k.value for k in node.keywords}
                    said = given.get("weights_only")
                    assert isinstance(said, ast.Constant) and said.value is True, f"{name}:{node.lineno}"
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                words = {a.name for a in node.names} | ({node.module} if isinstance(node, ast.ImportFrom) else set())
                assert "pickle" not in words or name in allowed, f"{name}:{node.lineno}"


@pytest.mark.parametrize("data", [b"", b"[1]", b"\x80", b"[" * 100_000, b"\xff\xfe", b"null"])
def test_what_is_no_object_of_json_is_an_error_of_ours(data: bytes) -> None:
    with pytest.raises(CoordinationError):
        decode(data)


def test_a_pickle_in_the_store_runs_nothing_and_is_an_error_on_every_rank(tmp_path: Path) -> None:
    """Rank 1's report is exchanged for a pickle before rank 0 reads it: both ranks end, with one error."""
    job = Job(tmp_path / "r")
    poison = pickle.dumps(Evil(tmp_path / "ran"))
    claim = Client.claim

    def poisoned(self: Client, key: str, value: dict[str, Any]) -> dict[str, Any]:
        if key.endswith("/report/1") and value.get("op") == "resume":
            self._raw.set(self._prefix + key, poison)
            return value
        return claim(self, key, value)

    job.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "claim", poisoned)
        outcomes = job.each(lambda m: m.resume(), timeout=9)
    assert all(isinstance(o.error, CoordinationError) and "not JSON" in str(o.error) for o in outcomes), outcomes
    assert not (tmp_path / "ran").exists()
    job.crash()


def test_a_pickle_among_the_messages_deafens_no_rank(tmp_path: Path) -> None:
    """The listener, the gatekeeper and the pulse pass over what is not ours, and answer what comes after it."""
    from distckpt.coordination.gate import news_key
    from distckpt.coordination.listener import control_key
    from distckpt.coordination.pulse import beat_key

    job = Job(tmp_path / "r")
    managers = job.start()
    poison = pickle.dumps(Evil(tmp_path / "ran"))
    client = managers[0]._group.rounds.client
    client.ticket("news")
    for key in (news_key(0), beat_key(1)):
        job.threads.store.set("t/" + key, poison)
    caller = managers[0]._group.rounds.caller
    number = caller.send(client, 1, "nothing")
    assert number >= 0
    job.threads.store.set("t/" + control_key(1, number + 1), poison)
    caller._numbers[1] = number + 2
    assert "MainThread" in caller.stacks(client, [1])[1], "the listener has answered the message after it"
    values(job.each(lambda m: write(m, 1)))
    job.finish()
    assert not (tmp_path / "ran").exists()


def test_a_heartbeat_that_is_none_stops_no_deadline() -> None:
    """The thread that reads it is the one that minds the deadlines."""
    from distckpt.coordination.pulse import _heard, beat_key

    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    client = Client(store, "t/")
    store.set("t/" + beat_key(1), b"\x80\x04.")
    assert _heard(client, 1) is None


@pytest.mark.parametrize("value", [{}, {"kind": 1}, {"kind": "save", "data": [1]}, {"kind": "stop", "reason": {}}])
def test_an_act_is_an_act(value: dict[str, Any]) -> None:
    with pytest.raises(CoordinationError, match="no act"):
        Act.from_json(value)
