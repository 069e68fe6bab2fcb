"""A file that only grows, by whole messages.

A write that fails half-way is taken back: the file is cut to what it was. The data is with the
operating system when `append` returns, so it outlives the process; `sync` brings it to the disk.
"""

from __future__ import annotations

import contextlib
import os

from ._naming import check_there, naming


class AppendFile:
    """A new file, of which `size` bytes are good."""

    def __init__(self, path: str):
        self.path = path
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
        self.handle = os.open(path, flags, 0o666)
        self.size = 0
        self.torn = False  # a write failed, and could not be taken back

    def append(self, data: bytearray | bytes) -> None:
        check_there(self.handle, self.path)
        rest = memoryview(data)
        try:
            with naming(self.path):
                while rest:  # a write may be shorter than asked for
                    rest = rest[os.write(self.handle, rest) :]
        except BaseException:
            self.torn = True
            with contextlib.suppress(OSError):
                os.ftruncate(self.handle, self.size)
                self.torn = False
            raise
        self.size += len(data)

    def cut(self, size: int) -> None:
        """Take back the latest writes."""
        self.torn = True
        os.ftruncate(self.handle, size)
        self.size, self.torn = size, False

    def sync(self) -> None:
        with naming(self.path):
            os.fsync(self.handle)

    def close(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1
