"""Debian packages that layers need: apt-get fetches them where this is root, and what it said is kept where it could not."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import cache

_PATIENCE = 600.0
_SAID = 400


class NotInstalled(str):
    """Why a layer cannot run, when all it lacks is what was to be installed here: with ``--strict``, an error."""


def lacking(absent: Callable[[], Sequence[str]], *packages: str) -> str | None:
    """What ``absent()`` names, after ``packages`` were installed where that can be; None when nothing is absent any more."""
    names = absent()
    if not names:
        return None
    asked = os.geteuid() == 0 and shutil.which("apt-get") is not None
    said = ""
    if asked:
        print(f"installing {' '.join(packages)}", flush=True)
        updated = _update()
        said = _apt("install", "-y", "--no-install-recommends", *packages) or updated
        names = absent()
        if not names:
            return None
    text = f"{', '.join(names)} not found (Debian packages: {' '.join(packages)})"
    return NotInstalled(f"{text}; apt-get: {said or 'it reports no error'}") if asked else text


@cache
def _update() -> str:
    """A fresh image has no lists, or old ones of packages that are gone. An error here need not keep ``install`` from working."""
    return _apt("update")


def _apt(*words: str) -> str:
    """What went wrong, in apt's own words; nothing when all went well."""
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}  # 1: no daemon of the packages is started
    try:
        done = subprocess.run(["apt-get", "-o", "DPkg::Lock::Timeout=60", *words], capture_output=True, text=True, env=env,
                              timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        return f"{words[0]} took longer than {_PATIENCE:.0f} s"
    lines = (done.stderr + done.stdout).splitlines()
    wrong = [line for line in lines if line.startswith(("E:", "W:"))]  # update ends with 0 though it reached no server
    if done.returncode:
        wrong = wrong or lines[-1:] or [f"exit code {done.returncode}"]
    return f"{words[0]}: {' '.join(wrong)}"[:_SAID] if wrong else ""
