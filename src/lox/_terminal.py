"""Numbers as text: a short number, a sparkline, and a line chart of braille dots."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = Any
Series = tuple[str, Array, Array, Array, Array]  # label, x, mean, low, high

BLOCKS = "▁▂▃▄▅▆▇█"
# The bit of each dot of a braille character: four rows of two.
_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
_COLORS = (34, 33, 32, 35, 36, 31)  # ANSI: blue, yellow, green, magenta, cyan, red


def number(x: float) -> str:
    """Four digits, and no exponent where it can be done without.

    >>> number(0.123456), number(12345.6), number(1e-7), number(3)
    ('0.1235', '12,346', '1.00e-07', '3')
    """
    if isinstance(x, int | np.integer) and abs(int(x)) < 10**9:
        return f"{x:,}"
    x = float(x)
    size = abs(x)
    if not math.isfinite(x):
        return str(x)
    if size and (size < 1e-3 or size >= 1e9):
        return f"{x:.2e}"
    if size >= 9999.5:
        return f"{x:,.0f}"
    digits = 3 - max(math.floor(math.log10(size)), -1) if size else 3
    return f"{x:,.{max(digits, 0)}f}"


def sparkline(values: Array, width: int = 20) -> str:
    """A line of block characters, one for each value or (if there are more) for each bin of them.

    >>> sparkline([0, 1, 2, 3, 2, 1, 0])
    '▁▃▆█▆▃▁'
    """
    values = binned(np.asarray(values, float).reshape(-1), width)
    finite = np.isfinite(values)
    if not finite.any():
        return " " * len(values)
    low, high = values[finite].min(), values[finite].max()
    if high == low:
        return "".join(BLOCKS[3] if ok else " " for ok in finite)
    scaled = np.where(finite, values - low, 0.0) / (high - low)
    level = np.minimum(np.round(scaled * (len(BLOCKS) - 1)), len(BLOCKS) - 1).astype(int)
    return "".join(BLOCKS[i] if ok else " " for i, ok in zip(level, finite))


def binned(values: np.ndarray, bins: int) -> np.ndarray:
    """At most `bins` values: the means of what is finite in neighbouring ones."""
    if len(values) <= bins:
        return values
    starts = np.arange(bins) * len(values) // bins
    finite = np.isfinite(values)
    total = np.add.reduceat(np.where(finite, values, 0.0), starts)
    count = np.add.reduceat(finite.astype(int), starts)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def chart(
    series: Sequence[Series],
    width: int = 72,
    height: int = 16,
    *,
    color: bool = False,
    title: str = "",
    x_label: str = "",
    log: bool = False,
) -> str:
    """A line chart for the terminal: each mean as a line, its band as scattered dots.

    >>> import numpy as np
    >>> x = np.arange(100)
    >>> loss = np.exp(-x / 30)
    >>> print(chart([("loss", x, loss, loss, loss)], 32, 4, x_label="step"))
     1.000 ┤⠑⢄
           │  ⠑⠤⣀
           │     ⠑⠢⠤⣀⡀
    0.0369 ┤         ⠈⠉⠑⠒⠒⠤⠤⠤⠤⢄⣀⣀⣀⣀
           └───────────────────────
            0             99 (step)

    - `series`: tuples of label, x, mean, low and high. With several, the label stands where its
      line ends.
    - `width`, `height`: in characters; the height without title and x axis.
    - `color`: whether to colour the lines, by ANSI codes.
    - `title`, `x_label`: text above, and below at the end of the x axis.
    - `log`: whether the y axis is logarithmic.
    """
    lines = [_points(s, log) for s in series]
    xs = np.concatenate([x for x, *_ in lines] or [np.zeros(0)])
    ys = np.concatenate([y[np.isfinite(y)] for _, *rest in lines for y in rest] or [np.zeros(0)])
    if not len(xs) or not len(ys):
        return (title + "\n" if title else "") + "(no data)"
    bottom, top = _wider(ys.min(), ys.max())
    left, right = _wider(xs.min(), xs.max())
    at = lambda row: number(_value(top + (bottom - top) * row / max(height - 1, 1), log))
    ticks = {row: at(row) for row in {0, (height - 1) // 2, height - 1}}
    if height < 5:
        ticks = {row: at(row) for row in {0, height - 1}}
    margin = max(map(len, ticks.values()))
    ends = [label[:16] for label, *_ in series] if len(series) > 1 else []
    columns = max(width - margin - 3 - (max(map(len, ends)) + 1 if ends else 0), 8)

    canvas = _Canvas(columns, height)
    dots = [_columns(line, left, right, canvas.dots_x) for line in lines]
    rows = [[(top - y) / (top - bottom) * (canvas.dots_y - 1) for y in d] for d in dots]
    for i, (_, low, high) in enumerate(rows):
        canvas.band(low, high, i)
    for i, (mean, _, _) in enumerate(rows):
        canvas.line(mean, i)
    labels = _place(ends, [mean for mean, _, _ in rows], height)

    out = [title.center(margin + 3 + columns).rstrip()] if title else []
    for row, text in enumerate(canvas.rows(color)):
        mark = "┤" if row in ticks else "│"
        end = labels.get(row)
        name = "" if end is None else " " + _colored(ends[end], end, color)
        line = f"{ticks.get(row, ''):>{margin}} {mark}{text}"
        out.append(line + name if name else line.rstrip())
    out.append(" " * margin + " └" + "─" * columns)
    first, last = number(_whole(left)), number(_whole(right))
    if x_label:
        last = f"{last} ({x_label})"
    out.append(" " * (margin + 2) + first + last.rjust(columns - len(first)))
    return "\n".join(out)


class _Canvas:
    """Braille characters: four dots high, two wide. A character has the colour of its last line."""

    def __init__(self, columns: int, rows: int):
        self.dots_x, self.dots_y = 2 * columns, 4 * rows
        self.bits = np.zeros((rows, columns), int)
        self.owner = np.full((rows, columns), -1)

    def put(self, x: int, y: int, owner: int) -> None:
        if 0 <= x < self.dots_x and 0 <= y < self.dots_y:
            self.bits[y // 4, x // 2] |= _DOTS[y % 4, x % 2]
            self.owner[y // 4, x // 2] = owner

    def line(self, ys: np.ndarray, owner: int) -> None:
        before: int | None = None
        for x, y in enumerate(ys):
            if not np.isfinite(y):
                before = None
                continue
            here = round(float(y))
            # Half of a steep step belongs to this column, so that the line has no holes.
            start = here if before is None else before + int(np.sign(here - before))
            for dot in range(min(start, here), max(start, here) + 1):
                self.put(x, dot, owner)
            before = here

    def band(self, low: np.ndarray, high: np.ndarray, owner: int) -> None:
        for x, (a, b) in enumerate(zip(low, high)):
            if np.isfinite(a) and np.isfinite(b) and round(float(a)) != round(float(b)):
                for y in range(round(float(b)), round(float(a)) + 1):
                    if (x + 2 * (y % 2)) % 4 == 0:
                        self.put(x, y, owner)

    def rows(self, color: bool) -> list[str]:
        chars = [[chr(0x2800 + int(b)) if b else " " for b in row] for row in self.bits]
        if not color:
            return ["".join(row) for row in chars]
        lines = []
        for row, owners in zip(chars, self.owner):
            pieces = itertools.groupby(zip(owners, row), key=lambda pair: pair[0])
            texts = ((i, "".join(c for _, c in piece)) for i, piece in pieces)
            lines.append("".join(t if i < 0 else _colored(t, int(i), True) for i, t in texts))
        return lines


def _points(series: Series, log: bool) -> list[np.ndarray]:
    """x, mean, low, high as floats, sorted by x; on a log axis, what is positive of them."""
    x, *ys = (np.asarray(a, float).reshape(-1) for a in series[1:])
    if log:
        ys = [np.log10(np.where(y > 0, y, np.nan)) for y in ys]
    order = np.argsort(x, kind="stable")
    return [x[order], *(y[order] for y in ys)]


def _columns(line: list[np.ndarray], left: float, right: float, count: int) -> list[np.ndarray]:
    """The mean, low and high at each column of dots."""
    x, *ys = line
    if not len(x):
        return [np.full(count, np.nan)] * 3
    column = np.clip(np.round((x - left) / (right - left) * (count - 1)), 0, count - 1).astype(int)
    out = []
    for y in ys:
        finite = np.isfinite(y)
        hits = np.bincount(column[finite], minlength=count)
        total = np.bincount(column[finite], y[finite], minlength=count)
        values = np.where(hits > 0, total / np.maximum(hits, 1), np.nan)
        if finite.sum() > 1:  # between neighbouring points, but not across what is not finite
            broken = np.bincount(column[~finite], minlength=count) > 0
            known = np.isfinite(values)
            between = np.interp(np.arange(count), np.flatnonzero(known), values[known])
            inside = (np.arange(count) >= column[0]) & (np.arange(count) <= column[-1])
            values = np.where(inside & ~broken & ~known & ~_gaps(known, broken), between, values)
        out.append(values)
    return out


def _gaps(known: np.ndarray, broken: np.ndarray) -> np.ndarray:
    """The columns whose neighbours with data, on the left or right, are such as have no value."""
    marked = np.where(known, 1, np.where(broken, 2, 0))
    last = lambda m: m[np.maximum.accumulate(np.where(m > 0, np.arange(len(m)), 0))]
    return (last(marked) == 2) | (last(marked[::-1])[::-1] == 2)


def _place(labels: list[str], means: list[np.ndarray], height: int) -> dict[int, int]:
    """The row of each label: where its line ends, or the nearest free one."""
    taken: dict[int, int] = {}
    for i in range(len(labels)):
        finite = means[i][np.isfinite(means[i])]
        want = round(float(finite[-1])) // 4 if len(finite) else 0
        free = sorted(set(range(height)) - set(taken), key=lambda row: abs(row - want))
        if free:
            taken[free[0]] = i
    return taken


def _wider(low: float, high: float) -> tuple[float, float]:
    if high > low:
        return float(low), float(high)
    half = abs(low) / 2 or 0.5
    return float(low - half), float(high + half)


def _value(y: float, log: bool) -> float:
    return 10.0**y if log else y


def _whole(x: float) -> float:
    return int(x) if x == int(x) else x


def _colored(text: str, index: int, color: bool) -> str:
    return f"\x1b[{_COLORS[index % len(_COLORS)]}m{text}\x1b[0m" if color else text
