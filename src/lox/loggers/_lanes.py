"""From what arrives on the host to the events of each run.

A message holds the identities of its runs, with the batch axes of the states in front, and a
logdict. After `by_run` there is one axis over the runs in front of every array, then an event axis:

    value  (runs, E, value …)      step, mask  (runs, E)

Batch axes that the states do not have (a `vmap` inside of one run) become axes of the value, for
all lanes log together. Where they may not (there is a mask), each lane has rows of its own, and a
step `lane` tells them apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from .._entry import Entry, Layout, as_events
from .._errors import LogError
from .._event import structure
from .._logdict import iterate_entries, logdict


def by_run(logs: logdict, ids: np.ndarray) -> tuple[np.ndarray, logdict]:
    """The identities of the runs, one a row, and the logs with one axis over them in front."""
    batch, inner = ids.shape[:-1], []
    for axis, size in enumerate(batch):
        if size > 1 and (ids == ids.take([0], axis)).all():
            inner.append(axis)  # the same runs along it: it is none of their own
    ids = ids[tuple(0 if i in inner else slice(None) for i in range(len(batch)))]
    entries = {}
    for key, entry in iterate_entries(logs):
        entry = as_events(_on_host(entry))
        entries[key] = _normal(key, _behind(entry, batch, inner), ids.shape[:-1])
    return ids.reshape(-1, ids.shape[-1]), logdict.of_entries(entries)


def _behind(entry: Entry, batch: tuple[int, ...], inner: list[int]) -> Entry:
    """The entry with some of its batch axes behind the others."""
    if not inner:
        return entry

    def move(x: np.ndarray, axis: int) -> np.ndarray:
        if x.shape[: len(batch)] != batch or axis < len(batch):
            return x  # the same for all runs, or an error that `_normal` will name
        return np.moveaxis(x, inner, range(len(batch) - len(inner), len(batch)))

    return entry.map_events(move)


def lanes_with_events(logs: logdict, runs: int) -> list[int]:
    """Those runs that logged anything."""
    there = np.zeros(runs, bool)
    for _, entry in iterate_entries(logs):
        if entry.mask is None:
            return list(range(runs))
        there |= entry.mask.any(1)
    return np.flatnonzero(there).tolist()


def of_run(logs: logdict, lane: int) -> logdict:
    """The logs of one run: every key a row of events that all happened. No axis over runs."""
    entries = {}
    for key, entry in iterate_entries(logs):
        real = None if entry.mask is None else entry.mask[lane]
        if real is not None and not real.any():
            continue
        take = lambda x, real=real: x[lane] if real is None or real.all() else x[lane][real]
        leaves = [take(x) for x in jax.tree.leaves(entry.value)]
        if not len(leaves[0]):
            continue
        steps = {name: take(s) for name, s in entry.steps.items()}
        value = structure(entry.value).unflatten(leaves)
        entries[key] = Entry(value, steps, entry.layout)
    return logdict.of_entries(entries)


def each_run(logs: logdict, count: int) -> Iterator[tuple[int, logdict]]:
    """The runs that logged something, with their logs."""
    for lane in range(count):
        own = of_run(logs, lane)
        if own:
            yield lane, own


def _on_host(entry: Entry) -> Entry:
    single = type(entry.value) is np.ndarray
    value = _native(entry.value) if single else jax.tree.map(_native, entry.value)
    steps = {name: _native(s) for name, s in entry.steps.items()}
    mask = None if entry.mask is None else np.asarray(entry.mask)
    return Entry(value, steps, entry.layout, mask)


def _native(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x if x.dtype.isnative else x.astype(np.dtype(x.dtype.type))


def _normal(key: str, entry: Entry, batch: tuple[int, ...]) -> Entry:
    """An entry with one axis over the runs in front, then the event axis."""
    leaves = [entry.value] if type(entry.value) is np.ndarray else jax.tree.leaves(entry.value)
    ndims, ranks = entry.layout.ndims, entry.layout.step_ndims
    x, steps = leaves[0], entry.steps
    extra = x.shape[len(batch) : x.ndim - ndims[0] - 1]
    wanted, runs = batch + extra, math.prod(batch)

    def normal(x: np.ndarray, ndim: int) -> np.ndarray:  # (runs, extra …, E, value …)
        lead = x.shape[: x.ndim - ndim - 1]
        if lead != wanted:
            if lead:
                raise mismatch(key, lead, batch)
            x = np.broadcast_to(x, wanted + x.shape)  # the same for all runs
        return x if len(batch) == 1 else x.reshape(runs, *x.shape[len(batch) :])

    leaves = [normal(x, n) for x, n in zip(leaves, ndims)]
    steps = {name: normal(s, n) for (name, s), n in zip(steps.items(), ranks)}
    mask = None if entry.mask is None else normal(entry.mask, 0)
    if extra:
        leaves, ndims, steps, ranks, mask = _extra_axes(leaves, ndims, steps, ranks, mask, extra)
    value = leaves[0] if type(entry.value) is np.ndarray else None
    if value is None:
        value = structure(entry.value).unflatten(leaves)
    return Entry(value, steps, Layout(True, ndims, ranks), mask)


def _extra_axes(
    leaves: list[np.ndarray],
    ndims: tuple[int, ...],
    steps: dict[str, np.ndarray],
    ranks: tuple[int, ...],
    mask: np.ndarray | None,
    extra: tuple[int, ...],
) -> Any:
    """Put batch axes inside of a run where they belong: behind the event axis, or into it."""
    n, lanes = len(extra), math.prod(extra)
    if mask is not None:
        events = mask.shape[-1]
        into = lambda x: x.reshape(x.shape[0], lanes * events, *x.shape[n + 2 :])
        numbers = np.repeat(np.arange(lanes, dtype=np.int32), events)
        mask, steps = into(mask), {name: into(s) for name, s in steps.items()}
        steps[_free_name("lane", steps)] = np.broadcast_to(numbers, mask.shape)
        return [into(x) for x in leaves], ndims, steps, (*ranks, 0), mask
    behind = lambda x: np.moveaxis(x, n + 1, 1)
    out, wider = {}, []
    for (name, s), rank in zip(steps.items(), ranks):
        s = behind(s)
        first: tuple[Any, ...] = (slice(None), slice(None), *(0,) * n)
        one = s[first]
        same = (s == one.reshape(one.shape[:2] + (1,) * n + one.shape[2:])).all()
        # As good as always, all lanes of a run are at the same step.
        out[name] = one if same else s
        wider.append(rank if same else rank + n)
    ndims = tuple(d + n for d in ndims)
    return [behind(x) for x in leaves], ndims, out, tuple(wider), None


def mismatch(key: str, lead: tuple[int, ...], batch: tuple[int, ...]) -> LogError:
    return LogError(
        f"{key!r} has the batch axes {lead}, but the logger's state is that of runs of shape "
        f"{batch}. Make one state for each lane: jax.vmap(logger.init)(keys)."
    )


def _free_name(name: str, taken: Any) -> str:
    while name in taken:
        name += "_"
    return name
