"""Mixtures of experts whose matrices are stacked in one parameter, as transformers has them.

Such a module is called with tokens (N, D), the experts of each token (N, k) and their weights
(N, k). Each expert is a layer of its own, and sees some of the tokens of each example:

    h = up x        a = gate(h)        y = down a        output += w y

The gradients of `h` are found by computing `h` and `a` again from the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._record import Outer, Record, Whole

_NEEDED = ("has_gate", "has_bias", "is_transposed", "_apply_gate", "down_proj", "num_experts")


def is_experts(module: nn.Module) -> bool:
    """Whether it keeps to the interface that transformers gives such modules."""
    return all(hasattr(module, name) for name in _NEEDED) and not getattr(
        module, "has_post_expert_norm", False
    )


def records(
    module: Any,
    inputs: list[Tensor],
    g: Tensor,
    n: int,
    masked: Callable[[Tensor], Tensor] = lambda x: x,
) -> dict[str, list[Record]]:
    """{parameter: the record of each expert}, for a call with `n` examples."""
    x, *routing = inputs
    chosen = next(t for t in routing if not t.is_floating_point())  # (N, k)
    weights = next(t for t in routing if t.is_floating_point())
    x, g = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
    example = torch.arange(n, device=x.device).repeat_interleave(len(x) // n)
    keep = masked(torch.ones((n, len(x) // n, 1), device=x.device)).reshape(-1, 1) != 0
    chosen = chosen.reshape(len(x), -1).where(keep, -1)  # what does not count goes to no expert
    weights = weights.reshape(chosen.shape)
    first = "gate_up_proj" if module.has_gate else "up_proj"
    out: dict[str, list[Record]] = {}
    for e in range(module.num_experts):
        token, slot = torch.where(chosen == e)
        up, up_bias = _expert(module, first, e)
        down, _ = _expert(module, "down_proj", e)
        g_y = g[token] * weights[token, slot, None].to(g.dtype)
        with torch.enable_grad():
            h = F.linear(x[token].to(up.dtype), up, up_bias).detach().requires_grad_()
            a = module._apply_gate(h) if module.has_gate else module.act_fn(h)
        (g_h,) = torch.autograd.grad(a, h, (g_y.to(down.dtype) @ down).to(a.dtype))
        rows = [_by_example(t, example[token], n) for t in (x[token], g_h, a.detach(), g_y)]
        real = _by_example(x.new_ones((len(token), 1)), example[token], n)[..., 0] != 0
        for name, (left, right) in {first: (rows[1], rows[0]), "down_proj": rows[3:1:-1]}.items():
            sides = (left, right) if module.is_transposed else (right, left)
            out.setdefault(name, []).append(Outer("", *sides, real))
            if module.has_bias:
                wide = left.sum(1, dtype=torch.promote_types(left.dtype, torch.float32))
                out.setdefault(f"{name}_bias", []).append(Whole("", wide))
    return out


def _expert(module: Any, name: str, e: int) -> tuple[Tensor, Tensor | None]:
    """Its matrix as (out, in), and its bias."""
    weight = getattr(module, name)[e].detach()
    bias = getattr(module, f"{name}_bias")[e].detach() if module.has_bias else None
    return (weight.T if module.is_transposed else weight), bias


def _by_example(x: Tensor, example: Tensor, n: int) -> Tensor:
    """(tokens, D) as (n, most tokens of an example, D), with zeros where an example has fewer."""
    count = torch.bincount(example, minlength=n)
    place = torch.arange(len(x), device=x.device) - (count.cumsum(0) - count)[example]
    out = x.new_zeros((n, max(1, int(count.max())), x.shape[-1]))
    out[example, place] = x  # tokens come in the order of the examples
    return out
