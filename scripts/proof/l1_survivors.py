"""Which disks a power cut may leave, told apart by what the next start reads: counted first, built only when new.

Three modes. *kill*: nothing is lost. *ordered*: names survive as a prefix of their changes, as with a metadata journal.
*weak*: any subset of the changes of names that were not synced survives, as far as each name's own order allows. In the
last two, the bytes of a file that were not synced are all there, none, zeros, the first or the second half of them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from distckpt.testing import crashstates
from distckpt.testing.crashdisk import Change, Node, apply
from distckpt.testing.crashfs import CrashFiles

_WORD = (1 << 64) - 1
_FEW = 64
KILL, ORDERED, WEAK = "kill", "ordered", "weak"


@lru_cache(maxsize=1 << 16)
def shown(path: str) -> bool:
    """Whether the next start reads what stands under this path of the root. The journal, the status and the beats promise
    nothing after a crash; of what is in trash only markers and the old half of a replace are looked at."""
    part = path.split("/")
    if part[0] != ".distckpt" or len(part) < 2:
        return True
    if part[1] == "trash" and len(part) > 3:
        return part[-1] == "commit.json" or part[3].endswith(".replaced")
    if part[1] == "owner":
        return not path.endswith(".beat")
    return not (part[1] == "journal" and len(part) > 2) and not part[1].startswith("status.json")


@dataclass(frozen=True)
class Survivor:
    """One disk. ``key``: equal for disks that the next start cannot tell apart."""

    key: int
    mode: str
    _view: _View
    _mask: int
    _bytes: tuple[bytes, ...]

    def build(self, seed: int) -> CrashFiles:
        return self._view.build(self._mask, self._bytes, seed)


class _View:
    """A disk with its cache, and what of it can be lost."""

    def __init__(self, disk: CrashFiles, root: str) -> None:
        self.disk, self._root = disk, root
        pending = disk.pending
        placed = self._placements()
        self.matter = [i for i, change in enumerate(pending) if self._matters(change, placed)]
        self._rest = [i for i in range(len(pending)) if i not in set(self.matter)]
        self.needs = self._needs()
        self._contents: dict[int, list[bytes]] = {}

    # -- which changes of names matter ---------------------------------------------------------------------------

    def _placements(self) -> dict[int, set[tuple[int, str]]]:
        """Every place a directory has, has had durably, or may get."""
        nodes = self.disk.nodes
        found: dict[int, set[tuple[int, str]]] = {}
        for number, node in nodes.items():
            for entries in (node.entries, node.kept_entries):
                for name, child in entries.items():
                    if child in nodes and nodes[child].kind == "dir":
                        found.setdefault(child, set()).add((number, name))
        for change in self.disk.pending:
            for place, new in change.effects.items():
                if new is not None and new in nodes and nodes[new].kind == "dir":
                    found.setdefault(new, set()).add(place)
        return found

    def _matters(self, change: Change, placed: dict[int, set[tuple[int, str]]]) -> bool:
        prefix = self._root + "/"
        for where, name in change.effects:
            for path in self._paths(where, placed, 0):
                full = f"{path}/{name}"
                if not full.startswith(prefix) or shown(full[len(prefix):]):
                    return True
        return False

    def _paths(self, number: int, placed: dict[int, set[tuple[int, str]]], depth: int) -> list[str]:
        if number == 1:
            return [""]
        if depth > 12:
            return []
        return [f"{path}/{name}" for where, name in placed.get(number, ()) for path in self._paths(where, placed, depth + 1)]

    def _needs(self) -> list[int]:
        masks: list[int] = []
        for at, index in enumerate(self.matter):
            mask = 1 << at
            for earlier in range(at):
                if self.disk.pending[self.matter[earlier]].touches(self.disk.pending[index]):
                    mask |= masks[earlier]
            masks.append(mask)
        return masks

    def closed(self, mask: int) -> int:
        """The largest set within ``mask`` in which nothing lacks what it builds on."""
        found = 0
        for at, needs in enumerate(self.needs):
            if mask >> at & 1 and needs & mask == needs:
                found |= 1 << at
        return found

    # -- what a reader sees --------------------------------------------------------------------------------------

    def look(self, mask: int) -> tuple[int, list[tuple[int, str]]]:
        """(sum over everything that is settled, [(inode, path)] of the files that may have lost bytes)."""
        nodes = self.disk.nodes
        touched: dict[int, dict[str, int]] = {}
        for at, index in enumerate(self.matter):
            if mask >> at & 1:
                for (where, name), child in self.disk.pending[index].effects.items():
                    if where not in touched:
                        touched[where] = dict(nodes[where].kept_entries)
                    apply(touched[where], name, child)
        total = 0
        dirty: list[tuple[int, str]] = []
        top = self._find_top(touched)
        if top is None:
            return 0, []
        queue, seen = [(top, "")], {top}
        while queue:
            number, path = queue.pop()
            for name, child in touched.get(number, nodes[number].kept_entries).items():
                if child in seen:
                    continue
                node, here = nodes[child], f"{path}{name}"
                if node.kind == "dir":
                    seen.add(child)
                    queue.append((child, here + "/"))
                    if shown(here):
                        total += hash(here + "/")
                elif shown(here):
                    if node.data != node.kept_data:
                        dirty.append((child, here))
                    else:
                        total += _item(here, node.kept_data)
        return total & _WORD, dirty

    def _find_top(self, touched: dict[int, dict[str, int]]) -> int | None:
        number: int | None = 1
        for part in self._root.strip("/").split("/"):
            if number is None:
                return None
            number = touched.get(number, self.disk.nodes[number].kept_entries).get(part)
        return number

    def contents(self, number: int) -> list[bytes]:
        """What this file may hold, each once. The objects stay: a bytes object remembers its hash."""
        if number not in self._contents:
            node = self.disk.nodes[number]
            self._contents[number] = list(dict.fromkeys(fate(node) for fate in _FATES))
        return self._contents[number]

    # -- building ------------------------------------------------------------------------------------------------

    def build(self, mask: int, data: tuple[bytes, ...], seed: int) -> CrashFiles:
        """The disk itself. What the next start does not look at is lost or kept at random."""
        dice = random.Random(seed)
        disk = self.disk
        chosen = {index for at, index in enumerate(self.matter) if mask >> at & 1}
        for index in self._rest:
            if dice.random() < 0.5 and all(earlier in chosen for earlier in range(index)
                                           if disk.pending[earlier].touches(disk.pending[index])):
                chosen.add(index)
        tree = crashstates._tree(disk, sum(1 << index for index in chosen))
        reachable = crashstates._reachable(disk, tree)
        _, dirty = self.look(mask)
        bytes_of = {number: found for (number, _), found in zip(dirty, data, strict=True)}
        fates: dict[int, crashstates.Fate] = {}
        for number in reachable:
            if number in bytes_of:
                fates[number] = _constant(bytes_of[number])
            elif disk.nodes[number].dirty:
                fates[number] = dice.choice(_FATES)
        return crashstates._build(disk, tree, reachable, fates)


def _item(path: str, data: bytes) -> int:
    """A number to add up. A string's hash, because sums of tuples' hashes are alike when two files swap their bytes."""
    return hash(f"{path}\0{hash(data)}")


def _constant(data: bytes) -> crashstates.Fate:
    return lambda node: data


def _second_half(node: Node) -> bytes:
    """The later blocks arrived and the earlier ones did not."""
    kept, data = node.kept_data, bytes(node.data)
    middle = len(data) // 2
    return (kept[:middle] + b"\0" * middle)[:middle] + data[middle:]


_FATES: tuple[crashstates.Fate, ...] = (crashstates._all, crashstates._none, crashstates._zeros, crashstates._half, _second_half)


def survivors(disk: CrashFiles, root: str, limit: int, seed: int) -> Iterator[Survivor]:
    """At most about ``limit`` disks per mode, chosen by ``seed`` where there are more; the telling ones come first."""
    view = _View(disk, root)
    full = (1 << len(view.matter)) - 1
    dice = random.Random(seed)
    yield from _spread(view, KILL, [full], 1, dice)
    prefixes = [(1 << size) - 1 for size in range(len(view.matter), -1, -1)]
    yield from _spread(view, ORDERED, prefixes, limit, dice)
    yield from _spread(view, WEAK, _subsets(view, limit, dice), limit, dice)


def _subsets(view: _View, limit: int, dice: random.Random) -> list[int]:
    count = len(view.matter)
    full = (1 << count) - 1
    found = [full, 0]
    for last in range(count - 1, -1, -1):  # one lost, one alone: what was done last is what may be lost wrongly
        found += [view.closed(full & ~(1 << last)), view.needs[last]]
    few = max(limit // 4, _FEW)
    found += [view.closed(mask) for mask in (range(full + 1) if full < few else (dice.getrandbits(count) for _ in range(few)))]
    return list(dict.fromkeys(found))


def _spread(view: _View, mode: str, masks: list[int], limit: int, dice: random.Random) -> Iterator[Survivor]:
    share = max(limit // len(masks), 5) if mode != KILL else 1
    left = limit
    for mask in masks:
        total, dirty = view.look(mask)
        for chosen in _fates(view, dirty, share, dice):
            key = total
            for (_, path), data in zip(dirty, chosen, strict=True):
                key += _item(path, data)
            yield Survivor(key & _WORD, mode, view, mask, chosen)
            left -= 1
        if left <= 0:
            return


def _fates(view: _View, dirty: list[tuple[int, str]], share: int, dice: random.Random) -> Iterator[tuple[bytes, ...]]:
    options = [view.contents(number) for number, _ in dirty]
    count = 1
    for option in options:
        count *= len(option)
    if count <= share:
        yield from itertools.product(*options)
        return
    for at in range(min(len(_FATES), share)):  # all files alike, then each by itself
        yield tuple(option[at % len(option)] for option in options)
    for _ in range(share - len(_FATES)):
        yield tuple(dice.choice(option) for option in options)
