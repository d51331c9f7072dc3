"""Rounds, pulse and listener, with threads as ranks: every rank gets one verdict, and nobody waits in vain."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from distckpt.coordination import collector, pulse, rounds, store
from distckpt.coordination import group as coordination_group
from distckpt.coordination.bootstrap import Bootstrap
from distckpt.coordination.group import Group
from distckpt.coordination.pulse import Watch, describe
from distckpt.coordination.rounds import by_value, require_same
from distckpt.coordination.store import Client
from distckpt.errors import (
    ConfigError,
    CoordinationError,
    CoordinatorLost,
    RankDisagreement,
    RankLost,
    RankTimeout,
    StepAlreadyExists,
)
from tests.harness import run
from tests.inprocess import Outcome, RankRuntime, Threads, await_, same_error, values


class Groups:
    """The groups of ``world`` ranks; ``each`` runs one thing on all, or some, of them."""

    def __init__(self, world: int, clients: dict[int, type[Client]] | None = None) -> None:
        self.threads = Threads(world)
        self.living: set[Any] = set()
        self.runtimes = [RankRuntime(f"host-{'abcd'[rank]}", self.living) for rank in range(world)]
        kinds = clients or {}

        def connect(rank: int) -> Group:
            kind = kinds.get(rank, Client)
            boot = Bootstrap("threads", rank, world, lambda: kind(self.threads.store, "t/"))
            return Group.connect(boot, self.runtimes[rank], 5.0, 5.0)

        self.all: list[Group] = values(self.threads.run(connect))

    def each(self, target: Callable[[Group], Any], *ranks: int) -> list[Outcome]:
        return self.threads.run(lambda rank: target(self.all[rank]), ranks=ranks or None)

    def keys(self) -> int:
        return int(self.threads.store.num_keys())

    def close(self) -> None:
        values(self.each(lambda group: group.close(5.0)))


def collect(group: Group, report: Any = None, timeout: float = 5.0, op: str = "meet", decide: Any = None) -> Any:
    """One call of one round, whose verdict is every rank's report."""
    def everything(reports: dict[int, Any]) -> dict[str, Any]:
        return {"seen": {str(rank): value["value"] for rank, value in reports.items()}}

    with group.rounds.call(op, 7) as call:
        return call.round({"value": group.rank if report is None else report}, decide or everything, timeout)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_rank_gets_the_one_verdict(world: int) -> None:
    groups = Groups(world)
    for turn in range(3):
        seen = {str(rank): 10 * turn + rank for rank in range(world)}
        told = values(groups.each(lambda g, t=turn: collect(g, 10 * t + g.rank)))
        assert [v["seen"] for v in told] == [seen] * world
    groups.close()


def test_an_error_of_the_decision_is_raised_on_every_rank_with_its_fields() -> None:
    groups = Groups(3)

    def decide(reports: Any) -> Any:
        raise StepAlreadyExists("there", step=7, attempt=None, background=False, failures={}, outcome="aborted")

    for error in same_error(groups.each(lambda g: collect(g, decide=decide)), StepAlreadyExists):
        assert (error.step, error.outcome) == (7, "aborted")
    assert len(values(groups.each(collect))) == 3
    groups.close()


def test_a_bug_in_the_decision_strands_nobody() -> None:
    groups = Groups(2)

    def decide(reports: Any) -> Any:
        raise KeyError("oops")

    first, second = same_error(groups.each(lambda g: collect(g, decide=decide)), CoordinationError)
    assert "KeyError: 'oops'" in str(second) and isinstance(first.__cause__, KeyError)
    groups.close()


def test_an_interrupt_of_the_decision_is_rank_0s_own_and_strands_nobody() -> None:
    groups = Groups(2)

    def decide(reports: Any) -> Any:
        raise KeyboardInterrupt

    begun = time.monotonic()
    first, second = groups.each(lambda g: collect(g, decide=decide))
    assert isinstance(first.error, KeyboardInterrupt)
    assert isinstance(second.error, CoordinationError) and "KeyboardInterrupt" in str(second.error)
    assert not isinstance(second.error, RankTimeout) and time.monotonic() - begun < 4
    groups.close()


def test_a_rank_that_gives_up_as_the_verdict_comes_takes_the_verdict() -> None:
    """Its error goes where nothing stands, and nowhere else: rank 0 has decided, and others may have read it."""
    class Late(Client):
        def wait(self, keys: Any, timeout: Any) -> bool:
            return not keys[0].endswith("/verdict") and super().wait(keys, timeout)

        def has(self, key: str) -> bool:
            if not key.endswith("/verdict"):
                return super().has(key)
            assert super().wait([key], 5.0)  # it comes after this look
            return False

    groups = Groups(2)
    groups.all[1].rounds.client = Late(groups.threads.store, "t/")
    assert [verdict["seen"] for verdict in values(groups.each(collect))] == [{"0": 0, "1": 1}] * 2
    groups.close()


