"""The same network with the same weights in PyTorch and JAX: one store for both."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import logix  # noqa: E402

N, B = 12, 4
NAMES = {"l1/w": "0", "l1/b": "0.bias", "l2/w": "2", "l2/b": "2.bias"}


@pytest.fixture(scope="module")
def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.randn(N, 5), torch.randint(0, 3, (N,))


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="sum")


def loss(p, e):
    h = jnp.tanh(e["x"] @ p["l1"]["w"] + p["l1"]["b"])
    scores = h @ p["l2"]["w"] + p["l2"]["b"]
    return jnp.log(jnp.exp(scores).sum()) - scores[e["y"]]


def as_jax(model):
    layer = lambda m: {"w": m.weight.detach().numpy().T, "b": m.bias.detach().numpy()}
    return {"l1": layer(model[0]), "l2": layer(model[2])}


def in_torch(run, problem):
    model, x, y = problem
    run.watch(model)

    def go(some, ids):
        with run(data_id=ids):
            loss_of(model, x[some], y[some]).backward()

    return lambda: [go(slice(i, i + B), list(range(i, i + B))) for i in range(0, N, B)], go


def in_jax(run, problem):
    model, x, y = problem
    run.watch(loss, as_jax(model), names=NAMES)
    part = lambda some: {"x": x[some], "y": y[some]}  # tensors of PyTorch will do
    batches = [part(slice(i, i + B)) for i in range(0, N, B)]
    return lambda: run.extract(batches, range(N)), lambda some, ids: run.log(part(some), ids=ids)


FRONT = {"torch": in_torch, "jax": in_jax}


def written(tmp_path, problem, front, statistic, rank):
    """A run of one of the two, after all its passes."""
    run = logix.LogIX(front, {"root_dir": str(tmp_path)})
    go, _ = FRONT[front](run, problem)
    lora = "none" if rank is None else "random"
    for _ in logix.LogIXScheduler(run, lora, statistic, "grad", rank=rank):
        go()
        run.finalize()
    return run


def by_layer(run):
    ids, logs = next(iter(run.build_log_dataloader(batch_size=N)))
    assert ids == list(range(N))
    return {name: np.asarray(own["grad"]) for name, own in logs.items()}


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("statistic", ["kfac", "ekfac", "raw"])
def test_rows_and_statistics_are_the_same(tmp_path, problem, statistic, rank):
    one, other = (written(tmp_path, problem, front, statistic, rank) for front in FRONT)
    rows = by_layer(one), by_layer(other)
    assert set(rows[0]) == set(rows[1]) == set(NAMES.values())
    for layer, grads in rows[0].items():
        np.testing.assert_allclose(rows[1][layer], grads, rtol=1e-5, atol=1e-5)
    first, second = one.statistics, other.statistics
    assert set(first) == set(second)
    for layer, stats in first.items():
        assert set(second[layer]) == set(stats)
        for name, value in stats.items():
            if "basis" in name:  # up to signs
                continue
            want, got = np.asarray(value), np.asarray(second[layer][name])
            assert not name.endswith("_n") or int(got) == int(want)
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("statistic", ["kfac", "ekfac"])
@pytest.mark.parametrize(("writer", "asker"), [("torch", "jax"), ("jax", "torch")])
def test_a_store_of_one_is_scored_by_the_other(tmp_path, problem, writer, asker, statistic):
    run = written(tmp_path, problem, writer, statistic, 2)
    same = logix.LogIX(writer, {"root_dir": str(tmp_path)})
    same.initialize_from_log()
    _, ask = FRONT[asker](same, problem)
    _, own = FRONT[writer](run, problem)
    for one in (run, same):
        one.setup({"log": "grad"})
        one.eval()
    own(slice(0, 3), [*"abc"])
    want = run.influence.compute_influence_all(run.get_log())
    ask(slice(0, 3), [*"abc"])
    got = same.influence.compute_influence_all(same.get_log())
    assert got["tgt_ids"] == list(range(N))
    scale = np.abs(np.asarray(want["influence"])).max()
    np.testing.assert_allclose(
        np.asarray(got["influence"]), np.asarray(want["influence"]), rtol=1e-3, atol=1e-3 * scale
    )


# --- examples that are not finite, of PyTorch ----------------------------------------------------


def spoiled(problem):
    model, x, y = problem
    x = x.clone()
    x[5, 0], x[6, 1] = float("nan"), float("inf")
    return model, x, y


def test_torch_tells_what_is_not_finite(tmp_path, problem):
    run = logix.LogIX("run", {"root_dir": str(tmp_path)})
    run.setup({"save": "grad", "statistic": "kfac"})
    go, one = in_torch(run, spoiled(problem))
    with pytest.raises(ValueError, match=r"gradient of 5, 6 is not finite in layer '0"):
        go()
    assert int(run.statistics["0"]["left_n"]) == B
    one(slice(8, 12), [8, 9, 10, 11])
    one(slice(7, 8), [5])  # the id is free
    run.finalize()
    assert run.store().ids == [0, 1, 2, 3, 8, 9, 10, 11, 5]
    assert int(run.statistics["0"]["left_n"]) == 9


@pytest.mark.parametrize("statistic", ["none", "kfac", "variance"])
@pytest.mark.parametrize("policy", ["skip", "keep"])
def test_torch_leaves_out_what_is_not_finite(tmp_path, capsys, problem, policy, statistic):
    run = logix.LogIX("run", {"root_dir": str(tmp_path)}, nonfinite=policy)
    clean = logix.LogIX("clean", {"root_dir": str(tmp_path)})
    kept = [i for i in range(N) if i not in (5, 6)]
    for one in (run, clean):
        one.setup({"save": "grad", "statistic": statistic})
    in_torch(run, spoiled(problem))[0]()
    _, part = in_torch(clean, problem)
    for ids in ([0, 1, 2, 3], [4, 7], [8, 9, 10, 11]):
        part(ids, ids)
    run.finalize()
    clean.finalize()
    told = "left out" if policy == "skip" else "saved, and left out of statistics"
    text = f"2 examples with gradients that are not finite: {told} (5, 6)"
    assert text in capsys.readouterr().out
    store = run.store()
    assert store.ids == (kept if policy == "skip" else list(range(N)))
    rows = store.rows()[[store.find(i) for i in kept]]
    np.testing.assert_allclose(rows, clean.store().rows(), rtol=1e-5, atol=1e-6)
    if policy == "keep":
        assert not np.isfinite(store.rows()[[5, 6]]).all(1).any()
    for layer, stats in clean.statistics.items():
        for name, value in stats.items():
            np.testing.assert_allclose(
                run.statistics[layer][name], value, rtol=1e-4, atol=1e-5, err_msg=name
            )


def test_mistakes_of_the_other_front_end(tmp_path, problem):
    model, x, _ = problem
    run = logix.LogIX("run", {"root_dir": str(tmp_path)})
    run.watch(model)
    with pytest.raises(TypeError, match="A PyTorch model is logged by"):
        run.extract([x.numpy()])
    with pytest.raises(TypeError, match=r"does not know \['filter'\]: they are for a loss of JAX"):
        run.watch(model, filter="0")
    run.watch(loss, as_jax(model), names=NAMES)
    with pytest.raises(TypeError, match=r"run.extract\(batches, ids=…\)"):
        run(data_id=[0])
    run.watch(model)
    with run(data_id=[0]):
        model(x[:1]).sum().backward()
    assert run.get_log()[0] == [0]


# --- padding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [None, 3])
def test_torch_has_no_padding_in_covariances(tmp_path, rank):
    """Statistics are those of the sequences without their padding, each by itself."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 3))
    words = torch.randint(0, 20, (4, 3))
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]])

    def statistics(name, parts):
        run = logix.LogIX(name, {"root_dir": str(tmp_path)})
        run.setup({"statistic": "kfac"})
        run.watch(model)
        if rank:
            run.add_lora(rank=rank)
        for k, (some, real) in enumerate(parts):
            with run(data_id=[f"{k}.{i}" for i in range(len(some))], mask=real):
                (model(some).square().sum(-1) * real).sum().backward()
        run.finalize()
        return run.statistics

    got = statistics("padded", [(words, mask)])
    cut = lambda x, k: x[k : k + 1, : int(mask[k].sum())]
    want = statistics("alone", [(cut(words, k), cut(mask, k)) for k in range(4)])
    assert set(got) == set(want)
    for layer, stats in want.items():
        for name, value in stats.items():
            np.testing.assert_allclose(
                got[layer][name], value, rtol=1e-4, atol=1e-5, err_msg=f"{layer} {name}"
            )
