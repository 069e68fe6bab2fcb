"""The command `logix`: look at stores of rows, and check them.

Exit codes: 0 good, 1 a store is damaged, 2 a mistake in what was asked for.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence

from _loxio import Damaged

from ._beside import damage_beside
from .store._reader import MANIFEST, RowStore, read_manifest, writer_numbers, writer_state
from .store._verify import verify


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns its exit code.

    >>> import logix.cli, tempfile
    >>> logix.cli.main(["ls", tempfile.mkdtemp()])
    no stores
    0
    """
    top = argparse.ArgumentParser(prog="logix", description="Look at stores of rows, check them.")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    for run, help in (
        (_verify, "compare a store with its checksums"),
        (_info, "what a store holds"),
        (_ls, "the stores below a folder"),
    ):
        one = commands.add_parser(run.__name__[1:], help=help, description=run.__doc__)
        one.set_defaults(run=run)
        if run is _ls:
            one.add_argument("path", nargs="?", default=".", help="where to look (default: here)")
        else:
            one.add_argument("path", help="a store")
        if run is _verify:
            one.add_argument("--quick", action="store_true", help="sizes and index, not the rows")
    try:
        args = top.parse_args(argv)
    except SystemExit as stop:  # argparse has said why
        return stop.code if isinstance(stop.code, int) else 2
    try:
        return args.run(args)
    except Damaged as error:
        print(f"logix: {error}", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"logix: {error}", file=sys.stderr)
        return 2


def _verify(args: argparse.Namespace) -> int:
    """Read all of a store and compare it with its checksums."""
    run = args.path if _store_of(args.path) != args.path else None
    args.path = _store_of(args.path)
    report = verify(args.path, check=not args.quick)
    if run is not None and not args.quick:
        report.damage += damage_beside(run)
    for found in report.damage:
        print(found)
    torn = f", {_size(report.torn)} of an unfinished append" if report.torn else ""
    state = "damaged" if report.damage else "good"
    print(f"{args.path}: {state}, {report.rows:,} rows, {_size(report.nbytes)}{torn}")
    return 1 if report.damage else 0


def _info(args: argparse.Namespace) -> int:
    """What a store holds: rows, layout, writers, and what was saved along."""
    args.path = _store_of(args.path)
    store = RowStore(args.path, duplicates="keep_all")
    held = store.manifest
    print(f"rows        {len(store):,} of {held['dim']:,} values")
    print(f"dtype       {held['dtype']} ({_size(len(store) * store.type.nbytes)})")
    print(f"duplicates  {held['duplicates']}")
    print(f"created     {held['created']}")
    for writer in writer_numbers(store.path):
        print(f"writer {writer:<4d} {writer_state(store.path, held, writer)}")
    for key, value in held["meta"].items():
        print(f"{key:<11s} {value}")
    print("layout")
    for part in held["layout"]:
        shape = "×".join(map(str, part["shape"]))
        print(f"  {part['offset']:>10,}  {part['name']}  {shape}")
    return 0


def _ls(args: argparse.Namespace) -> int:
    """The stores below a folder, one on each line."""
    if not os.path.isdir(args.path):
        raise FileNotFoundError(f"there is no folder {args.path}")
    code, found = 0, False
    for path in _stores(args.path):
        found = True
        try:
            store = RowStore(path, duplicates="keep_all")
            states = {writer_state(path, store.manifest, w) for w in writer_numbers(path)}
            state = "+".join(sorted(states)) or "empty"
            size = _size(len(store) * store.type.nbytes)
            print(f"{path}  {len(store):,} × {store.type.dim:,} {store.type.name}  {size}  {state}")
        except Damaged as error:
            code = 1
            print(f"{path}  damaged: {error}")
    if not found:
        print("no stores")
    return code


def _stores(root: str) -> Iterator[str]:
    for path, folders, files in os.walk(root):
        folders.sort()
        if MANIFEST in files:
            try:
                read_manifest(path)
            except ValueError:  # something else's
                continue
            except Damaged:
                if not any(f.endswith(".lock") and f[:-5].isdigit() for f in files):
                    continue
            yield path


def _store_of(path: str) -> str:
    """The store at a path, which may also be the folder of a run."""
    inside = os.path.join(path, "rows")
    return inside if os.path.isdir(inside) else path


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"
