"""The transformations: `spool` returns logs, `tap` streams them, `nolog` removes them.

Each traces the user's function once, with logging on, and interprets the jaxpr with a collector.
All of that happens inside one `jax.jit`, kept for as long as the user's function lives: so an eager
call is traced and compiled once, and inside an outer `jit` the whole is inlined.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from . import _jax_batching as _jax_batching  # teach JAX's own rules about events, on import
from . import _jax_derivatives as _jax_derivatives
from . import _shard_rule as _shard_rule
from ._cache import Forget, memo, weak_callable
from ._event import structure
from ._host import BY_HANDLE, Callback, EagerCall, Sink
from ._interpret import interpret
from ._logdict import logdict
from ._plan import Options, make_plan
from ._primitive import collecting
from ._reduce import Reduction
from ._spool import Spool
from ._stream import Stream
from ._survey import survey

_ARRAYS = (jax.Array, np.ndarray, np.generic)
_TRACEABLE = (*_ARRAYS, bool, int, float, complex)
with jax.ensure_compile_time_eval():
    _Eager = type(jex.find_top_trace(()))

Names = Iterable[str] | str | None
Reduce = str | Reduction | Mapping[str, str | Reduction] | None
Static = tuple[Any, Any]


def spool(
    fun: Callable,
    argnames: Names = None,
    tags: Names = None,
    keep_logs: bool = False,
    interval: int | None = None,
    reduce: Reduce = None,
    prefix: str = "",
    *,
    capacity: int | None = None,
    static_argnums: Any = None,
    static_argnames: Any = None,
) -> Callable[..., tuple[Any, logdict]]:
    """Transform `fun` so that it also returns what it logs.

    >>> import jax, jax.numpy as jnp, lox
    >>> def f(xs):
    ...     def step(total, x):
    ...         lox.log({"total": total + x}, step=x)
    ...         return total + x, None
    ...     return jax.lax.scan(step, 0, xs)[0]
    >>> y, logs = lox.spool(f)(jnp.arange(4))
    >>> logs
    {'total': [0, 1, 3, 6]}
    >>> lox.spool(f, reduce="max")(jnp.arange(4))[1]
    {'total': 6}

    Arguments:

    - `fun`: any function that JAX can trace.
    - `argnames`: collect only these keys.
    - `tags`: collect only logs with one of these tags.
    - `keep_logs`: leave the logs in the program as well, for a transformation further out.
    - `interval`: keep events 0, n, 2n … of each key; the others are never stored.
    - `reduce`: reduce the events of each key, in constant memory: the name of a reduction, a
      `lox.Reduction`, or a dict from key to either.
    - `prefix`: put in front of every key.
    - `capacity`: how many of the latest events to keep of a key whose number of events is not known
      when compiling (in a `while_loop`).
    - `static_argnums`, `static_argnames`: as for `jax.jit`.

    Returns a function with the arguments of `fun`, which returns `(out, logs)`.
    """
    options = Options.make(
        argnames,
        tags,
        reduce,
        keep_logs=bool(keep_logs),
        interval=interval,
        prefix=prefix,
        capacity=capacity,
    )

    def program(fun: Callable, args: Any, kwargs: Any, forget: Forget) -> Any:
        jaxpr, out_tree, flat = trace(fun, args, kwargs, forget)
        found = survey(jaxpr, options.select)
        repeated = found.repeated()
        spool = Spool(make_plan(found.once(repeated), options), options, repeated)
        outs = interpret(jaxpr, flat, spool)
        return out_tree.unflatten(outs), spool.finish()

    static = (static_argnums, static_argnames)

    @_like(fun)
    def spooled(*args: Any, **kwargs: Any) -> Any:
        return _compiled(fun, ("spool", options), static, program, args, kwargs)(*args, **kwargs)

    return spooled


def tap(
    fun: Callable,
    callback: Callback | None = None,
    argnames: Names = None,
    tags: Names = None,
    prefix: str = "",
    *,
    keep_logs: bool = False,
    every: int | None = None,
    interval: int | None = None,
    reduce: Reduce = None,
    static_argnums: Any = None,
    static_argnames: Any = None,
) -> Callable:
    """Transform `fun` so that it calls `callback` with every event, as it happens.

    >>> import jax.numpy as jnp, lox
    >>> def f(x):
    ...     lox.log({"x": x})
    ...     lox.log({"y": 2 * x}, step=1)
    ...     return x
    >>> y = lox.tap(f, print)(1.0)
    {'x': 1.0}
    {'y': 2.0}

    Arguments:

    - `fun`: any function that JAX can trace.
    - `callback`: called with a logdict of NumPy values; prints it by default. It runs while the
      program does, and must not call JAX. What it raises is raised at the end of the call, or by
      `lox.flush()` if the tapped function runs inside `jit`.
    - `argnames`, `tags`, `prefix`, `keep_logs`: as for `spool`.
    - `every`: one call for that many iterations of the outermost loop that logs, with all their
      events; what remains, at the end of the loop.
    - `interval`: send events 0, n, 2n … of each key.
    - `reduce`: as for `spool`. With `every`, over the events of one call; without, over them all,
      sent when `fun` is done.
    - `static_argnums`, `static_argnames`: as for `jax.jit`.

    Returns a function with the arguments and the result of `fun`.
    """
    options = Options.make(
        argnames,
        tags,
        reduce,
        keep_logs=bool(keep_logs),
        interval=interval,
        prefix=prefix,
        every=every,
    )
    call = _print if callback is None else callback
    static = (static_argnums, static_argnames)

    def program(run: Any, args: Any, kwargs: Any, forget: Forget, sink: Sink, token: Any) -> Any:
        jaxpr, out_tree, flat = trace(run, args, kwargs, forget)
        stream = Stream(jaxpr, options, sink, token)
        outs = interpret(jaxpr, flat, stream)
        return out_tree.unflatten(outs), stream.finish()

    def eager(fun: Callable, args: Any, kwargs: Any, forget: Forget) -> Any:
        return program(fun, args, kwargs, forget, BY_HANDLE, kwargs.pop(_TOKEN))

    def traced(fun: Callable, args: Any, kwargs: Any, forget: Forget) -> Any:
        return program(fun, args, kwargs, forget, Sink(call), jnp.int32(0))[0]

    own: dict[Any, Any] = {}  # what is compiled with `call` in it lives as long as `tapped`

    @_like(fun)
    def tapped(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(jex.find_top_trace(()), _Eager):
            return _compiled(fun, ("tap",), static, traced, args, kwargs, own)(*args, **kwargs)
        run = _compiled(fun, ("tap", options), static, eager, args, kwargs)
        with EagerCall(call) as handle:
            out, token = run(*args, **kwargs, **{_TOKEN: np.int32(handle)})
            token.block_until_ready()
        return out

    return tapped


def nolog(fun: Callable) -> Callable:
    """Transform `fun` so that its logs are gone, whatever is applied further out.

    >>> import lox
    >>> def f(x):
    ...     lox.log({"x": x})
    ...     return x
    >>> lox.spool(lox.nolog(f))(1.0)[1]
    {}
    """

    @_like(fun)
    def silent(*args: Any, **kwargs: Any) -> Any:
        with collecting(False):
            return fun(*args, **kwargs)

    return silent


_TOKEN = "lox_token"


def _print(logs: logdict) -> None:
    print(logs, flush=True)


def trace(fun: Callable, args: Any, kwargs: Any, forget: Forget) -> tuple[Any, Any, list[Any]]:
    """The jaxpr of `fun` with its logs, the structure of its result, and its flat arguments.

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
    with collecting(True):
        jaxpr, shape = jax.make_jaxpr(flat_fun, return_shape=True)(*flat)
    if any(isinstance(c, jax.core.Tracer) for c in jaxpr.consts):
        forget()
    return jaxpr, structure(shape), flat


def _compiled(
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

    jitted = memo(fun, (*key, tree, still), build, where)

    def call(*args: Any, **kwargs: Any) -> Any:
        extra = {k: kwargs.pop(k) for k in [_TOKEN] if k in kwargs}
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


def _like(fun: Callable) -> Callable[[Callable], Callable]:
    """Name, docstring and signature of `fun`, where it has them."""
    return lambda wrapper: functools.wraps(fun, updated=())(wrapper)
