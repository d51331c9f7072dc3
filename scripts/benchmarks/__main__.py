"""``scripts/bench NAME``: run one group of scenarios and print its table."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

from scripts.benchmarks import background, core, frameworks, link
from scripts.benchmarks.report import Row, table

GROUPS: dict[str, Callable[..., Iterator[Row]]] = {"background": background.run, "core": core.run, "frameworks": frameworks.run,
                                                   "link": link.run}


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("group", choices=sorted(GROUPS))
    parser.add_argument("--quick", action="store_true", help="smaller and fewer, to see that it runs")
    parser.add_argument("--only", default="", help="run scenarios whose name holds this text")
    parser.add_argument("--dir", default=None, help="where to write (default: a directory beside the repository's build)")
    parser.add_argument("--json", default=None, help="write the rows to this file as well")
    parser.add_argument("--size", type=int, default=None, help="MB of state of all ranks together (frameworks)")
    given = parser.parse_args()
    if given.size is not None and (given.group != "frameworks" or given.size <= 0):
        parser.error("--size is a number of MB, for frameworks")
    options = {} if given.size is None else {"size": given.size}
    place = Path(given.dir or ".cache/bench").resolve()
    place.mkdir(parents=True, exist_ok=True)
    print(f"machine: {platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; "
          f"files in {place}")
    rows: list[Row] = []
    for row in GROUPS[given.group](place, given.quick, given.only, **options):
        rows.append(row)
        print(table([row], head=len(rows) == 1), flush=True)
    print(f"load at the end {os.getloadavg()[0]:.1f}")
    if given.json:
        Path(given.json).write_text(json.dumps([vars(row) for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
