"""A real power cut: a peer saves into ext4 or XFS on a loop device, and the file system is shut down right after its last save
returned. What was not written by then is gone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.proof import packages
from scripts.proof.peers.judge import Content, Goldens, Picker, Server, verdict
from scripts.proof.peers.known import Peer
from scripts.proof.peers.recording import read_tree

SYSTEMS = {"ext4": (64, ["mkfs.ext4", "-q", "-F"], "loop"), "xfs": (320, ["mkfs.xfs", "-q", "-f"], "loop,nouuid")}
LIMIT = 120.0


def missing() -> str | None:
    """What this machine lacks for it, or None."""
    if os.geteuid() != 0:
        return "root, for mounts"
    return packages.lacking(lambda: [tools[0] for _, tools, _ in SYSTEMS.values() if shutil.which(tools[0]) is None],
                            "e2fsprogs", "xfsprogs")


@contextmanager
def mounted(image: Path, folder: Path, options: str) -> Iterator[None]:
    """``image`` on ``folder``. Mounting is what recovers it after a cut."""
    folder.mkdir(exist_ok=True)
    _call("mount", "-o", options, str(image), str(folder))
    try:
        yield
    finally:
        end = time.monotonic() + LIMIT
        while True:  # a rank that was killed may hold it for a moment
            try:
                _call("umount", str(folder))
                break
            except RuntimeError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)


def cut(peer: Peer, system: str, server: Server, picker: Picker, scratch: Path) -> tuple[str, str]:
    """What is wrong after one cut (nothing: all is well), and how many files of the newest save are still there.

    RuntimeError when the peer could not save there at all."""
    with tempfile.TemporaryDirectory(dir=scratch) as here:
        return _cut(peer, system, server, picker, Path(here))


def _cut(peer: Peer, system: str, server: Server, picker: Picker, scratch: Path) -> tuple[str, str]:
    image, folder, copies = scratch / "image", scratch / "mount", scratch / "copies"
    size, make, options = SYSTEMS[system]
    with image.open("wb") as out:
        out.truncate(size << 20)
    _call(*make, str(image))
    copies.mkdir()
    with mounted(image, folder, options):
        for name in ("root", "tmp"):
            (folder / "work" / name).mkdir(parents=True)
        _call("sync", "-f", str(folder))
        asked = {"work": str(folder / "work"), "copies": str(copies), "mount": str(folder), "log": ""}
        answer = server.ask(json.dumps(asked), LIMIT)
        if answer["code"]:
            raise RuntimeError(f"its save failed on {system}: {server.complaint()}")
        if _writable(folder):
            raise RuntimeError(f"{peer.name}: {system} was not shut down")
    after = scratch / "after"
    # A process in another mount namespace may hold the mount a while longer: the image would come back shut down.
    _call("cp", "--sparse=always", str(image), str(after))
    with mounted(after, folder, options):
        left = read_tree(folder / "work" / "root")
    golden = copied(system, picker, copies)
    newest_save = max(golden.of)
    path, newest = golden.of[newest_save]
    files = [name for name, data in newest.items() if data is not None and peer.needs(name)]
    there = sum(left.get(os.path.normpath(f"{path}/{name}")) == newest[name] for name in files)
    return verdict(golden.match(picker.pick(left)), newest_save), f"{there} of {len(files)} files of the newest whole"


def copied(system: str, picker: Picker, copies: Path) -> Goldens:
    """What the copies that were made at the acknowledgements are resumed from."""
    golden: dict[int, Content] = {}
    for number, copy in enumerate(sorted(copies.iterdir(), key=lambda path: int(path.name)), 1):
        content = picker.pick(read_tree(copy))
        if content is None:
            raise RuntimeError(f"{picker.peer.name}: nothing to resume from after save {number} on {system}")
        golden[number] = content
    return Goldens(picker.peer, golden)


def _writable(folder: Path) -> bool:
    try:
        (folder / "probe").touch()
    except OSError:
        return False
    return True


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
