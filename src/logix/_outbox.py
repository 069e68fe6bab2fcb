"""Rows on their way to the store: buffers are filled, and a thread writes them.

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
import dataclasses
import math
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ._array import namespace
from ._rows import Entry, fill, sample, some
from .store._writer import RowWriter

BLOCK = 1 << 23  # bytes that are filled, hashed and written at a time: they stay in the cache
_STOP = None


class _Job:
    """Some rows of a batch. Whoever comes to them first, the caller or the thread, fills them."""

    def __init__(self, ids: Sequence[Any], buffer: Any):
        self.ids, self.buffer = ids, buffer
        self._filling = threading.Lock()
        self._fill: Callable[[], None] | None = None
        self._copied: Any = None

    def begin(self, records: Any, layout: Any, part: slice, device: Any) -> None:
        """Rows on a GPU are made, and copied, without waiting for it."""
        if device is None:
            self._fill = lambda: fill(records, layout, part, self.buffer[: len(self.ids)])
            return
        torch = namespace(self.buffer)
        rows = torch.empty((len(self.ids), self.buffer.shape[1]), device=device)
        fill(records, layout, part, rows)
        self.buffer[: len(rows)].copy_(rows, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def fill(self, wait: bool = True) -> None:
        if not self._filling.acquire(blocking=wait):
            return  # the other one is at it
        try:
            if self._fill is not None:
                self._fill()
                self._fill = None
        finally:
            self._filling.release()

    def rows(self) -> np.ndarray:
        self.fill()
        if self._copied is not None:
            self._copied.synchronize()
        rows = self.buffer if isinstance(self.buffer, np.ndarray) else self.buffer.numpy()
        return rows[: len(self.ids)]


class _Given(_Job):
    """Rows that are there as they will be written: nothing is filled, and no buffer is used."""

    def __init__(self, ids: Sequence[Any], rows: np.ndarray):
        super().__init__(ids, None)
        self._rows = rows

    def rows(self) -> np.ndarray:
        return self._rows


@dataclasses.dataclass(frozen=True)
class Fit:
    """Batches of one size that fit into a store, by what a row of them is made of."""

    box: Outbox
    layout: Sequence[Entry]
    layers: set[str]

    def reserve(self, ids: Sequence[Any]) -> Reserved:
        return Reserved(self, ids)


class Reserved:
    """A batch that may be written, as far as its ids go: those of `keep` are new."""

    def __init__(self, fit: Fit, ids: Sequence[Any]):
        self.box, self.layout, self._layers = fit.box, fit.layout, fit.layers
        self._all = len(ids)
        self.names, self.keep, self._passed = self.box.writer.plan(ids)
        if len(self.keep) < len(ids):
            self.names = [self.names[i] for i in self.keep]

    def hold(self) -> None:
        """From now on these ids are there."""
        self.box.writer.reserve(self.names, self._passed)

    def release(self) -> None:
        """They will not be written: all is as it was before `hold`."""
        self.box.writer.release(self.names, self._passed)

    def without(self, numbers: Sequence[int]) -> None:
        """Some examples of the batch will not be written."""
        gone = set(numbers)
        self.box.writer.release([n for n, i in zip(self.names, self.keep) if i in gone])
        self.names = [n for n, i in zip(self.names, self.keep) if i not in gone]
        self.keep = [i for i in self.keep if i not in gone]

    def write(self, logged: Sequence[Any]) -> None:
        """Write the batch, whose ids are held."""
        chosen = [record for record in logged if record.layer in self._layers]
        if self.keep and len(self.keep) < self._all:
            chosen = [some(x, self.keep) for x in chosen]
        if self.keep:
            self.box.put(self.names, chosen, self.layout)

    def write_rows(self, rows: np.ndarray) -> None:
        """The same with rows, (examples, D) in float32, that nobody changes any more."""
        if len(self.keep) < self._all:
            rows = rows[self.keep]
        if self.keep:
            self.box.put_rows(self.names, rows)


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
        self._ends: deque[threading.Event] = deque()  # of batches whose rows wait as they are

    def put(self, ids: Sequence[Any], records: Sequence[Any], layout: Sequence[Entry]) -> None:
        """Write the rows of a batch (whose ids are of `writer.reserve`), or have them written."""
        first = sample(records[0])
        cuda = namespace(first).__name__ == "torch" and first.device.type != "cpu"
        step = len(ids) if cuda else max(1, min(len(ids), BLOCK // (4 * self.writer.type.dim)))
        jobs: list[_Job] = []
        start = 0
        try:
            while start < len(ids):
                part = slice(start, min(start + step, len(ids)))
                job = _Job(ids[part], self._buffer(step, namespace(first), cuda))
                try:
                    job.begin(records, layout, part, first.device if cuda else None)
                except BaseException:  # as when the GPU's memory is full
                    self._free.put(job.buffer)
                    raise
                self._hand_over(job)
                jobs.append(job)
                start = part.stop
        except BaseException:
            self.writer.release(ids[start:])
            raise
        for job in reversed(jobs):  # all that the thread has not come to: it may be writing
            with contextlib.suppress(Exception):  # it comes to it, and tells what is wrong
                job.fill(wait=False)

    def put_rows(self, ids: Sequence[Any], rows: np.ndarray) -> None:
        """Write rows as they are. At most a few batches of them wait."""
        step = max(1, BLOCK // (4 * self.writer.type.dim))
        start = 0
        try:
            for start in range(0, len(ids), step):
                self._hand_over(_Given(ids[start : start + step], rows[start : start + step]))
        except BaseException:
            self.writer.release(ids[start:])
            raise
        if self.beside:
            done = threading.Event()
            self._jobs.put(done)
            self._ends.append(done)
            if len(self._ends) > 3:
                self._ends.popleft().wait()  # the disk is behind

    def _hand_over(self, job: _Job) -> None:
        try:
            if self.beside:
                self._begin()
                self._jobs.put(job)
                return
            self._write(job)
        except BaseException:
            self._give_back(job)
            raise
        self._give_back(job)

    def _give_back(self, job: _Job) -> None:
        if job.buffer is not None:
            self._free.put(job.buffer)

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
        try:
            if xp.__name__ != "torch":
                return np.empty(shape, np.float32)
            return xp.empty(shape, dtype=xp.float32, device="cpu", pin_memory=pinned)
        except BaseException:
            self._made -= 1  # a later call would wait for it, for ever
            raise

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
            try:
                self._write(job)
            except BaseException as error:
                self.writer.release(job.ids)
                with self._telling:
                    self._error = self._error or error
                    self._lost += job.ids
            self._give_back(job)
            del job  # its rows are not needed while the next one is waited for

    def _write(self, job: _Job) -> None:
        self.writer.append(job.ids, job.rows(), reserved=True)

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
