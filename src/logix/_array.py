"""One engine for several array libraries: NumPy, PyTorch, JAX. What they name differently is here.

None of them is imported: the module of an array that is there tells which one it is.
"""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

Array = Any


_namespaces: dict[type, Any] = {}


def namespace(x: Array) -> Any:
    """The functions for arrays like `x`: numpy, torch or jax.numpy."""
    kind = type(x)
    if kind not in _namespaces:
        _namespaces[kind] = _namespace(x)
    return _namespaces[kind]


def _namespace(x: Array) -> Any:
    kind = type(x).__module__.split(".")[0]
    torch = sys.modules.get("torch")  # a subclass of a tensor may come from any module
    if kind == "torch" or isinstance(x, getattr(torch, "Tensor", ())):
        return torch
    if kind in ("jax", "jaxlib"):
        return sys.modules["jax.numpy"]
    return np


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
    device = other.device if xp.__name__ == "torch" else None
    spot = (key, xp.__name__, device, other.dtype if cast else None)
    if spot not in cache:
        made = like(make(), other, cast)
        if is_traced(made):
            return made  # belongs to the function being traced: it must not outlive it
        cache[spot] = made
    return cache[spot]


def is_traced(x: Array) -> bool:
    """Whether `x` stands for an array in a function that JAX is tracing."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.core.Tracer)


def as_float(x: Array) -> Array:
    """At least float32: sums of float16 and bfloat16 would lose what they add."""
    xp = namespace(x)
    if xp.__name__ == "torch":
        return x if x.dtype in (xp.float32, xp.float64) else x.to(xp.float32)
    return x if x.dtype in (np.float32, np.float64) else x.astype(np.float32)


def as_double(x: Array) -> Array:
    """float64, where the library has it (JAX has not, unless it was told to)."""
    xp = namespace(x)
    if xp.__name__ == "torch":
        return x.to(xp.float64)
    return x.astype(np.float64, copy=False) if xp is np else x.astype(xp.asarray(0.0).dtype)


_nothing = contextlib.nullcontext()


def precise(x: Array) -> Any:
    """Where PyTorch neither records for autograd nor rounds products to autocast's dtype."""
    xp = namespace(x)
    if xp.__name__ != "torch":
        return _nothing
    autocast = xp.is_autocast_enabled(x.device.type)
    if not autocast and not xp.is_grad_enabled():
        return _nothing  # as inside of another one: to enter them costs more than a small product
    stack = contextlib.ExitStack()
    stack.enter_context(xp.no_grad())
    if autocast:
        stack.enter_context(xp.autocast(x.device.type, enabled=False))
    return stack


def zeros(shape: Sequence[int], other: Array, double: bool = False, host: bool = False) -> Array:
    """In float32 or better (`double`: float64), where `other` is, or on the host as NumPy's."""
    xp = np if host else namespace(other)
    wide = double or "float64" in str(other.dtype)
    if xp is np:
        return np.zeros(shape, np.float64 if wide else np.float32)
    place = {"device": other.device} if xp.__name__ == "torch" else {}
    out = xp.zeros(tuple(shape), dtype=xp.float32, **place)
    return as_double(out) if wide else out


def moved(total: Array, other: Array, double: bool = False, host: bool = False) -> Array:
    """A sum to where `zeros` of the same arguments are made, in no lower precision than it has."""
    if double or "float64" in str(other.dtype):
        total = as_double(total)
    there = to_numpy(total) if host else like(total, other, cast=False)
    if str(there.dtype).split(".")[-1] != str(total.dtype).split(".")[-1]:
        there = to_numpy(total)  # JAX has no float64, unless it was told to
    readonly = isinstance(there, np.ndarray) and not there.flags.writeable
    return there.copy() if readonly else there


def copied(x: Array) -> Array:
    """In memory of its own. JAX's arrays never change: they are their own copies."""
    if namespace(x).__name__ == "torch":
        return x.detach().clone()
    return x.copy() if isinstance(x, np.ndarray) else x


# ---- sums, in the memory of `total` where its library can: PyTorch, NumPy. JAX makes a new one.


def add(total: Array, value: Array) -> Array:
    """`total + value`."""
    value = like(value, total)
    if namespace(total).__name__.startswith("jax"):
        return total + value
    total += value
    return total


