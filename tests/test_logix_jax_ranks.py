"""Runs over losses of JAX on several devices and in several processes: what one device gives."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_rank_worker as worker
import logix

HERE = pathlib.Path(__file__).resolve().parent
RANKS = 2


def launched(root, mode, statistic="kfac", compressed=0):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    path = os.pathsep.join([str(HERE), str(HERE.parent / "src")])
    flags = "--xla_force_host_platform_device_count=4"
    world = dict(PYTHONPATH=path, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    world |= dict(JAX_DISABLE_MOST_OPTIMIZATIONS="1", OMP_NUM_THREADS="1")
    arguments = [mode, statistic, str(compressed)]
    processes = [
        subprocess.Popen(
            [sys.executable, worker.__file__, str(root), str(rank), port, *arguments],
            env={**os.environ, **world},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        said = [p.communicate(timeout=120)[0] for p in processes]
    finally:
        for process in processes:
            process.kill()
    assert [p.returncode for p in processes] == [0] * RANKS, "\n".join(said)
    return said


def compare(run, want, ids=None):
    """Rows and statistics, up to the order in which float32 is added."""
    got, exact = run.store(), want.store()
    if ids is None:
        assert sorted(got.ids) == list(range(worker.N))
        order = [got.find(i) for i in exact.ids]
        np.testing.assert_allclose(got.rows()[order], exact.rows(), rtol=1e-4, atol=1e-5)
    assert got.verify().damage == []
    assert set(run.statistics) == set(want.statistics)
    for layer, stats in want.statistics.items():
        assert set(run.statistics[layer]) == set(stats)
        for name, value in stats.items():
            if "basis" in name or name == "eigen":
                continue
            own, value = np.asarray(run.statistics[layer][name]), np.asarray(value)
            np.testing.assert_allclose(own, value, rtol=1e-4, atol=1e-4 * np.abs(value).max())
            assert not name.endswith("_n") or int(own) == int(value)


def check(root, statistic, compressed=0):
    """One store, with a writer for each process; the same sums in all of them."""
    want = worker.alone(str(root / "alone"), statistic, compressed)
    run = logix.LogIX("run", {"root_dir": str(root)})
    run.initialize_from_log()
    compare(run, want)
    first, second = (np.load(root / f"statistics-{rank}.npz") for rank in range(RANKS))
    assert set(first.files) == set(second.files)
    for name in first.files:
        np.testing.assert_array_equal(first[name], second[name])
        kind, _, layer = name.partition(":")
        np.testing.assert_array_equal(first[name], run.statistics[layer][kind])
    return run


def writers(root):
    """How many rows each process has written."""
    from logix.store._reader import open_parts, writer_numbers

    path = str(root / "run" / "rows")
    store = logix.LogIX("run", {"root_dir": str(root)}).store()
    number = lambda w: sum(len(p) for p in open_parts(path, store.manifest, w))
    return {w: number(w) for w in writer_numbers(path)}


# --- several devices -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize(
    ("shape", "spec"), [((4, 2), P("data")), ((2, 4), P()), ((8, 1), P("data"))]
)
def test_devices_log_what_one_does(tmp_path, caplog, kind, shape, spec):
    if len(jax.devices()) < 8:
        pytest.skip("it needs 8 devices")
    mesh = worker.mesh_of(shape, kind, np.arange(8))
    params, data = worker.problem()
    if shape[1] == 4:  # 6 columns do not go into 4 parts
        own = {name: worker.put(x, mesh, P()) for name, x in params.items()}
    else:
        own = worker.placed(params, mesh)
    run = worker.started(str(tmp_path), "ekfac", 0, own)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        run.extract(worker.batches_of(data, mesh, spec), range(worker.N))
        run.finalize()
    told = [r.getMessage() for r in caplog.records]
    compiled = [text for text in told if "Finished XLA compilation of jit(_batch)" in text]
    assert len(compiled) == 2  # one for each pass of EK-FAC
    compare(run, worker.alone(str(tmp_path / "alone"), "ekfac", 0))
    query = worker.batches_of(data, mesh, spec)[0]
    own = run.influence.compute_self_influence(run.log(query, ids=[*"abcdefgh"]))["influence"]
    assert (np.asarray(own) > 0).all()


def test_only_the_parameters_are_sharded(tmp_path):
    mesh = worker.mesh_of((4, 2), "auto", np.arange(8))
    params, data = worker.problem()
    run = worker.started(str(tmp_path), "kfac", 2, worker.placed(params, mesh))
    part = lambda i: {name: x[i : i + worker.B] for name, x in data.items()}
    run.extract([part(0), part(worker.B)], range(worker.N))
    run.finalize()
    compare(run, worker.alone(str(tmp_path / "alone"), "kfac", 2))


# --- several processes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "statistic", "compressed", "rows"),
    [
        ("local", "ekfac", 0, {0: 5, 1: 11}),
        ("idle", "kfac", 2, {0: 16}),
        ("global", "ekfac", 0, {0: 8, 1: 8}),
        ("explicit", "kfac", 2, {0: 8, 1: 8}),
        ("crossed", "kfac", 0, {0: 16}),
        ("replicated", "raw", 0, {0: 16}),
    ],
)
def test_two_processes_log_what_one_does(tmp_path, mode, statistic, compressed, rows):
    """Each has its own batches, or all have one that is spread over them, in several ways."""
    said = launched(tmp_path, mode, statistic, compressed)
    check(tmp_path, statistic, compressed)
    assert {w: n for w, n in writers(tmp_path).items() if n} == rows
    assert sum("watching" in text for text in said) == 1


def test_ids_of_the_content_of_a_batch_of_several_processes(tmp_path):
    launched(tmp_path, "content")
    from logix.store._ids import content_ids

    _, data = worker.problem()
    run = logix.LogIX("run", {"root_dir": str(tmp_path)})
    assert sorted(run.store().ids) == sorted(content_ids(data))


def test_processes_go_on_with_what_is_there(tmp_path):
    launched(tmp_path, "half", "none")
    assert writers(tmp_path) == {0: 4, 1: 4}
    launched(tmp_path, "resume", "kfac")
    check(tmp_path, "kfac")


def test_an_example_that_is_not_finite_is_left_out_by_all(tmp_path):
    said = launched(tmp_path, "nan")
    assert "1 example with gradients that are not finite: left out (3)" in said[0]
    run = logix.LogIX("run", {"root_dir": str(tmp_path)})
    run.initialize_from_log()
    assert sorted(run.store().ids) == [i for i in range(worker.N) if i != 3]
    assert int(run.statistics["w"]["left_n"]) == worker.N - 1
    assert int(run.statistics["w"]["right_n"]) == 3 * (worker.N - 1)


def test_an_example_that_is_not_finite_is_told_by_all(tmp_path):
    said = launched(tmp_path, "error")
    assert "told: ValueError the gradient of 3 is not finite in layer" in said[0]
    assert "told: ValueError the gradients of some examples of another process" in said[1]
    run = logix.LogIX("run", {"root_dir": str(tmp_path)})
    run.initialize_from_log()
    assert sorted(run.store().ids) == [*range(8, 16), *range(100, 108)]
    assert int(run.statistics["w"]["left_n"]) == 16


def test_no_process_is_left_alone_with_an_error(tmp_path):
    said = launched(tmp_path, "fail", "none")
    assert "told: RuntimeError process 1 could not save: OSError" in said[0]
    assert "no space left" in said[1]


def test_a_batch_that_is_not_spread_like_the_parameters(tmp_path):
    for text in launched(tmp_path, "mixed"):
        assert "told: ValueError the parameters are spread over several processes" in text
