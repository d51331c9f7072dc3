"""Distckpt beside its peers, in one run, on the same work, as ratios: each round runs everybody once, in rotated order, and
what counts is the median of the rounds' ratios. Absolute times stand beside them, for scale only."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from scripts.benchmarks import (
    background,
    coordination,
    digest,
    frameworks,
    link,
    memory,
    peers,
    reading,
    rotation,
    save,
    small,
    startup,
)
from scripts.benchmarks.place import LOOPS, describe, loop, size_of
from scripts.benchmarks.report import SLACK, Row, missed, table

GROUPS: dict[str, Callable[..., Iterator[Row]]] = {
    "save": save.run,
    "background": background.run,
    "digest": digest.run,
    "coordination": coordination.run,
    "reading": reading.run,
    "rotation": rotation.run,
    "link": link.run,
    "small": small.run,
    "memory": memory.run,
    "startup": startup.run,
    "frameworks": frameworks.run,
    "peers": peers.run,
}

_SIZED = ("save", "background", "frameworks")

_EPILOG = """\
groups (none named: all of them):
{groups}

columns:
  ours, beside   seconds (or bytes) of the rounds: least/median/most
  ratio          median of the rounds' ours / beside [least-most]; 0.5 is half of what is beside it
  target         the median is at most this. "at least 4x faster" is a ratio of 0.25
  case           the scenario of the project's table of targets (issue 7)

examples:
  scripts/bench --quick                          does everything run? (its ratios mean nothing)
  scripts/bench save                             one group, full size
  scripts/bench background --only overlap        one scenario of it
  scripts/bench --check --json rows.json --charts charts
  scripts/bench save small --loop ext4 8G         on a journaled ext4 in a file, as root
"""


def _parser() -> argparse.ArgumentParser:
    lines = {name: (sys.modules[run.__module__].__doc__ or "?").splitlines()[0] for name, run in GROUPS.items()}
    about = "\n".join(f"  {name:11} {line}" for name, line in lines.items())
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__, epilog=_EPILOG.format(groups=about),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", nargs="*", metavar="GROUP", help="what to run (default: all groups)")
    parser.add_argument("--only", default="", metavar="TEXT", help="run scenarios whose name holds this text")
    parser.add_argument("--quick", action="store_true",
                        help="smaller and fewer, to see that it runs: exempt from the least number of rounds")
    parser.add_argument("--check", action="store_true",
                        help=f"exit with 1, naming each, where a median misses its target by more than {SLACK - 1:.0%}%")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the rows, every round of them, to this file as well")
    parser.add_argument("--charts", metavar="DIR", type=Path, help="draw one SVG for each scenario into this directory")
    parser.add_argument("--dir", metavar="DIR", type=Path, default=Path(".cache/bench"),
                        help="where to write, on whichever file system that is (default: %(default)s)")
    parser.add_argument("--loop", nargs=2, metavar=("KIND", "SIZE"), help="write to a new file system of KIND "
                        f"({' or '.join(LOOPS)}) and SIZE (8G) in a file in --dir, mounted for this run; root only")
    parser.add_argument("--size", type=int, metavar="MB",
                        help=f"MB of state of all ranks together (for {', '.join(_SIZED)})")
    return parser


def chart_name(group: str, scenario: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9]+", "-", scenario).strip("-")
    return plain if plain.startswith(group) else f"{group}-{plain}".rstrip("-")


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    unknown = [name for name in given.group if name not in GROUPS]
    if unknown:
        parser.error(f"there is no group {', '.join(unknown)}: {', '.join(GROUPS)}")
    names = given.group or list(GROUPS)
    if given.size is not None and (not set(names) <= set(_SIZED) or given.size <= 0):
        parser.error(f"--size is a number of MB, for {', '.join(_SIZED)}")
    options = {} if given.size is None else {"size": given.size}
    place: Path = given.dir.resolve()
    place.mkdir(parents=True, exist_ok=True)
    if given.charts is not None:
        from scripts.benchmarks import charts  # which needs matplotlib, and says so before anything is measured
    with ExitStack() as stack:
        if given.loop is not None:
            try:
                kind, size = given.loop[0], size_of(given.loop[1])
                if kind not in LOOPS:
                    raise ValueError(f"--loop makes {' or '.join(LOOPS)}, not {kind}")
                place = stack.enter_context(loop(kind, size, place))
            except (ValueError, RuntimeError) as error:
                parser.error(str(error))
        machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
        system = describe(place)
        print(f"machine: {machine}, load {os.getloadavg()[0]:.1f}; files in {place}, {system}")
        if given.quick:
            print("--quick: small sizes and few rounds; the ratios mean nothing, and too few rounds are no miss")
        rows: dict[str, list[Row]] = {name: [] for name in names}
        broken: list[str] = []
        for name in names:
            print(f"== {name}: load {os.getloadavg()[0]:.1f}", flush=True)
            try:
                for row in GROUPS[name](place, given.quick, given.only, **options):
                    rows[name].append(row)
                    print(table([row], head=len(rows[name]) == 1), flush=True)
            except Exception:  # whatever ended it, the other groups' twenty minutes are not lost
                traceback.print_exc()
                broken.append(name)
    if not any(rows.values()) and not broken:
        parser.error(f"nothing was run: no scenario of {', '.join(names)} has {given.only!r} in its name")
    if given.json is not None:
        found = {"machine": machine, "place": system, "quick": given.quick,
                 "groups": {name: [row.as_json() for row in of] for name, of in rows.items()}}
        given.json.write_text(json.dumps(found, indent=1))
    if given.charts is not None:
        given.charts.mkdir(parents=True, exist_ok=True)
        for name in names:
            for scenario in dict.fromkeys(row.scenario for row in rows[name]):
                charts.draw(f"{name} {scenario}".rstrip(), [row for row in rows[name] if row.scenario == scenario],
                            f"{system}{', --quick' if given.quick else ''}", given.charts / f"{chart_name(name, scenario)}.svg")
    every = [row for name in names for row in rows[name]]
    wrong, absent = missed(every), [row for row in every if row.absent]
    if given.check:
        for line in wrong:
            print(f"MISSED {line}")
        for row in absent:
            print(f"NOT MEASURED {row.name}: {row.note}")
        held = sum(row.target is not None or row.limit is not None for row in every)
        print(f"{held} rows with a target; {len(wrong)} missed, by more than {SLACK - 1:.0%} or for too few rounds; "
              f"{len(absent)} peers not measured")
    for name in broken:
        print(f"FAILED {name}: it ended with the exception above, and its other scenarios did not run")
    print(f"load at the end {os.getloadavg()[0]:.1f}")
    return 1 if broken or given.check and wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
