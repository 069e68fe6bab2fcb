"""A run over a loss of JAX: rows, statistics, ids, errors, what is logged beside gradients."""

from __future__ import annotations

import itertools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import logix
import logix.jax
import lox
from logix import _statistics
from logix._compress import Compression, Projector, gradients
from logix.utils import DataIDGenerator

N, B = 10, 4


def loss(p, e):
    h = jnp.tanh(e["x"] @ p["l1"]["w"] + p["l1"]["b"])
    return jnp.sum((h @ p["l2"]["w"] - e["y"]) ** 2)


@pytest.fixture
def params():
    return parameters()


def parameters():
    random = np.random.default_rng(1)
    make = lambda *shape: jnp.asarray(random.normal(size=shape) * 0.5, jnp.float32)
    return {"l1": {"w": make(4, 5), "b": make(5)}, "l2": {"w": make(5, 3)}}


def examples(n=N, seed=0):
    random = np.random.default_rng(seed)
    x, y = random.normal(size=(n, 4)), random.normal(size=(n, 3))
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def cut(data, size=B):
    """Batches, of which the last may be smaller."""
    n = len(jax.tree.leaves(data)[0])
    part = lambda i: jax.tree.map(lambda x: x[i : i + size], data)
    return [part(i) for i in range(0, n, size)]


def make(tmp_path, words, loss=loss, params=None, logging=None, how=None, name="run", **options):
    run = logix.LogIX(name, {"root_dir": str(tmp_path), "logging": logging}, **options)
    run.setup(words)
    run.watch(loss, parameters() if params is None else params, **(how or {}))
    return run


def by_vmap(loss, params, data):
    """{path: (examples, …)}, matrices as (out, in), tables as they are."""
    grads = jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, data)
    flat = jax.tree_util.tree_flatten_with_path(grads)[0]
    key = lambda path: "/".join(str(k.key) for k in path)
    turned = lambda name, x: x.swapaxes(1, 2) if x.ndim == 3 and name != "table" else x
    return {key(path): np.asarray(turned(key(path), x)) for path, x in flat}


def as_rows(grads, layout):
    return np.concatenate([grads[n].reshape(len(grads[n]), -1) for n, _, _ in layout], 1)


def close(got, want, rtol=2e-5, atol=1e-5):
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=rtol, atol=atol)


def same_statistics(got, want, rtol=2e-5):
    assert set(got) == set(want)
    for layer, stats in want.items():
        assert set(got[layer]) == set(stats), layer
        for name, value in stats.items():
            scale = max(1e-3, float(np.abs(np.asarray(value)).max()))
            close(got[layer][name], value, rtol, atol=rtol * scale)
            assert not name.endswith("_n") or int(got[layer][name]) == int(value)


# --- rows ----------------------------------------------------------------------------------------


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
    for name, loss, params, how in (
        ("a", scanned, whole, {}),
        ("b", unrolled, apart, dict(names=names)),
    ):
        run = make(tmp_path, words, loss, params, how=how, name=name)
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


# --- statistics ----------------------------------------------------------------------------------


def engine(records, what):
    """What the engine makes of all records at once."""
    if "ekfac" not in what:
        return _statistics.update({}, records, what)
    state = _statistics.with_bases(_statistics.update({}, records, ["kfac"]))
    return _statistics.update(state, records, ["ekfac"])


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


def sequence_loss(p, e):
    """Of tokens, of which those beyond the mask have no part in it."""
    h = jnp.tanh(p["table"][e["i"]] @ p["w"] + p["b"])
    return jnp.sum(((h @ p["v"]) ** 2).sum(-1) * e["mask"])


def sequences(n=N, t=3):
    random = np.random.default_rng(3)
    make = lambda *shape: jnp.asarray(random.normal(size=shape) * 0.5, jnp.float32)
    params = {"table": make(7, 4), "w": make(4, 5), "b": make(5), "v": make(5, 2)}
    lengths = random.integers(1, t + 1, n)
    mask = (np.arange(t) < lengths[:, None]).astype(np.float32)
    return params, {"i": random.integers(0, 7, (n, t)), "mask": mask}


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


