"""Reading a row store: what its folder holds, its rows, and whether they are what was written.

manifest.json     what a row is: layout, dtype, whatever else is needed to read it (by rename)
0000.json         of writer 0: its parts, and how much of them has reached the disk (by rename)
0000-0000.rows …  a part of writer 0: rows, ids, commits (see `_commits`)
0000.lock         held while the writer lives
"""

from __future__ import annotations

import bisect
import math
import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from _loxio import Damaged, is_held, read_small

from ._commits import Part
from ._ids import DUPLICATES, Id, as_id, stretches
from ._rowtypes import RowType, block_rows, mappable

MANIFEST, KIND, FORMAT = "manifest.json", "logix rows", 1
_OURS = re.compile(r"\d{4,}(-\d{4,}\.(rows|ids|commits)|\.json)|manifest\.json")


def read_manifest(path: str) -> dict[str, Any]:
    try:
        manifest = read_small(os.path.join(path, MANIFEST))
    except (FileNotFoundError, NotADirectoryError):
        if os.path.isdir(path) and store_files(path):
            raise Damaged(f"{path} is damaged: its {MANIFEST} is missing") from None
        raise FileNotFoundError(f"there is no store at {path}") from None
    if manifest.get("kind") != KIND:
        raise ValueError(f"{path} holds something else than rows of logix")
    if manifest["format"] != FORMAT:
        raise ValueError(f"{path} has format {manifest['format']}, and this version reads {FORMAT}")
    return manifest


def store_files(path: str) -> list[str]:
    return [n for n in os.listdir(path) if _OURS.fullmatch(n)]


def writer_numbers(path: str) -> list[int]:
    stems = (n.removesuffix(".json") for n in store_files(path) if n.endswith(".json"))
    return sorted(int(n) for n in stems if n.isdigit())


def writer_file(path: str, writer: int, kind: str) -> str:
    return os.path.join(path, f"{writer:04d}.{kind}")


def read_writer(path: str, manifest: dict[str, Any], writer: int) -> dict[str, Any]:
    file = writer_file(path, writer, "json")
    content = read_small(file)
    if content["store"] != manifest["store"] or content["writer"] != writer:
        raise Damaged(f"{file} is damaged: it belongs to another store, or to another writer")
    return content


def open_part(
    path: str, manifest: dict[str, Any], state: dict[str, Any], number: int, **how: Any
) -> Part:
    """One of the parts that `state` lists (of a writer, by `read_writer`)."""
    size = RowType(manifest["dtype"], manifest["dim"]).nbytes
    listed, closed = state["parts"][number], state["state"] == "closed"
    return Part(path, listed["name"], manifest["store"], size, listed, closed, **how)


def open_parts(path: str, manifest: dict[str, Any], writer: int, **how: Any) -> list[Part]:
    """What a writer has written, in order."""
    state = read_writer(path, manifest, writer)
    parts = [open_part(path, manifest, state, n, **how) for n in range(len(state["parts"]))]
    start = 0
    for part in parts:
        if len(part) and part.start != start:
            raise Damaged(f"{part.paths['rows']} is damaged: rows before it are missing")
        start += len(part)
    return parts


def writer_state(path: str, manifest: dict[str, Any], writer: int) -> str:
    """`closed`, `open` (its process lives) or `crashed`."""
    alive = is_held(writer_file(path, writer, "lock"))  # first: it may be closing just now
    state = read_writer(path, manifest, writer)["state"]
    return "crashed" if state == "open" and not alive else state


