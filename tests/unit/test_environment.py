"""What the tests run on: every version pinned, and no CUDA build, which is several GB that no machine here can use."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).parents[2]
PINS = dict(line.split("==") for line in (REPOSITORY / "scripts/constraints.txt").read_text().splitlines()
            if line and not line.startswith("#"))
OF_CUDA = re.compile(r"nvidia[-_].+|cuda[-_].+|triton|.*[-_]cu\d+")


def test_no_version_that_is_pinned_is_of_cuda_and_every_extra_is_pinned() -> None:
    assert [name for name, version in PINS.items() if OF_CUDA.fullmatch(name) or "+cu" in version] == []
    assert f"torch=={PINS['torch']}\n" in (REPOSITORY / "scripts/env").read_text(), "scripts/env installs torch by its version"
    if sys.version_info < (3, 11):
        pytest.skip("tomllib comes with 3.11")
    import tomllib

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = {re.split(r"[<>=\[ ]", line)[0] for lines in (project["dependencies"], *project["optional-dependencies"].values())
              for line in lines}
    assert wanted - set(PINS) == set()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and its build of torch is the right one")
def test_nothing_that_is_installed_is_of_cuda() -> None:
    """No extra pulls another torch over the pinned one: on a machine without a GPU that would be one with CUDA."""
    names = {dist.metadata["Name"].lower() for dist in importlib.metadata.distributions()}
    say = "install with PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu (README)"
    assert torch.version.cuda is None, f"torch {torch.__version__} is a CUDA build: {say}"
    assert sorted(filter(OF_CUDA.fullmatch, names)) == [], say
