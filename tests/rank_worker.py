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


def share_of(share, rank, ranks):
    """The examples of one process."""
    if share == "uneven":  # as many batches as come
        return [*range(N - 3)] if rank == 0 else [*range(N - 3, N), 0]
    if share.startswith("idle"):  # one process has none at all
        return [] if rank == int(share[-1]) else [*range(N), 0]
    # As a DistributedSampler does: every other example, and the first one again, to be as many.
    return [*range(rank, N, ranks), *([0] if rank else [])]


def log_all(run, model, x, y, mine, weight_grads):
    for i in range(0, len(mine), B):
        part = mine[i : i + B]
        with run(data_id=part, weight_grads=weight_grads):
            loss_of(model, x[part], y[part]).backward()


def fail(run, model, x, y, rank):
    """One process can't save, or has statistics that are not finite: none of them is left alone."""
    run.setup({"save": "grad"})
    with run(data_id=[100 + rank]):
        loss_of(model, x[:1] * (float("nan") if rank == 1 else 1.0), y[:1]).backward()
    try:
        run.finalize()
    except (ValueError, RuntimeError) as error:
        print("told:", error)
    run.clear()
    run.setup({"statistic": "kfac"})
    with run(data_id=[200 + rank]):
        loss_of(model, x[:1] * (1e25 if rank == 1 else 1.0), y[:1]).backward()
    try:
        run.finalize()
    except (ValueError, RuntimeError) as error:
        print("told:", error)


def main(root, kind, statistic, lora, weight_grads, share="half", how=""):
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    model, x, y = problem()
    model = wrapped(model, kind)
    options = dict(resume=how == "resume", overwrite=how == "overwrite")
    run = logix.LogIX("run", {"root_dir": root}, duplicates="keep_first", **options)
    run.watch(model, strict=True)
    mine = share_of(share, rank, ranks)
    if how == "begin":  # and then a crash
        run.setup({"save": "grad", "statistic": statistic})
        log_all(run, model, x, y, mine[: B + rank * B], False)
        run.flush()
        os._exit(0)
    for _ in logix.LogIXScheduler(run, lora, statistic, "grad", rank=3):
        log_all(run, model, x, y, mine, weight_grads == "True")
        run.finalize()
    if weight_grads == "True" and kind == "ddp":  # gradients are averaged, as without logix
        grads = [p.grad.clone() for p in model.parameters()]
        for g in grads:
            other = g.clone()
            distributed.broadcast(other, src=0)
            assert torch.equal(g, other)
    assert all(p.requires_grad for p in model.parameters())
    torch.save(run.statistics, os.path.join(root, f"statistics-{rank}.pt"))
    if how == "fail":
        fail(run, model, x, y, rank)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
