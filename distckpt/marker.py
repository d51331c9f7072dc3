"""commit.json: build, seal, parse, check. Pure: no I/O.

Three lines, one JSON object. The first line is the identity, so that ordering a thousand checkpoints reads a
thousand heads; the second is everything else, the manifest of files included; the last is the SHA-256 of all bytes
before it, so that a torn marker is no marker. No absolute path stands in it: a checkpoint may be moved or copied. Where
there is a key (see ``trust``), a line before the last is the HMAC of the first two.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from distckpt.errors import ConfigError, MarkerError
from distckpt.layout import ATTEMPT, member_path_problem, name_problem, run_problem
from distckpt.trust import KEY_VARIABLE, sign

FORMAT = 1
HEAD_LIMIT = 4096
SIZE_LIMIT = 256 << 20
LINEAGE_LIMIT = 512
FILES_LIMIT = 1_000_000
META_LIMIT = 16 << 20
RANK_LIMIT = 1 << 20
_NUMBER_LIMIT = 1 << 63

_START = b'{"head":'
_BODY = b',\n"body":'
_MAC = b',\n"mac":'
_SEAL = b',\n"seal":'
_SURROGATES = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class FileEntry(NamedTuple):
    """One file of a checkpoint. ``digest`` is "xxh3-128:<hex>" or None; ``rank`` is who wrote and fsynced it. A tuple in the
    order of the manifest, which is made of them as they are: rank 0 has one for every file of all ranks."""

    path: str
    size: int
    digest: str | None
    rank: int


@dataclass(frozen=True)
class Head:
    """Who a checkpoint is, and how new: ``seq`` counts the commits of a root (0: adopted, older than every commit).
    ``part`` ``of`` several: one storage domain's share of it."""

    seq: int
    step: int
    attempt: str
    name: str
    series: str
    run: str
    generation: int
    part: int = 0
    of: int = 1

    @property
    def share(self) -> str:
        """For people: which part of a checkpoint on several nodes this is."""
        return (f"share {self.part + 1} of {self.of} of a checkpoint on {self.of} nodes' own disks: only a job on all of them, "
                "with storage='node-local', can use it")


@dataclass(frozen=True)
class Marker:
    """All of commit.json. ``signed``: it carried a signature when it was read; whether the right one, only a key tells.
    ``domains``: (host, ranks) of every storage domain, where there are several; this marker's own is ``head.part``, and
    ``files`` are those of its ranks."""

    head: Head
    world: int
    files: tuple[FileEntry, ...]
    branch: str
    parent: str | None = None
    lineage: tuple[tuple[str, int], ...] = ()
    time: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    payload: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str | None = None
    retention: str | None = None
    host: str = ""
    domains: tuple[tuple[str, tuple[int, ...]], ...] = ()
    signed: bool = field(default=False, compare=False)

    @cached_property
    def size(self) -> int:
        """Bytes of all payload files."""
        return sum(entry.size for entry in self.files)


def check_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """``metrics`` as floats; anything that is one number (a 0-dim tensor too) is taken, NaN included."""
    found: dict[str, float] = {}
    for name, value in dict(metrics or {}).items():
        if hasattr(value, "item"):
            value = value.item()
        if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"metrics must map names to numbers; {name!r} is {type(value).__name__}")
        if not name.isprintable():  # a lone surrogate, above all, would only fail when the marker is written
            raise ConfigError(f"the metric {name!r} must have a printable name")
        found[name] = float(value)
    return found


