"""One rule for each primitive that may hold a log.

    rule : equation, args, collector -> outs

A rule runs the bodies of its equation through the collector (`run`), inside the same JAX construct
it found, and lets the collector `absorb` what comes out. See CONTRIBUTING.md for adding one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from . import _compat
from ._collect import Collector, Drop
from ._event import structure
from ._interpret import register
from ._rows import padded, through_scan, union

Args = list[Any]


def stage(fun: Callable, *args: Any) -> tuple[Any, Any]:
    """Trace `fun` to a closed jaxpr of flat arguments; also returns its outputs as shapes."""
    return jax.make_jaxpr(fun, return_shape=True)(*args)


def without_logs(jaxpr: Any) -> Any:
    """The same jaxpr with no event left in it."""
    run = lambda *xs: Drop({}).run(jaxpr, list(xs), {})[0]
    return jax.make_jaxpr(run)(*jaxpr.in_avals)


def split(xs: Args, *sizes: int) -> list[Args]:
    out, start = [], 0
    for size in sizes:
        out.append(xs[start : start + size])
        start += size
    return [*out, xs[start:]]


# --- calls: one body, run once -----------------------------------------------------------------


@register("jit", body="jaxpr")
def _jit(eqn: Any, args: Args, col: Collector) -> Args:
    body, params = eqn.params["jaxpr"], eqn.params
    state = col.borrow(body)
    flat_state = jax.tree.leaves(state)
    new, shape = stage(lambda s, xs: col.run(body, xs, s), state, args)
    extra = len(new.out_avals) - len(eqn.outvars)
    pad_in = lambda x, n: (x,) * len(flat_state) + tuple(params[n])
    pad_out = lambda x, n: tuple(params[n]) + (x,) * extra
    out = eqn.primitive.bind(
        *flat_state,
        *args,
        **params
        | dict(
            jaxpr=new,
            in_shardings=pad_in(_compat.UNSPECIFIED, "in_shardings"),
            in_layouts=pad_in(None, "in_layouts"),
            donated_invars=pad_in(False, "donated_invars"),
            out_shardings=pad_out(_compat.UNSPECIFIED, "out_shardings"),
            out_layouts=pad_out(None, "out_layouts"),
        ),
    )
    return absorb_flat(col, shape, out)


@register("remat2", "checkpoint", "remat", body="jaxpr")
def _remat(eqn: Any, args: Args, col: Collector) -> Args:
    body = _compat.closed(eqn.params["jaxpr"])
    state = col.borrow(body)
    new, shape = stage(lambda s, xs: col.run(body, xs, s), state, args)
    hoisted = jex.jaxpr_as_fun(new)
    flat = [*jax.tree.leaves(state), *args]
    closed = jax.make_jaxpr(lambda *xs: hoisted(*xs))(*flat)
    params = eqn.params | dict(jaxpr=_compat.open_jaxpr(closed))
    if closed.consts:
        raise AssertionError("a remat body closes over nothing")
    return absorb_flat(col, shape, eqn.primitive.bind(*flat, **params))


@register("closed_call", "core_call", "core_closed_call", "eval_jaxpr", body="call_jaxpr")
def _inline(eqn: Any, args: Args, col: Collector) -> Args:
    body = _compat.closed(eqn.params["call_jaxpr"])
    outs, state, rows = col.run(body, args, col.borrow(body))
    col.absorb(state, rows)
    return outs


def absorb_flat(col: Collector, shape: Any, flat: Args) -> Args:
    """Rebuild what `run` returned from the flat outputs of a bound primitive."""
    outs, state, rows = structure(shape).unflatten(flat)
    col.absorb(state, rows)
    return outs


# --- loops ---------------------------------------------------------------------------------------


@register("scan")
def _scan(eqn: Any, args: Args, col: Collector) -> Args:
    outs = col.loop(eqn, args)
    if outs is not None:
        return outs
    state = col.borrow(eqn.params["jaxpr"])
    outs, state, rows = run_scan(eqn.params, args, col, state, eqn.params["length"])
    col.absorb(state, rows)
    return outs


def run_scan(params: Any, args: Args, col: Collector, state: Any, length: int) -> Any:
    """Run a scan through `col`: its outputs, the state after it, its rows in program order."""
    consts, init, xs = split(args, *_compat.scan_arity(params))
    body, reverse = params["jaxpr"], params["reverse"]

    def step(carry: Any, x: Args) -> Any:
        values, state = carry
        outs, state, rows = col.run(body, [*consts, *values, *x], state)
        values, ys = split(outs, len(init))
        return (values, state), (ys, rows)

    (values, state), (ys, rows) = lax.scan(
        step, (init, state), xs, length, reverse=reverse, unroll=params["unroll"]
    )
    return [*values, *ys], state, {k: through_scan(r, reverse) for k, r in rows.items()}


@register("while")
def _while(eqn: Any, args: Args, col: Collector) -> Args:
    outs = col.loop(eqn, args)
    if outs is not None:
        return outs
    loop = While(eqn, args, col)
    carry = loop.start(col.borrow(*loop.bodies))
    carry = lax.while_loop(loop.keep_going, loop.step, carry)
    outs, state = loop.end(carry)
    col.absorb(state, {})
    return outs


class While:
    """A while equation as functions of one carry (values, predicate, state).

    The condition is evaluated once before the loop and then at the end of each iteration, so its
    logs are in the body, where state can be carried. Under `vmap` the predicate may have batch
    axes: then the loop runs while any lane does, and the lanes that are done keep their values.
    Each of their events has a mask already (see `_jax_batching`).
    """

    def __init__(self, eqn: Any, args: Args, col: Collector):
        self.col = col
        self.cond, self.body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        self.cond_consts, self.body_consts, self.init = split(args, n_cond, n_body)
        self.bodies = (self.cond, self.body)

    def _predicate(self, values: Args, state: Any) -> tuple[Any, Any]:
        [pred], state, rows = self.col.run(self.cond, [*self.cond_consts, *values], state)
        assert not rows, "events in a while loop are carried, not stacked"
        return pred, state

    def start(self, state: Any) -> Any:
        pred, state = self._predicate(self.init, state)
        return self.init, pred, state

    def keep_going(self, carry: Any) -> Any:
        return jnp.any(carry[1]) if carry[1].ndim else carry[1]

    def step(self, carry: Any) -> Any:
        old, pred, state = carry
        values, state, rows = self.col.run(self.body, [*self.body_consts, *old], state)
        assert not rows, "events in a while loop are carried, not stacked"
        if pred.ndim:
            lane = lambda x: lax.broadcast_in_dim(pred, x.shape, tuple(range(pred.ndim)))
            values = [jnp.where(lane(x), x, y) for x, y in zip(values, old, strict=True)]
        again, state = self._predicate(values, state)
        return values, (again & pred if pred.ndim else again), state

    def end(self, carry: Any) -> tuple[Args, Any]:
        values, _, state = carry
        return values, state


# --- branches ------------------------------------------------------------------------------------


@register("cond")
def _cond(eqn: Any, args: Args, col: Collector) -> Args:
    index, *operands = args
    branches = eqn.params["branches"]
    state = col.borrow(*branches)
    staged = [stage(lambda s, xs, b=b: col.run(b, xs, s), state, operands) for b in branches]
    wanted = union([structure(s).unflatten(j.out_avals)[2] for j, s in staged])
    padded_branches = [_padded_branch(new, shape, wanted, state, operands) for new, shape in staged]
    shape = padded_branches[0][1]
    out = eqn.primitive.bind(
        index,
        *jax.tree.leaves(state),
        *operands,
        **eqn.params | dict(branches=tuple(new for new, _ in padded_branches)),
    )
    return absorb_flat(col, shape, out)


def _padded_branch(new: Any, shape: Any, wanted: Any, state: Any, operands: Args) -> Any:
    """A branch that returns the rows of all branches, those of the others not real."""
    run = jex.jaxpr_as_fun(new)

    def branch(state: Any, operands: Args) -> Any:
        flat = run(*jax.tree.leaves(state), *operands)
        outs, state, rows = structure(shape).unflatten(flat)
        return outs, state, {k: padded(rows.get(k), like) for k, like in wanted.items()}

    return stage(branch, state, operands)
