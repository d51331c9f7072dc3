"""One save on this rank, from the arguments to the verdict, whoever calls: the training thread or the finaliser."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from distckpt import options
from distckpt.coordination.group import Group
from distckpt.coordination.rounds import Report, by_value
from distckpt.domains.parts import Parts
from distckpt.errors import ConfigError, DistckptError, RankDisagreement
from distckpt.layout import Layout, Naming, check_step
from distckpt.marker import check_meta, check_metrics
from distckpt.options import Seams, Timeouts
from distckpt.patience import Patience
from distckpt.payloads.base import Payload, Ranks, as_payload
from distckpt.record import CommitRecord
from distckpt.retention import Policy
from distckpt.saving.committer import Committer, final_name
from distckpt.saving.files import RankFiles
from distckpt.saving.hooks import Hooks
from distckpt.saving.piecewriter import PeerFailed
from distckpt.saving.terms import BLOCK, Request, refuse
from distckpt.saving.transaction import Transaction

log = logging.getLogger(__name__)


@dataclass
class Saved:
    """How a save ended: where the checkpoint stands; ``record`` when this save made it, None when it was there already."""

    path: str = ""
    skipped: bool = False
    record: CommitRecord | None = None


class Saver:
    """What every save of one manager has in common. ``policy`` gives a series' retention; ``committer`` is rank 0's; ``kept``:
    what is written stays in the page cache."""

    def __init__(self, seams: Seams, layout: Layout, naming: Naming, group: Group, committer: Committer | None,
                 timeouts: Timeouts, algorithm: str | None, on_exists: str, policy: Callable[[str], Policy],
                 hooks: Hooks, parts: Parts | None = None, links: bool = False, kept: bool = False) -> None:
        self._seams, self._layout, self._naming, self._group = seams, layout, naming, group
        self._committer, self._timeouts, self._algorithm = committer, timeouts, algorithm
        self._on_exists, self._policy, self._hooks, self._parts = on_exists, policy, hooks, parts
        self._links, self._kept = links, kept
        self._between: dict[Any, Any] = {}
        self._patience = Patience.towards(seams.files, seams.runtime, layout.root, timeouts.visible,
                                          lambda: group.pulse.phase(group.pulse.current_phase))

    def ranks(self) -> Ranks:
        return Ranks(self._group.rank, self._group.world, self._group.collectives, kept=self._between)

    def save(self, series: str, step: int, payload: Any, metrics: Mapping[str, Any] | None, meta: Mapping[str, Any] | None,
             on_exists: str | None, blocked: float | None = None) -> Saved:
        """``blocked``: seconds that a background save has held up this rank so far; None for a synchronous one. Collective."""
        with self.saving(series, step, payload, metrics, meta, on_exists, blocked) as (files, part, saved):
            if not files.skipped:
                assert part is not None
                part.write(files, replace(self.ranks(), step=check_step(step)))
        return saved

    def prepare(self, series: str, step: int, state: Any, metrics: Mapping[str, Any] | None, meta: Mapping[str, Any] | None,
                on_exists: str | None, blocked: float | None) -> tuple[Request, Payload | None]:
        """Everything that can be wrong on this rank before any I/O: the arguments, and a state that could not be loaded."""
        number = check_step(step)
        rule = self._on_exists if on_exists is None else options.choice("on_exists", on_exists, options.ON_EXISTS)
        part = None if state is BLOCK else as_payload(state)
        if part is not None:
            refusal = self.on_own_disks(part)
            if refusal is not None:
                raise refusal
            if part.collective:
                self._group.require_collectives()
            part.check()
        request = Request(step=number, series=series, on_exists=rule, name=final_name(self._naming, series, number),
                          metrics=check_metrics(metrics), meta=check_meta(meta),
                          collective=part is not None and part.collective, discardable=part is None, blocked=blocked,
                          links=self._links)
        return request, part

    def on_own_disks(self, part: Payload) -> ConfigError | None:
        """Why ``part`` cannot be saved where every node has its own disk; None when it can."""
        if self._parts is None or not part.collective:
            return None
        return ConfigError("storage='node-local': this state is saved by a framework's collectives (DCP, DeepSpeed), which need "
                           "every rank's files on one storage. Save with Shards or a state dict per rank, or in manager.saving "
                           "with files.mine, or use a root that all nodes share")

    def meet(self, step: int) -> None:
        """Make the group of a framework's collectives, after one round, so that all ranks make it or none. Collective, on the
        training thread, before a background save that needs it."""
        with self._group.rounds.call("save", step) as call:
            call.round({"meets": True}, _meeting, self._timeouts.arrive)
        self._group.collectives()

    @contextmanager
    def saving(self, series: str, step: int, state: Any, metrics: Mapping[str, Any] | None, meta: Mapping[str, Any] | None,
               on_exists: str | None, blocked: float | None = None) -> Iterator[tuple[RankFiles, Payload | None, Saved]]:
        saved, begun, pid = Saved(), self._seams.runtime.monotonic(), os.getpid()
        with self._group.rounds.call("save", _shown(step)) as call:
            try:
                request, payload = self.prepare(series, step, state, metrics, meta, on_exists, blocked)
            except Exception as error:  # whatever it is: every rank must hear of it, or wait for this one in vain
                try:
                    refuse(call, self._group, error, self._timeouts.arrive)
                except DistckptError as told:
                    if self._committer is not None:
                        self._committer.never_began(_shown(step), told)
                    raise
            if self._committer is not None:
                self._committer.prepare(request, self._policy(series))
            work = Transaction(call, self._group, self._seams.files, self._layout, self._seams.runtime, request, self._committer,
                               algorithm=self._algorithm, arrive=self._timeouts.arrive, progress=self._timeouts.progress,
                               patience=self._patience, parts=self._parts, kept=self._kept)
            files = work.begin({"options": self._policy(series).spec, "members": payload.members if payload else None,
                                **self._hooks.drain()})
            if files is None:
                assert work.go is not None
                self._settle(saved, {"existing": work.go.existing}, request, begun)
                yield RankFiles(self._seams.files, "", self._group.rank, self._group.world, algorithm=None, aborted=lambda: False,
                                skipped=True, first=self._parts.first if self._parts else 0), payload, saved
                return
            try:
                self._enter(work, request.collective)
                yield files, payload, saved
                if os.getpid() != pid:
                    raise ConfigError(f"this save belongs to process {pid}; a child forked inside the block must not end it")
            except BaseException as error:
                if os.getpid() != pid:
                    raise  # a child that was forked inside the block leaves it as well, and never speaks for its parent
                error = _own(error, self._group.rank)
                if isinstance(error, Exception):  # reported to all ranks, and raised again as the cause of the SaveError
                    _log_own(error, request.step, self._group.rank)
                    work.finish(files, error)
                else:  # an interrupt is the caller's; the others must learn of it all the same
                    _tell(work, files, error)
                raise
            self._settle(saved, work.finish(files, None), request, begun)

    def _settle(self, saved: Saved, verdict: Report, request: Request, begun: float) -> None:
        """What every rank learned, as this rank's record of it."""
        told = verdict.get("committed")
        saved.skipped = told is None
        saved.path = self._layout.final(verdict["existing"] if told is None else told["name"])
        if told is None:
            return
        took = self._seams.runtime.monotonic() - begun
        rank, seconds = told["slowest"]
        saved.record = CommitRecord(
            step=request.step, series=request.series, path=saved.path, attempt=told["attempt"], seq=told["seq"],
            metrics=dict(request.metrics), bytes=told["bytes"], files=told["files"],
            blocked_seconds=took if request.blocked is None else request.blocked,
            background_seconds=0.0 if request.blocked is None else took, slowest_rank=rank, slowest_seconds=seconds)

    def _enter(self, work: Transaction, collective: bool) -> None:
        """This rank sees the staging directory; before a framework's collectives, every rank does."""
        together = collective and self._group.world > 1
        try:
            work.await_staging()
        except OSError:
            if together:
                work.enter_together(ready=False)
            raise
        if together:
            work.enter_together(ready=True)
        if collective:
            self._group.collectives()


