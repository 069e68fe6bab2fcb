"""The host's side of a logger: which runs a message is for, the queue, and what fails.

A backend says how to open, write and close a run. It is called one call at a time: straight away,
or, if it is slow (the default), from a thread of its own behind a bounded queue. A failing backend
never stops the program: its first error is kept until `flush` or `close`.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import jax
import numpy as np

from .._host import Errors, Strict
from .._logdict import iterate_entries, logdict
from . import _exit
from ._contract import Contract
from ._lanes import by_run, lanes_with_events
from ._names import EXISTS, RunExists, RunInfo, name_runs, run_exists
from ._queue import POLICIES, Worker, within
from ._roster import Refused, Roster, keys_of


class Backend(Contract):
    """The runs of a logger on the host. `Logger` adds what runs inside of programs."""

    def __init__(
        self,
        *,
        exists: str | None = None,
        strict: bool = False,
        overflow: str = "block",
        capacity: int = 1024,
        timeout: float = 60.0,
    ):
        _one_of("exists", exists or "error", EXISTS)
        _one_of("overflow", overflow, POLICIES)
        self.exists, self.strict = exists or "error", strict
        self._numbers = exists is None  # runs that are named by a key that is taken
        self._queue_options = (overflow, capacity, timeout)
        self._worker: Worker | None = None
        self._errors = Errors("it failed {} more time(s); none of those events was written")
        self._lock, self._starting = threading.RLock(), threading.Lock()
        self._hung = False
        self._roster = Roster()
        self._refused = False
        self._closed = False

    def host_open(
        self,
        name: str | None,
        kind: str,
        ids: np.ndarray,
        configs: list[dict[str, Any]],
        group: str | None = None,
    ) -> list[str]:
        """Begin the runs of these identities, one for each row; returns the names of new ones."""
        infos = name_runs(name, kind, ids, configs, group)
        before = set(self._roster.handles)
        try:
            if self.exists == "overwrite" and self._worker is not None:
                self._worker.drain()  # of the runs that may be given up
            with self._backend():
                infos = self._open_new(infos)
        except Exception as error:
            error.add_note(f"lox: {type(self).__name__} could not begin {infos[0].name!r}")
            raise
        _exit.remember(self)
        self._roster.enter(keys_of(name, kind, ids), infos)
        return [i.name for i in infos if i.name not in before]

    def host_undo(self, names: list[str]) -> None:
        """Take runs back that have just begun: another logger could not begin the same ones."""
        for name in names:
            if name in self._roster.handles:
                with self._backend():
                    self.undo_run(self._roster.remove(name, replaced=False))

    def host_open_later(
        self, name: str | None, kind: str, ids: np.ndarray, configs: list[dict[str, Any]]
    ) -> None:
        """The same from inside of a program: an error is kept, and the runs take no events."""
        try:
            self.host_open(name, kind, ids, configs)
        except Exception as error:
            self._roster.refuse(keys_of(name, kind, ids), error)
            self._refused = True
            self._failed(error)

    def _open_new(self, infos: list[RunInfo]) -> list[RunInfo]:
        """Open runs, but for those that this logger has open already and is to go on with.

        A name that the user has not chosen is no reason to fail: unless told what to do with runs
        that exist, those named by a key get a number. Returns the runs as they are named now.
        """
        handles = self._roster.handles
        again = [i.name for i in infos if i.name in handles]
        if again and self.exists == "error":
            raise run_exists(type(self).__name__, again[0], "this logger")
        if self.exists == "overwrite":
            for name in again:
                self.replace_run(self._roster.remove(name, replaced=True))
        new = [i for i in infos if i.name not in handles]
        first = infos
        for n in itertools.count(2):
            try:
                opened = self._open_in_time(new) if new else []
                break
            except RunExists:
                if not (self._numbers and new[0].from_key):
                    raise
                infos = new = [i.numbered(n) for i in first]
        handles |= {i.name: h for i, h in zip(new, opened, strict=True)}
        return infos

    def _open_in_time(self, new: list[RunInfo]) -> list[Any]:
        if not self.slow:
            return self.open_runs(new)
        # A tracker that can't be reached must not hold up the program for longer.
        timeout = self._queue_options[2]
        return within(timeout, type(self).__name__, lambda: self.open_runs(new))

    def host_write(self, name: str | None, kind: str, logs: logdict, ids: np.ndarray) -> None:
        """Write a message: `logs` for the runs of `ids`, any batch axes in front of both."""
        try:
            if self._closed:
                raise ValueError(f"{type(self).__name__} is closed; these events came after")
            rows, logs = by_run(logs, ids)
            there = lanes_with_events(logs, len(rows))
            if len(there) < len(rows):  # of a branch that other lanes took
                rows, logs = rows[there], jax.tree.map(lambda x: x[there], logs)
            new = self._roster.unknown(name, kind, rows)
            if new:  # states from elsewhere: a checkpoint, another process
                self.host_open_later(name, kind, rows[new], [{} for _ in new])
            handles = self._roster.find(name, kind, rows)
            refused = [h.error for h in handles if isinstance(h, Refused)]
            if refused:
                self._errors.add(refused[0])
                lanes = [i for i, h in enumerate(handles) if not isinstance(h, Refused)]
                handles = [handles[i] for i in lanes]
                logs = jax.tree.map(lambda x: x[lanes], logs)
            if handles:
                self._deliver(handles, logs)
        except Strict:
            raise
        except Exception as error:
            self._failed(error)

    def _deliver(self, handles: list[Any], logs: logdict) -> None:
        if not self.slow or self.strict:
            self._write((handles, logs))
            return
        with self._starting:
            if self._worker is None:
                self._worker = Worker(self._write, *self._queue_options, type(self).__name__)
        self._worker.put((handles, logs))

    def _write(self, item: tuple[list[Any], logdict]) -> None:
        try:
            with self._backend():
                self.write_runs(*item)
        except Exception as error:
            error.add_note(f"lox: {type(self).__name__} could not write {_described(item[1])}")
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        self._errors.add(error)
        if self.strict:
            raise Strict(error)

    @contextlib.contextmanager
    def _backend(self) -> Iterator[None]:
        """One call of the backend at a time. One that hangs must not hang all others."""
        timeout = self._queue_options[2]
        if not self._lock.acquire(timeout=0 if self._hung else timeout):
            self._hung = True  # who has waited in vain once does not wait again
            raise TimeoutError(f"{type(self).__name__} has not answered for {timeout:g} s")
        try:
            yield
        finally:
            self._lock.release()

    # --- the end -----------------------------------------------------------------------------

    @property
    def dropped(self) -> int:
        """How many writes were given up because the backend could not keep up."""
        return self._worker.dropped if self._worker else 0

    def flush(self) -> None:
        """Wait until all that was logged is written; raise the first error of the backend."""
        stopped = _exit.wait_for_programs()
        self._settle(self.flush_run)
        self._raise_first(stopped)

    def close(self) -> None:
        """Flush, and end all runs. A closed logger takes no more."""
        if self._closed:
            return
        stopped = _exit.wait_for_programs()
        self._settle(self.close_run)
        self._closed = True
        if self._worker is not None:
            self._worker.stop()
        _exit.forget(self)
        if self.dropped:
            warnings.warn(
                f"{type(self).__name__} gave up {self.dropped} writes that the backend could not "
                f"keep up with (overflow={self._queue_options[0]!r})",
                RuntimeWarning,
                stacklevel=2,
            )
        self._raise_first(stopped)

    def end_runs(self, name: str | None, kind: str, ids: np.ndarray) -> None:
        """End the runs of these identities before the logger is closed."""
        if self._worker is not None:
            self._worker.drain()
        for run in [n for n in self._roster.names(name, kind, ids) if n in self._roster.handles]:
            with self._backend():
                self.close_run(self._roster.remove(run, replaced=False))

    def _settle(self, finish: Callable[[Any], None]) -> None:
        try:
            if self._worker is not None:
                self._worker.drain()
        except TimeoutError as error:
            self._hung = True
            self._errors.add(error)
        for handle in list(self._roster.handles.values()):
            try:
                with self._backend():
                    finish(handle)
            except Exception as error:
                what = finish.__name__.removesuffix("_run")
                error.add_note(f"lox: {type(self).__name__} could not {what} a run")
                self._errors.add(error)

    def _raise_first(self, stopped: Exception | None) -> None:
        """Raise our own error; if there is none, that of a program that was stopped."""
        self._refused = False
        self._errors.raise_first()
        if stopped is not None:
            raise stopped

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.close()
            return
        try:  # the program's own error is the one to show
            self.close()
        except Exception as own:
            error.add_note(f"lox: {type(self).__name__} had failed too: {own!r}")


def _described(logs: logdict) -> str:
    shapes = (f"{k!r} {np.shape(jax.tree.leaves(e.value)[0])}" for k, e in iterate_entries(logs))
    return ", ".join(shapes)


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r} is not known. Choose one of {', '.join(known)}.")
