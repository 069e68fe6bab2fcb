"""Runs over a loss of JAX: what is logged beside gradients, scores, losses of a batch, mistakes."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import logix
import logix.jax
import lox
from jax_run import (
    B,
    N,
    as_rows,
    by_vmap,
    close,
    cut,
    examples,
    loss,
    make,
    parameters,
    sequence_loss,
    sequences,
)


@pytest.fixture
def params():
    return parameters()


# --- beside gradients -----------------------------------------------------------------------------


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


# --- losses of a batch ----------------------------------------------------------------------------


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


# --- mistakes -------------------------------------------------------------------------------------


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
    run.setup({"save": "grad"})
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