def _meeting(reports: dict[int, Report]) -> Report:
    meets = {rank: "meets" in report for rank, report in reports.items()}
    if not all(meets.values()):
        raise RankDisagreement("save: the ranks gave states of different kinds; saved by collectives: "
                               f"{by_value(meets)}; every rank must give the same kind", values=meets)
    return {}


def _shown(step: object) -> int | None:
    """``step`` for messages, before it is known to be one."""
    try:
        return check_step(step)
    except ConfigError:
        return None


def _own(error: BaseException, rank: int) -> BaseException:
    """DCP raises one error on every rank alike, and no Exception: this rank's part in it, PeerFailed where it has none."""
    if "torch.distributed.checkpoint.api" not in sys.modules:
        return error
    from torch.distributed.checkpoint.api import CheckpointException

    from distckpt.payloads.framework import own_failure

    return own_failure(error, rank) if isinstance(error, CheckpointException) else error


def _log_own(error: Exception, step: int, rank: int) -> None:
    """The failing rank speaks first, before anything is sent: the others' errors may never arrive."""
    if not isinstance(error, PeerFailed):
        log.error("rank %d failed in the save of step %d: %s: %s", rank, step, type(error).__name__, error)


def _tell(work: Transaction, files: RankFiles, error: BaseException) -> None:
    try:
        work.finish(files, error)
    except DistckptError as reported:
        log.debug("the interrupted save ended: %s", reported)
