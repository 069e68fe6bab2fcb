"""Logs where no one would see them: inside a primitive that does not say it holds any.

The effects of an equation tell whether there is a log inside. A primitive of another library may
take a jaxpr and not pass its effects on; then its logs would be lost in silence. So the parameters
of every equation are searched, once for each jaxpr.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from jax.extend import core as jex

from . import _errors
from ._event import Spec
from ._primitive import log_p


def first_log(eqn: Any) -> Spec | None:
    """The description of some log inside an equation, for messages."""
    return next(_logs_in(eqn), None)


def _logs_in(eqn: Any) -> Iterator[Spec]:
    for sub in _subjaxprs(eqn.params, foreign_only=False):
        for inner in sub.eqns:
            if inner.primitive is log_p:
                yield inner.params["spec"]
            yield from _logs_in(inner)


_clean: weakref.WeakSet[Any] = weakref.WeakSet()


def check_hidden(eqn: Any) -> None:
    """A primitive that takes a body with logs, but does not say so, would lose them in silence."""
    for sub in _subjaxprs(eqn.params, foreign_only=True):
        if sub in _clean:
            continue
        for inner in sub.eqns:
            if inner.primitive is log_p and inner.params["sink"] is None:
                why = "it hides that there is a log inside"
                raise _errors.no_rule(eqn.primitive.name, inner.params["spec"], why)
            check_hidden(inner)
        _clean.add(sub)


def _subjaxprs(params: dict[str, Any], foreign_only: bool) -> Iterable[Any]:
    """All jaxprs in the parameters of an equation, also inside of other libraries' objects.

    JAX's own objects hold none without saying so in the effects, but may be large.
    """
    skip = ("jax", *_BASIC) if foreign_only else _BASIC
    for value in params.values():
        yield from _jaxprs_in(value, 5, skip)


def _jaxprs_in(value: Any, depth: int, skip: tuple[str, ...]) -> Iterable[Any]:
    if isinstance(value, jex.Jaxpr):
        yield value
    elif isinstance(value, jex.ClosedJaxpr):
        yield value.jaxpr
    elif value is None or isinstance(value, _PLAIN) or depth == 0:
        return
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _jaxprs_in(item, depth - 1, skip)
    elif isinstance(value, dict):
        yield from _jaxprs_in(list(value.values()), depth - 1, skip)
    elif not type(value).__module__.startswith(skip):
        yield from _jaxprs_in(list(getattr(value, "__dict__", {}).values()), depth - 1, skip)


_BASIC = ("numpy", "builtins", "types")
_PLAIN = (bool, int, float, str, bytes, np.dtype, np.ndarray, type)
