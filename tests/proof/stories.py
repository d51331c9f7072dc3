"""Programs of simulated ranks, and what a run must be, for the tests of schedules."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from typing import Any

from distckpt.testing import faults
from distckpt.testing.simnodes import Nodes, attempts
from distckpt.testing.simulation import Run, State, Told, tree_of
from scripts.proof.cases import Case
from scripts.proof.scenarios import bytes_of


def saves(*steps: int, **more: Any) -> Callable[[Told, int], None]:
    """A program that saves these steps."""

    def program(manager: Told, rank: int) -> None:
        for step in steps:
            manager.save(step, State(bytes_of(rank, step)), **more)

    return program


def well(run: Run) -> Run:
    assert run.violations == [], (run.violations, run.errors, run.stacks)
    return run


def all_well(cases: Iterable[Case]) -> list[Run]:
    """Every case ran without a violation; the runs."""
    found = []
    for case in cases:
        run = case.run()
        assert run.violations == [], f"{case}\n{run.violations}\n{run.errors}\n{run.stacks}"
        found.append(run)
    return found


def standing(nodes: Nodes) -> list[list[str]]:
    return [sorted(attempts(tree_of(disk))) for disk in nodes.nodes]


def block(manager: Told, step: int, text: bytes) -> bool:
    """A ``saving`` block that writes its own file; whether it was skipped."""
    with manager.saving(step, on_exists="skip") as files, files.writer("data.bin") as out:
        out.write(text)
    return files.skipped


def failing(rank: int, op: str, part: str, last: int | None = None) -> dict[str, Any]:
    fault = faults.fail(errno.EIO, op=op, path=lambda path: part in path, **({} if last is None else {"last": last}))
    return {"file_faults": {rank: [fault]}}
