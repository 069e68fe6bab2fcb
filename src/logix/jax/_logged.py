"""Values that the model logs itself, by `lox.log`: where they are made, so that both they and their
gradients can be taken there.

A log says that a variable is worth logging; the equation that makes it is where its gradient is
whole. A variable that a called function gets from outside is made outside, and so on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from lox._collect import keys_in
from lox._event import leaf_name
from lox._primitive import is_log, log_p

from ._site import Loop


@dataclasses.dataclass(frozen=True)
class Logged:
    """A variable that is logged: the number of the output (or input) it is, and its name."""

    key: str
    name: str
    number: int
    aval: Any
    loops: tuple[Loop, ...]

    @property
    def differentiable(self) -> bool:
        return jnp.issubdtype(self.aval.dtype, jnp.inexact)


class Logs:
    """The logs that are wanted, by patterns of their names."""

    def __init__(self, patterns: Sequence[str] = ()):
        self.patterns = tuple(patterns)
        self.seen: dict[str, None] = {}  # names of all logs, wanted or not

    def wanted(self, name: str) -> bool:
        return any(fnmatchcase(name, p) for p in self.patterns)

    def places(
        self, jaxpr: Any, loops: tuple[Loop, ...], keys: Iterator[int]
    ) -> tuple[list[Logged], dict[int, list[Logged]]]:
        """What is logged in a jaxpr: of its inputs, and of the outputs of its equations."""
        if not self.patterns or not is_log(jaxpr.effects):
            return [], {}
        names: dict[Any, dict[str, None]] = {}
        for eqn in jaxpr.eqns:
            for var, name in _fields(eqn):
                self.seen[name] = None
                if not self.wanted(name):
                    continue
                if isinstance(var, jex.Literal) or var in jaxpr.constvars:
                    raise ValueError(
                        f"what is logged as {name!r} is the same for all examples, and has no "
                        "gradient. Leave it out of logs="
                    )
                names.setdefault(var, {})[name] = None
        make = lambda v, k: [
            Logged(f"log {next(keys)}", name, k, v.aval, loops) for name in names.get(v, ())
        ]
        all_of = lambda vs: [x for k, v in enumerate(vs) for x in make(v, k)]
        made = {id(eqn): own for eqn in jaxpr.eqns if (own := all_of(eqn.outvars))}
        return all_of(jaxpr.invars), made

    def inside(self, eqn: Any) -> bool:
        """Whether there may be logs in the bodies of an equation."""
        return bool(self.patterns) and eqn.primitive is not log_p and is_log(eqn.effects)

    def refuse(self, eqn: Any) -> None:
        """An equation that is not looked into has none that is wanted."""
        if not self.inside(eqn):
            return
        for body in eqn.params.values():
            for name in keys_in(body) if hasattr(body, "eqns") or hasattr(body, "jaxpr") else ():
                if self.wanted(name):
                    raise ValueError(
                        f"{name!r} is logged inside of {eqn.primitive.name}, from where neither it "
                        "nor its gradient can be taken. Log it outside, or leave it out of logs=."
                    )


def _fields(eqn: Any) -> Iterator[tuple[Any, str]]:
    """The variables of a log, with their names."""
    if eqn.primitive is not log_p:
        return
    start = 0
    for field in eqn.params["spec"].fields:
        n = len(field.ndims)
        paths = jax.tree_util.tree_flatten_with_path(field.tree.unflatten([0] * n))[0]
        for (path, _), var in zip(paths, eqn.invars[start : start + n]):
            yield var, leaf_name(field.key, path) if path else field.key
        start += n