def test_a_rank_that_left_by_an_exception_is_known_at_once_on_any_host() -> None:
    """No kernel can tell of a process on another host; its goodbye can."""
    groups = Groups(2)
    groups.all[1].abandon()
    begun = time.monotonic()
    error = groups.each(lambda g: collect(g, timeout=20.0), 0)[0].error
    assert isinstance(error, RankLost) and "it has left its manager" in str(error) and time.monotonic() - begun < 5
    groups.close()


def test_every_rank_says_goodbye_whether_it_closes_or_leaves_by_an_error() -> None:
    for leave in (lambda group: group.close(5.0), lambda group: group.abandon()):
        groups = Groups(2)
        client = groups.threads.source()
        assert not client.has("bye/1")
        groups.each(leave)
        assert client.has("bye/1")


def test_ranks_of_two_versions_do_not_meet() -> None:
    reports = {rank: {"identity": {}, "version": f"1.{rank}"} for rank in range(2)}
    with pytest.raises(RankDisagreement, match="version"):
        coordination_group._meet(reports)


def test_a_missing_rank_is_named_with_host_and_last_phase_at_the_deadline() -> None:
    groups = Groups(3)
    values(groups.each(collect))
    begun = time.monotonic()
    errors = same_error(groups.each(lambda g: collect(g, timeout=0.5), 0, 2), RankTimeout)
    assert 0.5 <= time.monotonic() - begun < 2.0
    for error in errors:
        assert list(error.missing) == [1] and error.missing[1]["host"] == "host-b"
        assert error.missing[1]["phase"] == "outside, after meet" and not isinstance(error, RankLost)
        assert "rank 1 on host-b" in str(error) and "outside, after meet at step 7" in str(error) and "0.5 s" in str(error)
    groups.each(collect, 1)
    groups.close()


def test_S19_the_late_report_of_a_timed_out_call_counts_for_nothing() -> None:
    groups = Groups(3)
    same_error(groups.each(lambda g: collect(g, "old", timeout=0.3), 0, 2), RankTimeout)
    late = groups.each(lambda g: collect(g, "old"), 1)
    assert isinstance(late[0].error, RankTimeout), late[0].error
    seen = values(groups.each(lambda g: collect(g, f"new {g.rank}")))
    assert [v["seen"] for v in seen] == [{"0": "new 0", "1": "new 1", "2": "new 2"}] * 3
    groups.close()


def test_S19_a_report_that_is_sent_twice_counts_once_and_as_it_was_first() -> None:
    sent = threading.Event()

    class Telling(Client):
        def set(self, key: str, value: Any) -> None:
            super().set(key, value)
            self.tell(value)

        def claim(self, key: str, value: Any) -> Any:
            standing = super().claim(key, value)
            self.tell(value)
            return standing

        def tell(self, value: Any) -> None:
            if value.get("value") == "again":
                sent.set()

    groups = Groups(2, clients={1: Telling})

    def twice(group: Group) -> Any:
        with group.rounds.call("meet") as call:
            if group.rank == 1:
                group.rounds.client.claim(call.key(1, "report", 1, by=1), {"value": "first", "op": "meet"})
            else:
                assert sent.wait(10)
            return call.round({"value": "again"}, lambda reports: {"seen": reports[1]["value"], "count": len(reports)}, 5.0)

    assert [(v["seen"], v["count"]) for v in values(groups.each(twice))] == [("first", 2)] * 2
    groups.close()


def test_S19_a_calls_keys_stay_until_every_rank_has_reported_the_next() -> None:
    """Rank 2 is held between the arrival of the verdict and its reading; meanwhile the others are a call further on."""
    hold, held = threading.Event(), threading.Event()

    class Slow(Client):
        def get(self, keys: Any) -> Any:
            if threading.current_thread().name == "rank-2" and any("call/2/1/verdict" in key for key in keys):
                held.set()
                assert hold.wait(10)
            return super().get(keys)

    groups = Groups(3, clients={2: Slow})

    def two(group: Group) -> Any:
        return [collect(group, "a")["seen"]["2"], collect(group, "b")["seen"]["2"]]

    done = threading.Thread(target=lambda: outcomes.extend(groups.each(two)))
    outcomes: list[Outcome] = []
    done.start()
    assert held.wait(10)
    client = groups.threads.source()
    await_(lambda: client.has("call/3/1/report/0") and client.has("call/3/1/report/1"))
    assert client.has("call/2/1/verdict") and client.has("call/2/1/report/0")
    hold.set()
    done.join(10)
    assert values(outcomes) == [["a", "b"]] * 3
    assert not client.has("call/2/1/verdict") and not client.has("call/2/1/report/0")
    groups.close()


