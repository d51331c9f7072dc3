"""What simulated jobs do: ordinary programs against the manager's own interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy
import torch

from distckpt.errors import SaveError
from distckpt.payloads.base import Ranks
from distckpt.payloads.live import Live
from distckpt.saving.files import RankFiles
from distckpt.testing.checker import COMMITTED, SKIPPED
from distckpt.testing.crashfs import CrashFiles, write_payload
from distckpt.testing.simnodes import Nodes
from distckpt.testing.simulation import QUICK, Program, Run, Simulation, State, Strike, Told

_AT_ONCE = 1.0
UNKNOWN = 2
"""Operations of a rank before the others know which process it is."""
_ASKING = 10.0
ROLLING = 1


@dataclass(frozen=True)
class Scenario:
    """``rule`` looks at a run for what only this scenario promises; it is not asked when a process was killed or stopped.
    ``raises``: a rank of this program raises though nothing goes wrong. ``prompt``: its own steps take no time, so that what a
    fault costs is the library's. ``nodes``: more than one have disks, and kernels, of their own. ``protected``: steps that its
    policy keeps, once committed, whatever else is."""

    program: Program
    options: Mapping[str, Any] = field(default_factory=dict)
    rule: Callable[[Run], list[str]] = lambda run: []
    raises: bool = False
    prompt: bool = True
    disk: Callable[[], CrashFiles] = lambda: CrashFiles("/disk")
    nodes: int = 1
    protected: frozenset[int] = frozenset()

    def judge(self, run: Run, faults: Sequence[str], apart: bool = False) -> list[str]:
        """What is wrong with ``run`` beyond what the checker knows."""
        wrong = self.rule(run) if not any(fault.startswith(("kill", "power", "stop", "node")) for fault in faults) else []
        if self.prompt:
            looks = QUICK.visible if self.nodes > 1 else 0.0  # for the probes of ranks that may be on one disk, at the start
            wrong += _late(run, [Strike.parse(fault) for fault in faults], apart or self.nodes > 1, self.raises, looks)
        if not faults and not self.raises:
            wrong += [f"I8: nothing was wrong, and rank {rank} raised {type(error).__name__}: {str(error)[:300]}"
                      for rank, error in run.errors.items()]
            wrong += [f"I8: nothing was wrong, and the save of step {save.step} was {save.told}" for save in run.saves
                      if not run.errors and not set(save.told.values()) <= {COMMITTED, SKIPPED}]
        return wrong

    def simulation(self, world: int = 2, seed: int = 0, **more: Any) -> Simulation:
        options = {"disk": self.disk, **self.options, **more}
        made = Nodes(world, seed, nodes=self.nodes, **options) if self.nodes > 1 else Simulation(world, seed, **options)
        made.pinned |= self.protected
        return made


def bytes_of(rank: int, step: int, text: str = "") -> bytes:
    return f"{text}step {step} of rank {rank};".encode() * 3


def sync(manager: Told, rank: int) -> None:
    """Three saves, two kept."""
    for step in (1, 2, 3):
        manager.save(step, State(bytes_of(rank, step)))


def two(manager: Told, rank: int) -> None:
    for step in (1, 2):
        manager.save(step, State(bytes_of(rank, step)))


def one(manager: Told, rank: int) -> None:
    manager.save(1, State(bytes_of(rank, 1)))


def in_background(manager: Told, rank: int) -> None:
    """Background saves under a training loop that changes the state as soon as it may, and goes on after a failed one."""
    state = State()
    for step in range(1, 7):
        state.data = bytes_of(rank, step)
        try:
            manager.poll(step)
            if step in (1, 3, 4):
                manager.save(step, state, background=True)
        except SaveError:
            pass
        state.data = b"trained on"


def uneven(manager: Told, rank: int) -> None:
    """Training steps that take seconds, more on one rank than on the others; a failed save ends the program."""
    for step in range(1, 5):
        manager.poll(step)
        if step in (1, 3):
            manager.save(step, State(bytes_of(rank, step)), background=True)
        manager._seams.runtime.sleep(5.0 if rank == manager.world - 1 else 0.5)


def skipping(manager: Told, rank: int) -> list[bool]:
    """Saves that give way to one in flight: alike on every rank (S16)."""
    skipped = []
    for step in range(1, 6):
        manager.poll(step)
        skipped.append(manager.save(step, State(bytes_of(rank, step)), background=True).skipped)
    return skipped


def stopping(manager: Told, rank: int) -> list[Any]:
    """One rank gets a signal; every rank stops, and saves, at one step (P5)."""
    seen: list[Any] = []
    computing = manager._seams.runtime.event()
    for step in range(1, 40):
        if step == 3 and rank == manager.world - 1:
            manager._background.signals.raised = "SIGTERM"  # what the handler does
        todo = manager.poll(step)
        seen.append((step, todo.save, todo.stop))
        if todo.save:
            manager.save(step, State(bytes_of(rank, step)), background=True)
        if todo.stop:
            break
        for _ in range(4):
            computing.is_set()
    return seen


def replacing(manager: Told, rank: int) -> None:
    """A step saved again, over the committed one (S2)."""
    manager.save(1, State(bytes_of(rank, 1)))
    manager.save(2, State(bytes_of(rank, 2)))
    manager.save(2, State(bytes_of(rank, 2, "again: ")), on_exists="replace")


def linking(manager: Told, rank: int) -> None:
    """Saves in which only the last rank's bytes change; the others' are linked (S25)."""
    for step in (1, 2, 3):
        manager.save(step, State(bytes_of(rank, step if rank == manager.world - 1 else 0)))


def relinking(manager: Told, rank: int) -> None:
    """In the background, and over a committed one."""
    manager.poll(1)
    manager.save(1, State(bytes_of(rank, 1 if rank else 0)), background=True)
    manager.poll(2)
    manager.save(2, State(bytes_of(rank, 2 if rank else 0)), background=True)
    manager.wait()
    manager.save(2, State(bytes_of(rank, 3 if rank else 0)), on_exists="replace")


def keeping(manager: Told, rank: int) -> None:
    """One that is pinned outlives its turn, and a second series has turns of its own (I5)."""
    rolling = manager.series("rolling", keep_last=ROLLING)
    for step in (1, 2, 3, 4):
        manager.save(step, State(bytes_of(rank, step)))
        if step == 1 and rank == 0:
            with suppress(OSError):  # a pin is this rank's own affair, and its program goes on without
                manager.pin(step)
        if step < 4:
            rolling.save(step, State(bytes_of(rank, step, "rolling: ")))


LOSSES = {1: 0.2, 2: 0.1, 3: 0.4, 4: 0.3, 5: 0.5}
BEST = 2


def best(manager: Told, rank: int) -> None:
    """The best so far outlives its turn, and one that was the best before it does not (I5)."""
    for step, loss in LOSSES.items():
        manager.save(step, State(bytes_of(rank, step)), metrics={"loss": loss})


class Trained(State):
    """State that its optimizer changes, as torch's do, at the end of a step: a tensor, so that ``staging="overlap"`` leaves it
    to be copied beside the training. Bytes, as ``State`` has, are copied at once."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights, self.folder = weights, ""
        self._fences: list[Callable[..., object]] = []

    @property
    def data(self) -> bytes:  # type: ignore[override]
        return self.weights.numpy().tobytes()

    def become(self, data: bytes) -> None:
        self.weights.numpy()[:] = numpy.frombuffer(data.ljust(len(self.weights)), dtype=numpy.uint8)

    def step(self) -> None:
        for fence in list(self._fences):
            fence(self, (), {})
        self.become(b"trained on")

    def register_step_pre_hook(self, fence: Callable[..., object]) -> Any:
        self._fences.append(fence)
        return _Registered(self._fences, fence)

    def live(self) -> Live:
        return Live(steady=[self.weights], optimizers=[self])

    def tree(self) -> Any:
        return {"weights": self.weights}

    def of(self, tree: Any) -> State:
        return Trained(tree["weights"])


