"""Small things around a run: ids for batches, logs put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ._array import namespace
from ._ids import content_ids

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
        first = batch
        while isinstance(first, dict) or (isinstance(first, tuple) and first):
            first = next(iter(first.values())) if isinstance(first, dict) else first[0]
        start, self._next = self._next, self._next + len(first)
        return list(range(start, self._next))


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
