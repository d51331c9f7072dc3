"""The command, where it checks bytes: verify."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from distckpt import catalog
from distckpt import marker as _marker
from distckpt.durable import Files
from distckpt.layout import Layout
from distckpt.marker import FileEntry
from tests.support import Command, attempt_id, make_checkpoint, record_root


@pytest.fixture
def root(tmp_path: Path) -> Layout:
    return record_root(str(tmp_path / "run"))


def reject(root: Layout, attempt: str, why: str) -> None:
    Path(root.rejected(attempt)).write_text(json.dumps({"name": "x", "reason": why}))


def damage(root: Layout, name: str, path: str = "model.pt", data: bytes = b"x") -> None:
    Path(root.final(name), path).write_bytes(data)


def test_verify_finds_damage_and_says_where(command: Command, root: Layout) -> None:
    for seq in (1, 2, 3, 4):
        make_checkpoint(root.root, seq * 100, seq)
    assert command("verify", root.root, "--digest").code == 0
    damage(root, "step-100", "model.pt", b"weights of 999")  # the right size
    os.unlink(root.final("step-200/sub/optim.pt"))
    damage(root, "step-300", "extra")
    said = command("verify", root.root)
    assert said.code == 5 and "sub/optim.pt is missing" in said.out
    assert said.row("step-100").startswith("ok ") and "4 checkpoints verified" in said.out and "1 damaged" in said.out
    assert "1 file beside the manifest, such as extra: not verified" in said.out
    said = command("verify", root.root, "--digest", "--json")
    assert said.code == 5 and said.json["ok"] is False
    assert {c["name"]: c["status"] for c in said.json["checkpoints"]} == {
        "step-100": "damaged", "step-200": "damaged", "step-300": "ok", "step-400": "ok"}
    assert command("verify", f"{root.root}@400", "--digest").code == 0
    assert command("verify", f"{root.root}@100", "--digest").code == 5
    assert command("verify", f"{root.root}@7").code == 3


def test_a_digest_that_is_missing_is_a_failure(command: Command, root: Layout) -> None:
    made = make_checkpoint(root.root, 100, 1, payload={"a": b"1"})
    bare = _marker.Marker(made.head, 1, (_marker.FileEntry("a", 1, None, 0),), "b1")
    Path(root.final("step-100"), "commit.json").write_bytes(_marker.build(bare))
    assert command("verify", root.root).code == 0
    said = command("verify", root.root, "--digest")
    assert said.code == 5 and "a has no digest in the marker" in said.out


def test_verify_clears_a_rejection_only_when_every_byte_is_right(command: Command, root: Layout) -> None:
    make_checkpoint(root.root, 100, 1)
    make_checkpoint(root.root, 200, 2)
    reject(root, attempt_id(1), "cannot be right")
    reject(root, attempt_id(2), "a flaky disk")
    damage(root, "step-100", "model.pt", b"weights of 999")
    said = command("verify", root.root)
    assert "--digest clears it" in said.out and len(os.listdir(root.home("rejected"))) == 2
    said = command("verify", root.root, "--digest")
    assert "its rejection is cleared (a flaky disk)" in said.out and "rejected earlier: cannot be right" in said.out
    assert os.listdir(root.home("rejected")) == [f"{attempt_id(1)}.json"]
    assert command("latest", root.root).out == root.final("step-200") + "\n"
    reject(root, attempt_id(2), "again")
    assert "is cleared" in command("verify", root.final("step-200"), "--digest").out


def test_a_rejection_that_is_cleared_does_not_come_back_after_a_power_cut(command: Command, root: Layout,
                                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(root.root, 100, 1)
    reject(root, attempt_id(1), "a flaky disk")
    there: list[bool] = []
    real = Files.fsync_dir

    def fsync_dir(self: Files, path: str) -> None:
        real(self, path)
        if path == root.home("rejected"):
            there.append(os.path.exists(root.rejected(attempt_id(1))))

    monkeypatch.setattr(Files, "fsync_dir", fsync_dir)
    assert "is cleared" in command("verify", root.root, "--digest").out and there == [False]


def test_what_a_live_run_rotates_away_meanwhile_is_no_damage(command: Command, root: Layout,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(root.root, 100, 1)
    make_checkpoint(root.root, 200, 2)
    check = catalog.check_files

    def rotated(files: Files, directory: str, entries: tuple[FileEntry, ...], digest: bool = False) -> list[catalog.Problem]:
        if directory == root.final("step-100"):
            shutil.rmtree(directory)
        return check(files, directory, entries, digest)

    monkeypatch.setattr(catalog, "check_files", rotated)
    said = command("verify", root.root)
    assert said.code == 0 and "removed or replaced while it was read" in said.row("step-100")


def test_one_checkpoint_verifies_wherever_it_was_copied(command: Command, root: Layout, tmp_path: Path) -> None:
    make_checkpoint(root.root, 100, 1)
    shutil.copytree(root.final("step-100"), tmp_path / "elsewhere")
    shutil.rmtree(root.root)
    said = command("verify", tmp_path / "elsewhere", "--digest")
    assert said.code == 0 and "it is a copy of step-100" in said.out
    (tmp_path / "elsewhere" / "model.pt").write_bytes(b"weights of 999")
    assert command("verify", tmp_path / "elsewhere").code == 0
    assert command("verify", tmp_path / "elsewhere", "--digest").code == 5
    assert command("verify", tmp_path / "elsewhere", "--step", 3).code == 2
    assert command("ls", tmp_path / "elsewhere").err.count("is a checkpoint, not a root") == 1


def test_what_never_was_a_checkpoint_is_skipped(command: Command, root: Layout) -> None:
    os.mkdir(root.final("step-9"))
    damage(root, "step-9")
    os.symlink("step-9", root.final("step-5"))
    said = command("verify", root.root)
    assert said.code == 3 and said.row("step-9").startswith("skipped") and said.row("step-5").startswith("skipped")
    make_checkpoint(root.root, 100, 1)
    assert command("verify", root.root).code == 0
    os.rename(root.final("step-100"), root.final("step-200"))  # a marker speaks for one name only
    assert "its marker belongs to 'step-100'" in command("verify", root.root).out
