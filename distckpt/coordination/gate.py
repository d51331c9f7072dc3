"""One step for all: news that reaches one rank is acted on by every rank at the same boundary.

Boundaries are counted, not named by step: the n-th ``poll``, with ``close`` as the last. In peace ``poll`` adds one to a
number and reads one flag. News goes to rank 0, which announces a *freeze*; each rank's listener closes its gate and
answers with the last boundary that its training thread passed; rank 0 announces *act at max + 1*, and the gates open.

Why nobody can be past that boundary (S17): ``poll`` publishes its ordinal and then reads the flag, the listener sets the
flag and then reads the ordinal. So a thread that got by unseen is in the answer, and one that is not in the answer
stands at its gate, one boundary further at most, which is not beyond max + 1. (tests/unit/test_gate.py)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from distckpt.coordination.listener import Caller
from distckpt.coordination.pulse import bye_key
from distckpt.coordination.rounds import by_value
from distckpt.coordination.store import Client, ClientSource
from distckpt.errors import CoordinationError, CoordinatorLost, DistckptError, RankDisagreement, RankLost, RankTimeout, to_wire
from distckpt.runtime import Runtime

log = logging.getLogger(__name__)

ANSWER = 5.0
RETRY = 1.0
AT_CLOSE = 1 << 53
_LOOKS = 10
_FILLED: dict[str, Any] = {"filled": True}


@dataclass(frozen=True)
class Act:
    """What every rank does at one boundary. ``kind``: "failed", "error", "stop", "save" or "ended"."""

    kind: str
    reason: str = ""
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def failure(self) -> bool:
        """Whether it is raised, not done."""
        return self.kind in ("failed", "error")

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "reason": self.reason, "data": self.data}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Act:
        """What ``to_json`` gave; CoordinationError for anything else."""
        kind, reason, data = value.get("kind"), value.get("reason", ""), value.get("data") or {}
        if not isinstance(kind, str) or not isinstance(reason, str) or not isinstance(data, dict):
            raise CoordinationError(f"this is no act: {value!r:.300}")
        return cls(kind, reason, dict(data))


class Gate:
    """One rank's gate. The training thread puts up its new ``place``, then reads ``flag`` and, if it is set, asks what is
    ``due``; the rest is the listener's. ``place`` is (ordinal, step), one object, so that nobody sees half of it.

    ``limit``: seconds after which a gate that nobody opens is an error; a rank 0 that was stopped must not stop the others.
    """

    def __init__(self, runtime: Runtime, limit: float = 600.0) -> None:
        self.place: tuple[int, Any] = (0, None)
        self._limit = limit
        self.flag = False
        self.closing = False
        self.lost: CoordinatorLost | None = None
        self._lock = runtime.lock()
        self._open = runtime.event()
        self._open.set()
        self._acts: list[tuple[int, Act]] = []

    # -- the training thread -------------------------------------------------------------------------------------

    def due(self) -> list[Act]:
        """What is due at the present boundary, after the gate is open again. Waits only while a freeze is answered.

        When rank 0 is gone only failures are due: whoever raised one first may have left since, and took the store with it, but
        this rank still raises the same at the same boundary (P5). CoordinatorLost when there is none.
        """
        if not self._open.wait(self._limit):
            raise RankTimeout(f"poll: rank 0 stopped all ranks at this boundary and has not said for {self._limit:g} s what to "
                              "do: its process is stopped, or cannot be reached", missing={0: None}, phase="freeze")
        with self._lock:
            ordinal = self.place[0]
            due = [act for at, act in self._acts if at <= ordinal and (self.lost is None or act.failure)]
            if self.lost is not None and not due:
                raise self.lost
            self._acts = [(at, act) for at, act in self._acts if at > ordinal]
            self.flag = bool(self._acts) or self.lost is not None or not self._open.is_set()
        return due

    def again(self, acts: list[Act]) -> None:
        """Do these at the next boundary: a failure was raised first, on every rank alike."""
        if acts:
            with self._lock:
                self._acts = [(self.place[0] + 1, act) for act in acts] + self._acts
                self.flag = True

    # -- the listener --------------------------------------------------------------------------------------------

    def freeze(self) -> dict[str, Any]:
        """Close the gate, then read where the training thread is: in this order (S17)."""
        with self._lock:
            self.flag = True
            self._open.clear()
            ordinal, step = self.place
        return {"ordinal": ordinal, "step": int(step) if hasattr(step, "__index__") else None, "closing": self.closing}

    def act(self, at: int, act: Act) -> None:
        with self._lock:
            self.flag = True
            self._acts.append((at, act))
            self._open.set()

    def cancel(self) -> None:
        with self._lock:
            self.flag = bool(self._acts) or self.lost is not None
            self._open.set()

    def lose(self, error: CoordinatorLost) -> None:
        """Rank 0 is gone: nothing will open this gate any more, so it opens by itself and says so."""
        with self._lock:
            self.flag, self.lost = True, error
            self._open.set()


def news_key(number: int) -> str:
    return f"news/{number}"


def answer_key(freeze: int, rank: int) -> str:
    return f"freeze/{freeze}/{rank}"


def post(client: Client, act: Act) -> None:
    """Tell rank 0. Any rank, any thread with a client of its own."""
    client.set(news_key(client.ticket("news")), act.to_json())


class Gatekeeper:
    """Rank 0's thread: takes news in order, one freeze at a time, until told to end.

    ``gone`` tells of a rank whether its process is known to have ended: it is not asked, and the others hear of it. ``heard``
    is told of each act before the ranks agree on it.
    """

    def __init__(self, source: ClientSource, caller: Caller, world: int, runtime: Runtime,
                 gone: Callable[[int], bool] = lambda rank: False, heard: Callable[[Act], None] = lambda act: None) -> None:
        self._source, self._caller, self._world, self._runtime, self._gone = source, caller, world, runtime, gone
        self._heard = heard
        self._freezes = 0
        self._failed: set[int] = set()
        self._stopping = False
        self._number = 0
        self._filled: list[int] = []
        self._suspect = -1
        self.ending = False
        self._thread = runtime.thread("gatekeeper", self._run)

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            client = self._source()
            while True:
                key = news_key(self._number)
                if not client.wait([key], None):
                    continue
                self._number += 1  # before it is deleted, so that ``mind`` does not take it for one that never came
                value: dict[str, Any] = {}
                try:
                    value = client.get([key])[0]
                except CoordinatorLost:
                    raise
                except CoordinationError as error:  # not of our making; the news after it must still be heard
                    log.warning("news is passed over: %s", error)
                client.delete([key])
                if value == _FILLED:
                    self._filled.append(self._number - 1)
                    continue
                if value.get("kind") == "bye":
                    return
                if not value:
                    continue
                try:
                    act = Act.from_json(value)
                    if not self._known(act):
                        self._heard(act)
                        self._agree(client, act)
                except CoordinatorLost:
                    raise
                except Exception:  # whatever it is: no rank may be left standing at its gate
                    log.exception("news could not be agreed on: %.300r", value)
                    self._tell(client, "cancel", {"freeze": self._freezes - 1}, set())
        except CoordinatorLost as error:
            log.debug("the gatekeeper ends: %s", error)

    def mind(self, client: Client, ending: bool = False) -> None:
        """Pass over news that were announced and do not come; rank 0's messenger asks for it once a second, and at its end.

        A rank that was killed between taking its number and writing its news leaves a number that never comes. When there is news
        behind it, and a second look finds it no different, it is filled; what comes there later after all is posted again.
        """
        for number in list(self._filled):
            key = news_key(number)
            if client.has(key):
                self._filled.remove(number)
                value = client.get([key])[0]
                client.delete([key])
                client.set(news_key(client.ticket("news")), value)
        last, first = client.tickets("news") - 1, self._number
        suspects = range(first, last if ending else min(first + 1, last)) if ending or first == self._suspect else ()
        for number in suspects:
            if not client.has(news_key(number)) and number >= self._number:
                client.claim(news_key(number), _FILLED)
        self._suspect = first

    def _known(self, act: Act) -> bool:
        """Whether this is agreed already: a second signal, or a failure of which another rank has told."""
        if act.kind == "stop":
            known, self._stopping = self._stopping, True
            return known
        if act.kind == "failed":
            known = act.data["number"] in self._failed
            self._failed.add(act.data["number"])
            return known
        return False

    def _agree(self, client: Client, act: Act) -> None:
        """Freeze, collect, announce. Without all answers in time the freeze is cancelled and tried again (S18)."""
        absent: set[int] = set()
        while True:
            number, self._freezes = self._freezes, self._freezes + 1
            absent |= {rank for rank in range(self._world) if rank not in absent and self._gone(rank)}
            self._tell(client, "freeze", {"freeze": number}, absent)
            keys = {rank: answer_key(number, rank) for rank in range(self._world) if rank not in absent}
            if self._collect(client, keys):
                answers = dict(zip(keys, client.get(list(keys.values())), strict=True))
                client.delete(list(keys.values()))
                act = self._with_doubts(act, answers, absent)
                at = _boundary(answers, self._left_at(client, absent) if act.kind == "failed" else 0)
                self._tell(client, "act", {"at": at, "act": act.to_json()}, absent)
                log.debug("all ranks act at boundary %d: %s (%s)", at, act.kind, act.reason)
                return
            silent = [rank for rank, key in keys.items() if not client.has(key)]
            self._tell(client, "cancel", {"freeze": number}, absent)
            if self.ending:
                return
            left = {rank for rank in silent if self._left(client, rank)}
            absent |= left
            if not left:
                log.info("ranks %s did not answer a freeze within %g s; cancelled, trying again", silent[:8], ANSWER)
                self._runtime.sleep(RETRY)

    def _left_at(self, client: Client, absent: set[int]) -> int:
        """The last boundary of the ranks that said goodbye. One that met a failed save in its own ``save`` raised there, after
        that boundary, and left before this freeze: the others must not raise at it, but where that rank did (P5)."""
        byes = [client.peek(bye_key(rank)) or {} for rank in sorted(absent)]
        return max((int(bye.get("ordinal", 0)) for bye in byes), default=0)

    def _tell(self, client: Client, op: str, data: dict[str, Any], absent: set[int]) -> None:
        for rank in range(self._world):
            if rank not in absent:
                self._caller.send(client, rank, op, data)

    def _collect(self, client: Client, keys: dict[int, str]) -> bool:
        """Whether every answer came. The others stand at their gates meanwhile, and not for the sake of a rank that ended, or
        that left before it had heard of the freeze."""
        for _ in range(_LOOKS):
            if client.wait(list(keys.values()), ANSWER / _LOOKS):
                return True
            silent = {rank: key for rank, key in keys.items() if not client.has(key)}
            if self.ending or any(self._left(client, rank) and not client.has(key) for rank, key in silent.items()):
                break  # asked for its key again: whoever leaves may have answered first
        return False

    def _left(self, client: Client, rank: int) -> bool:
        """Whether it will answer no freeze any more."""
        return self._gone(rank) or client.has(bye_key(rank))

    def _with_doubts(self, act: Act, answers: dict[int, dict[str, Any]], absent: set[int]) -> Act:
        """``act``, or in its place the error that makes it impossible. A failed save stays one."""
        error = _lost(absent) if absent else _different_steps(answers)
        if error is None or act.kind == "failed":
            return act
        return Act("error", act.reason, {"error": to_wire(error)})


def _boundary(answers: dict[int, dict[str, Any]], passed: int = 0) -> int:
    """The first one after ``passed`` that every rank can still reach. With a rank in ``close`` there is none but the end, where
    every rank faces what has failed: the others must not leave by an exception while that one waits in its last round."""
    if any(answer["closing"] for answer in answers.values()):
        return AT_CLOSE
    return max(passed, *(int(answer["ordinal"]) for answer in answers.values())) + 1


def _lost(absent: set[int]) -> DistckptError:
    ranks = ", ".join(map(str, sorted(absent)[:8])) + (" ..." if len(absent) > 8 else "")
    return RankLost(f"poll: rank {ranks} has left this run and takes no further part in saves; its own log says why. The other "
                    "ranks are fine; restart the job to resume", missing=dict.fromkeys(sorted(absent)), phase="poll")


def _different_steps(answers: dict[int, dict[str, Any]]) -> DistckptError | None:
    """Ranks that made equally many polls, with different steps: they do not poll at the same places (S17)."""
    steps: dict[int, dict[int, Any]] = {}
    for rank, answer in answers.items():
        if not answer["closing"] and answer["step"] is not None:
            steps.setdefault(int(answer["ordinal"]), {})[rank] = answer["step"]
    for ordinal, values in sorted(steps.items()):
        if len(set(values.values())) > 1:
            return RankDisagreement(f"poll: ranks gave different steps to call {ordinal} of poll: {by_value(values)}; every rank "
                                    "must poll at the same places, with the same step", values=values)
    return None
