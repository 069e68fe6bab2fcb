"""A loss of a batch must be the sum of the losses of its examples, or no example has a gradient."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ._capture import Capture


def check_additive(capture: Capture, params: Any, batch: Any) -> None:
    """Compare the loss of a batch with those of its examples, each by itself."""
    if not capture.batched or jax.tree.leaves(batch)[0].shape[0] < 2:
        return

    @jax.jit
    def both(arrays: Any, batch: Any) -> tuple[Any, ...]:
        loss = lambda b: capture.loss(capture.watched.filled(arrays), b)
        each = jax.vmap(lambda example: loss(jax.tree.map(lambda x: x[None], example)))(batch)
        return jnp.sum(loss(batch)), jnp.sum(each), jnp.sum(jnp.abs(each))

    out = both(capture.watched.arrays(params), batch)
    found, total, scale = (float(x) for x in out)
    n = jax.tree.leaves(batch)[0].shape[0]
    digits = float(jnp.finfo(out[0].dtype).eps) ** 0.5
    if not math.isfinite(found):
        return  # told where examples that are not finite are
    for one in (found, found * n):  # a sum, or a mean
        if abs(one - total) <= 10 * digits * max(scale, 1e-30):
            return
    raise ValueError(
        f"batched=True: the loss of a batch of {n} is {found:.6g}, and the losses of its examples "
        f"sum up to {total:.6g} (mean {total / n:.6g}). They depend on each other, so no "
        "example has a gradient of its own: normalisation over the batch (BatchNorm in training "
        "mode), dropout, or weights that depend on the batch. Use running averages, turn dropout "
        "off, and sum over the examples."
    )
