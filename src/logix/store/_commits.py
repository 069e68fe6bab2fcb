"""The commit index: which rows exist, where they are, and what their bytes were.

A part of a store is three files that only grow:

NAME.rows      rows, one after the other
NAME.ids       their ids
NAME.commits   a record of 64 bytes for each append, written after the rows and the ids

A record: the number of its first row (of all this writer wrote), the count, where its rows and ids
begin, the size of the ids, the xxh3 of both, and the xxh3 of the record itself, seeded with the
store and the part, so that a file of another one does not fit. What no record vouches for does not
exist. A record that is cut short was never committed; one that was changed is found.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import threading
import warnings
from collections.abc import Iterator

import numpy as np
import xxhash

from _loxio import AppendFile, Damaged

from ._ids import Id, decode_ids
from ._rowtypes import map_bytes

RECORD = struct.Struct("<8Q")
FILES = ("rows", "ids", "commits")
START, COUNT, ROWS_AT, IDS_AT, IDS_SIZE, ROWS_XXH3, IDS_XXH3, SELF = range(8)
CHUNK = 1 << 20  # bytes that are read at once: they are still in the cache when they are checked


def seed_of(store: str, name: str) -> int:
    return xxhash.xxh3_64_intdigest(f"{store}/{name}".encode())


class PartWriter:
    """A new part. An `append` is whole or, if it fails, as if it had not been called."""

    def __init__(self, folder: str, name: str, store: str, start: int):
        self.name, self._seed, self._next = name, seed_of(store, name), start
        self.files: list[AppendFile] = []
        self.sizes = dict.fromkeys(FILES, 0)  # committed; replaced as a whole, for other threads
        try:
            for kind in FILES:
                self.files.append(AppendFile(os.path.join(folder, f"{name}.{kind}")))
        except BaseException:
            self.remove()
            raise

    def append(self, rows: memoryview, ids: bytes, count: int) -> None:
        before = self.sizes
        digests = xxhash.xxh3_64_intdigest(rows), xxhash.xxh3_64_intdigest(ids)
        fields = (self._next, count, before["rows"], before["ids"], len(ids), *digests)
        body = RECORD.pack(*fields, 0)[:-8]
        check = xxhash.xxh3_64_intdigest(body, seed=self._seed).to_bytes(8, "little")
        try:
            for file, data in zip(self.files, (rows, ids, body + check)):
                file.append(data)  # type: ignore[arg-type]
        except BaseException:
            for file, size in zip(self.files, before.values()):
                with contextlib.suppress(OSError):
                    if file.size > size:
                        file.cut(size)
            raise
        self._next += count
        self.sizes = {kind: f.size for kind, f in zip(FILES, self.files)}

    @property
    def torn(self) -> bool:
        """A write failed and could not be taken back: nothing can follow it."""
        return any(f.torn for f in self.files)

    def sync(self) -> None:
        for file in self.files:
            file.sync()

    def close(self) -> None:
        for file in self.files:
            file.close()

    def remove(self) -> None:
        """As if it had not been begun."""
        self.close()
        for file in self.files:
            with contextlib.suppress(OSError):
                os.unlink(file.path)


class Part:
    """A part as it is read: what was committed when it was opened.

    `listed`: the sizes that have reached the disk. No less may be there, and no other number of
    records once the writer is closed. With `keep`, all rows stay mapped; else what is in use.
    """

    def __init__(
        self,
        folder: str,
        name: str,
        store: str,
        row_bytes: int,
        listed: dict[str, int],
        closed: bool = False,
        keep: bool = False,
        strict: bool = True,
    ):
        self.name, self.keep, self.row_bytes = name, keep, row_bytes
        self.paths = {kind: os.path.join(folder, f"{name}.{kind}") for kind in FILES}
        try:
            found = _read_records(self.paths["commits"], seed_of(store, name), row_bytes)
            self.sizes = {kind: os.path.getsize(path) for kind, path in self.paths.items()}
        except FileNotFoundError as error:
            raise Damaged(f"{error.filename} is missing") from None
        self.records, bad = found
        self.starts = np.cumsum(np.r_[0, self.records[:, COUNT].astype(np.int64)])
        self.checked = np.zeros(len(self.records), bool)
        self._checking = threading.Lock()
        self._whole: np.ndarray | None = None
        self._latest: tuple[tuple[int, int], list[Id]] = ((-1, -1), [])
        bad = bad or self._misfit(listed, closed)
        if strict and bad:
            raise Damaged(bad)

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def start(self) -> int:
        return int(self.records[0, START]) if len(self.records) else 0

    def ends(self, count: int | None = None) -> dict[str, int]:
        """The sizes of the files after the first `count` records."""
        used = self.records[:count]
        ids = int(used[-1, IDS_AT] + used[-1, IDS_SIZE]) if len(used) else 0
        rows = int(used[:, COUNT].sum()) * self.row_bytes
        return {"rows": rows, "ids": ids, "commits": len(used) * RECORD.size}

    def _misfit(self, listed: dict[str, int], closed: bool) -> str | None:
        ends = self.ends()
        if closed and ends["commits"] > listed["commits"]:
            return f"{self.paths['commits']} is damaged: it was written after the store was closed"
        for kind in FILES:
            have = ends[kind] if kind == "commits" else self.sizes[kind]
            want = max(listed[kind], ends[kind])
            if have < want:
                return f"{self.paths[kind]} is damaged: it has {have:,} bytes instead of {want:,}"
        return None

    def appends(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Whose rows these are: the number of each append, its first row here, and its end."""
        first, last = np.searchsorted(self.starts, [start, stop - 1], side="right") - 1
        edges = self.starts[first : last + 2].tolist() if stop > start else []
        for k, (lo, hi) in enumerate(itertools.pairwise(edges), first):
            yield k, max(start, lo), min(stop, hi)

    def rows(self, start: int, stop: int) -> np.ndarray:
        """The bytes of these rows, (n, row_bytes). Each append they are of is checked once."""
        if not self.is_checked(start, stop):
            for k, _, _ in self.appends(start, stop):
                self.check(k)
        size = self.row_bytes
        return self.view(start * size, stop * size).reshape(stop - start, size)

    def is_checked(self, start: int, stop: int) -> bool:
        first, last = np.searchsorted(self.starts, [start, stop - 1], side="right") - 1
        return bool(self.checked[first : last + 1].all())

    def check(self, k: int) -> None:
        """Compare an append with its checksum, once."""
        if not self.checked[k]:
            with self._checking:  # one thread does it for all that wait
                if not self.checked[k] and (found := self.rows_damage(k)):
                    raise Damaged(found)
                self.checked[k] = True

    def rows_damage(self, k: int) -> str | None:
        at = int(self.records[k, ROWS_AT])
        end = at + int(self.records[k, COUNT]) * self.row_bytes
        if end <= self.sizes["rows"]:
            digest = xxhash.xxh3_64()
            for chunk in self._chunks(at, end):
                digest.update(chunk)
            if digest.intdigest() == int(self.records[k, ROWS_XXH3]):
                return None
        return self.damage(k)

    def damage(self, k: int) -> str:
        """What to say if an append is not what was written."""
        which = f"rows {self.starts[k]}–{self.starts[k + 1] - 1}"
        return f"{self.paths['rows']} is damaged: {which} are not what was written"

    def _chunks(self, at: int, end: int) -> Iterator[memoryview]:
        """Bytes of the rows: of the map, which brings its pages into memory, or read."""
        if self.keep:
            for lo in range(at, end, CHUNK):
                yield self.view(lo, min(lo + CHUNK, end)).data
            return
        scratch = memoryview(bytearray(min(CHUNK, end - at)))
        with open(self.paths["rows"], "rb", buffering=0) as file:
            file.seek(at)
            while at < end and (got := file.readinto(scratch[: end - at])):
                yield scratch[:got]
                at += got

    def view(self, start: int, stop: int) -> np.ndarray:
        if not self.keep:
            return map_bytes(self.paths["rows"], start, stop)
        if self._whole is None:
            self._whole = map_bytes(self.paths["rows"], 0, len(self) * self.row_bytes)
        return self._whole[start:stop]

    def ids(self, start: int, stop: int) -> list[Id]:
        """Checked whenever they are read."""
        if stop <= start:
            return []
        first, last = (np.searchsorted(self.starts, [start, stop - 1], side="right") - 1).tolist()
        known, ids = self._latest  # at once: other threads may replace it
        if known != (first, last):
            ids = self._read_ids(first, last + 1)
            self._latest = (first, last), ids
        base = int(self.starts[first])
        return ids[start - base : stop - base]

    def ids_of(self, k: int) -> list[Id]:
        return self._read_ids(k, k + 1)

    def _read_ids(self, first: int, end: int) -> list[Id]:
        records = self.records[first:end]
        base = int(records[0, IDS_AT])
        with open(self.paths["ids"], "rb", buffering=0) as file:
            file.seek(base)
            data = file.read(int(records[-1, IDS_AT] + records[-1, IDS_SIZE]) - base)
        for k, (at, size, digest) in enumerate(records[:, [IDS_AT, IDS_SIZE, IDS_XXH3]].tolist()):
            own = data[at - base : at - base + size]
            if len(own) != size or xxhash.xxh3_64_intdigest(own) != digest:
                which = f"those of rows {self.starts[first + k]}–{self.starts[first + k + 1] - 1}"
                raise Damaged(f"{self.paths['ids']} is damaged: {which} are not what was written")
        return decode_ids(data, int(records[:, COUNT].sum()))


