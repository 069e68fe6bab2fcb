"""Everything that depends on the JAX version, or that JAX keeps private.

This is the only file that may import `jax._src` (a test greps for it). Each use says which
versions need it. Everything else in lox is built on `jax.extend` and `jax.interpreters`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax

# 0.10-0.12: the table of linearization rules and the sharding of a callback are not re-exported.
from jax._src.callback import _callback_op_sharding
from jax._src.interpreters.ad import fallback_linearize_rule
from jax._src.interpreters.ad import primitive_linearizations as primitive_linearizations
from jax._src.interpreters.batching import BatchTrace
from jax.extend import core as jex
from jax.extend import source_info_util
from jax.interpreters import ad, mlir

_outside = threading.local()


def is_outside_shard_map(axis_data: Any) -> bool:
    """Is this the axis of a vmap around the shard_map whose body is being batched?"""
    return any(a is axis_data for a in getattr(_outside, "axes", ()))


def _watch_shard_map() -> None:
    # 0.10-0.12: vmap of a shard_map batches its body, where an axis from outside looks like any
    # other. JAX has no rule to wrap for it, only this method.
    tracer: Any = BatchTrace
    process = tracer.process_shard_map

    def process_shard_map(trace: Any, *args: Any, **params: Any) -> Any:
        before = getattr(_outside, "axes", ())
        _outside.axes = (*before, trace.axis_data)
        try:
            return process(trace, *args, **params)
        finally:
            _outside.axes = before

    tracer.process_shard_map = process_shard_map


_watch_shard_map()

# The effect of `jax.debug.callback` may sit in loops, branches, remat and custom derivatives, and
# JAX decides that by `isinstance`. Subclassing its type gives our effects the same rights.
_debug_effect = next(iter(jax.make_jaxpr(lambda: jax.debug.callback(lambda: None))().effects))
DebugEffect: Any = type(_debug_effect)

# A jit equation, to read off the marker for "no sharding asked for", and how to say "inline".
_jit_eqn = jax.make_jaxpr(jax.jit(lambda x: x + 1))(0.0).eqns[0]
UNSPECIFIED: Any = _jit_eqn.params["in_shardings"][0]
_Inline: Any = type(_jit_eqn.params["inline"])
_INLINE = True if _Inline is bool else _Inline.JAX_EARLY  # 0.12: an enumeration


def scan_arity(params: dict[str, Any]) -> tuple[int, int]:
    """How many constants and how many carried values a scan equation has."""
    if "num_consts" in params:  # 0.10
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # 0.11 and later
    return len(consts), len(carry)


def manual_axes(params: dict[str, Any]) -> frozenset[str]:
    """The mesh axes over which a shard_map equation is manual."""
    if "newly_manual_axes" in params:  # 0.12
        return frozenset(params["newly_manual_axes"])
    return frozenset(params["manual_axes"])


def closed(jaxpr: Any) -> Any:
    """A jaxpr with its constants; from 0.12 the two classes are one."""
    if isinstance(jaxpr, jex.ClosedJaxpr):
        return jaxpr
    return jex.ClosedJaxpr(jaxpr, ())


def open_jaxpr(jaxpr: Any) -> Any:
    """The jaxpr without its constants, for primitives whose parameter has none (remat)."""
    if jex.ClosedJaxpr is jex.Jaxpr:
        return jaxpr
    return jaxpr.jaxpr


def bind(eqn: Any, args: Sequence[Any]) -> list[Any]:
    """Bind an equation again as it is, on other arguments."""
    out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def bind_together(jaxpr: Any, eqns: list[Any], ins: list[Any], outs: list[Any], args: Any) -> Any:
    """Bind pure equations of `jaxpr` at once, from the variables `ins` to the variables `outs`.

    JAX inlines the body of such a call by copying its equations, four times faster than binding
    them one by one.
    """
    names = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    part = jaxpr.replace(
        constvars=[], invars=ins, outvars=outs, eqns=eqns, effects=frozenset(), debug_info=names
    )
    params = _jit_eqn.params | dict(
        jaxpr=closed(part),
        name="lox",
        inline=_INLINE,
        in_shardings=(UNSPECIFIED,) * len(ins),
        in_layouts=(None,) * len(ins),
        donated_invars=(False,) * len(ins),
        out_shardings=(UNSPECIFIED,) * len(outs),
        out_layouts=(None,) * len(outs),
    )
    return _jit_eqn.primitive.bind(*args, **params)


@contextlib.contextmanager
def equation_scope(eqn: Any) -> Iterator[None]:
    """Name stack, source line, mesh and metadata of an equation, for what is bound inside."""
    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with (
        source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack),
        eqn.ctx.manager,
    ):
        yield


# What a linearization rule returns: 0.10 has no place for structured residuals. (Found by tracing,
# because importing lox must not start JAX's backends.)
_arity: list[int] = []
jax.make_jaxpr(
    lambda x: _arity.append(len(fallback_linearize_rule(jex.primitives.neg_p, False, [True], x)))
)(0.0)
_RESIDUALS: tuple[Any, ...] = ([],) if _arity == [4] else ([], None)


def without_tangent(outs: list[Any]) -> tuple[Any, ...]:
    """What a linearization rule returns for results that have no derivative."""
    zeros = [zero_tangent(x) for x in outs]
    return outs, [False] * len(outs), *_RESIDUALS, lambda *_: zeros


def zero_tangent(x: Any) -> Any:
    """The symbolic zero among tangents of `x`."""
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def emit_callback(ctx: Any, host_fun: Any, args: Sequence[Any]) -> Any:
    """Lower to one call of `host_fun` with NumPy arrays.

    `jax.experimental.io_callback` would do, but it puts every argument on a JAX device inside the
    callback, which is slow and can deadlock.
    """
    sharding = _callback_op_sharding(ctx.module_context.axis_context, None, ctx.avals_out)
    result, _, _ = mlir.emit_python_callback(
        ctx,
        host_fun,
        None,
        list(args),
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=True,
        returns_token=False,
        sharding=sharding,
    )
    return result


def varying_axes(aval: Any) -> frozenset[str]:
    """The manual mesh axes over which a value inside a shard_map differs."""
    kind = getattr(aval, "manual_axis_type", None)
    return frozenset(kind.varying) if kind is not None else frozenset(getattr(aval, "vma", ()))


def as_varying(x: Any, axes: frozenset[str]) -> Any:
    """`x`, typed as differing over these manual mesh axes."""
    missing = tuple(axes - varying_axes(jax.typeof(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def explicit_sharding(aval: Any) -> bool:
    """Does the type of this value say how it is sharded (a mesh with Explicit axes)?"""
    sharding = getattr(aval, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    return mesh is not None and not mesh.empty and mesh.are_all_axes_explicit


def reshard_for(x: Any, mesh: Any, spec: Any) -> Any:
    """`x` as an argument of a shard_map, which wants it sharded already over Explicit axes."""
    if not mesh.are_all_axes_explicit:
        return x
    return jax.reshard(x, jax.sharding.NamedSharding(mesh, spec))


def reshard_like(x: Any, like: Any, axes: int, behind: int = 0) -> Any:
    """`x`, with `axes` of its axes sharded as the type of another value says its first ones are.

    They are the first axes of `x`, too, or those behind the first few.
    """
    if not explicit_sharding(like) or x.ndim < behind + axes:
        return x
    spec = (tuple(like.sharding.spec) + (None,) * like.ndim)[:axes]
    spec = jax.sharding.PartitionSpec(*(None,) * behind, *spec)
    return jax.reshard(x, jax.sharding.NamedSharding(like.sharding.mesh, spec))
