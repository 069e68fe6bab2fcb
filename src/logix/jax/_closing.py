"""Functions with a derivative of their own that close over values of the loss.

The derivative of a `custom_jvp` or `custom_vjp` function is called when the program is
differentiated. Here that is after the loss was traced, and a value of the loss that the derivative
closes over, instead of being handed over, is gone by then. Such a loss can be differentiated only
while it is traced: by `vmap(grad)` of the function itself.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from lox import _compat

from ._backward import Backward
from ._entrywise import CALLS, inner
from ._reached import FLAT

OWN = ("custom_jvp_call", "custom_vjp_call")


def closing(jaxpr: Any, trace: Any, params: Collection[int]) -> str | None:
    """Such a function that a parameter reaches, in words; the jaxpr was made by `trace`."""
    walk = _Walk(trace)
    walk.outs(inner(jaxpr), tuple(i in params for i in range(len(inner(jaxpr).invars))))
    if walk.found is None:
        return None
    name = inner(walk.found.params["call_jaxpr"]).debug_info.func_name
    kind = walk.found.primitive.name.removesuffix("_call")
    return (
        f"the {kind} function {name!r}, whose derivative closes over values that the loss "
        "computes: hand them over as arguments"
    )


class _Walk:
    """From the parameters on: what does not depend on them is never differentiated."""

    def __init__(self, trace: Any):
        self.trace, self.found = trace, None
        self._known: dict[Any, tuple[bool, ...]] = {}  # the outputs of bodies

    def outs(self, jaxpr: Any, ins: tuple[bool, ...]) -> tuple[bool, ...]:
        """Which outputs of a jaxpr depend on these of its inputs."""
        if (id(jaxpr), ins) in self._known:
            return self._known[id(jaxpr), ins]
        on = {v for v, own in zip(jaxpr.invars, ins) if own}
        depends = lambda v: not isinstance(v, jex.Literal) and v in on
        for eqn in jaxpr.eqns:
            own = tuple(map(depends, eqn.invars))
            if any(own) and self.found is None:
                made = self._equation(eqn, own)
                on |= {v for v, x in zip(eqn.outvars, made) if x and _is_real(v)}
        self._known[id(jaxpr), ins] = tuple(map(depends, jaxpr.outvars))
        return self._known[id(jaxpr), ins]

    def _equation(self, eqn: Any, ins: tuple[bool, ...]) -> Sequence[bool]:
        name, params = eqn.primitive.name, eqn.params
        if name in OWN and _needs(eqn, ins, self.trace):
            self.found = eqn
        if name in OWN:  # what it computes is not differentiated
            return [True] * len(eqn.outvars)
        if name in CALLS:
            return self.outs(inner(params[CALLS[name]]), ins)
        if name == "cond":
            each = [self.outs(inner(b), ins[1:]) for b in params["branches"]]
            return [any(own) for own in zip(*each)]
        if name == "scan":
            consts, carry = _compat.scan_arity(params)
            while True:  # until nothing more comes back by what is carried
                made = self.outs(inner(params["jaxpr"]), ins)
                back = [a or b for a, b in zip(ins[consts : consts + carry], made)]
                new = (*ins[:consts], *back, *ins[consts + carry :])
                if new == ins:
                    return made
                ins = new
        for value in params.values():
            for body in map(inner, value if isinstance(value, list | tuple) else [value]):
                if hasattr(body, "eqns"):
                    self.outs(body, (True,) * len(body.invars))
        return [name not in FLAT] * len(eqn.outvars)


def _is_real(v: Any) -> bool:
    return jnp.issubdtype(v.aval.dtype, jnp.inexact)


def _needs(eqn: Any, ins: Sequence[bool], trace: Any) -> bool:
    """Whether the derivative for these arguments uses a value of this trace."""
    backward = Backward(eqn)
    backward.real = [k for k in backward.real if ins[k]]
    try:
        closed = backward.jaxpr()
    except jax.errors.UnexpectedTracerError:
        return True
    except Exception:  # as where it needs the axes of a mesh, or refuses to be differentiated
        return any(_holds(eqn.params.get(name), trace) for name in RULES)
    tracers = [x for x in closed.consts if isinstance(x, jax.core.Tracer)]
    return any(x._trace is trace for x in tracers)


RULES = ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd")


def _holds(fun: Any, trace: Any) -> bool:
    """Whether a value of this trace is found in what a function closes over."""
    left, seen = [fun], set()
    while left:
        x = left.pop()
        if id(x) in seen or isinstance(x, type | types.ModuleType):
            continue
        seen.add(id(x))
        if isinstance(x, jax.core.Tracer):
            if x._trace is trace:
                return True
        elif isinstance(x, types.FunctionType):
            left += [c for cell in x.__closure__ or () for c in _content(cell)]
            left += [x.__defaults__, x.__kwdefaults__]
        elif isinstance(x, types.MethodType):
            left += [x.__self__, x.__func__]
        elif isinstance(x, functools.partial):
            left += [x.func, x.args, x.keywords]
        elif isinstance(x, dict):
            left += x.values()
        elif isinstance(x, list | tuple | set | frozenset):
            left += x
        else:
            slots = [s for kind in type(x).__mro__ for s in getattr(kind, "__slots__", ())]
            left += [getattr(x, name, None) for name in slots if isinstance(name, str)]
            left += getattr(x, "__dict__", {}).values()
    return False


def _content(cell: Any) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not filled yet
        return []
