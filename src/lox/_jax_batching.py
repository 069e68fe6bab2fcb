"""Two of JAX's batching rules, taught about events. They act only where a log is inside.

vmap of cond, batched index        JAX runs all branches for all lanes. If the branches log the
                                   same things, or nothing, their values leave the cond as
                                   outputs and are logged behind it. Otherwise each event gets
                                   `index == i` as a mask.
vmap of while, batched predicate   JAX runs the body until all lanes are done: each event gets
                                   the predicate of its lane as a mask.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jax.extend.core.primitives import cond_p, while_p
from jax.interpreters import batching

from ._collect import Collector, Mask, State, has_events
from ._event import Array, Event, Spec, pack, structure
from ._primitive import EventEffect, handed_on, is_log, log_p, read
from ._rules import split, stage

Args = list[Any]

# --- vmap of cond --------------------------------------------------------------------------------

_batch_cond = batching.fancy_primitive_batchers[cond_p]


def _cond_batcher(axis_data: Any, args: Args, dims: Args, *, branches: Any, **params: Any) -> Any:
    per_platform = "branches_platforms" in params  # JAX replaces such an index by an unbatched one
    if dims[0] is None or per_platform or not has_events(*branches):
        return _batch_cond(axis_data, args, dims, branches=branches, **params)
    outs = _logged_behind(axis_data, args, dims, branches, params)
    if outs is not None:
        return outs
    index_aval = jax.ShapeDtypeStruct((), jnp.result_type(args[0]))
    guarded = []
    for i, branch in enumerate(branches):
        masked = _masked(branch)
        taken = lambda index, *xs, i=i, fun=masked: fun(index == i, *xs)
        guarded.append(jax.make_jaxpr(taken)(index_aval, *branch.in_avals))
    args, dims = [args[0], *args], [dims[0], *dims]
    return _batch_cond(axis_data, args, dims, branches=tuple(guarded), **params)


def _masked(jaxpr: Any) -> Any:
    """`jaxpr` as a function of a condition, where its events happen, and its own arguments."""
    return lambda where, *xs: Mask({}).run(jaxpr, list(xs), {"where": where})[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Held:
    """An event taken out of a branch: its operands and its static description."""

    operands: list[Array]
    spec: Spec = dataclasses.field(metadata=dict(static=True))
    batch_dims: int = dataclasses.field(metadata=dict(static=True))
    masked: bool = dataclasses.field(metadata=dict(static=True))
    copies: tuple[bool, ...] = dataclasses.field(metadata=dict(static=True))
    derived: bool = dataclasses.field(metadata=dict(static=True))
    outside: int = dataclasses.field(metadata=dict(static=True))

    @property
    def kind(self) -> Any:
        """Events of one kind can stand for each other; the line they come from may differ."""
        types = tuple((x.shape, x.dtype) for x in self.operands)
        return dataclasses.replace(self.spec, line=""), self.batch_dims, self.masked, types


class Hold(Collector):
    """Take events out of a branch without loops, in order: its rows are a list of `Held`."""

    effect = EventEffect

    def at(self, state: State) -> Hold:
        other = super().at(state)
        other.rows = []  # type: ignore[assignment]
        return other

    def event(self, args: list[Array], params: dict[str, Any]) -> list[Array]:
        event, _, _ = read(args, params)
        self.absorb({}, [_held(event)])  # type: ignore[arg-type]
        return handed_on(args, params)

    def absorb(self, state: State, rows: Any) -> None:
        self.state = {**self.state, **state}
        self.rows = [*self.rows, *rows]  # type: ignore[assignment]


def _held(event: Event) -> Held:
    strong = [jax.lax.convert_element_type(x, x.dtype) for x in pack(event)]
    masked = event.mask is not None
    lanes = len(event.batch), masked, event.copies, event.derived, event.outside
    return Held(strong, event.spec, *lanes)


def _logged_behind(axis_data: Any, args: Args, dims: Args, branches: Any, params: Any) -> Any:
    """Batch a cond whose branches log the same sequence of events, or none; None if they don't."""
    if not all(_holds_plain_events(b) for b in branches):
        return None
    run = lambda b: lambda *xs: Hold({}).run(b, list(xs), {})
    staged = [stage(run(b), *b.in_avals) for b in branches]
    held = [structure(s).unflatten(j.out_avals)[2] for j, s in staged]
    kinds = {tuple(h.kind for h in events) for events in held if events}
    if len(kinds) != 1:
        return None
    some = next(events for events in held if events)
    blank = lambda: [jnp.zeros(x.shape, x.dtype) for h in some for x in h.operands]
    complete = []
    for branch, (jaxpr, _), events in zip(branches, staged, held, strict=True):
        fun = jex.jaxpr_as_fun(jaxpr)
        padded = fun if events else lambda *xs, fun=fun: [*fun(*xs), *blank()]
        complete.append(jax.make_jaxpr(padded)(*branch.in_avals))
    outs, out_dims = _batch_cond(axis_data, args, dims, branches=tuple(complete), **params)
    n = len(branches[0].out_avals)
    taken = None
    if not all(held):
        index = jnp.moveaxis(args[0], dims[0], 0)
        taken = jnp.isin(index, jnp.array([i for i, events in enumerate(held) if events]))
    rest = list(zip(outs[n:], out_dims[n:], strict=True))
    for h in some:
        operands, rest = rest[: len(h.operands)], rest[len(h.operands) :]
        _emit_batched(axis_data, h, [x for x, _ in operands], [d for _, d in operands], taken)
    return outs[:n], out_dims[:n]


