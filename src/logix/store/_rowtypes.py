"""How a row of floats is stored: as it is, in half the bytes, or in a quarter of them.

float32    as it is (float64 is rounded to it)
float16    rounded to nearest even: 11 bits, up to 65504
bfloat16   rounded to nearest even: 8 bits, the range of float32; stored as its bits, in a uint16
int8       a float32 scale, max|row| / 127, then an int8 for each value: q = rint(x / scale), so
           that |x - q·scale| ≤ scale / 2 (and a float32 rounding); rows of zeros are exact

Everything is little-endian. A row that is decoded, encoded and decoded again is the same row.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from _loxio import Damaged

DTYPES = ("float32", "float16", "bfloat16", "int8")
_BLOCK = 128 << 20
_TINY = np.finfo(np.float32).tiny


@dataclasses.dataclass(frozen=True)
class RowType:
    """Rows of `dim` values, stored as `name`."""

    name: str
    dim: int

    def __post_init__(self) -> None:
        if self.name not in DTYPES:
            raise ValueError(f"dtype={self.name!r} is not one of {', '.join(DTYPES)}")
        if self.dim < 1:
            raise ValueError(f"a row needs at least one value, and this layout has {self.dim}")

    @property
    def stored(self) -> np.dtype[Any]:
        """Of one row in the file."""
        if self.name == "int8":
            return np.dtype([("scale", "<f4"), ("q", "i1", (self.dim,))])
        one = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}[self.name]
        return np.dtype((one, (self.dim,)))

    @property
    def nbytes(self) -> int:
        return self.stored.itemsize

    def encode(
        self, rows: np.ndarray, nonfinite: str = "error", ids: Sequence[Any] | None = None
    ) -> np.ndarray:
        """The bytes of these rows, (B, nbytes).

        A value that is not finite, or too large for this dtype, is an error that names the row;
        with `nonfinite="keep"` it is stored as the dtype can (in int8, the whole row is NaN then).
        """
        rows = np.asarray(rows)
        if rows.ndim != 2 or rows.shape[1] != self.dim:
            raise ValueError(f"rows must have the shape (B, {self.dim}), and these {rows.shape}")
        if rows.dtype.kind == "c" or rows.dtype.kind in "OSUMm":
            raise TypeError(f"rows must be numbers, and these are {rows.dtype}")
        with np.errstate(over="ignore", invalid="ignore"):  # found below, and said better
            x = np.ascontiguousarray(rows, dtype="<f4")
            block, good = getattr(self, f"_{self.name}")(x)
        if nonfinite == "error" and not good.all():
            first = int(np.argmin(good))
            which = f"row {first}" if ids is None else f"the row of {ids[first]!r}"
            if np.isfinite(x[first]).all():
                why = f"has values too large for {self.name}: store bfloat16 or float32"
            else:
                why = "has values that are not finite: mask them, or pass nonfinite='keep'"
            raise ValueError(f"{which} {why}")
        return block.view(np.uint8).reshape(len(rows), self.nbytes)

    def decode(self, block: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """(B, dim) in float32, of the bytes (B, nbytes). What is float32 is not copied.

        `out`: memory for the others, at least of this shape.
        """
        element = self.stored if self.name == "int8" else self.stored.base
        block = block.reshape(-1).view(element).reshape(len(block), -1)
        if self.name == "float32":
            return block
        out = np.empty((len(block), self.dim), np.float32) if out is None else out[: len(block)]
        if self.name == "float16":
            np.copyto(out, block)
        elif self.name == "bfloat16":
            np.left_shift(block, np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)
        else:
            block = block.reshape(-1)
            np.multiply(block["q"], block["scale"][:, None], out=out, dtype=np.float32)
        return out

    def decode_tensor(self, block: Any) -> Any:
        """The same of a torch tensor of bytes, on the device where it is."""
        import torch

        if self.name != "int8":
            return block.view(getattr(torch, self.name)).float()  # float32 is not copied
        scale = block[:, :4].clone(memory_format=torch.contiguous_format).view(torch.float32)
        return block[:, 4:].view(torch.int8).float().mul_(scale)

    # Each returns the block, and which of its rows hold finite values alone.

    def _float32(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return x, np.isfinite(x).all(axis=1)

    def _float16(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        block, good = _by_torch(x, "float16")
        block = x.astype("<f2").view("<u2") if block is None else block
        return block, _exponent_free(block, 0x7C00) if good is None else good

    def _bfloat16(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        block, good = _by_torch(x, "bfloat16")
        if block is None:
            import ml_dtypes  # NumPy has no bfloat16; reading needs only a shift

            block = x.astype(ml_dtypes.bfloat16).view("<u2")
        return block, _exponent_free(block, 0x7F80) if good is None else good

    def _int8(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        most = np.abs(x).max(axis=1)
        good = np.isfinite(most)
        scale = most / np.float32(127)
        # Subnormal scales have no precision; at the other end, 127·scale may overflow.
        scale = np.where(most > 0, np.maximum(scale, _TINY), np.float32(0))
        scale = np.where(np.isfinite(scale * 127), scale, np.nextafter(scale, np.float32(0)))
        scale[~good] = np.nan  # q = 0: the row is decoded as NaN
        divisor = np.where(good & (most > 0), scale, np.float32(np.inf))
        q = x / divisor[:, None]
        np.rint(q, out=q)
        np.clip(q, -127, 127, out=q)
        q[~good] = 0
        block = np.empty(len(x), self.stored)
        block["scale"], block["q"] = scale, q
        return block, good


def _by_torch(x: np.ndarray, name: str) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The same bits by PyTorch, where it is loaded: ten times as fast as NumPy's float16.

    And which rows are good, if all are: a sum is finite only if everything in it is.
    """
    torch = sys.modules.get("torch")
    if torch is None or not x.flags.writeable or not x.size:
        return None, None
    block = torch.from_numpy(x).to(getattr(torch, name))
    sums = block.sum(1, dtype=torch.float32).numpy()
    good = np.isfinite(sums)
    return block.view(torch.int16).numpy().view("<u2"), good if good.all() else None


