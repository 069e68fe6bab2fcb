"""What a value inside a program is of the parameters: the same numbers, seen in another shape.

A parameter goes through casts, transposes, reshapes, slices and stacks before it is used. A `Part`
says which of its numbers are where in the value that comes out:

    dims      for each axis of the value, the parts of the parameter's axes (`Atom`) it runs over
    starts    where on each axis of the value it begins (another parameter may be beside it)
    pinned    atoms of which one entry was picked, whose axis is gone: w[3]
    bound     loops whose iteration picks an entry: a scan over stacked layers

A value is a tuple of parts, empty for what is no parameter. Each rule gives the values of an
equation's outputs, or None if they are more than a view.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
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


@dataclasses.dataclass(frozen=True)
class Bound:
    """A loop that picks an entry of `atoms` in each iteration; none: all is in number `start`."""

    loop: int
    start: int
    atoms: tuple[Atom, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    param: int
    dims: tuple[tuple[Atom, ...], ...]
    starts: tuple[int, ...]
    pinned: tuple[Atom, ...] = ()
    bound: tuple[Bound, ...] = ()

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


def picked(value: Value, loop: int) -> Value:
    """What an iteration of a loop gets of a value that is scanned along its first axis."""
    out = []
    for part in value:
        bound = Bound(loop, part.starts[0], part.dims[0])
        dims, starts = part.dims[1:], part.starts[1:]
        new = dataclasses.replace(part, dims=dims, starts=starts, bound=(*part.bound, bound))
        out.append(new)
    return tuple(out)


Rule = Callable[[dict[str, Any], list[Value], list[Any]], list[Value] | None]
RULES: dict[str, Rule] = {}
# These give on what they get.
SAME = (
    *("copy", "copy_p", "reduce_precision", "sharding_constraint", "mesh_cast", "reshard", "name"),
    *("pvary", "pcast", "layout_constraint", "optimization_barrier"),
)


def follow(eqn: Any, values: list[Value]) -> list[Value] | None:
    """The values of an equation's outputs, if they are views of those of its inputs."""
    name = eqn.primitive.name
    if name in SAME:
        return values[: len(eqn.outvars)]
    if name not in RULES:
        return None
    return RULES[name](eqn.params, values, [v.aval for v in eqn.invars])


