"""The marks of messages, for traces: each message leaves its own, and without the variable there are none."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch.distributed as dist

from distckpt.coordination import marks
from distckpt.coordination.store import Client


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(marks, "mark", found.append)
    return found


def test_without_the_variable_the_store_is_spoken_to_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(marks.VARIABLE, raising=False)
    raw = dist.HashStore()
    assert Client(raw, "t/")._raw is raw


def test_each_message_is_marked_before_it_goes_and_after_it_is_known(monkeypatch: pytest.MonkeyPatch, seen: list[str]) -> None:
    monkeypatch.setenv(marks.VARIABLE, "1")
    client = Client(dist.HashStore(), "t/")
    client.set("a", {"x": 1})
    assert client.get(["a"]) == [{"x": 1}] and client.has("a") and not client.has("b")
    assert client.claim("c", {"mine": 1}) == {"mine": 1}
    assert client.claim("c", {"mine": 2}) == {"mine": 1}
    assert client.wait(["a", "c"], 1.0) and not client.wait(["b"], 0.001)
    assert client.ticket("n") == 0
    client.delete(["a"])
    assert seen == ["HB send t/a", "HB recv t/a", "HB recv t/a", "HB send t/c", "HB send t/c", "HB lost t/c",
                    "HB recv t/a t/c", "HB send t/ticket/n", "HB recv t/ticket/n"]


def test_a_mark_is_a_write_that_fails_and_harms_nothing() -> None:
    with pytest.raises(OSError):
        os.write(1023, b"x")
    marks.mark("HB send k")


def test_the_marked_store_is_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(marks.VARIABLE, "1")
    raw = marks.around(dist.HashStore())
    raw.set("k", "v")
    raw.wait(["k"], timedelta(seconds=1))
    assert raw.num_keys() >= 1 and raw.delete_key("k")
