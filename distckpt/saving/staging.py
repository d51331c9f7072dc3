"""The copy that a background save costs the training step.

What comes out shares nothing with what was given: CPU tensors too may be mutated as soon as they are copied (DCP aliases
those; FIELD_CASES H). Copies from a device go on a side stream and end with an event; nothing reads the host buffer, and
nobody may change the source, before that event has been waited for.
"""

from __future__ import annotations

import copy as _copy
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Protocol

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor, ShardedTensorBase
from torch.distributed.tensor import DTensor

from distckpt import digest
from distckpt.runtime import Runtime
from distckpt.saving.arena import PLAIN, Arena, NoRoom, identity, size_of

HOW = ("copy", "overlap")

Path = tuple[Any, ...]
"""Where in a state something stands: the path of what it stands in, and its key there; empty at the top."""

Item = tuple[Path, torch.Tensor, torch.Tensor]
"""What is copied: its path, the target, the source."""

CONSTANT = frozenset({int, float, bool, str, bytes, complex, type(None)})

_SHOWN = 8
_LOOK = 0.5
_SMALL = 1 << 16


class DeviceEvent(Protocol):
    def wait(self) -> None: ...


class Device:
    """Tensors that are not in host memory, and the streams that bring them there. The tests' mocked GPU takes its place."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type != "cpu"

    def begin(self, sources: Iterable[torch.Tensor]) -> None:
        """On the training thread: the copies to come follow what its streams are computing now."""
        for device in {s.device for s in sources if s.is_cuda}:
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin to copy; it is done when an ``event`` taken afterwards has been waited for. The caller keeps ``source``."""
        stream = self._streams.get(source.device)
        if stream is None:
            target.copy_(source)
            return
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def event(self) -> DeviceEvent:
        """The end of all copies begun so far."""
        return _Events([stream.record_event() for stream in self._streams.values()])


class _Events:
    def __init__(self, events: list[Any]) -> None:
        self._events = events

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()


class Copy:
    """One state on its way into host memory: what was copied at once, and what is still to come (``staging="overlap"``)."""

    def __init__(self, runtime: Runtime, device: Device, check: bool) -> None:
        self._runtime, self._device, self._check = runtime, device, check
        self._later: list[Item] = []
        self._before: dict[str, str] = {}
        self._arena: Arena | None = None
        self._done = runtime.event()
        self._since: float | None = None
        self._waited = 0.0
        self.fences: list[Any] = []

    def begin(self, tree: Any, arena: Arena, steady: set[int]) -> Any:
        """On the training thread: ``tree`` with room in ``arena`` for every tensor, and a deep copy of everything else.

        Tensors whose storage is in ``steady`` are left to ``finish``; the others are copied when this returns.
        """
        try:
            return self._begin(tree, arena, steady)
        except NoRoom:  # it mostly fits, and to measure it first would take half as long again
            pass
        arena.reserve(size_of(tensors_of(tree)))  # out here the error has let go of what was cut from the old block
        return self._begin(tree, arena, steady)

    def _begin(self, tree: Any, arena: Arena, steady: set[int]) -> Any:
        self._arena = arena
        arena.rewind()
        now: list[Item] = []
        later: list[Item] = []
        first: dict[int, Item] = {}
        twins: dict[Hashable, torch.Tensor] = {}

        def stage(path: Path, tensor: torch.Tensor) -> torch.Tensor:
            where = tensor.data_ptr()
            there = first.get(where)
            if there is not None or not where:  # rare: another name of one memory, or none at all. Look closer
                if there is not None:
                    twins.setdefault(identity(there[2]), there[1])
                known = twins.get(identity(tensor))
                if known is not None:
                    return known
            target = arena.cut(tensor)
            source = tensor.detach()  # of the memory that it has now: to give the tensor another (``.data``) does not reach this
            item = (path, target, source)
            if there is not None or not where:
                twins[identity(tensor)] = target
            else:
                first[where] = item
            if self._check:
                self._before[shown(path)] = _digest(source)
            (later if steady and source.untyped_storage().data_ptr() in steady else now).append(item)
            return target

        staged = _walk(tree, stage, ())
        self._device.begin(source for _, _, source in (*now, *later))
        self._run(now)
        self._later = later
        if not later:
            self._before = {}
            self._done.set()
        return staged

    @property
    def unfinished(self) -> bool:
        return not self._done.is_set()

    def finish(self) -> None:
        """On the finaliser's thread: the rest. RuntimeError when a tensor was changed meanwhile and that is checked."""
        try:
            self._run(self._later)
        finally:
            self._later, self._before = [], {}
            if self._since is not None:
                self._waited += self._runtime.monotonic() - self._since
            self._done.set()
        if self._arena is not None:
            self._arena.ready()

    @property
    def waited(self) -> float:
        """Seconds that training stood still for ``finish``."""
        return self._waited

    def wait(self, gone: Callable[[], bool]) -> None:
        """On the training thread: until everything is copied, or ``gone()`` says that nobody will."""
        if self._done.is_set():
            return
        self._since = self._runtime.monotonic()
        while not self._done.wait(_LOOK):
            if gone():
                return

    def _run(self, items: list[Item]) -> None:
        on_device = False
        for _, target, source in items:
            if self._device.holds(source):
                on_device = True
                self._device.copy(target, source)
            else:
                _fill(target, source)
        if on_device:
            self._device.event().wait()
        if not self._check:
            return
        named = [(shown(path), target, source) for path, target, source in items]
        changed = [name for name, target, source in named
                   if name in self._before and not self._before[name] == _digest(target) == _digest(source)]
        if changed:
            more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
            raise RuntimeError(f"{', '.join(changed[:_SHOWN])}{more} changed while being staged, so the copy mixes two moments: "
                               "let nothing but an optimizer that the state knows change it before manager.staged() returns, or "
                               "save with staging='copy'")


