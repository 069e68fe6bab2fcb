"""Reading the messages of a stream that may have been cut off or damaged anywhere."""

from __future__ import annotations

import dataclasses
import mmap
import os
from typing import Any

from ._frame import is_torn, size_at


@dataclasses.dataclass(frozen=True)
class Damage:
    """Bytes of a file that are not what was written."""

    file: str
    start: int
    stop: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what} (bytes {self.start} to {self.stop})"


@dataclasses.dataclass
class Scan:
    """What a stream holds: the good messages, and what else there is."""

    data: memoryview
    messages: list[tuple[int, int]]  # start, size
    damage: list[Damage]
    torn: int  # bytes at the end of a write that never was finished


def scan(path: str, at_least: int = 0, live: bool = True, at_most: int | None = None) -> Scan:
    """Check every message of a stream. `at_least` bytes are known to have been there once, and
    what is behind `at_most` is of no interest.

    A file that is still written (`live`) is copied to memory: its writer may cut it.
    """
    data = contents(path, live)[:at_most]
    messages, damage, torn = [], [], 0
    name, at = os.path.basename(path), 0
    while at < len(data):
        size = size_at(data, at)
        if size is not None:
            messages.append((at, size))
            at += size
            continue
        then = _next_good(data, at)
        if then is None and at >= at_least and is_torn(data, at):
            torn = len(data) - at
            break
        stop = len(data) if then is None else then
        damage.append(Damage(name, at, stop, "a batch is damaged"))
        at = stop
    if len(data) < at_least:
        what = f"cut off: {at_least - len(data)} bytes are missing"
        damage.append(Damage(name, len(data), at_least, what))
    return Scan(data, messages, damage, torn)


def _next_good(data: memoryview, at: int) -> int | None:
    """Where the next good message begins. Messages have a size that is a multiple of eight."""
    whole: Any = data.obj
    while True:
        at = whole.find(b"\xff\xff\xff\xff", at + 1)
        if at < 0:
            return None
        if size_at(data, at) is not None:
            return at


def contents(path: str, live: bool = False) -> memoryview:
    """The bytes of a file; mapped, and so read as they are touched, unless it is `live`."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if live or not size:
            return memoryview(file.read())
        whole: Any = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    return memoryview(whole)
