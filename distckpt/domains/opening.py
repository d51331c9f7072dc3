"""The start on nodes' own disks: find the domains, claim every root, and decide once for all what stands in all of them.

No domain rolls forward, counts or picks by its own view. Every committer claims its root and says what it holds; rank 0
decides; every committer recovers by that and says what stands then; what stands in every domain can be used (S1, S7).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from distckpt import catalog, selection
from distckpt.coordination.rounds import Call, Report
from distckpt.domains.domains import Domains
from distckpt.domains.parts import Parts
from distckpt.domains.probe import Probe
from distckpt.domains.standing import decide, partial
from distckpt.errors import ConfigError, DistckptError, from_wire, to_wire
from distckpt.layout import Naming
from distckpt.owned import Claimed, claim, highest_seq
from distckpt.removal import remove_tree
from distckpt.retention import Policy
from distckpt.rootdir import agree_naming, infer_naming, known_heads
from distckpt.saving.committer import Committer
from distckpt.start import Start, report_key

log = logging.getLogger(__name__)


class LocalStart(Start):
    """``domains`` is None when all ranks turn out to share one disk: then all is as with ``storage="shared"``.

    ``owned`` is rank 0's root, ``share`` that of any other committer, ``generation`` that of this rank's own disk.
    """

    generation = 0

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._claimed: Claimed | None = None

    def open(self, call: Call, options: dict[str, Any], arrive: float, visible: float) -> Naming:
        token = call.round({"root": self._layout.root, "options": options, **report_key()}, self._agree, arrive)["token"]
        group = self._group
        domains = Probe(self._files, self._runtime, self._layout, group.rank, group.world, group.hosts, self._refuse_shared,
                        self._try_there, group.pulse.phase).find(call, token, arrive, visible)
        if len(domains.all) == 1:
            return super().open(call, options, arrive, visible)
        self.domains = domains
        try:
            verdict = call.round(self._claim(domains), self._decide, arrive, progress=True)
            self.generation = verdict["generations"][domains.index]
            naming = Naming.parse(verdict["naming"])
            reasons = call.round(self._recover(verdict, naming), self._compare, arrive, progress=True)["partial"]
        except BaseException:
            if self._claimed is not None:
                self._claimed.release()
            self.owned = self.share = None
            raise
        mine = self.owned or self.share
        if mine is not None:
            mine.in_doubt.update(reasons)
            mine.apart |= set(reasons)
            log.info("root %s on %s: run %s, generation %d, storage domain %d of %d", self._layout.root,
                     domains.name(domains.index), mine.record.run, mine.generation, domains.index + 1, len(domains.all))
        return naming

    def _agree(self, reports: dict[int, Report]) -> Report:
        self._require_alike(reports)
        return {"token": self._runtime.token(8)}

    def parts(self, committer: Committer | None, policy: Callable[[str], Policy], algorithm: str | None) -> Parts | None:
        """What a save needs on this rank, where there are several domains."""
        if self.domains is None:
            return None
        if committer is not None:
            committer.domains = self.domains
        return Parts(self._group, self.domains, self.generation, self.owned or self.share, committer, policy, algorithm)

    # -- on committers -------------------------------------------------------------------------------------------

    def _claim(self, domains: Domains) -> Report:
        """Own this domain's root; what it holds, before anything is recovered."""
        if not domains.leads:
            return {}
        try:
            claimed = self._claimed = claim(self._files, self._layout, self._runtime, self._naming, self._run_id,
                                            self._group.pulse.phase)
            if claimed.owned is not None:
                return {**self._holds(claimed), "run": claimed.owned.record.run, "seq": claimed.owned.highest_seq}
            for item in self._files.scan(self._layout.home()):
                if item.name.startswith("probe-"):
                    remove_tree(self._files, self._layout.root, self._layout.home(item.name))
            return self._holds(claimed)
        except DistckptError as error:
            return {"error": to_wire(error)}
        except OSError as error:
            return {"error": to_wire(ConfigError(f"root {self._layout.root} cannot be used: {error}"))}

    def _holds(self, claimed: Claimed) -> Report:
        files, layout, generation = self._files, self._layout, claimed.ownership.generation
        # What is seen as published here need not be durable yet: the domains that roll forward by it become the proof (S8).
        record = catalog.read_record(files, layout)
        heads = known_heads(files, layout)
        known = record.naming if record is not None else infer_naming(files, layout)
        entries = catalog.scan(files, layout, agree_naming(files, layout, record, self._naming))
        return {"run": record.run if record is not None else heads[0].run if heads else None, "generation": generation,
                "naming": known.template if known is not None else None,
                "seq": highest_seq(files, layout, generation, entries),
                "published": [e.head.attempt for e in entries if e.committed and e.head is not None and e.head.of > 1]}

    def _recover(self, verdict: Report, naming: Naming) -> Report:
        """Roll forward what was decided, sweep the rest; what stands then."""
        if self._claimed is None:
            return {}
        try:
            self._claimed.asked = naming
            owned = self._claimed.settle(verdict["run"], verdict["decided"])
            if self._group.rank == 0:
                self.owned = owned
            else:
                self.share = owned
            owned.highest_seq = max(owned.highest_seq, verdict["seq"])
            entries = owned.entries()
            traces = [] if entries else selection.traces(self._files, self._layout, entries)
            rows = [[e.head.attempt, e.name, e.series, e.head.seq, e.step, e.head.part, e.head.of] for e in entries
                    if e.committed and e.head is not None and e.head.run == owned.record.run]
            return {"entries": rows, "traces": traces, "rejected": owned.rejections()}
        except DistckptError as error:
            return {"error": to_wire(error)}
        except OSError as error:
            return {"error": to_wire(ConfigError(f"root {self._layout.root} cannot be recovered: {error}"))}

    # -- on rank 0 -----------------------------------------------------------------------------------------------

    def _told(self, reports: dict[int, Report]) -> list[Report]:
        """By domain; the error of one is everybody's."""
        assert self.domains is not None
        for index, rank in enumerate(self.domains.committers):
            if "error" in reports[rank]:
                error = from_wire(reports[rank]["error"])
                error.message = f"{self.domains.name(index)}: {error.message}"
                raise error
        return [reports[rank] for rank in self.domains.committers]

    def _decide(self, reports: dict[int, Report]) -> Report:
        assert self.domains is not None
        default = self._naming.template if self._naming is not None else catalog.DEFAULT_NAMING
        return decide(self.domains, self._told(reports), self._run_id, f"run-{self._runtime.token(6)}", default)

    def _compare(self, reports: dict[int, Report]) -> Report:
        assert self.domains is not None
        reasons, self.abroad = partial(self.domains, self._told(reports))
        if reasons:
            log.warning("root %s: %d checkpoints do not stand on every node and cannot be used: %s", self._layout.root,
                        len(reasons), next(iter(reasons.values())))
        return {"partial": reasons}
