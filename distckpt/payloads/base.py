"""The protocol of a payload, and how several make one checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeGuard

from distckpt.checkpoint import Checkpoint
from distckpt.errors import ConfigError
from distckpt.layout import check_member_path
from distckpt.payloads.live import Live, joined, live_of
from distckpt.saving.arena import PLAIN
from distckpt.saving.files import RankFiles


@dataclass(frozen=True)
class Ranks:
    """Who writes or loads. ``gloo``: a process group of our own for frameworks that run collectives, None without torch's.

    ``strict``: a member that the checkpoint lacks is an error. ``only``: names to load, None for all. ``step``: what is being
    saved, for a payload that counts steps itself. ``kept``: what payloads keep from one save of this manager for the next.
    """

    rank: int
    world: int
    gloo: Callable[[], Any]
    strict: bool = True
    only: Collection[str] | None = None
    step: int | None = None
    kept: dict[Any, Any] = field(default_factory=dict)


class Payload(Protocol):
    """Structural: nothing has to inherit from us.

    ``collective``: whether ``write`` and ``load`` run collectives, which every rank must then enter even when another
    payload has failed. ``check`` refuses, before any I/O, what could not be loaded again. One that can load a part of
    itself has ``parts``, the names that ``only`` may hold.
    """

    @property
    def collective(self) -> bool: ...
    @property
    def members(self) -> list[str]: ...
    def check(self) -> None: ...
    def write(self, files: RankFiles, ranks: Ranks) -> None: ...
    def load(self, checkpoint: Checkpoint, ranks: Ranks) -> None: ...


def is_payload(value: Any) -> TypeGuard[Payload]:
    """By its attributes; ``runtime_checkable`` takes 20 µs for a look at one value, in the call of a background save."""
    return all(hasattr(value, name) for name in ("collective", "members", "check", "write", "load"))


class Several:
    """Named payloads in one checkpoint, each in a sub-directory of its name; those that run collectives go first.

    So a rank whose own file fails has left no collective that the others would wait in.
    """

    def __init__(self, payloads: Mapping[str, Payload]) -> None:
        for name in payloads:
            check_member_path(name)
        self._payloads = dict(sorted(payloads.items(), key=lambda item: (not item[1].collective, item[0])))

    @property
    def collective(self) -> bool:
        return any(p.collective for p in self._payloads.values())

    @property
    def parts(self) -> list[str]:
        return list(self._payloads)

    @property
    def members(self) -> list[str]:
        return [f"{name}/{member}" for name, p in self._payloads.items() for member in p.members or [""]]

    @property
    def inner(self) -> list[Payload]:
        return list(self._payloads.values())

    def check(self) -> None:
        for payload in self._payloads.values():
            payload.check()

    def write(self, files: RankFiles, ranks: Ranks) -> None:
        for name, payload in self._payloads.items():
            payload.write(files.below(name), ranks)

    def tree(self) -> Any:
        return {name: stageable(payload).tree() for name, payload in self._payloads.items()}

    def live(self) -> Live:
        return joined(live_of(payload) for payload in self._payloads.values())

    def of(self, tree: Any) -> Payload:
        return Several({name: stageable(payload).of(tree[name]) for name, payload in self._payloads.items()})

    def load(self, checkpoint: Checkpoint, ranks: Ranks) -> None:
        for name, payload in self._payloads.items():
            if ranks.only is None or name in ranks.only:
                payload.load(checkpoint.below(name), replace(ranks, only=None))


class Stageable(Protocol):
    """A payload that can be saved in the background: ``tree`` is its state as it is now, nested dicts and lists with tensors;
    ``of(tree)`` is a payload that writes the same files from a copy of that."""

    def tree(self) -> Any: ...
    def of(self, tree: Any) -> Payload: ...


def is_stageable(payload: Any) -> bool:
    return hasattr(payload, "tree") and hasattr(payload, "of")


def stageable(payload: Any) -> Stageable:
    """``payload``, or the ConfigError that says what it lacks for a background save."""
    if not is_stageable(payload):
        raise ConfigError(f"a {type(payload).__name__} cannot be saved in the background: it lacks tree() and of(tree); save it "
                          "with background=False")
    found: Stageable = payload
    return found


class Parts:
    """The staged parts of a state that writes them side by side, as one payload."""

    def __init__(self, parts: Mapping[str, Payload], collective: bool, members: list[str]) -> None:
        self._parts, self._collective, self._members = dict(parts), collective, members

    @property
    def collective(self) -> bool:
        return self._collective

    @property
    def members(self) -> list[str]:
        return self._members

    @property
    def inner(self) -> list[Payload]:
        return list(self._parts.values())

    def check(self) -> None:
        for part in self._parts.values():
            part.check()

    def write(self, files: RankFiles, ranks: Ranks) -> None:
        for part in self._parts.values():
            part.write(files, ranks)

    def load(self, checkpoint: Checkpoint, ranks: Ranks) -> None:
        raise ConfigError("a staged copy is written, not loaded into")


def check_only(payload: Payload, only: Collection[str] | None) -> None:
    """ConfigError when ``only`` holds a name that ``payload`` does not have: loading nothing must not look like loading."""
    if only is None:
        return
    parts = list(getattr(payload, "parts", ()))
    unknown = [only] if isinstance(only, str) else sorted(set(only) - set(parts))
    if unknown:
        raise ConfigError(f"only={only!r}: it must be a collection of names of parts, and {unknown[0]!r} is none; this state has "
                          f"{', '.join(map(repr, parts)) or 'no parts with names'}")


def as_payload(value: Any) -> Payload:
    """A payload, several by name, a framework's engine, or a state dict (one file per rank)."""
    from distckpt.payloads.kinds import engine_of
    from distckpt.payloads.shards import Shards

    engine = engine_of(value)  # before its state_dict is looked at, which holds its module and no more
    if engine is not None:
        return engine
    if isinstance(value, Mapping):
        others = {name: item for name, item in value.items() if type(item) not in PLAIN}  # of thousands, in a state dict
        engines = {name: found for name, found in ((n, engine_of(v)) for n, v in others.items()) if found is not None}
        value = {**value, **engines} if engines else value
        kinds = {type(v) not in PLAIN and is_payload(v) for v in value.values()}
        if kinds == {True}:
            return Several(value)
        if True in kinds:
            plain = next(k for k, v in value.items() if not is_payload(v))
            raise ConfigError(f"a mapping of payloads must hold payloads only; {plain!r} is {type(value[plain]).__name__}: wrap "
                              "it in Shards(...)")
        return Shards(value, name="state")
    if is_payload(value):
        return value
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return Shards(value, name="state")
    raise ConfigError(f"cannot save a {type(value).__name__}: pass TrainState, DCP, Shards, a mapping of those, a state dict, "
                      "or an object with state_dict() and load_state_dict()")
