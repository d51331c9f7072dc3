import os, pytest, torch, distckpt
from tests.harness import run, values

def _fsdp(rank, world, root, kind):
    from torch.distributed.fsdp import fully_shard, FullyShardedDataParallel
    import torch.distributed as dist
    torch.manual_seed(0)
    m = torch.nn.Sequential(torch.nn.Linear(8,16), torch.nn.ReLU(), torch.nn.Linear(16,4))
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        mesh = init_device_mesh("cpu", (world,))
        for l in m: 
            if isinstance(l, torch.nn.Linear): fully_shard(l, mesh=mesh)
        fully_shard(m, mesh=mesh)
    elif kind == "fsdp1":
        m = FullyShardedDataParallel(m, device_id=torch.device("cpu"))
    elif kind == "ddp":
        m = torch.nn.parallel.DistributedDataParallel(m)
    o = torch.optim.AdamW(m.parameters(), lr=1e-2)
    prog = {"tokens": 0}
    st = distckpt.TrainState(model=m, optimizer=o, rng=True, progress=distckpt.Member(prog, on_world_change="rank0"))
    def step():
        x = torch.randn(4, 8)
        o.zero_grad(); loss = m(x).pow(2).mean(); loss.backward(); o.step(); prog["tokens"] += 4
        return float(loss)
    torch.manual_seed(100+rank)
    out=[]
    with distckpt.CheckpointManager(root) as mg:
        s = mg.restore(st) or 0
        first = s
        while s < first+3:
            step(); s+=1
        mg.save(s, st)
        out=[step() for _ in range(2)]
    return first, out, prog

@pytest.mark.parametrize("kind", ["fsdp2","fsdp1","ddp","plain"])
def test_kinds(kind, tmp_path):
    root=str(tmp_path/"r")
    a=values(run(2,_fsdp,root,kind))
    print(a)
    b=values(run(2,_fsdp,root,kind))
    print(b)
    c=values(run(1,_fsdp,root,kind))
    print(c)
    c=values(run(4,_fsdp,root,kind))
    print(c)
