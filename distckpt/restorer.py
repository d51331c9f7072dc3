"""Resume and restore on this rank: one choice for all, then the load whose failure on one rank is everybody's."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from distckpt import options, resume
from distckpt.checkpoint import Checkpoint
from distckpt.coordination.group import Group
from distckpt.coordination.rounds import Call
from distckpt.domains.domains import Domains
from distckpt.domains.standing import Abroad
from distckpt.errors import ConfigError, DistckptError, ResumeError
from distckpt.layout import Layout, Naming, check_step
from distckpt.options import Seams, Timeouts
from distckpt.owned import OwnedRoot
from distckpt.payloads import base
from distckpt.payloads.base import Payload, Ranks, as_payload
from distckpt.reader import Root, warned
from distckpt.resume import Resumed, Wish
from distckpt.saving.lineage import Lineage

Source = str | os.PathLike[str] | None


class Restorer:
    """What every resume of one manager has in common. ``owned`` is there on rank 0 only."""

    def __init__(self, seams: Seams, layout: Layout, naming: Naming, group: Group, owned: OwnedRoot | None, lineage: Lineage,
                 fingerprint: str | None, timeouts: Timeouts, domains: Domains | None = None,
                 abroad: Abroad | None = None) -> None:
        self._seams, self._layout, self._naming, self._group = seams, layout, naming, group
        self._owned, self._lineage, self._fingerprint, self._timeouts = owned, lineage, fingerprint, timeouts
        self._domains, self._abroad = domains, abroad

    def resume(self, series: str, step: int | None, verify: str, allow_fresh: bool) -> Resumed:
        """Collective."""
        with self._group.rounds.call("resume") as call:
            return self._choose(call, series, step, verify, allow_fresh, None)

    def restore(self, series: str, state: Any, step: int | None, source: Source, strict: bool, only: Collection[str] | None,
                verify: str, allow_fresh: bool) -> tuple[Checkpoint | None, Payload]:
        """(what was loaded, the state as a payload). Collective."""
        with self._group.rounds.call("restore") as call:
            try:
                part = as_payload(state)
                base.check_only(part, only)
                if part.collective:
                    self._group.require_collectives()
            except ConfigError as wrong:
                call.refuse(wrong, self._timeouts.arrive)
            found = self._choose(call, series, step, verify, allow_fresh, source)
            if part.collective:  # for a fresh start too: made here, it stands in the program's order of groups on every rank
                self._group.collectives()
            if found.checkpoint is None:
                return None, part
            self._group.pulse.phase(f"loading {found.checkpoint.name}")
            error: Exception | None = None
            try:
                part.load(found.checkpoint, Ranks(self._group.rank, self._group.world, self._group.collectives, strict, only))
            except Exception as raised:  # every rank ends with the round below, which raises it everywhere
                error = raised
            resume.end_load(call, self._group, found.checkpoint, error, self._timeouts.progress)
        return found.checkpoint, part

    def _choose(self, call: Call, series: str, step: int | None, verify: str, allow_fresh: bool,
                source: Source) -> Resumed:
        files, layout = self._seams.files, self._layout
        chooser = None
        try:
            how = options.choice("verify", verify, options.VERIFY)
            wish = Wish(series, None if step is None else check_step(step), how, allow_fresh,
                        self._fingerprint if source is None else None, source is not None)
            if source is not None:
                layout = Layout.at(source)
            if self._owned is not None and source is None:
                chooser = resume.Chooser(files, layout, self._naming, self._owned.record.run, self._owned, self._lineage, wish,
                                         self._abroad)
            elif self._owned is not None:
                other = warned(Root(layout.root, files, self._seams.runtime))
                chooser = resume.Chooser(files, layout, other.naming, None, None, self._lineage, wish)
        except DistckptError as error:
            call.refuse(error, self._timeouts.arrive)
        except OSError as error:
            call.refuse(ResumeError(f"resume: {layout.root} cannot be read: {error}", step=None), self._timeouts.arrive)
        looker = resume.Looker(files, layout.root, self._group, self._seams.runtime, self._timeouts.visible,
                               self._domains)
        return resume.agree(call, self._group, chooser, looker, wish, layout.root, files, self._timeouts.arrive,
                            self._timeouts.progress)
