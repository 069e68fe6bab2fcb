"""Sites of convolutions: the kernel is a matrix, applied to the patches it sees."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from .._record import Whole
from ._arrange import PLACE, Form, Role, Stack, arrange, form, names, ordered
from ._site import Loops, Matrix, NoRule
from ._view import Atom, Part, Value

Array = Any


class Convolution(Matrix):
    """A convolution with a parameter as its kernel."""

    rule = "convolution"

    def __init__(self, eqn: Any, values: list[Value], loops: Loops):
        if values[0]:
            raise NoRule("an image made of parameters")
        # Features or images in groups: a group of outputs sees only its own group of inputs.
        self.features = eqn.params["feature_group_count"]
        self.images = eqn.params["batch_group_count"]
        self.numbers = eqn.params["dimension_numbers"]
        self.apart = self.features * self.images == 1
        super().__init__(eqn, values[1], loops)
        [first, *others] = values[1]
        if not self.apart and (others or not first.covers(eqn.invars[1].aval.shape)):
            raise NoRule("a kernel for groups, made of several parameters")

    def form(self, part: Part) -> Form:
        out, *axes = self.numbers.rhs_spec
        found = form(part, (), part.dims[out], ())
        # Channels first, then the kernel's own axes: the order does not depend on the library.
        right = tuple(a.whole for d in axes for a in part.dims[d])
        if self.apart:
            return Form(found.blocks, found.left, right)
        for dim in (part.dims[d] for d in (out, *axes)):
            if any(a.size != a.full or a.flipped != dim[0].flipped for a in dim):
                raise NoRule("a part of a kernel for groups")
        if list(part.dims[out]) != ordered(part.dims[out]):
            raise NoRule("a kernel for groups whose outputs are in another order")
        # Another use of it, with other groups, does not go together with this one.
        marks: Any = self.features, self.images
        return Form(found.blocks, found.left, (*right, *marks))

    kept = [0]

    def inputs(self, part: Part, kept: list[Array]) -> Array:
        axes, kernel = self.numbers.rhs_spec[1:], self.eqn.invars[1].aval.shape
        a = self._seen(part, kept[0])
        a = a.reshape(*a.shape[:-1], *(kernel[d] for d in axes))
        atoms = tuple(x for d in axes for x in part.dims[d])
        places = [PLACE] * (a.ndim - len(axes) - len(self.front(part)))
        return arrange(
            a, [*self.front(part), *places, *(Role.of("side", part, d) for d in axes)], atoms
        )

    def outputs(self, part: Part, g: Array) -> Array:
        places = [PLACE] * (g.ndim - len(self.front(part)) - 1)
        g, out = self._features_last(part, g), self.numbers.rhs_spec[0]
        return arrange(g, [*self.front(part), *places, Role.of("side", part, out)])

    def record(self, part: Part, kept: list[Array], gs: list[Array], own: Form) -> Stack:
        if self.apart:
            return super().record(part, kept, gs, own)
        out, *axes = self.numbers.rhs_spec
        kernel, front = self.eqn.invars[1].aval.shape, self.front(part)
        a, g = self._seen(part, kept[0]), self._features_last(part, gs[0])
        roles, lead = [*front, *[PLACE] * (g.ndim - len(front) - 1)], a.shape[: len(front)]
        if self.images > 1:  # those of a group are behind each other; its outputs are features
            a = a.reshape(*lead, self.images, -1, *a.shape[len(lead) + 1 :])
            a = jnp.moveaxis(a, len(lead), -2).reshape(*lead, *g.shape[len(lead) : -1], -1)
        a, g = self._groups(a, roles), self._groups(g, roles)
        wide = jnp.promote_types(g.dtype, jnp.float32)
        how: Any = dict(precision="highest", preferred_element_type=wide)
        grad = jnp.einsum("sbtno,sbtni->sbnoi", g, a, **how)
        grad = grad.reshape(*grad.shape[:2], *(kernel[d] for d in (out, *axes)))
        turned = [k for k, d in enumerate((out, *axes)) if any(x.flipped for x in part.dims[d])]
        return Stack(names("", part, ()), Whole("", lax.rev(grad, [2 + k for k in turned])))

    def _features_last(self, part: Part, g: Array) -> Array:
        """(…, N, places …, features)."""
        image, feature, *space = self.numbers.out_spec
        n = len(self.front(part))
        return g.transpose(*range(n), *(n + d for d in (image, *space, feature)))

    def _seen(self, part: Part, x: Array) -> Array:
        """What the kernel sees: (…, N, places …, channels · kernel)."""
        kernel = self.eqn.invars[1].aval.shape
        lead = x.shape[: len(self.front(part))]
        merged = x.reshape(-1, *x.shape[len(lead) :])
        sizes = [kernel[d] for d in self.numbers.rhs_spec[2:]]
        patches = jnp.asarray(self._patches(merged, sizes))
        return patches.reshape(*lead, *patches.shape[1:])

    def _groups(self, x: Array, roles: list[Role]) -> Array:
        """(layers, examples, places, groups, entries)."""
        entries = Atom(0, 1, x.shape[-1], 0, x.shape[-1])
        x = arrange(x, [*roles, Role("side", (entries,))])
        groups = self.features * self.images
        return x.reshape(*x.shape[:3], groups, x.shape[-1] // groups)

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
