"""All that is known of a loss: the plan for it, and the form of the gradient of each parameter."""

from __future__ import annotations

import dataclasses
from typing import Any

from ._arrange import Form
from ._entrywise import inner, multiplied_out
from ._known import constant
from ._logged import Logs
from ._plan import Plan, Use
from ._planner import Planner, axes_of, picks_of
from ._reached import reached
from ._turned import turned
from ._view import parameter


@dataclasses.dataclass
class Found:
    """All that is known of a loss and its parameters, by their numbers."""

    plan: Plan
    forms: dict[int, Form]  # of those with sites
    rules: dict[int, str]
    direct: dict[int, Use]
    turned: dict[int, Form]  # of those that are differentiated as they are, if it is known
    unused: list[int]
    traced: bool  # False: the loss has to be run itself, not its jaxpr


def read(
    closed: Any,
    params: int,
    shapes: dict[int, tuple[int, ...]],
    logs: Logs,
    why_not: str | None = None,
) -> Found:
    """The plan for a loss, whose first inputs are the parameters.

    `shapes`: of those that are watched, by number. `why_not`: why no rule can be used at all.
    """
    jaxpr = inner(closed)
    constants = dict(zip(jaxpr.constvars, map(constant, closed.consts)))
    direct = {i: [Use("no entries", True)] for i, shape in shapes.items() if 0 in shape}
    if why_not is not None:
        direct = {i: [Use(why_not, False)] for i in shapes}
    while True:
        planner = Planner(logs, constants)
        followed = {i: parameter(i, shape) for i, shape in shapes.items() if i not in direct}
        values = [followed.get(i, ()) for i in range(len(jaxpr.invars))]
        plan = planner.jaxpr(jaxpr, values, ())
        planner._note(plan.outs, "the loss itself", True)
        forms, rules, clash = plan.forms()
        if not planner.uses and not clash:
            break
        direct |= {i: [Use("several uses that do not go together", False)] for i in clash}
        direct |= planner.uses
        for site in (site for _, site in plan.all_sites()):
            for part, own in zip(site.value, site.forms):
                if part.param in planner.uses:  # a matrix, of which something else is made too
                    reason = f"{planner.uses[part.param][0].reason} beside a {site.rule}"
                    turns = {
                        (a.axis, None) for a in own.blocks if a.axis not in axes_of(picks_of(part))
                    }
                    direct[part.param].append(Use(reason, False, picks_of(part) | turns))
    met = multiplied_out(jaxpr, params, list(direct)) if direct else {}
    uses = {i: _summary(found, shapes[i], met.get(i)) for i, found in direct.items()}
    known = reached(jaxpr, {0}) & {*forms, *direct}
    unused = [i for i, shape in shapes.items() if i not in known and 0 not in shape]
    axes = turned(jaxpr, shapes, uses)
    for i, own in axes.items():
        layers = tuple(sorted({a.axis for a in own.blocks}))
        uses[i] = dataclasses.replace(uses[i], blocks=layers)
    return Found(plan, forms, rules, uses, axes, unused, why_not is None)


def _summary(uses: list[Use], shape: tuple[int, ...], met: str | None) -> Use:
    """One reason for all uses of a parameter. It is split over layers only if all uses do so.

    `met`: an operation that multiplies it out, after all.
    """
    blocks: tuple[int, ...] = ()
    if len({axes_of(u.picks) for u in uses}) == 1:
        every = frozenset().union(*(u.picks for u in uses))
        whole = lambda axis: (
            (axis, None) in every or all((axis, k) in every for k in range(shape[axis]))
        )
        blocks = tuple(sorted(filter(whole, axes_of(every))))
    matrix = 0 not in shape and sum(n > 1 for i, n in enumerate(shape) if i not in blocks) > 1
    odd = next((u for u in uses if not u.elementwise), None)
    if odd is None and met is not None:
        odd = Use(f"{uses[0].reason} and {met}", False)
    return Use((odd or uses[0]).reason, odd is None or not matrix, blocks=blocks)
