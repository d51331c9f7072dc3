"""The program of the guest: forks the ranks, strikes at the operation that the plan names, and judges what is left.

It has torch loaded and one thread, so that a rank is a fork away. Every event goes out as one line on the console.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

import distckpt
import distckpt.manager  # loaded once, before the forks
from distckpt.testing.checker import COMMITTED, Found, check, tree_of
from scripts.proof.uml import golden, machines, ranks
from scripts.proof.uml.link import End, pair
from scripts.proof.uml.plan import CACHED, CUT, CUT_START, SERVER, STALE, Phase, Plan, line

Release = Callable[[], None]


class Hung(Exception):
    """A rank said nothing for as long as the plan allows, or ended without a word."""


def say(**event: Any) -> None:
    os.write(1, (line(**event) + "\n").encode())


@dataclass
class Child:
    """A process of ours on one node."""

    name: str
    pid: int
    link: End
    gate: End
    operations: int = 0


@dataclass
class Pair:
    """The two ranks of one phase."""

    number: int
    plan: Plan
    phase: Phase
    children: list[Child] = field(default_factory=list)

    def expect(self, key: str, strike: Callable[[Release], None]) -> list[dict[str, Any]]:
        """One event with ``key`` from each rank. ``strike`` is called when a rank is held, and lets it go."""
        got: dict[int, dict[str, Any]] = {}
        until = time.monotonic() + self.plan.limit
        while len(got) < len(self.children):
            ends: list[End] = [e for n, c in enumerate(self.children) for e in ([c.gate] if n in got else [c.gate, c.link])]
            ready = select.select(ends, [], [], max(until - time.monotonic(), 0))[0]
            if not ready:
                raise Hung(f"phase {self.phase.fault}: no {key!r} from rank {[n for n in range(2) if n not in got]} within "
                           f"{self.plan.limit:g} s")
            for number, child in enumerate(self.children):
                if child.gate in ready and (held := child.gate.hear()) is not None:
                    say(held=held["held"], path=held["path"], rank=number)
                    strike(partial(child.gate.say, go=True))
                    until = time.monotonic() + self.plan.limit
                if child.link in ready:
                    event = child.link.hear()
                    if event is None:
                        raise Hung(f"phase {self.phase.fault}: rank {number} ended without {key!r}")
                    say(**event)
                    got[number] = event
                    child.operations = event.get("operations", child.operations)
        return [got[n] for n in range(len(self.children))]


def fork(name: str, run: Callable[[End, End], object]) -> Child:
    """``run`` in a process of its own, with a log that is said when it does not end well."""
    link, theirs = pair()
    gate, their_gate = pair()
    pid = os.fork()
    if pid:
        theirs.close()
        their_gate.close()
        return Child(name, pid, link, gate)
    try:
        log = os.open(f"/run/log/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(name)s %(levelname)s %(message)s", force=True)
        faulthandler.register(signal.SIGUSR2, all_threads=True)
        link.close()
        gate.close()
        run(theirs, their_gate)
    except BaseException:  # its log is where the guest program looks
        traceback.print_exc()
    finally:
        logging.shutdown()
        sys.stderr.flush()
        os._exit(0)


def run_phase(number: int, plan: Plan, phase: Phase) -> None:
    draw = plan.random(number, phase.fault)
    two = Pair(number, plan, phase)
    if phase.fault == STALE:
        for node in machines.NODES:
            machines.remount(node, plan.version, f",actimeo={CACHED}")
    for node in machines.NODES:
        two.children.append(fork(f"rank-{node}", partial(ranks.rank, number=number, node=node, plan=plan, phase=phase)))
    readers = [fork(f"reader-{node}", partial(ranks.reader, node=node)) for node in machines.NODES if phase.fault == "read"]
    try:
        _saves(two, draw)
        for child in readers:
            child.link.say(stop=True)
            say(**(child.link.hear() or {"wrong": [f"I6: {child.name} ended without a word"]}))
    except Hung as error:
        _dump([*two.children, *readers])
        say(hung=str(error))
        raise
    finally:
        for child in [*two.children, *readers]:
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
            child.link.close()
            child.gate.close()
    _warnings()
    judge(plan, f"after {phase.fault}", went_on=phase.hurried or None)


def _saves(two: Pair, draw: Any) -> None:
    plan, phase = two.plan, two.phase
    at = {CUT_START: draw.randrange(1, 60), "lost": draw.randrange(1, 30)}.get(phase.fault)
    two.children[0].link.say(at=at)
    two.children[1].link.say(at=None)
    resumed = two.expect("resumed", lambda release: _strike(phase, draw, release))
    _judge_resumed(plan, [event["resumed"] for event in resumed], f"at the start of {phase.fault}")
    for count in range(phase.tries):
        step = plan.next_step
        plan.next_step += 1
        plan.told[step] = {}
        victim = draw.randrange(2)
        at = None
        if count and phase.fault in (*SERVER, CUT):
            at = 1 + draw.randrange(max(two.children[victim].operations, 1))
        filled = phase.fault == "full" and count % 2 == 1
        if filled:
            machines.leave_free(draw.randrange(0, int(1.7 * golden.size())))
        blind = filled and draw.random() < 0.5
        say(begin=step, fault=phase.fault, victim=victim, at=at, blind=blind)
        for rank, child in enumerate(two.children):
            child.link.say(step=step, at=at if rank == victim else None, blind=blind,
                           resume=count == phase.tries - 1)
        events = two.expect("verdict", lambda release: _strike(phase, draw, release))
        for rank, event in enumerate(events):
            plan.told[step][rank] = event["verdict"]
        if filled:
            machines.empty_ballast()
        else:
            _expect_success(phase, step, events)
        again = [event["again"] for event in events if "again" in event]
        if again:
            _judge_resumed(plan, again, "resumed at once after a save")
    for child in two.children:
        child.link.say(end=True)
    two.expect("closed", lambda release: release())


def _expect_success(phase: Phase, step: int, events: list[dict[str, Any]]) -> None:
    """A save must outlast every fault but a full disk: hard mounts wait for the server."""
    failed = [event["error"] for event in events if event["verdict"] != COMMITTED]
    if failed:
        say(wrong=[f"I8: the save of step {step} under {phase.fault!r} failed: {failed[0]}"])


def _cut(release: Release) -> NoReturn:
    """The host kills this whole machine when it reads the line; how far the other rank gets until then is chance."""
    say(cut=True)
    while True:
        signal.pause()


def _strike(phase: Phase, draw: Any, release: Release) -> None:
    if phase.fault in (CUT, CUT_START):
        _cut(release)
    lag, down = draw.choice((None, None, 0.0, 0.02, 0.06)), draw.choice((0.0, 0.1, 0.5))
    if phase.fault == "lost":
        machines.mute_server()
        lag = 0.1
    if lag is not None:
        release()
        time.sleep(lag)  # how far the ranks get
    if phase.fault == "crash":
        machines.crash_server()
    else:
        machines.stop_server()
    time.sleep(down)
    if phase.fault == "crash":
        machines.revive_server()
    else:
        machines.start_server()
    if phase.fault == "lost":
        machines.unmute_server()
    if lag is None:
        release()
    say(struck=phase.fault)


def _dump(children: list[Child]) -> None:
    for child in children:
        os.kill(child.pid, signal.SIGUSR2)
    time.sleep(1.0)  # the stacks are being written by processes that may be stuck
    for child in children:
        text = Path(f"/run/log/{child.name}").read_text()[-6000:]
        for row in text.splitlines():
            os.write(1, f"{child.name}: {row}\n".encode())


def _warnings() -> None:
    """What the ranks' logs complained about: no violation, and worth a look."""
    for node in machines.NODES:
        rows = Path(f"/run/log/rank-{node}").read_text().splitlines()
        found = sorted({row.partition(" ")[2][:240] for row in rows if " WARNING " in row or " ERROR " in row})
        if found:
            say(rank=node, warnings=found[:6])


