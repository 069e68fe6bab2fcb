"""Makes the plan: which equations of a loss are sites of its parameters, before anything is run.

The jaxpr is read once from the parameters on. A value that is still a view of a parameter is
followed, into every construct that the interpreter can run with a new body (jit, remat, scan,
cond, shard_map). Where it is used, there is either a rule for it (`_sites`), or its parameter is
`direct`: it is differentiated as it is, for each example. That is exact everywhere, and as cheap as
can be for what is only added or multiplied, entry by entry.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend import core as jex

from lox import _compat

from . import _known as known_numbers
from ._entrywise import CALLS as ENTERED
from ._entrywise import ENTRYWISE, carried_unchanged, inner
from ._known import Known
from ._logged import Logs
from ._picked import picked, with_numbers
from ._plan import Plan, Use
from ._ragged import contracted
from ._shards import local, mesh_loops, varies
from ._site import Loop, NoRule
from ._sites import SITES
from ._view import Part, Value
from ._viewing import follow

CALLS = {name: body for name, body in ENTERED.items() if name != "shard_map"}
Values = list[Value]  # of the inputs, or the outputs, of an equation
Numbers = Sequence[Known | None]
Loops = tuple[Loop, ...]


class Planner:
    """One reading of a jaxpr; `constants` are those of its constants that are numbers."""

    def __init__(self, logs: Logs, constants: known_numbers.Env):
        self.logs, self.constants = logs, constants
        self.uses: dict[int, list[Use]] = {}
        self._loops, self._keys = itertools.count(), itertools.count()
        self._names: dict[Any, str] = {}  # of variables that are kept; anew for each jaxpr
        self._ragged: dict[int, bool] = {}  # of bodies

    def jaxpr(self, jaxpr: Any, values: Sequence[Value], loops: Loops, known: Numbers = ()) -> Plan:
        """The plan for a jaxpr inside of loops, by what is known of its inputs."""
        plan, env = Plan(), dict(zip(jaxpr.invars, values, strict=True))
        numbers = {**self.constants, **dict(zip(jaxpr.invars, known))}
        read = lambda v: () if isinstance(v, jex.Literal) else env.get(v, ())
        plan.entered, plan.logged = self.logs.places(jaxpr, loops, self._keys)
        outside, self._names = self._names, {}  # a body that is called twice has its own each time
        for eqn in jaxpr.eqns:
            ins = [read(v) for v in eqn.invars]
            now = [known_numbers.read(numbers, v) for v in eqn.invars]
            if eqn.primitive.name == "ragged_dot_general" and not any(ins):
                plan.mapped |= {id(eqn)} if contracted(eqn) is not None else set()
            elif any(ins) or self.logs.inside(eqn) or self._holds_ragged(eqn):
                outs = self._equation(plan, eqn, ins, now, loops)
                env.update(zip(eqn.outvars, outs))
            else:
                made = known_numbers.evaluate(eqn, now, len(loops))
                numbers.update(zip(eqn.outvars, made))
        plan.outs = [read(v) for v in jaxpr.outvars]
        self._names = outside
        return plan

    def _equation(self, plan: Plan, eqn: Any, ins: Values, known: Numbers, loops: Loops) -> Values:
        name = eqn.primitive.name
        nothing: list[Value] = [()] * len(eqn.outvars)
        if name in CALLS:
            body = inner(eqn.params[CALLS[name]])
            found = self.jaxpr(body, ins, loops, known)
            plan.bodies[id(eqn)] = {id(body): found}
            return found.outs
        if name == "cond":
            bodies = [inner(b) for b in eqn.params["branches"]]
            return self._bodies(plan, eqn, bodies, ins[1:], known[1:], loops, "a branch")
        if name == "scan":
            return self._scan(plan, eqn, ins, known, loops)
        if name == "shard_map" and eqn.params["check_vma"]:
            own = mesh_loops(eqn.params, self._loops)
            shards = [local(v, s, own) for v, s in zip(ins, eqn.params["in_specs"])]
            if None not in shards:
                ins, body = [s for s in shards if s is not None], inner(eqn.params["jaxpr"])
                return self._bodies(plan, eqn, [body], ins, (), (*loops, *own), "a shard")
        self.logs.refuse(eqn)
        if (outs := follow(eqn, ins) or with_numbers(eqn, ins, known, loops)) is not None:
            return outs
        if name == "dot_general" and all(ins):
            self._note(_one_of_two(eqn, ins), "dot_general: a product of two parameters", False)
            return nothing
        if name in SITES:
            try:
                around = tuple(x for x in loops if varies(eqn.outvars[0].aval, x))
                site = SITES[name](eqn, ins, around)
                site.keys = [self._kept(eqn.invars[i], around) for i in site.kept]
                plan.sites[id(eqn)] = str(next(self._keys)), site
            except NoRule as why:
                odd = ins if why.only is None else [ins[k] for k in why.only]
                self._note(odd, f"{name}: {why}", False)
            return nothing
        return self._unknown(eqn, ins)

    def _kept(self, var: Any, loops: tuple[Loop, ...]) -> str:
        """The name of what is kept of a variable, in these loops. (A constant has no other.)"""
        if isinstance(var, jex.Literal):
            return f"kept {next(self._keys)}"
        return self._names.setdefault((var, loops), f"kept {next(self._keys)}")

    def _unknown(self, eqn: Any, ins: list[Value]) -> list[Value]:
        """What is neither a view nor a site."""
        self._note(ins, eqn.primitive.name, eqn.primitive.name in ENTRYWISE)
        return [()] * len(eqn.outvars)

    def _scan(self, plan: Plan, eqn: Any, ins: Values, known: Numbers, loops: Loops) -> Values:
        consts, carry = _compat.scan_arity(eqn.params)
        body = inner(eqn.params["jaxpr"])
        same = carried_unchanged(body, consts, carry)
        kept = [value if k in same else () for k, value in enumerate(ins[consts:][:carry])]
        lost = [value for k, value in enumerate(ins[consts:][:carry]) if k not in same]
        self._note(lost, "a value that a loop changes", False)
        loop = Loop(next(self._loops), eqn.params["length"])
        xs = [picked(value, loop.number) for value in ins[consts + carry :]]
        depth = len(loops)
        numbers = [
            *known[:consts],
            *(
                x if k in same else known_numbers.carried(eqn, k, x, depth)
                for k, x in enumerate(known[consts : consts + carry])
            ),
            *(known_numbers.iterated(x, depth) for x in known[consts + carry :]),
        ]
        found = self.jaxpr(body, [*ins[:consts], *kept, *xs], (*loops, loop), numbers)
        plan.bodies[id(eqn)] = {id(body): found}
        made = [value for k, value in enumerate(found.outs) if k not in same]
        self._note(made, "a loop that returns it", False)
        return [*kept, *[()] * (len(eqn.outvars) - carry)]

    def _bodies(
        self, plan: Plan, eqn: Any, bodies: list[Any], ins: Any, known: Any, loops: Any, what: str
    ) -> list[Value]:
        """The plans of bodies that give on nothing but numbers."""
        found = {id(b): self.jaxpr(b, ins, loops, known) for b in bodies}
        plan.bodies[id(eqn)] = found
        for body in found.values():
            self._note(body.outs, f"{what} that returns it", False)
        return [()] * len(eqn.outvars)

    def _holds_ragged(self, eqn: Any) -> bool:
        """Whether there is a ragged product in a body that can be run anew."""
        name = eqn.primitive.name
        if name == "ragged_dot_general":
            return True
        if name not in ("cond", "scan", *ENTERED):
            return False
        bodies = (
            eqn.params["branches"] if name == "cond" else [eqn.params[ENTERED.get(name, "jaxpr")]]
        )
        for body in map(inner, bodies):
            if id(body) not in self._ragged:
                self._ragged[id(body)] = any(map(self._holds_ragged, body.eqns))
        return any(self._ragged[id(inner(body))] for body in bodies)

    def _note(self, values: Sequence[Value], reason: str, elementwise: bool) -> None:
        for part in (part for value in values for part in value):
            self.uses.setdefault(part.param, []).append(Use(reason, elementwise, picks_of(part)))


def _one_of_two(eqn: Any, ins: list[Value]) -> list[Value]:
    """Of two parameters that are multiplied, those that are not followed: the smaller one alone,
    if that is cheaper, as with queries that are learned, times a matrix.
    """
    sizes = [v.aval.size for v in eqn.invars]
    return [ins[sizes.index(min(sizes))]] if eqn.outvars[0].aval.size <= max(sizes) else ins


def picks_of(part: Part) -> frozenset[tuple[int, int | None]]:
    """Which entries of which axes a part of a parameter is, if it is not all of them."""
    pinned = {(a.axis, a.start) for a in part.pinned if a.stride == 1 and a.full > 1}
    bound = {(a.axis, None) for b in part.bound for a in b.atoms if a.stride == 1 and a.full > 1}
    return frozenset(pinned | bound)


def axes_of(picks: Iterable[tuple[int, int | None]]) -> frozenset[int]:
    return frozenset(axis for axis, _ in picks)
