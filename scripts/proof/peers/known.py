"""The peers: how each is run, and which of its files a restart reads."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scripts.proof.peers.child import environment

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
HOMES = Path(os.environ.get("DISTCKPT_PEERS", "/opt/peers"))
INSTALLS = {
    "torch": ["transformers", "accelerate", "lightning", "torch-checkpointing", "deepspeed"],
    "orbax": ["jax", "orbax-checkpoint"],
}


@dataclass(frozen=True)
class Peer:
    """``home``: its environment under HOMES, or None for the one this runs in. ``unread``: files of a checkpoint that a
    restart does not read, so that their loss is none; ``optional``: may be gone, but not wrong. ``visible``: what ``pick`` can
    see of a root; states that differ only elsewhere are one state."""

    name: str
    program: str
    home: str | None
    env: Mapping[str, str] = field(default_factory=dict)
    unread: str = "(?!)"
    optional: str = "(?!)"
    visible: str = ""
    ours: bool = False

    @property
    def python(self) -> str:
        return sys.executable if self.home is None else str(HOMES / self.home / "bin" / "python")

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(REPOSITORY) if self.ours else "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
                "TORCH_EXTENSIONS_DIR": str(HOMES / "extensions"), "TORCH_CPP_LOG_LEVEL": "ERROR", "RES_OPTIONS": "attempts:0",
                "PYTHONDONTWRITEBYTECODE": "1", **self.env}

    def command(self, *arguments: str) -> list[str]:
        return [self.python, str(HERE / "programs" / f"{self.program}.py"), *arguments]

    def version(self) -> str:
        """Its version, from a run of its program; RuntimeError with the reason when it does not start."""
        try:
            done = subprocess.run(self.command("version"), capture_output=True, text=True, timeout=180, env=self.environment)
        except OSError as error:
            raise RuntimeError(str(error)) from error
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["it said nothing"])[-1])
        return done.stdout.strip().splitlines()[-1]

    def sees(self, path: str) -> bool:
        return re.match(self.visible, path) is not None

    def reads(self, path: str) -> bool:
        return re.search(self.unread, path) is None

    def needs(self, path: str) -> bool:
        return self.reads(path) and re.search(self.optional, path) is None


_ORBAX = r"(^|/)(commit_success\.txt|_CHECKPOINT_METADATA|_sharding|descriptor/.*|ocdbt\.process_\d+/.*)$"
_RECOVERY_SCRIPTS = r"^zero_to_(fp32|torch)\.py$"
PEERS = (
    Peer("torch DCP, new directory per step", "torch_dcp", None),
    Peer("torch DCP, same directory overwritten", "torch_dcp", None, {"PEER_SAME": "1"}),
    Peer("torch DCP, 2 ranks", "torch_dcp", None, {"PEER_WORLD": "2"}),
    Peer("DeepSpeed", "deepspeed_engine", "torch", visible=f"(?!{_RECOVERY_SCRIPTS})"),
    Peer("DeepSpeed, 2 ranks", "deepspeed_engine", "torch", {"PEER_WORLD": "2"}, visible=f"(?!{_RECOVERY_SCRIPTS})"),
    Peer("DeepSpeed, 2 ranks, one slow", "deepspeed_engine", "torch", {"PEER_WORLD": "2", "PEER_SLOW": "1"},
         visible=f"(?!{_RECOVERY_SCRIPTS})"),
    Peer("HF Trainer", "hf_trainer", "torch", unread=r"training_args\.bin$"),
    Peer("Accelerate", "accelerate_state", "torch"),
    Peer("Lightning", "lightning_checkpoint", "torch", visible=r"last"),
    Peer("Orbax", "orbax_manager", "orbax", unread=_ORBAX, optional=r"/_METADATA$"),
    Peer("torch_checkpointing", "torch_checkpointing_manager", "torch", visible=r"step_\d+(/|$)"),
    Peer("distckpt", "distckpt_manager", None, ours=True),
    Peer("distckpt, 2 ranks", "distckpt_manager", None, {"PEER_WORLD": "2"}, ours=True),
)


def install(home: str) -> str:
    """Make the environment ``home``; what went wrong, or nothing."""
    folder = HOMES / home
    stamp = folder / "complete"
    if stamp.exists():
        return ""
    why = environment(folder, INSTALLS[home])
    if not why and home == "torch":
        why = _build_extension()
        if why:
            stamp.unlink()
    return why


def _build_extension() -> str:
    """DeepSpeed compiles on first use, which takes minutes; and waits for ever for a build that was killed, hence the rmtree."""
    shutil.rmtree(HOMES / "extensions", ignore_errors=True)
    peer = next(peer for peer in PEERS if peer.program == "deepspeed_engine")
    build = "import deepspeed, sys; sys.modules['deepspeed.comm.torch'].build_shm_op()"
    done = subprocess.run([peer.python, "-c", build], capture_output=True, text=True, timeout=1200,
                          env={**peer.environment, "DS_ACCELERATOR": "cpu"})
    return done.stderr[-500:] if done.returncode else ""
