"""Unit tests share nothing: the registry of open roots is emptied around each, and no key to sign with is inherited."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distckpt import owned, trust
from distckpt.cli.main import main
from tests.support import Answer, Command


@pytest.fixture(autouse=True)
def no_open_roots() -> Iterator[None]:
    owned._open.clear()
    yield
    owned._open.clear()


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(trust.KEY_VARIABLE, raising=False)


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Command:
    """The command ``distckpt``, run in this process."""
    def run(*argv: object) -> Answer:
        capfd.readouterr()
        code = main([str(a) for a in argv])
        seen = capfd.readouterr()
        return Answer(code, seen.out, seen.err)

    return run
