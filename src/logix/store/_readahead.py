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
from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash

from _loxio import Damaged

from .._array import Array
from ._commits import CHUNK, COUNT, ROWS_XXH3, Part
from ._ids import Id
from ._reader import RowStore
from ._rings import Buffer, DeviceRing, HostRing
from ._rowtypes import RowType, block_rows

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
    # Large pieces where many threads read: between them they wait for Python's lock.
    piece = CHUNK if device is None else _JOB
    room = min(rows, len(store)) * type.nbytes
    ring: HostRing | DeviceRing = (
        HostRing(room, type) if device is None else DeviceRing(room, device)
    )
    pool = concurrent.futures.ThreadPoolExecutor(workers or ring.workers)
    # Blocks are filled at the same time too: a large append is checked by one thread.
    filling = concurrent.futures.ThreadPoolExecutor(len(ring.buffers) - 1)

    def fill(buffer: Buffer, pieces: Pieces) -> tuple[Buffer, list[Id], int]:
        buffer.wait()
        jobs, at = [], 0
        for part, lo, hi in pieces:
            for first, last in _jobs(part, lo, hi):
                end = at + (last - first) * type.nbytes
                to = buffer.bytes[at:end]
                jobs.append(pool.submit(read_into, part, first, last, to, piece))
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


def read_into(part: Part, start: int, stop: int, out: np.ndarray, piece: int = CHUNK) -> None:
    """Copy the bytes of these rows to `out`, and check them there.

    An append of which some rows are elsewhere is checked as a whole, once. Of a part that stays
    open, an append that was checked before is not checked again, as if it were mapped.
    """
    size, base, view = part.row_bytes, start * part.row_bytes, out.reshape(-1).data
    known = part.keep and part.is_checked(start, stop)
    have, total = 0, (stop - start) * size
    piece = total if known else piece
    with open(part.paths["rows"], "rb", buffering=0) as file:
        file.seek(base)
        for k, lo, hi in part.appends(start, stop):
            whole = hi - lo == int(part.records[k, COUNT])
            digest = xxhash.xxh3_64()
            at, end = lo * size - base, hi * size - base
            while at < end:
                upto = min(at + piece, end)
                while have < upto:  # small appends share a read
                    got = file.readinto(view[have : min(have + piece, total)])
                    if not got:
                        raise Damaged(part.damage(k))
                    have += got
                if whole and not known:
                    digest.update(view[at:upto])
                at = upto
            if known:
                continue
            if not whole:
                part.check(k)
            elif digest.intdigest() != int(part.records[k, ROWS_XXH3]):
                raise Damaged(part.damage(k))
            elif part.keep:
                part.checked[k] = True


def _jobs(part: Part, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Stretches of whole appends, each for one thread."""
    first = start
    for _, _, last in part.appends(start, stop):
        if (last - first) * part.row_bytes >= _JOB or last == stop:
            yield first, last
            first = last
