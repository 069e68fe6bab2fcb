"""Send saved runs elsewhere: to files, or to a tracker.

csv, tensorboard and wandb (offline) are written as by the loggers of that name, a run for a run.
parquet and arrow are tables of all rows; json has the config too.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

from . import _output as out
from ._errors import Mistake
from ._find import chosen_keys, find

HELP = "write runs as csv, parquet, tensorboard, wandb, arrow or json"
EXAMPLES = (
    "lox export ppo-0 --to csv",
    "lox export 'ppo-*' --to parquet -o tables/",
    "lox export ppo --to tensorboard -o runs/ --keys loss return",
    "lox export ppo --to wandb --project digits",
    "lox export ppo-0 --to json -o -",
)
LONG = 50_000  # rows after which it takes long enough to show how far it is
FILES = ("parquet", "arrow", "json")
TRACKERS = {"csv": ".", "tensorboard": "./runs", "wandb": "."}  # and where they write by default


def options(parser: argparse.ArgumentParser) -> None:
    what = "names, groups, patterns with *, or paths"
    parser.add_argument("names", metavar="RUN", nargs="+", help=what)
    parser.add_argument("--to", required=True, choices=[*TRACKERS, *FILES])
    parser.add_argument("-o", "--output", metavar="OUT", help="a file, or a folder for several")
    parser.add_argument("-k", "--keys", nargs="+", metavar="KEY", help="only these keys")
    parser.add_argument("-p", "--path", help="the folder of runs (default: ./.lox)")
    parser.add_argument("--force", action="store_true", help="replace what is there")
    parser.add_argument("--project", default="lox", help="of W&B (default: lox)")


def run(args: argparse.Namespace) -> int:
    found = {r.name: r for name in args.names for r in find(name, args.path)}
    chosen = [Chosen(r, chosen_keys(r, args.keys)) for r in found.values()]
    if args.to in FILES:
        _to_files(chosen, args)
    else:
        _to_tracker(chosen, args)
    return 0


class Chosen:
    """Some keys of a run, as `lox.replay` wants it."""

    def __init__(self, run: Any, keys: list[str] | None):
        self.run, self.keys = run, keys
        self.name, self.path = run.name, run.path
        self.group, self.config = run.group, run.config

    def forms(self) -> Any:
        return self.run.forms(self.keys)


# --- files ---------------------------------------------------------------------------------------


def _to_files(chosen: list[Chosen], args: Any) -> None:
    targets = [_target(one.name, args.to, args.output, len(chosen) > 1) for one in chosen]
    if targets == ["-"]:
        print(_json(chosen[0]))
        return
    for target in targets:
        _check_free(target, args.force)
    rows = [one.run.rows for one in chosen]
    with out.progress("exporting", sum(rows), sum(rows) > LONG) as advance:
        for one, target, count in zip(chosen, targets, rows):
            _whole(target, functools.partial(_write_file, one, args.to))
            advance(count)
    print(*targets, sep="\n")


def _target(name: str, kind: str, output: str | None, several: bool) -> str:
    """The file of a run: OUT itself, or one named after the run in the folder OUT."""
    from ..loggers._values import safe_name

    if output == "-":
        if kind != "json" or several:
            raise Mistake("only one run as json can be written to standard output")
        return output
    output = output or "."
    if not several and not os.path.isdir(output) and not output.endswith("/"):
        return output
    return os.path.join(output, f"{safe_name(name)}.{kind}")


def _check_free(target: str, force: bool) -> None:
    if os.path.exists(target) and not force:
        raise Mistake(f"{target} exists. --force replaces it.")


def _whole(target: str, write: Callable[[str], None]) -> None:
    """Write a file under another name first: what is there is always whole."""
    folder = os.path.dirname(target) or "."
    os.makedirs(folder, exist_ok=True)
    temporary = os.path.join(folder, f".{os.path.basename(target)}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _write_file(one: Chosen, kind: str, path: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if kind == "json":
        with open(path, "w", encoding="utf-8") as file:
            file.write(_json(one) + "\n")
        return
    table = one.run.to_arrow(one.keys)
    about = {"name": one.name, "group": one.run.group, "config": one.config}
    table = table.replace_schema_metadata({"lox": json.dumps(about, default=str)})
    if kind == "parquet":
        pq.write_table(table, path, compression="zstd")
    else:
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)


def _json(one: Chosen) -> str:
    run = one.run
    table = run.to_arrow(one.keys)
    # What was logged as NaN is null; what was not logged in a row is not in it.
    missing = {n: table.column(n).is_null().to_pylist() for n in table.column_names}
    rows = [
        {n: v for n, v in row.items() if not missing[n][i]}
        for i, row in enumerate(_in_utc(table).to_pylist())
    ]
    about = dict(name=run.name, group=run.group, state=run.state, created=run.created)
    return json.dumps(out.plain({**about, "config": run.config, "rows": rows}), ensure_ascii=False)


def _in_utc(table: Any) -> Any:
    """Times in microseconds: Python has none in nanoseconds."""
    import pyarrow as pa
    import pyarrow.compute as pc

    at = table.column_names.index("time")
    times = pc.floor_temporal(table.column("time"), unit="microsecond")
    return table.set_column(at, "time", times.cast(pa.timestamp("us")))


# --- trackers ------------------------------------------------------------------------------------


def _to_tracker(chosen: list[Chosen], args: Any) -> None:
    from ..loggers._values import safe_name

    one_file = args.to == "csv" and args.output and args.output.endswith(".csv")
    if one_file and len(chosen) == 1:
        _check_free(args.output, args.force)
        _one_csv(chosen[0], args.output)
        return
    target = args.output or TRACKERS[args.to]
    rows = {one.name: one.run.rows for one in chosen}
    total = sum(rows.values())
    groups: dict[str, list[Chosen]] = {}
    for one in chosen:
        groups.setdefault(one.run.group, []).append(one)
    with out.progress("exporting", total, total > LONG) as advance:
        for group, members in groups.items():
            with _logger(args, target, group) as logger:
                for one in members:
                    _send(one, logger)
                    advance(rows[one.name])
    if args.to == "wandb":
        print(os.path.join(target, "wandb"))
        out.note("`wandb sync` sends them to W&B")
        return
    ending = ".csv" if args.to == "csv" else ""
    for one in chosen:
        print(os.path.join(target, safe_name(one.name) + ending))


def _one_csv(one: Chosen, target: str) -> None:
    from ..loggers._csv import CSVLogger

    folder = os.path.dirname(target) or "."
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".lox-", dir=folder) as temporary:
        with CSVLogger(temporary, strict=True) as logger:
            _send(one, logger)
        [made] = (n for n in os.listdir(temporary) if n.endswith(".csv"))
        shutil.move(os.path.join(temporary, made), target)
    print(target)


def _send(one: Chosen, logger: Any) -> None:
    from .._runs import replay
    from ..loggers._names import RunExists

    try:
        replay(one, logger)
    except RunExists as error:
        raise Mistake(f"{str(error).split('. Choose')[0]}. --force replaces it.") from error


def _logger(args: Any, target: str, group: str) -> Any:
    exists = "overwrite" if args.force else "error"
    if args.to == "csv":
        from ..loggers._csv import CSVLogger

        return CSVLogger(target, exists=exists)
    if args.to == "tensorboard":
        from ..loggers._tensorboard import TensorBoardLogger

        return TensorBoardLogger(target, exists=exists)
    from ..loggers._wandb import WandbLogger

    return WandbLogger(
        args.project, group, exists=exists, mode="offline", dir=target, settings={"silent": True}
    )