class RowStore:
    """The rows that were committed when it was opened. Read-only; `refresh` looks again.

    >>> import tempfile, numpy as np
    >>> from logix.store import RowStore, RowWriter
    >>> path = tempfile.mkdtemp()
    >>> with RowWriter(path, [dict(name="fc", shape=(2,), offset=0)]) as writer:
    ...     writer.append(["a", "b"], np.ones((2, 2)))
    2
    >>> store = RowStore(path)
    >>> store.ids, store.rows(1).tolist(), store.find("b")
    (['a', 'b'], [[1.0, 1.0]], 1)

    Rows are in the order of the writers, and of each writer's appends. They are mapped when asked
    for, and stay so only if all of them take at most `map_bytes` (a quarter of the memory, and
    nothing where the address space is limited).

    No row is returned unchecked: the first time that a row of an append is asked for, all bytes of
    that append are compared with their checksum; ids are, whenever they are read from the file.
    What does not fit raises `Damaged`, which names the file.

    `duplicates` takes the place of the policy that the store was written with.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        duplicates: str | None = None,
        map_bytes: int | None = None,
    ):
        self.path = os.path.abspath(path)
        self.manifest = read_manifest(self.path)
        self.policy = duplicates or self.manifest["duplicates"]
        if self.policy not in DUPLICATES:
            raise ValueError(f"duplicates={duplicates!r} is not one of {', '.join(DUPLICATES)}")
        self.type = RowType(self.manifest["dtype"], self.manifest["dim"])
        self.map_bytes = mappable() // 4 if map_bytes is None else map_bytes
        self.refresh()

    def refresh(self) -> None:
        """See what has been committed since."""
        writers = [open_parts(self.path, self.manifest, w) for w in writer_numbers(self.path)]
        writers = [parts for parts in writers if any(len(p) for p in parts)]
        parts = [p for parts in writers for p in parts if len(p)]
        self.mapped = sum(len(p) for p in parts) * self.type.nbytes <= self.map_bytes
        for part in parts:
            part.keep = self.mapped
        # Stretches of rows: a part, its first row, and one after its last.
        self.spans = [(p, 0, len(p)) for p in parts]
        alone = len(writers) < 2 and self.manifest["duplicates"] != "keep_all"
        if self.policy != "keep_all" and not alone:  # one writer alone has seen to it
            seen: set[Id] = set()
            kept = ((p, stretches(p.ids(0, len(p)), self.policy, seen)) for p in parts)
            self.spans = [(p, lo, hi) for p, found in kept for lo, hi in found]
        self._starts = [0]
        for _, lo, hi in self.spans:
            self._starts.append(self._starts[-1] + hi - lo)
        self._index: dict[Id, int] | None = None

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def grads(self) -> list[tuple[str, tuple[int, ...], int]]:
        """Where the gradient of each layer is in a row: (name, shape, offset).

        Other kinds of logs ("forward", "backward") come after the gradients.
        """
        own = [p for p in self.manifest["layout"] if p.get("kind", "grad") == "grad"]
        return [(p["name"], tuple(p["shape"]), p["offset"]) for p in own]

    @property
    def width(self) -> int:
        """How many values of a row are gradients: the first ones."""
        return sum(math.prod(shape) for _, shape, _ in self.grads)

    @property
    def ids(self) -> list[Id]:
        """Of all rows, in their order."""
        return self.ids_of(0, len(self))

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[Part, int, int]]:
        first = bisect.bisect_right(self._starts, start) - 1
        for (part, lo, hi), at in zip(self.spans[first:], self._starts[first:]):
            if at >= stop or stop <= start:
                break
            yield part, lo + max(start - at, 0), min(hi, lo + stop - at)

    def ids_of(self, start: int, stop: int) -> list[Id]:
        """Of these rows."""
        return [i for part, lo, hi in self._pieces(start, stop) for i in part.ids(lo, hi)]

    def rows(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows in float32, (stop - start, D); `start` and `stop` as in a slice.

        float32 rows within one part are the mapped file itself: read-only, and not copied.
        """
        start, stop, _ = slice(start, stop).indices(len(self))
        found = [self.type.decode(p.rows(lo, hi)) for p, lo, hi in self._pieces(start, stop)]
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.empty((0, self.type.dim), np.float32)

    def blocks(self, rows: int | None = None) -> Iterator[tuple[list[Id], np.ndarray]]:
        """All rows, `rows` at a time, with their ids. No more than that is held.

        By default as many as `block_rows` says.
        """
        rows = rows or block_rows(self.type.dim)
        for start in range(0, len(self), rows):
            stop = min(start + rows, len(self))
            yield self.ids_of(start, stop), self.rows(start, stop)

    def find(self, id: Any) -> int:
        """The number of the first row with this id."""
        if self._index is None:
            self._index = {}
            for place, one in enumerate(self.ids):
                self._index.setdefault(one, place)
        try:
            return self._index[as_id(id)]
        except KeyError:
            raise KeyError(f"no row of {self.path} has the id {id!r}") from None

    def __reduce__(self) -> Any:
        # Another process opens it for itself.
        return RowStore, (self.path, self.policy, self.map_bytes)

    def verify(self, check: bool = True) -> Any:
        """Compare all of the store with its checksums."""
        from ._verify import verify

        return verify(self.path, check)
