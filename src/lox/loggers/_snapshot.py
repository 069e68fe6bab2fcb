"""A console's board at one moment: for each key, numbers over its runs; and how fast they go."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Line:
    """One key over all runs that logged it. Numbers are those of the runs with a finite value."""

    key: str
    shape: tuple[int, ...]  # of a value; an array is shown by the mean of its elements
    whole: bool  # is it a whole number
    text: str | None  # what is no number
    axis: str | None  # the step's name; None if there is none, and events are counted
    history: list[float]
    runs: int
    bad: int  # runs whose value is not finite
    mean: float
    std: float
    low: float
    high: float
    behind: float  # the step of the slowest run, and of the fastest
    ahead: float


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """All that is shown."""

    runs: int
    lines: list[Line]
    axis: str | None  # of the progress
    total: float | None
    done: float | None  # steps done, the mean over runs
    rate: float | None  # steps per second of a run
    left: float | None  # seconds until all runs are at `total`
    seconds: float


def finite_mean(x: np.ndarray, axis: int = 0) -> np.ndarray:
    """The mean of what is finite; NaN if nothing is."""
    finite = np.isfinite(x)
    if finite.all() and x.shape[axis]:
        return x.mean(axis)
    count = finite.sum(axis)
    return np.where(count, np.where(finite, x, 0.0).sum(axis) / np.maximum(count, 1), np.nan)


def over_runs(rows: np.ndarray) -> list[dict[str, Any]]:
    """The numbers of all lines at once, from (keys, [latest, step, seen], runs)."""
    latest, step, seen = rows[:, 0], rows[:, 1], rows[:, 2] > 0
    finite = np.isfinite(latest) & seen
    values = np.where(finite, latest, np.nan)
    mean = finite_mean(values, 1)
    none = ~finite.any(1)
    with np.errstate(all="ignore"):
        std = np.sqrt(finite_mean((values - mean[:, None]) ** 2, 1))
        # Where no value is finite, say which it is: nan or inf.
        shown = np.where(none, np.where(seen, latest, 0.0).sum(1), mean)
    numbers = dict(
        runs=seen.sum(1),
        bad=(seen & ~finite).sum(1),
        mean=shown,
        std=std,
        low=np.where(none, np.nan, np.where(finite, latest, np.inf).min(1)),
        high=np.where(none, np.nan, np.where(finite, latest, -np.inf).max(1)),
        behind=np.where(seen, step, np.inf).min(1),
        ahead=np.where(seen, step, -np.inf).max(1),
    )
    lists = {name: x.tolist() for name, x in numbers.items()}
    return [dict(zip(lists, numbers_of)) for numbers_of in zip(*lists.values())]


def speed(
    since: tuple[float, np.ndarray] | None, now: float, done: np.ndarray, total: float | None
) -> tuple[float | None, float | None]:
    """Steps per second of a run that is going on, and the seconds left."""
    if since is None or now <= since[0]:
        return None, None
    then = np.zeros(len(done))
    then[: len(since[1])] = since[1]
    gained = np.maximum(done - then, 0.0)
    of_all = float(gained.sum()) / (now - since[0])
    left = None
    if total is not None and of_all > 0:
        left = float(np.maximum(total - done, 0.0).sum()) / of_all
    return of_all / max(int((gained > 0).sum()), 1), left
