"""Logs by module, `(ids, {module: {"grad": array}})`: of what was saved, and as rows again.

`LogDataset` and `LogLoader` give what was saved; their arrays are torch's if torch is imported in
this process, else NumPy's. `log_rows` makes rows of any log, with its layers found by their names.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ._array import Array, to_numpy
from ._compress import Layout, flatten, layout
from .store._reader import RowStore

Log = tuple[Sequence[Any], Any]  # ids, {layer: {"grad": (B, …)}} or rows (B, D)

Modules = dict[str, dict[str, Array]]  # {module: {"grad" | "forward" | "backward": array}}


class LogDataset:
    """One example at a time, by its place: `(id, {module: {"grad": array}})`, or `(id, row)`.

    It is what `torch.utils.data.DataLoader` takes as a dataset, in its worker processes too.

    Arguments:

    - `store`: the rows.
    - `flatten`: rows as they are stored, all modules one after the other.
    """

    def __init__(self, store: RowStore, flatten: bool = False):
        self.store, self.flatten = store, flatten

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> tuple[Any, Array | Modules]:
        place = range(len(self))[index]  # negative ones from the end; IndexError after it
        ids, rows = self.batch(place, place + 1)
        if self.flatten:
            return ids[0], rows[0]
        return ids[0], {n: {k: x[0] for k, x in logs.items()} for n, logs in rows.items()}

    def batch(self, start: int, stop: int) -> tuple[list[Any], Any]:
        """The rows of these places together."""
        rows = np.array(self.store.rows(start, stop))  # the caller's own: it may be written to
        torch = sys.modules.get("torch")
        array = rows if torch is None else torch.from_numpy(rows)
        ids = self.store.ids_of(start, stop)
        return ids, array if self.flatten else modules(array, self.store.manifest["layout"])


class LogLoader:
    """All of a store in batches, in its order.

    >>> import tempfile, numpy as np
    >>> from logix.store import RowStore, RowWriter
    >>> path = tempfile.mkdtemp()
    >>> with RowWriter(path, [dict(name="fc", shape=(2, 3), offset=0)]) as writer:
    ...     writer.append(["a", "b", "c"], np.ones((3, 6)))
    3
    >>> for ids, logs in LogLoader(RowStore(path), batch_size=2):
    ...     print(ids, tuple(logs["fc"]["grad"].shape))
    ['a', 'b'] (2, 2, 3)
    ['c'] (1, 2, 3)

    Arguments:

    - `store`: the rows. `compute_influence_all` reads them by itself, in larger blocks.
    - `batch_size`: of all batches but the last.
    - `num_workers`: batches that a thread prepares ahead; reading needs no processes.
    - `pin_memory`: tensors in pinned memory, where there is a GPU.
    - `flatten`: `(ids, rows)`, all modules one after the other.
    """

    def __init__(
        self,
        store: RowStore,
        batch_size: int = 16,
        num_workers: int = 0,
        pin_memory: bool = False,
        flatten: bool = False,
    ):
        if batch_size < 1 or num_workers < 0:
            raise ValueError(
                f"batch_size={batch_size}, num_workers={num_workers}: at least 1 and 0 are needed"
            )
        self.dataset, self.store = LogDataset(store, flatten), store
        self.batch_size, self.num_workers, self.pin_memory = batch_size, num_workers, pin_memory
        self.flatten = flatten

    def __len__(self) -> int:
        return -(-len(self.store) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[list[Any], Any]]:
        starts = iter(range(0, len(self.store), self.batch_size))
        if not self.num_workers:
            yield from map(self._batch, starts)
            return
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            order = lambda n: [pool.submit(self._batch, s) for s in itertools.islice(starts, n)]
            waiting = collections.deque(order(self.num_workers))
            while waiting:
                ready = waiting.popleft().result()
                waiting.extend(order(1))
                yield ready

    def _batch(self, start: int) -> tuple[list[Any], Any]:
        ids, rows = self.dataset.batch(start, min(start + self.batch_size, len(self.store)))
        torch = sys.modules.get("torch")
        if self.pin_memory and torch is not None and torch.cuda.is_available():
            if self.flatten:
                return ids, rows.pin_memory()
            rows = {n: {k: x.pin_memory() for k, x in m.items()} for n, m in rows.items()}
        return ids, rows


def modules(rows: Array, layout: list[dict[str, Any]]) -> Modules:
    """Rows (B, D) cut into what they are made of, by the layout of their store."""
    out: Modules = {}
    for part in layout:
        start, shape = part["offset"], tuple(part["shape"])
        cut = rows[:, start : start + math.prod(shape)].reshape(len(rows), *shape)
        out.setdefault(part["name"], {})[part.get("kind", "grad")] = cut
    return out


# --- a log as rows -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Layers:
    """What rows are made of: the gradients of these layers, and then maybe other logs."""

    where: Layout
    owner: str
    size: int  # of a row, with all that comes after the gradients

    @classmethod
    def of(cls, store: RowStore) -> Layers:
        if not store.grads:
            raise ValueError(f"{store.path} holds no gradients. Save them: setup with 'grad'.")
        return cls(store.grads, f"the store {store.path}", store.type.dim)

    @property
    def width(self) -> int:
        return sum(math.prod(shape) for _, shape, _ in self.where)

    def differences(self, grads: Mapping[str, Array]) -> list[str]:
        """In words: layers that are missing, additional, or of another shape."""
        own = {name: tuple(shape) for name, shape, _ in self.where}
        found = {name: tuple(g.shape[1:]) for name, g in grads.items()}
        # Axes of one entry are a matter of taste: a convolution's bias is (O,) or (O, 1, 1).
        plain = lambda shape: [n for n in shape if n != 1]
        other = [n for n in own if n in found and plain(own[n]) != plain(found[n])]
        kinds = {
            "missing": [f"{n!r} {own[n]}" for n in own if n not in found],
            "additional": [f"{n!r} {found[n]}" for n in found if n not in own],
            "of another shape": [f"{n!r} {found[n]} instead of {own[n]}" for n in other],
        }
        return [f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names]


def log_gradients(log: Log) -> Mapping[str, Array] | None:
    """By layer; None if the log is a matrix of rows."""
    if not isinstance(log, tuple | list) or len(log) != 2:
        raise TypeError(
            f"a log is (ids, {{layer: {{'grad': rows}}}}), and this is {type(log).__name__}. "
            "Get one by run.get_log() after a batch."
        )
    if not isinstance(log[1], Mapping):
        return None
    return {name: kinds["grad"] for name, kinds in log[1].items() if "grad" in kinds}


def log_rows(
    log: Log, who: str, wanted: Layers | None = None, device: Any = None
) -> tuple[list[Any], Array, Layers]:
    """The ids and rows of a log, with its layers in the order that is wanted, or in its own."""
    grads, ids = log_gradients(log), listed(log[0])
    if grads is None:
        rows = log[1]
        width = rows.shape[1]
        if wanted is not None and width not in (wanted.width, wanted.size):
            raise ValueError(
                f"{who} has rows of {width} values, and {wanted.owner} of {wanted.width}. "
                "Log both with the same watch(…) and the same compression."
            )
        wanted = wanted or Layers([("rows", (width,), 0)], who, width)
        rows = rows[:, : wanted.width]
    else:
        if not grads:
            raise ValueError(f"{who} has no 'grad' of any layer. Log it: setup({{'log': 'grad'}}).")
        shapes = layout({name: tuple(g.shape[1:]) for name, g in grads.items()})
        wanted = wanted or Layers(shapes, who, 0)
        if found := wanted.differences(grads):
            raise ValueError(
                f"the layers of {who} are not those of {wanted.owner}; {'; '.join(found)}. "
                "Log both with the same watch(…) and the same compression."
            )
        rows = flatten(grads, wanted.where)
    if len(ids) != len(rows):
        raise ValueError(f"{who} has {len(ids)} ids for {len(rows)} rows")
    if device is not None:
        import torch

        rows = (rows if isinstance(rows, torch.Tensor) else torch.tensor(to_numpy(rows))).to(device)
    return ids, rows, wanted


def listed(ids: Any) -> list[Any]:
    return ids.tolist() if hasattr(ids, "tolist") else list(ids)
