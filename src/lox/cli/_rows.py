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


Numbered = tuple[Any, np.ndarray]  # rows of a table (`lox.store._follow.Rows`), their `events`


def lines(found: list[Any], last: int | None = None) -> list[Line]:
    """Rows in the order of their writing; of those written at once, event by event.

    `last`: only so many, the newest.
    """
    numbered = [(rows, events(rows)) for rows in found]
    if last is not None:
        numbered = _newest(numbered, last)
    return sorted((line for one in numbered for line in _of_table(*one)), key=lambda x: x[:2])


def _newest(found: list[Numbered], count: int) -> list[Numbered]:
    sizes = [len(numbers) for _, numbers in found]
    total = sum(sizes)
    if total <= count:
        return found
    keep = np.zeros(total, bool)
    times = np.concatenate([rows.times for rows, _ in found])
    order = np.lexsort([np.concatenate([numbers for _, numbers in found]), times])
    keep[order[total - count :]] = True
    picked = zip(found, np.split(keep, np.cumsum(sizes)[:-1]))
    some = ((rows, numbers, np.flatnonzero(kept)) for (rows, numbers), kept in picked)
    return [(rows.pick(at), numbers[at]) for rows, numbers, at in some if len(at)]


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


def _of_table(rows: Any, numbers: np.ndarray) -> Iterator[Line]:
    import jax

    from .._event import leaf_name

    steps: dict[str, Any] = {}
    columns: dict[str, Any] = {}
    for key in rows.table.keys:
        entry = rows.table.entry(key, rows.data)
        steps |= entry.steps
        for path, x in jax.tree_util.tree_flatten_with_path(entry.value)[0]:
            columns[leaf_name(key, path)] = x
    steps = {name: steps[name] for name in sorted(steps, key=lambda name: name != "step")}
    where = zip(rows.times.tolist(), numbers.tolist(), rows.lanes.tolist())
    for i, (time, event, lane) in enumerate(where):
        at = lambda arrays, i=i: {name: x[i] for name, x in arrays.items()}
        yield Line(time, event, rows.names[lane], at(steps), at(columns))