def _exponent_free(bits: np.ndarray, mask: int) -> np.ndarray:
    """Rows without a value whose exponent is all ones: NaN and infinity."""
    return ((bits & np.uint16(mask)) != mask).all(axis=1)


def map_bytes(path: str, start: int, stop: int) -> np.ndarray:
    """Bytes of a file, mapped read-only for as long as the array is used."""
    if stop <= start:
        return np.empty(0, np.uint8)
    base = start - start % mmap.ALLOCATIONGRANULARITY
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size < stop:  # to touch it would end the process
            raise Damaged(f"{path} is damaged: it has fewer than {stop:,} bytes")
        mapped = mmap.mmap(file.fileno(), stop - base, access=mmap.ACCESS_READ, offset=base)
    return np.frombuffer(mapped, np.uint8, stop - start, start - base)


def mappable() -> int:
    """Bytes that may be mapped for long: none where the address space is limited."""
    return 0 if _address_space() is not None else _memory()


def block_bytes() -> int:
    """What a block may take, with all that is held beside it: less where memory is limited."""
    left = _address_space()
    return min(_BLOCK, max(1 << 20, (_memory() if left is None else left) // 16))


def _memory() -> int:
    """Of the machine, or what this process and its like may have of it."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return 1 << 32
    with contextlib.suppress(OSError, ValueError):  # no group, or no limit ("max")
        with open("/sys/fs/cgroup/memory.max") as file:
            memory = min(memory, int(file.read()))
    return memory


def _address_space() -> int | None:
    """Bytes of it that are left, if it is limited."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY:
            return None
        with open("/proc/self/statm") as file:
            return max(0, limit - int(file.read().split()[0]) * resource.getpagesize())
    except ImportError:  # not a POSIX system
        return None
    except OSError:  # no /proc: what is used already is not known
        return limit // 2


def block_rows(dim: int) -> int:
    """Rows of a block. An eighth of it is for ids and scores; rows count as float32."""
    return max(1, block_bytes() // 8 * 7 // (4 * dim))
