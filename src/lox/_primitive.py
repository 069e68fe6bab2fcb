"""The primitive behind `lox.log`, and the switch that turns it on.

    log_p : (values, steps, mask?, anchor?) -> ()        waits to be collected by spool or tap
    log_p : (values, steps, mask?, anchor?, token) -> token     with a sink: calls the host

Without a lox transformation around it, `lox.log` binds nothing: `collecting` is off. While `spool`
or `tap` traces a function it is on. JAX keeps it in the key of every trace cache, so a jitted
function is traced once with its logs and once without, and neither is lost.

The anchor is an integer that nothing reads. It makes the event depend on the loop it is in, so that
JAX does not move an event with constant operands out of its loop (see `_jax_rules`).
The token is an integer that each host call takes and returns. It keeps calls in program order, and
its value is the handle by which the host finds the callback (see `_host`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
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
    """Bind an event. Returns the new token if it has a sink."""
    operands = pack(event)
    if anchor is not None:
        operands.append(anchor)
    if sink is not None:
        operands.append(token)
    out = log_p.bind(
        *operands,
        spec=event.spec,
        batch_dims=len(event.batch),
        masked=event.mask is not None,
        anchored=anchor is not None,
        sink=sink,
    )
    return out[0] if sink is not None else None


def emit_if_collecting(event: Event, anchor: Array | None = None) -> None:
    if collecting.value:
        emit(event, anchor)


def read(args: list[Array], params: dict[str, Any]) -> tuple[Event, Array | None, Array | None]:
    """The event, anchor and token of a log equation, from its arguments and parameters."""
    args = list(args)
    token = args.pop() if params["sink"] is not None else None
    anchor = args.pop() if params["anchored"] else None
    return unpack(params["spec"], params["batch_dims"], params["masked"], args), anchor, token


def is_log(effects: Any, kind: type = LogEffect) -> bool:
    """Does this set of effects hold an event of lox?"""
    return any(isinstance(e, kind) for e in effects)


@log_p.def_effectful_abstract_eval
def _abstract(*avals: Any, sink: Any, **_: Any) -> Any:
    if sink is None:
        return [], {log_effect}
    return [avals[-1]], {tap_effect}


@log_p.def_impl
def _impl(*args: Array, sink: Any, spec: Spec, **params: Any) -> Any:
    if sink is None:
        raise _errors.at_compile_time(spec)
    return jax.jit(lambda *xs: log_p.bind(*xs, sink=sink, spec=spec, **params))(*args)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    # An event has no derivative: log the primal values, drop the tangents.
    outs = log_p.bind(*primals, **params)
    return outs, [_compat.zero_tangent(x) for x in outs]


def _transpose(*_: Any, spec: Spec, **__: Any) -> Any:
    raise _errors.tangent_logged(spec)


def _batch(axis_data: Any, args: Any, dims: Any, *, batch_dims: int, **params: Any) -> Any:
    # One event for the whole batch, its axis in front of all arrays, also of those that are the
    # same in all lanes: so `spool` and `vmap` commute. Registered as a "fancy" rule because those
    # are called even when no operand is batched.
    args, dims = list(args), list(dims)
    rest = int(params["anchored"]) + (params["sink"] is not None)
    tail = []
    for _ in range(rest):  # anchor and token: any lane will do
        x, d = args.pop(), dims.pop()
        tail.append(x if d is None else jax.lax.index_in_dim(x, 0, d, keepdims=False))
    front = [batch_front(axis_data.size, x, d) for x, d in zip(args, dims, strict=True)]
    outs = log_p.bind(*front, *reversed(tail), batch_dims=batch_dims + 1, **params)
    return outs, [None] * len(outs)


def batch_front(size: int, x: Array, dim: int | None) -> Array:
    """`x` with its batch axis in front, repeated if it has none."""
    if dim is None:
        return jnp.broadcast_to(jnp.asarray(x)[None], (size, *np.shape(x)))
    return jnp.moveaxis(x, dim, 0)


def _lower(ctx: Any, *args: Any, sink: Any, spec: Spec, **params: Any) -> Any:
    if sink is None:
        raise _errors.at_compile_time(spec)
    host_fun = sink.host_function(spec=spec, sink=sink, **params)
    return _compat.emit_callback(ctx, host_fun, args)


ad.primitive_jvps[log_p] = _jvp
ad.primitive_transposes[log_p] = _transpose
batching.fancy_primitive_batchers[log_p] = _batch
mlir.register_lowering(log_p, _lower, cacheable=False)


def token_aval() -> ShapedArray:
    return ShapedArray((), np.dtype(np.int32))
