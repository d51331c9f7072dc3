"""Unit tests share nothing: the registry of open roots is emptied around each, and no key to sign with is inherited."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distckpt import owned, trust


@pytest.fixture(autouse=True)
def no_open_roots() -> Iterator[None]:
    owned._open.clear()
    yield
    owned._open.clear()


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(trust.KEY_VARIABLE, raising=False)
