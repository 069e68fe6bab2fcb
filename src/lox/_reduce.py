"""Reductions over events: monoids that run in constant memory.

A `Reduction` folds the events of one key, never the axes of a value:

    init   : value -> state              the state of no event, for values shaped like this one
    update : state, value -> state       one more event
    merge  : state, state -> state       the events of the first, then those of the second
    finish : state -> result

`update` carries a reduction through loops; `merge` folds rows that are already there, in parallel.
Sums are compensated (the rounding error of each addition is kept in a second word), so a float32
mean of a million events is as good as its inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _errors

Array = Any
State = Any


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A user's own reduction over events, for `reduce=` in `spool`, `tap` and `log`.

    >>> import jax.numpy as jnp, lox
    >>> product = lox.Reduction(
    ...     init=jnp.ones_like,
    ...     update=lambda state, x: state * x,
    ...     merge=lambda a, b: a * b,
    ...     finish=lambda state: state,
    ... )
    >>> def f(xs):
    ...     for x in xs:
    ...         lox.log({"x": x})
    >>> lox.spool(f, reduce=product)(jnp.array([2.0, 3.0, 4.0]))[1]
    {'x': 24.0}

    Arguments:

    - `init`: takes zeros of a value's shape and dtype, returns the state before any event.
    - `update`: takes the state and the value of one event, returns the state after it.
    - `merge`: takes the states of two consecutive runs of events, returns that of both.
    - `finish`: takes the state, returns the result.
    - `name`: shown in messages.
    """

    init: Callable[[Array], State]
    update: Callable[[State, Array], State]
    merge: Callable[[State, State], State]
    finish: Callable[[State], Array]
    name: str = "custom"


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """`a + b` and the rounding error of that sum (zero once the sum is not finite)."""
    s = a + b
    bb = s - a
    error = (a - (s - bb)) + (b - bb)
    return s, jnp.where(jnp.isfinite(s), error, jnp.zeros_like(s))


def _accumulate(total: tuple[Array, Array], x: Array) -> tuple[Array, Array]:
    """Add `x` to a sum held in two words."""
    hi, error = two_sum(total[0], x)
    return hi, total[1] + error


def _wide(x: Array) -> Any:
    """The floating dtype in which values like `x` are averaged."""
    dtype = jnp.result_type(x)
    if not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.result_type(float)
    return jnp.promote_types(dtype, jnp.float32)


def _sum_dtype(x: Array) -> Any:
    dtype = jnp.result_type(x)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.promote_types(dtype, jnp.float32)
    return jax.eval_shape(jnp.sum, jax.ShapeDtypeStruct((1,), dtype)).dtype


def _counter() -> Array:
    return jnp.zeros((), jnp.int32)


# A sum is (count, hi, lo); integers leave lo at zero. A mean is a sum, divided at the end.


def _sum_of(dtype_of: Callable[[Array], Any], divide: bool, name: str) -> Reduction:
    def init(x: Array) -> State:
        zero = jnp.zeros(jnp.shape(x), dtype_of(x))
        return _counter(), zero, zero

    def add(hi: Array, lo: Array, x: Array) -> tuple[Array, Array]:
        return _accumulate((hi, lo), x) if jnp.issubdtype(x.dtype, jnp.inexact) else (hi + x, lo)

    def update(state: State, x: Array) -> State:
        n, hi, lo = state
        return n + 1, *add(hi, lo, jnp.asarray(x).astype(hi.dtype))

    def merge(a: State, b: State) -> State:
        hi, lo = add(a[1], a[2], b[1])
        return a[0] + b[0], hi, lo + b[2]

    def finish(state: State) -> Array:
        n, hi, lo = state
        return (hi + lo) / jnp.maximum(n, 1).astype(hi.dtype) if divide else hi + lo

    return Reduction(init, update, merge, finish, name)


# Spread is Welford's: (count, mean hi, mean lo, sum of squared deviations hi, lo).


def _spread(root: bool, name: str) -> Reduction:
    def init(x: Array) -> State:
        mean = jnp.zeros(jnp.shape(x), _wide(x))
        m2 = jnp.zeros_like(mean.real)
        return _counter(), mean, mean, m2, m2

    def update(state: State, x: Array) -> State:
        n, hi, lo, m2, m2_lo = state
        x, n = jnp.asarray(x).astype(hi.dtype), n + 1
        before = (x - hi) - lo
        hi, lo = _accumulate((hi, lo), before / n.astype(hi.dtype))
        after = (x - hi) - lo
        return n, hi, lo, *_accumulate((m2, m2_lo), (before * jnp.conj(after)).real)

    def merge(a: State, b: State) -> State:
        (na, hi, lo, m2, m2_lo), (nb, hi_b, lo_b, m2_b, m2_lo_b) = a, b
        n = na + nb
        share = nb.astype(hi.dtype) / jnp.maximum(n, 1).astype(hi.dtype)
        delta = (hi_b - hi) + (lo_b - lo)
        hi, lo = _accumulate((hi, lo), delta * share)
        m2, m2_lo = _accumulate((m2, m2_lo + m2_lo_b), m2_b)
        between = (delta * jnp.conj(delta)).real * (na.astype(m2.dtype) * share.real)
        m2, m2_lo = _accumulate((m2, m2_lo), between)
        return n, hi, lo, m2, m2_lo

    def finish(state: State) -> Array:
        n, _, _, m2, m2_lo = state
        var = (m2 + m2_lo) / jnp.maximum(n, 1).astype(m2.dtype)
        return jnp.sqrt(var) if root else var

    return Reduction(init, update, merge, finish, name)


