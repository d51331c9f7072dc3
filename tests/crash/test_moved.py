"""No absolute path stands in a checkpoint: a root, or one checkpoint, may be moved or copied and still verifies and loads."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest
import torch

import distckpt
from distckpt.cli.main import main


def _run(root: Path, steps: range, naming: str | None = None) -> None:
    state = {"w": torch.zeros(1000)}
    with distckpt.CheckpointManager(root, naming=naming) as manager:
        manager.restore(state)
        for step in steps:
            state["w"].fill_(float(step))
            manager.save(step, state)


def _restored(root: Path) -> tuple[int | None, float]:
    state = {"w": torch.full((1000,), -1.0)}
    with distckpt.CheckpointManager(root) as manager:
        step = manager.restore(state, verify="digest")
    return step, float(state["w"][0])


@pytest.mark.parametrize("how", ["moved", "copied"])
def test_a_whole_root(how: str, tmp_path: Path) -> None:
    _run(tmp_path / "old", range(1, 4))
    there = tmp_path / "elsewhere" / "new"
    if how == "moved":
        there.parent.mkdir()
        (tmp_path / "old").rename(there)
    else:
        shutil.copytree(tmp_path / "old", there)
    assert main(["verify", "--digest", str(there)]) == 0
    assert _restored(there) == (3, 3.0)
    _run(there, range(4, 6))
    assert _restored(there) == (5, 5.0)


def test_one_checkpoint_alone_verifies_where_it_was_copied_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run(tmp_path / "old", range(1, 3))
    copy = tmp_path / "backup" / "whatever"
    shutil.copytree(tmp_path / "old" / "step-2", copy)
    assert main(["verify", "--digest", str(copy)]) == 0
    with open(copy / "state.rank-00000-of-00001.pt", "r+b") as file:
        file.seek(500)
        byte = file.read(1)
        file.seek(500)
        file.write(bytes([byte[0] ^ 1]))
    assert main(["verify", str(copy)]) == 0, "the sizes are still right"
    assert main(["verify", "--digest", str(copy)]) == 5
    assert "state.rank-00000-of-00001.pt" in capsys.readouterr().out


def test_one_checkpoint_in_a_new_root_is_resumed_from(tmp_path: Path) -> None:
    _run(tmp_path / "old", range(1, 3), naming="ckpt-{step:06d}")
    there = tmp_path / "new"
    there.mkdir()
    shutil.copytree(tmp_path / "old" / "ckpt-000002", there / "ckpt-000002")
    assert _restored(there) == (2, 2.0), "the naming and the run come from its marker"
    newest = distckpt.open(there).latest()
    assert newest is not None and newest.name == "ckpt-000002"


def test_a_lost_root_record_is_made_anew_from_the_newest_marker(tmp_path: Path) -> None:
    _run(tmp_path / "root", range(1, 3), naming="ckpt-{step}")
    before = (tmp_path / "root" / ".distckpt" / "root.json").read_text()
    (tmp_path / "root" / ".distckpt" / "root.json").unlink()
    assert _restored(tmp_path / "root") == (2, 2.0)
    assert (tmp_path / "root" / ".distckpt" / "root.json").read_text() == before


def test_a_moved_checkpoint_of_dcp_loads(tmp_path: Path) -> None:
    """DCP keeps names of its own in its metadata: they must be relative as well."""
    saved = {"w": torch.arange(1000.0), "b": torch.ones(3)}
    with distckpt.CheckpointManager(tmp_path / "old") as manager:
        manager.save(1, {"model": distckpt.DCP(state=dict(saved)), "rest": distckpt.Shards({"x": torch.ones(2)})})
    (tmp_path / "old").rename(tmp_path / "new")
    loaded = {"w": torch.zeros(1000), "b": torch.zeros(3)}
    with distckpt.CheckpointManager(tmp_path / "new") as manager:
        assert manager.restore({"model": distckpt.DCP(state=loaded), "rest": distckpt.Shards({"x": torch.zeros(2)})}) == 1
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    for file in (tmp_path / "new" / "step-1").rglob("*"):
        assert file.is_dir() or str(tmp_path).encode() not in file.read_bytes(), f"an absolute path stands in {file}"


@pytest.mark.parametrize("mask, file_mode, folder_mode", [(0o027, 0o640, 0o750), (0o002, 0o664, 0o775)])
def test_whoever_may_read_the_root_may_read_every_checkpoint(tmp_path: Path, mask: int, file_mode: int, folder_mode: int) -> None:
    """Umask holds for every file and directory; safetensors makes its files with mode 0600 and renames them."""
    before = os.umask(mask)
    try:
        with distckpt.CheckpointManager(tmp_path / "root") as manager:
            state = {"w": torch.zeros(10)}
            manager.save(1, {"a": distckpt.Shards(state), "b": distckpt.Shards(state, format="safetensors"),
                             "c": distckpt.DCP(state=dict(state))})
    finally:
        os.umask(before)
    top = tmp_path / "root" / "step-1"
    modes = {str(path.relative_to(top)): stat.S_IMODE(path.stat().st_mode) for path in [top, *top.rglob("*")]}
    assert len(modes) == 9, modes
    assert modes == {name: folder_mode if (top / name).is_dir() else file_mode for name in modes}
