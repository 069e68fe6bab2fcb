"""A run over a loss of JAX: its rows and its statistics."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import logix
import logix.jax
from jax_run import (
    N,
    as_rows,
    by_vmap,
    close,
    cut,
    engine,
    examples,
    loss,
    make,
    parameters,
    same_statistics,
    sequence_loss,
    sequences,
)
from logix import _statistics
from logix._compress import Compression, Projector, gradients
from logix.utils import DataIDGenerator


@pytest.fixture
def params():
    return parameters()


# --- rows -----------------------------------------------------------------------------------------


def test_rows_are_the_gradients(tmp_path, params):
    run = make(tmp_path, {"save": "grad"})
    data = examples()
    assert run.extract(cut(data), range(N)) == N
    run.finalize()
    store = run.store()
    assert store.ids == list(range(N))
    assert {name for name, _, _ in run.layout} == {"l1/w", "l1/b", "l2/w"}
    close(store.rows(), as_rows(by_vmap(loss, params, data), run.layout))
    shapes = {name: shape for name, shape, _ in run.layout}
    assert shapes == {"l1/w": (5, 4), "l1/b": (5,), "l2/w": (3, 5)}


@pytest.mark.parametrize(
    "settings",
    [
        Compression("logra", rank=2),
        Compression("logra", rank=2, shared=("l1", "l2")),
        Compression("sparse", rank=2),
        Compression("logra", "pca", rank=2),
    ],
    ids=["logra", "shared", "sparse", "pca"],
)
def test_compressed_rows_are_projected_gradients(tmp_path, params, settings):
    run, data = make(tmp_path, {"statistic": "kfac"}), examples()
    if settings.init == "pca":
        run.extract(cut(data), range(N))
        run.finalize()
        run.add_lora(init="pca", rank=2)
        projector = Projector(settings, run.compression.pca)
    else:
        run.compression = projector = Projector(settings)
    run.setup({"save": "grad"})
    run.extract(cut(data), range(N))
    run.finalize()
    capture = logix.jax.capture(loss, params)
    want = gradients(projector.record(r) for r in capture(params, data))
    close(run.store().rows(), as_rows(want, run.layout), atol=5e-5)
    assert {n: s for n, s, _ in run.layout}["l1/w"] == (2, 2)


@pytest.mark.parametrize(("dtype", "rtol"), [("bfloat16", 0.005), ("int8", 0.02)])
def test_rows_of_a_smaller_type(tmp_path, params, dtype, rtol):
    run, data = make(tmp_path, {"save": "grad"}, logging={"log_dtype": dtype}), examples()
    run.extract(cut(data), range(N))
    run.finalize()
    want = as_rows(by_vmap(loss, params, data), run.layout)
    close(run.store().rows(), want, rtol, atol=rtol * np.abs(want).max())


def test_parameters_of_another_type(tmp_path):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), parameters())
    run, data = make(tmp_path, {"save": "grad", "statistic": "kfac"}, params=half), examples()
    run.extract(cut(data), range(N))
    run.finalize()
    want = as_rows(by_vmap(loss, half, data), run.layout)
    close(run.store().rows(), want, 0.05, atol=0.02 * np.abs(want).max())
    assert run.statistics["l1/w"]["left"].dtype == np.float32


def stacked(seed=0):
    random = np.random.default_rng(seed)
    make = lambda *shape: jnp.asarray(random.normal(size=shape) * 0.4, jnp.float32)
    return {"blocks": {"w": make(3, 4, 4), "b": make(3, 4)}, "out": make(4, 3)}


def scanned(p, e):
    step = lambda h, q: (h + jnp.tanh(h @ q["w"] + q["b"]), None)
    return jnp.sum((jax.lax.scan(step, e["x"], p["blocks"])[0] @ p["out"] - e["y"]) ** 2)


def unrolled(p, e):
    h = e["x"]
    for q in p["layers"]:
        h = h + jnp.tanh(h @ q["w"] + q["b"])
    return jnp.sum((h @ p["out"] - e["y"]) ** 2)


@pytest.mark.parametrize("rank", [None, 2])
def test_a_scan_over_layers_gives_what_its_layers_give(tmp_path, rank):
    whole, data = stacked(), examples()
    one = lambda k: jax.tree.map(lambda x: x[k], whole["blocks"])
    apart = {"layers": [one(k) for k in range(3)], "out": whole["out"]}
    names = {f"layers/{k}/{n}": f"blocks/{n}[{k}]" for k in range(3) for n in "wb"}
    words, runs = {"save": "grad", "statistic": "ekfac"}, []
    for name, own, params, how in (
        ("a", scanned, whole, {}),
        ("b", unrolled, apart, dict(names=names)),
    ):
        run = make(tmp_path, words, own, params, how=how, name=name)
        if rank:
            run.add_lora(rank=rank)
        run.extract(cut(data), range(N))
        run.finalize()
        runs.append(run)
    rows = [dict(run.build_log_dataloader(N).__iter__().__next__()[1]) for run in runs]
    assert set(rows[0]) == {*names.values(), "out"} == set(rows[1])
    for layer in rows[0]:
        close(rows[0][layer]["grad"], rows[1][layer]["grad"])
    drop = lambda stats: {
        k: {n: x for n, x in s.items() if "basis" not in n and n != "eigen"}
        for k, s in stats.items()
    }
    same_statistics(drop(runs[0].statistics), drop(runs[1].statistics))
    queries = examples(3, seed=5)
    got = [r.compute_influence_all(r.log(queries, ids=[*"abc"]))["influence"] for r in runs]
    close(got[0], got[1], 1e-3, 1e-3 * np.abs(got[1]).max())


def test_leaves_that_are_no_arrays_stay_where_they_are(tmp_path):
    """As in modules of Equinox, whose activation function is a part of them."""
    params = {"w": parameters()["l1"]["w"], "act": jnp.tanh, "name": "mlp"}
    own = lambda p, e: jnp.sum(p["act"](e["x"] @ p["w"]) ** 2)
    run, data = make(tmp_path, {"save": "grad", "statistic": "kfac"}, own, params), examples()
    run.extract(cut(data), range(N))
    run.finalize()
    want = by_vmap(lambda p, e: own({**params, **p}, e), {"w": params["w"]}, data)
    close(run.store().rows(), want["w"].reshape(N, -1))


# --- statistics -----------------------------------------------------------------------------------


@pytest.mark.parametrize("statistic", ["mean", "variance", "diagonal", "kfac", "ekfac", "raw"])
@pytest.mark.parametrize("offload", [False, True])
def test_statistics_do_not_depend_on_batches(tmp_path, params, statistic, offload):
    data = examples()
    capture = logix.jax.capture(loss, params)
    want = engine(capture(params, data), [statistic])
    for size in (3, N):
        how = dict(logging={"cpu_offload": offload}, name=str(size))
        run = make(tmp_path, {"statistic": statistic}, **how)
        run.extract(cut(data, size), range(N))
        if offload:
            held = [x for own in run._fresh.values() for n, x in own.items() if "basis" not in n]
            assert held
            assert all(isinstance(x, np.ndarray) for x in held)
        run.finalize()
        rotated = lambda s: {
            k: {n: x for n, x in own.items() if n != "eigen" and "basis" not in n}
            for k, own in s.items()
        }
        same_statistics(rotated(run.statistics), rotated(want))
        if statistic == "ekfac":
            check_eigen(run.statistics, by_vmap(loss, params, data))


def check_eigen(stats, grads):
    """EK-FAC's sums in the bases that are beside them."""
    for layer in ("l1/w", "l2/w"):
        own, left, right = stats[layer], stats[layer]["left_basis"], stats[layer]["right_basis"]
        turned = np.einsum("oi,bop,pj->bij", left, grads[layer], right)
        close(own["eigen"], (turned**2).sum(0), 1e-4, atol=1e-3)
        assert int(own["eigen_n"]) == len(turned)
        for side, basis in (("left", left), ("right", right)):
            diagonal = basis.T @ np.asarray(own[side]) @ basis
            close(diagonal, np.diag(np.diag(diagonal)), atol=1e-3)


