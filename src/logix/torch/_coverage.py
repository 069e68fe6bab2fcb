"""Which parameters of a model its watched units account for, and how large a row is."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping

from torch import nn

from ._units import Unit, inner, own_parameters, owners
from ._watch import own_type


@dataclasses.dataclass(frozen=True)
class Coverage:
    """Trained parameters, those that are covered, and what a reader should know about the rest."""

    layers: int
    covered: int
    total: int
    missing: tuple[str, ...]  # parameters
    recomputed: tuple[str, ...]  # types of modules
    halved: tuple[str, ...]  # layers
    shared: tuple[str, ...]  # "layer = module = module"

    def __str__(self) -> str:
        share = 100 * self.covered / max(self.total, 1)
        layers = "1 layer" if self.layers == 1 else f"{self.layers} layers"
        text = f"{layers}, {self.covered:,} of {self.total:,} parameters ({share:.1f}%)"
        for what, names in (
            ("not covered", self.missing),
            ("shared weights, counted once", self.shared),
            ("shared with a module that is not watched, so a part is not seen", self.halved),
            ("without a rule, so computed again for each example", self.recomputed),
        ):
            if names:
                text += f"; {what}: {', '.join(names[:5])}" + (" …" if len(names) > 5 else "")
        return text


def coverage(model: nn.Module, units: Mapping[str, Unit]) -> Coverage:
    """What the units see of the model. A parameter that several modules share counts once."""
    model = inner(model)
    frozen = not any(p.requires_grad for p in model.parameters())
    uses = Counter(id(p) for *_, own in owners(model) for p in own.values())
    known: dict[int, list[str]] = {}  # the modules that see a parameter
    labels: dict[int, str] = {}
    for unit in units.values():
        own = own_parameters(unit.module)
        for parameter, layer in unit.layers.items():
            key = id(own[parameter])
            known.setdefault(key, []).append(unit.name)
            labels.setdefault(key, layer)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad or frozen]
    again = Counter(own_type(u.module).__name__ for u in units.values() if u.how == "recomputed")
    return Coverage(
        len(units),
        sum(p.numel() for _, p in trained if id(p) in known),
        sum(p.numel() for _, p in trained),
        tuple(n for n, p in trained if id(p) not in known),
        tuple(name if n == 1 else f"{n} {name}" for name, n in again.items()),
        tuple(labels[k] for k, seen in known.items() if len(seen) < uses[k]),
        tuple(" = ".join([labels[k], *seen[1:]]) for k, seen in known.items() if len(seen) > 1),
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
