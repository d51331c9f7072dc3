"""What a fuzzer feeds: each target takes any bytes, and fails by an exception that the code under test does not declare, or
by an AssertionError. ``tests/unit/test_fuzz.py`` runs them with hypothesis, ``scripts/proof/fuzz.py`` with atheris.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from distckpt import catalog, journal, leases, marker, ownership, requests, selection
from distckpt.coordination.gate import Act, Gate, Gatekeeper, answer_key, news_key
from distckpt.coordination.listener import Caller, Listener, control_key
from distckpt.coordination.rounds import Rounds, require_same
from distckpt.coordination.store import Client, decode
from distckpt.errors import ConfigError, CoordinationError, DistckptError, MarkerError, from_wire, to_wire
from distckpt.layout import MARKER, Layout, Naming, check_member_path, member_path_problem, rank_name, series_of
from distckpt.payloads.dcpread import _Unpickler
from distckpt.runtime import Identity
from distckpt.testing.clock import VirtualRuntime
from distckpt.testing.crashfs import CrashFiles, write_payload
from tests.support import ROOT, STEP, attempt_id, make_marker

KEY = b"k" * 32
_WHOLE = make_marker(7, 3, payload={"model.pt": b"m" * 10, "sub/optim.rank-00000-of-00002.pt": b""}, world=2,
                     parent=attempt_id(2), lineage=(("b1", 2), ("b0", 1)), time=12.5, metrics={"loss": 0.25}, host="n",
                     meta={"note": "grün", "n": [1]}, fingerprint="f", retention="last=3")
PLAIN, SIGNED = marker.build(_WHOLE), marker.build(_WHOLE, KEY)
Target = Callable[[bytes], None]


class Cursor:
    """Small numbers and pieces out of fuzz bytes; zeros when they run out."""

    def __init__(self, data: bytes) -> None:
        self._in = io.BytesIO(data)

    def number(self, below: int) -> int:
        return int.from_bytes(self._in.read(4), "big") % below

    def piece(self, longest: int) -> bytes:
        return self._in.read(self.number(longest + 1))

    def rest(self) -> bytes:
        return self._in.read()


def read(data: bytes, key: bytes | None = None) -> marker.Marker | None:
    """What every reader of a marker makes of ``data``: they must agree, and what they take must be harmless."""
    try:
        whole = marker.parse(data, key=key)
    except MarkerError:
        whole = None
    try:
        seen = marker.glance(data, key=key)
    except MarkerError:
        seen = None
    assert (whole is None) == (seen is None), "parse and glance disagree"
    try:
        head = marker.parse_head(data[:marker.HEAD_LIMIT])
    except MarkerError:
        head = None
    if whole is None or seen is None:
        return None
    assert head == whole.head == seen.head
    assert (seen.count, seen.size, seen.world) == (len(whole.files), whole.size, whole.world)
    assert "/" not in head.name and member_path_problem(head.name) is None and head.run.isprintable()
    assert all(member_path_problem(e.path) is None and 0 <= e.size < 1 << 63 for e in whole.files)
    assert len({e.path for e in whole.files}) == len(whole.files) and whole.world < 1 << 20
    again = marker.build(whole)  # what is taken can be written, and reads the same
    assert repr(marker.parse(again)) == repr(marker.renamed(marker.parse(again))) and marker.parse(again).files == whole.files
    return whole


def resealed(text: bytes) -> bytes:
    return text + b',\n"seal":"sha256:' + hashlib.sha256(text).hexdigest().encode() + b'"}\n'


def marker_bytes(data: bytes) -> None:
    """Bytes from nowhere, bare and under a right seal."""
    read(data)
    read(resealed(b'{"head":' + data))
    assert read(data, KEY) is None or data == SIGNED
    assert read(resealed(b'{"head":' + data), KEY) is None


def marker_edited(data: bytes) -> None:
    """A true marker with pieces replaced: never accepted with other bytes, nor, signed, with another seal."""
    cursor = Cursor(data)
    for whole, key in ((PLAIN, None), (SIGNED, KEY)):
        edited, sealed = bytearray(whole), bytearray(whole.rpartition(b',\n"seal":')[0])
        for _ in range(1 + cursor.number(3)):
            at, size, piece = cursor.number(len(whole)), cursor.number(12), cursor.piece(24)
            edited[at:at + size] = piece
            sealed[at:at + size] = piece
        found = read(bytes(edited), key)
        assert found is None or bytes(edited) == whole, "an edited marker was accepted"
        found = read(resealed(bytes(sealed)), key)
        assert key is None or found is None or resealed(bytes(sealed)) == whole, "an edited marker passed for signed"


def marker_values(data: bytes) -> None:
    """A true marker with one value of its JSON replaced, under a right seal."""
    cursor = Cursor(data)
    value: dict[str, Any] = json.loads(PLAIN)
    part = value["head"] if cursor.number(2) else value["body"]
    name, depth = sorted(part)[cursor.number(len(part))], cursor.number(3)
    target = part
    while depth and isinstance(target[name], (dict, list)) and target[name]:
        target, depth = target[name], depth - 1
        keys: list[Any] = sorted(target) if isinstance(target, dict) else list(range(len(target)))
        name = keys[cursor.number(len(keys))]
    try:
        target[name] = json.loads(cursor.rest())
        head, body = json.dumps(value["head"]), json.dumps(value["body"])
    except (ValueError, RecursionError):
        return
    read(resealed(b'{"head":' + head.encode() + b',\n"body":' + body.encode()))


def names(data: bytes) -> None:
    """Names of directories and files, and templates."""
    text = data.decode("utf-8", "surrogateescape")
    for naming in (STEP, Naming.parse("{step:08d}"), Naming.parse("run-{step}-of-7")):
        step = naming.step_of(text)
        if step is not None:
            assert naming.step_of(naming.format(step)) == step
        parsed = series_of(naming, text)
        if parsed is not None:
            assert naming.of_series(parsed[0]).step_of(text) == parsed[1]
    try:
        made = Naming.parse(text)
    except ConfigError:
        made = None
    if made is not None:
        assert made.step_of(made.format(5)) == 5 and "/" not in made.format(5) and not made.format(5).startswith(".")
    problem = member_path_problem(text)
    try:
        check_member_path(text)
        assert problem is None and not text.startswith("/") and ".." not in text.split("/") and len(text) <= 1024
        text.encode()
        assert member_path_problem(rank_name(text, 3, 16)) or rank_name(text, 3, 16) != rank_name(text, 4, 16)
    except ConfigError:
        assert problem is not None


def messages(data: bytes) -> None:
    """One value of the control plane, as a report, an act, an error and an identity."""
    try:
        value = decode(data)
    except CoordinationError:
        return
    with suppress(CoordinationError):
        assert isinstance(Act.from_json(value).data, dict)
    told = from_wire(value)
    assert isinstance(told, DistckptError) and str(told) == told.message
    json.dumps(to_wire(from_wire({"type": "CoordinationError", "message": told.message})))
    owner = Identity.of_record(value)
    assert owner is None or isinstance(hash(owner), int)


class _Pulse:
    """A pulse that never beats: nobody is waited for here."""

    lost = None
    running = True
    current_phase = "fuzz"
    identities: dict[int, Identity] = {}

    def enter(self, call: int, op: str, step: int | None) -> None: ...
    def leave(self, client: Client) -> None: ...
    def watch(self, watch: Any) -> None: ...


def _client(**keys: bytes) -> Client:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    for key, data in keys.items():
        store.set("t/" + key, data)
    return Client(store, "t/")


def rounds(data: bytes) -> None:
    """The report of another rank, as rank 0 gets it; the verdict, as another rank gets it."""
    pulse: Any = _Pulse()
    for rank, keys in ((0, {"call/1/1/report/1": data}), (1, {"call/1/1/report/0": b"{}", "call/1/1/verdict": data})):
        one = Rounds(_client(**keys), rank, 2, VirtualRuntime(), pulse)
        try:
            with one.call("save", 1) as call:
                verdict = call.round({"a": 1}, lambda reports: require_same(reports, {"a": "a"}, "save") or {"b": 2}, 1.0)
            assert isinstance(verdict, dict)
        except DistckptError:
            continue


def listener(data: bytes) -> None:
    """A message to a listener: whatever it is, the one after it is answered."""
    runtime, answered = VirtualRuntime(), []
    client = _client(**{control_key(0, 0): data, control_key(0, 1): b'{"op":"after"}', control_key(0, 2): b'{"op":"bye"}'})
    one, gate = Listener(lambda: client, 0, runtime), Gate(runtime)
    one.handlers.update(act=lambda c, m: gate.act(int(m["at"]), Act.from_json(m["act"])), cancel=lambda c, m: gate.cancel(),
                        after=lambda c, m: answered.append(m))
    one._run()
    try:
        bye = decode(data).get("op") == "bye"
    except CoordinationError:
        bye = False
    assert bye or answered, "the listener went deaf"


def gatekeeper(data: bytes) -> None:
    """News from any rank, and any rank's answer to a freeze: the gatekeeper goes on, and no gate stays closed."""
    cursor = Cursor(data)
    answer = cursor.piece(200)
    runtime = VirtualRuntime()
    client = _client(**{news_key(0): cursor.rest(), news_key(1): b'{"kind":"save","reason":"r"}', news_key(2): b'{"kind":"bye"}',
                        answer_key(0, 0): answer, answer_key(1, 0): b'{"ordinal":1,"step":1,"closing":false}'})
    keeper = Gatekeeper(lambda: client, Caller(runtime), 1, runtime)
    keeper.ending = True  # a freeze without an answer is not tried again
    keeper._run()
    told = [client.get([key])[0]["op"] for number in range(9) if client.has(key := control_key(0, number))]
    assert told[-1:] != ["freeze"] and told.count("freeze") <= told.count("act") + told.count("cancel"), told


