"""Which checkpoints stay, and why. Pure: a policy maps the committed list to reasons, and touches nothing.

Policies combine with ``|``: what any of them keeps, stays. The order is by commit (``seq``), never by step or mtime;
checkpoints of an abandoned branch (after a rollback) come after those this run descends from, so that a stale step
5000 beside a new step 400 never wins a slot.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from distckpt.errors import ConfigError


@dataclass(frozen=True)
class Record:
    """What a policy may look at."""

    attempt: str
    step: int
    seq: int
    stale: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


def newest_first(records: Iterable[Record]) -> list[Record]:
    """This run's own line before abandoned branches, then by commit; adopted ones (seq 0) by step."""
    return sorted(records, key=lambda r: (not r.stale, r.seq, r.step), reverse=True)


class Policy:
    """``policy(records)`` gives {attempt: why it stays}."""

    def __call__(self, records: Sequence[Record]) -> dict[str, str]:
        raise TypeError(f"{type(self).__name__} must say what it keeps")

    def __or__(self, other: Policy) -> Policy:
        return AnyOf((*self.parts, *other.parts))

    @property
    def parts(self) -> tuple[Policy, ...]:
        return (self,)

    @property
    def spec(self) -> str:
        """One line that ``parse`` turns back into the policy; it stands in the marker."""
        raise TypeError(f"{type(self).__name__} must have a spec")


@dataclass(frozen=True)
class KeepAll(Policy):
    """Nothing is ever removed."""

    def __call__(self, records: Sequence[Record]) -> dict[str, str]:
        return {r.attempt: "no limit is set" for r in records}

    @property
    def spec(self) -> str:
        return "all"


@dataclass(frozen=True)
class KeepLast(Policy):
    """The ``count`` newest by commit."""

    count: int

    def __post_init__(self) -> None:
        if _limit("keep_last", self.count) == 0:
            raise ConfigError("KeepLast(0) would mean no limit: use KeepAll()")

    def __call__(self, records: Sequence[Record]) -> dict[str, str]:
        return {r.attempt: f"one of the last {self.count}" for r in newest_first(records)[:self.count]}

    @property
    def spec(self) -> str:
        return f"last={self.count}"


@dataclass(frozen=True)
class KeepEvery(Policy):
    """Every step that is a multiple of ``steps``, of this run's own line."""

    steps: int

    def __post_init__(self) -> None:
        if _limit("keep_every", self.steps) == 0:
            raise ConfigError("KeepEvery(0) is no rule: leave it out")

    def __call__(self, records: Sequence[Record]) -> dict[str, str]:
        return {r.attempt: f"step is a multiple of {self.steps}" for r in records
                if r.step % self.steps == 0 and not r.stale}

    @property
    def spec(self) -> str:
        return f"every={self.steps}"


@dataclass(frozen=True)
class KeepBest(Policy):
    """The ``count`` best by ``metric``; those without it, or with NaN, are never best. Ties: the newer."""

    count: int
    metric: str = "loss"
    mode: str = "min"

    def __post_init__(self) -> None:
        if _limit("keep_best", self.count) == 0:
            raise ConfigError("KeepBest(0) is no rule: leave it out")
        if self.mode not in ("min", "max"):
            raise ConfigError(f"best_mode must be 'min' or 'max', not {self.mode!r}")
        _check_metric(self.metric)

    def __call__(self, records: Sequence[Record]) -> dict[str, str]:
        scored = [r for r in newest_first(records) if not math.isnan(r.metrics.get(self.metric, math.nan))]
        sign = 1 if self.mode == "min" else -1
        scored.sort(key=lambda r: (r.stale, sign * r.metrics[self.metric]))
        return {r.attempt: f"{self.metric}={r.metrics[self.metric]:.6g} is among the best {self.count}"
                for r in scored[:self.count]}

    @property
    def spec(self) -> str:
        return f"best={self.count},{self.metric},{self.mode}"


