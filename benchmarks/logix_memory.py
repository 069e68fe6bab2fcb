"""The best of a store that is four times as large as the memory allowed: does it run, and in what?

python benchmarks/logix_memory.py

A process of its own imports everything, scores a small store to warm up, and limits its address
space to what it has and 256 MB more (RLIMIT_AS), which is a quarter of the store: what it does not
have, it can not use. The figure is how far VmHWM of /proc/self/status, the peak of all resident
pages, anonymous and mapped ones, then rises above the resident pages of that moment (the queries
and the store's index are there already). A block is what `block_bytes` says it is.
"""

from __future__ import annotations

import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import numpy as np

from logix._influence import scores
from logix.store._rowtypes import block_bytes
from logix.store._writer import RowStore, RowWriter

Row = tuple[str, str, str, bool | None]
N, D, Q, APPEND, ALLOWED = 16_384, 16_384, 16, 64, 256 << 20


def fill(path: str, rows: int, dtype: str) -> None:
    block = np.random.default_rng(0).standard_normal((APPEND, D), dtype=np.float32)
    layout = [dict(name="layer", shape=[D], offset=0)]
    with RowWriter(path, layout, dtype, sync_every=1e9) as writer:
        for start in range(0, rows, APPEND):
            writer.append(range(start, start + APPEND), block + start / rows)


def status(name: str) -> int:
    text = pathlib.Path("/proc/self/status").read_text()
    return int(text.split(f"{name}:")[1].split()[0]) << 10


def measure(path: str, small: str, library: str) -> None:
    """In the limited process: print what it took."""
    query = np.random.default_rng(1).standard_normal((Q, D), dtype=np.float32)
    if library == "torch":
        import torch

        query = torch.from_numpy(query)
    list(scores(query, RowStore(small, map_bytes=0), top_k=10))
    store = RowStore(path)
    limit = status("VmSize") + ALLOWED
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    store = RowStore(path)  # looks how much memory there is
    block = block_bytes()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    before = status("VmRSS")
    found = scores(query, store, top_k=10)
    peak = status("VmHWM") - before
    refused = False
    try:
        np.ones(len(store) * D, np.float32)  # the store as one array
    except MemoryError:
        refused = True
    size = len(store) * store.type.nbytes
    assert found.influence.shape == (Q, 10)
    print(json.dumps(dict(size=size, block=block, peak=peak, refused=refused)))


def memory() -> Iterator[Row]:
    for library, dtype in (("numpy", "float32"), ("torch", "float32"), ("numpy", "bfloat16")):
        with tempfile.TemporaryDirectory() as folder:
            path, small = os.path.join(folder, "large"), os.path.join(folder, "small")
            fill(path, N if dtype == "float32" else 2 * N, dtype)
            fill(small, APPEND * 4, dtype)
            env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, "--measure", path, small, library]
            done = subprocess.run(command, env=env, capture_output=True, text=True)
        what = f"top 10 of a store 4 × the memory allowed, {dtype}, {library}: peak"
        if done.returncode:
            yield what, f"fails: {done.stderr.strip().splitlines()[-1]}", "≤ 2 blocks", False
            continue
        got = json.loads(done.stdout)
        assert got["refused"]
        assert got["size"] >= 4 * ALLOWED
        blocks = got["peak"] / got["block"]
        detail = f"{blocks:.2f} blocks ({got['peak'] / 2**20:.1f} MiB; a block is"
        detail += f" {got['block'] / 2**20:.1f} MiB, the store {got['size'] / 2**20:,.0f} MiB)"
        yield what, detail, "≤ 2 blocks", blocks <= 2


ROWS = [memory]

if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(*sys.argv[2:])
    else:
        for what, measured, target, met in memory():
            print(f"{what}  {measured}  {target} {'met' if met else 'NOT MET'}", flush=True)
