"""The processes that log into one run, if there are several."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any


def group_of_processes() -> Any:
    """The processes of this run, if PyTorch has started several."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return None
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return None
    from .torch import _ranks

    return _ranks


def raise_others(problems: Sequence[str | None]) -> None:
    for rank, text in enumerate(problems):
        if text is not None:
            raise RuntimeError(f"process {rank} could not save: {text}")
