"""Records: what a front end gives to the engine, and nothing else.

A record holds, for one parameter of one layer and a batch of examples, what its per-sample gradient
is made of. The gradient itself is made as late as possible, and smaller where it is compressed.

    Outer(a, g)    a matrix that is applied at T places:   grad[b] = Σ_t g[b,t] ⊗ a[b,t]   (out, in)
    Lookup(i, g)   an embedding:                           row i[b,t] gets g[b,t]        (rows, out)
    Whole(grad)    anything small (biases, norms):         grad[b], as it is
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ._array import Array, namespace


@dataclasses.dataclass(frozen=True)
class Outer:
    """`a`: (B, T, in), `g`: (B, T, out)."""

    layer: str
    a: Array
    g: Array

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
