"""What a console knows of its runs: for each key the latest value of every run, a short history.

All runs of a message are treated at once, so that 256 of them cost about as much as one. A write
stores numbers; means and the like are computed when a frame is made.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from .._entry import Entry
from .._event import leaf_name
from .._logdict import iterate_entries, logdict
from ._snapshot import Line, Snapshot, finite_mean, over_runs, speed

HISTORY = 64  # points kept of the history of a key
WINDOW = 10.0  # seconds over which the speed is measured


class History:
    """Evenly spaced points of a row of any length: when it is full, every second one is kept."""

    def __init__(self) -> None:
        self.points: list[float] = []
        self._stride, self._skip = 1, 0

    def due(self, count: int) -> slice | None:
        """Which of the next `count` events to add. Makes room for them."""
        while len(self.points) - (self._skip - count) // self._stride > HISTORY:
            if len(self.points) % 2:
                self._skip += self._stride
            self.points, self._stride = self.points[::2], 2 * self._stride
        taken = slice(self._skip, count, self._stride) if self._skip < count else None
        self._skip = self._skip - count if taken is None else (self._skip - count) % self._stride
        return taken


@dataclasses.dataclass
class Row:
    """What is kept of a key. Arrays have an element for each run."""

    shape: tuple[int, ...]
    whole: bool
    latest: np.ndarray
    step: np.ndarray  # the latest step, or the number of events
    seen: np.ndarray
    axis: str | None = None
    text: str | None = None
    history: History = dataclasses.field(default_factory=History)


class Board:
    """The state of a console. Writes and snapshots may come from different threads."""

    def __init__(
        self,
        total: float | None = None,
        keys: Sequence[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.total, self.keys, self.clock = total, keys, clock
        self.version = 0  # counts what happened
        self._lock = threading.Lock()
        self._rows: dict[str, Row | None] = {}  # None: not shown
        self._runs = 0
        self._last: tuple[list[int], Any] = ([], None)
        self._axis: str | None = None  # along which progress is measured
        self._rank, self._offset = -1, 0
        self._done = np.zeros(0)  # steps done by each run
        self._opened = self._at = clock()
        self._first: tuple[float, np.ndarray] | None = None
        self._recent: deque[tuple[float, np.ndarray]] = deque()

    def open(self, count: int) -> list[int]:
        """New runs. Returns their numbers."""
        with self._lock:
            first, self._runs = self._runs, self._runs + count
            self._last = ([], None)
            self._done = np.append(self._done, np.zeros(count))
            for row in filter(None, self._rows.values()):
                row.latest = np.append(row.latest, np.zeros(count))
                row.step = np.append(row.step, np.zeros(count))
                row.seen = np.append(row.seen, np.zeros(count, bool))
            self.version += 1
        return list(range(first, self._runs))

    def write(self, runs: list[int], logs: logdict) -> None:
        """Events of these runs; `logs` has an axis over them in front."""
        with self._lock:
            if runs != self._last[0]:
                # All runs, in order, is the usual case: a slice is quicker than an array.
                whole = runs == list(range(self._runs))
                self._last = (runs, slice(None) if whole else np.asarray(runs))
            for key, entry in iterate_entries(logs):
                self._write(key, entry, self._last[1])
            self.version += 1
            self._at = self.clock()
            if self._first is None:
                self._first = (self._at, self._done.copy())
                self._recent.append(self._first)

    def _write(self, key: str, entry: Entry, index: Any) -> None:
        """Store the last event of each run. With a mask, the last that happened."""
        axis, steps = _axis_of(entry)
        lanes: Any = slice(None)
        mask, last, count = entry.mask, -1, None
        if mask is not None:
            lanes = np.flatnonzero(mask.any(1))
            last = mask.shape[1] - 1 - mask[lanes, ::-1].argmax(1)
            index, count = np.arange(self._runs)[index][lanes], mask.sum(1)[lanes]
        step = None
        if steps is not None and steps.shape[1]:
            step = steps[lanes, last].astype(float)
            self._advance(axis, index, step, steps if mask is None else steps[mask])
        for name, leaf in _leaves(key, entry.value):
            events = leaf.shape[1]
            row = self._row(name, leaf) if events else None
            if row is None:
                continue
            values = _numbers(leaf[lanes, last])
            row.text = str(leaf[-1, -1]) if values is None else None
            row.latest[index] = np.nan if values is None else values
            row.seen[index], row.axis = True, axis
            if step is None:
                row.step[index] += events if count is None else count
                self._advance(None, index, row.step[index], row.step)
            else:
                row.step[index] = step
            _remember(row, leaf, mask is None and isinstance(index, slice))

    def _row(self, name: str, leaf: np.ndarray) -> Row | None:
        if name not in self._rows:
            n = self._runs
            shown = self.keys is None or any(fnmatch.fnmatchcase(name, k) for k in self.keys)
            arrays = (np.zeros(n), np.zeros(n), np.zeros(n, bool))
            row = Row(leaf.shape[2:], leaf.dtype.kind in "biu", *arrays)
            self._rows[name] = row if shown else None
        return self._rows[name]

    def _advance(self, axis: str | None, index: Any, step: np.ndarray, steps: np.ndarray) -> None:
        """Progress is measured along `step`, else along another step, else in events."""
        rank = 0 if axis is None else 2 if axis == "step" else 1
        if rank > self._rank:
            self._rank, self._axis = rank, axis
            # Steps that begin at 0: the one that is logged is done.
            self._offset = int(axis is not None and steps.min() == 0)
            self._done[:] = 0
            self._first = None
            self._recent.clear()
        if axis == self._axis:
            self._done[index] = np.maximum(self._done[index], step + self._offset)

    def snapshot(self, final: bool = False) -> Snapshot:
        """What there is to show. At the end, the speed is that of the whole time."""
        with self._lock:
            now = self._at if final else self.clock()
            done, since = self._done.copy(), self._first
            rows = [(k, r) for k, r in self._rows.items() if r is not None]
            known = [(k, r.shape, r.whole, r.text, r.axis, r.history.points[:]) for k, r in rows]
            arrays = [np.stack([r.latest, r.step, r.seen]) for _, r in rows]
            if since is not None and not final:
                while len(self._recent) > 1 and now - self._recent[1][0] > WINDOW:
                    self._recent.popleft()
                since = self._recent[0]
                self._recent.append((now, done))
        numbers = over_runs(np.stack(arrays)) if arrays else []
        lines = [Line(*k, **n) for k, n in zip(known, numbers, strict=True)]
        rate, left = speed(since, now, done, self.total)
        mean = float(done.mean()) if self._rank >= 0 else None
        took = now - self._opened
        return Snapshot(len(done), lines, self._axis, self.total, mean, rate, left, took)


def _axis_of(entry: Entry) -> tuple[str | None, np.ndarray | None]:
    """The step to show: `step`, or the first other. `lane` is one that the loggers add."""
    steps = entry.steps
    name = "step" if "step" in steps else next((n for n in steps if n != "lane"), None)
    if name is None:
        return None, None
    s = steps[name]
    return name, s if s.ndim == 2 else s.reshape(*s.shape[:2], -1).max(-1)


def _leaves(key: str, value: Any) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(value, np.ndarray):
        yield key, value
    else:
        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            yield leaf_name(key, path), leaf


def _numbers(x: np.ndarray) -> np.ndarray | None:
    """(runs, value …) as one number for each run, if it is one."""
    if x.dtype.kind not in "biufcV":
        return None
    x = np.abs(x) if x.dtype.kind == "c" else x
    if x.ndim == 1:
        return x.astype(float)
    x = x.reshape(len(x), -1)
    with np.errstate(all="ignore"):  # what is not finite is shown as such
        return x.mean(1, dtype=float) if x.size else np.full(len(x), np.nan)


def _remember(row: Row, leaf: np.ndarray, all_runs: bool) -> None:
    """Add the mean over runs to the history: of each event if they all took part, else the latest.

    Of arrays only the last event counts: the mean of all their elements may be slow.
    """
    if row.text is None and all_runs and not row.shape:
        due = row.history.due(leaf.shape[1])
        if due is not None:
            values = leaf[:, due]
            values = np.abs(values) if values.dtype.kind == "c" else values.astype(float)
            row.history.points += finite_mean(values).tolist()
    elif row.text is None and row.history.due(1) is not None:
        row.history.points.append(float(finite_mean(row.latest[row.seen])))
