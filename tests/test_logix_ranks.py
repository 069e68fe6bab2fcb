"""Runs of several processes: one store, and the statistics of all data in each of them."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import logix  # noqa: E402
import rank_worker  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
RANKS = 2


def launched(root, *args):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    path = os.pathsep.join([str(HERE), str(HERE.parent / "src")])
    world = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE=str(RANKS))
    world |= dict(PYTHONPATH=path, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "rank_worker.py"), str(root), *args],
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        said = [p.communicate(timeout=90)[0] for p in processes]
    finally:
        for process in processes:
            process.kill()
    assert [p.returncode for p in processes] == [0] * RANKS, "\n".join(said)
    return said


def alone(root, statistic, lora):
    """The same by one process, with the example that is there twice."""
    model, x, y = rank_worker.problem()
    run = logix.LogIX("alone", {"root_dir": str(root)}, duplicates="keep_first")
    run.watch(model)
    for _ in logix.LogIXScheduler(run, lora, statistic, "grad", rank=3):
        for part in ([*range(rank_worker.N)], [0]):
            with run(data_id=part):
                rank_worker.loss_of(model, x[part], y[part]).backward()
        run.finalize()
    return run


@pytest.mark.parametrize(
    ("kind", "statistic", "lora", "weight_grads"),
    [
        ("ddp", "ekfac", "none", False),
        ("ddp", "raw", "random", True),
        ("ddp", "kfac", "none", True),
        ("fsdp", "ekfac", "none", False),
        ("fsdp", "kfac", "random", False),
        ("none", "kfac", "none", False),
    ],
)
def test_two_processes_log_what_one_does(tmp_path, kind, statistic, lora, weight_grads):
    said = launched(tmp_path, kind, statistic, lora, str(weight_grads))
    assert sum("watching" in text for text in said) == 1  # only the first one speaks
    want = alone(tmp_path, statistic, lora)
    run = logix.LogIX("run", {"root_dir": str(tmp_path)})
    run.initialize_from_log()
    got, exact = run.store(), want.store()
    assert sorted(got.ids) == list(range(rank_worker.N))
    order = [got.find(i) for i in exact.ids]
    np.testing.assert_allclose(got.rows()[order], exact.rows(), rtol=1e-4, atol=1e-6)
    assert got.verify().damage == []
    for rank in range(RANKS):  # all processes end with the same sums
        state = torch.load(tmp_path / f"statistics-{rank}.pt", weights_only=False)
        assert_same(state, run.statistics)
    assert_same(run.statistics, want.statistics)
    own = [r.influence.compute_self_influence() for r in (run, want)]
    np.testing.assert_allclose(own[0]["influence"][order], own[1]["influence"], rtol=1e-3)


def assert_same(got, want):
    assert set(got) == set(want)
    for layer, stats in want.items():
        assert set(got[layer]) == set(stats)
        for name, x in stats.items():
            x, y = np.asarray(x), np.asarray(got[layer][name])
            if name.endswith("basis"):  # up to its sign
                x, y = np.abs(x), np.abs(y)
            # Eigenvectors of eigenvalues that are near each other turn with the last bits.
            close = 2e-2 if name in ("left_basis", "right_basis", "eigen") else 1e-4
            scale = float(np.abs(x).max()) or 1.0
            np.testing.assert_allclose(y, x, rtol=1e-3, atol=close * scale, err_msg=name)