def _emit_batched(axis_data: Any, h: Held, xs: Args, dims: Args, taken: Array | None) -> None:
    if taken is not None:
        lanes = xs.pop() if h.masked else None
        lanes_dim = dims.pop() if h.masked else None
        shape = (axis_data.size, *xs[0].shape[1 : h.batch_dims + 1])
        mask = jnp.broadcast_to(taken.reshape(-1, *[1] * h.batch_dims), shape)
        if lanes is not None:
            mask = mask & (lanes if lanes_dim is None else jnp.moveaxis(lanes, lanes_dim, 0))
        xs, dims = [*xs, mask], [*dims, 0]
    params = dict(
        spec=h.spec,
        batch_dims=h.batch_dims,
        masked=h.masked or taken is not None,
        copies=h.copies,
        derived=h.derived,
        outside=h.outside,
        anchored=False,
        sink=None,
    )
    batching.fancy_primitive_batchers[log_p](axis_data, xs, dims, **params)


def _holds_plain_events(jaxpr: Any) -> bool:
    """Are all events of a branch its own or in a jit? Loops and taps are left to the masks."""
    for eqn in jaxpr.eqns:
        if not is_log(eqn.effects, EventEffect):
            continue
        if eqn.primitive is log_p:
            if eqn.params["sink"] is not None:
                return False
        elif eqn.primitive.name != "jit" or not _holds_plain_events(eqn.params["jaxpr"]):
            return False
    return True


batching.fancy_primitive_batchers[cond_p] = _cond_batcher


# --- vmap of while -------------------------------------------------------------------------------

_batch_while = batching.fancy_primitive_batchers[while_p]


def _while_batcher(axis_data: Any, args: Args, dims: Args, **params: Any) -> Any:
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]
    if cond.out_avals[0].ndim or not has_events(cond, body):
        # A predicate with axes has been batched before, and its events have their masks.
        return _batch_while(axis_data, args, dims, **params)
    if not _predicate_gets_batched(axis_data, args, dims, params):
        return _batch_while(axis_data, args, dims, **params)
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts, init = split(list(args), n_cond, n_body)
    cond_dims, body_dims, init_dims = split(list(dims), n_cond, n_body)

    def first(*xs: Any) -> Any:
        return jex.jaxpr_as_fun(cond)(*xs)[0]

    masked_body, masked_cond = _masked(body), _masked(cond)

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
