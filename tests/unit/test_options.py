"""The manager's arguments: what they become, and that they are checked."""

from __future__ import annotations

import pytest

from distckpt import options
from distckpt.durable import REAL
from distckpt.errors import ConfigError
from distckpt.options import Seams, Timeouts
from distckpt.retention import KeepAll, KeepBest, KeepEvery, KeepLast
from distckpt.runtime import SYSTEM


def policy(retention: object = None, last: object = None, every: object = None, best: object = None, metric: str = "loss",
           mode: str = "min") -> object:
    return options.policy(retention, last, every, best, metric, mode)  # type: ignore[arg-type]


def test_limits_become_a_policy() -> None:
    assert policy(last=3).spec == KeepLast(3).spec  # type: ignore[attr-defined]
    assert policy(last=3, every=100, best=2).spec == (KeepLast(3) | KeepEvery(100) | KeepBest(2, "loss")).spec  # type: ignore[attr-defined]
    assert policy(KeepBest(2, "acc", "max")).spec == KeepBest(2, "acc", "max").spec  # type: ignore[attr-defined]


@pytest.mark.parametrize("nothing", [None, 0])
def test_no_limit_deletes_nothing(nothing: object, caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(policy(last=nothing), KeepAll)
    assert not caplog.records
    assert isinstance(policy(last=nothing, every=100), KeepAll)
    assert "without keep_last nothing is ever deleted" in caplog.text


def test_a_policy_and_limits_are_not_both_given() -> None:
    with pytest.raises(ConfigError, match="not both"):
        policy(KeepLast(1), last=1)
    with pytest.raises(ConfigError, match="must be a policy such as KeepLast"):
        policy("last=3")


def test_a_choice_names_what_may_be_chosen() -> None:
    assert options.choice("on_exists", "skip", options.ON_EXISTS) == "skip"
    with pytest.raises(ConfigError, match="verify must be one of 'size', 'digest', not 'bytes'"):
        options.choice("verify", "bytes", options.VERIFY)


def test_seams_lead_to_the_real_machine_unless_a_test_says_otherwise() -> None:
    assert Seams() == Seams(REAL, SYSTEM, None)
    assert Timeouts() == Timeouts(600, 600, 120, 300) and Timeouts(arrive=0.5).arrive == 0.5
