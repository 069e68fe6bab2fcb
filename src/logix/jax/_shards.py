"""A `shard_map` as loops: each axis of the mesh picks a part of what is sharded along it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from lox import _compat

from ._site import Loop
from ._view import Atom, Bound, Value


def mesh_loops(params: dict[str, Any], numbers: Iterator[int]) -> tuple[Loop, ...]:
    """One for each axis of the mesh over which a shard_map is manual."""
    manual, shape = _compat.manual_axes(params), dict(params["mesh"].shape)
    return tuple(Loop(next(numbers), shape[name], name) for name in shape if name in manual)


def varies(aval: Any, loop: Loop) -> bool:
    """Whether a value differs between the iterations of a loop: between shards, it may not."""
    return loop.axis is None or loop.axis in _compat.varying_axes(aval)


def local(value: Value, spec: Any, loops: tuple[Loop, ...]) -> Value | None:
    """What a shard has of a value. None: an axis is not made of one part of the parameter."""
    number = {loop.axis: loop for loop in loops}
    out = []
    for part in value:
        dims, bound = list(part.dims), list(part.bound)
        for d, names in enumerate(spec):
            names = (names,) if isinstance(names, str) else tuple(names or ())
            for name in names:
                if len(dims[d]) != 1 or part.starts[d] or dims[d][0].size != dims[d][0].full:
                    return None
                [atom], n = dims[d], number[name].length
                rest, turned = atom.full // n, atom.flipped
                outer = Atom(atom.axis, atom.stride * rest, n, 0, n, turned)
                bound.append(Bound(number[name].number, 0, (outer,)))
                dims[d] = (Atom(atom.axis, atom.stride, rest, 0, rest, turned),) if rest > 1 else ()
        out.append(dataclasses.replace(part, dims=tuple(dims), bound=tuple(bound)))
    return tuple(out)
