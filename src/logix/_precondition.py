"""Preconditioners: products with the inverse of a damped curvature, layer by layer.

Each is kept as eigenvectors and eigenvalues without damping, and a product is

    Q_left [ (Q_leftᵀ G Q_right) / (Λ + λ) ] Q_rightᵀ

    none       G itself
    diagonal   Λ = E[G²]                                  no Q
    kfac       Λ = eigenvalues of left ⊗ right            Q: their eigenvectors
    ekfac      Λ = E[(Q_leftᵀ G Q_right)²]                Q: those of K-FAC
    raw        Λ, Q of E[vec G vec Gᵀ]                    G as a vector

λ is `relative` × the mean of the layer's own Λ, or what `damping` says. It is used where
1 / (Λ + λ) is made and is nowhere kept: another damping gives what a fresh start with it gives.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ._array import Array, as_double, like, namespace, placed, precise
from ._compress import Layout, flatten, unflatten
from ._progress import progress
from ._statistics import BASES, State, average, eigh

KINDS = ("none", "diagonal", "kfac", "ekfac", "raw")
RELATIVE = 0.1


@dataclasses.dataclass(frozen=True)
class Spectrum:
    """Of one layer: Λ in the shape of the rotated gradient, and its Q (None: the identity)."""

    values: Array
    left: Array | None = None
    right: Array | None = None

    def mean(self) -> float:
        """Of Λ, computed where it is: there are as many values as weights."""
        xp = namespace(self.values)
        if xp.__name__ in ("numpy", "torch"):
            return float(self.values.mean(dtype=xp.float64))
        return float(as_double(self.values).mean())

    def inverse(self, damping: float) -> Array:
        """1 / (Λ + λ). Without damping the pseudo-inverse: a direction with no curvature gets 0."""
        total = self.values + damping
        smallest = 0.0
        if damping == 0:
            eps = float(namespace(total).finfo(total.dtype).eps)
            smallest = eps * max(self.values.shape) * float(self.values.max())
        good = total > smallest
        where = namespace(total).where
        return where(good, 1 / where(good, total, like(np.ones(()), total)), 0 * total)


class Preconditioner:
    """`apply` to gradients of layers, `rows` to rows. Made by `prepare`."""

    def __init__(
        self,
        kind: str,
        spectra: Mapping[str, Spectrum],
        damping: float | None = None,
        relative: float = RELATIVE,
        _shared: tuple[dict[Any, Array], dict[str, float]] | None = None,
    ):
        self.kind, self.damping, self.relative = kind, damping, relative
        self.spectra = spectra
        # What does not depend on the damping: Q at the places it was needed, and means of Λ.
        self._shared = ({}, {}) if _shared is None else _shared
        self._inverses: dict[Any, Array] = {}

    def damped(self, damping: float | None = None, relative: float = RELATIVE) -> Preconditioner:
        """The same curvature with another damping; what does not depend on it is shared."""
        _checked(damping=damping, relative=relative)
        return Preconditioner(self.kind, self.spectra, damping, relative, self._shared)

    def damping_of(self, layer: str) -> float:
        """The λ that is added to this layer's spectrum."""
        if self.damping is not None:
            return self.damping
        means = self._shared[1]
        if layer not in means:
            means[layer] = self.spectra[layer].mean()
        return self.relative * means[layer]

    def apply(self, grads: Mapping[str, Array]) -> dict[str, Array]:
        """{layer: (B, …)} to the same shapes."""
        if self.kind == "none":
            return dict(grads)
        return {layer: self._layer(layer, grad) for layer, grad in grads.items()}

    def rows(self, rows: Array, where: Layout) -> Array:
        """(B, D) to (B, D)."""
        return rows if self.kind == "none" else flatten(self.apply(unflatten(rows, where)), where)

    def _layer(self, layer: str, grad: Array) -> Array:
        if layer not in self.spectra:
            raise KeyError(
                f"no statistics for {self.kind!r} of layer {layer!r}. "
                f"They are there for: {', '.join(self.spectra) or 'no layer'}"
            )
        own = self.spectra[layer]
        if math.prod(grad.shape[1:]) != math.prod(own.values.shape):
            raise ValueError(
                f"layer {layer!r}: gradients of shape {tuple(grad.shape[1:])}, statistics of "
                f"{tuple(own.values.shape)}. Log both with the same compression."
            )
        with precise(grad):
            make = lambda: own.inverse(self.damping_of(layer))
            inverse = placed(self._inverses, layer, make, grad)
            x = grad.reshape(len(grad), *own.values.shape)
            left, right = (self._rotation(layer, side, grad) for side in ("left", "right"))
            x = x if right is None else x @ right
            x = x if left is None else left.T @ x
            x = x * inverse
            x = x if left is None else left @ x
            x = x if right is None else x @ right.T
            return x.reshape(grad.shape)

    def _rotation(self, layer: str, side: str, grad: Array) -> Array | None:
        own = getattr(self.spectra[layer], side)
        return None if own is None else placed(self._shared[0], (layer, side), lambda: own, grad)