# --- ids, errors, resuming -----------------------------------------------------------------------


@pytest.mark.parametrize("form", ["range", "list", "array", "generator", "function", "key"])
def test_ids_in_every_form(tmp_path, form):
    run, data = make(tmp_path, {"save": "grad"}), examples()
    batches, names = cut(data), [f"n{i}" for i in range(N)]
    if form in ("range", "array"):
        names = list(range(N))
    given = {
        "range": range(N),
        "list": names,
        "array": np.arange(N),
        "generator": (name for name in names),
        "function": lambda batch: [
            names[int(np.flatnonzero((data["x"] == x).all(1))[0])] for x in batch["x"]
        ],
        "key": "name",
    }[form]
    if form == "key":
        batches = [{**b, "name": np.array(names[i * B : i * B + B])} for i, b in enumerate(batches)]
    run.extract(batches, given)
    run.finalize()
    assert run.store().ids == names


def test_ids_of_the_content_are_the_same_in_any_batch(tmp_path):
    run, data = make(tmp_path, {"save": "grad"}), examples()
    run.extract(cut(data))
    run.finalize()
    ids = run.store().ids
    again = make(tmp_path, {"save": "grad"}, resume=True)
    again.extract(cut(data, 5))
    again.finalize()
    assert again.store().ids == ids
    from logix.store._ids import content_ids

    assert content_ids(data) == ids


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (range(N - 1), "1 ids for batch 2, which has 2 examples"),
        (range(N + 2), "the ids are too many: 2 were left when the batches ended"),
        (lambda batch: [1, 2], "2 ids for batch 0, which has 4 examples"),
        ("id", "ids='id': the batch is no dict with this key"),
        ([0, 1, 0, *range(4, 11)], "the id 0 is there already"),
    ],
)
def test_wrong_ids_are_told(tmp_path, ids, message):
    run, data = make(tmp_path, {"save": "grad", "statistic": "kfac"}), examples()
    with pytest.raises(ValueError, match=message):
        run.extract(cut(data), ids)
    there = int(run.statistics["l1/w"]["left_n"]) if run.statistics else 0
    run._fresh = {}
    run.flush()
    assert there == (len(run.store()) if there else 0)


@pytest.mark.parametrize("where", ["loss", "batches", "first batch", "shapes"])
def test_an_error_leaves_the_run_usable(tmp_path, params, where):
    broken = [where == "loss"]

    def fragile(p, e):
        if broken[0]:
            raise ZeroDivisionError
        return loss(p, e)

    def batches():
        for k, batch in enumerate(cut(data)):
            if (where, k) in (("batches", 2), ("first batch", 0)):
                raise ZeroDivisionError
            if where == "shapes" and k == 2:
                batch = {**batch, "x": batch["x"][:, :3]}
            yield batch

    data = examples()
    run = make(tmp_path, {"save": "grad", "statistic": "kfac"}, fragile)
    with pytest.raises(TypeError if where == "shapes" else ZeroDivisionError):
        run.extract(batches(), range(N))
    done = 2 * B if where in ("batches", "shapes") else 0
    assert (int(run.statistics["l1/w"]["left_n"]) if run.statistics else 0) == done
    broken[0] = False
    rest = jax.tree.map(lambda x: x[done:], data)
    run.extract(cut(rest), range(done, N))
    run.finalize()
    assert run.store().ids == list(range(N))
    close(run.store().rows(), as_rows(by_vmap(loss, params, data), run.layout))
    same_statistics(run.statistics, engine(logix.jax.capture(loss, params)(params, data), ["kfac"]))


