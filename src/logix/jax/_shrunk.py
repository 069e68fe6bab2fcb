"""Projections inside of loops over layers.

What is kept of an iteration of a scan is held until the last one is done, and then the vectors of
all layers are there at the same time: more than the whole backward pass needs, of a model that is
rematerialised. Where gradients are compressed, it is enough to hold each layer's projected vectors:

    shrunk(plan, …)   the plan with such sites in place of those that are in loops over layers

What goes into a matrix is projected where it is seen. The gradient of what comes out is projected
in the backward pass: the slot has the size of the projected one, and its derivative is the
projection.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._compress import Projector
from .._record import Outer
from ._arrange import Form, Stack, names, ordered
from ._names import filled_in
from ._plan import Plan
from ._site import Matrix, Site
from ._stacks import matrices, projected, wide
from ._view import Part

Array = Any


def shrunk(
    plan: Plan, paths: Sequence[str], forms: Mapping[int, Form], how: Projector
) -> tuple[Plan, dict[str, Array]]:
    """The plan whose sites project what they can, and the arrays that have to be given to them."""
    if how.settings.kind != "logra":
        return plan, {}
    given: dict[str, Array] = {}

    def site(key: str, old: Site) -> Site:
        if (part := _layer(old, forms)) is None:
            return old
        layers = [filled_in(paths[part.param] + n) for n in names("", part, old.blocks(part))]
        assert isinstance(old, Matrix)
        new = Shrunk(old, part, key, layers, how)
        given.update(new.matrices)
        return new if new.matrices else old

    def each(plan: Plan) -> Plan:
        sites = {i: (key, site(key, old)) for i, (key, old) in plan.sites.items()}
        bodies = {i: {k: each(b) for k, b in own.items()} for i, own in plan.bodies.items()}
        return dataclasses.replace(plan, sites=sites, bodies=bodies)

    return each(plan), given


def _layer(site: Site, forms: Mapping[int, Form]) -> Part | None:
    """The one part of a site's value, if each of the loops around it goes over layers of it."""
    if not isinstance(site, Matrix) or not site.apart or not site.loops or len(site.value) != 1:
        return None
    [part], [own] = site.value, site.forms
    bound = {b.loop: b for b in part.bound}
    if own != forms[part.param] or any(x.axis or x.number not in bound for x in site.loops):
        return None
    over = [bound[loop.number] for loop in site.loops]
    atoms = [a for b in over for a in b.atoms]
    inside = ordered(site.blocks(part))
    in_order = [*atoms, *inside] == sorted([*atoms, *inside], key=lambda a: a.place)
    if not in_order or any(b.start or not b.atoms for b in over) or any(a.flipped for a in atoms):
        return None
    layers = len(names("", part, site.blocks(part)))
    each = len(names("", dataclasses.replace(part, bound=()), site.blocks(part)))
    return part if layers == each * math.prod(x.length for x in site.loops) and layers > 1 else None


class Shrunk(Site):
    """A site in loops over layers; `one` is that of an iteration."""

    def __init__(self, site: Matrix, part: Part, key: str, layers: Sequence[str], how: Projector):
        self.eqn, self.value, self.loops = site.eqn, site.value, site.loops
        self.forms, self.rule, self.kept = site.forms, site.rule, site.kept
        self.one, self.part = copy.copy(site), dataclasses.replace(part, bound=())
        self.one.loops = ()
        shape = lambda v: jax.ShapeDtypeStruct((1, *v.aval.shape), v.aval.dtype)
        inputs = lambda *kept: self.one.inputs(self.part, list(kept))
        a = jax.eval_shape(inputs, *(shape(site.eqn.invars[i]) for i in site.kept))
        y = jax.ShapeDtypeStruct(site.eqn.outvars[0].aval.shape, site.eqn.outvars[0].aval.dtype)
        g = jax.eval_shape(self._outputs, y)
        # Handed in with an axis for each loop, as slots are; those of one iteration are used in it.
        self.matrices: dict[str, Array] = {}
        self.sides: list[str] = []
        sizes = [loop.length for loop in site.loops]
        for side, x in (("right", a), ("left", g)):
            found = matrices(layers, side, jax.eval_shape(wide, x), how)
            if found is not None:  # else this side is small enough
                self.matrices[f"{key} {side}"] = found.reshape(*sizes, -1, *found.shape[1:])
                self.sides.append(side)
        self.given = list(self.matrices)
        has_real = jax.eval_shape(self.one.real, a) is not None
        self.keys = [f"{key} in", *[f"{key} real"] * has_real]
        kind = lambda m: jax.ShapeDtypeStruct(m.shape[len(sizes) :], m.dtype)
        self.outs = [jax.eval_shape(self._small, y, list(map(kind, self.matrices.values())))]

    def keep(self, args: list[Array], given: list[Array]) -> list[Array]:
        a = self.one.inputs(self.part, [args[i][None] for i in self.kept])
        real = self.one.real(a)
        small = projected(a, dict(zip(self.sides, given)).get("right"))
        return [small[:, 0]] if real is None else [small[:, 0], real[:, 0]]

    def _outputs(self, g: Array) -> Array:
        out = self.one.outputs(self.part, g[None])
        return out if self.part.scale == 1 else out * self.part.scale

    def _small(self, g: Array, given: list[Array]) -> Array:
        """(layers, places, rank) of the gradient of an output."""
        return projected(self._outputs(g), dict(zip(self.sides, given)).get("left"))[:, 0]

    def run(self, args: list[Array], slots: list[Array], given: list[Array]) -> list[Array]:
        @jax.custom_jvp
        def taken(y: Array, slot: Array, given: list[Array]) -> Array:
            return y

        @taken.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            y, _, given = primals
            small = lambda g: self._small(g, given)
            [more] = jax.linear_transpose(small, y)(tangents[1])
            return y, tangents[0] + more

        return [taken(self.one.output(args), slots[0], given)]

    def stacks(
        self, kept: list[Array], g: list[Array], paths: Sequence[str], wanted: Mapping[int, Form]
    ) -> list[Stack]:
        in_front = lambda x: jnp.moveaxis(x, 0, len(self.loops) + 1)
        together = lambda x: in_front(x).reshape(-1, x.shape[0], *x.shape[len(self.loops) + 2 :])
        a, gradient, *real = map(together, (kept[0], g[0], *kept[1:]))
        called = names(paths[self.part.param], self.value[0], self.one.blocks(self.part))
        return [Stack(called, Outer("", a, gradient, *real))]
