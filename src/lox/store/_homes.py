"""Which keys share a table.

Keys that were written with the same rows the first time do, for as long as they always are. Once
they are not, each has a table of its own, for good. So there are never more tables than twice the
number of keys, whatever the data is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._table import Flat

Written = tuple[Flat, np.ndarray | None]  # keys with the same rows, and which of those happened


class Homes:
    """For each key (with its dtype, shape and steps), those that it shares a table with."""

    def __init__(self) -> None:
        self._together: dict[Any, frozenset[Any]] = {}

    def split(self, flat: Flat, mask: np.ndarray | None) -> list[Written]:
        """Keys that have the same rows in this write, as they are to be written."""
        members = [Flat((key,), flat.steps) for key in flat.keys]
        names = [one.signature() for one in members]
        all_of_them = frozenset(names)
        homes = {self._together.get(name) for name in names}
        if homes == {None}:
            self._together |= dict.fromkeys(names, all_of_them)
        elif homes != {all_of_them}:
            for home in homes:
                for name in home or ():
                    self._together[name] = frozenset([name])
            self._together |= {name: frozenset([name]) for name in names}
            return [(one, mask) for one in members]
        return [(flat, mask)]
