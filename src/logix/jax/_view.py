"""What a value inside a program is of the parameters: the same numbers, seen in another shape.

A parameter goes through casts, transposes, reshapes, slices and stacks before it is used. A `Part`
says which of its numbers are where in the value that comes out:

    dims      for each axis of the value, the parts of the parameter's axes (`Atom`) it runs over
    starts    where on each axis of the value it begins (another parameter may be beside it)
    pinned    atoms of which one entry was picked, whose axis is gone: w[3]
    bound     loops whose iteration picks an entry: a scan over stacked layers
    scale     a number that all of it is multiplied by

A value is a tuple of parts, empty for what is no parameter. What may be done to one that leaves it
a view is a function here; which equation does it, `_viewing` says.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Atom:
    """The entries `stride · i` of an axis, for i in start … start + size, of `full` there are.

    `flipped`: the last one comes first.
    """

    axis: int
    stride: int
    full: int
    start: int
    size: int
    flipped: bool = False

    @property
    def place(self) -> tuple[int, int]:
        """Where it comes in the order of the parameter's own axes."""
        return self.axis, -self.stride

    @property
    def whole(self) -> Atom:
        return Atom(self.axis, self.stride, self.full, 0, self.full)


@dataclass(frozen=True)
class Bound:
    """A loop that picks an entry of `atoms` in each iteration; none: all is in number `start`."""

    loop: int
    start: int
    atoms: tuple[Atom, ...]


@dataclass(frozen=True)
class Part:
    param: int
    dims: tuple[tuple[Atom, ...], ...]
    starts: tuple[int, ...]
    pinned: tuple[Atom, ...] = ()
    bound: tuple[Bound, ...] = ()
    scale: float = 1.0

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(a.size for a in dim) for dim in self.dims)

    def covers(self, shape: Sequence[int]) -> bool:
        """Whether there is nothing beside it in a value of this shape."""
        return not any(self.starts) and self.sizes == tuple(shape)


Value = tuple[Part, ...]


def parameter(number: int, shape: Sequence[int]) -> Value:
    """A parameter as it is."""
    dims = tuple((Atom(i, 1, n, 0, n),) if n != 1 else () for i, n in enumerate(shape))
    return (Part(number, dims, (0,) * len(shape)),)


def squeezed(value: Value, gone: Collection[int]) -> Value:
    """The value without axes of one entry, which are picked."""
    out = []
    for part in value:
        kept = [d for d in range(len(part.dims)) if d not in gone]
        dims = tuple(part.dims[d] for d in kept)
        starts = tuple(part.starts[d] for d in kept)
        pinned = (*part.pinned, *(a for d in gone for a in part.dims[d]))
        out.append(replace(part, dims=dims, starts=starts, pinned=pinned))
    return tuple(out)


def reshaped(part: Part, shape: Sequence[int], new: Sequence[int]) -> Part | None:
    """A part of a value of one shape, in another; None if that is no view."""
    if not part.covers(shape):
        return None
    atoms = [a for dim in part.dims for a in dim]
    pinned = [a for a in atoms if a.size == 1]
    left = [a for a in atoms if a.size > 1]
    dims = []
    for n in new:
        dim = []
        while n > 1:
            atom = left.pop(0)
            if n % atom.size == 0:
                dim.append(atom)
                n //= atom.size
                continue
            inner = atom.size // n
            if atom.size % n or atom.start % inner or atom.full % inner:
                return None
            outer = (atom.stride * inner, atom.full // inner, atom.start // inner, n)
            dim.append(Atom(atom.axis, *outer, atom.flipped))
            left.insert(0, Atom(atom.axis, atom.stride, inner, 0, inner, atom.flipped))
            n = 1
        dims.append(tuple(dim))
    starts = (0,) * len(dims)
    return replace(part, dims=tuple(dims), starts=starts, pinned=(*part.pinned, *pinned))


def flipped(value: Value, axes: Sequence[int], shape: Sequence[int]) -> Value:
    """The value, with the order of its entries along some axes turned round."""
    turn = lambda a: replace(a, flipped=not a.flipped)
    out = []
    for part in value:
        dims, starts = list(part.dims), list(part.starts)
        for d in axes:
            starts[d] = shape[d] - starts[d] - part.sizes[d]
            dims[d] = tuple(map(turn, dims[d]))
        out.append(replace(part, dims=tuple(dims), starts=tuple(starts)))
    return tuple(out)


def sliced(value: Value, low: Sequence[int], high: Sequence[int]) -> Value | None:
    """The value from `low` to `high`, on each axis."""
    out = []
    for part in value:
        dims, starts, pinned = [], [], list(part.pinned)
        for dim, start, size, lo, hi in zip(part.dims, part.starts, part.sizes, low, high):
            first, last = max(lo, start), min(hi, start + size)
            if first >= last:
                break
            cut = _cut(dim, first - start, last - start, pinned)
            if cut is None:
                return None
            dims.append(cut)
            starts.append(first - lo)
        else:
            new = replace(part, dims=tuple(dims), starts=tuple(starts))
            out.append(replace(new, pinned=tuple(pinned)))
    return tuple(out)


def strided(
    value: Value, shape: Sequence[int], low: Sequence[int], high: Sequence[int], step: Sequence[int]
) -> Value | None:
    """The same in steps: an axis of n entries is seen as n / step times `step`, of which one."""
    if any(n % s for n, s in zip(shape, step)):
        return None
    whole = [size for n, s in zip(shape, step) for size in (n // s, s)]
    first = [at for lo, s in zip(low, step) for at in (lo // s, lo % s)]
    counts = [-(-(hi - lo) // s) for lo, hi, s in zip(low, high, step)]
    last = [at for lo, n, s in zip(low, counts, step) for at in (lo // s + n, lo % s + 1)]
    parts = [reshaped(part, shape, whole) for part in value]
    cut = sliced(tuple(part for part in parts if part is not None), first, last)
    if cut is None or None in parts:
        return None
    joined = lambda dims: tuple((*dims[k], *dims[k + 1]) for k in range(0, len(dims), 2))
    return tuple(replace(p, dims=joined(p.dims), starts=(0,) * len(shape)) for p in cut)


def _cut(dim: tuple[Atom, ...], lo: int, hi: int, pinned: list[Atom]) -> tuple[Atom, ...] | None:
    if lo == 0 and hi == math.prod(a.size for a in dim):
        return dim
    outer, *rest = dim
    inner = math.prod(a.size for a in rest)
    first, last = lo // inner, -(-hi // inner)
    start = outer.start + (outer.size - last if outer.flipped else first)
    cut = replace(outer, start=start, size=last - first)
    if lo % inner == 0 and hi % inner == 0:
        return cut, *rest
    if cut.size == 1:
        pinned.append(cut)
        return _cut(tuple(rest), lo % inner, (hi - 1) % inner + 1, pinned)
    return None
