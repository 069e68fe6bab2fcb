"""Generated programs: parameters seen through random views, then multiplied over random axes.

LOGIX_EXAMPLES=500 in the environment makes the run longer.
"""

from __future__ import annotations

import math
import os
import random

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax

import logix.jax
from logix._compress import Compression
from logix.jax._shrunk import shrunk
from logix.jax._stacks import Handed, compressed, layer_gradients

EXAMPLES = int(os.environ.get("LOGIX_EXAMPLES", "12"))


def factors(r, n):
    """Sizes of axes whose product is n."""
    out = []
    while n > 1 and len(out) < 3 and r.random() < 0.8:
        out.append(r.choice([d for d in range(1, n + 1) if n % d == 0]))
        n //= out[-1]
    out.append(n)
    r.shuffle(out)
    return tuple(out)


def beside(r, params, like):
    """A value of the same shape, to join with: of a parameter, if one has enough entries."""
    fitting = [x for x in params if x.size >= like.size]
    if not fitting:
        return jnp.ones_like(like)
    x = r.choice(fitting)
    whole = x.shape == like.shape and r.random() < 0.5
    return x if whole else x.reshape(-1)[: like.size].reshape(like.shape)


def view(r, params, w):
    """One more view of w."""
    kinds = ["reshape", "transpose", "slice", "slice", "index", "join", "stack", "squeeze"]
    kind = r.choice([*kinds, "flip", "flip", "scale", "take"])
    axis = r.randrange(w.ndim) if w.ndim else 0
    if kind == "reshape":
        return w.reshape(factors(r, w.size))
    if kind == "transpose":
        return w.transpose(r.sample(range(w.ndim), w.ndim))
    if kind == "slice" and w.ndim:
        low = r.randrange(w.shape[axis])
        high = r.randrange(low, w.shape[axis]) + 1
        return lax.slice_in_dim(w, low, high, r.choice([1, 1, 1, 2, 3]), axis)
    if kind == "index" and w.ndim > 1:
        return lax.index_in_dim(w, r.randrange(w.shape[axis]), axis, keepdims=False)
    if kind == "join" and w.ndim:
        return jnp.concatenate([w, beside(r, params, w)][:: r.choice([1, -1])], axis)
    if kind == "stack" and w.ndim < 4:
        both = [w, beside(r, params, w)][:: r.choice([1, -1])]
        return jnp.stack(both, r.randrange(w.ndim + 1))
    if kind == "flip" and w.ndim:
        return jnp.flip(w, r.sample(range(w.ndim), r.randrange(1, w.ndim + 1)))
    if kind == "scale":
        return r.choice([-w, w * 0.5, w / jnp.sqrt(3.0)])
    if kind == "take" and w.ndim > 1:
        return jnp.take(w, r.randrange(w.shape[axis]), axis)
    return w.squeeze()


def use(r, w, e):
    """A number, of w and the example: by a product over some axes, or by a loop of them."""
    if w.ndim > 1 and r.random() < 0.35:
        seed, reverse = r.random(), r.random() < 0.5
        if r.random() < 0.4:  # by the number of each
            axis, n = (k := r.randrange(w.ndim)), w.shape[k]
            at = lambda k: jnp.take(w, n - 1 - k if reverse else k, axis)
            again = lambda k, c: c + use(random.Random(seed), at(k), e * jnp.cos(c))
            return lax.fori_loop(0, n, again, jnp.float32(0.3))
        step = lambda c, w: (c + use(random.Random(seed), w, e * jnp.cos(c)), None)
        return lax.scan(step, jnp.float32(0.3), w, reverse=reverse)[0]
    roles = [r.choice("ccffb") for _ in range(w.ndim)]
    of = lambda role: [i for i in range(w.ndim) if roles[i] == role]
    axes = [*((i, w.shape[i]) for i in of("c") + of("b")), *[(-1, 2)] * r.randrange(2)]
    r.shuffle(axes)
    shape = [n for _, n in axes]
    x = jnp.sin(e * (1 + jnp.arange(math.prod(shape), dtype=jnp.float32))).reshape(shape)
    at = lambda role: [[i for i, _ in axes].index(i) for i in of(role)]
    if r.random() < 0.5:
        y = lax.dot_general(x, w, ((at("c"), of("c")), (at("b"), of("b"))))
    else:
        y = lax.dot_general(w, x, ((of("c"), at("c")), (of("b"), at("b"))))
    return jnp.tanh(y).sum()


@settings(
    max_examples=EXAMPLES,
    derandomize=EXAMPLES == 12,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.integers(0, 2**32 - 1))
def test_views_of_parameters(seed):
    r, numbers = random.Random(seed), np.random.default_rng(seed)
    shapes = [
        tuple(r.choices([1, 2, 3, 4, 6], k=r.randrange(1, 4))) for _ in range(r.randrange(1, 4))
    ]
    params = [jnp.asarray(numbers.standard_normal(s), jnp.float32) for s in shapes]

    def loss(params, e):
        r, total = random.Random(seed + 1), jnp.float32(0)
        for w in params:
            for _ in range(r.randrange(1, 3)):
                seen = w
                for _ in range(r.randrange(5)):
                    seen = view(r, params, seen)
                total += use(r, seen, e)
        return total

    batch = jnp.asarray([0.3, 0.7])
    capture = logix.jax.capture(loss, params)
    got = jax.jit(capture.gradients)(params, batch)
    want = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))(params, batch)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    same_rows_where_loops_project(capture, params, batch)


def same_rows_where_loops_project(capture, params, batch):
    how = Handed(Compression(kind="logra", rank=2))
    jax.eval_shape(lambda: compressed(capture.everything(params, batch)[1], how))
    how = Handed(how.settings, given={spot: jnp.asarray(x) for spot, x in how.made.items()})

    def gradients(inside):
        stacks = capture.everything(params, batch, how if inside else None)[1]
        return {x.layer: x.value for x in layer_gradients(compressed(stacks, how))}

    _, found = capture.read(params, batch)
    if not shrunk(found.plan, capture.watched.names, found.forms, how)[1]:
        return  # no loop over layers that are large enough
    got, want = (jax.jit(gradients, static_argnums=0)(inside) for inside in (True, False))
    assert got.keys() == want.keys()
    for name, y in want.items():
        np.testing.assert_allclose(got[name], y, rtol=1e-4, atol=1e-5)
