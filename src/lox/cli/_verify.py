"""Check every checksum of the saved runs under a path.

Exit code 0 if all is as it was written, 1 if anything is damaged, 2 if there is nothing to check.
The unfinished last write of a run that crashed is no damage: it was never acknowledged.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from . import _output as out
from ._errors import DAMAGED, Mistake
from ._find import folder

HELP = "check every checksum"
EXAMPLES = ("lox verify", "lox verify path/to/.lox", "lox verify path/to/.lox/ppo-0 --quiet")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", help="a folder of runs, or of one (default: ./.lox)")
    parser.add_argument("-q", "--quiet", action="store_true", help="print only what is damaged")


def run(args: argparse.Namespace) -> int:
    from ..store import verify

    root = folder(args.path)
    total = _size(root)
    reports = []
    with out.progress("checking", total, total > out.LONG) as advance:
        for report in verify(root):
            advance(report.bytes)
            reports.append(report)
    for report in reports:
        if report.damage or not args.quiet:
            _print(report)
    checked, damaged = len(reports), sum(bool(r.damage) for r in reports)
    if not checked:
        raise Mistake(f"there are no runs in {root}")
    word = "folder" if checked == 1 else "folders"
    verdict = f"{damaged} of {checked} {word} damaged" if damaged else f"{checked} {word}, all good"
    if not args.quiet:
        out.note(f"{verdict}, {out.size(total)}", out.RED if damaged else out.GREEN)
    return DAMAGED if damaged else 0


def _size(root: str) -> int:
    return sum(
        os.path.getsize(os.path.join(path, name))
        for path, _, names in os.walk(root)
        for name in names
        if os.path.exists(os.path.join(path, name))
    )


def _print(report: Any) -> None:
    verdict = out.Cell("damaged", out.RED) if report.damage else out.Cell("ok", out.GREEN)
    if out.is_terminal():
        verdict = out.Cell(verdict.text.ljust(7), verdict.style)
    files = f"{report.files} file" + ("s" if report.files != 1 else "")
    torn = f"torn: {report.torn} bytes of an unfinished write" if report.torn else ""
    where = out.Cell(report.path, out.BOLD)
    more = [out.Cell(torn, out.YELLOW)] if torn else []
    out.line(verdict, where, report.state, files, out.size(report.bytes), *more)
    for damage in report.damage:
        out.line(out.Cell("       " if out.is_terminal() else ""), out.Cell(str(damage), out.RED))
