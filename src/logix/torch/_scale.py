"""By what a GradScaler multiplies a loss: gradients have to be divided by it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_LISTENERS: list[Callable[[Tensor], None]] = []
_KINDS: list[tuple[Any, Any]] = []  # types of scalers, and the `scale` each of them has itself


@contextlib.contextmanager
def scales(note: Callable[[Tensor], None]) -> Iterator[None]:
    """`note(scale)` is called for each loss that is scaled inside."""
    if not _LISTENERS:
        _listen(torch.amp.GradScaler)
    _LISTENERS.append(note)
    try:
        yield
    finally:
        _LISTENERS.remove(note)
        while _KINDS and not _LISTENERS:
            kind, scale = _KINDS.pop()
            kind.scale = scale


def _listen(kind: Any) -> None:
    for derived in kind.__subclasses__():
        _listen(derived)
    if "scale" not in vars(kind):
        return
    scale = vars(kind)["scale"]

    def noted(self: Any, outputs: Any) -> Any:
        out = scale(self, outputs)
        if self.is_enabled():
            first = outputs if isinstance(outputs, Tensor) else next(iter(outputs))
            by = scale(self, torch.ones((), device=first.device)).detach()
            for note in list(_LISTENERS):
                note(by)
        return out

    _KINDS.append((kind, scale))
    kind.scale = noted
