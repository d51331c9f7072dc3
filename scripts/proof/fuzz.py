"""Layer "fuzz": the targets of ``tests/fuzzing.py`` under atheris, guided by coverage, in a process of their own.

``python -m scripts.proof.fuzz END SEED PLACE`` is that process; END is a time of the wall clock. The first byte of an input
says which target it is for.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from scripts.proof.layer import Budget, Layer, Result
from scripts.proof.packages import NotInstalled

REPOSITORY = Path(__file__).resolve().parents[2]
_GRACE = 90.0
_RUNS = re.compile(r"^(?:Done |#|stat::number_of_executed_units: +)(\d+)", re.MULTILINE)
_BAD = ("crash-", "timeout-", "oom-")


def missing() -> str | None:
    """Installs atheris by pip where it can."""
    if find_spec("atheris") is None:
        done = subprocess.run([sys.executable, "-m", "pip", "install", "-q", "atheris"], capture_output=True, text=True,
                              timeout=300)
        if done.returncode != 0 or find_spec("atheris") is None:
            return NotInstalled(f"atheris does not install: {(done.stderr.strip().splitlines() or ['?'])[-1][:200]}")
    return None


def run(budget: Budget) -> Result:
    """All targets for what is left; an input that breaks one is a violation, with the line that replays it."""
    result = Result("fuzz", skipped=missing() or "", covers=f"fuzz seed {budget.seed}")
    if result.skipped:
        return result
    begun, seconds = time.monotonic(), max(budget.left, 1.0)
    with tempfile.TemporaryDirectory(prefix="distckpt-fuzz-") as place:
        command = [sys.executable, "-m", "scripts.proof.fuzz", str(time.time() + seconds), str(budget.seed), place]
        try:
            ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, errors="replace",
                                   timeout=seconds + _GRACE, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
        except subprocess.TimeoutExpired:
            result.hangs += 1
            result.violations.append(f"I6: fuzz seed {budget.seed}: did not end within {seconds + _GRACE:g} s")
            return result
        result.runs = max(map(int, _RUNS.findall(ended.stderr)), default=0)
        for path in sorted(Path(place).iterdir()):
            if path.name.startswith(_BAD):
                replay = f"from tests.fuzzing import one; one(bytes.fromhex({path.read_bytes().hex()!r}))"
                result.violations.append(f'I9: fuzz, {_last_line(ended.stdout + ended.stderr)}; replay: python -c "{replay}"')
        if ended.returncode != 0 and not result.violations:
            raise RuntimeError(f"the fuzzer did not run: {ended.stderr[-2000:]}")
    result.seconds = time.monotonic() - begun
    return result


def _last_line(text: str) -> str:
    found = [line.strip() for line in text.splitlines() if re.match(r"\s*[\w.]*(Error|Exception|Failure)\b", line)]
    return (found or ["it crashed"])[-1][:300]


def _fuzz(end: float, seed: int, place: str) -> None:
    import logging

    import atheris  # type: ignore[import-not-found]

    with atheris.instrument_imports(include=["distckpt"]):
        from tests import fuzzing

    logging.disable(logging.CRITICAL)
    corpus = Path(place, "corpus")
    corpus.mkdir()
    for number, data in enumerate(fuzzing.all_seeds()):
        (corpus / str(number)).write_bytes(data)
    atheris.Setup([sys.argv[0], f"-max_total_time={max(int(end - time.time()), 1)}", f"-seed={seed + 1}", "-max_len=2000",
                   "-timeout=20", "-rss_limit_mb=0", f"-artifact_prefix={place}/", "-print_final_stats=1", str(corpus)],
                  fuzzing.one)
    atheris.Fuzz()


LAYER = Layer("fuzz", "markers, names, records and messages of any bytes, guided by coverage", missing, run, quick_seconds=30,
              full_seconds=1800)

if __name__ == "__main__":
    _fuzz(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
