"""Rows on their way to the store: the caller fills buffers, and a thread writes them.

Hashing and writing release Python's lock, so they run beside the next batch. A buffer is used again
when it has been written: there are never more than a few, and a caller that is faster than the disk
waits for it. Rows from a GPU are copied to pinned memory without waiting for it.

Rows that can not be written are told by the next `check`, `flush` or `close`, with their ids, which
are free again. Those before and after them are written. A program that ends without `close` waits
for its rows first.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import queue
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._array import namespace
from ._rows import Entry, fill, sample
from .store._writer import RowWriter

BLOCK = 1 << 23  # bytes that are filled, hashed and written at a time: they stay in the cache
_STOP = None


class Outbox:
    """Writes batches of records to a store.

    Arguments:

    - `writer`: the store's.
    - `waiting`: bytes that may wait to be written.
    - `beside`: False to write in the caller's thread.
    """

    def __init__(self, writer: RowWriter, waiting: int, beside: bool = True):
        self.writer, self.waiting, self.beside = writer, waiting, beside
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._made, self._process = 0, os.getpid()
        self._thread: threading.Thread | None = None
        self._telling = threading.Lock()
        self._error: BaseException | None = None
        self._lost: list[Any] = []  # ids that were not written

    def put(self, ids: Sequence[Any], records: Sequence[Any], layout: Sequence[Entry]) -> None:
        """Write the rows of a batch (whose ids are of `writer.reserve`), or have them written."""
        first = sample(records[0])
        cuda = namespace(first).__name__ == "torch" and first.device.type != "cpu"
        dim = self.writer.type.dim
        step = len(ids) if cuda else max(1, min(len(ids), BLOCK // (4 * dim)))
        start = 0
        try:
            while start < len(ids):
                part = slice(start, min(start + step, len(ids)))
                self._put(ids[part], part, records, layout, step, first if cuda else None)
                start = part.stop
        except BaseException:
            self.writer.release(ids[start:])
            raise

    def _put(
        self, ids: Sequence[Any], part: slice, records: Any, layout: Any, step: int, device: Any
    ) -> None:
        buffer, event = self._buffer(step, namespace(sample(records[0])), device is not None), None
        try:
            if device is not None:
                event = self._from_device(records, layout, part, buffer, device)
            else:
                fill(records, layout, part, buffer[: len(ids)])
            if self.beside:
                self._begin()
            else:
                self._write(ids, buffer, event)
        except BaseException:
            self._free.put(buffer)
            raise
        if self.beside:
            self._jobs.put((ids, buffer, event))
        else:
            self._free.put(buffer)

    def _buffer(self, rows: int, xp: Any, pinned: bool) -> Any:
        """Room for rows on the host: what has been written, or new."""
        shape = rows, self.writer.type.dim
        found = None
        if self._made < max(2, self.waiting // (4 * math.prod(shape))):
            with contextlib.suppress(queue.Empty):
                found = self._free.get_nowait()
            self._made += found is None
        else:
            found = self._free.get()  # the disk is behind
        if found is not None and len(found) >= rows:
            return found
        if xp.__name__ != "torch":
            return np.empty(shape, np.float32)
        return xp.empty(shape, dtype=xp.float32, device="cpu", pin_memory=pinned)

    def _from_device(self, records: Any, layout: Any, part: slice, buffer: Any, first: Any) -> Any:
        torch = namespace(first)
        shape = part.stop - part.start, buffer.shape[1]
        rows = torch.empty(shape, dtype=torch.float32, device=first.device)
        fill(records, layout, part, rows)
        buffer[: len(rows)].copy_(rows, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return event

    def _begin(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            # A daemon lives until the functions of atexit have run: the last of its jobs is there.
            atexit.unregister(self._at_exit)
            atexit.register(self._at_exit)
            self._thread = threading.Thread(target=self._work, name="logix rows", daemon=True)
            self._thread.start()

    def _at_exit(self) -> None:
        if os.getpid() == self._process:  # a child made by fork has neither thread nor lock
            self.close()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not _STOP:
            if isinstance(job, threading.Event):  # all before it is done
                job.set()
                continue
            ids, buffer, event = job
            try:
                self._write(ids, buffer, event)
            except BaseException as error:
                self.writer.release(ids)
                with self._telling:
                    self._error = self._error or error
                    self._lost += ids
            self._free.put(buffer)

    def _write(self, ids: Sequence[Any], buffer: Any, event: Any) -> None:
        if event is not None:
            event.synchronize()
        rows = buffer if isinstance(buffer, np.ndarray) else buffer.numpy()
        self.writer.append(ids, rows[: len(ids)], reserved=True)

    def check(self) -> None:
        """Raise what went wrong beside the caller, once."""
        with self._telling:
            error, lost = self._error, self._lost
            self._error, self._lost = None, []
        if error is not None:
            some = ", ".join(map(repr, lost[:5])) + (" …" if len(lost) > 5 else "")
            error.add_note(
                f"{len(lost)} rows were not saved, of the ids {some}. All others are. The run can "
                "go on, and these may be logged again (statistics have counted them)."
            )
            raise error

    def flush(self) -> None:
        """Wait until all rows are with the operating system."""
        if self._thread is not None and self._thread.is_alive():
            done = threading.Event()
            self._jobs.put(done)
            done.wait()
        self.check()

    def close(self) -> None:
        """Write what is left, and end the store."""
        try:
            self.flush()
        finally:
            atexit.unregister(self._at_exit)
            if self._thread is not None:
                self._jobs.put(_STOP)
                self._thread.join()
                self._thread = None
            self.writer.close()
