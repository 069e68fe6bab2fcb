"""What a program carries of a logger: the identity of its run, as an array.

A run is known by the words of its key and by its lane: the index along the batch axes that `init`
was vmapped over (0 outside of `vmap`). That is ordinary data, so a state goes through `jit`,
`vmap`, `scan` and checkpoints like any other array, and every write carries it to the host.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jax.interpreters import batching, mlir

Array = Any
THREEFRY = "threefry2x32"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoggerState:
    """Which run to write to. Made by `logger.init`, taken by `logger.spool`, `tap` and `log`.

    >>> import jax, lox
    >>> logger = lox.loggers.ConsoleLogger()
    >>> keys = jax.random.split(jax.random.key(0), 8)
    >>> states = jax.vmap(logger.init)(keys)
    >>> states.id.shape[0]
    8
    >>> logger.close()
    """

    id: Array  # uint32: the words of the key, the lane, and how lanes are named (`identity`)
    name: str | None = dataclasses.field(default=None, metadata=dict(static=True))
    kind: str = dataclasses.field(default=THREEFRY, metadata=dict(static=True))  # of the key


def words_of(key: Array) -> tuple[Array, str]:
    """The words of a key, and its kind. Takes typed keys and the older arrays of uint32."""
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        shape, kind = key.shape, str(jax.random.key_impl(key))
        words = jax.random.key_data(key)
    elif getattr(key, "dtype", None) == np.uint32 and key.ndim >= 1:
        shape, kind, words = key.shape[:-1], THREEFRY, jnp.asarray(key)
    else:
        what = jax.typeof(key) if hasattr(key, "dtype") else repr(key)
        raise TypeError(
            f"logger.init takes a random key, got {what}. Write logger.init(jax.random.key(0))."
        )
    if shape:
        raise ValueError(
            f"logger.init takes one key, got keys of shape {shape}. For one run per key, write "
            "jax.vmap(logger.init)(keys)."
        )
    return words, kind


def identity(words: Array, arrays: list[Array]) -> Array:
    """The identity of the run that `init` begins in this lane: words, lane, and how to name it."""
    lane, lanes = lane_of(words, *arrays)
    _, keys = lane_of(words)
    flags = SHARED * (keys < lanes) + BATCHED * (lanes > 1)
    tail = jnp.stack([lane.astype(jnp.uint32), flags.astype(jnp.uint32)])
    return jnp.concatenate([words, tail])


# The last word of an identity: several lanes have this key; there are several lanes.
SHARED, BATCHED = 1, 2

# lane_p : (anything …) -> int32, int32
# The index along all batch axes that any operand has, and the number of lanes along them.
lane_p = jex.Primitive("lox_lane")
lane_p.multiple_results = True


def lane_of(*operands: Array) -> tuple[Array, Array]:
    lane, lanes = lane_p.bind(*operands)
    return lane, lanes


@lane_p.def_abstract_eval
def _abstract(*avals: Any) -> Any:
    return [jax.core.ShapedArray((), np.dtype("int32"))] * 2


@lane_p.def_impl
def _impl(*operands: Array) -> Any:
    return [jnp.int32(0), jnp.int32(1)]


def _batch(args: Any, dims: Any) -> Any:
    [size] = {x.shape[d] for x, d in zip(args, dims) if d is not None}
    # The axis counts as an ordinary one from here on; vmaps further out add theirs on the left.
    lane, lanes = lane_p.bind(*args)
    return [lane * size + jnp.arange(size, dtype=jnp.int32), lanes * size], [0, None]


def _lower(*operands: Array) -> Any:
    return [jnp.int32(0), jnp.int32(1)]


batching.primitive_batchers[lane_p] = _batch
mlir.register_lowering(lane_p, mlir.lower_fun(_lower, multiple_results=True))