def check_meta(meta: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of ``meta`` as JSON gives it back."""
    try:
        text = _dumps(dict(meta or {}))  # as the marker will write it: UTF-8, so no lone surrogates
        copy = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"meta must be a dict of JSON values: {error}") from error
    if len(text) > META_LIMIT:
        raise ConfigError(f"meta takes {len(text)} bytes, more than {META_LIMIT}: save it as a file of the checkpoint")
    assert isinstance(copy, dict)
    return copy


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode("utf-8")


def _load(data: bytes) -> Any:
    """JSON as ``_dumps`` writes it, so that recovery can write again what it read; ValueError for the numbers and the halves of
    characters that Python's reader takes beyond that."""
    value = json.loads(data, parse_constant=_refuse, parse_float=_finite)
    if _SURROGATES.search(data):
        _dumps(value)
    return value


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    return float(text) if math.isfinite(float(text)) else _refuse(text)


def _number_out(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def build(marker: Marker, key: bytes | None = None) -> bytes:
    """The bytes of commit.json, sealed, and signed with ``key``. ConfigError for what ``parse`` would not take back."""
    head = marker.head
    problem = name_problem(head.name, head.series) or run_problem(head.run)
    if problem or len(marker.files) > FILES_LIMIT:
        raise ConfigError(f"{head.name} cannot be committed: {problem or f'it has more than {FILES_LIMIT} files'}")
    first = _dumps({"format": FORMAT, "seq": head.seq, "step": head.step, "attempt": head.attempt, "name": head.name,
                    "series": head.series, "run": head.run, "generation": head.generation,
                    **({"part": [head.part, head.of]} if head.of > 1 else {})})
    second = _dumps({
        "world": marker.world, "branch": marker.branch, "parent": marker.parent,
        "lineage": [list(pair) for pair in marker.lineage[:LINEAGE_LIMIT]],
        "time": marker.time, "host": marker.host, "fingerprint": marker.fingerprint, "retention": marker.retention,
        "metrics": {name: _number_out(value) for name, value in marker.metrics.items()},
        "meta": dict(marker.meta), "payload": dict(marker.payload),
        **({"domains": [[host, list(ranks)] for host, ranks in marker.domains]} if marker.domains else {}),
        "files": marker.files,
    })
    data = _START + first + _BODY + second
    if key is not None:
        data += _MAC + _dumps(sign(key, data))
    data += _SEAL + _dumps("sha256:" + hashlib.sha256(data).hexdigest()) + b"}\n"
    if len(data) >= SIZE_LIMIT:
        raise ConfigError(f"{head.name} cannot be committed: its marker takes {len(data)} bytes, more than {SIZE_LIMIT}")
    return data


def seal_of(data: bytes) -> str:
    """The seal that stands at the end of ``data``."""
    _, _, tail = data.rpartition(_SEAL)
    return tail.decode("utf-8", "replace").strip().rstrip("}").strip('"')


def _is_sealed(data: bytes) -> bool:
    """Whether ``data`` ends, to the last byte, with the seal of all that stands before it."""
    sealed, mark, tail = data.rpartition(_SEAL)
    return bool(mark) and tail == _dumps("sha256:" + hashlib.sha256(sealed).hexdigest()) + b"}\n"


def _signature_problem(data: bytes, key: bytes) -> str | None:
    """Why ``data``, which is sealed, does not come from who holds ``key``. The signature must be all that stands between the
    body and the seal: a second body there would win over the signed one."""
    signed, mark, tail = data.rpartition(_SEAL)[0].rpartition(_MAC)
    if not mark:
        return f"it is not signed, and {KEY_VARIABLE} is set: only signed ones count"
    if not hmac.compare_digest(tail, _dumps(sign(key, signed))):
        return f"its signature is not by the key of {KEY_VARIABLE} (forged, altered, or signed with another key)"
    return None


def _bad(why: str, path: str) -> MarkerError:
    return MarkerError(f"{path} is not a usable marker: {why}", files={path: why})


def parse_head(data: bytes, path: str = "commit.json") -> Head:
    """The identity at the start of a marker, from its first ``HEAD_LIMIT`` bytes. It orders; it never counts (S15)."""
    if not data.startswith(_START):
        raise _bad("it does not begin with a head (torn, or not written by distckpt)", path)
    text = data[:HEAD_LIMIT].decode("utf-8", "replace")
    try:
        value, _ = json.JSONDecoder().raw_decode(text, len(_START))
    except (ValueError, RecursionError) as error:
        raise _bad(f"its head is not JSON ({error})", path) from error
    return _head(value, path)


def _head(value: Any, path: str) -> Head:
    if not isinstance(value, dict):
        raise _bad("its head is not an object", path)
    number = value.get("format")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise _bad(f"its format is {number!r}", path)
    if number > FORMAT:
        raise _bad(f"format {number} is newer than this version reads ({FORMAT}); upgrade distckpt", path)
    for name, kind in (("seq", int), ("step", int), ("generation", int), ("attempt", str), ("name", str),
                       ("series", str), ("run", str)):
        if not isinstance(value.get(name), kind) or isinstance(value[name], bool):
            raise _bad(f"its {name} is {value.get(name)!r}", path)
    numbers = value["seq"], value["step"], value["generation"]
    if not all(0 <= number < _NUMBER_LIMIT for number in numbers) or not ATTEMPT.fullmatch(value["attempt"]):
        raise _bad("its identity has a number out of range or a malformed attempt", path)
    problem = name_problem(value["name"], value["series"]) or run_problem(value["run"])
    if problem:
        raise _bad(problem, path)
    part, of = _part(value.get("part", [0, 1]), path)
    return Head(value["seq"], value["step"], value["attempt"], value["name"], value["series"], value["run"],
                value["generation"], part, of)


def _part(value: Any, path: str) -> tuple[int, int]:
    try:
        part, of = value
        return _whole(part, _whole(of, RANK_LIMIT)), of
    except (TypeError, ValueError) as error:
        raise _bad(f"its part is {str(value)[:40]}", path) from error


def parse(data: bytes, path: str = "commit.json", key: bytes | None = None) -> Marker:
    """The whole marker; MarkerError unless the seal, the format and every manifest entry are right, and the signature where
    there is a ``key``."""
    if len(data) >= SIZE_LIMIT:
        raise _bad(f"it is larger than {SIZE_LIMIT} bytes", path)
    if not data.startswith(_START):
        raise _bad("it does not begin with a head (torn, or not written by distckpt)", path)
    if _SEAL not in data:
        parse_head(data, path)
        raise _bad("it ends before its seal (truncated)", path)
    try:
        value = _load(data)
    except (ValueError, RecursionError) as error:
        raise _bad(f"it is not JSON ({error})", path) from error
    head = _head(value.get("head") if isinstance(value, dict) else None, path)
    if not _is_sealed(data):
        raise _bad("its seal does not match its bytes (torn or altered)", path)
    problem = _signature_problem(data, key) if key is not None else None
    if problem:
        raise _bad(problem, path)
    body = value.get("body")
    if not isinstance(body, dict):
        raise _bad("it has no body", path)
    try:
        return Marker(
            head=head, world=_whole(body["world"], RANK_LIMIT), files=_files(body["files"], path), branch=_text(body["branch"]),
            parent=_text_or_none(body.get("parent")), lineage=_lineage(body.get("lineage", [])),
            time=float(body.get("time", 0)), host=_text(body.get("host", "")), fingerprint=_text_or_none(body.get("fingerprint")),
            retention=_text_or_none(body.get("retention")), metrics=_metrics(body["metrics"]), meta=_object(body["meta"]),
            payload=_object(body["payload"]), domains=_domains(body.get("domains", []), head),
            signed=_MAC in data.rpartition(_SEAL)[0])
    except _MALFORMED as error:
        raise _bad(f"its body is malformed ({type(error).__name__}: {error})", path) from error


_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, OverflowError)  # the last: an int that no float holds


def _whole(value: Any, limit: int = _NUMBER_LIMIT) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
        raise ValueError(f"{str(value)[:40]} is not a whole number below {limit}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} is not text")
    return value


def _text_or_none(value: Any) -> str | None:
    return None if value is None else _text(value)


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.80} is not an object")
    return value