def test_S19_each_rank_deletes_its_own_keys_after_errors_too() -> None:
    groups = Groups(3)
    gone: dict[int, set[str]] = {rank: set() for rank in range(3)}
    for group in groups.all:
        def delete(keys: Any, group: Group = group, delete: Any = group.rounds.client.delete) -> None:
            gone[group.rank] |= set(keys)
            delete(keys)

        group.rounds.client.delete = delete  # type: ignore[method-assign]

    def refuse(reports: Any) -> Any:
        raise StepAlreadyExists("there", step=7, attempt=None, background=False, failures={}, outcome="aborted")

    values(groups.each(collect))
    keys = groups.keys()
    for _ in range(5):
        same_error(groups.each(lambda g: collect(g, decide=refuse)), StepAlreadyExists)
    values(groups.each(collect))
    assert groups.keys() == keys
    for rank in range(3):
        own = {f"call/{call}/1/report/{rank}" for call in range(1, 8)}
        assert gone[rank] == own | ({f"call/{call}/1/verdict" for call in range(1, 8)} if rank == 0 else set())
    groups.close()


def test_a_store_that_goes_after_the_verdict_does_not_hide_it() -> None:
    """Rank 0 may be killed as soon as it has told: what it told is known all the same, on every rank alike (P4)."""
    groups = Groups(2)
    values(groups.each(collect))

    def gone(keys: Any) -> None:
        raise CoordinatorLost("the store is gone")

    groups.all[1].rounds.client.delete = gone  # type: ignore[method-assign]
    assert values(groups.each(lambda group: collect(group, "seen")))[1]["seen"] == {"0": "seen", "1": "seen"}
    del groups.all[1].rounds.client.delete
    groups.close()


