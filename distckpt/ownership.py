"""One live writer per root, and a fence against the ones before it.

Ownership is a sequence of exclusively created files: creating ``owner/<g>.json`` *is* the takeover, so two takers
cannot both win and no beat can overwrite a new owner (S6). Every move a committer makes has one side in
``staging/<g>/`` or ``trash/<g>/``, which are made only here, at the claim. A takeover renames those of all older
generations away and empties them until ``rmdir`` succeeds, and only then recovers or starts: whatever a zombie of an
older generation still tries, the file system itself answers ENOENT (S5).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from distckpt import catalog
from distckpt.durable import GONE, TAKEN, Files
from distckpt.errors import RootInUse
from distckpt.layout import Layout, is_taken, number_of
from distckpt.ordered import create_exclusively, make_dir, move, unlink_if_there, write_new
from distckpt.patience import NONE, Patience
from distckpt.runtime import Identity, Runtime

log = logging.getLogger(__name__)

BEAT = 10.0
STILL = 90.0
_KEEP_RECORDS = 8


def _numbers(files: Files, path: str, suffix: str = "") -> list[int]:
    try:
        names = [i.name for i in files.scan(path)]
    except OSError as error:
        if error.errno in GONE:
            return []
        raise
    found = (number_of(name.removesuffix(suffix)) for name in names if name.endswith(suffix))
    return sorted(number for number in found if number is not None)


def highest(files: Files, layout: Layout, in_markers: int = 0) -> int:
    """The highest generation that left any trace: a lost owner record must not let the count start over (S6)."""
    seen = [in_markers, *_numbers(files, layout.home("owner"), ".json"), *_numbers(files, layout.home("owner"), ".released")]
    seen += _numbers(files, layout.home("staging")) + _numbers(files, layout.home("trash"))
    return max(seen)


def _beat_of(files: Files, layout: Layout, generation: int) -> bytes:
    try:
        return files.read(layout.owner(generation, "beat"), 64)
    except OSError as error:
        if error.errno in GONE:
            return b""
        raise


def released(files: Files, layout: Layout, generation: int) -> bool:
    try:
        files.stat(layout.owner(generation, "released"))
    except OSError as error:
        if error.errno in GONE:
            return False
        raise
    return True


def while_stale(files: Files, layout: Layout, runtime: Runtime, waiting: Callable[[str], None]) -> Files:
    """``files`` for a claim and the recovery after it."""
    return Patience.towards(files, runtime, layout.root, STILL, lambda: waiting(
        f"root {layout.root} or what is in it is stale here; looking again for up to {STILL:.0f} s")).over(files)


def live_owner(files: Files, layout: Layout, runtime: Runtime, generation: int,
               waiting: Callable[[str], None] = lambda text: None) -> RootInUse | None:
    """The error to raise when generation ``generation`` still has a live owner, else None.

    A pid counts only on the kernel and in the pid namespace it was taken in; a requeued job knows that its former
    run has ended; in every other case the owner's counter must stand still for 90 s, read by a fresh open each time.
    Clocks are never compared (the age in the message is for people).
    """
    if generation == 0 or released(files, layout, generation):
        return None
    value = catalog.read_json(files, layout.owner(generation))
    owner = Identity.of_record((value or {}).get("identity"))
    if owner is not None:
        mine = runtime.identity()
        alive = runtime.alive(owner)
        if alive is False or mine.succeeds(owner):
            return None
        if alive:
            return _in_use(layout, owner, generation, _age(value, runtime))
    elif value is None and generation not in _numbers(files, layout.home("owner"), ".json"):
        return None  # a generation known from staging, trash or markers only: nobody claims to live
    first, began = _beat_of(files, layout, generation), runtime.monotonic()
    while (waited := runtime.monotonic() - began) < STILL:
        waiting(f"root {layout.root} has an owner of generation {generation} on another machine; waiting "
                f"{STILL - waited:.0f} s more to see whether it still beats")
        runtime.sleep(2.0)
        if _beat_of(files, layout, generation) != first:
            return _in_use(layout, owner, generation, _age(value, runtime))
        if released(files, layout, generation):
            return None  # it ended while it was watched: its counter stands still for that
    return None


def _age(value: dict[str, Any] | None, runtime: Runtime) -> float:
    """Seconds since a record was written, by two clocks, for people; 0 when it does not say."""
    since = (value or {}).get("time")
    return runtime.time() - since if isinstance(since, (int, float)) and abs(since) < 1e12 else 0.0


def _in_use(layout: Layout, owner: Identity | None, generation: int, age: float) -> RootInUse:
    who = "an unknown process"
    if owner is not None:
        who = f"pid {owner.pid} on {owner.host}" + (f", job {owner.job}" if owner.job else "")
    return RootInUse(f"root {layout.root} is in use: its live writer is {who}, since {max(age, 0):.0f} s (generation "
                     f"{generation}); wait for it or stop it, or use another root for this run",
                     host=owner.host if owner else "", pid=owner.pid if owner else 0, job=owner.job if owner else None,
                     age=age, generation=generation)


def owner_now(files: Files, layout: Layout, runtime: Runtime) -> tuple[Identity | None, bool | None]:
    """(who claimed the root last, whether they live), without waiting: None where this kernel cannot tell."""
    top = highest(files, layout)
    value = catalog.read_json(files, layout.owner(top)) if top else None
    owner = Identity.of_record((value or {}).get("identity"))
    if top == 0 or released(files, layout, top):
        return owner, False
    return owner, runtime.alive(owner) if owner is not None else None


def _await_record(files: Files, layout: Layout, runtime: Runtime, generation: int) -> None:
    """Wait until the record that stands there is seen, so that whoever wrote it is judged and not passed over."""
    for _ in Patience.towards(files, runtime, layout.root, STILL).looks():
        if generation in _numbers(files, layout.home("owner"), ".json"):
            return


class Ownership:
    """The right to commit and to rotate in one root, from ``claim`` to ``release``."""

    def __init__(self, files: Files, layout: Layout, runtime: Runtime, generation: int) -> None:
        self.generation = generation
        self._files, self._layout, self._runtime = files, layout, runtime
        self._stop = runtime.event()
        self._thread = runtime.thread("owner-beat", self._beat)

    @classmethod
    def claim(cls, files: Files, layout: Layout, runtime: Runtime, in_markers: int = 0,
              waiting: Callable[[str], None] = lambda text: None) -> Ownership:
        """Become the owner; RootInUse while another one lives. Older generations are fenced off when this returns."""
        plain, files = files, while_stale(files, layout, runtime, waiting)
        while True:
            top = highest(files, layout, in_markers)
            refusal = live_owner(files, layout, runtime, top, waiting)
            if refusal is not None:
                raise refusal
            generation = top + 1
            record = {"identity": runtime.identity().to_json(), "time": runtime.time(), "generation": generation,
                      "token": runtime.token(8)}
            try:
                create_exclusively(files, layout.owner(generation), json.dumps(record).encode() + b"\n",
                                   layout.owner(generation, f"{runtime.token(4)}.tmp"))
            except OSError as error:
                # The reply may have been lost, and not the link: whose record stands there decides.
                if catalog.read_json(files, layout.owner(generation)) != record:
                    if isinstance(error, FileExistsError):
                        in_markers = max(in_markers, generation)  # this host's listing may not show it for a minute
                        _await_record(files, layout, runtime, generation)
                        continue  # somebody else took this number; judge them next
                    raise
            try:
                files.fsync_dir(layout.home("owner"))
                files.overwrite(layout.owner(generation, "beat"), b"%020d" % 0)
                _fence(files, layout, generation)
                refusal = _overtaken(files, layout, runtime, generation)
                if refusal is None:
                    _prune_records(files, layout, generation)
            except OSError as error:
                refusal = _overtaken_for_sure(files, layout, runtime, generation)
                if refusal is None:
                    _release(files, layout, generation)  # this process lives on, and may try again
                    raise
                raise refusal from error
            if refusal is not None:
                raise refusal
            return cls(plain, layout, runtime, generation)

    def _beat(self) -> None:
        count = 0
        while not self._stop.wait(BEAT):
            count += 1
            try:
                self._files.overwrite(self._layout.owner(self.generation, "beat"), b"%020d" % count)
            except OSError as error:
                log.warning("could not write the owner's beat of %s: %s", self._layout.root, error)

    def check(self, patience: Patience = NONE) -> None:
        """RootInUse when a higher generation was claimed. A courtesy: the fence itself is the file system's (S5)."""
        refusal = _overtaken(patience.over(self._files), self._layout, self._runtime, self.generation)
        if refusal is not None:
            raise refusal

    def explain(self, error: OSError) -> None:
        """RootInUse when ``error`` came of a takeover: the fence is met as a path that is gone. Returns when it did not, and
        when this disk does not tell: then ``error`` itself is the one to speak of."""
        refusal = _overtaken_for_sure(self._files, self._layout, self._runtime, self.generation)
        if refusal is not None:
            raise refusal from error

    def lost_to(self) -> str:
        """For people, after an error: who took the root over; empty when nobody did, or this disk does not tell."""
        taken = _overtaken_for_sure(self._files, self._layout, self._runtime, self.generation)
        if taken is None:
            return ""
        return (f"; this process lost the root to generation {taken.generation}: pid {taken.pid} on {taken.host}"
                + (f", job {taken.job}" if taken.job else ""))

    def release(self) -> None:
        """Let the next writer in without a wait."""
        self._stop.set()
        self._thread.join(5)
        _release(self._files, self._layout, self.generation)


