"""Sites of look-ups: rows of a table, picked by numbers (`gather`) or by one (`dynamic_slice`)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from .._record import Lookup
from ._arrange import PLACE, Form, Role, Stack, arrange, form, names
from ._site import Loops, NoRule, Site
from ._view import Part, Value

Array = Any
Mode = lax.GatherScatterMode


class LookUp(Site):
    """Whole rows of a table, one or several in a row for each number; one table for each batch."""

    rule = "look-up"

    def __init__(self, eqn: Any, values: list[Value], loops: Loops):
        table, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
        if any(values[1:]):
            raise NoRule("a look-up at places that depend on a parameter")
        every = tuple(range(len(table)))
        collapsed: tuple[int, ...] = ()
        tables: tuple[int, ...] = ()
        own: tuple[int, ...] = ()
        if eqn.primitive.name == "dynamic_slice":
            self.mode, indexed, offset = Mode.CLIP, every, every
        else:
            numbers = eqn.params["dimension_numbers"]
            self.mode, indexed = eqn.params["mode"], numbers.start_index_map
            collapsed, offset = numbers.collapsed_slice_dims, numbers.offset_dims
            tables, own = numbers.operand_batching_dims, numbers.start_indices_batching_dims
        # Of an axis that is taken whole, the place it is taken from is always 0.
        known = self.mode == Mode.CLIP
        axes = [d for d in indexed if not (known and sizes[d] == table[d])]
        if len(axes) != 1:
            raise NoRule("a look-up by several numbers")
        [self.axis], self.tables = axes, tables
        self.others = [d for d in every if d != self.axis and d not in tables]
        if any(sizes[d] != table[d] for d in self.others):
            raise NoRule("a look-up of a part of a row")
        if sum(table[d] > 1 for d in self.others) > 1:
            raise NoRule("a look-up of matrices")  # a product with one of them may follow
        self.rows, self.taken = table[self.axis], sizes[self.axis]
        self.column = list(indexed).index(self.axis)
        self.kept = [1 + self.column] if eqn.primitive.name == "dynamic_slice" else [1]
        # What each axis of the output is: of the rows' own, over tables, or over places.
        left = [d for d in every if d not in (*collapsed, *tables)]
        of = dict(zip(offset, left))
        batch = dict(zip(own, tables))
        numbers_of_index = iter(range(len(table) + eqn.invars[1].aval.ndim))
        self.roles: list[tuple[str, int]] = []
        for k in range(eqn.outvars[0].aval.ndim):
            if k in of:
                self.roles.append(("row", 0) if of[k] == self.axis else ("side", of[k]))
            else:
                n = next(numbers_of_index)
                self.roles.append(("block", batch[n]) if n in batch else ("place", 0))
        super().__init__(eqn, values[0], loops)

    def form(self, part: Part) -> Form:
        atoms = part.dims[self.axis]
        whole = list(atoms) == sorted(atoms, key=lambda a: a.place)
        whole &= all(a.size == a.full for a in atoms)
        if (len(atoms) > 1 and not whole) or any(a.flipped for a in atoms):
            raise NoRule("a look-up in a part of a table")
        blocks = [a for d in self.tables for a in part.dims[d]]
        return form(part, blocks, atoms, [a for d in self.others for a in part.dims[d]])

    def record(self, part: Part, kept: list[Array], gs: list[Array], own: Form) -> Stack:
        [g] = gs
        front = self.front(part)
        i = kept[0] if kept[0].ndim == len(front) else kept[0][..., self.column]
        i = i.astype(jnp.promote_types(i.dtype, jnp.int32))  # uint8 has no number 256
        inside = (i >= 0) & (i <= self.rows - self.taken)
        i = jnp.clip(i, 0, self.rows - self.taken)
        kinds = [kind for kind, _ in self.roles if kind != "side"]
        if "row" in kinds:
            at = len(front) + kinds.index("row")
            step = jnp.arange(self.taken, dtype=i.dtype)
            step = step.reshape(-1, *[1] * (i.ndim - at))
            i, inside = jnp.expand_dims(i, at) + step, jnp.expand_dims(inside, at)
        # Where the parameter is in the table, if there are others beside it.
        first, size = part.starts[self.axis], part.sizes[self.axis]
        mine = (i >= first) & (i < first + size)
        if self.mode != Mode.CLIP:
            mine &= inside  # what is outside has no row
        atoms = part.dims[self.axis]
        shift = (atoms[0].start if len(atoms) == 1 else 0) - first
        rows = atoms[0].full if len(atoms) == 1 else size
        i = jnp.clip(i + shift, 0, rows - 1)

        role = lambda d, kind: Role.of(kind, part, d)
        roles = [PLACE if k in ("row", "place") else role(d, k) for k, d in self.roles]
        shared = [r for r in roles if r.kind != "side"]
        g = arrange(g, [*front, *roles])
        number = lambda x: arrange(x[..., None], [*front, *shared, Role("side")])[..., 0]
        i, mine = number(i), number(jnp.broadcast_to(mine, i.shape))
        blocks = [a for d in self.tables for a in part.dims[d]]
        g = jnp.where(mine[..., None], g, 0)
        return Stack(names("", part, blocks), Lookup("", i, g, rows))
