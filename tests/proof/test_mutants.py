"""The mutants are made from the code, change what they say they change, only in a copy, and are found there."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.proof import detect, mutants
from scripts.proof.guards import GUARDED
from scripts.proof.layer import Budget
from scripts.proof.mutants import REPOSITORY, Copy, Detector, Hunt, explained, ordered, speaks_of
from scripts.proof.mutations import FILES, LEFT_OUT, PICKED, Mutant, made
from scripts.proof.nearest import nearest

PACKAGE = REPOSITORY / "distckpt"


@pytest.fixture(scope="module")
def all_of_them() -> list[Mutant]:
    return made(PACKAGE)


def one(among: list[Mutant], where: str, original: str, mutated: str = "pass") -> Mutant:
    found = [m for m in among if m.where == where and m.original.startswith(original) and m.mutated.startswith(mutated)]
    assert len(found) == 1, found
    return found[0]


def test_every_file_of_the_ordering_code_gives_some_and_each_is_another_program(all_of_them: list[Mutant]) -> None:
    assert len(all_of_them) > 200
    assert {mutant.file for mutant in all_of_them} == set(FILES)
    every = [str(path.relative_to(PACKAGE)) for path in sorted(PACKAGE.rglob("*.py")) if "testing" not in path.parts]
    others = {mutant.file for mutant in made(PACKAGE, [file for file in every if file not in FILES])}
    assert others == set(LEFT_OUT), "a file for which the rules find something is tried, or left out with a reason"
    assert all(len(reason) > 15 for reason in LEFT_OUT.values()) and set(GUARDED) <= set(FILES)
    changed = set()
    for mutant in all_of_them:
        source = (PACKAGE / mutant.file).read_bytes()
        broken = source[:mutant.start] + mutant.put + source[mutant.end:]
        assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse(source)), mutant
        changed.add((mutant.file, broken))
    assert len(changed) == len(all_of_them)


def test_the_rules_that_the_design_names_are_among_them(all_of_them: list[Mutant]) -> None:
    one(all_of_them, "prepare", "fsync_tree_dirs(patience.over(files), staged)")
    one(all_of_them, "prepare", "owned.ownership.check(patience)")
    one(all_of_them, "publish", "files.fsync_dir(owned.layout.root)")
    one(all_of_them, "prepare", "fsync_tree_dirs(patience.over(files), staged)", "write_new(")
    one(all_of_them, "picked", "return prepare(owned, found, patience) or", "return publish(")  # published before it is committed
    one(all_of_them, "PieceWriter.sync", "self._out.fsync()")
    one(all_of_them, "PieceWriter.release", "self._out.close()")
    one(all_of_them, "RankFiles.finish", "self._top.unsynced.sync()")
    one(all_of_them, "RankFiles.finish", "self._top.unsynced.sync()", "entries = together(")
    one(all_of_them, "_serve_one", "files.unsynced.sync()")
    one(all_of_them, "Transaction.finish", "self._client.claim(self._decision")
    one(all_of_them, "to_trash", "files.fsync_dir(os.path.dirname(target))")
    one(all_of_them, "doubt", "owned.in_doubt[attempt]")
    one(all_of_them, "Gate.freeze", "self._open.clear()", "ordinal, step = self.place")
    one(all_of_them, "Background.poll", "gate.place =", "if gate.flag")
    assert len([m for m in all_of_them if m.kind == "picked"]) == len(PICKED)


def test_every_check_of_the_files_that_read_what_others_wrote_is_among_them(all_of_them: list[Mutant]) -> None:
    def has(file: str, where: str, original: str, put: str, within: str = "") -> None:
        found = [m for m in all_of_them if (m.file, m.where, m.put) == (file, where, put.encode())
                 and m.original.startswith(original) and m.within.startswith(within)]
        assert len(found) == 1, (file, where, original, found)

    has("marker.py", "parse", "not _is_sealed(data)", "False")
    has("marker.py", "_glance", "not _is_sealed(data)", "False", "len(data) >= SIZE_LIMIT or")
    has("marker.py", "_glance", "0 <= rank < RANK_LIMIT", "True", "not (type(size)")
    has("marker.py", "_files", "RANK_LIMIT", "(1 << 62)", "_whole(rank")
    has("layout.py", "member_path_problem", "_DOTS.search(path)", "False")
    has("layout.py", "run_problem", "None if 0 < len(run)", "None")
    has("catalog.py", "read_marker", "_marker.SIZE_LIMIT", "(1 << 62)")
    has("catalog.py", "check_file", "seen.kind != \"file\"", "False")
    has("durable.py", "Files.append", "NOFOLLOW", "0")
    has("beneath.py", "module", "getattr(os, \"O_NOCTTY\", 0)", "0")
    has("beneath.py", "open_below", "_NO_XDEV if one_mount else 0", "0")
    has("trust.py", "_read", "mode & _OTHERS_WRITE", "False")
    has("coordination/store.py", "decode", "len(data) > VALUE_LIMIT", "False")
    has("payloads/dcpread.py", "_Unpickler.find_class", "found is None", "False")
    has("removal.py", "picked", "with files.folder(root", "if True:")


def test_two_syncs_with_nothing_between_do_not_change_places(all_of_them: list[Mutant]) -> None:
    for mutant in all_of_them:
        if mutant.kind == "swapped":
            assert not (mutant.original.startswith("files.fsync_dir(") and mutant.mutated.startswith("files.fsync_dir(")), mutant


def test_what_is_explained_is_a_mutant_and_has_a_reason(all_of_them: list[Mutant]) -> None:
    for entry in explained():
        assert len(entry["why"]) > 40, entry
        assert len([m for m in all_of_them if speaks_of(entry, m)]) == 1, entry


def test_the_tests_that_a_file_is_shown_first_are_there() -> None:
    for file in FILES:
        for path in nearest(file):
            assert (REPOSITORY / path).is_file(), path


def test_a_run_of_another_seed_begins_elsewhere(all_of_them: list[Mutant]) -> None:
    assert ordered(all_of_them, 1) == ordered(all_of_them, 1) != ordered(all_of_them, 2)


def test_one_is_found_in_a_copy_by_the_detector_that_is_green_without_it(tmp_path: Path, all_of_them: list[Mutant]) -> None:
    source = (PACKAGE / "ordered.py").read_bytes()
    mutant = one(all_of_them, "to_trash", "files.fsync_dir(os.path.dirname(target))")
    told: list[str] = []
    hunt = Hunt(tmp_path, [Detector("durable", ("pytest", "tests/unit/test_durable.py"))], workers=1,
                tell=lambda line, _: told.append(line))
    (found,) = hunt.find([mutant], lambda: True)
    assert found.by == "durable" and "test_durable.py::test_S21" in found.how, found
    assert "is green" in told[0] and "| durable |" in told[1]
    assert (PACKAGE / "ordered.py").read_bytes() == (tmp_path / "copy-0" / "distckpt" / "ordered.py").read_bytes() == source


def test_whoever_imports_another_package_than_the_copy_is_noticed_and_so_is_whoever_hangs(tmp_path: Path) -> None:
    copy = Copy(tmp_path / "copy")
    assert copy.detect(("pytest", "tests/unit/test_durable.py"), limit=0.01) == (None, "")
    copy.close()
    copy.package.rename(tmp_path / "away")
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-m", "scripts.proof.detect", "pytest"], cwd=copy.home, env=env, capture_output=True,
                          timeout=60)
    assert done.returncode == detect.ELSEWHERE


def test_a_detector_that_is_red_without_a_mutant_is_not_believed(tmp_path: Path, all_of_them: list[Mutant]) -> None:
    hunt = Hunt(tmp_path, [Detector("no test", ("pytest", "tests/unit/test_durable.py", "-k", "no such test"))], workers=1)
    with pytest.raises(RuntimeError, match="not green on the code as it is"):
        hunt.find(all_of_them[:1], lambda: True)


def test_a_test_that_is_red_only_once_finds_nothing() -> None:
    """A busy machine makes some red; what a mutant makes red stays red."""
    said = "FAILED tests/unit/test_a.py::test_b[one - two] - assert 1 == 2"
    answers = {("pytest", "tests"): (1, said), ("pytest", "tests/unit/test_a.py::test_b[one - two]"): (0, ""),
               ("pytest", "tests", "--deselect", "tests/unit/test_a.py::test_b[one - two]"): (0, "")}

    class Flaky:
        def detect(self, told: tuple[str, ...], limit: float) -> tuple[int, str]:
            return answers[told]

    assert mutants._surely(Flaky(), ("pytest", "tests"), 1.0) == (0, "")  # type: ignore[arg-type]
    answers["pytest", "tests/unit/test_a.py::test_b[one - two]"] = (1, said)
    assert mutants._surely(Flaky(), ("pytest", "tests"), 1.0) == (1, said)  # type: ignore[arg-type]


def test_of_the_nearest_tests_the_red_one_says_which_layer_it_was() -> None:
    assert mutants._layer("own", "FAILED tests/ranks/test_a.py::test_b - x") == "ranks"
    assert mutants._layer("own", "ERROR tests/unit/test_a.py::test_b") == "unit"
    assert mutants._layer("own", "Segmentation fault") == "own"
    assert mutants._layer("power-cut", "FAILED tests/unit/test_a.py::test_b") == "power-cut"


def test_a_survivor_that_nobody_explains_is_a_violation(monkeypatch: pytest.MonkeyPatch, all_of_them: list[Mutant]) -> None:
    lost, kept = all_of_them[:2]
    monkeypatch.setattr(mutants, "hunt", lambda todo, budget, tell: [
        mutants.Finding(str(lost), "", 2.0), mutants.Finding(str(kept), "unit", 1.0)])
    result = mutants.run(Budget(1.0))
    assert result.violations == [f"nothing finds it: {lost}"] and "1 of 2 found (unit 1)" in result.covers