def _rule(name: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES[name] = rule
        return rule

    return register


@_rule("stop_gradient")
def _stop(params: Any, values: list[Value], avals: list[Any]) -> list[Value]:
    return [()]


@_rule("convert_element_type")
def _cast(params: Any, values: list[Value], avals: list[Any]) -> list[Value] | None:
    if jnp.issubdtype(params["new_dtype"], jnp.complexfloating):
        return None  # its gradient is the real part of another one
    return [values[0] if jnp.issubdtype(params["new_dtype"], jnp.floating) else ()]


@_rule("transpose")
def _transpose(params: Any, values: list[Value], avals: list[Any]) -> list[Value]:
    order = params["permutation"]
    turn = lambda xs: tuple(xs[i] for i in order)
    turned = lambda p: dataclasses.replace(p, dims=turn(p.dims), starts=turn(p.starts))
    return [tuple(map(turned, values[0]))]


@_rule("squeeze")
def _squeeze(params: Any, values: list[Value], avals: list[Any]) -> list[Value] | None:
    gone = {d % avals[0].ndim for d in params["dimensions"]}
    out = []
    for part in values[0]:
        atoms = [a for d in gone for a in part.dims[d]]
        kept = [d for d in range(len(part.dims)) if d not in gone]
        out.append(
            dataclasses.replace(
                part,
                dims=tuple(part.dims[d] for d in kept),
                starts=tuple(part.starts[d] for d in kept),
                pinned=(*part.pinned, *atoms),
            )
        )
    return [tuple(out)]


@_rule("reshape")
def _reshape(params: Any, values: list[Value], avals: list[Any]) -> list[Value] | None:
    if params.get("dimensions") is not None:
        return None
    out = [_reshaped(part, avals[0].shape, params["new_sizes"]) for part in values[0]]
    return None if None in out else [tuple(part for part in out if part is not None)]


def _reshaped(part: Part, shape: Sequence[int], new: Sequence[int]) -> Part | None:
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
    pinned = [*part.pinned, *pinned]
    starts = (0,) * len(dims)
    return dataclasses.replace(part, dims=tuple(dims), starts=starts, pinned=tuple(pinned))


@_rule("broadcast_in_dim")
def _broadcast(params: Any, values: list[Value], avals: list[Any]) -> list[Value] | None:
    shape, where = params["shape"], params["broadcast_dimensions"]
    if math.prod(shape) != math.prod(avals[0].shape):
        return None  # repeated: its gradient is a sum
    out = []
    for part in values[0]:
        dims: list[Any] = [()] * len(shape)
        starts = [0] * len(shape)
        for d, dim, start in zip(where, part.dims, part.starts):
            dims[d], starts[d] = dim, start
        out.append(dataclasses.replace(part, dims=tuple(dims), starts=tuple(starts)))
    return [tuple(out)]


@_rule("slice")
def _slice(params: Any, values: list[Value], avals: list[Any]) -> list[Value] | None:
    if any(s != 1 for s in params["strides"] or ()):
        return None
    cut = sliced(values[0], params["start_indices"], params["limit_indices"])
    return None if cut is None else [cut]


@_rule("rev")
def _rev(params: Any, values: list[Value], avals: list[Any]) -> list[Value]:
    return [flipped(values[0], params["dimensions"], avals[0].shape)]


def flipped(value: Value, axes: Sequence[int], shape: Sequence[int]) -> Value:
    """The value, with the order of its entries along some axes turned round."""
    turn = lambda a: dataclasses.replace(a, flipped=not a.flipped)
    out = []
    for part in value:
        dims, starts = list(part.dims), list(part.starts)
        for d in axes:
            starts[d] = shape[d] - starts[d] - part.sizes[d]
            dims[d] = tuple(map(turn, dims[d]))
        out.append(dataclasses.replace(part, dims=tuple(dims), starts=tuple(starts)))
    return tuple(out)


@_rule("split")
def _split(params: Any, values: list[Value], avals: list[Any]) -> list[Value] | None:
    out, shape, axis, start = [], list(avals[0].shape), params["axis"], 0
    for size in params["sizes"]:
        low, high = [0] * len(shape), list(shape)
        low[axis], high[axis] = start, start + int(size)
        cut = sliced(values[0], low, high)
        if cut is None:
            return None
        out.append(cut)
        start += int(size)
    return out


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
            new = dataclasses.replace(part, dims=tuple(dims), starts=tuple(starts))
            out.append(dataclasses.replace(new, pinned=tuple(pinned)))
    return tuple(out)


def _cut(dim: tuple[Atom, ...], lo: int, hi: int, pinned: list[Atom]) -> tuple[Atom, ...] | None:
    if lo == 0 and hi == math.prod(a.size for a in dim):
        return dim
    outer, *rest = dim
    inner = math.prod(a.size for a in rest)
    first, last = lo // inner, -(-hi // inner)
    start = outer.start + (outer.size - last if outer.flipped else first)
    cut = dataclasses.replace(outer, start=start, size=last - first)
    if lo % inner == 0 and hi % inner == 0:
        return cut, *rest
    if cut.size == 1:
        pinned.append(cut)
        return _cut(tuple(rest), lo % inner, (hi - 1) % inner + 1, pinned)
    return None


@_rule("concatenate")
def _concatenate(params: Any, values: list[Value], avals: list[Any]) -> list[Value] | None:
    if not all(values):
        return None
    axis, offset, out = params["dimension"], 0, []
    for value, aval in zip(values, avals):
        for part in value:
            starts = list(part.starts)
            starts[axis] += offset
            out.append(dataclasses.replace(part, starts=tuple(starts)))
        offset += aval.shape[axis]
    return [tuple(out)]


@_rule("stack")
def _stack(params: Any, values: list[Value], avals: list[Any]) -> list[Value] | None:
    if not all(values):
        return None
    axis, out = params["axis"], []
    for k, value in enumerate(values):
        for part in value:
            dims, starts = list(part.dims), list(part.starts)
            dims.insert(axis, ())
            starts.insert(axis, k)
            out.append(dataclasses.replace(part, dims=tuple(dims), starts=tuple(starts)))
    return [tuple(out)]
