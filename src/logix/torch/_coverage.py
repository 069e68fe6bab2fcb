"""Which parameters of a model its watched layers account for."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

NAMES = ("weight", "bias")  # the parameters that rules have records for


@dataclasses.dataclass(frozen=True)
class Coverage:
    """Trainable parameters, those that are covered, and the names of those that are not."""

    layers: int
    covered: int
    total: int
    missing: tuple[str, ...]

    def __str__(self) -> str:
        share = 100 * self.covered / max(self.total, 1)
        text = f"{self.layers} layers, {self.covered:,} of {self.total:,} parameters ({share:.1f}%)"
        if self.missing:
            shown = ", ".join(self.missing[:5])
            text += f"; not covered: {shown}" + (" …" if len(self.missing) > 5 else "")
        return text


def coverage(model: nn.Module, layers: dict[str, nn.Module]) -> Coverage:
    """A parameter that several modules share counts once."""
    known: set[int] = set()
    for module in layers.values():
        own: list[Any] = [getattr(module, name, None) for name in NAMES]
        known |= {id(p) for p in own if p is not None}
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    covered = sum(p.numel() for _, p in trained if id(p) in known)
    missing = tuple(n for n, p in trained if id(p) not in known)
    return Coverage(len(layers), covered, sum(p.numel() for _, p in trained), missing)
