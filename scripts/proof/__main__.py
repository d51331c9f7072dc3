"""``scripts/prove``: run layers of the proof and print what they found.

Without names, every layer but the peers' runs. ``--quick`` gives each its few seconds (that is what CI runs); otherwise each
gets its full time, or ``--seconds``. Results are appended to a file, so a full run may be stopped and gone on with: seeds
of later runs are others, and results of the same code add up in the table. Exit code 1 when anything was violated, hung, or
could not run though it was named; with ``--strict`` also when a layer was skipped and all it lacked could be installed here, as
root (CI would be green without it).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from importlib import import_module
from pathlib import Path

from scripts.proof.layer import Budget, Layer, Result, append
from scripts.proof.packages import NotInstalled

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / ".cache" / "proof" / "results.jsonl"
MODULES = ("l0", "l1", "l2", "l3", "l4", "fuzz", "mutants", "peers")
SEEDS_A_RUN = 1_000_003
"""A prime: a layer whose cases go round begins elsewhere in each run."""


def layers() -> list[Layer]:
    found: list[Layer] = []
    for name in MODULES:
        module = import_module(f"scripts.proof.{name}")
        found += getattr(module, "LAYERS", None) or [module.LAYER]
    return found


def code() -> str:
    """What was tested: results of other code do not count."""
    running = hashlib.sha256()
    for path in sorted((REPOSITORY / "distckpt").rglob("*.py")):
        running.update(f"{path.relative_to(REPOSITORY)}\0".encode() + path.read_bytes())
    return running.hexdigest()[:12]


def earlier(path: Path, tested: str) -> dict[str, list[Result]]:
    """Results of the same code, by layer."""
    found: dict[str, list[Result]] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            value = json.loads(line)
            if value.get("code") == tested:
                found.setdefault(value["layer"], []).append(Result(**value))
    return found


def table(results: list[Result]) -> str:
    rows = [("layer", "runs", "states", "distinct", "violations", "hangs", "slowest", "seconds", "")]
    for r in results:
        rows.append((r.layer, f"{r.runs:,}", f"{r.states:,}", f"{r.distinct:,}", str(len(r.violations)), str(r.hangs),
                     f"{r.slowest:.1f} s", f"{r.seconds:.0f}", f"skipped: {r.skipped}" if r.skipped else r.covers[:100]))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) if i in (0, 8) else cell.rjust(width)
                               for i, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/prove", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("layer", nargs="*", help="names of layers; none: all but the peers'")
    parser.add_argument("--quick", action="store_true", help="a few seconds for each layer")
    parser.add_argument("--strict", action="store_true", help="as root: a layer that lacks only packages is an error")
    parser.add_argument("--seconds", type=float, help="this much for each layer")
    parser.add_argument("--seed", type=int, help="begin here, instead of after the last run of the same code")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--mutants", action="store_true", help="the mutants only")
    parser.add_argument("--peers", action="store_true", help="the peers only")
    parser.add_argument("--list", action="store_true", help="name the layers and what each is")
    given = parser.parse_args()
    known = {layer.name: layer for layer in layers()}
    if given.list:
        for layer in known.values():
            print(f"{layer.name:14} {layer.title}" + (f" (cannot run here: {why})" if (why := layer.missing()) else ""))
        return 0
    names = [*given.layer, *(["mutants"] if given.mutants else []), *(["peers"] if given.peers else [])]
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"no layer is called {unknown[0]!r}; there are {', '.join(known)}")
    chosen = [known[name] for name in names] or [layer for layer in known.values() if layer.name not in ("peers", "mutants")]
    given.results.parent.mkdir(parents=True, exist_ok=True)
    tested = code()
    totals, ended = [], 0
    for layer in chosen:
        before = earlier(given.results, tested).get(layer.name, [])
        result = one(layer, given, len(before) * SEEDS_A_RUN, bool(names))
        result.code = tested
        if not result.skipped:
            append(given.results, [result])
        total = Result(layer.name, skipped=result.skipped)
        for part in (*before, result):
            total.add(part)
        totals.append(total)
        for line in result.violations[:20]:
            print(f"VIOLATION {layer.name}: {line}", flush=True)
        unfetched = given.strict and isinstance(result.skipped, NotInstalled)
        if unfetched:
            print(f"NOT RUN {layer.name}: {result.skipped}", flush=True)
        if result.violations or result.hangs or (result.skipped and names) or unfetched:
            ended = 1
        print(table([total]).splitlines()[1], flush=True)
    print(f"\ncode {tested}; results in {given.results}\n" + table(totals))
    return ended


def one(layer: Layer, given: argparse.Namespace, seed: int, named: bool) -> Result:
    seconds = given.seconds or (layer.quick_seconds if given.quick else layer.full_seconds)
    if seconds <= 0:
        return Result(layer.name, skipped="it has no quick form")
    why = layer.missing()
    if why:
        return Result(layer.name, skipped=why)
    budget = Budget(seconds, seed if given.seed is None else given.seed)
    result = layer.run(budget)
    result.layer = layer.name
    result.seconds = round(seconds - budget.left, 1)
    return result


if __name__ == "__main__":
    sys.exit(main())