@dataclass(frozen=True)
class _Registered:
    fences: list[Callable[..., object]]
    fence: Callable[..., object]

    def remove(self) -> None:
        self.fences.remove(self.fence)


def options(manager: Told, rank: int, series: bool = True) -> None:
    """With every option on that one process can play: copied beside the training, one part of it linked, in two series, the
    best one kept. (A writer process writes to the real disk only: L1 and L3 have it.)"""
    rolling = manager.series("rolling", keep_last=ROLLING) if series else None
    frozen, model = State(b"frozen, of rank %d" % rank), Trained(torch.zeros(96, dtype=torch.uint8))
    for step in (1, 2, 3):
        with suppress(SaveError):
            manager.poll(step)
            model.become(bytes_of(rank, step))
            manager.save(step, {"frozen": frozen, "model": model}, metrics={"loss": LOSSES[step]}, background=True,
                         staging="overlap")
            model.step()
            if rolling is not None and step < 3:
                model.become(bytes_of(rank, step, "rolling: "))
                rolling.save(step, {"frozen": frozen, "model": model}, background=True, staging="overlap")
                model.step()


def satisfied(manager: Told, rank: int) -> None:
    """A step that is there already is skipped on every rank."""
    manager.save(1, State(bytes_of(rank, 1)))
    manager.save(1, State(bytes_of(rank, 1, "again: ")), on_exists="skip")
    manager.save(2, State(bytes_of(rank, 2)))


class Framework(State):
    """Writes under names of its own that nobody claims (S20)."""

    def write(self, files: RankFiles, ranks: Ranks) -> None:
        write_payload(files._files, f"{files.path}/{self.path(ranks.rank, ranks.world)}", self.data, durable=False)


def framework(manager: Told, rank: int) -> None:
    for step in (1, 2):
        manager.save(step, Framework(bytes_of(rank, step)))


