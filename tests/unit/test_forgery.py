"""Markers and records that somebody made up: limits, and signatures (RELIABILITY.md, 3.7). Deleting each check
in turn is the business of the mutants (``scripts/proof/guards.py``)."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import distckpt
from distckpt import catalog, marker, ordered, trust
from distckpt.durable import REAL, Files
from distckpt.errors import ConfigError, IntegrityError, MarkerError, NoUsableCheckpoint, RankDisagreement
from distckpt.layout import MARKER, PATH_DEPTH, Layout, member_path_problem
from distckpt.removal import remove_tree
from distckpt.runtime import SYSTEM
from distckpt.testing.crashfs import CrashFiles, write_payload
from tests.inprocess import Job, Threads, same_error
from tests.support import Command, make_checkpoint, make_marker, record_root, restore, same_size, saved

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


def test_a_marker_of_the_limit_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    data = marker.build(make_marker(1))
    for limit, fine in ((len(data) + 1, True), (len(data), False)):
        monkeypatch.setattr(marker, "SIZE_LIMIT", limit)
        for read in (marker.parse, marker.glance):
            if fine:
                read(data)
            else:
                with pytest.raises(MarkerError, match=f"larger than {limit} bytes"):
                    read(data)


def test_what_is_ten_gigabytes_long_is_read_to_its_limit(signed: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    """Markers, records, the journal and the pointer, by all who read them."""
    home, asked = signed / ".distckpt", list[tuple[str, int]]()
    (home / "rejected" / "0.json").touch()
    for path in (signed / "step-2" / MARKER, home / "rejected" / "0.json", home / "journal" / "1.jsonl", signed / "latest"):
        os.truncate(path, 10 << 30)
    monkeypatch.setattr(marker, "SIZE_LIMIT", 1 << 19)
    real = Files.read

    def read(files: Files, path: str, limit: int) -> bytes:
        asked.append((os.path.splitext(path)[1], limit))
        assert limit <= (1 << 19 if path.endswith(MARKER) else 1 << 28 if path.endswith(".jsonl") else 1 << 20), path
        return real(files, path, min(limit, 1 << 20))

    monkeypatch.setattr(Files, "read", read)
    usable, skipped = candidates(signed)
    assert usable == [1] and "larger than" in skipped["step-2"]
    for word in ("ls", "show", "verify"):
        command(word, signed)
    assert catalog.read_pointer(REAL, Layout.at(signed))
    monkeypatch.delenv(trust.KEY_VARIABLE)
    with distckpt.CheckpointManager(signed) as manager:
        found = manager.resume()
        assert found.step == 1 and "larger than" in found.skipped["step-2"]
    assert {".json", ".jsonl", ""} == {kind for kind, limit in asked if limit > 64}


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


def test_an_event_is_one_line_of_no_more_than_its_limit(tmp_path: Path) -> None:
    layout = record_root(str(tmp_path / "r"))
    distckpt.journal.Journal(REAL, layout, 1, SYSTEM).event("stacks", text="y" * 100_000)
    assert os.path.getsize(layout.journal(1)) == 64_001


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
    monkeypatch.setattr(start, "report_key", lambda: next(reports))
    for error in same_error(Job(tmp_path / "r").run(lambda m: None), ConfigError):
        assert "it cannot be read here" in str(error) and str(error).startswith("rank ")


@pytest.mark.parametrize(("content", "mode", "text"), [(None, 0o600, "cannot be read"), (b"short", 0o600, "holds 5 bytes"),
                                                      (KEY * 200, 0o600, "holds 4097 bytes"),
                                                      (KEY, 0o606, "can be written by every user")],
                         ids=["none", "short", "long", "writable"])
def test_a_key_that_is_no_good_is_an_error_on_every_rank(content: bytes | None, mode: int, text: str, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
        os.chmod(path, mode)
    monkeypatch.setenv(trust.KEY_VARIABLE, str(path))
    for error in same_error(Job(tmp_path / "r").run(lambda m: None), ConfigError):
        assert text in str(error)


def test_a_key_that_is_no_file_blocks_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "key")
    writer: list[int] = []
    for _ in range(2):  # without a writer, and with one that says nothing
        ended = Threads(1).run(lambda rank: trust._read(str(tmp_path / "key")), 5)[0]
        assert isinstance(ended.error, ConfigError) and "no regular file" in str(ended.error)
        writer.append(os.open(tmp_path / "key", os.O_RDWR))
    for fd in writer:
        os.close(fd)


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
