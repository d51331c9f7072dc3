"""The command, where it keeps something or waits: pins, and the trash of a network file system."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distckpt import leases
from distckpt.cli import claim
from distckpt.cli.output import Output
from distckpt.durable import REAL
from distckpt.errors import RootInUse
from distckpt.layout import Layout
from distckpt.owned import OwnedRoot
from distckpt.runtime import SYSTEM
from distckpt.testing.clock import VirtualClock, VirtualRuntime
from tests.support import Command, attempt_id, crash_disk, make_checkpoint, open_owned, record_root


def names(root: Layout) -> list[str]:
    return sorted(n for n in os.listdir(root.root) if n.startswith("step-"))


def test_a_pin_outlasts_the_command_and_retention(command: Command, tmp_path: Path) -> None:
    root = record_root(str(tmp_path / "run"))
    for seq in (1, 2, 3):
        make_checkpoint(root.root, seq * 100, seq)
    said = command("pin", f"{root.root}@100", "--reason", "figure 3")
    assert said.code == 0 and said.out.startswith("step-100: pinned (figure 3)")
    assert "already pinned" in command("pin", root.root, "--step", 100, "--reason", "figure 3").out
    command("prune", root.root, "--keep-last", 1)
    assert names(root) == ["step-100", "step-300"]
    held = leases.take(REAL, root, SYSTEM, "step-100", attempt_id(1), "upload", 600.0)
    said = command("unpin", f"{root.root}@100")
    assert "1 pin removed" in said.out and "1 lease of readers stay" in said.out
    assert command("unpin", f"{root.root}@100", "--json").json == {
        "name": "step-100", "attempt": attempt_id(1), "pins": [], "leases": ["upload"]}
    held.release()
    assert command("unpin", f"{root.root}@100").out == "step-100: was not pinned\n"
    command("prune", root.root, "--keep-last", 1)
    assert names(root) == ["step-300"]
    assert command("pin", f"{root.root}@100").code == 3


def on_network() -> tuple[VirtualRuntime, OwnedRoot, str]:
    """An owned root on a network file system, and a victim that was just moved to its trash."""
    disk, runtime = crash_disk(), VirtualRuntime()
    disk.network = True
    root = open_owned(disk, runtime)
    victim = root.layout.trash(root.generation, f"step-100.{attempt_id(1)}")
    make_checkpoint(disk, 100, 1, directory=victim)
    return runtime, root, victim


def test_on_a_network_file_system_it_waits_until_the_bytes_are_gone(capsys: pytest.CaptureFixture[str]) -> None:
    runtime, root, victim = on_network()
    root.janitor.delete([victim])
    runtime.run("janitor", waits=0)
    runtime.hooks.append(lambda now: runtime.run("janitor", waits=0) and None)
    assert claim.drain(root, Output()) == []
    assert 90 <= runtime.slept <= 92
    assert "a reader's lease may show up late: 1 entry in trash" in capsys.readouterr().err


def test_it_gives_up_on_what_does_not_go() -> None:
    runtime, root, victim = on_network()
    runtime.run("janitor", waits=0)  # it knows nothing of the victim, so that nobody deletes it
    assert claim.drain(root, Output()) == [victim]
    assert 200 <= runtime.slept <= 220


def test_what_was_claimed_for_a_command_is_free_behind_it() -> None:
    """For another process that starts while this one, which may be a program of somebody's, still lives."""
    disk, clock = crash_disk(), VirtualClock()
    layout = open_owned(disk, VirtualRuntime(clock, pid=99)).layout
    clock.living.clear()
    with claim.claimed(disk, layout, VirtualRuntime(clock, pid=100), Output()) as owned:
        assert owned.generation == 2
        with pytest.raises(RootInUse):
            open_owned(disk, VirtualRuntime(clock, pid=101))
    assert open_owned(disk, VirtualRuntime(clock, pid=102)).generation == 3
