"""Several processes of `torch.distributed`: their number, what they agree on, sums over all."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import distributed


def rank() -> int:
    return distributed.get_rank() if _many() else 0


def world() -> int:
    return distributed.get_world_size() if _many() else 1


def _many() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def agree(value: Any = None) -> Any:
    """What the first process says, for all of them; a text that no other run has, by default."""
    box = [uuid.uuid4().hex if value is None else value]
    if world() > 1:
        distributed.broadcast_object_list(box, src=0)
    return box[0]


def wait() -> None:
    """Until all processes are here."""
    if world() > 1:
        distributed.barrier()


def merged(
    state: Mapping[str, Mapping[str, Any]], keep: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    """The sums of all processes, in each of them. What is in `keep` all of them have alike."""
    out = {layer: dict(stats) for layer, stats in state.items()}
    if world() == 1:
        return out
    own = {layer: sorted(stats) for layer, stats in out.items()}
    every: list[Any] = [None] * world()
    distributed.all_gather_object(every, own)
    if any(other != every[0] for other in every):
        raise RuntimeError(
            "the processes have accumulated statistics of different layers, so they can't be "
            "added. Every process needs at least one batch, and the same setup and watch."
        )
    cuda = distributed.get_backend() == "nccl"
    for layer in sorted(out):
        for name in sorted(out[layer]):
            if name not in keep:
                out[layer][name] = _sum(out[layer][name], cuda)
    return out


def _sum(x: Any, cuda: bool) -> Any:
    total = torch.as_tensor(np.asarray(x)) if not isinstance(x, torch.Tensor) else x.clone()
    where = total.device
    total = total.cuda() if cuda else total.cpu()
    distributed.all_reduce(total)
    total = total.to(where)
    return total if isinstance(x, torch.Tensor) else total.numpy()


def spread(
    state: Mapping[str, Mapping[str, Any]], names: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    """What the first process has under these names, in all of them."""
    out = {layer: dict(stats) for layer, stats in state.items()}
    cuda = distributed.get_backend() == "nccl"
    for layer in sorted(out):
        for name in names:
            if name in out[layer]:
                x = out[layer][name]
                sent = torch.as_tensor(np.asarray(x)) if not isinstance(x, torch.Tensor) else x
                sent = sent.contiguous().cuda() if cuda else sent.contiguous().cpu()
                distributed.broadcast(sent, src=0)
                out[layer][name] = sent.to(x.device) if hasattr(x, "device") else sent.numpy()
    return out
