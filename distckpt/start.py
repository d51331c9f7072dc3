"""The start of a manager: agree on the root, own it, and prove that every rank can use it, before step 1."""

from __future__ import annotations

import logging
import os
from typing import Any

from distckpt import human
from distckpt.catalog import Entry, read_marker
from distckpt.coordination.group import Group
from distckpt.coordination.rounds import Call, Report, require_same
from distckpt.digest import SHA256
from distckpt.domains.domains import Domains, ranks_text
from distckpt.domains.standing import Abroad
from distckpt.durable import Files
from distckpt.errors import ConfigError, MarkerError
from distckpt.launch.environment import detect
from distckpt.layout import Layout, Naming
from distckpt.ordered import make_dir, move, rmdir_if_there, unlink_if_there, write_new
from distckpt.owned import OwnedRoot
from distckpt.patience import PASSING, Patience
from distckpt.removal import remove_tree
from distckpt.retention import KeepAll, Policy
from distckpt.runtime import Runtime
from distckpt.trust import KEY_VARIABLE, key, key_id, refuse_shared

log = logging.getLogger(__name__)


class Start:
    """Two rounds: rank 0 opens the root; every rank finds rank 0's nonce there and tries what a save will need."""

    def __init__(self, files: Files, runtime: Runtime, layout: Layout, group: Group, naming: Naming | None,
                 run_id: str | None, allow_shared: bool = False) -> None:
        self._files, self._runtime, self._layout, self._group = files, runtime, layout, group
        self._naming, self._run_id, self._allow_shared = naming, run_id, allow_shared
        self._probe = ""
        self.owned: OwnedRoot | None = None
        self.share: OwnedRoot | None = None
        self.domains: Domains | None = None
        self.abroad: Abroad | None = None

    def open(self, call: Call, options: dict[str, Any], arrive: float, visible: float) -> Naming:
        """The root's naming; the same errors on every rank. Rank 0 owns the root when this returns."""
        try:
            verdict = call.round({"root": self._layout.root, "options": options, **report_key()}, self._open, arrive)
            self._probe = self._layout.staging(verdict["generation"], verdict["probe"])
            call.round(self._try_storage(verdict["probe"], verdict["nonce"], visible), self._judge, arrive)
        except BaseException:
            if self.owned is not None:
                self.owned.close()
                self.owned = None
            raise
        return Naming.parse(verdict["naming"])

    def _open(self, reports: dict[int, Report]) -> Report:
        self._require_alike(reports)
        try:
            self._refuse_shared()
            owned = OwnedRoot.open(self._files, self._layout, self._runtime, self._naming, self._run_id,
                                   self._group.pulse.phase)
            self.owned = owned
            self._refuse_shared()  # it may have been made just now, with a umask that lets everybody in
            name, nonce = f"probe-{self._runtime.token(4)}", self._runtime.token(8)
            probe = self._layout.staging(owned.generation, name)
            make_dir(self._files, probe)
            write_new(self._files, os.path.join(probe, "nonce"), nonce.encode())
            self._files.fsync_dir(probe)
        except OSError as error:
            raise ConfigError(f"root {self._layout.root} cannot be used by rank 0 ({self._group.identity.host}): {error}; choose "
                              "another root, or fix its permissions or its file system") from error
        return {"generation": owned.generation, "probe": name, "nonce": nonce, "naming": owned.naming.template}

    def _require_alike(self, reports: dict[int, Report]) -> None:
        """Every rank has the same root, options, and key to sign with or none."""
        require_same(reports, {"root": "the root", "options": "the manager's options"}, "start")
        for rank, report in sorted(reports.items()):
            if "key_problem" in report:
                raise ConfigError(f"rank {rank} on {self._group.hosts[rank]}: {report['key_problem']}")
        require_same(reports, {"key": f"the key of {KEY_VARIABLE}"}, "start")

    def _refuse_shared(self) -> None:
        if not self._allow_shared:
            refuse_shared(self._files, self._layout.root)

    def _try_storage(self, name: str, nonce: str, visible: float) -> Report:
        """``problem``: what is wrong with the root as this rank sees it; None when nothing is. ``blind``: it does not see what
        rank 0 wrote, and where the disk that it sees is mounted.

        The nonce's name came by the verdict, after its fsync, and is never looked up before (S10).
        """
        pulse = self._group.pulse
        pulse.phase("looking for the root's nonce")
        patience = Patience.towards(self._files, self._runtime, self._layout.root, visible,
                                    lambda: pulse.phase(pulse.current_phase))
        for _ in patience.looks(at_least=min(visible, 2.0)):
            try:
                parent = os.path.dirname(self._probe)
                there = any(item.name == name for item in self._files.scan(parent))
                if there and self._files.read(os.path.join(self._probe, "nonce"), 64).decode("ascii", "replace") == nonce:
                    break
            except OSError as error:
                if error.errno not in PASSING:
                    return {"problem": f"cannot read it: {error}"}
        else:
            return {"problem": "does not see what rank 0 wrote there: the root is not on storage that all hosts share",
                    "blind": self._mount()}
        return {"problem": self._try_there(self._probe)}

    def _mount(self) -> str:
        try:
            return self._files.mount_point(self._files.real(self._layout.root))
        except OSError:
            return "an unknown mount"

    def _try_there(self, probe: str) -> str | None:
        """What a save could not do in the directory ``probe``; None when it can do all it needs."""
        mine = os.path.join(probe, f"rank-{self._group.rank}")
        try:
            make_dir(self._files, mine)
            write_new(self._files, os.path.join(mine, "a"), b"distckpt")
            move(self._files, os.path.join(mine, "a"), os.path.join(mine, "b"))
            self._files.fsync_dir(mine)
            unlink_if_there(self._files, os.path.join(mine, "b"))
            rmdir_if_there(self._files, mine)
        except OSError as error:
            return f"cannot mkdir, write, fsync, rename and unlink there: {error}"
        return None

    def _judge(self, reports: dict[int, Report]) -> Report:
        problems = {rank: str(report["problem"]) for rank, report in reports.items() if report.get("problem")}
        try:
            remove_tree(self._files, self._layout.root, self._probe)
        except OSError as error:
            problems.setdefault(0, f"cannot remove a directory there: {error}")
        if any("blind" in report for report in reports.values()):
            raise self._apart(reports, problems)
        if problems:
            fine = sorted({self._group.hosts[r] for r in reports if r not in problems})
            bad = "; ".join(f"rank {rank} on {self._group.hosts[rank]} {text}" for rank, text in sorted(problems.items())[:8])
            raise ConfigError(f"root {self._layout.root} cannot be used by all ranks: {bad}. Fine on: "
                              f"{', '.join(fine) or 'no host'}. Put the root on storage that every host "
                              "mounts, writable, at the same path")
        return {}

    def _apart(self, reports: dict[int, Report], problems: dict[int, str]) -> ConfigError:
        """Which hosts see rank 0's storage, and where the others' root is; those may each have their own."""
        hosts = self._group.hosts
        sees = [rank for rank in sorted(reports) if "blind" not in reports[rank]]
        groups: dict[str, list[int]] = {}
        for rank in sorted(set(reports) - set(sees)):
            groups.setdefault(f"{hosts[rank]} ({{}}, on {reports[rank]['blind']})", []).append(rank)
        blind = min(set(reports) - set(sees))
        others = ", ".join(where.format(ranks_text(ranks)) for where, ranks in list(groups.items())[:8])
        more = "; ".join(f"rank {rank} on {hosts[rank]} {problems[rank]}" for rank in sees if rank in problems)
        return ConfigError(
            f"root {self._layout.root} cannot be used by all ranks: rank {blind} on {hosts[blind]} {problems[blind]}. "
            f"Fine on: {', '.join(dict.fromkeys(hosts[r] for r in sees))} ({ranks_text(sees)}, on {self._mount()}); on another "
            f"storage: {others}{f'. Besides, {more}' if more else ''}. Put the root on storage that every host mounts, writable, "
            "at the same path; or, if every node's own disk is what you want, pass storage='node-local'")


