"""A manifest of 10,000 files, and a root of many checkpoints: works, and the figures are printed, never judged."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import distckpt
from distckpt.cli.main import main


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory where there is one: this is about the manifest, not about 20,000 fsyncs of a shared disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        yield Path(name)


def test_ten_thousand_files(memory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count, times = 10_000, {}

    def timed(name: str, begun: float) -> None:
        times[name] = time.perf_counter() - begun

    root = memory / "root"
    with distckpt.CheckpointManager(root, keep_last=1) as manager:
        for step in (1, 2):
            begun = time.perf_counter()
            with manager.saving(step) as files:
                for index in range(count):
                    with files.writer(f"part/{index % 100}/f{index}.bin") as out:
                        out.write(b"%d" % index)
            timed(f"save {step}", begun)
        begun = time.perf_counter()
        found = manager.resume()
        timed("resume", begun)
        assert found.checkpoint is not None and len(found.checkpoint.marker.files) == count
        begun = time.perf_counter()
    timed("close, with the old one deleted", begun)
    assert sorted(p.name for p in root.iterdir()) == [".distckpt", "latest", "step-2"]
    for arguments in (["ls", str(root)], ["verify", str(root)], ["verify", "--digest", str(root)]):
        begun = time.perf_counter()
        assert main(arguments) == 0
        timed(" ".join(arguments[:-1]), begun)
    assert "10000" in capsys.readouterr().out
    with capsys.disabled():
        print("\n  10,000 files: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in times.items()))
