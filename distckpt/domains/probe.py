"""Which ranks see one disk: each leaves a file under its own root, and looks whose it finds there.

The directory's name is a random token of this start, told by rank 0, and every rank's file is durable before anybody
looks: nobody looks a name up before it exists, for network file systems remember an absence (S10).
"""

from __future__ import annotations

import os
from collections.abc import Callable

from distckpt.coordination.rounds import Call, Report
from distckpt.domains.domains import Domains, joined, ranges
from distckpt.durable import Files
from distckpt.errors import ConfigError
from distckpt.layout import Layout
from distckpt.ordered import make_dir, rmdir_if_there, unlink_if_there, write_new
from distckpt.ownership import STILL
from distckpt.patience import PASSING, Patience
from distckpt.rootdir import make_root
from distckpt.runtime import Runtime

_LOCAL = 2.0


class Probe:
    """Two rounds. ``refuse`` raises ConfigError where the root must not be used, ``try_storage(directory)`` says what a save
    could not do there, or None. ``waiting`` says that this rank is still at it."""

    def __init__(self, files: Files, runtime: Runtime, layout: Layout, rank: int, world: int, hosts: dict[int, str],
                 refuse: Callable[[], None], try_storage: Callable[[str], str | None], waiting: Callable[[str], None]) -> None:
        self._files, self._runtime, self._layout = files, runtime, layout
        self._rank, self._world, self._hosts = rank, world, hosts
        self._refuse, self._try, self._waiting = refuse, try_storage, waiting

    def find(self, call: Call, token: str, arrive: float, visible: float) -> Domains:
        """The domains, alike on every rank; ConfigError when some rank's root cannot be used. Collective."""
        place = self._layout.home(f"probe-{token}")
        mine = os.path.join(place, str(self._rank))
        try:
            problem: str | None = None
            try:
                self._refuse()  # before anything is made in it
                make_root(self._files, self._layout, self._runtime)
                self._refuse()  # it may have been made just now, with a umask that lets everybody in
                make_dir(self._files, place)
                write_new(self._files, mine, b"distckpt")
                self._files.fsync_dir(place)
            except ConfigError as error:
                problem = f"finds that {error}"
            except OSError as error:
                problem = f"cannot write there: {error}"
            call.round({"problem": problem}, self._judge, arrive)
            seen, problem = self._look(place, visible)
            problem = problem or self._try(place)
            verdict = call.round({"problem": problem, "sees": ranges(seen)}, self._join, arrive, progress=True)
        finally:
            self._clear(place, mine)
        return Domains(tuple(tuple(ranks) for ranks in verdict["domains"]), self._rank, self._hosts)

    def _look(self, place: str, visible: float) -> tuple[set[int], str | None]:
        """Whose files this rank sees: all of them, or those that it saw until its patience ended."""
        patience = Patience.towards(self._files, self._runtime, self._layout.root, max(visible, STILL),
                                    lambda: self._waiting("looking whose probes are on this disk"))
        seen: set[int] = {self._rank}
        for _ in patience.looks(at_least=min(visible, _LOCAL)):
            try:
                seen |= {int(item.name) for item in self._files.scan(place) if item.name.isdecimal()}
            except OSError as error:
                if error.errno not in PASSING:
                    return seen, f"cannot read it: {error}"
            if len(seen) >= self._world:
                break
        return {rank for rank in seen if rank < self._world}, None

    def _judge(self, reports: dict[int, Report]) -> Report:
        problems = {rank: report["problem"] for rank, report in reports.items() if report.get("problem")}
        if problems:
            bad = "; ".join(f"rank {rank} on {self._hosts[rank]} {text}" for rank, text in sorted(problems.items())[:8])
            raise ConfigError(f"root {self._layout.root} cannot be used by all ranks: {bad}. With storage='node-local' it must "
                              "be a writable directory on every node's own disk, of the same path")
        return {}

    def _join(self, reports: dict[int, Report]) -> Report:
        self._judge(reports)
        return {"domains": joined({rank: report["sees"] for rank, report in reports.items()})}

    def _clear(self, place: str, mine: str) -> None:
        """The last one out removes the directory. What a crash leaves is swept by the next probe of this root."""
        try:
            unlink_if_there(self._files, mine)
            if not self._files.scan(place):
                rmdir_if_there(self._files, place)
        except OSError:
            return  # another rank's file is still there, or the disk's trouble has been told
