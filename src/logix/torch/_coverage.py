"""Which parameters of a model its watched units account for, and how large a row is."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping

from torch import nn

from ._units import Unit, inner, own_parameters, owners


@dataclasses.dataclass(frozen=True)
class Coverage:
    """Trained parameters, those that are covered, and what a reader should know about the rest."""

    layers: int
    covered: int
    total: int
    missing: tuple[str, ...]
    recomputed: tuple[str, ...]
    halved: tuple[str, ...]

    def __str__(self) -> str:
        share = 100 * self.covered / max(self.total, 1)
        text = f"{self.layers} layers, {self.covered:,} of {self.total:,} parameters ({share:.1f}%)"
        for what, names in (
            ("not covered", self.missing),
            ("without a rule, so computed again for each example", self.recomputed),
            ("shared with a layer that is not watched", self.halved),
        ):
            if names:
                text += f"; {what}: {', '.join(names[:5])}" + (" …" if len(names) > 5 else "")
        return text


def coverage(model: nn.Module, units: Mapping[str, Unit]) -> Coverage:
    """A parameter that several modules share counts once."""
    model = inner(model)
    frozen = not any(p.requires_grad for p in model.parameters())
    uses = Counter(id(p) for *_, own in owners(model) for p in own.values())
    own = {u.name: [own_parameters(u.module)[n] for n in u.layers] for u in units.values()}
    known = Counter(id(p) for parameters in own.values() for p in parameters)
    halved = (name for name, ps in own.items() if any(known[id(p)] < uses[id(p)] for p in ps))
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad or frozen]
    return Coverage(
        len(units),
        sum(p.numel() for _, p in trained if id(p) in known),
        sum(p.numel() for _, p in trained),
        tuple(n for n, p in trained if id(p) not in known),
        tuple(u.name for u in units.values() if u.how == "recomputed"),
        tuple(halved),
    )


def shapes(units: Mapping[str, Unit]) -> dict[str, tuple[int, ...]]:
    """Of the gradient of one example, by layer, in the order of a row."""
    out: dict[str, tuple[int, ...]] = {}
    for unit in units.values():
        for layer, shape in unit.shapes().items():
            out.setdefault(layer, shape)
    return out


def row_size(where: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in where.values())
