"""Sites of matrix products: `dot_general` and `ragged_dot_general`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from .._record import Outer
from . import _ragged as ragged
from ._arrange import PLACE, Form, Role, Stack, arrange, form, names
from ._site import Loops, Matrix, NoRule, Site
from ._view import Atom, Part, Value

Array = Any


class Product(Matrix):
    """A matrix product with a parameter on either side, over any axes, batched or not."""

    rule = "product"

    def __init__(self, eqn: Any, values: list[Value], loops: Loops):
        left, right = values
        self.at = 0 if left else 1
        self.kept = [1 - self.at]
        contract, batch = eqn.params["dimension_numbers"]
        self.contract, self.batch = contract[self.at], batch[self.at]
        self.x_contract, self.x_batch = contract[1 - self.at], batch[1 - self.at]
        w, x = (eqn.invars[i].aval.ndim for i in (self.at, 1 - self.at))
        self.free = [d for d in range(w) if d not in (*self.contract, *self.batch)]
        self.x_free = [d for d in range(x) if d not in (*self.x_contract, *self.x_batch)]
        super().__init__(eqn, left or right, loops)
        if self.batch and any(not own.left and not own.right for own in self.forms):
            raise NoRule("every entry by itself")  # a scale: no matrix, and not a layer for each

    def form(self, part: Part) -> Form:
        of = lambda axes: [a for d in axes for a in part.dims[d]]
        return form(part, of(self.batch), of(self.free), of(self.contract))

    def blocks(self, part: Part) -> list[Atom]:
        return [a for d in self.batch for a in part.dims[d]]

    def inputs(self, part: Part, kept: list[Array]) -> Array:
        roles: dict[int, Role] = dict.fromkeys(self.x_free, PLACE)
        roles |= {k: Role.of("block", part, d) for k, d in zip(self.x_batch, self.batch)}
        roles |= {k: Role.of("side", part, d) for k, d in zip(self.x_contract, self.contract)}
        return arrange(kept[0], [*self.front(part), *(roles[k] for k in range(len(roles)))])

    def outputs(self, part: Part, g: Array) -> Array:
        blocks = [Role.of("block", part, d) for d in self.batch]
        free = [Role.of("side", part, d) for d in self.free]
        places = [PLACE] * len(self.x_free)
        order = [*free, *places] if self.at == 0 else [*places, *free]
        return arrange(g, [*self.front(part), *blocks, *order])

    def real(self, a: Array) -> Array | None:
        # An expert sees some of the places only: at the others there are zeros, which don't count.
        return (a != 0).any(-1) if self.batch else None


class RaggedProduct(Site):
    """`lax.ragged_dot`: rows of one matrix, each times one of several matrices."""

    rule = "ragged product"

    def __init__(self, eqn: Any, values: list[Value], loops: Loops):
        found = ragged.contracted(eqn)
        if values[0] or values[2] or found is None:
            raise NoRule("a ragged product of another kind")
        self.contract = found
        super().__init__(eqn, values[1], loops)

    def output(self, args: list[Array]) -> Array:
        return ragged.run(self.eqn, args)

    def form(self, part: Part) -> Form:
        left = part.dims[3 - self.contract]
        return form(part, part.dims[0], left, part.dims[self.contract])

    kept = [0, 2]

    def record(self, part: Part, kept: list[Array], gs: list[Array], own: Form) -> Stack:
        [g] = gs
        x, sizes = kept
        front = self.front(part)
        # Which matrix each row was for: an axis over them, behind the loops.
        mine = ragged.groups(sizes, x.shape[-2])
        role = lambda d: Role.of("side", part, d)
        block = Role.of("block", part, 0)
        apart = lambda y: jnp.where(mine[..., None], y[..., None, :, :], 0)
        a = arrange(apart(x), [*front, block, PLACE, role(self.contract)])
        g = arrange(apart(g), [*front, block, PLACE, role(3 - self.contract)])
        real = arrange(mine[..., None], [*front, block, PLACE, Role("side")])[..., 0]
        return Stack(names("", part, part.dims[0]), Outer("", a, g, real))
