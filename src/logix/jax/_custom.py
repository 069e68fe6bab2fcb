"""Sites of functions with a derivative of their own (`custom_jvp`, `custom_vjp`).

What such a function computes says nothing about its derivative, so it is not looked into. Its
backward pass is: there the gradient of a matrix is a product of two arrays, of which one does not
depend on what comes from behind. Those two are handed out, as gradients of two slots, and the
product is left out.
"""

from __future__ import annotations

from typing import Any

import jax

from lox import _compat

from .._record import Outer
from ._arrange import PLACE, Form, Role, Stack, arrange, form, names
from ._backward import Backward, evaluate, factors, real
from ._site import Loops, NoRule, Site
from ._view import Part, Value

Array = Any


class Custom(Site):
    """A call with matrices among its arguments."""

    rule = "product"
    kept: list[int] = []

    def __init__(self, eqn: Any, values: list[Value], loops: Loops):
        matrices = [sum(n > 1 for n in p.sizes) > 1 for value in values for p in value]
        if not any(matrices) or any(loop.axis for loop in loops) or eqn.params["symbolic_zeros"]:
            raise NoRule("a derivative of its own")
        self.eqn, self.args = eqn, [k for k, value in enumerate(values) if value]
        self.backward = Backward(eqn)
        self.real, kinds = self.backward.real, self.backward.kinds
        if not set(self.args) <= set(self.real):
            raise NoRule("a derivative of its own, of what it closes over")
        try:
            back = self.backward.jaxpr()
        except Exception as error:  # as it may be where only some arguments have a gradient
            raise NoRule("a derivative of its own") from error
        found = {k: factors(back.jaxpr, self.real.index(k), len(kinds)) for k in self.args}
        if odd := [k for k, x in found.items() if x is None]:
            raise NoRule("a derivative of its own, which is no product", odd)
        self.factors = {k: x for k, x in found.items() if x is not None}
        self.of = {id(p): k for k in self.args for p in values[k]}
        if len(self.of) < sum(map(len, values)):
            raise NoRule("a derivative of its own, for two arguments that are the same")
        slots = [
            jax.ShapeDtypeStruct(shape, v.aval.dtype)
            for own in self.factors.values()
            for v, shape in zip(own.variables, own.shapes())
        ]
        super().__init__(eqn, tuple(p for k in self.args for p in values[k]), loops, slots)

    def run(self, args: list[Array], slots: list[Array], given: list[Array]) -> list[Array]:
        @jax.custom_vjp
        def call(args: list[Array], slots: list[Array]) -> list[Array]:
            return _compat.bind(self.eqn, args)

        def backward(args: list[Array], every: list[Array]) -> Any:
            g = real(every)
            closed = jax.make_jaxpr(self.backward)(args, g)
            back, n = closed.jaxpr, len(args)
            mine = {k: factors(back, self.real.index(k), n) for k in self.args}
            assert all(x is not None for x in mine.values())
            parts = [(v, o) for x in mine.values() if x for v, o in zip(x.variables, x.orders)]
            others = [k for k in self.real if k not in self.args]
            wanted = [*(v for v, _ in parts), *(back.outvars[self.real.index(k)] for k in others)]
            values = evaluate(closed, wanted, [*args, *g])
            of_slots = [x.transpose(order) for x, (_, order) in zip(values, parts)]
            of_args: list[Any] = [None] * n
            for k, x in zip(others, values[len(parts) :]):
                of_args[k] = x
            return of_args, of_slots

        call.defvjp(lambda args, slots: (_compat.bind(self.eqn, args), args), backward)
        return call(args, slots)

    def form(self, part: Part) -> Form:
        own = self.factors[self.of[id(part)]]
        of = lambda axes: [a for d in axes if d is not None for a in part.dims[d]]
        return form(part, of(own.batch), of(own.free[1]), of(own.free[0]))

    def record(self, part: Part, kept: list[Array], g: list[Array], form: Form) -> Stack:
        k = self.of[id(part)]
        own, at = self.factors[k], 2 * list(self.factors).index(k)
        role = lambda kind, axes: [
            Role(kind) if d is None else Role.of(kind, part, d) for d in axes
        ]
        front = [*self.front(part), *role("block", own.batch)]
        a, g_out = (
            arrange(x, [*front, *[PLACE] * (x.ndim - len(front) - len(free)), *role("side", free)])
            for x, free in zip(g[at : at + 2], own.free)
        )
        blocks = [x for d in own.batch if d is not None for x in part.dims[d]]
        real = (a != 0).any(-1) if own.batch else None
        a = a if own.scale == 1 else a * own.scale
        return Stack(names("", part, blocks), Outer("", a, g_out, real))
