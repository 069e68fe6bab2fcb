"""From what arrives on the host to the events of each run.

A message holds the identities of its runs, with the batch axes of the states in front, and a
logdict. After `by_run` there is one axis over the runs in front of every array, then an event axis:

    value  (runs, E, value …)      step, mask  (runs, E)

Batch axes that the states do not have (a `vmap` inside of one run) become axes of the value, for
all lanes log together. Where they may not (there is a mask), each lane has rows of its own, and a
step `lane` tells them apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from .._entry import Entry, as_events, event_axis
from .._errors import LogError
from .._event import structure
from .._logdict import iterate_entries, logdict


def by_run(logs: logdict, ids: np.ndarray) -> tuple[np.ndarray, logdict]:
    """The identities of the runs, one a row, and the logs with one axis over them in front."""
    if ids.ndim > 1 and (ids == ids[(0,) * (ids.ndim - 1)]).all():
        ids = ids[(0,) * (ids.ndim - 1)]  # one run, in a batch that is none of its own
    batch = ids.shape[:-1]
    entries = {k: _normal(k, as_events(_on_host(e)), batch) for k, e in iterate_entries(logs)}
    return ids.reshape(-1, ids.shape[-1]), logdict.of_entries(entries)


def of_run(logs: logdict, lane: int) -> logdict:
    """The logs of one run: every key a row of events that all happened. No axis over runs."""
    entries = {}
    for key, entry in iterate_entries(logs):
        real = None if entry.mask is None else entry.mask[lane]
        if real is not None and not real.any():
            continue
        take = lambda x, real=real: x[lane] if real is None or real.all() else x[lane][real]
        leaves = [take(x) for x in _leaves(entry)]
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


def _leaves(entry: Entry) -> list[np.ndarray]:
    return jax.tree.leaves(entry.value)


def _on_host(entry: Entry) -> Entry:
    value = jax.tree.map(np.asarray, entry.value)
    steps = {name: np.asarray(s) for name, s in entry.steps.items()}
    mask = None if entry.mask is None else np.asarray(entry.mask)
    return Entry(value, steps, entry.layout, mask)


def _normal(key: str, entry: Entry, batch: tuple[int, ...]) -> Entry:
    x, axis = entry.parts()[0]
    extra = np.shape(x)[len(batch) : axis]
    mixed = entry.mask is not None and bool(extra)

    def normal(x: np.ndarray, ndim: int) -> np.ndarray:
        axis = event_axis(x, ndim)
        lead = x.shape[:axis]
        if not lead:  # the same for all runs
            x = np.broadcast_to(x, batch + extra + x.shape)
        elif lead != batch + extra:
            raise LogError(
                f"{key!r} has the batch axes {lead}, but the logger's state is that of runs of "
                f"shape {batch}. Make one state for each lane: jax.vmap(logger.init)(keys)."
            )
        x = x.reshape(-1, *x.shape[len(batch) :])  # (runs, extra …, E, value …)
        n = len(extra)
        if mixed:
            return x.reshape(x.shape[0], -1, *x.shape[n + 2 :])
        return np.moveaxis(x, n + 1, 1) if n else x

    value = structure(entry.value).unflatten(
        [normal(x, n) for x, n in zip(_leaves(entry), entry.layout.ndims)]
    )
    ranks = dict(zip(entry.steps, entry.layout.step_ndims))
    steps = {name: normal(s, ranks[name]) for name, s in entry.steps.items()}
    mask = None if entry.mask is None else normal(entry.mask, 0)
    ndims = entry.layout.ndims
    if mixed:
        rows = mask.shape[1]  # type: ignore[union-attr]
        name = _free_name("lane", steps)
        lanes = np.repeat(np.arange(rows // x.shape[axis], dtype=np.int32), x.shape[axis])
        steps[name], ranks[name] = np.broadcast_to(lanes, mask.shape), 0  # type: ignore
    elif extra:
        ndims = tuple(n + len(extra) for n in ndims)
        for name, s in steps.items():
            front: tuple[Any, ...] = (slice(None), slice(None), *(0,) * len(extra))
            first = s[front]
            over = first.reshape(first.shape[:2] + (1,) * len(extra) + first.shape[2:])
            if (s == over).all():  # as good as always: all lanes of a run are at the same step
                steps[name] = first
            else:
                ranks[name] += len(extra)
    layout = dataclasses.replace(entry.layout, ndims=ndims, step_ndims=tuple(ranks.values()))
    return Entry(value, steps, layout, mask)


def _free_name(name: str, taken: Any) -> str:
    while name in taken:
        name += "_"
    return name