def records(data: bytes) -> None:
    """What else stands in ``.distckpt``: anybody's leases, requests, journals, rejections, owners."""
    cursor = Cursor(data)
    layout, disk = Layout.at(ROOT), CrashFiles(ROOT + "/.distckpt")
    name = cursor.piece(12).decode("utf-8", "ignore").replace("/", "").replace("\0", "").strip(".") or "x"
    body = cursor.rest()
    attempt = attempt_id(1)
    for path in {layout.home("owner", f"{name}.json"), layout.owner(4), layout.home("staging", name),
                 layout.leases(attempt, "a.json"), layout.rejected(attempt), layout.home("requests", "r.json"), layout.journal(2),
                 layout.home("journal", f"{name}.jsonl"), layout.rollback, layout.record, layout.pointer}:
        write_payload(disk, path, body, durable=False)
    runtime = VirtualRuntime()
    for act in (lambda: leases.Watch(disk, layout, runtime).holders(attempt), lambda: catalog.rejections(disk, layout),
                lambda: selection.abandoned(disk, layout), lambda: journal.ever_committed(disk, layout),
                lambda: catalog.read_record(disk, layout), lambda: ownership.owner_now(disk, layout, runtime),
                lambda: ownership.live_owner(disk, layout, runtime, 4), lambda: catalog.read_pointer(disk, layout),
                lambda: requests.take(disk, layout), lambda: catalog.scan(disk, layout, STEP)):
        try:
            act()
        except MarkerError:
            continue


