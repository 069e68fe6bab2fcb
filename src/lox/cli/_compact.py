"""Close runs that crashed, and turn the streams of ended runs into Parquet files.

Runs that are being written are left alone, and so is what is damaged (exit code 1).
"""

from __future__ import annotations

import argparse
import os

from . import _output as out
from ._errors import DAMAGED, Mistake, message
from ._find import folder

HELP = "close crashed runs, turn streams into Parquet"
EXAMPLES = ("lox compact", "lox compact path/to/.lox", "lox compact path/to/.lox/ppo-0")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", help="a folder of runs, or of one (default: ./.lox)")


def run(args: argparse.Namespace) -> int:
    from _loxio import Damaged

    from ..store import compact
    from ..store._catalog import folders
    from ..store._verify import folder_size

    root = folder(args.path)
    found, failed = folders(root)
    if not found and not failed:
        raise Mistake(f"there are no runs in {root}")
    sizes = [folder_size(one.path) for one in found]
    done: list[tuple[str, int, int]] = []
    with out.progress("compacting", sum(sizes), sum(sizes) > out.LONG) as advance:
        for one, size in zip(found, sizes):
            try:
                done += compact(one.path)  # each by itself: one may be damaged
            except Damaged as error:
                failed.append(error)
            advance(size)
    for path, old, new in done:
        _print(path, old, new)
    for why in failed:
        out.note(f"lox: {message(why)}", out.RED)
    busy = sum(one.state == "open" for one in found)
    text = f"{len(done)} of {len(found)} folders" if done else "nothing to do"
    before, after = sum(old for _, old, _ in done), sum(new for *_, new in done)
    text += f", {out.size(before)} → {out.size(after)}" if len(done) > 1 else ""
    out.note(text + (f"; {busy} being written" if busy else ""))
    return DAMAGED if failed else 0


def _print(path: str, before: int, after: int) -> None:
    shorter = f"{before / after:.1f}×" if after else ""
    sizes = (out.size(before), out.size(after))
    if out.is_terminal():
        path_cell = out.Cell(os.path.normpath(path), out.BOLD)
        out.line(path_cell, f"{sizes[0]} → {sizes[1]}", out.Cell(shorter, out.DIM))
    else:
        out.line(path, *sizes)
