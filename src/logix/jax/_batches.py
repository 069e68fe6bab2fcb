"""Batches from anywhere, as arrays that JAX takes; and which of their examples are this process's.

A batch may be spread over the devices of several processes. Each of them logs the examples that it
has itself: `mine` are their numbers in the whole batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from .._array import to_numpy

Array = Any


@dataclasses.dataclass(frozen=True)
class Batch:
    """A pytree of arrays. `mine`: None if all examples are this process's."""

    arrays: Any
    size: int
    mine: tuple[int, ...] | None = None

    @property
    def shape(self) -> str:
        return str(jax.tree.map(jax.typeof, self.arrays))

    def own(self, ids: list[Any]) -> list[Any]:
        """The ids of this process's examples, of those of all."""
        if self.mine is None or len(ids) != self.size:
            return ids
        return [ids[i] for i in self.mine]

    @property
    def here(self) -> int:
        return self.size if self.mine is None else len(self.mine)

    def local(self, x: Any) -> np.ndarray:
        """(examples of this process, …), on the host, of an array over all of them."""
        return np.asarray(x) if self.mine is None else _picked(x, self.mine)

    @property
    def devices(self) -> frozenset[Any]:
        """Where it is, as far as it is on a device already."""
        arrays = [x for x in jax.tree.leaves(self.arrays) if isinstance(x, jax.Array)]
        return frozenset(device for x in arrays for device in x.devices())

    def column(self, x: Any) -> Any:
        """A part of the batch that is no array of the loss, such as its ids: what is here of it."""
        return x if is_here(x) else self.local(x)

    def content(self) -> Any:
        """This process's examples, on the host, as a dict, list or array."""
        own = jax.tree.map(self.local, self.arrays)
        if isinstance(own, Mapping | list | tuple | np.ndarray):
            return own
        flat = jax.tree_util.tree_flatten_with_path(own)[0]
        return {jax.tree_util.keystr(path): x for path, x in flat}


def as_batch(batch: Any) -> Batch:
    """A batch of NumPy, JAX, PyTorch or TensorFlow arrays."""
    arrays = jax.tree.map(as_array, batch)
    flat = jax.tree_util.tree_flatten_with_path(arrays)[0]
    for path, x in flat:
        if isinstance(x, np.ndarray) and x.dtype.kind not in "biufcV":
            raise TypeError(
                f"{jax.tree_util.keystr(path) or 'the batch'} is of {x.dtype}, which JAX has not. "
                "Leave it out of the batch; if these are the ids, name them: ids='key'."
            )
    sizes = {jax.tree_util.keystr(path): np.shape(x)[:1] for path, x in flat}
    if not flat or () in sizes.values() or len(set(sizes.values())) != 1:
        raise ValueError(
            "a batch is a pytree of arrays whose first axis is over the examples; the sizes of "
            f"their first axes are {sizes}. One batch alone is given as [batch]."
        )
    spread = [x for _, x in flat if not is_here(x)]
    return Batch(arrays, flat[0][1].shape[0], _owned(spread[0]) if spread else None)


def as_mask(mask: Any, batch: Batch) -> Any:
    """(examples, positions), true where a position counts."""
    mask = as_array(mask)
    if np.ndim(mask) != 2 or len(mask) != batch.size:
        raise ValueError(
            f"mask has the shape {np.shape(mask)}, and there are {batch.size} examples: it must be "
            "(examples, positions)."
        )
    return mask != 0


def as_array(x: Any) -> Any:
    """An array that nobody changes: a loader may fill its buffer anew while this is computed."""
    if isinstance(x, jax.Array):
        return freely(x)
    if hasattr(x, "numpy") and not hasattr(x, "detach"):  # TensorFlow
        x = x.numpy()
    return np.array(to_numpy(x))


def is_here(x: Any) -> bool:
    """Whether this process has all of an array."""
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def freely(x: Any) -> Any:
    """The same array, whose sharding is not part of its type: XLA finds those that follow."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(x, jax.Array) or not isinstance(sharding, jax.sharding.NamedSharding):
        return x
    mesh = sharding.mesh
    auto = (jax.sharding.AxisType.Auto,) * len(mesh.axis_names)
    if mesh.axis_types == auto or isinstance(x, jax.core.Tracer):
        return x
    mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=auto)
    where = jax.sharding.NamedSharding(mesh, sharding.spec)
    shards = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, where, shards)


def _owned(x: jax.Array) -> tuple[int, ...]:
    """The examples that this process logs: if several have one, it is the first one's."""
    owner: dict[int, int] = {}
    places: Any = x.sharding.devices_indices_map(x.shape)
    for device, index in places.items():
        for i in range(*index[0].indices(len(x))):
            owner[i] = min(owner.get(i, device.process_index), device.process_index)
    return tuple(i for i in sorted(owner) if owner[i] == jax.process_index())


def _picked(x: Any, numbers: tuple[int, ...]) -> np.ndarray:
    """These examples of an array, which are here."""
    if is_here(x) or x.is_fully_replicated:
        return np.asarray(x)[list(numbers)]
    out = np.empty((len(numbers), *x.shape[1:]), x.dtype)
    place = {number: k for k, number in enumerate(numbers)}
    for shard in x.addressable_shards:
        rows = range(*shard.index[0].indices(x.shape[0]))
        own = [k for k, i in enumerate(rows) if i in place]
        to = [place[rows[k]] for k in own]
        out[(to, *shard.index[1:])] = np.asarray(shard.data)[own]
    return out


@dataclasses.dataclass(frozen=True)
class Spread:
    """Inside of jit: where results are put, if parameters or examples are on several devices."""

    sharding: jax.sharding.NamedSharding | None

    @classmethod
    def of(cls, batch: Any, params: Any) -> Spread:
        of_batch = [x.sharding for x in cls.named(batch)]
        spread = [s for s in of_batch if s.spec and s.spec[0]]
        found = [*spread, *of_batch, *(x.sharding for x in cls.named(params))]
        if not found or found[0].mesh.size == 1:
            return cls(None)
        axes = found[0].spec[:1] if spread else ()
        spec = jax.sharding.PartitionSpec(*axes)
        return cls(jax.sharding.NamedSharding(found[0].mesh, spec))

    @staticmethod
    def named(tree: Any) -> list[Any]:
        """The arrays that are placed by names of axes."""
        kind = jax.sharding.NamedSharding
        return [x for x in jax.tree.leaves(tree) if isinstance(getattr(x, "sharding", None), kind)]

    def __call__(self, x: Array) -> Array:
        """An array (examples, …) where the examples of the batch are."""
        return x if self.sharding is None else jax.lax.with_sharding_constraint(x, self.sharding)

    def everywhere(self, x: Any) -> Any:
        """Arrays of all devices, on each of them."""
        return x if self.whole is None else jax.lax.with_sharding_constraint(x, self.whole)

    @property
    def whole(self) -> jax.sharding.NamedSharding | None:
        if self.sharding is None:
            return None
        return jax.sharding.NamedSharding(self.sharding.mesh, jax.sharding.PartitionSpec())
