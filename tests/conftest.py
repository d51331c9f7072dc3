"""What tests of several folders use."""

from __future__ import annotations

import pytest

from distckpt.cli.main import main
from tests.support import Answer, Command


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Command:
    """The command ``distckpt``, run in this process."""
    def run(*argv: object) -> Answer:
        capfd.readouterr()
        code = main([str(a) for a in argv])
        seen = capfd.readouterr()
        return Answer(code, seen.out, seen.err)

    return run
