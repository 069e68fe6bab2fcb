"""The plan: which equations of a loss are sites of its parameters, before anything is run.

The jaxpr is read once from the parameters on. A value that is still a view of a parameter is
followed, into every construct that the interpreter can run with a new body (jit, remat, scan,
cond, shard_map). Where it is used, there is either a rule for it (`_sites`), or its parameter is
`direct`: it is differentiated as it is, for each example. That is exact everywhere, and as cheap as
can be for what is only added or multiplied, entry by entry.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jax.extend import core as jex

from lox import _compat

from ._arrange import Form
from ._entrywise import CALLS as ENTERED
from ._entrywise import ENTRYWISE, carried_unchanged, inner, multiplied_out
from ._logged import Logged, Logs
from ._ragged import contracted
from ._reached import reached
from ._shards import local, mesh_loops, varies
from ._site import Loop, NoRule, Site
from ._sites import SITES
from ._view import Part, Value, follow, parameter, picked

CALLS = {name: body for name, body in ENTERED.items() if name != "shard_map"}


@dataclasses.dataclass
class Plan:
    """What to do in one jaxpr, by `id` of its equations: they live as long as the jaxpr does."""

    sites: dict[int, tuple[str, Site]] = dataclasses.field(default_factory=dict)
    bodies: dict[int, dict[int, Plan]] = dataclasses.field(default_factory=dict)
    logged: dict[int, list[Logged]] = dataclasses.field(default_factory=dict)  # of outputs
    entered: list[Logged] = dataclasses.field(default_factory=list)  # of the jaxpr's own inputs
    mapped: set[int] = dataclasses.field(default_factory=set)  # ragged products with no parameter
    outs: list[Value] = dataclasses.field(default_factory=list)

    @property
    def idle(self) -> bool:
        """Whether all of it can be run as it is."""
        found = self.sites or self.logged or self.entered or self.mapped
        return not found and all(b.idle for bodies in self.bodies.values() for b in bodies.values())

    def all_sites(self) -> Iterator[tuple[str, Site]]:
        """Each once, in the order of the program, also those of bodies."""
        for key in dict.fromkeys((*self.sites, *self.bodies)):
            if key in self.sites:
                yield self.sites[key]
            for body in self.bodies.get(key, {}).values():
                yield from body.all_sites()

    def all_logged(self) -> Iterator[Logged]:
        yield from self.entered
        for key in dict.fromkeys((*self.logged, *self.bodies)):
            yield from self.logged.get(key, ())
            for body in self.bodies.get(key, {}).values():
                yield from body.all_logged()

    def slots(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """For each gradient that is wanted its shape, with the loops around it in front, and type.

        An axis for each loop comes first.
        """
        every = [(key, site.loops, site.out) for key, site in self.all_sites()]
        every += [(x.key, x.loops, x.aval) for x in self.all_logged() if x.differentiable]
        return {k: ((*(x.length for x in loops), *a.shape), a.dtype) for k, loops, a in every}

    def loops(self) -> dict[str, tuple[Loop, ...]]:
        every = [(key, site.loops) for key, site in self.all_sites()]
        return dict([*every, *((x.key, x.loops) for x in self.all_logged())])


@dataclasses.dataclass(frozen=True)
class Use:
    """Why a parameter is differentiated as it is, and which of its axes its uses pick from."""

    reason: str
    elementwise: bool
    picks: frozenset[tuple[int, int | None]] = frozenset()  # axis and entry; None: each in turn
    blocks: tuple[int, ...] = ()


class Planner:
    """One reading of a jaxpr; `direct` are the parameters that are not followed any more."""

    def __init__(self, direct: frozenset[int], logs: Logs):
        self.direct, self.logs = direct, logs
        self.uses: dict[int, list[Use]] = {}
        self._loops, self._keys = itertools.count(), itertools.count()
        self._ragged: dict[int, bool] = {}  # of bodies

    def jaxpr(self, jaxpr: Any, values: Sequence[Value], loops: tuple[Loop, ...]) -> Plan:
        plan, env = Plan(), dict(zip(jaxpr.invars, values, strict=True))
        read = lambda v: () if isinstance(v, jex.Literal) else env.get(v, ())
        plan.entered, plan.logged = self.logs.places(jaxpr, loops, self._keys)
        for eqn in jaxpr.eqns:
            ins = [read(v) for v in eqn.invars]
            if eqn.primitive.name == "ragged_dot_general" and not any(ins):
                plan.mapped |= {id(eqn)} if contracted(eqn) is not None else set()
            elif any(ins) or self.logs.inside(eqn) or self._holds_ragged(eqn):
                outs = self._equation(plan, eqn, ins, loops)
                env.update(zip(eqn.outvars, outs))
        plan.outs = [read(v) for v in jaxpr.outvars]
        return plan

    def _equation(
        self, plan: Plan, eqn: Any, ins: list[Value], loops: tuple[Loop, ...]
    ) -> list[Value]:
        name = eqn.primitive.name
        nothing: list[Value] = [()] * len(eqn.outvars)
        if name in CALLS:
            body = inner(eqn.params[CALLS[name]])
            found = self.jaxpr(body, ins, loops)
            plan.bodies[id(eqn)] = {id(body): found}
            return found.outs
        if name == "cond":
            bodies = [inner(b) for b in eqn.params["branches"]]
            return self._bodies(plan, eqn, bodies, ins[1:], loops, "a branch")
        if name == "scan":
            return self._scan(plan, eqn, ins, loops)
        if name == "shard_map" and eqn.params["check_vma"]:
            own = mesh_loops(eqn.params, self._loops)
            shards = [local(v, s, own) for v, s in zip(ins, eqn.params["in_specs"])]
            if None not in shards:
                ins, body = [s for s in shards if s is not None], inner(eqn.params["jaxpr"])
                return self._bodies(plan, eqn, [body], ins, (*loops, *own), "a shard")
        self.logs.refuse(eqn)
        if (outs := follow(eqn, ins)) is not None:
            return outs
        if name == "dot_general" and all(ins):
            self._note(_one_of_two(eqn, ins), "dot_general: a product of two parameters", False)
            return nothing
        if name in SITES:
            try:
                around = tuple(x for x in loops if varies(eqn.outvars[0].aval, x))
                plan.sites[id(eqn)] = str(next(self._keys)), SITES[name](eqn, ins, around)
            except NoRule as why:
                self._note(ins, f"{name}: {why}", False)
            return nothing
        self._note(ins, name, name in ENTRYWISE)
        return nothing

    def _scan(self, plan: Plan, eqn: Any, ins: list[Value], loops: tuple[Loop, ...]) -> list[Value]:
        consts, carry = _compat.scan_arity(eqn.params)
        body = inner(eqn.params["jaxpr"])
        same = carried_unchanged(body, consts, carry)
        kept = [value if k in same else () for k, value in enumerate(ins[consts:][:carry])]
        lost = [value for k, value in enumerate(ins[consts:][:carry]) if k not in same]
        self._note(lost, "a value that a loop changes", False)
        loop = Loop(next(self._loops), eqn.params["length"])
        xs = [picked(value, loop.number) for value in ins[consts + carry :]]
        found = self.jaxpr(body, [*ins[:consts], *kept, *xs], (*loops, loop))
        plan.bodies[id(eqn)] = {id(body): found}
        made = [value for k, value in enumerate(found.outs) if k not in same]
        self._note(made, "a loop that returns it", False)
        return [*kept, *[()] * (len(eqn.outvars) - carry)]

    def _bodies(
        self, plan: Plan, eqn: Any, bodies: list[Any], ins: Any, loops: Any, what: str
    ) -> list[Value]:
        """The plans of bodies that give on nothing but numbers."""
        found = {id(b): self.jaxpr(b, ins, loops) for b in bodies}
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
            self.uses.setdefault(part.param, []).append(Use(reason, elementwise, _picks(part)))


def _one_of_two(eqn: Any, ins: list[Value]) -> list[Value]:
    """Of two parameters that are multiplied, those that are not followed: the smaller one alone,
    if that is cheaper, as with queries that are learned, times a matrix.
    """
    sizes = [v.aval.size for v in eqn.invars]
    return [ins[sizes.index(min(sizes))]] if eqn.outvars[0].aval.size <= max(sizes) else ins


@dataclasses.dataclass
class Found:
    """All that is known of a loss and its parameters, by their numbers."""

    plan: Plan
    forms: dict[int, Form]  # of those with sites
    rules: dict[int, str]
    direct: dict[int, Use]
    unused: list[int]


def read(jaxpr: Any, params: int, shapes: dict[int, tuple[int, ...]], logs: Logs) -> Found:
    """The plan for a loss, whose first inputs are the parameters.

    `shapes`: of those that are watched, by number.
    """
    direct = {i: [Use("no entries", True)] for i, shape in shapes.items() if 0 in shape}
    while True:
        planner = Planner(frozenset(direct), logs)
        followed = {i: parameter(i, shape) for i, shape in shapes.items() if i not in direct}
        values = [followed.get(i, ()) for i in range(len(jaxpr.invars))]
        plan = planner.jaxpr(jaxpr, values, ())
        planner._note(plan.outs, "the loss itself", True)
        forms, rules, clash = _forms(plan)
        if not planner.uses and not clash:
            break
        direct |= {i: [Use("several uses that do not go together", False)] for i in clash}
        direct |= planner.uses
        for site in (site for _, site in plan.all_sites()):
            for part, own in zip(site.value, site.forms):
                if part.param in planner.uses:  # a matrix, of which something else is made too
                    reason = f"{planner.uses[part.param][0].reason} beside a {site.rule}"
                    turns = {
                        (a.axis, None) for a in own.blocks if a.axis not in _axes(_picks(part))
                    }
                    direct[part.param].append(Use(reason, False, _picks(part) | turns))
    met = multiplied_out(jaxpr, params, list(direct)) if direct else {}
    uses = {i: _summary(found, shapes[i], met.get(i)) for i, found in direct.items()}
    known = reached(jaxpr, {0}) & {*forms, *direct}
    unused = [i for i, shape in shapes.items() if i not in known and 0 not in shape]
    return Found(plan, forms, rules, uses, unused)


def _summary(uses: list[Use], shape: tuple[int, ...], met: str | None) -> Use:
    """One reason for all uses of a parameter. It is split over layers only if all uses do so.

    `met`: an operation that multiplies it out, after all.
    """
    blocks: tuple[int, ...] = ()
    if len({_axes(u.picks) for u in uses}) == 1:
        every = frozenset().union(*(u.picks for u in uses))
        whole = lambda axis: (
            (axis, None) in every or all((axis, k) in every for k in range(shape[axis]))
        )
        blocks = tuple(sorted(filter(whole, _axes(every))))
    matrix = 0 not in shape and sum(n > 1 for i, n in enumerate(shape) if i not in blocks) > 1
    odd = next((u for u in uses if not u.elementwise), None)
    if odd is None and met is not None:
        odd = Use(f"{uses[0].reason} and {met}", False)
    return Use((odd or uses[0]).reason, odd is None or not matrix, blocks=blocks)


def _picks(part: Part) -> frozenset[tuple[int, int | None]]:
    """Which entries of which axes a part of a parameter is, if it is not all of them."""
    pinned = {(a.axis, a.start) for a in part.pinned if a.stride == 1 and a.full > 1}
    bound = {(a.axis, None) for b in part.bound for a in b.atoms if a.stride == 1 and a.full > 1}
    return frozenset(pinned | bound)


def _axes(picks: Iterable[tuple[int, int | None]]) -> frozenset[int]:
    return frozenset(axis for axis, _ in picks)


def _forms(plan: Plan) -> tuple[dict[int, Form], dict[int, str], set[int]]:
    """One form for each parameter: that of a look-up, which can't be transposed, or its first."""
    forms: dict[int, Form] = {}
    rules: dict[int, str] = {}
    clash: set[int] = set()
    sites = [site for _, site in plan.all_sites()]
    for site in sorted(sites, key=lambda s: s.rule != "look-up"):
        for part, own in zip(site.value, site.forms):
            wanted = forms.setdefault(part.param, own)
            if own != wanted and not (own.swapped == wanted and site.rule == "product"):
                clash.add(part.param)
            known = rules.setdefault(part.param, site.rule)
            if site.rule not in known:
                rules[part.param] = f"{known}, {site.rule}"
    return forms, rules, clash
