"""README's table "What launchers do with signals", measured: the real launchers, with ranks that write down what they get.

Its rows for srun and for SLURM itself are what the tests of ``tests/slurm`` do.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import support
from tests.frameworks.stage import ENVIRONMENT
from tests.harness import free_port

REPOSITORY = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
RECORDER = str(REPOSITORY / "tests/frameworks/recorder.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
HANDLED = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
RANKS = {"0", "1"}
ALL = {"0", "0-worker", "1", "1-worker"}

pytestmark = pytest.mark.xdist_group("launchers")


def alive(pid: int) -> bool:
    """And not a zombie that nobody waits for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait(what: str, seen: Callable[[], bool], limit: float = 90) -> None:
    end = time.monotonic() + limit
    while not seen():
        assert time.monotonic() < end, f"{what}: not seen within {limit:g} s"
        time.sleep(0.05)


class Launcher:
    """A launcher with two ranks, in a session of its own."""

    def __init__(self, folder: Path, *command: str, **variables: str) -> None:
        folder.mkdir()
        env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(REPOSITORY), "PATH": f"{BIN}:{os.environ['PATH']}", **variables}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            env.pop(name, None)
        self.folder = folder
        with (folder / "out").open("wb") as out:
            self.process = subprocess.Popen([*command, RECORDER, str(folder)], env=env, cwd=folder, stdin=subprocess.DEVNULL,
                                            stdout=out, stderr=subprocess.STDOUT, start_new_session=True)

    def said(self) -> str:
        return (self.folder / "out").read_text(errors="replace")

    def started(self) -> None:
        wait("every rank and its worker", lambda: self.who("pid") == ALL or self.process.poll() is not None)
        assert self.process.poll() is None, self.said()

    def who(self, stem: str) -> set[str]:
        """A signal's name: who got it."""
        return {path.name.partition(".")[2] for path in self.folder.glob(f"{stem}.*")}

    def pid(self, who: str) -> int:
        return int((self.folder / f"pid.{who}").read_text())

    def living(self) -> set[str]:
        return {who for who in self.who("pid") if alive(self.pid(who))}

    def got(self, name: str, who: set[str]) -> None:
        wait(f"{name} at {sorted(who)}", lambda: who <= self.who(name))
        assert self.who(name) == who

    def at(self, name: str, who: str) -> float:
        """When it got that signal, as ``time.time``."""
        return (self.folder / f"{name}.{who}").stat().st_mtime

    def leave(self, rank: str, code: int) -> None:
        """Have the rank and its worker end."""
        (self.folder / "new").write_text(str(code))
        (self.folder / "new").rename(self.folder / f"leave.{rank}")

    def gone(self, *who: str) -> float:
        """``time.time`` when they are; whoever was not told to leave was killed."""
        wait(f"the end of {who}", lambda: not self.living() & set(who))
        return time.time()

    def code(self) -> int:
        return self.process.wait(60)

    def below(self) -> int:
        """The process that the launcher has started."""
        found, = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(found)

    def end(self) -> None:
        for pid in (self.process.pid, *map(self.pid, self.who("pid"))):
            if alive(pid) and str(self.folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        self.process.wait(30)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    """``launch(name, *command, **variables)``; nothing of it outlives the test."""
    found: list[Launcher] = []

    def launch(name: str, *command: str, **variables: str) -> Launcher:
        found.append(Launcher(tmp_path / name, *command, **variables))
        return found[-1]

    yield launch
    for launcher in found:
        launcher.end()


def deepspeed(launch: Callable[..., Launcher], name: str) -> Launcher:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    return launch(name, str(BIN / "deepspeed"), "--num_accelerators=2", "--master_addr=127.0.0.1", f"--master_port={free_port()}")


def test_B121_torchrun_passes_on_what_it_handles_and_kills_after_its_timeout(launch: Callable[..., Launcher]) -> None:
    unhandled = launch("unhandled", *TORCHRUN)
    handled = launch("handled", *TORCHRUN, HANDLED, "--shutdown-timeout=2")
    term = launch("term", *TORCHRUN, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="2")
    for one in (unhandled, handled, term):
        one.started()

    unhandled.process.send_signal(signal.SIGUSR1)
    assert unhandled.code() == -signal.SIGUSR1  # a shell's 138
    assert unhandled.living() == ALL and not unhandled.who("SIGUSR1"), "orphans, and nobody told them"

    for one, name in ((handled, "SIGUSR1"), (term, "SIGTERM")):
        one.process.send_signal(signal.Signals[name])
        one.got(name, ALL)
        one.leave("0", 0)
    for one, name in ((handled, "SIGUSR1"), (term, "SIGTERM")):
        assert one.code() == 1, one.said()
        assert one.gone("1", "1-worker") - one.at(name, "1") >= 2 - 0.5, "killed, but not at once"
        assert not one.living() and one.who("ended") == {"0", "0-worker"}


def test_B121_the_deepspeed_launchers_pass_no_USR1_on_and_the_upper_one_nothing(launch: Callable[..., Launcher]) -> None:
    one = deepspeed(launch, "usr1")
    one.started()
    below = one.below()
    one.process.send_signal(signal.SIGUSR1)
    assert one.code() == -signal.SIGUSR1 and alive(below)
    os.kill(below, signal.SIGUSR1)
    wait("the end of deepspeed.launcher.launch", lambda: not alive(below))
    assert one.living() == ALL and not one.who("SIGUSR1"), "orphans, and nobody told them"


def test_B121_what_ranks_get_when_one_fails_and_how_deepspeed_ends_them_one_after_the_other(
        launch: Callable[..., Launcher]) -> None:
    """All of them at once: each takes half a minute."""
    term, failed = deepspeed(launch, "term"), deepspeed(launch, "failed")
    torchrun = launch("torchrun", *TORCHRUN, "--shutdown-timeout=2")
    for one in (term, failed, torchrun):
        one.started()
    below = term.below()

    failed.leave("1", 75)
    torchrun.leave("1", 75)
    term.process.send_signal(signal.SIGTERM)
    assert term.code() == -signal.SIGTERM and alive(below)  # a shell's 143
    assert term.living() == ALL and not term.who("SIGTERM")
    os.kill(below, signal.SIGTERM)
    term.got("SIGTERM", {"0", "0-worker"})
    term.leave("0", 0)
    term.got("SIGTERM", ALL)

    for one, others in ((term, ("1", "1-worker")), (failed, ("0", "0-worker")), (torchrun, ("0", "0-worker"))):
        assert one.gone(*others) - one.at("SIGTERM", others[0]) >= 30 - 1, "30 s after TERM: no option changes that"
        assert not one.living() and others[0] not in one.who("ended"), "killed"
    assert failed.who("SIGTERM") == torchrun.who("SIGTERM") == {"0", "0-worker"}
    wait("the end of deepspeed.launcher.launch", lambda: not alive(below))
    assert failed.code() == 75, "the rank's"
    assert torchrun.code() == 1, "whatever the rank's was"


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_B121_mpiexec_passes_signals_on_to_every_rank(mpi: str, launch: Callable[..., Launcher]) -> None:
    more = support.openmpi() if mpi == "openmpi" else {}
    mpiexec = [f"{more['OPAL_PREFIX']}/bin/mpiexec", "--oversubscribe"] if more else [str(BIN / "mpiexec")]
    if not os.access(mpiexec[0], os.X_OK):
        pytest.skip("needs the package mpich")
    told, killed = (launch(name, *mpiexec, "-n", "2", sys.executable, **more) for name in ("told", "killed"))
    for one in (told, killed):
        one.started()

    told.process.send_signal(signal.SIGUSR1)
    told.got("SIGUSR1", ALL)
    told.process.send_signal(signal.SIGTERM)
    told.got("SIGTERM", ALL)
    os.kill(killed.pid("1"), signal.SIGKILL)
    ended = killed.gone(*ALL)
    assert killed.code() in (9, 128 + 9), killed.said()
    if mpi == "openmpi":
        assert told.gone(*ALL) - told.at("SIGTERM", "0") < 5 and ended - killed.at("SIGTERM", "0") < 5, "no time for a save"
        return
    assert not killed.who("SIGTERM"), "KILL, at once"
    told.leave("1", 3)
    told.gone("1", "1-worker")
    told.leave("0", 0)
    assert told.code() == 3 and told.who("ended") == ALL, "after an exit code others go on"
