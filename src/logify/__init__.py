"""Imperative-like logging for JAX: `logify.log` anywhere, `@logify.logify` around it.

A facade over lox. Every (name, reduction) is a lox key with that reduction.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

import lox

_TAG = "logify"
_REDUCTIONS = {"replace": "last", "append": "append", "mean": "mean", "sum": "sum"}


def log(name: str, value: Any, reduction: str = "replace") -> None:
    """Log a value under a name, combined with what was logged there before.

    >>> import jax.numpy as jnp, logify
    >>> @logify.logify
    ... def f(x):
    ...     logify.log("x", x, reduction="mean")
    ...     logify.log("x", x + 1, reduction="mean")
    ...     return x
    >>> out, logs = f(1.0)
    >>> print(logs.asdict())
    {'x': {'mean': Array(1.5, dtype=float32)}}

    Arguments:

    - `name`: the name. One name may be used with several reductions.
    - `value`: an array, a number, or a pytree of them.
    - `reduction`: `"replace"` (the last value), `"append"`, `"mean"` or `"sum"`, over log calls.
    """
    if reduction not in _REDUCTIONS:
        known = ", ".join(_REDUCTIONS)
        raise ValueError(
            f"logify.log({name!r}, …): unknown reduction {reduction!r}. Known: {known}."
        )
    lox.log({f"{name}/{reduction}": value}, tags=(_TAG,), reduce=_REDUCTIONS[reduction])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logs:
    """What a function logged. A pytree.

    >>> import logify
    >>> @logify.logify
    ... def f(x):
    ...     logify.log("x", x, reduction="sum")
    >>> _, logs = f(2.0)
    >>> float(logs.asdict()["x"]["sum"])
    2.0
    """

    logs: lox.logdict

    def asdict(self) -> dict[str, dict[str, Any]]:
        """The values, as `{name: {reduction: value}}`."""
        out: dict[str, dict[str, Any]] = {}
        for key, value in self.logs.items():
            name, _, reduction = key.rpartition("/")
            out.setdefault(name, {})[reduction] = value
        return out


def logify(fun: Callable, *, capacity: int | None = None) -> Callable[..., tuple[Any, Logs]]:
    """Transform `fun` so that it returns `(out, Logs)`. Any order with jit, vmap and grad works.

    >>> import jax, jax.numpy as jnp, logify
    >>> def f(x):
    ...     logify.log("x", x)
    ...     return 2 * x
    >>> out, logs = jax.jit(jax.vmap(logify.logify(f)))(jnp.arange(3))
    >>> print(out, logs.asdict()["x"]["replace"])
    [0 2 4] [0 1 2]

    Arguments:

    - `fun`: any function that JAX can trace.
    - `capacity`: how many of the latest events `"append"` keeps in a `while_loop`.

    Returns a function with the arguments of `fun`.
    """
    spooled = lox.spool(fun, tags=(_TAG,), capacity=capacity)

    @functools.wraps(fun, updated=())
    def logified(*args: Any, **kwargs: Any) -> tuple[Any, Logs]:
        out, logs = spooled(*args, **kwargs)
        return out, Logs(logs)

    return logified
