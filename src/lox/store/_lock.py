"""Locks that die with their process. Where the system has none, nobody is kept out."""

from __future__ import annotations

import contextlib
import os
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

    def release(self) -> None:
        os.close(self.handle)


def hold(path: str) -> Hold:
    handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_EX)  # a reader may be looking just now
    os.ftruncate(handle, 0)
    os.write(handle, str(os.getpid()).encode())
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