def directory(data: bytes) -> None:
    """A checkpoint's directory of any name with any marker, as everybody sees it."""
    cursor = Cursor(data)
    disk, layout = CrashFiles(ROOT), Layout.at(ROOT)
    write_payload(disk, layout.final(f"step-{cursor.number(20)}") + "/" + MARKER, cursor.rest(), durable=False)
    for entry in catalog.scan(disk, layout, STEP):
        assert not entry.committed or entry.head is not None and entry.head.name == entry.name


def metadata(data: bytes) -> None:
    """A pickle in the place of DCP's metadata: any error, and nothing that is not metadata."""
    try:
        _Unpickler(io.BytesIO(data)).load()
    except Exception:  # a pickle may raise anything; what counts is what it does, and tests/unit/test_unpickling.py tells that
        return


TARGETS: dict[str, Target] = {f.__name__: f for f in (
    marker_bytes, marker_edited, marker_values, names, messages, rounds, listener, gatekeeper, records, directory, metadata)}
SEEDS: dict[str, list[bytes]] = {
    "marker_bytes": [PLAIN, SIGNED, PLAIN.partition(b'{"head":')[2].rpartition(b',\n"seal":')[0]],
    "marker_values": [bytes([0, 0, 0, part, 0, 0, 0, index, 0, 0, 0, depth] + [0, 0, 0, 0] * depth) + text
                      for part in (0, 1) for index in range(12) for depth in (0, 1)
                      for text in (b"1" + b"0" * 400, b'"../x"', b"[[]]", b"{}", b"null", b"-1", b"1e999", b'"\\ud800"')],
    "names": [b"step-7", b"00000007", b"run-3-of-7", b"step-7-rolling", b"a/../b", b"{step}", "step-²".encode()],
    "messages": [json.dumps(to_wire(CoordinationError("x"))).encode(), b'{"kind":"save","data":{}}',
                 b'{"type":"SaveError","message":"m","fields":{"failures":{"0":{}}}}'],
    "rounds": [b'{"a":1,"op":"save"}', b'{"filled":true}', b'{"refused":{"type":"ConfigError","message":"m"},"op":"save"}',
               b'{"error":{}}', b'{"by":1}', b"\x80\x04."],
    "listener": [b'{"op":"act","at":1,"act":{"kind":"save"}}', b'{"op":"stacks"}', b'{"op":"bye"}', b'{"op":[]}', b"\x80\x04."],
    "gatekeeper": [b"\0\0\0\x26" + b'{"ordinal":1,"step":1,"closing":false}' + b'{"kind":"stop"}',
                   b"\0\0\0\0" + b'{"kind":"failed","data":{"number":[]}}'],
    "records": [b"\0\0\0\1" + b"5" + b'{"identity":{"host":"h"},"ttl":"x","abandoned":[[1]],"time":"t"}',
                b"\0\0\0\2" + "²".encode() + b'{"format":1,"run":"r","naming":"step-{step}"}', b"\0\0\0\3007" + b"[" * 3000],
    "directory": [b"\0\0\0\7" + PLAIN],
}


def one(data: bytes) -> None:
    """One input for any target: its first byte says which."""
    if data:
        list(TARGETS.values())[data[0] % len(TARGETS)](data[1:])


def all_seeds() -> list[bytes]:
    """The seeds of all targets, as inputs of ``one``."""
    return [bytes([index]) + seed for index, name in enumerate(TARGETS) for seed in SEEDS.get(name, [b""])]