def test_statistics_are_those_of_the_formulas(tmp_path, params):
    data = examples()
    run = make(tmp_path, {"statistic": ["mean", "variance", "diagonal", "kfac", "raw"]})
    run.extract(cut(data), range(N))
    run.finalize()
    grads = by_vmap(loss, params, data)
    h = np.tanh(data["x"] @ params["l1"]["w"] + params["l1"]["b"])
    out = 2 * (h @ params["l2"]["w"] - data["y"])
    back = (out @ params["l2"]["w"].T) * (1 - h**2)
    sides = {"l1/w": (back, data["x"]), "l2/w": (out, h)}
    found = run.averages()
    for layer, grad in grads.items():
        flat = grad.reshape(N, -1)
        close(found[layer]["mean"].reshape(-1), flat.mean(0), 1e-4)
        close(found[layer]["variance"].reshape(-1), flat.var(0), 1e-3, 1e-4)
        close(found[layer]["square"].reshape(-1), (flat**2).mean(0), 1e-4, 1e-4)
        close(found[layer]["raw"], flat.T @ flat / N, 1e-4, 1e-3)
    for layer, (left, right) in sides.items():
        close(found[layer]["left"], left.T @ left / N, 1e-4, 1e-4)
        close(found[layer]["right"], right.T @ right / N, 1e-4, 1e-4)


