"""Whom a root is shared with, and the key that its markers are signed with.

A marker's seal and the digests in it say that bytes are whole, not who wrote them. With ``DISTCKPT_HMAC_KEY_FILE`` set, on
every rank and for every reader, markers are signed by HMAC-SHA256 over head and body, which hold name, series, step,
attempt, seq, run and generation, and the manifest: a directory whose marker is unsigned or signed otherwise is no
checkpoint, for resume, retention, ``ls`` and everybody else, and is passed over with that reason.

What this prevents: a forged or edited marker; a true marker put into a directory of another name, or into a root of
another run. With ``digest="sha256"`` also: files exchanged under a true marker, or written into while they are loaded,
wherever digests are checked (always before anything is unpickled; every file with ``verify="digest"``). XXH3 digests find
damage and no forger; ``verify="size"`` reads none of a tensor file.

What it cannot prevent: a whole older checkpoint of this run, marker and files, put back under its own name is authentic. It
is passed over where the journal records a newer commit under that name, and the journal is not signed, so that is a hint
and no proof. Nor does it keep anybody who may write in the root from deleting checkpoints, or from having them passed
over (``rejected/``, ``rollback.json``). And whoever can read the key can sign. Markers from before the key count for nothing
once it is set: begin a root of its own with it.

Of the usual checklist for shared directories this is declined. Names that differ by case only: they are two files here, and
where they are one, ``O_EXCL`` refuses the second. The owner and the number of links of a file: groups share roots, and
``dedup="link"`` makes links; size and digest judge what is read. Modes of 0700 and 0600: the umask is the user's word. An
interface of the job's own: TCPStore listens on all, and by which one the other ranks come only the launcher knows.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from functools import lru_cache

from distckpt.durable import Files
from distckpt.errors import ConfigError

KEY_VARIABLE = "DISTCKPT_HMAC_KEY_FILE"
_SHORTEST, _LONGEST = 16, 4096
_OTHERS_WRITE, _STICKY = 0o002, 0o1000


def key() -> bytes | None:
    """The key to sign and check markers with; None when none is set. ConfigError when it cannot be used."""
    path = os.environ.get(KEY_VARIABLE)
    return _read(path) if path else None


@lru_cache(maxsize=4)
def _read(path: str) -> bytes:
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):  # the first rank would empty a pipe, and one with a silent writer gives nothing at all
                raise ConfigError(f"{KEY_VARIABLE}={path} is no regular file: put the key into one")
            found = file.read(_LONGEST + 1).strip()
    except OSError as error:
        raise ConfigError(f"{KEY_VARIABLE}={path} cannot be read: {error.strerror or error}; every rank and reader needs the "
                          "key, or unset the variable") from error
    if mode & _OTHERS_WRITE:
        raise ConfigError(f"{KEY_VARIABLE}={path} can be written by every user: chmod o-w, and make a new key")
    if not _SHORTEST <= len(found) <= _LONGEST:
        raise ConfigError(f"{KEY_VARIABLE}={path} holds {len(found)} bytes, not {_SHORTEST} to {_LONGEST}: put random ones "
                          "there, such as those of 'openssl rand -hex 32'")
    return found


def sign(secret: bytes, data: bytes) -> str:
    return "hmac-sha256:" + hmac.new(secret, b"distckpt marker 1\0" + data, hashlib.sha256).hexdigest()


def key_id(secret: bytes | None) -> str | None:
    """What ranks compare to find out that they hold the same key; it tells nothing of the key."""
    return None if secret is None else hmac.new(secret, b"distckpt key id\0", hashlib.sha256).hexdigest()[:16]


def sharers(files: Files, root: str) -> str | None:
    """Who else may put checkpoints into ``root``, as text; None when nobody may but us, uid 0, and the group.

    A group that may write (a project directory with setgid, say) is people who work together and is taken as it is.
    """
    try:
        seen = files.access(root)
    except (FileNotFoundError, NotADirectoryError):
        return None  # there is no such directory, which is for others to say
    if seen.mode & _OTHERS_WRITE and not seen.mode & _STICKY:
        return f"every user may write in it (mode {seen.mode:04o}): 'chmod o-w' it, and mind the umask"
    if seen.owner not in (seen.me, 0):
        return f"it belongs to uid {seen.owner}, and this process is uid {seen.me}: use one of your own in it, or chown it"
    return None


def refuse_shared(files: Files, root: str) -> None:
    """ConfigError when somebody else may put checkpoints into ``root``: what is loaded from there would be theirs."""
    problem = sharers(files, root)
    if problem is not None:
        raise ConfigError(f"root {root} is shared: {problem}; or say allow_shared_root=True if all who can write there are "
                          "trusted like this run itself")