def test_a_computation_that_fails_takes_the_sums_with_it(tmp_path):
    """They were given to it, to be changed in place; rows of other batches are not lost."""
    data, broken = examples(), [True]

    def watchdog(x):
        if broken[0] and x > 50:
            raise RuntimeError("the device fell over")
        return np.float32(1)

    def fragile(p, e):
        how = jax.ShapeDtypeStruct((), jnp.float32)
        x = jax.lax.stop_gradient(e["x"][0])
        return loss(p, e) * jax.pure_callback(watchdog, how, x, vmap_method="sequential")

    bad = {**data, "x": np.where(np.arange(N)[:, None] == 5, 100, data["x"]).astype(np.float32)}
    run = make(tmp_path, {"save": "grad", "statistic": "kfac"}, fragile)
    with pytest.raises(Exception, match="the device fell over") as told:
        run.extract(cut(bad), range(N))
    assert "the statistics of this pass are lost" in told.value.__notes__[0]
    assert run.statistics == {}
    assert set(range(B)) <= set(run.store().ids) <= {*range(B), 8, 9}
    run.close()
    again = make(tmp_path, {"save": "grad", "statistic": "kfac"}, resume=True)
    again.extract(cut(data), range(N))
    again.finalize()
    assert sorted(again.store().ids) == list(range(N))
    assert int(again.statistics["l1/w"]["left_n"]) == N


@pytest.mark.parametrize("policy", ["error", "keep_first", "keep_all"])
def test_duplicates(tmp_path, policy):
    run, data = make(tmp_path, {"save": "grad"}, duplicates=policy), examples()
    ids = [0, 1, 2, 3, 3, 4, 5, 6, 7, 0]
    if policy == "error":
        with pytest.raises(ValueError, match="the id 3 is there already; nothing of this batch"):
            run.extract(cut(data), ids)
        assert run.store().ids == [0, 1, 2, 3]
        return
    run.extract(cut(data), ids)
    run.finalize()
    store = run.store()
    assert store.ids == ([*range(8)] if policy == "keep_first" else ids)
    rows = as_rows(by_vmap(loss, parameters(), data), run.layout)
    close(store.rows(), rows[[0, 1, 2, 3, 5, 6, 7, 8]] if policy == "keep_first" else rows)


def test_what_is_there_is_not_computed_again(tmp_path, params):
    data, computed = examples(), []

    def traced(p, e):
        jax.debug.callback(lambda x: computed.append(float(x)), e["x"][0])
        return loss(p, e)

    first = make(tmp_path, {"save": "grad"})
    first.extract(cut(data)[:2], range(8))
    first.close()
    again = make(tmp_path, {"save": "grad"}, traced, resume=True)
    again.extract(cut(data), range(N))
    again.finalize()
    jax.effects_barrier()
    assert sorted(set(computed)) == sorted(data["x"][8:, 0].tolist())
    assert again.store().ids == list(range(N))
    close(again.store().rows(), as_rows(by_vmap(loss, params, data), again.layout))


def test_ids_that_were_passed_over_are_not_lost_with_a_failed_batch(tmp_path):
    data = cut(examples(), 2)
    first = make(tmp_path, {"save": "grad"})
    first.extract([jax.tree.map(lambda x: x[:1], data[0])], [0])
    first.close()
    again = make(tmp_path, {"save": "grad"}, resume=True)
    with pytest.raises(ValueError, match="gradient of 1 is not finite"):
        again.extract([spoiled(data[0], 1)], [0, 1])
    again.extract(data, range(N))
    again.finalize()
    assert again.store().ids == list(range(N))


# --- examples that are not finite ----------------------------------------------------------------


def spoiled(data, *which):
    x = data["x"].copy()
    for k, i in enumerate(which):
        x[i, 0] = (np.nan, np.inf)[k % 2]
    return {**data, "x": x}


def without(data, *which):
    return jax.tree.map(lambda x: np.delete(x, which, axis=0), data)


