"""The identity that logs its cotangent: the primitive behind `log_grad`.

    probe_p : (x_1 … x_n, steps) -> (x_1 … x_n)

It is linear in the x. Its derivative is itself, and its transpose logs the cotangents it is given
and passes them on. So it works through everything JAX can differentiate, forward mode included.
"""

from __future__ import annotations

from typing import Any

from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from ._event import Array, Spec, unpack
from ._primitive import batch_front, emit_if_collecting

probe_p = jex.Primitive("lox_probe")
probe_p.multiple_results = True


def probe(spec: Spec, xs: list[Array], steps: list[Array]) -> list[Array]:
    return probe_p.bind(*xs, *steps, spec=spec, batch_dims=0)


def _count(spec: Spec) -> int:
    return len(spec.fields[0].ndims)


@probe_p.def_impl
def _impl(*args: Array, spec: Spec, batch_dims: int) -> Any:
    return list(args[: _count(spec)])


@probe_p.def_abstract_eval
def _abstract(*avals: Any, spec: Spec, batch_dims: int) -> Any:
    return list(avals[: _count(spec)])


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    n = _count(params["spec"])
    xs, steps = primals[:n], primals[n:]
    zero = [isinstance(t, ad.Zero) for t in tangents[:n]]
    dots = list(tangents[:n])
    if not all(zero):
        live = [ad.instantiate_zeros(t) for t in dots]
        dots = probe_p.bind(*live, *steps, **params)
    return list(xs), dots


def _transpose(cts: Any, *args: Any, spec: Spec, batch_dims: int) -> Any:
    n = _count(spec)
    live = [ad.instantiate_zeros(ct) for ct in cts]
    emit_if_collecting(unpack(spec, batch_dims, False, [*live, *args[n:]]))
    return [*live, *[None] * (len(args) - n)]


def _batch(axis_data: Any, args: Any, dims: Any, *, spec: Spec, batch_dims: int) -> Any:
    # Every lane has a cotangent of its own, also of an x that all lanes share.
    front = [batch_front(axis_data, x, d) for x, d in zip(args, dims, strict=True)]
    outs = probe_p.bind(*front, spec=spec, batch_dims=batch_dims + 1)
    return outs, [0] * len(outs)


ad.primitive_jvps[probe_p] = _jvp
ad.primitive_transposes[probe_p] = _transpose
batching.fancy_primitive_batchers[probe_p] = _batch
mlir.register_lowering(probe_p, mlir.lower_fun(_impl, multiple_results=True))
