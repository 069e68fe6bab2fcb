"""Which inputs of a program its result depends on in a way that can be differentiated.

It is read backward from the result. Loops, branches and functions with derivatives of their own are
not looked into: what goes in is taken to come out.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
from jax.extend import core as jex

from ._entrywise import CALLS, inner

FLAT = frozenset(("stop_gradient", "round", "floor", "ceil", "sign"))  # their derivative is zero


def reached(jaxpr: Any, outs: Collection[int]) -> set[int]:
    """The numbers of a jaxpr's inputs that these of its outputs depend on."""
    is_var = lambda v: not isinstance(v, jex.Literal) and jnp.issubdtype(v.aval.dtype, jnp.inexact)
    wanted = {v for k, v in enumerate(jaxpr.outvars) if k in outs and is_var(v)}
    for eqn in reversed(jaxpr.eqns):
        used = [k for k, v in enumerate(eqn.outvars) if v in wanted]
        if not used or eqn.primitive.name in FLAT:
            continue
        ins = range(len(eqn.invars))
        if eqn.primitive.name in CALLS:
            ins = reached(inner(eqn.params[CALLS[eqn.primitive.name]]), used)  # type: ignore
        wanted |= {eqn.invars[k] for k in ins if is_var(eqn.invars[k])}
    return {k for k, v in enumerate(jaxpr.invars) if v in wanted}
