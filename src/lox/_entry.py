"""One key of a logdict: its value, steps, mask and count, and what can be done with its events.

Every key is either one value or a row of events. Which of the two is static, part of the pytree
structure, together with the rank of a single value. So the event axis is found by counting from the
right, and any number of batch axes (from `vmap`, or removed by indexing) may stand on the left:

    value, one event      (batch …, value …)
    value, E events       (batch …, E, value …)
    step, mask            (batch …) or (batch …, E)
    count                 (batch …)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _errors
from ._event import structure
from ._reduce import APPEND, over_lanes, reduce_rows, resolve, select

Array = Any


@dataclasses.dataclass(frozen=True)
class Layout:
    """The static part of a key: has it an event axis; the rank of each leaf and of each step."""

    events: bool
    ndims: tuple[int, ...]
    step_ndims: tuple[int, ...] = ()


@dataclasses.dataclass
class Entry:
    """All that belongs to one key."""

    value: Any
    steps: dict[str, Array]
    layout: Layout
    mask: Array | None = None
    count: Array | None = None  # only where a buffer may have kept fewer events than happened

    def parts(self) -> list[tuple[Array, int]]:
        """Every array with an event axis, and the position of that axis."""
        leaves = zip(jax.tree.leaves(self.value), self.layout.ndims, strict=True)
        parts = [(x, event_axis(x, n)) for x, n in leaves]
        steps = zip(self.steps.values(), self.layout.step_ndims, strict=True)
        parts += [(x, event_axis(x, n)) for x, n in steps]
        return parts + ([] if self.mask is None else [(self.mask, event_axis(self.mask, 0))])

    def rebuilt(self, arrays: list[Array], events: bool, count: Array | None) -> Entry:
        """The same key with other arrays, given in the order of `parts`."""
        arrays = list(arrays)
        tree = structure(self.value)
        value = tree.unflatten([arrays.pop(0) for _ in self.layout.ndims])
        steps = {name: arrays.pop(0) for name in self.steps}
        mask = arrays.pop(0) if arrays else None
        return Entry(value, steps, dataclasses.replace(self.layout, events=events), mask, count)

    def map_events(self, fun: Callable[[Array, int], Array]) -> Entry:
        """Apply `fun(array, event_axis)` to every array of a row of events."""
        return self.rebuilt([fun(x, axis) for x, axis in self.parts()], True, None)


def event_axis(x: Array, ndim: int) -> int:
    return np.ndim(x) - ndim - 1


def entry_of(value: Any, steps: dict[str, Any]) -> Entry:
    """An entry from plain values: a row of events if steps and values share a leading axis."""
    leaves = jax.tree.leaves(value)
    lengths = {np.shape(s)[0] if np.ndim(s) else None for s in steps.values()}
    events = bool(steps) and len(lengths) == 1 and lengths != {None}
    events = events and all(np.ndim(x) and np.shape(x)[0] in lengths for x in leaves)
    ndims = tuple(np.ndim(x) - events for x in leaves)
    step_ndims = tuple(np.ndim(s) - events for s in steps.values())
    return Entry(value, dict(steps), Layout(events, ndims, step_ndims))


def count_of(entry: Entry) -> Any:
    if entry.count is not None:
        return entry.count
    if entry.mask is not None:
        return entry.mask.sum(-1) if entry.layout.events else entry.mask.astype(np.int32)
    if not entry.layout.events:
        return 1
    x, axis = entry.parts()[0]
    return np.shape(x)[axis]


def _numpy(arrays: list[Array]) -> Any:
    """NumPy if all are on the host already (as in a callback), else jax.numpy."""
    return np if all(isinstance(x, np.ndarray | np.generic) for x in arrays) else jnp


def as_events(entry: Entry) -> Entry:
    """The same key with an event axis (of length one, if it was a single value)."""
    if entry.layout.events:
        return entry
    expand = lambda x, axis: _numpy([x]).expand_dims(x, axis + 1)
    arrays = [expand(x, axis) for x, axis in entry.parts()]
    return entry.rebuilt(arrays, True, entry.count)


def concatenated(key: str, a: Entry, b: Entry) -> Entry:
    if set(a.steps) != set(b.steps):
        raise _errors.two_steps(key, tuple(a.steps), tuple(b.steps), "the left", "the right")
    count = None if a.count is None and b.count is None else count_of(a) + count_of(b)
    a, b = as_events(a), _steps_in_order(as_events(b), tuple(a.steps))
    if a.mask is not None or b.mask is not None:
        a, b = (e if e.mask is not None else _all_real(e) for e in (a, b))
    both = list(zip(a.parts(), b.parts(), strict=True))
    for (x, axis), (y, _) in both:
        if _without(x, axis) != _without(y, axis):
            shapes = str(_without(x, axis)), str(_without(y, axis))
            raise _errors.two_shapes(key, *shapes, "the left", "the right")
    xp = _numpy([x for pair in both for x, _ in pair])
    arrays = [xp.concatenate([x, y], axis) for (x, axis), (y, _) in both]
    return a.rebuilt(arrays, True, count)


def _steps_in_order(entry: Entry, names: tuple[str, ...]) -> Entry:
    ranks = dict(zip(entry.steps, entry.layout.step_ndims, strict=True))
    layout = dataclasses.replace(entry.layout, step_ndims=tuple(ranks[n] for n in names))
    return dataclasses.replace(entry, steps={n: entry.steps[n] for n in names}, layout=layout)


def _without(x: Array, axis: int) -> tuple[int, ...]:
    return np.shape(x)[:axis] + np.shape(x)[axis + 1 :]


def _all_real(entry: Entry) -> Entry:
    x, axis = entry.parts()[0]
    xp = _numpy([x])
    return dataclasses.replace(entry, mask=xp.ones(np.shape(x)[: axis + 1], bool))


def reduced(entry: Entry, reduction: Any, keep_steps: bool) -> Entry:
    entry = as_events(entry)
    if not keep_steps:
        layout = dataclasses.replace(entry.layout, step_ndims=())
        entry = dataclasses.replace(entry, steps={}, layout=layout)
    if reduction is None or reduction == APPEND:
        return entry
    leaves = jax.tree.leaves(entry.value)
    tree = structure(entry.value)
    values = [_reduce_leaf(reduction, x, n, entry.mask) for x, n in zip(leaves, entry.layout.ndims)]
    pick = resolve("first" if reduction.name == "first" else "last")
    step_ndims = entry.layout.step_ndims
    steps = {
        name: _reduce_leaf(pick, s, n, entry.mask)
        for (name, s), n in zip(entry.steps.items(), step_ndims, strict=True)
    }
    mask = None if entry.mask is None else entry.mask.any(-1)
    if reduction.name == "count":
        tree, values = structure(0), values[:1]
    lanes = np.shape(leaves[0])[: event_axis(leaves[0], entry.layout.ndims[0])]
    value = tree.unflatten(values)  # the result of a user's reduction may be a pytree
    ndims = tuple(np.ndim(v) - len(lanes) for v in jax.tree.leaves(value))
    count = jnp.broadcast_to(count_of(entry), lanes)
    return Entry(value, steps, Layout(False, ndims, step_ndims), mask, count)


def _reduce_leaf(reduction: Any, x: Array, ndim: int, mask: Array | None) -> Array:
    x = jnp.asarray(x)
    lanes = event_axis(x, ndim)
    if mask is None:
        return over_lanes(lambda rows: reduce_rows(reduction, rows, None), lanes)(x)
    reduced = lambda rows, m: reduce_rows(reduction, rows, m)
    out = over_lanes(reduced, lanes)(x, jnp.asarray(mask))
    real = jnp.asarray(mask).any(-1)
    return select(real, out, jax.tree.map(jnp.zeros_like, out))


def compacted(entry: Entry) -> Entry | None:
    """The entry without the rows that are not real, if all lanes agree on those; else None.

    (An entry with no real row at all has length zero, or must be left out by the caller.)
    """
    if entry.mask is None:
        return dataclasses.replace(entry, count=None)
    mask, events = np.asarray(entry.mask), entry.layout.events
    if not events and not mask.all():
        return None
    bare = dataclasses.replace(entry, mask=None, count=None)
    first = mask[(0,) * (mask.ndim - 1)] if events and mask.size else np.zeros(0, bool)
    if events and (mask != first).any():
        return None
    keep = np.flatnonzero(first)
    return bare.map_events(lambda x, axis: np.take(np.asarray(x), keep, axis)) if events else bare
