"""Compression: a record made small before its gradient is made, by projections fixed by a seed.

A gradient is a matrix G = Σ_t l_t ⊗ r_t, (left, right). LoGra keeps P_leftᵀ G P_right, which is the
gradient of a small record, l P_left and r P_right: B·T·left·right is never there. What is no
matrix (a bias, a norm) is folded: its entries, with random signs, are summed in rank² groups.

Projections are scaled so that E[P Pᵀ] = 1: scores of compressed gradients are those of the whole
ones in expectation, whatever the rank. Random columns are orthonormal (times √(dim / rank)) rather
than gaussian: they lose nothing but what they leave out, so the error falls to zero as the rank
grows to the layer's own size. PCA's columns are eigenvectors, not scaled: they keep most of it.

All come from the bits of Philox, keyed by the seed, the layer's name and the side. NumPy promises
these bits for ever (not its normal numbers, which are made here), so a query logged years later,
in another framework, is projected the same way.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from ._array import Array, add_rows, as_float, eigh, like, namespace, placed, precise
from ._record import Lookup, Outer, Record, Whole

Side = Literal["left", "right", "whole"]
Layout = Sequence[tuple[str, tuple[int, ...], int]]  # name, shape, offset: what a row is made of
_CHOICES = {"kind": ("none", "logra", "sparse"), "init": ("random", "pca")}


@dataclasses.dataclass(frozen=True)
class Compression:
    """The settings: all that is needed to project again, apart from a PCA's arrays."""

    kind: str = "none"
    init: str = "random"
    rank: int = 64
    seed: int = 0
    shared: tuple[str, ...] | None = None  # words: layers whose names contain the same one share

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {known}")
        if self.rank < 1:
            raise ValueError(f"rank={self.rank}: at least 1 is needed")
        if self.kind == "sparse" and self.init == "pca":
            raise ValueError('init="pca" is for kind="logra": a sparse projection is random')
        if self.shared is not None and self.init == "pca":
            raise ValueError('shared projections are random: init="pca" is of one layer')

    def source(self, layer: str) -> str:
        """The name that a layer's projections are made from."""
        words = [word for word in self.shared or () if word in layer]
        return f"shared:{words[0]}" if words else layer

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Of a compressed gradient, for that of a whole one."""
        if self.kind == "none":
            return tuple(shape)
        if len(shape) == 2:
            return min(self.rank, shape[0]), min(self.rank, shape[1])
        return tuple(shape) if math.prod(shape) <= self.rank**2 else (self.rank**2,)

    def ratio(self, shapes: Iterable[Sequence[int]]) -> float:
        """How many times smaller rows are than gradients of these shapes."""
        shapes = list(shapes)
        kept = sum(math.prod(self.shape(s)) for s in shapes)
        return sum(math.prod(s) for s in shapes) / kept if kept else 1.0

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Compression:
        shared = content.get("shared")
        return cls(**{**content, "shared": None if shared is None else tuple(shared)})


class Projector:
    """Compresses records by the settings; makes each projection once for each device and dtype."""

    def __init__(self, settings: Compression, pca: Mapping[str, Mapping[str, Array]] | None = None):
        self.settings = settings
        self.pca = pca or {}
        self._cache: dict[Any, Array] = {}

    @classmethod
    def from_covariances(
        cls, settings: Compression, averages: Mapping[str, Mapping[str, Array]]
    ) -> Projector:
        """A PCA from the covariances "left" and "right" of each layer (`statistics.finalize`)."""
        pca: dict[str, dict[str, Array]] = {}
        for layer, stats in averages.items():
            for side in ("left", "right"):
                if side not in stats:
                    continue
                own = pca.setdefault(layer, {})
                own[side] = np.zeros((0, 0), np.float32)  # known, and random or small enough
                if stats[side].ndim == 2 and len(stats[side]) > settings.rank:
                    own[side] = eigh(stats[side])[1][:, -settings.rank :]  # eigenvalues ascend
        return cls(settings, pca)

    def record(self, record: Record) -> Record:
        """The record whose gradient is the projected gradient of `record`, in float32 or better."""
        if self.settings.kind == "none":
            return record
        name, layer = record.layer, self.settings.source(record.layer)
        if isinstance(record, Whole):
            with precise(record.value):
                return Whole(name, self._whole(layer, record.value))
        with precise(record.g):
            if isinstance(record, Outer):
                right = self._side(layer, "right", record.a)
                return Outer(name, right, self._side(layer, "left", record.g), record.real)
            right = self._side(layer, "right", record.g)
            if record.rows <= self.settings.rank:
                return Lookup(name, record.i, right, record.rows)
            make = lambda: self.matrix(layer, "left", record.rows)
            left = self.placed((layer, "left", record.rows), make, right)
            return Outer(name, right, left[record.i])

    def placed(
        self, key: Hashable, make: Callable[[], Array], other: Array, cast: bool = True
    ) -> Array:
        """What `make` gives, as an array like `other`, made once."""
        return placed(self._cache, key, make, other, cast)

    def matrix(self, layer: str, side: Side, dim: int) -> Array:
        """(dim, rank), in float64 if it is random."""
        if self.settings.init == "random":
            return self._random(layer, side, dim)
        if layer not in self.pca:
            known = ", ".join(self.pca) or "none: fit it first"
            raise KeyError(f"the PCA has no layer {layer!r}. Its layers: {known}")
        found = self.pca[layer].get(side)
        # Of a side whose covariance is a diagonal (a table's rows, a large vocabulary) it would
        # be the most frequent entries, and nothing of the others: it stays random.
        return self._random(layer, side, dim) if found is None or not len(found) else found

    def _side(self, layer: str, side: Side, x: Array) -> Array:
        dim, rank = x.shape[-1], self.settings.rank
        if dim <= rank:
            return as_float(x)
        if self.settings.kind == "sparse":
            return self._fold(layer, side, x, rank)
        # bfloat16 has the range of float32, and products of its own are fast. float16 may overflow.
        x = x if getattr(x.dtype, "itemsize", 4) == 2 and "bf" in str(x.dtype) else as_float(x)
        make = lambda: self.matrix(layer, side, dim)
        return as_float(x @ self.placed((layer, side, dim), make, x))

    def _whole(self, layer: str, x: Array) -> Array:
        if x.ndim != 3:
            n, kept = math.prod(x.shape[1:]), self.settings.rank**2
            return self._fold(layer, "whole", x.reshape(-1, n), kept) if n > kept else as_float(x)
        if self.settings.init == "pca":  # of two sides no covariance is known
            random = copy.copy(self)
            random.settings = dataclasses.replace(self.settings, init="random")
            return random._whole(layer, x)
        x = self._side(layer, "right", x)
        return self._side(layer, "left", x.swapaxes(1, 2)).swapaxes(1, 2)

    def _fold(self, layer: str, side: Side, x: Array, rank: int) -> Array:
        """Like a product with `_random` of a sparse kind, at the cost of reading x once."""
        x = as_float(x)
        fold = lambda i: lambda: _fold(self.settings.seed, layer, side, x.shape[-1], rank)[i]
        key = (layer, side, x.shape[-1], rank)
        index = self.placed((*key, "index"), fold(0), x, cast=False)
        signs = self.placed((*key, "signs"), fold(1), x)
        return (x[..., index] * signs).reshape(*x.shape[:-1], rank, -1).sum(-1)

    def _random(self, layer: str, side: Side, dim: int) -> np.ndarray:
        rank, seed = self.settings.rank, self.settings.seed
        if self.settings.kind == "sparse":
            index, signs = _fold(seed, layer, side, dim, rank)
            out = np.zeros((dim, rank))
            np.add.at(out, (index, np.arange(len(index)) // (len(index) // rank)), signs)
            return out
        q, r = np.linalg.qr(_normals(_bits(seed, layer, side, 2 * dim * rank)).reshape(dim, rank))
        # The signs make the columns uniformly distributed, and the same from every LAPACK.
        return q * np.sign(np.diagonal(r)) * math.sqrt(dim / rank)


def _bits(seed: int, layer: str, side: str, n: int) -> np.ndarray:
    digest = hashlib.blake2b(f"{seed}\0{side}\0{layer}".encode(), digest_size=16).digest()
    return np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(n)


def _normals(bits: np.ndarray) -> np.ndarray:
    """Half as many standard normal numbers, by Box and Muller's formula."""
    u, v = ((bits >> np.uint64(11)) + 0.5).reshape(2, -1) * 2.0**-53
    return np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v)


