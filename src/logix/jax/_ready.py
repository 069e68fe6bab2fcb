"""What is known of batches before they are computed: their shapes, and memory for their rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .._compress import Projector
from .._record import Record, Whole
from .._rows import Activation

Array = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Ready:
    """What is known of batches of one shape, compressed in one way."""

    how: Projector
    given: dict[str, Array]  # projections
    first: list[str]  # of each stack of records, the first layer
    records: list[Record]  # as shapes, as are the others
    logged: list[Activation]
    gradients: list[Whole]  # compressed, in the order of a row
    parts: list[Any]  # rows, as they are computed

    def rows(self, n: int, want: str) -> list[Any]:
        """What is saved of n examples, as shapes."""
        some = lambda x: jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype)
        if want == "records":
            return jax.tree.map(some, [*self.records, *self.logged])
        return jax.tree.map(some, self.gradients)

    def split(self, parts: Sequence[np.ndarray]) -> list[Record]:
        """Parts of rows, as the records of the layers they are of."""
        out: list[Record] = []
        left = iter(self.gradients)
        for part in parts:
            start = 0
            while start < part.shape[1]:
                layer, shape = (found := next(left)).layer, found.shape
                end = start + math.prod(shape)
                out.append(Whole(layer, part[:, start:end].reshape(-1, *shape)))
                start = end
        return out


class Spare:
    """Rows on the host that are written: the next ones are put into the same memory.

    New memory has to be given by the system page by page, which takes as long as a third of all
    that a batch computes. (JAX sees to it that rows that somebody still looks at are not touched.)
    """

    def __init__(self) -> None:
        self._rows: list[tuple[Any, list[Array]]] = []

    def take(self, shapes: Sequence[Any], devices: Any) -> list[Array]:
        """Arrays of these shapes, on the devices of a batch, to be given away."""
        kind = [x.shape for x in shapes], devices
        self._rows = [(own, rows) for own, rows in self._rows if own == kind]
        if self._rows:
            return self._rows.pop()[1]
        new = lambda x: np.zeros(x.shape, x.dtype)
        return [jax.device_put(new(x), may_alias=False) for x in shapes]  # nothing is compiled

    def give(self, rows: Sequence[Array], devices: Any) -> None:
        self._rows.append((([x.shape for x in rows], devices), list(rows)))

    def keep(self, most: int) -> None:
        """No more than this, while nothing is computed."""
        del self._rows[most:]
