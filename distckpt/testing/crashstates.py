"""What a power cut may leave of a ``CrashFiles``: the enumeration behind ``CrashFiles.crash_states``.

Structured cuts come first (nothing, everything, every prefix, one change lost, one change alone), because the bugs
that exist are found by those; then all subsets where they are few, else random ones. States that read the same are
given once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from distckpt.testing.crashdisk import ROOT, D, Disk, Node, apply

_ALL_SUBSETS = 10
Tree = dict[int, dict[str, int]]
Key = tuple[tuple[str, bytes], ...]


def _needs(files: Disk) -> list[int]:
    """For each pending change the mask of earlier ones it builds on, itself included."""
    masks: list[int] = []
    for index, change in enumerate(files.pending):
        mask = 1 << index
        for earlier in range(index):
            if files.pending[earlier].touches(change):
                mask |= masks[earlier]
        masks.append(mask)
    return masks


def _masks(files: Disk, limit: int, seed: int, ordered: bool) -> list[int]:
    """Sets of pending changes that happened, as bit masks closed under what they build on."""
    count = len(files.pending)
    full = (1 << count) - 1
    prefixes = [(1 << size) - 1 for size in range(1, count)]
    if ordered:
        return list(dict.fromkeys([0, full, *prefixes]))
    needs = _needs(files)

    def closed(mask: int) -> int:
        """The largest closed set within ``mask``."""
        return sum(1 << i for i in range(count) if mask >> i & 1 and needs[i] & mask == needs[i])

    found = [0, full]
    for last in range(count - 1, -1, -1):  # the latest changes first: what was done last is what may be lost wrongly
        found += [needs[last], closed(full & ~(1 << last)), *prefixes[last - 1:last]]
    if count <= _ALL_SUBSETS:
        found += [closed(mask) for mask in range(full + 1)]
    else:
        source = random.Random(seed)
        found += [closed(source.getrandbits(count)) for _ in range(min(limit, 4096))]
    return list(dict.fromkeys(found))


def _tree(files: Disk, mask: int) -> Tree:
    tree = {node.number: dict(node.kept_entries) for node in files.nodes.values() if node.kind == "dir"}
    for index, change in enumerate(files.pending):
        if mask >> index & 1:
            for (directory, name), number in change.effects.items():
                apply(tree[directory], name, number)
    return tree


def _reachable(files: Disk, tree: Tree) -> dict[int, str]:
    """{inode: one of its paths} of all that can be reached. A directory is reached once, as on a checked disk."""
    found = {ROOT: ""}
    queue = [ROOT]
    while queue:
        here = queue.pop()
        for name, number in tree[here].items():
            if number in found:
                continue
            found[number] = f"{found[here]}/{name}"
            if files.nodes[number].kind == "dir":
                queue.append(number)
    return found


def _all(node: Node) -> bytes:
    return node.kept_data if node.condemned is not None else bytes(node.data)


def _none(node: Node) -> bytes:
    return node.kept_data


def _zeros(node: Node) -> bytes:
    return node.kept_data + b"\0" * max(len(node.data) - len(node.kept_data), 0) if node.condemned is None else _none(node)


def _half(node: Node) -> bytes:
    if node.condemned is not None:
        return _none(node)
    middle = (len(node.kept_data) + len(node.data) + 1) // 2 if len(node.data) > len(node.kept_data) else len(node.data) // 2
    return bytes(node.data[:middle]) + node.kept_data[middle:]


Fate = Callable[[Node], bytes]
_FATES: tuple[Fate, ...] = (_all, _none, _zeros, _half)


def _fates(dirty: list[int], stage: int) -> Iterator[dict[int, Fate]]:
    """Which bytes each dirty file keeps: first alike for all of them, then one apart from the others."""
    if stage < len(_FATES):
        yield dict.fromkeys(dirty, _FATES[stage])
    elif len(dirty) > 1:
        for odd in dirty:
            for mine, theirs in ((_none, _all), (_all, _none), (_half, _all), (_zeros, _all)):
                yield {number: mine if number == odd else theirs for number in dirty}


def states(files: D, limit: int, seed: int, ordered: bool) -> Iterator[D]:
    """See ``CrashFiles.crash_states``."""
    with files._lock:
        files = files.after_kill()
    masks = _masks(files, limit, seed, ordered)
    trees: dict[int, tuple[Tree, dict[int, str]]] = {}
    seen: set[Key] = set()
    for stage, mask in _tour(masks):
        if mask not in trees:
            made = _tree(files, mask)
            trees[mask] = made, _reachable(files, made)
        tree, reachable = trees[mask]
        dirty = sorted(n for n in reachable if files.nodes[n].dirty)
        if stage and not dirty:
            continue
        for fates in _fates(dirty, stage):
            state = _build(files, tree, reachable, fates)
            key = tuple((path, b"d" if data is None else b"f" + data) for path, data in state.snapshot().items())
            if key in seen:
                continue
            seen.add(key)
            yield state
            if len(seen) >= limit:
                return


def _tour(masks: list[int]) -> Iterator[tuple[int, int]]:
    """(fate of the bytes, names) in an order that shows every kind of loss early, however low the limit is."""
    stages = range(len(_FATES) + 1)
    yield from ((stage, mask) for stage in stages for mask in masks[:2])
    yield from ((stage, mask) for stage in stages for mask in masks[2:])


def _build(files: D, tree: Tree, reachable: dict[int, str], fates: dict[int, Fate]) -> D:
    state = type(files)()
    state.nodes = {}
    for number in reachable:
        node = files.nodes[number]
        data = fates[number](node) if number in fates else node.kept_data
        entries = {name: child for name, child in tree[number].items() if child in reachable} if node.kind == "dir" else {}
        state.nodes[number] = Node(number, node.kind, bytearray(data), bytes(data), dict(entries), dict(entries))
    state._next = files._next
    state.exchange_supported, state.links_supported = files.exchange_supported, files.links_supported
    state.network, state.room = files.network, files.room
    return state
