"""Which rule took each parameter of a loss, its share of all parameters, and what it costs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ._found import Found
from ._names import Watched


@dataclasses.dataclass(frozen=True)
class Taken:
    """One parameter. `cost`: the values that are held for one example to make its gradient."""

    path: str
    rule: str
    values: int
    cost: int
    fallback: bool


@dataclasses.dataclass(frozen=True)
class Coverage:
    """All of them; as text, a table."""

    taken: tuple[Taken, ...]
    total: int  # values of all parameters, watched or not

    @property
    def covered(self) -> int:
        return sum(t.values for t in self.taken)

    @property
    def fallbacks(self) -> list[str]:
        """Parameters whose gradients are made whole, and why."""
        return [f"{t.path} ({t.rule})" for t in self.taken if t.fallback]

    def summary(self) -> str:
        n, share = len(self.taken), 100 * self.covered / max(1, self.total)
        what = "1 parameter array" if n == 1 else f"{n} parameter arrays"
        text = f"{what}, {self.covered:,} of {self.total:,} values ({share:.1f}%)"
        if found := self.fallbacks:
            more = " …" if len(found) > 5 else ""
            text += f"; gradients made whole for each example: {', '.join(found[:5])}{more}"
        return text

    def __str__(self) -> str:
        width = max(len(t.path) for t in self.taken)
        lines = [f"{'parameter':{width}}  {'values':>12}  {'share':>6}  {'held/example':>12}  rule"]
        for t in self.taken:
            share = f"{100 * t.values / max(1, self.total):.1f}%"
            lines.append(f"{t.path:{width}}  {t.values:12,}  {share:>6}  {t.cost:12,}  {t.rule}")
        return "\n".join(lines)

    __repr__ = __str__


def coverage(found: Found, watched: Watched, params: Any) -> Coverage:
    """The report on what `read` has found."""
    sizes = [math.prod(x.shape) for x in watched.arrays(params)]
    cost: dict[int, int] = {}
    for _, site in found.plan.all_sites():
        times = math.prod(loop.length for loop in site.loops)
        arrays = [*site.outs, *(site.eqn.invars[i].aval for i in site.kept)]
        held = sum(math.prod(x.shape) for x in arrays)
        for i in {part.param for part in site.value}:
            cost[i] = cost.get(i, 0) + times * held
    taken = []
    for i in watched.chosen:
        if i in found.direct:
            use = found.direct[i]
            rule = "elementwise" if use.elementwise else f"vmap(grad), because of {use.reason}"
            taken.append(Taken(watched.paths[i], rule, sizes[i], sizes[i], not use.elementwise))
        else:
            taken.append(Taken(watched.paths[i], found.rules[i], sizes[i], cost.get(i, 0), False))
    return Coverage(tuple(taken), sum(sizes))
