"""Influence: scores between rows of queries q and rows of training examples t, block by block.

With P the preconditioner, an inverse curvature:

    dot      q·P t                                  how much training on t lowers the query's loss
    cosine   q·P t / √(q·P q · t·P t)               in [-1, 1]; the same from t to q
    l2       q·P t - ½ t·P t                        ranks t by its distance to q, nearest first

The last is ½ q·P q - ½ |q - t|² in the metric of P. Blocks of training rows come from an iterator,
so that a store may be larger than the memory; the query × train matrix exists only without `top_k`.
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
from ._result import Influence as Influence

Blocks = Iterable[tuple[Sequence[Any], Array]]  # ids, rows (n, D)
MODES = ("dot", "cosine", "l2")


def scores(
    query_rows: Array,
    blocks: Blocks,
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

    Arguments:

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
    make = lambda: _Top(len(query), top_k, largest) if top_k else _All(len(query))
    kept = {group: make() for group in parts.names}
    with precise(query):
        ready = _apply(preconditioner, query, layout)
        own_query = parts.own(query, ready) if mode == "cosine" else {}
        for block_ids, block in blocks:
            if block.shape[1] != query.shape[1]:
                raise ValueError(
                    f"rows of {block.shape[1]} entries, queries of {query.shape[1]}: "
                    "they were logged with other layers or another compression"
                )
            rows = like(block, query)
            own = parts.own(rows, _apply(preconditioner, rows, layout)) if mode != "dot" else {}
            for group, x in parts.products(ready, rows).items():
                if mode == "cosine":
                    x = _cosine(x, own_query[group], own[group])
                elif mode == "l2":
                    x = x - own[group][None] / 2
                kept[group].add(block_ids, to_numpy(x))
    values, names = {g: k.values for g, k in kept.items()}, {g: k.names for g, k in kept.items()}
    if not groups and not per_layer:
        return Influence(ids, values["total"], names["total"])
    return Influence(ids, values, names if top_k else names["total"])


def self_influence(
    blocks: Blocks,
    preconditioner: Preconditioner | None = None,
    *,
    layout: Layout | None = None,
    groups: Sequence[str] | None = None,
    per_layer: bool = False,
) -> Influence:
    """t·P t of each row: large for examples that only they themselves explain."""
    parts = _Parts.of(layout, groups, per_layer)
    ids: list[Any] = []
    kept: dict[str, list[np.ndarray]] = {g: [] for g in parts.names}
    for block_ids, block in blocks:
        rows = as_float(block)
        with precise(rows):
            ids += list(block_ids)
            for group, x in parts.own(rows, _apply(preconditioner, rows, layout)).items():
                kept[group].append(to_numpy(x))
    out = {g: np.concatenate(x) if x else np.zeros(0) for g, x in kept.items()}
    return Influence(ids, out if groups or per_layer else out["total"])


def token_scores(queries: Mapping[str, Array], records: Iterable[Record]) -> Array:
    """(Q, B, T): what each position of each example adds to its score, q·(l_t ⊗ r_t) over layers.

    `queries`: {layer: (Q, left, right)}, preconditioned. All layers must have the same positions;
    what has none (`Whole`) has no share.
    """
    total: Any = None
    for record in records:
        if isinstance(record, Whole):
            continue
        q = as_float(queries[record.layer])
        with precise(q):
            if isinstance(record, Lookup):
                rows = namespace(q).einsum("qbtr,btr->qbt", q[:, record.i], like(record.g, q))
            else:
                half = namespace(q).einsum("qlr,btr->qbtl", q, like(record.a, q))
                rows = namespace(q).einsum("qbtl,btl->qbt", half, like(record.g, q))
            total = rows if total is None else total + rows
    if total is None:
        raise ValueError("no record has positions")
    return total


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


class _All:
    """Everything: the query × train matrix."""

    def __init__(self, queries: int):
        self.parts = [np.zeros((queries, 0), np.float32)]
        self.names: list[Any] = []

    def add(self, ids: Sequence[Any], x: np.ndarray) -> None:
        self.parts.append(x)
        self.names.extend(ids)

    @property
    def values(self) -> np.ndarray:
        return np.concatenate(self.parts, 1)


class _Top:
    """The k best of each query so far."""

    def __init__(self, queries: int, k: int, largest: bool):
        self.k, self.sign = k, 1 if largest else -1
        self.best = np.zeros((queries, 0), np.float32)
        self.ids = np.empty((queries, 0), dtype=object)

    def add(self, ids: Sequence[Any], x: np.ndarray) -> None:
        if np.isnan(x).any():
            bad = ids[int(np.isnan(x).any(0).argmax())]
            raise ValueError(f"the score of row {bad!r} is not a number: is its gradient finite?")
        x = self.sign * x
        columns = np.arange(x.shape[1])
        if self.best.shape[1] == self.k:  # only what beats the last of some query
            columns = np.flatnonzero((x > self.best[:, -1:]).any(0))
        named = np.empty(len(columns), dtype=object)
        named[:] = [ids[int(i)] for i in columns]
        both = np.concatenate([self.best, x[:, columns]], 1)
        named = np.concatenate([self.ids, np.broadcast_to(named, (len(x), len(columns)))], 1)
        order = np.argsort(-both, axis=1, kind="stable")[:, : self.k]
        self.best = np.take_along_axis(both, order, 1)
        self.ids = np.take_along_axis(named, order, 1)

    @property
    def values(self) -> np.ndarray:
        return self.sign * self.best

    @property
    def names(self) -> list[list[Any]]:
        return self.ids.tolist()


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
