"""One process of `jax.distributed` that logs a run of logix. Driven by `test_logix_jax_ranks.py`.

    jax_rank_worker.py ROOT RANK PORT MODE STATISTIC RANK_OF_COMPRESSION

The rank -1 is that of a single process, which logs all of it on several devices.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import logix

N, B = 16, 8


def problem() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    make = lambda *shape: (random.normal(size=shape) * 0.5).astype(np.float32)
    params = {"w": make(4, 6), "b": make(6), "blocks": make(2, 6, 6), "v": make(6, 2)}
    return params, {"x": make(N, 3, 4), "y": make(N, 3, 2)}


def loss(p: Any, e: Any) -> Any:
    h = jnp.tanh(e["x"] @ p["w"] + p["b"])
    h = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), h, p["blocks"])[0]
    return jnp.sum((h @ p["v"] - e["y"]) ** 2)


SPECS = {"w": P(None, "model"), "b": P("model"), "blocks": P(None, "model"), "v": P("model")}


def put(x: Any, mesh: Any, spec: Any) -> Any:
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda i: x[i])


def placed(params: Any, mesh: Any) -> Any:
    return {name: put(x, mesh, SPECS[name]) for name, x in params.items()}


def batches_of(data: Any, mesh: Any, spec: Any) -> list[Any]:
    part = lambda i: {name: put(x[i : i + B], mesh, spec) for name, x in data.items()}
    return [part(i) for i in range(0, N, B)]


def mesh_of(shape: tuple[int, int], kind: str = "auto", order: Any = None) -> Any:
    types = (AxisType.Explicit if kind == "explicit" else AxisType.Auto,) * 2
    devices = np.asarray(jax.devices()) if order is None else np.asarray(jax.devices())[order]
    return jax.sharding.Mesh(devices.reshape(shape), ("data", "model"), axis_types=types)


def started(root: str, statistic: str, compressed: int, params: Any, **how: Any) -> Any:
    run = logix.LogIX("run", {"root_dir": root}, **how)
    run.setup({"save": "grad", "statistic": statistic})
    run.watch(loss, params)
    if compressed:
        run.add_lora(rank=compressed)
    return run


def alone(root: str, statistic: str, compressed: int) -> Any:
    """The same by one process on one device."""
    params, data = problem()
    run = started(root, statistic, compressed, params)
    part = lambda i: {name: x[i : i + B] for name, x in data.items()}
    run.extract([part(i) for i in range(0, N, B)], range(N))
    run.finalize()
    return run


def main(root: str, rank: int, mode: str, statistic: str, compressed: int) -> None:
    params, data = problem()
    how: dict[str, Any] = {"resume": True} if mode == "resume" else {}
    if mode in ("local", "idle", "fail"):
        run = started(root, statistic, compressed, params)
        share = {"local": [5, 11], "idle": [N, 0], "fail": [8, 8]}[mode]
        first, count = sum(share[:rank]), share[rank]
        own = {name: x[first : first + count].copy() for name, x in data.items()}
        part = lambda i: {name: x[i : i + 4] for name, x in own.items()}
        if mode == "fail":
            failed(run, part, rank)
            return
        run.extract([part(i) for i in range(0, count, 4)], range(first, first + count))
    else:
        # Examples of one process, or each of them in both processes.
        order = np.arange(8) if mode != "crossed" else np.arange(8).reshape(2, 4).T.reshape(-1)
        mesh = mesh_of((4, 2), "explicit" if mode == "explicit" else "auto", order)
        spec = P() if mode == "replicated" else P("data")
        if mode == "nan":
            data["x"][3] = np.nan  # of the first process
            how |= {"nonfinite": "skip"}
        if mode == "error":
            data["x"][3] = np.nan
        run = started(root, statistic, compressed, placed(params, mesh), **how)
        batches = batches_of(data, mesh, spec)
        if mode == "mixed":
            told(lambda: run.extract([{k: np.asarray(x[:4]) for k, x in data.items()}]))
            return
        if mode == "error":
            told(lambda: run.extract(batches, range(N)))
            good = {name: np.roll(x, -8, 0) for name, x in data.items()}
            run.extract(batches_of(good, mesh, spec)[:1], range(100, 108))
            run.finalize()
            return
        if mode == "half":
            run.extract(batches[:1], range(B))
            run.close()
            return
        run.extract(batches, None if mode == "content" else range(N))
        print("computed:", run._program._step.run._cache_size())
    run.finalize()
    state = {f"{n}:{k}": np.asarray(x) for k, s in run.statistics.items() for n, x in s.items()}
    np.savez(os.path.join(root, f"statistics-{rank}.npz"), **state)


def told(act: Any) -> None:
    try:
        act()
    except Exception as error:
        print("told:", type(error).__name__, error, flush=True)


def failed(run: Any, part: Any, rank: int) -> None:
    """A row that the disk does not take, in the second process."""
    real = os.write

    def write(handle: int, content: Any) -> int:
        if rank == 1 and len(content) == 4 * 4 * 114:  # four rows
            raise OSError(28, "no space left")
        return real(handle, content)

    os.write = write
    run.extract([part(0)], range(rank * 8, rank * 8 + 4))
    told(run.finalize)
    os.write = real


if __name__ == "__main__":
    root, rank, port, mode, statistic, compressed = sys.argv[1:]
    if int(rank) >= 0:
        jax.distributed.initialize(f"localhost:{port}", 2, int(rank))
    main(root, int(rank), mode, statistic, int(compressed))
