"""Four of JAX's own rules, taught about events. Each acts only where a log is inside.

JAX's batching and differentiation rules assume that a body has no events, or lose the very fact an
event needs. So for a construct with a log in it, the body is rewritten first (by the interpreter,
with a `Rewrite` collector) and then handed to JAX's own rule:

    vmap of cond, batched index      both sides run for all lanes: each event gets `index == i`
    vmap of while, batched predicate the body runs until all lanes are done: each event gets the
                                     predicate of its lane
    jvp, linearize of scan           events with constant operands would be hoisted out of the loop:
                                     each event gets the iteration as its anchor
    jvp of while                     linearizing would run primal events a second time with the
                                     tangents: the primal loop runs with events, the other without
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex
from jax.extend.core.primitives import cond_p, scan_p, while_p
from jax.interpreters import ad, batching

from . import _compat
from ._collect import Anchor, Mask, Rewrite
from ._primitive import EventEffect, is_log
from ._rules import split, stage, without_logs

Args = list[Any]


def rewritten(jaxpr: Any, collector: type[Rewrite], name: str, like: Any) -> Any:
    """`jaxpr` with one more leading argument, which `collector` gives to every event as `name`."""
    run = lambda extra, *xs: collector({}).run(jaxpr, list(xs), {name: extra})[0]
    return jax.make_jaxpr(run)(like, *jaxpr.in_avals)


def _logs(*jaxprs: Any) -> bool:
    return any(is_log(j.effects, EventEffect) for j in jaxprs)


# --- vmap of cond --------------------------------------------------------------------------------

_batch_cond = batching.fancy_primitive_batchers[cond_p]


def _cond_batcher(axis_data: Any, args: Args, dims: Args, *, branches: Any, **params: Any) -> Any:
    per_platform = "branches_platforms" in params  # JAX replaces such an index by an unbatched one
    if dims[0] is None or per_platform or not _logs(*branches):
        return _batch_cond(axis_data, args, dims, branches=branches, **params)
    index_aval = jax.ShapeDtypeStruct((), jnp.result_type(args[0]))
    guarded = []
    for i, branch in enumerate(branches):
        masked = rewritten(branch, Mask, "where", jax.ShapeDtypeStruct((), bool))
        taken = lambda index, *xs, i=i, fun=jex.jaxpr_as_fun(masked): fun(index == i, *xs)
        guarded.append(jax.make_jaxpr(taken)(index_aval, *branch.in_avals))
    args, dims = [args[0], *args], [dims[0], *dims]
    return _batch_cond(axis_data, args, dims, branches=tuple(guarded), **params)


batching.fancy_primitive_batchers[cond_p] = _cond_batcher


# --- vmap of while -------------------------------------------------------------------------------

_batch_while = batching.fancy_primitive_batchers[while_p]


def _while_batcher(axis_data: Any, args: Args, dims: Args, **params: Any) -> Any:
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]
    if cond.out_avals[0].ndim or not _logs(cond, body):
        # A predicate with axes has been batched before, and its events have their masks.
        return _batch_while(axis_data, args, dims, **params)
    if not _predicate_gets_batched(axis_data, args, dims, params):
        return _batch_while(axis_data, args, dims, **params)
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts, init = split(list(args), n_cond, n_body)
    cond_dims, body_dims, init_dims = split(list(dims), n_cond, n_body)

    def first(*xs: Any) -> Any:
        return jex.jaxpr_as_fun(cond)(*xs)[0]

    masked_body = jex.jaxpr_as_fun(rewritten(body, Mask, "where", _bool()))
    masked_cond = jex.jaxpr_as_fun(rewritten(cond, Mask, "where", _bool()))

    def step(*xs: Any) -> Any:
        # The condition runs at the end of the body, for the lanes that ran the body.
        c_consts, b_consts, values, [pred] = split(list(xs), n_cond, n_body, len(init))
        values = masked_body(pred, *b_consts, *values)
        return [*values, masked_cond(pred, *c_consts, *values)[0]]

    pred = jax.vmap(first, in_axes=[*cond_dims, *init_dims], axis_size=axis_data.size)(
        *cond_consts, *init
    )
    avals = [*cond.in_avals[:n_cond], *body.in_avals]
    rotated = dict(
        cond_nconsts=0,
        cond_jaxpr=jax.make_jaxpr(lambda *xs: xs[-1])(*body.out_avals, _bool()),
        body_nconsts=n_cond + n_body,
        body_jaxpr=jax.make_jaxpr(step)(*avals, _bool()),
    )
    outs, out_dims = _batch_while(
        axis_data,
        [*cond_consts, *body_consts, *init, pred],
        [*cond_dims, *body_dims, *init_dims, 0],
        **rotated,
    )
    return outs[:-1], out_dims[:-1]


def _bool() -> Any:
    return jax.ShapeDtypeStruct((), bool)


def _predicate_gets_batched(axis_data: Any, args: Args, dims: Args, params: Any) -> bool:
    """Let JAX batch the loop as it is, and look at what became of its predicate."""
    batched = jax.make_jaxpr(lambda *xs: _batch_while(axis_data, xs, dims, **params)[0])(*args)
    loop = next(e for e in reversed(batched.eqns) if e.primitive is while_p)
    return loop.params["cond_jaxpr"].out_avals[0].ndim > 0


batching.fancy_primitive_batchers[while_p] = _while_batcher


# --- differentiating scan ------------------------------------------------------------------------

_jvp_scan = ad.primitive_jvps[scan_p]
_linearize_scan = _compat.primitive_linearizations[scan_p]


def _anchored(avals: Args, params: Any) -> tuple[Any, list[int]]:
    """The parameters of the scan with a counter, and which argument goes where in it.

    The counter's position is given as `len(avals)`. The public `lax.scan` is traced again, because
    the parameters of the primitive differ between versions of JAX.
    """
    n_consts, n_carry = _compat.scan_arity(params)
    jaxpr, length = params["jaxpr"], params["length"]
    body = jex.jaxpr_as_fun(
        rewritten(jaxpr, Anchor, "iteration", jax.ShapeDtypeStruct((), jnp.int32))
    )

    def scan(*args: Any) -> Any:
        consts, init, xs, [counter] = split(
            list(args), n_consts, n_carry, len(avals) - n_consts - n_carry
        )

        def step(carry: Args, x: Any) -> Any:
            i, xs = x
            return split(body(i, *consts, *carry, *xs), n_carry)

        return lax.scan(
            step, init, (counter, xs), length, reverse=params["reverse"], unroll=params["unroll"]
        )

    counter = jax.ShapeDtypeStruct((length,), jnp.int32)
    closed, _ = stage(scan, *avals, counter)
    [eqn] = closed.eqns
    order = {v: i for i, v in enumerate(getattr(closed, "jaxpr", closed).invars)}
    return eqn.params, [order[v] for v in eqn.invars]


def _scan_jvp(primals: Args, tangents: Args, **params: Any) -> Any:
    if not _logs(params["jaxpr"]):
        return _jvp_scan(primals, tangents, **params)
    avals = [jax.typeof(x) for x in primals]
    params, order = _anchored(avals, params)
    counter = jnp.arange(params["length"], dtype=jnp.int32)
    primals, tangents = [*primals, counter], [*tangents, _compat.zero_tangent(counter)]
    return _jvp_scan([primals[i] for i in order], [tangents[i] for i in order], **params)


def _scan_linearize(is_vjp: bool, nonzero: Args, *primals: Any, **params: Any) -> Any:
    if not _logs(params["jaxpr"]):
        return _linearize_scan(is_vjp, nonzero, *primals, **params)
    params, order = _anchored([jax.typeof(x) for x in primals], params)
    counter = jnp.arange(params["length"], dtype=jnp.int32)
    primals, nonzero = (*primals, counter), [*nonzero, False]
    *out, linear = _linearize_scan(
        is_vjp, [nonzero[i] for i in order], *[primals[i] for i in order], **params
    )
    n = len(primals) - 1

    def linear_in_order(*args: Any) -> Any:
        # Residuals come first (in one or two arguments, by version), then the tangents.
        residuals, tangents = args[:-n], [*args[-n:], _compat.zero_tangent(counter)]
        return linear(*residuals, *[tangents[i] for i in order])

    return (*out, linear_in_order)


ad.primitive_jvps[scan_p] = _scan_jvp
_compat.primitive_linearizations[scan_p] = _scan_linearize


# --- differentiating while -----------------------------------------------------------------------

_jvp_while = ad.primitive_jvps[while_p]


def _while_jvp(primals: Args, tangents: Args, **params: Any) -> Any:
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]
    if not _logs(cond, body):
        return _jvp_while(primals, tangents, **params)
    outs = while_p.bind(*primals, **params)
    bare = params | dict(cond_jaxpr=without_logs(cond), body_jaxpr=without_logs(body))
    _, dots = _jvp_while(primals, tangents, **bare)
    return outs, dots


ad.primitive_jvps[while_p] = _while_jvp
