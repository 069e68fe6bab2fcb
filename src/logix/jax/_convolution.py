"""Sites of convolutions: the kernel is a matrix, applied to the patches it sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from .._record import Outer, Whole
from ._arrange import PLACE, Form, Role, Stack, arrange, form, names
from ._site import Loops, NoRule, Site
from ._view import Atom, Part, Value

Array = Any


class Convolution(Site):
    """A convolution with a parameter as its kernel."""

    rule = "convolution"

    def __init__(self, eqn: Any, values: list[Value], loops: Loops):
        if values[0] or eqn.params["batch_group_count"] != 1:
            raise NoRule("a convolution of another kind")
        self.groups = eqn.params["feature_group_count"]
        self.numbers = eqn.params["dimension_numbers"]
        super().__init__(eqn, values[1], loops)
        kernel = eqn.invars[1].aval.shape
        if len(values[1]) > 1 or not values[1][0].covers(kernel):
            raise NoRule("a kernel made of several parameters")

    def form(self, part: Part) -> Form:
        out, into, *space = self.numbers.rhs_spec
        found = form(part, (), part.dims[out], ())
        right = tuple(a for d in (into, *space) for a in part.dims[d])
        if any(a.size != a.full for a in (*right, *part.dims[out])):
            raise NoRule("a part of a kernel")
        # Channels first, then the kernel's own axes: the order does not depend on the library.
        return Form(found.blocks, found.left, (*right, *_marks(self.groups)))

    kept = [0]

    def record(self, part: Part, kept: list[Array], g: Array, own: Form) -> Stack:
        out, into, *space = self.numbers.rhs_spec
        kernel = self.eqn.invars[1].aval.shape
        front = self.front(part)
        lead = kept[0].shape[: len(front)]
        merged = kept[0].reshape(-1, *kept[0].shape[len(front) :])
        patches = jnp.asarray(self._patches(merged, [kernel[d] for d in space]))
        a = patches.reshape(*lead, *patches.shape[1:])  # (…, N, places …, channels · kernel)
        g = jnp.moveaxis(g, len(front) + self.numbers.out_spec[1], -1)
        g = jnp.moveaxis(g, len(front) + _before(self.numbers.out_spec), len(front))
        ndim = a.ndim - len(front) - 1
        roles = [*front, *[PLACE] * ndim]
        if self.groups == 1:
            dims = [part.dims[d] for d in (into, *space)]
            side = Role("side", tuple(x for dim in dims for x in dim))
            a = arrange(a, [*roles, side], side.atoms)
            g = arrange(g, [*roles, Role("side", part.dims[out])])
            return Stack(names("", part, ()), Outer("", a, g))
        # A group of outputs sees only its own inputs: no outer product of all with all.
        every = lambda x: arrange(
            x, [*roles, Role("side", (Atom(0, 1, *(x.shape[-1], 0, x.shape[-1])),))]
        )
        split = lambda x: x.reshape(*x.shape[:3], self.groups, -1)
        wide = jnp.promote_types(g.dtype, jnp.float32)
        how: Any = dict(precision="highest", preferred_element_type=wide)
        grad = jnp.einsum("sbtno,sbtni->sbnoi", split(every(g)), split(every(a)), **how)
        shape = kernel[out], kernel[into], *(kernel[d] for d in space)
        return Stack(names("", part, ()), Whole("", grad.reshape(*grad.shape[:2], *shape)))

    def _patches(self, x: Array, kernel: list[int]) -> Array:
        """(batch, N, places …, channels · kernel)."""
        params = self.eqn.params
        batch, channel, *space = self.numbers.lhs_spec
        x = x.transpose(0, *(d + 1 for d in (batch, channel, *space)))
        lead = x.shape[:2]
        out = lax.conv_general_dilated_patches(
            x.reshape(-1, *x.shape[2:]),
            kernel,
            params["window_strides"],
            params["padding"],
            params["lhs_dilation"],
            params["rhs_dilation"],
            precision=lax.Precision.HIGHEST,  # a copy: nothing is to be rounded
        )
        return jnp.moveaxis(out.reshape(*lead, *out.shape[1:]), 2, -1)


def _marks(groups: int) -> tuple[Any, ...]:
    return () if groups == 1 else (groups,)


def _before(spec: Sequence[int]) -> int:
    """Where the batch's axis is once that of the features is the last."""
    return spec[0] - (spec[1] < spec[0])
