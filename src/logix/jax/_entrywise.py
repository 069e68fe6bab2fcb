"""Whether a parameter that is differentiated as it is meets the data entry by entry.

Then its gradient for an example costs no more than the parameter itself. Not so where something
that is made of it is multiplied out, as in `x @ (w + a @ b)`: there a matrix is made for each
example. A value is followed as long as it is made of parameters alone (`free` of data).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend import core as jex

from lox import _compat

from ._viewing import RULES, SAME

ENTRYWISE = {
    *("add", "add_any", "sub", "mul", "div", "max", "min", "pow", "integer_pow", "neg", "sqrt"),
    *("rsqrt", "exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "square", "abs", "sign"),
    *("select_n", "pad", "clamp", "reduce_sum", "rev", "erf", "sin", "cos", "atan2", "cumsum"),
    *(*SAME, *RULES, "reduce_precision"),
}
PICKS = {"gather", "dynamic_slice", "sort", "reduce_max", "reduce_min"}  # by places known before
CALLS = {
    **dict.fromkeys(("jit", "remat2", "checkpoint", "remat", "shard_map"), "jaxpr"),
    **dict.fromkeys(("closed_call", "core_call", "core_closed_call", "eval_jaxpr"), "call_jaxpr"),
}
Made = frozenset[int]  # the parameters that a value is made of
NONE: Made = frozenset()


def inner(jaxpr: Any) -> Any:
    """The jaxpr of a closed one, whose equations are the same each time it is asked for."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def carried_unchanged(body: Any, consts: int, carry: int) -> set[int]:
    """Which of the values that a scan carries are the same in all its iterations."""
    return {k for k in range(carry) if body.outvars[k] is body.invars[consts + k]}


class Entrywise:
    """One walk for all parameters; `met` says for each that is multiplied out by which equation."""

    def __init__(self) -> None:
        self.met: dict[int, str] = {}

    def walk(self, jaxpr: Any, made: Sequence[Made], free: Sequence[bool]) -> Any:
        """What the outputs are made of, and which of them are free of data."""
        of: dict[Any, Made] = dict(zip(jaxpr.invars, made, strict=True))
        clean = dict(zip(jaxpr.invars, free, strict=True))
        made_of = lambda v: NONE if isinstance(v, jex.Literal) else of.get(v, NONE)
        is_free = lambda v: isinstance(v, jex.Literal) or clean.get(v, v in jaxpr.constvars)
        for eqn in jaxpr.eqns:
            ins, frees = [made_of(v) for v in eqn.invars], [is_free(v) for v in eqn.invars]
            outs, ok = self._equation(eqn, ins, frees)
            of.update(zip(eqn.outvars, outs))
            clean.update(zip(eqn.outvars, ok))
        return [made_of(v) for v in jaxpr.outvars], [is_free(v) for v in jaxpr.outvars]

    def _equation(self, eqn: Any, ins: list[Made], free: list[bool]) -> Any:
        name, n = eqn.primitive.name, len(eqn.outvars)
        both, alone = NONE.union(*ins), all(free)
        if not both or name == "stop_gradient":
            return [NONE] * n, [alone] * n
        if name in CALLS:
            return self.walk(inner(eqn.params[CALLS[name]]), ins, free)
        if name == "cond":
            found = [self.walk(inner(b), ins[1:], free[1:]) for b in eqn.params["branches"]]
            outs = [NONE.union(*x) for x in zip(*(made for made, _ in found))]
            return (outs if free[0] else self._meet(outs, name)), [alone] * n
        if name == "scan":
            consts, carry = _compat.scan_arity(eqn.params)
            body = inner(eqn.params["jaxpr"])
            same = carried_unchanged(body, consts, carry)
            changes = [k for k in range(carry) if k not in same]
            self._meet([ins[consts + k] for k in changes], name)
            ins, free = list(ins), list(free)
            for k in changes:
                ins[consts + k], free[consts + k] = NONE, False
            outs, ok = self.walk(body, ins, free)
            self._meet([outs[k] for k in changes], name)
            still = lambda k: k >= carry or k in same
            outs = [x if still(k) else NONE for k, x in enumerate(outs)]
            return outs, [x and still(k) for k, x in enumerate(ok)]
        if name in ENTRYWISE or (name in PICKS and alone):
            return [both if alone else NONE] * n, [alone] * n
        if alone and name in ("custom_jvp_call", "custom_vjp_call"):
            return [both] * n, [True] * n
        self._meet(ins, name)
        return [NONE] * n, [alone] * n

    def _meet(self, made: Sequence[Made], name: str) -> list[Made]:
        for number in NONE.union(*made):
            self.met.setdefault(number, name)
        return [NONE] * len(made)


def multiplied_out(jaxpr: Any, params: int, some: Sequence[int]) -> dict[int, str]:
    """Which of some parameters do not meet the data entry by entry, and where.

    `params`: how many of the inputs are parameters; the others are the data.
    """
    walk = Entrywise()
    n = len(jaxpr.invars)
    made = [frozenset({i}) if i in some else NONE for i in range(n)]
    walk.walk(jaxpr, made, [i < params for i in range(n)])
    return walk.met
