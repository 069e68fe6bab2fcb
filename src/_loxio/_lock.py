"""Locks that die with their process. Where the system has none, nobody is kept out."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Iterator
from typing import Any

try:
    import fcntl as _fcntl
except ImportError:  # not a POSIX system
    _fcntl = None  # type: ignore[assignment]

fcntl: Any = _fcntl


class Hold:
    """A lock that is held until `release`, or until the process ends."""

    def __init__(self, handle: int):
        self.handle = handle
        _held.add(self)

    def release(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


_held: weakref.WeakSet[Hold] = weakref.WeakSet()


def _in_child() -> None:
    # A child made by fork shares its parent's locks, and would hold them after the parent's death.
    for lock in list(_held):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def hold(path: str) -> Hold | None:
    """Take a lock, or None if another has it."""
    handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
    if fcntl is not None:
        for attempt in range(5):  # somebody may be looking just now whether it is free
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.002 * attempt)
        else:
            os.close(handle)
            return None
    return Hold(handle)


def is_held(path: str) -> bool:
    """Is the process alive that holds this lock?"""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        if fcntl is None:
            return True
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


@contextlib.contextmanager
def exclusive(path: str) -> Iterator[None]:
    """One process at a time."""
    handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
