"""Weights & Biases in three functions, inside and outside of `jit` and `vmap`.

    run = lox.wandb.init(key, project="digits")
    lox.wandb.log(run, logs)
    lox.wandb.finish(run)

`lox.loggers.WandbLogger` does the work.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from ._logdict import logdict
from .loggers import _program
from .loggers._state import LoggerState
from .loggers._wandb import WandbLogger as WandbLogger

__all__ = ["WandbLogger", "WandbRun", "finish", "init", "log"]

_loggers: dict[str, WandbLogger] = {}  # by the options they were made with
_ending: list[WandbRun] = []  # runs that a compiled program has ended


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WandbRun(LoggerState):
    """A run in W&B. A pytree, as the states of all loggers are.

    >>> import jax, lox.wandb, tempfile
    >>> offline = dict(mode="offline", dir=tempfile.mkdtemp(), settings={"silent": True})
    >>> run = lox.wandb.init(jax.random.key(0), name="first", **offline)
    >>> run.name, run.id.dtype
    ('first', dtype('uint32'))
    >>> lox.wandb.finish(run)
    """

    options: str = dataclasses.field(default="", metadata=dict(static=True))

    @property
    def logger(self) -> WandbLogger:
        """The logger that writes it."""
        return _loggers[self.options]


def init(key: Any, name: str | None = None, config: Any = None, **options: Any) -> WandbRun:
    """Begin a run in W&B. Under `vmap`, one run for each lane.

    >>> import jax, lox.wandb, tempfile
    >>> offline = dict(mode="offline", dir=tempfile.mkdtemp(), settings={"silent": True})
    >>> @jax.jit
    ... def train(key):
    ...     run = lox.wandb.init(key, project="digits", **offline)
    ...     lox.wandb.log(run, {"loss": 0.5})
    ...     return run
    >>> runs = jax.vmap(train)(jax.random.split(jax.random.key(0), 2))
    >>> lox.wandb.finish(runs)

    Arguments:

    - `key`: a random key. It names the run, unless `name` does.
    - `name`, `config`: as for `logger.init`.
    - `options`: those of `WandbLogger`, and of `wandb.init`.
    """
    _end_those_that_wait()
    same = repr(sorted(options.items()))
    logger = _loggers.get(same)
    if logger is None or logger._closed:
        logger = _loggers[same] = WandbLogger(**options)
    state = logger.init(key, name, config)
    return WandbRun(state.id, state.name, state.kind, same)


def log(run: WandbRun, logs: Any, prefix: str = "") -> None:
    """Write a logdict (or a dict) to a run.

    >>> import jax, lox.wandb, tempfile
    >>> offline = dict(mode="offline", dir=tempfile.mkdtemp(), settings={"silent": True})
    >>> run = lox.wandb.init(jax.random.key(0), name="first", **offline)
    >>> lox.wandb.log(run, lox.logdict({"loss": 0.5}, step=10))
    >>> lox.wandb.finish(run)
    """
    run.logger.log(run, logs, prefix)


def finish(run: WandbRun) -> None:
    """End a run. Inside of a program, it ends after the program: at the next call from outside.

    >>> import jax, lox.wandb, tempfile
    >>> offline = dict(mode="offline", dir=tempfile.mkdtemp(), settings={"silent": True})
    >>> lox.wandb.finish(lox.wandb.init(jax.random.key(0), name="empty", **offline))
    """
    if _program.is_eager(run.id):
        _ending.append(run)
        _end_those_that_wait()
        return

    name, kind, options = run.name, run.kind, run.options  # the id is that of a trace

    def receive(logs: logdict, ids: np.ndarray) -> None:
        _ending.append(WandbRun(ids, name, kind, options))

    # What is sent from a program has no order: the last logs may come after this.
    _program.send(logdict({"finish": np.int32(0)}), run.id, receive)


def _end_those_that_wait() -> None:
    if not _ending:
        return
    jax.effects_barrier()
    while _ending:
        run = _ending.pop()
        ids = np.asarray(run.id)
        run.logger.end_runs(run.name, run.kind, ids.reshape(-1, ids.shape[-1]))
