"""Which runs a logger has: by name, and by the identity that programs carry.

An identity stands for a run, or for the error because of which there is none: then its events are
refused, and not mixed into another run.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._names import RunExists, RunInfo

Key = tuple[str | None, str, bytes]


class Roster:
    """The runs of one logger. `handles` has what the backend calls them, by name."""

    def __init__(self) -> None:
        self.handles: dict[str, Any] = {}
        self._names: dict[Key, str | Exception] = {}
        self._found: dict[Key, list[Any]] = {}  # what `find` has answered, for whole messages

    def enter(self, keys: list[Key], infos: list[RunInfo]) -> None:
        self._names |= {k: i.name for k, i in zip(keys, infos, strict=True)}
        self._found.clear()

    def refuse(self, keys: list[Key], error: Exception) -> None:
        self._names |= dict.fromkeys(keys, error)
        self._found.clear()

    def remove(self, name: str, replaced: bool) -> Any:
        """Take a run off the list. If another replaces it, events of the old states are refused."""
        gone = [k for k, n in self._names.items() if n == name]
        for key in gone:
            if replaced:
                self._names[key] = RunExists(f"run {name!r} was overwritten by another")
            else:
                del self._names[key]
        self._found.clear()
        return self.handles.pop(name)

    def unknown(self, name: str | None, kind: str, rows: np.ndarray) -> list[int]:
        """Those rows of a message's identities that were never heard of."""
        if (name, kind, rows.tobytes()) in self._found:
            return []
        return [i for i, key in enumerate(keys_of(name, kind, rows)) if key not in self._names]

    def names(self, name: str | None, kind: str, rows: np.ndarray) -> list[str]:
        """The names of those rows that have runs."""
        found = (self._names.get(key) for key in keys_of(name, kind, rows))
        return [n for n in found if isinstance(n, str)]

    def find(self, name: str | None, kind: str, rows: np.ndarray) -> list[Any]:
        """The handle of each row, or the error it is refused for."""
        whole = (name, kind, rows.tobytes())
        if whole not in self._found:
            known = [self._names[key] for key in keys_of(name, kind, rows)]
            self._found[whole] = [
                Refused(n) if isinstance(n, Exception) else self.handles[n] for n in known
            ]
        return self._found[whole]


class Refused:
    """In place of a handle: the events of this identity are not written, and why."""

    def __init__(self, error: Exception):
        self.error = error


def keys_of(name: str | None, kind: str, rows: np.ndarray) -> list[Key]:
    return [(name, kind, row.tobytes()) for row in rows]
