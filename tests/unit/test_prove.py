"""``scripts/prove`` is green only when what could run here did run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.proof import __main__ as prove
from scripts.proof import disks, l1, l4, packages, peers
from scripts.proof.layer import Budget, Layer, Result
from scripts.proof.packages import NotInstalled, lacking
from scripts.proof.peers import power


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Put an ``apt-get`` there, alone on PATH, that notes its words and then does as told; where it notes them."""
    noted = tmp_path / "noted"

    def put(script: str) -> Path:
        program = tmp_path / "bin" / "apt-get"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\nshift 2\necho "$*" >> {noted}\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent))
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        packages._update.cache_clear()
        return noted

    return put


def test_a_fresh_image_is_asked_for_its_lists_once_and_then_for_the_packages(tmp_path: Path, apt: Callable[[str], Path]) -> None:
    noted = apt(f'[ "$1" = update ] || : > {tmp_path}/$4')

    def absent(name: str) -> list[str]:
        return [] if (tmp_path / name).exists() else [name]

    assert lacking(lambda: absent("one"), "one") is None and lacking(lambda: absent("two"), "two") is None
    assert lacking(lambda: absent("two"), "two") is None
    assert noted.read_text().splitlines() == ["update", "install -y --no-install-recommends one",
                                              "install -y --no-install-recommends two"]


@pytest.mark.parametrize(("script", "said"), [
    ('[ "$1" = update ] || { echo "Reading"; echo "E: Unable to locate package x" >&2; exit 100; }',
     "install: E: Unable to locate package x"),
    ('[ "$1" = update ] && echo "W: Failed to fetch http://deb" >&2; exit 0', "update: W: Failed to fetch http://deb"),
    ('exit 3', "install: exit code 3"), ('exit 0', "it reports no error")])
def test_what_apt_said_stands_in_the_reason(script: str, said: str, apt: Callable[[str], Path]) -> None:
    apt(script)
    why = lacking(lambda: ["prog"], "x")
    assert isinstance(why, NotInstalled) and why == f"prog not found (Debian packages: x); apt-get: {said}"


def test_who_is_not_root_installs_nothing(monkeypatch: pytest.MonkeyPatch, apt: Callable[[str], Path]) -> None:
    noted = apt("exit 0")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    why = lacking(lambda: ["prog"], "x")
    assert why == "prog not found (Debian packages: x)" and not isinstance(why, NotInstalled) and not noted.exists()


def test_every_layer_that_needs_packages_asks_for_them(monkeypatch: pytest.MonkeyPatch, apt: Callable[[str], Path]) -> None:
    noted = apt("exit 1")
    monkeypatch.setattr(disks, "_which", lambda program: None)
    monkeypatch.setattr(l4, "_absent", lambda: ["linux.uml"])
    for missing in (l1.missing, l4.missing, peers._missing, power.missing):
        assert isinstance(missing(), NotInstalled)
    assert isinstance(packages.lacking(lambda: disks._absent(["mkfs.xfs"]), "xfsprogs"), NotInstalled)
    asked = noted.read_text()
    assert all(name in asked for name in ("update\n", " strace\n", " user-mode-linux ", " e2fsprogs xfsprogs\n"))


@pytest.mark.parametrize(("why", "words", "code"), [
    (NotInstalled("strace not found"), ["--strict"], 1), (NotInstalled("strace not found"), [], 0),
    ("there is no /dev/fuse here", ["--strict"], 0), (None, ["--strict"], 0), ("there is no /dev/fuse here", ["one"], 1)])
def test_strict_is_red_when_all_that_a_layer_lacks_could_be_installed(
        why: str | None, words: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    def run(budget: Budget) -> Result:
        return Result("one", runs=1)

    slow = Layer("slow", "of no quick form", lambda: pytest.fail("nothing is installed for it"), run, 0.0, 1.0)
    monkeypatch.setattr(prove, "layers", lambda: [Layer("one", "a layer", lambda: why, run, 1.0, 1.0), slow])
    monkeypatch.setattr(sys, "argv", ["prove", "--quick", "--results", str(tmp_path / "results"), *words])
    assert prove.main() == code
    said = capsys.readouterr().out
    assert (f"skipped: {why}" in said) == (why is not None)
    assert ("NOT RUN one: strace not found" in said) == (code == 1 and words == ["--strict"])
