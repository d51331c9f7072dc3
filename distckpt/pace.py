"""How long a run takes for what a stop has to wait for: from the journal, and as it is seen now.

A stop that is told in the middle of a step is acted on two boundaries later at most: the rest of that step, and the next one,
at whose end all ranks are together (see ``coordination.gate``). Its save waits for the one in flight. Then the manager is closed,
and only after that the job is requeued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

_KEPT = 200
_ENOUGH = 3


class Pace:
    """Of one root, on rank 0. ``blocked``: seconds that saves held up this process's training. ``setup``: from its birth to the
    first ``poll``, None before that. ``stopped``, ``closing``: the monotonic times when a stop was told, and close was called."""

    def __init__(self) -> None:
        self.blocked = 0.0
        self.setup: float | None = None
        self.stopped: float | None = None
        self.closing: float | None = None
        self.recalled = False
        self._saves: deque[float] = deque(maxlen=_KEPT)
        self._steps: deque[float] = deque(maxlen=_KEPT)
        self._stops: deque[float] = deque(maxlen=_KEPT)
        self._closes: deque[float] = deque(maxlen=_KEPT)
        self._behind = False
        self._before: float | None = None

    def recall(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Take over what the journal knows, of the runs before and of this one."""
        self.recalled = True
        for known in (self._saves, self._stops, self._closes):
            known.clear()
        for event in events:
            self._learn(event)

    def _learn(self, event: Mapping[str, Any]) -> None:
        kind, seconds = event.get("event"), _number(event, "seconds")
        if seconds is None or kind not in ("committed", "released"):
            return
        if kind == "released":
            self._closes.append(seconds)
            return
        self._saves.append(seconds)
        self._behind = bool(_number(event, "background"))
        self._before = _number(event, "step_seconds") or self._before
        stop = _number(event, "since_stop")
        if stop is not None:
            self._stops.append(stop)

    # -- what happens now ------------------------------------------------------------------------------------------

    def step(self, seconds: float) -> None:
        """So long it took from one ``poll`` to the next, saves apart."""
        self._steps.append(seconds)

    def commit(self, seconds: float, blocked: float, behind: float, now: float) -> dict[str, Any]:
        """A save was committed: what the journal keeps of it for the runs to come. ``since_stop``: it is the save of a stop."""
        self.blocked += blocked
        found: dict[str, Any] = {"seconds": round(seconds, 3), "blocked": round(blocked, 3), "background": round(behind, 3)}
        if len(self._steps) >= _ENOUGH:
            found["step_seconds"] = round(_slow(self._steps), 3)
        if self.setup is not None:
            found["setup"] = round(self.setup, 3)
        if self.stopped is not None and now - seconds >= self.stopped:
            found["since_stop"], self.stopped = round(now - self.stopped, 3), None
        self._learn({"event": "committed", **found})
        return found

    def close(self, now: float) -> dict[str, float]:
        """The root is given back: the same for that."""
        return {} if self.closing is None else {"seconds": round(now - self.closing, 3)}

    # -- what follows from it --------------------------------------------------------------------------------------

    @property
    def step_seconds(self) -> float | None:
        """The slow steps of this process, after the first few; before that what the journal says; None when nothing does."""
        return _slow(self._steps) if len(self._steps) >= _ENOUGH else self._before

    @property
    def save_seconds(self) -> float | None:
        """The slow saves; None when none is known."""
        return _slow(self._saves) if self._saves else None

    def stop_seconds(self) -> float | None:
        """What a stop takes at most, from the word to the root given back; None when nothing is known."""
        step, save = self.step_seconds, self.save_seconds
        if step is None and save is None:
            return None
        expected = 2 * (step or 0.0) + (2 if self._behind else 1) * (save or 0.0)
        return max(expected, _slow(self._stops)) + _slow(self._closes)

    def explain(self) -> str:
        """Of what ``stop_seconds`` consists."""
        step, save = self.step_seconds, self.save_seconds
        parts = [f"twice a step of {step:.1f} s"] if step is not None else []
        if save is not None:
            parts += [f"{'the save in flight and ' if self._behind else ''}a save of {save:.1f} s"]
        if self._closes:
            parts.append(f"close with {_slow(self._closes):.1f} s")
        text = f"a stop takes up to {self.stop_seconds() or 0.0:.1f} s ({', '.join(parts)}"
        return f"{text}; from the word to the commit it took {_slow(self._stops):.1f} s before)" if self._stops else f"{text})"


def _number(event: Mapping[str, Any], name: str) -> float | None:
    value = event.get(name)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _slow(values: Iterable[float]) -> float:
    """95th percentile; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * 0.95), len(ordered) - 1)] if ordered else 0.0
