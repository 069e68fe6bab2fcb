"""Several processes of `jax.distributed`: their number, what they agree on, sums over all.

The same functions as of `logix.torch._ranks`. What is sent is bytes: JAX would make other types of
what it has no type for, such as counts of 64 bits.
"""

from __future__ import annotations

import hashlib
import pickle
import uuid
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from .._array import to_numpy

State = Mapping[str, Mapping[str, Any]]
_token: list[str] = []


def rank() -> int:
    return jax.process_index()


def world() -> int:
    return jax.process_count()


def meet() -> None:
    """Agree on a text of this group of processes. All wait for each other, once."""
    if not _token:
        _token.append(gathered(uuid.uuid4().hex)[0])


def agreed(key: str) -> str:
    """A text that no other run has, the same in all processes. Nobody waits: they have met."""
    return hashlib.blake2b(f"{_token[0]} {key}".encode(), digest_size=16).hexdigest()


def gathered(value: Any) -> list[Any]:
    """What all processes say, by their number. All wait for each other."""
    own = np.frombuffer(pickle.dumps(value), np.uint8)
    every = lambda x: np.asarray(multihost_utils.process_allgather(x))
    sizes = every(np.asarray([len(own)], np.int32)).reshape(-1)
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(own)] = own
    found = every(padded).reshape(len(sizes), -1)
    return [pickle.loads(row[:n].tobytes()) for row, n in zip(found, sizes)]


def merged(state: State, keep: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """The sums of all processes, in each of them. What is in `keep` all of them have alike."""
    own = {layer: dict(stats) for layer, stats in state.items()}
    names = lambda s: [(k, n) for k, stats in s.items() for n in stats if n not in keep]
    every = sorted({key for found in gathered(names(own)) for key in found})
    for layer, name in every:  # in the same order everywhere, one at a time
        x = own.get(layer, {}).get(name)
        parts = [p for p in gathered(None if x is None else to_numpy(x)) if p is not None]
        if len({p.shape for p in parts}) > 1:
            raise RuntimeError(
                f"the statistics {name!r} of {layer!r} can't be added: processes have the shapes "
                f"{[p.shape for p in parts]}. All need the same setup and watch."
            )
        own.setdefault(layer, {})[name] = np.asarray(sum(parts[1:], start=parts[0]))
    return own


def spread(state: State, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """What the first process has under these names, in all of them."""
    out = {layer: dict(stats) for layer, stats in state.items()}
    for layer in sorted(out):
        for name in (n for n in names if n in out[layer]):
            sent = to_numpy(out[layer][name]) if rank() == 0 else None
            out[layer][name] = gathered(sent)[0]
    return out
