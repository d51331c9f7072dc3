"""commit.json: a marker is whole, or it is none."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distckpt import catalog, marker
from distckpt.errors import ConfigError, MarkerError
from distckpt.layout import MARKER, Layout, Naming
from distckpt.marker import FileEntry, Head, Marker
from distckpt.testing.crashfs import CrashFiles
from tests.support import ROOT, attempt_id, crash_disk, make_checkpoint, make_marker

FILES = {"model.pt": b"m" * 10, "sub/optim.rank-00000-of-00002.pt": b""}


def whole() -> Marker:
    return make_marker(7, 3, payload=FILES, world=2, parent=attempt_id(2), lineage=(("b1", 2), ("b0", 1)), time=12.5,
                       metrics={"loss": 0.25, "worst": math.inf, "best": -math.inf}, host="node-1",
                       meta={"note": "grün \n", "n": [1, None]}, fingerprint="f", retention="last=3")


def resealed(data: bytes, **changes: Any) -> bytes:
    """The bytes with parts of head or body changed, under a right seal: what a newer or hostile writer could leave."""
    value = json.loads(data)
    for key, new in changes.items():
        part = "head" if key in value["head"] else "body"
        value[part][key] = new
    text = b'{"head":' + json.dumps(value["head"]).encode() + b',\n"body":' + json.dumps(value["body"]).encode()
    return text + b',\n"seal":"sha256:' + hashlib.sha256(text).hexdigest().encode() + b'"}\n'


READERS = pytest.mark.parametrize("read", [marker.parse, marker.glance], ids=["parse", "glance"])


def test_a_marker_reads_back_as_it_was_built() -> None:
    data = marker.build(whole())
    assert marker.parse(data) == whole() and marker.parse_head(data) == whole().head
    assert data.count(b"\n") == 3 and json.loads(data)["seal"] == marker.seal_of(data)
    assert json.loads(data)["body"]["files"] == [[e.path, e.size, e.digest, e.rank] for e in whole().files]


def test_a_metric_that_is_not_a_number_survives() -> None:
    found = marker.parse(marker.build(make_marker(1, metrics={"loss": math.nan})))
    assert math.isnan(found.metrics["loss"])


def test_no_absolute_path_and_no_host_path_stands_in_a_marker() -> None:
    assert b"/disk" not in marker.build(whole())


@READERS
def test_no_truncated_marker_is_accepted(read: Any) -> None:
    data = marker.build(whole())
    for size in range(len(data)):
        with pytest.raises(MarkerError):
            read(data[:size])
    with pytest.raises(MarkerError, match="truncated"):  # rather than what JSON makes of it
        read(data[:-100])


@READERS
def test_no_marker_with_a_flipped_bit_is_accepted(read: Any) -> None:
    data = marker.build(make_marker(7, 3, payload=FILES))
    for position in range(len(data)):
        for bit in range(8):
            broken = bytearray(data)
            broken[position] ^= 1 << bit
            with pytest.raises(MarkerError):
                read(bytes(broken))


@READERS
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_marker_with_torn_pages_is_accepted(read: Any, data: st.DataObject) -> None:
    whole_data = marker.build(whole())
    start = data.draw(st.integers(0, len(whole_data) - 1))
    size = data.draw(st.integers(1, len(whole_data)))
    filler = data.draw(st.sampled_from([b"\0", b" ", b"\n", b"\xff", b""]))
    torn = whole_data[:start] + filler * size + whole_data[start + size:]
    if torn != whole_data:
        with pytest.raises(MarkerError):
            read(torn)


@READERS
@pytest.mark.parametrize("data", [
    b"", b"{}", b"null", b"not json", b"\0" * 500, b'{"head":', b'{"head":{}}', b'{"head":' + b"[" * 100_000,
    b'{"head":7,\n"seal":""}',
    b'\xef\xbb\xbf{"head":{}}', b'{"head":{"format":1},\n"body":{},\n"seal":"sha256:00"}\n'])
def test_what_is_not_a_marker_is_refused(read: Any, data: bytes) -> None:
    with pytest.raises(MarkerError):
        read(data)
    with pytest.raises(MarkerError):
        marker.parse_head(data)


@READERS
def test_a_newer_format_says_upgrade(read: Any) -> None:
    data = resealed(marker.build(whole()), format=2)
    with pytest.raises(MarkerError, match="format 2 is newer.*upgrade"):
        read(data)
    with pytest.raises(MarkerError, match="format 2 is newer.*upgrade"):
        marker.parse_head(data)


@READERS
@pytest.mark.parametrize("name", ["../up", "/etc/passwd", "a\nb", "a/../../b", "", "commit.json", "a//b", "a\u0000b", 7, None,
                                  ["a"]])
def test_a_manifest_reaches_only_into_its_own_directory(read: Any, name: object) -> None:
    data = resealed(marker.build(whole()), files=[["ok.pt", 1, None, 0], [name, 1, None, 0]])
    with pytest.raises(MarkerError):
        read(data)


@READERS
@pytest.mark.parametrize("rows", [
    [["a", 1, None, 0], ["a", 1, None, 1]], [["a", -1, None, 0]], [["a", 1.5, None, 0]], [["a", True, None, 0]],
    [["a", 1, 5, 0]], [["a", 1, None, -1]], [["a", 1, None, True]],
    [["a", 1, None, 1.5]], [["a", 1, None]], [["a"]], "files", 5, None, [5]])
def test_a_manifest_row_is_path_size_digest_rank(read: Any, rows: object) -> None:
    with pytest.raises(MarkerError):
        read(resealed(marker.build(whole()), files=rows))


@READERS
@pytest.mark.parametrize("change", [
    {"seq": -1}, {"seq": "1"}, {"seq": True}, {"step": None}, {"step": -5}, {"generation": -1}, {"attempt": "../../x"},
    {"attempt": "ABCDEF0123456789"}, {"name": 5}, {"format": 0}, {"format": "1"}, {"format": True}])
def test_a_head_with_a_wrong_identity_is_refused(read: Any, change: dict[str, Any]) -> None:
    data = resealed(marker.build(whole()), **change)
    with pytest.raises(MarkerError):
        read(data)
    with pytest.raises(MarkerError):
        marker.parse_head(data)


@READERS
@pytest.mark.parametrize("change", [{"world": -1}, {"world": "2"}, {"metrics": [1]}, {"metrics": {"a": "x"}}, {"lineage": [[1]]},
                                    {"meta": 5}, {"lineage": 5}, {"time": "noon"}, {"branch": 5}, {"host": []},
                                    {"parent": {}}, {"fingerprint": 5}, {"lineage": [[5, 1]]}, {"payload": []}])
def test_a_malformed_body_is_refused(read: Any, change: dict[str, Any]) -> None:
    with pytest.raises(MarkerError):
        read(resealed(marker.build(whole()), **change))


@READERS
def test_a_marker_has_a_body(read: Any) -> None:
    text = marker.build(whole()).partition(b',\n"body":')[0] + b',\n"body":[]'
    with pytest.raises(MarkerError, match="it has no body"):
        read(text + b',\n"seal":"sha256:' + hashlib.sha256(text).hexdigest().encode() + b'"}\n')


@READERS
def test_what_counts_ranks_and_ancestors_is_a_small_number_wherever_it_stands(read: Any) -> None:
    two = replace(whole(), head=replace(whole().head, part=1, of=2), domains=(("a", (0,)), ("b", (1,))))
    data = marker.build(two)
    top, ancestors = (1 << 20) - 1, [["b", 1]] * 512
    read(resealed(data, files=[["a", 1, None, top]], world=top, lineage=ancestors, domains=[["a", [0]], ["b", [top]]]))
    for change, why in (({"files": [["a", 1, None, top + 1]]}, "below 1048576"), ({"world": top + 1}, "below 1048576"),
                        ({"domains": [["a", [0]], ["b", [top + 1]]]}, "below 1048576"), ({"part": [0, top + 1]}, "its part is"),
                        ({"part": [2, 2]}, "its part is"), ({"lineage": [*ancestors, ["b", 1]]}, "513 ancestors, more than 512"),
                        ({"domains": [["a", [0, 1]]]}, "names 1 domains")):
        with pytest.raises(MarkerError, match=why):
            read(resealed(data, **change))
    many = replace(whole(), lineage=(("b", 1),) * 600)
    assert len(marker.parse(marker.build(many)).lineage) == 512, "what is built can be read"


def test_the_identity_stands_in_the_first_bytes() -> None:
    big = make_marker(7, 3, payload={f"shard-{n}": b"" for n in range(2000)})
    data = marker.build(big)
    assert len(data) > 20 * marker.HEAD_LIMIT and marker.parse_head(data[:marker.HEAD_LIMIT]) == big.head


@READERS
def test_nothing_stands_before_the_head(read: Any) -> None:
    """All read the same, however much of it: the first bytes, or all of it as JSON, to which a space is nothing."""
    text = b" " + marker.build(whole()).rpartition(b',\n"seal":')[0]
    data = text + b',\n"seal":"sha256:' + hashlib.sha256(text).hexdigest().encode() + b'"}\n'
    assert json.loads(data)["seal"] == marker.seal_of(data)
    with pytest.raises(MarkerError, match="does not begin with a head"):
        read(data)
    for start in (data, b"12345678" + data[len(b'  {"head":') - 1:]):
        with pytest.raises(MarkerError, match="does not begin with a head"):
            marker.parse_head(start)


def test_a_head_is_looked_for_in_the_first_bytes_only() -> None:
    with pytest.raises(MarkerError, match="its head is not JSON"):
        marker.parse_head(resealed(marker.build(whole()), run="r" * marker.HEAD_LIMIT))


def test_a_head_that_does_not_fit_is_refused_before_anything_is_written() -> None:
    with pytest.raises(ConfigError, match="its run is not 1 to 255"):
        marker.build(make_marker(1, run="r" * marker.HEAD_LIMIT))


def test_ordering_reads_at_most_a_head_of_each_checkpoint() -> None:
    disk = crash_disk()
    for step in (1, 2, 3):
        make_checkpoint(disk, step, payload={f"shard-{n}": b"" for n in range(300)})
    asked: list[tuple[str, int, int]] = []

    class Counting(CrashFiles):
        def read(self, path: str, limit: int) -> bytes:
            data = disk.read(path, limit)
            asked.append((path, limit, len(data)))
            return data

    files = Counting()
    files.nodes = disk.nodes
    entries = catalog.scan(files, Layout.at(ROOT), Naming.parse("step-{step}"))
    assert [e.step for e in entries] == [3, 2, 1] and len(asked) == 3
    assert all(limit <= 4096 and size <= 4096 and path.endswith(MARKER) for path, limit, size in asked)


def test_metrics_are_numbers() -> None:
    class Scalar:
        def item(self) -> float:
            return 2.5

    assert marker.check_metrics({"a": 1, "b": Scalar(), "c": math.inf}) == {"a": 1.0, "b": 2.5, "c": math.inf}
    assert marker.check_metrics(None) == {}
    for bad in ({"a": "1"}, {"a": None}, {"a": True}, {1: 1.0}, {"a": [1]}, {"\ud800": 1.0}):
        with pytest.raises(ConfigError):
            marker.check_metrics(bad)  # type: ignore[arg-type]


def test_meta_is_json_and_a_copy() -> None:
    mine = {"a": [1]}
    copy = marker.check_meta(mine)
    mine["a"].append(2)
    assert copy == {"a": [1]} and marker.check_meta(None) == {}
    for bad in ({"a": object()}, {"a": math.nan}, {"a": {1, 2}}, {"a": "\ud800"}):
        with pytest.raises(ConfigError):
            marker.check_meta(bad)


NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/\x7f"), min_size=1, max_size=20).filter(
    lambda n: n not in (".", "..", MARKER))
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(
    st.characters(exclude_categories=["Cs"])), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3), max_leaves=6)


@settings(max_examples=100, deadline=None)
@given(seq=st.integers(0, 2**62), step=st.integers(0, 10**18), series=st.text("ab_9", min_size=1, max_size=5),
       names=st.lists(NAMES, unique=True, max_size=5), size=st.integers(0, 2**50), digest=st.none() | st.text("abc", max_size=9),
       rank=st.integers(0, 10**6), metrics=st.dictionaries(NAMES, st.floats(allow_nan=False), max_size=3),
       meta=st.dictionaries(NAMES, JSON, max_size=3), lineage=st.lists(st.tuples(NAMES, st.integers(0, 99)), max_size=4))
def test_any_marker_reads_back_and_glance_agrees(seq: int, step: int, series: str, names: list[str], size: int,
                                                 digest: str | None,
                                                 rank: int, metrics: dict[str, float], meta: dict[str, Any],
                                                 lineage: list[tuple[str, int]]) -> None:
    head = Head(seq, step, attempt_id(seq), f"step-{step}", series, "run", 3)
    one = Marker(head, 4, tuple(FileEntry(n, size, digest, rank) for n in names), "b", None, tuple(lineage), 1.5, metrics, meta)
    data = marker.build(one)
    assert marker.parse(data) == one and marker.parse_head(data[:marker.HEAD_LIMIT]) == head
    seen = marker.glance(data)
    assert (seen.head, seen.world, seen.count, seen.size, seen.time, seen.metrics) == (
        head, 4, len(names), size * len(names), 1.5, metrics)


def test_renamed_changes_the_head_only() -> None:
    one = whole()
    other = marker.renamed(one, seq=9)
    assert other.head == replace(one.head, seq=9) and replace(other, head=one.head) == one
