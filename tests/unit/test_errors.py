"""Every error survives pickle and the control plane, so that all ranks raise the same one."""

from __future__ import annotations

import copy
import errno
import json
import pickle
from typing import Any

import pytest

from distckpt import errors
from distckpt.errors import DistckptError, RankFailure, from_wire, is_disk_full, to_wire


def classes(base: type[DistckptError] = DistckptError) -> list[type[DistckptError]]:
    return [base] + [c for child in base.__subclasses__() for c in classes(child)]


ALL = sorted({c for c in classes() if c.__module__ == "distckpt.errors"}, key=lambda c: c.__name__)
FAILURE = RankFailure(3, "OSError", "no space", "node-7", 4711, "write", "Traceback ...", "/r/x", True, 10, 20)
SAMPLES: dict[str, Any] = {
    "host": "node-7", "pid": 7, "job": "slurm:1", "age": 2.5, "generation": 4, "values": {0: 10, 3: 20}, "phase": "begin",
    "missing": {1: {"host": "node-8", "phase": "write"}, 12: None}, "step": 100, "attempt": "ab", "background": True,
    "failures": {3: FAILURE}, "outcome": "aborted", "needed": 5, "free": 4, "path": "/r", "rejected": {"step-1": "torn"},
    "saved": 4, "now": 2, "members": ["rng"], "files": {"a.pt": "missing"}}


def sample(cls: type[DistckptError]) -> DistckptError:
    return cls("what; where; what to do", **{name: SAMPLES[name] for name in cls._fields})


def same(one: DistckptError, other: BaseException) -> bool:
    return (type(one) is type(other) and str(one) == str(other)
            and all(getattr(one, name) == getattr(other, name) for name in one._fields))


@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.__name__)
def test_every_error_survives_pickle_and_the_wire(cls: type[DistckptError]) -> None:
    for error in (sample(cls), cls("bare")):
        assert same(error, pickle.loads(pickle.dumps(error)))
        assert same(error, copy.deepcopy(error))
        assert same(error, from_wire(json.loads(json.dumps(to_wire(error)))))


@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.__name__)
def test_every_error_is_raised_caught_and_shown_by_its_message(cls: type[DistckptError]) -> None:
    with pytest.raises(DistckptError) as caught:
        raise sample(cls)
    assert str(caught.value) == "what; where; what to do" and "what; where" in repr(caught.value)
    with pytest.raises(TypeError, match="has no"):
        cls("message", nonsense=1)


def test_the_tree_stands_in_the_docstring() -> None:
    assert errors.__doc__ is not None
    for cls in ALL:
        assert cls.__name__ in errors.__doc__, cls


@pytest.mark.parametrize(("name", "builtin"), [
    ("ConfigError", ValueError), ("RankTimeout", TimeoutError), ("RankLost", TimeoutError),
    ("StepAlreadyExists", FileExistsError), ("StepNotFound", FileNotFoundError)])
def test_what_python_calls_by_a_builtin_name_is_caught_by_it(name: str, builtin: type[Exception]) -> None:
    assert issubclass(getattr(errors, name), builtin)


def test_an_unknown_type_from_a_newer_peer_is_still_an_error_of_ours() -> None:
    error = from_wire({"type": "FutureError", "message": "m", "fields": {"x": 1}})
    assert type(error) is DistckptError and str(error) == "m"
    error = from_wire({"type": "SaveError", "message": "m", "fields": {"step": 3, "new": 1}})
    assert isinstance(error, errors.SaveError) and error.step == 3


def test_no_wire_can_name_a_class_outside_the_tree() -> None:
    assert type(from_wire({"type": "SystemExit", "message": "m"})) is DistckptError


def raised(cause: BaseException) -> BaseException:
    try:
        raise RuntimeError("wrapped") from cause
    except RuntimeError as error:
        return error


def test_a_failure_names_type_place_and_path() -> None:
    found = RankFailure.of(raised(OSError(errno.ENOSPC, "No space left on device", "/r/x")), rank=2, host="h", pid=9,
                           phase="write")
    assert (found.rank, found.type, found.path, found.disk_full) == (2, "RuntimeError", "/r/x", True)
    assert "No space left" in found.traceback
    assert str(found) == "rank 2 on h (pid 9, write): RuntimeError: wrapped"


def test_a_failure_is_bounded() -> None:
    found = RankFailure.of(RuntimeError("x" * 10**6), rank=0, host="h", pid=1, phase="p")
    assert len(found.message) == 4000 and len(found.traceback) == 8000


@pytest.mark.parametrize(("error", "free", "full"), [
    (OSError(errno.ENOSPC, "x"), None, True), (OSError(errno.EDQUOT, "x"), None, True), (OSError(errno.EIO, "x"), None, False),
    (raised(OSError(errno.EDQUOT, "x")), None, True), (RuntimeError("[Errno 28] No space left on device"), None, True),
    (RuntimeError("I/O error: Disk quota exceeded (os error 122)"), None, True),
    (RuntimeError("PytorchStreamWriter failed writing file"), 100, True),
    (RuntimeError("PytorchStreamWriter failed writing file"), 1 << 40, False),
    (RuntimeError("PytorchStreamWriter failed"), None, False), (RuntimeError("boom"), 0, False)])
def test_a_full_disk_is_told_from_other_errors(error: BaseException, free: int | None, full: bool) -> None:
    assert is_disk_full(error, free) is full


def test_a_circle_of_causes_ends() -> None:
    one, other = RuntimeError("a"), RuntimeError("b")
    one.__cause__, other.__cause__ = other, one
    assert is_disk_full(one) is False


def test_the_failure_of_every_rank_of_a_very_large_job_can_be_told() -> None:
    """Sixteen thousand ranks meet one full disk: what all are told must fit into one message of the control plane."""
    long = "x" * 4_000
    failures = {r: RankFailure(r, "OSError", long, f"host-{r}", 1, "write", traceback=2 * long, disk_full=True)
                for r in range(16_384)}
    wire = to_wire(errors.DiskFull("full", step=1, attempt=None, background=False, failures=failures, outcome="aborted",
                                   needed=None, free=0, path="/p"))
    assert len(json.dumps(wire)) < 16 << 20
    told = from_wire(wire)
    assert isinstance(told, errors.DiskFull) and len(told.failures) == 16_384
    assert told.failures[0] == failures[0] and told.failures[9_999].message == long[:300] and not told.failures[9_999].traceback
