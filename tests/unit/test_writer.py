"""The writer process: the same files as the thread's, its death noticed at once, a new one for the next save."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import distckpt
from distckpt import layout
from distckpt.durable import Files
from distckpt.errors import ConfigError, DiskFull, SaveError
from distckpt.options import Seams
from distckpt.payloads.base import Ranks
from distckpt.saving import writer as writing
from distckpt.saving.arena import Arena
from distckpt.saving.files import RankFiles
from distckpt.saving.piecewriter import PeerFailed
from tests.inprocess import await_, tree


def manager_of(root: Path, **options: Any) -> distckpt.CheckpointManager:
    return distckpt.CheckpointManager(root, writer="process", **options)


def gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")


def some_state() -> dict[str, distckpt.Shards]:
    torch.manual_seed(1)
    weight = torch.randn(200, 300)
    return {"model": distckpt.Shards({"w": weight, "tied": weight, "t": weight[:5, :7].t(), "half": torch.randn(5).bfloat16(),
                                      "none": torch.empty(0), "scalar": torch.tensor(2), "n": 3, "deep": [{"x": torch.ones(2)}]}),
            "safe": distckpt.Shards({"a": torch.arange(9.0), "b": torch.ones(2, 2)}, format="safetensors")}


def test_it_writes_what_the_thread_writes(tmp_path: Path) -> None:
    roots = {}
    for how in ("thread", "process"):
        with distckpt.CheckpointManager(tmp_path / how, writer=how) as manager:
            made = manager.save(1, some_state(), background=True).result(30)
            roots[how] = {f.path: (f.size, f.digest) for f in made.marker.files}
        assert len(tree(tmp_path / how)) == 4
    assert roots["thread"] == roots["process"] and len(roots["thread"]) == 2
    back = torch.load(made.below("model").mine("shard.pt"), weights_only=True)
    assert back["w"].data_ptr() == back["tied"].data_ptr()


def test_members_travel_and_the_state_may_change_at_once(tmp_path: Path) -> None:
    progress = {"n": 1, "seen": torch.zeros(3)}
    state = distckpt.TrainState(rng=True, progress=progress, part=distckpt.Member({"k": [1]}, on_world_change="rank0"))
    with manager_of(tmp_path / "root") as manager:
        random.seed(4)
        drawn = random.Random(4).random()
        for number in (1, 2):
            manager.save(number, state, background=True)
            progress["n"] += 1
            progress["seen"].add_(1)
        manager.wait()
        random.seed(99)
        assert manager.restore(state, step=1) == 1
        assert progress["n"] == 1 and progress["seen"].tolist() == [0, 0, 0] and random.random() == drawn


def test_the_training_process_does_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with manager_of(tmp_path / "root") as manager:
        first = manager._behind.writer.pid  # type: ignore[union-attr]
        monkeypatch.setattr(distckpt.Shards, "write", None)  # here; the child has its own
        for number in range(1, 5):
            manager.save(number, {"w": torch.full((10_000 * number,), float(number))}, background=True)
        manager.wait()
        assert manager._behind.writer.pid == first  # type: ignore[union-attr]
        assert manager._behind.arena.version == 4
        for number, made in zip(range(4, 0, -1), manager.checkpoints(), strict=True):
            assert torch.equal(torch.load(made.mine("state.pt", rank=0))["w"], torch.full((10_000 * number,), float(number)))
    assert first is not None and gone(first)


@pytest.mark.parametrize(("number", "said"), [(signal.SIGKILL, r"was ended by SIGKILL \(out of memory\?\)"),
                                              (signal.SIGABRT, "was ended by SIGABRT")])
def test_its_death_is_noticed_at_once_and_the_next_save_has_another(tmp_path: Path, number: int, said: str) -> None:
    state = {"w": torch.ones(1000)}
    with manager_of(tmp_path / "root") as manager:
        manager.save(1, state, background=True).result(30)
        pid = manager._behind.writer.pid  # type: ignore[union-attr]
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        handle = manager.save(2, state, background=True)
        time.sleep(0.3)
        assert not handle.done()
        begun = time.monotonic()
        os.kill(pid, number)
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(SaveError, match=said) as caught:
            manager.wait()
        assert time.monotonic() - begun < 2.0 and isinstance(caught.value.__cause__, writing.WriterDied)
        assert caught.value.failures[0].type == "WriterDied"
        manager.save(3, state, background=True).result(30)
        assert manager._behind.writer.pid not in (None, pid) and manager.all_steps() == [1, 3]  # type: ignore[union-attr]


def test_one_that_died_between_saves_is_replaced(tmp_path: Path) -> None:
    with manager_of(tmp_path / "root") as manager:
        pid = manager._behind.writer.pid  # type: ignore[union-attr]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert manager._behind.writer._child.wait(10) == -signal.SIGKILL  # type: ignore[union-attr]
        manager.save(1, {"w": torch.ones(10)}, background=True).result(30)
        assert manager._behind.writer.pid != pid  # type: ignore[union-attr]


def test_what_belongs_to_a_child_goes_with_it() -> None:
    """Its channel is closed when it is replaced, when its death is told, and at the end, which is how it hears of that."""
    writer = writing.WriterProcess(Arena())

    def started() -> tuple[Any, Any]:
        writer.start()
        return writer._child, writer._channel

    first, channel = started()
    first.kill()
    first.wait(10)
    second, other = started()
    assert channel.closed and second is not first
    second.kill()
    assert "was ended by SIGKILL" in str(writer._death()) and other.closed and writer.pid is None
    third, last = started()
    writer.close(60.0)
    assert third.returncode == 0 and last.closed and writer.pid is None


def test_who_leaves_by_an_exception_takes_it_along(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), manager_of(tmp_path / "root") as manager:
        child = manager._behind.writer._child  # type: ignore[union-attr]
        raise ZeroDivisionError
    assert child is not None and child.returncode is not None


def test_its_exit_code_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_CHILD", "import sys; sys.exit(3) # {path} {channel}")
    with manager_of(tmp_path / "root") as manager:
        manager.save(1, {"w": torch.ones(10)}, background=True)
        with pytest.raises(SaveError, match="ended with exit code 3"):
            manager.wait()


def test_a_full_disk_over_there_is_a_full_disk_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = ("import distckpt.durable as d\n"
              "def full(self, path): raise OSError(28, 'No space left on device', path)\n"
              "d.Files.open = full\n")
    monkeypatch.setattr(writing, "_CHILD", writing._CHILD.replace("serve({channel})", broken + "serve({channel})"))
    with manager_of(tmp_path / "root") as manager:
        manager.save(1, {"w": torch.ones(10)}, background=True)
        with pytest.raises(DiskFull, match="state.rank-00000-of-00001.pt"):
            manager.wait()


def test_it_syncs_what_it_closed_before_it_says_so_and_holds_nothing_open(tmp_path: Path,
                                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    broken = ("import distckpt.durable as d\n"
              "def lost(self): raise OSError(5, 'Input/output error', self._path)\n"
              "def refused(self, path, real=d.Files.open):\n"
              "    if 'second' in path: raise OSError(13, 'Permission denied', path)\n"
              "    return real(self, path)\n"
              "d._File.fsync = lost\n"
              "d.Files.open = refused\n")
    monkeypatch.setattr(writing, "_CHILD", writing._CHILD.replace("serve({channel})", broken + "serve({channel})"))
    with manager_of(tmp_path / "root") as manager:
        for names, said in ((("first",), "Input/output error"), (("first", "second"), "Permission denied")):
            manager.save(1, {name: distckpt.Shards({"w": torch.ones(10)}) for name in names}, background=True)
            with pytest.raises(SaveError, match=said):
                manager.wait()
            held = [os.readlink(link) for link in Path(f"/proc/{manager._behind.writer.pid}/fd").iterdir()]  # type: ignore[union-attr]
            assert not [path for path in held if path.startswith(str(tmp_path))]


def test_it_ignores_stop_signals_and_ends_with_its_parent(tmp_path: Path) -> None:
    with manager_of(tmp_path / "root") as manager:
        manager.save(1, {"w": torch.ones(10)}, background=True).result(30)
        pid = manager._behind.writer.pid  # type: ignore[union-attr]
        assert pid is not None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(pid, number)
        manager.save(2, {"w": torch.ones(10)}, background=True).result(30)
        assert manager._behind.writer.pid == pid  # type: ignore[union-attr]
        channel = manager._behind.writer._channel  # type: ignore[union-attr]
        assert channel is not None
        channel.close()  # as the kernel does when this process dies
        await_(lambda: manager._behind.writer._child.poll() is not None)  # type: ignore[union-attr]


def test_it_leaves_when_another_rank_has_failed(tmp_path: Path) -> None:
    """The order to stop comes between two pieces; one that is stuck is killed before this rank says that it has left."""
    arena = Arena(shared=True)
    arena.reserve(32 << 20)
    process = writing.WriterProcess(arena)
    aborted = threading.Event()
    target = tmp_path / "x"
    target.mkdir()
    files = RankFiles(Files(), str(target), 0, 1, algorithm=None, aborted=aborted.is_set)
    part = distckpt.Shards({"w": arena.cut(torch.zeros(8 << 20))})
    packed = process.pack(part)
    assert packed is not None and len(packed) < 2000
    ranks = Ranks(0, 1, lambda: None)
    process.write(packed, files, ranks)
    assert [e.path for e in files.finish()] == [layout.rank_name("shard.pt", 0, 1)]
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(0.2, aborted.set).start()
    threading.Timer(0.6, os.kill, (pid, signal.SIGCONT)).start()
    again = RankFiles(Files(), str(tmp_path), 0, 1, algorithm=None, aborted=aborted.is_set)
    with pytest.raises(PeerFailed):
        process.write(packed, again, ranks)
    assert process.pid == pid and sum(p.stat().st_size for p in tmp_path.glob("shard*")) < 16 << 20
    os.kill(pid, signal.SIGSTOP)
    writing._GRACE, before = 0.3, writing._GRACE
    try:
        with pytest.raises(writing.WriterDied, match="SIGKILL"):
            process.write(packed, again, ranks)
    finally:
        writing._GRACE = before
    assert gone(pid)


def test_what_it_cannot_do_a_thread_does(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    with manager_of(tmp_path / "root") as manager:
        pid = manager._behind.writer.pid  # type: ignore[union-attr]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        manager.save(1, distckpt.TrainState(model=model, progress={"n": 1}), background=True).result(30)  # DCP's collectives
        assert manager._behind.writer.pid == pid and manager.all_steps() == [1]  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="writer='process' writes to the real file system only"):
        distckpt.CheckpointManager(tmp_path / "other", writer="process", seams=Seams(files=Files()))
    with pytest.raises(ConfigError, match="writer must be one of 'thread', 'process'"):
        distckpt.CheckpointManager(tmp_path / "third", writer="fork")
