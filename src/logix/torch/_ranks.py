"""Several processes of `torch.distributed`: their number, what they agree on, sums over all."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import distributed

State = Mapping[str, Mapping[str, Any]]


def rank() -> int:
    return distributed.get_rank() if _many() else 0


def world() -> int:
    return distributed.get_world_size() if _many() else 1


def _many() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def meet() -> None:
    """Nothing has to be agreed on beforehand."""


def agreed(key: str) -> str:
    """A text that no other run has: all processes get that of the one which asks first.

    Nobody waits: it goes through the store by which they have found each other.
    """
    own = uuid.uuid4().hex
    store = distributed.distributed_c10d._get_default_store()
    return bytes(store.compare_set(f"logix/{key}", "", own)).decode()


def gathered(value: Any) -> list[Any]:
    """What all processes say, by their number. All wait for each other."""
    every: list[Any] = [None] * world()
    distributed.all_gather_object(every, value)
    return every


def merged(state: State, keep: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """The sums of all processes, in each of them. What is in `keep` all of them have alike.

    A process that has seen nothing of a layer, or had no batch at all, adds nothing.
    """
    out = {layer: dict(stats) for layer, stats in state.items()}
    every = gathered(
        {
            (layer, name): (tuple(x.shape), str(_tensor(x).dtype))
            for layer, stats in out.items()
            for name, x in stats.items()
            if name not in keep
        }
    )
    kinds: dict[tuple[str, str], tuple[tuple[int, ...], str]] = {}
    for number, own in enumerate(every):
        for key, kind in own.items():
            if kinds.setdefault(key, kind) != kind:
                raise RuntimeError(
                    f"the statistics {key[1]!r} of layer {key[0]!r} can't be added: process "
                    f"{number} has {kind[0]} {kind[1]}, another one {kinds[key][0]} "
                    f"{kinds[key][1]}. All processes need the same setup and watch."
                )
    cuda = distributed.get_backend() == "nccl"
    for (layer, name), (shape, dtype) in kinds.items():  # in the same order everywhere
        stats = out.setdefault(layer, {})
        zeros = torch.zeros(shape, dtype=getattr(torch, dtype.split(".")[-1]))
        stats[name] = _sum(stats.get(name, zeros), cuda)
    return out


def _tensor(x: Any) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else torch.as_tensor(np.asarray(x))


def _sum(x: Any, cuda: bool) -> Any:
    total = _tensor(x).clone()
    where = total.device
    total = total.cuda() if cuda else total.cpu()
    distributed.all_reduce(total)
    total = total.to(where)
    return total if isinstance(x, torch.Tensor) else total.numpy()


def spread(state: State, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """What the first process has under these names, in all of them."""
    out = {layer: dict(stats) for layer, stats in state.items()}
    cuda = distributed.get_backend() == "nccl"
    for layer in sorted(out):
        for name in names:
            if name in out[layer]:
                x = out[layer][name]
                sent = _tensor(x).contiguous()
                sent = sent.cuda() if cuda else sent.cpu()
                distributed.broadcast(sent, src=0)
                tensor = isinstance(x, torch.Tensor)
                out[layer][name] = sent.to(x.device) if tensor else sent.numpy()
    return out
