"""Which checks there are to break in the files that stand between the library and what somebody else wrote: each refusal, each
limit and each flag of an open call. ``mutations`` makes mutants of them.

A refusal is an ``if`` without ``else`` that raises a new error or gives the text, or the entry, of a problem; each part of its
``or`` is one. A limit is what is handed to a call by such a name, or says how much is read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

GUARDED = ("beneath.py", "trust.py", "marker.py", "catalog.py", "layout.py", "coordination/store.py", "payloads/dcpread.py",
           "durable.py", "ordered.py", "removal.py", "journal.py", "cli/survey.py", "payloads/whole.py", "reread.py")

_FLAGS = {"NOFOLLOW", "O_NONBLOCK", "_NONBLOCK", "O_NOCTTY", "DIRECTORY", "_BENEATH", "_NO_SYMLINKS", "_NO_XDEV"}
_TELLS = {"Problem", "Entry"}
_ASKED_IN_FULL = "_glance"
"""What it does not find plainly right it leaves to ``parse``, so its ``return None`` is a refusal."""


@dataclass(frozen=True)
class Guard:
    """``node``, in the function ``where``, becomes ``put``; ``of`` is what stands there for people."""

    where: str
    node: ast.expr
    put: str
    of: ast.expr


def guards(tree: ast.Module) -> Iterator[Guard]:
    for where, node in _places(tree, ""):
        if isinstance(node, ast.If) and _refuses(node, where):
            yield from _parts(where, node.test)
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.IfExp) and _tells(node.value):
            yield Guard(where, node.value, "None", node.value)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            for leaf in (node.left, node.right):
                if _name(leaf) in _FLAGS:
                    yield Guard(where, leaf, "0", node)
        elif isinstance(node, ast.Call):
            for number, given in enumerate(node.args):
                reads = isinstance(node.func, ast.Attribute) and node.func.attr == "read" and number == 1 and _name(
                    node.func.value) == "files"
                if reads or _name(given).endswith("_LIMIT"):
                    yield Guard(where, given, "(1 << 62)", node)
        elif isinstance(node, ast.Slice) and node.upper is not None and _name(node.upper).endswith("_LIMIT"):
            yield Guard(where, node.upper, "(1 << 62)", node.upper)


def _places(node: ast.AST, where: str) -> Iterator[tuple[str, ast.AST]]:
    for inner in ast.iter_child_nodes(node):
        yield where or "module", inner
        deeper = isinstance(inner, (ast.FunctionDef, ast.ClassDef))
        yield from _places(inner, f"{where}.{inner.name}".lstrip(".") if deeper else where)  # type: ignore[attr-defined]


def _refuses(node: ast.If, where: str) -> bool:
    last = node.body[-1]
    if node.orelse:
        return False
    if isinstance(last, ast.Raise):
        return isinstance(last.exc, ast.Call)
    return isinstance(last, ast.Return) and (_is_problem(last.value) or where == _ASKED_IN_FULL and _is_none(last.value))


def _is_problem(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return _name(value.func) in _TELLS
    if isinstance(value, ast.Constant):
        return isinstance(value.value, str) and " " in value.value
    return isinstance(value, ast.JoinedStr)


def _is_none(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _tells(value: ast.IfExp) -> bool:
    arms = value.body, value.orelse
    return any(map(_is_none, arms)) and any(map(_is_problem, arms))


def _parts(where: str, test: ast.expr) -> Iterator[Guard]:
    """The whole, or each part of an ``or``; of ``not (a and b)``, each part of the ``and``."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
        for part in test.values:
            yield Guard(where, part, "False", test)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) and isinstance(test.operand, ast.BoolOp) and isinstance(
            test.operand.op, ast.And):
        for part in test.operand.values:
            yield Guard(where, part, "True", test)
    else:
        yield Guard(where, test, "False", test)


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Call) and _name(node.func) == "getattr" and len(node.args) == 3:
        return str(node.args[1].value) if isinstance(node.args[1], ast.Constant) else ""
    if isinstance(node, ast.IfExp):
        return _name(node.body)
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
