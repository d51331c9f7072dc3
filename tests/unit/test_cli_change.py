"""The command, where it changes something: prune, gc, adopt, pin and unpin."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from distckpt import leases, owned, recovery
from distckpt.cli.leftovers import leftovers
from distckpt.durable import REAL
from distckpt.layout import Layout, Naming
from distckpt.owned import OwnedRoot
from distckpt.reader import Root
from distckpt.runtime import SYSTEM
from tests.support import RUN, Answer, Command, attempt_id, make_checkpoint, record_root, stage_attempt


@pytest.fixture
def root(tmp_path: Path) -> Layout:
    return record_root(str(tmp_path / "run"))


def names(root: Layout) -> list[str]:
    return sorted((n for n in os.listdir(root.root) if n.startswith("step-")), key=lambda n: int(n.split("-")[1]))


def tree(root: Layout) -> dict[str, bytes | None]:
    """Every entry of the root with its bytes: what a read-only command must leave as it was."""
    return {str(p.relative_to(root.root)): p.read_bytes() if p.is_file() else None for p in Path(root.root).rglob("*")}


@pytest.fixture
def living(root: Layout) -> Iterator[OwnedRoot]:
    """Another live writer: this process, whose registry of open roots forgets it, so that the command sees a stranger."""
    found = OwnedRoot.open(REAL, root, SYSTEM)
    owned._open.clear()
    yield found
    found.close()


# -- prune ---------------------------------------------------------------------------------------------------------------

def chain(root: Layout, count: int, **more: object) -> None:
    for seq in range(1, count + 1):
        make_checkpoint(root.root, seq * 100, seq, durable=False, **{"metrics": {"loss": abs(seq - 2)}, **more})  # type: ignore[arg-type]


def verdicts(said: Answer) -> dict[str, tuple[bool, str]]:
    return {c["name"]: (c["keep"], c["reason"]) for c in said.json["checkpoints"]}


def test_a_dry_run_says_why_and_touches_nothing(command: Command, root: Layout) -> None:
    chain(root, 6, retention="last=2|best=1,loss,min")
    make_checkpoint(root.root, 50, 7, run="run-z")
    before = tree(root)
    said = command("prune", root.root, "--dry-run")
    assert said.code == 0 and said.err == "" and tree(root) == before
    assert "retention last=2|best=1,loss,min (recorded in step-600)" in said.out
    assert said.row("step-600").endswith("keep     one of the last 2; the newest; resume would choose it")
    assert said.row("step-200").endswith("keep     loss=0 is among the best 1")
    assert said.row("step-100").endswith("remove   outside retention last=2|best=1,loss,min")
    assert said.row("step-50").endswith("belongs to another run (run-z), left alone")
    assert said.out.splitlines()[-1] == "would remove 3 of 7 checkpoints, 84 B; nothing was changed (--dry-run)"
    kept = {name for name, (keep, _) in verdicts(command("prune", root.root, "--dry-run", "--json")).items() if keep}
    assert kept == {"step-50", "step-200", "step-500", "step-600"}


def test_a_real_prune_does_what_the_dry_run_said(command: Command, root: Layout) -> None:
    chain(root, 6, retention="last=2")
    leases.take(REAL, root, SYSTEM, "step-100", attempt_id(1), "figure 3", None)
    Path(root.pointer).write_text("step-200\n")
    Path(root.rejected(attempt_id(3))).write_text('{"reason": "bad"}')
    promised = verdicts(command("prune", root.root, "--dry-run", "--json"))
    said = command("prune", root.root, "--json")
    assert said.code == 0 and verdicts(said) == promised
    assert names(root) == ["step-100", "step-200", "step-300", "step-500", "step-600"]
    assert {n: why for n, (_, why) in promised.items() if n in ("step-100", "step-200", "step-300")} == {
        "step-100": "pinned: figure 3", "step-200": "'latest' points to it", "step-300": "neither counts nor goes: rejected: bad"}
    assert all(not os.listdir(path) for path in Path(root.home("trash")).iterdir())  # it waited for the bytes to go
    again = command("prune", root.root)
    assert again.code == 0 and "removed 0 of 5 checkpoints" in again.out
    assert {c["name"] for c in said.json["checkpoints"] if c["removed"]} == {"step-400"} and said.json["bytes"] == 28


def test_flags_replace_the_recorded_policy(command: Command, root: Layout) -> None:
    chain(root, 6, retention="all")
    assert "removed 0 of 6" in command("prune", root.root).out
    said = command("prune", root.root, "--keep-last", 1, "--keep-every", 200, "--keep-best", 1, "--best-metric", "loss",
                   "--best-mode", "max")
    assert said.code == 0 and names(root) == ["step-200", "step-400", "step-600"]
    assert "retention last=1|every=200|best=1,loss,max (given)" in said.out


def test_without_any_policy_it_asks_for_one(command: Command, root: Layout) -> None:
    chain(root, 3)
    said = command("prune", root.root)
    assert said.code == 1 and "step-300 records no retention policy" in said.err and "--keep-last N" in said.err
    said = command("prune", root.root, "--keep-last", 1, "--keep-best", 1, "--best-metric", "los")
    assert said.code == 1 and "no checkpoint here records the metric 'los'" in said.err and "recorded are: loss" in said.err
    assert len(names(root)) == 3
    assert command("prune", root.root, "--keep-last", 1, "--series", "rolling").code == 3


def test_what_resume_would_choose_stays_after_a_rollback(command: Command, root: Layout) -> None:
    chain(root, 6)
    Path(root.rollback).write_text(json.dumps({"abandoned": [[2, 6]]}))  # the run went on from step 200 and did not commit yet
    said = command("prune", root.root, "--keep-last", 1)
    assert said.code == 0 and names(root) == ["step-200"]
    assert command("latest", root.root).out == root.final("step-200") + "\n"


def test_the_checkpoint_that_resume_falls_back_to_stays(command: Command, root: Layout) -> None:
    chain(root, 4)
    for name in ("step-300", "step-400"):
        Path(root.final(name), "model.pt").write_bytes(b"")
    said = command("prune", root.root, "--keep-last", 1)
    assert said.code == 0 and names(root) == ["step-200", "step-300", "step-400"]
    assert "damaged, neither counts nor goes" in said.row("step-400") and "resume would choose it" in said.row("step-200")
    Path(root.final("step-200"), "model.pt").write_bytes(b"")
    said = command("prune", root.root, "--keep-last", 1)
    assert said.code == 4 and "step-200" in said.err and len(names(root)) == 3  # nothing usable: nothing goes


def test_an_abandoned_branch_never_wins_a_slot(command: Command, root: Layout) -> None:
    chain(root, 5)
    make_checkpoint(root.root, 250, 6, branch="b2", parent=attempt_id(2), lineage=(("b1", 2),))
    said = command("prune", root.root, "--keep-last", 2)
    assert said.code == 0 and names(root) == ["step-200", "step-250"]


def test_the_origin_of_a_resume_stays_until_enough_newer_ones_stand(command: Command, root: Layout) -> None:
    make_checkpoint(root.root, 100, 1)
    make_checkpoint(root.root, 900, 2)
    after = {"branch": "b2", "parent": attempt_id(1), "lineage": (("b1", 1),)}
    make_checkpoint(root.root, 200, 3, **after)
    make_checkpoint(root.root, 300, 4, **after)
    make_checkpoint(root.root, 150, 5, series="rolling")
    said = command("prune", root.root, "--keep-last", 2, "--dry-run")
    assert "remove" in said.row("step-100").split() and "remove" in said.row("step-900").split()
    Path(root.final("step-200"), "model.pt").write_bytes(b"")
    said = command("prune", root.root, "--keep-last", 2, "--dry-run")
    assert "this run was resumed from it, and too few newer ones stand" in said.row("step-100")


def test_series_do_not_count_for_each_other(command: Command, root: Layout) -> None:
    chain(root, 3)
    for seq in range(4, 7):
        make_checkpoint(root.root, seq * 100, seq, series="rolling")
    command("prune", root.root, "--keep-last", 1, "--series", "rolling")
    assert names(root) == ["step-100", "step-200", "step-300", "step-600-rolling"]


def test_a_live_run_is_left_alone(command: Command, root: Layout, living: OwnedRoot) -> None:
    chain(root, 3)
    before = names(root)
    for argv in (("prune", root.root, "--keep-last", "1"), ("gc", root.root), ("adopt", root.root, "step-9")):
        os.makedirs(root.final("step-9"), exist_ok=True)
        Path(root.final("step-9"), "model.pt").write_bytes(b"1")
        said = command(*argv)
        assert said.code == 6 and "is in use: its live writer is pid" in said.err and said.err.count("\n") == 1, argv
    assert [n for n in names(root) if n != "step-9"] == before and not os.path.exists(root.final("step-9") + "/commit.json")
    for argv in (("prune", root.root, "--keep-last", "1", "--dry-run"), ("gc", root.root, "--dry-run"), ("ls", root.root)):
        assert command(*argv).code == 0


def test_a_victim_that_cannot_be_moved_is_no_success(command: Command, root: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    chain(root, 3)
    rename = REAL.rename

    def busy(source: str, target: str) -> None:
        if source == root.final("step-100"):
            raise OSError(16, "Device or resource busy", source)
        rename(source, target)

    monkeypatch.setattr(REAL, "rename", busy)
    said = command("prune", root.root, "--keep-last", 1)
    assert said.code == 1 and names(root) == ["step-100", "step-300"]
    assert "STANDS" in said.row("step-100") and "removed" in said.row("step-200")
    assert "distckpt: warning: could not rotate step-100 away" in said.err
    assert "1 of 2 checkpoints to remove still stand" in said.err


def test_bytes_that_stay_in_trash_are_no_success(command: Command, root: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    chain(root, 2)
    unlink = REAL.unlink

    def busy(path: str) -> None:
        if "step-100." in path:
            raise OSError(16, "Device or resource busy", path)
        unlink(path)

    monkeypatch.setattr(REAL, "unlink", busy)
    said = command("prune", root.root, "--keep-last", 1)
    assert said.code == 1 and names(root) == ["step-200"] and "1 entry in trash could not be deleted yet" in said.err


# -- gc ------------------------------------------------------------------------------------------------------------------

def crashed(root: Layout) -> None:
    """A root whose writer of generation 3 died: one attempt of each kind, and a victim it had not deleted yet."""
    for kind in ("staging", "trash"):
        os.makedirs(root.home(kind, "3"))
    make_checkpoint(root.root, 100, 5)
    stage_attempt(REAL, 200, 6, root=root.root, generation=3)
    stage_attempt(REAL, 300, 7, root=root.root, generation=3)
    stage_attempt(REAL, 50, 4, root=root.root, generation=3)
    os.makedirs(root.staging(3, attempt_id(8), "step-400"))
    Path(root.staging(3, attempt_id(8), "step-400"), "model.pt").write_bytes(b"half")
    stage_attempt(REAL, 500, 9, root=root.root, generation=3)
    os.unlink(root.staging(3, attempt_id(9), "step-500", "model.pt"))
    stage_attempt(REAL, 600, 10, root=root.root, generation=3)
    os.rename(root.staging(3, attempt_id(10)), root.staging(3, attempt_id(99)))
    Path(root.staging(3, "latest.tmp")).write_text("step-1")
    make_checkpoint(root.root, 10, 1, directory=root.trash(3, f"step-10.{attempt_id(1)}"))
    make_checkpoint(root.root, 20, 2, directory=root.trash(3, f"step-20.{attempt_id(2)}{recovery.REPLACED}"))


def test_gc_foretells_what_recovery_does(command: Command, root: Layout) -> None:
    crashed(root)
    before = tree(root)
    said = command("gc", root.root, "--dry-run", "--json")
    assert said.code == 0 and tree(root) == before
    assert {(f["name"], f["id"]): (f["fate"], f["reason"]) for f in said.json["leftovers"]} == {
        ("step-200", attempt_id(6)): ("publish", "committed, not yet published"),
        ("step-300", attempt_id(7)): ("publish", "committed, not yet published"),
        ("step-50", attempt_id(4)): ("remove", "commit 4 is not newer than what is published (5)"),
        ("step-400", attempt_id(8)): ("remove", "never committed: it has no commit.json"),
        ("step-500", attempt_id(9)): ("remove", "partly removed or damaged: model.pt is missing"),
        ("step-600", attempt_id(99)): ("remove", f"the old half of a replace: it holds attempt {attempt_id(10)}"),
        ("-", "latest.tmp"): ("remove", "a temporary file"),
        ("step-10", f"step-10.{attempt_id(1)}"): ("remove", "removed before, its bytes are still here"),
        ("step-20", f"step-20.{attempt_id(2)}.replaced"): ("put back", "its replacement was never committed"),
    }
    foretold = {f.name for f in leftovers(Root(root.root)) if f.fate in ("publish", "put back")}
    said = command("gc", root.root)
    assert said.code == 0
    assert set(names(root)) == {"step-100"} | foretold
    assert os.listdir(root.home("staging")) == os.listdir(root.home("trash")) == ["4"]
    assert os.listdir(root.staging(4)) == os.listdir(root.trash(4)) == []
    assert "published" in said.row("step-200").split()
    assert "published 3, removed 6" in said.out and "recovery published step-300" in said.err
    assert "nothing to do" in command("gc", root.root).out


def test_gc_puts_back_what_somebody_holds(command: Command, root: Layout) -> None:
    crashed(root)
    os.makedirs(root.leases(attempt_id(1)))
    Path(root.leases(attempt_id(1)), "aa.json").write_text('{"reason": "figure 3", "ttl": null}')
    found = command("gc", root.root, "--dry-run", "--json").json["leftovers"]
    assert [(f["fate"], f["reason"]) for f in found if f["name"] == "step-10"] == [("put back", "somebody holds a lease on it")]
    said = command("gc", root.root)
    assert said.code == 0 and "step-10" in names(root) and "put back" in said.row("step-10")


def test_gc_says_what_it_cannot_tell(command: Command, root: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    crashed(root)
    look = REAL.look

    def unreadable(top: str, below: str) -> object:
        if below.endswith("step-200/model.pt"):
            raise OSError(5, "Input/output error", below)
        return look(top, below)

    before = tree(root)
    monkeypatch.setattr(REAL, "look", unreadable)
    found = {f.name: f.fate for f in leftovers(Root(root.root))}
    assert found["step-200"] == "cannot tell" and found["step-300"] == "publish"
    said = command("gc", root.root)
    assert said.code == 1 and "cannot tell whether this attempt is whole" in said.err
    monkeypatch.undo()
    assert {k.rpartition("staging/")[2].partition("/")[2] for k in before if "step-200" in k} <= {
        k.rpartition("staging/")[2].partition("/")[2] for k in tree(root)}  # nothing that cannot be read is deleted


def test_gc_leaves_the_attempt_of_a_live_run_alone(command: Command, root: Layout, living: OwnedRoot) -> None:
    living.make_attempt(attempt_id(1), "step-100")
    said = command("gc", root.root, "--dry-run")
    assert "in progress" in said.row("step-100") and "belongs to the live writer" in said.out
    assert "publish 0, remove 0 (0 B); 1 in progress stay" in said.out


def test_gc_sees_attempts_that_a_killed_takeover_had_moved_aside(command: Command, root: Layout) -> None:
    for kind in ("staging", "trash"):
        os.makedirs(root.home(kind, "3"))
    stage_attempt(REAL, 200, 6, root=root.root, generation=3)
    os.makedirs(root.home("staging", "4"))
    os.rename(root.home("staging", "3"), root.home("staging", "4", "taken-staging-3"))
    found = command("gc", root.root, "--dry-run", "--json").json["leftovers"]
    assert [(f["name"], f["generation"], f["fate"]) for f in found] == [("step-200", 3, "publish")]
    assert command("gc", root.root).code == 0 and names(root) == ["step-200"]


def test_what_cannot_be_deleted_is_said(command: Command, root: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    crashed(root)
    unlink = REAL.unlink

    def busy(path: str) -> None:
        if "step-10." in path:
            raise OSError(16, "Device or resource busy", path)
        unlink(path)

    monkeypatch.setattr(REAL, "unlink", busy)
    said = command("gc", root.root)
    assert said.code == 1 and "STANDS" in said.row("step-10") and "1 entry in trash could not be deleted" in said.err


# -- adopt ---------------------------------------------------------------------------------------------------------------

def legacy(root: Layout, name: str, **files: bytes) -> None:
    os.makedirs(root.final(name))
    for path, data in (files or {"model.pt": b"weights"}).items():
        Path(root.final(name), path).write_bytes(data)


def test_adopt_then_latest(command: Command, root: Layout) -> None:
    legacy(root, "step-100")
    legacy(root, "step-200")
    assert command("latest", root.root).code == 4
    before = tree(root)
    said = command("adopt", root.root, "--all", "--dry-run")
    assert said.code == 0 and tree(root) == before and "would adopt 2 directories" in said.out
    said = command("adopt", root.root, "--all")
    assert said.code == 0 and "adopted step-100: 1 file, 7 B, 1 rank" in said.out and "not proven" in said.err
    assert command("latest", root.root).out == root.final("step-200") + "\n"
    assert command("verify", root.root, "--digest").code == 0
    make_checkpoint(root.root, 50, 1)
    assert command("latest", root.root).out == root.final("step-50") + "\n"  # older than every commit, whatever its step
    said = command("adopt", root.root, "--all")
    assert said.code == 1 and "nothing to adopt" in said.err


def test_adopt_takes_a_metric_and_a_path_that_the_shell_completed(command: Command, root: Layout) -> None:
    legacy(root, "step-100")
    assert command("adopt", root.root, root.final("step-100") + "/", "--metric", "loss=0.5", "--metric", "acc=1").code == 0
    assert command("ls", root.root, "--json").json["checkpoints"][0]["metrics"] == {"loss": 0.5, "acc": 1.0}


def test_adopt_makes_a_root_of_a_directory_of_another_tool(command: Command, tmp_path: Path) -> None:
    layout = Layout.at(tmp_path)
    legacy(layout, "checkpoint-500")
    said = command("adopt", layout.root, "checkpoint-500")
    assert said.code == 1 and "it is not named like 'step-{step}'" in said.err and os.listdir(tmp_path) == ["checkpoint-500"]
    said = command("adopt", layout.root, "checkpoint-500", "--naming", "checkpoint-{step}")
    assert said.code == 0 and Root(layout.root).naming == Naming.parse("checkpoint-{step}")
    assert command("latest", layout.root).out == layout.final("checkpoint-500") + "\n"
    assert command("adopt", layout.root, "checkpoint-500", "--naming", "step-{step}").code == 1


def test_another_runs_checkpoint_is_adopted_by_name_only(command: Command, root: Layout) -> None:
    legacy(root, "step-100")
    make_checkpoint(root.root, 200, 9, run="run-z", metrics={"loss": 0.5}, world=1)
    said = command("adopt", root.root, "--all")
    assert said.code == 0 and "step-200" not in said.out
    assert command("latest", root.root).out == root.final("step-100") + "\n"
    said = command("adopt", root.root, "step-200")
    assert said.code == 0 and "(was step-200 of run-z)" in said.out
    found = command("show", f"{root.root}@200", "--json").json
    assert (found["run"], found["seq"], found["metrics"], found["payload"]) == (RUN, 0, {"loss": 0.5}, {"adopted": True})


def test_one_refusal_stops_all_that_were_named(command: Command, root: Layout) -> None:
    legacy(root, "step-100")
    make_checkpoint(root.root, 200, 1)
    said = command("adopt", root.root, "step-100", "step-200", "step-300", "--json")
    assert said.code == 1 and said.json["refused"].keys() == {"step-200", "step-300"} and said.err.count("\n") == 2
    assert not os.path.exists(root.final("step-100") + "/commit.json") and not os.listdir(root.home("owner"))
