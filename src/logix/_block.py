"""The block around a batch: `with run(data_id=ids):`."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any


class Block(contextlib.AbstractContextManager[None]):
    """What `run(…)` returns. Without `with` nothing would be logged, which it says."""

    def __init__(self, inside: contextlib.AbstractContextManager[None]):
        self._inside, self._entered = inside, False

    def __enter__(self) -> None:
        self._entered = True
        self._inside.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._inside.__exit__(*error)

    def __del__(self) -> None:
        if not self._entered:
            warnings.warn(
                "run(data_id=…) by itself logs nothing. Write `with run(data_id=…):` around the "
                "forward and backward pass, or run.start(data_id=…) before and run.end() after it.",
                RuntimeWarning,
                stacklevel=2,
            )
