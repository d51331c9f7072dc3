"""``marker.glance`` says what ``marker.parse`` says, quicker."""

from __future__ import annotations

import pytest

from distckpt import marker as _marker
from distckpt.errors import MarkerError
from tests.support import make_marker


@pytest.mark.parametrize("change", [
    {}, {"payload": {"adopted": True}}, {"meta": {"files": [["x", 1, None, 0]]}, "lineage": (("b", 1),)},
    {"metrics": {"loss": float("inf")}}])
def test_a_glance_is_what_parse_says(change: dict[str, object]) -> None:
    files = tuple(_marker.FileEntry(path, 5, None, 1) for path in ("a", "sub/.metadata", "é", "x\u00a0y", "..a", "a b/c.pt"))
    made = _marker.Marker(make_marker(5).head, 3, files, "b", time=7.0, **change)  # type: ignore[arg-type]
    seen = _marker.glance(_marker.build(made))
    assert (seen.head, seen.world, seen.count, seen.size, seen.time) == (made.head, 3, 6, 30, 7.0)
    assert dict(seen.metrics) == dict(made.metrics)


def test_a_glance_refuses_what_parse_refuses() -> None:
    whole = _marker.build(make_marker(5, payload={"a": b"1", "b": b"2"}))
    bodies = [whole[:cut] for cut in range(0, len(whole) - 1, 7)]
    bad = [("../a", 1, None, 0), ("/a", 1, None, 0), ("a//b", 1, None, 0), ("a/../b", 1, None, 0), ("a", -1, None, 0),
           ("a", True, None, 0), ("a", 1, 5, 0), ("a", 1, None, -1), ("commit.json", 1, None, 0), (5, 1, None, 0),
           ("", 1, None, 0), ("a\x7f", 1, None, 0), ("x" * 1025, 1, None, 0)]
    head = make_marker(5).head
    bodies += [_marker.build(_marker.Marker(head, 1, (_marker.FileEntry(*row),), "b")) for row in bad]  # type: ignore[arg-type]
    twice = _marker.FileEntry("a", 1, None, 0)
    bodies += [_marker.build(_marker.Marker(head, 1, (twice, twice), "b")), _marker.build(_marker.Marker(head, -1, (), "b"))]
    for data in bodies:
        with pytest.raises(MarkerError) as parsed:
            _marker.parse(data)
        with pytest.raises(MarkerError) as glanced:
            _marker.glance(data)
        assert str(glanced.value) == str(parsed.value)
