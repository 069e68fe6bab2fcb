"""`lax.ragged_dot` for a batch of examples: JAX can't map it over examples that share the matrices.

Rows of all examples are sorted by the matrix they are for, so that one product does for all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = Any


def contracted(eqn: Any) -> int | None:
    """For a `lax.ragged_dot`, which axis of the matrices is contracted; None for other kinds."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    contract, batch = numbers.dot_dimension_numbers
    usual = eqn.invars[0].aval.ndim == 2 and tuple(numbers.lhs_ragged_dimensions) == (0,)
    usual &= tuple(numbers.rhs_group_dimensions) == (0,) and not batch[0]
    return int(contract[1][0]) if usual and tuple(contract[0]) == (1,) else None


def run(eqn: Any, args: list[Array]) -> Array:
    """The equation, of that kind, in a way that can be mapped over examples."""
    x, w, sizes = args
    how = {k: eqn.params[k] for k in ("precision", "preferred_element_type")}
    return ragged(**how)(x, w if contracted(eqn) == 1 else w.swapaxes(1, 2), sizes)


def groups(sizes: Array, rows: int) -> Array:
    """(…, matrices, rows): which rows are for which matrix."""
    end, row = jnp.cumsum(sizes, -1)[..., None], jnp.arange(rows)
    return (row < end) & (row >= end - sizes[..., None])


def ragged(**how: Any) -> Callable[[Array, Array, Array], Array]:
    """`lax.ragged_dot(x, w, sizes, **how)`, mappable and differentiable."""

    @jax.custom_batching.custom_vmap
    def product(x: Array, w: Array, sizes: Array) -> Array:
        return lax.ragged_dot(x, w, sizes, **how)

    @product.def_vmap
    def _(n: int, batched: Any, x: Array, w: Array, sizes: Array) -> Any:
        wide = lambda y, is_wide: y if is_wide else jnp.broadcast_to(y, (n, *y.shape))
        x, sizes = wide(x, batched[0]), wide(sizes, batched[2])
        if batched[1]:  # matrices of each one's own
            return lax.map(lambda args: product(*args), (x, w, sizes)), True
        row = jnp.arange(x.shape[1])
        group = (row[:, None] >= jnp.cumsum(sizes, -1)[:, None, :]).sum(-1)
        order = jnp.argsort(group.reshape(-1))  # a row of no matrix comes last, and gives zeros
        y = product(x.reshape(-1, x.shape[-1])[order], w, sizes.sum(0))
        back = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)))
        return y[back].reshape(n, -1, y.shape[-1]), True

    @jax.custom_vjp
    def call(x: Array, w: Array, sizes: Array) -> Array:
        return product(x, w, sizes)

    def forward(x: Array, w: Array, sizes: Array) -> Any:
        return product(x, w, sizes), (x, w, sizes)

    def backward(kept: Any, g: Array) -> Any:
        x, w, sizes = kept
        back = product(g, w.swapaxes(1, 2), sizes).astype(x.dtype)
        mine = groups(sizes, len(x)).astype(x.dtype)
        of_w = jnp.einsum("et,ti,to->eio", mine, x, g).astype(w.dtype)  # unless nobody wants it
        return back, of_w, None

    call.defvjp(forward, backward)
    return call
