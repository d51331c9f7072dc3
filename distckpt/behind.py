"""A save that goes on behind the training: the copy that it waits for, the memory for it, and what the finaliser is handed."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch

from distckpt import options
from distckpt.background import Background, Job
from distckpt.checkpoint import Checkpoint
from distckpt.coordination.group import Group
from distckpt.durable import REAL
from distckpt.errors import ConfigError
from distckpt.layout import Layout, Naming, check_step
from distckpt.options import Seams
from distckpt.payloads.base import Payload, Ranks, Stageable, as_payload, is_stageable, stageable
from distckpt.payloads.live import live_of
from distckpt.runtime import Thread
from distckpt.saving.arena import Arena
from distckpt.saving.files import RankFiles
from distckpt.saving.handle import SaveHandle
from distckpt.saving.hooks import Hooks
from distckpt.saving.saver import Saved, Saver
from distckpt.saving.staging import HOW, Copy, Device
from distckpt.saving.writer import WriterProcess

log = logging.getLogger(__name__)

_ASKED = 3
_SLACK = 1.005
_SMALL = 1 << 16

CHECK = "DISTCKPT_CHECK_STAGING"


class Behind:
    """Background saves of one manager, on its training thread up to the copy. ``attach`` gives it the rest of them.

    ``attention``: ``poll`` has something to do here: memory to prepare, or a copy under way to wait for.
    """

    def __init__(self, seams: Seams, layout: Layout, naming: Naming, group: Group, saver: Saver, hooks: Hooks,
                 check_staging: bool | None, writer: str) -> None:
        self._seams, self._layout, self._naming, self._group = seams, layout, naming, group
        self._saver, self._hooks = saver, hooks
        self._check = os.environ.get(CHECK, "") not in ("", "0") if check_staging is None else check_staging
        self.device = Device()
        apart = writer == "process"
        if apart and seams.files is not REAL:
            raise ConfigError("writer='process' writes to the real file system only; with other files use writer='thread'")
        self.arena = Arena(pin=torch.cuda.is_available(), shared=apart)
        self.writer = WriterProcess(self.arena) if apart else None
        if self.writer is not None:
            self.writer.start()
        self._background: Background | None = None
        self._state: Payload | None = None
        self._asked = 0
        self._preparing: Thread | None = None
        self._copying: Copy | None = None
        self.attention = False

    def attach(self, background: Background) -> None:
        self._background = background

    @property
    def background(self) -> Background:
        assert self._background is not None
        return self._background

    # -- memory, before the first save ---------------------------------------------------------------------------

    def learn(self, payload: Payload) -> None:
        """``restore`` was given this state: background saves of it are likely, and ``poll`` prepares for them."""
        if self.arena.size == 0 and self._preparing is None and is_stageable(payload):
            self._state = payload
            self.attention = True

    def attend(self) -> None:
        """What ``poll`` does while ``attention`` is set."""
        self.staged()
        if self._state is not None:
            self._prepare(self._state)
        self.attention = self._state is not None

    def _prepare(self, payload: Payload) -> None:
        """Make and touch the memory of the first copy, on a thread of its own, as soon as its size is known: an optimizer
        makes its state in its first step. Some never make any, so it is asked for a few times only."""
        self._asked += 1
        live = live_of(payload)
        if live is not None and not live.complete and self._asked < _ASKED:
            return
        self._state = None
        size = live.size if live is not None else 0
        if size and self.arena.size == 0:
            wanted = min(int(size * _SLACK), size + _SMALL)
            self._preparing = self._seams.runtime.thread("arena", lambda: self._reserve(wanted))

    def _reserve(self, size: int) -> None:
        try:
            self.arena.reserve(size)
        except (OSError, RuntimeError) as error:  # the save will say so, on every rank
            log.warning("could not make %d bytes of staging memory ahead of the first background save: %s", size, error)

    def _await_arena(self) -> None:
        self._state = None
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    # -- one save ------------------------------------------------------------------------------------------------

    def save(self, series: str, step: int, payload: Any, metrics: Mapping[str, Any] | None, meta: Mapping[str, Any] | None,
             on_exists: str | None, how: str) -> SaveHandle:
        """Copy the state, hand the rest to the finaliser. Sends nothing."""
        number = check_step(step)
        options.choice("staging", how, HOW)
        self.staged()
        behind, runtime = self.background, self._seams.runtime
        if not behind.admit(number):
            return SaveHandle(self._seams.files, "", number, self._group.rank, self._group.world, skipped=True)
        part, refusal = _taken(payload)
        refusal = self._saver.on_own_disks(part) if part is not None else refusal
        if refusal is not None:
            part = None  # told to every rank in the begin round
        if part is not None and part.collective and not self._group.has_collectives:
            self._saver.meet(number)
        begun = runtime.monotonic()
        self._await_arena()
        name = self._naming.of_series(series).format(number)
        copy = Copy(runtime, self.device, self._check)

        def run(part: Any) -> Saved:
            try:
                copy.finish()
            except Exception as error:  # as below: every rank hears of it in the begin round
                part = Refused(error)
            return self._saver.save(series, number, part, metrics, meta, on_exists, job.blocked + copy.waited)

        handle = SaveHandle(self._seams.files, self._layout.final(name), number, self._group.rank, self._group.world,
                            ended=runtime.event(), number=behind.next_number())
        job = Job(series, number, run, None, handle)
        job.refusal = refusal
        if part is not None:
            try:
                job.payload = self._stage(stageable(part), copy, how)
            except Exception as error:  # told to every rank in the begin round, and raised at one step for all
                job.refusal = error
        if copy.unfinished and job.refusal is None:
            self._copying, self.attention = copy, True
        job.blocked = runtime.monotonic() - begun
        behind.submit(job)
        return handle

    def _stage(self, part: Stageable, copy: Copy, how: str) -> Payload:
        live = live_of(part) if how == "overlap" else None
        staged = part.of(copy.begin(part.tree(), self.arena, live.pointers if live is not None else set()))
        if copy.unfinished and live is not None:
            copy.fences = [o.register_step_pre_hook(lambda *ignored: self._fence(copy)) for o in live.optimizers]
        return staged if self.writer is None else self.writer.around(staged)

    def close(self, timeout: float) -> None:
        """After the last save: end the writer process, give the memory back."""
        if self.writer is not None:
            self.writer.close(timeout)

    def _fence(self, copy: Copy) -> None:
        copy.wait(lambda: self.background.wait(0.0))

    def staged(self) -> None:
        """Wait for the copy under way, and let the optimizers go. On the training thread."""
        copy = self._copying
        if copy is None:
            return
        self._fence(copy)
        for fence in copy.fences:
            fence.remove()
        self._copying = None

    def finish(self, job: Job) -> None:
        """The finaliser's: begin to the verdict, then the hooks, on its thread."""
        saved = job.run(Refused(job.refusal) if job.refusal is not None else job.payload)
        job.handle.commit(saved.path, saved.skipped)
        self._hooks.run(saved.record)


def _taken(state: Any) -> tuple[Payload | None, Exception | None]:
    """``state`` as a payload, or the error that every rank is told in the begin round."""
    try:
        return as_payload(state), None
    except Exception as error:
        return None, error


class Refused:
    """In place of a payload that could not be staged on this rank: it raises that where every rank hears of it."""

    collective = False
    members: list[str] = []

    def __init__(self, error: Exception) -> None:
        self._error = error

    def check(self) -> None:
        raise self._error

    def write(self, files: RankFiles, ranks: Ranks) -> None:
        raise self._error

    def load(self, checkpoint: Checkpoint, ranks: Ranks) -> None:
        raise self._error
