"""`capture`: the records of a loss, from the loss of one example and its parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp

from lox._primitive import collecting

from .._compress import gradients
from .._record import Record
from .._rows import Activation
from ._additive import check_additive
from ._arrange import Stack, split_whole
from ._assembled import assembled
from ._closing import closing
from ._coverage import Coverage, coverage
from ._explicit import freely
from ._follow import Follow, slots
from ._found import Found, read
from ._logged import Logs
from ._names import Watched, renamed, watched
from ._shrunk import shrunk
from ._stacks import Handed

Array = Any


def capture(
    loss: Callable,
    params: Any,
    *,
    filter: Any = None,
    batched: bool = False,
    logs: Sequence[str] = (),
    strict: bool = False,
    names: Any = None,
) -> Capture:
    """A function of parameters and a batch that returns the records of each example's gradient.

    >>> import jax, jax.numpy as jnp, logix.jax
    >>> loss = lambda w, example: ((example["x"] @ w["kernel"] - example["y"]) ** 2).sum()
    >>> w, batch = {"kernel": jnp.ones((3, 2))}, {"x": jnp.ones((4, 3)), "y": jnp.ones((4, 2))}
    >>> capture = logix.jax.capture(loss, w)
    >>> [record] = jax.jit(capture)(w, batch)
    >>> record.layer, record.a.shape, record.g.shape
    ('kernel', (4, 1, 3), (4, 1, 2))
    >>> capture.gradients(w, batch)["kernel"].shape
    (4, 3, 2)

    Arguments:

    - `loss`: `loss(params, example)`, a number for one example.
    - `params`: any pytree; its arrays are the parameters, known by their paths: `layers/0/kernel`.
    - `filter`: which parameters, by a function of the path, or by patterns: `"*/kernel"`. The
      others cost nothing.
    - `batched`: the loss takes a batch, of which it returns the sum (or the mean) over its
      examples, which must not depend on each other.
    - `logs`: names of `lox.log` in the model (`"h/*"`): these values and their gradients too.
    - `strict`: a parameter whose gradient must be made whole for each example is an error.
    - `names`: the name of a parameter in what is logged, as a function of its path or a dict. Of
      layers that are stacked in it, `"h.{}.fc"` is `h.0.fc`, `h.1.fc` …
    """
    return Capture(loss, params, filter, batched, logs, strict, names)


class Capture:
    """What `capture` returns. It may be jitted, mapped and sharded as any function."""

    def __init__(
        self,
        loss: Callable,
        params: Any,
        filter: Any,
        batched: bool,
        logs: Sequence[str],
        strict: bool,
        names: Any,
    ):
        self.loss, self.batched, self.strict = loss, batched, strict
        self.watched: Watched = watched(params, filter, names)
        self.logs = Logs((logs,) if isinstance(logs, str) else logs)
        self._found: dict[Any, tuple[Any, Found]] = {}
        self._additive: set[Any] = set()  # shapes of batches whose examples do not depend on others

    def __call__(self, params: Any, batch: Any) -> list[Record]:
        """The records: `logix.jax.Outer`, `Lookup` or `Whole`, of each layer and use of it."""
        self.check(params, batch)
        return [r for stack in self.everything(params, batch)[1] for r in stack.unstacked()]

    def everything(
        self, params: Any, batch: Any, how: Handed | None = None
    ) -> tuple[Array, list[Stack], list[Activation]]:
        """The loss of each example, the records (of stacked layers in one), what is logged.

        `how`: records of layers in a loop are compressed in it; all others are as they are.
        """
        how = None if how is None or how.given is None else how
        losses, stacks, logged = self._freely(self._everything, params, batch, 0, 1, 0, how=how)
        called = renamed([name for stack in stacks for name in stack.names])
        new = lambda names: tuple(called[name] for name in names)
        replace = dataclasses.replace
        return losses, [replace(stack, names=new(stack.names)) for stack in stacks], logged

    def _freely(
        self,
        fun: Callable,
        params: Any,
        batch: Any,
        *axes: int,
        how: Handed | None = None,
    ) -> Any:
        tree: Any = jax.tree.structure(batch)
        arrays, given = self.watched.arrays(params), {} if how is None else how.given or {}

        def run(xs: Sequence[Array], ys: Sequence[Array]) -> Any:
            own, more = xs[: len(arrays)], dict(zip(given, xs[len(arrays) :]))
            again = None if how is None else Handed(how.settings, given=more)
            return fun(self.watched.filled(own), tree.unflatten(ys), again)

        return freely(run, [*arrays, *given.values()], self._checked(batch), *axes)

    def _everything(self, params: Any, batch: Any, how: Handed | None) -> Any:
        jaxpr, found = self.read(params, batch)
        plan, given = found.plan, dict[str, Array]()
        if how is not None:
            plan, given = shrunk(plan, self.watched.names, found.forms, how)
        arrays, tree = self.watched.arrays(params), jax.tree.structure(batch)

        def one(slot: Any, direct: Any, example: Any) -> Any:
            follow = Follow(plan, {**slot, **given})
            own = [direct.get(i, x) for i, x in enumerate(arrays)]
            if found.traced:
                [loss] = follow.start(jaxpr, [*own, *example])
            else:
                with collecting(False):
                    loss = self._one(tree, [*own, *example])
            return loss, (loss, {key: rows.values for key, rows in follow.rows.items()})

        take = jax.grad(one, argnums=(0, 1), has_aux=True)
        direct = {i: arrays[i] for i in found.direct}
        both = lambda example: take(slots(plan), direct, example)
        (g, whole), (losses, kept) = jax.vmap(both)(jax.tree.leaves(batch))
        layers = self.watched.names
        stacks = []
        for key, site in plan.all_sites():
            stacks += site.stacks(
                [kept[name][0] for name in site.keys],
                [g[name] for name in site.slots(key)],
                layers,
                found.forms,
            )
        for i, value in whole.items():
            stacks.append(
                split_whole(layers[i], value, found.direct[i].blocks, found.turned.get(i))
            )
        logged = [Activation(x.name, kept[x.key][0], g.get(x.key)) for x in plan.all_logged()]
        return losses, stacks, logged

    def gradients(self, params: Any, batch: Any) -> Any:
        """The gradient of each example, as a pytree like the parameters with the examples in front.

        It is what `vmap(grad(loss))` returns. None stands for what is not watched.
        """
        self.check(params, batch)
        return self.watched.filled(self._freely(self._gradients, params, batch, 0))

    def _gradients(self, params: Any, batch: Any, how: None) -> list[Any]:
        _, found = self.read(params, batch)
        stacks = self._everything(params, batch, how)[1]
        records = [r for stack in stacks for r in stack.unstacked()]
        return assembled(gradients(records), found, self.watched, params)

    def check(self, params: Any, batch: Any) -> None:
        """Of `batched=True`: raise an error if examples of a batch depend on each other.

        It is called at the first batch of each shape; under `jit` there are no numbers to compare,
        so call it yourself before.
        """
        leaves = [*self.watched.arrays(params), *self._checked(batch)]
        if not self.batched or any(isinstance(x, jax.core.Tracer) for x in leaves):
            return
        key = tuple((jnp.shape(x), str(jnp.result_type(x))) for x in self._checked(batch))
        if key in self._additive:
            return
        self._additive.add(key)  # before: where nothing is jitted, the check comes here itself
        try:
            check_additive(self, params, batch)
        except BaseException:
            self._additive.discard(key)
            raise

    def coverage(self, params: Any, batch: Any) -> Coverage:
        """Which rule took each parameter, and what it costs."""
        _, found = self.read(params, batch)
        return coverage(found, self.watched, params)

    def read(self, params: Any, batch: Any) -> tuple[Any, Found]:
        """The jaxpr of the loss of one example, and the plan for it."""
        tree: Any = jax.tree.structure(batch)
        own = [_kind(x) for x in self.watched.arrays(params)]
        kinds = [_kind(x, 1) for x in self._checked(batch)]
        # Equations remember the mesh that they were made under.
        mesh = jax.sharding.get_abstract_mesh()
        key = tree, mesh, tuple(map(str, (*kinds, *own)))
        if key not in self._found:
            traces = []

            def loss(*args: Any) -> Any:
                traces.append(args[0]._trace)
                return self._one(tree, args)

            with collecting(bool(self.logs.patterns)):
                jaxpr = jax.make_jaxpr(loss)(*own, *kinds)
            self._check_loss(jaxpr)
            shapes = {i: tuple(own[i].shape) for i in self.watched.chosen}
            why_not = closing(jaxpr, traces[0], self.watched.chosen)
            if why_not is not None and self.logs.patterns:
                raise ValueError(
                    f"logs={self.logs.patterns}: nothing can be logged beside {why_not}"
                )
            found = read(jaxpr, len(own), shapes, self.logs, why_not)
            self._check(found, params)
            self._found[key] = jaxpr, found
        return self._found[key]

    def _one(self, tree: Any, args: Sequence[Any]) -> Any:
        """The loss of one example, of the arrays of all parameters and of the example."""
        n = len(args) - tree.num_leaves
        mine, example = args[:n], args[n:]
        if self.batched:
            example = [x[None] for x in example]
        value = self.loss(self.watched.filled(mine), tree.unflatten(example))
        return value.reshape(()) if self.batched and jnp.shape(value) == (1,) else value

    def _checked(self, batch: Any) -> list[Any]:
        flat = jax.tree_util.tree_flatten_with_path(batch)[0]
        sizes = {jax.tree_util.keystr(path): jnp.shape(x)[:1] for path, x in flat}
        if not flat or () in sizes.values() or len(set(sizes.values())) != 1:
            raise ValueError(
                f"a batch is a pytree of arrays whose first axis is over the examples. Sizes of "
                f"first axes: {sizes}"
            )
        return [x for _, x in flat]

    def _check_loss(self, jaxpr: Any) -> None:
        avals = jaxpr.out_avals
        if (
            len(avals) == 1
            and avals[0].shape == ()
            and jnp.issubdtype(avals[0].dtype, jnp.floating)
        ):
            return
        shown = ", ".join(a.str_short() for a in avals)
        fix = (
            "Sum it over the examples."
            if self.batched
            else "For a loss that takes a whole batch, sum over its examples and pass batched=True."
        )
        raise ValueError(
            f"the loss of one example must be one floating-point number; it is {shown}. {fix}"
        )

    def _check(self, found: Found, params: Any) -> None:
        unused = [self.watched.paths[i] for i in found.unused]
        if unused:
            raise ValueError(
                f"the loss does not depend on {', '.join(map(repr, unused))} in any way that can "
                f"be differentiated. Leave them out: filter=lambda path: path not in {unused!r}"
            )
        names = sorted({x.name for x in found.plan.all_logged()})
        for pattern in self.logs.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                known = ", ".join(sorted(self.logs.seen)) or "no log at all"
                raise ValueError(
                    f"logs={pattern!r}: the loss logs no such name by lox.log. Found: {known}"
                )
        if self.strict and (whole := coverage(found, self.watched, params).fallbacks):
            raise ValueError(f"strict=True: no rule for {'; '.join(whole)}")


def _kind(x: Any, drop: int = 0) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape[drop:], aval.dtype, weak_type=aval.weak_type)
