"""Which axes of a matrix that is differentiated as it is are those of an output: (out, in).

In `x @ (w + 1)` the parameter is no view any more when it is multiplied, but its axes are the same.
So its gradient is written as that of a matrix with a rule is, and as other front ends write it.
"""

from __future__ import annotations

import math
from typing import Any

from ._arrange import Form
from ._entrywise import ENTRYWISE, inner
from ._logged import Logs
from ._plan import Plan, Use
from ._planner import Planner
from ._view import Atom, Value, parameter


class Loosely(Planner):
    """A reading that goes on where a parameter is no view any more: for the sake of its axes."""

    def _equation(self, plan: Plan, eqn: Any, ins: Any, known: Any, loops: Any) -> list[Value]:
        if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
            body = inner(eqn.params["call_jaxpr"])
            plan.bodies[id(eqn)] = {id(body): (found := self.jaxpr(body, ins, loops, known))}
            return found.outs
        return super()._equation(plan, eqn, ins, known, loops)

    def _unknown(self, eqn: Any, ins: list[Value]) -> list[Value]:
        out: list[Value] = [()] * len(eqn.outvars)
        if len(out) == 1 and eqn.primitive.name in ENTRYWISE:
            shape = eqn.outvars[0].aval.shape
            alike = [x for x, v in zip(ins, eqn.invars) if x and v.aval.shape == shape]
            out = alike[:1] or out
        return out


def turned(
    jaxpr: Any, shapes: dict[int, tuple[int, ...]], direct: dict[int, Use]
) -> dict[int, Form]:
    """The forms of parameters that are differentiated as they are, where one is found.

    A loop over layers may be found, too, behind what is made of all of them.
    """
    some = {i: shapes[i] for i in direct if sum(n > 1 for n in shapes[i]) > 1}
    if not some:
        return {}
    values = [parameter(i, some[i]) if i in some else () for i in range(len(jaxpr.invars))]
    forms, _, clash = Loosely(Logs(), {}).jaxpr(jaxpr, values, ()).forms()
    out = {}
    for i, own in forms.items():
        shape, blocks = shapes[i], {a.axis for a in own.blocks}
        atoms = [a for a in (*own.left, *own.right) if isinstance(a, Atom)]
        layers = all(a.stride == 1 and a.full == shape[a.axis] for a in own.blocks)
        layers &= direct[i].blocks in ((), tuple(sorted(blocks)))
        rest = math.prod(n for d, n in enumerate(shape) if d not in blocks)
        whole = math.prod(a.full for a in atoms) == rest and own.left and own.right
        if i not in clash and layers and whole:
            out[i] = own
    return out
