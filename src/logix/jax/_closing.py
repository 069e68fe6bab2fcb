"""Functions with a derivative of their own that close over values of the loss.

The derivative of a `custom_jvp` or `custom_vjp` function is called when the program is
differentiated. Here that is after the loss was traced, and a value of the loss that the derivative
closes over, instead of being handed over, is gone by then. Such a loss can be differentiated only
while it is traced: by `vmap(grad)` of the function itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from ._backward import Backward
from ._entrywise import inner


def closing(jaxpr: Any, trace: Any) -> str | None:
    """Such a function in a jaxpr that was made by `trace`, in words."""
    for eqn in _customs(inner(jaxpr), set()):
        if _needs(eqn, trace):
            name = inner(eqn.params["call_jaxpr"]).debug_info.func_name
            kind = eqn.primitive.name.removesuffix("_call")
            return (
                f"the {kind} function {name!r}, whose derivative closes over values that the loss "
                "computes: hand them over as arguments"
            )
    return None


def _customs(jaxpr: Any, seen: set[int]) -> Iterator[Any]:
    """All calls of such functions, also those in bodies; a body that is used twice comes once."""
    if id(jaxpr) in seen:
        return
    seen.add(id(jaxpr))
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
            yield eqn
        for value in eqn.params.values():
            for body in map(inner, value if isinstance(value, (list, tuple)) else [value]):
                if hasattr(body, "eqns"):
                    yield from _customs(body, seen)


def _needs(eqn: Any, trace: Any) -> bool:
    """Whether the derivative uses a value of this trace."""
    try:
        closed = Backward(eqn).jaxpr()
    except jax.errors.UnexpectedTracerError:
        return True
    except Exception:  # it can't be differentiated for all of its arguments at once: not our matter
        return False
    tracers = [x for x in closed.consts if isinstance(x, jax.core.Tracer)]
    return any(x._trace is trace for x in tracers)
