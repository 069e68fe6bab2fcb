"""Views that depend on numbers: an entry for each iteration of a loop, or a scale.

`ws[i]` with the counter of a loop is to a parameter what a scan over it is: each iteration has an
entry of its own. That the counter is known, `_known` says.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._known import Known
from ._site import Loops
from ._view import Bound, Value, flipped, sliced, squeezed


def picked(value: Value, loop: int, axis: int = 0) -> Value:
    """What an iteration of a loop gets of a value that is scanned along an axis."""
    out = []
    for part in value:
        bound = Bound(loop, part.starts[axis], part.dims[axis])
        dims = part.dims[:axis] + part.dims[axis + 1 :]
        starts = part.starts[:axis] + part.starts[axis + 1 :]
        new = dataclasses.replace(part, dims=dims, starts=starts, bound=(*part.bound, bound))
        out.append(new)
    return tuple(out)


def with_numbers(
    eqn: Any, values: list[Value], known: Sequence[Known | None], loops: Loops
) -> list[Value] | None:
    """The values of an equation's outputs, if known numbers make them views of its inputs."""
    name = eqn.primitive.name
    if name in ("mul", "div", "neg"):
        new = _scaled(name, values, known)
    elif name == "dynamic_slice" and not any(values[1:]):
        new = _dynamic_slice(eqn, values[0], known[1:], loops)
    elif name == "gather" and not values[1]:
        new = _gather(eqn, values[0], known[1], loops)
    else:
        return None
    return None if new is None else [new]


def _scaled(name: str, values: list[Value], known: Sequence[Known | None]) -> Value | None:
    [at, *others] = [k for k, value in enumerate(values) if value]
    scale: float | None = -1.0
    if name != "neg":
        number = known[1 - at]
        scale = None if number is None or others else number.constant
    if scale is None or not math.isfinite(scale) or (name == "div" and (at == 1 or scale == 0)):
        return None
    scale = 1 / scale if name == "div" else scale
    if not math.isfinite(scale):
        return None
    return tuple(dataclasses.replace(p, scale=p.scale * scale) for p in values[at])


def _dynamic_slice(
    eqn: Any, value: Value, starts: Sequence[Known | None], loops: Loops
) -> Value | None:
    shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    new: Value | None = value
    for axis, (n, size, start) in enumerate(zip(shape, sizes, starts)):
        if size == n or new is None:
            continue
        if start is None or start.vector:
            return None
        now = (*sizes[:axis], *shape[axis:])
        new = _entries(new, axis, now, np.clip(start.value, 0, n - size), size, loops)
    return new


def _gather(eqn: Any, value: Value, index: Known | None, loops: Loops) -> Value | None:
    """`jnp.take` of one entry."""
    shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    numbers = eqn.params["dimension_numbers"]
    axes = numbers.start_index_map
    if index is None or index.vector or len(axes) != 1 or eqn.invars[1].aval.size != 1:
        return None
    [axis] = axes
    only = all(sizes[d] == (1 if d == axis else n) for d, n in enumerate(shape))
    inside = (index.value >= 0).all() and (index.value < shape[axis]).all()
    one = tuple(numbers.collapsed_slice_dims) == (axis,) and not numbers.operand_batching_dims
    if not (only and inside and one and eqn.outvars[0].aval.ndim == len(shape) - 1):
        return None
    new = _entries(value, axis, shape, index.value, 1, loops)
    return None if new is None else squeezed(new, [axis])


def _entries(
    value: Value, axis: int, shape: Sequence[int], at: np.ndarray, size: int, loops: Loops
) -> Value | None:
    """`size` entries along an axis, from `at` on, which may count with a loop, up or down."""
    if not at.size:
        return None
    low, high = [0] * len(shape), list(shape)
    low[axis], high[axis] = int(at.min()), int(at.max()) + size
    cut = sliced(value, low, high)
    turns = [k for k, n in enumerate(at.shape) if n > 1 and (at != at.reshape(-1)[0]).any()]
    if cut is None or not turns:
        return cut
    steps = np.diff(at.reshape(-1))
    up, down = (steps == 1).all(), (steps == -1).all()
    if size > 1 or at.size != at.shape[turns[0]] or not (up or down):
        return None
    number = loops[turns[0]].number
    if any(b.loop == number for part in cut for b in part.bound):
        return None
    if down:
        cut = flipped(cut, [axis], [h - k for h, k in zip(high, low)])
    put = lambda xs, x: (*xs[:axis], x, *xs[axis:])
    return tuple(
        dataclasses.replace(part, dims=put(part.dims, ()), starts=put(part.starts, 0))
        for part in picked(cut, number, axis)
    )
