"""A run as other libraries want it: Arrow, pandas, polars, xarray. Each is imported when used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import pyarrow as pa

from .._logdict import iterate_entries, logdict
from ._columns import from_column, to_column

Parts = Iterable[tuple[Any, pa.Table]]  # tables and their rows


def arrow_table(parts: Parts) -> pa.Table:
    """All rows, in the order of their writing. What Arrow has no type for is widened, exactly."""
    tables = []
    for table, data in parts:
        columns = {"time": data.column("time")}
        for c in (*table.steps, *table.values):
            column = data.column(c.name)
            if jax.numpy.dtype(c.dtype).isbuiltin != 1:
                wide = from_column(column, c.dtype, c.shape).astype(np.float32)
                column = to_column(wide)
            columns[c.name] = column
        tables.append(pa.table(columns))
    if not tables:
        return pa.table({"time": pa.array([], pa.timestamp("ns"))})
    whole = pa.concat_tables(tables, promote_options="permissive")
    return whole if len(tables) == 1 else whole.take(_order(whole))


def _order(table: pa.Table) -> pa.Array:
    time = table.column("time").to_numpy().astype(np.int64)
    return pa.array(np.argsort(time, kind="stable"))


def pandas_frame(parts: Parts) -> Any:
    from ..loggers._optional import need

    pd = need("pandas", "frames")
    parts = list(parts)
    shapes = {c.name: c for table, _ in parts for c in (*table.steps, *table.values)}
    table = arrow_table(parts)
    frame = {}
    for name in table.column_names:
        column = table.column(name)
        if pa.types.is_fixed_size_list(column.type) or column.type == pa.null():
            c = shapes[name]
            wide = "float32" if jax.numpy.dtype(c.dtype).isbuiltin != 1 else c.dtype
            rows = [None] * len(column)
            if column.type == pa.null():
                rows = list(np.zeros((len(column), *c.shape), wide))
            else:
                there = np.flatnonzero(column.is_valid().to_numpy())
                values = from_column(column.drop_null(), wide, c.shape)
                for i, value in zip(there, values):
                    rows[i] = value
            frame[name] = pd.Series(rows, dtype=object)
        elif column.null_count and not pa.types.is_floating(column.type):
            frame[name] = column.to_pandas(types_mapper=pd.ArrowDtype)
        else:
            frame[name] = column.to_pandas()
    return pd.DataFrame(frame)


def polars_frame(table: pa.Table) -> Any:
    from ..loggers._optional import need

    return need("polars", "frames").from_arrow(table)


def xarray_dataset(logs: logdict, config: dict[str, Any]) -> Any:
    """Keys with the same steps share a dimension, named after the step."""
    from ..loggers._optional import need

    xr = need("xarray", "frames")
    variables: dict[str, Any] = {}
    coords: dict[str, Any] = {}
    axes: list[tuple[str, dict[str, np.ndarray]]] = []
    for key, entry in iterate_entries(logs):
        leaves = jax.tree_util.tree_flatten_with_path(entry.value)[0]
        rows = len(leaves[0][1])
        flat = {n: s for n, s in entry.steps.items() if s.ndim == 1}
        axis = next((a for a, known in axes if _same(known, flat) and _length(known) == rows), None)
        if axis is None or not flat:
            axis = "event" if not axes else f"event_{len(axes)}"
            axes.append((axis, flat))
            for name, steps in flat.items():
                coords[name if name not in coords else f"{name}_{axis}"] = (axis, steps)
        for path, x in leaves:
            inner = [f"{key}_{i}" for i in range(x.ndim - 1)]
            name = key + jax.tree_util.keystr(path, simple=True, separator="/")
            variables[name] = ((axis, *inner), x)
    attrs = {k: v for k, v in config.items() if isinstance(v, str | int | float)}
    clash = {n: f"{n}_step" for n in coords if n in variables}
    return xr.Dataset(variables, {clash.get(n, n): c for n, c in coords.items()}, attrs)


def _same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)


def _length(steps: dict[str, np.ndarray]) -> int:
    return next((len(s) for s in steps.values()), -1)
