"""The primitive behind `lox.log`, and the switch that turns it on.

    log_p : (values, steps, mask?)           -> ()        waits to be collected by spool or tap
    log_p : (values, steps, mask?, …, token) -> token     with a sink: calls the host
    log_p : (values, steps, mask?, anchor …) -> anchor …  inside a differentiated loop

Without a lox transformation around it, `lox.log` binds nothing: `collecting` is off. While `spool`
or `tap` traces a function it is on. JAX keeps it in the key of every trace cache, so a jitted
function is traced once with its logs and once without, and neither is lost.

Anchor and token are integers that an event takes and hands on. The anchor ties it to the iteration
of the loop it is in, so that JAX neither moves it out of the loop nor drops it (see
`_jax_derivatives`). The token keeps host calls in program order, and its value is the handle by
which the host finds the callback (see `_host`).
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from . import _compat, _errors
from ._event import Array, Event, Spec, pack, unpack

collecting = jax.make_user_context(False)


class EventEffect(_compat.DebugEffect):  # type: ignore[misc, valid-type]
    """An event of lox happens here."""

    __str__ = lambda self: "lox"


class LogEffect(EventEffect):
    """A log that a lox transformation has yet to collect."""


class TapEffect(EventEffect):
    """A log that calls the host when it happens."""


log_effect, tap_effect = LogEffect(), TapEffect()
log_p = jex.Primitive("lox_log")
log_p.multiple_results = True


def emit(event: Event, anchor: Array | None = None, sink: Any = None, token: Any = None) -> Any:
    """Bind an event. Returns the anchor and the token to go on with, None for what it has not."""
    operands = pack(event)
    if anchor is not None:
        operands.append(anchor)
    if sink is not None:
        operands.append(token)
    outs = log_p.bind(
        *operands,
        spec=event.spec,
        batch_dims=len(event.batch),
        masked=event.mask is not None,
        copies=event.copies or (False,) * len(event.batch),
        derived=event.derived,
        outside=event.outside,
        anchored=anchor is not None,
        sink=sink,
    )
    new_token = outs.pop() if sink is not None else None
    return (outs.pop() if anchor is not None else None), new_token


def emit_if_collecting(event: Event, anchor: Array | None = None) -> Any:
    """Bind an event for a transformation further out, if there is one; returns the anchor."""
    return emit(event, anchor)[0] if collecting.value else anchor


def handed_on(args: list[Array], params: dict[str, Any]) -> list[Array]:
    """What a log equation returns when its event is taken away: anchor and token, unchanged."""
    return args[len(args) - params["anchored"] - (params["sink"] is not None) :]


def read(args: list[Array], params: dict[str, Any]) -> tuple[Event, Array | None, Array | None]:
    """The event, anchor and token of a log equation, from its arguments and parameters."""
    args = list(args)
    token = args.pop() if params["sink"] is not None else None
    anchor = args.pop() if params["anchored"] else None
    event = unpack(params["spec"], params["batch_dims"], params["masked"], args)
    event.copies, event.derived = params["copies"], params["derived"]
    event.outside = params["outside"]
    return event, anchor, token


def is_log(effects: Any, kind: type = LogEffect) -> bool:
    """Does this set of effects hold an event of lox?"""
    return any(isinstance(e, kind) for e in effects)


@log_p.def_effectful_abstract_eval
def _abstract(*avals: Any, **params: Any) -> Any:
    effect = log_effect if params["sink"] is None else tap_effect
    return handed_on(list(avals), params), {effect}


@log_p.def_impl
def _impl(*args: Array, **params: Any) -> Any:
    kept = handed_on(list(args), params)
    if params["sink"] is None:
        _check_nobody_listens(params["spec"])
    else:  # run one by one (jax.disable_jit): the host is here
        params["sink"].host_function(**params)(*(np.asarray(x) for x in args))
    return kept


def _check_nobody_listens(spec: Spec) -> None:
    """A log is run, not collected.

    After a transformation is done, derivative rules may still hold logs in jaxprs of their own;
    nobody asks for those. While one is tracing, it is a log that can't be put into the program.
    """
    if collecting.value:
        raise _errors.at_compile_time(spec)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    # An event has no derivative: log the primal values, drop the tangents.
    outs = log_p.bind(*primals, **params | dict(derived=True))
    return outs, [_compat.zero_tangent(x) for x in outs]


def _linearize(is_vjp: bool, nonzero: Any, *primals: Array, **params: Any) -> Any:
    return _compat.without_tangent(log_p.bind(*primals, **params))


def _transpose(*_: Any, spec: Spec, **__: Any) -> Any:
    raise _errors.tangent_logged(spec)


def _batch(axis_data: Any, args: Any, dims: Any, **params: Any) -> Any:
    # One event for the whole batch, its axis in front of all arrays, also of those that are the
    # same in all lanes: so `spool` and `vmap` commute. Registered as a "fancy" rule because those
    # are called even when no operand is batched.
    args, dims = list(args), list(dims)
    tail = []
    for _ in handed_on(args, params):  # anchor and token: any lane will do
        x, d = args.pop(), dims.pop()
        tail.append(x if d is None else jax.lax.index_in_dim(x, 0, d, keepdims=False))
    front = [batch_front(axis_data, x, d) for x, d in zip(args, dims, strict=True)]
    params["batch_dims"] += 1
    params["outside"] += _compat.is_outside_shard_map(axis_data)
    params["copies"] = (all(d is None for d in dims), *params["copies"])
    outs = log_p.bind(*front, *reversed(tail), **params)
    return outs, [None] * len(outs)


def batch_front(axis_data: Any, x: Array, dim: int | None) -> Array:
    """`x` with its batch axis in front, repeated if it has none."""
    mesh_axis = axis_data.explicit_mesh_axis
    return batching.bdim_at_front(x, dim, axis_data.size, mesh_axis)


def _lower(ctx: Any, *args: Any, **params: Any) -> Any:
    sink, kept = params["sink"], handed_on(list(args), params)
    if sink is None:
        _check_nobody_listens(params["spec"])
        return kept
    host_fun = sink.host_function(**params)
    call = ctx.replace(avals_out=ctx.avals_out[-1:])
    return [*kept[:-1], *_compat.emit_callback(call, host_fun, args)]


ad.primitive_jvps[log_p] = _jvp
_compat.primitive_linearizations[log_p] = _linearize
ad.primitive_transposes[log_p] = _transpose
batching.fancy_primitive_batchers[log_p] = _batch
mlir.register_lowering(log_p, _lower, cacheable=False)
