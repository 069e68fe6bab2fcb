"""`Logger`: what is common to all loggers inside of programs.

    program:  init, spool, tap, log           a state that goes through jit and vmap; messages
    host:     host_open, host_write           which runs a message is for, and its errors
    backend:  open_run, write_run, close_run  what a backend writes; NumPy only

The last two are in `_backend`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from .. import _transform
from .._host import Strict
from .._log import caller_line, describe
from .._logdict import logdict
from . import _program
from ._backend import Backend
from ._lanes import mismatch
from ._state import LoggerState


class Logger(Backend):
    """Base class of loggers: runs, from what programs log.

    A backend subclasses it and writes `open_run`, `write_run` and `close_run`.

    >>> import jax, lox
    >>> class Printer(lox.loggers.Logger):
    ...     def open_run(self, info):
    ...         return info.name
    ...     def write_run(self, run, logs):
    ...         print(run, logs)
    >>> def f(x):
    ...     lox.log({"x": x})
    ...     return x + 1
    >>> with Printer() as logger:
    ...     state = logger.init(jax.random.key(0), name="first")
    ...     y = logger.tap(f, state)(1.0)
    first {'x': [1.0]}

    Arguments:

    - `exists`: what happens when a run of the same name is there already: `"error"`, `"overwrite"`
      or `"resume"`. By default it is an error for a name of yours, and a run that is named by its
      key gets a number behind it.
    - `strict`: raise a backend's error at once, and stop the program, instead of at `flush`.
    - `overflow`: what happens when a slow backend can't keep up: `"block"`, `"drop_oldest"` or
      `"decimate"`. `logger.dropped` counts the writes given up.
    - `capacity`: how many writes may wait for a slow backend.
    - `timeout`: seconds without any progress after which a backend is given up.
    """

    def init(self, key: Any, name: str | None = None, config: Any = None) -> LoggerState:
        """Begin a run. Under `vmap`, one run for each lane.

        - `key`: a random key. It names the run, unless `name` does.
        - `name`: a name, or a template with `{lane}`, `{key}` or entries of `config`.
        - `config`: a dict or dataclass kept with the run. Its values may be traced, so that a sweep
          over them is one `vmap`.
        """
        self._check()
        return _program.init(self, key, name, config)

    def log(self, state: LoggerState, logs: Any, prefix: str = "") -> None:
        """Write a logdict (or a dict) to the run of `state`, inside or outside of `jit`."""
        if not isinstance(state, LoggerState):
            raise TypeError(
                f"logger.log takes the state of a run first, got {type(state).__name__}. Write "
                "state = logger.init(key) and logger.log(state, logs)."
            )
        logs = logs.prefix(prefix) if isinstance(logs, logdict) else _one_event(state, logs, prefix)
        if not logs:
            return
        if _program.is_eager(state.id, logs):
            self._check()
            with _own_type():
                self.host_write(state.name, state.kind, logs, np.asarray(state.id))
        else:
            _program.send(logs, state.id, self.receiver(state))

    def spool(self, fun: Callable, state: LoggerState, **options: Any) -> Callable:
        """`lox.spool`, its logs written to the run when `fun` is done. Returns what `fun` does."""
        spooled = _transform.spool(fun, **options)

        @functools.wraps(fun, updated=())
        def logged(*args: Any, **kwargs: Any) -> Any:
            self._check_eager(state)
            out, logs = spooled(*args, **kwargs)
            self.log(state, logs)
            return out

        return logged

    def tap(self, fun: Callable, state: LoggerState, **options: Any) -> Callable:
        """`lox.tap`, every event (or window of `every=` iterations) written as it happens."""
        static = (options.pop("static_argnums", None), options.pop("static_argnames", None))
        chosen = _transform.tap_options("logger.tap", **options)
        receive = self.receiver(state)
        tapped = _transform.tap_into(fun, receive, chosen, static, context=state.id)

        @functools.wraps(fun, updated=())
        def logged(*args: Any, **kwargs: Any) -> Any:
            self._check_eager(state)
            return tapped(*args, **kwargs)

        return logged

    def finish(self, state: LoggerState) -> None:
        """End the runs of a state now, not only when the logger is closed. Outside of `jit`."""
        self._check_eager(state)
        ids = np.asarray(state.id)
        self.end_runs(state.name, state.kind, ids.reshape(-1, ids.shape[-1]))

    def receiver(self, state: LoggerState) -> Callable[[logdict, Any], None]:
        name, kind = state.name, state.kind
        return lambda logs, ids: self.host_write(name, kind, logs, ids)

    def _check_eager(self, state: LoggerState) -> None:
        if _program.is_eager(state.id):
            _program.forget_trace()
            jax.block_until_ready(state.id)  # the host has opened the run, or failed to
            self._check()

    def flush(self) -> None:
        """Wait until all that was logged is written; raise the first error of the backend."""
        _program.forget_trace()
        super().flush()

    def close(self) -> None:
        """Flush, and end all runs. A closed logger takes no more."""
        _program.forget_trace()
        super().close()

    def _check(self) -> None:
        if self._closed:
            raise ValueError(f"this {type(self).__name__} is closed. Make a new one.")
        if self._refused:
            self._refused = False
            self._errors.raise_first()


def _one_event(state: LoggerState, data: Any, prefix: str) -> logdict:
    """A plain dict as an event. If the state is that of many runs, each has its own part of it."""
    spec, values, _ = describe(data, (), False, prefix, None, {}, caller_line())
    batch = np.shape(state.id)[:-1]
    ndims = {}
    for field, leaves in zip(spec.fields, values, strict=True):
        shapes = [np.shape(x) for x in leaves]
        for shape in shapes:
            if shape and shape[: len(batch)] != batch:
                raise mismatch(field.key, shape, batch)
        ndims[field.key] = tuple(max(len(s) - len(batch), 0) for s in shapes)
    whole = {f.key: f.tree.unflatten(v) for f, v in zip(spec.fields, values, strict=True)}
    return logdict.one_event(whole, {}, ndims, ())


@contextlib.contextmanager
def _own_type() -> Iterator[None]:
    try:
        yield
    except Strict as stop:
        raise stop.error from None