def _extreme(choose: Callable[[Array, Array], Array], sign: int, name: str) -> Reduction:
    def init(x: Array) -> State:
        dtype = jnp.result_type(x)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise TypeError(f"reduce={name!r} has no meaning for complex values.")
        if dtype == jnp.bool_:
            worst: Any = sign > 0
        elif jnp.issubdtype(dtype, jnp.floating):
            worst = sign * np.inf
        else:
            worst = jnp.iinfo(dtype).max if sign > 0 else jnp.iinfo(dtype).min
        return jnp.full(jnp.shape(x), worst, dtype)

    update = lambda state, x: choose(state, jnp.asarray(x, state.dtype))
    return Reduction(init, update, choose, lambda state: state, name)


def _pick(last: bool, name: str) -> Reduction:
    def init(x: Array) -> State:
        return _counter(), jnp.zeros(jnp.shape(x), jnp.result_type(x))

    def merge(a: State, b: State) -> State:
        second = b[0] > 0 if last else a[0] == 0
        return a[0] + b[0], jnp.where(second, b[1], a[1])

    def update(state: State, x: Array) -> State:
        n, kept = state
        x = jnp.asarray(x, kept.dtype)
        return n + 1, (x if last else jnp.where(n == 0, x, kept))

    return Reduction(init, update, merge, lambda state: state[1], name)


REDUCTIONS: dict[str, Reduction] = {
    "mean": _sum_of(_wide, True, "mean"),
    "sum": _sum_of(_sum_dtype, False, "sum"),
    "min": _extreme(jnp.minimum, 1, "min"),
    "max": _extreme(jnp.maximum, -1, "max"),
    "first": _pick(False, "first"),
    "last": _pick(True, "last"),
    "count": Reduction(
        lambda x: _counter(), lambda n, x: n + 1, lambda a, b: a + b, lambda n: n, "count"
    ),
    "var": _spread(False, "var"),
    "std": _spread(True, "std"),
}

APPEND = "append"  # every event, always with an event axis: the free monoid


def resolve(reduce: Any) -> Any:
    """A `Reduction`, `"append"` or None, from what the user wrote."""
    if reduce is None or reduce == APPEND or isinstance(reduce, Reduction):
        return reduce
    if isinstance(reduce, str) and reduce in REDUCTIONS:
        return REDUCTIONS[reduce]
    raise _errors.unknown_reduction(reduce, [*REDUCTIONS, APPEND])


def over_lanes(fun: Callable, batch_dims: int) -> Callable:
    """`fun`, mapped over that many leading axes."""
    for _ in range(batch_dims):
        fun = jax.vmap(fun)
    return fun


def select(mask: Array, new: Any, old: Any) -> Any:
    """`new` where `mask` holds, else `old`; the mask's axes lead those of every leaf."""

    def one(a: Array, b: Array) -> Array:
        a = jnp.asarray(a)
        return jnp.where(mask.reshape(mask.shape + (1,) * (a.ndim - mask.ndim)), a, b)

    return jax.tree.map(one, new, old)


def reduce_rows(reduction: Reduction, rows: Array, mask: Array | None) -> Array:
    """Reduce the leading axis of `rows` (events in order), leaving out what `mask` says."""
    empty = jax.vmap(lambda x: reduction.init(jnp.zeros_like(x)))(rows)
    states = jax.vmap(reduction.update)(empty, rows)
    if mask is not None:
        states = select(mask, states, empty)
    size = rows.shape[0]
    if size == 0:
        return reduction.finish(reduction.init(jnp.zeros(rows.shape[1:], rows.dtype)))
    while size > 1:
        states = _merge_neighbours(reduction, states, size)
        size = (size + 1) // 2
    return reduction.finish(jax.tree.map(lambda s: s[0], states))


def _merge_neighbours(reduction: Reduction, states: State, size: int) -> State:
    """Half as many states; an odd one out waits at the end."""
    left = jax.tree.map(lambda s: s[0 : size - 1 : 2], states)
    right = jax.tree.map(lambda s: s[1:size:2], states)
    odd = jax.tree.map(lambda s: s[size - size % 2 : size], states)
    merged = jax.vmap(reduction.merge)(left, right)
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), merged, odd)
