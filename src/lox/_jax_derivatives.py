"""Two of JAX's differentiation rules, taught about events. They act only where a log is inside.

The body is rewritten first, by the interpreter with a `Rewrite` collector, and then handed to JAX's
own rule:

    jvp, linearize of scan   JAX moves what does not depend on the iteration out of the loop, events
                             too, and drops a branch or remat that returns nothing: the events are
                             strung on a carried integer, their anchor
    jvp of while             linearizing runs the primal loop again with the tangents: its events
                             are taken out there, and stay in a loop of their own
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core.primitives import scan_p, while_p
from jax.interpreters import ad

from . import _compat
from ._collect import Anchor, has_events
from ._rules import split, stage, without_logs

Args = list[Any]

# --- differentiating scan ------------------------------------------------------------------------

_jvp_scan = ad.primitive_jvps[scan_p]
_linearize_scan = _compat.primitive_linearizations[scan_p]


class _Anchored:
    """A logging scan with one more carried value, on which its events are strung.

    The public `lax.scan` is traced again, because the parameters of the primitive differ between
    versions of JAX. What it does with arguments and results is read off the equation it makes.
    """

    def __init__(self, primals: Args, params: Any):
        n_consts, n_carry = _compat.scan_arity(params)

        def scan(anchor: Any, *args: Any) -> Any:
            consts, init, xs = split(list(args), n_consts, n_carry)

            def step(carry: Any, x: Args) -> Any:
                values, anchor = carry
                body, state = params["jaxpr"], {"anchor": anchor}
                outs, state, _ = Anchor({}).run(body, [*consts, *values, *x], state)
                values, ys = split(outs, n_carry)
                return (values, state["anchor"]), ys

            (values, _), ys = lax.scan(
                step,
                (init, anchor),
                xs,
                params["length"],
                reverse=params["reverse"],
                unroll=params["unroll"],
            )
            return [*values, *ys]

        closed, _ = stage(scan, jax.ShapeDtypeStruct((), jnp.int32), *map(jax.typeof, primals))
        [eqn] = closed.eqns
        jaxpr = getattr(closed, "jaxpr", closed)
        self.params, self._eqn, self._jaxpr = eqn.params, eqn, jaxpr

    def arguments(self, anchor: Any, args: Args) -> Args:
        """What goes into the new scan, from what went into the old one."""
        env = dict(zip(self._jaxpr.invars, [anchor, *args], strict=True))
        return [env[v] for v in self._eqn.invars]

    def results(self, outs: Args, anchor: Any, args: Args) -> Args:
        """What the old scan returns, from what the new one does.

        A carried value that the loop does not change goes past it, from argument to result.
        """
        env = dict(zip(self._jaxpr.invars, [anchor, *args], strict=True))
        env.update(zip(self._eqn.outvars, outs, strict=True))
        return [env[v] for v in self._jaxpr.outvars]


def _scan_jvp(primals: Args, tangents: Args, **params: Any) -> Any:
    if not has_events(params["jaxpr"]):
        return _jvp_scan(primals, tangents, **params)
    new, anchor = _Anchored(primals, params), jnp.int32(0)
    zero = _compat.zero_tangent(anchor)
    outs, dots = _jvp_scan(
        new.arguments(anchor, primals), new.arguments(zero, tangents), **new.params
    )
    return new.results(outs, anchor, primals), new.results(dots, zero, tangents)


def _scan_linearize(is_vjp: bool, nonzero: Args, *primals: Any, **params: Any) -> Any:
    if not has_events(params["jaxpr"]):
        return _linearize_scan(is_vjp, nonzero, *primals, **params)
    new, anchor = _Anchored(list(primals), params), jnp.int32(0)
    outs, nonzero_out, *residuals, linear = _linearize_scan(
        is_vjp,
        new.arguments(False, nonzero),
        *new.arguments(anchor, list(primals)),
        **new.params,
    )
    n, zero = len(primals), _compat.zero_tangent(anchor)

    def linear_in_order(*args: Any) -> Any:
        # Residuals come first (in one or two arguments, by version), then the tangents.
        tangents = list(args[-n:])
        return new.results(linear(*args[:-n], *new.arguments(zero, tangents)), zero, tangents)

    outs = new.results(outs, anchor, list(primals))
    return outs, new.results(nonzero_out, False, nonzero), *residuals, linear_in_order


ad.primitive_jvps[scan_p] = _scan_jvp
_compat.primitive_linearizations[scan_p] = _scan_linearize


# --- differentiating while -----------------------------------------------------------------------

_jvp_while = ad.primitive_jvps[while_p]


def _while_jvp(primals: Args, tangents: Args, **params: Any) -> Any:
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]
    if not has_events(cond, body):
        return _jvp_while(primals, tangents, **params)
    outs = while_p.bind(*primals, **params)
    bare = params | dict(cond_jaxpr=without_logs(cond), body_jaxpr=without_logs(body))
    _, dots = _jvp_while(primals, tangents, **bare)
    return outs, dots


ad.primitive_jvps[while_p] = _while_jvp
