"""Scores from a store, beside one matrix product over the same rows.

python benchmarks/logix_scoring.py                    on the CPU: N=4096, D=8292, Q=1, 16, 64
python benchmarks/logix_scoring.py --gpu              D=200,704, Q=64: from the store to the GPU
python benchmarks/logix_scoring.py --gpu --rows 65536 --folder /dev/shm --dtype bfloat16

On the GPU the floor is the product alone, with rows copied from pinned memory. The store is read
from the page cache: `--rows` should leave it room in the memory. Checksums are compared in both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

# One thread for products, as in all rows on the CPU: another one reads.
for name in ("OPENBLAS", "OMP", "MKL"):
    os.environ.setdefault(f"{name}_NUM_THREADS", "1")

import numpy as np  # noqa: E402

from logix._influence import _beside, scores  # noqa: E402
from logix.store._writer import RowStore, RowWriter  # noqa: E402

Row = tuple[str, str, str, bool | None]
APPEND = 16  # rows that are saved at once: a batch


def fill(path: str, rows: int, dim: int, dtype: str = "float32") -> RowStore:
    """A store of random rows; the same few blocks again and again, which reading does not know."""
    rng = np.random.default_rng(0)
    some = [rng.standard_normal((APPEND, dim), dtype=np.float32) for _ in range(4)]
    layout = [dict(name="layer", shape=[dim], offset=0)]
    with RowWriter(path, layout, dtype, sync_every=1e9) as writer:
        for start in range(0, rows, APPEND):
            n = min(APPEND, rows - start)
            writer.append(range(start, start + n), some[start // APPEND % 4][:n])
    return RowStore(path)


def turns(*variants: Callable[[], Any], rounds: int = 9) -> list[float]:
    """Median seconds of each, in turns, after a warm-up."""
    times: list[list[float]] = [[] for _ in variants]
    for i in range(rounds + 1):
        for k, run in enumerate(variants):
            start = time.perf_counter()
            run()
            if i:
                times[k].append(time.perf_counter() - start)
    return [statistics.median(t) for t in times]


def cpu() -> Iterator[Row]:
    """The map is warm and was checked before; a store that is opened anew is checked again."""
    import torch

    n, dim = 4096, 8292
    with tempfile.TemporaryDirectory() as path:
        store = fill(path, n, dim)
        mapped = store.rows()
        for queries in (1, 16, 64):
            query = np.random.default_rng(1).standard_normal((queries, dim), dtype=np.float32)
            tensor = torch.from_numpy(query)
            block = _beside(mapped, tensor)  # the map itself, as a tensor
            torch.set_num_threads(1)
            for name, q, product in (
                ("NumPy", query, lambda q=query: q @ mapped.T),
                ("torch", tensor, lambda q=tensor, block=block: q @ block.T),
            ):
                ours, top, floor = turns(
                    lambda q=q: scores(q, store),
                    lambda q=q: scores(q, store, top_k=10),
                    product,
                )
                anew = turns(lambda q=q: scores(q, RowStore(path)), rounds=3)[0]
                rate = f"{n * queries / ours / 1e6:.2f} M pairs/s"
                more = f"top 10: {floor / top:.2f}, opened and checked anew: {floor / anew:.2f}"
                what = f"scoring from the map / one product, {name}, Q={queries}"
                yield what, f"{floor / ours:.2f} ({rate}; {more})", "≥ 0.8", floor / ours >= 0.8


def gpu(rows: int, dim: int, queries: int, folder: str | None, dtype: str) -> Iterator[Row]:
    import torch

    device = torch.device("cuda")
    with tempfile.TemporaryDirectory(dir=folder) as path:
        started = time.perf_counter()
        store = fill(path, rows, dim, dtype)
        size = len(store) * store.type.nbytes
        took = time.perf_counter() - started
        yield f"written: {size / 1e9:.1f} GB", f"{size / took / 1e9:.2f} GB/s", "", None
        query = torch.randn(queries, dim, device=device)

        def floor() -> float:
            block = torch.empty(160, dim, pin_memory=True).normal_()
            slots = [torch.empty_like(block, device=device) for _ in range(2)]
            count, start = 100, time.perf_counter()
            for i in range(count):
                slots[i % 2].copy_(block, non_blocking=True)
                query @ slots[i % 2].T
            torch.cuda.synchronize()
            return count * len(block) * queries / (time.perf_counter() - start)

        floor()
        best = max(floor() for _ in range(3))
        yield "the product from pinned memory", f"{best / 1e6:.2f} M pairs/s", "", None
        for what, options in (("top 10", dict(top_k=10)), ("all scores", {})):
            times = []
            opened = RowStore(path)
            for _ in range(5):  # the first compares all bytes with their checksums
                start = time.perf_counter()
                scores(query, opened, **options)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
            took = statistics.median(times[1:])
            rate = rows * queries / took
            detail = f"{rate / 1e6:.2f} M pairs/s ({size / took / 1e9:.1f} GB/s; {rate / best:.2f}"
            detail += f" of the floor; first {rows * queries / times[0] / 1e6:.2f} M)"
            yield f"GPU, from the store, {dtype}, {what}", detail, "≥ 2 M", rate >= 2e6
        for workers in (4, 8, 16):
            from logix.store._readahead import ahead

            start = time.perf_counter()
            for _, block in ahead(opened, device=device, workers=workers):
                query @ block.T
            torch.cuda.synchronize()
            rate = rows * queries / (time.perf_counter() - start)
            yield f"  the same with {workers} threads", f"{rate / 1e6:.2f} M pairs/s", "", None


ROWS = [cpu]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--rows", type=int, default=32_768)
    parser.add_argument("--dim", type=int, default=200_704)
    parser.add_argument("--queries", type=int, default=64)
    parser.add_argument("--folder", help="where the store is written")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores")
    given = (args.rows, args.dim, args.queries, args.folder, args.dtype)
    for what, measured, target, met in gpu(*given) if args.gpu else cpu():
        mark = {True: "met", False: "NOT MET", None: ""}[met]
        print(f"{what:<58s} {measured}  {target} {mark}", flush=True)


if __name__ == "__main__":
    main()
