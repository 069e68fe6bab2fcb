"""One batch as one compiled function: records, compressed; rows of them; what they add to sums.

    Step(capture).run(arrays, batch, given, sums, fixed, mask, good, old, settings=…, want=…, …)

`arrays` are those of the parameters. `sums` are given back in the same memory, and rows in that of
`old` ones. Counts are those of this batch, and are added on the host, where they can't overflow. If
an example is not finite, nothing of its batch goes into the sums: they are asked for again, with
`good` telling which examples are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _statistics
from .._compress import Compression, Projector
from .._record import Lookup, Outer, Record, Whole
from .._rows import Activation
from .._taking import OF_POSITIONS
from ._arrange import Stack
from ._batches import Spread
from ._capture import Capture
from ._stacks import Handed, compressed, fits, layer_gradients, masked, rows, unstacked

Array = Any
# For what is made of records; the model's own products are left as they are.
PRECISE = functools.partial(jax.default_matmul_precision, "highest")
# Counts of examples; all others are of positions.
OF_EXAMPLES = frozenset(f"{name}_n" for name in ("sum", "square", "left", "eigen", "raw"))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Counts:
    """How many a batch adds to each sum: one array, since each one is a copy to the host."""

    names: tuple[tuple[str, str], ...] = dataclasses.field(metadata=dict(static=True))
    values: Array


class Step:
    """The function for one loss; it is compiled for each shape of a batch."""

    def __init__(self, capture: Capture):
        self.capture = capture
        static = ("settings", "want", "what", "spread")
        given = ("sums", "old")
        self.run = jax.jit(self._batch, static_argnames=static, donate_argnames=given)
        self.records = jax.jit(self._records, static_argnames="settings")

    def shapes(self, arrays: Any, batch: Any, how: Projector) -> tuple[Any, dict[str, Any]]:
        """Whole gradients, compressed records (stacked, and not), what is logged, compressed
        gradients, and parts of rows: as shapes.

        And the projections that are needed for it.
        """
        maker = Handed(how.settings, how.pca)

        def all_of_it(arrays: Any, batch: Any) -> Any:
            _, stacks, logged = self.capture.everything(self.capture.watched.filled(arrays), batch)
            small = compressed(stacks, maker)
            small_ones = unstacked(small), logged, layer_gradients(small), rows(small, False)
            return layer_gradients(stacks), small, *small_ones

        return jax.eval_shape(all_of_it, arrays, batch), maker.made

    def _small(
        self, arrays: Any, batch: Any, given: Any, mask: Array | None, settings: Compression
    ) -> tuple[list[Stack], list[Activation]]:
        """Compressed records and what is logged, zero at positions that do not count."""
        params, how = self.capture.watched.filled(arrays), Handed(settings, given=given)
        _, stacks, logged = self.capture.everything(params, batch, how)
        with PRECISE():
            stacks = compressed(stacks, how)
        if mask is None:
            return stacks, logged
        placed = [stack for stack in stacks if not isinstance(stack.record, Whole)]
        known = any(fits(stack, mask) for stack in placed)
        if placed and not known and not any(x.has_positions(mask) for x in logged):
            raise ValueError(
                f"mask has {mask.shape[1]} positions, and no layer has so many places. It is "
                "(examples, positions), with the positions that the model sees."
            )
        return [masked(s, mask) for s in stacks], [_masked_log(x, mask) for x in logged]

    def _records(
        self, arrays: Any, batch: Any, given: Any, mask: Array | None, *, settings: Compression
    ) -> Any:
        stacks, logged = self._small(arrays, batch, given, mask, settings)
        return unstacked(stacks), logged

    def _batch(
        self,
        arrays: Any,
        batch: Any,
        given: dict[str, Array],
        sums: Any,
        fixed: Any,
        mask: Array | None,
        good: Array | None,
        old: Sequence[Array],
        *,
        settings: Compression,
        want: str,
        what: frozenset[str],
        spread: Spread,
    ) -> dict[str, Any]:
        """`want`: "rows", "joined" rows, "records" or "sums" alone; `fixed`: EK-FAC's bases."""
        out: dict[str, Any] = {}
        stacks, logged = self._small(arrays, batch, given, mask, settings)
        with PRECISE():
            records = unstacked(stacks) if what or want == "records" else []
            if want in ("rows", "joined"):
                out["rows"] = [spread(part) for part in rows(stacks, want == "joined")]
                if old:  # all of it is overwritten: this says only which memory it may be put into
                    put = lambda x, part: jax.lax.dynamic_update_slice(x, part, (0, 0))
                    out["rows"] = list(map(put, old, out["rows"]))
            elif want == "records":
                out["records"] = jax.tree.map(spread, (records, logged))
            if want == "joined":  # one array, which is finite only if all that it is made of is
                out["finite"] = spread(jnp.isfinite(out["rows"][0]).all(1, keepdims=True))
            else:
                out["finite"] = spread(jnp.stack([_finite(s.record) for s in stacks], 1))
            out["all finite"] = spread.everywhere(out["finite"].all())
            if what:
                fine = out["all finite"] if good is None else True
                add = functools.partial(self._add, records, logged, mask, good, what)
                begun, kinds = jax.eval_shape(add, sums, fixed)
                # `setup` may ask for more than what is summed up so far.
                sums = {k: {**zeros_like(own), **sums.get(k, {})} for k, own in begun.items()}
                # All or nothing. A branch would hold what all layers add at the same time.
                chosen = lambda new, old: jnp.where(fine, new, old)
                added = jax.tree.map(chosen, add(sums, fixed), (sums, zeros_like(kinds)))
                out["sums"], out["counts"] = jax.tree.map(spread.everywhere, added)
        return out

    def _add(
        self,
        records: Sequence[Record],
        logged: Sequence[Activation],
        mask: Array | None,
        good: Array | None,
        what: frozenset[str],
        sums: Any,
        fixed: Any,
    ) -> tuple[Any, Any]:
        """The sums with this batch, and how many it adds to each of them."""
        if good is not None:
            records = [_only(r, good) for r in records]
            logged = [_only(x, good) for x in logged]
            mask = None if mask is None else mask & good[:, None]
        state = {k: {**sums.get(k, {}), **fixed.get(k, {})} for k in {**sums, **fixed}}
        state = _statistics.update(state, records, what, mask=mask)
        for x in logged:
            own = mask if x.has_positions(mask) else None
            state = _statistics.update(state, [x.as_record()], what & OF_POSITIONS, mask=own)
        counts: dict[tuple[str, str], Any] = {}
        new: dict[str, Any] = {}
        for layer, stats in state.items():
            for name, x in stats.items():
                if name.endswith("_n"):
                    counts[layer, name] = jnp.asarray(_counted(name, x, good), jnp.int32)
                elif name not in _statistics.BASES:
                    new.setdefault(layer, {})[name] = x
        names = tuple(sorted(counts))
        values = [counts[name] for name in names]
        return new, Counts(names, jnp.stack(values) if values else jnp.zeros(0, jnp.int32))


