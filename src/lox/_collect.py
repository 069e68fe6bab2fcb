"""Collectors: what becomes of the events of a program.

A collector meets events one by one and keeps what it needs in two places:

    state   a dict of arrays that is carried through the program, in and out of every loop, branch
            and call (reductions, ring buffers, the token of a stream)
    rows    a dict of `Rows`: events that leave a body as extra outputs (stacked by scans)

Rules use `borrow`, `run` and `absorb`, and know nothing else of a collector:

    state = collector.borrow(body)                       what the body needs of the state
    outs, state, rows = collector.run(body, args, state) pure: may be called inside lax.scan etc.
    collector.absorb(state, rows)                        afterwards, outside
"""

from __future__ import annotations

import copy
import weakref
from typing import Any, ClassVar, Self

import jax
from jax.sharding import PartitionSpec as P

from . import _compat
from ._event import Array, Event
from ._interpret import RULES, interpret
from ._primitive import EventEffect, LogEffect, emit, handed_on, is_log, read
from ._rows import Rows, combine
from ._survey import survey

State = dict[str, Any]


class Collector:
    """The common part; a collector says what to do with an event."""

    effect: ClassVar[type] = LogEffect
    defers: ClassVar[bool] = False  # may events wait until the equations after them are bound

    def __init__(self, state: State):
        self.state = state
        self.rows: dict[str, Rows] = {}

    def event(self, args: list[Array], params: dict[str, Any]) -> list[Array]:
        raise NotImplementedError

    def enters(self, eqn: Any) -> bool:
        """Whether to look at an equation that has no event in sight."""
        return False

    def equation(self, eqn: Any, args: list[Array]) -> list[Array] | None:
        """A chance to treat an equation in its own way; None leaves it to the rules."""
        return None

    def made(self, eqn: Any, outs: list[Array]) -> list[Array]:
        """A chance to change what an equation that was looked at has made."""
        return outs

    def loop(self, eqn: Any, args: list[Array]) -> list[Array] | None:
        """A chance to treat a whole loop in its own way; None leaves it to the rule."""
        return None

    def for_rules(self) -> Collector:
        """What to do with events of a custom derivative's own rule. They are not the function's."""
        return Drop({})

    def borrow(self, *jaxprs: Any) -> State:
        return self.state

    def at(self, state: State) -> Self:
        """The same collector at another point of the program."""
        other = copy.copy(self)
        other.state, other.rows = dict(state), {}
        return other

    def run(self, jaxpr: Any, args: list[Array], state: State) -> tuple[Any, State, Any]:
        child = self.at(state)
        outs = interpret(_compat.closed(jaxpr), args, child)
        return outs, child.state, child.rows

    # Crossing into a shard_map: by default the state is the same on all shards.

    def cross(self, state: State, sites: dict[str, Any]) -> tuple[Any, Any]:
        """The state as arguments of a shard_map, any shard axis in front, and their specs.

        `sites` tells for each key where it is logged inside.
        """
        return state, jax.tree.map(lambda _: P(), state)

    def back(self, state: Any, sites: dict[str, Any]) -> State:
        """The inverse of `cross`."""
        return state

    def absorb(self, state: State, rows: dict[str, Rows]) -> None:
        self.state = {**self.state, **state}
        for key, new in rows.items():
            self.rows[key] = combine(self.rows[key], new) if key in self.rows else new


class Rewrite(Collector):
    """Bind every event again, changed."""

    effect = EventEffect

    def for_rules(self) -> Collector:
        return self

    def event(self, args: list[Array], params: dict[str, Any]) -> list[Array]:
        event, anchor, token = read(args, params)
        outs = self.bind_again(event, anchor, params["sink"], token)
        return [x for x in outs if x is not None]

    def bind_again(self, event: Event, anchor: Any, sink: Any, token: Any) -> tuple[Any, Any]:
        raise NotImplementedError


class Mask(Rewrite):
    """Events happen only where a condition holds: `state["where"]`, read only."""

    def bind_again(self, event: Event, anchor: Any, sink: Any, token: Any) -> tuple[Any, Any]:
        return emit(event.masked(self.state["where"]), anchor, sink, token)


class Anchor(Rewrite):
    """Events are strung on `state["anchor"]`, which the loop around them carries."""

    def bind_again(self, event: Event, anchor: Any, sink: Any, token: Any) -> tuple[Any, Any]:
        here = self.state["anchor"]
        # An event that has an anchor already, of a loop further out, is strung on both.
        new, token = emit(event, here if anchor is None else anchor + here, sink, token)
        self.state = {"anchor": new}
        return (None if anchor is None else new), token


class Drop(Rewrite):
    """Events disappear."""

    def for_rules(self) -> Collector:
        return self

    def event(self, args: list[Array], params: dict[str, Any]) -> list[Array]:
        return handed_on(args, params)


class Silence(Drop):
    """Events disappear, also those that a custom derivative's rule will only log when it is run."""

    def enters(self, eqn: Any) -> bool:
        return eqn.primitive.name in RULES


def has_events(*jaxprs: Any) -> bool:
    return any(is_log(j.effects, EventEffect) for j in jaxprs)


_keys: weakref.WeakKeyDictionary[Any, frozenset[str]] = weakref.WeakKeyDictionary()


def keys_in(jaxpr: Any) -> frozenset[str]:
    """The keys logged anywhere inside a jaxpr."""
    if jaxpr not in _keys:
        _keys[jaxpr] = frozenset(survey(jaxpr, lambda spec: set(spec.keys)).sites)
    return _keys[jaxpr]
