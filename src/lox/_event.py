"""One `lox.log` call as data: its static description, and the arrays that go with it.

`Spec` is what is known while tracing (keys, structure, tags, the line of the call) and is a
parameter of the primitive. `Event` is a spec with its arrays, as it travels through collectors.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

Array = Any
Axis = tuple[int, int]  # the position and the size of a batch axis


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
    copies: tuple[bool, ...] = ()  # for each batch axis: are all lanes known to be the same
    derived: bool = False  # has it been through forward-mode differentiation
    outside: int = 0  # how many batch axes are of vmaps around the shard_map it is in

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


def once(event: Event, axes: frozenset[Axis]) -> Event:
    """The event without those of these batch axes whose lanes are copies of each other."""
    for axis in reversed(range(len(event.batch))):
        if event.copies[axis] and (axis, event.batch[axis]) in axes:
            first = lambda x, axis=axis: jax.lax.index_in_dim(x, 0, axis, keepdims=False)
            event = dataclasses.replace(
                event,
                values=[[first(x) for x in leaves] for leaves in event.values],
                steps=[first(x) for x in event.steps],
                mask=None if event.mask is None else first(event.mask),
                batch=event.batch[:axis] + event.batch[axis + 1 :],
                copies=event.copies[:axis] + event.copies[axis + 1 :],
                outside=event.outside - (axis < event.outside),
            )
    return event


def leaf_name(key: str, path: Any) -> str:
    """The name of a leaf of a key whose value is a pytree: `key/a/0`."""
    return "/".join([key, *(jax.tree_util.keystr((p,), simple=True) for p in path)])


def structure(tree: Any) -> Any:
    """`jax.tree.structure`, which is not typed."""
    return jax.tree.structure(tree)


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
    return Event(spec, values, steps, mask, batch, (False,) * batch_dims)
