"""Runs over a loss of JAX whose process is killed: what is written is right, and goes on."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import time

import jax
import numpy as np
import pytest

import jax_kill_worker as worker
import logix
from jax_kill_worker import B, expected
from kill_server import Server, kill

HERE = pathlib.Path(__file__).resolve().parent
KILLS = int(os.environ.get("LOX_KILLS", "14")) // 4
COUNT = 6  # batches


@pytest.fixture(scope="module")
def server():
    path = os.pathsep.join([str(HERE), str(HERE.parent / "src")])
    made = Server(worker.__file__, PYTHONPATH=path, OMP_NUM_THREADS="1", JAX_PLATFORMS="cpu")
    yield made
    made.end_jobs()
    made.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The same run, undisturbed."""
    return worker.extracted(str(tmp_path_factory.mktemp("whole")), COUNT)


def words_in(path):
    return path.read_text().split("\n")[:-1] if path.exists() else []


def said(server):
    server.errors.seek(0)
    return server.errors.read()[-3000:]


def rows_of(run):
    store = run.store()
    ids, logs = next(iter(run.build_log_dataloader(batch_size=len(store))))
    return ids, {name: logs[name]["grad"] for name in logs}


def check(root, words):
    """What is there begins what was logged: all that was sure, and it is right."""
    sure = max([int(w) for w in words if w.isdigit()], default=0)
    if not sure:
        return
    run = logix.LogIX("run", {"root_dir": str(root)})
    ids, grads = rows_of(run)
    assert ids == list(range(len(ids)))
    assert sure * B <= len(ids) <= COUNT * B
    assert len(ids) % B == 0
    for name, want in expected(len(ids) // B).items():
        np.testing.assert_array_equal(grads[name], want)
    assert run.store().verify().damage == []


def check_continued(root, whole):
    run = worker.extracted(str(root), COUNT, resume=True)
    ids, grads = rows_of(run)
    assert ids == list(range(COUNT * B))
    for name, want in expected(COUNT).items():
        np.testing.assert_array_equal(grads[name], want)
    for layer, stats in whole.statistics.items():
        assert set(run.statistics[layer]) == set(stats)
        for name, value in stats.items():
            np.testing.assert_allclose(run.statistics[layer][name], value, rtol=1e-4, atol=1e-3)


def test_killed_at_random_moments(server, tmp_path, whole):
    root, ack = tmp_path / "whole", tmp_path / "ack"
    begun = time.monotonic()
    [pid] = server.start(dict(job="extract", root=str(root), ack=str(ack), count=COUNT))
    while not words_in(ack):
        time.sleep(0.001)
    first = time.monotonic() - begun
    while words_in(ack)[-1] != "done":
        time.sleep(0.001)
    last = time.monotonic() - begun
    kill(pid)
    server.wait()
    check(root, words_in(ack))
    for k in range(KILLS):
        root, ack = tmp_path / str(k), tmp_path / f"ack{k}"
        [pid] = server.start(dict(job="extract", root=str(root), ack=str(ack), count=COUNT))
        time.sleep(random.uniform(first, last))
        kill(pid)
        assert server.wait() == [-signal.SIGKILL]
        check(root, words_in(ack))
        check_continued(root, whole)


@pytest.mark.parametrize("half", [False, True])
def test_killed_at_a_call(server, tmp_path, whole, half):
    """Before one of the calls that change a file, those of `finalize` too."""
    cut_short = 0
    for at in (9, 20, 28, 40, 60):
        root, ack = tmp_path / str(at), tmp_path / f"ack{at}"
        job = dict(job="crash", root=str(root), ack=str(ack), count=COUNT, at=at + half)
        [end] = server.run(dict(half=half, **job))
        assert end in (0, -signal.SIGKILL), said(server)
        cut_short += end != 0
        check(root, words_in(ack))
        check_continued(root, whole)
    assert cut_short > 2


def test_what_is_there_is_not_computed_again_after_a_kill(server, tmp_path):
    root, ack, computed = tmp_path / "run", tmp_path / "ack", []
    job = dict(job="crash", root=str(root), ack=str(ack), count=COUNT, at=36)
    assert server.run(job) == [-signal.SIGKILL]
    there = len(logix.LogIX("run", {"root_dir": str(root)}).store())
    assert 0 < there < COUNT * B

    def counted(p, x):
        jax.debug.callback(lambda _: computed.append(1), x[0])
        return worker.loss(p, x)

    run = logix.LogIX("run", {"root_dir": str(root)}, resume=True)
    run.setup({"save": "grad"})
    run.watch(counted, worker.parameters())
    run.extract([worker.batch(i) for i in range(COUNT)], range(COUNT * B))
    run.finalize()
    jax.effects_barrier()
    assert run.store().ids == list(range(COUNT * B))
    assert len(computed) == COUNT * B - there
