"""Processes that log runs of logix, to be killed. Driven by `test_logix_faults.py`.

Children of the server (`kill_server`) acknowledge the number of their batches after each `flush`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import numpy as np
import torch

import logix
import logix.torch._context  # so that no child has to import it
from kill_server import Acknowledge, die_at, serve

B = 3  # examples in a batch
FAR = 1e9  # seconds: never


def model_of() -> torch.nn.Module:
    model = torch.nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.25)
    return model


def batch(i: int) -> torch.Tensor:
    return torch.arange(4 * B, dtype=torch.float32).reshape(B, 4) / 8 + i


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) * torch.tensor([1.0, -0.5])).sum()


def expected(count: int) -> np.ndarray:
    """The rows of the first batches."""
    x = torch.cat([batch(i) for i in range(count)] or [torch.zeros(0, 4)]).numpy()
    return np.concatenate([x, -0.5 * x, np.tile(np.float32([1, -0.5]), (len(x), 1))], 1)


def started(root: str, logging: Any = None, **options: Any) -> tuple[Any, torch.nn.Module]:
    model = model_of()
    run = logix.LogIX("run", {"root_dir": root, "logging": logging}, **options)
    run.setup({"save": "grad", "statistic": "ekfac"})
    run.watch(model)
    return run, model


def log(run: Any, model: torch.nn.Module, i: int) -> None:
    with run(data_id=list(range(B * i, B * (i + 1)))):
        loss_of(model, batch(i)).backward()


def passes(root: str, count: int, ack: Any = lambda word: None, every: int = 1, **how: Any) -> Any:
    """Two passes over the data, as EK-FAC needs them."""
    run, model = started(root, **how)
    for k in range(2):
        for i in range(count):
            log(run, model, i)
            if i % every == 0 and k == 0:
                run.flush()
                ack(i + 1)
        run.finalize()
        ack(f"pass{k}")
    return run


# --- jobs ----------------------------------------------------------------------------------------


def job_passes(ack: Acknowledge, root: str, count: int, **how: Any) -> None:
    passes(root, count, ack, **how)
    time.sleep(FAR)


def job_crash(ack: Acknowledge, at: int, half: bool = False, **job: Any) -> None:
    die_at(at, half)
    passes(ack=ack, **job)
    ack("done")


def job_exit(ack: Acknowledge, root: str, count: int, how: str) -> None:
    """End in some way without `finalize`, with rows that a slow disk has not taken yet."""
    run, model = started(root)
    real = os.write
    os.write = lambda *args: (time.sleep(0.02), real(*args))[1]
    for i in range(count):
        log(run, model, i)
    ack(count)
    if how == "exception":
        raise RuntimeError("the program's own error")
    if how == "interrupt":
        with run(data_id=[-1, -2, -3]):
            loss_of(model, batch(0)).backward()
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(FAR)
    if how == "sys.exit":
        sys.exit(3)
    if how == "fork":  # a child that ends like a program does not touch its parent's run
        if os.fork() == 0:
            return
        os.wait()


def job_limit(ack: Acknowledge, root: str, limit: int, count: int, workers: int) -> None:
    """No file may grow beyond `limit` bytes; then the limit is lifted again."""
    import resource

    run, model = started(root, logging={"num_workers": workers})
    log(run, model, 0)
    run.flush()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    failed: dict[int, str] = {}
    for i in range(1, count):
        try:
            log(run, model, i)
            run.flush()
        except OSError as error:
            failed[i] = f"{type(error).__name__}:{error.errno}:{error.filename}"
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    for i, told in failed.items():  # the run goes on, and takes them now
        ack(told)
        log(run, model, i)
    run.finalize()
    ack("closed")


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(globals())
