"""One rank's part of the DeepSpeed tests: what they check inside the ranks, on a real engine."""

from __future__ import annotations

import errno
import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

import distckpt
from distckpt.durable import REAL
from distckpt.errors import ConfigError, DiskFull, RankTimeout, SaveError, WorldMismatch
from distckpt.options import Seams, Timeouts
from distckpt.payloads.deepspeed import DeepSpeed, claiming
from distckpt.testing.faults import FaultyFiles, Operation, call, fail
from tests.frameworks.dsranks import engine, final, micro, step
from tests.frameworks.story import digest

OPTIMIZER = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


def wait_for(path: str, limit: float = 30.0) -> None:
    until = time.monotonic() + limit
    while not os.path.exists(path):
        assert time.monotonic() < until, f"nobody made {path}"
        time.sleep(0.01)


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[Any]:
    real = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield real
    finally:
        setattr(owner, name, real)


@contextmanager
def counted(owner: Any, name: str) -> Iterator[list[str]]:
    """What ``owner.name(state, path)`` is called with, as file names."""
    calls: list[str] = []
    real = getattr(owner, name)

    def count(*args: Any, **more: Any) -> Any:
        paths = [a for a in (*args, *more.values()) if isinstance(a, str) or hasattr(a, "path")]
        calls.append(os.path.basename(str(getattr(paths[0], "path", paths[0]))) if paths else "?")
        return real(*args, **more)

    with patched(owner, name, count):
        yield calls


def saves(rank: int, world: int, root: str, zero: int) -> dict[str, Any]:
    """Three saves of one engine, the second in the background, with keep_last=2; and what wrote them."""
    made = engine(zero)
    client = {"epoch": 3, "note": "mine"}
    state = DeepSpeed(made, client_state=client)
    told: dict[str, Any] = {}
    with distckpt.CheckpointManager(root, keep_last=2) as manager:
        with counted(TorchCheckpointEngine, "save") as own, counted(torch, "save") as serialised:
            step(made)
            manager.save(made.global_steps, state)
            step(made)
            told["behind"] = final(made)
            manager.save(made.global_steps, state, background=True)
            step(made)  # what was staged must not change with it
            manager.wait()
            told["sync"] = final(made)
            manager.save(made.global_steps, state, metrics={"loss": 1.0})
        told["own"], told["serialised"] = own, serialised
        client["epoch"] = 9
    return told


def loads(rank: int, world: int, root: str, zero: int, tag: str | None, out: str) -> tuple[str, Any]:
    """DeepSpeed's own loader, and its scripts, without a trace of distckpt in this process."""
    made = engine(zero)
    ours = [name for name in sys.modules if name.partition(".")[0] == "distckpt"]
    shown = final  # it was imported before, and asks the engine only
    for name in ours:
        sys.modules[name] = None  # type: ignore[assignment]
    path, client = made.load_checkpoint(root, tag=tag)
    assert path is not None and os.path.dirname(path) == os.path.join(root, tag or Path(root, "latest").read_text().strip())
    found = shown(made)
    if zero and rank == 0 and tag is None:
        sys.path.insert(0, root)  # as of a script that is run
        for name, *more in (["zero_to_fp32.py", root, out], ["zero_to_torch.py", root, f"{out}-torch", "--dtype", "float32"]):
            sys.argv = [name, *more]
            runpy.run_path(os.path.join(root, name), run_name="__main__")
    return found, (client["epoch"], client["note"], made.global_steps, _weights(made) if zero < 3 else None)


def _weights(made: Any) -> str:
    return digest(made.module.state_dict())


def restores(rank: int, world: int, root: str, zero: int, wanted: int | None) -> tuple[int | None, str, dict[str, Any]]:
    """By distckpt: the newest, or an earlier step while ``latest`` names another (FIELD_CASES B27)."""
    made, client = engine(zero), {"epoch": 0}
    with distckpt.CheckpointManager(root) as manager:
        if zero == 3:
            try:
                manager.restore(DeepSpeed(made, load_options={"load_optimizer_states": False}))
            except ConfigError as error:
                assert "8499" in str(error), error
            else:
                raise AssertionError("loaded, and from where?")
        found = manager.restore(DeepSpeed(made, client_state=client), step=wanted)
    assert made.global_steps == found
    return found, final(made), client