def zeros_like(shapes: Any, spread: Spread | None = None) -> Any:
    """Zeros; outside of jit, on all devices where results are put."""
    whole = None if spread is None else spread.whole
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=whole), shapes)


def _counted(name: str, n: Any, good: Array | None) -> Any:
    """How many of what was counted are good. Positions are as many in each example, or masked."""
    if good is None or isinstance(n, jax.core.Tracer):
        return n
    return good.sum() if name in OF_EXAMPLES else int(n) // len(good) * good.sum()


def _only(record: Any, good: Array) -> Any:
    """The record without what is not good: zeros, which are not counted."""
    if isinstance(record, Outer) and record.real is not None:
        record = Outer(record.layer, record.a, record.g, record.real & good[:, None])
    keep = lambda x: jnp.where(good.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros((), x.dtype))
    only = jax.tree.map(keep, record)
    if isinstance(record, Lookup):  # rows that are not there: JAX adds nothing to them
        only = dataclasses.replace(only, i=jnp.where(good[:, None], record.i, record.rows))
    return only


def _masked_log(x: Activation, mask: Array) -> Activation:
    """What is logged, zero at positions that do not count."""
    if not x.has_positions(mask):
        return x
    real = mask.reshape(*mask.shape, *[1] * (x.forward.ndim - 2))
    return jax.tree.map(lambda y: jnp.where(real, y, jnp.zeros((), y.dtype)), x)


def _finite(record: Record) -> Array:
    """Of each example of a stack, whether its gradients are: no entry is larger than this product.

    The gradients themselves are far larger: to read them would cost more than all that is before.
    """
    most = lambda x: jnp.abs(x).max((0, *range(2, x.ndim)), initial=0).astype(jnp.float32)
    if isinstance(record, Whole):
        return jnp.isfinite(most(record.value))
    largest = most(record.g) * record.g.shape[2]
    return jnp.isfinite(largest if isinstance(record, Lookup) else largest * most(record.a))
