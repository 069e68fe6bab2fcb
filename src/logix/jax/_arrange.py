"""Arrays of a program, arranged as the engine wants them: (layers, examples, places, entries).

What went into a matrix and the gradient of what came out have the axes that the model gave them. A
`Role` says what each is: one over examples, one over places, or one that runs over entries of the
parameter: of a side of its gradient, or of layers that are stacked in one parameter.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._record import Outer, Record, Whole
from ._view import Atom, Part

Array = Any


@dataclasses.dataclass(frozen=True)
class Role:
    """Of one axis: "example", "place", "side" or "block", with the entries it runs over.

    `start`: where the parameter's entries begin, on an axis that has others beside them.
    """

    kind: str
    atoms: tuple[Atom, ...] = ()
    start: int = 0

    @classmethod
    def of(cls, kind: str, part: Part, axis: int) -> Role:
        """Of an axis that runs over one of a parameter's value."""
        return cls(kind, part.dims[axis], part.starts[axis])


PLACE = Role("place")


@dataclasses.dataclass(frozen=True)
class Form:
    """How a parameter's entries are split: over layers, and the two sides of their matrices."""

    blocks: tuple[Atom, ...]
    left: tuple[Atom, ...]
    right: tuple[Atom, ...]

    @property
    def swapped(self) -> Form:
        return Form(self.blocks, self.right, self.left)

    def placed(self, grad: Array, shape: Sequence[int], index: Sequence[int]) -> Array:
        """(examples, *shape): the gradient of one layer, where it is in that of the parameter."""
        sides = [a for a in (*self.left, *self.right) if isinstance(a, Atom)]
        atoms = [*self.blocks, *sides]
        order = sorted(range(len(atoms)), key=lambda i: atoms[i].place)
        axes = dict(zip(sorted({a.axis for a in self.blocks}), index))
        at = [axes[a.axis] // a.stride % a.full for a in self.blocks]
        out = jnp.zeros((len(grad), *(a.full for a in atoms)), grad.dtype)
        grad = grad.reshape(len(grad), *(a.full for a in sides))
        out = out.at[(slice(None), *at)].set(grad)
        return out.transpose(0, *(i + 1 for i in order)).reshape(len(grad), *shape)


def form(part: Part, blocks: Iterable[Atom], left: Iterable[Atom], right: Iterable[Atom]) -> Form:
    """In the order of the parameter's own axes, neighbours joined: one form for all its uses."""
    blocks = [*blocks, *part.pinned, *(a for b in part.bound for a in b.atoms)]
    return Form(_joined(ordered(blocks)), _joined(ordered(left)), _joined(ordered(right)))


def ordered(atoms: Iterable[Atom]) -> list[Atom]:
    return sorted((a for a in atoms if a.full > 1), key=lambda a: a.place)


def _joined(atoms: Sequence[Atom]) -> tuple[Atom, ...]:
    out: list[Atom] = []
    for atom in (a.whole for a in atoms):
        if out and out[-1].axis == atom.axis and out[-1].stride == atom.stride * atom.full:
            n = out.pop().full * atom.full
            atom = Atom(atom.axis, atom.stride, n, 0, n)
        out.append(atom)
    return tuple(out)


def arrange(x: Array, roles: Sequence[Role], side: Sequence[Atom] | None = None) -> Array:
    """(layers, examples, places, entries of a side), for an array whose axes have these roles.

    `side`: the order of its entries; by default that of the parameter's own axes.
    """
    for axis, role in enumerate(roles):
        n = math.prod(a.size for a in role.atoms)
        if role.kind in ("side", "block") and x.shape[axis] != n:
            x = lax.slice_in_dim(x, role.start, role.start + n, axis=axis)
    pieces: list[tuple[str, Atom | None]] = []
    shape: list[int] = []
    for axis, role in enumerate(roles):
        if role.kind in ("side", "block"):
            pieces += [(role.kind, atom) for atom in role.atoms]
            shape += [atom.size for atom in role.atoms]
        else:
            pieces.append((role.kind, None))
            shape.append(x.shape[axis])
    x = x.reshape(shape)
    if turned := [i for i, (_, atom) in enumerate(pieces) if atom is not None and atom.flipped]:
        x = lax.rev(x, turned)
    missing = [
        (a.start, a.full - a.start - a.size, 0) if kind == "side" and a is not None else (0, 0, 0)
        for kind, a in pieces
    ]
    if any(low or high for low, high, _ in missing):
        x = lax.pad(x, jnp.zeros((), x.dtype), missing)
    at = lambda kind: [i for i, piece in enumerate(pieces) if piece[0] == kind]
    place = lambda i: pieces[i][1].place  # type: ignore[union-attr]
    sides = sorted(at("side"), key=place)
    if side is not None:
        sides = sorted(at("side"), key=lambda i: [a.place for a in side].index(place(i)))
    groups = sorted(at("block"), key=place), at("example"), at("place"), sides
    size = lambda group: math.prod(x.shape[i] for i in group)
    sizes = [size(group) for group in groups]
    return x.transpose([i for group in groups for i in group]).reshape(sizes)


def names(path: str, part: Part, blocks: Iterable[Atom]) -> tuple[str, ...]:
    """Of the layers that are stacked in a parameter, in the order of `arrange`: `path[3]`."""
    atoms = ordered([*blocks, *part.pinned, *(a for b in part.bound for a in b.atoms)])
    axes = sorted({a.axis for a in atoms})
    out = []
    for index in itertools.product(*(range(a.start, a.start + a.size) for a in atoms)):
        found = dict.fromkeys(axes, 0)
        for atom, i in zip(atoms, index):
            found[atom.axis] += atom.stride * i
        out.append(path + "".join(f"[{found[axis]}]" for axis in axes))
    return tuple(out)


@partial(jax.tree_util.register_dataclass, data_fields=["record"], meta_fields=["names", "loops"])
@dataclasses.dataclass(frozen=True)
class Stack:
    """The records of several layers: `record` is theirs, with an axis over them in front.

    `loops`: the lengths of those that share the parameter, outermost first: places are in them.
    """

    names: tuple[str, ...]
    record: Record
    loops: tuple[int, ...] = ()

    @classmethod
    def of(cls, record: Record, loops: tuple[int, ...]) -> Stack:
        """That of one layer."""
        alone = cls((record.layer,), record)
        new = {name: x[None] for name, x in alone.arrays().items()}
        return cls(alone.names, dataclasses.replace(record, layer="", **new), loops)

    def unstacked(self) -> list[Record]:
        one = lambda k: {n: x[k] for n, x in self.arrays().items()}
        new = dataclasses.replace
        return [new(self.record, layer=n, **one(k)) for k, n in enumerate(self.names)]

    def arrays(self) -> dict[str, Array]:
        fields = {f.name: getattr(self.record, f.name) for f in dataclasses.fields(self.record)}
        return {name: x for name, x in fields.items() if hasattr(x, "ndim")}


def swapped(record: Record) -> Record:
    """The record whose gradient is transposed."""
    assert isinstance(record, Outer)
    return dataclasses.replace(record, a=record.g, g=record.a)


def scaled(record: Record, scale: float) -> Record:
    """The record whose gradient is multiplied by a number."""
    if isinstance(record, Whole):
        return dataclasses.replace(record, value=record.value * scale)
    return dataclasses.replace(record, g=record.g * scale)


def split_whole(path: str, value: Array, axes: Sequence[int], own: Form | None) -> Stack:
    """Gradients of a parameter, (examples, …), as those of the layers stacked along these axes.

    `own`: the form of the parameter, if it is known which of its axes are those of an output.
    """
    n = len(axes)
    value = jnp.moveaxis(value, [a + 1 for a in axes], list(range(n)))
    index = itertools.product(*(range(k) for k in value.shape[:n]))
    layers = tuple(path + "".join(f"[{i}]" for i in where) for where in index)
    value = value.reshape(len(layers), *value.shape[n:])
    if own is not None:
        sides = [a for a in (*own.left, *own.right) if isinstance(a, Atom)]
        inside = sorted(sides, key=lambda a: a.place)
        value = value.reshape(*value.shape[:2], *(a.full for a in inside))
        value = value.transpose(0, 1, *(2 + inside.index(a) for a in sides))
        rows = math.prod(a.full for a in own.left)
        value = value.reshape(*value.shape[:2], rows, -1)
    return Stack(layers, Whole("", value))
