"""What each kind of layer is to the engine: a table from module type to its records.

A rule takes the module, its input and the gradient of its output, both with the batch in front, and
gives the records of its parameters. Names are those of the parameters: `weight`, `bias`.

    rule : (module, x, g) -> {parameter name: record}

Types of packages that may not be there are named by text, "package.module.Type".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._record import Lookup, Outer, Record, Whole
from ._watch import own_type

Records = dict[str, Record] | dict[str, Any]
Rule = Callable[[Any, Tensor, Tensor], Records]
RULES: dict[type | str, Rule] = {}


def rule(*kinds: type | str) -> Callable[[Rule], Rule]:
    """Teaches logix a type of module: from a call's input and gradient to those of the parameters.

    >>> import torch, logix.torch
    >>> class Scale(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.by = torch.nn.Parameter(torch.ones(3))
    ...
    ...     def forward(self, x):
    ...         return self.by * x
    >>> @logix.torch.rule(Scale)
    ... def scale(module, x, g):
    ...     return {"by": (g * x).reshape(len(x), -1, 3).sum(1)}

    Arguments:

    - `kinds`: types, or their full names ("package.module.Type", with `*` for any part). A type
      derived from one of them has the same rule, unless it has a `forward` of its own.

    The rule is called with the module, its (first) input and the gradient of its (first) output,
    both with the examples in front. It gives, by the name of each parameter, a tensor with the
    gradient of each example, (examples, …); or `logix.torch.Outer("", a, g)` for a matrix that is
    applied to `a` (examples, places, in), whose output has the gradients `g` (examples, places,
    out): that is compressed without ever being multiplied out. A module without a rule is computed
    again for each example, which is slower.
    """

    def register(fun: Rule) -> Rule:
        for kind in kinds:
            if not isinstance(kind, str) and not (
                isinstance(kind, type) and issubclass(kind, nn.Module)
            ):
                raise TypeError(f"rule({kind!r}): a type of modules or its full name is needed")
            RULES[kind] = fun
        return fun

    if not kinds:
        raise TypeError("rule() is for no type. Write @rule(MyLayer) above the function.")
    return register


def rule_for(module: nn.Module) -> Rule | None:
    """The rule of a module's own type or of the nearest type it is derived from, if that knows it.

    It does not if the module computes something else (a `forward` of its own) or if it has
    parameters that the types below know nothing of.
    """
    own: Any = own_type(module)
    for kind in own.__mro__:
        found = RULES.get(kind) or _by_name(f"{kind.__module__}.{kind.__qualname__}")
        if found is not None:
            extra = {name for name, _ in module.named_parameters()} - {"weight", "bias"}
            ours = found.__module__ == __name__
            same = own.forward is kind.forward and not {"forward", "logix_forward"} & {
                *vars(module)
            }
            return found if same and not (ours and extra) else None
    return _other_rms_norm if _is_rms_norm(module) else None


def _by_name(name: str) -> Rule | None:
    texts = [kind for kind in RULES if isinstance(kind, str)]
    return next((RULES[text] for text in reversed(texts) if fnmatchcase(name, text)), None)


def places(x: Tensor) -> Tensor:
    """(B, …, D) as (B, T, D): all axes between the batch and the last are places."""
    return x.reshape(x.shape[0], -1, x.shape[-1])


def wide(x: Tensor) -> Tensor:
    """In float32 at least: what is summed or normalised in bfloat16 would be rounded."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def total(x: Tensor, axis: int = 1) -> Tensor:
    if x.shape[axis] == 1:
        return wide(x.squeeze(axis))
    return x.sum(axis, dtype=torch.promote_types(x.dtype, torch.float32))


@rule(nn.Linear)
def _linear(module: nn.Linear, x: Tensor, g: Tensor) -> Records:
    g = places(g)
    return {"weight": Outer("", places(x), g), "bias": Whole("", total(g))}


@rule("transformers.pytorch_utils.Conv1D")
def _transposed_linear(module: Any, x: Tensor, g: Tensor) -> Records:
    g = places(g)  # the weight is (in, out), and so is its gradient
    return {"weight": Outer("", g, places(x)), "bias": Whole("", total(g))}


@rule(nn.Embedding)
def _embedding(module: nn.Embedding, x: Tensor, g: Tensor) -> Records:
    if module.scale_grad_by_freq:
        raise ValueError(
            "scale_grad_by_freq divides by what all examples of a batch have in common"
        )
    g = places(g)
    ids = x.reshape(-1, g.shape[1]).expand(len(g), -1)  # the same for all, or those of each
    if module.padding_idx is not None:
        g = g * (ids != module.padding_idx).unsqueeze(-1)  # that row is not trained
    return {"weight": Lookup("", ids, g, module.num_embeddings)}


@rule("transformers.models.*ScaledWordEmbedding")
def _scaled_embedding(module: Any, x: Tensor, g: Tensor) -> Records:
    scale = torch.as_tensor(module.embed_scale, dtype=module.weight.dtype, device=g.device)
    return _embedding(module, x, g * scale)


@rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def _conv(module: Any, x: Tensor, g: Tensor) -> Records:
    a, g = _patches(module, x), g.flatten(2).transpose(1, 2)  # (B, T, C·k), (B, T, O)
    bias = {"bias": Whole("", total(g))}
    if module.groups == 1:
        return {"weight": Outer("", a, g), **bias}
    # A group of outputs sees only its own inputs: the weight is (O, C / groups, k …).
    n = module.groups
    a, g = (wide(y).reshape(*y.shape[:2], n, -1) for y in (a, g))
    grad = torch.einsum("btno,btni->bnoi", g, a).reshape(len(g), *module.weight.shape)
    return {"weight": Whole("", grad), **bias}


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
    normal = F.layer_norm(wide(x), module.normalized_shape, eps=module.eps)
    return _scale_and_shift(normal, g, len(module.normalized_shape))


@rule(nn.RMSNorm)
def _rms_norm(module: nn.RMSNorm, x: Tensor, g: Tensor) -> Records:
    eps = torch.finfo(x.dtype).eps if module.eps is None else module.eps
    normal = F.rms_norm(wide(x), module.normalized_shape, eps=eps)
    return _scale_and_shift(normal, g, len(module.normalized_shape))


def _is_rms_norm(module: nn.Module) -> bool:
    """Whether this is someone's own RMSNorm, scaled by w or 1 + w: by its name, and by trying."""
    weight, eps = getattr(module, "weight", None), _eps(module)
    named = "rmsnorm" in own_type(module).__name__.lower() and len(list(module.parameters())) == 1
    if not named or not isinstance(weight, nn.Parameter) or weight.ndim != 1 or eps is None:
        return False
    if hasattr(weight, "to_local"):  # a part of it: to try would need the other processes
        return False
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        x = torch.arange(3 * len(weight), device=weight.device).sin().reshape(1, 3, -1)
        try:
            y = module(x.to(weight.dtype))
        except (TypeError, RuntimeError):
            return False
        normal, w = _rms_normal(x.to(weight.dtype), eps), wide(weight)
        near = lambda scale: torch.allclose(wide(y), scale * normal, rtol=0.02, atol=1e-3)
        return isinstance(y, Tensor) and (near(w) or near(1 + w))


def _eps(module: Any) -> float | None:
    found = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return found if isinstance(found, float) else None


def _rms_normal(x: Tensor, eps: float) -> Tensor:
    return wide(x) * (wide(x).square().mean(-1, keepdim=True) + eps).rsqrt()


def _other_rms_norm(module: Any, x: Tensor, g: Tensor) -> Records:
    eps = _eps(module)
    assert eps is not None
    return {"weight": _scale_and_shift(_rms_normal(x, eps), g, 1)["weight"]}


@rule(nn.GroupNorm)
def _group_norm(module: nn.GroupNorm, x: Tensor, g: Tensor) -> Records:
    normal = F.group_norm(wide(x), module.num_groups, eps=module.eps)
    sum_of = lambda y: total(y.flatten(2), 2)
    return {"weight": Whole("", sum_of(g * normal)), "bias": Whole("", sum_of(g))}


@rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def _batch_norm(module: Any, x: Tensor, g: Tensor) -> Records:
    if module.training or module.running_mean is None:
        raise ValueError(
            "in training mode it normalises over the batch, so no example has a gradient of its "
            "own. Call model.eval() before logging"
        )
    shape = (1, -1, *(1,) * (x.ndim - 2))
    spread = (module.running_var + module.eps).rsqrt()
    normal = (wide(x) - module.running_mean.view(shape)) * spread.view(shape)
    sum_of = lambda y: total(y.reshape(*y.shape[:2], -1), 2)
    return {"weight": Whole("", sum_of(g * normal)), "bias": Whole("", sum_of(g))}


def _scale_and_shift(normal: Tensor, g: Tensor, dims: int) -> Records:
    def summed(y: Tensor) -> Tensor:
        return total(y.reshape(len(y), -1, *y.shape[y.ndim - dims :]))

    return {"weight": Whole("", summed(g * normal)), "bias": Whole("", summed(g))}
