"""CheckpointManager: the one door. Save, resume, restore, close."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from distckpt import options, start
from distckpt.background import Background, open_gate
from distckpt.behind import Behind
from distckpt.checkpoint import Checkpoint
from distckpt.coordination import bootstrap
from distckpt.coordination.group import Group
from distckpt.digest import XXH3, check_algorithm
from distckpt.domains.opening import LocalStart
from distckpt.ending import Ending
from distckpt.errors import ConfigError
from distckpt.launch.signals import DEFAULT, StopSignals
from distckpt.layout import MAIN, Layout, Naming, check_run_id, check_series, check_step
from distckpt.options import Seams, Timeouts
from distckpt.owned import OwnedRoot
from distckpt.payloads.base import Ranks
from distckpt.reader import Root
from distckpt.restorer import Restorer
from distckpt.resume import Resumed
from distckpt.retention import Policy
from distckpt.saving.committer import Committer
from distckpt.saving.files import RankFiles
from distckpt.saving.handle import SaveHandle
from distckpt.saving.hooks import Hook, Hooks
from distckpt.saving.lineage import Lineage
from distckpt.saving.saver import Saver
from distckpt.saving.terms import BLOCK
from distckpt.series import Series, SeriesView, check_apart
from distckpt.steps import Schedule, Todo, Tolerate, tolerated
from distckpt.timing import Timing


class CheckpointManager:
    """Checkpoints of one run in one directory, written by all its ranks.

    Collective: every rank makes it, with equal arguments, after its process group or engine exists. Raises on every
    rank alike: ConfigError (arguments, an unusable root, storage that ranks do not share), RootInUse (another live
    writer), RankDisagreement (ranks passed different things), RankTimeout (some did not come).

    ``root``: the directory of the run's checkpoints. ``group``: None finds the ranks (torch process group, MPI, SLURM, one
    process); or a torch ProcessGroup, or an mpi4py Comm. ``naming``: a template with one ``{step}`` (None: the root's own,
    else ``step-{step}``). ``keep_last``, ``keep_every``, ``keep_best`` (by ``best_metric``, ``best_mode``), or
    ``retention=KeepLast(3) | KeepBest(2, "loss")``: what stays; nothing given: nothing is ever deleted. ``on_exists``: what a
    save of a committed step does: "error", "skip", "replace". ``fingerprint``: names the model or configuration; resume
    refuses another's. ``digest``: "xxh3-128", None, or "sha256", an eighth of the speed, which with signed markers
    (``distckpt.trust``) is proof against exchanged files as well. ``dedup="link"``: a file of Shards whose bytes have not changed
    since the checkpoint before is hard-linked instead of written; damage to one such file is damage to all its names.
    ``page_cache``: what becomes of a checkpoint's pages in memory once they are on the disk. "drop" gives them back behind the
    write, so that checkpoints push nothing out that training reads, and several ranks write faster; whoever reads the checkpoint
    next waits for the disk. "keep" leaves them there for who reads at once on this machine (an evaluation, ``verify --digest``),
    for as much memory as the checkpoint is large.
    ``allow_shared_root``: use a root that belongs to another user, or in which every user may write and there is no sticky bit;
    without it that is a ConfigError, since what is loaded from there may be somebody else's. A group that may write is taken as
    it is. ``check_staging`` (or
    DISTCKPT_CHECK_STAGING=1): find tensors that change while a background save copies them. ``writer="process"``: background
    saves of Shards and per-rank members are written by a process of their own, off the interpreter lock; DCP's collectives stay
    on a thread of this one. ``storage="node-local"``: ``root`` is on every node's own disk; a checkpoint exists when every node
    has its share, and only what all of them have is resumed from. Per-rank payloads only.

    Use it as a context manager; it must be closed by every rank.
    """

    def __init__(self, root: str | os.PathLike[str], group: Any = None, *, naming: str | None = None, run_id: str | None = None,
                 fingerprint: str | None = None, keep_last: int | None = None, keep_every: int | None = None,
                 keep_best: int | None = None, best_metric: str = "loss", best_mode: str = "min",
                 retention: Policy | None = None, save_every: int | None = None, save_every_minutes: float | None = None,
                 save_at_start: bool = False, on_exists: str = "error", in_flight: str = "wait",
                 on_failure: str | Tolerate = "raise", stop_signals: Iterable[str] = DEFAULT, grace: float | None = None,
                 digest: str | None = XXH3, dedup: str | None = None, allow_shared_root: bool = False,
                 check_staging: bool | None = None, writer: str = "thread", storage: str = "shared",
                 page_cache: str = "drop", timeouts: Timeouts | None = None, seams: Seams | None = None) -> None:
        policy = options.policy(retention, keep_last, keep_every, keep_best, best_metric, best_mode)
        self._seams = seams or Seams()
        self._timeouts = timeouts or Timeouts()
        self._on_exists = options.choice("on_exists", on_exists, options.ON_EXISTS)
        self._algorithm = check_algorithm(digest)
        self._layout = Layout.at(root)
        links = options.links(dedup, digest)
        check_run_id(run_id)
        asked = Naming.parse(naming) if naming is not None else None
        schedule, signals, tolerate = Schedule(save_every, save_at_start), StopSignals(stop_signals), tolerated(on_failure)
        options.choice("in_flight", in_flight, options.IN_FLIGHT)
        options.choice("writer", writer, options.WRITERS)
        options.choice("storage", storage, options.STORAGE)
        kept = options.choice("page_cache", page_cache, options.PAGE_CACHE) == "keep"
        timing = Timing(save_every_minutes, grace)
        self._pid = os.getpid()
        self._series = {MAIN: Series(policy, schedule)}
        found = self._seams.bootstrap or bootstrap.find(group, self._seams.runtime)
        self._group = Group.connect(found, self._seams.runtime, self._timeouts.arrive, self._timeouts.progress)
        compared = {"retention": policy.spec, "on_exists": on_exists, "digest": digest, "run_id": run_id,
                    "fingerprint": fingerprint, "naming": naming, "save_every": save_every, "in_flight": in_flight,
                    "save_every_minutes": save_every_minutes, "save_at_start": save_at_start, "tolerated": tolerate,
                    "allow_shared_root": allow_shared_root, "storage": storage, "dedup": dedup}
        gate = open_gate(self._group, self._seams.runtime, self._timeouts.close)
        try:
            with self._group.rounds.call("start") as call:
                begin = start.Start if storage == "shared" else LocalStart
                self._start = begin(self._seams.files, self._seams.runtime, self._layout, self._group, asked, run_id,
                                    allow_shared_root)
                self._naming = self._start.open(call, compared, self._timeouts.arrive, self._timeouts.visible)
        except BaseException:
            self._group.abandon()
            raise
        self._owned: OwnedRoot | None = self._start.owned
        self._lineage = Lineage(self._seams.runtime.token(8))
        self._committer: Committer | None = None
        if self._owned is not None:
            self._committer = Committer(self._owned, self._group, self._lineage, fingerprint)
            self._group.rounds.on_stacks = self._journal_stacks
            start.say_hello(self._owned, self._group, policy, digest)
            timing.watch(self._owned)
        self._hooks = Hooks(self.rank, self._owned.journal.event if self._owned is not None else None, self._seams.runtime)
        parts = self._start.parts(self._committer, self._policy, digest) if isinstance(self._start, LocalStart) else None
        self._saver = Saver(self._seams, self._layout, self._naming, self._group, self._committer, self._timeouts,
                            self._algorithm, self._on_exists, self._policy, self._hooks, parts,
                            links, kept)
        self._restorer = Restorer(self._seams, self._layout, self._naming, self._group, self._owned, self._lineage, fingerprint,
                                  self._timeouts, self._start.domains, self._start.abroad)
        self._behind = Behind(self._seams, self._layout, self._naming, self._group, self._saver, self._hooks,
                              check_staging, writer)
        self._background = Background(
            self._group, gate, found.source, self._seams.runtime, self._behind.finish,
            lambda series: self._series[series].schedule, signals, tolerate, in_flight,
            timing if self._owned is not None else None, lambda: self._ending.leave(), self._timeouts.close)
        self._behind.attach(self._background)
        self._ending = Ending(self._group, self._background, self._behind, self._hooks, self._owned or self._start.share,
                              self._committer, self._series, self._timeouts.close)

    # -- who and where -------------------------------------------------------------------------------------------

    @property
    def root(self) -> str:
        """The root, absolute. Local."""
        return self._layout.root

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def world(self) -> int:
        return self._group.world

    @property
    def hosts(self) -> int:
        """How many hosts the ranks run on."""
        return len(self._group.leaders)

    @property
    def stop_signals(self) -> tuple[str, ...]:
        """Names of the signals that the first ``poll`` takes over, and that later arrive as ``todo.stop``. Local."""
        return self._background.signals.names

    @property
    def stopped(self) -> str:
        """Why ``poll`` said stop, the same on every rank; empty when it has not. It stays after ``close``. Local."""
        return self._background.stop_reason

    def _policy(self, series: str) -> Policy:
        return self._series[series].policy

    def _journal_stacks(self, stacks: dict[int, str]) -> None:
        assert self._owned is not None
        for rank, text in stacks.items():
            self._owned.journal.event("stacks", rank=rank, stacks=text)

    def _usable(self) -> None:
        if os.getpid() != self._pid:
            raise ConfigError(f"this manager belongs to process {self._pid}; a forked child (a DataLoader worker, say) must not "
                              "act for its parent: use distckpt.open(root) there to read")
        if self._ending.closed:
            raise ConfigError(f"the manager of {self.root} is closed")
        if self._hooks.running_here:
            raise ConfigError("an on_commit hook must not save, wait, resume or close: the other ranks are not in it; let it set "
                              "something that the training loop acts on")

    def _ranks(self, strict: bool = True, only: Collection[str] | None = None) -> Ranks:
        return Ranks(self.rank, self.world, self._group.collectives, strict, only)

    # -- saving --------------------------------------------------------------------------------------------------

    def poll(self, step: int) -> Todo:
        """What this step asks for: ``todo.save``, ``todo.stop``, ``todo.reason``, equal on every rank at the same call.

        Call it at the top of every step, on every rank, with the number of optimizer steps done. It sends nothing and reads
        two flags; a failed background save is raised here, once, on every rank at the same step. The first call takes the
        stop signals over: from then on they arrive as ``todo.stop``.
        """
        if self._background.signals.untouched:
            self._usable()
            self._background.signals.install()
        if self._behind.attention:
            self._behind.attend()
        return self._background.poll(step)

    def wait(self, timeout: float | None = None) -> bool:
        """Whether no background save is in flight within ``timeout`` seconds; without, the root has what retention says, too.

        Without ``timeout``, what it failed with is raised, and every rank must make this call at the same place, though
        nothing is sent. With one the answer is local, and ranks may get different ones: it raises nothing (``poll`` will), and
        must not steer collective code.
        """
        self._usable()
        self._behind.staged()
        if timeout is not None:
            return self._background.wait(timeout)
        self._background.settle()
        self._rotated()
        return True

    def async_save(self, step: int, payload: Any, **options: Any) -> SaveHandle:
        """``save(..., background=True)``, under the name that DCP uses. Collective."""
        return self.save(step, payload, background=True, **options)

    def wait_until_finished(self) -> None:
        """``wait()``, under the name that Orbax uses. Every rank."""
        self.wait()

    def should_save(self, step: int) -> bool:
        """Whether ``save_every`` asks for ``step``: the part of ``poll`` that goes by the step alone. Local, alike everywhere."""
        return self._background.schedule.due(check_step(step))

    def status(self) -> dict[str, Any]:
        """What this process knows: the save in flight, failures in a row and, on rank 0, the last attempts. Local."""
        pending = self._background.pending
        return {"in_flight": pending.step if pending is not None else None,
                "failures_in_a_row": self._background.failures_in_a_row,
                **({"attempts": self._owned.status.snapshot()["attempts"]} if self._owned is not None else {})}

    def save(self, step: int, payload: Any, *, metrics: Mapping[str, Any] | None = None, meta: Mapping[str, Any] | None = None,
             background: bool = False, on_exists: str | None = None, staging: str = "copy") -> SaveHandle:
        """Save ``payload`` as the checkpoint of ``step`` (optimizer steps done); returns when it is committed everywhere.
        ``latest`` and retention follow behind it: they are done when ``wait``, ``close`` or the next save's begin is.

        Collective: every rank, with the same step. ``payload``: TrainState, DCP, Shards, a mapping of those, or a state
        dict (one file per rank). ``metrics``: name to number, for ``keep_best``. ``meta``: small JSON values kept in the marker.

        ``background=True`` returns as soon as the state is copied; everything may be changed then. What goes wrong later is
        raised by ``poll`` at one step for all ranks, or by the next ``save``, ``wait`` or ``close``. With
        ``staging="overlap"`` it returns before parameters and optimizer state are copied, and forward and backward run beside
        that; the optimizers that ``payload`` knows wait for it before they step. Tensors that no such optimizer owns (a state
        dict of your own) must stay as they are until ``staged`` returns.

        Raises on every rank alike: SaveError with the causes of all failing ranks (DiskFull, StepAlreadyExists among them),
        RankDisagreement, RankTimeout, RankLost, CoordinatorLost. After an error the checkpoints before it are untouched and
        the next save works.
        """
        return self._save(MAIN, step, payload, metrics, meta, background, on_exists, staging)

    def staged(self) -> None:
        """Wait until the state of a save with ``staging="overlap"`` is copied; at once when none is being copied. Local.

        Call it before anything but the optimizer changes what was saved. ``poll`` and the next ``save``, ``wait`` and
        ``close`` do it too.
        """
        self._usable()
        self._behind.staged()

    def on_commit(self, hook: Hook, ranks: str = "rank0") -> Hook:
        """Call ``hook(CommitRecord)`` for every checkpoint that is saved from now on, once it is published. Local.

        ``ranks``: "rank0", or "all" for a call on every rank where it was registered. It runs after every rank has the verdict:
        on the finaliser's thread for a background save, on the caller's otherwise, and the next save waits for it, while
        ``latest`` and retention may still be behind. A "rank0" hook must not communicate with other ranks, which do not run it:
        a collective of torch is refused there. No hook may save, wait or close. What it raises is logged and journaled
        (``hook_failed``) and reaches nobody else.
        """
        self._usable()
        self._hooks.add(hook, ranks)
        return hook

    @contextmanager
    def saving(self, step: int, *, metrics: Mapping[str, Any] | None = None, meta: Mapping[str, Any] | None = None,
               on_exists: str | None = None) -> Iterator[RankFiles]:
        """The universal plug: write whatever you like through the ``files`` it gives; leaving the block commits it.

        Collective: every rank enters and leaves. ``files.mine(name)`` is a path of this rank's own, ``files.shared(name)`` one
        that a single rank writes (``files.writes(name)`` says which), ``files.path`` the directory for a framework's saver. An
        exception in the block of one rank is a SaveError on every rank. With ``on_exists="skip"`` and a step that is there,
        ``files.skipped`` is true and what the block writes is thrown away.
        """
        with self._saving(MAIN, step, metrics, meta, on_exists) as files:
            yield files

    @contextmanager
    def _saving(self, series: str, step: int, metrics: Mapping[str, Any] | None, meta: Mapping[str, Any] | None,
                on_exists: str | None) -> Iterator[RankFiles]:
        self._enter()
        with self._saver.saving(series, step, BLOCK, metrics, meta, on_exists) as (files, _, saved), files.paced():
            yield files
        self._saved(series, step)
        self._hooks.run(saved.record)

    def _enter(self) -> None:
        """Before a collective call on this thread: nothing may be in flight, and what failed is raised."""
        self._usable()
        self._behind.staged()
        self._background.settle()
        self._rotated()

    def _rotated(self) -> None:
        """What follows the last commit is done, on the ranks that rotate. Local. A forked child does nothing for its parent."""
        here = self._owned or self._start.share
        if here is not None and os.getpid() == self._pid:
            here.afterwards.catch_up()

    def _saved(self, series: str, step: int) -> None:
        self._series[series].schedule.last = int(step)

    def _save(self, series: str, step: int, payload: Any, metrics: Mapping[str, Any] | None, meta: Mapping[str, Any] | None,
              background: bool, on_exists: str | None, staging: str) -> SaveHandle:
        if background:
            self._usable()
            handle = self._behind.save(series, step, payload, metrics, meta, on_exists, staging)
            if not handle.skipped or handle.number:
                self._saved(series, step)
            return handle
        self._enter()
        saved = self._saver.save(series, step, payload, metrics, meta, on_exists)
        self._saved(series, step)
        self._hooks.run(saved.record)
        return SaveHandle(self._seams.files, saved.path, int(step), self.rank, self.world, saved.skipped)

    # -- resuming ------------------------------------------------------------------------------------------------

    def resume(self, step: int | None = None, *, verify: str = "size", allow_fresh: bool = False) -> Resumed:
        """Which checkpoint the run goes on from: the same answer on every rank. Loads nothing.

        Collective. ``.checkpoint`` is None for a fresh start, which is the answer only when nothing can be lost by it;
        ``.skipped`` maps what was passed over to the reason. ``step``: that one, or an error; no pointer is consulted.
        ``verify="digest"`` reads every byte, shared among the ranks. ``allow_fresh``: start over though candidates exist.

        Raises on every rank alike: NoUsableCheckpoint, StepNotFound, ResumeError (a rank cannot tell, or another
        fingerprint), RankDisagreement, RankTimeout.
        """
        return self._resume(MAIN, step, verify, allow_fresh)

    def _resume(self, series: str, step: int | None, verify: str, allow_fresh: bool) -> Resumed:
        self._enter()
        found = self._restorer.resume(series, step, verify, allow_fresh)
        self._series[series].schedule.last = found.step
        return found

    def restore(self, state: Any, step: int | None = None, *, source: str | os.PathLike[str] | None = None, strict: bool = True,
                only: Collection[str] | None = None, verify: str = "size", allow_fresh: bool = False) -> int | None:
        """Resume and load into ``state``, in place; the step to go on from, or None for a fresh start.

        Collective. ``source``: a checkpoint of another root (a warm start: this run's own lineage stays empty).
        ``strict=False``: a member that the checkpoint lacks keeps what it has. ``only``: names of parts to load.

        Raises on every rank alike, also when only one rank's load failed: what ``resume`` raises, WorldMismatch,
        MemberMissing, IntegrityError, or ResumeError with that rank's cause.
        """
        return self._restore(MAIN, state, step, source, strict, only, verify, allow_fresh)

    def _restore(self, series: str, state: Any, step: int | None, source: str | os.PathLike[str] | None, strict: bool,
                 only: Collection[str] | None, verify: str, allow_fresh: bool) -> int | None:
        self._enter()
        found, part = self._restorer.restore(series, state, step, source, strict, only, verify, allow_fresh)
        self._behind.learn(part)
        if source is None and found is not None:
            self._series[series].schedule.last = found.step
        return found.step if found is not None else None

    # -- further series ------------------------------------------------------------------------------------------

    def series(self, name: str, *, keep_last: int | None = None, keep_every: int | None = None, keep_best: int | None = None,
               best_metric: str = "loss", best_mode: str = "min", retention: Policy | None = None,
               save_every: int | None = None) -> SeriesView:
        """A further line of checkpoints with limits of its own, under the same owner: ``step-100-<name>``. Local.

        Every rank makes it with the same arguments; the first save compares them. ``poll`` speaks of the main line only: of this
        one ``view.should_save(step)`` does.
        """
        self._usable()
        check_series(name)
        policy = options.policy(retention, keep_last, keep_every, keep_best, best_metric, best_mode)
        check_apart(name, self._series, self._naming)
        schedule = Schedule(save_every, at_start=False)
        self._series[name] = Series(policy, schedule)
        return SeriesView(self, name, schedule)

    # -- looking -------------------------------------------------------------------------------------------------

    def checkpoints(self, series: str = MAIN) -> list[Checkpoint]:
        """Committed checkpoints of this root, newest commit first. Local: must not steer collective code."""
        return self._reader().checkpoints(series)

    def all_steps(self) -> list[int]:
        """Steps of the committed checkpoints, ascending. Local: must not steer collective code."""
        return self._reader().all_steps()

    def latest_step(self) -> int | None:
        """Step of the newest commit, None when there is none. Local: ``resume`` is what ranks agree on."""
        return self._reader().latest_step()

    def best_step(self, metric: str = "loss", mode: str = "min") -> int | None:
        """Step of the best checkpoint by ``metric``, None when none has it. Local."""
        return self._reader().best_step(metric, mode)

    def _reader(self) -> Root:
        self._rotated()
        return Root(self.root, self._seams.files, self._seams.runtime)

    # -- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Say goodbye to the other ranks, delete what is in trash, give the root back. Collective; once.

        In a forked child it does nothing.
        """
        if self._ending.closed or os.getpid() != self._pid:
            return
        if self._hooks.running_here:
            self._usable()
        self._ending.goodbye()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: Any, value: BaseException | None, trace: Any) -> None:
        if value is None:
            self.close()
        elif not self._ending.closed and os.getpid() == self._pid:
            self._ending.leave_after(value)
