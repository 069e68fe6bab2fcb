"""The rules for functions with derivatives, batching or transposes of their own.

The new function returns its logs beside its outputs. Differentiated or mapped, its outputs follow
the user's rule, which is traced and run through the collector that `for_rules` names; the logs are
those of the function itself, and have no derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from . import _compat
from ._collect import Collector
from ._event import structure
from ._interpret import register
from ._rules import Args, absorb_flat, split, stage, without_logs


def _bound(eqn: Any) -> Callable:
    """The equation as a function, with its custom rule."""
    return lambda *xs: _compat.bind(eqn, xs)


def _traced(col: Collector, fun: Callable, state: Any, *args: Any) -> Any:
    """Call `fun(*args)`, its events given to `col`; returns its result alone."""
    jaxpr, shape = stage(fun, *args)
    outs, _, _ = col.run(jaxpr, jax.tree.leaves(args), state)
    return structure(shape).unflatten(outs)


@register("custom_jvp_call", body="call_jaxpr")
def _custom_jvp(eqn: Any, args: Args, col: Collector) -> Args:
    body, rules = eqn.params["call_jaxpr"], col.for_rules()

    @jax.custom_jvp
    def call(state: Any, args: Args) -> Any:
        return col.run(body, args, state)

    @call.defjvp
    def jvp(primals: Any, tangents: Any) -> Any:
        state, args = primals
        derive = lambda xs, ts: jax.jvp(_bound(eqn), xs, ts)
        outs, dots = _traced(rules, derive, state, list(args), list(tangents[1]))
        rows = {}
        if rules is not col:
            _, state, rows = call(state, args)
        return (outs, state, rows), (dots, *jax.tree.map(_zero_tangent, (state, rows)))

    outs, state, rows = call(col.borrow(body), args)
    col.absorb(state, rows)
    return outs


@register("custom_vjp_call", "custom_vjp_call_jaxpr", body="call_jaxpr")
def _custom_vjp(eqn: Any, args: Args, col: Collector) -> Args:
    body, rules = eqn.params["call_jaxpr"], col.for_rules()

    @jax.custom_vjp
    def call(state: Any, args: Args) -> Any:
        return col.run(body, args, state)

    def fwd(state: Any, args: Args) -> Any:
        outs, vjp = _traced(rules, lambda xs: jax.vjp(_bound(eqn), *xs), state, args)
        before, rows = state, {}
        if rules is not col:
            _, state, rows = call(state, args)
        return (outs, state, rows), (vjp, before)

    def bwd(saved: Any, cts: Any) -> Any:
        vjp, state = saved
        back = _traced(rules, lambda v, ct: list(v(ct)), state, vjp, cts[0])
        return jax.tree.map(_zero_tangent, state), back

    call.defvjp(fwd, bwd)
    outs, state, rows = call(col.borrow(body), args)
    col.absorb(state, rows)
    return outs


def _zero_tangent(x: Any) -> Any:
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


@register("custom_vmap_call", body="call")
def _custom_vmap(eqn: Any, args: Args, col: Collector) -> Args:
    body, rules = eqn.params["call"], col.for_rules()

    @jax.custom_batching.custom_vmap
    def call(state: Any, args: Args) -> Any:
        return col.run(body, args, state)

    @call.def_vmap
    def rule(size: int, in_batched: Any, state: Any, args: Args) -> Any:
        axes = jax.tree.map(lambda b: 0 if b else None, in_batched)
        mapped = jax.vmap(_bound(eqn), in_axes=axes[1], axis_size=size)
        outs = _traced(rules, lambda xs: mapped(*xs), state, args)
        rows: Any = {}
        if rules is not col:
            run = lambda s, xs: col.run(body, xs, s)
            _, state, rows = jax.vmap(run, in_axes=tuple(axes), axis_size=size)(state, args)
        out = (outs, state, rows)
        return out, jax.tree.map(lambda _: True, out)

    outs, state, rows = call(col.borrow(body), args)
    col.absorb(state, rows)
    return outs


@register("custom_linear_solve", body="jaxprs")
def _linear_solve(eqn: Any, args: Args, col: Collector) -> Args:
    # What the solver logs leaves as its auxiliary output, which JAX keeps out of the derivative.
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    matvec, vecmat, solve, transposed, b = split(args, *lengths)
    state = col.borrow(jaxprs.solve)
    flat_state = jax.tree.leaves(state)
    new, shape = stage(lambda s, xs: col.run(jaxprs.solve, xs, s), state, [*solve, *b])
    bare = [None if j is None else without_logs(j) for j in jaxprs]
    if bare[3] is not None:  # must return as many auxiliary outputs
        bare[3] = _with_zeros(bare[3], new.out_avals[len(eqn.outvars) :])
    flat = eqn.primitive.bind(
        *[*matvec, *vecmat, *flat_state, *solve, *transposed, *b],
        const_lengths=lengths._replace(solve=len(flat_state) + lengths.solve),
        jaxprs=type(jaxprs)(*bare)._replace(solve=new),
    )
    return absorb_flat(col, shape, flat)


def _with_zeros(jaxpr: Any, avals: list[Any]) -> Any:
    """The same jaxpr, returning zeros of these types as well."""
    run = jex.jaxpr_as_fun(jaxpr)
    zeros = lambda: [jnp.zeros(a.shape, a.dtype) for a in avals]
    return jax.make_jaxpr(lambda *xs: [*run(*xs), *zeros()])(*jaxpr.in_avals)
