"""Rows: events as arrays with static shapes. The free monoid, and what control flow does to it.

Inside a program the event axis comes first, then batch axes, then those of the value; it is moved
behind the batch axes once, at the end. A single event has no event axis until it must have one, so
a scan can stack its value with nothing in between.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._compat import as_varying, varying_axes

Array = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Rows:
    """Events of one key: leaves of the value, steps, and which of them are real (None: all)."""

    values: list[Array]
    steps: list[Array]
    mask: Array | None
    batch: tuple[int, ...] = dataclasses.field(metadata=dict(static=True))
    single: bool = dataclasses.field(metadata=dict(static=True))

    @property
    def count(self) -> int:
        return 1 if self.single else jnp.shape(self.values[0])[0]


def expand(rows: Rows) -> Rows:
    """The same with an event axis."""
    if not rows.single:
        return rows
    return dataclasses.replace(
        jax.tree.map(lambda x: jax.lax.expand_dims(x, [0]), rows), single=False
    )


def with_mask(rows: Rows) -> Rows:
    """The same with a mask, all true if it had none."""
    if rows.mask is not None:
        return rows
    shape = rows.batch if rows.single else (rows.count, *rows.batch)
    return dataclasses.replace(rows, mask=jnp.ones(shape, bool))


def combine(a: Rows, b: Rows) -> Rows:
    """The events of `a`, then those of `b`."""
    a, b = expand(a), expand(b)
    if a.mask is not None or b.mask is not None:
        a, b = with_mask(a), with_mask(b)
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y]), a, b)


def through_scan(rows: Rows, reverse: bool) -> Rows:
    """Rows that a scan stacked along a new leading axis, put into program order."""
    if reverse:
        rows = jax.tree.map(lambda x: jnp.flip(x, 0), rows)
    if rows.single:
        return dataclasses.replace(rows, single=False)
    return jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), rows)


def padded(rows: Rows | None, like: Rows) -> Rows:
    """`rows` grown to the structure of `like` with rows that are not real."""
    if rows is None:
        return jax.tree.map(_blank, like)  # its mask too: nothing here is real
    if not like.single:
        rows = expand(rows)
    if like.mask is not None:
        rows = with_mask(rows)
    missing = like.count - rows.count
    if missing:
        fill = lambda x: jnp.concatenate([x, jnp.zeros((missing, *x.shape[1:]), x.dtype)])
        rows = jax.tree.map(fill, rows)
    return jax.tree.map(_retype, rows, like)


def union(branches: list[dict[str, Any]]) -> dict[str, Any]:
    """What every branch of a cond must return: for each key, the rows (as types) that hold any."""
    out: dict[str, Any] = {}
    for key in dict.fromkeys(k for b in branches for k in b):
        present = [b[key] for b in branches if key in b]
        counts = {r.count for r in present}
        certain = len(present) == len(branches) and len(counts) == 1
        masked = not certain or any(r.mask is not None for r in present)
        single = all(r.single for r in present)
        # Inside a shard_map, types must also say over which axes any branch varies.
        axes = frozenset().union(*(varying_axes(x) for r in present for x in jax.tree.leaves(r)))
        first, front = present[0], () if single else (max(counts),)

        def like(x: Any, first: Rows = first, front: Any = front, axes: Any = axes) -> _Like:
            shape = x.shape if first.single else x.shape[1:]
            return _Like((*front, *shape), np.dtype(x.dtype), axes)

        mask = _Like((*front, *first.batch), np.dtype(bool), axes) if masked else None
        values, steps = [like(x) for x in first.values], [like(x) for x in first.steps]
        out[key] = Rows(values, steps, mask, first.batch, single)
    return out


@dataclasses.dataclass(frozen=True)
class _Like:
    shape: tuple[int, ...]
    dtype: Any
    axes: frozenset[str]


def _blank(like: _Like) -> Array:
    return as_varying(jnp.zeros(like.shape, like.dtype), like.axes)


def _retype(x: Array, like: _Like) -> Array:
    return as_varying(x, like.axes)
