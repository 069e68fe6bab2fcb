"""The backward pass of a function with a derivative of its own, and what is read off it: which
product the gradient of a matrix is, in the end.

Behind that product there may be transposes, casts, a number, a sum over an axis that was mapped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from lox import _compat

from ._known import read
from ._picked import with_numbers
from ._view import Atom, Value, parameter, squeezed
from ._viewing import follow

Array = Any
Axes = tuple[int | None, ...]  # None: one of a single entry, which the matrix does not have


@dataclasses.dataclass(frozen=True)
class Factors:
    """The gradient of a matrix as a product: its factors, (batch …, places …, free …) each.

    The axes of the matrix, in the order of the batch, and of what is free in each of them.
    """

    variables: tuple[Any, Any]  # what went in, and the gradient of what came out
    orders: tuple[tuple[int, ...], tuple[int, ...]]
    batch: Axes
    free: tuple[Axes, Axes]
    scale: float

    def shapes(self) -> list[tuple[int, ...]]:
        turned = zip(self.variables, self.orders)
        return [tuple(v.aval.shape[d] for d in order) for v, order in turned]


class Backward:
    """Of an equation that calls such a function: the gradients for its arguments `real`.

    Those are no integers, and nothing that the function closes over, which has no gradient.
    """

    def __init__(self, eqn: Any):
        self.eqn = eqn
        self.kinds = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        self.outs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
        first = eqn.params["num_consts"]
        self.real = [k for k, x in enumerate(self.kinds) if k >= first and real([x])]

    def jaxpr(self) -> Any:
        return jax.make_jaxpr(self)(self.kinds, real(self.outs))

    def __call__(self, args: Sequence[Array], g: Sequence[Array]) -> list[Array]:
        def call(*own: Array) -> Any:
            every = list(args)
            for k, x in zip(self.real, own):
                every[k] = x
            return _compat.bind(self.eqn, every)

        outs, back = jax.vjp(call, *(args[k] for k in self.real))
        given = iter(g)
        none = lambda y: np.zeros(y.shape, jax.dtypes.float0)
        return list(back([next(given) if real([y]) else none(y) for y in outs]))


def real(xs: Sequence[Any]) -> list[Any]:
    """Those that are no integers, which have no gradient."""
    return [x for x in xs if jnp.issubdtype(x.dtype, jnp.inexact)]


def factors(jaxpr: Any, number: int, args: int) -> Factors | None:
    """The product that an output of a backward pass is, if it is one.

    `args`: how many of its inputs are arguments; the others are gradients.
    """
    made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    variables = lambda eqn: [v for v in eqn.invars if not isinstance(v, jex.Literal)]
    chain: list[Any] = []
    if isinstance(jaxpr.outvars[number], jex.Literal):
        return None
    eqn = made.get(jaxpr.outvars[number])
    while eqn is not None and eqn.primitive.name != "dot_general" and _is_link(eqn):
        chain, eqn = [eqn, *chain], made.get(variables(eqn)[0])
    if eqn is None or eqn.primitive.name != "dot_general":
        return None
    shape = eqn.outvars[0].aval.shape
    value: Value = parameter(0, shape)
    summed: set[int] = set()  # axes of the product over which there is a sum
    for link in chain:
        if not value:
            return None
        if link.primitive.name == "reduce_sum":
            over = [atom for d in link.params["axes"] for atom in value[0].dims[d]]
            if any(map(_partial, over)):
                return None
            summed |= {atom.axis for atom in over}
            value = squeezed(value, link.params["axes"])
            continue
        ins = [() if isinstance(v, jex.Literal) else value for v in link.invars]
        numbers = [read({}, v) for v in link.invars]
        [value] = follow(link, ins) or with_numbers(link, ins, numbers, ()) or [()]
    # Each axis of the matrix has to be one of the product.
    if len(value) != 1 or any(len(dim) > 1 or any(map(_partial, dim)) for dim in value[0].dims):
        return None
    where = {dim[0].axis: d for d, dim in enumerate(value[0].dims) if dim}
    behind = _depends(jaxpr, set(jaxpr.invars[args:]))
    if any(n > 1 and d not in where and d not in summed for d, n in enumerate(shape)):
        return None
    contract, batch = eqn.params["dimension_numbers"]
    if any(d >= len(batch[0]) for d in summed):
        return None
    late = [v in behind for v in eqn.invars]
    if late[0] == late[1]:
        return None
    # What is summed over is a place.
    together = [d for d in range(len(batch[0])) if d not in summed]
    sides = []
    start = len(batch[0])
    for k, var in enumerate(eqn.invars):
        free = [d for d in range(var.aval.ndim) if d not in (*contract[k], *batch[k])]
        axes = range(start, start + len(free))
        start += len(free)
        own = [batch[k][d] for d in together], [batch[k][d] for d in summed]
        sides.append((var, (*own[0], *own[1], *contract[k], *free), axes))
    a, g = sorted(sides, key=lambda side: late[sides.index(side)])
    kept = lambda axes: tuple(map(where.get, axes))
    free_axes = kept(a[2]), kept(g[2])
    return Factors((a[0], g[0]), (a[1], g[1]), kept(together), free_axes, value[0].scale)


def _is_link(eqn: Any) -> bool:
    """Whether an equation makes one thing of one other, and rounds nothing."""
    if len(eqn.outvars) != 1 or sum(not isinstance(v, jex.Literal) for v in eqn.invars) != 1:
        return False
    if eqn.primitive.name != "convert_element_type":
        return True
    old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    if not (jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)):
        return False
    a, b = jnp.finfo(old), jnp.finfo(new)
    return b.nmant >= a.nmant and b.maxexp >= a.maxexp


def _partial(atom: Atom) -> bool:
    return atom.flipped or atom.size != atom.full or atom.stride != 1


def _depends(jaxpr: Any, on: set[Any]) -> set[Any]:
    """The variables that depend on some of them."""
    for eqn in jaxpr.eqns:
        if any(v in on for v in eqn.invars if not isinstance(v, jex.Literal)):
            on |= set(eqn.outvars)
    return on


def evaluate(closed: Any, wanted: Sequence[Any], args: Sequence[Array]) -> list[Array]:
    """Some variables of a jaxpr, and nothing that they do not need."""
    jaxpr = closed.jaxpr
    needed = {v for v in wanted if not isinstance(v, jex.Literal)}
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        if any(v in needed for v in eqn.outvars):
            eqns.append(eqn)
            needed |= {v for v in eqn.invars if not isinstance(v, jex.Literal)}
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args)))
    read = lambda v: v.val if isinstance(v, jex.Literal) else env[v]
    for eqn in reversed(eqns):
        env.update(zip(eqn.outvars, _compat.bind(eqn, [read(v) for v in eqn.invars])))
    return [jnp.asarray(read(v)) for v in wanted]
