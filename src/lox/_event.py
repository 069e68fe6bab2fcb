"""One `lox.log` call as data: its static description, and the arrays that go with it.

`Spec` is what is known while tracing (keys, structure, tags, the line of the call) and is a
parameter of the primitive. `Event` is a spec with its arrays, as it travels through collectors.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

Array = Any


@dataclasses.dataclass(frozen=True)
class Field:
    """One key of a log call: the structure of its value and the rank of each leaf."""

    key: str
    tree: Any  # PyTreeDef
    ndims: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is static about a log call."""

    fields: tuple[Field, ...]
    steps: tuple[str, ...]
    step_ndims: tuple[int, ...]
    tags: tuple[str, ...]
    explicit: bool
    reduce: Any  # None, the name of a reduction, or a Reduction
    line: str

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(f.key for f in self.fields)


@dataclasses.dataclass
class Event:
    """A log call with its arrays. Every array has the same leading batch axes.

    `mask` (of the batch's shape) tells which lanes of a batch really logged; None means all.
    """

    spec: Spec
    values: list[list[Array]]  # per field, its leaves
    steps: list[Array]
    mask: Array | None
    batch: tuple[int, ...]

    def only(self, keys: set[str]) -> Event:
        """The same event, cut down to some of its keys."""
        kept = [i for i, f in enumerate(self.spec.fields) if f.key in keys]
        spec = dataclasses.replace(self.spec, fields=tuple(self.spec.fields[i] for i in kept))
        return dataclasses.replace(self, spec=spec, values=[self.values[i] for i in kept])

    def masked(self, mask: Array) -> Event:
        """The same event, happening only where `mask` (of the batch's leading axes) is true."""
        mask = mask.reshape(mask.shape + (1,) * (len(self.batch) - mask.ndim))
        mask = jnp.broadcast_to(mask, self.batch)
        return dataclasses.replace(self, mask=mask if self.mask is None else self.mask & mask)


def pack(event: Event) -> list[Array]:
    """The operands of the primitive, in order: values, steps, mask."""
    mask = [] if event.mask is None else [event.mask]
    return [x for leaves in event.values for x in leaves] + event.steps + mask


def unpack(spec: Spec, batch_dims: int, masked: bool, operands: list[Array]) -> Event:
    """The inverse of `pack`."""
    operands = list(operands)
    values = []
    for field in spec.fields:
        n = len(field.ndims)
        values.append(operands[:n])
        del operands[:n]
    steps = operands[: len(spec.steps)]
    del operands[: len(spec.steps)]
    mask = operands.pop(0) if masked else None
    assert not operands
    batch = tuple(jnp.shape(values[0][0])[:batch_dims])
    return Event(spec, values, steps, mask, batch)
