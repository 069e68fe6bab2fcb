"""`ConsoleLogger`: one live table for all runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from .._logdict import logdict
from ._base import Logger
from ._board import Board
from ._names import RunInfo
from ._screen import FASTEST, PAINTER, Target, target_for


class ConsoleLogger(Logger):
    """Shows all runs in one live table: latest values, mean ± std over runs, history and speed.

    In a terminal it is drawn in place, and what the program prints appears above it. In a notebook
    it is a display of the cell. Where the output is no terminal, a line is printed from time to
    time, and at the end.

    >>> import jax, jax.numpy as jnp, lox
    >>> def train(state, lr):
    ...     def update(x, i):
    ...         lox.log({"loss": x**2}, step=i)
    ...         return x - lr * 2 * x, None
    ...     run = lambda x: jax.lax.scan(update, x, jnp.arange(10))[0]
    ...     return logger.tap(run, state)(1.0)
    >>> with lox.loggers.ConsoleLogger(total=10) as logger:
    ...     states = jax.vmap(logger.init)(jax.random.split(jax.random.key(0), 2))
    ...     x = jax.vmap(train)(states, jnp.array([0.0, 0.5]))
    [...] 2 runs · step 9/10 · 100% · ... · loss 0.5000 ± 0.5

    Arguments:

    - `total`: how many steps there will be, for a progress bar with the time left.
    - `keys`: names or patterns (`"loss/*"`) of what to show; all keys if not given.
    - `refresh`: seconds between frames, at least 0.25.
    - `interval`: seconds between lines, where the output is no terminal.
    - `file`: where to write instead of `sys.stdout`.
    - `options`: those of `Logger`.
    """

    slow: ClassVar[bool] = False  # a write only stores numbers

    def __init__(
        self,
        total: float | None = None,
        keys: str | Sequence[str] | None = None,
        refresh: float = FASTEST,
        interval: float = 10.0,
        file: Any = None,
        **options: Any,
    ):
        # Nothing is stored, so there is nothing that a run of the same name could damage.
        super().__init__(**{"exists": "resume", **options})
        self._board = Board(total, [keys] if isinstance(keys, str) else keys)
        self._display = (max(refresh, FASTEST), interval, file)
        self._target: Target | None = None

    def open_runs(self, infos: Sequence[RunInfo]) -> list[int]:
        """Begin runs: rows of the board."""
        runs = self._board.open(len(infos))
        if self._target is None:
            self._target = target_for(self._board, *self._display)
            PAINTER.add(self._target, self._errors.add)
        return runs

    def write_runs(self, runs: list[int], logs: logdict) -> None:
        """Store the events of all these runs. They are drawn by another thread, later."""
        self._board.write(runs, logs)

    def close(self) -> None:
        """End the display. The last state of the table stays."""
        try:
            super().close()
        finally:
            if self._target is not None:
                PAINTER.remove(self._target)
        self._errors.raise_first()  # of the last frame
