"""Where a parameter is used in a way whose gradient is known: what all such operations share.

    Site(eqn, value, loops)   at a product, convolution or look-up with a parameter
    site.kept                 which arguments have to be kept of the forward pass
    site.stacks(kept, g, …)   the records, from that and the gradient of the output

A site of a kind that an equation is not is refused with `NoRule`, and its parameters are then
differentiated as they are. `loops` are the loops around it, outermost first: what is kept, and the
gradient, have an axis for each in front, behind that of the examples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lox import _compat

from .._record import Outer
from ._arrange import PLACE, Form, Role, Stack, names, scaled, swapped
from ._view import Atom, Part, Value

Array = Any
EXAMPLE = Role("example")


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop around an equation; `axis`: of a mesh, whose shards are its iterations."""

    number: int
    length: int
    axis: str | None = None


Loops = Sequence[Loop]


class NoRule(Exception):
    """The equation uses a parameter in another way; `only`: the numbers of these arguments."""

    def __init__(self, why: str, only: Sequence[int] | None = None):
        super().__init__(why)
        self.only = only


@jax.custom_jvp
def taken(y: Array, slot: Array) -> Array:
    """An output as it is, whose gradient is that of the slot too."""
    return y


@taken.defjvp
def _taken_jvp(primals: Any, tangents: Any) -> Any:
    return primals[0], tangents[0] + tangents[1]


class Site:
    """The common part. `forms`: of each part of the value, in its order."""

    rule: str
    kept: list[int]  # the arguments that have to be kept of the forward pass
    keys: list[str]  # their names there: what several sites keep is kept once
    forms: list[Form]
    outs: list[Any]  # the shapes and types of the gradients that are wanted of the backward pass
    given: Sequence[str] = ()  # names of what else is handed in, by the state that has the slots

    def __init__(self, eqn: Any, value: Value, loops: Loops, outs: list[Any] | None = None):
        self.eqn, self.value, self.loops = eqn, value, tuple(loops)
        self.outs = [eqn.outvars[0].aval] if outs is None else outs
        if not all(jnp.issubdtype(x.dtype, jnp.inexact) for x in self.outs):
            raise NoRule("an integer result")
        self.forms = [self.form(part) for part in value]

    def form(self, part: Part) -> Form:
        raise NotImplementedError

    def record(self, part: Part, kept: list[Array], g: Any, own: Form) -> Stack:
        raise NotImplementedError

    def slots(self, key: str) -> list[str]:
        """Names of the slots for these gradients."""
        return [f"{key}.{n}" for n in range(len(self.outs))]

    def keep(self, args: list[Array], given: list[Array]) -> list[Array]:
        """What is kept of the forward pass, by its names."""
        return [args[i] for i in self.kept]

    def run(self, args: list[Array], slots: list[Array], given: list[Array]) -> list[Array]:
        """What the equation gives; the gradients of slots are those that are wanted."""
        return [taken(self.output(args), slots[0])]

    def output(self, args: list[Array]) -> Array:
        """What the equation gives, in a way that can be mapped over examples."""
        return _compat.bind(self.eqn, args)[0]

    def front(self, part: Part) -> list[Role]:
        """The roles of the axes in front: examples, loops."""
        bound = {b.loop: b for b in part.bound}
        loops = [
            Role("block", bound[n].atoms, bound[n].start) if n in bound else PLACE
            for n in (loop.number for loop in self.loops)
        ]
        return [EXAMPLE, *loops]

    def blocks(self, part: Part) -> list[Atom]:
        """Axes of the value that are over layers."""
        return []

    def stacks(
        self, kept: list[Array], g: list[Array], paths: Sequence[str], wanted: Mapping[int, Form]
    ) -> list[Stack]:
        """Records of all parts; `wanted` is the form of each parameter, which may be transposed."""
        out = []
        for part, own in zip(self.value, self.forms):
            made = self.record(part, kept, g, own)
            record = made.record if part.scale == 1 else scaled(made.record, part.scale)
            if own != wanted[part.param]:
                record = swapped(record)
            bound = {b.loop for b in part.bound}
            shared = tuple(x.length for x in self.loops if x.number not in bound)
            layers = tuple(paths[part.param] + n for n in made.names)
            out.append(Stack(layers, record, shared))
        return out


class Matrix(Site):
    """A site where a matrix is applied to vectors: those that go in and the gradients of those that
    come out, each alone, as (layers, examples, places, entries).
    """

    apart: bool = True  # whether the gradient is a product of the two

    def inputs(self, part: Part, kept: list[Array]) -> Array:
        raise NotImplementedError

    def outputs(self, part: Part, g: Array) -> Array:
        raise NotImplementedError

    def real(self, a: Array) -> Array | None:
        """The places that count, of (layers, examples, places)."""
        return None

    def record(self, part: Part, kept: list[Array], g: list[Array], own: Form) -> Stack:
        a = self.inputs(part, kept)
        record = Outer("", a, self.outputs(part, g[0]), self.real(a))
        return Stack(names("", part, self.blocks(part)), record)
