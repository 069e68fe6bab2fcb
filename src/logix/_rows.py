"""A batch as rows: what is logged of each of its examples, one entry after another.

A row is made of entries, first the gradients of all layers, then what went into layers (`forward`),
then the gradients of what came out (`backward`). They are made for some examples at a time, right
where they are written from: those of a whole batch, uncompressed, are never there at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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

    def has_positions(self, mask: Any) -> bool:
        """Whether a mask, (B, T), is of this tensor's first two axes."""
        return mask is not None and tuple(self.forward.shape[:2]) == tuple(mask.shape)

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
        for name, record in uses(records, kind):
            if kind in kinds and (shape := _shape(record, kind)) is not None:
                shapes.setdefault((name, kind), shape)
    for (name, kind), shape in shapes.items():
        out.append(Entry(name, kind, shape, offset))
        offset += out[-1].size
    return out


def uses(records: Iterable[Logged], kind: str) -> Iterator[tuple[str, Logged]]:
    """Records with the names of their entries.

    A weight that several modules share has a record of each. Its gradient is their sum; what goes
    through them is not: the second module's has the name `layer[1]`.
    """
    seen: Counter[str] = Counter()
    for record in records:
        k = seen[record.layer]
        seen[record.layer] += 1
        yield record.layer if kind == "grad" or not k else f"{record.layer}[{k}]", record


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


def sample(record: Logged) -> Array:
    """One of a record's arrays, to see where they are."""
    return next(iter(arrays(record).values()))


def difference(old: Sequence[Entry], new: Sequence[Entry]) -> str:
    """What to tell of two rows that are not made of the same."""
    for a, b in zip(old, new):
        if (a.name, a.kind, a.shape) != (b.name, b.kind, b.shape):
            was, now = f"{a.kind} of {a.name!r} {a.shape}", f"{b.kind} of {b.name!r} {b.shape}"
            break
    else:
        was, now = f"{len(old)} entries", f"{len(new)}"
    return (
        f"all rows of a store are alike, and this batch differs from the first: {now} instead of "
        f"{was}. Pad sequences to one length if activations are saved; for another setup, begin "
        "another run."
    )


def fill(records: Sequence[Logged], layout: Sequence[Entry], examples: slice, out: Array) -> None:
    """Write the rows of some examples into `out`, (examples, D) in float32."""
    chosen = [some(record, examples) for record in records]
    by_layer: dict[str, list[Any]] = {}
    for record in chosen:
        by_layer.setdefault(record.layer, []).append(record)
    by_use = dict(uses(chosen, "forward"))
    same = lambda x: to_numpy(x) if isinstance(out, np.ndarray) else x
    with precise(out):
        for entry in layout:
            where = out[:, entry.offset : entry.offset + entry.size]
            if entry.kind != "grad":
                x = value(by_use[entry.name], entry.kind)
                where[...] = same(x).reshape(len(out), -1)
                continue
            own = by_layer[entry.name]
            if len(own) == 1 and isinstance(own[0], Outer) and not isinstance(out, np.ndarray):
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
    if a.dtype != out.dtype:  # float64: rounded once, after the sum
        out.copy_(torch.bmm(g.transpose(1, 2), a))
    elif a.shape[1] == 1:
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
    for name, record in uses(records, "forward"):
        own = out.setdefault(name, {})
        if name in grads:
            own["grad"] = grads[name]
        for kind in ("forward", "backward"):
            if kind in kinds and (x := value(record, kind)) is not None:
                own[kind] = x
    return {layer: own for layer, own in out.items() if own}
