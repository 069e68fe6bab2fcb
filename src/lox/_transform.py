"""The transformations: `spool` returns logs, `tap` streams them, `nolog` removes them.

Each traces the user's function once, with logging on, and interprets the jaxpr with a collector.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

# Imported for what they register: rules of the interpreter, and of JAX's own transformations.
from . import _custom_rules as _custom_rules
from . import _errors
from . import _jax_batching as _jax_batching
from . import _jax_derivatives as _jax_derivatives
from . import _shard_rule as _shard_rule
from ._cache import Forget
from ._collect import Silence
from ._compile import CONTEXT, TOKEN, compiled, trace
from ._host import BY_HANDLE, Callback, EagerCall, Receive, Sink
from ._interpret import interpret
from ._logdict import logdict
from ._plan import Options, make_plan
from ._primitive import collecting
from ._reduce import Reduction
from ._spool import Spool
from ._stream import Stream
from ._survey import survey

with jax.ensure_compile_time_eval():
    Eager = type(jex.find_top_trace(()))

Names = Iterable[str] | str | None
Reduce = str | Reduction | Mapping[str, str | Reduction] | None


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
        return compiled(fun, ("spool", options), static, program, args, kwargs)(*args, **kwargs)

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
    options = tap_options("lox.tap", argnames, tags, prefix, keep_logs, every, interval, reduce)
    call = _print if callback is None else callback
    if not callable(call):
        raise _errors.not_callable(call)
    return tap_into(fun, lambda logs, _: call(logs), options, (static_argnums, static_argnames))


def tap_options(
    caller: str,
    argnames: Names = None,
    tags: Names = None,
    prefix: str = "",
    keep_logs: bool = False,
    every: int | None = None,
    interval: int | None = None,
    reduce: Reduce = None,
    **unknown: Any,
) -> Options:
    if unknown:
        raise _errors.no_option(caller, next(iter(unknown)))
    return Options.make(
        argnames,
        tags,
        reduce,
        keep_logs=bool(keep_logs),
        interval=interval,
        prefix=prefix,
        every=every,
    )


def tap_into(
    fun: Callable, receive: Receive, options: Options, static: Any, context: Any = None
) -> Callable:
    """`tap` for loggers: `receive(logs, context)` also gets the arrays of `context`, as they are in
    each lane of a batch."""

    def program(run: Any, args: Any, kwargs: Any, forget: Forget, sink: Sink, token: Any) -> Any:
        context = kwargs.pop(CONTEXT, None)
        jaxpr, out_tree, flat = trace(run, args, kwargs, forget)
        stream = Stream(jaxpr, options, sink, token, context)
        outs = interpret(jaxpr, flat, stream)
        return out_tree.unflatten(outs), stream.finish()

    def eager(fun: Callable, args: Any, kwargs: Any, forget: Forget) -> Any:
        return program(fun, args, kwargs, forget, BY_HANDLE, kwargs.pop(TOKEN))

    def traced(fun: Callable, args: Any, kwargs: Any, forget: Forget) -> Any:
        return program(fun, args, kwargs, forget, Sink(receive), jnp.int32(0))[0]

    own: dict[Any, Any] = {}  # what is compiled with `receive` in it lives as long as `tapped`
    extra = {} if context is None else {CONTEXT: context}

    @_like(fun)
    def tapped(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(jex.find_top_trace(jax.tree.leaves(context)), Eager):
            run = compiled(fun, ("tap",), static, traced, args, kwargs, own)
            return run(*args, **kwargs, **extra)
        run = compiled(fun, ("tap", options), static, eager, args, kwargs)
        with EagerCall(receive) as handle:
            out, token = run(*args, **kwargs, **extra, **{TOKEN: np.int32(handle)})
            jax.block_until_ready(token)
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
        if not collecting.value:
            return fun(*args, **kwargs)
        # Logs of the function itself are not even traced; those of derivative rules may be, later.
        jaxpr, out_tree, flat = trace(fun, args, kwargs, lambda: None, logs=False)
        return out_tree.unflatten(interpret(jaxpr, flat, Silence({})))

    return silent


def _print(logs: logdict) -> None:
    print(logs, flush=True)


def _like(fun: Callable) -> Callable[[Callable], Callable]:
    """Name, docstring and signature of `fun`, where it has them."""
    return lambda wrapper: functools.wraps(fun, updated=())(wrapper)