def _flat(rank: int, world: int, rounds: int) -> tuple[list[int], list[int]]:
    """(key counts, resident bytes) after a tenth of ``rounds``, and after all of them; two threads as ranks."""
    groups = Groups(2)
    before = groups.keys()

    def resident() -> int:
        with open("/proc/self/statm") as stat:
            return int(stat.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    marks: list[int] = []
    keys: list[int] = []

    def many(group: Group) -> None:
        for number in range(1, rounds + 1):
            collect(group, "x" * 200)
            if group.rank == 0 and number in (rounds // 10, rounds):
                marks.append(resident())
                keys.append(groups.keys())

    values(groups.threads.run(lambda r: many(groups.all[r]), timeout=100))
    values(groups.each(lambda g: collect(g, "x" * 200)))
    keys.append(groups.keys())
    return [before, *keys], marks


def test_S19_the_store_is_flat_over_ten_thousand_rounds() -> None:
    """Key count after the rounds is that of before the first; RSS after round 10,000 at most 2 MB above round 1,000."""
    (keys, marks), = values(run(1, _flat, 10_000, init=False, timeout=110))
    before, tenth, end, quiet = keys
    assert quiet == before, keys  # the beat of each rank, and the last call's own: two reports, one verdict
    assert max(tenth, end) <= before + 2, keys  # while the other thread may be a call ahead
    assert marks[1] - marks[0] <= 2 << 20, f"RSS grew by {(marks[1] - marks[0]) / 1e6:.1f} MB"


def test_the_collector_is_off_while_very_many_reports_are_decoded_and_on_while_rank_0_decides(monkeypatch: pytest.MonkeyPatch,
                                                                                              ) -> None:
    """What is decided may wait, for the last save's rotation or for room, while the training goes on and makes garbage."""
    groups = Groups(1)
    decoded, decided, decode = [], [], store.decode
    monkeypatch.setattr(collector, "_MANY", 1)
    monkeypatch.setattr(store, "decode", lambda data: (decoded.append(gc.isenabled()), decode(data))[1])

    def decide(reports: Any) -> Any:
        decided.append(gc.isenabled())
        return {}

    values(groups.each(lambda g: collect(g, decide=decide)))
    assert decided == [True] and False in decoded and gc.isenabled()
    groups.close()


def test_rank_0_missing_is_named_at_the_deadline_and_decides_nothing_when_it_comes_late() -> None:
    groups = Groups(3)
    begun = time.monotonic()
    errors = same_error(groups.each(lambda g: collect(g, timeout=0.5), 1, 2), RankTimeout)
    assert 0.5 <= time.monotonic() - begun < 2.0
    assert all(list(e.missing) == [0] and e.missing[0]["host"] == "host-a" for e in errors)
    decided: list[Any] = []

    def decide(reports: Any) -> Any:
        decided.append(reports)
        return {}

    late = groups.each(lambda g: collect(g, decide=decide), 0)
    assert isinstance(late[0].error, RankTimeout) and str(late[0].error) == str(errors[0])
    assert not decided
    assert [v["seen"]["1"] for v in values(groups.each(collect))] == [1, 1, 1]
    groups.close()


def test_a_rank_that_has_ended_is_lost_at_once_not_at_the_deadline() -> None:
    groups = Groups(3)
    groups.living.discard(groups.runtimes[2].me)
    begun = time.monotonic()
    errors = same_error(groups.each(lambda g: collect(g, timeout=30.0), 0, 1), RankLost)
    assert time.monotonic() - begun < 2.0
    assert all(list(e.missing) == [2] and "host-c" in str(e) and "has ended" in str(e) for e in errors)


def test_a_rank_that_ended_is_found_out_when_an_abort_ends_the_wait() -> None:
    """Its end may be what the abort is about: gloo tells the others before anybody looked at the pid."""
    groups = Groups(2)
    client, watched = groups.threads.source(), Watch({1: "k"}, "x", 60.0, abort="abort", next_look=1e18)
    client.set("abort", {})
    groups.living.discard(groups.runtimes[1].me)
    for now in (10.0, 11.0):
        groups.all[0].pulse._tick(client, watched, now)
    assert watched.lost == [1] and client.get(["k"]) == [{"filled": True}]


def test_a_wait_without_anybody_to_mind_its_deadline_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_LOOK", 0.1)
    groups = Groups(2)
    groups.all[0].pulse.stop()
    outcome, = groups.each(collect, 0)
    assert isinstance(outcome.error, CoordinationError) and "was closed while it waited" in str(outcome.error)


def test_the_stacks_of_a_missing_rank_are_asked_for_and_name_where_it_hangs() -> None:
    groups = Groups(2)
    found: dict[int, str] = {}
    groups.all[0].rounds.on_stacks = found.update
    release = threading.Event()

    def where_it_hangs() -> None:
        release.wait(20)

    stuck = threading.Thread(target=where_it_hangs, name="rank-1")
    stuck.start()
    same_error(groups.each(lambda g: collect(g, timeout=0.3), 0), RankTimeout)
    release.set()
    stuck.join()
    assert list(found) == [1] and "where_it_hangs" in found[1]
    groups.each(collect, 1)
    groups.close()


def test_slow_is_no_timeout_while_new_bytes_come_and_silence_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "BEAT", 0.1)
    groups = Groups(2)
    written = [0]

    def slow(group: Group, how: str) -> Any:
        with group.rounds.call("load") as call:
            if group.rank == 1:
                group.pulse.probe(lambda: written[0])
                until = time.monotonic() + 1.5
                while time.monotonic() < until:
                    written[0] += how == "files of its own"
                    groups.runtimes[1].moved += {"a framework's bytes": 10_000, "log lines": 100}.get(how, 0)
                    time.sleep(0.02)
            return call.round({}, lambda reports: {"ok": len(reports)}, 0.5, progress=True)

    for how in ("files of its own", "a framework's bytes"):
        assert [v["ok"] for v in values(groups.each(lambda g, h=how: slow(g, h)))] == [2, 2]
    for how in ("nothing", "log lines"):
        same_error(groups.each(lambda g, h=how: slow(g, h)), RankTimeout)
    groups.close()


def test_a_long_wait_is_told_while_it_lasts(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(pulse, "SAY", 0.3)
    groups = Groups(2)
    outcomes: list[Outcome] = []
    with caplog.at_level("INFO", "distckpt.coordination.pulse"):
        lead = threading.Thread(target=lambda: outcomes.extend(groups.each(collect, 0)))
        lead.start()
        await_(lambda: "meet of step 7: still waiting for rank 1 on host-b" in caplog.text)
        values(groups.each(collect, 1))
        lead.join(10)
    assert len(values(outcomes)) == 1
    groups.close()


def test_different_calls_at_one_time_are_a_disagreement_at_once() -> None:
    groups = Groups(3)
    begun = time.monotonic()
    errors = same_error(groups.each(lambda g: collect(g, timeout=20.0, op="save" if g.rank < 2 else "resume")), RankDisagreement)
    assert time.monotonic() - begun < 5.0
    assert all(e.values == {0: "save", 1: "save", 2: "resume"} for e in errors)
    assert "'save' on ranks 0-1; 'resume' on rank 2" in str(errors[0])
    groups.close()


@pytest.mark.parametrize("bad", [0, 1])
def test_a_rank_that_cannot_take_part_says_so_and_every_rank_raises_it(bad: int) -> None:
    groups = Groups(3)

    def one(group: Group) -> Any:
        if group.rank != bad:
            return collect(group, timeout=20.0)
        with group.rounds.call("meet", 7) as call:
            call.refuse(ConfigError("step must be an int"), 20.0)
        return None

    errors = same_error(groups.each(one), ConfigError)
    assert str(errors[0]) == f"meet of step 7: rank {bad} cannot take part: step must be an int"
    assert str(errors[bad].__cause__) == "step must be an int"
    assert len(values(groups.each(collect))) == 3
    groups.close()


def test_disagreement_names_each_value_and_its_ranks() -> None:
    reports = {rank: {"step": 5 if rank < 3 else 6} for rank in range(4)}
    with pytest.raises(RankDisagreement) as caught:
        require_same(reports, {"step": "the step"}, "save")
    assert caught.value.values == {0: 5, 1: 5, 2: 5, 3: 6}
    assert "ranks disagree on the step: 5 on ranks 0-2; 6 on rank 3" in str(caught.value)
    require_same(reports, {"other": "x"}, "save")
    require_same({0: {"step": {"a": 1}}, 1: {"step": {"a": 1}}}, {"step": "x"}, "save")
    assert by_value({0: 1, 1: 2, 2: 1}) == "1 on ranks 0, 2; 2 on rank 1"
    assert by_value(dict.fromkeys(range(0, 40, 2), 1)).endswith("14 ...")
    assert by_value({rank: rank for rank in range(9)}).count("on rank") == 6


def test_many_missing_ranks_make_one_short_line() -> None:
    beats: dict[int, Any] = {rank: {"phase": "write", "host": f"n{rank}", "pid": 7, "step": 3, "bytes": 99} for rank in range(20)}
    text = describe(beats)
    assert text.startswith("rank 0 on n0 (pid 7), last seen: write at step 3, 99 bytes so far; rank 1 on n1")
    assert text.endswith("; and 12 more")
    assert describe({3: None}) == "rank 3, last seen: never"


def test_a_store_that_times_out_where_nobody_waits_is_gone_and_where_somebody_does_it_is_not() -> None:
    class Slow(dist.HashStore):  # type: ignore[misc, name-defined]
        def check(self, keys: list[str]) -> bool:
            raise dist.DistStoreError("Socket Timeout")

        def wait(self, keys: list[str], timeout: Any) -> None:
            raise dist.DistStoreError("wait timeout after 1ms" if keys == ["a"] else "Connection reset by peer")

    client = Client(Slow(), "")
    assert client.wait(["a"], 0.001) is False
    with pytest.raises(CoordinatorLost, match="Socket Timeout"):
        client.has("a")
    with pytest.raises(CoordinatorLost, match="Connection reset"):
        client.wait(["b"], 0.001)


def test_only_bounded_json_objects_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Threads(1).source()
    client.set("a", {"x": [1, "ü", None]})
    assert client.get(["a"]) == [{"x": [1, "ü", None]}]
    for text in (b'{}{"x":1}', b"{},{}", b"{}\n", b" {}", b"", b"{", b'"\xff"', b"[" * 100_000):
        with pytest.raises(CoordinationError, match="a report is not JSON"):
            store.decode(text)
    monkeypatch.setattr(store, "VALUE_LIMIT", 50)
    with pytest.raises(CoordinationError, match="over the control plane's limit"):
        client.set("b", {"x": "y" * 60})
    Client(client._raw, "").claim("t/d", {"x": "y" * 42})
    assert len(client.peek("d") or {}) == 1
    client._raw.set("t/d", '{"x":"' + "y" * 43 + '"}')  # by somebody who does not ask ``encode``
    for ask in (lambda: client.get(["d"]), lambda: client.claim("d", {})):
        with pytest.raises(CoordinationError, match="a report of 51 bytes came, over the control plane's limit of 50"):
            ask()
    with pytest.raises(CoordinationError, match="not an object"):
        store.decode(b"[1]")
    assert client.claim("c", {"v": 1}) == {"v": 1} == client.claim("c", {"v": 2})
    assert not client.wait(["never"], 0.05) and client.peek("never") is None
