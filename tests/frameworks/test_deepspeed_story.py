"""DeepSpeed's story: ZeRO 0 to 3, sync and in the background, killed at three points, to the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="needs DeepSpeed")

from tests.frameworks import dsranks
from tests.frameworks.stage import Stage, staged
from tests.frameworks.story import Story

pytestmark = pytest.mark.xdist_group("deepspeed")


stage = staged(*dsranks.LOADED)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_killed_in_a_save_it_goes_on_to_the_same_bits(stage: Stage, tmp_path: Path, zero: int) -> None:
    tools = ("zero_to_fp32.py", "zero_to_torch.py") if zero else ()
    story = Story(stage, dsranks.train, tmp_path, extra={"stage": zero}, limit=90, tools=tools)
    plain = story.plain()
    for background in (False, True):
        story.whole(plain, background)