def _release(files: Files, layout: Layout, generation: int) -> None:
    try:
        write_new(files, layout.owner(generation, "released"), b"{}\n")
    except OSError as error:
        log.warning("could not release root %s: %s; the next writer will wait for this process to be gone", layout.root, error)


def _overtaken(files: Files, layout: Layout, runtime: Runtime, generation: int) -> RootInUse | None:
    """The error to raise when a higher generation was claimed."""
    top = highest(files, layout)
    if top <= generation:
        return None
    value = catalog.read_json(files, layout.owner(top)) or {}
    return _in_use(layout, Identity.of_record(value.get("identity")), top, _age(value, runtime))


def _overtaken_for_sure(files: Files, layout: Layout, runtime: Runtime, generation: int) -> RootInUse | None:
    """As ``_overtaken``, after another error; None when it cannot be told."""
    try:
        return _overtaken(files, layout, runtime, generation)
    except OSError as error:
        log.debug("cannot tell whether root %s was taken over: %s", layout.root, error)
        return None


def _fence(files: Files, layout: Layout, generation: int) -> None:
    """Make our own two directories and take everything out of the older ones.

    A taker may be stopped between its record and its directories, and be overtaken meanwhile: it makes them first
    and looks for a newer record second, and the newer one wrote its record first and looks for directories second.
    One of the two sees the other; whoever is overtaken leaves no directory, and touches nobody newer (S5).
    """
    for kind, at in (("staging", layout.staging), ("trash", layout.trash)):
        make_dir(files, at(generation))
        files.fsync_dir(layout.home(kind))
    if highest(files, layout) > generation:
        for at in (layout.staging, layout.trash):
            with suppress(OSError):
                files.rmdir(at(generation))
        return
    for kind, at in (("staging", layout.staging), ("trash", layout.trash)):
        for older in _numbers(files, layout.home(kind)):
            if older < generation:
                aside = at(generation, f"taken-{kind}-{older}")
                move(files, at(older), aside)
        files.fsync_dir(layout.home(kind))
        for item in files.scan(at(generation)):
            if is_taken(item.name):
                _empty(files, at(generation, item.name), at(generation))
        files.fsync_dir(at(generation))


