"""Rank tests share nothing: the registry of open roots is emptied around each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distckpt import owned


@pytest.fixture(autouse=True)
def no_open_roots() -> Iterator[None]:
    owned._open.clear()
    yield
    owned._open.clear()
