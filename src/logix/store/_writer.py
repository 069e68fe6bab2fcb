"""Writing a row store (`_reader` reads it): rows with ids, by one or several processes.

When `append` returns, its rows are with the operating system and outlive the process; they are on
the disk after `flush` and `close`, and are brought there beside the caller by the first append that
comes `sync_every` seconds or `SYNC_BYTES` later. A new part is begun when the one before is on the
disk: with so little left to bring there, that takes no time worth speaking of.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from _loxio import exclusive, hold, write_small

from ._claim import claim, row_size
from ._commits import PartWriter, recover
from ._ids import Id, Known, as_ids, encode_ids
from ._reader import RowStore as RowStore
from ._reader import (
    open_part,
    open_parts,
    read_writer,
    writer_file,
    writer_numbers,
)
from ._rowtypes import RowType

SYNC_BYTES = 1 << 28  # a disk takes them in a moment, and not so few that it does little else


class RowWriter:
    """Writes rows to the store at `path`.

    >>> import tempfile, numpy as np
    >>> from logix.store import RowWriter
    >>> with RowWriter(tempfile.mkdtemp(), [dict(name="fc", shape=(3,), offset=0)]) as writer:
    ...     writer.append([0, 1], np.zeros((2, 3)))
    2

    A store that is there is an error, unless `resume=True` (continue it: ids that are there are
    passed over) or `overwrite=True` (remove it first). Several writers, one for each rank, need a
    number each and the same `run`, a text that no other run has: by it they know whether the store
    is theirs or an earlier one.

    With `again=False`, ids that a resumed store has are held to the policy too.
    `duplicates`: `error`, `keep_first` or `keep_all` rows whose id was there before. A writer knows
    its own ids, and those it found when it resumed; `RowStore` holds all writers to the policy. A
    row with NaN or infinity is an error, or kept with `nonfinite="keep"`. `meta`: any JSON.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        layout: Sequence[dict[str, Any]],
        dtype: str = "float32",
        writer: int = 0,
        duplicates: str = "error",
        resume: bool = False,
        sync_every: float = 30.0,
        shard_bytes: int = 1 << 32,
        *,
        overwrite: bool = False,
        run: str | None = None,
        meta: dict[str, Any] | None = None,
        nonfinite: str = "error",
        again: bool = True,
    ):
        if nonfinite not in ("error", "keep"):
            raise ValueError(f"nonfinite={nonfinite!r} is neither 'error' nor 'keep'")
        if resume and overwrite:
            raise ValueError("resume=True keeps what is there, overwrite=True removes it: pass one")
        self.path, self.writer, self.nonfinite = os.path.abspath(path), int(writer), nonfinite
        self.sync_every, self.shard_bytes = sync_every, shard_bytes
        self.type, self._known = RowType(dtype, row_size(layout)), Known(duplicates)
        wanted = dict(layout=list(layout), dim=self.type.dim, dtype=dtype, duplicates=duplicates)
        wanted = json.loads(json.dumps({**wanted, "meta": meta or {}}))  # as it will be read
        self._writing, self._syncing = threading.Lock(), threading.Lock()
        self._knowing = threading.Lock()  # of `_known`: held for a moment only, not while writing
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._done: list[dict[str, Any]] = []  # the parts before
        self._part: PartWriter | None = None
        self._unsynced = 0  # bytes that came since the last sync began
        os.makedirs(self.path, exist_ok=True)
        with exclusive(os.path.join(self.path, ".claim")):
            lock = hold(writer_file(self.path, self.writer, "lock"))
            if lock is None:
                raise FileExistsError(
                    f"{self.path}: writer {self.writer} is writing it just now, in another process "
                    "or by another run of this one. run.close() ends a run."
                )
            self._lock = lock
            try:
                self.manifest = claim(self.path, wanted, self.writer, run, resume, overwrite)
                if resume:
                    self._continue(again)
                self._list("open", self._done)
            except BaseException:
                lock.release()
                raise
        self.rows = sum(d["rows"] for d in self._done) // self.type.nbytes
        self._synced_at, self.closed = time.monotonic(), False

    def _continue(self, again: bool) -> None:
        """Cut this writer's parts to what is good, and learn the ids of all writers."""
        before: list[Id] = []
        for writer in writer_numbers(self.path):
            if writer == self.writer:
                state = read_writer(self.path, self.manifest, writer)
                for n, listed in enumerate(state["parts"]):
                    part = open_part(self.path, self.manifest, state, n, strict=False)
                    self._done.append({"name": part.name, **recover(part, listed)})
            for part in open_parts(self.path, self.manifest, writer):
                before += part.ids(0, len(part))
        self._known = Known(self._known.policy, before, again)

    def _list(self, state: str, parts: list[dict[str, Any]]) -> None:
        """Say on the disk which parts there are, and how large they are at least."""
        content = dict(store=self.manifest["store"], writer=self.writer, state=state, parts=parts)
        write_small(writer_file(self.path, self.writer, "json"), content)

    def append(self, ids: Iterable[Any], rows: np.ndarray, reserved: bool = False) -> int:
        """Write (B, D) rows with their ids, all or none. Returns how many were new.

        `reserved`: the ids are of `reserve`, and all of them are written.
        """
        names, rows = as_ids(ids), np.asarray(rows)
        if rows.ndim != 2 or len(rows) != len(names):
            raise ValueError(f"{len(names)} ids for rows of the shape {rows.shape}")
        with self._writing:
            self._raise_error()
            passed: Counter[Id] = Counter()
            if not reserved:
                names, keep, passed = self.plan(names)
                if len(keep) < len(names):
                    names, rows = [names[i] for i in keep], rows[keep]
            if names:
                block = self.type.encode(rows, self.nonfinite, names)
                self._room().append(block.reshape(-1).data, encode_ids(names), len(names))
                self.rows += len(names)
                self._unsynced += block.nbytes
            if not reserved:
                self.reserve(names, passed)
            idle = self._thread is None or not self._thread.is_alive()
            late = time.monotonic() - self._synced_at > self.sync_every
            if names and idle and (late or self._unsynced >= SYNC_BYTES):
                self._thread = threading.Thread(target=self._sync_beside, daemon=True)
                with contextlib.suppress(RuntimeError):  # while the interpreter ends: `close` syncs
                    self._thread.start()
        return len(names)

    def plan(self, ids: Iterable[Any]) -> tuple[list[Id], list[int], Counter[Id]]:
        """Plain ids, the places of those to write, and what is passed over.

        By the policy for duplicates. Nothing has changed yet: give it to `reserve`.
        """
        names = as_ids(ids)
        with self._knowing:
            return names, *self._known.new(names)

    def reserve(self, names: Iterable[Id], passed: Counter[Id]) -> None:
        """These will be written by `append(…, reserved=True)`, and from now on they are there.

        Whoever writes beside the caller would find duplicates too late. `release` takes back what
        was not written.
        """
        with self._knowing:
            self._known.accept(names, passed)

    def release(self, ids: Iterable[Id], passed: Counter[Id] | None = None) -> None:
        """These were reserved, and will not be written; those passed over may be given again."""
        with self._knowing:
            self._known.forget(ids, passed)

    def _room(self) -> PartWriter:
        """The part that takes the next rows."""
        if self.closed:
            raise ValueError(f"the writer of {self.path} is closed")
        part = self._part
        if part is None or part.torn or part.sizes["rows"] >= self.shard_bytes:
            self._sync()
            with self._syncing:  # what is listed may not become older
                before = [*self._done, *([{"name": part.name, **part.sizes}] if part else ())]
                n = len(before)
                while os.path.exists(os.path.join(self.path, f"{self.writer:04d}-{n:04d}.rows")):
                    n += 1  # made, but not listed, before a crash
                name = f"{self.writer:04d}-{n:04d}"
                new = PartWriter(self.path, name, self.manifest["store"], self.rows)
                try:
                    self._list("open", [*before, {"name": name, **new.sizes}])
                except BaseException:
                    new.close()  # it may be listed: it stays, empty
                    raise
                self._done, self._part = before, new
                if part is not None:
                    part.close()
                part = new
        return part

    def _sync(self, state: str = "open") -> None:
        with self._syncing:
            if self.closed:
                return
            parts, self._unsynced = list(self._done), 0
            if self._part is not None:
                parts.append({"name": self._part.name, **self._part.sizes})
                self._part.sync()
            self._list(state, parts)
            self._synced_at = time.monotonic()

    def _sync_beside(self) -> None:
        try:
            self._sync()
        except BaseException as error:
            self._error = error

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def flush(self) -> None:
        """Bring everything to the disk."""
        self._sync()
        self._raise_error()

    def close(self) -> None:
        """End the store, as far as this writer goes."""
        try:
            self._sync("closed")
        finally:
            with self._syncing:
                self.closed = True
                if self._part is not None:
                    self._part.close()
                self._lock.release()
        self._raise_error()

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