@pytest.mark.parametrize("statistic", ["none", "kfac", "ekfac"])
@pytest.mark.parametrize("save", ["grad", "forward"])
def test_an_example_that_is_not_finite_is_an_error(tmp_path, params, statistic, save):
    run = make(tmp_path, {"save": save, "statistic": statistic})
    good = examples(16)
    with pytest.raises(ValueError, match=r"gradient of 5, 6 is not finite in layer 'l1/") as told:
        run.extract(cut(spoiled(good, 5, 6)), range(16))
    assert "Nothing of this batch was logged" in str(told.value)
    run.flush()
    done = run.store().ids  # those before it, and some that were begun beside it
    assert set(range(4)) <= set(done) <= {*range(4), *range(8, 16)}
    if statistic != "none":
        assert int(run.statistics["l1/w"]["left_n"]) == len(done)
    left = [i for i in range(16) if i not in done]
    run.extract(cut(jax.tree.map(lambda x: x[left], good)), left)
    run.finalize()
    assert sorted(run.store().ids) == list(range(16))
    if statistic == "kfac":
        same_statistics(
            run.statistics, engine(logix.jax.capture(loss, params)(params, good), ["kfac"])
        )


@pytest.mark.parametrize("statistic", ["none", "kfac", "ekfac", "variance"])
@pytest.mark.parametrize("policy", ["skip", "keep"])
def test_examples_that_are_not_finite_are_left_out(tmp_path, capsys, policy, statistic):
    words, data = {"save": "grad", "statistic": statistic}, examples()
    run = make(tmp_path, words, nonfinite=policy)
    run.extract(cut(spoiled(data, 0, 5, 9)), range(N))
    run.finalize()
    told = "left out" if policy == "skip" else "saved, and left out of statistics"
    assert (
        f"3 examples with gradients that are not finite: {told} (0, 5, 9)"
        in capsys.readouterr().out
    )
    clean = make(tmp_path, words, name="clean")
    kept = [i for i in range(N) if i not in (0, 5, 9)]
    clean.extract(cut(without(data, 0, 5, 9)), kept)
    clean.finalize()
    store = run.store()
    assert store.ids == (kept if policy == "skip" else list(range(N)))
    close(store.rows()[[store.find(i) for i in kept]], clean.store().rows())
    if policy == "keep":
        assert not np.isfinite(store.rows()[[0, 5, 9]]).all(1).any()
    drop = lambda s: {
        k: {n: x for n, x in v.items() if "basis" not in n and n != "eigen"} for k, v in s.items()
    }
    same_statistics(drop(run.statistics), drop(clean.statistics))


@pytest.mark.parametrize("masked", [False, True])
def test_tables_and_positions_without_what_is_not_finite(tmp_path, masked):
    params, data = sequences()
    spoiled = {**data, "scale": np.where(np.arange(N) == 3, np.nan, 1).astype(np.float32)}
    scaled = lambda p, e: sequence_loss(p, e) * e["scale"]
    mask = (lambda batch: batch["mask"]) if masked else None
    runs = []
    for name, content in (("a", spoiled), ("b", without({**spoiled, "scale": np.ones(N, "f")}, 3))):
        run = make(tmp_path, {"statistic": "kfac"}, scaled, params, name=name, nonfinite="skip")
        run.extract(cut(content), mask=mask)
        run.finalize()
        runs.append(run)
    same_statistics(runs[0].statistics, runs[1].statistics)


# --- beside gradients ----------------------------------------------------------------------------


def test_activations_are_saved_and_read_back(tmp_path, params):
    data = examples()
    run = make(tmp_path, {"forward": ["log"], "backward": ["log"]})
    run.extract(cut(data), range(N))
    run.finalize()
    ((ids, logs),) = run.build_log_dataloader(batch_size=N)
    assert ids == list(range(N))
    h = np.tanh(data["x"] @ params["l1"]["w"] + params["l1"]["b"])
    out = 2 * (h @ params["l2"]["w"] - data["y"])
    close(logs["l1/w"]["forward"][:, 0], data["x"])
    close(logs["l2/w"]["forward"][:, 0], h)
    close(logs["l2/w"]["backward"][:, 0], out)
    assert set(logs) == {"l1/w", "l2/w"}
    _, log = run.log(cut(data)[0], ids=[*"abcd"])
    close(log["l2/w"]["forward"][:, 0], h[:B])


def naming(p, e):
    h = jnp.tanh(e["x"] @ p["l1"]["w"] + p["l1"]["b"])
    lox.log({"h/first": h, "other": h * 2})
    return jnp.sum((h @ p["l2"]["w"] - e["y"]) ** 2)


