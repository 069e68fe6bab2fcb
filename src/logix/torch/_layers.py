"""What each kind of layer is to the engine: a table from module type to its records.

A rule takes the module, its input and the gradient of its output, both with the batch in front, and
gives the records of its parameters. Names are those of the parameters: `weight`, `bias`.

    rule : (module, x, g) -> {parameter name: record}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._record import Lookup, Outer, Record, Whole

Records = dict[str, Record]
Rule = Callable[[Any, Tensor, Tensor], Records]
RULES: dict[type, Rule] = {}


def rule(*kinds: type) -> Callable[[Rule], Rule]:
    def register(fun: Rule) -> Rule:
        for kind in kinds:
            RULES[kind] = fun
        return fun

    return register


def rule_for(module: nn.Module) -> Rule | None:
    """The rule of a module's own type or of the nearest type it is derived from."""
    return next((RULES[kind] for kind in type(module).__mro__ if kind in RULES), None)


def places(x: Tensor) -> Tensor:
    """(B, …, D) as (B, T, D): all axes between the batch and the last are places."""
    return x.reshape(x.shape[0], -1, x.shape[-1])


@rule(nn.Linear)
def _linear(module: nn.Linear, x: Tensor, g: Tensor) -> Records:
    g = places(g)
    return {"weight": Outer("weight", places(x), g), "bias": Whole("bias", g.sum(1))}


@rule(nn.Embedding)
def _embedding(module: nn.Embedding, x: Tensor, g: Tensor) -> Records:
    ids, g = x.reshape(len(x), -1), places(g)
    if module.padding_idx is not None:
        g = g * (ids != module.padding_idx).unsqueeze(-1)  # that row is not trained
    return {"weight": Lookup("weight", ids, g, module.num_embeddings)}


@rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def _conv(module: Any, x: Tensor, g: Tensor) -> Records:
    a, g = _patches(module, x), g.flatten(2).transpose(1, 2)  # (B, T, C·k), (B, T, O)
    bias = {"bias": Whole("bias", g.sum(1))}
    if module.groups == 1:
        return {"weight": Outer("weight", a, g), **bias}
    # A group of outputs sees only its own inputs: the weight is (O, C / groups, k …).
    n = module.groups
    size = math.prod(module.weight.shape[1:])
    a = a.reshape(*a.shape[:2], n, size)
    g = g.reshape(*g.shape[:2], n, -1)
    grad = torch.einsum("btno,btni->bnoi", g, a).reshape(len(g), *module.weight.shape)
    return {"weight": Whole("weight", grad), **bias}


def _patches(module: Any, x: Tensor) -> Tensor:
    """What the kernel sees at each place, (B, T, C·k), for any number of spatial axes."""
    dims = len(module.kernel_size)
    if module.padding_mode != "zeros":
        x = F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)
    elif module.padding == "same":
        total = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size)]
        x = F.pad(x, [p for t in reversed(total) for p in (t // 2, t - t // 2)])
    elif module.padding != "valid":
        x = F.pad(x, [p for p in reversed(module.padding) for _ in range(2)])
    settings = zip(module.kernel_size, module.stride, module.dilation)
    for axis, (kernel, stride, dilation) in enumerate(settings, start=2):
        x = x.unfold(axis, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
    # (B, C, places …, kernel …) -> (B, places …, C, kernel …)
    spatial = list(range(2, 2 + dims))
    x = x.permute(0, *spatial, 1, *range(2 + dims, 2 + 2 * dims))
    return x.reshape(x.shape[0], math.prod(x.shape[1 : 1 + dims]), -1)


@rule(nn.LayerNorm)
def _layer_norm(module: nn.LayerNorm, x: Tensor, g: Tensor) -> Records:
    normal = F.layer_norm(x, module.normalized_shape, eps=module.eps)
    return _scale_and_shift(normal, g, len(module.normalized_shape))


@rule(nn.RMSNorm)
def _rms_norm(module: nn.RMSNorm, x: Tensor, g: Tensor) -> Records:
    normal = F.rms_norm(x, module.normalized_shape, eps=module.eps)
    return _scale_and_shift(normal, g, len(module.normalized_shape))


@rule(nn.GroupNorm)
def _group_norm(module: nn.GroupNorm, x: Tensor, g: Tensor) -> Records:
    normal = F.group_norm(x, module.num_groups, eps=module.eps)
    sum_of = lambda y: y.flatten(2).sum(2)
    return {"weight": Whole("weight", sum_of(g * normal)), "bias": Whole("bias", sum_of(g))}


def _scale_and_shift(normal: Tensor, g: Tensor, dims: int) -> Records:
    def summed(y: Tensor) -> Tensor:
        shape = y.shape[y.ndim - dims :]
        return y.reshape(len(y), -1, *shape).sum(1)

    return {"weight": Whole("weight", summed(g * normal)), "bias": Whole("bias", summed(g))}


def own_parameters(module: nn.Module, records: Records) -> Iterator[tuple[str, Record]]:
    """The records of parameters that the module really has."""
    for name, record in records.items():
        if getattr(module, name, None) is not None:
            yield name, record
