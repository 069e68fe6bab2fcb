"""Curves: a key over its steps, the mean over runs and a band around it. What plots draw.

Lanes of a batch (`vmap`) and the logdicts of a list are runs. They may be of different lengths and
have different steps: each is interpolated within its own range, and what is not finite is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ._entry import Entry, Layout, as_events, event_axis
from ._event import leaf_name

Array = Any
Band = str | tuple[float, float] | None


class Curve(NamedTuple):
    """The mean over runs at each x, and the ends of the band around it."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def curves(logs: Any, key: str, x: str = "step", band: Band = "std") -> Curve:
    """One key over its steps: the mean over all runs, and a band. Arrays are averaged first.

    >>> import numpy as np, lox
    >>> a = lox.logdict({"loss": np.array([4.0, 2.0])}, step=np.array([0, 10]))
    >>> b = lox.logdict({"loss": np.array([6.0, 4.0, 2.0])}, step=np.array([0, 10, 20]))
    >>> curve = curves([a, b], "loss")
    >>> curve.x.tolist(), curve.mean.tolist(), curve.low.tolist()
    ([0.0, 10.0, 20.0], [5.0, 3.0, 2.0], [4.0, 2.0, 2.0])

    - `logs`: a logdict, or several, one for each run.
    - `key`: which key.
    - `x`: the step to use. Where there is no `step`, the first other; without any, the index.
    - `band`: `"std"`, `"minmax"`, two percentiles such as `(10, 90)`, or None.
    """
    _, [(_, curve)] = lines(logs, key, x, band, components=0)
    return curve


def lines(
    logs: Any, key: str, x: str = "step", band: Band = "std", components: int = 8
) -> tuple[str, list[tuple[str, Curve]]]:
    """The name of the x axis, and a curve for each component of a value.

    Values of more than `components` elements have one curve, that of their mean.
    """
    found = [one._entries[key] for one in several(logs) if key in one]
    if not found:
        raise KeyError(no_key(key, several(logs)))
    if len({tuple(_shapes(e)) for e in found}) > 1:
        components = 0
    all_runs = [_runs(key, entry, x, components) for entry in found]
    runs = [run for own in all_runs for run in own.runs]
    grid, values = _aligned(runs)
    names = all_runs[0].names
    stats = [(name, _stats(values[..., i], band)) for i, name in enumerate(names)]
    return all_runs[0].axis, [(name, Curve(grid, *s)) for name, s in stats]


def several(logs: Any) -> Sequence[Any]:
    return [logs] if hasattr(logs, "layouts") else logs


def no_key(key: str, logs: Sequence[Any]) -> str:
    known = ", ".join(dict.fromkeys(k for one in logs for k in one)) or "none"
    return f"no key {key!r} was logged. Keys here: {known}."


# --- from an entry to runs ------------------------------------------------------------------------


class _Runs(NamedTuple):
    axis: str  # the name of the x axis
    names: list[str]  # of the components
    runs: list[tuple[np.ndarray, np.ndarray]]  # x (E,) and values (E, components) of each run


def _runs(key: str, entry: Entry, x: str, components: int) -> _Runs:
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(entry.value)):
        raise TypeError(f"{key!r} is traced: it has no values yet. Plot what the function returns.")
    entry = as_events(_over_its_index(entry) if x in ("step", "index") else entry)
    axis = x if x in entry.steps or x != "step" else next(iter(entry.steps), "index")
    if axis != "index" and axis not in entry.steps:
        known = ", ".join(entry.steps) or "none"
        raise KeyError(f"{key!r} was logged with no step {x!r}. Steps here: {known}.")
    names, values, lead = _values(entry, components)
    mask = np.broadcast_to(True if entry.mask is None else np.asarray(entry.mask), lead)
    mask = mask.reshape(values.shape[:2])
    if axis == "index":
        steps = np.cumsum(mask, 1) - 1.0  # among the events that happened
    else:
        rank = dict(zip(entry.steps, entry.layout.step_ndims))[axis]
        step = _real(entry.steps[axis])
        at = event_axis(step, rank)
        step = step.max(tuple(range(at + 1, step.ndim))) if rank else step
        steps = np.broadcast_to(step, lead).reshape(values.shape[:2])
    return _Runs(axis, names, [(s[m], v[m]) for s, v, m in zip(steps, values, mask)])


