"""One-line mutants of the ordering code, made from the code itself by a walk over its syntax trees.

*removed*: a statement that syncs, closes, claims, moves away, marks or tells is replaced by ``pass``; a check that refuses (of a
size, a digest, a lease, a refusal, a number) never refuses. *swapped*: two neighbours that both order something change
places, where no value runs from the one to the other. Two syncs with nothing between have no order, and are not swapped.
*unguarded*: one of ``guards``. ``PICKED`` adds what no rule makes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.proof.guards import GUARDED, guards

FILES = ("saving/commit.py", "saving/committer.py", "saving/transaction.py", "saving/files.py", "saving/links.py",
         "saving/piecewriter.py", "saving/unsynced.py",
         "saving/finaliser.py", "saving/saver.py",
         "saving/compare.py", "saving/unclaimed.py", "domains/parts.py", "domains/opening.py",
         "domains/retire.py", "durable.py",
         "ordered.py", "removal.py", "owned.py", "rootdir.py", "recovery.py", "rotation.py", "janitor.py", "ownership.py",
         "leases.py", "coordination/gate.py", "coordination/rounds.py", "coordination/group.py", "background.py",
         "domains/probe.py", "domains/standing.py", "patience.py", "pace.py", "launch/ending.py", "launch/signals.py",
         "payloads/standin.py", "payloads/memory.py", "afterwards.py", "together.py",
         "adopt.py", "start.py", "checkpoint.py", "ending.py", "coordination/pulse.py", "coordination/listener.py", "requests.py",
         "resume.py", "behind.py", "status.py", "manager.py", "cli/export.py", "cli/verify.py", "cli/prune.py", "cli/claim.py",
         "integrations/lightning.py", "saving/staging.py", "saving/terms.py", "saving/writer.py",
         "payloads/inplace.py", "payloads/safefile.py", "payloads/dcpplan.py", "pagecache.py",
         *(file for file in GUARDED if file not in ("durable.py", "ordered.py", "removal.py")))

LEFT_OUT = {
    "cli/main.py": "flushes what people read",
    "cli/output.py": "flushes what people read",
    "runtime.py": "flushes what people read, before it leaves",
    "timing.py": "a clock for people",
    "cli/doctor.py": "a trial in a directory of its own, of which nothing is kept",
    "cli/probe.py": "a trial in a directory of its own, of which nothing is kept",
    "coordination/bootstrap.py": "waits for a thread at the end, for no longer than it may",
    "saving/alone.py": "the size of a tensor, which decides what is copied how",
    "saving/pacing.py": "hints that a write may begin: no promise hangs on when they end, and saving/files.py syncs the file",
    "saving/arena.py": "where in memory a copy stands: what is wrong there is other bytes, which every test of a payload sees",
    "payloads/pieces.py": "how many small tensors one write takes",
    "payloads/scratch.py": "a place in memory that a framework's writer uses; the lock goes with the process",
    "payloads/dcp.py": "DCP's own calls by these names; its order is DCP's, and its files are saving/piecewriter.py's",
    "payloads/deepspeed.py": "DeepSpeed's own words by these names; what it wrote is synced by saving/files.py",
    "payloads/lightning.py": "Lightning's shards; what it wrote is synced by saving/files.py",
    "payloads/framework.py": "the framework's writer: it is stood in for by payloads/standin.py and payloads/memory.py",
    "integrations/transformers.py": "refuses options of Trainer and asks it to stop; the order is the manager's",
}
"""Files for which the rules make mutants that say nothing of a promise, and why."""

_SYNCS = {"fsync", "fsync_dir", "fsync_tree_dirs", "sync_root", "make_durable", "together", "sync"}
_CALLS = _SYNCS | {
    "flush", "close", "_held", "_release", "write_new", "_fill", "settle", "vouch",  # bytes
    "rename", "move", "to_trash", "unlink_markers", "discard", "publish", "_sweep", "put_back", "_undo", "_move",
    "unlink_if_there", "remove_tree",  # names
    "check", "_refuse_leased", "hold", "_fence", "create_exclusively", "_start", "raise_failures", "require_same",  # refusals
    "claim", "_announce", "forget_old", "await_staging", "enter_together", "finish", "after_commit", "rotate",  # rounds
    "catch_up", "make_room", "popleft",  # what follows a commit
    "freeze", "act", "cancel", "again", "lose",  # the gate
    "_refuse", "_require_alike", "_judge", "rmdir_if_there",  # the start
    "announce", "make_staging", "carry_out", "_publish", "_withdraw", "_finish",  # several domains
    "never_began", "unknown", "aborted", "discarded", "point_to", "put_beside", "remove_attempt", "sweep", "add",  # rank 0
    "requeue", "callback", "begin", "end"}  # the end; what a framework wrote
_OF = {"set": {"client", "_client", "_idle", "_open", "_wake"}, "clear": {"_idle", "_open", "_wake"},
       "append": {"_acts", "_queue", "again"}, "unlink": {"files"},
       "wait": {"_wake", "janitor"}, "join": {"helper", "_thread"}, "release": {"_lock", "self", "writer", "unsynced"},
       "sync": {"self", "unsynced"},
       "discard": {"live", "_parts"}, "check": {"ownership", "self"}, "again": {"gate"}, "act": {"gate"}, "cancel": {"gate"},
       "begin": {"memory", "_parts"}, "end": {"memory"}, "callback": {"undo"}, "remove_attempt": {"owned"}, "sweep": {"owned"},
       "add": {"live"}, "unknown": {"_committer"}, "aborted": {"_committer"}}
"""Names too common to go by alone: only of these receivers."""
_MARKS = {"place", "flag", "no_rotation", "in_doubt", "durable", "lost", "closing", "highest_seq", "raised",
          "stopped", "_used", "_stopping", "_job", "failed"}
_CHECKS = re.compile(r"\b(size|sizes|inode|durable|holders|refusal|newest|highest|no_rotation|in owner|PASSING|limit|not missing|"
                     r"failed|acquire|"
                     r"entry\.certain|_is_plain|_?overlap|_RUNNING|manager)\b")


@dataclass(frozen=True)
class Mutant:
    """``original`` in ``file`` (below the package), in the function ``where``, becomes ``mutated``."""

    file: str
    line: int
    where: str
    kind: str
    original: str
    mutated: str
    start: int
    end: int
    put: bytes
    within: str = ""

    def __str__(self) -> str:
        if self.within:
            return (f"{self.file}:{self.line} {self.where}: {shown(self.original)} becomes {shown(self.mutated)} in "
                    f"{shown(self.within)}")
        if self.kind == "swapped":
            return f"{self.file}:{self.line} {self.where}: {shown(self.original)} changes places with {shown(self.mutated)}"
        return f"{self.file}:{self.line} {self.where}: {shown(self.original)} becomes {shown(self.mutated)}"

    def apply(self, package: Path) -> None:
        """Change the file in a copy of the package."""
        path = package / self.file
        source = path.read_bytes()
        path.write_bytes(source[:self.start] + self.put + source[self.end:])


def shown(text: str, width: int = 90) -> str:
    flat = " ".join(text.split())
    return f"`{flat}`" if len(flat) <= width else f"`{flat[:width - 4]} ...`"


@dataclass(frozen=True)
class Picked:
    """A mutant chosen by hand: ``text`` stands in ``file`` once."""

    file: str
    text: str
    put: str


PICKED = (
    Picked("saving/commit.py", "return prepare(owned, found, patience) or publish(owned, found, replace=replace)",
           "return publish(owned, found, replace=replace) or prepare(owned, found, patience)"),
    Picked("durable.py", "os.O_WRONLY | os.O_CREAT | os.O_EXCL |", "os.O_WRONLY | os.O_CREAT |"),
    Picked("saving/transaction.py", "return self._client.claim(self._decision, {decision: True}).get(decision) is True",
           "return True"),
    Picked("saving/transaction.py", "progress=True, abort=self._decision)", "progress=True)"),
    Picked("domains/parts.py", "self._drop(item.name)", "pass"),
    Picked("domains/parts.py", "self._drop(self._go.attempt)", "pass"),
    Picked("ownership.py", "generation = top + 1", "generation = max(top, 1)"),
    Picked("recovery.py", "key=lambda c: c[0]", "key=lambda c: -c[0]"),
    Picked("coordination/gate.py", "for answer in answers.values())) + 1", "for answer in answers.values()))"),
    Picked("coordination/rounds.py", "rounds.client.claim(key, {\"error\": to_wire(error), \"by\": rounds.rank})",
           "rounds.client.set(key, {\"error\": to_wire(error), \"by\": rounds.rank})"),
    Picked("removal.py", "with files.folder(root, os.path.relpath(place, root)):", "if True:"),
    Picked("durable.py", "_require_regular(fd, os.path.join(top, below))", "pass"),
    Picked("durable.py", "_require_regular(fd, path)\n            parts", "parts"),
    Picked("pagecache.py", "raise OSError(number, os.strerror(number), path)", "pass"),
    Picked("payloads/dcpplan.py", "and before.local == self._local", ""),
    Picked("payloads/dcpplan.py", " or plan.number != before.number", ""),
    Picked("payloads/dcpplan.py", "(before is None or not before.plans or plan.number != before.number)", "False"),
    Picked("payloads/dcpplan.py", "planner = Planner(kept.pop((Planner, name), None))",
           "planner = Planner(kept.get((Planner, name)))"),
    Picked("payloads/dcpread.py", "torch.load(value, weights_only=True)", "torch.load(value, weights_only=False)"),
)


def made(package: Path, files: Sequence[str] = FILES) -> list[Mutant]:
    """Every mutant of ``files``, in the order of the code, those picked by hand last."""
    found: list[Mutant] = []
    for file in files:
        source = (package / file).read_bytes()
        walk = _Walk(file, source)
        walk.function(ast.parse(source).body, "")
        if file in GUARDED:
            walk.guards(ast.parse(source))
        found += walk.found
    for one in PICKED:
        if one.file in files:
            found.append(_picked(package, one))
    return found


def _picked(package: Path, one: Picked) -> Mutant:
    source, text = (package / one.file).read_bytes(), one.text.encode()
    if source.count(text) != 1:
        raise ValueError(f"{one.file} holds {one.text!r} {source.count(text)} times")
    at = source.index(text)
    return Mutant(one.file, source[:at].count(b"\n") + 1, "picked", "picked", one.text, one.put, at, at + len(text),
                  one.put.encode())


class _Walk:
    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.source = file, source
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self.found: list[Mutant] = []

    def _span(self, node: ast.stmt | ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._lines[node.lineno - 1] + node.col_offset, self._lines[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.stmt | ast.expr) -> bytes:
        start, end = self._span(node)
        return self.source[start:end]

    def function(self, body: Sequence[ast.stmt], where: str) -> None:
        for node in body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                self.function(node.body, f"{where}.{node.name}" if where else node.name)
        if where and not where.endswith("__init__"):
            self._block(body, where)

    def guards(self, tree: ast.Module) -> None:
        known = {(one.start, one.end) for one in self.found if one.kind == "removed"}
        for guard in guards(tree):
            start, end = self._span(guard.node)
            if (start, end) not in known:
                self._add(guard.node, guard.where, "unguarded", guard.put, start, end, guard.put.encode(), guard.of)

    def _block(self, body: Sequence[ast.stmt], where: str) -> None:
        for node in body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                continue
            if _removable(node):
                self._add(node, where, "removed", "pass", *self._span(node), b"pass")
            elif isinstance(node, ast.If) and _refuses(node):
                self._add(node.test, where, "removed", "False", *self._span(node.test), b"False")
            for inner in _blocks(node):
                self._block(inner, where)
        for one, other in zip(body, body[1:], strict=False):
            if _orders(one) and _orders(other) and _independent(one, other):
                start, middle = self._span(one)
                later, end = self._span(other)
                self._add(one, where, "swapped", self._text(other).decode(), start, end,
                          self._text(other) + self.source[middle:later] + self._text(one))

    def _add(self, node: ast.stmt | ast.expr, where: str, kind: str, mutated: str, start: int, end: int, put: bytes,
             within: ast.expr | None = None) -> None:
        self.found.append(Mutant(self.file, node.lineno, where, kind, self._text(node).decode(), mutated, start, end, put,
                                 self._text(within).decode() if within is not None and within is not node else ""))


def _blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        inner = getattr(node, name, None)
        if inner:
            yield inner
    for handler in getattr(node, "handlers", ()):
        yield handler.body


def _called(node: ast.AST) -> str | None:
    """The name of an ordering call."""
    if not isinstance(node, ast.Call):
        return None
    function = node.func
    if isinstance(function, ast.Name):
        return function.id if function.id in _CALLS else None
    if not isinstance(function, ast.Attribute):
        return None
    receiver = function.value
    last = receiver.attr if isinstance(receiver, ast.Attribute) else receiver.id if isinstance(receiver, ast.Name) else ""
    if last == "os" and function.attr == "close":
        return None  # of a descriptor that only read; the one that wrote is closed by ``_File.close``
    known = last in _OF[function.attr] if function.attr in _OF else function.attr in _CALLS
    return function.attr if known else None


def _marked(target: ast.expr) -> bool:
    if isinstance(target, ast.Subscript):
        target = target.value
        if isinstance(target, ast.Name):
            return target.id in _MARKS
    if isinstance(target, ast.Tuple):
        return any(map(_marked, target.elts))
    return isinstance(target, ast.Attribute) and target.attr in _MARKS


def _removable(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        return _called(node.value) is not None
    if isinstance(node, ast.Assign):
        return any(map(_marked, node.targets))
    return isinstance(node, ast.AugAssign) and _marked(node.target)


def _refuses(node: ast.If) -> bool:
    """A check that ends the way of what is wrong."""
    ends = isinstance(node.body[-1], (ast.Raise, ast.Return, ast.Continue, ast.Break))
    return ends and not node.orelse and _CHECKS.search(ast.unparse(node.test)) is not None


def _orders(node: ast.stmt) -> bool:
    if isinstance(node, (ast.Return, ast.Raise, ast.FunctionDef, ast.ClassDef)):
        return False
    return _removable(node) or any(
        _called(inner) or isinstance(inner, ast.Attribute) and inner.attr in ("place", "flag") for inner in ast.walk(node))


def _only_syncs(node: ast.stmt) -> bool:
    if isinstance(node, ast.For):
        return all(map(_only_syncs, node.body))
    return isinstance(node, ast.Expr) and _called(node.value) in _SYNCS


def _independent(one: ast.stmt, other: ast.stmt) -> bool:
    if all(_only_syncs(node) for node in (one, other)) or ast.dump(one) == ast.dump(other):
        return False
    names = [{n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)} for node in (one, other)]
    loads = {n.id for n in ast.walk(other) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    return not names[0] & (loads | names[1])
