"""Records from a PyTorch model, by hooks that are there only while they are needed.

A forward hook sees the input of a layer, and puts a hook on its output that sees the gradient. So
one forward and one backward pass of the user's own loss give, for every watched layer, what its
per-sample gradients are made of. The gradients of the weights themselves are not needed for that:
`weights=False` turns them off, which makes the pass cheaper than a training step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .._record import Lookup, Outer, Record, Whole
from ._layers import own_parameters, rule_for


def watched(
    model: nn.Module, type_filter: Any = None, name_filter: Any = None
) -> dict[str, nn.Module]:
    """The layers that have a rule, by name; those of some types, or with a word in their name."""
    kinds = tuple(type_filter) if type_filter else None
    words = [name_filter] if isinstance(name_filter, str) else name_filter
    found = {}
    for name, module in model.named_modules():
        if rule_for(module) is None or not any(True for _ in module.parameters(recurse=False)):
            continue
        if kinds is not None and not isinstance(module, kinds):
            continue
        if words is not None and not any(word in name for word in words):
            continue
        found[name] = module
    return found


class Capture:
    """The records of one batch. Filled by the backward pass inside of `with capture.hooks():`."""

    def __init__(self, layers: dict[str, nn.Module], mask: Tensor | None = None):
        self.layers, self.mask = layers, mask
        self._found: dict[str, list[Record]] = {}

    @contextlib.contextmanager
    def hooks(self, model: nn.Module, weights: bool = True) -> Iterator[None]:
        """Watch the layers of `model`. Afterwards it is as it was, whatever happens in between."""
        handles = [
            module.register_forward_hook(self._hook(name)) for name, module in self.layers.items()
        ]
        trained = [p for p in model.parameters() if p.requires_grad] if not weights else []
        for p in trained:
            p.requires_grad_(False)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for p in trained:
                p.requires_grad_(True)

    def _hook(self, name: str) -> Any:
        def after(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            if not torch.is_grad_enabled():
                return  # no gradient will come: it is computed again in the backward pass, or never
            x = inputs[0].detach()
            if not output.requires_grad:
                output.requires_grad_()  # the first layer, if its weights have no gradient

            def seen(g: Tensor) -> None:
                self._add(name, module, x, g.detach())

            output.register_hook(seen)

        return after

    def _add(self, name: str, module: nn.Module, x: Tensor, g: Tensor) -> None:
        g = self._masked(g)
        if x.is_floating_point():
            x = self._masked(x)  # what is not real counts in no covariance
        if g.dtype in (torch.float16, torch.bfloat16):
            g = g.float()  # sums over places would lose what they add
        rule = rule_for(module)
        assert rule is not None
        x = x if not x.is_floating_point() else x.to(g.dtype)
        for parameter, record in own_parameters(module, rule(module, x, g)):
            layer = name if parameter == "weight" else f"{name}.{parameter}"
            self._found.setdefault(layer, []).append(record)

    def _masked(self, x: Tensor) -> Tensor:
        """Zero at the places of (B, T, …) that the mask leaves out."""
        if self.mask is None or x.ndim < 3 or x.shape[:2] != self.mask.shape:
            return x
        return x * self.mask.to(x).reshape(*self.mask.shape, *(1,) * (x.ndim - 2))

    def records(self) -> list[Record]:
        """One record for each parameter, in the order of the layers. A layer that was called more
        than once has all its places in one."""
        order = [f"{name}{end}" for name in self.layers for end in ("", ".bias")]
        return [_together(layer, self._found[layer]) for layer in order if layer in self._found]


def _together(layer: str, records: list[Any]) -> Record:
    first = records[0]
    if isinstance(first, Outer):
        join = lambda part: torch.cat([getattr(r, part) for r in records], 1)
        return Outer(layer, join("a"), join("g"))
    if isinstance(first, Lookup):
        join = lambda part: torch.cat([getattr(r, part) for r in records], 1)
        return Lookup(layer, join("i"), join("g"), first.rows)
    return Whole(layer, sum((r.value for r in records[1:]), first.value))
