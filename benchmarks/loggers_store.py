"""What saving runs costs: speed beside other writers, bytes on disk and read, many runs at once."""

from __future__ import annotations

import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _measure import once

import lox

Row = tuple[str, str, str, bool | None]
KEYS, BLOCK = 10, 100


def folder_bytes(path: str) -> int:
    return sum(f.stat().st_size for f in pathlib.Path(path).rglob("*") if f.is_file())


def block(
    rows: int, keys: int, start: int, rng: np.random.Generator, dtype: str = "float32"
) -> lox.logdict:
    data = {f"metric/{k}": rng.standard_normal(rows).astype(dtype) for k in range(keys)}
    return lox.logdict(data, step=np.arange(start, start + rows, dtype=np.int32))


def throughput() -> Iterator[Row]:
    """Rows of ten scalars: blocks of 100 to ours, row by row to those that take one row."""
    import wandb
    from tensorboardX import SummaryWriter

    rng = np.random.default_rng(0)
    blocks = [block(BLOCK, KEYS, i * BLOCK, rng) for i in range(20)]
    values = {k: np.concatenate([b[k] for b in blocks]) for k in blocks[0]}
    small = 300  # rows for the slow ones
    with tempfile.TemporaryDirectory() as path:
        logger = lox.loggers.SaveLogger(os.path.join(path, "lox"))
        state = logger.init(jax.random.key(0), name="run")
        writer = SummaryWriter(os.path.join(path, "tb"))
        run = wandb.init(mode="offline", dir=path, project="bench", settings={"silent": True})

        def ours() -> None:
            for b in blocks:
                logger.log(state, b)

        def tensorboard_x() -> None:
            for i in range(small):
                for k, v in values.items():
                    writer.add_scalar(k, float(v[i]), i)
            writer.flush()

        def wandb_offline() -> None:
            for i in range(small):
                run.log({k: float(v[i]) for k, v in values.items()})

        ours()
        a, b, c = once(ours, tensorboard_x, wandb_offline, rounds=5)
        mine = len(blocks) * BLOCK * KEYS / a
        theirs = [small * KEYS / t for t in (b, c)]
        yield "SaveLogger, scalars a second", f"{mine / 1e6:.2f} M", "≥ 0.5 M", mine >= 5e5
        for name, other, wanted in zip(("tensorboardX", "W&B offline"), theirs, (20, 50)):
            label = f"SaveLogger, times faster than {name}"
            detail = f"{mine / other:.0f} ({other / 1e3:.1f} k scalars/s)"
            yield label, detail, f"≥ {wanted}", mine / other >= wanted
        logger.close()
        writer.close()
        run.finish()


def size_on_disk() -> Iterator[Row]:
    """Random numbers, which nothing compresses."""
    for dtype, size in (("float32", 4), ("float64", 8)):
        rng = np.random.default_rng(0)
        with tempfile.TemporaryDirectory() as path:
            with lox.loggers.SaveLogger(path) as logger:
                state = logger.init(jax.random.key(0), name="run")
                for i in range(500):
                    logger.log(state, block(BLOCK, KEYS, i * BLOCK, rng, dtype))
                logger.flush()
                before = folder_bytes(path)
            scalars = 500 * BLOCK * KEYS
            after = folder_bytes(path) / scalars
            detail = f"{after:.2f} (while written {before / scalars:.1f}; {dtype} has {size})"
            yield f"bytes a scalar after compaction, {dtype}", detail, "≤ 12", after <= 12


def one_key() -> Iterator[Row]:
    """One of 100 keys of a run with 10⁶ rows. Bytes read are those the kernel counts."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as path:
        with lox.loggers.SaveLogger(path) as logger:
            state = logger.init(jax.random.key(0), name="run")
            for i in range(100):
                logger.log(state, block(10_000, 100, i * 10_000, rng))
        whole = folder_bytes(path)
        before = _bytes_read()
        start = time.perf_counter()
        logs = lox.runs(path)["run"].load(keys=["metric/42"])
        took = time.perf_counter() - start
        read = _bytes_read() - before
        assert logs["metric/42"].shape == (1_000_000,)
        share = read / whole
        detail = f"{share:.2%} of {whole / 1e6:.0f} MB ({took * 1e3:.0f} ms)"
        yield "one key of 100, 10⁶ rows: bytes read", detail, "≤ 5%", share <= 0.05


def _bytes_read() -> int:
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])  # rchar


def many_runs() -> Iterator[Row]:
    """Host time of a write: 256 vmapped runs beside one, ten scalars an update, 1000 updates."""
    updates = 1000
    spent: dict[str, float] = {}

    class Timed(lox.loggers.SaveLogger):
        def host_write(self, *args: Any) -> None:
            start = time.perf_counter()
            super().host_write(*args)
            spent["s"] += time.perf_counter() - start

    def train(x: jax.Array) -> jax.Array:
        def step(x: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
            x = 0.99 * x + 0.01
            lox.log({f"metric/{k}": x * k for k in range(KEYS)}, step=i)
            return x, None

        return jax.lax.scan(step, x, jnp.arange(updates))[0]

    def measure(count: int) -> float:
        with tempfile.TemporaryDirectory() as path, Timed(path, compact=False) as logger:
            keys = jax.random.split(jax.random.key(0), count)
            states = jax.vmap(lambda key: logger.init(key, name="run-{lane}"))(keys)
            logger.flush()
            run = jax.jit(jax.vmap(lambda state, x: logger.tap(train, state)(x)))
            spent["s"] = 0.0
            jax.block_until_ready(run(states, jnp.arange(float(count))))
            logger.flush()
            return spent["s"] / updates

    one, many = zip(*((measure(1), measure(256)) for _ in range(3)), strict=True)
    a, b = statistics.median(one), statistics.median(many)
    detail = f"{b / a:.2f} ({b * 1e6:.0f} and {a * 1e6:.0f} µs an update)"
    yield "256 vmapped runs / one, host time of an update", detail, "≤ 2", b / a <= 2


ROWS = [throughput, size_on_disk, one_key, many_runs]
