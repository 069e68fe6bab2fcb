"""Draw keys of runs over their steps: in the terminal, or with -o as a picture.

Several runs of one RUN (a group, a pattern) are drawn as their mean, with a band around it.
More than one --run are drawn side by side, to compare them.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from . import _output as out
from ._errors import Mistake
from ._find import find

HELP = "draw keys of runs, mean and band over seeds"
EXAMPLES = (
    "lox plot ppo-0 loss",
    "lox plot ppo return loss -o curves.png",
    "lox plot 'ppo-*' return --band minmax",
    "lox plot ppo return --run dqn --x frames",
)
LIMIT = 6  # how many keys are drawn when none is named


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="RUN", help="a name, a group, a pattern with *, or a path")
    parser.add_argument("keys", metavar="KEY", nargs="*", help="a key, or a pattern with *")
    parser.add_argument("-r", "--run", dest="more", action="append", default=[], metavar="RUN")
    parser.add_argument("-o", "--output", metavar="FILE", help="a picture: .png, .svg, .pdf")
    parser.add_argument("-p", "--path", help="the folder of runs (default: ./.lox)")
    parser.add_argument("--x", default="step", metavar="STEP", help="the x axis (default: step)")
    parser.add_argument("--band", choices=["std", "minmax", "none"], default="std")
    parser.add_argument("--log", action="store_true", help="a logarithmic y axis")


def run(args: argparse.Namespace) -> int:
    from ..store._run import FORM

    asked = [args.name, *args.more]
    runs = {name: find(name, args.path) for name in asked}
    keys = _keys([r for found in runs.values() for r in found], args.keys)
    logs: dict[str, list[Any]] = {}
    for name, found in runs.items():
        loaded = [r.load([k for k in keys if FORM.sub("", k) in r.keys]) for r in found]
        logs[_label(name, found)] = [x for x in loaded if x]
        others = sorted({k for one in loaded for k in one if k not in keys})
        if others:  # the shape or the steps of a key have changed on the way
            out.note(f"not drawn, draw them by name: {', '.join(others)}")
    band = None if args.band == "none" else args.band
    try:
        if args.output:
            _picture(logs, keys, args, band)
        else:
            _charts(logs, keys, args, band)
    except KeyError as error:  # a step that is not there
        raise Mistake(str(error.args[0])) from error
    return 0


def _label(name: str, found: list[Any]) -> str:
    name = os.path.basename(os.path.normpath(name))
    return name if len(found) == 1 else f"{name} ({len(found)} runs)"


def _keys(runs: list[Any], asked: list[str]) -> list[str]:
    """The keys to draw: those asked for, or the first few that are numbers."""
    import fnmatch

    from ..store._run import FORM

    known = list(dict.fromkeys(k for r in runs for k in r.keys))
    if not known:
        raise Mistake("nothing has been logged yet")
    if not asked:
        scalars = _scalars(runs[0])
        if len(scalars) > LIMIT:
            out.note(f"drawn: {LIMIT} of {len(scalars)} keys; others: {', '.join(scalars[LIMIT:])}")
        return scalars[:LIMIT] or known[:LIMIT]
    chosen: list[str] = []
    for key in asked:
        found = [key] if FORM.sub("", key) in known else fnmatch.filter(known, key)
        if not found:
            raise Mistake(f"no key {key!r} was logged\nkeys: {', '.join(known)}")
        chosen += [k for k in found if k not in chosen]
    return chosen


def _scalars(run: Any) -> list[str]:
    tables = [source.table for source, _ in run._sources() if source.table]
    shapes: dict[str, list[Any]] = {}
    for table in tables:
        for column in table.values:
            shapes.setdefault(column.of, []).append(column.shape)
    return [k for k in run.keys if all(s == () for s in shapes[k])]


def _picture(logs: dict[str, list[Any]], keys: list[str], args: Any, band: str | None) -> None:
    folder = os.path.dirname(args.output) or "."
    if not os.path.isdir(folder):
        raise Mistake(f"there is no folder {folder}")
    if "matplotlib.pyplot" not in sys.modules:
        os.environ.setdefault("MPLBACKEND", "agg")  # no window
    from .._plot import plot

    figure = plot(logs if len(logs) > 1 else next(iter(logs.values())), keys, args.x, **_how(args))
    [label, *others] = logs
    if not others:
        band = "" if args.band == "none" or label == os.path.basename(args.name) else args.band
        figure.suptitle(f"{label}, band: {band}" if band else label, fontsize=10)
    try:
        figure.savefig(args.output, dpi=150)
    except ValueError as error:  # a format that matplotlib does not know
        raise Mistake(str(error)) from error
    finally:
        sys.modules["matplotlib.pyplot"].close(figure)
    print(args.output)


def _how(args: Any) -> dict[str, Any]:
    return dict(band=None if args.band == "none" else args.band, log=args.log)


def _charts(logs: dict[str, list[Any]], keys: list[str], args: Any, band: str | None) -> None:
    from .._curves import lines
    from .._terminal import chart

    height = 16 if len(keys) == 1 else 10
    colors = out.is_terminal() and not os.environ.get("NO_COLOR")
    for i, key in enumerate(keys):
        series, axis = [], args.x
        for name, own in logs.items():
            if any(key in one for one in own):
                axis, found = lines(own, key, args.x, band)
                parts = [(f"{name} {p}" if len(logs) > 1 else p, c) for p, c in found]
                series += [(label.strip(), *curve) for label, curve in parts]
        title = key if len(logs) > 1 else f"{key} · {next(iter(logs))}"
        wide = min(out.width(), 120)
        text = chart(series, wide, height, color=colors, title=title, x_label=axis, log=args.log)
        print(("\n" if i else "") + text)
