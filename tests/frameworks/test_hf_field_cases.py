"""Transformers' Trainer where its own checkpoints go wrong in public (FIELD_CASES): several hosts, hooks, directories that it
wrote without us, and the end of a run on the Hub."""

from __future__ import annotations

import json
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import distckpt
from distckpt.durable import Files, Item
from distckpt.errors import ConfigError, MemberMissing, SaveError
from distckpt.options import Seams, Timeouts
from distckpt.runtime import Identity, SystemRuntime
from distckpt.saving.transaction import Transaction
from tests.frameworks.stage import Stage, staged
from tests.frameworks.story import Job, Told
from tests.frameworks.test_transformers import arguments, examples, final, made, tiny, train
from tests.support import Command

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.xdist_group("transformers")


stage = staged("transformers.trainer", "transformers.models.gpt2.modeling_gpt2", "distckpt.integrations.transformers")


# -- several hosts -------------------------------------------------------------------------------------------------------


class On(SystemRuntime):
    """This rank runs on another host."""

    def __init__(self, host: str) -> None:
        super().__init__()
        self._host = host

    def identity(self) -> Identity:
        return replace(super().identity(), host=self._host)


class Elsewhere(Files):
    """A disk of this host's own under the same path."""

    def __init__(self, root: str) -> None:
        self._root = root

    def scan(self, path: str) -> list[Item]:
        return super().scan(path.replace(self._root, f"{self._root}.node-1"))


def nodes(rank: int, world: int, root: str) -> list[str]:
    """What is told on two hosts with disks of their own, and on two that share one, with save_on_each_node."""
    told = []
    os.makedirs(f"{root}.node-1/.distckpt/staging/1", exist_ok=True)
    apart = Seams(files=Elsewhere(root), runtime=On("node-1")) if rank == 1 else Seams()
    shared = Seams(runtime=On(f"node-{rank}"))
    for seams, options in ((apart, {}), (shared, {"save_on_each_node": True})):
        trainer = made(root, Job(seams=seams, extra={"manager": {"timeouts": Timeouts(visible=0.3)}}), **options)
        with pytest.raises(ConfigError) as caught:
            trainer.train()
        told.append(str(caught.value))
        assert trainer.state.global_step == 0 and not list(Path(root).glob("checkpoint-*"))
    made(root, Job(), save_on_each_node=True, max_steps=2).train()
    return told


def test_B34_disks_of_each_nodes_own_are_refused_before_the_first_step(stage: Stage, tmp_path: Path) -> None:
    """Trainer would leave the other nodes' shards under another name for ever. On one host ``save_on_each_node`` says nothing."""
    root = tmp_path / "root"
    for apart, each in stage.values(2, nodes, str(root)):
        assert "rank 1 on node-1 does not see what rank 0 wrote there: the root is not on storage that all hosts share" in apart
        assert "save_on_each_node=True is for disks of each node's own, and all 2 hosts share" in each and "leave it out" in each
    assert {"rng_state_0.pth", "rng_state_1.pth", "model.safetensors"} <= set(os.listdir(root / "checkpoint-2"))


def writes_beside(rank: int, world: int, root: str) -> str:
    """A callback's ``on_save`` makes the directory that it thinks the checkpoint is in, as PEFT recipes do. The background save
    begins when it has: how far it came else is the scheduler's choice."""
    from transformers import TrainerCallback

    there, begin = threading.Event(), Transaction.begin

    def after(self: Transaction, report: Any) -> Any:
        assert there.wait(60)
        return begin(self, report)

    class Beside(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **ignored: Any) -> None:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            folder.mkdir(exist_ok=True)
            (folder / "adapter.txt").write_text("x")
            there.set()

    for background in (False, True):
        trainer = made(f"{root}-{background}", Job(background=background), max_steps=4, save_total_limit=1)
        trainer.add_callback(Beside())
        if background:
            there.clear()
            Transaction.begin = after  # type: ignore[method-assign]
            try:
                with pytest.raises(SaveError) as caught:
                    trainer.train()
            finally:
                Transaction.begin = begin  # type: ignore[method-assign]
            return str(caught.value)
        trainer.train()
    raise AssertionError


