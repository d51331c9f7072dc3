"""DeepSpeed by its own checkpoint engine: what stands where, who reads it, and what happens when something goes wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="needs DeepSpeed")

import torch

from tests.frameworks import dscases, dskinds, dsranks
from tests.frameworks.stage import Stage, staged
from tests.frameworks.story import digest

pytestmark = pytest.mark.xdist_group("deepspeed")

SCRIPTS = ["zero_to_fp32.py", "zero_to_torch.py"]


stage = staged(*dsranks.LOADED, "tests.frameworks.dscases", "tests.frameworks.dskinds")


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_B31_deepspeed_itself_reads_the_root_and_ours_reads_any_step(stage: Stage, tmp_path: Path, zero: int) -> None:
    """Three saves with keep_last=2 leave two, and the scripts once; B27: an explicit step is not the pointer's."""
    root, out = tmp_path / "root", tmp_path / "out"
    told = stage.values(2, dscases.saves, str(root), zero)
    scripts = SCRIPTS if zero else []
    assert sorted(p.name for p in root.iterdir()) == [".distckpt", "latest", "step-2", "step-3", *scripts]
    for rank, one in enumerate(told):
        written = [name for name in one["own"] if name.endswith(".pt")]
        assert len(written) == len(one["own"]) == (3 if zero == 0 and rank == 0 else 0 if zero == 0 else
                                                   3 if zero < 3 and rank == 1 else 6), one["own"]
        assert len(one["serialised"]) == len(written), "something was serialised that DeepSpeed did not write"
    assert (root / "latest").read_text().strip() == "step-3"
    newest = stage.values(2, dscases.loads, str(root), zero, None, str(out))
    for rank, (found, client) in enumerate(newest):
        assert (found, client[:3]) == (told[rank]["sync"], (3, "mine", 3))
    earlier = stage.values(2, dscases.loads, str(root), zero, "step-2", str(out))
    assert [found for found, _ in earlier] == [one["behind"] for one in told]
    if zero:
        by_fp32, by_torch = (torch.load(tmp_path / name / "pytorch_model.bin") for name in ("out", "out-torch"))
        assert sum(t.numel() for t in by_fp32.values()) == 610 and digest(by_fp32) == digest(by_torch)
        assert zero == 3 or digest(by_fp32) == newest[0][1][3], "the weights that DeepSpeed itself loaded"
    for step, kind in ((None, "sync"), (2, "behind")):
        back = stage.values(2, dscases.restores, str(root), zero, step)
        assert [b[:2] for b in back] == [(step or 3, one[kind]) for one in told]
        assert [b[2] for b in back] == [{"epoch": 3, "note": "mine"}] * 2


@pytest.mark.parametrize("zero", [1, 3])
def test_a_background_save_writes_what_a_sync_one_would(stage: Stage, tmp_path: Path, zero: int) -> None:
    for found in stage.values(2, dscases.compares, str(tmp_path / "root"), zero):
        assert len(found) == {1: 5, 3: 6}[zero] and all(same for _, same in found), found


def test_what_is_refused_and_why(stage: Stage, tmp_path: Path) -> None:
    for texts in stage.values(2, dscases.refusals, str(tmp_path / "root")):
        wanted = ["gradient accumulation boundary", "gradient accumulation boundary", "engine.global_steps is 1",
                  "engine.global_steps is 1", "returns before its files are written", "use_node_local_storage",
                  "use_node_local_storage", "only=", "lacks save_checkpoint",
                  "client_state must be a dict", "saves its optimizer itself", "critic"]
        assert len(texts) == len(wanted) and all(w in text for w, text in zip(wanted, texts, strict=True)), texts


@pytest.mark.parametrize(("background", "zero"), [(False, 2), (True, 3)])
def test_B49_some_ranks_save_and_others_do_not(stage: Stage, tmp_path: Path, background: bool, zero: int) -> None:
    texts = stage.values(2, dscases.alone, str(tmp_path / "root"), background, zero, limit=40)
    assert "rank 1" in texts[0] and "every rank" in texts[0], texts


@pytest.mark.parametrize(("background", "zero"), [(False, 1), (False, 3), (True, 2)])
def test_what_goes_wrong_on_one_rank_is_every_ranks(stage: Stage, tmp_path: Path, background: bool, zero: int) -> None:
    first, second = stage.values(2, dscases.failures, str(tmp_path / "root"), background, zero)
    assert first == second
    kind, said = first.pop("one name")
    assert kind == "SaveError" and "ranks 0 and 1 both wrote 'zero_pp_rank_0_mp_rank_00_optim_states.pt'" in said, said
    for name, text in {"full": "No space left", "raises": "the writer of rank 1 is broken", "cut": "reported success",
                       "swallows": "No space left", "nothing": "wrote nothing", "short": "reported success"}.items():
        kind, said = first[name]
        assert kind in ("SaveError", "DiskFull") and "rank 1" in said and text in said, (name, first[name])


