"""Calls of a module put together to one record of the batch.

A module may be called several times in a pass: the places of its calls are side by side, and their
gradients add up. A batch may come in several passes (gradient accumulation): their examples follow
one another, in the order of the forward passes.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .._record import Lookup, Outer, Record, Whole, examples


class Part(NamedTuple):
    """What one call gave."""

    backward: int  # the backward pass that it belongs to
    time: int  # of the call, -1 if it is not known
    record: Any


def together(layer: str, parts: list[Part], n: int) -> Record:
    """The record of `n` examples."""
    groups = _groups(layer, _in_order(parts), n)
    joined = [_side_by_side([part.record for part in group]) for group in groups]
    if len(joined) == 1:
        return joined[0]
    if isinstance(joined[0], Whole):
        return Whole(layer, torch.cat([r.value for r in joined]))
    longest = max(r.g.shape[1] for r in joined)
    join = lambda name: torch.cat([_padded(getattr(r, name), longest) for r in joined])
    if isinstance(joined[0], Lookup):
        return Lookup(layer, join("i"), join("g"), joined[0].rows)
    return Outer(layer, join("a"), join("g"), None if joined[0].real is None else join("real"))


def _in_order(parts: list[Part]) -> list[Part]:
    """As they were called, those of each backward pass together; backward passes come in order."""
    first: dict[int, int] = {}  # the backward pass in which a call was seen first
    order: dict[int, list[Part]] = {}
    for part in parts:
        now = first.setdefault(part.time, part.backward) if part.time >= 0 else part.backward
        order.setdefault(now, []).append(part._replace(backward=now))
    return [p for several in order.values() for p in sorted(several, key=lambda p: p.time)]


def _groups(layer: str, parts: list[Part], n: int) -> list[list[Part]]:
    """The calls that have the same examples."""
    size = lambda part: examples(part.record)
    passes = [list(x) for _, x in itertools.groupby(parts, key=lambda p: p.backward)]
    alike = all(len({size(p) for p in some}) == 1 for some in passes)
    if alike and sum(size(some[0]) for some in passes) == n:
        return passes
    # Several forward passes may go into one backward pass.
    each, rest = divmod(sum(size(p) for p in parts), n)
    groups = [some[i : i + each] for some in passes for i in range(0, len(some), max(each, 1))]
    if rest or not each or any(len({size(p) for p in g}) > 1 or len(g) != each for g in groups):
        sizes = [[size(p) for p in some] for some in passes]
        where = f" of {sizes[0]}" if len(sizes) == 1 else f" of {sizes}, by backward pass,"
        raise ValueError(
            f"layer {layer!r} was called with batches{where} and there are {n} ids. Give one id "
            "for each example; the examples must be the first axis of what the model gets."
        )
    if any(len(some) > each and some[0].time < 0 for some in passes):
        raise ValueError(
            f"layer {layer!r}: several forward passes went into one backward pass, and with "
            "torch.compile or a reentrant checkpoint their order is not known. Call backward() "
            "after each of them."
        )
    return groups


def _side_by_side(calls: list[Any]) -> Any:
    first = calls[0]
    if len(calls) == 1:
        return first
    if isinstance(first, Whole):
        return Whole(first.layer, sum((r.value for r in calls[1:]), first.value))
    join = lambda part: torch.cat([getattr(r, part) for r in calls], 1)
    if isinstance(first, Lookup):
        return Lookup(first.layer, join("i"), join("g"), first.rows)
    return Outer(first.layer, join("a"), join("g"), None if first.real is None else join("real"))


def _padded(x: Tensor, length: int) -> Tensor:
    return F.pad(x, [0, 0] * (x.ndim - 2) + [0, length - x.shape[1]])