def test_B34_a_callback_that_writes_where_the_checkpoint_will_be(stage: Stage, command: Command, tmp_path: Path) -> None:
    """After a save that waited, it writes beside what is committed. Before a background one is there, what it made is in the way:
    an error that names the directory, and no mixture of the two."""
    said, = stage.values(1, writes_beside, str(tmp_path / "root"))
    assert "checkpoint-2 exists in" in said and "it has files but no commit.json" in said and "Nothing was written" in said
    assert sorted(p.name for p in (tmp_path / "root-False").iterdir()) == [".distckpt", "checkpoint-4", "latest"]
    assert (tmp_path / "root-False" / "checkpoint-4" / "adapter.txt").exists()
    verified = command("verify", "--digest", tmp_path / "root-False")
    assert verified.code == 0 and "1 file beside the manifest, such as adapter.txt" in verified.out
    assert os.listdir(tmp_path / "root-True" / "checkpoint-2") == ["adapter.txt"]


# -- hooks ---------------------------------------------------------------------------------------------------------------


def hooked(rank: int, world: int, root: str) -> dict[str, Any]:
    """A hook on all ranks may communicate; one on rank 0 runs there alone."""
    from transformers import TrainerCallback

    seen: dict[str, list[Any]] = {"all": [], "rank0": []}

    class Register(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **ignored: Any) -> None:
            trainer.manager.on_commit(collective, ranks="all")
            trainer.manager.on_commit(lambda record: seen["rank0"].append(record.step))

    def collective(record: distckpt.CommitRecord) -> None:
        """As a forward of a model that is spread over the ranks is."""
        found = torch.tensor(float(rank + 1))
        dist.all_reduce(found)
        seen["all"].append((record.step, float(found)))

    trainer = made(root, Job(), max_steps=4)
    trainer.add_callback(Register())
    trainer.train()
    return seen


def test_B58_a_hook_that_communicates_is_for_all_ranks_and_says_so(stage: Stage, tmp_path: Path) -> None:
    first, second = stage.values(2, hooked, str(tmp_path / "root"), limit=60)
    assert first["all"] == second["all"] == [(2, 3.0), (4, 3.0)]
    assert (first["rank0"], second["rank0"]) == ([2, 4], [])


def alone(rank: int, world: int, job: Job, hooked: bool) -> tuple[str, list[str]]:
    """A hook of rank 0 talks to the other rank in every way, and then does what it may."""
    from transformers import TrainerCallback

    told, mine = list[str](), dist.new_group([0])

    def talks(record: distckpt.CommitRecord) -> None:
        one, two = torch.ones(1), torch.ones(2)
        for call in (lambda: dist.all_reduce(one), dist.barrier, lambda: dist.broadcast_object_list(["x"], src=0),
                     lambda: dist.send(one, 1), lambda: dist.all_gather_into_tensor(two, one), lambda: spread.full_tensor(),
                     lambda: (spread @ spread).sum().item(), lambda: trainer.accelerator.gather(one)):
            with pytest.raises(ConfigError, match=r"talks runs on rank 0 alone, and it called \w+\.\w+ in a group of 2 ranks"):
                call()
        dist.all_reduce(one, group=mine)
        told.append(f"{record.step}: {float(one @ one)}")
        dist.barrier()

    class Register(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **ignored: Any) -> None:
            if hooked:
                trainer.manager.on_commit(talks)

    spread = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
    trainer = made(job.root, job)
    trainer.add_callback(Register())
    trainer.train()
    return final(trainer.model), told


