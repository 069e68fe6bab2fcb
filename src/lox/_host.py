"""The host side of `tap`: finding the callback, calling it, and keeping its errors.

A compiled program may outlive the callback it was first called with. So an eager call registers its
callback under a handle, and the program carries the handle as its token: any callback then works
with the same compiled program, and nothing is kept alive by it. Inside a user's own `jit` there is
no such moment, and the callback is part of the program.

An exception in a callback must not kill the program half-way, and XLA would lose its type. It is
kept, the program goes on, and it is raised at the end of the eager call or by `flush`.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import itertools
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ._entry import Entry, compacted, count_of
from ._logdict import iterate_entries, logdict

Callback = Callable[[logdict], Any]
Receive = Callable[[logdict, Any], Any]  # a callback that also gets the context of what was sent


class Strict(Exception):
    """Raised by a receiver to stop the program at once, with the error that is the reason."""

    def __init__(self, error: BaseException):
        super().__init__(str(error))
        self.error = error


class Errors:
    """The first exception of several, and how many followed it."""

    def __init__(self, more: str = "the callback raised {} more time(s) in the same program"):
        self._note = more
        self._lock = threading.Lock()
        self._first: BaseException | None = None
        self._more = 0
        self.fatal = False  # was the program stopped because of it

    def add(self, error: BaseException) -> None:
        with self._lock:
            if self._first is None:
                self._first = error
            else:
                self._more += 1

    def take(self) -> BaseException | None:
        with self._lock:
            error, more = self._first, self._more
            self._first, self._more = None, 0
        if error is not None and more:
            error.add_note("lox: " + self._note.format(more))
        return error

    def raise_first(self) -> None:
        error = self.take()
        if error is not None:
            raise error


pending = Errors()  # of programs that call back on their own time
_calls: dict[int, tuple[Receive, Errors]] = {}
_handles = itertools.count(1)


@dataclasses.dataclass(frozen=True, eq=False)
class Sink:
    """Where the events of a tapped program go: a callback, or whatever the token stands for."""

    callback: Receive | None

    # It is a parameter of the primitive. A callback need not be hashable.

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sink) and other.callback is self.callback

    def __hash__(self) -> int:
        return id(self.callback)

    def host_function(self, **params: Any) -> Callable:
        from ._primitive import read

        def call(*args: np.ndarray) -> tuple[np.ndarray]:
            token = np.asarray(args[-1])
            known = _calls.get(int(token)) if self.callback is None else (self.callback, pending)
            if known is not None:
                callback, errors = known
                try:
                    event, _, _ = read([np.asarray(a) for a in args], params)
                    logs, context = contents(event)
                    if logs:  # else nothing of it happened
                        callback(logs, context)
                except Strict as stop:
                    if self.callback is None:
                        errors.fatal = True
                        errors.add(stop.error)
                    raise stop.error from None
                except (KeyboardInterrupt, SystemExit) as stop:  # of the user, who wants an end
                    if self.callback is None:
                        errors.fatal = True
                        errors.add(stop)
                    raise
                except BaseException as error:  # raised to the user later, with its own type
                    errors.add(error)
            return (token,)

        return call


BY_HANDLE = Sink(None)


def contents(event: Any) -> tuple[logdict, Any]:
    """The logdict of a message, without the keys and rows that did not happen, and the context."""
    [field], [leaves] = event.spec.fields, event.values
    logs, context = field.tree.unflatten(leaves)
    entries = {}
    for key, whole in iterate_entries(logs):
        entry: Entry | None = _real(_with_lanes(whole, event.mask))
        if entry is not None:
            entries[key] = entry
    return logdict.of_entries(entries), context


def _real(entry: Entry) -> Entry | None:
    """What of an entry happened. The rows of a batch keep their mask: its lanes may differ."""
    if entry.mask is None:
        return None if entry.layout.events and count_of(entry) == 0 else entry
    if not entry.mask.any():
        return None
    in_batch = entry.mask.ndim > entry.layout.events
    return entry if in_batch else compacted(entry)


def _with_lanes(entry: Entry, lanes: np.ndarray | None) -> Entry:
    """Restrict an entry to the lanes of the batch that took part."""
    if lanes is None:
        return entry
    x, axis = entry.parts()[0]
    shape = np.shape(x)[: axis + 1]
    lanes = np.broadcast_to(lanes.reshape(lanes.shape + (1,) * (len(shape) - lanes.ndim)), shape)
    return dataclasses.replace(entry, mask=lanes if entry.mask is None else entry.mask & lanes)


class EagerCall:
    """A callback registered for the time of one eager call."""

    def __init__(self, callback: Receive):
        self.callback, self.errors = callback, Errors()
        self.handle = next(_handles) % (2**31 - 1)

    def __enter__(self) -> int:
        _calls[self.handle] = (self.callback, self.errors)
        return self.handle

    def __exit__(self, *failed: Any) -> None:
        del _calls[self.handle]
        if failed[0] is None or self.errors.fatal:
            self.errors.raise_first()


def flush() -> None:
    """Wait until every pending callback of this thread's programs has run; raise what they raised.

    >>> import jax, lox
    >>> def f(x):
    ...     lox.log({"x": x})
    ...     return x
    >>> def callback(logs):
    ...     raise RuntimeError("disk full")
    >>> y = jax.jit(lox.tap(f, callback))(1.0)
    >>> lox.flush()
    Traceback (most recent call last):
    ...
    RuntimeError: disk full
    """
    jax.effects_barrier()
    pending.raise_first()


@atexit.register
def _at_exit() -> None:
    # JAX's own wait at exit comes after this one, too late to show what went wrong. It also tells
    # of a program that was stopped.
    with contextlib.suppress(Exception):
        jax.effects_barrier()
    error = pending.take()
    if error is not None:
        print("lox: a tap callback had raised, and lox.flush() was never called:", file=sys.stderr)
        traceback.print_exception(error)
