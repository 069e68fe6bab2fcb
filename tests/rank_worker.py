"""One of two processes of `torch.distributed` that log their halves of the data into one run."""

import os
import sys

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import logix

N, B = 23, 4


def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.randn(N, 5), torch.randint(0, 3, (N,))


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="sum")


def wrapped(model, kind):
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return model


def log_all(run, model, x, y, rank, ranks, weight_grads):
    # As a DistributedSampler does: every other example, and the first one again, to be as many.
    mine = [*range(rank, N, ranks), *([0] if rank else [])]
    for i in range(0, len(mine), B):
        part = mine[i : i + B]
        with run(data_id=part, weight_grads=weight_grads):
            loss_of(model, x[part], y[part]).backward()
    run.finalize()


def main(root, kind, statistic, lora, weight_grads):
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    model, x, y = problem()
    model = wrapped(model, kind)
    run = logix.LogIX("run", {"root_dir": root}, duplicates="keep_first")
    run.watch(model, strict=True)
    for _ in logix.LogIXScheduler(run, lora, statistic, "grad", rank=3):
        log_all(run, model, x, y, rank, ranks, weight_grads == "True")
    if weight_grads == "True" and kind == "ddp":  # gradients are averaged, as without logix
        grads = [p.grad.clone() for p in model.parameters()]
        for g in grads:
            other = g.clone()
            distributed.broadcast(other, src=0)
            assert torch.equal(g, other)
    assert all(p.requires_grad for p in model.parameters())
    torch.save(run.statistics, os.path.join(root, f"statistics-{rank}.pt"))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
