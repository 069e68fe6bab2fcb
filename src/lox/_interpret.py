"""The interpreter: runs a jaxpr again, equation by equation, and hands its logs to a collector.

    interpret : jaxpr, args, collector -> outs

Equations that hold no log are bound again untouched; their effects tell, and the collector, which
may look at others as well (`enters`, `equation`, `made`). A log goes to the collector. For
anything else there is one rule per primitive (`_rules`), which calls the public JAX function again
with a new body. Jaxprs are never edited: JAX caches and shares them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core as jex

from . import _compat, _errors
from ._hidden import first_log
from ._primitive import is_log, log_p
from ._survey import BODIES

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
    plain = getattr(jaxpr, "jaxpr", jaxpr)
    env: dict[Any, Any] = {}
    env.update(zip(plain.constvars, jaxpr.consts, strict=True))
    env.update(zip(plain.invars, args, strict=True))
    read = lambda v: v.val if isinstance(v, jex.Literal) else env[v]
    for pure, events, other in _stretches(plain, collector):
        _run_pure(plain, pure, env, read)
        for eqn in events + other:
            with _compat.equation_scope(eqn):
                outs = _equation(eqn, [read(v) for v in eqn.invars], collector)
                outs = collector.made(eqn, outs)
            env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in plain.outvars]


# Pure equations without a log need no look at each: they are bound again in stretches.

Stretch = tuple[list[Any], list[Any], list[Any]]  # pure equations, events that follow, others


def _stretches(jaxpr: Any, collector: Any) -> list[Stretch]:
    """Cut a jaxpr at the equations that must be looked at."""
    cuts: list[Stretch] = [([], [], [])]
    for eqn in jaxpr.eqns:
        _, events, other = cuts[-1]
        if eqn.primitive is log_p and is_log(eqn.effects, collector.effect):
            kind, cut = 1, bool(other)
        elif eqn.effects or collector.enters(eqn):
            kind, cut = 2, False
        else:
            kind, cut = 0, bool(other) or _must_follow(eqn, events, collector)
        if cut:
            cuts.append(([], [], []))
        cuts[-1][kind].append(eqn)
    return cuts


def _must_follow(eqn: Any, events: list[Any], collector: Any) -> bool:
    """May a pure equation not be moved in front of the events before it?"""
    if not events or not collector.defers:
        return bool(events)
    handed_on = {v for event in events for v in event.outvars}
    return any(v in handed_on for v in eqn.invars if not isinstance(v, jex.Literal))


def _run_pure(jaxpr: Any, eqns: list[Any], env: dict[Any, Any], read: Callable) -> None:
    if len(eqns) < 4:
        for eqn in eqns:
            with _compat.equation_scope(eqn):
                outs = _compat.bind(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return
    outs = [v for eqn in eqns for v in eqn.outvars if not isinstance(v, jex.DropVar)]
    made = set(outs)
    used = {v: None for eqn in eqns for v in eqn.invars if not isinstance(v, jex.Literal)}
    ins = [v for v in used if v not in made]
    env.update(zip(outs, _compat.bind_together(jaxpr, eqns, ins, outs, [env[v] for v in ins])))


def _equation(eqn: Any, args: list[Any], collector: Any) -> list[Any]:
    outs = collector.equation(eqn, args)
    if outs is not None:
        return outs
    if not collector.enters(eqn) and not is_log(eqn.effects, collector.effect):
        return _compat.bind(eqn, args)
    if eqn.primitive is log_p:
        return collector.event(args, eqn.params)
    rule = RULES.get(eqn.primitive.name)
    if rule is None:
        raise _errors.no_rule(eqn.primitive.name, first_log(eqn))
    return rule(eqn, args, collector)
