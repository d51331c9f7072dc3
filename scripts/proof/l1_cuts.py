"""Where L1 cuts the power: after every step of the order that was seen, and with ranks that lag behind it.

A trace is one interleaving. A rank that had not yet done its last steps would have been just as legal, as long as nothing
that the others did followed from them. What follows from what is known by program order and by the messages' marks
(``coordination.marks``), kept as vector clocks: one count of steps per rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from distckpt.testing.checker import Save, Story
from distckpt.testing.crashfs import CrashFiles
from distckpt.testing.replay import Mark, Run, Step, Write
from scripts.proof.l1_scenarios import ROLLING, ROLLING_KEEP, Scenario

Clock = tuple[int, ...]
Verdicts = tuple[str, ...]


@dataclass(frozen=True)
class Event:
    """A step with its ``rank`` and its number among that rank's steps; ``needs``: what of each rank came before it.

    ``starts``, ``ends``: whether the rank's step before it, and the one after it, is something else than more of the same: a
    framework writes a file in thirty small pieces, and of what lies between those, a file that has its first half tells enough.
    """

    step: Step
    rank: int
    number: int
    needs: Clock
    starts: bool = True
    ends: bool = True


@dataclass
class Told:
    """What the ranks had begun and heard, as far as a cut goes."""

    begun: set[int] = field(default_factory=set)
    verdicts: dict[int, set[str]] = field(default_factory=dict)

    def copy(self) -> Told:
        return Told(set(self.begun), {number: set(words) for number, words in self.verdicts.items()})

    def hear(self, text: str) -> bool:
        """Whether this mark changes what was promised."""
        word, _, rest = text.partition(" ")
        if word == "BEGIN":
            self.begun.add(int(rest.split()[0]))
        elif word == "TOLD":
            number, verdict = rest.split()
            self.verdicts.setdefault(int(number), set()).add(verdict)
        return word in ("BEGIN", "TOLD")

    @property
    def key(self) -> tuple[tuple[int, Verdicts], ...]:
        return tuple((number, tuple(sorted(self.verdicts.get(number, ())))) for number in sorted(self.begun))


@dataclass
class Recorded:
    """One scenario's run. ``events`` in the order in which they were seen; ``contents``: of each save that can be
    committed; ``kills``: how many of the planned ones came about."""

    scenario: Scenario
    disk: CrashFiles
    events: list[Event]
    contents: Mapping[int, str]
    kills: int

    def story(self, told: Told) -> Story:
        """What the checker is told of a cut."""
        saves = []
        for number, plan in enumerate(self.scenario.saves):
            if number in told.begun:
                words = dict(enumerate(sorted(told.verdicts.get(number, ()))))
                saves.append(Save(plan.step, self.contents.get(number, "never completed"), words, plan.series))
        return Story(saves, self.scenario.keep, self.scenario.protected, {ROLLING: ROLLING_KEEP})


def understand(run: Run, scenario: Scenario, contents: Mapping[int, str]) -> Recorded:
    """Ranks and clocks of a recorded run, of which each save must leave ``contents``."""
    ranks: dict[int, int] = {}
    for step in run.steps:
        if isinstance(step, Mark) and step.text.startswith("RANK "):
            ranks[step.process] = int(step.text.split()[1])

    def rank_of(process: int | None) -> int:
        while process is not None and process not in ranks:
            process = run.parent.get(process)
        return -1 if process is None else ranks[process]

    events = _clocks([(step, rank_of(step.process)) for step in run.steps], scenario.world)
    kills = sum(isinstance(step, Mark) and step.text == "KILLED" for step in run.steps)
    return Recorded(scenario, run.disk, events, contents, kills)


def _clocks(steps: Sequence[tuple[Step, int]], world: int) -> list[Event]:
    clocks = [[0] * world for _ in range(world)]
    sent: dict[str, dict[int, Clock]] = {}
    events = []
    for step, rank in steps:
        if rank < 0:  # the program that starts the ranks waits for all of them
            if isinstance(step, Mark) and step.text == "PHASE":
                latest = [clocks[r][r] for r in range(world)]
                clocks = [list(latest) for _ in range(world)]
                sent = {}
                events.append(Event(step, -1, 0, tuple(latest)))
            continue
        mine = clocks[rank]
        if isinstance(step, Mark) and step.text.startswith("HB "):
            _, word, *keys = step.text.split(" ")
            if word == "send":
                sent.setdefault(keys[0], {})[rank] = tuple(mine)
                continue
            for key in keys:
                for sender, clock in sent.get(key, {}).items():
                    if sender != rank:
                        mine[:] = map(max, mine, clock)
            continue
        mine[rank] += 1
        events.append(Event(step, rank, mine[rank], tuple(mine)))
    return _pieces(events)


def _pieces(events: list[Event]) -> list[Event]:
    last: dict[int, int] = {}
    for index, event in enumerate(events):
        before = last.get(event.rank)
        if before is not None and isinstance(event.step, Write):
            earlier = events[before]
            if isinstance(earlier.step, Write) and earlier.step.node == event.step.node:
                events[before], events[index] = replace(earlier, ends=False), replace(event, starts=False)
        last[event.rank] = index
    return events


@dataclass
class Cut:
    """A disk in the middle of a run, its cache included. ``where``: for the report. ``lags``: some rank is behind."""

    disk: CrashFiles
    told: Told
    where: str
    lags: bool


def cuts(recorded: Recorded, lagging: bool = True) -> Iterator[Cut]:
    """Every cut of the order that was seen, and the lagging ones. A cut's disk is good until the next is asked for."""
    disk, told = recorded.disk.after_kill(), Told()
    events = recorded.events
    world = recorded.scenario.world
    yield Cut(disk, told, "before anything", False)
    for index, event in enumerate(events):
        if event.rank >= 0 and lagging and world > 1 and event.starts and not isinstance(event.step, Mark):
            yield from _lagging(recorded, index, disk, told)
        if _happen(event, disk, told):
            yield Cut(disk, told, f"after line {event.step.line}", False)