def compares(rank: int, world: int, root: str, zero: int) -> list[tuple[str, bool]]:
    """The files of a sync and of a background save of one state: the same names, the same content."""
    made = engine(zero)
    step(made)
    with distckpt.CheckpointManager(root) as manager:
        kinds = [manager.series(name) for name in ("sync", "behind")]
        kinds[0].save(made.global_steps, DeepSpeed(made))
        kinds[1].save(made.global_steps, DeepSpeed(made), background=True)
        manager.wait()
    return same_files(*(Path(root, f"step-1-{kind}") for kind in ("sync", "behind")))


def same_files(one: Path, other: Path) -> list[tuple[str, bool]]:
    names = {p.name for p in one.iterdir()} | {p.name for p in other.iterdir()}
    return [(name, digest(_read(one / name)) == digest(_read(other / name))) for name in sorted(names - {"commit.json"})]


def _read(path: Path) -> Any:
    return torch.load(path, weights_only=False) if path.suffix == ".pt" else path.read_text()


def refusals(rank: int, world: int, root: str) -> list[str]:
    """What is wrong before any I/O, and in the step; and the next save works."""
    made = engine(2)
    state, texts = DeepSpeed(made), []
    with distckpt.CheckpointManager(root) as manager:
        micro(made)
        for background in (False, True):
            try:
                manager.save(0, state, background=background)
                manager.wait()
            except (ConfigError, SaveError) as error:
                texts.append(str(error))
        micro(made)
        for background in (False, True):
            try:
                manager.save(17, state, background=background)
                manager.wait()
            except SaveError as error:
                texts.append(str(error))
        with patched(made.checkpoint_engine, "is_decoupled", lambda: True):
            try:
                manager.save(1, state)
            except ConfigError as error:
                texts.append(str(error))
        with patched(made, "use_node_local_storage", lambda: True), pytest.MonkeyPatch.context() as patch:
            patch.setenv("LOCAL_WORLD_SIZE", "1")  # as on two nodes
            for background in (False, True):
                try:
                    manager.save(1, state, background=background)
                    manager.wait()
                except ConfigError as error:
                    texts.append(str(error))
            patch.setenv("LOCAL_WORLD_SIZE", str(world))
            manager.save(1, state)
        try:
            manager.restore(state, only={"model"})
        except ConfigError as error:
            texts.append(str(error))
    for wrong in (lambda: DeepSpeed(made.module), lambda: DeepSpeed(made, client_state=[1]),  # type: ignore[arg-type]
                  lambda: distckpt.TrainState(model=made, optimizer=made.optimizer),
                  lambda: distckpt.TrainState(model=made, critic=made)):
        try:
            wrong()
        except ConfigError as error:
            texts.append(str(error))
    return texts


def alone(rank: int, world: int, root: str, background: bool, zero: int) -> str:
    """Rank 0 saves, rank 1 does not (FIELD_CASES B49)."""
    made = engine(zero)
    step(made)
    manager = distckpt.CheckpointManager(root, timeouts=Timeouts(arrive=2, progress=5, visible=5, close=5))
    done = f"{root}.done"
    text = ""
    if rank == 0:
        try:
            manager.save(1, DeepSpeed(made), background=background)
            manager.wait()
        except RankTimeout as error:
            text = str(error)
        Path(done).touch()
    else:
        wait_for(done)
    return text


