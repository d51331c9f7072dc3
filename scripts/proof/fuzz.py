"""Layer "fuzz": the targets of ``tests/fuzzing.py`` under atheris, guided by coverage, each in a process of its own.

``python -m scripts.proof.fuzz TARGET SECONDS SEED [FILE ...]`` runs one, or replays a crashing input.
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

REPOSITORY = Path(__file__).resolve().parents[2]
_TARGETS = ("marker_bytes", "marker_edited", "marker_values", "names", "messages", "rounds", "listener", "gatekeeper", "records",
            "directory", "metadata")
_GRACE = 60.0
_RUNS = re.compile(r"^(?:Done|#)\s*(\d+)", re.MULTILINE)


def missing() -> str | None:
    """Installs atheris by pip where it can."""
    if find_spec("atheris") is None:
        done = subprocess.run([sys.executable, "-m", "pip", "install", "-q", "atheris"], capture_output=True, text=True,
                              timeout=300)
        if done.returncode != 0 or find_spec("atheris") is None:
            return f"atheris does not install: {(done.stderr.strip().splitlines() or ['?'])[-1][:200]}"
    return None


def run(budget: Budget) -> Result:
    """Every target for its share of what is left; a crash is a violation with the input that replays it."""
    result = Result("fuzz", skipped=missing() or "")
    if result.skipped:
        return result
    begun = time.monotonic()
    done = []
    for index, name in enumerate(_TARGETS):
        seconds = int(budget.left / (len(_TARGETS) - index) - 3)  # torch takes its time to load
        if budget.left <= 0:
            break
        _one(name, max(seconds, 1), budget.seed, result)
        done.append(name)
    result.seconds = time.monotonic() - begun
    result.covers = f"fuzz seed {budget.seed}: {', '.join(done)}"
    return result


def _one(name: str, seconds: int, seed: int, result: Result) -> None:
    with tempfile.TemporaryDirectory(prefix="distckpt-fuzz-") as place:
        command = [sys.executable, "-m", "scripts.proof.fuzz", name, str(seconds), str(seed), "--", place]
        try:
            ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, errors="replace",
                                   timeout=seconds + _GRACE, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
        except subprocess.TimeoutExpired:
            result.hangs += 1
            result.violations.append(f"I6: fuzz target {name}, seed {seed}: did not end within {seconds + _GRACE:g} s")
            return
        result.runs += max(map(int, _RUNS.findall(ended.stderr)), default=0)
        crashes = [path for path in Path(place).iterdir() if path.name.startswith(("crash-", "timeout-", "oom-"))]
        for path in crashes:
            replay = f"from tests.fuzzing import TARGETS; TARGETS[{name!r}](bytes.fromhex({path.read_bytes().hex()!r}))"
            result.violations.append(f"I9: fuzz target {name}: {_last_line(ended.stdout + ended.stderr)}; replay: python -c "
                                     f'"{replay}"')
        if ended.returncode != 0 and not crashes:
            raise RuntimeError(f"the fuzzer of {name} did not run: {ended.stderr[-2000:]}")


def _last_line(text: str) -> str:
    found = [line.strip() for line in text.splitlines() if re.match(r"\s*\w*(Error|Exception|Failure)\b", line)]
    return (found or ["it crashed"])[-1][:300]


def _fuzz(name: str, seconds: int, seed: int, place: str) -> None:
    import logging

    import atheris  # type: ignore[import-not-found]

    with atheris.instrument_imports(include=["distckpt"]):
        from tests import fuzzing

    logging.disable(logging.CRITICAL)
    corpus = Path(place, "corpus")
    corpus.mkdir()
    for number, data in enumerate(fuzzing.SEEDS.get(name, [])):
        (corpus / str(number)).write_bytes(data)
    atheris.Setup([sys.argv[0], f"-max_total_time={seconds}", f"-seed={seed + 1}", "-max_len=2000", "-timeout=20",
                   "-rss_limit_mb=0", f"-artifact_prefix={place}/", "-print_final_stats=1", str(corpus)], fuzzing.TARGETS[name])
    atheris.Fuzz()


LAYER = Layer("fuzz", "markers, names and messages of any bytes, guided by coverage", missing, run, quick_seconds=60,
              full_seconds=1800)

if __name__ == "__main__":
    _fuzz(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[5])
