"""Processes that log a loss of JAX, to be killed. Driven by `test_logix_jax_faults.py`.

JAX starts its threads at the first array that is made: the server (`kill_server`) makes none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import logix
import logix.jax._program  # so that no child has to import it
from kill_server import Acknowledge, die_at, serve

B = 3  # examples in a batch
FAR = 1e9  # seconds: never


def parameters() -> dict[str, np.ndarray]:
    return {"w": np.full((4, 2), 0.5, np.float32), "b": np.full(2, 0.25, np.float32)}


def loss(p: Any, x: Any) -> Any:
    return jnp.sum((x @ p["w"] + p["b"]) * jnp.asarray([1.0, -0.5]))


def batch(i: int) -> np.ndarray:
    return np.arange(4 * B, dtype=np.float32).reshape(B, 4) / 8 + i


def expected(count: int) -> dict[str, np.ndarray]:
    """The gradients of the examples of the first batches."""
    x = np.concatenate([batch(i) for i in range(count)] or [np.zeros((0, 4), np.float32)])
    back = np.tile(np.float32([1, -0.5]), (len(x), 1))
    return {"w": back[:, :, None] * x[:, None], "b": back}


def extracted(root: str, count: int, ack: Any = lambda word: None, **how: Any) -> Any:
    """Two passes over the data, as EK-FAC needs them; at each batch those before are flushed."""
    run = logix.LogIX("run", {"root_dir": root}, **how)
    run.setup({"save": "grad", "statistic": "ekfac"})
    run.watch(loss, parameters())

    def batches() -> Iterator[np.ndarray]:
        for i in range(count):
            run.flush()
            if (there := run._saved._outbox) is not None:
                ack(there.writer.rows // B)
            yield batch(i)

    run.extract(batches, range(B * count))
    run.finalize()
    ack("done")
    return run


def job_extract(ack: Acknowledge, root: str, count: int) -> None:
    extracted(root, count, ack)
    time.sleep(FAR)


def job_crash(ack: Acknowledge, at: int, half: bool = False, **job: Any) -> None:
    die_at(at, half)
    extracted(ack=ack, **job)


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)
    serve(globals())
