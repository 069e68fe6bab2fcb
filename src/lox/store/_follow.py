"""Following a folder of runs while it is written: every row once, and only what is new is read.

Streams grow, so an offset for each tells what is new. (A write that failed may be taken back; then
the last message of a stream is another one.) When the folder is closed its streams become Parquet
files with the same rows in the same order: those not seen yet are read from there.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fnmatch
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from _loxio import Damaged

from ._folder import Folder
from ._frame import is_torn, size_at
from ._parquet import CheckedFile
from ._scan import Damage, _next_good
from ._table import Table


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some rows of a table, in the order of their writing."""

    table: Table
    data: pa.Table  # run, time, and the columns of the table
    names: Mapping[int, str]  # of the runs

    @property
    def times(self) -> np.ndarray:
        return self.data.column("time").to_numpy().astype(np.int64)

    @property
    def lanes(self) -> np.ndarray:
        return self.data.column("run").to_numpy()

    def pick(self, at: np.ndarray) -> Rows:
        return dataclasses.replace(self, data=self.data.take(pa.array(at)))


class Follower:
    """The rows of a folder of runs, as they come. `poll` returns those that are new.

    `ended` is true when there will be no more; `state` then tells why (`"closed"`, `"crashed"` or
    `"removed"`). `damage` has what could not be read, `torn` the bytes of an unfinished write.

    - `names`: the runs to follow, by their number in the folder.
    - `keys`: names or patterns; the others are not read from Parquet files.
    """

    def __init__(self, path: str, names: Mapping[int, str], keys: Iterable[str] | None = None):
        self.path, self.names = path, names
        self.keys = None if keys is None else list(keys)
        self.known: dict[str, None] = {}  # the keys that were met
        self.state, self.ended = "open", False
        self.damage: list[Damage] = []
        self._streams: dict[str, _Stream] = {}

    @property
    def torn(self) -> int:
        return sum(s.size - s.offset for s in self._streams.values() if self.state == "crashed")

    def poll(self) -> list[Rows]:
        """What is new since the last call, in the order of its writing."""
        if self.ended:
            return []
        try:
            folder = Folder(self.path)
            self.state = folder.state  # before the streams are read: what is there then is all
            if "tables" not in folder.manifest:
                return self._from_streams(folder)
        except (FileNotFoundError, NotADirectoryError):
            self.state, self.ended = "removed", True
            return self._taken(None)
        self.ended = True
        return self._taken(None) + self._rest(folder)

    def _from_streams(self, folder: Folder) -> list[Rows]:
        limits = folder.manifest.get("streams", {})
        self._read_streams(limits)
        horizon: int | None = max((s.newest for s in self._streams.values()), default=0)
        # What was written before the newest batch so far may have been missed, in a stream that was
        # read earlier or that is new since then; after a second look it is all there.
        self._read_streams(limits)
        if self.state != "open":
            # Unless somebody has turned the streams into Parquet files while we looked for them.
            self.ended = "tables" not in Folder(self.path).manifest
            horizon = None
        if self.ended:
            self.damage += [d for s in self._streams.values() for d in s.end()]
        return self._taken(horizon)

    def _read_streams(self, limits: dict[str, int]) -> None:
        names = [n for n in os.listdir(self.path) if n.endswith(".arrows")]
        for name in sorted(names, key=lambda n: int(n.split(".")[0])):
            stream = self._streams.setdefault(name, _Stream(os.path.join(self.path, name)))
            with contextlib.suppress(FileNotFoundError):  # closed just now, or never begun
                self.damage += stream.read(limits.get(name))

    def _taken(self, until: int | None) -> list[Rows]:
        """The batches that wait, up to a time."""
        out: list[tuple[int, Rows]] = []
        for stream in self._streams.values():
            while stream.waiting and (until is None or _time(stream.waiting[0]) <= until):
                batch = stream.waiting.popleft()
                rows = self._wanted(stream.table, pa.Table.from_batches([batch]))
                out += [] if rows is None else [(_time(batch), rows)]
        return [rows for _, rows in sorted(out, key=lambda pair: pair[0])]

    def _wanted(self, table: Any, data: pa.Table) -> Rows | None:
        """The chosen runs and keys."""
        table = self._only_wanted(table)
        if not table.keys:
            return None
        lanes = pa.array([*self.names], pa.int32())
        data = data.filter(pc.is_in(data.column("run"), lanes))
        data = data.select(table.schema().names)
        return Rows(table, data, self.names) if len(data) else None

    def _only_wanted(self, table: Any) -> Any:
        self.known |= dict.fromkeys(table.keys)
        if self.keys is None:
            return table
        fits = lambda key: any(key == p or fnmatch.fnmatchcase(key, p) for p in self.keys or ())
        return table.only([k for k in table.keys if fits(k)])

    def _rest(self, folder: Folder) -> list[Rows]:
        """The rows of the tables of a closed folder that were not seen in its streams."""
        out = []
        for record in folder.manifest["tables"]:
            stream = self._streams.get(record["file"].replace(".parquet", ".arrows"))
            seen = stream.seen if stream else collections.Counter()
            if all(seen[lane] >= record["counts"][lane] for lane in self.names):
                continue
            try:
                rows = self._read_table(record)
                out += [] if rows is None else [_unseen(rows, seen)]
            except (Damaged, FileNotFoundError, pa.ArrowException) as error:
                self.damage.append(Damage(record["file"], 0, record["bytes"], str(error)))
        return out

    def _read_table(self, record: dict[str, Any]) -> Rows | None:
        with CheckedFile(os.path.join(self.path, record["file"]), record) as file:
            metadata = pq.read_metadata(pa.BufferReader(file.footer))
            reader = pq.ParquetFile(pa.PythonFile(file, "r"), metadata=metadata, pre_buffer=False)
            table = self._only_wanted(Table.of_schema(reader.schema_arrow))
            return self._wanted(table, reader.read(columns=table.schema().names, use_threads=False))


