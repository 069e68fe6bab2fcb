"""Arrays as columns of Arrow, and back: shape and dtype are kept, to the last bit.

A column holds one value for each row. Arrays are lists of fixed size; dtypes that Arrow does not
know (bfloat16 and its like) are kept as the integers of the same bits, complex numbers as pairs.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pyarrow as pa

Shape = tuple[int, ...]


def storage_dtype(dtype: np.dtype) -> np.dtype:
    """What is stored for one number of this dtype (for a complex one, of each part)."""
    if dtype.isbuiltin != 1:
        return np.dtype(f"u{dtype.itemsize}")
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype


def column_type(dtype: np.dtype, shape: Shape) -> pa.DataType:
    one = pa.from_numpy_dtype(storage_dtype(dtype))
    size = math.prod(shape) * (2 if dtype.kind == "c" else 1)
    if size == 0:
        return pa.null()
    return one if shape == () and dtype.kind != "c" else pa.list_(one, size)


def to_column(x: np.ndarray) -> pa.Array:
    """The column of an array (rows, …)."""
    kind = column_type(x.dtype, x.shape[1:])
    if kind == pa.null():
        return pa.nulls(len(x))
    stored = storage_dtype(x.dtype)
    if x.dtype != stored:
        x = np.ascontiguousarray(x).view(stored)
    if not pa.types.is_fixed_size_list(kind):
        return pa.array(x)
    flat = pa.array(np.ascontiguousarray(x).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, kind.list_size)


def from_column(column: Any, dtype: str, shape: Shape) -> np.ndarray:
    """The array of a column: (rows, *shape)."""
    wanted = jnp.dtype(dtype)
    if column.type == pa.null():
        return np.zeros((len(column), *shape), wanted)
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    rows = len(column)
    if pa.types.is_fixed_size_list(column.type):
        column = column.flatten()
    flat = column.to_numpy(zero_copy_only=False)
    if flat.dtype != wanted:
        flat = np.ascontiguousarray(flat).view(wanted)
    return flat.reshape(rows, *shape)
