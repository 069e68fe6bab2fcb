"""Layers that a model calls once for all examples of a batch, as it may do for positions.

What they compute is added to every example alike, so the gradient that comes back is the sum over
the examples, and none of them has one of its own. (An embedding of a row of positions is no such
layer: its output gets an axis for the examples before it is added.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def called_once(
    model: nn.Module, two: Callable[[], Any], one: Callable[[], Any]
) -> dict[str, nn.Parameter]:
    """The trained parameters of layers whose input does not grow with the number of examples.

    `two` and `one` run the model forward with an example twice, and with that example alone.
    """
    own = {
        name: module
        for name, module in model.named_modules()
        if any(p.requires_grad for p in module.parameters(recurse=False))
    }
    twice, once = _inputs(own, two), _inputs(own, one)
    names = [
        name
        for name, x in twice.items()
        if name in once and not _row(own[name], x) and len(x) != 2 * len(once[name])
    ]
    return {
        f"{name}.{key}": p
        for name in names
        for key, p in own[name].named_parameters(recurse=False)
        if p.requires_grad
    }


def _inputs(layers: dict[str, nn.Module], run: Callable[[], Any]) -> dict[str, Tensor]:
    """The first tensor that each layer is called with."""
    found: dict[str, Tensor] = {}

    def look(name: str) -> Any:
        def seen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
            if x is not None and x.ndim:
                found[name] = x

        return seen

    handles = [m.register_forward_pre_hook(look(n), with_kwargs=True) for n, m in layers.items()]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return found


def _row(module: nn.Module, x: Tensor) -> bool:
    return isinstance(module, nn.Embedding) and (x.ndim == 1 or x.shape[:-1] == (1,))
