"""A loss of a batch must be the sum of the losses of its examples, or no example has a gradient."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from .._norms import squared_norms


def check_additive(capture: Any, params: Any, batch: Any) -> None:
    """Compare the loss of a batch, and its gradient, with those of its examples by themselves."""
    n = jax.tree.leaves(batch)[0].shape[0]
    if n == 0:
        return
    if n == 1:
        batch, n = jax.tree.map(_with_another, batch), 2
    arrays, chosen = capture.watched.arrays(params), capture.watched.chosen

    @jax.jit
    def compared(arrays: Any, batch: Any) -> tuple[Any, ...]:
        def loss(own: Any, batch: Any) -> Any:
            filled = [own.get(i, x) for i, x in enumerate(arrays)]
            return jnp.sum(capture.loss(capture.watched.filled(filled), batch))

        alone = lambda own, x: loss(own, jax.tree.map(lambda y: y[None], x))
        each = lambda own: jax.vmap(alone, in_axes=(None, 0))(own, batch)
        own = {i: arrays[i] for i in chosen}
        found, g = jax.value_and_grad(loss)(own, batch)
        if capture.read(capture.watched.filled(arrays), batch)[1].traced:
            total, each_g = jax.value_and_grad(lambda own: each(own).sum())(own)
        else:  # it can be differentiated only by itself
            none = jax.tree.map(jnp.zeros_like, (found, own))
            one = lambda x: jax.value_and_grad(alone)(own, x)
            add = lambda sums, x: (jax.tree.map(jnp.add, sums, one(x)), None)
            (total, each_g), _ = jax.lax.scan(add, none, batch)
        far = lambda times: _norm(jax.tree.map(lambda x, y: times * x - y, g, each_g))
        sizes = jnp.sqrt(squared_norms(capture(capture.watched.filled(arrays), batch))).sum()
        return found, total, jnp.abs(each(own)).sum(), far(1), far(n), sizes

    out = compared(arrays, batch)
    found, total, scale, *far, sizes = map(float, out)
    if not math.isfinite(found):
        return  # told where examples that are not finite are
    near = max(1e-4, 20 * float(jnp.finfo(out[0].dtype).eps))
    for times, distance in zip((1, n), far):  # a sum, or a mean
        same = abs(times * found - total) <= near * max(scale, 1e-30)
        if same and distance <= 10 * near * max(sizes, 1e-30):
            return
    raise ValueError(
        f"batched=True: the loss of a batch of {n} is {found:.6g}, and the losses of its examples "
        f"sum up to {total:.6g} (mean {total / n:.6g}). They, or their gradients, depend on each "
        "other, so no example has a gradient of its own: normalisation over the batch (BatchNorm "
        "in training mode), dropout, or weights that depend on the batch. Use running averages, "
        "turn dropout off, and sum over the examples."
    )


def _with_another(x: Any) -> Any:
    """One example alone shows nothing: beside it, one that differs from it a little."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.concatenate([x, x])
    noise = jax.random.uniform(jax.random.key(0), x.shape, jnp.float32, 0.8, 1.2)
    return jnp.concatenate([x, (x * noise + (noise - 1)).astype(x.dtype)])


def _norm(tree: Any) -> Any:
    return jnp.sqrt(sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)))
