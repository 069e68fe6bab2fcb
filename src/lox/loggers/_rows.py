"""From the events of one run to rows, one for each step: what trackers and tables hold.

    logs   {"loss": 3 events, "lr": 3 events}, step: [0, 10, 20]
    rows   step 0: loss, lr      step 10: loss, lr      step 20: loss, lr

The x axis is `step`, else the first step name that is one number. Other step names stay columns.
Events without any step get a running index for each key, in a column `index`.

Keys logged at the same step share a row, also when they come in writes one after the other. Two
events of the same key never do: no row replaces another, and steps may repeat or go backwards.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from .._entry import Entry
from .._event import leaf_name
from .._logdict import iterate_entries, logdict

INDEX = "index"
Number = Any  # a scalar of NumPy


@dataclasses.dataclass
class Row:
    """What was logged at one step."""

    steps: dict[str, Any]  # the x axis comes first
    values: dict[str, Any]

    @property
    def axis(self) -> str:
        return next(iter(self.steps))

    @property
    def x(self) -> Number:
        return self.steps[self.axis]

    def fits(self, other: Row) -> bool:
        """Do both belong to one row: the same step, and nothing that would be replaced?"""
        return (
            self.axis == other.axis
            and all(_same(self.steps[n], s) for n, s in other.steps.items() if n in self.steps)
            and self.values.keys().isdisjoint(other.values)
        )

    def take(self, other: Row) -> None:
        self.steps.update(other.steps)
        self.values.update(other.values)

    def columns(self) -> dict[str, Any]:
        """Steps and values side by side. A key named like a step gets another name."""
        out = dict(self.steps)
        for key, value in self.values.items():
            while key in out:
                key += "_"
            out[key] = value
        return out


class Index:
    """The running index of events without a step, for each key of a run.

    `restore(key)` says where a resumed run goes on. It is asked when a key is first met.
    """

    def __init__(self, restore: Callable[[str], int] | None = None):
        self._restore = restore
        self.next: dict[str, int] = {}

    def count(self, key: str, events: int) -> np.ndarray:
        if key not in self.next:
            self.next[key] = self._restore(key) if self._restore else 0
        start = self.next[key]
        self.next[key] = start + events
        return np.arange(start, start + events)


class Merger:
    """Holds the last row open, until one comes that is not at the same step."""

    def __init__(self) -> None:
        self.last: Row | None = None

    def add(self, rows: list[Row]) -> list[Row]:
        """Take rows; returns those that are complete."""
        if rows and self.last is not None and self.last.fits(rows[0]):
            self.last.take(rows[0])
            rows = rows[1:]
        if not rows:
            return []
        done = [*self.close(), *rows[:-1]]
        self.last = rows[-1]
        return done

    def close(self) -> list[Row]:
        """The row that was open, if any."""
        last, self.last = self.last, None
        return [] if last is None else [last]


@dataclasses.dataclass
class _Track:
    """Keys that share their steps: as a rule, those of one call of `lox.log`."""

    steps: dict[str, np.ndarray]
    values: dict[str, np.ndarray]

    def rows(self) -> Iterator[Row]:
        events = len(next(iter(self.values.values())))
        for i in range(events):
            at = {name: s[i] for name, s in self.steps.items()}
            yield Row(at, {name: x[i] for name, x in self.values.items()})


def rows_of(logs: logdict, index: Index) -> list[Row]:
    """The rows of one write. Every key of `logs` is a row of events; all values are NumPy."""
    tracks: dict[Any, _Track] = {}
    for key, entry in iterate_entries(logs):
        leaves = _leaves(key, entry)
        if not leaves:
            continue
        steps = _steps(entry, leaves, index)
        same = tuple((name, s.dtype.str, s.shape, s.tobytes()) for name, s in steps.items())
        track = tracks.setdefault(same, _Track(steps, {}))
        for name, value in leaves.items():
            while name in track.values:  # {"a/b": …} and {"a": {"b": …}}
                name += "_"
            track.values[name] = value
    return _merged(list(tracks.values()))


def _merged(tracks: list[_Track]) -> list[Row]:
    if len(tracks) == 1:
        return list(tracks[0].rows())
    rows: list[Row] = []
    at_step: dict[Any, list[Row]] = {}
    for track in tracks:
        used: Counter[Any] = Counter()  # the second event at a step goes to the second row of it
        for row in track.rows():
            place = (row.axis, row.x.item())
            there = at_step.setdefault(place, [])
            position = used[place]
            while position < len(there) and not there[position].fits(row):
                position += 1
            if position < len(there):
                there[position].take(row)
            else:
                there.append(row)
                rows.append(row)
            used[place] = position + 1
    if all(_rises(track) for track in tracks) and len({row.axis for row in rows}) == 1:
        rows.sort(key=lambda row: row.x)  # keys that are logged at different times interleave
    return rows


def _rises(track: _Track) -> bool:
    x = next(iter(track.steps.values()))
    return bool((x[1:] >= x[:-1]).all())


def _leaves(key: str, entry: Entry) -> dict[str, np.ndarray]:
    """The arrays of a key, each with a name. A pytree has one name for each leaf."""
    leaves: dict[str, np.ndarray] = {}
    for path, x in jax.tree_util.tree_flatten_with_path(entry.value)[0]:
        name = leaf_name(key, path)
        if x.dtype.kind == "c":  # no tracker has complex numbers
            leaves |= {f"{name}/real": x.real, f"{name}/imag": x.imag}
        else:
            leaves[name] = x
    return leaves


def _steps(entry: Entry, leaves: dict[str, np.ndarray], index: Index) -> dict[str, np.ndarray]:
    """The steps of a key, that of the x axis first."""
    name, value = next(iter(leaves.items()))
    numbers = [n for n, s in entry.steps.items() if s.ndim == 1]
    if not numbers:
        return {INDEX: index.count(name, len(value)), **entry.steps}
    axis = "step" if "step" in numbers else numbers[0]
    return {axis: entry.steps[axis], **entry.steps}


def _same(a: Any, b: Any) -> bool:
    return a is b or np.array_equal(a, b)
