"""Files that a framework wrote under names of its own and no rank claimed: one more round makes them durable.

The first rank of every host fsyncs every such file, after all writers have returned; rank 0 alone could not flush another host's
pages (S20).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from distckpt.coordination.group import Group
from distckpt.coordination.rounds import Call, Report
from distckpt.durable import Files
from distckpt.errors import RankFailure
from distckpt.marker import FileEntry
from distckpt.ordered import walk
from distckpt.patience import Patience
from distckpt.saving.files import make_durable
from distckpt.together import together


class Unclaimed:
    """That round of one attempt, in ``directory``. ``failure`` makes what is told of an error of this rank."""

    def __init__(self, call: Call, group: Group, files: Files, directory: str, attempt: str,
                 failure: Callable[[BaseException], RankFailure], *, algorithm: str | None, progress: float,
                 patience: Patience, kept: bool = False) -> None:
        self._call, self._group, self._files, self._directory, self._failure = call, group, files, directory, failure
        self._algorithm, self._progress, self._patience = algorithm, progress, patience
        self._attempt, self._kept = attempt, kept

    @property
    def shown_late(self) -> bool:
        """Whether rank 0 may be shown late what another host wrote."""
        return bool(self._patience.seconds) and len(self._group.leaders) > 1

    def may_hide(self, reports: dict[int, Report]) -> bool:
        """Whether another host may have written files that nobody claims and that rank 0 is not shown yet."""
        return self.shown_late and any(report.get("open") for report in reports.values())

    def sync(self, unclaimed: list[str], acked: dict[int, list[FileEntry]]) -> dict[int, RankFailure]:
        """Rank 0: have every host make them durable, and count them as rank 0's in ``acked``; the failures, by rank.

        RankTimeout when a host's first rank does not answer. Each host also tells of what it sees and rank 0 did not.
        """
        client = self._group.rounds.client
        keys = self._call.keys(self._group.leaders, self._attempt, "synced")
        known = [e.path for entries in acked.values() for e in entries] if self.shown_late else None
        client.set(self._call.key(self._attempt, "unclaimed"), {"files": unclaimed, "known": known})
        client.claim(keys[0], self._here(unclaimed, 0, known))
        reports, watch = self._call.gather(keys, self._progress, progress=True)
        failures = {r: RankFailure(**report["failure"]) for r, report in reports.items() if "failure" in report}
        if failures:
            return failures
        if len(reports) < len(keys):
            raise self._call.absence(watch, "fsync of framework files")
        sizes: dict[str, tuple[int, int]] = {}
        digests: dict[str, str] = {}
        for rank, report in reports.items():
            for path, size, text in report["files"]:
                first = sizes.setdefault(path, (size, rank))
                if first[0] != size:
                    return {rank: self._failure(OSError(
                        errno.EIO, f"{path} has {size} bytes on rank {rank}'s host and {first[0]} on rank {first[1]}'s"))}
                if text is not None:
                    digests[path] = text
        acked[0] = acked[0] + [FileEntry(p, size, digests.get(p), rank) for p, (size, rank) in sizes.items()]
        return {}

    def answer(self) -> None:
        """The other ranks: nothing, but on the first rank of a host."""
        key = self._call.key(self._attempt, "unclaimed")
        if self._group.leads_host and self._call.await_rank0(key, self._progress):
            told = self._group.rounds.client.get([key])[0]
            report = self._here(told["files"], self._group.leaders.index(self._group.rank), told["known"])
            me = self._group.rank
            self._group.rounds.client.claim(self._call.key(self._attempt, "synced", me, by=me), report)

    def _here(self, unclaimed: list[str], position: int, known: list[str] | None) -> Report:
        """Fsync all of them; digest this leader's share. ``known``: files that are acked, where others count as unclaimed too."""
        self._group.pulse.phase("fsync of framework files")
        extra: list[str] = []

        def one(counted: tuple[int, str]) -> list[Any]:
            index, path = counted
            mine = index % len(self._group.leaders) == position or index >= len(unclaimed)
            # rank 0 has seen it; to open it is what makes this host ask for its size as well
            self._patience.again(partial(self._files.read, os.path.join(self._directory, path), 0))
            entry = make_durable(self._files, self._directory, path, self._group.rank, self._algorithm if mine else None,
                                 self._kept)
            return [entry.path, entry.size, entry.digest]

        try:
            for path in unclaimed:
                self._files.start_writeback(os.path.join(self._directory, path))
            extra = self._unknown_here({*unclaimed, *known}) if known is not None else []
            found = together(self._group.rounds.runtime, one, list(enumerate([*unclaimed, *extra])))
            for folder in sorted({os.path.dirname(path) for path in [*unclaimed, *extra]}):
                self._files.fsync_dir(os.path.join(self._directory, folder))
        except OSError as error:
            return {"failure": asdict(self._failure(error))}
        return {"files": found}

    def _unknown_here(self, known: set[str]) -> list[str]:
        """Regular files that this host sees in the attempt beside the ``known`` ones."""
        return [path for path, item in walk(self._files, self._directory) if item.kind == "file" and path not in known]