def _over_its_index(entry: Entry) -> Entry:
    """A single vector is drawn over its own index, as if it were a row of events."""
    if entry.layout.events or entry.layout.ndims != (1,):
        return entry
    mask = entry.mask
    if mask is not None:
        mask = np.repeat(np.asarray(mask)[..., None], np.shape(entry.value)[-1], -1)
    return Entry(entry.value, {}, Layout(True, (0,)), mask)


def _values(entry: Entry, components: int) -> tuple[list[str], np.ndarray, tuple[int, ...]]:
    """The names of components; values (runs, E, components); the batch and event axes."""
    with_path = jax.tree_util.tree_leaves_with_path(entry.value)
    shapes = _shapes(entry)
    elements = sum(map(math.prod, shapes))
    names: list[str] = []
    parts: list[np.ndarray] = []
    lead: tuple[int, ...] = ()
    for (path, leaf), shape in zip(with_path, shapes, strict=True):
        leaf = np.asarray(leaf)
        lead = leaf.shape[: leaf.ndim - len(shape)]
        leaf = leaf.reshape(math.prod(lead[:-1]), lead[-1], math.prod(shape))
        if elements > components:  # summed at once: a whole network may be too large as float64
            leaf = np.abs(leaf) if np.iscomplexobj(leaf) else leaf
            parts.append(leaf.sum(-1, dtype=float, keepdims=True) / elements)
        else:
            name = leaf_name("", path)
            names += [name + (str(list(i)) if i else "") for i in np.ndindex(shape)]
            parts.append(_real(leaf))
    if not elements:
        return [""], np.full((*parts[0].shape[:2], 1), np.nan), lead
    if elements > components:
        return [""], np.sum(parts, axis=0), lead
    return names, np.concatenate(parts, -1), lead


def _shapes(entry: Entry) -> list[tuple[int, ...]]:
    leaves = zip(jax.tree.leaves(entry.value), entry.layout.ndims, strict=True)
    return [np.shape(x)[np.ndim(x) - n :] for x, n in leaves]


def _real(x: Array) -> np.ndarray:
    x = np.asarray(x)
    return np.abs(x) if np.iscomplexobj(x) else x.astype(float)


# --- from runs to a curve -------------------------------------------------------------------------


def _aligned(runs: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """All x of the runs, and their values there (runs, x, components)."""
    runs = [_in_order(x, y) for x, y in runs]
    grid = runs[0][0] if runs else np.zeros(0)
    if all(np.array_equal(x, grid) for x, _ in runs):
        return grid, np.stack([y for _, y in runs])
    grid = np.unique(np.concatenate([x for x, _ in runs]))
    values = np.full((len(runs), len(grid), runs[0][1].shape[1]), np.nan)
    for out, (x, y) in zip(values, runs):
        if len(x):
            for i in range(y.shape[1]):
                out[:, i] = np.interp(grid, x, y[:, i], left=np.nan, right=np.nan)
    return grid, values


def _in_order(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorted by x. Events at the same x are averaged."""
    if (np.diff(x) > 0).all():
        return x, y
    known = ~np.isnan(x)
    x, where = np.unique(x[known], return_inverse=True)
    total = np.zeros((len(x), y.shape[1]))
    np.add.at(total, where, y[known])
    return x, total / np.bincount(where, minlength=len(x))[:, None]


def _stats(values: np.ndarray, band: Band) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Over the runs, of what is finite."""
    finite = np.isfinite(values)
    count = finite.sum(0)
    some = np.maximum(count, 1)
    mean = np.where(finite, values, 0.0).sum(0) / some
    if band is None:
        low = high = mean
    elif band == "std":
        std = np.sqrt(np.where(finite, (values - mean) ** 2, 0.0).sum(0) / some)
        low, high = mean - std, mean + std
    elif band == "minmax":
        low = np.where(finite, values, np.inf).min(0, initial=np.inf)
        high = np.where(finite, values, -np.inf).max(0, initial=-np.inf)
    elif isinstance(band, tuple | list) and len(band) == 2:
        some_value = np.where(finite.any(0), np.where(finite, values, np.nan), 0.0)
        low, high = np.nanpercentile(some_value, band, axis=0) if values.size else (mean, mean)
    else:
        raise ValueError(
            f"band={band!r} is not known. Choose 'std', 'minmax', percentiles (10, 90) or None."
        )
    none = count == 0
    return tuple(np.where(none, np.nan, y) for y in (mean, low, high))  # type: ignore[return-value]
