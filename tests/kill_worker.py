"""Processes that write runs, to be killed. Driven by `test_faults.py`.

Children of the server (`kill_server`) drive `SaveLogger` on its host side, with NumPy only: no JAX
backend is started in it.

    python kill_worker.py                     the server
    python kill_worker.py program ARGS …      a real program, in a process of its own
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import numpy as np
import pyarrow

import lox
import lox.store  # so that no child has to import it
from kill_server import Acknowledge, die_at, serve

KIND = "threefry2x32"
FAR = 1e9  # seconds: never


# --- what is written: known from its number ------------------------------------------------------


def event(i: int, lanes: int = 1) -> lox.logdict:
    """The i-th write: two tables, and from some writes on more keys."""
    batch = lambda x: np.stack([np.asarray(x) + 0 * lane for lane in range(lanes)])
    own = np.float32(i + 0.25) + 100 * np.arange(lanes, dtype=np.float32)
    data = {"a": own, "v": batch(np.arange(3, dtype=np.int16) * i)}
    ndims = {"a": (0,), "v": (1,)}
    logs = lox.logdict.one_event(data, {"step": batch(np.int32(i))}, ndims, (0,))
    late = {} if i < 3 else {"late": batch(np.array([i, -i], np.int16))}
    other = lox.logdict.one_event({"b": own * 2} | late, {}, {"b": (0,), "late": (1,)}, ())
    return logs | other


def expected(count: int, lane: int = 0) -> dict[str, Any]:
    """What the first writes come to in one run."""
    i = np.arange(count)
    own = (i + 0.25 + 100 * lane).astype(np.float32)
    late = np.arange(3, max(count, 3))
    return {
        "a": own,
        "v": (i[:, None] * np.arange(3)).astype(np.int16),
        "b": own * 2,
        "late": np.stack([late, -late], 1).astype(np.int16),
    }


def ids(lanes: int = 1, key: int = 0) -> np.ndarray:
    rows = [[0, key, lane, 0] for lane in range(lanes)]  # the key's words, the lane, no flags
    return np.array(rows, np.uint32)


def open_runs(logger: Any, lanes: int = 1, name: str = "r{lane}", key: int = 0) -> None:
    configs = [{"lr": 0.5, "lane": lane} for lane in range(lanes)]
    logger.host_open(name, KIND, ids(lanes, key), configs)


def write(logger: Any, i: int, lanes: int = 1, name: str = "r{lane}", key: int = 0) -> None:
    logger.host_write(name, KIND, event(i, lanes), ids(lanes, key))


# --- jobs ----------------------------------------------------------------------------------------


def job_write(
    ack: Acknowledge,
    root: str,
    count: int,
    lanes: int = 1,
    start: int = 0,
    name: str = "r{lane}",
    key: int = 0,
    close: bool = True,
    pause: float = 0,
    **options: Any,
) -> None:
    logger = lox.SaveLogger(root, **options)
    try:
        open_runs(logger, lanes, name, key)
    except lox.loggers.RunExists:
        ack("exists")
        return
    ack("opened")
    for i in range(start, start + count):
        write(logger, i, lanes, name, key)
        ack(i)
        time.sleep(pause)
    if close:
        logger.close()
        ack("closed")
    else:
        time.sleep(FAR)


def job_crash(ack: Acknowledge, at: int, half: bool = False, **job: Any) -> None:
    die_at(at, half)
    job_write(ack, sync_every=FAR, **job)


def job_compact(ack: Acknowledge, root: str) -> None:
    for path, _, _ in lox.store.compact(root):
        ack(path)


def job_limit(ack: Acknowledge, root: str, limit: int, count: int) -> None:
    """No file may grow beyond `limit` bytes; then the limit is lifted again."""
    import resource

    logger = lox.SaveLogger(root, sync_every=FAR)
    open_runs(logger)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    for i in range(count):
        write(logger, i)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    try:
        logger.flush()
    except OSError as error:
        ack(json.dumps([error.errno, *described(error)]))
    for i in range(count, 2 * count):
        write(logger, i)
    logger.close()
    ack("closed")


def job_exit(ack: Acknowledge, root: str, how: str, count: int, name: str = "r{lane}") -> None:
    logger = lox.SaveLogger(root)
    open_runs(logger, name=name)
    for i in range(count):
        write(logger, i, name=name)
        ack(i)
    leave(how)


def job_race(ack: Acknowledge, root: str, start: str, **job: Any) -> None:
    """Wait for a file to appear, so that all begin at once."""
    while not os.path.exists(start):
        pass
    job_write(ack, root, **job)


def leave(how: str) -> None:
    if how == "exception":
        raise RuntimeError("the program's own error")
    if how == "sys.exit":
        sys.exit(3)
    if how == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(FAR)
    if how == "os._exit":
        os._exit(4)
    assert how == "end", how


def described(error: BaseException) -> list[str]:
    """All that a user is told about an error."""
    return [type(error).__name__, str(error), *getattr(error, "__notes__", ())]


# --- a real program, jitted and tapped -----------------------------------------------------------


def program(root: str, ack_path: str, how: str, steps: str) -> None:
    """Writes a run from inside of a jitted scan, and acknowledges each write that returned."""
    import jax
    import jax.numpy as jnp

    ack = Acknowledge(ack_path)

    class Acknowledging(lox.SaveLogger):
        def host_write(self, name: Any, kind: str, logs: Any, rows: np.ndarray) -> None:
            super().host_write(name, kind, logs, rows)
            ack(int(np.max(logs.step["x"])))

    def train(x: Any) -> Any:
        def step(x: Any, i: Any) -> Any:
            lox.log({"x": x, "two": jnp.stack([x, -x])}, step=i)
            return x + 1, None

        return jax.lax.scan(step, x, jnp.arange(int(steps)))[0]

    logger = Acknowledging(root)
    run = jax.jit(lambda key, x: logger.tap(train, logger.init(key, name="r{lane}"))(x))
    keys = jax.random.split(jax.random.key(0), 2)
    out = jax.vmap(run)(keys, jnp.array([0.5, 1000.5]))  # nobody waits for it
    ack("called")
    if how == "SIGKILL":
        jax.block_until_ready(out)
        time.sleep(FAR)
    if how in ("SIGTERM", "os._exit"):
        jax.effects_barrier()
    leave(how)


# --- the server ----------------------------------------------------------------------------------


if __name__ == "__main__":
    if sys.argv[1:]:
        program(*sys.argv[2:])
    else:
        pyarrow.array(np.zeros(1))  # imports pandas, if it is there
        serve(globals())
