"""One engine for several array libraries: NumPy, PyTorch, JAX. What they name differently is here.

None of them is imported: the module of an array that is there tells which one it is.
"""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np

Array = Any


def namespace(x: Array) -> Any:
    """The functions for arrays like `x`: numpy, torch or jax.numpy."""
    kind = type(x).__module__.split(".")[0]
    if kind == "torch" or _is_tensor(x):
        return sys.modules["torch"]
    if kind in ("jax", "jaxlib"):
        return sys.modules["jax.numpy"]
    return np


def _is_tensor(x: Array) -> bool:
    torch = sys.modules.get("torch")  # a subclass of a tensor may come from any module
    return torch is not None and isinstance(x, getattr(torch, "Tensor", ()))


def to_numpy(x: Array) -> np.ndarray:
    """On the host. bfloat16, which NumPy lacks, becomes float32, which holds it exactly."""
    xp = namespace(x)
    if xp.__name__ == "torch":
        x = x.detach().cpu()
        return (x.float() if x.dtype == xp.bfloat16 else x).numpy()
    x = np.asarray(x)
    return x.astype(np.float32) if x.dtype.name == "bfloat16" else x


def like(x: Array, other: Array, cast: bool = True) -> Array:
    """Any array as one of the library, on the device and (with `cast`) in the dtype of `other`."""
    xp = namespace(other)
    if namespace(x) is not xp:
        x = to_numpy(x)
    if xp is np:
        return np.asarray(x).astype(other.dtype if cast else x.dtype, copy=False)
    if xp.__name__ == "torch":
        if isinstance(x, np.ndarray):
            if x.dtype.name == "bfloat16":
                x = x.astype(np.float32)
            x = xp.as_tensor(x if x.flags.writeable else x.copy())
        return x.to(device=other.device, dtype=other.dtype if cast else x.dtype)
    return xp.asarray(x, dtype=other.dtype) if cast else xp.asarray(x)


def placed(
    cache: dict, key: Hashable, make: Callable[[], Array], other: Array, cast: bool = True
) -> Array:
    """`like(make(), other)`, kept in `cache` for the next array at the same place."""
    xp = namespace(other)
    device = str(other.device) if xp.__name__ == "torch" else ""
    spot = (key, xp.__name__, device, str(other.dtype) if cast else "")
    if spot not in cache:
        made = like(make(), other, cast)
        if xp.__name__.startswith("jax") and isinstance(made, sys.modules["jax"].core.Tracer):
            return made  # belongs to the function being traced: it must not outlive it
        cache[spot] = made
    return cache[spot]


def as_float(x: Array) -> Array:
    """At least float32: sums of float16 and bfloat16 would lose what they add."""
    xp = namespace(x)
    if xp.__name__ == "torch":
        return x if x.dtype == xp.float64 else x.to(xp.float32)
    return x if x.dtype == np.float64 else x.astype(np.float32)


def as_double(x: Array) -> Array:
    """float64, where the library has it (JAX has not, unless it was told to)."""
    xp = namespace(x)
    if xp.__name__ == "torch":
        return x.to(xp.float64)
    return x.astype(np.float64) if xp is np else x.astype(xp.asarray(0.0).dtype)


@contextlib.contextmanager
def precise(x: Array) -> Any:
    """Where PyTorch neither records for autograd nor rounds products to autocast's dtype."""
    xp = namespace(x)
    if xp.__name__ != "torch":
        yield
        return
    with xp.no_grad(), xp.autocast(x.device.type, enabled=False):
        yield


def add_rows(rows: int, index: Array, values: Array) -> Array:
    """(rows, D): zeros, with `values` (n, D) added at the rows `index` (n,), repeated or not."""
    xp = namespace(values)
    if xp.__name__ == "torch":
        out = xp.zeros((rows, values.shape[1]), dtype=values.dtype, device=values.device)
        return out.index_add_(0, index, values)
    out = xp.zeros((rows, values.shape[1]), dtype=values.dtype)
    if xp is np:
        np.add.at(out, index, values)
        return out
    return out.at[index].add(values)


def save(arrays: Mapping[str, Mapping[str, Array]], path: str | os.PathLike[str]) -> None:
    """{layer: {name: array}} as npz without pickle, by rename: whole or not at all."""
    path = os.fspath(path)
    temporary = os.path.join(os.path.dirname(path), f".{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            # A layer may be called anything, a statistic not: the first colon parts the two.
            host: dict[str, Any] = {
                f"{name}:{layer}": to_numpy(x)
                for layer, named in arrays.items()
                for name, x in named.items()
            }
            np.savez(file, allow_pickle=False, **host)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def load(path: str | os.PathLike[str]) -> dict[str, dict[str, Array]]:
    out: dict[str, dict[str, Array]] = {}
    with np.load(path, allow_pickle=False) as file:
        for key in file.files:
            name, _, layer = key.partition(":")
            out.setdefault(layer, {})[name] = file[key]
    return out
