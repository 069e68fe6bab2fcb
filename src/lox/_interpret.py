"""The interpreter: runs a jaxpr again, equation by equation, and hands its logs to a collector.

    interpret : jaxpr, args, collector -> outs

An equation that holds no log is bound again untouched; its effects tell. A log goes to the
collector. For anything else there is one rule per primitive (`_rules`), which calls the public JAX
function again with a new body. Jaxprs are never edited: JAX caches and shares them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core as jex

from . import _compat, _errors
from ._primitive import is_log, log_p
from ._survey import BODIES, first_log

Rule = Callable[[Any, list[Any], Any], list[Any]]
RULES: dict[str, Rule] = {}


def register(*names: str, body: str = "") -> Callable[[Rule], Rule]:
    """Register the rule for the primitives of these names.

    `body` is the parameter that holds the jaxpr they run once, for the survey; the primitives that
    run theirs several times, or one of several, the survey knows itself.
    """

    def add(rule: Rule) -> Rule:
        for name in names:
            RULES[name] = rule
            if body:
                BODIES[name] = body
        return rule

    return add


def interpret(jaxpr: Any, args: Sequence[Any], collector: Any) -> list[Any]:
    """Run a closed jaxpr on `args`, giving its logs to `collector`."""
    env: dict[Any, Any] = {}
    read = lambda v: v.val if isinstance(v, jex.Literal) else env[v]
    plain = getattr(jaxpr, "jaxpr", jaxpr)
    env.update(zip(plain.constvars, jaxpr.consts, strict=True))
    env.update(zip(plain.invars, args, strict=True))
    for eqn in plain.eqns:
        with _compat.equation_scope(eqn):
            outs = _equation(eqn, [read(v) for v in eqn.invars], collector)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in plain.outvars]


def _equation(eqn: Any, args: list[Any], collector: Any) -> list[Any]:
    if not is_log(eqn.effects, collector.effect):
        return _compat.bind(eqn, args)
    if eqn.primitive is log_p:
        return collector.event(args, eqn.params)
    rule = RULES.get(eqn.primitive.name)
    if rule is None:
        raise _errors.no_rule(eqn.primitive.name, first_log(eqn))
    return rule(eqn, args, collector)
