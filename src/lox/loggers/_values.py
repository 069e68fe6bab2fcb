"""What a tracker can show of a value: a number, a histogram, an image, or none of them."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import urllib.parse
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from .._errors import LogError

BINS = 64


def is_number(x: Any) -> bool:
    """Is it one number? (The small floats of JAX are none of NumPy's own number types.)"""
    return np.ndim(x) == 0 and _numeric(x)


def is_array(x: Any) -> bool:
    """Is it an array of numbers, with at least one in it?"""
    return np.ndim(x) > 0 and np.size(x) > 0 and _numeric(x)


def _numeric(x: Any) -> bool:
    dtype = np.asarray(x).dtype
    return dtype == np.bool_ or jax.dtypes.issubdtype(dtype, np.number)


def whole(x: Any) -> int:
    """A step for trackers whose x axis has whole numbers of 64 bits."""
    x = x.item() if hasattr(x, "item") else x
    if not math.isfinite(x):
        return 0
    return min(max(math.floor(x), -(2**63)), 2**63 - 1)


@dataclasses.dataclass(frozen=True)
class Histogram:
    """How the values of an array are distributed. Those that are not finite are only counted."""

    counts: np.ndarray
    edges: np.ndarray
    values: np.ndarray  # those that are finite, as float64
    others: int


def histogram(x: np.ndarray) -> Histogram:
    every = np.asarray(x).astype(np.float64).reshape(-1)
    values = every[np.isfinite(every)]
    try:
        counts, edges = np.histogram(values, BINS)
    except ValueError:  # too close to each other, or too far, for as many bins
        low, high = float(values.min()), float(values.max())
        counts, edges = np.array([values.size]), np.array([low, max(high, np.nextafter(low, 1e9))])
    return Histogram(counts, edges, values, every.size - values.size)


def images(key: str, x: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The images in an array, as uint8 (height, width, channels), each with a name.

    Floats are from 0 to 1, integers from 0 to 255. Axes in front of an image's are several images.
    """
    x = np.asarray(x)
    if x.ndim < 2:
        raise LogError(
            f"{key!r} is to be an image, but has the shape {x.shape}. An image is (height, width), "
            "or (height, width, channels) with 1, 3 or 4 channels."
        )
    if jax.dtypes.issubdtype(x.dtype, np.floating):
        x = np.nan_to_num(x.astype(np.float32)) * 255
        x = np.round(np.clip(x, 0, 255))
    elif x.dtype == np.bool_:
        x = x * 255
    x = np.clip(x, 0, 255).astype(np.uint8)
    if x.ndim == 2 or x.shape[-1] not in (1, 3, 4):
        x = x[..., None]
    stack = x.reshape(-1, *x.shape[-3:])
    for i, image in enumerate(stack):
        yield (key if len(stack) == 1 else f"{key}/{i}"), image


class Unheld:
    """Names, once for each key, what a tracker can't hold. Nothing is left out in silence."""

    def __init__(self, logger: str):
        self._logger = logger
        self._named: set[str] = set()
        self._new: dict[str, Any] = {}

    def add(self, key: str, value: Any) -> None:
        if key not in self._named:
            self._named.add(key)
            self._new[key] = value

    def warn(self) -> None:
        """Warn of new ones: after the rest is written, for a warning may be made an error."""
        new, self._new = self._new, {}
        if new:
            what = ", ".join(f"{k!r} ({x.dtype}{list(x.shape)})" for k, x in new.items())
            warnings.warn(
                f"{self._logger} can't hold {what}, and leaves it out. Reduce it to numbers, or "
                "use a logger that keeps arrays as well: SaveLogger, CSVLogger.",
                RuntimeWarning,
                stacklevel=2,
            )


def safe_name(name: str, limit: int = 180) -> str:
    """A run's name as one part of a path. Different names stay different."""
    safe = urllib.parse.quote(name, safe=" =+@,()[]{}")
    if safe.strip(". ") != safe or not safe:
        safe = "%" + safe.encode().hex()
    if len(safe) > limit:
        safe = safe[: limit - 13] + "-" + hashlib.sha256(name.encode()).hexdigest()[:12]
    return safe
