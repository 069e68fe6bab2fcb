"""One batch of a PyTorch model: what is around the user's forward and backward pass.

By default no parameter gets a gradient inside: extraction does not need them. Someone who trains on
the same pass would lose a step without noticing, so an optimizer that is asked to step on the
gradients that were left out raises an error which says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from .._record import Record
from ._capture import Capture, without_weight_gradients
from ._units import Unit

_left_out = WeakTensorKeyDictionary()  # parameters whose gradients were left out
_guard: Any = None


@contextlib.contextmanager
def batch(
    model: nn.Module,
    units: Mapping[str, Unit],
    examples: int,
    mask: Tensor | None,
    compress: Callable[[Record], Record],
    weight_grads: bool,
) -> Iterator[Capture]:
    """A `Capture` that sees what happens inside."""
    capture = Capture(units, examples, mask, compress)
    with contextlib.ExitStack() as stack:
        stack.enter_context(capture.watch())
        if not weight_grads and _may_leave_out(model):
            if isinstance(model, nn.parallel.DistributedDataParallel):
                stack.enter_context(model.no_sync())  # there is nothing to be averaged
            _note(stack.enter_context(without_weight_gradients(model)))
        yield capture


def _may_leave_out(model: nn.Module) -> bool:
    """Whatever else averages gradients over processes waits for them, and may not be let down."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not distributed or isinstance(model, nn.parallel.DistributedDataParallel)


def _note(parameters: list[nn.Parameter]) -> None:
    global _guard
    if _guard is None:
        _guard = register_optimizer_step_pre_hook(_before_step)
    for p in parameters:
        _left_out[p] = True


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not len(_left_out):
        return
    own = [p for group in optimizer.param_groups for p in group["params"] if p in _left_out]
    if not own:
        return
    for p in own:
        del _left_out[p]
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    # With a closure, gradients are computed inside of the step.
    if closure is None and all(p.grad is None for p in own):
        raise RuntimeError(
            "this step would change nothing: the gradients of the weights are left out where logix "
            "logs, which makes it cheaper. To train on the same pass, write "
            "`with run(data_id=…, weight_grads=True):`."
        )


def in_backward() -> bool:
    """Whether a backward pass is under way: a checkpoint computes its part again inside of it."""
    return torch._C._current_graph_task_id() != -1