def _happen(event: Event, disk: CrashFiles, told: Told) -> bool:
    """Do it; whether it made a difference."""
    if isinstance(event.step, Mark):
        return told.hear(event.step.text)
    event.step.apply(disk)
    return True


def _lagging(recorded: Recorded, index: int, disk: CrashFiles, told: Told) -> Iterator[Cut]:
    """The rank of event ``index`` stands before it while others go on: all others, or one alone."""
    events, world = recorded.events, recorded.scenario.world
    late = events[index].rank
    groups = [frozenset({late})]
    if world > 2:
        groups += [frozenset(range(world)) - {leader} for leader in range(world) if leader != late]
    for frozen in groups:
        ahead = list(_allowed(events, index, frozen, world))
        if not any(not isinstance(e.step, Mark) or e.step.text.startswith("TOLD") for e in ahead):
            continue
        branch, heard = disk.after_kill(), told.copy()
        stuck: set[int] = set()
        for event in ahead:
            if event.rank in stuck:
                continue
            if not event.step.possible(branch):  # it follows from what the frozen ones did, by way of the disk
                stuck.add(event.rank)
                continue
            if _happen(event, branch, heard) and event.ends:
                where = f"after line {event.step.line}, ranks {sorted(frozen)} before line {events[index].step.line}"
                yield Cut(branch, heard, where, True)


def _allowed(events: Sequence[Event], index: int, frozen: frozenset[int], world: int) -> Iterator[Event]:
    """The events from ``index`` on that can happen while ``frozen`` ranks do nothing more."""
    done: dict[int, int] = {}
    for event in events[index:]:
        if event.rank in frozen and event.rank not in done:
            done[event.rank] = event.number - 1
        if len(done) == len(frozen):
            break
    running = set(range(world)) - frozen
    for event in events[index:]:
        if event.rank < 0 or not running:
            return
        if event.rank in running:
            if any(event.needs[rank] > count for rank, count in done.items()):
                running.discard(event.rank)
            else:
                yield event