@dataclass(frozen=True)
class KeepTotal(Policy):
    """``count`` in all: the newest, the one whose step the newest has as its metric ``names``, and the latest others.

    What Transformers means by ``save_total_limit``: the best one counts, and stays although it is old. Two stay at ``count`` 1
    when the best is not the newest.
    """

    count: int
    names: str = "best_step"

    def __post_init__(self) -> None:
        if _limit("keep_last", self.count) == 0:
            raise ConfigError("KeepTotal(0) would mean no limit: use KeepAll()")
        _check_metric(self.names)

    def __call__(self, records: Sequence[Record]) -> dict[str, str]:
        ordered = newest_first(records)
        kept = {r.attempt: "the newest" for r in ordered[:1]}
        for record in ordered[1:]:
            if record.step == ordered[0].metrics.get(self.names) and record.stale == ordered[0].stale:
                kept[record.attempt] = f"the newest names it as {self.names}"
                break
        for record in ordered[1:]:
            if len(kept) < self.count:
                kept.setdefault(record.attempt, f"one of {self.count} in all")
        return kept

    @property
    def spec(self) -> str:
        return f"total={self.count},{self.names}"


@dataclass(frozen=True)
class AnyOf(Policy):
    """What any of ``members`` keeps."""

    members: tuple[Policy, ...]

    def __call__(self, records: Sequence[Record]) -> dict[str, str]:
        kept: dict[str, str] = {}
        for policy in self.members:
            for attempt, reason in policy(records).items():
                kept[attempt] = f"{kept[attempt]}; {reason}" if attempt in kept else reason
        return kept

    @property
    def parts(self) -> tuple[Policy, ...]:
        return self.members

    @property
    def spec(self) -> str:
        return "|".join(policy.spec for policy in self.members)


def _check_metric(name: object) -> None:
    if not isinstance(name, str) or not name or any(c in name for c in ",|=\n"):
        raise ConfigError(f"best_metric must be a name without ',', '|' or '=', not {name!r}")


def _limit(name: str, value: object) -> int:
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be a whole number or None, not {value!r}")
    if value < 0:
        raise ConfigError(f"{name} must not be negative ({value}); None or 0 means "
                          + ("no limit" if name == "keep_last" else "no such rule"))
    return value


def from_limits(keep_last: int | None = None, keep_every: int | None = None, keep_best: int | None = None,
                best_metric: str = "loss", best_mode: str = "min") -> Policy:
    """The policy of the short arguments. No ``keep_last`` means no limit: everything stays, whatever else is kept."""
    last, every, best = _limit("keep_last", keep_last), _limit("keep_every", keep_every), _limit("keep_best", keep_best)
    extra: list[Policy] = []
    if every:
        extra.append(KeepEvery(every))
    if best:
        extra.append(KeepBest(best, best_metric, best_mode))
    if not last:
        return KeepAll()
    policy: Policy = KeepLast(last)
    for rule in extra:
        policy = policy | rule
    return policy


def parse(spec: str) -> Policy:
    """The policy that ``spec`` was made from."""
    parts: list[Policy] = []
    for part in spec.split("|"):
        kind, _, value = part.partition("=")
        try:
            if kind == "all":
                parts.append(KeepAll())
            elif kind == "last":
                parts.append(KeepLast(int(value)))
            elif kind == "every":
                parts.append(KeepEvery(int(value)))
            elif kind == "best":
                count, metric, mode = value.split(",")
                parts.append(KeepBest(int(count), metric, mode))
            elif kind == "total":
                total, names = value.split(",")
                parts.append(KeepTotal(int(total), names))
            else:
                raise ValueError(part)
        except ValueError as error:
            raise ConfigError(f"retention {spec!r} is not known: use all, last=N, every=N, best=N,METRIC,min|max, "
                              "total=N,METRIC joined by '|'") from error
    return parts[0] if len(parts) == 1 else AnyOf(tuple(parts))
