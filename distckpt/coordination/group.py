"""The ranks of one manager: their rounds, their pulse, and who sits on which host."""

from __future__ import annotations

import logging
from typing import Any

import distckpt
from distckpt.coordination.bootstrap import Bootstrap
from distckpt.coordination.listener import Listener
from distckpt.coordination.pulse import Pulse, bye_key
from distckpt.coordination.rounds import Report, Rounds, require_same
from distckpt.errors import ConfigError, CoordinatorLost
from distckpt.runtime import Identity, Runtime

log = logging.getLogger(__name__)

_LEAVING = 2.0
_LOOK = 0.5


class Group:
    """Made by ``Group.connect`` on every rank. ``identities`` says who every rank is."""

    def __init__(self, bootstrap: Bootstrap, runtime: Runtime, patience: float) -> None:
        self.kind, self.rank, self.world = bootstrap.kind, bootstrap.rank, bootstrap.world
        self.identity = runtime.identity()
        self._bootstrap, self._runtime, self._patience = bootstrap, runtime, patience
        self._gloo: Any = None
        self.broken = False
        self._client = bootstrap.source()
        self.pulse = Pulse(bootstrap.source, self.rank, runtime, self.identity)
        self.listener = Listener(bootstrap.source, self.rank, runtime)
        self.rounds = Rounds(self._client, self.rank, self.world, runtime, self.pulse)
        self.identities: dict[int, Identity] = {}

    @classmethod
    def connect(cls, bootstrap: Bootstrap, runtime: Runtime, timeout: float, patience: float) -> Group:
        """All ranks, introduced to each other; RankTimeout names those who did not come. Collective. ``patience``: seconds
        that a rank waits inside a framework's collective: torch's own half hour is nobody's choice here."""
        group = cls(bootstrap, runtime, patience)
        try:
            with group.rounds.call("start") as call:
                verdict = call.round({"identity": group.identity.to_json(), "restarts": runtime.restarts(),
                                      "version": distckpt.__version__}, _meet, timeout)
        except BaseException:
            group.abandon()
            raise
        finally:
            bootstrap.met()
        group.identities = {int(r): Identity.from_json(v) for r, v in verdict["identities"].items()}
        runtime.recount(sum(verdict["restarts"][str(leader)] for leader in group.leaders))
        group.identity = runtime.identity()
        if group.rank == 0:
            group.pulse.identities = {r: i for r, i in group.identities.items() if r != 0}
        return group

    @property
    def hosts(self) -> dict[int, str]:
        return {rank: identity.host for rank, identity in self.identities.items()}

    @property
    def leads_host(self) -> bool:
        """Whether this is the lowest rank of its host."""
        return self.rank == min(rank for rank, host in self.hosts.items() if host == self.identity.host)

    @property
    def leaders(self) -> list[int]:
        """The lowest rank of each host."""
        first: dict[str, int] = {}
        for rank, host in sorted(self.hosts.items()):
            first.setdefault(host, rank)
        return sorted(first.values())

    def require_collectives(self) -> None:
        """ConfigError when a framework that runs collectives cannot run here. Local, the same on every rank."""
        if self.world > 1 and self._bootstrap.new_gloo is None:
            raise ConfigError(f"DCP needs a torch process group, and these {self.world} ranks were found by {self.kind}: "
                              "initialise torch.distributed first, or save with Shards")

    @property
    def has_collectives(self) -> bool:
        """Whether ``collectives`` makes no group now. Alike on every rank."""
        return self._bootstrap.new_gloo is None or (self._gloo is not None and not self.broken)

    def collectives(self) -> Any:
        """A gloo group of our own for DCP, made when first needed; None in a process without torch's. Collective.

        Never the training group: a slow disk must not trip its watchdog, and two threads must not share one group. It is made
        anew when it may be ``broken``: a save that used it failed, on every rank. On the training thread only: torch lets one
        thread at a time wait on its store, and numbers its groups, so a thread that made one while the program made another, in
        the other order on another rank, could wait for ever.
        """
        self.require_collectives()
        if self._bootstrap.new_gloo is None:
            return None
        if self._gloo is None or self.broken:
            self.broken = False
            self._gloo = self._bootstrap.new_gloo(self._patience)
        return self._gloo

    def close(self, timeout: float) -> None:
        """Say goodbye. Rank 0 keeps the store open until every rank said so, or for ``timeout`` seconds (S19)."""
        rounds = self.rounds
        try:
            if rounds.rank == 0:
                self.pulse.stop()
                for rank in range(self.world):
                    rounds.caller.send(rounds.client, rank, "bye")
                if not self._goodbyes(timeout):
                    log.warning("not every rank said goodbye within %g s; closing the store", timeout)
                self.listener.join(5)
            else:
                self.listener.join(timeout)
                self.pulse.stop()
                rounds.client.set(bye_key(self.rank), {})
        except CoordinatorLost as error:
            log.debug("closing without a goodbye: %s", error)
        self._drop()

    def abandon(self, place: int = 0) -> None:
        """Stop without a collective, after boundary ``place``: an exception is in flight, and the others may be anywhere. Local.

        When all ranks raise the same error, the others may still be reading it: rank 0's store stays until they have
        left as well, or for two seconds, so that nobody gets a CoordinatorLost in its place (P4).
        """
        client = self.rounds.client
        self.pulse.stop()
        self.listener.stop(client)
        try:
            if self.rank == 0:
                self._goodbyes(_LEAVING)
            else:
                client.set(bye_key(self.rank), {"ordinal": place})
        except CoordinatorLost as error:
            log.debug("leaving without a goodbye: %s", error)
        self._drop()

    def _goodbyes(self, timeout: float) -> bool:
        """Whether every other rank has said goodbye, or is known to have ended, within ``timeout`` seconds. Rank 0 only."""
        end, look = self._runtime.monotonic() + timeout, _LOOK
        while True:
            ended = {rank for rank, identity in self.identities.items() if self._runtime.alive(identity) is False}
            keys = [bye_key(rank) for rank in range(1, self.world) if rank not in ended]
            left = end - self._runtime.monotonic()
            if not keys or self.rounds.client.wait(keys, max(0.0, min(left, look))):
                return True
            if left <= 0:
                return False
            look *= 2  # TCPStore writes a line to stderr for every wait that ends without its key

    def _drop(self) -> None:
        self._bootstrap.server = None


def _meet(reports: dict[int, Report]) -> Report:
    require_same(reports, {"version": "the distckpt version"}, "start")
    return {what: {str(rank): report[one] for rank, report in reports.items()}
            for what, one in (("identities", "identity"), ("restarts", "restarts"))}
