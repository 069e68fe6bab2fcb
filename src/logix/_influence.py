"""Influence: scores between rows of queries q and rows of training examples t, block by block.

With P the preconditioner, an inverse curvature:

    dot      q·P t                                  how much training on t lowers the query's loss
    cosine   q·P t / √(q·P q · t·P t)               in [-1, 1]; the same from t to q
    l2       q·P t - ½ t·P t                        ranks t by its distance to q, nearest first

The last is ½ q·P q - ½ |q - t|² in the metric of P. Blocks of training rows come from an iterator,
or are read ahead from a store, which may be larger than the memory; the query × train matrix exists
only without `top_k`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ._array import Array, as_float, like, namespace, precise, to_numpy
from ._compress import Layout
from ._precondition import Preconditioner
from ._record import Lookup, Record, Whole
from ._result import All, Top
from ._result import Influence as Influence
from .store._readahead import ahead
from .store._reader import RowStore

Blocks = Iterable[tuple[Sequence[Any], Array]]  # ids, rows (n, D)
MODES = ("dot", "cosine", "l2")
_BETWEEN = 1 << 24  # numbers between two products, for scores of tokens


def scores(
    query_rows: Array,
    blocks: Blocks | RowStore,
    mode: str = "dot",
    preconditioner: Preconditioner | None = None,
    *,
    query_ids: Sequence[Any] | None = None,
    layout: Layout | None = None,
    groups: Sequence[str] | None = None,
    per_layer: bool = False,
    top_k: int | None = None,
    largest: bool = True,
) -> Influence:
    """Scores of all queries (Q, D) with all rows of `blocks`, where the query's array lives.

    >>> import numpy as np
    >>> rows = np.array([[1.0, 2.0], [3.0, -1.0]])
    >>> scores(np.ones((1, 2)), [(["a", "b"], rows)], query_ids=["q"]).influence
    array([[3., 2.]])

    Arguments:

    - `blocks`: (ids, rows) for each block, or a store, of whose rows the gradients are taken.
    - `layout`: (name, shape, offset) of the layers in a row. Needed by all but plain scores.
    - `groups`: also scores of the layers whose name contains the word, for each word.
    - `per_layer`: also scores of each layer.
    - `top_k`: only the k largest of each query (equal ones: the earlier row first).
    - `largest`: False for the k smallest.
    """
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}. Known are: {', '.join(MODES)}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k}: at least 1 is needed")
    parts = _Parts.of(layout, groups, per_layer)
    query = as_float(query_rows)
    ids = list(range(len(query))) if query_ids is None else list(query_ids)
    if len(ids) != len(query):
        raise ValueError(f"{len(ids)} query_ids for {len(query)} queries")
    make = lambda: Top(len(query), top_k, largest) if top_k else All(len(query))
    kept = {group: make() for group in parts.names}
    with precise(query):
        ready = _apply(preconditioner, query, layout)
        own_query = parts.own(query, ready) if mode == "cosine" else {}
        for block_ids, block in _read(blocks, query):
            if block.shape[1] != query.shape[1]:
                raise ValueError(
                    f"rows of {block.shape[1]} entries, queries of {query.shape[1]}: "
                    "they were logged with other layers or another compression"
                )
            rows = _beside(block, query)
            own = parts.own(rows, _apply(preconditioner, rows, layout)) if mode != "dot" else {}
            for group, x in parts.products(ready, rows).items():
                if mode == "cosine":
                    x = _cosine(x, own_query[group], own[group])
                elif mode == "l2":
                    x = x - own[group][None] / 2
                kept[group].add(block_ids, x)
    names = {g: k.names for g, k in kept.items()}
    values = {g: k.values for g, k in kept.items()}
    if not groups and not per_layer:
        return Influence(ids, values["total"], names["total"])
    return Influence(ids, values, names if top_k else names["total"])


def self_influence(
    blocks: Blocks | RowStore,
    preconditioner: Preconditioner | None = None,
    *,
    layout: Layout | None = None,
    groups: Sequence[str] | None = None,
    per_layer: bool = False,
) -> Influence:
    """t·P t of each row: large for examples that only they themselves explain."""
    parts = _Parts.of(layout, groups, per_layer)
    ids: list[Any] = []
    kept: dict[str, list[Array]] = {g: [] for g in parts.names}
    for block_ids, block in _read(blocks):
        rows = as_float(block)
        with precise(rows):
            ids += list(block_ids)
            for group, x in parts.own(rows, _apply(preconditioner, rows, layout)).items():
                kept[group].append(x)  # to fetch it would make the host wait for the device
    host = {g: [to_numpy(x) for x in several] for g, several in kept.items()}
    out = {g: np.concatenate(x) if x else np.zeros(0) for g, x in host.items()}
    return Influence(ids, out if groups or per_layer else out["total"])


def token_shares(
    queries: Mapping[str, Array], records: Iterable[Record], positions: int | None = None
) -> tuple[Array, Array]:
    """(Q, B, T): the share of each position in the score, and (Q, B): that of all the rest.

    That of a position is q·(l_t ⊗ r_t), over the layers of `queries` {layer: (Q, left, right)}. The
    rest is what has no position: biases and norms (`Whole`), and layers that are used once for
    each example where others are used T times. If several numbers of positions remain, `positions`
    says which one is meant, and the others belong to the rest. Both together are the score.
    """
    records = list(records)
    counts = {r.layer: r.g.shape[1] for r in records if not isinstance(r, Whole)}
    found = sorted(set(counts.values()) - {1}) or sorted(set(counts.values()))
    if positions is None and len(found) > 1:
        each = ", ".join(f"{layer!r} {t}" for layer, t in counts.items())
        raise ValueError(
            f"layers have different numbers of positions: {each}. Say which are meant, as in "
            f"positions={found[-1]}: those of the others are summed in `rest`."
        )
    if not found or (positions is not None and positions not in found):
        asked = "" if positions is None else f"{positions} "
        raise ValueError(f"no record has {asked}positions. Layers with some: {counts or 'none'}")
    wanted = positions or found[0]
    total: Any = None
    rest: Any = None
    for record in records:
        q = as_float(queries[record.layer])
        with precise(q):
            if isinstance(record, Whole):
                value = like(record.value, q).reshape(len(record.value), -1)
                share = q.reshape(len(q), -1) @ value.T
                rest = share if rest is None else rest + share
                continue
            share = _shares(q, record)
            if share.shape[2] == wanted:
                total = share if total is None else total + share
            else:
                rest = share.sum(2) if rest is None else rest + share.sum(2)
    return total, 0 * total[:, :, 0] if rest is None else rest


def _shares(q: Array, record: Any) -> Array:
    """(Q, B, T) of one record, some queries at a time: what lies between has an axis more."""
    xp, g = namespace(q), like(record.g, q)
    width = g.shape[2]  # of what lies between: (Q, B, T, width)
    a = None if isinstance(record, Lookup) else like(record.a, q)
    step = max(1, _BETWEEN // max(1, g.shape[0] * g.shape[1] * width))
    out = []
    for start in range(0, len(q), step):
        some = q[start : start + step]
        half = some[:, record.i] if a is None else xp.einsum("qlr,btr->qbtl", some, a)
        out.append(xp.einsum("qbtl,btl->qbt", half, g))
    return xp.concatenate(out, 0)


@dataclasses.dataclass(frozen=True)
class _Parts:
    """Slices of a row, and the groups each of them is part of."""

    slices: list[tuple[slice, tuple[str, ...]]]
    names: tuple[str, ...]

    @classmethod
    def of(cls, where: Layout | None, groups: Sequence[str] | None, per_layer: bool) -> _Parts:
        if not groups and not per_layer:
            return cls([(slice(None), ("total",))], ("total",))
        if where is None:
            raise ValueError("scores of groups or layers need the layout of the rows")
        groups = [groups] if isinstance(groups, str) else groups
        words, layers = list(groups or ()), [name for name, _, _ in where]
        lost = [w for w in words if not any(w in name for name in layers)]
        if lost:
            raise ValueError(f"no layer's name contains {lost}. Layers: {', '.join(layers)}")
        slices = []
        for name, shape, offset in where:
            own = {"total", *(w for w in words if w in name), *([name] if per_layer else [])}
            slices.append((slice(offset, offset + math.prod(shape)), tuple(own)))
        return cls(slices, tuple(dict.fromkeys(["total", *words, *(layers if per_layer else [])])))

    def products(self, queries: Array, rows: Array) -> dict[str, Array]:
        return self._sum(lambda s: queries[:, s] @ rows[:, s].T)

    def own(self, rows: Array, ready: Array) -> dict[str, Array]:
        return self._sum(lambda s: namespace(rows).einsum("bd,bd->b", rows[:, s], ready[:, s]))

    def _sum(self, f: Any) -> dict[str, Array]:
        out: dict[str, Array] = {}
        for where, groups in self.slices:
            x = f(where)
            for group in groups:
                out[group] = out[group] + x if group in out else x
        return out


def _read(blocks: Blocks | RowStore, query: Array = None) -> Blocks:
    """Blocks of a store are read ahead, to the GPU if the queries are there."""
    if not isinstance(blocks, RowStore):
        return blocks
    return ahead(blocks, device=gpu_of(query), width=blocks.width)


def gpu_of(x: Array) -> Any:
    """The GPU that an array of torch is on, else None: a store's own memory is as good."""
    gpu = namespace(x).__name__ == "torch" and x.device.type == "cuda"
    return x.device if gpu else None


