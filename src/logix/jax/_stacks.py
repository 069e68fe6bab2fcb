"""Records of stacked layers, compressed and multiplied out together: one operation for all layers.

A scan over layers is compiled once for all of them; what is made of its records should be, too.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._array import as_float, like
from .._compress import Compression, Projector, gradients
from .._record import Lookup, Outer, Record, Whole
from ._arrange import Stack

Array = Any


class Handed(Projector):
    """A projector whose arrays are handed to a jitted function, not compiled into it.

    Without `given` it makes them, and keeps them in `made`.
    """

    def __init__(
        self, settings: Compression, pca: Any = None, given: dict[str, Array] | None = None
    ):
        super().__init__(settings, pca)
        self.given, self.made = given, {}  # type: ignore[var-annotated]

    def placed(
        self, key: Hashable, make: Callable[[], Array], other: Array, cast: bool = True
    ) -> Array:
        spot = f"{key} {other.dtype if cast else ''}"
        if self.given is not None:
            return self.given[spot]
        if spot not in self.made:
            self.made[spot] = np.asarray(make()).astype(other.dtype if cast else np.int32)
        return like(self.made[spot], other, cast)


def compressed(stacks: Sequence[Stack], how: Projector) -> list[Stack]:
    """The records of the projected gradients."""
    if how.settings.kind == "none":
        return list(stacks)
    out: list[Stack] = []
    for stack in stacks:
        record = stack.record
        if isinstance(record, Outer) and len(stack.names) > 1 and how.settings.kind == "logra":
            a = _sides(stack.names, "right", record.a, how)
            g = _sides(stack.names, "left", record.g, how)
            out.append(Stack(stack.names, Outer("", a, g, record.real), stack.loops))
        else:
            out += [Stack.of(how.record(r), stack.loops) for r in stack.unstacked()]
    return out


def _sides(names: tuple[str, ...], side: Any, x: Array, how: Projector) -> Array:
    """Each layer's vectors, (layers, examples, places, dim), times its own matrix."""
    return as_float(projected(x, matrices(names, side, wide(x), how)))


def wide(x: Array) -> Array:
    """As it is projected. bfloat16 has the range of float32; float16 may overflow."""
    return x if x.dtype == jnp.bfloat16 else as_float(x)


def matrices(names: Sequence[str], side: Any, x: Array, how: Projector) -> Array | None:
    """Those of some layers, (layers, dim, rank), for vectors like x; None: x is small enough."""
    dim = x.shape[-1]
    if dim <= how.settings.rank:
        return None
    sources = [how.settings.source(name) for name in names]
    make = lambda: np.stack([np.asarray(how.matrix(s, side, dim)) for s in sources])
    return how.placed((tuple(sources), side, dim), make, x)


def projected(x: Array, by: Array | None) -> Array:
    """Vectors, (layers, examples, places, dim), times these matrices."""
    return x if by is None else jnp.einsum("sbti,sir->sbtr", wide(x), by, precision="highest")


def masked(stack: Stack, mask: Array) -> Stack:
    """The records with zeros where the mask, (examples, positions), says so.

    Records with another number of places than the mask has are left as they are: pooled ones, or
    those of an image.
    """
    record = stack.record
    if isinstance(record, Whole):
        return stack
    real = jnp.ones(record.g.shape[:3], bool)
    if (times := fits(stack, mask)) is not None:
        own = jnp.tile(jnp.repeat(mask, times[1], axis=1), (1, times[0]))
        real = jnp.broadcast_to(own, real.shape)
    keep = lambda x: jnp.where(real[..., None], x, jnp.zeros((), x.dtype))
    if isinstance(record, Lookup):
        return dataclasses.replace(stack, record=dataclasses.replace(record, g=keep(record.g)))
    counted = real if record.real is None else record.real & real
    new = dataclasses.replace(record, a=keep(record.a), g=keep(record.g), real=counted)
    return dataclasses.replace(stack, record=new)


def fits(stack: Stack, mask: Array) -> tuple[int, int] | None:
    """Where the positions of a mask are among the places of records: how often all of them come,
    by loops around them, and each of them, by loops inside. A loop may go over them itself.
    """
    record, positions = stack.record, mask.shape[1]
    if isinstance(record, Whole):
        return None
    axes = (*stack.loops, record.g.shape[2] // max(1, math.prod(stack.loops)))
    for end in range(len(axes), 0, -1):
        for begin in range(end - 1, -1, -1):
            if math.prod(axes[begin:end]) == positions:
                return math.prod(axes[:begin]), math.prod(axes[end:])
    return None


def layer_gradients(stacks: Sequence[Stack]) -> list[Whole]:
    """(examples, …) of each layer, in the order of a row. (JAX would sort the keys of a dict.)"""
    each = [(name, x) for names, x in _summed(stacks) for name, x in zip(names, x)]
    return [Whole(name, x) for name, x in each]


def rows(stacks: Sequence[Stack], joined: bool) -> list[Array]:
    """Rows, (examples, D), in parts: those of stacked layers in one, else one for each layer.

    `joined`: in one part. A host copies them anyway, and needs no memory for both; from another
    device each part would be a copy of its own.
    """
    parts = [jnp.moveaxis(x, 0, 1) for _, x in _summed(stacks)]
    parts = [x.reshape(len(x), math.prod(x.shape[1:])).astype(jnp.float32) for x in parts]
    return [jnp.concatenate(parts, 1)] if joined else parts


def _summed(stacks: Sequence[Stack]) -> list[tuple[tuple[str, ...], Array]]:
    """Names and gradients, (layers, examples, …), of stacks. Several uses of a layer add up."""
    times = Counter(name for stack in stacks for name in stack.names)
    out: dict[tuple[str, ...], Array] = {}
    for stack in stacks:
        grads = _grads(stack)
        if all(times[name] == 1 for name in stack.names):
            out[stack.names] = grads
            continue
        for name, x in zip(stack.names, grads):
            out[name,] = out[name,] + x[None] if (name,) in out else x[None]
    return list(out.items())


def _grads(stack: Stack) -> Array:
    """(layers, examples, …)."""
    record = stack.record
    if isinstance(record, Outer):
        a, g = as_float(record.a), as_float(record.g)
        if a.shape[2] == 1:
            return g[:, :, 0, :, None] * a[:, :, 0, None, :]
        return jnp.einsum("sbto,sbti->sboi", g, a)
    every = [gradients([r])[r.layer] for r in stack.unstacked()]
    return jnp.stack(every)


def unstacked(stacks: Sequence[Stack]) -> list[Record]:
    return [record for stack in stacks for record in stack.unstacked()]
