"""Show a run: its config, and for each key its type, steps, values and course.

Of arrays, the last value and the course are the means over their elements.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

from . import _output as out
from ._find import chosen_keys, find, parts

HELP = "config, keys and values of a run"
EXAMPLES = ("lox show ppo-0", "lox show ppo-0 --keys 'loss*'", "lox show ppo-0 --json")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="RUN", help="a name, a group, a pattern with *, or a path")
    parser.add_argument("-p", "--path", help="the folder of runs (default: ./.lox)")
    parser.add_argument("-k", "--keys", nargs="+", metavar="KEY", help="only these keys")
    parser.add_argument("--json", action="store_true", help="print JSON")


@dataclasses.dataclass
class Key:
    """What is to be said of a key (of a leaf of it, if its value is a pytree)."""

    name: str
    dtype: str
    shape: list[int]
    events: int
    steps: dict[str, list[Any]]  # the first and the last of each step
    last: Any
    min: float | None = None
    mean: float | None = None
    max: float | None = None
    not_finite: int = 0
    course: Any = dataclasses.field(default=None, repr=False)  # the mean of every event

    @property
    def last_number(self) -> float:
        """Of an array, the mean of what is finite."""
        if isinstance(self.last, int | float):
            return self.last
        return math.nan if self.course is None else float(self.course[-1])

    def json(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != "course"}


def run(args: argparse.Namespace) -> int:
    found = find(args.name, args.path)
    shown = []
    for i, r in enumerate(found):
        keys = chosen_keys(r, args.keys)
        about, known = _about(r), list(_keys(r, keys or r.keys))
        if args.json:
            shown.append({**about, "config": r.config, "keys": [k.json() for k in known]})
        else:
            if i:
                print()
            _print(about, r.config, known)
    if args.json:
        out.print_json(shown if len(shown) > 1 else shown[0])
    return 0


def _about(run: Any) -> dict[str, Any]:
    from ..store._verify import folder_size

    manifest = run._parts[-1][0].manifest
    others = len(run._parts[-1][0].lanes) - 1
    return dict(
        name=run.name,
        group=run.group,
        state=run.state,
        created=run.created,
        closed=manifest.get("closed"),
        host=manifest["host"],
        process=manifest["process"],
        rows=run.rows,
        folders=parts(run),
        size=sum(map(folder_size, parts(run))),
        shared_with=others,
    )


def _keys(run: Any, keys: list[str]) -> Iterator[Key]:
    """What is damaged is left out, and said."""
    from _loxio import Damaged

    # Of Parquet files each key is read by itself; a stream is read whole anyway.
    pieces = [[k] for k in keys] if run.state == "closed" else [keys]
    for piece in pieces if keys else []:
        try:
            entries = run.load(piece)._entries
        except Damaged as error:
            out.note(f"lox: {error}", out.RED)
            entries = run.load([], damaged="skip")._entries
            for key in piece:
                entries |= run.load([key], damaged="skip")._entries
        for key, entry in entries.items():
            yield from _leaves(key, entry)


def _leaves(key: str, entry: Any) -> Iterator[Key]:
    import jax
    import numpy as np

    from .._event import leaf_name

    names = sorted(entry.steps, key=lambda n: n != "step")
    steps = {n: [s[0].tolist(), s[-1].tolist()] for n in names if len(s := entry.steps[n])}
    for path, x in jax.tree_util.tree_flatten_with_path(entry.value)[0]:
        one = Key(leaf_name(key, path), x.dtype.name, [*x.shape[1:]], len(x), steps, None)
        if len(x):
            one.last = x[-1].tolist()
        if x.size:
            real = np.abs(x) if x.dtype.kind == "c" else x.astype(float)
            finite = np.isfinite(real)
            one.not_finite = int(real.size - finite.sum())
            if finite.any():
                kept = real[finite]
                one.min, one.mean, one.max = (float(f()) for f in (kept.min, kept.mean, kept.max))
            flat, good = real.reshape(len(x), -1), finite.reshape(len(x), -1)
            count = good.sum(1)
            sums = np.where(good, flat, 0.0).sum(1)
            one.course = np.where(count > 0, sums / np.maximum(count, 1), np.nan)
        yield one


def _print(about: dict[str, Any], config: dict[str, Any], keys: list[Key]) -> None:
    state = about["state"]
    size = out.size(about["size"])
    if about["shared_with"]:
        size += f" (shared with {about['shared_with']} more runs)"
    created = about["created"] + (f", closed {about['closed']}" if about["closed"] else "")
    lines = {
        "run": out.Cell(about["name"], out.BOLD),
        "state": out.Cell(state, out.STATES[state]),
        "group": about["group"],
        "created": f"{created}, by process {about['process']} on {about['host']}",
        "rows": f"{about['rows']:,}",
        "size": size,
        "folder": ", ".join(about["folders"]),
        **{f"config.{k}": json.dumps(v, default=str) for k, v in config.items()},
    }
    longest = max(map(len, lines))
    for name, value in lines.items():
        padded = name.ljust(longest) if out.is_terminal() else name
        out.line(out.Cell(padded, out.DIM), value)
    if not keys:
        out.note("nothing has been logged yet")
        return
    print()
    _print_keys(keys)


def _print_keys(keys: list[Key]) -> None:
    from .._terminal import sparkline

    columns = [
        out.Column("key", fold=True),
        out.Column("type"),
        out.Column("events", right=True),
        out.Column("steps", right=True),
        out.Column("last", right=True),
        out.Column("min", right=True, drop=3),
        out.Column("mean", right=True, drop=4),
        out.Column("max", right=True, drop=2),
        out.Column("course", drop=1),
    ]
    bad = any(k.not_finite for k in keys)
    if bad:
        columns.insert(8, out.Column("nan", right=True))
    room = 10 if out.width() < 100 else 20
    rows: list[list[str | out.Cell]] = []
    for k in keys:
        shape = ",".join(map(str, k.shape))
        course = "" if k.course is None else sparkline(k.course, room)
        values = [out.Cell("" if x is None else _number(x)) for x in (k.min, k.mean, k.max)]
        nans = [out.Cell(str(k.not_finite) if k.not_finite else "", out.RED)] if bad else []
        rows.append(
            [
                out.Cell(k.name, out.BOLD),
                f"{k.dtype}[{shape}]",
                f"{k.events:,}" if out.is_terminal() else str(k.events),
                _steps(k.steps),
                "" if k.last is None else _number(k.last_number),
                *values,
                *nans,
                out.Cell(course, "blue"),
            ]
        )
    out.table(columns, rows)


def _number(x: float) -> str:
    from .._terminal import number

    if isinstance(x, bool):
        return str(x)
    return number(x) if out.is_terminal() else repr(x)


def _steps(steps: dict[str, list[Any]]) -> str:
    """`0…990`, with its name where that is not `step`. Where there is little room, one step."""
    texts = []
    some = list(steps.items())
    for name, (first, last) in some if out.width() >= 120 else some[:1]:
        span = f"{first}…{last}" if first != last else str(first)
        texts.append(span if name == "step" else f"{name} {span}")
    return ", ".join(texts)
