"""How many examples a call has, and which of the mask's rows are theirs.

Most inputs show it: (examples, positions, …). Rows (N, D) are examples or the positions of all of
them, one example after another: that is known from the other layers of the same pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import Tensor

from ._call import counts
from ._units import Unit
from ._watch import Seen


@dataclasses.dataclass
class _Pass:
    """What is known of one backward pass."""

    shapes: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # examples, positions
    sizes: set[int] = dataclasses.field(default_factory=set)  # numbers of examples
    rows: dict[str, int] = dataclasses.field(default_factory=dict)  # of layers, taken as examples
    positions: dict[str, int] = dataclasses.field(default_factory=dict)  # taken as positions
    counted: dict[str, int] = dataclasses.field(default_factory=dict)  # looked up as 0 1 2 …


class Passes:
    """All backward passes over one batch of `batch` examples."""

    def __init__(self, batch: int, mask: Tensor | None):
        self.batch, self.mask = batch, mask
        self._passes: dict[int, _Pass] = {}
        self._fitted = False  # whether the mask was the one of any layer
        self._lengths: set[int] = set()  # of sequences that it did not fit
        self._cut = False  # whether a part of the mask was taken for a part of the batch

    def of(self, unit: Unit, seen: Seen) -> tuple[int, Callable[[Tensor], Tensor]]:
        """How many examples a call has, and what masks a tensor with these examples in front."""
        if not seen.inputs:
            raise ValueError("it is called without a tensor, so nothing tells its examples apart")
        now = self._passes.get(seen.backward) or self._passes.setdefault(seen.backward, _Pass())
        n = self._size(unit, seen.inputs[0], seen.gradients[0], now)
        now.sizes.add(n)
        if self.mask is None:
            return n, unmasked
        return n, lambda x: self._masked(x, n, seen.backward)

    def _size(self, unit: Unit, x: Tensor, g: Tensor, now: _Pass) -> int:
        looked_up = not x.is_floating_point() and (x.ndim == 1 or len(x) == 1)
        if looked_up or unit.looks_up:
            if x.ndim == 1 and g.ndim == 2 and len(x) > 1 and counts(x):
                now.counted[unit.name] = len(x)
            if g.ndim == 3:
                now.shapes.insert(0, (len(g), g.shape[1]))
            return len(g)
        if unit.positions_first and x.ndim > 1:
            return x.shape[1]
        if x.ndim == 2 and x.is_floating_point():
            return self._rows(unit.name, len(x), now)
        if x.ndim > 1 and not unit.channels_first:
            now.shapes.insert(0, (x.shape[0], x.shape[1]))
        return len(x)

    def _rows(self, name: str, rows: int, now: _Pass) -> int:
        """(N, D): the examples themselves, or their positions."""
        for n, length in now.shapes:
            if rows in (n, n * length):
                return n
        if now.shapes:
            n, length = now.shapes[0]
            raise ValueError(
                f"it has {rows} rows, and other layers have {n} examples of {length} positions. If "
                "a router picks tokens for it, they can't be given back to their examples"
            )
        if rows > self.batch and rows % self.batch == 0:
            now.positions[name] = rows // self.batch
            return self.batch
        now.rows[name] = rows
        return rows

    def check(self) -> None:
        """Whether what was taken for granted agrees with what was seen later."""
        lengths = {length for p in self._passes.values() for _, length in p.shapes}
        if self.mask is not None:
            lengths.add(self.mask.shape[1])
        for now in self._passes.values():
            for name, length in now.positions.items():
                if length not in lengths:
                    raise ValueError(
                        f"layer {name!r} was called with {length * self.batch} rows for "
                        f"{self.batch} ids. Give one id for each example. If they are the "
                        "positions of the examples, one after another, pass a mask of the shape "
                        f"({self.batch}, {length}) to say so."
                    )
            sizes = {n for n, _ in now.shapes}
            for name, rows in now.rows.items():
                if sizes and rows not in sizes:
                    raise ValueError(
                        f"layer {name!r} was called with {rows} rows, and other layers with "
                        f"{max(sizes)} examples. If a router picks tokens for it, they can't be "
                        "given back to their examples: leave it out with name_filter."
                    )
            for name, length in now.counted.items():
                if length in {t for _, t in now.shapes}:
                    raise ValueError(
                        f"layer {name!r} looks up {length} positions, which are as many as there "
                        "are examples: nothing tells them apart. Look them up with the shape "
                        f"(1, {length})."
                    )
        if self.mask is not None and self._lengths and not self._fitted:
            seen = ", ".join(map(str, sorted(self._lengths)))
            raise ValueError(
                f"the mask has {self.mask.shape[1]} positions, which no watched layer has (they "
                f"have: {seen}), so nothing was masked. Give the mask of what the model is called "
                "with: mask[:, :-1] if that is input_ids[:, :-1]."
            )
        if self._cut and sum(max(p.sizes) for p in self._passes.values()) != self.batch:
            raise ValueError(
                f"a mask of {self.batch} examples was given, but the backward passes inside of "
                f"the block have {[max(p.sizes) for p in self._passes.values()]}. Call backward() "
                "after each part of the batch."
            )

    def _masked(self, x: Tensor, n: int, backward: int) -> Tensor:
        """Zero at the positions of (n, T, …) that the mask leaves out: in no sum do they count."""
        assert self.mask is not None
        if not x.is_floating_point() or x.ndim < 3:
            return x
        mask = self.mask
        if n != self.batch:  # a part of the batch, whose rows follow those of earlier parts
            self._cut = True
            earlier = [max(p.sizes) for key, p in self._passes.items() if key != backward]
            mask = _narrowed(mask[sum(earlier) :][:n], x.shape[1])
        if x.shape[:2] != mask.shape:
            self._lengths.add(x.shape[1])
            return x
        self._fitted = True
        return x * mask.to(x.device).reshape(*mask.shape, *(1,) * (x.ndim - 2))


def unmasked(x: Tensor) -> Tensor:
    return x


def _narrowed(mask: Tensor, length: int) -> Tensor:
    """A shorter one for examples that were padded less than the longest of the batch."""
    if not mask[:, length:].any():
        return mask[:, :length]
    left = mask.shape[1] - length
    return mask[:, left:] if left > 0 and not mask[:, :left].any() else mask