@pytest.mark.parametrize("background", [False, True])
def test_B58_a_hook_of_rank_0_alone_cannot_talk_and_training_does_not_hear_it(
        stage: Stage, tmp_path: Path, background: bool) -> None:
    """Unrefused, its all-reduce is met by one of DDP's own, and both ranks train on with a wrong gradient."""
    jobs = [Job(str(tmp_path / name), background=background) for name in ("plain", "hooked")]
    plain, hooked = (stage.values(2, alone, job, job is jobs[1], limit=60) for job in jobs)
    assert [weights for weights, _ in hooked] == [weights for weights, _ in plain]
    assert [told for _, told in hooked] == [["2: 1.0", "4: 1.0", "6: 1.0"], []]
    journal = [json.loads(line) for line in (tmp_path / "hooked/.distckpt/journal/1.jsonl").read_text().splitlines()]
    assert [(e["step"], "it called c10d.barrier" in e["error"]) for e in journal if e["event"] == "hook_failed"] == [
        (2, True), (4, True), (6, True)]


# -- what Trainer wrote by itself ----------------------------------------------------------------------------------------


def by_itself(rank: int, world: int, root: str) -> None:
    from transformers import Trainer

    Trainer(model=tiny(), args=arguments(root), train_dataset=examples()).train()


def goes_on(rank: int, world: int, root: str) -> Told:
    trainer = made(root, Job())
    trainer.train(resume_from_checkpoint=True)
    return Told(trainer._initial_global_step, final(trainer.model))


def without_random_states(rank: int, world: int, root: str) -> None:
    """A loop of somebody's own has committed Trainer's files, but not all of them."""
    with distckpt.CheckpointManager(root) as manager, manager.saving(5) as files:
        for path in sorted(Path(root, "checkpoint-4").iterdir()):
            if path.name not in ("rng_state_1.pth", "commit.json") and files.writes(path.name):
                shutil.copy(path, files.shared(path.name))
    trainer = made(root, Job())
    with pytest.raises(MemberMissing, match=r"checkpoint-5 has no rng_state_1\.pth: that rank's random states") as told:
        trainer.train(resume_from_checkpoint=True)
    assert told.value.members == ["rng_state_1.pth"] and trainer.state.global_step == 0


def test_a_directory_of_trainers_own_is_adopted_whole_or_not_and_missing_random_states_are_an_error(
        stage: Stage, command: Command, tmp_path: Path) -> None:
    """Trainer itself goes on with other random numbers, and says so at INFO."""
    root = tmp_path / "root"
    stage.values(2, by_itself, str(root))
    shutil.rmtree(root / "checkpoint-6")
    (root / "checkpoint-2" / "rng_state_1.pth").unlink()
    said = command("adopt", root, "checkpoint-2", "--naming", "checkpoint-{step}")
    assert said.code == 1 and "its file names tell of 2 ranks, and there is no file of rank 1" in said.err, said
    said = command("adopt", root, "checkpoint-4", "--naming", "checkpoint-{step}")
    assert said.code == 0 and "2 ranks" in said.out, said
    plain = stage.values(2, train, Job())
    stage.values(2, without_random_states, str(root))
    shutil.rmtree(root / "checkpoint-5")
    assert stage.values(2, goes_on, str(root)) == [Told(4, one.final) for one in plain]


# -- the Hub -------------------------------------------------------------------------------------------------------------


def pushed(rank: int, world: int, root: str) -> list[str]:
    """``push_to_hub`` at the end; the network is not there, and what would have been sent is."""
    import huggingface_hub
    from huggingface_hub import _upload_pipeline

    sent: list[str] = []

    def send(api: Any, *ignored: Any, **told: Any) -> None:
        for operation in told.get("add_operations") or told["operations"]:
            assert os.path.exists(operation.path_or_fileobj)
            sent.append(operation.path_in_repo)

    _upload_pipeline.pipelined_upload = send
    huggingface_hub.HfApi.create_commit = send
    huggingface_hub.HfApi._validate_yaml = lambda self, *args, **ignored: None
    huggingface_hub.HfApi.create_repo = lambda self, *args, **ignored: huggingface_hub.RepoUrl("https://huggingface.co/x/y")
    trainer = made(root, Job(), hub_model_id="x/y", max_steps=2)
    trainer.train()
    trainer.push_to_hub()
    return sent


