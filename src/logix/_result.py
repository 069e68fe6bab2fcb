"""Scores with the ids they belong to: as they are gathered block by block, and as a result."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ._array import Array, namespace, to_numpy

_PENDING = 1 << 26  # bytes of scores that wait on a device before they go to the host
_RECENT = 100_000  # ids that are held before those of rows that lost are dropped


@dataclasses.dataclass(frozen=True, repr=False)
class Influence(Mapping[str, Any]):
    """Scores with their ids, as attributes or `result["influence"]`.

    `influence` is (queries, train), (queries, k) with `top_k`, best first, (rows,) for
    self-influence, or (queries, batch, positions) for tokens; `tgt_ids` is a list, one list per
    query with `top_k`, or None. With groups, `influence` (and with `top_k` also `tgt_ids`) is a
    dict: "total" and each group. `rest`, for tokens, is what has no position: (queries, batch).
    """

    src_ids: list[Any]
    influence: Any
    tgt_ids: Any = None
    rest: Any = None

    def __getitem__(self, key: str) -> Any:
        if key not in list(iter(self)):
            raise KeyError(f"{key!r} is not there; there are {', '.join(self)}")
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        optional = ("tgt_ids", "rest")
        fields = [f.name for f in dataclasses.fields(self)]
        return iter(f for f in fields if f not in optional or getattr(self, f) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in iter(self))

    def __repr__(self) -> str:
        if isinstance(self.influence, dict):
            shape = next(iter(self.influence.values())).shape
            what = f"{shape} for each of {_few(list(self.influence))}"
        else:
            what = str(self.influence.shape)
        ids = self.tgt_ids["total"] if isinstance(self.tgt_ids, dict) else self.tgt_ids
        parts = [f"influence: {what}", f"src_ids: {_few(self.src_ids)}"]
        if ids is not None and ids and isinstance(ids[0], list):
            parts.append(f"tgt_ids: of each query its best {len(ids[0])}")
        elif ids is not None:
            parts.append(f"tgt_ids: {_few(ids)}")
        return f"Influence({', '.join(parts)})"

    def top(self, k: int, largest: bool = True) -> Influence:
        """The k best of each query, best first (equal scores: the earlier row first).

        >>> import numpy as np
        >>> full = Influence(["q"], np.array([[1.0, 3.0, 2.0]]), ["a", "b", "c"])
        >>> full.top(2).tgt_ids
        [['b', 'c']]

        Of self-influence, the k rows that have most of it.
        """
        if k < 1:
            raise ValueError(f"top({k}): at least 1 is needed")
        ids = self.tgt_ids["total"] if isinstance(self.tgt_ids, dict) else self.tgt_ids
        if self.rest is not None or (ids and isinstance(ids[0], list)):
            what = "of tokens" if self.rest is not None else "already the best of each query"
            raise ValueError(f"these scores are {what}: top(k) is for a (queries, train) matrix")
        sign = 1 if largest else -1
        if ids is None:
            if isinstance(self.influence, dict):
                raise ValueError(
                    "each group has an order of its own: ask for one, as in "
                    'Influence(r.src_ids, r.influence["total"]).top(k)'
                )
            order = best_columns(sign * self.influence[None], k)[0]
            return Influence([self.src_ids[i] for i in order], self.influence[order])
        pick = lambda x: best_columns(sign * x, k)
        named = lambda columns: [[ids[i] for i in row] for row in columns.tolist()]
        if not isinstance(self.influence, dict):
            columns = pick(self.influence)
            scores = np.take_along_axis(self.influence, columns, 1)
            return Influence(self.src_ids, scores, named(columns))
        found = {group: pick(x) for group, x in self.influence.items()}
        each = {g: np.take_along_axis(x, found[g], 1) for g, x in self.influence.items()}
        return Influence(self.src_ids, each, {g: named(c) for g, c in found.items()})

    def to_pandas(self) -> Any:
        """One line per score: src_id, tgt_id, rank (with `top_k`) or position (of tokens), and
        group (with groups)."""
        import pandas

        if not isinstance(self.influence, dict):
            return pandas.DataFrame(self._columns(self.influence, self.tgt_ids))
        frames = []
        for group, x in self.influence.items():
            ids = self.tgt_ids[group] if isinstance(self.tgt_ids, dict) else self.tgt_ids
            frames.append(pandas.DataFrame({"group": group, **self._columns(x, ids)}))
        return pandas.concat(frames, ignore_index=True)

    def _columns(self, influence: np.ndarray, ids: Any) -> dict[str, Any]:
        if ids is None:
            return {"src_id": self.src_ids, "influence": influence}
        queries, each = influence.shape[:2]
        positions = influence.shape[2] if influence.ndim == 3 else 1
        columns: dict[str, Any] = {"src_id": _repeat(self.src_ids, each * positions)}
        if ids and isinstance(ids[0], list):
            columns["tgt_id"] = [i for row in ids for i in row]
            columns["rank"] = np.tile(np.arange(each), queries)
        else:
            columns["tgt_id"] = _repeat(ids, positions) * queries
        if influence.ndim == 3:
            columns["position"] = np.tile(np.arange(positions), queries * each)
        return columns | {"influence": influence.reshape(-1)}


def _repeat(ids: Sequence[Any], times: int) -> list[Any]:
    return [i for i in ids for _ in range(times)]


def _few(names: Sequence[Any]) -> str:
    short = [t if len(t) < 24 else f"{t[:20]}…" for t in map(repr, names[:3])]
    return f"{len(names):,} [{', '.join([*short, *(['…'] if len(names) > 3 else [])])}]"


def best_columns(x: np.ndarray, k: int) -> np.ndarray:
    """(rows, k): where the largest of each row are, in order; of equal ones, the earlier first."""
    rows, n = x.shape
    if k < n:
        least = np.partition(x, n - k, axis=1)[:, n - k, None]  # the smallest that stays
        keep = x >= least
        if np.count_nonzero(keep) > rows * k:  # ties, of which only the first ones stay
            above, tied = x > least, x == least
            keep = above | (tied & (tied.cumsum(1) <= k - above.sum(1, keepdims=True)))
        columns = np.flatnonzero(keep).reshape(rows, k) % n
    else:
        columns = np.tile(np.arange(n), (rows, 1))
    order = np.argsort(-np.take_along_axis(x, columns, 1), axis=1, kind="stable")
    return np.take_along_axis(columns, order, 1)


# --- as they are gathered ------------------------------------------------------------------------


class All:
    """Everything: the query × train matrix, on the host."""

    def __init__(self, queries: int):
        self.parts: list[Array] = []
        self.names: list[Any] = []
        self._queries, self._pending = queries, 0

    def add(self, ids: Sequence[Any], x: Array) -> None:
        self.parts.append(x)
        self.names.extend(ids)
        # To fetch each block would make the host wait for the device each time.
        self._pending += x.shape[0] * x.shape[1] * 4
        if self._pending > _PENDING:
            self.parts, self._pending = [to_numpy(part) for part in self.parts], 0

    @property
    def values(self) -> np.ndarray:
        empty = [] if self.parts else [np.zeros((self._queries, 0), np.float32)]
        return np.concatenate([to_numpy(part) for part in self.parts] + empty, 1)


class Top:
    """The k best of each query so far, where the scores are: as values and numbers of rows."""

    def __init__(self, queries: int, k: int, largest: bool):
        self.k, self.sign = k, 1 if largest else -1
        self.best: Any = np.zeros((queries, 0), np.float32)
        self.numbers: Any = np.zeros((queries, 0), np.int64)
        self._ids: dict[int, Any] = {}  # of rows that were among the best when it was last asked
        self._recent: list[tuple[int, Sequence[Any]]] = []  # of all rows since
        self._count = self._since = 0
        self._bad: Any = None  # the first row that has no number for a score, on the device

    def add(self, ids: Sequence[Any], x: Array) -> None:
        if not len(ids):
            return
        self._recent.append((self._count, ids))
        on_device = namespace(x).__name__ == "torch" and x.device.type != "cpu"
        # -0.0 becomes 0.0: they are equal, whatever a sort of bits says.
        (self._add_tensor if on_device else self._add_host)(self.sign * x + 0.0)
        self._count += len(ids)
        if self._count - self._since > _RECENT:
            self._settle()

    def _add_host(self, x: Array) -> None:
        x = to_numpy(x)
        if np.isnan(x).any():
            self._raise_nan(self._count + int(np.isnan(x).any(0).argmax()))
        columns = best_columns(x, self.k)
        numbers = np.concatenate([self.numbers, self._count + columns], 1)
        both = np.concatenate([self.best, np.take_along_axis(x, columns, 1)], 1)
        order = best_columns(both, self.k)
        self.best = np.take_along_axis(both, order, 1)
        self.numbers = np.take_along_axis(numbers, order, 1)

    def _add_tensor(self, x: Any) -> None:
        """The same in torch, without waiting for the device."""
        torch = namespace(x)
        numbers = torch.arange(self._count, self._count + x.shape[1], device=x.device)
        never = torch.iinfo(torch.int64).max
        bad = torch.where(x.isnan().any(0), numbers, never).amin()
        self._bad = bad if self._bad is None else torch.minimum(self._bad, bad)
        both = torch.cat([torch.as_tensor(self.best, dtype=x.dtype, device=x.device), x], 1)
        before = torch.as_tensor(self.numbers, device=x.device)
        best, order = both.sort(dim=1, descending=True, stable=True)
        self.best, order = best[:, : self.k].clone(), order[:, : self.k]
        self.numbers = torch.cat([before, numbers.expand(len(x), -1)], 1).gather(1, order)

    def _raise_nan(self, number: int) -> None:
        bad = self._name()(number)
        raise ValueError(f"the score of row {bad!r} is not a number: is its gradient finite?")

    def _name(self) -> Callable[[int], Any]:
        starts = [start for start, _ in self._recent]

        def name(number: int) -> Any:
            if number in self._ids:
                return self._ids[number]
            start, ids = self._recent[bisect.bisect_right(starts, number) - 1]
            return ids[number - start]

        return name

    def _settle(self) -> np.ndarray:
        """Learn which rows are the best so far, and forget the ids of all others."""
        if self._bad is not None and int(self._bad) < self._count:
            self._raise_nan(int(self._bad))
        numbers, name = to_numpy(self.numbers), self._name()
        self._ids = {n: name(n) for n in np.unique(numbers).tolist()}
        self._recent, self._since = [], self._count
        return numbers

    @property
    def values(self) -> np.ndarray:
        return self.sign * to_numpy(self.best) + 0.0

    @property
    def names(self) -> list[list[Any]]:
        return [[self._ids[n] for n in row] for row in self._settle().tolist()]
