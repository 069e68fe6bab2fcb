"""What becomes of examples whose gradients are not finite: a policy, and a count.

error   they are told, and nothing of their batch is logged
skip    they are left out, of rows and statistics
keep    their rows are saved as they are; statistics, which they would spoil, leave them out
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ._array import Array, as_float, precise, to_numpy
from ._record import Outer, Record, Whole

POLICIES = ("error", "skip", "keep")


class Finite:
    """The policy of one run, and the examples it has met."""

    def __init__(self, policy: str):
        if policy not in POLICIES:
            raise ValueError(f"nonfinite={policy!r} is not one of {', '.join(POLICIES)}")
        self.policy = policy
        self.count = 0
        self._some: list[Any] = []

    def note(self, ids: Sequence[Any], good: np.ndarray, layer: str) -> None:
        """Count the examples that are not good, or raise."""
        bad = [i for i, yes in zip(ids, good) if not yes]
        if self.policy == "error" and not bad:
            raise ValueError(
                "the gradients of some examples of another process are not finite; it tells which. "
                'Nothing of this batch was logged: leave these out, or pass nonfinite="skip".'
            )
        if self.policy == "error":
            raise ValueError(
                f"the gradient of {', '.join(map(repr, bad))} is not finite in layer {layer!r}, "
                "and would spoil scores and statistics. Nothing of this batch was logged: leave "
                'these out, or pass nonfinite="skip".'
            )
        self.count += len(bad)
        self._some += bad[: 5 - len(self._some)]

    def told(self) -> str:
        """What to say of them at the end of a pass, once; nothing if there were none."""
        if not self.count:
            return ""
        ids = ", ".join(map(repr, self._some)) + (" …" if self.count > len(self._some) else "")
        left = "left out" if self.policy == "skip" else "saved, and left out of statistics"
        n = "1 example" if self.count == 1 else f"{self.count:,} examples"
        text = f"{n} with gradients that are not finite: {left} ({ids})"
        self.count, self._some = 0, []
        return text


def finite(records: Sequence[Record]) -> tuple[np.ndarray, str] | None:
    """Which examples are finite, and a layer in which one is not; None: all are."""
    total: Any = 0.0
    for record in records:
        for x in _floats(record):
            with precise(x):
                total = total + x.sum()  # finite only if all of it is
    if float(total) - float(total) == 0:
        return None
    good, layer = None, ""
    for record in records:
        for x in _floats(record):
            own = np.isfinite(to_numpy(as_float(x)).reshape(len(x), -1)).all(axis=1)
            layer = layer if own.all() or layer else record.layer
            good = own if good is None else good & own
    return None if good is None or good.all() else (good, layer)  # a sum may overflow by itself


def _floats(record: Record) -> list[Array]:
    found = (record.value,) if isinstance(record, Whole) else (record.g,)
    return [*found, record.a] if isinstance(record, Outer) else [*found]
