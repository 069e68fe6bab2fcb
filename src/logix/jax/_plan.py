"""What is to be done in a jaxpr to get the gradients of its parameters: data alone, no work.

`_planner` makes it, `_follow` runs a program by it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ._arrange import Form
from ._logged import Logged
from ._site import Loop, Site
from ._view import Value


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
        every = [
            (name, site.loops, out)
            for key, site in self.all_sites()
            for name, out in zip(site.slots(key), site.outs)
        ]
        every += [(x.key, x.loops, x.aval) for x in self.all_logged() if x.differentiable]
        return {k: ((*(x.length for x in loops), *a.shape), a.dtype) for k, loops, a in every}

    def handed(self) -> list[str]:
        """The names of all that is handed in: slots, and what sites are given."""
        return [*self.slots(), *(name for _, site in self.all_sites() for name in site.given)]

    def kept(self) -> list[str]:
        """The names of all that is kept of the forward pass."""
        every = [name for _, site in self.all_sites() for name in site.keys]
        return list(dict.fromkeys([*every, *(x.key for x in self.all_logged())]))

    def loops(self) -> dict[str, tuple[Loop, ...]]:
        sites = self.all_sites()
        names = lambda key, x: (*x.keys, *x.slots(key), *x.given)
        every = [(name, x.loops) for key, x in sites for name in names(key, x)]
        return dict([*every, *((x.key, x.loops) for x in self.all_logged())])

    def forms(self) -> tuple[dict[int, Form], dict[int, str], set[int]]:
        """One form for each parameter, its rules, and those whose uses do not go together.

        The form is that of a look-up, which can't be transposed, or of the first use.
        """
        forms: dict[int, Form] = {}
        rules: dict[int, str] = {}
        clash: set[int] = set()
        sites = [site for _, site in self.all_sites()]
        for site in sorted(sites, key=lambda s: s.rule != "look-up"):
            for part, own in zip(site.value, site.forms):
                wanted = forms.setdefault(part.param, own)
                if own != wanted and not (own.swapped == wanted and site.rule == "product"):
                    clash.add(part.param)
                known = rules.setdefault(part.param, site.rule)
                if site.rule not in known:
                    rules[part.param] = f"{known}, {site.rule}"
        return forms, rules, clash


@dataclasses.dataclass(frozen=True)
class Use:
    """Why a parameter is differentiated as it is, and which of its axes its uses pick from."""

    reason: str
    elementwise: bool
    picks: frozenset[tuple[int, int | None]] = frozenset()  # axis and entry; None: each in turn
    blocks: tuple[int, ...] = ()