def prepare(
    kind: str, statistics: State, damping: float | None = None, relative: float = RELATIVE
) -> Preconditioner:
    """A preconditioner from summed statistics, which are not changed.

    Arguments:

    - `damping`: λ for all layers; None: `relative` × the mean eigenvalue of each layer's own.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown preconditioner {kind!r}. Known are: {', '.join(KINDS)}")
    _checked(damping=damping, relative=relative)
    spectra = {}
    if kind != "none":
        own = {layer: s for layer, s in statistics.items() if _of_gradients(s)}
        if kind in ("kfac", "ekfac") and auto(statistics) not in ("kfac", "ekfac"):
            # Squares of a matrix are not what K-FAC keeps: it was not accumulated.
            found = {n: None if _is_matrix(s) else _spectrum(kind, s) for n, s in own.items()}
        else:
            every = progress(own.items(), what="eigenvectors")
            found = {layer: _spectrum(kind, s) for layer, s in every}
        spectra = {layer: s for layer, s in found.items() if s is not None}
        if not spectra or len(spectra) < len(found):
            missing = ", ".join(repr(layer) for layer in found if layer not in spectra) or "all"
            raise ValueError(
                f"there are no statistics for {kind!r} of these layers: {missing}; "
                f'the best these allow is {auto(statistics)!r}. Accumulate "{kind}" first.'
            )
    return Preconditioner(kind, spectra, damping, relative)


def _checked(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{name}={value}: it must be finite and not negative")


def auto(statistics: State) -> str:
    """The best kind that the statistics allow."""
    layers = [stats.keys() for stats in statistics.values() if _of_gradients(stats)]
    if any("eigen" in names for names in layers):
        return "ekfac"
    if any({"left", "right"} <= names for names in layers):
        return "kfac"
    kinds = {"raw": "raw", "square": "diagonal"}
    for name, kind in kinds.items():
        if layers and all(name in names for names in layers):
            return kind
    if layers and all(names & kinds.keys() for names in layers):
        return "kfac"  # of a run in which nothing is a matrix: some are short, some long
    return next((kind for n, kind in kinds.items() if any(n in names for names in layers)), "none")


def _of_gradients(stats: Mapping[str, Array]) -> bool:
    """Whether these are not only statistics of what goes into a layer or comes back to it."""
    names = stats.keys()
    return bool(names & {"sum", "square", "eigen", "raw"}) or {"left", "right"} <= names


def _is_matrix(stats: Mapping[str, Array]) -> bool:
    return any(name in stats and stats[name].ndim == 2 for name in ("sum", "square"))


def _spectrum(kind: str, stats: Mapping[str, Array]) -> Spectrum | None:
    """From the sums of a layer, of which only those that are needed are divided."""
    if kind == "ekfac" and "eigen" in stats:
        bases = [stats.get(name) for name in BASES]
        # A vector is the diagonal of the identity: that side has no rotation.
        left, right = (q if q is not None and q.ndim == 2 else None for q in bases)
        return Spectrum(average(stats, "eigen"), left, right)
    factors = {"left", "right"} & stats.keys()
    if kind == "kfac" and len(factors) == 2:
        (left, q), (right, r) = (_eigen(average(stats, side)) for side in ("left", "right"))
        return Spectrum(left[:, None] * right[None, :], q, r)
    # Under K-FAC, what is no matrix has a covariance of its own, or only its squares.
    if "raw" in stats and kind != "diagonal" and (kind == "raw" or not factors):
        values, vectors = eigh(average(stats, "raw"))
        # A vector as a matrix of one row: the product from the right is its rotation.
        return Spectrum(values[None], None, vectors)
    if "square" in stats and (kind == "diagonal" or (kind != "raw" and not factors)):
        return Spectrum(average(stats, "square"))
    return None


def _eigen(covariance: Array) -> tuple[Array, Array | None]:
    """A vector is a diagonal covariance, and its own spectrum."""
    return (covariance, None) if covariance.ndim == 1 else eigh(covariance)


GRID = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)


def select_damping(
    preconditioner: Preconditioner,
    score: Callable[[Preconditioner], float],
    relatives: Iterable[float] = GRID,
    refine: int = 1,
) -> tuple[Preconditioner, dict[float, float]]:
    """The relative damping with the highest score, and the scores of all that were tried.

    Arguments:

    - `score`: how good a preconditioner is, on held-out queries (`lambda p: lds(…).mean`).
    - `relatives`: a first grid, in multiples of each layer's mean eigenvalue.
    - `refine`: how often the geometric means with the best one's neighbours are tried too.
    """
    damped = lambda r: preconditioner.damped(relative=r)
    best, tried = search_damping(lambda r: score(damped(r)), relatives, refine)
    return damped(best), tried


def search_damping(
    score: Callable[[float], float], relatives: Iterable[float] = GRID, refine: int = 1
) -> tuple[float, dict[float, float]]:
    """The same of a score that takes the relative damping itself."""
    tried: dict[float, float] = {}
    new = sorted(set(relatives))
    for _ in range(refine + 1):
        tried |= {r: float(score(r)) for r in new}
        grid = sorted(tried)
        best = max(grid, key=lambda r: -math.inf if math.isnan(tried[r]) else tried[r])
        at = grid.index(best)
        sides = [grid[i] for i in (at - 1, at + 1) if 0 <= i < len(grid)]
        new = [math.sqrt(best * r) for r in sides if best * r > 0]
    return best, tried
