"""What tests of several folders use."""

from __future__ import annotations

import os

import pytest

from distckpt.cli.main import main
from tests.support import Answer, Command


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests of one group never run at once: xdist says that it heard of a group by a suffix to the test's name. With pytest 9.2
    it does not, and says nothing (pytest-xdist issue 1386): two tests then killed the nodes of one cluster under each other."""
    beside = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1
    if beside and item.get_closest_marker("xdist_group") and "@" not in item.nodeid.rpartition("]")[2]:
        pytest.fail("this would run beside others of its group: -n goes with --dist loadgroup, and pytest < 9.2", pytrace=False)


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Command:
    """The command ``distckpt``, run in this process."""
    def run(*argv: object) -> Answer:
        capfd.readouterr()
        code = main([str(a) for a in argv])
        seen = capfd.readouterr()
        return Answer(code, seen.out, seen.err)

    return run