def test_B35_B36_deepspeeds_own_writers_that_write_one_file_on_two_ranks_are_told(stage: Stage, tmp_path: Path) -> None:
    for texts in stage.values(2, dskinds.doubled, str(tmp_path / "root")):
        assert len(texts) == 2 and all("ranks 0 and 1 both wrote 'mp_rank_00_model_states.pt'" in text for text in texts), texts


def test_B19_B103_a_slow_rank_holds_up_no_barrier_and_no_pointer(stage: Stage, tmp_path: Path) -> None:
    stage.values(2, dscases.slow, str(tmp_path / "root"))


def test_whoever_calls_the_engine_writes_into_the_attempt(stage: Stage, tmp_path: Path) -> None:
    for names in stage.values(2, dscases.nested, str(tmp_path / "root")):
        assert names == ["latest", "pytorch_model/mp_rank_00_model_states.pt",
                         *(f"pytorch_model/zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in (0, 1)), *SCRIPTS]


def test_B41_the_attempts_directory_is_never_made_on_the_way(stage: Stage, tmp_path: Path) -> None:
    stage.values(2, dscases.fenced, str(tmp_path / "root"))


def test_B132_another_number_of_ranks(stage: Stage, tmp_path: Path) -> None:
    for zero, wanted in ((1, "universal"), (0, "restored 3, 3")):
        root = str(tmp_path / f"root-{zero}")
        stage.values(2, dscases.saves, root, zero)
        text, = stage.values(1, dscases.other_world, root, zero)
        assert wanted in text and (not zero or "saved by 2 ranks and is loaded by 1" in text), text


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_B132_more_ranks_than_saved_are_all_told_and_none_hangs(zero: int, stage: Stage, tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    stage.values(1, dscases.saves, root, zero)
    for text in stage.values(2, dscases.other_world, root, zero, limit=40):
        assert "universal" in text and "saved by 1 ranks and is loaded by 2" in text, text


def test_a_changed_byte_is_found_before_anything_is_unpickled(stage: Stage, tmp_path: Path) -> None:
    first, second = stage.values(2, dscases.rotten, str(tmp_path / "root"), limit=40)
    assert first == second and first.startswith("IntegrityError") and dscases.OPTIMIZER in first, first


def test_the_block_in_deepspeeds_configuration(stage: Stage, tmp_path: Path) -> None:
    for texts in stage.values(2, dscases.block, str(tmp_path / "root"), str(tmp_path / "none.json")):
        wanted = ["save_evry", "no root", "must be an object", "none.json", "int", "arive"]
        assert len(texts) == len(wanted) and all(w in text for w, text in zip(wanted, texts, strict=True)), texts


def test_other_settings_of_an_engine(stage: Stage, tmp_path: Path) -> None:
    for good in stage.values(2, dskinds.variants, str(tmp_path)):
        assert good == list(dskinds.VARIANTS)


def test_a_copy_beside_the_next_step_is_of_the_moment_of_the_save(stage: Stage, tmp_path: Path) -> None:
    for rank, told in enumerate(stage.values(2, dskinds.overlaps, str(tmp_path), limit=120)):
        assert list(told) == list(dskinds.OVERLAPPING)
        for name, (late, size, same) in told.items():
            assert same, f"rank {rank}, {name}: the copy mixes two moments"
            assert late == size and (size or rank and name.endswith("ZeRO 0")), f"rank {rank}, {name}: {late} of {size} bytes"


def test_a_weight_that_changes_while_it_is_staged_is_named(stage: Stage, tmp_path: Path) -> None:
    for said, next_one in stage.values(2, dskinds.meddles, str(tmp_path / "root"), 2):
        assert "module.0.bias changed while being staged" in said and next_one, said


def test_several_engines_in_one_checkpoint(stage: Stage, tmp_path: Path) -> None:
    for folders in stage.values(2, dskinds.several, str(tmp_path / "root")):
        assert folders == ["step-2/actor", "step-2/critic", "step-2/rest"]


def test_a_pipeline_of_two_stages(stage: Stage, tmp_path: Path) -> None:
    for names in stage.values(2, dskinds.pipeline, str(tmp_path / "root")):
        assert names == [*(f"layer_0{n}-model_states.pt" for n in range(4)),
                         *(f"mp_rank_0{stage}_model_states.pt" for stage in (0, 1)),
                         *(f"zero_pp_rank_0_mp_rank_0{stage}_optim_states.pt" for stage in (0, 1))], names


def test_experts_on_two_ranks(stage: Stage, tmp_path: Path) -> None:
    for names in stage.values(2, dskinds.moe, str(tmp_path / "root")):
        assert {"layer_0_expert_0_mp_rank_00_model_states.pt", "layer_0_expert_1_mp_rank_00_model_states.pt"} < set(names), names