def report_key() -> Report:
    """Which key this rank has, or why it has none: an error of one rank alone would strand the others."""
    try:
        return {"key": key_id(key())}
    except ConfigError as error:
        return {"key_problem": str(error)}


def say_hello(owned: OwnedRoot, group: Group, policy: Policy, algorithm: str | None) -> None:
    """The lines at start: what root, whose, how many checkpoints, and for how many more there is room. Rank 0."""
    entries: list[Entry] = []
    room = ""
    try:
        entries = [e for e in owned.entries() if e.committed]
        free = owned.files.free(owned.layout.root)
        room = f", {human.size(free)} free"
        if entries:
            size = read_marker(owned.files, owned.layout.final(entries[0].name)).size
            room += f": room for about {free // max(size, 1)} more checkpoints like {entries[0].name} ({human.size(size)})"
    except (OSError, MarkerError) as error:
        room += f" (for how many more checkpoints is unknown: {error})"
    log.info("root %s: run %s, generation %d, %d ranks (%s), %s, %d checkpoints%s", owned.layout.root, owned.record.run,
             owned.generation, group.world, group.kind, detect(), len(entries), room)
    if key() is not None and algorithm != SHA256:
        log.warning("root %s: markers are signed, and digest=%r cannot tell files that were exchanged on purpose: use digest=%r",
                    owned.layout.root, algorithm, SHA256)
    if isinstance(policy, KeepAll):
        log.info("root %s: no retention is set, so nothing is ever deleted", owned.layout.root)
