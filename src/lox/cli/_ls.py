"""List the runs of a folder: state, rows, keys, age and size.

Runs that were begun together share a folder; its size is divided among them by their rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
from typing import Any

from . import _output as out
from ._find import folder

HELP = "list runs"
EXAMPLES = ("lox ls", "lox ls path/to/.lox --json", "lox ls --quiet")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", help="the folder of runs (default: ./.lox)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("-q", "--quiet", action="store_true", help="print only names")


@dataclasses.dataclass
class Summary:
    """A line of the list."""

    name: str
    group: str = ""
    state: str = "damaged"
    rows: int = 0
    keys: list[str] = dataclasses.field(default_factory=list)
    created: str = ""
    size: int = 0
    path: str = ""
    damage: list[str] = dataclasses.field(default_factory=list)

    @property
    def age(self) -> float | None:
        if not self.created:
            return None
        return (datetime.datetime.now(datetime.UTC) - out.moment(self.created)).total_seconds()


def run(args: argparse.Namespace) -> int:
    root = folder(args.path)
    found = summaries(root)
    if args.json:
        out.print_json([{**dataclasses.asdict(s), "age": s.age} for s in found])
    elif args.quiet:
        for s in found:
            print(s.name)
    elif not found:
        out.note(f"there are no runs in {root}")
    else:
        _print(found)
    return 0


def summaries(root: str) -> list[Summary]:
    """What is to be said of each run. Every folder is opened once, however many runs it has."""
    from .._runs import runs

    known = runs(root)
    tables: dict[str, Any] = {}
    found = []
    for r in known:
        summary = Summary(r.name, r.group, r.state, 0, [], r.created, 0, r.path)
        for part, lane in r._parts:
            if part.path not in tables:
                tables[part.path] = _tables(part)
            _add(summary, tables[part.path], lane)
        found.append(summary)
    for error in known.damaged:
        path = str(error).split("/manifest.json")[0]
        found.append(Summary(path.rpartition("/")[2], path=path, damage=[str(error)]))
    return found


@dataclasses.dataclass
class _Tables:
    counts: list[tuple[tuple[str, ...], dict[int, int]]]  # keys, and the rows of each run
    size: int
    damage: list[str]


def _tables(part: Any) -> _Tables:
    from _loxio import Damaged

    from ..store._verify import folder_size

    try:
        sources = part.sources()
    except Damaged as error:
        return _Tables([], folder_size(part.path), [str(error)])
    counts = [(s.table.keys if s.table else (), s.counts) for s in sources]
    damage = [str(d) for s in sources for d in s.damage]
    return _Tables(counts, folder_size(part.path), damage)


def _add(summary: Summary, tables: _Tables, lane: int) -> None:
    own = sum(counts.get(lane, 0) for _, counts in tables.counts)
    rows = sum(sum(counts.values()) for _, counts in tables.counts)
    summary.rows += own
    summary.size += round(tables.size * own / rows) if rows else 0
    there = [k for keys, counts in tables.counts if lane in counts for k in keys]
    summary.keys += [k for k in dict.fromkeys(there) if k not in summary.keys]
    if tables.damage:
        summary.state = "damaged"
        summary.damage += tables.damage


def _print(found: list[Summary]) -> None:
    columns = [
        out.Column("name", fold=True),
        out.Column("group", drop=2),
        out.Column("state"),
        out.Column("rows", right=True),
        out.Column("keys", right=True, drop=1),
        out.Column("created", drop=4),
        out.Column("age", right=True),
        out.Column("size", right=True, drop=3),
    ]
    rows: list[list[str | out.Cell]] = []
    for s in found:
        style = out.STATES[s.state]
        local = out.moment(s.created).astimezone() if s.created else None
        rows.append(
            [
                out.Cell(s.name, out.RED if s.state == "damaged" else out.BOLD),
                s.group,
                out.Cell(s.state, style),
                f"{s.rows:,}" if out.is_terminal() else str(s.rows),
                str(len(s.keys)),
                f"{local:%Y-%m-%d %H:%M}" if out.is_terminal() and local else s.created,
                "" if s.age is None else out.age(s.age),
                out.size(s.size),
            ]
        )
    out.table(columns, rows)