def failures(rank: int, world: int, root: str, background: bool, zero: int) -> dict[str, tuple[str, str]]:
    """Everything that goes wrong on rank 1 while files are written; each time both ranks hear of it, and the next works."""
    made = engine(zero)
    told: dict[str, tuple[str, str]] = {}
    real = TorchCheckpointEngine.save

    def raises(self: Any, state_dict: Any, path: Any) -> None:
        raise RuntimeError("the writer of rank 1 is broken")

    def cut(self: Any, state_dict: Any, path: Any) -> None:
        real(self, state_dict, path)
        os.truncate(path.path, path.size // 2)

    def swallows(self: Any, state_dict: Any, path: Any) -> None:
        path.write(b"half")
        path.flush()
        try:
            raise_on_write(path)
        except OSError:
            return

    def raise_on_write(path: Any) -> None:
        with patched(path._out, "write", lambda piece: _full()):
            path.write(b"the other half")
            path.flush()

    def nothing(self: Any, state_dict: Any, path: Any) -> None:
        return

    def short(self: Any, state_dict: Any, path: Any) -> None:
        path.write(b"PK\x03\x04 and no end")

    full = fail(errno.ENOSPC, op="write", path=lambda p: p.endswith(_last(zero, 1)) and "/step-2/" in p, forever=True)
    files = FaultyFiles(REAL, full) if rank == 1 else REAL
    with distckpt.CheckpointManager(root, seams=Seams(files=files)) as manager:
        step(made)
        manager.save(1, DeepSpeed(made), background=background)
        step(made)

        def attempt(name: str, writer: Callable[..., None] | None) -> None:
            with patched(TorchCheckpointEngine, "save", writer if writer is not None and rank == 1 else real):
                try:
                    manager.save(2, DeepSpeed(made), background=background)
                    manager.wait()
                    told[name] = ("saved", "")
                except SaveError as error:
                    told[name] = (type(error).__name__, "; ".join(map(str, error.failures.values())) or str(error))
            standing = sorted(p.name for p in Path(root).iterdir() if p.name.startswith("step-"))
            assert standing == ["step-1"], standing

        attempt("full", None)
        full.forever, full.seen = False, 10**6
        for name, writer in (("raises", raises), ("cut", cut), ("swallows", swallows), ("nothing", nothing), ("short", short)):
            attempt(name, writer)
        one = made._get_rank_zero_ckpt_name
        with patched(made, "_get_rank_zero_ckpt_name", lambda path, tag, mp, dp, bf16: one(path, tag, mp, 0, bf16)):
            attempt("one name", None)  # rank 1 takes rank 0's (FIELD_CASES B35, B36)
        manager.save(2, DeepSpeed(made), background=background)
        manager.wait()
        assert manager.all_steps() == [1, 2]
    assert told["full"][0] == DiskFull.__name__
    return told


def _full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _last(zero: int, rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def slow(rank: int, world: int, root: str) -> None:
    """Rank 1 is slow to write (FIELD_CASES B19, B103): rank 0 has left DeepSpeed's barriers long before, and nothing names
    the new checkpoint yet."""
    made = engine(2)
    left = f"{root}.left"
    seen: list[str] = []

    def look(operation: Operation) -> None:
        wait_for(left)
        seen.append(Path(root, "latest").read_text().strip())
        seen.extend(p.name for p in Path(root).iterdir() if p.name == "step-2")

    files = FaultyFiles(REAL, call(look, op="write", path=f"/step-2/{OPTIMIZER}")) if rank == 1 else REAL
    with distckpt.CheckpointManager(root, seams=Seams(files=files)) as manager:
        for _ in range(2):
            step(made)
            state = DeepSpeed(made)
            with manager.saving(made.global_steps) as out, claiming(made, out):
                made.save_checkpoint(os.path.dirname(out.directory), tag=os.path.basename(out.directory))
                if rank == 0 and made.global_steps == 2:
                    Path(left).touch()
        assert state is not None
    assert Path(root, "latest").read_text().strip() == "step-2"
    assert rank == 0 or seen == ["step-1"], seen


def nested(rank: int, world: int, root: str) -> list[str]:
    """Somebody else calls the engine, with a directory and a tag of its own, and wants ``latest``: as Accelerate does."""
    made = engine(2)
    step(made)
    with distckpt.CheckpointManager(root, naming="checkpoint-{step}") as manager:
        with manager.saving(1) as files, claiming(made, files):
            made.save_checkpoint(files.directory, "pytorch_model")
        assert "save_checkpoint" not in vars(made) and isinstance(made.checkpoint_engine, TorchCheckpointEngine)
        came: list[int] = []
        try:
            with manager.saving(2) as files, claiming(made, files):
                made.save_checkpoint(os.path.join(root, "elsewhere") if rank == 1 else files.directory, "pytorch_model")
                came.append(rank)  # an error of rank 1's files must not keep it from what others wait for here
                dist.barrier()
        except SaveError as error:
            assert came and list(error.failures) == [1] and "not in this attempt" in str(error), error
        else:
            raise AssertionError("written where it must not be")
    found = Path(root, "checkpoint-1")
    names = sorted(str(p.relative_to(found)) for p in found.rglob("*") if p.is_file() and p.name != "commit.json")
    assert not Path(root, "elsewhere").exists()
    before = final(made)
    step(made)
    other = engine(2)
    other.load_checkpoint(str(found))
    assert final(other) == before
    return names


def fenced(rank: int, world: int, root: str) -> None:
    """The attempt's directory has been taken away (a takeover): nobody makes it again (S5; FIELD_CASES B41)."""
    made = engine(1)
    step(made)
    gone = []
    with distckpt.CheckpointManager(root) as manager:
        try:
            with manager.saving(1) as files, claiming(made, files):
                dist.barrier()
                if rank == 0:
                    os.rename(os.path.dirname(files.directory), f"{root}.taken")
                dist.barrier()
                gone.append(files.directory)
                made.save_checkpoint(os.path.dirname(files.directory), tag=os.path.basename(files.directory))
        except SaveError as error:
            assert all("No such file" in str(f) for f in error.failures.values()), error
        else:
            raise AssertionError("saved into nothing")
        assert not os.path.exists(os.path.dirname(gone[0]))


def other_world(rank: int, world: int, root: str, zero: int) -> str:
    """With another number of ranks than saved."""
    made = engine(zero)
    with distckpt.CheckpointManager(root) as manager:
        try:
            found = manager.restore(DeepSpeed(made))
        except WorldMismatch as error:
            return str(error)
    return f"restored {found}, {made.global_steps}"


def rotten(rank: int, world: int, root: str) -> str:
    """One byte of rank 1's file has changed: nothing is unpickled, and rank 0 is not left in ZeRO-3's collectives."""
    made = engine(3)
    step(made)
    with distckpt.CheckpointManager(root) as manager:
        manager.save(1, DeepSpeed(made))
        if rank == 1:
            path = Path(root, "step-1", OPTIMIZER)
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(bytes(data))
        dist.barrier()
        try:
            manager.restore(DeepSpeed(made))
        except distckpt.DistckptError as error:
            return f"{type(error).__name__}: {error}"
    return "restored"


def block(rank: int, world: int, root: str, file: str) -> list[str]:
    """The block in DeepSpeed's configuration: it is passed over by DeepSpeed, and makes the manager."""
    from distckpt.integrations.deepspeed import manager_from

    made = engine(1, distckpt={"root": root, "save_every": 2, "keep_last": 1, "timeouts": {"arrive": 30}})
    with manager_from(made) as manager:
        while made.global_steps < 4:
            if manager.poll(made.global_steps).save:
                manager.save(made.global_steps, DeepSpeed(made))
            step(made)
        manager.save(made.global_steps, DeepSpeed(made))
    assert manager.all_steps() == [4]
    config = {"train_batch_size": 2, "distckpt": {"root": root, "save_every": 3}}
    Path(f"{root}.{rank}.json").write_text(json.dumps(config))
    for given in (config, f"{root}.{rank}.json", Path(f"{root}.{rank}.json")):
        with manager_from(given, keep_last=2) as manager:
            assert manager.all_steps() == [4] and manager.poll(6).save and not manager.poll(7).save
    texts = []
    for wrong in ({"distckpt": {"root": root, "save_evry": 2}}, {"distckpt": {}}, {"distckpt": 3}, file, 4,
                  {"distckpt": {"root": root, "timeouts": {"arive": 1}}}):
        try:
            manager_from(wrong)
        except ConfigError as error:
            texts.append(str(error))
    return texts
