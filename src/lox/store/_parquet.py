"""A stream as a Parquet file, and reading one with every byte that is used checked.

Rows are sorted by run within a row group. The record kept in the manifest has a checksum of each
column of each row group, of the footer, and of the whole file: reading some columns touches and
checks only those.
"""

from __future__ import annotations

import bisect
import io
import os
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from _loxio import Damaged, naming

from ._scan import contents, scan
from ._table import Table

ROW_GROUP = 1 << 20  # rows
GROUP_BYTES = 1 << 28
_CODEC = "zstd"


def compact_stream(source: str, target: str, runs: int, size: int) -> dict[str, Any] | None:
    """Write the rows of a stream, `size` bytes, to a Parquet file. Returns its record.

    None if there is nothing in it, not even a whole schema: the process died that early.
    """
    found = scan(source, size, live=False, at_most=size)
    if found.damage:
        raise Damaged(f"{found.damage[0]}; it is left as it is")
    if not found.messages:
        return None
    temporary = os.path.join(os.path.dirname(target), f".{uuid.uuid4().hex}.tmp")
    schema, batches = read_batches(found)
    counts = np.zeros(runs, np.int64)
    spans: list[list[int]] = []
    try:
        with pq.ParquetWriter(temporary, schema, **_options(schema)) as writer:
            for group in _groups(batches):
                table = pa.Table.from_batches(group, schema)
                run = table.column("run").to_numpy()
                counts += np.bincount(run, minlength=runs)
                if (run[1:] < run[:-1]).any():
                    order = np.argsort(run, kind="stable")
                    table = table.take(pa.array(order))
                spans.append([int(run.min()), int(run.max())])
                writer.write_table(table, row_group_size=max(len(table), 1))
        with open(temporary, "rb+") as file, naming(target):
            os.fsync(file.fileno())
        record = _record(temporary, os.path.basename(target))
        os.replace(temporary, target)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    return {**record, "runs": spans, "counts": counts.tolist()}


def read_batches(found: Any) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """The schema and the batches of a scanned stream."""
    messages = [found.data[at : at + size] for at, size in found.messages]
    read = lambda m: pa.ipc.read_message(pa.py_buffer(m))
    schema = pa.ipc.read_schema(read(messages[0]))
    return schema, (pa.ipc.read_record_batch(read(m), schema) for m in messages[1:])


def _groups(batches: Iterator[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    group: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        group.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= ROW_GROUP or size >= GROUP_BYTES:
            yield group
            group, rows, size = [], 0, 0
    if group:
        yield group


def _options(schema: pa.Schema) -> dict[str, Any]:
    steps = {c.name for c in Table.of_schema(schema).steps}
    encodings = {"run": "RLE_DICTIONARY", "time": "DELTA_BINARY_PACKED"}
    for field in schema:
        plain_list = pa.types.is_fixed_size_list(field.type)
        leaf = f"{field.name}.list.element" if plain_list else field.name
        kind = field.type.value_type if plain_list else field.type
        if pa.types.is_floating(kind):
            encodings[leaf] = "BYTE_STREAM_SPLIT"  # exponents next to each other pack well
        elif field.name in steps and kind in (pa.int32(), pa.int64()):
            encodings[leaf] = "DELTA_BINARY_PACKED"
    dictionary = [n for n, e in encodings.items() if e == "RLE_DICTIONARY"]
    encodings = {n: e for n, e in encodings.items() if e != "RLE_DICTIONARY"}
    return dict(
        compression=_CODEC,
        use_dictionary=dictionary,
        column_encoding=encodings,
        write_statistics=["run"],
    )


def _record(path: str, name: str) -> dict[str, Any]:
    """Size and checksums of a Parquet file, of its footer and of its column chunks."""
    data = contents(path)
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    meta = pq.read_metadata(path)
    chunks: dict[str, list[Any]] = {}
    for g in range(meta.num_row_groups):
        group = meta.row_group(g)
        for c in range(group.num_columns):
            column = group.column(c)
            start, size = _range(column)
            digest = xxhash.xxh3_64_hexdigest(data[start : start + size])
            chunks.setdefault(column.path_in_schema, []).append([start, size, digest])
    return dict(
        file=name,
        bytes=len(data),
        xxh3=xxhash.xxh3_64_hexdigest(data),
        footer=[footer, xxhash.xxh3_64_hexdigest(data[footer:])],
        chunks=chunks,
    )


def _range(column: Any) -> tuple[int, int]:
    starts = [column.data_page_offset, column.dictionary_page_offset]
    return min(s for s in starts if s), column.total_compressed_size


class CheckedFile(io.RawIOBase):
    """A Parquet file that gives out only bytes whose checksum was right, and reads no others."""

    def __init__(self, path: str, record: dict[str, Any]):
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed with this)
        self.path, self._at, self._size = path, 0, record["bytes"]
        size = os.fstat(self._file.fileno()).st_size
        if size != self._size:
            self._file.close()
            raise Damaged(f"{path} has {size} bytes instead of {self._size}")
        start, digest = record["footer"]
        self._parts = [("its footer", start, self._size - start, digest)]
        for name, chunks in record["chunks"].items():
            self._parts += [(f"column {name!r}", *chunk) for chunk in chunks]
        self._parts.sort(key=lambda part: part[1])
        self._starts = [part[1] for part in self._parts]
        self._latest = (-1, b"")  # a column is read in several pieces
        self.footer = self._part(len(self._parts) - 1)

    def _part(self, i: int) -> bytes:
        if self._latest[0] != i:
            what, start, size, digest = self._parts[i]
            self._file.seek(start)
            data = b"".join(iter(lambda: self._file.read(start + size - self._file.tell()), b""))
            if xxhash.xxh3_64_hexdigest(data) != digest:
                raise Damaged(f"{self.path} is damaged: {what} does not fit its checksum")
            self._latest = (i, data)
        return self._latest[1]

    def read(self, size: int = -1) -> bytes:
        i = bisect.bisect_right(self._starts, self._at) - 1
        start = self._at - self._starts[i] if i >= 0 else -1
        if i < 0 or start + size > self._parts[i][2]:
            raise Damaged(f"{self.path}: its footer asks for bytes that are of no column")
        self._at += size
        return self._part(i)[start : start + size]

    def seek(self, at: int, whence: int = 0) -> int:
        self._at = at + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()


def read_schema(path: str, record: dict[str, Any]) -> pa.Schema:
    with CheckedFile(path, record) as file:
        return pq.read_schema(pa.BufferReader(file.footer))


def read_parquet(path: str, record: dict[str, Any], columns: list[str], run: int) -> pa.Table:
    """Some columns of one run. Only their bytes are read, and each of them is checked."""
    groups = [g for g, (low, high) in enumerate(record["runs"]) if low <= run <= high]
    order = ["run", "time", *columns]
    with CheckedFile(path, record) as file:
        metadata = pq.read_metadata(pa.BufferReader(file.footer))
        reader = pq.ParquetFile(pa.PythonFile(file, "r"), metadata=metadata, pre_buffer=False)
        table = reader.read_row_groups(groups, columns=order, use_threads=False).select(order)
    if any(low != high for low, high in (record["runs"][g] for g in groups)):
        table = table.filter(pc.equal(table.column("run"), run))
    return table
