"""`plot`: curves as a picture, with matplotlib. A panel for each key, a band over runs."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ._curves import Band, Curve, lines, no_key, several
from ._curves import curves as curves

_MISSING = 'plots need matplotlib. Install it: pip install "jaxlox[plot]"'
_COLORS = ("#2f6fde", "#e8743b", "#19a979", "#945ecf", "#d9364f", "#13a4b4", "#b58900", "#6c757d")
_INK, _GRID = "#3c4043", "#e3e5e8"


def plot(
    logs: Any,
    keys: Iterable[str] | str | None = None,
    x: str = "step",
    ax: Any = None,
    *,
    band: Band = "std",
    log: bool = False,
    components: int = 8,
    label: str | None = None,
    columns: int | None = None,
    size: tuple[float, float] = (4.2, 2.8),
) -> Any:
    """Draw keys over their steps, a panel for each, with a band over runs. Returns the figure.

    - `logs`: a logdict; several, one for each run; or a dict from label to either of these, to
      compare them. A dict from name to `Curve` is drawn as it is.
    - `keys`: names or patterns (`"loss/*"`); all keys if not given.
    - `x`: the step on the x axis, or `"index"`.
    - `ax`: axes to draw on, one for each key, instead of a new figure.
    - `band`: `"std"`, `"minmax"`, two percentiles such as `(10, 90)`, or None.
    - `log`: whether the y axis is logarithmic.
    - `components`: arrays of at most so many elements get a line for each; of larger ones the mean
      is drawn.
    - `label`: the name of these lines in the legend.
    - `columns`, `size`: panels in a row, and the inches of each.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(_MISSING) from error
    groups, ready = _groups(logs, label)
    shown = list(ready) or _chosen([one for g in groups.values() for one in several(g)], keys)
    axes = _axes(plt, ax, max(len(shown), 1), columns, size)
    for panel, key in zip(axes, shown):
        axis, drawn = x, [("", ready[key])] if ready else []
        for name, group in groups.items():
            if any(key in one for one in several(group)):
                axis, found = lines(group, key, x, band, components)
                drawn += [(f"{name} {part}".strip(), curve) for part, curve in found]
        _panel(panel, key, axis, drawn, log, own=ax is None)
    if not shown:
        _empty(axes[0], "nothing was logged")
    figure = axes[0].get_figure()
    if ax is None and "inline" in plt.get_backend().lower():
        plt.close(figure)  # a notebook shows what a cell returns; it would show it twice
    return figure


def _groups(logs: Any, label: str | None) -> tuple[dict[str, Any], dict[str, Curve]]:
    """Logs by label, or curves by name."""
    if isinstance(logs, Mapping) and not hasattr(logs, "layouts"):
        if logs and all(isinstance(v, tuple) and len(v) == 4 for v in logs.values()):
            return {}, {k: Curve(*map(np.asarray, v)) for k, v in logs.items()}
        return dict(logs), {}
    return {label or "": logs}, {}


def _chosen(logs: list[Any], keys: Iterable[str] | str | None) -> list[str]:
    known = list(dict.fromkeys(k for one in logs for k in one))
    if keys is None:
        return known
    chosen: list[str] = []
    for key in [keys] if isinstance(keys, str) else keys:
        found = [key] if key in known else fnmatch.filter(known, key)
        if not found:
            raise KeyError(no_key(key, logs))
        chosen += [k for k in found if k not in chosen]
    return chosen


def _axes(
    plt: Any, ax: Any, count: int, columns: int | None, size: tuple[float, float]
) -> list[Any]:
    if ax is not None:
        axes = list(np.asarray(ax, object).reshape(-1))
        if len(axes) < count:
            raise ValueError(f"{count} keys are to be drawn, but ax has {len(axes)} axes")
        return axes[:count]
    across = min(count, columns or (2 if count == 4 else 3))
    down = -(-count // across)
    figure, grid = plt.subplots(
        down,
        across,
        figsize=(size[0] * across, size[1] * down),
        layout="constrained",
        squeeze=False,
    )
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    axes = list(grid.reshape(-1))
    for unused in axes[count:]:
        unused.remove()
    return axes[:count]


def _panel(
    ax: Any, key: str, axis: str, drawn: list[tuple[str, Curve]], log: bool, own: bool
) -> None:
    first = len(ax.get_lines())  # on axes that have lines already, the next colours
    drawn = [(name, c) for name, c in drawn if np.isfinite(c.mean).any()]
    for i, (name, curve) in enumerate(drawn):
        color = _COLORS[(first + i) % len(_COLORS)]
        points = np.isfinite(curve.mean).sum()
        # A line of few points shows where they are; one of a single point would not show at all.
        style = dict(marker="o", markersize=4 if points > 1 else 6) if points <= 12 else {}
        label = name or ("_" if own else key)
        ax.plot(curve.x, curve.mean, color=color, linewidth=1.6, label=label, zorder=3, **style)
        if np.any(curve.high > curve.low):
            _fill(ax, curve, color, points)
    if not drawn:
        _empty(ax, "no events")
    if log:
        ax.set_yscale("log")
    _dress(ax, key, axis)
    if own and drawn:
        _ticks(ax, np.unique(np.concatenate([c.x[np.isfinite(c.mean)] for _, c in drawn])))
    _, labels = ax.get_legend_handles_labels()
    if len(labels) > 1 or (own and labels):
        many = len(labels) > 4
        ax.legend(frameon=False, fontsize=8, ncols=2 if many else 1, labelcolor=_INK)


def _fill(ax: Any, curve: Curve, color: str, points: int) -> None:
    if points > 1:
        band = dict(color=color, alpha=0.18, linewidth=0, zorder=2)
        ax.fill_between(curve.x, curve.low, curve.high, **band)
        return
    below, above = curve.mean - curve.low, curve.high - curve.mean
    ax.errorbar(curve.x, curve.mean, [below, above], fmt="none", ecolor=color, alpha=0.5, capsize=4)


def _dress(ax: Any, key: str, axis: str) -> None:
    ax.set_title(key, fontsize=10.5, color=_INK, loc="left")
    ax.set_xlabel(axis, fontsize=9, color=_INK)
    ax.grid(color=_GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.margins(x=0.02)
    ax.tick_params(labelsize=8.5, colors=_INK)
    ax.tick_params(which="both", length=0)
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("bottom", "left"))
        spine.set_color(_GRID)


def _ticks(ax: Any, x: np.ndarray) -> None:
    """Whole numbers where steps are such, and a single step by its name."""
    from matplotlib.ticker import MaxNLocator

    if len(x) == 1:
        ax.set_xticks(x, [f"{x[0]:g}"])
    else:
        whole = bool((x == np.round(x)).all())
        ax.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=whole))


def _empty(ax: Any, text: str) -> None:
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color="#9aa0a6")
    ax.set_xticks([])
    ax.set_yticks([])
