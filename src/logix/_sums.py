"""What one batch adds to the sums of one layer, whose meaning is told in `_statistics`.

A layer may have a record for each of its uses. What is linear in positions is added use by use.
Squares and products of gradients need those of whole examples: they are made for as many examples
at a time as `_CHUNK` allows, except where a formula does without them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ._array import (
    Array,
    add,
    add_at,
    add_gram,
    add_product,
    as_float,
    exact_products,
    is_traced,
    like,
    moved,
    namespace,
    zeros,
)
from ._compress import gradients
from ._record import (
    Lookup,
    Outer,
    Record,
    Whole,
    changed,
    cut,
    examples,
    floated,
    places_joined,
    rotated,
    row_gradients,
    turned,
)

LARGEST_SIDE = 2**14  # entries: 1 GiB of covariance, whose eigenvectors take minutes
_SHORT = 256  # entries of a bias whose covariance is kept: n² numbers, and n² work per example
_CHUNK = 2**24  # entries of per-sample gradients that exist at a time, if one example has no more
_LARGEST = 2**15  # of a raw covariance: 4 GiB
_flat = lambda x: x.reshape(-1, x.shape[-1])  # (B, T, D) as (B·T, D)


@dataclasses.dataclass(frozen=True)
class Sums:
    """The sums of one layer, and where they are kept: beside the `data`, or on the host."""

    own: dict[str, Array]
    data: Array
    double: bool = False
    cpu: bool = False

    def add(
        self, name: str, count: Any, shape: Sequence[int], how: Callable[..., Array], *what: Any
    ) -> None:
        """`how` is an addition like those of `_array`: (total, *what) -> total."""
        if name not in self.own:
            total = zeros(shape, self.data, self.double, self.cpu)
        else:
            total = self.own[name]
            if total.ndim < len(shape):  # a table that was only looked up so far
                total = namespace(total).diag(total)
            total = moved(total, self.data, self.double, self.cpu)
        self.own[name] = how(total, *what)
        self.count(f"{name}_n", count)

    def count(self, name: str, more: Any) -> None:
        n = self.own.get(name, 0) + more
        self.own[name] = np.asarray(n) if isinstance(n, int | np.generic) else n

    def basis(self, side: str) -> Array | None:
        """Eigenvectors of a side, None for the identity. They are moved once, if they may stay."""
        found = self.own.get(f"{side}_basis")
        if found is None or found.ndim == 1:
            return None
        there = moved(found, self.data)
        if not self.cpu:
            self.own[f"{side}_basis"] = there
        return there


class Real:
    """Which positions count: all, or those of a mask (B, T)."""

    def __init__(self, mask: Array | None):
        if mask is not None and mask.ndim != 2:
            raise ValueError(f"a mask has the shape (examples, positions), not {tuple(mask.shape)}")
        self.mask = mask
        self._count: Any = None

    def __call__(self, record: Outer | Lookup) -> tuple[Array | None, Any]:
        """The mask at the record's places (None: all count), and how many count."""
        b, places = record.g.shape[:2]
        if isinstance(record, Outer) and (own := record.real) is not None:
            return own, own.sum() if is_traced(own) else int(own.sum())
        mask = self.mask
        if mask is None or len(mask) != b or not mask.shape[1] or places % mask.shape[1]:
            return None, b * places  # places of its own: pooled ones, or those of an image
        if self._count is None:  # once for all layers: a GPU is waited for
            count = (mask != 0).sum()
            self._count = count if is_traced(count) else int(count)
        times = places // mask.shape[1]
        return namespace(mask).concatenate([mask] * times, 1), self._count * times


