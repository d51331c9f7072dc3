"""Lightning: the story with DDP and with FSDP2 (ModelParallelStrategy)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.frameworks.lightning_job import train
from tests.frameworks.stage import Stage
from tests.frameworks.story import Story

pytestmark = pytest.mark.xdist_group("lightning")


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    found = Stage("tests.frameworks.lightning_job")
    yield found
    found.close()


@pytest.mark.parametrize("background", [False, True], ids=["sync", "background"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_the_story(stage: Stage, kind: str, background: bool, tmp_path: Path) -> None:
    story = Story(stage, train, tmp_path, extra={"kind": kind})
    story.whole(story.plain(), background)
