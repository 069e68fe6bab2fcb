"""How a transformed function is traced, compiled and kept.

All of a transformation happens inside one `jax.jit`, kept for as long as the user's function lives:
so an eager call is traced and compiled once, and inside an outer `jit` the whole is inlined.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from . import _errors
from ._cache import Forget, memo, weak_callable
from ._event import structure
from ._primitive import collecting

_ARRAYS = (jax.Array, np.ndarray, np.generic)
_TRACEABLE = (*_ARRAYS, bool, int, float, complex)

Static = tuple[Any, Any]
# The keywords by which a tapped program gets its token, and what goes with all it sends.
TOKEN, CONTEXT = "lox_token", "lox_context"


def trace(
    fun: Callable, args: Any, kwargs: Any, forget: Forget, logs: bool = True
) -> tuple[Any, Any, list[Any]]:
    """The jaxpr of `fun`, with its logs or without; the structure of its result; flat arguments.

    A function that closes over traced values of its surroundings is of no use in others: then
    `forget` is called.
    """
    leaves, tree = jax.tree.leaves((args, kwargs)), structure((args, kwargs))
    traced = [i for i, x in enumerate(leaves) if isinstance(x, _ARRAYS)]

    def flat_fun(*xs: Any) -> Any:
        filled = list(leaves)
        for i, x in zip(traced, xs, strict=True):
            filled[i] = x
        args, kwargs = tree.unflatten(filled)
        return fun(*args, **kwargs)

    flat_fun.__name__ = getattr(fun, "__name__", "fun")
    flat = [leaves[i] for i in traced]
    with collecting(logs):
        jaxpr, shape = jax.make_jaxpr(flat_fun, return_shape=True)(*flat)
    if any(isinstance(c, jax.core.Tracer) for c in jaxpr.consts):
        forget()
    return jaxpr, structure(shape), flat


def compiled(
    fun: Callable,
    key: tuple[Any, ...],
    static: Static,
    program: Callable,
    args: Any,
    kwargs: Any,
    where: dict[Any, Any] | None = None,
) -> Callable:
    """The jitted form of `program(fun, args, kwargs)`, from the cache that `fun` owns.

    Arguments that JAX can't trace (functions, strings, in a model's pytree, say) are static, unless
    the user has said which ones are.
    """
    if static == (None, None):
        leaves, tree = jax.tree.flatten((args, kwargs))
        if not all(isinstance(x, _TRACEABLE) for x in leaves):
            return _partly_static(fun, key, program, leaves, tree, where)

    def build(forget: Forget) -> Callable:
        alive = weak_callable(fun)

        def run(*args: Any, **kwargs: Any) -> Any:
            return program(alive(), args, kwargs, forget)

        run.__name__ = run.__qualname__ = getattr(fun, "__name__", "fun")
        if static != (None, None):
            run.__signature__ = _signature(fun)  # type: ignore[attr-defined]
        nums, names = static
        return jax.jit(run, static_argnums=nums, static_argnames=names, inline=True)

    return memo(fun, (*key, _hashable(static)), build, where)


def _partly_static(
    fun: Callable, key: Any, program: Callable, leaves: Any, tree: Any, where: Any
) -> Callable:
    still = tuple(None if isinstance(x, _TRACEABLE) else x for x in leaves)
    moving = [i for i, x in enumerate(leaves) if isinstance(x, _TRACEABLE)]

    def build(forget: Forget) -> Callable:
        alive = weak_callable(fun)

        def run(xs: Any, extra: Any) -> Any:
            filled = list(still)
            for i, x in zip(moving, xs, strict=True):
                filled[i] = x
            args, kwargs = tree.unflatten(filled)
            return program(alive(), args, {**kwargs, **extra}, forget)

        run.__name__ = getattr(fun, "__name__", "fun")
        return jax.jit(run, inline=True)

    for leaf in still:
        try:
            hash(leaf)
        except TypeError:
            raise _errors.not_static(fun, leaf) from None
    jitted = memo(fun, (*key, tree, still), build, where)

    def call(*args: Any, **kwargs: Any) -> Any:
        extra = {k: kwargs.pop(k) for k in (TOKEN, CONTEXT) if k in kwargs}
        leaves = jax.tree.leaves((args, kwargs))
        return jitted([leaves[i] for i in moving], extra)

    return call


def _hashable(static: Static) -> Any:
    return tuple(tuple(s) if isinstance(s, list | set) else s for s in static)


def _signature(fun: Callable) -> inspect.Signature:
    """The signature of `fun`, open for the token's keyword."""
    signature = inspect.signature(fun)
    parameters = list(signature.parameters.values())
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        parameters.append(inspect.Parameter("_lox", inspect.Parameter.VAR_KEYWORD))
    return signature.replace(parameters=parameters)