def check(
    layer: str, uses: Sequence[Record], what: frozenset[str], own: Mapping[str, Array]
) -> None:
    """Raises what must be raised while nothing has been added."""
    if len({(examples(r), *r.shape) for r in uses}) > 1:
        shapes = ", ".join(f"{examples(r)} × {tuple(r.shape)}" for r in uses)
        raise ValueError(f"layer {layer!r}: gradients of several shapes do not add up: {shapes}")
    shape, size = tuple(uses[0].shape), math.prod(uses[0].shape)
    if "raw" in what and size > _LARGEST:
        raise ValueError(
            f"layer {layer!r}: the raw covariance of a gradient of {size:,} entries would take "
            f'{size**2 * 4 / 2**30:,.0f} GiB. Compress it first (kind="logra"), or use "kfac" '
            'or "ekfac".'
        )
    whole = any(isinstance(r, Whole) for r in uses)
    if "ekfac" in what and not whole and "right_basis" not in own:
        raise ValueError(
            f"layer {layer!r}: EK-FAC is summed in K-FAC's eigenbasis, which is not there. "
            "First pass: update(…, ['kfac']); then with_bases(state); then ['ekfac']."
        )
    known: dict[str, Any] = dict.fromkeys(("sum", "square", "eigen"), (shape,))
    known["raw"] = ((size, size),)
    if not whole:
        known |= {"left": (shape[:1], shape[:1] * 2), "right": (shape[1:], shape[1:] * 2)}
    for name, allowed in known.items():
        if name in own and tuple(own[name].shape) not in allowed:
            raise ValueError(
                f"layer {layer!r}: gradients of shape {shape} can not be added to a sum {name!r} "
                f"of shape {tuple(own[name].shape)}. It is of another model or another "
                "compression: start with an empty state."
            )


def add_layer(sums: Sums, uses: Sequence[Record], what: frozenset[str], real: Real) -> None:
    """Adds what the uses of one layer in one batch give to the statistics `what`."""
    given, uses = uses, [floated(r) for r in uses]
    shape, size, n = tuple(uses[0].shape), math.prod(uses[0].shape), examples(uses[0])
    if any(isinstance(r, Whole) for r in uses):
        if len(uses) > 1:
            uses = [Whole(layer, x) for layer, x in gradients(uses).items()]
        if "kfac" in what:
            what = what | {"raw" if size <= _SHORT else "diagonal"}
        what = what - {"kfac", "ekfac"}
    if what & {"mean", "variance"}:
        for k, record in enumerate(uses):
            sums.add("sum", 0 if k else n, shape, *_total(record))
    if what & {"variance", "diagonal"}:
        sums.add("square", n, shape, _add_squares, uses)
    if "raw" in what:
        for grads in _chunks(uses):
            sums.add("raw", len(grads), (size, size), add_gram, grads.reshape(len(grads), size))
    if "ekfac" in what:
        sums.add("eigen", n, shape, _add_squares, uses, sums.basis("left"), sums.basis("right"))
    places = [r for r in (given if exact_products(sums.data) else uses) if not isinstance(r, Whole)]
    _add_positions(sums, places, what, real)


def _total(record: Record) -> tuple[Any, ...]:
    """How to add Σ_b G."""
    if isinstance(record, Whole):
        return add, record.value.sum(0)
    if isinstance(record, Lookup):
        return add_at, record.i.reshape(-1), _flat(record.g)
    return add_product, _flat(record.g), _flat(record.a)


def _add_squares(
    total: Array, uses: Sequence[Any], left: Array | None = None, right: Array | None = None
) -> Array:
    """Adds Σ_b G², of G rotated to leftᵀ G right."""
    if isinstance(uses[0], Whole):
        return add(total, (uses[0].value ** 2).sum(0))
    if left is None and all(isinstance(r, Lookup) for r in uses):
        lookup: Any = places_joined([changed(r, g=turned(r.g, right)) for r in uses])
        for some in _slices(lookup.g, max(lookup.rows, math.prod(lookup.g.shape[1:]))):
            part: Any = cut(lookup, some)
            rows, grads = row_gradients(part)
            total = add_at(total, rows, grads * grads)
        return total
    if len(uses) == 1 and isinstance(uses[0], Outer) and uses[0].g.shape[1] == 1:
        g, a = turned(uses[0].g[:, 0], left), turned(uses[0].a[:, 0], right)
        return add_product(total, g**2, a**2)
    for grads in _chunks(uses, left, right):
        grads *= grads
        total = add(total, grads.sum(0))
    return total


