"""Rows on their way to the store: the caller fills buffers, and a thread writes them.

Hashing and writing release Python's lock, so they run beside the next batch. A buffer is used again
when it has been written: there are never more than a few, and a caller that is faster than the disk
waits for it. Rows from a GPU are copied to pinned memory without waiting for it.

What goes wrong in the thread is raised by the next call. `flush` returns when all is written.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._array import namespace
from ._rows import Entry, fill
from ._store import RowWriter

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
        self._made = 0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def put(self, ids: Sequence[Any], records: Sequence[Any], layout: Sequence[Entry]) -> None:
        """Write the rows of a batch (whose ids are of `writer.reserve`), or have them written."""
        self._raise()
        first = getattr(records[0], "value", None)
        first = records[0].g if first is None else first
        cuda = namespace(first).__name__ == "torch" and first.device.type != "cpu"
        dim = self.writer.type.dim
        step = len(ids) if cuda else max(1, min(len(ids), BLOCK // (4 * dim)))
        for start in range(0, len(ids), step):
            part = slice(start, min(start + step, len(ids)))
            buffer, event = self._buffer(step, namespace(first), cuda), None
            if cuda:
                buffer, event = self._from_device(records, layout, part, buffer, first)
            else:
                fill(records, layout, part, buffer[: part.stop - start])
            if self.beside:
                self._begin()
                self._jobs.put((ids[part], buffer, event))
            else:
                self._write(ids[part], buffer, event)

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
        return xp.empty(shape, pin_memory=pinned)

    def _from_device(
        self, records: Any, layout: Any, part: slice, buffer: Any, first: Any
    ) -> tuple[Any, Any]:
        torch = namespace(first)
        rows = torch.empty((part.stop - part.start, buffer.shape[1]), device=first.device)
        fill(records, layout, part, rows)
        buffer[: len(rows)].copy_(rows, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return buffer, event

    def _begin(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, name="logix rows", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not _STOP:
            try:
                if self._error is None:  # after an error nothing more is written
                    self._write(*job)
                    continue
            except BaseException as error:
                self._error = error
            self.writer.release(job[0])
            self._free.put(job[1])

    def _write(self, ids: Sequence[Any], buffer: Any, event: Any) -> None:
        if event is not None:
            event.synchronize()
        rows = buffer if isinstance(buffer, np.ndarray) else buffer.numpy()
        self.writer.append(ids, rows[: len(ids)], reserved=True)
        self._free.put(buffer)

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def flush(self) -> None:
        """Wait until all rows are with the operating system."""
        if self._thread is not None:
            self._jobs.put(_STOP)
            self._thread.join()
            self._thread = None
        self._raise()

    def close(self) -> None:
        """Write what is left, and end the store."""
        try:
            self.flush()
        finally:
            self.writer.close()