def _beside(block: Array, query: Array) -> Array:
    """The block as an array like `query`. A mapped file is not copied for that."""
    torch = namespace(query)
    if torch.__name__ != "torch" or not isinstance(block, np.ndarray):
        return like(block, query)
    if block.dtype.name not in ("float16", "float32", "float64"):
        return like(block, query)
    return torch.from_numpy(np.asarray(_Lent(block))).to(query.device, query.dtype)


class _Lent:
    """Memory of an array that may only be read, lent to torch, which knows no such thing."""

    def __init__(self, array: np.ndarray):
        self.array = array  # alive as long as this is
        address = array.__array_interface__["data"][0]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


def _apply(preconditioner: Preconditioner | None, rows: Array, where: Layout | None) -> Array:
    if preconditioner is None or preconditioner.kind == "none":
        return rows
    if where is None:
        raise ValueError("a preconditioner works on layers: give the layout of the rows too")
    return preconditioner.rows(rows, where)


def _cosine(x: Array, q: Array, t: Array) -> Array:
    """0 where a row is zero; within [-1, 1] whatever the rounding."""
    xp = namespace(x)
    scale = xp.sqrt(xp.clip(q, 0, None))[:, None] * xp.sqrt(xp.clip(t, 0, None))[None]
    good = scale > 0
    return xp.clip(xp.where(good, x / xp.where(good, scale, scale + 1), 0 * x), -1, 1)
