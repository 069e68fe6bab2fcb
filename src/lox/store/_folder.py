"""Reading a folder of runs: closed, crashed, or still being written."""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from _loxio import Damaged, is_held, read_small

from ._parquet import read_batches, read_parquet, read_schema
from ._scan import Damage, scan
from ._table import Table
from ._writer import FORMAT, LOCK, MANIFEST, SYNCED


class Folder:
    """The runs of one `init`, as they are on disk now."""

    def __init__(self, path: str):
        self.path = path
        self.manifest = read_small(os.path.join(path, MANIFEST))
        if self.manifest["format"] != FORMAT:
            raise ValueError(
                f"{path} has format {self.manifest['format']}; this lox reads {FORMAT}"
            )

    def refresh(self) -> bool:
        """Read the manifest again if the folder was not closed; has that changed?"""
        if self.manifest["state"] == "closed" and "tables" in self.manifest:
            return False
        before, self.manifest = self.manifest, read_small(os.path.join(self.path, MANIFEST))
        return self.manifest != before

    @property
    def state(self) -> str:
        if self.manifest["state"] == "open":
            if is_held(os.path.join(self.path, LOCK)):
                return "open"
            self.refresh()  # it may have been closed since
        closed = self.manifest["state"] == "closed" and "crashed" not in self.manifest
        return "closed" if closed else "crashed"

    def replaced(self) -> bool:
        """Is there something else now, or nothing?"""
        try:
            now = read_small(os.path.join(self.path, MANIFEST))
        except FileNotFoundError:
            return True
        return now["created_ns"] != self.manifest["created_ns"]

    @property
    def lanes(self) -> dict[str, int]:
        """The runs that are in here, by name."""
        runs = enumerate(self.manifest["runs"])
        return {r["name"]: lane for lane, r in runs if not r.get("dropped")}

    def sources(self) -> list[StreamSource | ParquetSource]:
        """The tables. If the folder is closed while we look, as it is then."""
        for _ in range(10):
            try:
                if "tables" in self.manifest:
                    return [ParquetSource(self.path, r) for r in self.manifest["tables"]]
                found = self._streams()
                if not self.refresh():
                    return found
            except FileNotFoundError:
                if not self.refresh():
                    break
        raise Damaged(f"{self.path}: a file that its manifest names is missing")

    def _streams(self) -> list[StreamSource | ParquetSource]:
        closed = self.manifest["state"] == "closed"
        sizes = self.stream_sizes().items()
        sources = [StreamSource(os.path.join(self.path, n), size, closed) for n, size in sizes]
        return [s for s in sources if s.found.messages or s.damage]

    def stream_sizes(self) -> dict[str, int]:
        """The streams of this folder, and how many bytes of each are known to have been there."""
        sizes = self.manifest.get("streams")
        if sizes is None:
            try:
                sizes = read_small(os.path.join(self.path, SYNCED))["bytes"]
            except FileNotFoundError:
                sizes = {}
        there = (n for n in os.listdir(self.path) if n.endswith(".arrows"))
        names = sorted({*there, *sizes}, key=lambda n: int(n.split(".")[0]))
        return {name: sizes.get(name, 0) for name in names}


class StreamSource:
    """A table as a stream of batches."""

    def __init__(self, path: str, size: int, closed: bool):
        self.path = path
        self.found = scan(path, size, not closed, size if closed else None)
        self.table: Table | None = None
        if self.found.messages and self.found.messages[0][0] == 0:
            self.schema, batches = read_batches(self.found)
            self.batches = list(batches)
            self.table = Table.of_schema(self.schema)

    @property
    def damage(self) -> list[Damage]:
        return self.found.damage

    @functools.cached_property
    def counts(self) -> dict[int, int]:
        """How many rows each run has."""
        if self.table is None or not self.batches:
            return {}
        runs = np.concatenate([b.column(0).to_numpy() for b in self.batches])
        return {int(r): int(n) for r, n in zip(*np.unique(runs, return_counts=True))}

    def read(self, columns: list[str], run: int) -> pa.Table:
        names = ["run", "time", *columns]
        picked = [b.select(names) for b in self.batches]
        table = pa.Table.from_batches(picked, pa.schema([self.schema.field(n) for n in names]))
        if len(self.counts) > 1:
            table = table.filter(pc.equal(table.column("run"), run))
        return table


class ParquetSource:
    """A table as a Parquet file."""

    def __init__(self, folder: str, record: dict[str, Any]):
        self.path, self.record = os.path.join(folder, record["file"]), record
        self.damage: list[Damage] = []
        try:
            self.table: Table | None = Table.of_schema(read_schema(self.path, record))
        except (Damaged, pa.ArrowException) as error:
            self.table = None
            self.damage.append(Damage(record["file"], 0, record["bytes"], str(error)))

    @property
    def counts(self) -> dict[int, int]:
        return {run: n for run, n in enumerate(self.record["counts"]) if n}

    def read(self, columns: list[str], run: int) -> pa.Table:
        return read_parquet(self.path, self.record, columns, run)