def _lineage(pairs: Any) -> tuple[tuple[str, int], ...]:
    if len(pairs) > LINEAGE_LIMIT:
        raise ValueError(f"its lineage has {len(pairs)} ancestors, more than {LINEAGE_LIMIT}")
    return tuple((_text(branch), _whole(last)) for branch, last in pairs)


def _domains(values: Any, head: Head) -> tuple[tuple[str, tuple[int, ...]], ...]:
    found = tuple((_text(host), tuple(_whole(rank, RANK_LIMIT) for rank in ranks)) for host, ranks in values)
    if len(found) != (head.of if head.of > 1 else 0):
        raise ValueError(f"it names {len(found)} domains and is a share of {head.of}")
    return found


def _metrics(values: Any) -> dict[str, float]:
    return {name: _NOT_FINITE[v] if isinstance(v, str) else float(v) for name, v in values.items()}


def _files(rows: Any, path: str) -> tuple[FileEntry, ...]:
    entries = []
    seen = set()
    if len(rows) > FILES_LIMIT:
        raise _bad(f"its manifest has {len(rows)} files, more than {FILES_LIMIT}", path)
    for name, size, digest, rank in rows:
        problem = member_path_problem(name)
        if problem:
            raise _bad(f"its manifest names {name!r}: {problem}", path)
        if name in seen:
            raise _bad(f"its manifest names {name!r} twice", path)
        if digest is not None and not isinstance(digest, str):
            raise _bad(f"the digest of {name!r} is {digest!r}", path)
        seen.add(name)
        entries.append(FileEntry(name, _whole(size), digest, _whole(rank, RANK_LIMIT)))
    return tuple(entries)


