"""The rows of several tables and runs as lines, in the order of their writing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np


class Line(NamedTuple):
    """A row of a run."""

    time: int  # nanoseconds
    event: int  # among those of the same run that were written at once
    run: str
    steps: dict[str, Any]
    values: dict[str, Any]


def newest(found: list[Any], count: int) -> list[Any]:
    """The last `count` rows of several tables (`lox.store._follow.Rows`)."""
    total = sum(len(rows.data) for rows in found)
    if total <= count:
        return found
    last = np.zeros(total, bool)
    order = np.lexsort([np.concatenate([f(r) for r in found]) for f in (events, times)])
    last[order[total - count :]] = True
    masks = np.split(last, np.cumsum([len(rows.data) for rows in found])[:-1])
    picked = ((rows, np.flatnonzero(mask)) for rows, mask in zip(found, masks))
    return [rows.pick(at) for rows, at in picked if len(at)]


def times(rows: Any) -> np.ndarray:
    return rows.times


def events(rows: Any) -> np.ndarray:
    """The position of each row among those of the same run that were written at once."""
    order = np.lexsort([rows.lanes, rows.times])  # stable
    lanes, moments = rows.lanes[order], rows.times[order]
    new = np.ones(len(order), bool)
    new[1:] = (lanes[1:] != lanes[:-1]) | (moments[1:] != moments[:-1])
    start = np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))
    out = np.empty(len(order), np.int64)
    out[order] = np.arange(len(order)) - start
    return out


def lines(found: list[Any]) -> list[Line]:
    """All rows in the order of their writing; of those written at once, event by event."""
    return sorted((line for rows in found for line in _of_table(rows)), key=lambda line: line[:2])


def _of_table(rows: Any) -> Iterator[Line]:
    import jax

    steps: dict[str, Any] = {}
    columns: dict[str, Any] = {}
    for key in rows.table.keys:
        entry = rows.table.entry(key, rows.data)
        steps |= entry.steps
        for path, x in jax.tree_util.tree_flatten_with_path(entry.value)[0]:
            inner = jax.tree_util.keystr(path, simple=True, separator="/")
            columns[f"{key}/{inner}" if path else key] = x
    steps = {name: steps[name] for name in sorted(steps, key=lambda name: name != "step")}
    where = zip(rows.times.tolist(), events(rows).tolist(), rows.lanes.tolist())
    for i, (time, event, lane) in enumerate(where):
        at = lambda arrays, i=i: {name: x[i] for name, x in arrays.items()}
        yield Line(time, event, rows.names[lane], at(steps), at(columns))
