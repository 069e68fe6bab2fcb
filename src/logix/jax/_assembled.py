"""The gradients of parameters, put together from those of the layers that are stacked in them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from ._found import Found
from ._names import Watched

Array = Any


def assembled(
    layers: Mapping[str, Array], found: Found, watched: Watched, params: Any
) -> list[Array | None]:
    """Of each parameter, (examples, …) in its own shape; None for those that are not watched."""
    arrays = watched.arrays(params)
    out: list[Any] = [None] * len(arrays)
    for name, x in layers.items():
        path, index = _parsed(name, watched.names)
        i = watched.names.index(path)
        shape = arrays[i].shape
        if i in found.direct and i not in found.turned:
            where: list[Any] = [slice(None)] * (1 + len(shape))
            for axis, k in zip(found.direct[i].blocks, index):
                where[1 + axis] = k
            out[i] = jnp.zeros((len(x), *shape), x.dtype) if out[i] is None else out[i]
            out[i] = out[i].at[tuple(where)].add(x)
            continue
        form = found.turned.get(i) or found.forms[i]
        made = form.placed(x, shape, index)
        out[i] = made if out[i] is None else out[i] + made
    return out


def _parsed(name: str, paths: Sequence[str]) -> tuple[str, list[int]]:
    """The path and the indices of `path[3][1]`. A path may end in brackets itself."""
    if name in paths:
        return name, []
    match = re.fullmatch(r"(.*)\[(\d+)\]", name)
    assert match is not None, name
    path, index = _parsed(match[1], paths)
    return path, [*index, int(match[2])]