def _chunks(
    uses: Sequence[Record], left: Array | None = None, right: Array | None = None
) -> Iterator[Array]:
    """The gradients of some examples at a time, rotated. New arrays, except for those of Whole."""
    data, (rows, width) = uses[0], (*uses[0].shape, 1)[:2]
    turns = [dim for q, dim in ((left, rows), (right, width)) if q is not None]
    # Vectors of all places are rotated, or, for long sequences, the gradients made of them.
    places = sum(r.g.shape[1] for r in uses if not isinstance(r, Whole))
    late = places * sum(dim**2 for dim in turns) > rows * width * sum(turns)
    for some in _slices(data.value if isinstance(data, Whole) else data.g, math.prod(data.shape)):
        parts = [cut(r, some) for r in uses]
        if turns and not late:
            parts = [rotated(r, left, right) for r in parts]
        for grads in gradients(parts).values():
            if turns and late:
                grads = turned(grads, right)
                grads = grads if left is None else like(left, grads).T @ grads
            yield grads


def _slices(data: Array, entries: int) -> list[slice]:
    """Of a batch whose examples have so many entries."""
    gpu = namespace(data).__name__ == "torch" and data.device.type != "cpu"
    step = max(1, _CHUNK * (8 if gpu else 1) // max(1, entries))
    return [slice(b, b + step) for b in range(0, len(data), step)]


def _add_positions(
    sums: Sums, uses: Sequence[Outer | Lookup], what: frozenset[str], real: Real
) -> None:
    """Covariances of both sides, and moments of what goes in and of the gradient of what comes out.

    All are sums over positions, so that uses of any kind are added one after the other.
    """
    multiplied = any(isinstance(r, Outer) for r in uses)
    begun: set[str] = set()
    for record in uses:
        mask, count = real(record)
        for kind, side, vectors in _ends(record, mask):
            dim = record.shape[side == "right"]
            if "kfac" in what or kind in what:
                n = count if side == "right" else 0 if side in begun else examples(record)
                begun.add(side)
                small = dim <= LARGEST_SIDE and f"{side}_cut_n" not in sums.own
                dense = small and (side == "right" or multiplied)
                if dense or getattr(sums.own.get(side), "ndim", 1) == 2:
                    sums.add(side, n, (dim, dim), *_gram(vectors))
                else:
                    sums.add(side, n, (dim,), *_moment(vectors, 2))
                    if not isinstance(vectors, tuple):
                        sums.count(f"{side}_cut_n", count)
            # One table may be looked up and multiplied: what goes in is then of two shapes.
            own = kind if isinstance(record, Outer) else f"lookup_{kind}"
            if what & {f"{kind}_mean", f"{kind}_variance"}:
                sums.add(f"{own}_sum", count, (dim,), *_moment(vectors, 1))
            if f"{kind}_variance" in what:
                sums.add(f"{own}_square", count, (dim,), *_moment(vectors, 2))


def _ends(record: Outer | Lookup, mask: Array | None) -> Iterator[tuple[str, str, Any]]:
    """What goes in and the gradient of what comes out, as vectors (n, dim) of one side of G.

    One-hot vectors are (index, used): the places of their ones, which are 0 where a mask says so.
    """
    if isinstance(record, Outer):
        yield "forward", "right", _flat(record.a)
        yield "backward", "left", _flat(record.g)
        return
    used = namespace(record.g).ones_like(record.g[..., 0])
    used = used if mask is None else like(mask != 0, record.g)
    yield "forward", "left", (record.i.reshape(-1), used.reshape(-1))
    yield "backward", "right", _flat(record.g)


def _gram(vectors: Any) -> tuple[Any, ...]:
    """How to add Σ v vᵀ to a matrix."""
    return (_add_to_diagonal, *vectors) if isinstance(vectors, tuple) else (add_gram, vectors)


def _moment(vectors: Any, power: int) -> tuple[Any, ...]:
    """How to add Σ v or Σ v² to a vector. Ones are their own squares."""
    if isinstance(vectors, tuple):
        return add_at, *vectors
    return (add, as_float(vectors).sum(0)) if power == 1 else (_add_second, vectors)


def _add_second(total: Array, vectors: Array) -> Array:
    """Σ v², some at a time: those of a vocabulary are large."""
    for some in _slices(vectors, vectors.shape[1]):
        total = add(total, (as_float(vectors[some]) ** 2).sum(0))
    return total


def _add_to_diagonal(total: Array, index: Array, values: Array) -> Array:
    return add_at(total.reshape(-1), index * (len(total) + 1), values).reshape(total.shape)
