"""The events of a key from several tables, as one row of events. Nothing is rounded on the way."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .. import _errors
from .._entry import Entry
from .._event import structure


@dataclasses.dataclass(frozen=True)
class Piece:
    """Events of one key from one table; `part` counts how often the run was resumed before."""

    part: int
    time: np.ndarray
    entry: Entry


def joined(key: str, pieces: list[Piece]) -> tuple[np.ndarray, Entry]:
    """All events in the order of their writing, and when that was."""
    if len(pieces) == 1:
        return pieces[0].time, pieces[0].entry
    pieces = _same_form(pieces)
    first = pieces[0].entry
    ways = ("an earlier write", "a later one")
    for other in (p.entry for p in pieces[1:]):
        if set(other.steps) != set(first.steps):
            raise _errors.two_steps(key, tuple(first.steps), tuple(other.steps), *ways)
        if structure(other.value) != structure(first.value) or _shapes(other) != _shapes(first):
            raise _errors.two_shapes(key, _shapes(first), _shapes(other), *ways)
    order = in_order([(p.part, p.time) for p in pieces])
    join = lambda *xs: concatenated(key, xs)[order]
    value = jax.tree.map(join, *(p.entry.value for p in pieces))
    steps = {name: join(*(p.entry.steps[name] for p in pieces)) for name in first.steps}
    times = np.concatenate([p.time for p in pieces])
    return times[order], Entry(value, steps, first.layout)


def _same_form(pieces: list[Piece]) -> list[Piece]:
    """Lanes of a vmap inside of the run: if some events have them as rows (see `loggers._lanes`),
    those that have them as an axis of the value get rows, too."""
    by_row = next((p.entry for p in pieces if "lane" in p.entry.steps), None)
    if by_row is None:
        return pieces

    def rows(piece: Piece) -> Piece:
        entry, n = piece.entry, 0
        if set(by_row.steps) - set(entry.steps) == {"lane"}:
            n = entry.layout.ndims[0] - by_row.layout.ndims[0]
        if n <= 0:
            return piece
        leaves = jax.tree.leaves(entry.value)
        events, lanes = len(leaves[0]), math.prod(leaves[0].shape[1 : n + 1])
        flat = [x.reshape(events * lanes, *x.shape[n + 1 :]) for x in leaves]
        steps = {name: np.repeat(s, lanes, axis=0) for name, s in entry.steps.items()}
        steps["lane"] = np.tile(np.arange(lanes, dtype=np.int32), events)
        value = structure(entry.value).unflatten(flat)
        return Piece(piece.part, np.repeat(piece.time, lanes), Entry(value, steps, by_row.layout))

    return [rows(p) for p in pieces]


def in_order(pieces: Sequence[tuple[int, np.ndarray]]) -> np.ndarray:
    """The order of rows by part, then by time (a clock may have been set back between parts)."""
    parts = np.concatenate([np.full(len(time), part) for part, time in pieces])
    return np.lexsort((np.concatenate([time for _, time in pieces]), parts))


def concatenated(key: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """One array; of different dtypes, one that holds the very numbers of all."""
    dtype = common_dtype({x.dtype for x in arrays})
    out = [x.astype(dtype) for x in arrays]
    for x, y in zip(arrays, out):
        if x.dtype != dtype and not _exact(x, y):
            first, other = sorted({x.dtype.name for x in arrays})[:2]
            raise _errors.two_dtypes(key, first, other, "an earlier write", "a later one")
    return np.concatenate(out)


def common_dtype(dtypes: Any) -> np.dtype:
    dtypes = set(dtypes)
    if len(dtypes) == 1:
        return next(iter(dtypes))
    # NumPy knows nothing of bfloat16 and its like; float32 holds them all
    return np.result_type(*(d if d.isbuiltin == 1 else np.float32 for d in dtypes))


def _exact(x: np.ndarray, wide: np.ndarray) -> bool:
    if x.dtype.kind in "iu" and wide.dtype.kind in "fc":
        whole = wide.real
        return all(int(a) == int(b) for a, b in zip(x.reshape(-1), whole.reshape(-1)))
    return True  # wider of its own kind


def _shapes(entry: Entry) -> str:
    arrays = [*jax.tree.leaves(entry.value), *entry.steps.values()]
    return ", ".join(str(x.shape[1:]) for x in arrays)
