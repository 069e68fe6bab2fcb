"""A logdict as an HTML table, for notebooks: a row for each key, with a small picture of it."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from ._entry import Entry, count_of, event_axis
from ._event import leaf_name
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
        _row(leaf_name(key, path), leaf, ndim, entry)
        for (path, leaf), ndim in zip(with_path, ranks, strict=True)
    ]


def _row(name: str, leaf: Any, ndim: int, entry: Entry) -> list[str]:
    shape, dtype = np.shape(leaf), str(getattr(leaf, "dtype", type(leaf).__name__))
    at = event_axis(leaf, ndim)
    batch = shape[: at + 1 - entry.layout.events]
    what = str(shape[at + 1 :]) if ndim else "scalar"
    if batch:
        what = " × ".join(map(str, batch)) + " × " + what
    if not _on_host(leaf, entry):
        # Traced, on other hosts, or no numbers: only what is known of it.
        events = str(shape[at]) if entry.layout.events else "1"
        return [name, what, dtype, events, "", str(jax.typeof(leaf)), "", "", "", ""]
    events = _range(np.asarray(count_of(entry)).reshape(-1))
    numbers, picture = _numbers(leaf, ndim, entry)
    return [name, what, dtype, events, _steps(entry), *numbers, picture]


def _on_host(leaf: Any, entry: Entry) -> bool:
    if any(
        isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((leaf, entry.steps, entry.mask))
    ):
        return False
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return False
    return _numeric(leaf)


def _numeric(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return isinstance(leaf, int | float | complex)
    return any(jax.numpy.issubdtype(dtype, kind) for kind in (np.number, np.bool_))


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
    low, high = (number(int(x) if x == x // 1 else x) for x in (values.min(), values.max()))
    return low if low == high else f"{low} … {high}"


def _numbers(leaf: Any, ndim: int, entry: Entry) -> tuple[list[str], str]:
    """The last value, minimum, mean and maximum (of a batch, all together); the sparkline."""
    values, mask, exact = _sample(leaf, ndim, entry)
    whole = values.dtype.kind in "biu"
    values = np.abs(values) if np.iscomplexobj(values) else values.astype(float)
    some = mask.any(1)
    if not values.size or not some.any():
        return ["", "", "", ""], ""
    lanes = np.flatnonzero(some)
    last = values[lanes, mask.shape[1] - 1 - mask[lanes, ::-1].argmax(1)]
    finite = np.isfinite(values) & mask[..., None]
    real, bad = values[finite], int(values[mask].size - finite.sum())
    about = "" if exact else "≈"
    show = lambda x: colored(x, about + number(int(x) if whole and exact else x))
    with np.errstate(all="ignore"):  # what is not finite is shown as such
        mean_of_last = float(last.mean())
        line = np.where(finite, values, 0.0).sum((0, 2)) / finite.sum((0, 2))
    if last.size == 1:
        shown = show(last.item())
    else:
        shown = colored(mean_of_last, f"{about}{number(mean_of_last)} (mean)")
    if mask.shape[1] == 1 and ndim == 1:
        line = last.mean(0)  # one vector: its elements
    ends: list[str] = ["", "", ""]
    if real.size:
        ends = [show(real.min()), about + number(real.mean()), show(real.max())]
    if bad:  # the numbers are those of the rest
        ends[2] = Raw(f'{ends[2]} <span class="bad">{bad:,} not finite</span>')
    return [shown, *ends], svg_sparkline(line)


def _sample(leaf: Any, ndim: int, entry: Entry) -> tuple[np.ndarray, np.ndarray, bool]:
    """Values (runs, events, elements), which events happened, and whether that is all of them.

    Of large arrays evenly spaced parts are taken, before they are copied from a device.
    """
    x = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    split = x.ndim - ndim
    lead = x.shape[:split] if entry.layout.events else (*x.shape[:split], 1)
    shape = (math.prod(lead[:-1]), lead[-1], math.prod(x.shape[split:]))
    mask = np.ones(lead, bool) if entry.mask is None else np.asarray(entry.mask)
    x, mask = x.reshape(shape), np.broadcast_to(mask.reshape(mask.shape or (1,)), lead)
    mask = mask.reshape(shape[:2])
    if math.prod(shape) <= SAMPLE:
        return np.asarray(x), mask, True
    runs, events, elements = shape
    every = -(-events // 512)
    left = max(SAMPLE // (-(-events // every)), 1)
    each = max(-(-runs * elements // left), 1)
    of_runs = -(-runs // left) if elements < each else 1
    of_elements = -(-each // of_runs)
    # From the end, so that the last event is one of them.
    events_kept = slice((events - 1) % every, None, every)
    x = x[::of_runs, events_kept, :: min(of_elements, max(elements, 1))]
    return np.asarray(x), mask[::of_runs, events_kept], False
