"""Two networks in each library of JAX, with the same weights: what each calls them, and the loss.

`LIBRARIES[library](kind, weights)` gives the loss of one example and its parameters. Weights are
those of PyTorch's modules: `first.weight` is (out, in), or (out, in, height, width).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax import lax

SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "mlp": dict(first=(5, 6), norm=(5,), last=(3, 5)),
    "convolutions": dict(first=(4, 2, 3, 3), norm=(4,), last=(3, 4)),
}
INPUTS = {"mlp": (6,), "convolutions": (7, 6, 2)}
EPSILON = 1e-5


def weights_of(kind: str) -> dict[str, np.ndarray]:
    random, out = np.random.default_rng(1), {}
    for layer, shape in SHAPES[kind].items():
        out[f"{layer}.weight"] = random.standard_normal(shape).astype("f") / 2
        out[f"{layer}.bias"] = random.standard_normal(shape[0]).astype("f") / 2
    return out


def score(y: Any) -> Any:
    """A loss in which every number has a slope of its own."""
    return (jnp.sin(y) * jnp.arange(1.0, 1 + y.size).reshape(y.shape)).sum()


def turned(w: np.ndarray) -> jax.Array:
    """As Flax and Haiku have it: the outputs last, the inputs before."""
    return jnp.asarray(w.transpose(*range(2, w.ndim), 1, 0))


def run(first: Callable, norm: Callable, last: Callable, x: Any) -> Any:
    """Both networks, for modules that have channels last: over space, if any, there is a mean."""
    h = jnp.tanh(norm(first(x)))
    return last(h.reshape(-1, h.shape[-1]).mean(0))


def filled(paths: dict[str, str], weights: dict[str, np.ndarray]) -> Callable[[str], Any]:
    """The weight of a layer's parameter, by the word that a library has for it."""

    def value(path: str) -> Any:
        layer, word = path.split("/")[-2:]
        w = weights[f"{layer}.{paths[word]}"]
        return turned(w) if paths[word] == "weight" and w.ndim > 1 else jnp.asarray(w)

    return value


# --- plain pytrees -------------------------------------------------------------------------------


def plain(kind: str, w: dict[str, np.ndarray]) -> tuple[Callable, Any]:
    params = {
        layer: {"kernel": turned(w[f"{layer}.weight"]), "bias": jnp.asarray(w[f"{layer}.bias"])}
        for layer in ("first", "last")
    }
    params["norm"] = {"scale": jnp.asarray(w["norm.weight"]), "bias": jnp.asarray(w["norm.bias"])}
    dims = ("NHWC", "HWIO", "NHWC")

    def first(p: Any, x: Any) -> Any:
        if kind == "mlp":
            return x @ p["kernel"] + p["bias"]
        y = lax.conv_general_dilated(x[None], p["kernel"], (2, 2), "SAME", dimension_numbers=dims)
        return y[0] + p["bias"]

    def norm(p: Any, x: Any) -> Any:
        x = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + EPSILON)
        return x * p["scale"] + p["bias"]

    def loss(p: Any, x: Any) -> Any:
        last = lambda h: h @ p["last"]["kernel"] + p["last"]["bias"]
        return score(run(lambda x: first(p["first"], x), lambda h: norm(p["norm"], h), last, x))

    return loss, params


# --- Flax ----------------------------------------------------------------------------------------


