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
    check(tmp_path, statistic, lora)


@pytest.mark.parametrize(
    ("statistic", "lora", "share"),
    [
        ("kfac", "none", "uneven"),
        ("ekfac", "none", "idle1"),
        ("kfac", "pca", "idle0"),
    ],
)
def test_processes_need_not_have_as_many_batches(tmp_path, statistic, lora, share):
    launched(tmp_path, "none", statistic, lora, "False", share)
    check(tmp_path, statistic, lora)


def test_processes_go_on_after_a_crash(tmp_path):
    launched(tmp_path, "none", "kfac", "none", "False", "half", "begin")
    begun = logix.LogIX("run", {"root_dir": str(tmp_path)}).store().ids
    assert len(begun) == 3 * rank_worker.B
    launched(tmp_path, "none", "kfac", "none", "False", "idle1", "resume")  # others have them now
    check(tmp_path, "kfac", "none")


def test_processes_replace_a_run_together(tmp_path):
    launched(tmp_path, "none", "raw", "none", "False", "idle0")
    launched(tmp_path, "none", "kfac", "random", "False", "half", "overwrite")
    check(tmp_path, "kfac", "random")


def test_no_process_is_left_alone_with_an_error(tmp_path):
    said = launched(tmp_path, "none", "kfac", "none", "False", "half", "fail")
    told = [[line for line in text.splitlines() if "told:" in line] for text in said]
    assert [len(lines) for lines in told] == [2, 2]
    assert "process 1 could not save: ValueError: the row of 101" in told[0][0]
    assert "the row of 101 has values that are not finite" in told[1][0]
    assert "have NaN or infinity" in told[0][1]
    assert "process 0 could not save: ValueError" in told[1][1]
    ids = logix.LogIX("run", {"root_dir": str(tmp_path)}).store().ids
    assert sorted(ids) == [*range(rank_worker.N), 100]


def check(tmp_path, statistic, lora):
    """Rows, statistics and scores are those of one process."""
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
