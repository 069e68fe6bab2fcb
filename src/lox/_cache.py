"""A cache that a function owns: it lives as long as the function, and keeps nothing else alive."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

# By identity, because functions may define equality, and callable pytrees may not be hashable.
_owned: dict[int, tuple[Any, dict[Any, Any]]] = {}


def memo(fun: Callable, key: Any, build: Callable[[], Any], where: dict[Any, Any] | None) -> Any:
    """What `build` returned for `fun` and `key` before, or now. `where` replaces the shared cache."""
    if where is None:
        owner, method = fun, None
        if isinstance(fun, types.MethodType):  # a new object each time it is looked up
            owner, method = fun.__self__, fun.__func__
        try:
            where = _of(owner)
        except TypeError:  # no weak references: no cache that could be dropped with it
            return build()
        key = (method, key)
    if key not in where:
        where[key] = build()
    return where[key]


def _of(owner: Any) -> dict[Any, Any]:
    ident = id(owner)
    known = _owned.get(ident)
    if known is None or known[0]() is not owner:
        ref = weakref.ref(owner, lambda _, ident=ident: _owned.pop(ident, None))
        known = _owned[ident] = (ref, {})
    return known[1]


def weak_callable(fun: Callable) -> Callable[[], Any]:
    """A function that returns `fun`, without keeping it alive where that can be avoided."""
    try:
        if isinstance(fun, types.MethodType):
            return weakref.WeakMethod(fun)
        return weakref.ref(fun)
    except TypeError:
        return lambda: fun
