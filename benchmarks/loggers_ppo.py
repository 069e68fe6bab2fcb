"""What it costs to watch and save a real training run: the PPO example, eight seeds in one program.

Three compiled programs take turns: without logging; with SaveLogger and a live ConsoleLogger; and
with `jax.debug.callback` and `wandb.log` in every update, as it is often done. Nothing that happens
once is timed: compiling, beginning runs, ending them.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import lox

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "examples"))
import ppo_seeds

Row = tuple[str, str, str, bool | None]
SEEDS, UPDATES, ROUNDS = 8, 100, 15
SETTINGS = ppo_seeds.Settings(updates=UPDATES)


@contextlib.contextmanager
def terminal() -> Iterator[Any]:
    """A file that is a terminal, whose output is read and thrown away."""
    ours, theirs = os.openpty()

    def drain() -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while os.read(ours, 65536):
                pass

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    with os.fdopen(theirs, "w") as file:
        yield file
    reader.join()
    os.close(ours)


def by_callback(runs: list[Any], lane: Any) -> Callable[..., None]:
    """Stands in for `lox.log`: each seed sends each update to its own run in W&B."""

    def send(lane: Any, step: Any, data: dict[str, Any]) -> None:
        # The step as a value: W&B would drop rows of the next round, whose steps begin anew.
        runs[int(lane)].log({"step": int(step)} | {k: float(v) for k, v in data.items()})

    return lambda data, step: jax.debug.callback(send, lane, step, data)


class Timed(lox.loggers.MultiLogger):
    """Knows how long the program has waited for it: no less than that is its overhead."""

    waited = 0.0

    def host_write(self, *args: Any) -> None:
        start = time.perf_counter()
        super().host_write(*args)
        self.waited += time.perf_counter() - start


def ppo_overhead() -> Iterator[Row]:
    import wandb

    keys, lanes = jax.random.split(jax.random.key(0), SEEDS), jnp.arange(SEEDS)
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(tempfile.TemporaryDirectory())
        screen = stack.enter_context(terminal())
        console = lox.loggers.ConsoleLogger(total=UPDATES, file=screen)
        save = lox.loggers.SaveLogger(os.path.join(path, "runs"))
        logger = stack.enter_context(Timed(console, save))
        states = jax.vmap(lambda key: logger.init(key, name="ppo-{lane}", config=SETTINGS))(keys)
        options = dict(project="bench", mode="offline", dir=path, settings={"silent": True})
        runs = [wandb.init(**options, reinit="create_new") for _ in range(SEEDS)]
        for run in runs:
            stack.callback(run.finish)

        def bare(key):
            return ppo_seeds.train(key, SETTINGS)

        def ours(key, state):
            return logger.tap(ppo_seeds.train, state, every=10)(key, SETTINGS)

        def theirs(key, lane):
            with mock.patch.object(lox, "log", by_callback(runs, lane)):
                return ppo_seeds.train(key, SETTINGS)

        plain = compiled(bare, keys)
        logged = compiled(ours, keys, states), compiled(theirs, keys, lanes)
        a, again, b, c = in_turns(plain, plain, *logged)
        waited = logger.waited / (ROUNDS + 1)
        # What was timed is the whole work: no row is missing, here or there.
        logger.flush()
        rows = UPDATES * (ROUNDS + 1)
        assert [run.rows for run in lox.runs(save.path)] == [rows] * SEEDS
        assert [run.step for run in runs] == [rows] * SEEDS
    noise = statistics.median(y / x for x, y in zip(a, again))
    yield "PPO, 8 seeds: no logging / the same once more (noise)", f"{noise:.3f}", "", None
    yield from report(a, b, c, waited)


def compiled(fun: Callable, *args: Any) -> Callable[[], Any]:
    program = jax.jit(jax.vmap(fun)).lower(*args).compile()
    return lambda: program(*args)


def in_turns(*variants: Callable[[], Any]) -> list[list[float]]:
    """Seconds of each variant in each round, host calls included. The first round warms up."""
    times: list[list[float]] = [[] for _ in variants]
    for i in range(ROUNDS + 1):
        for k in sorted(range(len(variants)), reverse=bool(i % 2)):
            start = time.perf_counter()
            jax.block_until_ready(variants[k]())
            jax.effects_barrier()
            times[k].append(time.perf_counter() - start)
    return [t[1:] for t in times]


def report(a: list[float], b: list[float], c: list[float], waited: float) -> Iterator[Row]:
    """Medians over rounds of what differs within a round: a slow moment is in all its numbers."""
    an_update = lambda seconds: f"{seconds / UPDATES * 1e3:.2f}"
    ratio = statistics.median(y / x for x, y in zip(a, b))
    detail = f"({an_update(statistics.median(a))} ms an update without)"
    what = "PPO, 8 seeds: SaveLogger + ConsoleLogger, every=10 / no logging"
    yield what, f"{ratio:.3f} {detail}", "≤ 1.05", ratio <= 1.05
    mine, others = (statistics.median(y - x for x, y in zip(a, t)) for t in (b, c))
    mine = max(mine, waited)
    detail = f"({an_update(others)} ms an update to {an_update(mine)})"
    what = "PPO, 8 seeds: overhead of debug.callback + wandb.log in every update / ours"
    yield what, f"{others / mine:.0f} {detail}", "≥ 5", others >= 5 * mine


ROWS = (ppo_overhead,)

if __name__ == "__main__":
    for rows in ROWS:
        for line in rows():
            print(*line, sep=" | ")