def exact_products(x: Array) -> bool:
    """Whether `add_product` multiplies arrays of this dtype as they are, and rounds nothing.

    The product of two numbers of bfloat16 fits into float32, and JAX sums it there; a GPU does so
    many times faster than products of float32.
    """
    return x.dtype.name == "bfloat16" if namespace(x).__name__.startswith("jax") else False


def add_product(total: Array, x: Array, y: Array) -> Array:
    """`total + xᵀ y`."""
    if exact_products(x) and exact_products(y):
        xp = namespace(x)
        return add(total, xp.matmul(x.T, y, preferred_element_type=xp.float32))
    own = _within(total, x)
    if own is None:
        return add(total, x.T @ y)
    own.addmm_(x.T, y)
    return total


def add_gram(total: Array, x: Array) -> Array:
    """`total + xᵀ x`, of which on a CPU only the upper blocks are computed, and mirrored.

    Measured: 0.6 of the time from 256 columns on; with few rows to sum, copying costs more than it
    saves. A GPU gains nothing (0.57 to 0.62 ms for 3072 columns), NumPy does it by itself.
    """
    own, (n, columns) = _within(total, x), x.shape
    if own is None or own.device.type != "cpu" or min(n, columns) < 256:
        return add_product(total, x, x)
    width = max(128, columns // 512 * 64)
    for start in range(0, columns, width):
        end = start + width
        own[start:end, start:].addmm_(x[:, start:end].T, x[:, start:])
        own[end:, start:end].copy_(own[start:end, end:].T)
    return total


def add_at(total: Array, index: Array, values: Array) -> Array:
    """`total` with `values` (n, …) added at its rows `index` (n,), repeated or not."""
    xp, own = namespace(values), _within(total, values)
    if own is not None:
        own.index_add_(0, index, values)
        return total
    if namespace(total) is not xp or xp.__name__ == "torch":
        return add(total, add_rows(len(total), index, values))
    if xp is np:
        np.add.at(total, index, values)
        return total
    return total.at[index].add(values)


def add_rows(rows: int, index: Array, values: Array) -> Array:
    """(rows, …): zeros, with `values` (n, …) added at the rows `index` (n,), repeated or not."""
    xp = namespace(values)
    place = {"device": values.device} if xp.__name__ == "torch" else {}
    return add_at(xp.zeros((rows, *values.shape[1:]), dtype=values.dtype, **place), index, values)


def _within(total: Array, x: Array) -> Any:
    """`total` as a tensor that PyTorch can add products of `x` to, or None. NumPy's arrays lend
    their memory: sums on the host cost no more than those beside the data."""
    torch = namespace(x)
    if torch.__name__ != "torch":
        return None
    if isinstance(total, np.ndarray):
        if x.device.type != "cpu" or f"torch.{total.dtype.name}" != str(x.dtype):
            return None
        return torch.from_numpy(total)
    same = (
        namespace(total).__name__ == "torch" and total.device == x.device and total.dtype == x.dtype
    )
    return total if same else None


def eigh(x: Array) -> tuple[Array, Array]:
    """Eigenvalues, not negative, and eigenvectors of a covariance, in its own dtype.

    In float64, on a GPU too: for 3072 entries of float32 an H200 took 58 ms against 53. Errors of
    float32 were 2e-6 of the largest eigenvalue, a hundred times those of rounding the result, and
    a damping of a tenth of the mean eigenvalue can be as small as that. JAX, which has no float64
    unless it is told to, lends its arrays to NumPy; on a GPU it is told to.
    """
    if namespace(x).__name__.startswith("jax"):
        jax = sys.modules["jax"]
        if next(iter(x.devices())).platform == "cpu":
            return tuple(like(y, x) for y in eigh(np.asarray(x)))  # type: ignore[return-value]
        with jax.enable_x64(True):
            values, vectors = jax.numpy.linalg.eigh(((x + x.T) / 2).astype(np.float64))
            return values.clip(0).astype(x.dtype), vectors.astype(x.dtype)
    values, vectors = namespace(x).linalg.eigh(as_double((x + x.T) / 2))
    return like(namespace(x).clip(values, 0, None), x), like(vectors, x)


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
