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

from ._array import Array, like, namespace, placed, precise, to_numpy
from ._compress import Layout, flatten, unflatten
from ._statistics import State, eigh, finalize

KINDS = ("none", "diagonal", "kfac", "ekfac", "raw")
RELATIVE = 0.1


@dataclasses.dataclass(frozen=True)
class Spectrum:
    """Of one layer: Λ in the shape of the rotated gradient, and its Q (None: the identity)."""

    values: Array
    left: Array | None = None
    right: Array | None = None

    def damping(self, relative: float) -> float:
        return relative * float(to_numpy(self.values).mean(dtype=np.float64))

    def inverse(self, damping: float) -> Array:
        """1 / (Λ + λ). Without damping the pseudo-inverse: a direction with no curvature gets 0."""
        total = self.values + damping
        smallest = 0.0
        if damping == 0:
            eps = np.finfo(to_numpy(self.values[:0]).dtype).eps
            smallest = float(eps * max(self.values.shape) * self.values.max())
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
        _rotations: dict[Any, Array] | None = None,
    ):
        self.kind, self.damping, self.relative = kind, damping, relative
        self.spectra = spectra
        self._rotations = {} if _rotations is None else _rotations
        self._inverses: dict[Any, Array] = {}

    def damped(self, damping: float | None = None, relative: float = RELATIVE) -> Preconditioner:
        """The same curvature with another damping; what does not depend on it is shared."""
        return Preconditioner(self.kind, self.spectra, damping, relative, self._rotations)

    def damping_of(self, layer: str) -> float:
        """The λ that is added to this layer's spectrum."""
        own = self.damping
        return self.spectra[layer].damping(self.relative) if own is None else own

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
        return None if own is None else placed(self._rotations, (layer, side), lambda: own, grad)


def prepare(
    kind: str, statistics: State, damping: float | None = None, relative: float = RELATIVE
) -> Preconditioner:
    """A preconditioner from summed statistics, which are not changed.

    Arguments:

    - `damping`: λ for all layers; None: `relative` × the mean eigenvalue of each layer's own.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown preconditioner {kind!r}. Known are: {', '.join(KINDS)}")
    for name, value in (("damping", damping), ("relative", relative)):
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{name}={value}: it must be finite and not negative")
    spectra = {}
    if kind != "none":
        found = {layer: _spectrum(kind, s) for layer, s in finalize(statistics).items()}
        spectra = {layer: s for layer, s in found.items() if s is not None}
        if not spectra or len(spectra) < len(found):
            missing = ", ".join(repr(layer) for layer in found if layer not in spectra) or "all"
            raise ValueError(
                f"there are no statistics for {kind!r} of these layers: {missing}; "
                f'the best these allow is {auto(statistics)!r}. Accumulate "{kind}" first.'
            )
    return Preconditioner(kind, spectra, damping, relative)


def auto(statistics: State) -> str:
    """The best kind that the statistics allow."""
    for stat, kind in (
        ("eigen", "ekfac"),
        ("left", "kfac"),
        ("raw", "raw"),
        ("square", "diagonal"),
    ):
        if any(stat in stats for stats in statistics.values()):
            return kind
    return "none"


def _spectrum(kind: str, stats: Mapping[str, Array]) -> Spectrum | None:
    if kind == "ekfac" and "eigen" in stats:
        return Spectrum(stats["eigen"], stats.get("left_basis"), stats.get("right_basis"))
    if kind == "kfac" and "left" in stats:
        sides = {side: (stats[side], None) for side in ("left", "right")}
        for side, (x, _) in sides.items():
            if x.ndim == 2:  # a vector is a diagonal covariance, its own spectrum
                sides[side] = eigh(x)
        left, right = sides["left"], sides["right"]
        return Spectrum(left[0][:, None] * right[0][None, :], left[1], right[1])
    # Under K-FAC, what is no matrix has a covariance of its own, or only its squares.
    if "raw" in stats and kind != "diagonal" and (kind == "raw" or "left" not in stats):
        values, vectors = eigh(stats["raw"])
        # A vector as a matrix of one row: the product from the right is its rotation.
        return Spectrum(values[None], None, vectors)
    if "square" in stats and (kind == "diagonal" or (kind != "raw" and "left" not in stats)):
        return Spectrum(stats["square"])
    return None


def select_damping(
    preconditioner: Preconditioner,
    score: Callable[[Preconditioner], float],
    relatives: Iterable[float] = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0),
    refine: int = 1,
) -> tuple[Preconditioner, dict[float, float]]:
    """The relative damping with the highest score, and the scores of all that were tried.

    Arguments:

    - `score`: how good a preconditioner is, on held-out queries (`lambda p: lds(…).mean`).
    - `relatives`: a first grid, in multiples of each layer's mean eigenvalue.
    - `refine`: how often the geometric means with the best one's neighbours are tried too.
    """
    tried: dict[float, float] = {}
    new = sorted(set(relatives))
    for _ in range(refine + 1):
        tried |= {r: float(score(preconditioner.damped(relative=r))) for r in new}
        grid = sorted(tried)
        best = max(grid, key=lambda r: -math.inf if math.isnan(tried[r]) else tried[r])
        at = grid.index(best)
        sides = [grid[i] for i in (at - 1, at + 1) if 0 <= i < len(grid)]
        new = [math.sqrt(best * r) for r in sides if best * r > 0]
    return preconditioner.damped(relative=best), tried