def _judge_resumed(plan: Plan, answers: list[Any], when: str) -> None:
    """Both ranks must go on from the newest, and read it exactly; the disk as the server has it."""
    found = Found(tree_of(f"{machines.DISK}/run"), crashes=plan.cuts + 1,
                  resumed={rank: tuple(answer) if answer else None for rank, answer in enumerate(answers)})
    say(judged=when, wrong=[f"{text} ({when})" for text in check(plan.story(), found)])


def judge(plan: Plan, when: str, went_on: bool | None = None) -> None:
    """What both machines read through a fresh mount."""
    for node in machines.NODES:
        machines.remount(node, plan.version)

        def look() -> list[str]:
            return check(plan.story(), Found(tree_of(machines.ROOT), crashes=plan.cuts + 1, went_on=went_on))

        say(judged=when, node=node, wrong=[f"{text} ({when}, node {node})" for text in machines.inside(node, look)])


def main(path: str) -> None:
    torch.set_num_threads(1)
    plan = Plan.from_json(Path(path).read_text())
    say(ready=True, boot=plan.boot, version=plan.version, torch=torch.__version__, distckpt=distckpt.__name__)
    for node in machines.NODES:
        machines.mount(node, plan.version)
    if os.path.isdir(f"{machines.DISK}/run"):
        judge(plan, "after the cut, before anything ran")
    for number, phase in enumerate(plan.phases):
        say(phase=phase.fault, tries=phase.tries)
        try:
            run_phase(number, plan, phase)
        except Hung:
            return
    say(done=True)


if __name__ == "__main__":
    main(sys.argv[1])
