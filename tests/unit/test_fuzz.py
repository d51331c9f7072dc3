"""Bytes from anywhere never pass for something else, and raise what is declared and nothing else.

The targets are in ``tests/fuzzing.py``; the layer "fuzz" of the proof runs them for longer, guided by coverage.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distckpt import marker, trust
from distckpt.coordination import store
from scripts.proof import fuzz
from scripts.proof.layer import Budget
from tests import fuzzing
from tests.fuzzing import SEEDS, TARGETS

WORDS = ["op", "kind", "at", "act", "data", "number", "error", "type", "message", "fields", "failures", "0", "ttl", "abandoned",
         "identity", "host", "pid", "time", "ordinal", "step", "closing", "freeze", "reason"]
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(
    ["act", "stacks", "save", "failed", "stop", "ConfigError", "../x", 10**400, 1 << 63])
JSON = st.recursive(VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
    st.sampled_from(WORDS), inner, max_size=4), max_leaves=10)


def inputs(name: str) -> st.SearchStrategy[bytes]:
    """Raw bytes, JSON with the words of the messages, and true inputs with a piece replaced."""
    written = JSON.map(lambda value: json.dumps(value).encode())
    known = st.sampled_from(SEEDS.get(name, [b""]))
    spoilt = st.tuples(known, st.integers(0, 400), st.integers(0, 9), st.binary(max_size=9)).map(
        lambda t: t[0][:t[1]] + t[3] + t[0][t[1] + t[2]:])
    framed = st.tuples(st.binary(min_size=4, max_size=24), written).map(b"".join)
    return st.binary(max_size=300) | written | known | spoilt | framed


@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes(name: str) -> None:
    target = TARGETS[name]
    for seed in SEEDS.get(name, []):
        target(seed)

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
    @given(inputs(name))
    def run(data: bytes) -> None:
        target(data)

    run()


@contextmanager
def broken(patch: pytest.MonkeyPatch, module: object, name: str, value: object) -> Iterator[None]:
    with patch.context() as inner:
        inner.setattr(module, name, value)
        yield


def test_the_targets_see_what_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fuzzer that cannot fail is worthless: the seal, the signature, the name and the decoder taken away in turn."""
    edit = b"\0\0\0\0" + (200).to_bytes(4, "big") + (1).to_bytes(4, "big") + (1).to_bytes(4, "big") + b"Z"
    with broken(monkeypatch, marker, "_is_sealed", lambda data: True), pytest.raises(AssertionError, match="was accepted"):
        for at in range(300, len(fuzzing.PLAIN) - 80):
            fuzzing.marker_edited(edit[:4] + at.to_bytes(4, "big") + edit[8:])
    with broken(monkeypatch, marker, "_signature_problem", lambda data, key: None), pytest.raises(AssertionError):
        fuzzing.marker_bytes(fuzzing.SEEDS["marker_bytes"][2])
    with broken(monkeypatch, marker, "name_problem", lambda name, series: None), pytest.raises(AssertionError):
        fuzzing.read(fuzzing.resealed(fuzzing.PLAIN.rpartition(b',\n"seal":')[0].replace(b'"step-7"', b'"../x-7"')))
    with broken(monkeypatch, fuzzing, "decode", pickle.loads), pytest.raises(Exception, match="."):
        fuzzing.messages(b"not a pickle")
    with broken(monkeypatch, store, "decode", lambda data: None), pytest.raises((AssertionError, AttributeError)):
        fuzzing.listener(b"{}")
    assert trust.key() is None


def test_the_layer_runs_or_says_why_not(tmp_path: Path) -> None:
    """A second of the layer, so that it works on the day it is asked for."""
    if fuzz.LAYER.missing():
        result = fuzz.LAYER.run(Budget(1))
        assert result.skipped
        return
    result = fuzz.LAYER.run(Budget(3))
    assert result.violations == [] and result.runs > 0 and "seed 0" in result.covers
