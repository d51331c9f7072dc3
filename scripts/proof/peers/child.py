"""A program in an environment of its own: how that is made, and how it is asked."""

from __future__ import annotations

import importlib.util
import json
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

LIMIT = 120.0
TORCH = ("torch==2.13.0", "numpy==2.4.6")


def environment(folder: Path, packages: Sequence[str]) -> str:
    """Make the environment ``folder`` with ``packages``; what went wrong, or nothing. It borrows torch and numpy from the one
    this runs in, which also keeps pip from fetching a torch with CUDA."""
    folder = folder.absolute()
    stamp, wanted = folder / "complete", "\n".join((sys.executable, *packages))
    if stamp.exists() and stamp.read_text() == wanted:
        return ""
    stamp.unlink(missing_ok=True)
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return "there is no torch here to borrow"
    folder.parent.mkdir(parents=True, exist_ok=True)
    rules = folder.parent / "constraints.txt"
    rules.write_text("\n".join(TORCH) + "\n")
    pip = [str(folder / "bin/pip"), "install", "-q", "--no-build-isolation", "-c", str(rules)]
    steps = [[sys.executable, "-m", "venv", "--clear", str(folder)], *([*pip, name] for name in packages)]
    for number, command in enumerate(steps):
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
        if done.returncode:
            return f"{' '.join(command)}: {done.stderr[-500:]}"
        if number == 0:
            borrowed = folder / f"lib/python3.{sys.version_info.minor}/site-packages/borrowed.pth"
            borrowed.write_text(f"{Path(torch.origin).parents[1]}\n")
    stamp.write_text(wanted)
    return ""


_Child = TypeVar("_Child", bound="Child")


class Child:
    """A program that answers a line with a line of JSON. Use it as a context manager."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self._log = log.open("ab")
        # Unbuffered: of two lines that come at once the second would hide in a buffer, where select does not see it.
        self._child = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
                                       env=env)
        self._name = name

    def __enter__(self: _Child) -> _Child:
        return self

    def __exit__(self, *exc: object) -> None:
        self._child.kill()
        self._child.wait()
        self._log.close()

    def end(self, limit: float) -> None:
        """No more lines; let it end by itself, for ``limit`` seconds at most."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(limit)
        except subprocess.TimeoutExpired:
            self._child.kill()

    def complaint(self) -> str:
        """The last thing it printed."""
        lines = Path(self._log.name).read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def ask(self, line: str, limit: float = LIMIT) -> dict[str, object]:
        """RuntimeError when it does not answer within ``limit`` seconds: the log says more."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(line.encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(f"{self._name} died before {line}, see {self._log.name}") from None
        return self.hear(limit, f" {line}")

    def quiet(self, seconds: float) -> bool:
        """Wait that long for it to say something; whether it said nothing."""
        assert self._child.stdout is not None
        return not select.select([self._child.stdout], [], [], seconds)[0]

    def hear(self, limit: float, asked: str = "") -> dict[str, object]:
        """A line that it says, as an answer or unasked."""
        if self.quiet(limit):
            raise RuntimeError(f"{self._name} did not answer{asked} within {limit:.0f} s, see {self._log.name}")
        assert self._child.stdout is not None
        answer = self._child.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self._name} died{' on' if asked else ''}{asked}, see {self._log.name}")
        found = json.loads(answer)
        assert isinstance(found, dict)
        return found
