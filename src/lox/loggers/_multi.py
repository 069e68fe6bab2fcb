"""`MultiLogger`: several loggers as one. One host call serves them all; none can stop another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from .._host import Strict
from .._logdict import logdict
from ._base import Logger


class MultiLogger(Logger):
    """Write to several loggers at once.

    >>> import jax, lox, tempfile
    >>> folders = [tempfile.mkdtemp(), tempfile.mkdtemp()]
    >>> with lox.loggers.MultiLogger(*map(lox.loggers.SaveLogger, folders)) as logger:
    ...     state = logger.init(jax.random.key(0), name="twice")
    ...     logger.log(state, {"x": 1.0})
    >>> [lox.runs(path)["twice"].load() for path in folders]
    [{'x': [1.0]}, {'x': [1.0]}]

    Arguments:

    - `loggers`: the loggers. An error of one is raised at `flush` or `close`, after all others have
      done their work.
    """

    slow = False

    def __init__(self, *loggers: Logger):
        super().__init__()
        for logger in loggers:
            if not isinstance(logger, Logger):
                raise TypeError(
                    f"MultiLogger takes loggers, got {type(logger).__name__}. Write "
                    "MultiLogger(ConsoleLogger(), SaveLogger(path))."
                )
        self.loggers = loggers

    def host_open(
        self,
        name: str | None,
        kind: str,
        ids: np.ndarray,
        configs: list[dict[str, Any]],
        group: str | None = None,
    ) -> list[str]:
        begun: list[tuple[Logger, list[str]]] = []
        try:
            for logger in self.loggers:
                begun.append((logger, logger.host_open(name, kind, ids, configs, group)))
        except Exception:
            for logger, names in begun:  # all or none, so that the call can be repeated
                logger.host_undo(names)
            raise
        return [n for _, names in begun for n in names]

    def host_undo(self, names: list[str]) -> None:
        for logger in self.loggers:
            logger.host_undo(names)

    def host_open_later(
        self, name: str | None, kind: str, ids: np.ndarray, configs: list[dict[str, Any]]
    ) -> None:
        self._each(lambda logger: logger.host_open_later(name, kind, ids, configs))

    def host_write(self, name: str | None, kind: str, logs: logdict, ids: np.ndarray) -> None:
        self._each(lambda logger: logger.host_write(name, kind, logs, ids))

    def end_runs(self, name: str | None, kind: str, ids: np.ndarray) -> None:
        self._each(lambda logger: logger.end_runs(name, kind, ids))

    def _check(self) -> None:
        super()._check()
        self._each(lambda logger: logger._check())

    @property
    def dropped(self) -> int:
        """How many writes all loggers together have given up."""
        return sum(logger.dropped for logger in self.loggers)

    def flush(self) -> None:
        """Flush all loggers; raise the first error of any."""
        self._each(lambda logger: logger.flush())

    def close(self) -> None:
        """Close all loggers; raise the first error of any."""
        self._closed = True
        self._each(lambda logger: logger.close())

    def _each(self, do: Callable[[Logger], None]) -> None:
        """Do it with every logger, whatever happens to the others; raise the first error."""
        first: BaseException | None = None
        for logger in self.loggers:
            try:
                do(logger)
            except Exception as error:
                if first is None:
                    first = error
                else:
                    other = error.error if isinstance(error, Strict) else error
                    with contextlib.suppress(AttributeError):
                        first.add_note(f"lox: and {type(logger).__name__} failed: {other!r}")
        if first is not None:
            raise first
