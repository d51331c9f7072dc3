"""The order of the system calls of a real save, as the kernel saw them. The seam itself is not trusted here.

Data fsync, directory fsync, marker write, marker fsync, directory fsync, rename, both parents' fsync, only then the first
rename into trash, and no unlink of what was rotated before both sides of that rename are synced (DESIGN 4; S9, S21).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness import free_port

_CALLS = "write,pwrite64,fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,rmdir,mkdir"
_LINE = re.compile(r"^(\d+\.\d+) (\w+)\((.*)\)\s+= (-?\d+).*<(\d+\.\d+)>$")

_PROGRAM = """
import os, sys, torch, distckpt
rank, world, root = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if world > 1:
    import torch.distributed as dist
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"tcp://127.0.0.1:{sys.argv[4]}")
state = {"w": torch.full((1000,), float(rank))}
with distckpt.CheckpointManager(root, keep_last=1) as manager:
    manager.save(1, state)
    with manager.saving(2) as files:
        os.makedirs(os.path.dirname(files.mine("sub/deep/x.bin")), exist_ok=True)
        with open(files.mine("sub/deep/x.bin"), "wb") as out:
            out.write(b"x" * 5000)
os._exit(0)
"""


@dataclass(frozen=True)
class Seen:
    begin: float
    end: float
    name: str
    arguments: str

    def paths(self) -> list[str]:
        return re.findall(r'[<"](/[^>"]*)[>"]', self.arguments)


def _trace(folder: Path, world: int) -> list[list[Seen]]:
    """The calls of each rank, by the time they ended."""
    port = free_port()
    program = folder / "program.py"
    program.write_text(_PROGRAM)
    ranks = []
    for rank in range(world):
        out = folder / f"trace-{rank}"
        command = ["strace", "-ff", "-ttt", "-T", "-y", "-s", "256", "-e", f"trace={_CALLS}", "-o", str(out),
                   sys.executable, str(program), str(rank), str(world), str(folder / "root"), str(port)]
        ranks.append(subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    for process in ranks:
        said = process.communicate(timeout=150)[0]
        assert process.returncode == 0, said.decode()[-3000:]
    traces = []
    for rank in range(world):
        seen = []
        for file in folder.glob(f"trace-{rank}.*"):
            for line in file.read_text(errors="replace").splitlines():
                match = _LINE.match(line)
                if match and int(match[4]) >= 0 and str(folder / "root") in match[3]:
                    seen.append(Seen(float(match[1]), float(match[1]) + float(match[5]), match[2], match[3]))
        assert seen, "strace saw nothing of the root"
        traces.append(sorted(seen, key=lambda s: s.end))
    return traces


def _find(trace: list[Seen], names: str, *parts: str, last: bool = False) -> Seen:
    """The first (or last) call of one of ``names`` whose paths match each regular expression of ``parts`` in turn."""
    found = [s for s in trace if s.name in names.split("|") and len(s.paths()) >= len(parts)
             and all(re.search(part, path) for part, path in zip(parts, s.paths(), strict=False))]
    assert found, f"no {names} of {parts}"
    return found[-1] if last else found[0]


def _in_order(*calls: Seen) -> None:
    for one, other in zip(calls, calls[1:], strict=False):
        assert one.end <= other.begin + 1e-6, f"{other.name}({other.arguments}) began before {one.name}({one.arguments}) ended"


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("world", [1, 2])
def test_one_save_and_its_rotation(world: int, tmp_path: Path) -> None:
    traces = _trace(tmp_path, world)
    main = traces[0]
    staged = r"staging/1/[0-9a-f]{16}/step-2"
    marker_write = _find(main, "write", staged + r"/commit\.json$")
    marker_fsync = _find(main, "fsync", staged + r"/commit\.json$")
    rename = _find(main, "rename|renameat|renameat2", staged + "$", r"/root/step-2$")
    into_trash = _find(main, "rename|renameat|renameat2", r"/root/step-1$", r"trash/1/step-1\.")
    for rank, trace in enumerate(traces):
        name = rf"x\.rank-0000{rank}-of-0000{world}\.bin$"
        _in_order(_find(trace, "write", staged + "/sub/deep/" + name), _find(trace, "fsync", staged + "/sub/deep/" + name),
                  _find(trace, "fsync", staged + "/sub/deep$"), _find(trace, "fsync", staged + "/sub$"),
                  _find(trace, "fsync", staged + "$"), marker_write)
    _in_order(_find(main, "fsync", staged + "$"), marker_write, marker_fsync)
    after_marker = [s for s in main if s.begin >= marker_fsync.end]
    _in_order(marker_fsync, _find(after_marker, "fsync", staged + "$"), rename)
    after_rename = [s for s in main if s.begin >= rename.end]
    _in_order(rename, _find(after_rename, "fsync", r"staging/1/[0-9a-f]{16}$"), into_trash)
    pointer = _find(after_rename, "rename|renameat|renameat2", r"latest\.tmp$", r"/root/latest$")
    _in_order(rename, _find(after_rename, "fsync", r"/root$"), pointer, into_trash)
    after_trash = [s for s in main if s.begin >= into_trash.end]
    first_unlink = _find(after_trash, "unlink|unlinkat", r"trash/1/step-1\.")
    _in_order(into_trash, _find(after_trash, "fsync", r"trash/1$"), first_unlink)
    _in_order(into_trash, _find(after_trash, "fsync", r"/root$"), first_unlink)
    assert first_unlink.paths()[0].endswith("commit.json"), "the marker is the first to go (S3)"
    after_unlink = [s for s in main if s.begin >= first_unlink.end]
    second = next(s for s in after_unlink if s.name in ("unlink", "unlinkat") and "trash/1/step-1." in s.arguments)
    _in_order(first_unlink, _find(after_unlink, "fsync", r"trash/1/step-1\.[0-9a-f]{16}$"), second)