class Nnx(nnx.Module):
    def __init__(self, kind: str, rngs: nnx.Rngs):
        if kind == "mlp":
            self.first = nnx.Linear(6, 5, rngs=rngs)
        else:
            self.first = nnx.Conv(2, 4, (3, 3), strides=2, rngs=rngs)
        width = SHAPES[kind]["norm"][0]
        self.norm = nnx.LayerNorm(width, epsilon=EPSILON, use_fast_variance=False, rngs=rngs)
        self.last = nnx.Linear(width, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return run(self.first, self.norm, self.last, x)


def nnx_module(kind: str, w: dict[str, np.ndarray]) -> tuple[Callable, Any]:
    """The module is the parameters."""
    model = Nnx(kind, nnx.Rngs(0))
    for name in ("first", "last"):
        getattr(model, name).kernel[...] = turned(w[f"{name}.weight"])
        getattr(model, name).bias[...] = jnp.asarray(w[f"{name}.bias"])
    model.norm.scale[...] = jnp.asarray(w["norm.weight"])
    model.norm.bias[...] = jnp.asarray(w["norm.bias"])
    return lambda model, x: score(model(x)), model


def nnx_split(kind: str, w: dict[str, np.ndarray]) -> tuple[Callable, Any]:
    graph, params = nnx.split(nnx_module(kind, w)[1], nnx.Param)
    return lambda params, x: score(nnx.merge(graph, params)(x)), params


class Linen(linen.Module):
    kind: str

    @linen.compact
    def __call__(self, x: Any) -> Any:
        if self.kind == "mlp":
            first: Any = linen.Dense(5, name="first")
        else:
            first = linen.Conv(4, (3, 3), strides=2, name="first")
        norm = linen.LayerNorm(epsilon=EPSILON, use_fast_variance=False, name="norm")
        return run(first, norm, linen.Dense(3, name="last"), x)


def linen_params(kind: str, w: dict[str, np.ndarray]) -> tuple[Callable, Any]:
    model = Linen(kind)
    params = model.init(jax.random.key(0), jnp.ones(INPUTS[kind]))["params"]
    value = filled(dict(kernel="weight", scale="weight", bias="bias"), w)
    named = lambda path, _: value(jax.tree_util.keystr(path, simple=True, separator="/"))
    params = jax.tree_util.tree_map_with_path(named, params)
    return lambda params, x: score(model.apply({"params": params}, x)), params


# --- Haiku ---------------------------------------------------------------------------------------


def haiku(kind: str, w: dict[str, np.ndarray]) -> tuple[Callable, Any]:
    def network(x: Any) -> Any:
        if kind == "mlp":
            first: Any = hk.Linear(5, name="first")
        else:
            first = hk.Conv2D(4, 3, stride=2, name="first")
        norm = hk.LayerNorm(-1, True, True, eps=EPSILON, name="norm")
        return run(first, norm, hk.Linear(3, name="last"), x)

    model = hk.without_apply_rng(hk.transform(network))
    words = dict(w="weight", scale="weight", b="bias", offset="bias")
    value = filled(words, w)
    params = model.init(jax.random.key(0), jnp.ones(INPUTS[kind]))
    params = {
        layer: {word: value(f"{layer}/{word}") for word in own} for layer, own in params.items()
    }
    return lambda params, x: score(model.apply(params, x)), params


# --- Equinox -------------------------------------------------------------------------------------


class Equinox(eqx.Module):
    """Channels are first, and modules are for one place; the activation is a leaf of the tree."""

    first: eqx.Module
    activation: Callable
    norm: eqx.nn.LayerNorm
    last: eqx.nn.Linear

    def __init__(self, kind: str, key: Any):
        if kind == "mlp":
            self.first = eqx.nn.Linear(6, 5, key=key)
        else:
            self.first = eqx.nn.Conv2d(2, 4, 3, 2, padding="SAME", key=key)
        self.activation = jnp.tanh
        width = SHAPES[kind]["norm"][0]
        self.norm, self.last = eqx.nn.LayerNorm(width), eqx.nn.Linear(width, 3, key=key)

    def __call__(self, x: Any) -> Any:
        h = self.first(jnp.moveaxis(x, -1, 0))  # type: ignore[operator]
        h = jax.vmap(self.norm)(h.reshape(len(h), -1).T)
        return self.last(self.activation(h).mean(0))


def equinox(kind: str, w: dict[str, np.ndarray]) -> tuple[Callable, Any]:
    """The module is the parameters, with its leaves that are no arrays."""
    model = Equinox(kind, jax.random.key(0))
    flat, tree = jax.tree_util.tree_flatten_with_path(model)
    leaves = []
    for path, leaf in flat:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        leaves.append(jnp.asarray(w[name]).reshape(leaf.shape) if name in w else leaf)
    return lambda model, x: score(model(x)), tree.unflatten(leaves)


def equinox_partition(kind: str, w: dict[str, np.ndarray]) -> tuple[Callable, Any]:
    params, static = eqx.partition(equinox(kind, w)[1], eqx.is_array)
    return lambda params, x: score(eqx.combine(params, static)(x)), params


LIBRARIES = {
    "plain": plain,
    "nnx module": nnx_module,
    "nnx split": nnx_split,
    "linen": linen_params,
    "haiku": haiku,
    "equinox": equinox,
    "equinox partition": equinox_partition,
}
