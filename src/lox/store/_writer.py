"""Writing a folder of runs: those of one `init`, by one process.

manifest.json   what runs these are; when closed, also what the tables hold (by rename)
synced.json     how many bytes of each stream have reached the disk (by rename)
0.arrows …      one stream for each table: a schema, then a batch for every write
0.parquet …     the same after `close`, when the streams are gone
lock            held while the writer lives
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Any

import numpy as np
import pyarrow as pa

from .._errors import Damaged
from .._logdict import iterate_entries, logdict
from ._append import AppendFile
from ._frame import BLANK, seal
from ._lock import hold
from ._parquet import compact_stream
from ._small import write_small
from ._table import Table, flat_tables

MANIFEST, SYNCED, LOCK = "manifest.json", "synced.json", "lock"
FORMAT = 1


class Stream:
    """One table of a folder, while it is written."""

    def __init__(self, path: str, table: Table):
        self.table, self.schema = table, table.schema()
        header = bytearray(memoryview(self.schema.serialize()))
        self._header_size = len(header)
        self.file = AppendFile(path)
        self.file.append(seal(header))

    def append(self, batch: pa.RecordBatch) -> None:
        # Arrow writes the schema first, always; to skip it is cheaper than any way around it.
        sink = pa.BufferOutputStream()
        pa.ipc.new_stream(sink, self.schema).write_batch(batch, custom_metadata={"check": BLANK})
        message = bytearray(memoryview(sink.getvalue())[self._header_size :])
        self.file.append(seal(message))


class FolderWriter:
    """A new folder of runs that is open for writing."""

    def __init__(self, path: str, manifest: dict[str, Any]):
        self.path, self.manifest = path, manifest
        os.mkdir(path)
        self._lock = hold(os.path.join(path, LOCK))
        write_small(os.path.join(path, MANIFEST), manifest)
        self._streams: dict[Any, Stream] = {}
        self._all: list[Stream] = []
        self._time = 0
        self._mutex = threading.Lock()  # the syncing thread is the other one
        self.closed = False

    def write(self, lanes: np.ndarray, logs: logdict) -> None:
        """Append the events of `logs`, which has an axis over these runs in front.

        When it returns, all of it is with the operating system.
        """
        self._time = max(time.time_ns(), self._time + 1)
        for flat, mask in flat_tables(list(iterate_entries(logs))):
            signature = flat.signature()
            stream = self._streams.get(signature)
            if stream is None or stream.file.torn:
                stream = self._streams[signature] = self._new_stream(flat.table())
            batch = flat.batch(stream.schema, lanes, self._time, mask)
            if batch.num_rows:
                stream.append(batch)

    def _new_stream(self, table: Table) -> Stream:
        stream = Stream(os.path.join(self.path, f"{len(self._all)}.arrows"), table)
        with self._mutex:
            self._all.append(stream)
        return stream

    def sync(self) -> None:
        """Bring to the disk what was written, and say there how much that is."""
        with self._mutex:
            streams = list(self._all)
            if self.closed or all(s.file.synced == s.file.size for s in streams):
                return
            for s in streams:
                s.file.sync()
            sizes = {os.path.basename(s.file.path): s.file.synced for s in streams}
            write_small(os.path.join(self.path, SYNCED), {"bytes": sizes})

    def close(self, compact: bool = True) -> None:
        """End the runs of this folder."""
        if self.closed:
            return
        try:
            self.sync()
            try:
                end_folder(self.path, self.manifest, compact)
            except (Damaged, OSError, pa.ArrowException):
                if compact:  # the streams are as good, only larger
                    end_folder(self.path, self.manifest, False)
                raise
        finally:
            with self._mutex:
                self.closed = True
                for s in self._all:
                    s.file.close()
                self._lock.release()


def end_folder(path: str, manifest: dict[str, Any], compact: bool) -> None:
    """Close a folder: its tables become Parquet files, and the manifest vouches for them.

    Killed anywhere in between, the folder is as good as before: the streams go last.
    """
    streams = [n for n in os.listdir(path) if n.endswith(".arrows")]
    streams.sort(key=lambda n: int(n.split(".")[0]))
    tables = []
    if compact:
        for name in streams:
            target = os.path.join(path, name.replace(".arrows", ".parquet"))
            record = compact_stream(os.path.join(path, name), target, len(manifest["runs"]))
            tables += [] if record is None else [record]
        done = {**manifest, "state": "closed", "closed": now(), "tables": tables}
    else:
        sizes = {n: os.path.getsize(os.path.join(path, n)) for n in streams}
        done = {**manifest, "state": "closed", "closed": now(), "streams": sizes}
    write_small(os.path.join(path, MANIFEST), done)
    for name in [*(streams if compact else ()), SYNCED]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(path, name))


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + "Z"