def recover(part: Part, listed: dict[str, int]) -> dict[str, int]:
    """Cut a part to what is good, once its writer is dead, and say how large that is.

    What has reached the disk must be there. Of what came later, a loss of power may leave records
    without their rows: they are dropped, with a warning, and can be logged again.
    """
    if part.ends()["commits"] < listed["commits"]:
        raise Damaged(f"{part.paths['commits']} is damaged: records of rows on the disk are gone")
    good = listed["commits"] // RECORD.size
    with contextlib.suppress(Damaged):
        while good < len(part.records) and part.rows_damage(good) is None:
            part.ids_of(good)
            good += 1
    ends = part.ends(good)
    for kind in FILES:
        if part.sizes[kind] < ends[kind]:
            raise Damaged(f"{part.paths[kind]} is damaged: some of its bytes are gone")
    if part.sizes["commits"] - ends["commits"] >= RECORD.size:
        lost = "rows that had not reached the disk when the machine stopped are dropped"
        warnings.warn(f"{part.paths['rows']}: {lost}", RuntimeWarning, stacklevel=4)
    for kind in reversed(FILES):  # the records first
        if part.sizes[kind] > ends[kind]:
            os.truncate(part.paths[kind], ends[kind])
    return ends


def _read_records(path: str, seed: int, row_bytes: int) -> tuple[np.ndarray, str | None]:
    """The records before the first bad one, and what is wrong with that."""
    with open(path, "rb") as file:
        data = memoryview(file.read())
    count = len(data) // RECORD.size
    records = np.frombuffer(data[: count * RECORD.size], "<u8").reshape(count, 8)
    rows = ids = 0
    start = int(records[0, START]) if count else 0
    for good in range(count):
        body = data[good * RECORD.size :][: RECORD.size - 8]
        one = records[good].tolist()
        fits = one[:1] + one[ROWS_AT : IDS_AT + 1] == [start, rows, ids]
        if not fits or xxhash.xxh3_64_intdigest(body, seed=seed) != one[SELF]:
            return records[:good], f"{path} is damaged: record {good} is not what was written"
        start, rows, ids = start + one[COUNT], rows + one[COUNT] * row_bytes, ids + one[IDS_SIZE]
    return records, None
