"""Arrays whose types say how they are sharded (a mesh with Explicit axes).

There each operation has to say how its result is sharded. What is done here is of many shapes, and
XLA finds good shardings for all: so inside, types say nothing of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def freely(fun: Callable, params: Sequence[Any], batch: Sequence[Any], *axes: int) -> Any:
    """`fun(params, batch)` without shardings in types; results keep those over examples.

    `axes`: where in each result the examples are.
    """
    meshes = [m for x in (*batch, *params) if (m := _explicit_mesh(x)) is not None]
    if not meshes:
        return fun(params, batch)
    over = next((jax.typeof(x).sharding.spec[0] for x in batch if _explicit_mesh(x)), None)
    sharding = lambda axis: NamedSharding(meshes[0], P(*[None] * axis, over))
    out = tuple(sharding(axis) for axis in axes)
    free = jax.sharding.auto_axes(fun, out_sharding=out if len(out) > 1 else out[0])
    return free(params, batch)


def _explicit_mesh(x: Any) -> Any:
    mesh = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)
    if mesh is None or mesh.empty or AxisType.Explicit not in mesh.axis_types:
        return None
    return mesh
