"""Small things around a run: ids for batches, logs put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ._array import namespace, to_numpy
from .store._ids import as_ids, content_ids

__all__ = ["DataIDGenerator", "merge_logs"]
MODES = ("hash", "index")


class DataIDGenerator:
    """Ids for batches: of their content, or a running number.

    >>> from logix.utils import DataIDGenerator
    >>> number = DataIDGenerator(mode="index")
    >>> number(["a", "b"]), number(["c"])
    ([0, 1], [2])

    Arguments:

    - `mode`: `"hash"`: equal examples have equal ids, in any run; `"index"`: 0, 1, 2 …
    """

    def __init__(self, mode: str = "hash"):
        if mode not in MODES:
            raise ValueError(f"mode={mode!r} is not one of {', '.join(MODES)}")
        self.mode, self._next = mode, 0

    def __call__(self, batch: Any) -> list[Any]:
        """An id for each example of a batch: an array, or several arrays of the same length."""
        if self.mode == "hash":
            return content_ids(batch)
        start, self._next = self._next, self._next + _length(batch)
        return list(range(start, self._next))


def given_ids(data_id: Any) -> list[Any]:
    """Ids as they are given; of a batch, ids of its content."""
    if isinstance(data_id, str | bytes):
        raise TypeError(f"data_id={data_id!r} is one id, and each example needs one: give a list")
    if isinstance(data_id, range):
        return as_ids(data_id)
    plain = str, int, np.integer
    if isinstance(data_id, list | tuple):
        scalars = [x.item() if getattr(x, "ndim", None) == 0 else x for x in data_id]
        if all(isinstance(x, plain) for x in scalars):
            return as_ids(scalars)
    array = to_numpy(data_id) if hasattr(data_id, "dtype") else data_id
    if isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype.kind in "iuU":
        return as_ids(array)
    return content_ids(array)


def _length(batch: Any) -> int:
    """Examples of a batch: a list of arrays is one of several parts, as data loaders give it."""
    if isinstance(batch, Mapping):
        return _length(next(iter(batch.values())))
    plain = str | int | float | np.generic
    several = isinstance(batch, list | tuple) and len(batch) > 0 and not isinstance(batch[0], plain)
    return _length(batch[0]) if several else len(batch)


def merge_logs(logs: Sequence[tuple[Sequence[Any], dict[str, dict[str, Any]]]]) -> Any:
    """One log of several: their examples one after another.

    >>> import numpy as np
    >>> from logix.utils import merge_logs
    >>> one = (["a"], {"fc": {"grad": np.zeros((1, 2))}})
    >>> two = (["b"], {"fc": {"grad": np.ones((1, 2))}})
    >>> ids, layers = merge_logs([one, two])
    >>> ids, layers["fc"]["grad"].tolist()
    (['a', 'b'], [[0.0, 0.0], [1.0, 1.0]])
    """
    if not logs:
        return [], {}
    ids = [i for some, _ in logs for i in some]
    first = logs[0][1]
    for _, layers in logs:
        if {k: set(v) for k, v in layers.items()} != {k: set(v) for k, v in first.items()}:
            raise ValueError(
                f"the logs are of different layers or kinds: {sorted(layers)} and {sorted(first)}"
            )
    join = lambda xs: (np if isinstance(xs[0], np.ndarray) else namespace(xs[0])).concatenate(xs, 0)
    both = {
        layer: {kind: join([layers[layer][kind] for _, layers in logs]) for kind in kinds}
        for layer, kinds in first.items()
    }
    return ids, both