@pytest.mark.parametrize("rank", [None, 3])
def test_positions_that_do_not_count(tmp_path, rank):
    """Statistics are those of the sequences without their padding, each by itself."""
    params, data = sequences()
    run = make(tmp_path, {"save": "grad", "statistic": "kfac"}, sequence_loss, params)
    if rank:
        run.add_lora(rank=rank)
    run.extract(cut(data), range(N), mask=lambda batch: batch["mask"])
    run.finalize()
    capture, want = logix.jax.capture(sequence_loss, params), {}
    for k in range(N):
        real = int(data["mask"][k].sum())
        one = {name: x[k : k + 1, :real] for name, x in data.items()}
        records = [run.compression.record(r) for r in capture(params, one)]
        want = _statistics.update(want, records, ["kfac"])
    same_statistics(run.statistics, want)
    assert int(run.statistics["w"]["right_n"]) == int(data["mask"].sum()) < N * 3
    if not rank:
        close(run.store().rows(), as_rows(by_vmap(sequence_loss, params, data), run.layout))


def test_a_mask_of_another_shape(tmp_path):
    params, data = sequences()
    run = make(tmp_path, {"statistic": "kfac"}, sequence_loss, params)
    with pytest.raises(ValueError, match=r"mask has the shape \(4,\), and there are 4 examples"):
        run.extract(cut(data), range(N), mask=lambda batch: batch["mask"][:, 0])
    with pytest.raises(TypeError, match="mask is a function of a batch"):
        run.extract(cut(data), range(N), mask=data["mask"])


def test_ekfac_goes_over_the_data_twice(tmp_path):
    passes = []

    def loader():
        passes.append(1)
        yield from cut(examples())

    words = {"save": "grad", "statistic": "ekfac"}
    run = make(tmp_path, words)
    with pytest.raises(ValueError, match=r"EK-FAC goes over the data twice.*lambda: iter"):
        run.extract(loader())
    assert not passes
    run.extract(loader, ids=DataIDGenerator("index"))
    run.finalize()
    assert len(passes) == 2
    assert run.store().ids == list(range(N))
    assert int(run.statistics["l1/w"]["eigen_n"]) == N == int(run.statistics["l1/w"]["left_n"])


def test_a_batch_is_compiled_once(tmp_path, caplog):
    traces = itertools.count()

    def counted(p, e):
        next(traces)
        return loss(p, e)

    run = make(tmp_path, {"save": "grad", "statistic": "kfac"}, counted)
    data = examples(20)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for k in range(2):
            run.extract(cut(data), range(20 * k, 20 * k + 20))
            run.finalize()
    told = [r.getMessage() for r in caplog.records]
    assert sum("Finished XLA compilation of jit(_batch)" in text for text in told) == 1
    assert next(traces) == 1
    assert int(run.statistics["l1/w"]["left_n"]) == 40


def test_sums_are_moved_not_copied(tmp_path):
    """Those of the batch before are gone: nobody holds them any more."""
    run, data = make(tmp_path, {"statistic": "kfac"}), cut(examples())
    run.extract(data[:1], range(4))
    before = run._fresh["l1/w"]["left"]
    run.extract(data[1:], range(4, N))
    assert before.is_deleted()
    assert int(run.statistics["l1/w"]["left_n"]) == N
    first = run.statistics["l1/w"]["left"] + 0
    run.finalize()
    close(run.statistics["l1/w"]["left"], first)
