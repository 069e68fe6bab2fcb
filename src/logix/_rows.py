"""A batch as rows: what is logged of each of its examples, one entry after another.

A row is made of entries, first the gradients of all layers, then what went into layers (`forward`),
then the gradients of what came out (`backward`). They are made for some examples at a time, right
where they are written from: those of a whole batch, uncompressed, are never there at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ._array import Array, as_float, precise, to_numpy
from ._compress import gradients
from ._record import Outer, Record, Whole

KINDS = ("grad", "forward", "backward")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One part of a row."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def to_json(self) -> dict[str, Any]:
        return dict(name=self.name, kind=self.kind, shape=list(self.shape), offset=self.offset)


@dataclasses.dataclass(frozen=True)
class Activation:
    """A tensor of the forward pass, (B, …), and its gradient, if there is one."""

    layer: str
    forward: Array
    backward: Array | None = None

    def as_record(self) -> Outer:
        """For statistics of positions: all axes between the batch and the last are places."""
        places = lambda x: x.reshape(len(x), -1, x.shape[-1] if x.ndim > 1 else 1)
        a = places(self.forward)
        return Outer(self.layer, a, a[..., :0] if self.backward is None else places(self.backward))


Logged = Record | Activation


def entries(records: Sequence[Logged], kinds: frozenset[str]) -> list[Entry]:
    """What a row of these is made of."""
    out: list[Entry] = []
    offset = 0
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    for kind in KINDS:
        for record in records:
            if kind in kinds and (shape := _shape(record, kind)) is not None:
                shapes.setdefault((record.layer, kind), shape)
    for (name, kind), shape in shapes.items():
        out.append(Entry(name, kind, shape, offset))
        offset += out[-1].size
    return out


def _shape(record: Logged, kind: str) -> tuple[int, ...] | None:
    if kind == "grad":
        return None if isinstance(record, Activation) else tuple(record.shape)
    x = value(record, kind)
    return None if x is None else tuple(x.shape[1:])


def value(record: Logged, kind: str) -> Array | None:
    """What went in, or the gradient of what came out, (B, T, …); None where there is none."""
    if isinstance(record, Activation):
        return record.forward if kind == "forward" else record.backward
    if isinstance(record, Whole):
        return None
    if kind == "backward":
        return record.g
    return record.a if isinstance(record, Outer) else record.i


def fill(records: Sequence[Logged], layout: Sequence[Entry], examples: slice, out: Array) -> None:
    """Write the rows of some examples into `out`, (examples, D) in float32."""
    by_layer: dict[str, list[Any]] = {}
    for record in records:
        by_layer.setdefault(record.layer, []).append(some(record, examples))
    same = lambda x: to_numpy(x) if isinstance(out, np.ndarray) else x
    with precise(out):
        for entry in layout:
            own = by_layer[entry.name]
            where = out[:, entry.offset : entry.offset + entry.size]
            if entry.kind != "grad":
                where[...] = same(value(own[0], entry.kind)).reshape(len(out), -1)
            elif len(own) == 1 and isinstance(own[0], Outer) and not isinstance(out, np.ndarray):
                _outer(own[0], where, entry.shape)
            else:
                where[...] = same(gradients(own)[entry.name]).reshape(len(out), -1)


def arrays(record: Logged) -> dict[str, Array]:
    """Those of a record, all with the batch in front."""
    fields = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    return {name: x for name, x in fields.items() if hasattr(x, "ndim")}


def some(record: Logged, examples: slice | list[int]) -> Any:
    """The record of some examples."""
    return dataclasses.replace(record, **{k: x[examples] for k, x in arrays(record).items()})


def _outer(record: Outer, where: Array, shape: tuple[int, ...]) -> None:
    """The product straight into the block, in PyTorch."""
    import torch

    out = where.as_strided((len(where), *shape), (where.stride(0), shape[1], 1))
    a, g = as_float(record.a), as_float(record.g)
    if a.shape[1] == 1:
        torch.mul(g.transpose(1, 2), a, out=out)
    elif out.is_contiguous():
        torch.bmm(g.transpose(1, 2), a, out=out)
    else:
        out.copy_(torch.bmm(g.transpose(1, 2), a))


def shown(records: Sequence[Logged], kinds: frozenset[str]) -> dict[str, dict[str, Array]]:
    """{layer: {kind: array}}: what `get_log` returns."""
    out: dict[str, dict[str, Array]] = {}
    made = [r for r in records if not isinstance(r, Activation)]
    grads = gradients(made) if "grad" in kinds else {}
    for record in records:
        own = out.setdefault(record.layer, {})
        if record.layer in grads:
            own["grad"] = grads[record.layer]
        for kind in ("forward", "backward"):
            if kind in kinds and (x := value(record, kind)) is not None:
                own.setdefault(kind, x)
    return {layer: own for layer, own in out.items() if own}


def from_rows(rows: Array, layout: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Array]]:
    """The same of rows that were read."""
    out: dict[str, dict[str, Array]] = {}
    for part in layout:
        shape, offset = tuple(part["shape"]), part["offset"]
        x = rows[:, offset : offset + math.prod(shape)].reshape(len(rows), *shape)
        out.setdefault(part["name"], {})[part.get("kind", "grad")] = x
    return out
