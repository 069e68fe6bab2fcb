"""Runs a loss by its plan, on lox's interpreter: at each site a slot is added, and inputs are kept.

A slot is a place for the gradient of a site's output: `taken` returns the output as it is, and its
derivative for the slot is the identity. So the gradient for all slots costs a backward pass without
the gradients of weights, and nothing has to be added in the forward pass.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from lox import _compat
from lox._collect import Collector, Drop
from lox._interpret import RULES, interpret
from lox._primitive import handed_on, is_log
from lox._rows import Rows
from lox._rules import split

from . import _ragged as ragged
from ._entrywise import inner
from ._logged import Logged
from ._plan import Plan
from ._site import taken

Array = Any


def slots(plan: Plan) -> dict[str, Array]:
    """Zeros: their gradients are those of the outputs of all sites."""
    return {key: jnp.zeros(shape, dtype) for key, (shape, dtype) in plan.slots().items()}


class Follow(Collector):
    """A collector of lox: its state are the slots and what else is given, its rows what is kept."""

    def __init__(self, plan: Plan, state: dict[str, Array]):
        super().__init__(state)
        self.plan = plan
        self._bodies: dict[int, Plan] = {}  # of the equation that a rule is at

    def start(self, jaxpr: Any, args: list[Array]) -> list[Array]:
        """Run a jaxpr whose plan this is."""
        args = list(args)
        for logged in self.plan.entered:
            args[logged.number] = self._log(logged, args[logged.number])
        return interpret(_compat.closed(jaxpr), args, self)

    def enters(self, eqn: Any) -> bool:
        plan = self.plan
        if id(eqn) in plan.sites or id(eqn) in plan.logged or id(eqn) in plan.mapped:
            return True
        return not all(body.idle for body in plan.bodies.get(id(eqn), {}).values())

    def equation(self, eqn: Any, args: list[Array]) -> list[Array] | None:
        self._bodies = self.plan.bodies.get(id(eqn), {})
        if id(eqn) in self.plan.sites:
            key, site = self.plan.sites[id(eqn)]
            given = [self.state[name] for name in site.given]
            for name, x in zip(site.keys, site.keep(args, given)):
                self.rows[name] = Rows([x], [], None, (), True)
            return site.run(args, [self.state[name] for name in site.slots(key)], given)
        if id(eqn) in self.plan.mapped:
            return [ragged.run(eqn, args)]
        if self._bodies and eqn.primitive.name == "shard_map":
            return self._shard_map(eqn, args)
        if self._bodies:
            return None
        if is_log(eqn.effects) and eqn.primitive.name in RULES:  # logs that nobody wants
            return RULES[eqn.primitive.name](eqn, args, Drop({}))
        return _compat.bind(eqn, args) if not is_log(eqn.effects) else None

    def event(self, args: list[Array], params: dict[str, Any]) -> list[Array]:
        return handed_on(args, params)  # what is wanted was taken where it was made

    def made(self, eqn: Any, outs: list[Array]) -> list[Array]:
        for logged in self.plan.logged.get(id(eqn), ()):
            outs = list(outs)
            outs[logged.number] = self._log(logged, outs[logged.number])
        return outs

    def _log(self, logged: Logged, x: Array) -> Array:
        self.rows[logged.key] = Rows([x], [], None, (), True)
        return taken(x, self.state[logged.key]) if logged.differentiable else x

    def borrow(self, *jaxprs: Any) -> dict[str, Array]:
        plans = [self._bodies[id(inner(j))] for j in jaxprs]
        return {key: self.state[key] for plan in plans for key in plan.handed()}

    def run(self, jaxpr: Any, args: list[Array], state: dict[str, Array]) -> Any:
        child = Follow(self._bodies[id(inner(jaxpr))], state)
        outs = child.start(jaxpr, args)
        return outs, {}, child.rows

    def loop(self, eqn: Any, args: list[Array]) -> list[Array] | None:
        """A scan: each iteration has slots of its own."""
        body, params = eqn.params["jaxpr"], eqn.params
        consts, init, xs = split(args, *_compat.scan_arity(params))

        def step(values: list[Array], x: Any) -> Any:
            mine, own = x
            outs, _, rows = self.run(body, [*consts, *values, *mine], own)
            values, ys = split(outs, len(init))
            return values, (ys, rows)

        how = dict(reverse=params["reverse"], unroll=params["unroll"])
        values, (ys, rows) = lax.scan(step, init, (xs, self.borrow(body)), params["length"], **how)
        self.absorb({}, rows)
        return [*values, *ys]

    def _shard_map(self, eqn: Any, args: list[Array]) -> list[Array]:
        """Slots, and what is kept, have an axis in front for each mesh axis they vary over."""
        body, params = eqn.params["jaxpr"], eqn.params
        plan, state = self._bodies[id(inner(body))], self.borrow(body)
        manual = _compat.manual_axes(params)
        axes = {
            key: tuple(x.axis for x in loops if x.axis is not None and x.axis in manual)
            for key, loops in plan.loops().items()
        }

        def run(slots: Any, args: Any) -> Any:
            slots = {k: x.reshape(x.shape[len(axes[k]) :]) for k, x in slots.items()}
            outs, _, rows = self.run(body, list(args), slots)
            up = lambda x, own: _compat.as_varying(x, frozenset(own))[(None,) * len(own)]
            return outs, {k: [up(x, axes[k]) for x in r.values] for k, r in rows.items()}

        specs = {key: P(*own) for key, own in axes.items()}
        outs, kept = jax.shard_map(
            run,
            mesh=params["mesh"],
            in_specs=({k: specs[k] for k in state}, list(params["in_specs"])),
            out_specs=(list(params["out_specs"]), {k: specs[k] for k in plan.kept()}),
            axis_names=manual,
            check_vma=True,
        )(state, args)
        self.absorb({}, {k: Rows(values, [], None, (), True) for k, values in kept.items()})
        return outs
