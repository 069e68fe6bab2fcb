"""A logdict as an HTML table, for notebooks: a row for each key, with a small picture of it."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from ._curves import curves
from ._entry import Entry, as_events, count_of, event_axis
from ._terminal import binned, number

SAMPLE = 200_000  # elements looked at for the numbers of a key; of larger ones, evenly spaced ones

_STYLE = (
    "<style>.lox{border-collapse:collapse;font-size:13px}"
    ".lox th{text-align:left;font-weight:600;border-bottom:1px solid #8886}"
    ".lox th,.lox td{padding:3px 10px;white-space:nowrap;text-align:left}"
    ".lox td.n{text-align:right;font-variant-numeric:tabular-nums}"
    ".lox .bad{color:#d9364f}.lox small{opacity:.65}</style>"
)


class Raw(str):
    """Text that is HTML already."""


def html_table(logs: Any) -> str:
    """One row for each key of a logdict: shape, type, events, steps, numbers and a sparkline.

    >>> import lox
    >>> text = html_table(lox.logdict({"loss": 0.5}))
    >>> "<td>loss</td>" in text and "0.5000" in text
    True
    """
    if not logs:
        return _STYLE + '<table class="lox"><tr><td><small>empty logdict</small></td></tr></table>'
    rows = [row for key, entry in logs._entries.items() for row in _rows(key, entry)]
    heads = ["key", "shape", "dtype", "events", "steps", "last", "min", "mean", "max", ""]
    return table(heads, rows, numbers=range(5, 9))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> str:
    """An HTML table. All text is escaped, but for `Raw`."""
    right = set(numbers)
    lines = [_STYLE, '<table class="lox"><thead><tr>', *(_cell("th", h) for h in heads)]
    lines.append("</tr></thead><tbody>")
    for row in rows:
        cells = (_cell("td", c, ' class="n"' if i in right else "") for i, c in enumerate(row))
        lines.append("<tr>" + "".join(cells) + "</tr>")
    return "".join(lines) + "</tbody></table>"


def _cell(tag: str, text: str, attributes: str = "") -> str:
    return f"<{tag}{attributes}>{text if isinstance(text, Raw) else html.escape(text)}</{tag}>"


def svg_sparkline(values: Any, width: int = 110, height: int = 22) -> Raw:
    """A line as inline SVG. Where a value is not finite there is a gap."""
    y = binned(np.asarray(values, float).reshape(-1), 60)
    finite = np.isfinite(y)
    if finite.sum() < 2:
        return Raw("")
    low, span = y[finite].min(), np.ptp(y[finite]) or 1.0
    x = np.arange(len(y)) * (width - 4) / (len(y) - 1) + 2
    y = height - 3 - (y - low) / span * (height - 6)
    pieces = np.split(np.arange(len(y)), np.flatnonzero(np.diff(finite.astype(int)) != 0) + 1)
    draw = lambda piece: " ".join(f"{x[i]:.1f},{y[i]:.1f}" for i in piece)
    inside = "".join(f'<polyline points="{draw(p)}"/>' for p in pieces if finite[p[0]])
    return Raw(
        f'<svg width="{width}" height="{height}" fill="none" stroke="#2f6fde" '
        f'stroke-width="1.5" stroke-linejoin="round">{inside}</svg>'
    )


def colored(value: float, text: str | None = None) -> str:
    """A number as text, in red if it is not finite."""
    text = number(value) if text is None else text
    return text if math.isfinite(value) else Raw(f'<span class="bad">{html.escape(text)}</span>')


def _rows(key: str, entry: Entry) -> list[list[str]]:
    with_path = jax.tree_util.tree_leaves_with_path(entry.value)
    ranks = entry.layout.ndims
    return [
        _row(key + jax.tree_util.keystr(path), leaf, ndim, entry)
        for (path, leaf), ndim in zip(with_path, ranks, strict=True)
    ]


def _row(name: str, leaf: Any, ndim: int, entry: Entry) -> list[str]:
    shape, dtype = np.shape(leaf), str(getattr(leaf, "dtype", type(leaf).__name__))
    at = event_axis(leaf, ndim)
    batch = shape[: at + 1 - entry.layout.events]
    what = str(shape[at + 1 :]) if ndim else "scalar"
    if batch:
        what = " × ".join(map(str, batch)) + " runs of " + what
    if not _on_host(leaf, entry):
        # Traced, on other hosts, or no numbers: only what is known of it.
        events = str(shape[at]) if entry.layout.events else "1"
        return [name, what, dtype, events, "", str(jax.typeof(leaf)), "", "", "", ""]
    events = _range(np.asarray(count_of(entry)).reshape(-1))
    numbers, picture = _numbers(leaf, ndim, entry)
    return [name, what, dtype, events, _steps(entry), *numbers, picture]


def _on_host(leaf: Any, entry: Entry) -> bool:
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((leaf, entry.steps, entry.mask))):
        return False
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return False
    return _numeric(leaf)


def _numeric(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return isinstance(leaf, int | float | complex)
    return bool(jax.numpy.issubdtype(dtype, np.number) or dtype == bool)


def _steps(entry: Entry) -> str:
    texts = []
    for name, step in entry.steps.items():
        step = np.asarray(step)
        if entry.mask is not None and step.shape == np.shape(entry.mask):
            step = step[np.asarray(entry.mask)]
        if step.size:
            texts.append(f"{name} {_range(step.reshape(-1))}")
    return ", ".join(texts)


def _range(values: np.ndarray) -> str:
    if not len(values):
        return "0"
    low, high = number(values.min()), number(values.max())
    return low if low == high else f"{low} … {high}"


def _numbers(leaf: Any, ndim: int, entry: Entry) -> tuple[list[str], str]:
    """The last value, minimum, mean and maximum (over a batch, all together); the sparkline."""
    mask = None if entry.mask is None else np.asarray(entry.mask)
    one = as_events(Entry(leaf, {}, type(entry.layout)(entry.layout.events, (ndim,)), mask))
    leaf, mask = one.value, one.mask
    at = event_axis(leaf, ndim)
    lead = np.shape(leaf)[: at + 1]
    size = math.prod(np.shape(leaf))
    if not size or (mask is not None and not mask.any()):
        return ["", "", "", ""], ""
    about = ""
    if size > SAMPLE:
        # Of the events, then of the elements of each: the copy to the host stays small.
        leaf, mask = _thinned(leaf, mask, at)
        about = "≈"
    values = np.asarray(leaf)
    values = np.abs(values) if np.iscomplexobj(values) else values
    whole = values.dtype.kind in "biu"
    values = values.astype(float)
    mask = np.ones(values.shape[: at + 1], bool) if mask is None else mask
    real = values[mask]
    rows = [np.flatnonzero(m) for m in mask.reshape(-1, mask.shape[-1])]
    flat = values.reshape(len(rows), mask.shape[-1], -1)
    last = np.concatenate([flat[i, r[-1]] for i, r in enumerate(rows) if len(r)])
    with np.errstate(all="ignore"):
        middle = real.mean()
    ends = [int(v) if whole else v for v in (real.min(), real.max())]
    exact = last.size == 1
    shown = number(int(last[0]) if whole else last[0]) if exact else "mean " + number(last.mean())
    line = _mean_of_rows(flat, mask) if mask.shape[-1] > 1 else last if ndim == 1 else []
    texts = [colored(float(last.mean()), shown), *(colored(v, about + number(v)) for v in (ends[0], middle, ends[1]))]
    return texts, svg_sparkline(line)