def pointer(tensor: torch.Tensor) -> int:
    """What tells one memory from another; 0 for none."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


def shown(path: Path) -> str:
    """``layer.w``, ``list[0].w``: where in a state it stands, as people write it."""
    text = ""
    while path:
        path, key = path
        text = f"{key}{'.' if text and not text.startswith('[') else ''}{text}"
    return text


def copy(tree: Any, arena: Arena, runtime: Runtime) -> Any:
    """``tree`` with every tensor replaced by a copy in ``arena``, and everything else by a deep copy."""
    return Copy(runtime, Device(), check=False).begin(tree, arena, set())


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The local tensors of a state, in the order in which they are copied."""
    found: list[torch.Tensor] = []

    def keep(path: Path, tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _walk(tree, keep, (), deep=False)
    return found


def _digest(tensor: torch.Tensor) -> str:
    host = tensor.detach().cpu().contiguous().reshape(-1)
    running = digest.Running()
    running.update(host.view(torch.uint8).numpy().data)
    return running.text


def _fill(target: torch.Tensor, source: torch.Tensor) -> None:
    if source.nbytes > _SMALL and source.is_contiguous() and not (source.is_conj() or source.is_neg()):
        import numpy  # its copy is half again as fast as torch's on one core, and costs more to begin

        numpy.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())
        return
    target.copy_(source)


OnTensor = Callable[[Path, torch.Tensor], torch.Tensor]


def _walk(value: Any, on_tensor: OnTensor, path: Path, deep: bool = True) -> Any:
    """What every tensor costs training is mostly this: so the kinds are told apart by their exact type, and what is most of a
    state comes first. A name is made of ``path`` only where somebody wants to read it."""
    kind = type(value)
    if kind in PLAIN:
        return on_tensor(path, value)
    if kind in CONSTANT:
        return value
    if kind is dict or kind is OrderedDict:
        found = kind()
        for key, item in value.items():
            found[key] = item if type(item) in CONSTANT else _walk(item, on_tensor, (path, key), deep)
        if kind is OrderedDict:  # a module's state dict carries the versions of its parts there (_metadata)
            vars(found).update(_walk(vars(value), on_tensor, path, deep))
        return found
    if kind is list or kind is tuple:
        return kind(item if type(item) in CONSTANT else _walk(item, on_tensor, (path, f"[{index}]"), deep)
                    for index, item in enumerate(value))
    if isinstance(value, DTensor):
        local = on_tensor(path, value._local_tensor)
        return DTensor(local, value._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    if isinstance(value, ShardedTensor):  # FSDP1's, a tensor by class and without memory of its own
        shards = [_shard(shard, on_tensor, (path, f"[shard {index}]")) for index, shard in enumerate(value.local_shards())]
        return ShardedTensorBase._init_from_local_shards_and_global_metadata(shards, value.metadata(), value.sharding_spec())
    if isinstance(value, torch.Tensor):
        return on_tensor(path, value)
    return _copy.deepcopy(value) if deep else value


def _shard(shard: Any, on_tensor: OnTensor, path: Path) -> Any:
    staged = _copy.copy(shard)
    staged.tensor = on_tensor(path, shard.tensor)
    return staged
