"""Which equations give a view of what they get: a rule for each primitive.

A rule gives the values of an equation's outputs, or None if they are more than a view.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from ._view import Value, flipped, reshaped, sliced, squeezed, strided

Rule = Callable[[dict[str, Any], list[Value], list[Any]], list[Value] | None]
RULES: dict[str, Rule] = {}
# These give on what they get.
SAME = (
    *("copy", "copy_p", "sharding_constraint", "mesh_cast", "reshard", "name"),
    *("pvary", "pcast", "layout_constraint", "optimization_barrier"),
)


def follow(eqn: Any, values: list[Value]) -> list[Value] | None:
    """The values of an equation's outputs, if they are views of those of its inputs."""
    name = eqn.primitive.name
    if name in SAME:
        return values[: len(eqn.outvars)]
    if name not in RULES:
        return None
    return RULES[name](eqn.params, values, [v.aval for v in eqn.invars])


def _rule(name: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES[name] = rule
        return rule

    return register


@_rule("stop_gradient")
def _stop(params: Any, values: list[Value], avals: list[Any]) -> list[Value]:
    return [()]


@_rule("convert_element_type")
def _cast(params: Any, values: list[Value], avals: list[Any]) -> list[Value] | None:
    if jnp.issubdtype(params["new_dtype"], jnp.complexfloating):
        return None  # its gradient is the real part of another one
    return [values[0] if jnp.issubdtype(params["new_dtype"], jnp.floating) else ()]


@_rule("transpose")
def _transpose(params: Any, values: list[Value], avals: list[Any]) -> list[Value]:
    order = params["permutation"]
    turn = lambda xs: tuple(xs[i] for i in order)
    turned = lambda p: replace(p, dims=turn(p.dims), starts=turn(p.starts))
    return [tuple(map(turned, values[0]))]


@_rule("squeeze")
def _squeeze(params: Any, values: list[Value], avals: list[Any]) -> list[Value]:
    return [squeezed(values[0], {d % avals[0].ndim for d in params["dimensions"]})]


@_rule("reshape")
def _reshape(params: Any, values: list[Value], avals: list[Any]) -> list[Value] | None:
    if params.get("dimensions") is not None:
        return None
    out = [reshaped(part, avals[0].shape, params["new_sizes"]) for part in values[0]]
    return None if None in out else [tuple(part for part in out if part is not None)]


@_rule("broadcast_in_dim")
def _broadcast(params: Any, values: list[Value], avals: list[Any]) -> list[Value] | None:
    shape, where = params["shape"], params["broadcast_dimensions"]
    if math.prod(shape) != math.prod(avals[0].shape):
        return None  # repeated: its gradient is a sum
    out = []
    for part in values[0]:
        dims: list[Any] = [()] * len(shape)
        starts = [0] * len(shape)
        for d, dim, start in zip(where, part.dims, part.starts):
            dims[d], starts[d] = dim, start
        out.append(replace(part, dims=tuple(dims), starts=tuple(starts)))
    return [tuple(out)]


@_rule("slice")
def _slice(params: Any, values: list[Value], avals: list[Any]) -> list[Value] | None:
    low, high, step = params["start_indices"], params["limit_indices"], params["strides"]
    if all(s == 1 for s in step or ()):
        cut = sliced(values[0], low, high)
    else:
        cut = strided(values[0], avals[0].shape, low, high, step)
    return None if cut is None else [cut]


@_rule("rev")
def _rev(params: Any, values: list[Value], avals: list[Any]) -> list[Value]:
    return [flipped(values[0], params["dimensions"], avals[0].shape)]


@_rule("split")
def _split(params: Any, values: list[Value], avals: list[Any]) -> list[Value] | None:
    out, shape, axis, start = [], list(avals[0].shape), params["axis"], 0
    for size in params["sizes"]:
        low, high = [0] * len(shape), list(shape)
        low[axis], high[axis] = start, start + int(size)
        cut = sliced(values[0], low, high)
        if cut is None:
            return None
        out.append(cut)
        start += int(size)
    return out


@_rule("concatenate")
def _concatenate(params: Any, values: list[Value], avals: list[Any]) -> list[Value] | None:
    if not all(values):
        return None
    axis, offset, out = params["dimension"], 0, []
    for value, aval in zip(values, avals):
        for part in value:
            starts = list(part.starts)
            starts[axis] += offset
            out.append(replace(part, starts=tuple(starts)))
        offset += aval.shape[axis]
    return [tuple(out)]


@_rule("stack")
def _stack(params: Any, values: list[Value], avals: list[Any]) -> list[Value] | None:
    if not all(values):
        return None
    axis, out = params["axis"], []
    for k, value in enumerate(values):
        for part in value:
            dims, starts = list(part.dims), list(part.starts)
            dims.insert(axis, ())
            starts.insert(axis, k)
            out.append(replace(part, dims=tuple(dims), starts=tuple(starts)))
    return [tuple(out)]
