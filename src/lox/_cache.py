"""A cache that a function owns: it lives as long as the function, and keeps nothing else alive."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

# By identity, because functions may define equality, and callable pytrees may not be hashable.
_owned: dict[int, tuple[Any, dict[Any, Any]]] = {}


# How many variants (options, static arguments) of one function are kept.
LIMIT = 32

Forget = Callable[[], None]


def memo(
    fun: Callable, key: Any, build: Callable[[Forget], Any], where: dict[Any, Any] | None
) -> Any:
    """What `build` returned for `fun` and `key`, before or now; kept in `where`, if given.

    `build` gets a function that forgets its result, for the case that it turns out not to be of use
    a second time.
    """
    if where is None:
        owner: Any = fun
        method = None
        if isinstance(fun, types.MethodType):  # a new object each time it is looked up
            owner, method = fun.__self__, fun.__func__
        where = _of(owner)
        key = (method, key)
    kept = where
    found = kept.get(key)
    if found is not None:
        if len(kept) > LIMIT // 2:
            kept[key] = kept.pop(key)  # the latest last
        return found
    kept[key] = built = build(lambda: kept.pop(key, None))
    while len(kept) > LIMIT:
        kept.pop(next(iter(kept)))
    return built


def _of(owner: Any) -> dict[Any, Any]:
    ident = id(owner)
    known = _owned.get(ident)
    if known is None or known[0]() is not owner:
        try:
            alive: Any = weakref.ref(owner, functools.partial(_forget, ident))
        except TypeError:  # an object without weak references: of those, a few are kept alive
            alive = functools.partial(lambda x: x, owner)
            strong = [k for k, (a, _) in _owned.items() if isinstance(a, functools.partial)]
            for old in strong[: len(strong) + 1 - LIMIT]:
                _owned.pop(old, None)
        known = _owned[ident] = (alive, {})
    return known[1]


def _forget(ident: int, _: Any) -> None:
    _owned.pop(ident, None)


def weak_callable(fun: Callable) -> Callable[[], Any]:
    """A function that returns `fun`, without keeping it alive where that can be avoided."""
    try:
        if isinstance(fun, types.MethodType):
            return weakref.WeakMethod(fun)
        return weakref.ref(fun)
    except TypeError:
        return lambda: fun
