"""How good scores are, against what retraining says: NumPy in, small results out.

Scores are (queries, train): positive where training on the example helps the query. Outputs are
therefore such that larger is better: a margin, a log-likelihood, minus a loss.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class LDS:
    """Of `lds`: the mean over queries with its interval, and what a perfect method would reach.

    >>> import numpy as np
    >>> from logix.evaluate import LDS
    >>> LDS(0.6, 0.55, 0.65, 0.85, 0.72, np.array([0.6])).ceiling
    0.85
    """

    mean: float
    low: float
    high: float
    ceiling: float | None
    reliability: float | None
    per_query: np.ndarray


@dataclasses.dataclass(frozen=True)
class Correlation:
    """Of `loo_correlation`: means over queries, and each query's own rank correlation.

    >>> import numpy as np
    >>> from logix.evaluate import Correlation
    >>> Correlation(0.9, 0.8, np.array([0.9])).spearman
    0.9
    """

    spearman: float
    pearson: float
    per_query: np.ndarray


@dataclasses.dataclass(frozen=True)
class Detection:
    """Of `mislabel_detection`: the area under the curve, and what the first `k` hold.

    >>> from logix.evaluate import Detection
    >>> Detection(auroc=0.99, precision=0.8, recall=0.8, k=10).k
    10
    """

    auroc: float
    precision: float
    recall: float
    k: int


def lds(
    scores: Any,
    subset_masks: Any,
    subset_outputs: Any,
    *,
    confidence: float = 0.95,
    resamples: int = 1000,
    splits: int = 20,
    seed: int = 0,
) -> LDS:
    """Linear datamodeling score: do summed scores predict what models retrained on subsets say?

    For each query, Spearman's correlation over subsets between Σ_{t in subset} score[q, t] and the
    mean output of the models trained on the subset; then the mean over queries.

    >>> import numpy as np
    >>> from logix.evaluate import lds
    >>> rng = np.random.default_rng(0)
    >>> scores = rng.normal(size=(5, 40))
    >>> masks = rng.random((30, 40)) < 0.5
    >>> round(lds(scores, masks, masks @ scores.T).mean, 6)
    1.0

    Arguments:

    - `scores`: (Q, N).
    - `subset_masks`: (M, N), what each subset holds.
    - `subset_outputs`: (M, Q), or (M, S, Q) of S trainings that differ in the seed.
    - `confidence`, `resamples`: of the interval, from queries drawn again with replacement.
    - `splits`: random halves of the S trainings for the ceiling: their correlation, stepped up to
      all S by Spearman and Brown's formula, is the reliability of the outputs; its root is the
      score of a method without error. None with one training per subset.

    Returns an `LDS`.
    """
    scores, masks = (
        np.asarray(getattr(scores, "influence", scores), np.float64),
        np.asarray(subset_masks, bool),
    )
    outputs = np.asarray(subset_outputs, np.float64)
    outputs = outputs[:, None] if outputs.ndim == 2 else outputs
    if outputs.ndim != 3 or masks.shape != (len(outputs), scores.shape[1]):
        raise ValueError(
            f"scores {scores.shape}, subset_masks {masks.shape}, subset_outputs "
            f"{np.shape(subset_outputs)}: they must be (Q, N), (M, N) and (M, Q) or (M, S, Q)"
        )
    if outputs.shape[2] != len(scores):
        raise ValueError(f"outputs of {outputs.shape[2]} queries, scores of {len(scores)}")
    found = _spearman(scores @ masks.T, outputs.mean(1).T)
    rng = np.random.Generator(np.random.Philox(seed))
    means = found[rng.integers(len(found), size=(resamples, len(found)))].mean(1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    reliability = _reliability(outputs, splits, rng)
    ceiling = None if reliability is None else math.sqrt(max(reliability, 0.0))
    return LDS(float(found.mean()), float(low), float(high), ceiling, reliability, found)


def loo_correlation(scores: Any, effects: Any) -> Correlation:
    """Do scores agree with what leaving single examples out does?

    >>> import numpy as np
    >>> from logix.evaluate import loo_correlation
    >>> scores = np.random.default_rng(0).normal(size=(3, 20))
    >>> round(loo_correlation(scores, 2 * scores).pearson, 6)
    1.0

    Arguments:

    - `scores`: (Q, N).
    - `effects`: (Q, N), the output of the query with the example minus that without it.

    Returns a `Correlation` over the examples.
    """
    x, y = (
        np.asarray(getattr(scores, "influence", scores), np.float64),
        np.asarray(effects, np.float64),
    )
    if x.shape != y.shape or x.ndim != 2:
        raise ValueError(f"scores {x.shape} and effects {y.shape} must both be (Q, N)")
    found = _spearman(x, y)
    return Correlation(float(found.mean()), float(_pearson(x, y).mean()), found)


def mislabel_detection(self_influence: Any, is_wrong: Any, k: int | None = None) -> Detection:
    """Do wrongly labelled examples have the largest self-influence?

    >>> from logix.evaluate import mislabel_detection
    >>> mislabel_detection([0.1, 3.0, 0.2, 2.0], [False, True, False, True])
    Detection(auroc=1.0, precision=1.0, recall=1.0, k=2)

    Arguments:

    - `self_influence`: (N,).
    - `is_wrong`: (N,), True where the label is known to be wrong.
    - `k`: how many of the largest are looked at; as many as are wrong by default.

    Returns a `Detection`: the area under the ROC curve, and precision and recall among those k.
    """
    x, wrong = _numbers(self_influence), np.asarray(is_wrong, bool)
    n = int(wrong.sum())
    if x.shape != wrong.shape or x.ndim != 1 or not 0 < n < len(wrong):
        raise ValueError(
            f"self_influence {x.shape} and is_wrong {wrong.shape} must both be (N,), and some but "
            f"not all of is_wrong be True (there are {n})"
        )
    k = n if k is None else min(k, len(x))
    # Mann and Whitney: the chance that a wrong one is above a right one, equal ones by half.
    above = _ranks(x[None])[0][wrong].sum() - n * (n - 1) / 2
    hits = int(wrong[np.argsort(-x, kind="stable")[:k]].sum())
    return Detection(float(above / (n * (len(x) - n))), hits / k, hits / n, k)


def _ranks(x: np.ndarray) -> np.ndarray:
    """Along the last axis, from 0; equal values have the mean of their ranks."""
    out = np.empty(x.shape)
    for row, target in zip(x, out):
        _, where, counts = np.unique(row, return_inverse=True, return_counts=True)
        target[:] = (np.cumsum(counts) - (counts + 1) / 2)[where]
    return out


def _pearson(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Along the last axis. A constant row predicts nothing: 0."""
    x, y = x - x.mean(-1, keepdims=True), y - y.mean(-1, keepdims=True)
    scale = np.sqrt((x**2).sum(-1) * (y**2).sum(-1))
    return np.where(scale > 0, (x * y).sum(-1) / np.where(scale > 0, scale, 1), 0.0)


def _spearman(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return _pearson(_ranks(x), _ranks(y))


def _reliability(outputs: np.ndarray, splits: int, rng: np.random.Generator) -> float | None:
    seeds = outputs.shape[1]
    half = seeds // 2
    if half == 0:
        return None
    found = []
    for _ in range(splits):
        order = rng.permutation(seeds)
        a, b = (outputs[:, order[s]].mean(1).T for s in (slice(half), slice(half, 2 * half)))
        found.append(_spearman(a, b).mean())
    r, times = float(np.mean(found)), seeds / half
    return times * r / (1 + (times - 1) * r)


def _numbers(scores: Any) -> np.ndarray:
    """Scores as they are, or those of an `Influence`."""
    return np.asarray(getattr(scores, "influence", scores), np.float64)
