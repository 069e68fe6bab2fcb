"""Arrays as plain text: `[0, 1, 3]`, not `Array([0, 1, 3], dtype=int32)`."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

LIMIT = 1000  # elements printed in full; of longer arrays the ends


def plain(value: Any) -> str:
    """A value of a logdict as text; pytrees keep their shape, traced values show their type."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {plain(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple):
        inner = ", ".join(plain(v) for v in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, list):
        return "[" + ", ".join(plain(v) for v in value) + "]"
    if isinstance(value, jax.core.Tracer):
        return str(value.aval)
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            return str(jax.typeof(value))
        return _array(np.asarray(value))
    return repr(value)


def _array(x: np.ndarray) -> str:
    if x.ndim == 0:
        # str of a NumPy scalar is the shortest text that reads back as the same number.
        return str(x[()])
    if x.size > LIMIT and len(x) > 6:
        ends = [_array(row) for row in (*x[:3], *x[-3:])]
        return "[" + ", ".join([*ends[:3], "...", *ends[3:]]) + "]"
    return "[" + ", ".join(_array(row) for row in x) + "]"
