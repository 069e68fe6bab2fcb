"""`CSVLogger`: a table of text for each run, that anything can read.

    step,episode,loss,grad
    0,0,0.75,
    10,1,0.5,"[0.1, 0.2]"

Rows are handed to the operating system at once. The last one may still grow, when another key is
logged at the same step: it is written again in its place. A key that is new gets a column, for
which the file is written anew under another name and then renamed.
"""

from __future__ import annotations

import copy
import csv
import dataclasses
import io
import json
import os
import pathlib
from typing import Any

import numpy as np

from _loxio import check_there, naming

from .._logdict import logdict
from ._base import Logger
from ._names import RunInfo, plain, run_exists
from ._rows import INDEX, Index, Merger, Row, rows_of
from ._values import safe_name

Cells = dict[str, Any]  # by the name of their column


@dataclasses.dataclass
class _Run:
    path: pathlib.Path
    file: io.FileIO
    index: Index
    columns: list[str]
    steps: set[str]  # the columns that are steps
    is_new: bool
    end: int  # of the rows that are complete: the open one comes there
    merger: Merger = dataclasses.field(default_factory=Merger)


class CSVLogger(Logger):
    """Write each run as a CSV file: a row for each step, the steps first, then the keys.

    Numbers are written as the shortest text that reads back as the same, arrays as JSON. A config
    is written next to it, as JSON.

    >>> import jax, jax.numpy as jnp, lox, pathlib, tempfile
    >>> from lox.loggers import CSVLogger
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> with CSVLogger(folder) as logger:
    ...     state = logger.init(jax.random.key(0), name="first")
    ...     logger.log(state, lox.logdict({"loss": 0.5, "norms": jnp.array([1.0, 2.0])}, step=10))
    >>> print((folder / "first.csv").read_text(), end="")
    step,loss,norms
    10,0.5,"[1.0, 2.0]"

    Arguments:

    - `path`: the folder that the files are in.
    - `options`: those of `lox.loggers.Logger`.
    """

    slow = False

    def __init__(self, path: str | os.PathLike, **options: Any):
        super().__init__(**options)
        self.path = pathlib.Path(path)

    def open_run(self, info: RunInfo) -> _Run:
        self.path.mkdir(parents=True, exist_ok=True)
        path = self.path / f"{safe_name(info.name)}.csv"
        resumed = path.exists() and self.exists == "resume"
        if path.exists() and self.exists == "error":
            raise run_exists(type(self).__name__, info.name, str(self.path))
        if info.config:
            config = path.with_suffix(".json")
            config.write_text(json.dumps(info.config, indent=2, default=repr) + "\n")
        if resumed:
            return _resumed(path)
        return _Run(path, io.FileIO(path, "w+"), Index(), [], set(), True, 0)

    def write_run(self, run: _Run, logs: logdict) -> None:
        before = copy.deepcopy(run.merger.last)
        try:
            self._write_rows(run, run.merger.add(rows_of(logs, run.index)))
        except BaseException:
            run.merger.last = before  # which was written; the new ones are not
            raise

    def _write_rows(self, run: _Run, done: list[Row]) -> None:
        check_there(run.file.fileno(), run.path)
        still_open = [run.merger.last] if run.merger.last else []
        run.steps |= {name for row in (*done, *still_open) for name in row.steps}
        complete, last = ([row.columns() for row in rows] for rows in (done, still_open))
        names = dict.fromkeys(name for cells in (*complete, *last) for name in cells)
        new = [name for name in names if name not in run.columns]
        if new:
            _widen(run, new, complete, last)
            return
        text = _lines(run.columns, complete)
        _write_at(run.file, run.end, text + _lines(run.columns, last))
        run.end += len(text)

    def close_run(self, run: _Run) -> None:
        with run.file:
            check_there(run.file.fileno(), run.path)

    def undo_run(self, run: _Run) -> None:
        run.file.close()
        if run.is_new:
            run.path.unlink()

    def flush_run(self, run: _Run) -> None:
        with naming(run.path):
            check_there(run.file.fileno(), run.path)
            os.fsync(run.file.fileno())


def _widen(run: _Run, new: list[str], complete: list[Cells], last: list[Cells]) -> None:
    """Write rows that have new columns: into a new file, which then takes the place of the old."""
    columns = [*run.columns, *new]
    columns = [k for k in columns if k in run.steps] + [k for k in columns if k not in run.steps]
    run.file.seek(0)
    _, before = _parsed(run.file.read(run.end))
    cells = [{k: c for k, c in zip(run.columns, row) if c} for row in before]
    text = _lines(columns, [dict(zip(columns, columns)), *cells, *complete])
    successor = run.path.with_name(run.path.name + ".new")
    file = io.FileIO(successor, "w+")
    try:
        _write_at(file, 0, text + _lines(columns, last))
        os.replace(successor, run.path)
    except BaseException:
        file.close()
        raise
    run.file.close()
    run.file, run.columns, run.end = file, columns, len(text)


def _write_at(file: io.FileIO, position: int, data: bytes) -> None:
    """Write all of it there, and nothing behind."""
    file.seek(position)
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
    file.truncate()


def _lines(columns: list[str], rows: list[Cells]) -> bytes:
    out = io.StringIO()
    cells = ([_text(row[k]) if k in row else "" for k in columns] for row in rows)
    csv.writer(out, lineterminator="\n").writerows(cells)
    return out.getvalue().encode()


def _text(x: Any) -> str:
    """A value as text: the shortest that reads back as the same."""
    if np.ndim(x):
        return json.dumps(plain(x))
    return str(x)


def _parsed(data: bytes) -> tuple[list[str], list[list[str]]]:
    before = csv.field_size_limit(2**31 - 1)  # an array is one long text
    try:
        rows = list(csv.reader(io.StringIO(data.decode(), newline="")))
    finally:
        csv.field_size_limit(before)
    return (rows[0], rows[1:]) if rows else ([], [])


def _resumed(path: pathlib.Path) -> _Run:
    """A run that is there already, behind its last whole row."""
    file = io.FileIO(path, "r+")
    data = file.read()
    end = data.rfind(b"\n") + 1  # what follows was being written when the machine went down
    columns, rows = _parsed(data[:end])
    following: dict[str, int] = {}
    if INDEX in columns:
        at = columns.index(INDEX)
        for row in rows:
            for name, cell in zip(columns, row):
                if cell and row[at]:
                    following[name] = int(row[at]) + 1
    steps = {INDEX, "step"} & set(columns)
    return _Run(path, file, Index(lambda key: following.get(key, 0)), columns, steps, False, end)