def renamed(marker: Marker, **head: Any) -> Marker:
    """``marker`` with parts of its head replaced."""
    return replace(marker, head=replace(marker.head, **head))


@dataclass(frozen=True)
class Glance:
    """What a listing shows of a marker: the manifest is checked and counted, not kept."""

    head: Head
    world: int
    count: int
    size: int
    time: float
    metrics: Mapping[str, float]


def glance(data: bytes, path: str = "commit.json", key: bytes | None = None) -> Glance:
    """``parse`` for a listing: seven times as fast, for there is no object per file; MarkerError where it would raise.

    Whatever is not plainly right is left to ``parse``, so that both refuse the same markers for the same reasons.
    """
    try:
        found = _glance(data, path, key)
    except (*_MALFORMED, RecursionError):
        found = None
    if found is not None:
        return found
    whole = parse(data, path, key)
    return Glance(whole.head, whole.world, len(whole.files), whole.size, whole.time, whole.metrics)


def _glance(data: bytes, path: str, key: bytes | None) -> Glance | None:
    if len(data) >= SIZE_LIMIT or not data.startswith(_START) or not _is_sealed(data):
        return None
    if key is not None and _signature_problem(data, key):
        return None
    value = _load(data)
    body, rows = value["body"], value["body"]["files"]
    if len(rows) > FILES_LIMIT or len({row[0] for row in rows}) != len(rows):
        return None
    for name, size, digest, rank in rows:
        if not (type(size) is int and type(rank) is int and 0 <= size < _NUMBER_LIMIT and 0 <= rank < RANK_LIMIT
                and (digest is None or type(digest) is str) and not member_path_problem(name)):
            return None
    for kept, part in ((_object, "meta"), (_object, "payload"), (_lineage, "lineage"), (_text, "branch"), (_text, "host"),
                       (_text_or_none, "parent"), (_text_or_none, "fingerprint"), (_text_or_none, "retention")):
        kept(body[part])
    head = _head(value["head"], path)
    _domains(body.get("domains", []), head)
    return Glance(head, _whole(body["world"], RANK_LIMIT), len(rows), sum([row[1] for row in rows]),
                  float(body["time"]), _metrics(body["metrics"]))
