"""Losses as sums over the examples of a batch, whatever reduction a model or a trainer uses.

A row of the store is the gradient of one example's own loss. It must not depend on what else is in
the batch, as it does where a loss is the mean over a batch's examples or tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# Sums over what counts: tokens whose label is not ignored, classes with their weights.
SUMMED = {F.cross_entropy, F.nll_loss}
# Means over all entries. Of one example they stay means over its own.
AVERAGED = {
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy),
    *(F.binary_cross_entropy_with_logits, F.kl_div, F.poisson_nll_loss, F.gaussian_nll_loss),
    *(F.ctc_loss, F.margin_ranking_loss, F.soft_margin_loss, F.hinge_embedding_loss),
    *(F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss),
    *(F.cosine_embedding_loss, F.triplet_margin_loss, F.triplet_margin_with_distance_loss),
}
TOLERANCE = 0.05  # a mean instead of a sum is off by a factor; rounding in 16 bits by far less


class SummedLosses(TorchFunctionMode):
    """While it is on, torch's losses with `reduction="mean"` are sums over the examples."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in SUMMED and kwargs.get("reduction", "mean") == "mean":
            return func(*args, **{**kwargs, "reduction": "sum"})
        if func in AVERAGED:
            how = kwargs.get("reduction", "mean")
            if how == "batchmean":
                return func(*args, **{**kwargs, "reduction": "sum"})
            if how == "mean":
                return func(*args, **kwargs) * _examples(func, args, kwargs)
        return func(*args, **kwargs)


def _examples(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    values = args[0] if args else kwargs["input"]
    if func is F.ctc_loss:  # (time, batch, classes)
        return values.shape[1] if values.ndim == 3 else 1
    return values.shape[0] if values.ndim else 1


def summed_smoother(epsilon: float, ignore_index: int) -> Callable[..., Tensor]:
    """In place of a trainer's label smoother, which takes the mean over the tokens that count."""

    def loss(outputs: Any, labels: Tensor, shift_labels: bool = False, **_: Any) -> Tensor:
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
        if shift_labels:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        return F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]).float(),
            labels.reshape(-1),
            ignore_index=ignore_index,
            label_smoothing=epsilon,
            reduction="sum",
        )

    return loss


def check_sum(loss_of: Callable[[Any], Tensor], batch: Any, size: int) -> None:
    """Raise if the loss of a batch is not the loss of its first example plus that of the others.

    Forward passes only. A batch that can't be taken apart is not checked.
    """
    first, rest = part(batch, size, 0, 1), part(batch, size, 1, size)
    if size < 2 or first is None or rest is None:
        return
    with torch.no_grad():
        whole = float(loss_of(part(batch, size, 0, size)))
        try:
            apart = float(loss_of(first)) + float(loss_of(rest))
        except Exception:  # what belongs to an example is not only where a batch axis is
            return
    if abs(whole - apart) > TOLERANCE * max(abs(whole), abs(apart)):
        raise ValueError(
            f"the loss of a batch of {size} is {whole:.6g}, and those of its first example and of "
            f"the others add up to {apart:.6g}: it is not a sum over examples, so rows would "
            "depend on what else is in a batch. Losses of torch.nn.functional are summed by logix; "
            "a mean that is taken otherwise must be a sum: `loss.sum()` instead of `loss.mean()` "
            "(in a Trainer's compute_loss, `loss.sum() / num_items_in_batch`)."
        )


def part(batch: Any, size: int, start: int, stop: int) -> Any:
    """These examples of a batch, or None if nothing in it has an axis over its examples."""
    found = False

    def take(x: Any) -> Any:
        nonlocal found
        if isinstance(x, Mapping):
            return {key: take(value) for key, value in x.items()}
        if isinstance(x, tuple) and hasattr(x, "_fields"):
            return type(x)(*map(take, x))
        if isinstance(x, list | tuple) and not (
            len(x) == size and not any(isinstance(y, Tensor | Mapping | list | tuple) for y in x)
        ):
            return type(x)(take(y) for y in x)
        if isinstance(x, list | tuple) or (isinstance(x, Tensor) and x.shape[:1] == (size,)):
            found = True
            return x[start:stop]
        return x

    out = take(batch)
    return out if found else None
