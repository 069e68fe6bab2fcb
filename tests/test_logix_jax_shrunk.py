"""Vectors that are projected in a loop over layers are those that are projected behind it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_programs_conv
import logix.jax
from jax_programs import PROGRAMS, square
from logix._compress import Compression, Projector
from logix._record import Outer
from logix.jax._batches import Spread
from logix.jax._shrunk import shrunk
from logix.jax._stacks import Handed, compressed, unstacked
from logix.jax._step import Step

assert jax_programs_conv.WIDE  # that file has added its programs


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def over_layers(step, **how):
    return lambda p, x: square(lax.scan(lambda x, w: (step(x, w), None), x, p, **how)[0])


def experts(x, w):
    to = jax.nn.softmax(x @ w["router"])
    to = jnp.where(to < to.max(-1, keepdims=True), 0, to)
    up = jnp.einsum("td,te,edf->etf", x, (to > 0).astype(x.dtype), w["up"])
    return x + jnp.einsum("etf,efd,te->td", jnp.tanh(up), w["down"], to)


def heads(x, w):
    q, k, v = (jnp.einsum("td,dhk->thk", x, w[n]) for n in "qkv")
    scores = jax.nn.softmax(jnp.einsum("thk,shk->hts", q, k))
    return x + jnp.einsum("hts,shk,hkd->td", scores, v, w["o"])


def branch(x, w):
    return lax.cond(x[0, 0] > 0, lambda: jnp.tanh(x @ w["a"]), lambda: x @ w["a"].T @ w["b"])


def half(x, w):
    y = x.astype(jnp.bfloat16) @ w["a"].astype(jnp.bfloat16)
    return x + jnp.tanh(y).astype(jnp.float32) @ (w["b"] * 0.5)


def scanned_part(p, x):
    step = lambda x, w: (jnp.tanh(x @ w["a"]) @ w["b"][:, 1:], None)
    x, _ = lax.scan(step, x, jax.tree.map(lambda y: y[1:3], p))
    return square(x @ p["a"][0])


def flipped(p, x):
    return square(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["a"][::-1])[0])


A = {"a": (3, 4, 5), "b": (3, 5, 4)}
SQUARE = {"a": (3, 4, 4), "b": (3, 4, 4)}
# How many matrices are handed into loops, the loss, the shapes of its parameters.
LOSSES = {
    "layers of experts": (
        6,
        over_layers(experts),
        {"router": (3, 4, 5), "up": (3, 5, 4, 6), "down": (3, 5, 6, 4)},
    ),
    "layers of heads": (
        8,
        over_layers(heads),
        dict.fromkeys("qkv", (3, 4, 2, 3)) | {"o": (3, 2, 3, 4)},
    ),
    "remat": (
        8,
        over_layers(jax.checkpoint(heads)),
        dict.fromkeys("qkv", (3, 4, 2, 3)) | {"o": (3, 2, 3, 4)},
    ),
    "a branch": (4, over_layers(branch), SQUARE),
    "bfloat16, scaled": (4, over_layers(half), A),
    "some layers": (4, scanned_part, {"a": (4, 4, 6), "b": (4, 6, 5)}),
    "reversed": (
        8,
        over_layers(heads, reverse=True),
        dict.fromkeys("qkv", (3, 4, 1, 3)) | {"o": (3, 1, 3, 4)},
    ),
    "flipped, which is projected behind it": (0, flipped, {"a": (3, 4, 4)}),
}
LOOPS = ("scan_over_layers", "scan_in_scan", "shared_and_stacked", "for_loop_over_some_layers")
LOOPS = (*LOOPS, "for_loop_in_for_loop", "scan_of_remat", "conv_over_layers")


def given_loss(name):
    if name in PROGRAMS:
        params, batch = PROGRAMS[name].data()
        return 2, PROGRAMS[name].loss, params, batch
    count, loss, shapes = LOSSES[name]
    params = {key: 0.5 * normal(*shape, seed=k) for k, (key, shape) in enumerate(shapes.items())}
    return count, loss, params, normal(3, 5, 4)


@pytest.mark.parametrize("name", [*LOSSES, *LOOPS])
def test_projected_in_loops_or_behind_them(name):
    count, loss, params, batch = given_loss(name)
    capture = logix.jax.capture(loss, params)
    settings = Compression(kind="logra", rank=2)
    arrays = capture.watched.arrays(params)
    _, made = Step(capture).shapes(arrays, batch, Projector(settings))
    how = Handed(settings, given={spot: jnp.asarray(x) for spot, x in made.items()})
    _, found = capture.read(params, batch)
    assert len(shrunk(found.plan, capture.watched.names, found.forms, how)[1]) == count

    def records(inside):
        stacks = capture.everything(params, batch, how if inside else None)[1]
        return unstacked(compressed(stacks, how))

    got, want = (jax.jit(records, static_argnums=0)(inside) for inside in (True, False))
    key = lambda r: r.layer
    for x, y in zip(sorted(got, key=key), sorted(want, key=key), strict=True):
        assert (x.layer, type(x)) == (y.layer, type(y))
        for a, b in zip(jax.tree.leaves(vars(x)), jax.tree.leaves(vars(y)), strict=True):
            scale = float(jnp.abs(b).max()) if hasattr(b, "max") else 0
            if hasattr(a, "shape"):
                np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * (scale + 1e-3))
    if name == "layers of experts":  # the places that an expert does not see
        assert any(isinstance(x, Outer) and x.real is not None and not x.real.all() for x in got)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_on_several_devices(kind):
    _, loss, params, batch = given_loss("layers of experts")
    batch = jnp.concatenate([batch, batch + 1, batch - 1])[:8]
    capture, settings = logix.jax.capture(loss, params), Compression(kind="logra", rank=2)
    step = Step(capture)

    def records(params, batch):
        arrays = capture.watched.arrays(params)
        _, made = step.shapes(arrays, batch, Projector(settings))
        given = {spot: jnp.asarray(x) for spot, x in made.items()}
        return step.records(arrays, batch, given, None, settings=settings)[0]

    mesh = jax.make_mesh((8,), ("d",), axis_types=(getattr(jax.sharding.AxisType, kind),))
    put = lambda xs, *spec: jax.device_put(xs, NamedSharding(mesh, P(*spec)))
    got, want = records(put(params), put(batch, "d")), records(params, batch)
    for x, y in zip(got, want, strict=True):
        assert x.layer == y.layer
        assert all(leaf.sharding.spec[0] == "d" for leaf in jax.tree.leaves(x))
        np.testing.assert_allclose(x.grad(), y.grad(), rtol=2e-5, atol=1e-5)


def test_nothing_of_the_size_of_the_vectors_is_held_for_all_layers():
    wide, rank = 96, 4
    loss = over_layers(jax.checkpoint(lambda x, w: x + jnp.tanh(x @ w["a"]) @ w["b"]))
    params = {"a": jnp.ones((12, 8, wide)), "b": jnp.ones((12, wide, 8))}
    batch, settings = normal(4, 32, 8), Compression(kind="logra", rank=rank)
    capture = logix.jax.capture(loss, params)
    step, arrays = Step(capture), capture.watched.arrays(params)
    _, made = step.shapes(arrays, batch, Projector(settings))
    given = {spot: jnp.asarray(x) for spot, x in made.items()}
    spread = Spread.of(batch, arrays)
    how = dict(settings=settings, want="rows", what=frozenset(), spread=spread)
    small = step.run.lower(arrays, batch, given, {}, {}, None, None, [], **how).compile()
    # What goes into b, of all layers. (The gradient of what a gives would be as much again.)
    stored = 12 * batch.shape[0] * 32 * wide * 4
    assert small.memory_analysis().temp_size_in_bytes < stored
