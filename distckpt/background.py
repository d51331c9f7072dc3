"""Background saves as the training loop sees them: ``poll``, one save in flight, failures raised at one step for all.

The training thread copies the state and reads flags; it sends nothing and waits for nobody, except while a freeze is being
answered. Everything else is the finaliser's, the listener's, and a messenger's that tells rank 0 the news.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distckpt.coordination.gate import Act, Gate, Gatekeeper, answer_key, post
from distckpt.coordination.group import Group
from distckpt.coordination.store import Client, ClientSource
from distckpt.errors import ConfigError, CoordinationError, CoordinatorLost, DistckptError, SaveError, from_wire, to_wire
from distckpt.launch.signals import StopSignals
from distckpt.layout import MAIN
from distckpt.payloads.base import Payload
from distckpt.runtime import Runtime
from distckpt.saving.finaliser import Finaliser
from distckpt.saving.handle import SaveHandle
from distckpt.saving.saver import Saved
from distckpt.steps import NOTHING, Schedule, Todo
from distckpt.timing import Timing

log = logging.getLogger(__name__)

_SECOND = 1.0
_OWN_WORD = 2.0


@dataclass
class Job:
    """One background save, from the copy on. ``refusal``: what made this rank unable to take part."""

    series: str
    step: int
    run: Callable[[Any], Saved]
    payload: Payload | None
    handle: SaveHandle
    refusal: Exception | None = None
    blocked: float = 0.0


def open_gate(group: Group, runtime: Runtime, limit: float) -> Gate:
    """This rank's gate, at which its listener answers from now on. Before the last round of the start: a rank that is through it
    may have news at once, and a freeze that nobody answers holds all ranks up for ``ANSWER`` (found by l0)."""
    gate = Gate(runtime, limit)

    def freeze(client: Client, message: dict[str, Any]) -> None:
        client.set(answer_key(int(message["freeze"]), group.rank), gate.freeze())

    def act(client: Client, message: dict[str, Any]) -> None:
        gate.act(int(message["at"]), Act.from_json(message["act"]))

    def cancel(client: Client, message: dict[str, Any]) -> None:
        gate.cancel()
        client.delete([answer_key(int(message["freeze"]), group.rank)])

    group.listener.handlers.update(freeze=freeze, act=act, cancel=cancel)
    group.listener.on_lost = gate.lose
    return gate


class Background:
    """Parts of a manager that outlive a call. ``execute`` runs one job and raises what went wrong with it."""

    def __init__(self, group: Group, gate: Gate, source: ClientSource, runtime: Runtime, execute: Callable[[Job], None],
                 schedules: Callable[[str], Schedule], signals: StopSignals, tolerated: int, in_flight: str,
                 timing: Timing | None, orphaned: Callable[[], None], flush: float) -> None:
        self._group, self._source, self._runtime = group, source, runtime
        self._execute_job, self._orphaned_manager, self._flush = execute, orphaned, flush
        self._schedules, self.schedule, self.signals = schedules, schedules(MAIN), signals
        self._tolerated, self.in_flight_rule = tolerated, in_flight
        self.failures_in_a_row = 0
        self.gate = gate
        self._stop_reason = ""
        self._pending: Job | None = None
        self._unreported: Job | None = None
        self._faced: set[int] = set()
        self._number = 0
        self._series = MAIN
        self._gatekeeper: Gatekeeper | None = None
        if group.rank == 0:
            heard = timing.heard if timing is not None else lambda act: None
            self._gatekeeper = Gatekeeper(source, group.rounds.caller, group.world, runtime, self._has_ended, heard)
        if timing is not None:
            timing.polls = lambda: self.gate.place[0]
        self._messenger = _Messenger(source, runtime, timing, self._gatekeeper)
        self._posted_stop = False
        self._finaliser = self._new_finaliser()

    def _new_finaliser(self) -> Finaliser[Job]:
        """From the start, saves or not: it is also who notices that the main thread has ended without ``close``."""
        return Finaliser(self._runtime, self._runtime.lifeline(), self._execute, self._orphaned, self._flush)

    def _has_ended(self, rank: int) -> bool:
        identity = self._group.identities.get(rank)
        return identity is not None and rank != self._group.rank and self._runtime.alive(identity) is False

    # -- the training thread: poll -------------------------------------------------------------------------------

    def poll(self, step: int) -> Todo:
        gate = self.gate
        gate.place = (gate.place[0] + 1, step)  # first this, then the flag (S17)
        if gate.flag or self.signals.raised or self._stop_reason:
            return self._attend(step)
        schedule = self.schedule
        if schedule.due(step):
            return Todo(save=True, reason=schedule.reason(step))
        return NOTHING

    def _attend(self, step: int) -> Todo:
        if self.signals.raised and not self._posted_stop:
            self._posted_stop = True
            waited = round(self._runtime.monotonic() - self.signals.at, 3) if self.signals.at else 0.0
            self._messenger.tell(Act("stop", f"{self.signals.raised} on rank {self._group.rank}", {"waited": waited}))
        acts = self.gate.due() if self.gate.flag else []
        failed = [act for act in acts if act.failure]
        rest = [act for act in acts if not act.failure]
        for index, act in enumerate(failed):
            try:
                if act.kind == "error":
                    raise from_wire(act.data["error"])
                self._face(int(act.data["number"]), from_wire(act.data["error"]))
            except DistckptError:
                self.gate.again([*failed[index + 1:], *rest])
                raise
        reasons = []
        for act in rest:
            if act.kind == "ended" and self._pending is not None and act.data.get("number") == self._pending.handle.number:
                self._pending = None
            elif act.kind == "stop":
                self._stop_reason = self._stop_reason or act.reason
            elif act.kind == "save":
                reasons.append(act.reason)
        save = (bool(reasons) or bool(self._stop_reason) or self.schedule.due(step)) and step != self.schedule.last
        if not save and not self._stop_reason:
            return NOTHING
        why = "; ".join([*([self._stop_reason] if self._stop_reason else []), *reasons]) or self.schedule.reason(step)
        return Todo(save, bool(self._stop_reason), why)

    def _face(self, number: int, told: DistckptError) -> None:
        """A background save failed: raise it, once, or count it as tolerated. At one boundary on every rank.

        This rank's own error is raised where there is one: it has the original as its cause.
        """
        if number in self._faced:
            return
        self._faced.add(number)
        if isinstance(told, SaveError) and self._group.rank in told.failures:
            self._finaliser.wait(_OWN_WORD)  # this rank has reported its failure and is about to hear the same verdict
        own = self._unreported
        error: BaseException = told
        if own is not None and own.handle.number == number:
            error = own.handle.exception() or told
            self._unreported = None
        if self._pending is not None and self._pending.handle.number == number:
            self._pending = None
        self._schedules(self._series).last = None
        self.failures_in_a_row += 1
        if self.failures_in_a_row > self._tolerated:
            self.failures_in_a_row = 0
            raise error
        log.warning("a background save failed, %d in a row, %d are tolerated: %s", self.failures_in_a_row, self._tolerated, error)

    # -- the training thread: saves ------------------------------------------------------------------------------

    def next_number(self) -> int:
        """Counts the background saves, alike on every rank."""
        self._number += 1
        return self._number

    def admit(self, step: int) -> bool:
        """Before a background save of ``step``: whether it may begin, decided alike on every rank (S16).

        What failed is raised. ``skip`` and ``error`` go by ends that were acted on at a boundary, so they need ``poll``.
        """
        if self.in_flight_rule != "wait":
            if not self.gate.place[0]:
                raise ConfigError(f"in_flight={self.in_flight_rule!r} needs poll(step) in the training loop: ranks learn of the "
                                  "end of a save at different moments, and only poll makes it one step; or use 'wait'")
            if self._pending is not None:
                text = f"save of step {step}: the save of step {self._pending.step} is in flight"
                if self.in_flight_rule == "error":
                    raise SaveError(f"{text} and in_flight is 'error'; save less often, or use in_flight='wait'", step=step,
                                    attempt=None, background=True, failures={}, outcome="aborted")
                log.info("%s; skipped", text)
                return False
        self.settle()
        return True

    @property
    def stop_reason(self) -> str:
        """Why ``poll`` said stop; empty when it has not."""
        return self._stop_reason

    @property
    def pending(self) -> Job | None:
        """The save in flight, until its end has been acted on at a boundary that all ranks share (S16)."""
        if self._pending is not None and self.in_flight_rule == "wait" and self._pending.handle.done():
            return None
        return self._pending

    def submit(self, job: Job) -> None:
        if not self._finaliser.alive:
            self._finaliser.stop(_SECOND)
            self._finaliser = self._new_finaliser()
        self._pending, self._series = job, job.series
        self._finaliser.submit(job)

    def wait(self, timeout: float | None) -> bool:
        """Whether nothing is in flight within ``timeout``. Local; a save whose finaliser died counts as failed."""
        if not self._finaliser.wait(timeout):
            return False
        job = self._pending
        if job is not None and not job.handle.done():
            self._failed(job, SaveError(f"background save of step {job.step}: the thread that worked on it has died; its outcome "
                                        "is settled at the next start", step=job.step, attempt=None, background=True, failures={},
                                        outcome="unknown"))
        return True

    def settle(self) -> None:
        """Wait for the save in flight, and face its failure here: every rank makes this call, so it is one step for all."""
        self.wait(None)
        self._pending = None
        self.face_unreported()

    @property
    def unreported(self) -> DistckptError | None:
        """What a background save failed with and nobody was told yet."""
        job = self._unreported
        return job.handle.exception() if job is not None and job.handle.number not in self._faced else None

    def face_unreported(self) -> None:
        job, error = self._unreported, self.unreported
        if job is not None and error is not None:
            self._face(job.handle.number, error)

    def note_unreported(self, value: BaseException) -> None:
        """Another exception is in flight and must not be masked: what a save failed with becomes a note to it."""
        error = self.unreported
        if error is None or error is value:
            return
        if hasattr(value, "add_note"):
            value.add_note(f"a background save had failed as well: {error}")
        log.error("a background save had failed as well: %s", error)
        self._unreported = None

    def overdue(self, seconds: float) -> SaveError:
        """What ``close`` raises when the save in flight does not end."""
        step = self._pending.step if self._pending is not None else -1
        return SaveError(f"close: the background save of step {step} has not ended within {seconds:g} s; its outcome is settled "
                         "at the next start. A longer deadline is Timeouts(close=...)", step=step, attempt=None, background=True,
                         failures={}, outcome="unknown")

    # -- the finaliser's -----------------------------------------------------------------------------------------

    def _execute(self, job: Job) -> None:
        try:
            self._execute_job(job)
        except DistckptError as error:
            self._failed(job, error)
        except BaseException as error:  # filed and raised at a poll: this thread has nobody to raise to, and must not die
            log.exception("a background save failed in a way that nobody foresaw")
            filed = SaveError(f"background save of step {job.step}: {type(error).__name__}: {error}", step=job.step, attempt=None,
                              background=True, failures={}, outcome="unknown")
            filed.__cause__ = error
            self._failed(job, filed)
        else:
            self.failures_in_a_row = 0
            if self.in_flight_rule != "wait" and self._group.rank == 0:
                self._messenger.tell(Act("ended", data={"number": job.handle.number}))
        finally:
            job.payload = None

    def _failed(self, job: Job, error: DistckptError) -> None:
        if isinstance(error, SaveError):
            error.background = True
        _forget_locals(error)
        self._unreported = job
        job.handle.fail(error)
        if isinstance(error, CoordinatorLost):
            self.gate.lose(error)
        else:  # every rank tells: rank 0 may have been given up on, and knows of no failure then
            self._messenger.tell(Act("failed", data={"number": job.handle.number, "error": to_wire(error)}))

    def _orphaned(self) -> None:
        """The program ended without ``close()``; the save in flight has ended before this is called."""
        failed = self.unreported
        log.error("the program ended without closing its CheckpointManager: use it as a context manager, or call close() on "
                  "every rank%s", f"; its last background save had failed: {failed}" if failed is not None else "")
        try:
            self._orphaned_manager()
        except Exception:  # nobody is left to raise it to; the exit code below still counts
            log.exception("could not leave in order")
        if failed is not None:
            self._runtime.exit_now(1)

    # -- the end -------------------------------------------------------------------------------------------------

    def last_boundary(self) -> None:
        """``close`` counts as the last boundary (S18)."""
        self.gate.closing = True
        self.gate.place = (self.gate.place[0] + 1, None)

    def stop(self, timeout: float) -> None:
        """End the threads. ``close`` has had its last round, or nobody listens any more."""
        self.signals.restore()
        self._finaliser.stop(timeout)
        if self._gatekeeper is not None:
            self._gatekeeper.ending = True
            self._messenger.tell(Act("bye"))
        self._messenger.stop(timeout)
        if self._gatekeeper is not None:
            self._gatekeeper.join(timeout)


class _Messenger:
    """Tells rank 0 the news with a client of its own, so that the training thread sends nothing. On rank 0 it also asks once
    a second whether something is due by the clock.

    It connects at the start and not when there is news: TCPStore's server looks up the name of every peer that connects, on its
    only thread, and where the resolver is slow (5 s until it gives up) every rank would stand at its gate meanwhile.
    """

    def __init__(self, source: ClientSource, runtime: Runtime, timing: Timing | None, gatekeeper: Gatekeeper | None) -> None:
        self._source, self._runtime, self._timing, self._gatekeeper = source, runtime, timing, gatekeeper
        self._lock = runtime.lock()
        self._wake = runtime.event()
        self._queue: list[Act] = []
        self._stopping = False
        self._thread = runtime.thread("messenger", self._run)

    def tell(self, act: Act) -> None:
        with self._lock:
            self._queue.append(act)
        self._wake.set()

    def stop(self, timeout: float) -> None:
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            client = self._source()
            while True:
                with self._lock:
                    acts, self._queue = self._queue, []
                for act in [*acts, *self._by_the_clock()]:
                    post(client, act)
                stopping = self._stopping and not self._queue
                if self._gatekeeper is not None:
                    self._gatekeeper.mind(client, stopping)
                if stopping:
                    return
                self._wake.wait(None if self._gatekeeper is None else _SECOND)
                self._wake.clear()
        except CoordinationError as error:
            log.debug("news does not reach rank 0 any more: %s", error)

    def _by_the_clock(self) -> list[Act]:
        if self._timing is None or self._gatekeeper is None or self._stopping:
            return []
        try:
            timed = self._timing.due()
        except Exception:  # a disk that cannot be read must not take the way for failures with it
            log.exception("cannot tell what is due by the clock")
            return []
        return [timed] if timed is not None else []


def _forget_locals(error: BaseException | None) -> None:
    """An error is kept until it is raised; the frames in its traceback would keep the payload (FIELD_CASES B147)."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
