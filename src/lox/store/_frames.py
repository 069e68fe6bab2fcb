"""A run as other libraries want it: Arrow, pandas, polars, xarray. Each is imported when used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
import pyarrow as pa

from .._event import leaf_name
from .._logdict import iterate_entries, logdict
from .._optional import need
from ._columns import from_column, to_column
from ._join import concatenated, in_order
from ._table import Table

Parts = Iterable[tuple[int, Table, pa.Table]]  # the part of the run, a table, its rows


Filled = tuple[np.ndarray, np.ndarray]  # the values of all rows, and which of them there are


def _gather(parts: Parts) -> tuple[np.ndarray, dict[str, Filled]]:
    """The time of each row, and the columns. One whose shape changes, or whose dtype does so that
    none holds all values, is several: `key`, `key#2` …"""
    parts = list(parts)
    steps = dict.fromkeys(c.of for _, table, _ in parts for c in table.steps)
    taken = {*steps, "time"}
    found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in steps}
    times, total = [], 0
    for part, table, data in parts:
        rows = np.arange(total, total + len(data))
        total += len(data)
        times.append((part, data.column("time").to_numpy().astype(np.int64)))
        named = [(c.of, c) for c in table.steps]
        named += [(c.name if c.name != c.of else _free(c.of, taken), c) for c in table.values]
        for name, c in named:
            values = from_column(data.column(c.name), c.dtype, c.shape)
            found.setdefault(name, []).append((rows, values))
    if not times:
        return np.zeros(0, np.int64), {}
    order = in_order(times)
    columns = {}
    for name, pieces in found.items():
        for n, (at, values) in enumerate(_forms(pieces), 1):
            there = np.zeros(total, bool)
            there[at] = True
            whole = np.zeros((total, *values.shape[1:]), values.dtype)
            whole[at] = values
            columns[name if n == 1 else f"{name}#{n}"] = (whole[order], there[order])
    return np.concatenate([t for _, t in times])[order], columns


def _forms(pieces: list[tuple[np.ndarray, np.ndarray]]) -> Iterator[tuple[Any, np.ndarray]]:
    """The rows and values of a column, those together that can be one array."""
    groups: dict[Any, list[Any]] = {}
    for piece in pieces:
        groups.setdefault(piece[1].shape[1:], []).append(piece)
    for group in groups.values():
        by_dtype: dict[Any, list[Any]] = {}
        for piece in group:
            by_dtype.setdefault(piece[1].dtype, []).append(piece)
        whole = concatenated([x for _, x in group])
        for same in [group] if whole is not None else by_dtype.values():
            values = concatenated([x for _, x in same])
            assert values is not None
            if values.dtype.isbuiltin != 1:  # Arrow and pandas have no such type; this is exact
                is_integer = jax.numpy.issubdtype(values.dtype, jax.numpy.integer)
                values = values.astype(np.int16 if is_integer else np.float32)
            yield np.concatenate([rows for rows, _ in same]), values


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
            name = leaf_name(key, path)
            name = _free(name, taken) if path else name
            taken.add(name)
            inner = [_free(f"{name}.{i}", taken) for i in range(x.ndim - 1)]
            variables[name] = ((axis, *inner), x)
    attrs = {k: v for k, v in config.items() if isinstance(v, str | int | float)}
    return xr.Dataset(variables, coords, attrs)


def _same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)


def _length(steps: dict[str, np.ndarray]) -> int:
    return next((len(s) for s in steps.values()), -1)
