"""What user code calls: `log` and `log_grad`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _errors
from ._event import Event, Field, Spec
from ._logdict import RESERVED, logdict
from ._primitive import collecting, emit
from ._probe import probe
from ._reduce import resolve

_ARRAYS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


def log(
    data: Mapping[str, Any],
    *,
    tags: Iterable[str] = (),
    explicit: bool = False,
    prefix: str = "",
    reduce: Any = None,
    **steps: Any,
) -> logdict:
    """Log named values from inside a function. It costs nothing until someone asks for them.

    >>> import jax, lox
    >>> def f(x):
    ...     lox.log({"x": x}, step=0)
    ...     return x + 1.0
    >>> jax.jit(f)(1.0)
    Array(2., dtype=float32, weak_type=True)
    >>> lox.spool(f)(1.0)
    (Array(2., dtype=float32, weak_type=True), {'x': 1.0})

    Arguments:

    - `data`: maps names to arrays, numbers, bools, or pytrees of them.
    - `tags`: words by which `spool` and `tap` can select this log.
    - `explicit`: if true, the log appears only where its key is named in `argnames`.
    - `prefix`: put in front of every key.
    - `reduce`: how events of these keys are combined, whatever `spool` or `tap` say.
    - `steps`: any other keyword is the name of a step, kept beside the value.

    Returns the logdict of this one event.
    """
    line = caller_line()
    spec, values, step_values = describe(data, tags, explicit, prefix, reduce, steps, line)
    if collecting.value and spec.fields:
        keyed = zip(spec.fields, values, strict=True)
        arrays = [[_array(f.key, x, line) for x in leaves] for f, leaves in keyed]
        at = [_array(n, s, line) for n, s in zip(spec.steps, step_values, strict=True)]
        emit(Event(spec, arrays, at, None, ()))
    whole = {f.key: f.tree.unflatten(v) for f, v in zip(spec.fields, values, strict=True)}
    ndims = {f.key: f.ndims for f in spec.fields}
    named = dict(zip(spec.steps, step_values, strict=True))
    return logdict.one_event(whole, named, ndims, spec.step_ndims)


def log_grad(x: Any, name: str, *, tags: Iterable[str] = (), **steps: Any) -> Any:
    """Return `x` as it is, and log the cotangent that reaches it in the backward pass.

    >>> import jax, lox
    >>> def loss(w):
    ...     h = lox.log_grad(2.0 * w, "dh")
    ...     return h**2
    >>> grad, logs = lox.spool(jax.grad(loss))(3.0)
    >>> logs
    {'dh': 12.0}

    Arguments:

    - `x`: an array or a pytree of arrays.
    - `name`: the key under which the cotangent is logged.
    - `tags`, `steps`: as for `log`.
    """
    line = caller_line()
    spec, [leaves], step_values = describe({name: x}, tags, False, "", None, steps, line)
    for leaf in leaves:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise _errors.no_cotangent(name, leaf, line)
    if not collecting.value:
        return x
    out = probe(spec, [jnp.asarray(v) for v in leaves], [jnp.asarray(s) for s in step_values])
    return spec.fields[0].tree.unflatten(out)


def _array(key: str, value: Any, line: str) -> Any:
    try:
        return jnp.asarray(value)
    except (OverflowError, TypeError) as error:
        raise _errors.no_such_number(key, value, line, error) from None


def caller_line() -> str:
    """Where the user called: file:line of the first frame outside of lox and logify."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and _own(frame):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _own(frame: Any) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("lox", "logify")


def describe(
    data: Any,
    tags: Iterable[str],
    explicit: bool,
    prefix: str,
    reduce: Any,
    steps: dict[str, Any],
    line: str,
) -> tuple[Spec, list[list[Any]], list[Any]]:
    """Check a log call; split it into its static description and its leaves."""
    if not isinstance(data, Mapping):
        raise _errors.not_a_mapping(data, line)
    tags = (tags,) if isinstance(tags, str) else tuple(tags or ())
    if not isinstance(prefix, str):
        raise _errors.not_a_string("prefix", prefix)
    if isinstance(data, logdict) and data.steps:
        raise _errors.steps_inside(data, line)
    try:
        resolve(reduce)
    except ValueError as error:
        raise _errors.in_log(error, data, line) from None
    steps = {name: steps[name] for name in sorted(steps)}  # so that their order does not matter
    fields, values = [], []
    for key, value in data.items():
        if not isinstance(key, str):
            raise _errors.bad_key(key, line)
        leaves, tree = jax.tree.flatten(value)
        if not leaves:
            raise _errors.no_leaves(key, line)
        for leaf in leaves:
            check_leaf(key, leaf, line)
        fields.append(Field(prefix + key, tree, tuple(np.ndim(v) for v in leaves)))
        values.append(leaves)
    for name, value in steps.items():
        if name in RESERVED or name.startswith("_"):
            raise _errors.step_name_taken(name, line)
        check_leaf(name, value, line, step=True)
    ndims = tuple(np.ndim(s) for s in steps.values())
    spec = Spec(tuple(fields), tuple(steps), ndims, tuple(tags), bool(explicit), reduce, line)
    return spec, values, list(steps.values())


def check_leaf(name: str, leaf: Any, line: str, step: bool = False) -> None:
    if not isinstance(leaf, _ARRAYS):
        raise _errors.not_an_array(name, leaf, line, step)
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        raise _errors.random_key(name, line, step)
    if dtype.kind in "OSUMm":
        raise _errors.not_an_array(name, leaf, line, step)
