"""Records: what a front end gives to the engine, and nothing else.

A record holds, for one parameter of one layer and a batch of examples, what its per-sample gradient
is made of. The gradient itself is made as late as possible, and smaller where it is compressed.

    Outer(a, g)    a matrix that is applied at T places:   grad[b] = Σ_t g[b,t] ⊗ a[b,t]   (out, in)
    Lookup(i, g)   an embedding:                           row i[b,t] gets g[b,t]        (rows, out)
    Whole(grad)    anything small (biases, norms):         grad[b], as it is
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._array import Array, add_rows, as_float, like, namespace


@dataclasses.dataclass(frozen=True)
class Outer:
    """`a`: (B, T, in), `g`: (B, T, out).

    `real`: (B, T), the places that are not there only to make all examples equally long. None: all
    that the batch's mask does not leave out.
    """

    layer: str
    a: Array
    g: Array
    real: Array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Of the gradient of one example."""
        return self.g.shape[-1], self.a.shape[-1]

    def grad(self) -> Array:
        """(B, out, in)."""
        return namespace(self.g).einsum("bto,bti->boi", self.g, self.a)


@dataclasses.dataclass(frozen=True)
class Lookup:
    """`i`: (B, T) rows of an embedding of `rows` rows, `g`: (B, T, out)."""

    layer: str
    i: Array
    g: Array
    rows: int

    @property
    def shape(self) -> tuple[int, int]:
        """Of the gradient of one example, which is that of the table: (rows, out)."""
        return self.rows, self.g.shape[-1]

    def outer(self) -> Outer:
        """The same with one-hot vectors written out, as the output's side: for small tables."""
        xp = namespace(self.g)
        eye: Any = xp.eye(self.rows, dtype=self.g.dtype)
        eye = eye.to(self.g.device) if xp.__name__ == "torch" else eye
        return Outer(self.layer, self.g, eye[self.i])

    def grad(self) -> Array:
        """(B, rows, out)."""
        return self.outer().grad()


@dataclasses.dataclass(frozen=True)
class Whole:
    """`value`: (B, …), the gradient of each example."""

    layer: str
    value: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape[1:])

    def grad(self) -> Array:
        return self.value


Record = Outer | Lookup | Whole


def examples(record: Record) -> int:
    """How many there are in the batch."""
    return len(record.value if isinstance(record, Whole) else record.g)


def changed(record: Record, **arrays: Any) -> Any:
    """The record with other arrays."""
    return dataclasses.replace(record, **arrays)


def floated(record: Record) -> Record:
    """In float32 or better: sums of float16 and bfloat16 would lose what they add."""
    if isinstance(record, Whole):
        return changed(record, value=as_float(record.value))
    if isinstance(record, Lookup):
        return changed(record, g=as_float(record.g))
    return changed(record, a=as_float(record.a), g=as_float(record.g))


def cut(record: Record, some: slice) -> Record:
    """The record of some of its examples."""
    if isinstance(record, Whole):
        return changed(record, value=record.value[some])
    if isinstance(record, Lookup):
        return changed(record, i=record.i[some], g=record.g[some])
    real = None if record.real is None else record.real[some]
    return changed(record, a=record.a[some], g=record.g[some], real=real)


def rotated(record: Record, left: Array | None, right: Array | None) -> Record:
    """The record whose gradient is leftᵀ G right; None is the identity."""
    assert not isinstance(record, Whole)
    if isinstance(record, Lookup):
        g = turned(record.g, right)
        if left is None:
            return changed(record, g=g)
        return Outer(record.layer, g, like(left, g)[record.i])  # one-hot vectors pick its rows
    return changed(record, a=turned(record.a, right), g=turned(record.g, left))


def turned(x: Array, q: Array | None) -> Array:
    """The vectors of the last axis in another basis; None is the identity."""
    # One product of two matrices: with three axes some libraries make one for each example.
    return x if q is None else (x.reshape(-1, x.shape[-1]) @ like(q, x)).reshape(x.shape)


def places_joined(lookups: Sequence[Lookup]) -> Lookup:
    """One lookup for several of one table."""
    if len(lookups) == 1:
        return lookups[0]
    join = lambda xs: namespace(xs[0]).concatenate(xs, 1)
    return changed(lookups[0], i=join([x.i for x in lookups]), g=join([x.g for x in lookups]))


def row_gradients(lookup: Lookup) -> tuple[Array, Array]:
    """Rows (n,) and their gradients (n, out): no row comes twice for one example.

    A row that an example uses at several places has its sum at one of them, and zeros at the
    others. So n is that of all places, the table is never written out, and JAX can trace it.
    """
    g = lookup.g.reshape(-1, lookup.g.shape[-1])
    xp, start = namespace(g), np.arange(len(lookup.g))[:, None] * lookup.rows
    keys = (lookup.i + like(start, lookup.i)).reshape(-1)
    order = xp.argsort(keys)
    keys = keys[order]
    fresh = xp.concatenate([keys[:1] == keys[:1], keys[1:] != keys[:-1]])
    slot = xp.cumsum(fresh, 0) - 1
    sums = add_rows(len(keys), slot, g[order])
    return keys % lookup.rows, sums[slot] * like(fresh, g)[:, None]
