"""Text for people at a terminal, and for programs at the end of a pipe.

At a terminal: columns, colours and short numbers. In a pipe: a line for each thing, fields with a
tab between them, for `cut`, `grep` and `awk`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

RED, GREEN, YELLOW, DIM, BOLD = "red", "green", "yellow", "dim", "bold"
STATES = {"open": GREEN, "closed": "", "crashed": YELLOW, "damaged": RED}
LONG = 1 << 26  # bytes after which it takes long enough to show how far it is


@dataclasses.dataclass(frozen=True)
class Cell:
    """A text with a style, which only terminals see."""

    text: str
    style: str = ""


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table. Where there is little room, those with the largest `drop` go first."""

    title: str
    right: bool = False
    drop: int = 0  # 0: it stays
    fold: bool = False  # goes on in the next line if there is no room; others keep theirs


def is_terminal() -> bool:
    return sys.stdout.isatty()


def width() -> int:
    return shutil.get_terminal_size((100, 24)).columns if is_terminal() else 100


def table(columns: Sequence[Column], rows: Sequence[Sequence[str | Cell]]) -> None:
    """Print a table."""
    cells = [[c if isinstance(c, Cell) else Cell(c) for c in row] for row in rows]
    if not is_terminal():
        for row in [[Cell(c.title) for c in columns], *cells]:
            print("\t".join(c.text.replace("\t", " ") for c in row))
        return
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=DIM)
    shown = _that_fit(columns, cells)
    for i in shown:
        c = columns[i]
        side: Any = "right" if c.right else "left"
        overflow: Any = "fold" if c.fold else "ellipsis"
        grid.add_column(c.title, justify=side, overflow=overflow, no_wrap=not c.fold)
    for row in cells:
        grid.add_row(*(Text(row[i].text, row[i].style) for i in shown))
    _console().print(grid)


def _that_fit(columns: Sequence[Column], cells: list[list[Cell]]) -> list[int]:
    """The columns that there is room for, with a gap of two between them."""
    wide = [
        max([len(c.title), *(len(row[i].text) for row in cells)]) for i, c in enumerate(columns)
    ]
    shown = list(range(len(columns)))
    while sum(wide[i] + 2 for i in shown) - 2 > width():
        least = max(shown, key=lambda i: columns[i].drop)
        if not columns[least].drop:
            break
        shown.remove(least)
    return shown


def line(*parts: str | Cell) -> None:
    """Print a line of several fields."""
    cells = [p if isinstance(p, Cell) else Cell(p) for p in parts]
    if not is_terminal():
        print("\t".join(c.text for c in cells), flush=True)
        return
    from rich.text import Text

    spaced = [Text(c.text, c.style) for c in cells if c.text]
    _console().print(Text("  ").join(spaced), soft_wrap=True)


def note(text: str, style: str = DIM) -> None:
    """Say something that is not the output itself."""
    sys.stdout.flush()
    if sys.stderr.isatty():
        from rich.text import Text

        _console(stderr=True).print(Text(text, style), soft_wrap=True)
    else:
        print(text, file=sys.stderr, flush=True)


def print_json(content: Any) -> None:
    print(json.dumps(plain(content), indent=2, ensure_ascii=False))


def plain(x: Any) -> Any:
    """What JSON can hold. It has no word for numbers that are not finite: they become null."""
    if isinstance(x, dict):
        return {str(k): plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [plain(v) for v in x]
    if isinstance(x, float) and not math.isfinite(x):
        return None
    if isinstance(x, datetime.datetime):
        return utc(x)
    if isinstance(x, complex):
        return [plain(x.real), plain(x.imag)]
    return x


@contextlib.contextmanager
def progress(what: str, total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar at the terminal while something takes long. Yields a function that moves it on."""
    if not shown or not sys.stderr.isatty():
        yield lambda amount: None
        return
    from rich.progress import Progress

    # What is printed meanwhile must still go to standard output, which may be a pipe.
    console = _console(stderr=True)
    with Progress(
        console=console, transient=True, redirect_stdout=False, redirect_stderr=False
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda amount: bar.advance(task, amount)


def _console(stderr: bool = False) -> Any:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


# --- sizes and times -----------------------------------------------------------------------------


def size(count: int) -> str:
    """Bytes in words.

    >>> size(999), size(12_345), size(3_000_000)
    ('999 B', '12.3 kB', '3.0 MB')
    """
    if count < 1000:
        return f"{count} B"
    units = ("kB", "MB", "GB", "TB")
    power = next((i for i in range(1, len(units)) if count < 999.95 * 1000**i), len(units))
    return f"{count / 1000**power:.1f} {units[power - 1]}"


def moment(created: str) -> datetime.datetime:
    """The time in a manifest."""
    return datetime.datetime.strptime(created, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=datetime.UTC)


def utc(time: datetime.datetime) -> str:
    if time.tzinfo is None:
        time = time.replace(tzinfo=datetime.UTC)
    return time.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def age(seconds: float) -> str:
    """A duration in its largest unit.

    >>> age(5), age(90), age(7300), age(200_000)
    ('5 s', '1 min', '2 h', '2 d')
    """
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(int(seconds), 0)} s"