def leaving(manager: Told, rank: int) -> None:
    """One rank's program raises with a save in flight; no rank may hang."""
    manager.poll(1)
    manager.save(1, State(bytes_of(rank, 1)), background=True)
    if rank == manager.world - 1:
        raise KeyError("the program is wrong")
    for step in range(2, 6):
        manager.poll(step)
        manager.save(step, State(bytes_of(rank, step)), background=True)


def _alike(run: Run) -> list[str]:
    values = {rank: value for rank, value in run.values.items() if rank not in run.errors}
    if len({repr(value) for value in values.values()}) > 1:
        return [f"P5: ranks did different things: {values}"]
    return []


def _stopped(run: Run) -> list[str]:
    stopped = {rank: value[-1] for rank, value in run.values.items() if rank not in run.errors}
    if len(set(stopped.values())) > 1:
        return [f"P5: ranks stopped at different steps: {stopped}"]
    return []


def noticed(run: Run, strikes: Sequence[Strike]) -> float | None:
    """Seconds from the first fault until the last rank that lives had raised or ended; None when a fault takes time itself, or
    none fired."""
    slow = [s for s in strikes if s.kind in ("power", "slow", "node") or (s.kind == "stop" and s.value)]
    if not run.struck or slow:
        return None
    gone = {strike.rank for strike in strikes if strike.kind in ("kill", "stop")}
    begun = min(moment.seconds for moment in run.struck.values())
    return max((run.told.get(rank, run.seconds) - begun for rank in run.operations if rank not in gone), default=0.0)


def _late(run: Run, strikes: Sequence[Strike], apart: bool, leaves: bool = False, looks: float = 0.0) -> list[str]:
    """I6, of a single fault: a kernel that can tell is believed within a second, and otherwise that after the deadline
    counts. Rank 0 waits for an answer at a gate, and asks for stacks before it raises, five seconds each; and that *it*
    stands still shows only at its deadline, after which ``close`` has one more: first for the save in flight, then for its
    own round. A rank that ``leaves`` by an exception of its program is missed as a killed one is. ``looks``: what a start
    takes at best."""
    seconds = noticed(run, strikes)
    if seconds is None or len(strikes) != 1:
        return []
    strike = strikes[0]
    allowed = _AT_ONCE + looks
    if strike.kind == "stop" or (strike.kind == "kill" and strike.at <= UNKNOWN) or (apart and (strike.kind == "kill" or leaves)):
        allowed += QUICK.progress * (2 if strike.rank == 0 else 1) + _ASKING
    return [f"I6: {strike} was noticed after {seconds:.2f} s, not {allowed:g} s"] if seconds > allowed else []


def _no_exchange() -> CrashFiles:
    disk = CrashFiles("/disk")
    disk.exchange_supported = disk.links_supported = False
    return disk


_BOTH: dict[str, Any] = {"keep": 1, "keep_best": 1, "keeps": {"rolling": ROLLING}}

SCENARIOS: dict[str, Scenario] = {
    "sync": Scenario(sync),
    "two": Scenario(two),
    "one": Scenario(one),
    "background": Scenario(in_background),
    "uneven": Scenario(uneven, prompt=False),
    "skipping": Scenario(skipping, {"in_flight": "skip"}, _alike),
    "stopping": Scenario(stopping, rule=_stopped),
    "replacing": Scenario(replacing),
    "replacing-nfs": Scenario(replacing, disk=_no_exchange),
    "linking": Scenario(linking, {"dedup": "link"}),
    "linking-nfs": Scenario(linking, {"dedup": "link"}, disk=_no_exchange),
    "relinking": Scenario(relinking, {"dedup": "link"}),
    "keeping": Scenario(keeping, {"keeps": {"rolling": ROLLING}}),
    "best": Scenario(best, {"keep_best": 1}, protected=frozenset({BEST})),
    "options": Scenario(options, {**_BOTH, "dedup": "link", "digest": "sha256"}, protected=frozenset({BEST})),
    "undigested": Scenario(options, {**_BOTH, "digest": None}, protected=frozenset({BEST})),
    "satisfied": Scenario(satisfied),
    "framework": Scenario(framework),
    "leaving": Scenario(leaving, raises=True),
    "local": Scenario(sync, nodes=2),
    "local-3": Scenario(sync, nodes=3),
    "local-background": Scenario(in_background, nodes=2),
    "local-replacing": Scenario(replacing, nodes=2),
    "local-replacing-nfs": Scenario(replacing, disk=_no_exchange, nodes=2),
    "local-linking": Scenario(linking, {"dedup": "link"}, nodes=2),
    # without a best one and a second series: a share that stands on one node only stays there while the policy would keep it, or
    # its series is not named (domains/retire.py), and the rule of ``Nodes`` is that none is left
    "local-options": Scenario(partial(options, series=False), {"dedup": "link", "digest": "sha256"}, nodes=2),
    "local-framework": Scenario(framework, nodes=2),
    "local-leaving": Scenario(leaving, raises=True, nodes=2),
}
