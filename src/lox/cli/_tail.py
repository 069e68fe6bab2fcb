"""Print the last rows of a run; with -f, also those that come, until the run ends."""

from __future__ import annotations

import argparse
import datetime
import json
import time
from typing import Any

from . import _output as out
from ._errors import DAMAGED, Mistake
from ._find import find

HELP = "the last rows of a run, and those that come"
EXAMPLES = (
    "lox tail ppo-0",
    "lox tail -f ppo-0",
    "lox tail -n 100 'ppo-*' --keys loss return",
    "lox tail -f ppo-0 --json",
)
WAIT = 0.2  # seconds between two looks


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="RUN", help="a name, a group, a pattern with *, or a path")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run ends")
    parser.add_argument("-n", "--rows", type=_count, default=10, metavar="N", help="default: 10")
    parser.add_argument("-k", "--keys", nargs="+", metavar="KEY", help="only these keys")
    parser.add_argument("-p", "--path", help="the folder of runs (default: ./.lox)")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each row")


def _count(text: str) -> int:
    count = int(text)
    if count < 0:
        raise ValueError
    return count


def run(args: argparse.Namespace) -> int:
    from ..store._follow import Follower

    runs = find(args.name, args.path)
    places: dict[str, dict[int, str]] = {}  # of each folder, these runs by their number in it
    for r in runs:
        for part, lane in r._parts:
            places.setdefault(part.path, {})[lane] = r.name
    followers = [Follower(path, names, args.keys) for path, names in places.items()]
    found = [rows for f in followers for rows in f.poll()]
    if not args.follow:
        _check_keys(args.keys, followers)
    several = len(runs) > 1
    _print(found, args.json, several, args.rows)
    while args.follow and not all(f.ended for f in followers):
        time.sleep(WAIT)
        _print([rows for f in followers for rows in f.poll()], args.json, several)
    return _end(followers, args.follow)


def _check_keys(asked: list[str] | None, followers: list[Any]) -> None:
    import fnmatch

    known = list(dict.fromkeys(k for f in followers for k in f.known))
    if asked and not known:
        raise Mistake("nothing has been logged yet")
    for key in asked or ():
        if key not in known and not fnmatch.filter(known, key):
            raise Mistake(f"no key {key!r} was logged\nkeys: {', '.join(known)}")


def _end(followers: list[Any], followed: bool) -> int:
    for f in followers:
        for damage in f.damage:
            out.note(f"lox: {f.path}: {damage}", out.RED)
        if followed:
            names = [*f.names.values()]
            what = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
            torn = f" ({f.torn} bytes of a write that was not finished)" if f.torn else ""
            out.note(f"{what}: {f.state}{torn}")
    return DAMAGED if any(f.damage for f in followers) else 0


# --- from rows to text ---------------------------------------------------------------------------


def _print(found: list[Any], as_json: bool, several: bool, last: int | None = None) -> None:
    from ._rows import lines

    for row in lines(found, last):
        clock = datetime.datetime.fromtimestamp(row.time / 1e9, datetime.UTC)
        if as_json:
            listed = {k: x.tolist() for k, x in (row.steps | row.values).items()}
            text = out.plain({"time": out.utc(clock), "run": row.run, **listed})
            print(json.dumps(text, ensure_ascii=False), flush=True)
            continue
        terminal = out.is_terminal()
        when = f"{clock.astimezone():%H:%M:%S}" if terminal else out.utc(clock)
        parts = [out.Cell(when, out.DIM)]
        parts += [out.Cell(row.run, out.BOLD)] if several else []
        parts += [out.Cell(f"{k}={_text(x)}", out.DIM) for k, x in row.steps.items()]
        parts += [out.Cell(f"{k}={_text(x)}") for k, x in row.values.items()]
        out.line(*parts)


def _text(x: Any) -> str:
    """A value: short at a terminal, exact in a pipe. Of a large array, its shape and mean."""
    from .._terminal import number

    if x.ndim == 0:
        exact = not out.is_terminal() or x.dtype.kind in "bc"
        return str(x) if exact else number(x.item())
    if x.size <= 8:
        return "[" + ", ".join(map(_text, x)) + "]"
    shape = ",".join(map(str, x.shape))
    mean = x.astype(complex if x.dtype.kind == "c" else float).mean()
    return f"{x.dtype.name}[{shape}] mean {number(mean) if x.dtype.kind != 'c' else mean}"
