"""A store that is asked for again and again: it is opened, and its rows checked, only once."""

from __future__ import annotations

import os

from ._reader import RowStore

Files = dict[str, tuple[int, int]]  # name: size, time of the last change


class Opened:
    """The store at a path, anew whenever one of its files has changed."""

    def __init__(self, path: str):
        self.path = path
        self._found: tuple[Files, RowStore] | None = None

    def __call__(self) -> RowStore:
        files = self._files()
        if self._found is None or self._found[0] != files:
            self._found = files, RowStore(self.path)
        return self._found[1]

    def _files(self) -> Files:
        if not os.path.isdir(self.path):
            return {}
        with os.scandir(self.path) as entries:
            stats = {entry.name: entry.stat() for entry in entries}
        return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}
