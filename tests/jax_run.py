"""For tests of runs over a loss of JAX: a small network, its data, its gradients by `vmap`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import logix
from logix import _statistics

N, B = 10, 4


def loss(p, e):
    h = jnp.tanh(e["x"] @ p["l1"]["w"] + p["l1"]["b"])
    return jnp.sum((h @ p["l2"]["w"] - e["y"]) ** 2)


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


def engine(records, what):
    """What the engine makes of all records at once."""
    if "ekfac" not in what:
        return _statistics.update({}, records, what)
    state = _statistics.with_bases(_statistics.update({}, records, ["kfac"]))
    return _statistics.update(state, records, ["ekfac"])


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


def spoiled(data, *which):
    x = data["x"].copy()
    for k, i in enumerate(which):
        x[i, 0] = (np.nan, np.inf)[k % 2]
    return {**data, "x": x}


def without(data, *which):
    return jax.tree.map(lambda x: np.delete(x, which, axis=0), data)
