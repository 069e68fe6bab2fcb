"""A console's board as a table for the terminal, as a line of text, and as HTML.

The table is laid out here, not by rich: a frame of 30 keys then takes about a millisecond, which
counts, for it is made while the program runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from .. import _html
from .._terminal import number, sparkline
from ._snapshot import Line, Snapshot

Cell = tuple[str, str]  # text, and the name of its style

SPARK = 24
_STYLES = dict(plain="", bold="bold", dim="dim", bad="bold red", spark="cyan", bar="green")


class Frame:
    """Lines of styled text, for rich to print. They are made once, and may be printed again."""

    def __init__(self, lines: list[list[Cell]]):
        self.lines = lines
        self._segments: list[Any] | None = None

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        if self._segments is None:
            from rich.segment import Segment
            from rich.style import Style

            styles = {name: Style.parse(text) for name, text in _STYLES.items()}
            self._segments = []
            for line in self.lines:
                self._segments += [Segment(text, styles[style]) for text, style in line]
                self._segments.append(Segment.line())
        yield from self._segments

    def __str__(self) -> str:
        return "\n".join("".join(text for text, _ in line).rstrip() for line in self.lines)


class Column:
    """A column of the table, with its heading."""

    def __init__(self, head: str, texts: list[str], style: str = "plain", right: bool = False):
        self.head, self.texts, self.style, self.right = head, texts, style, right
        self.width = max(map(len, self))

    def __iter__(self) -> Iterator[str]:
        return iter([self.head, *self.texts])


def frame(shot: Snapshot, width: int, height: int | None = None) -> Frame:
    """The table, at most so wide and (if given) so high."""
    lines: list[list[Cell]] = [[(_cut(head(shot), width), "bold")]]
    if shot.total:
        lines.append(_bar(shot, width))
    rows = shot.lines
    room = len(rows) if height is None else max(height - len(lines) - 1, 0)
    hidden = 0
    if len(rows) > room:
        rows, hidden = rows[: max(room - 1, 0)], len(rows) - max(room - 1, 0)
    if rows:
        lines += _table(rows, shot.runs, width)
    if hidden:
        lines.append([(_cut(f"… {hidden} more keys", width), "dim")])
    return Frame(lines)


def head(shot: Snapshot) -> str:
    parts = [f"{shot.runs:,} run" + "s" * (shot.runs != 1)]
    if shot.done is None:
        parts.append("no events yet")
    if shot.rate is not None:
        parts.append(f"{number(shot.rate)} {'events' if shot.axis is None else 'steps'}/s")
    return " · ".join([*parts, clock(shot.seconds)])


def line(shot: Snapshot, limit: int = 8) -> str:
    """All of it in one line of plain text, for logs."""
    parts = [f"{shot.runs:,} run" + "s" * (shot.runs != 1)]
    if shot.done is not None:
        name = "events" if shot.axis is None else shot.axis
        ahead = max((x.ahead for x in shot.lines if x.axis == shot.axis), default=shot.done)
        parts.append(f"{name} {_step(ahead)}" + (f"/{_step(shot.total)}" if shot.total else ""))
    if shot.total:
        parts.append(f"{_share(shot):.0%}")
    if shot.rate is not None:
        parts.append(f"{number(shot.rate)}/s{_left(shot, ' · ')}")
    for x in shot.lines[:limit]:
        spread, bad = _spread(x), _bad(x)
        parts.append(" ".join(filter(None, (x.key, _latest(x), spread, bad and f"({bad})"))))
    if len(shot.lines) > limit:
        parts.append(f"and {len(shot.lines) - limit} more keys")
    return f"[{clock(shot.seconds)}] " + " · ".join(parts)


def html(shot: Snapshot) -> str:
    """The table for notebooks."""
    several = shot.runs > 1
    heads = ["key", "latest", *(["± std", "min … max"] if several else []), "", "step"]
    rows = []
    for x in shot.lines:
        latest = _html.colored(x.mean if x.text is None else 0.0, _latest(x))
        if bad := _bad(x):
            latest = _html.Raw(f'{latest} <span class="bad">{bad}</span>')
        over = [_spread(x), _range(x)] if several else []
        line = _html.svg_sparkline(_points(x))
        rows.append([x.key + _shape(x), latest, *over, line, _steps(x)])
    top = head(shot)
    if shot.total:
        top += f" · {_share(shot):.0%}{_left(shot, ' · ')}"
        bar = f'<progress value="{_share(shot):.4f}" max="1" style="width:24em"></progress>'
    else:
        bar = ""
    return f"<div><b>{top}</b><br>{bar}{_html.table(heads, rows, numbers=(1,))}</div>"


# --- the parts ------------------------------------------------------------------------------------


def clock(seconds: float) -> str:
    s = max(int(seconds), 0)
    return f"{s // 3600}:{s // 60 % 60:02}:{s % 60:02}"


def _bar(shot: Snapshot, width: int) -> list[Cell]:
    share, total = _share(shot), shot.total or 0.0
    text = f" {_step(share * total)}/{_step(total)}  {share:4.0%}{_left(shot, '  ')}"
    room = max(min(width - len(text), 60), 0)
    full = math.floor(room * share)
    return [("━" * full, "bar"), ("─" * (room - full), "dim"), (_cut(text, width - room), "plain")]


def _left(shot: Snapshot, gap: str) -> str:
    return f"{gap}eta {clock(shot.left)}" if shot.left is not None and shot.left >= 1 else ""


def _share(shot: Snapshot) -> float:
    return min((shot.done or 0.0) / shot.total, 1.0) if shot.total else 0.0


def _table(rows: Sequence[Line], runs: int, width: int) -> list[list[Cell]]:
    several, bad = runs > 1, [_bad(x) for x in rows]
    key = Column("key", [x.key + _shape(x) for x in rows])
    ends = Column("min … max", [_range(x) for x in rows], "dim")
    spark = Column("", [sparkline(_points(x), SPARK) for x in rows], "spark")
    steps = Column("step", [_steps(x) for x in rows], right=True)
    columns = [key, Column("latest", [_latest(x) for x in rows], "bold", right=True)]
    columns += [Column("± std", [_spread(x) for x in rows])] if several else []
    columns += [Column("", bad, "bad")] if any(bad) else []
    columns += [*([ends] if several else []), spark, steps]
    for dropped in (ends, spark, steps):  # where there is no room
        if _width(columns) > width:
            columns = [c for c in columns if c is not dropped]
    longest = max(key.width - max(_width(columns) - width, 0), 8)
    columns[0] = Column("key", [_cut(k, longest) for k in key.texts])

    lines: list[list[Cell]] = [[] for _ in range(len(rows) + 1)]
    for i, column in enumerate(columns):
        gap = "  " if i else ""
        texts = [t.rjust(column.width) if column.right else t.ljust(column.width) for t in column]
        lines[0].append((gap + texts[0], "dim"))
        for x, text, cells in zip(rows, texts[1:], lines[1:], strict=True):
            red = column.head == "latest" and x.text is None and not math.isfinite(x.mean)
            cells.append((gap + text, "bad" if red else column.style))
    return lines


def _width(columns: Sequence[Column]) -> int:
    return sum(c.width + 2 for c in columns) - 2


def _latest(x: Line) -> str:
    return _cut(x.text, 40) if x.text is not None else _number(x, x.mean)


def _spread(x: Line) -> str:
    return f"± {x.std:.2g}" if x.text is None and x.runs - x.bad > 1 else ""


def _range(x: Line) -> str:
    return f"{_number(x, x.low)} … {_number(x, x.high)}" if x.runs - x.bad > 1 else ""


def _number(x: Line, value: float) -> str:
    whole = x.whole and not x.shape and math.isfinite(value) and value == round(value)
    return number(int(value) if whole else value)


def _bad(x: Line) -> str:
    return f"{x.bad}/{x.runs} not finite" if x.bad and x.text is None and x.runs > 1 else ""


def _points(x: Line) -> list[float]:
    """The history up to now: not every event is in it."""
    new = not x.history or not math.isclose(x.history[-1], x.mean)
    return [*x.history, x.mean] if new else x.history


def _shape(x: Line) -> str:
    return f" [{'×'.join(map(str, x.shape))}]" if x.shape else ""


def _steps(x: Line) -> str:
    text = _step(x.ahead) if x.behind == x.ahead else f"{_step(x.behind)}–{_step(x.ahead)}"
    return text if x.axis in ("step", None) else f"{x.axis} {text}"


def _step(x: float) -> str:
    return number(int(x)) if math.isfinite(x) and x == int(x) else number(x)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"