def test_the_push_at_the_end_takes_the_model_and_of_ours_one_line(stage: Stage, tmp_path: Path) -> None:
    """``latest`` goes along: a file of the same name is DeepSpeed's in the checkpoints, which an upload must not leave out, and
    it says a directory's name and nothing else."""
    root = tmp_path / "root"
    sent, none = stage.values(2, pushed, str(root))
    assert none == [] and {"model.safetensors", "config.json", "README.md", "latest"} <= set(sent)
    assert not [name for name in sent if "distckpt" in name or name.startswith("checkpoint-") or "commit.json" in name], sent
    assert (root / "latest").read_text() == "checkpoint-2\n" and (root / ".distckpt" / "root.json").exists()


HUB: dict[str, tuple[int, set[str]]] = {  # hub_strategy: in how many pushes, which files among others
    "end": (1, {"model.safetensors", "README.md"}),
    "every_save": (2, {"model.safetensors", "training_args.bin"}),
    "checkpoint": (4, {"model.safetensors", "last-checkpoint/commit.json", "last-checkpoint/rng_state.pth"}),
    "all_checkpoints": (4, {"model.safetensors", "checkpoint-2/commit.json", "checkpoint-4/commit.json",
                            "checkpoint-4/rng_state.pth"}),
}


def pushes(rank: int, world: int, root: str, strategies: list[str], background: bool) -> dict[str, Any]:
    """The network is not there; what would have been sent is."""
    import huggingface_hub
    from huggingface_hub import _upload_pipeline

    sent: list[list[str]] = []
    held: list[bool] = []

    def send(api: Any, *ignored: Any, **told: Any) -> None:
        operations = told.get("add_operations") or told["operations"]
        held.append(any(os.scandir(f"{place}/.distckpt/leases")))
        sent.append([operation.path_in_repo for operation in operations])
        assert all(os.path.exists(operation.path_or_fileobj) for operation in operations)

    _upload_pipeline.pipelined_upload = send
    huggingface_hub.HfApi.create_commit = send
    huggingface_hub.HfApi._validate_yaml = lambda self, *args, **ignored: None
    huggingface_hub.HfApi.create_repo = lambda self, *args, **ignored: huggingface_hub.RepoUrl("https://huggingface.co/x/y")
    found: dict[str, Any] = {}
    for strategy in strategies:
        place, late = f"{root}/{strategy}", strategy == "end"
        sent, held = [], []
        options = {"push_to_hub": True, "hub_model_id": "x/y", "hub_strategy": strategy, "hub_always_push": True}
        if not late:
            with pytest.raises(ConfigError, match="background_saves=True with push_to_hub"):
                made(place, Job(background=True), **options)
        trainer = made(place, Job(background=background), save_total_limit=1, max_steps=4, **options)
        trainer.train()
        assert not (late and sent), "before the end"
        if late:
            trainer.push_to_hub()
        found[strategy] = {"sent": sent, "held": held, "left": list(Path(f"{place}/.distckpt/leases").rglob("*.json"))}
    return found


def assert_sent(strategy: str, told: dict[str, Any]) -> None:
    count, wanted = HUB[strategy]
    names = {name for files in told["sent"] for name in files}
    assert len(told["sent"]) == count, (strategy, told["sent"])
    assert told["held"] == [strategy != "end"] * count and told["left"] == [], strategy
    assert not [name for name in names if ".distckpt" in name], strategy
    assert wanted <= names, (strategy, wanted - names)


def test_a_push_to_the_hub_takes_committed_files_and_nothing_of_ours(stage: Stage, tmp_path: Path) -> None:
    """By each hub_strategy. While a checkpoint is sent a lease keeps it from rotation; what is sent at the end is none."""
    for strategy, told in stage.values(1, pushes, str(tmp_path / "root"), list(HUB), False, limit=90)[0].items():
        assert_sent(strategy, told)


def test_saves_in_the_background_and_a_push_at_the_end(stage: Stage, tmp_path: Path) -> None:
    """What the refusal of background saves with another hub_strategy says to do."""
    assert_sent("end", stage.values(1, pushes, str(tmp_path / "root"), ["end"], True)[0]["end"])
