"""A run as other libraries want it: Arrow, pandas, polars, xarray. Each is imported when used."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import pyarrow as pa

from .. import _errors
from .._logdict import iterate_entries, logdict
from .._optional import need
from ._columns import from_column, to_column
from ._join import concatenated, in_order
from ._table import Table

Parts = Iterable[tuple[int, Table, pa.Table]]  # the part of the run, a table, its rows


@dataclasses.dataclass
class Wide:
    """One column over all rows of a run: where it has values, and which."""

    rows: list[np.ndarray] = dataclasses.field(default_factory=list)
    values: list[np.ndarray] = dataclasses.field(default_factory=list)

    def filled(self, name: str, total: int, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The values of all rows, and which of them there are."""
        shapes = list(dict.fromkeys(str(x.shape[1:]) for x in self.values))
        if len(shapes) > 1:
            ways = ("an earlier write", "a later one")
            raise _errors.two_shapes(name, shapes[0], shapes[1], *ways)
        values = concatenated(name, self.values)
        if values.dtype.isbuiltin != 1:
            values = values.astype(np.float32)  # Arrow and pandas have no such type; exact
        at = np.concatenate(self.rows)
        there = np.zeros(total, bool)
        there[at] = True
        whole = np.zeros((total, *values.shape[1:]), values.dtype)
        whole[at] = values
        return whole[order], there[order]


def _gather(parts: Parts) -> tuple[np.ndarray, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """The time of each row, and for each column its values and where there are any."""
    parts = list(parts)
    steps = dict.fromkeys(c.of for _, table, _ in parts for c in table.steps)
    taken = {*steps, "time"}
    columns: dict[str, Wide] = {name: Wide() for name in steps}
    times, total = [], 0
    for part, table, data in parts:
        rows = np.arange(total, total + len(data))
        total += len(data)
        times.append((part, data.column("time").to_numpy().astype(np.int64)))
        named = [(c.of, c) for c in table.steps]
        named += [(c.name if c.name != c.of else _free(c.of, taken), c) for c in table.values]
        for name, c in named:
            wide = columns.setdefault(name, Wide())
            wide.rows.append(rows)
            wide.values.append(from_column(data.column(c.name), c.dtype, c.shape))
    if not times:
        return np.zeros(0, np.int64), {}
    order = in_order(times)
    time = np.concatenate([t for _, t in times])[order]
    return time, {name: wide.filled(name, total, order) for name, wide in columns.items()}


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name


def arrow_table(parts: Parts) -> pa.Table:
    """All rows, in the order of their writing."""
    time, columns = _gather(parts)
    out = {"time": pa.array(time).view(pa.timestamp("ns"))}
    for name, (values, there) in columns.items():
        column = to_column(values)
        if there.all() or column.type == pa.null():
            out[name] = column
        elif pa.types.is_fixed_size_list(column.type):
            gaps = pa.array(~there)
            out[name] = pa.FixedSizeListArray.from_arrays(
                column.flatten(), column.type.list_size, mask=gaps
            )
        else:
            out[name] = pa.array(values, mask=~there)
    return pa.table(out)


def pandas_frame(parts: Parts) -> Any:
    pd = need("pandas", "frames")
    time, columns = _gather(parts)
    frame = {"time": pd.to_datetime(time)}
    for name, (values, there) in columns.items():
        if values.ndim > 1:
            cells = [x if real else None for x, real in zip(values, there)]
            frame[name] = pd.Series(cells, dtype=object)
        elif there.all():
            frame[name] = values
        elif values.dtype.kind == "f":
            frame[name] = np.where(there, values, np.nan).astype(values.dtype)
        else:  # integers and bools have gaps of their own; NaN would round the others
            frame[name] = pd.array(values).copy()
            frame[name][~there] = pd.NA
    return pd.DataFrame(frame)


def polars_frame(table: pa.Table) -> Any:
    return need("polars", "frames").from_arrow(table)


def xarray_dataset(logs: logdict, config: dict[str, Any]) -> Any:
    """Keys with the same steps share a dimension, named after the step."""
    xr = need("xarray", "frames")
    variables: dict[str, Any] = {}
    coords: dict[str, Any] = {}
    axes: list[tuple[str, dict[str, np.ndarray]]] = []
    taken = set(logs)  # no dimension and no coordinate may have the name of a key
    for key, entry in iterate_entries(logs):
        leaves = jax.tree_util.tree_flatten_with_path(entry.value)[0]
        rows = len(leaves[0][1])
        flat = {n: s for n, s in entry.steps.items() if s.ndim == 1}
        axis = next((a for a, known in axes if _same(known, flat) and _length(known) == rows), None)
        if axis is None or not flat:
            axis = _free("event", taken)
            taken.add(axis)
            axes.append((axis, flat))
            for name, steps in flat.items():
                name = _free(name, taken)
                taken.add(name)
                coords[name] = (axis, steps)
        for path, x in leaves:
            name = "/".join([key, *(jax.tree_util.keystr((p,), simple=True) for p in path)])
            inner = [_free(f"{name}.{i}", taken) for i in range(x.ndim - 1)]
            variables[name] = ((axis, *inner), x)
    attrs = {k: v for k, v in config.items() if isinstance(v, str | int | float)}
    return xr.Dataset(variables, coords, attrs)


def _same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)


def _length(steps: dict[str, np.ndarray]) -> int:
    return next((len(s) for s in steps.values()), -1)
