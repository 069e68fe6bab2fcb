"""`SaveLogger`: runs on disk that survive the process, and read back exactly. See `lox.store`."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._logdict import logdict
from .._optional import need
from ._base import Logger
from ._names import RunInfo, run_exists


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a run is written: a folder, and its number in there."""

    folder: Any
    lane: int


class SaveLogger(Logger):
    """Save runs to a folder. Read them back with `lox.runs`.

    >>> import jax, lox, tempfile
    >>> path = tempfile.mkdtemp()
    >>> def train(x):
    ...     def step(x, i):
    ...         lox.log({"x": x}, step=i)
    ...         return x / 2, None
    ...     return jax.lax.scan(step, x, jax.numpy.arange(3))[0]
    >>> with lox.loggers.SaveLogger(path) as logger:
    ...     state = logger.init(jax.random.key(0), name="halves")
    ...     y = logger.tap(train, state)(8.0)
    >>> lox.runs(path)["halves"].load()
    {'x': [8.0, 4.0, 2.0]}

    When a write returns, it outlives the process. It is on the disk at the latest after
    `sync_every` seconds.

    Arguments:

    - `path`: the folder. Several processes may write to the same one.
    - `compact`: turn each run into Parquet files when it is closed.
    - `sync_every`: seconds between two `fsync`s.
    - `overwrite`: the same as `exists="overwrite"`.
    - `exists`, `strict`: as for `Logger`.
    """

    slow = False

    def __init__(
        self,
        path: str | os.PathLike[str] = "./.lox",
        overwrite: bool = False,
        *,
        compact: bool = True,
        sync_every: float = 1.0,
        **options: Any,
    ):
        if overwrite:
            options["exists"] = "overwrite"
        super().__init__(**options)
        self.path = os.path.abspath(os.fspath(path))
        self.compact, self.sync_every = compact, sync_every
        self._folders: list[Any] = []
        self._ended_lanes: dict[int, set[int]] = {}  # of folders in which other runs go on
        self._closing = False
        self._written, self._ended = threading.Event(), threading.Event()
        self._syncer: threading.Thread | None = None
        need("pyarrow", "")

    def open_runs(self, infos: Sequence[RunInfo]) -> list[Any]:
        from ..store._catalog import Taken, begin

        runs = [dict(name=i.name, config=i.config) for i in infos]
        try:
            folder = begin(self.path, runs, infos[0].group, self.exists)
        except Taken as taken:
            raise run_exists("SaveLogger", taken.name, self.path, taken.why) from None
        except OSError as error:
            error.add_note(f"lox: SaveLogger can't make a run in {self.path}: {error.strerror}")
            raise
        self._folders.append(folder)
        return [Place(folder, lane) for lane in range(len(infos))]

    def write_runs(self, runs: list[Place], logs: logdict) -> None:
        folder = runs[0].folder
        if all(r.folder is folder for r in runs):
            folder.write(np.array([r.lane for r in runs], np.int32), logs)
        else:
            self._write_each(runs, logs)
        if self._syncer is None:
            self._syncer = threading.Thread(target=self._keep_synced, daemon=True, name="lox sync")
            self._syncer.start()
        self._written.set()

    def _write_each(self, runs: list[Place], logs: logdict) -> None:
        """States of several calls of `init` in one message."""
        import jax

        for folder in dict.fromkeys(r.folder for r in runs):
            lanes = [i for i, r in enumerate(runs) if r.folder is folder]
            own = jax.tree.map(lambda x, lanes=lanes: x[lanes], logs)
            folder.write(np.array([runs[i].lane for i in lanes], np.int32), own)

    def _keep_synced(self) -> None:
        while not self._ended.is_set():
            self._written.wait()
            if self._ended.wait(self.sync_every):
                return
            self._written.clear()
            try:
                for folder in list(self._folders):
                    folder.sync()
            except OSError as error:
                error.add_note(f"lox: SaveLogger could not bring {self.path} to the disk")
                self._errors.add(error)

    def replace_run(self, run: Place) -> None:
        run.folder.drop(run.lane)

    def undo_run(self, run: Place) -> None:
        run.folder.discard()

    def flush_run(self, run: Place) -> None:
        run.folder.sync()

    def close_run(self, run: Place) -> None:
        ended = self._ended_lanes.setdefault(id(run.folder), set())
        ended.add(run.lane)
        if len(ended) == len(run.folder.manifest["runs"]) or self._closing:
            run.folder.close(self.compact)
            self._folders = [f for f in self._folders if f is not run.folder]

    def close(self) -> None:
        """Flush, end all runs, and turn them into Parquet files."""
        self._ended.set()
        self._written.set()
        self._closing = True
        super().close()