def _fold(seed: int, layer: str, side: str, dim: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Entries in random order, cut into `rank` groups of one length (padded), and their signs."""
    bits = _bits(seed, layer, side, dim)
    index = np.zeros((-(-dim // rank), rank), dtype=np.int64)
    signs = np.zeros(index.shape)
    index.reshape(-1)[:dim] = np.argsort(bits, kind="stable")
    # The order is that of the high bits, so the lowest one is still free.
    signs.reshape(-1)[:dim] = 1.0 - 2.0 * (bits[index.reshape(-1)[:dim]] & np.uint64(1))
    return index.T.reshape(-1), signs.T.reshape(-1)


def gradients(records: Iterable[Record]) -> dict[str, Array]:
    """Per layer (B, …), in float32 or better. Records of one layer (several uses of it) add up."""
    out: dict[str, Array] = {}
    for record in records:
        x = record.value if isinstance(record, Whole) else record.g
        with precise(x):
            if isinstance(record, Lookup):
                (b, t, width), rows, xp = record.g.shape, record.rows, namespace(record.g)
                start = like(np.arange(b)[:, None] * rows, xp.asarray(record.i), cast=False)
                flat = as_float(record.g).reshape(b * t, width)
                grad = add_rows(b * rows, (record.i + start).reshape(-1), flat)
                grad = grad.reshape(b, rows, width)
            elif isinstance(record, Outer):
                grad = Outer(record.layer, as_float(record.a), as_float(record.g)).grad()
            else:
                grad = as_float(record.value)
            out[record.layer] = out[record.layer] + grad if record.layer in out else grad
    return out


def layout(shapes: Mapping[str, Sequence[int]]) -> list[tuple[str, tuple[int, ...], int]]:
    """Where the gradient of each layer is in a row: (name, shape, offset)."""
    out, offset = [], 0
    for name, shape in shapes.items():
        out.append((name, tuple(shape), offset))
        offset += math.prod(shape)
    return out


def flatten(grads: Mapping[str, Array], where: Layout) -> Array:
    """(B, D): gradients as rows."""
    parts = [grads[name].reshape(grads[name].shape[0], math.prod(s)) for name, s, _ in where]
    return namespace(parts[0]).concatenate(parts, 1)


def unflatten(rows: Array, where: Layout) -> dict[str, Array]:
    return {n: rows[:, o : o + math.prod(s)].reshape(len(rows), *s) for n, s, o in where}
