"""Rows of a store, block by block: the next one is read and checked while the present one is used.

    mapped     a store that stays mapped: blocks are the mapped file itself; a thread checks the
               next one, which brings its pages into memory
    buffered   where the memory is limited: two buffers, one in use and one being filled
    device     the same with pinned buffers, which are copied to the device on a stream of their
               own; rows travel as they are stored and become float32 there

Blocks end where appends end, as far as they can, so that a checksum is of bytes just read.
"""

from __future__ import annotations

import collections
import concurrent.futures
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash

from _loxio import Damaged

from ._array import Array
from ._commits import CHUNK, COUNT, ROWS_XXH3, Part
from ._ids import Id
from ._rowtypes import RowType, block_rows, mappable
from ._verify import RowStore

Pieces = list[tuple[Part, int, int]]  # parts, with the first of their rows and one after the last
_JOB = 4 << 20  # bytes that one thread reads at a time, or an append if that is larger


def ahead(
    store: RowStore,
    rows: int | None = None,
    device: Any = None,
    workers: int | None = None,
    width: int | None = None,
) -> Iterator[tuple[list[Id], Array]]:
    """The ids and rows of all blocks, in order. A block is good until the next one is asked for.

    Arguments:

    - `rows`: the most rows of a block; by default as many as fit (`block_rows`).
    - `device`: of torch, to have tensors there. By default NumPy arrays.
    - `workers`: threads that read. By default one, and as many as there are cores for a GPU.
    - `width`: only the first columns.
    """
    rows = rows or block_rows(store.type.dim)
    read: Iterator[tuple[list[Id], Array]]
    if store.mapped and device is None:
        read = _mapped(store.type, plan(store, rows, alone=True))
    else:
        read = _buffered(store, plan(store, rows), rows, device, workers)
    for ids, block in read:
        yield ids, block if width is None else block[:, :width]


