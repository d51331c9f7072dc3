"""A save on several storage domains: two-phase commit over their committers, decided by rank 0's publish.

every committer                                      rank 0
                                                     every rank acked; the decision is fixed as *prepare*
1. compare, marker and its directory durable         1. the same, in its own domain
2. prepared ->                                       2. all prepared
                                                     3. publish in its own domain, durably: *that* is the decision
4. publish, durably <-                               4. tell the others
5. done, with what stands here ->                    5. all done: the plan of rotation, and then only the verdict
6. the pointer; what the plan lets go                6. the same

A staged share counts for nothing by itself: recovery publishes it only if some domain published its own, so what ends
before 3 is aborted everywhere, whoever died, and what got past 3 stands everywhere after the next start (S1). Who
cannot tell whether 3 happened (a lost rank 0, a deadline) leaves its share as it is. No rank but rank 0 publishes first,
so a share that stands published anywhere is proof that every domain's marker was durable before it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from distckpt import marker as _marker
from distckpt import recovery, trust
from distckpt.coordination.group import Group
from distckpt.coordination.rounds import Call, Report
from distckpt.domains import retire
from distckpt.domains.domains import Domains
from distckpt.errors import DistckptError, RankFailure, SaveError
from distckpt.layout import ATTEMPT, MAIN, MARKER
from distckpt.marker import FileEntry, Marker
from distckpt.ordered import unlink_if_there
from distckpt.owned import OwnedRoot
from distckpt.patience import NONE, Patience
from distckpt.retention import Policy
from distckpt.saving import commit
from distckpt.saving.committer import Committer, in_order
from distckpt.saving.compare import compare
from distckpt.saving.files import make_durable
from distckpt.saving.terms import Go, Request, save_error

log = logging.getLogger(__name__)

PREPARE = "prepare"


class Parts:
    """This rank's side. ``owned`` is there on committers, ``committer`` on rank 0; ``generation`` is of this rank's own disk."""

    def __init__(self, group: Group, domains: Domains, generation: int, owned: OwnedRoot | None, committer: Committer | None,
                 policy: Callable[[str], Policy], algorithm: str | None) -> None:
        self.domains, self.generation, self.first = domains, generation, domains.mine[0]
        self._group, self._owned, self._committer, self._policy = group, owned, committer, policy
        self._algorithm = algorithm
        self._client, self._pulse, self._rank = group.rounds.client, group.pulse, group.rank
        self._found: Marker | None = None
        self._patience: Patience = NONE
        self._marked = self._replaces = False
        self._views: dict[int, retire.View] = {}
        self._plan: Report = {}

    @property
    def owned(self) -> OwnedRoot:
        assert self._owned is not None
        return self._owned

    def begin(self, call: Call, request: Request, go: Go, progress: float, failure: Callable[[BaseException], RankFailure],
              doubt: list[str], patience: Patience) -> None:
        """What the attempt is. ``doubt``: earlier ones that rank 0 cannot say the end of; all others that still stand in staging
        are dead, for every rank left them before it came to this begin (S21)."""
        self._call, self._request, self._go, self._progress, self._failure = call, request, go, progress, failure
        self._doubt, self._patience, self._found, self._marked, self._views = doubt, patience, None, False, {}

    def room(self, request: Request) -> Report:
        """For begin's report, of another domain's committer: [free bytes, bytes that its share will take], where both are known.
        What its trash gives back is waited for when it matters."""
        if not self.domains.leads or self._rank == 0 or request.links:  # rank 0 alone knows how much was linked
            return {}
        owned = self.owned
        needed = owned.needed(request.series)
        try:
            free = owned.files.free(owned.layout.root)
            if needed is not None and free < needed:
                owned.make_room()
                free = owned.files.free(owned.layout.root)
        except OSError:
            return {}  # the attempt itself will say what is wrong with this disk
        return {} if needed is None else {"room": [free, needed]}

    def _key(self, kind: str, *rank: int) -> str:
        return self._call.key(self._go.attempt, kind, *rank, by=rank[0] if rank else 0)

    def make_staging(self) -> None:
        """On a committer: the attempt's directory on its own disk. OSError ends the attempt for all, by the abort key."""
        if not self.domains.leads or self._rank == 0:
            return
        owned, go = self.owned, self._go
        with owned.lock:
            owned.afterwards.catch_up()
            for item in owned.files.scan(owned.layout.staging(owned.generation)):
                if ATTEMPT.fullmatch(item.name) and item.name not in owned.live and item.name not in self._doubt:
                    self._drop(item.name)
            owned.live.add(go.attempt)
            owned.make_attempt(go.attempt, go.name)
        owned.status.note(go.attempt, "pending", step=self._request.step, series=self._request.series)
        owned.journal.event("begin", step=self._request.step, series=self._request.series, attempt=go.attempt, seq=go.seq)

    def _drop(self, attempt: str) -> None:
        """Its marker goes first: in trash it would pass for a trace of a checkpoint (S7)."""
        owned = self.owned
        outer = owned.layout.staging(owned.generation, attempt)
        for name in recovery.inside(owned.files, outer):
            unlink_if_there(owned.files, os.path.join(outer, name, MARKER))
            owned.files.fsync_dir(os.path.join(outer, name))
        owned.remove_attempt(attempt)

    # -- phase one -----------------------------------------------------------------------------------------------

    def announce(self, notes: dict[int, dict[str, Any]]) -> None:
        """Rank 0, before the decision is fixed: what all markers have in common. Ranks may have been given other metrics."""
        assert self._committer is not None
        draft = self._committer.draft(self._go, notes)
        domains = tuple((self.domains.host(index), ranks) for index, ranks in enumerate(self.domains.all))
        draft = replace(draft, head=replace(draft.head, of=len(domains)), domains=domains)
        self._client.set(self._key("draft"), {"marker": _marker.build(draft, trust.key()).decode()})

    def _prepare_here(self, acked: Mapping[int, list[FileEntry]], empty: bool) -> RankFailure | None:
        """Make this domain's share durable, its marker last; None when it is."""
        owned, go = self.owned, self._go
        try:
            text = self._client.get([self._key("draft")])[0]["marker"]
            draft = _marker.parse(text.encode(), "the draft of the marker", trust.key())
            staged = owned.layout.staging(owned.generation, go.attempt, go.name)
            unclaimed, complaint = compare(owned.files, staged, acked, self._group.hosts, self._patience, self._rank, empty)
            if complaint is None and unclaimed and len({self._group.hosts[rank] for rank in self.domains.mine}) > 1:
                complaint = (self._rank, f"{unclaimed[0]!r} was claimed by no rank, and on storage of several hosts only its "
                                         "writer can make it durable: use files.mine or files.shared")
            if complaint is not None:
                who = self._group.identities[complaint[0]]
                return RankFailure(complaint[0], "IntegrityError", complaint[1], who.host, who.pid, "durable")
            own = [make_durable(owned.files, staged, path, self._rank, self._algorithm) for path in unclaimed]
            entries = in_order({**acked, self._rank: [*acked.get(self._rank, []), *own]})
            head = replace(draft.head, generation=owned.generation, part=self.domains.index)
            self._found = replace(draft, head=head, files=entries, host=self._group.identity.host)
            with owned.lock:
                self._replaces = go.replace if self._rank == 0 else retire.makes_way(owned, go.name)
                outcome = commit.prepare(owned, self._found, self._patience)
            if outcome is None:
                self._marked = True
                return None
            assert outcome.error is not None
            return self._failure(outcome.error)
        except (OSError, DistckptError) as error:
            return self._failure(error)

    def _withdraw(self) -> None:
        """Take the marker back. What fails here changes nothing: nobody published, so the next start sweeps it all the same."""
        if self._marked and self._found is not None:
            with self.owned.lock:
                outcome = commit.withdraw(self.owned, commit.staging_of(self.owned, self._found), OSError())
            self._marked = outcome.state != "aborted"

    # -- rank 0 --------------------------------------------------------------------------------------------------

    def commit(self, go: Go, acked: dict[int, list[FileEntry]], notes: dict[int, dict[str, Any]],
               slowest: tuple[int, float]) -> Report:
        """Both phases; the committed verdict, or the error that says aborted or unknown."""
        owned, committer = self.owned, self._committer
        assert committer is not None
        keys = {kind: {rank: self._key(kind, rank) for rank in self.domains.committers if rank} for kind in ("prepared", "done")}
        turn = self._key("publish")
        try:
            failure = self._prepare_here({r: acked[r] for r in self.domains.mine}, empty=any(acked.values()))
            problem = save_error(self._request.step, go.attempt, {failure.rank: failure}, self._group.world) if failure else (
                self._unprepared(keys["prepared"]))
            if problem is not None:
                self._withdraw()
                self._client.claim(turn, {"aborted": True})
                raise problem
            assert self._found is not None
            with owned.lock:
                outcome = commit.publish(owned, self._found, replace=go.replace)
            owned.live.discard(go.attempt)
            if outcome.state != "committed":
                self._client.claim(turn, {"aborted": outcome.state == "aborted"})
                raise committer.failed(go, outcome) from outcome.error
            self._client.claim(turn, {"publish": True})
            self._finish(go, keys["done"])
        except BaseException:  # whatever it is, the others must not wait for their turn
            self._client.claim(turn, {"aborted": False})
            raise
        verdict = committer.committed(go, self._found, slowest, sum(e.size for entries in acked.values() for e in entries),
                                      sum(map(len, acked.values())))
        series = self._request.series
        self._plan = retire.plan(owned, self.domains, series, self._policy(series), committer.context(), self._views)
        self._client.set(self._key("rotate"), self._plan)
        return verdict

    def _unprepared(self, keys: dict[int, str]) -> DistckptError | None:
        """Why not every domain is prepared."""
        self._pulse.phase("waiting for every domain to prepare")
        reports, watch = self._call.gather(keys, self._progress, progress=True)
        failures = [RankFailure(**report["failure"]) for report in reports.values() if "failure" in report]
        if failures:
            return save_error(self._request.step, self._go.attempt, {f.rank: f for f in failures}, self._group.world)
        return self._call.absence(watch, "prepare") if len(reports) < len(keys) else None

    def _finish(self, go: Go, keys: dict[int, str]) -> None:
        """The others' publishing; SaveError *unknown* while a domain owes its own. It is decided, and the next start publishes it
        there; until then readers of that node do not see it, so it must not count, and nothing may go for it (S12)."""
        self._pulse.phase("waiting for every domain to publish")
        reports, _ = self._call.gather(keys, self._progress, progress=True)
        failures = {rank: RankFailure(**report["failure"]) for rank, report in reports.items() if "failure" in report}
        for rank in set(keys) - set(reports):
            who = self._group.identities[rank]
            failures[rank] = RankFailure(rank, "RankLost", "no word from it since it had prepared; rank 0 had published, so the "
                                         "next start publishes its share as well", who.host, who.pid, "publish")
        self._views = {rank: report.get("view", {}) for rank, report in reports.items()}
        if failures:
            told = save_error(self._request.step, go.attempt, failures, self._group.world, "unknown")
            self.owned.in_doubt[go.attempt] = f"its outcome is unknown ({told})"
            self.owned.no_rotation = f"{go.name} is not published on every node"
            raise told

    def rotation(self) -> Callable[[str, Policy], None]:
        """Rank 0, after the verdict: what was planned. Nobody waits for the others: what they cannot do, the next plan has."""
        return partial(retire.carry_out, self.owned, plan=self._plan)

    # -- the other committers ------------------------------------------------------------------------------------

    def prepare(self) -> bool:
        """Both phases, on a committer; False when rank 0 stands still, and nobody can tell how it ends."""
        if not self.domains.leads:
            return True
        self._pulse.phase("prepare")
        mine = self.domains.mine
        acks = self._client.get([self._key("ack", rank) for rank in mine])
        acked = {rank: [FileEntry(p, s, d, rank) for p, s, d in ack["files"]] for rank, ack in zip(mine, acks, strict=True)}
        failure = self._prepare_here(acked, empty=True)
        self._client.claim(self._key("prepared", self._rank), {"failure": asdict(failure)} if failure else {})
        self._pulse.phase("waiting for rank 0 to publish")
        if not self._call.await_rank0(self._key("publish"), self._progress):
            return False
        turn = self._client.get([self._key("publish")])[0]
        if turn.get("publish"):
            self._publish()
        elif turn.get("aborted"):
            self._withdraw()
        return True

    def _publish(self) -> None:
        owned = self.owned
        assert self._found is not None
        self._pulse.phase("publish")
        with owned.lock:
            outcome = commit.publish(owned, self._found, replace=self._replaces, decided=True)
            report: Report = {}
            if outcome.error is not None:
                report = {"failure": asdict(self._failure(outcome.error))}
            else:
                report = {"view": retire.view(owned, self._request.series, self._policy(self._request.series))}
        self._client.claim(self._key("done", self._rank), report)

    def carry_out(self, verdict: Report) -> Report:
        """After the verdict, on a committer: the pointer of its own root, and the rotation that rank 0 planned."""
        if not self.domains.leads or "committed" not in verdict:
            return verdict
        owned, series, go = self.owned, self._request.series, self._go
        owned.status.note(go.attempt, "committed", name=go.name)
        owned.journal.event("committed", step=self._request.step, series=series, name=go.name, attempt=go.attempt, seq=go.seq)
        plan = self._client.get([self._key("rotate")])[0]  # it came before the verdict
        policy = self._policy(series)

        def follow() -> None:
            if series == MAIN:
                owned.point_to(go.name)
            retire.carry_out(owned, series, policy, plan)

        owned.afterwards.add(follow)
        return verdict

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Around what follows this rank's ack, on all but rank 0."""
        if not self.domains.leads:
            yield
            return
        owned, attempt = self.owned, self._go.attempt
        try:
            yield
        except DistckptError as error:
            known = isinstance(error, SaveError) and error.outcome == "aborted"
            owned.status.note(attempt, "failed" if known else "unknown", error=str(error)[:2000])
            owned.journal.event("aborted" if known else "unknown", attempt=attempt, error=str(error)[:2000])
            if not self._marked and all(self._client.has(self._key("ack", r)) and "filled" not in (
                    self._client.peek(self._key("ack", r)) or {}) for r in self.domains.mine):
                self.discard()
            raise
        finally:
            owned.live.discard(attempt)

    def discard(self) -> None:
        """On a committer: remove an attempt that this domain's ranks have left. What cannot go now does at the next begin."""
        if not self.domains.leads or self._rank == 0:
            return
        self.owned.live.discard(self._go.attempt)
        try:
            with self.owned.lock:
                self._drop(self._go.attempt)
        except OSError as error:
            log.warning("could not sweep the attempt %s: %s; the next save tries again", self._go.attempt, error)
