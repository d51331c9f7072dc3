"""What ``Checkpointing`` does beside saving and loading: a second fit, and whose the signals are."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distckpt.integrations import lightning

pytestmark = pytest.mark.xdist_group("lightning")


def _callback(root: Path, monkeypatch: pytest.MonkeyPatch, stop_signals: bool = True) -> lightning.Checkpointing:
    class Manager:
        def __init__(self, *args: Any, **options: Any) -> None:
            self.stop_signals = stop_signals

        def restore(self, *args: Any, **options: Any) -> None: ...

    monkeypatch.setattr(lightning, "CheckpointManager", Manager)
    monkeypatch.setattr(lightning, "Lightning", lambda *args: SimpleNamespace(found=None))
    return lightning.Checkpointing(root)


def _set_up(callback: lightning.Checkpointing) -> None:
    trainer: Any = SimpleNamespace(fast_dev_run=False, strategy=SimpleNamespace(checkpoint_io=None))
    module: Any = None
    callback.setup(trainer, module, "fit")


def test_a_second_fit_knows_nothing_of_how_the_first_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callback = _callback(tmp_path, monkeypatch)
    callback._seen, callback._whole, callback._saved, callback.stopped = 7, True, 7, "told to stop"
    _set_up(callback)
    assert (callback._seen, callback._whole, callback._saved, callback.stopped) == (-1, False, None, "")


@pytest.mark.parametrize(("ours", "main", "taken"), [(True, True, True), (False, True, False), (True, False, False)])
def test_lightnings_handlers_go_where_poll_takes_signals_and_python_lets_them(
        ours: bool, main: bool, taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs:
        __module__ = "lightning.pytorch.trainer.connectors.signal_connector"

        def __call__(self, number: int, frame: Any) -> None: ...

    theirs = Theirs()
    callback, before = _callback(tmp_path, monkeypatch, stop_signals=ours), signal.getsignal(signal.SIGUSR1)
    errors: list[BaseException] = []

    def take() -> None:
        try:
            callback._take_signals()
        except BaseException as error:
            errors.append(error)

    try:
        _set_up(callback)
        signal.signal(signal.SIGUSR1, theirs)
        if main:
            take()
        else:
            thread = threading.Thread(target=take)
            thread.start()
            thread.join(10)
        assert not errors and signal.getsignal(signal.SIGUSR1) is (before if taken else theirs)
    finally:
        signal.signal(signal.SIGUSR1, before)