class _Stream:
    """A stream as far as it was read."""

    def __init__(self, path: str):
        self.path = path
        self.offset = self.size = 0  # the end of the good messages, of the file
        self.schema: pa.Schema | None = None
        self.table: Table | None = None
        self.seen: collections.Counter[int] = collections.Counter()  # rows of each run
        self.waiting: collections.deque[pa.RecordBatch] = collections.deque()
        self.newest = 0
        self._tail = memoryview(b"")  # behind the good messages
        self._last: tuple[int, int, pa.RecordBatch] | None = None  # its start and checksum

    def read(self, limit: int | None = None) -> list[Damage]:
        """Take the messages that were appended since the last time. Returns what is damaged."""
        with open(self.path, "rb") as file:
            if os.fstat(file.fileno()).st_size == self.size:
                return []
            start = self.offset if self._last is None else self._last[0]
            file.seek(start)
            data = memoryview(file.read(-1 if limit is None else max(limit - start, 0)))
        at = self._again(data)
        damage: list[Damage] = []
        while at < len(data):
            size = size_at(data, at)
            if size is not None:
                self._take(data[at : at + size], start + at)
                at += size
                continue
            then = None if is_torn(data, at) else _next_good(data, at)
            if then is None:
                break  # the rest of it may still come
            damage.append(self._damage(start + at, start + then))
            at = then
        self.size, self.offset, self._tail = start + len(data), start + at, data[at:]
        return damage

    def _again(self, data: memoryview) -> int:
        """Where to go on: behind the last message, unless its write failed and was taken back."""
        if self._last is None:
            return 0
        start, checksum, batch = self._last
        if xxhash.xxh3_64_intdigest(data[: self.offset - start]) == checksum:
            return self.offset - start
        self._last = None
        self.seen.subtract(batch.column(0).to_pylist())
        if self.waiting and self.waiting[-1] is batch:
            self.waiting.pop()
        return 0

    def _take(self, message: memoryview, start: int) -> None:
        read = pa.ipc.read_message(pa.py_buffer(message))
        if start == 0:
            self.schema = pa.ipc.read_schema(read)
            self.table = Table.of_schema(self.schema)
        elif self.schema is not None:  # without a schema, nothing can be made of it
            batch = pa.ipc.read_record_batch(read, self.schema)
            self.waiting.append(batch)
            self.newest = _time(batch)
            self.seen.update(batch.column(0).to_pylist())
            self._last = start, xxhash.xxh3_64_intdigest(message), batch

    def end(self) -> list[Damage]:
        """What is damaged at the end of a stream that nobody writes any more."""
        if self.size == self.offset or is_torn(self._tail, 0):
            return []
        start, self.size = self.offset, self.offset  # damaged, not torn
        return [self._damage(start, start + len(self._tail))]

    def _damage(self, start: int, stop: int) -> Damage:
        return Damage(os.path.basename(self.path), start, stop, "a batch is damaged")


def _time(batch: pa.RecordBatch) -> int:
    return batch.column(1)[0].value


def _unseen(rows: Rows, seen: collections.Counter[int]) -> Rows:
    """The rows after the first few of each run, in the order of their writing."""
    lanes, times = rows.lanes, rows.times
    order = np.argsort(lanes, kind="stable")  # row groups have the runs one after the other
    first = np.searchsorted(lanes[order], lanes[order])
    new = order[np.arange(len(order)) - first >= np.array([seen[int(r)] for r in lanes[order]])]
    new = new[np.argsort(times[new], kind="stable")]
    return rows.pick(new)
