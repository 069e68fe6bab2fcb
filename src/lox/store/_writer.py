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
import shutil
import threading
import time
from typing import Any

import numpy as np
import pyarrow as pa

from _loxio import AppendFile, Damaged, hold, write_small

from .._logdict import iterate_entries, logdict
from ._frame import BLANK, seal
from ._homes import Homes
from ._parquet import compact_stream
from ._table import Flat, Table, flat_tables

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
        try:
            self._lock = hold(os.path.join(path, LOCK))
            write_small(os.path.join(path, MANIFEST), manifest)
        except BaseException:  # as if nothing had been begun
            shutil.rmtree(path, ignore_errors=True)
            raise
        self._streams: dict[Any, Stream] = {}
        self._homes = Homes()
        self._all: list[Stream] = []
        self._made = 0
        self._time = manifest["created_ns"]
        self._synced: dict[str, int] = {}
        self._writing, self._syncing = threading.Lock(), threading.Lock()
        self.closed = False

    def write(self, lanes: np.ndarray, logs: logdict) -> None:
        """Append the events of `logs`, which has an axis over these runs in front.

        When it returns, all of it is with the operating system. If it fails, none of it is kept.
        """
        groups = flat_tables(list(iterate_entries(logs)))
        with self._writing:
            tables = [table for flat, mask in groups for table in self._homes.split(flat, mask)]
            self._time = max(time.time_ns(), self._time + 1)
            before: list[tuple[Stream, int]] = []
            try:
                for flat, mask in tables:
                    stream = self._stream(flat)
                    batch = flat.batch(stream.schema, lanes, self._time, mask)
                    before.append((stream, stream.file.size))
                    if batch.num_rows:
                        stream.append(batch)
            except BaseException:
                for stream, size in before:
                    with contextlib.suppress(OSError):
                        if stream.file.size > size:
                            stream.file.cut(size)
                raise

    def _stream(self, flat: Flat) -> Stream:
        signature = flat.signature()
        stream = self._streams.get(signature)
        if stream is None or stream.file.torn:
            path = os.path.join(self.path, f"{self._made}.arrows")
            self._made += 1
            try:
                stream = Stream(path, flat.table())
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(path)
                raise
            self._streams[signature] = stream
            self._all.append(stream)
        return stream

    def sync(self) -> None:
        """Bring to the disk what was written, and say there how much that is."""
        with self._syncing:
            with self._writing:
                sizes = {os.path.basename(s.file.path): s.file.size for s in self._all}
                streams = list(self._all)
            if self.closed or sizes == self._synced:
                return
            for stream in streams:
                stream.file.sync()
            write_small(os.path.join(self.path, SYNCED), {"bytes": sizes})
            self._synced = sizes

    def drop(self, lane: int) -> None:
        """Give up one of the runs; with the last one, the folder."""
        runs = self.manifest["runs"]
        runs[lane] = {**runs[lane], "dropped": True}
        if all(r.get("dropped") for r in runs):
            self.discard()
        else:
            write_small(os.path.join(self.path, MANIFEST), self.manifest)

    def close(self, compact: bool = True) -> None:
        """End the runs of this folder."""
        if self.closed:
            return
        try:
            self.sync()
            sizes = {os.path.basename(s.file.path): s.file.size for s in self._all}
            try:
                end_folder(self.path, self.manifest, sizes, compact)
            except (Damaged, OSError, pa.ArrowException):
                if compact:  # the streams are as good, only larger
                    end_folder(self.path, self.manifest, sizes, False)
                raise
        finally:
            self._release()

    def discard(self) -> None:
        """Remove the folder and all that is in it."""
        if not self.closed:
            self._release()
            shutil.rmtree(self.path, ignore_errors=True)

    def _release(self) -> None:
        with self._syncing, self._writing:
            self.closed = True
            for s in self._all:
                s.file.close()
            if self._lock is not None:
                self._lock.release()


def end_folder(path: str, manifest: dict[str, Any], sizes: dict[str, int], compact: bool) -> None:
    """Close a folder: its tables become Parquet files, and the manifest vouches for them.

    `sizes` has how many bytes of each stream are good. Killed anywhere in between, the folder is as
    good as before: the streams go last.
    """
    done = {**manifest, "state": "closed", "closed": now()}
    if compact:
        tables = []
        for name, size in sizes.items():
            target = os.path.join(path, name.replace(".arrows", ".parquet"))
            runs = len(manifest["runs"])
            record = compact_stream(os.path.join(path, name), target, runs, size)
            tables += [] if record is None else [record]
        done["tables"] = tables
    else:
        done["streams"] = sizes
    write_small(os.path.join(path, MANIFEST), done)
    for name in [*(sizes if compact else ()), SYNCED]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(path, name))


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + "Z"
