"""What is read runs nothing, whoever wrote it (RELIABILITY.md, 3.7): files of a checkpoint, and messages of other ranks.
Deleting each check in turn is the business of the mutants (``scripts/proof/guards.py``)."""

from __future__ import annotations

import ast
import dataclasses
import io
import os
import pickle
from collections import OrderedDict
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

import distckpt
from distckpt import DCP, Shards, TrainState, catalog, marker
from distckpt.coordination.gate import Act
from distckpt.coordination.store import Client, decode
from distckpt.durable import REAL
from distckpt.errors import CoordinationError, IntegrityError, ResumeError
from distckpt.layout import MARKER
from distckpt.marker import FileEntry
from distckpt.payloads import dcpread, whole
from tests.inprocess import Job, values, write
from tests.support import found, restore, same_size, saved

# -- unpickling --------------------------------------------------------------------------------------------------------


class Evil:
    """A pickle that runs code when it is loaded: it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self._path,)


def model() -> dict[str, Any]:
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(2)).sum().backward()
    optimizer.step()
    return {"model": layer, "optimizer": optimizer}


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


def test_what_is_no_metadata_or_no_member_of_its_formats_is_refused_by_one_error() -> None:
    for owner, name in ((object, "TORCH_CONTIGUOUS_FORMAT"), (dcpread._FORMATS, "__class__")):
        with pytest.raises(pickle.UnpicklingError, match="asks for an attribute"):
            dcpread._format_by_name(owner, name)
    for value in (torch.Size([1]), Metadata({}, None, [1])):  # type: ignore[arg-type]
        with pytest.raises(pickle.UnpicklingError, match=f"it holds a {type(value).__name__}"):
            dcpread.unpickled(io.BytesIO(pickle.dumps(value)))


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
    own_memory = {"payloads/dcpplan.py"}  # bytes that never leave the process
    allowed = {"payloads/dcpread.py", "payloads/loadable.py", "payloads/whole.py", *own_child, *own_memory}
    home = Path(distckpt.__file__).parent
    for path in sources():
        name = str(path.relative_to(home))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("load", "loads"):
                owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
                assert owner != "pickle" or name in own_child | own_memory, f"{name}:{node.lineno}"
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


class Marked(set[int]):
    """Pickled with its elements, which are added one by one."""


class Level(Enum):
    HIGH = 1


def test_looking_for_the_end_of_a_pickle_runs_nothing_of_it(tmp_path: Path) -> None:
    metadata = tmp_path / ".metadata"
    odd = [Evil(tmp_path / "ran"), {"a": {1}}, OrderedDict(a=1), Marked({1, 2}), Path("x"), torch.float32, Level.HIGH, 1j]
    metadata.write_bytes(pickle.dumps(odd))
    whole.check(str(metadata))
    assert not (tmp_path / "ran").exists()
    pickle.loads(metadata.read_bytes())
    assert (tmp_path / "ran").exists(), "it would have"


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