def test_logged_names_are_saved(tmp_path, params):
    data = examples()
    words = {"save": ["grad", "forward", "backward"], "log": "forward"}
    run = make(tmp_path, words, naming, how=dict(logs=["h/*"]))
    run.extract(cut(data), range(N))
    run.finalize()
    ((_, logs),) = run.build_log_dataloader(batch_size=N)
    h = np.tanh(data["x"] @ params["l1"]["w"] + params["l1"]["b"])
    back = 2 * (h @ params["l2"]["w"] - data["y"]) @ params["l2"]["w"].T
    close(logs["h/first"]["forward"], h)
    close(logs["h/first"]["backward"], back)
    assert set(logs) == {"l1/w", "l1/b", "l2/w", "h/first"}
    close(logs["l1/w"]["grad"], by_vmap(loss, params, data)["l1/w"])


def test_statistics_of_what_is_logged(tmp_path, params):
    data = examples()
    words = {"forward": ["mean", "variance"], "backward": ["mean"]}
    run = make(tmp_path, words, naming, how=dict(logs="h/*"))
    run.extract(cut(data), range(N))
    run.finalize()
    h = np.tanh(data["x"] @ params["l1"]["w"] + params["l1"]["b"])
    close(run.averages()["h/first"]["forward_mean"], h.mean(0))
    close(run.averages()["l2/w"]["forward_mean"], h.mean(0))
    assert int(run.statistics["h/first"]["forward_sum_n"]) == N


def test_scores(tmp_path, params):
    data, queries = examples(), examples(3, seed=9)
    run = make(tmp_path, {"save": "grad", "statistic": "raw"})
    run.extract(cut(data), range(N))
    run.finalize()
    log = run.log(queries, ids=[*"abc"])
    assert log[0] == [*"abc"]
    assert len(run.store()) == N
    train, asked = by_vmap(loss, params, data), by_vmap(loss, params, queries)
    each = {}
    for layer in train:
        a, q = train[layer].reshape(N, -1).astype(np.float64), asked[layer].reshape(3, -1)
        each[layer] = q @ np.linalg.solve(a.T @ a / N + 0.5 * np.eye(a.shape[1]), a.T)
    want = sum(each.values())
    got = run.influence.compute_influence_all(log, damping=0.5, per_layer=True)
    for layer, scores in {"total": want, **each}.items():
        close(got["influence"][layer], scores, 1e-3, 1e-3)
    top = run.influence.compute_influence_all(log, damping=0.5, top_k=3)
    close(top["influence"], np.sort(want, 1)[:, :-4:-1], 1e-3, 1e-3)
    pairs = run.influence.compute_influence(log, run.log(data, ids=range(N)), damping=0.5)
    close(pairs["influence"], want, 1e-3, 1e-3)
    own = run.influence.compute_self_influence(log, damping=0.5)["influence"]
    both = run.influence.compute_influence(log, log, damping=0.5)["influence"]
    close(own, np.diag(both), 1e-3, 1e-3)
    assert run.get_log()[0] == list(range(N))


def test_scores_of_positions_add_up(tmp_path):
    params, data = sequences()
    run = make(
        tmp_path,
        {"save": "grad", "statistic": "kfac"},
        sequence_loss,
        params,
        how=dict(filter=["w", "v"]),
    )
    run.extract(cut(data), range(N), mask=lambda batch: batch["mask"])
    run.finalize()
    queries = jax.tree.map(lambda x: x[:2], data)
    log = run.log(queries, ids=["a", "b"], mask=queries["mask"])
    tokens = run.influence.compute_token_influence(log)
    assert tokens["influence"].shape == (2, 2, 3)
    whole = run.influence.compute_influence(log, log)["influence"]
    close(tokens["influence"].sum(-1) + tokens["rest"], whole, 1e-3, 1e-3)
    assert (np.asarray(tokens["influence"])[:, queries["mask"] == 0] == 0).all()