def _empty(files: Files, aside: str, into: str) -> None:
    """Move every entry of a fenced directory into ours, until it can be removed.

    On a network file system a zombie's client may know the directory by handle for a moment and still make entries in
    it: hence the loop, which ends only with ``rmdir``.
    """
    while True:
        for item in files.scan(aside):
            source = os.path.join(aside, item.name)
            if is_taken(item.name):
                _empty(files, source, into)
                continue
            target = os.path.join(into, item.name)
            try:
                files.rename(source, target)
            except OSError as error:
                if error.errno in GONE:
                    continue
                if error.errno not in TAKEN:
                    raise
                files.rename(source, f"{target}.{os.path.basename(aside)}")
        files.fsync_dir(into)
        try:
            files.rmdir(aside)
        except OSError as error:
            if error.errno in GONE:
                return
            if error.errno not in TAKEN:
                raise
            continue
        return


def _prune_records(files: Files, layout: Layout, generation: int) -> None:
    for item in files.scan(layout.home("owner")):
        number = number_of(item.name.partition(".")[0])
        # a temporary of our own number may belong to a taker that is about to learn that it came second
        oldest = generation if item.name.endswith(".tmp") else generation - _KEEP_RECORDS
        if number is not None and number < oldest:
            unlink_if_there(files, layout.home("owner", item.name))
