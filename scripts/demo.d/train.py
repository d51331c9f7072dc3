"""One life of the training job, as torchrun starts it on every rank: resume, train, save, and perhaps die."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

import torch
import torch.distributed as dist
from doom import Doom
from gpt import GPT
from text import Loader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import distckpt

LENGTH, BATCH = 64, 8


def build(world: int, steps: int) -> tuple[GPT, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """The same weights on every rank, then sharded."""
    torch.manual_seed(1)
    model = GPT(LENGTH)
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", required=True)
    parser.add_argument("--out", type=Path, required=True, help="directory for losses, final weights and the last note")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--keep-last", type=int, required=True)
    parser.add_argument("--life", type=int, default=1)
    parser.add_argument("--doom", default="", help="RANK:write|fsync|ack|full:STEP")
    args = parser.parse_args()

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model, optimizer, scheduler = build(world, args.steps)
    torch.manual_seed(100 + rank)  # each rank drops out other units, so its random state is its own and must be saved
    loader = Loader(LENGTH, BATCH, rank, world)
    progress = {"tokens": 0}
    state = distckpt.TrainState(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, rng=True,
                                progress=progress)

    doom = Doom.parse(args.doom, args.out / "last-words.json") if args.doom else None
    seams = doom.seams() if doom is not None and doom.rank == rank else None
    losses = open(args.out / "losses.jsonl", "a") if rank == 0 else None  # noqa: SIM115 - as long as the process

    with distckpt.CheckpointManager(args.root, keep_last=args.keep_last, save_every=args.save_every, seams=seams) as manager:
        step, value = manager.restore(state) or 0, float("nan")
        while True:
            try:
                todo = manager.poll(step)
            except distckpt.SaveError as error:
                raised = {"step": step, "error": type(error).__name__, "text": str(error)}
                (args.out / f"raised-{rank}.json").write_text(json.dumps(raised))
                raise
            if todo.save:
                if doom is not None:
                    doom.reach(step)
                manager.save(step, state, metrics={"loss": value}, background=True)
            if todo.stop or step == args.steps:
                break
            optimizer.zero_grad()
            loss = model(*loader.batch())
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            progress["tokens"] += LENGTH * BATCH
            mean = loss.detach()
            dist.all_reduce(mean)
            value = float(mean) / world
            if losses is not None:
                losses.write(json.dumps({"life": args.life, "step": step, "loss": value}) + "\n")
                losses.flush()

    weights, moments = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    own = {"rng": torch.get_rng_state(), "loader": loader.state_dict(), "scheduler": scheduler.state_dict(), "progress": progress}
    torch.save(own, args.out / f"final-own-{rank}.pt")
    if rank == 0:
        torch.save({"model": weights, "optimizer": moments}, args.out / "final.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