def plan(store: RowStore, rows: int, alone: bool = False) -> Iterator[Pieces]:
    """Which rows each block is of, at most `rows`.

    An append is cut only if it is larger than a block. With `alone`, it is parts that are cut as
    little as can be, but for small ones: what is of one part need not be copied together.
    """
    block: Pieces = []
    room = rows
    for part, start, stop in store.spans:
        if alone and block and (stop - start >= rows // 4 or room < rows * 3 // 4):
            yield block
            block, room = [], rows
        for lo, hi in [(start, stop)] if alone else (a[1:] for a in part.appends(start, stop)):
            while lo < hi:
                if block and (room == 0 or room < hi - lo <= rows):
                    yield block
                    block, room = [], rows
                take = min(hi - lo, room)
                if block and block[-1][0] is part and block[-1][2] == lo:
                    lo_before = block.pop()[1]
                    block.append((part, lo_before, lo + take))
                else:
                    block.append((part, lo, lo + take))
                lo, room = lo + take, room - take
    if block:
        yield block


def _ids(pieces: Pieces) -> list[Id]:
    return [i for part, lo, hi in pieces for i in part.ids(lo, hi)]


def _mapped(type: RowType, blocks: Iterator[Pieces]) -> Iterator[tuple[list[Id], np.ndarray]]:
    def load(pieces: Pieces) -> tuple[list[Id], np.ndarray]:
        found = [type.decode(part.rows(lo, hi)) for part, lo, hi in pieces]
        return _ids(pieces), found[0] if len(found) == 1 else np.concatenate(found)

    plain, later = type.name == "float32", next(blocks, None)
    ready = None if later is None else load(later)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        while ready is not None:
            later = next(blocks, None)
            # Where all was checked before, there is nothing to do that a thread would speed up.
            done = plain and all(part.is_checked(lo, hi) for part, lo, hi in later or ())
            waiting = None if done or later is None else pool.submit(load, later)
            yield ready
            ready = waiting.result() if waiting else load(later) if later else None


def _buffered(
    store: RowStore, blocks: Iterator[Pieces], rows: int, device: Any, workers: int | None
) -> Iterator[tuple[list[Id], Array]]:
    type = store.type
    room = min(rows, len(store)) * type.nbytes
    ring: _Host | _Device = _Host(room, type) if device is None else _Device(room, device)
    pool = concurrent.futures.ThreadPoolExecutor(workers or ring.workers)
    # Blocks are filled at the same time too: a large append is checked by one thread.
    filling = concurrent.futures.ThreadPoolExecutor(len(ring.buffers) - 1)

    def fill(buffer: _Buffer, pieces: Pieces) -> tuple[_Buffer, list[Id], int]:
        buffer.wait()
        jobs, at = [], 0
        for part, lo, hi in pieces:
            for first, last in _jobs(part, lo, hi):
                end = at + (last - first) * type.nbytes
                jobs.append(pool.submit(read_into, part, first, last, buffer.bytes[at:end]))
                at = end
        concurrent.futures.wait(jobs)  # before an error is raised: nobody writes to it any more
        for job in jobs:
            job.result()
        return buffer, _ids(pieces), at

    free, waiting = collections.deque(ring.buffers), collections.deque[Any]()

    def order() -> None:
        while free and (pieces := next(blocks, None)):
            waiting.append(filling.submit(fill, free.popleft(), pieces))

    try:
        order()
        while waiting:
            buffer, ids, size = waiting.popleft().result()
            block = ring.rows(buffer, size, type)
            if ring.copies:
                free.append(buffer)
                order()
            yield ids, block
            ring.used()
            if not ring.copies:
                free.append(buffer)
                order()
    finally:
        for job in waiting:
            job.cancel()
        filling.shutdown()
        pool.shutdown()


def read_into(part: Part, start: int, stop: int, out: np.ndarray) -> None:
    """Copy the bytes of these rows to `out`, and check them there.

    An append of which some rows are elsewhere is checked as a whole, once.
    """
    size, base, view = part.row_bytes, start * part.row_bytes, out.reshape(-1).data
    have, total = 0, (stop - start) * size
    with open(part.paths["rows"], "rb", buffering=0) as file:
        file.seek(base)
        for k, lo, hi in part.appends(start, stop):
            whole = hi - lo == int(part.records[k, COUNT])
            digest = xxhash.xxh3_64()
            at, end = lo * size - base, hi * size - base
            while at < end:
                upto = min(at + CHUNK, end)
                while have < upto:  # small appends share a read
                    got = file.readinto(view[have : min(have + CHUNK, total)])
                    if not got:
                        raise Damaged(part.damage(k))
                    have += got
                if whole:
                    digest.update(view[at:upto])
                at = upto
            if not whole:
                part.check(k)
            elif digest.intdigest() != int(part.records[k, ROWS_XXH3]):
                raise Damaged(part.damage(k))


def _jobs(part: Part, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Stretches of whole appends, each for one thread."""
    first = start
    for _, _, last in part.appends(start, stop):
        if (last - first) * part.row_bytes >= _JOB or last == stop:
            yield first, last
            first = last


class _Buffer:
    """Bytes on the host. `wait` until nothing reads them any more."""

    def __init__(self, array: np.ndarray, tensor: Any = None):
        self.bytes, self.tensor = array, tensor
        self.copied: Any = None  # the event after its copy to the device

    def wait(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()


class _Host:
    """Two buffers, and rows as NumPy arrays in them, or in a third one if they must be decoded."""

    copies = False
    workers = 1

    def __init__(self, size: int, type: RowType):
        self.buffers = [_Buffer(np.empty(size, np.uint8)) for _ in range(2)]
        self.decoded = None
        if type.name != "float32":
            self.decoded = np.empty((size // type.nbytes, type.dim), np.float32)
        if mappable():
            self.workers = max(1, min(4, _cores() // 2))

    def rows(self, buffer: _Buffer, size: int, type: RowType) -> np.ndarray:
        out = type.decode(buffer.bytes[:size].reshape(-1, type.nbytes), self.decoded)
        out.flags.writeable = False
        return out

    def used(self) -> None:
        pass


class _Device:
    """Three pinned buffers on the host and two on the device; copies overlap with products.

    On the device the order is kept by events: the products of the caller's stream wait for the copy
    of their rows, a copy waits for the products with the rows that it replaces. The host waits for
    neither, but for a copy before it fills the buffer anew.
    """

    copies = True

    def __init__(self, size: int, device: Any):
        import torch

        self.torch, self.device = torch, torch.device(device)
        self.pinned = self.device.type == "cuda"
        make = lambda: torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned)
        self.buffers = [_Buffer(x.numpy(), x) for x in (make() for _ in range(3))]
        self.slots = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2)]
        self.workers, self.turn = max(1, _cores()), 0
        if self.pinned:
            self.stream = torch.cuda.Stream(self.device)
            # The memory of the slots may still be in use by what was enqueued before.
            self.done = [torch.cuda.current_stream(self.device).record_event()] * 2

    def rows(self, buffer: _Buffer, size: int, type: RowType) -> Any:
        slot = self.slots[self.turn][:size]
        if self.pinned:
            cuda = self.torch.cuda
            with cuda.stream(self.stream):
                self.stream.wait_event(self.done[self.turn])
                slot.copy_(buffer.tensor[:size], non_blocking=True)
                # Who waits for it sleeps: the cores are needed by the threads that read.
                buffer.copied = self.stream.record_event(cuda.Event(blocking=True))
            cuda.current_stream(self.device).wait_event(buffer.copied)
        else:
            slot.copy_(buffer.tensor[:size])
        return type.decode_tensor(slot.view(-1, type.nbytes))

    def used(self) -> None:
        """What was made of the latest rows has been enqueued."""
        if self.pinned:
            self.done[self.turn] = self.torch.cuda.current_stream(self.device).record_event()
        self.turn = 1 - self.turn


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
