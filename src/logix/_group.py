"""The processes that log into one run, if there are several."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def group_of_processes() -> Any:
    """The processes of this run, if PyTorch or JAX has started several."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    several = getattr(torch, "distributed", None)
    if several is not None and several.is_available() and several.is_initialized():
        from .torch import _ranks

        if several.get_world_size() > 1:
            return _ranks
    if jax is not None and jax.distributed.is_initialized() and jax.process_count() > 1:
        from .jax import _ranks as processes

        return processes
    return None


def together(save: Callable[[], None], also: Any = None) -> list[Any]:
    """Save in every process. Returns what each of them says as `also`, by their number.

    All of them raise, or none: a process that is waited for in vain hangs the others.
    """
    group = group_of_processes()
    if group is None:
        save()
        return [also]
    problem: Exception | None = None
    told: str | None = None
    try:
        save()
    except Exception as error:
        problem, told = error, f"{type(error).__name__}: {error}"
    every = group.gathered((told, also))
    if problem is not None:
        raise problem
    for rank, (text, _) in enumerate(every):
        if text is not None:
            raise RuntimeError(f"process {rank} could not save: {text}")
    return [said for _, said in every]
