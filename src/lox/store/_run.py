"""`Run`: one run as it was saved, to be read back."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from _loxio import Damaged

from .._entry import Entry
from .._logdict import logdict
from ._catalog import folders
from ._folder import Folder, ParquetSource, StreamSource
from ._frames import arrow_table, pandas_frame, polars_frame, xarray_dataset
from ._join import Piece, forms
from ._table import Table

FORM = re.compile(r"#\d+$")  # of a key with several forms, those after the first


class Run:
    """A saved run: its name, config and state, and what was logged. Made by `lox.runs`.

    >>> import jax, lox, tempfile
    >>> path = tempfile.mkdtemp()
    >>> with lox.loggers.SaveLogger(path) as logger:
    ...     state = logger.init(jax.random.key(0), name="first", config={"lr": 0.1})
    ...     logger.log(state, lox.logdict({"loss": 1.5}, step=0))
    ...     logger.log(state, lox.logdict({"loss": 0.5}, step=10))
    >>> [run] = lox.runs(path)
    >>> run
    Run('first', closed, 2 rows, keys: loss)
    >>> logs = run.load()
    >>> logs, logs.step["loss"]
    ({'loss': [1.5, 0.5]}, array([ 0, 10]))

    Attributes: `name`, `group` (of all runs of one `init`), `config`, `state` (`"open"`,
    `"closed"` or `"crashed"`), `created`, `keys`, `rows`, `counts` (the events of each key).
    """

    def __init__(self, name: str, parts: list[tuple[Folder, int]]):
        self.name = name
        self._parts = parts  # more than one, if the run was resumed
        folder, self.lane = parts[-1]
        self.group: str = folder.manifest["group"]
        self.created: str = parts[0][0].manifest["created"]
        self.config: dict[str, Any] = {}
        for f, i in parts:
            self.config |= f.manifest["runs"][i]["config"]

    @property
    def state(self) -> str:
        """`"open"`, `"closed"` or `"crashed"`."""
        return self._parts[-1][0].state

    @property
    def path(self) -> str:
        """The folder that was written last."""
        return self._parts[-1][0].path

    @property
    def counts(self) -> dict[str, int]:
        """How many events each key has."""
        counts: dict[str, int] = {}
        for source, lane in self._sources():
            for key in source.table.keys if source.table else ():
                if lane in source.counts:
                    counts[key] = counts.get(key, 0) + source.counts[lane]
        return counts

    @property
    def keys(self) -> list[str]:
        """The keys that were logged."""
        return list(self.counts)

    @property
    def rows(self) -> int:
        """How many rows there are; keys that were logged together share theirs."""
        return sum(source.counts.get(lane, 0) for source, lane in self._sources())

    def load(self, keys: Iterable[str] | str | None = None, damaged: str = "error") -> logdict:
        """What was logged: every key a row of events, in order, with its steps.

        If the shape of a key has changed on the way, or the names of its steps, the events that do
        not fit the first ones are under `key#2` (and so on).

        - `keys`: read only these; the others are not touched.
        - `damaged`: `"error"` raises `lox.Damaged` if a checksum does not fit; `"skip"` leaves out
          what is damaged.
        """
        wanted = self._wanted(keys)
        found = self.forms(wanted, damaged)
        entries = {}
        for key in wanted if wanted is not None else found:
            for n, (_, entry) in enumerate(found.get(key, ()), 1):
                entries[key if n == 1 else f"{key}#{n}"] = entry
        asked = {keys} if isinstance(keys, str) else set(keys or ())
        missing = asked - set(entries)
        if missing and damaged != "skip":  # a form that is not there
            raise self._no_key(missing.pop())
        if any(FORM.search(key) for key in asked):
            entries = {k: e for k, e in entries.items() if k in asked or FORM.sub("", k) in asked}
        return logdict.of_entries(entries)

    def forms(
        self, wanted: list[str] | None = None, damaged: str = "error"
    ) -> dict[str, list[tuple[np.ndarray, Entry]]]:
        """The events of each key with their time in nanoseconds; see `_join.forms`."""
        pieces: dict[str, list[Piece]] = {}
        for part, table, data in self._read(wanted, damaged):
            time = data.column("time").to_numpy().astype(np.int64)
            for key in table.keys:
                pieces.setdefault(key, []).append(Piece(part, time, table.entry(key, data)))
        return {key: forms(of_key) for key, of_key in pieces.items()}

    def to_arrow(self, keys: Iterable[str] | str | None = None) -> Any:
        """All rows as one Arrow table: time, steps, and a column for each key."""
        return arrow_table(self._read(self._wanted(keys), "error"))

    def to_pandas(self, keys: Iterable[str] | str | None = None) -> Any:
        """All rows as a pandas DataFrame. Integers with gaps are of a type that has gaps."""
        return pandas_frame(self._read(self._wanted(keys), "error"))

    def to_polars(self, keys: Iterable[str] | str | None = None) -> Any:
        """All rows as a polars DataFrame."""
        return polars_frame(self.to_arrow(keys))

    def to_xarray(self, keys: Iterable[str] | str | None = None) -> Any:
        """What was logged as an xarray Dataset, steps as coordinates."""
        return xarray_dataset(self.load(keys), self.config)

    def _wanted(self, keys: Iterable[str] | str | None) -> list[str] | None:
        if keys is None:
            return None
        wanted = [keys] if isinstance(keys, str) else list(keys)
        known = set(self.keys)
        wanted = [k if k in known else FORM.sub("", k) for k in wanted]
        for key in wanted:
            if key not in known:
                raise self._no_key(key)
        return list(dict.fromkeys(wanted))

    def _no_key(self, key: str) -> KeyError:
        return KeyError(f"run {self.name!r} has no key {key!r}. It has: {', '.join(self.keys)}")

    def _sources(self) -> Iterator[tuple[StreamSource | ParquetSource, int]]:
        return ((source, lane) for _, source, lane in self._numbered_sources())

    def _numbered_sources(self) -> Iterator[tuple[int, StreamSource | ParquetSource, int]]:
        for part, (folder, lane) in enumerate(self._parts):
            for source in folder.sources():
                yield part, source, lane

    def _read(self, wanted: list[str] | None, damaged: str) -> Iterator[tuple[int, Table, Any]]:
        """The number of the part, a table and its rows of this run; the oldest part first."""
        for part, source, lane in self._numbered_sources():
            if source.damage and damaged != "skip":
                self._check_replaced()
                raise Damaged(
                    f"run {self.name!r}: {source.damage[0]}. What is not damaged can be read with "
                    "run.load(damaged='skip')."
                )
            table = source.table
            if table is None or lane not in source.counts:
                continue
            keys = [k for k in table.keys if wanted is None or k in wanted]
            if not keys:
                continue
            table = table.only(keys)
            columns = [c.name for c in (*table.steps, *table.values)]
            try:
                yield part, table, source.read(columns, lane)
            except Damaged:
                self._check_replaced()
                if damaged != "skip":
                    raise

    def _check_replaced(self) -> None:
        if any(folder.replaced() for folder, _ in self._parts):
            raise LookupError(
                f"run {self.name!r} was overwritten or removed since it was listed. Call lox.runs "
                "again."
            )

    def __repr__(self) -> str:
        keys = ", ".join(self.keys)
        return f"Run({self.name!r}, {self.state}, {self.rows} rows, keys: {keys})"


class Runs(list[Run]):
    """Runs, the oldest first. `runs["name"]` finds one; `runs.select("ppo*")` some.

    >>> import lox
    >>> lox.runs("./a folder without runs")
    []
    """

    damaged: list[Damaged]

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, str):
            return super().__getitem__(index)
        found = [r for r in self if r.name == index]
        if not found:
            names = ", ".join(r.name for r in self[:20]) or "none"
            raise KeyError(f"there is no run {index!r}. There are: {names}")
        return found[0]

    def select(self, pattern: str) -> Runs:
        """Those whose name or group fits a pattern with `*` and `?`."""
        fits = lambda r: any(fnmatch.fnmatchcase(n, pattern) for n in (r.name, r.group))
        out = Runs(r for r in self if fits(r))
        out.damaged = []
        return out


def find_runs(path: str | os.PathLike[str]) -> Runs:
    """See `lox.runs`."""
    root = os.fspath(path)
    out = Runs()
    out.damaged = []
    if not os.path.isdir(root):
        return out
    found, out.damaged = folders(root)
    parts: dict[str, list[tuple[Folder, int]]] = {}
    for folder in found:
        for name, lane in folder.lanes.items():
            parts.setdefault(name, []).append((folder, lane))
    out.extend(Run(name, p) for name, p in parts.items())
    return out
