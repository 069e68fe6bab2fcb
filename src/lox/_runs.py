"""Saved runs, seen from outside: `runs` lists them, `replay` sends one to another logger.

What reads them is in `lox.store`, and imported when it is used.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any


def runs(path: str | os.PathLike[str] = "./.lox") -> Any:
    """The saved runs under a path, the oldest first: a list of `lox.store.Run`.

    >>> import jax, lox, tempfile
    >>> path = tempfile.mkdtemp()
    >>> with lox.loggers.SaveLogger(path) as logger:
    ...     keys = jax.random.split(jax.random.key(0), 3)
    ...     states = jax.vmap(lambda k: logger.init(k, name="seed{lane}"))(keys)
    ...     logger.log(states, {"loss": jax.numpy.arange(3.0)})
    >>> [run.name for run in lox.runs(path)]
    ['seed0', 'seed1', 'seed2']
    >>> lox.runs(path)["seed2"].load()
    {'loss': [2.0]}
    >>> len(lox.runs(path).select("seed*"))
    3

    Runs can be read while they are written. `runs(path).damaged` has what is wrong with folders
    that can't be read at all.
    """
    from .store._run import find_runs

    return find_runs(path)


def replay(run: Any, logger: Any, rows: int = 10_000) -> None:
    """Send a saved run (or several) to any logger, as if it happened now.

    >>> import jax, lox, tempfile
    >>> path = tempfile.mkdtemp()
    >>> with lox.loggers.SaveLogger(path) as logger:
    ...     logger.log(logger.init(jax.random.key(0), name="first"), {"loss": 1.5})
    >>> other = tempfile.mkdtemp()
    >>> with lox.loggers.SaveLogger(other) as logger:
    ...     lox.replay(lox.runs(path)["first"], logger)
    >>> lox.runs(other)["first"].load()
    {'loss': [1.5]}

    Arguments:

    - `run`: a run of `lox.runs`, or a list of them.
    - `logger`: any logger. The run has the same name and config there.
    - `rows`: about how many events of each key are sent at a time.
    """
    from .store._replay import send_run

    for one in [run] if not isinstance(run, Iterable) else run:
        send_run(one, logger, rows)