@pytest.mark.parametrize(
    ("lora", "hessian"), [("none", "kfac"), ("random", "ekfac"), ("pca", "ekfac"), ("pca", "raw")]
)
def test_the_scheduler_counts_the_passes(tmp_path, lora, hessian):
    data, passes = examples(), []
    run = logix.LogIX("run", {"root_dir": str(tmp_path)})
    run.watch(loss, parameters())
    scheduler = logix.LogIXScheduler(run, lora, hessian, "grad", rank=2)
    for k in scheduler:
        passes.append(k)
        run.extract(iter(cut(data)), range(N))
        run.finalize()
    assert len(passes) == len(scheduler)
    assert run.store().ids == list(range(N))
    stats = run.statistics["l1/w"]
    assert {int(n) for name, n in stats.items() if name.endswith("_n")} == {N}
    own = run.influence.compute_self_influence(hessian=hessian)["influence"]
    assert (own > 0).all()


# --- losses of a batch ---------------------------------------------------------------------------


def of_batch(reduce):
    def whole(p, b):
        h = jnp.tanh(b["x"] @ p["l1"]["w"] + p["l1"]["b"])
        return reduce(jnp.sum((h @ p["l2"]["w"] - b["y"]) ** 2, -1))

    return whole


@pytest.mark.parametrize("reduce", [jnp.sum, jnp.mean, lambda x: x], ids=["sum", "mean", "each"])
def test_a_loss_of_a_batch(tmp_path, params, reduce):
    data = examples()
    run = make(
        tmp_path, {"save": "grad", "statistic": "kfac"}, of_batch(reduce), how=dict(batched=True)
    )
    run.extract(cut(data), range(N))
    run.finalize()
    close(run.store().rows(), as_rows(by_vmap(loss, params, data), run.layout))


@pytest.mark.parametrize("eps", [1e-3, 0.0])
def test_examples_that_depend_on_each_other_are_refused(tmp_path, eps):
    def normalised(p, b):
        h = b["x"] @ p["l1"]["w"] + p["l1"]["b"]
        h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + eps)
        return jnp.sum((jnp.tanh(h) @ p["l2"]["w"] - b["y"]) ** 2)

    run = make(tmp_path, {"save": "grad"}, normalised, how=dict(batched=True))
    with pytest.raises(ValueError, match="normalisation over the batch"):
        run.extract(cut(examples()), range(N))


# --- mistakes ------------------------------------------------------------------------------------


def test_mistakes_are_named(tmp_path, params):
    run = logix.LogIX("run", {"root_dir": str(tmp_path)})
    with pytest.raises(TypeError, match=r"extract is for a loss of JAX: run.watch\(loss, params\)"):
        run.extract(cut(examples()))
    with pytest.raises(RuntimeError, match="Call watch"):
        run.log(examples())
    with pytest.raises(TypeError, match=r"watch\(loss, params\). dict was given"):
        run.watch(params, loss)
    with pytest.raises(TypeError, match=r"watch\(loss, params\)"):
        run.watch(loss)
    with pytest.raises(ValueError, match="no parameter is left to watch"):
        run.watch(loss, params, filter="l3/*")
    with pytest.raises(TypeError, match="batch_size"):
        run.watch(loss, params, batch_size=3)
    run.watch(loss, params)
    with pytest.raises(TypeError, match=r"run.extract\(batches, ids=…\)"):
        run(data_id=[0])
    with pytest.raises(TypeError, match="filter=…"):
        run.add_lora(name_filter="l1")
    with pytest.raises(TypeError, match=r"does not know \['idz'\]"):
        run.log(examples(), idz=[1])
    with pytest.raises(ValueError, match="sizes of their first axes"):
        run.extract([{"x": np.ones((3, 4)), "y": np.ones((2, 3))}])
    assert "layers watched: 3" in repr(run)


def test_only_what_is_used_is_imported():
    code = "import sys, {}; print(*[m for m in ('torch', 'jax', 'lox') if m in sys.modules])"
    for name, there in (("logix", ""), ("logix.jax", "jax lox")):
        found = subprocess.run(
            [sys.executable, "-c", code.format(name)], capture_output=True, text=True, check=True
        )
        assert found.stdout.strip() == there
