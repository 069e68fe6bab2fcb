"""The events of a key from several tables, as one row of events. Nothing is rounded on the way."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .._entry import Entry
from .._event import structure


@dataclasses.dataclass(frozen=True)
class Piece:
    """Events of one key from one table; `part` counts how often the run was resumed before."""

    part: int
    time: np.ndarray
    entry: Entry


def forms(pieces: list[Piece]) -> list[tuple[np.ndarray, Entry]]:
    """The events of a key in the order of their writing, and when that was.

    There is more than one of these where events can't be one array: if the key's shape or the names
    of its steps have changed, or its dtype, and none holds all values.
    """
    groups: dict[Any, list[Piece]] = {}
    for piece in _same_form(pieces):
        groups.setdefault(_form(piece.entry), []).append(piece)
    out = []
    for group in groups.values():
        whole = _joined(group)
        if whole is not None:
            out.append(whole)
            continue
        by_dtype: dict[Any, list[Piece]] = {}
        for piece in group:
            by_dtype.setdefault(_dtypes(piece.entry), []).append(piece)
        out += [one for same in by_dtype.values() if (one := _joined(same)) is not None]
    return out


def _joined(pieces: list[Piece]) -> tuple[np.ndarray, Entry] | None:
    """Pieces of the same form as one, if that can be done exactly."""
    first = pieces[0].entry
    if len(pieces) == 1:
        return pieces[0].time, first
    order = in_order([(p.part, p.time) for p in pieces])
    leaves = [concatenated(xs) for xs in zip(*(jax.tree.leaves(p.entry.value) for p in pieces))]
    steps = {name: concatenated([p.entry.steps[name] for p in pieces]) for name in first.steps}
    if any(x is None for x in (*leaves, *steps.values())):
        return None
    pick = lambda x: x[order]
    value = jax.tree.map(pick, structure(first.value).unflatten(leaves))
    times = np.concatenate([p.time for p in pieces])
    return times[order], Entry(value, jax.tree.map(pick, steps), first.layout)


def _form(entry: Entry) -> Any:
    shapes = tuple(x.shape[1:] for x in jax.tree.leaves(entry.value))
    steps = tuple(sorted((name, s.shape[1:]) for name, s in entry.steps.items()))
    return structure(entry.value), shapes, steps


def _dtypes(entry: Entry) -> Any:
    steps = tuple((name, s.dtype) for name, s in sorted(entry.steps.items()))
    return tuple(x.dtype for x in jax.tree.leaves(entry.value)), steps


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


def concatenated(arrays: Sequence[np.ndarray]) -> np.ndarray | None:
    """One array; of different dtypes, one that holds the very numbers of all, if there is such."""
    dtype = common_dtype({x.dtype for x in arrays})
    out = [x.astype(dtype) for x in arrays]
    if all(x.dtype == dtype or _exact(x, y) for x, y in zip(arrays, out)):
        return np.concatenate(out)
    return None


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
