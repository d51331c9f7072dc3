"""The command, where it only looks: ls, show, latest, and what all commands share."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distckpt import human, leases
from distckpt import marker as _marker
from distckpt.cli import output, target
from distckpt.durable import REAL
from distckpt.layout import Layout
from distckpt.runtime import SYSTEM
from tests.support import RUN, Answer, Command, attempt_id, make_checkpoint, make_marker, record_root, stage_attempt


@pytest.fixture
def root(tmp_path: Path) -> Layout:
    return record_root(str(tmp_path / "run"))


def reject(root: Layout, attempt: str, why: str) -> None:
    Path(root.rejected(attempt)).write_text(json.dumps({"name": "x", "reason": why}))


def damage(root: Layout, name: str, path: str = "model.pt", data: bytes = b"x") -> None:
    Path(root.final(name), path).write_bytes(data)


# -- ls ------------------------------------------------------------------------------------------------------------------

def test_ls_says_what_each_entry_is(command: Command, root: Layout) -> None:
    for seq in range(1, 7):
        make_checkpoint(root.root, seq * 100, seq, metrics={"loss": 1 / seq}, time=time.time() - 3600 * 3, world=4)
    make_checkpoint(root.root, 700, 7, series="rolling")
    make_checkpoint(root.root, 50, 9, run="run-z")
    os.mkdir(root.final("step-8"))
    os.mkdir(root.final("step-9"))
    damage(root, "step-9", "pytorch_model.bin")
    os.symlink("step-600", root.final("step-5"))
    reject(root, attempt_id(6), "model.pt has digest a")
    leases.take(REAL, root, SYSTEM, "step-100", attempt_id(1), "figure 3", None)
    leases.take(REAL, root, SYSTEM, "step-200", attempt_id(2), "upload", 600.0).release()
    held = leases.take(REAL, root, SYSTEM, "step-200", attempt_id(2), "upload", 600.0)
    Path(root.rollback).write_text(json.dumps({"abandoned": [[3, 4]]}))
    said = command("ls", root.root)
    held.release()
    assert said.code == 0 and said.err == ""
    lines = said.out.splitlines()
    assert lines[0].split() == ["NAME", "STEP", "SERIES", "SEQ", "AGE", "SIZE", "FILES", "WORLD", "METRICS", "STATE"]
    state = lines[0].index("STATE")
    states = {line.split()[0]: line[state:] for line in lines[1:-1]}
    assert states == {
        "step-100": "committed, pinned: figure 3",
        "step-200": f"committed, leased: by {SYSTEM.identity().host}, upload",
        "step-300": "committed",
        "step-400": "rolled back",
        "step-500": "newest",
        "step-600": "rejected: model.pt has digest a",
        "step-700-rolling": "newest",
        "step-50": "other run: run-z",
        "step-9": "no commit.json: never committed, or not written by distckpt; 'distckpt adopt' makes it a checkpoint",
        "step-5": "not a checkpoint: it is a symlink, not a directory",
    }
    assert said.row("step-500").split()[:12] == ["step-500", "500", "main", "5", "3", "h", "ago", "28", "B", "2", "4", "loss=0.2"]
    assert lines[-1].startswith("8 committed, ") and "room for" in lines[-1] and "of step-500's size" in lines[-1]
    order = [line.split()[0] for line in lines[1:9]]
    assert order == ["step-50", "step-700-rolling"] + [f"step-{n}00" for n in (6, 5, 4, 3, 2, 1)]  # by commit, newest first


@pytest.mark.parametrize(("bytes_", "why"), [
    (b"", "it does not begin with a head (torn, or not written by distckpt)"),
    (b"not json at all", "it does not begin with a head (torn, or not written by distckpt)"),
    (b'{"head":{"format":1,,', "its head is not JSON"),
    ("cut", "it ends before its seal (truncated)"),
    ("altered", "its seal does not match its bytes (torn or altered)"),
    ("newer", "is newer than this version reads (1); upgrade distckpt"),
    ("newline", "its manifest names 'a\\nb': it holds a control character, such as a newline"),
], ids=lambda v: v if isinstance(v, str) and len(v) < 10 else "")
def test_a_marker_that_cannot_be_trusted_is_shown_with_the_reason(command: Command, root: Layout, bytes_: bytes | str,
                                                                  why: str) -> None:
    make_checkpoint(root.root, 100, 1)
    whole = _marker.build(make_checkpoint(root.root, 200, 2))
    made = {"cut": whole[:300], "altered": whole.replace(b'"world":1', b'"world":2'),
            "newer": whole.replace(b'"format":1', b'"format":2'),
            "newline": _marker.build(make_marker(200, 2, payload={"a\nb": b""}))}
    Path(root.final("step-200"), "commit.json").write_bytes(made[bytes_] if isinstance(bytes_, str) else bytes_)
    said = command("ls", root.root)
    assert said.code == 0
    assert "damaged: " in said.row("step-200") and why in said.row("step-200")
    assert said.row("step-100").endswith("newest")
    verified = command("verify", root.root)
    assert verified.code == 5 and why in verified.out
    assert command("latest", root.root).out == f"{root.final('step-100')}\n"
    assert command("verify", f"{root.root}@200").code == 5


def test_ls_for_scripts_is_one_document(command: Command, root: Layout) -> None:
    make_checkpoint(root.root, 100, 1, metrics={"loss": float("nan")}, payload={"a": b"12345"})
    os.mkdir(root.final("step-9"))
    damage(root, "step-9")
    found = command("ls", root.root, "--json").json
    assert (found["run"], found["naming"], found["committed"], found["bytes"]) == (RUN, "step-{step}", 1, 5)
    assert found["free"] > 0 and found["room"] == found["free"] // 5
    first, second = found["checkpoints"]
    assert first["path"] == root.final("step-100") and first["metrics"] == {"loss": "NaN"} and first["states"] == ["newest"]
    assert second["committed"] is False and second["states"] == ["no commit.json"] and first.keys() == second.keys()


def test_ls_of_one_series_and_of_none(command: Command, root: Layout) -> None:
    make_checkpoint(root.root, 100, 1)
    make_checkpoint(root.root, 150, 2, series="rolling")
    said = command("ls", root.root, "--series", "rolling")
    assert "step-150-rolling" in said.out and "step-100" not in said.out
    assert "there are: main, rolling" in command("ls", root.root, "--series", "nope").out
    assert command("ls", root.root, "--series", "no/pe").code == 1


def test_a_copied_root_without_its_home_works(command: Command, tmp_path: Path) -> None:
    made = make_checkpoint(str(tmp_path / "copy"), 100, 1)
    assert "newest" in command("ls", tmp_path / "copy").row("step-100")
    assert command("latest", tmp_path / "copy").out.strip() == str(tmp_path / "copy" / "step-100")
    assert command("verify", tmp_path / "copy", "--digest").code == 0
    assert r"pinned (a\x1b[1m\nb)" in command("pin", f"{tmp_path}/copy@100", "--reason", "a\x1b[1m\nb").out
    assert f"attempt    {made.head.attempt}" in command("show", tmp_path / "copy").out


@pytest.mark.parametrize("name", ["ls", "show", "latest", "verify", "prune", "gc"])
def test_what_is_no_root_is_one_clear_line(command: Command, tmp_path: Path, name: str) -> None:
    (tmp_path / "plain" / "checkpoint-5").mkdir(parents=True)
    for path, why in ((tmp_path / "gone", "is not a directory"), (tmp_path / "plain", "is not a checkpoint root")):
        said = command(name, path)
        assert said.code == 1 and said.out == ""
        assert said.err.startswith("distckpt: ") and said.err.count("\n") == 1 and why in said.err
    assert not (tmp_path / "gone").exists() and os.listdir(tmp_path / "plain") == ["checkpoint-5"]


def test_an_empty_root_is_no_error_for_ls(command: Command, root: Layout) -> None:
    said = command("ls", root.root)
    assert said.code == 0 and said.out.startswith("0 committed, 0 B; ")


def test_an_attempt_in_staging_is_mentioned(command: Command, root: Layout) -> None:
    make_checkpoint(root.root, 100, 1)
    os.mkdir(root.staging(1))
    stage_attempt(REAL, 200, 2, root=root.root)
    assert "1 attempt in staging (step-200)" in command("ls", root.root).out


def test_a_checkpoint_that_is_replaced_meanwhile_is_not_mixed_up(command: Command, root: Layout,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(root.root, 100, 1)
    glance = _marker.glance
    other = _marker.build(make_marker(100, 2))
    monkeypatch.setattr(_marker, "glance", lambda data, path, key: glance(other, path, key))
    assert "changing: it was replaced while this was read" in command("ls", root.root).row("step-100")


# -- latest --------------------------------------------------------------------------------------------------------------

def test_latest_prints_the_path_and_nothing_else(command: Command, root: Layout) -> None:
    make_checkpoint(root.root, 5000, 1)
    make_checkpoint(root.root, 400, 2)
    assert command("latest", root.root) == Answer(0, root.final("step-400") + "\n", "")
    damage(root, "step-400")
    assert command("latest", root.root) == Answer(0, root.final("step-5000") + "\n", "")
    assert command("latest", root.root, "--json").json["name"] == "step-5000"


def test_latest_tells_none_at_all_from_none_usable(command: Command, root: Layout) -> None:
    said = command("latest", root.root)
    assert said.code == 3 and said.out == "" and said.err.count("\n") == 1
    make_checkpoint(root.root, 100, 1)
    assert command("latest", root.root, "--series", "rolling").code == 3
    damage(root, "step-100")
    said = command("latest", root.root)
    assert said.code == 4 and said.out == "" and "step-100: model.pt has 1 bytes, the marker says 14" in said.err
    assert command("latest", root.root, "--json").json["rejected"].keys() == {"step-100"}
    assert command("show", root.root).code == 4


def test_latest_never_calls_a_lost_checkpoint_a_fresh_start(command: Command, root: Layout) -> None:
    Path(root.pointer).write_text("step-100\n")
    said = command("latest", root.root)
    assert said.code == 4 and "'latest' names step-100" in said.err
    os.unlink(root.pointer)
    os.mkdir(root.staging(1))
    stage_attempt(REAL, 200, 2, root=root.root)
    said = command("latest", root.root)
    assert said.code == 4 and "step-200: committed but not published; 'distckpt gc" in said.err
    make_checkpoint(root.root, 100, 1)
    said = command("latest", root.root)
    assert said.out == root.final("step-100") + "\n" and "step-200 is newer, committed and not published" in said.err


def test_latest_gives_the_exact_bytes_of_a_path(command: Command, tmp_path: Path) -> None:
    odd = os.fsdecode(os.fsencode(str(tmp_path)) + b"/r\xff\xc3\xb6n")
    make_checkpoint(odd, 100, 1)
    plain = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run([sys.executable, "-m", "distckpt", "latest", odd], capture_output=True, env=plain)
    assert done.stdout == os.fsencode(odd) + b"/step-100\n" and done.returncode == 0


# -- show ----------------------------------------------------------------------------------------------------------------

def test_show_tells_everything_about_one(command: Command, root: Layout) -> None:
    first = make_checkpoint(root.root, 100, 1)
    make_checkpoint(root.root, 200, 2, parent=first.head.attempt, branch="b2", lineage=(("b1", 1),), metrics={"loss": 0.25},
                    meta={"note": "two\nlines", "lr": 1e-4}, host="node07", retention="last=2", fingerprint="f1", world=2,
                    payload={f"f{i:02d}": b"x" * i for i in range(30)}, time=1_700_000_000.0)
    Path(root.journal(1)).write_text("".join(json.dumps(event) + "\n" for event in (
        {"time": 1.7e9, "event": "committed", "name": "step-200", "attempt": attempt_id(2), "bytes": 435},
        {"time": 1.7e9, "event": "committed", "name": "step-200", "attempt": attempt_id(9), "bytes": 77},
        {"time": 1.7e9, "event": "rotated", "names": ["step-200"]}, {"time": 1.7e9, "event": "released"})))
    leases.take(REAL, root, SYSTEM, "step-200", attempt_id(2), "figure 3", None)
    said = command("show", root.root)
    for text in ("step-200  " + root.final("step-200"), "newest, pinned: figure 3", f"{attempt_id(2)} (generation 1)", "run-a",
                 "by node07", "2 ranks", "435 B in 30 files", f"step-100 (attempt {attempt_id(1)})", "b1 to commit 1", "last=2",
                 "loss = 0.25", r"note = two\nlines", "lr = 0.0001", "files (the first 20 of 30; --all shows all)", "f19",
                 "committed  name=step-200", 'rotated    names=["step-200"]', "f1"):
        assert text in said.out, text
    assert "f20" not in said.out and "bytes=77" not in said.out and "released" not in said.out
    assert "f29" in command("show", root.root, "--all").out
    found = command("show", f"{root.root}@200", "--json").json
    assert found["parent_name"] == "step-100" and len(found["files"]) == 30 and len(found["journal"]) == 2
    assert found["leases"] == [{"kind": "pinned", "reason": "figure 3"}] and found["meta"]["note"] == "two\nlines"
    shutil.rmtree(root.final("step-100"))
    assert f"attempt {attempt_id(1)}, no longer here" in command("show", root.root).out


def test_a_step_is_named_in_either_way(command: Command, tmp_path: Path) -> None:
    plain, odd = record_root(str(tmp_path / "run")), record_root(str(tmp_path / "run@7"))
    make_checkpoint(plain.root, 7, 1)
    make_checkpoint(odd.root, 8, 1)
    make_checkpoint(plain.root, 9, 2, series="rolling")
    assert command("show", plain.root, "--step", 7).out.startswith("step-7 ")
    assert command("show", f"{plain.root}@7").out.startswith("step-8 ")  # an existing directory of that name wins
    assert command("show", f"{odd.root}@8").out.startswith("step-8 ")
    assert command("show", f"{plain.root}@9").out.startswith("step-9-rolling ")
    missing = command("show", f"{plain.root}@10")
    assert missing.code == 3 and "step 10 is not a committed checkpoint" in missing.err
    assert command("show", f"{plain.root}@9", "--step", 8).code == 2
    assert command("show", plain.root, "--step", "x").code == 2
    assert target.parse("a@b") == target.Target("a@b") and target.parse("@5") == target.Target("@5")


# -- what all share ------------------------------------------------------------------------------------------------------

def test_usage_errors_are_one_line_and_exit_2(command: Command, root: Layout) -> None:
    for argv in ((), ("ls",), ("nope", "x"), ("ls", root.root, "--nope"), ("pin", root.root), ("adopt", root.root),
                 ("prune", root.root, "--keep-every", "5"), ("prune", root.root, "--keep-last", "0"),
                 ("prune", root.root, "--keep-last", "1", "--keep-best", "1"), ("prune", root.root, "--best-metric", "loss"),
                 ("adopt", root.root, "step-1", "--metric", "loss"), ("adopt", root.root, "a", "b", "--metric", "loss=1")):
        said = command(*argv)
        assert (said.code, said.out, said.err.count("\n")) == (2, "", 1) and said.err.startswith("distckpt: "), argv


def test_help_documents_the_exit_codes(command: Command) -> None:
    said = command("--help")
    assert said.code == 0 and "4  checkpoints are there and none is usable" in said.out and "ROOT@STEP" in said.out
    assert "distckpt 0" in command("--version").out


def test_a_disk_error_is_one_line(command: Command, root: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    def scan(path: str) -> None:
        raise OSError(5, "Input/output error", path)

    monkeypatch.setattr(REAL, "scan", scan)
    said = command("ls", root.root)
    assert said.code == 1 and said.err.startswith(f"distckpt: {root.root}: Input/output error") and said.err.count("\n") == 1


def test_numbers_for_people() -> None:
    assert [human.size(n) for n in (0, 999, 1000, 99_949, 99_950, 999_499, 999_500, 1_234_567_890)] == [
        "0 B", "999 B", "1.0 kB", "99.9 kB", "100 kB", "999 kB", "1.0 MB", "1.2 GB"]
    assert [output.age(1e9, 1e9 - s) for s in (0, 119, 120, 7199, 7200, 3 * 86400, -90, 1e9)] == [
        "0 s ago", "119 s ago", "2 min ago", "119 min ago", "2 h ago", "3 d ago", "90 s ahead", "-"]
    assert output.plural(1, "entry") == "1 entry" and output.plural(2, "entry") == "2 entries"
    assert output.clean("a\x1b[31m\nb\udcff") == "a\\x1b[31m\\nb\\udcff"
    assert output.metrics({"a": 1, "b": 2, "c": 3, "d": 4}) == "a=1 b=2 c=3 ..."


# -- as a process --------------------------------------------------------------------------------------------------------

def test_as_a_process_it_is_quick_and_imports_no_torch(tmp_path: Path) -> None:
    layout = record_root(str(tmp_path / "run"))
    shared = {f"optim.rank-{i:05d}-of-00032.pt": b"" for i in range(32)}
    for seq in range(1, 201):
        made = make_marker(seq * 10, seq, payload=shared, world=32)
        os.mkdir(layout.final(made.head.name))
        Path(layout.final(made.head.name), "commit.json").write_bytes(_marker.build(made))
    best = 9.9
    for _ in range(5):
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "distckpt", "ls", layout.root], capture_output=True, text=True)
        best = min(best, time.perf_counter() - began)
        assert done.returncode == 0 and len(done.stdout.splitlines()) == 202 and done.stderr == ""
    print(f"\ndistckpt ls, 200 checkpoints of 32 files, best of 5: {best:.3f} s (goal 0.3 s)")
    script = ("import sys, distckpt; from distckpt.cli.main import main, parser; parser()\n"
              "if {'distckpt.reader', 'distckpt.marker', 'ctypes'} & set(sys.modules): sys.exit('not instant')\n"
              f"main(['ls', {layout.root!r}]); main(['show', {layout.root!r}]); main(['latest', {layout.root!r}])\n"
              "main(['verify', sys.argv[1]])\n"
              "heavy = {'torch', 'numpy', 'xxhash', 'mpi4py'} & set(sys.modules); sys.exit(f'imported {heavy}' if heavy else 0)")
    done = subprocess.run([sys.executable, "-c", script, layout.root], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_goes_away_is_no_error(root: Layout) -> None:
    for seq in range(1, 4):
        make_checkpoint(root.root, seq, seq)
    process = subprocess.Popen([sys.executable, "-m", "distckpt", "verify", root.root], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 141
    process.stderr.close()
