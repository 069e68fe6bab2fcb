"""The collector behind `tap`: every event becomes a call of the host, in program order.

With `every=N`, the outermost loop that logs is cut into windows of N iterations. The events of a
window are spooled, and one call carries them all. Keys that are reduced are sent once for each
window, or once at the end where there are no windows.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import _compat
from ._collect import Collector
from ._event import Array, Event, Field, Spec, once
from ._logdict import logdict
from ._plan import Options, make_plan
from ._primitive import emit, read
from ._reduce import Reduction
from ._rules import While, run_scan, split
from ._spool import Spool, pass_on
from ._survey import Survey, survey


class Stream(Collector):
    """Send events to a sink. State: the token, counts for `interval`, reductions over the call.

    `context` is a pytree of arrays that goes with everything that is sent (which run it is of).
    """

    def __init__(self, jaxpr: Any, options: Options, sink: Any, token: Array, context: Any = None):
        self.options, self.sink = options, sink
        found = survey(jaxpr, options.select)
        self.repeated = found.repeated()
        found = found.once(self.repeated)
        self.lanes = {k for k, sites in found.sites.items() if any(s.masked for s in sites)}
        reduced = (
            set() if options.every else {k for k in found.sites if _reduced(k, found, options)}
        )
        self.folds = Spool(make_plan(found.only(reduced), options), options, self.repeated)
        self.group = _groups(found)
        seen = {}
        if options.interval and options.interval > 1:
            seen = {g: _counter(found, g) for g in self.group.values() if g not in reduced}
        super().__init__(
            {"token": token, "context": context, "seen": seen, "folds": self.folds.state}
        )

    def event(self, args: list[Array], params: dict[str, Any]) -> list[Array]:
        event, anchor, _ = read(args, params)
        wanted, anchor = pass_on(self.options, event, anchor)
        folded = wanted & set(self.folds.plan)
        if folded:
            spool = self.folds.at(self.state["folds"])
            spool.keep(event.only(folded))
            self.state = self.state | {"folds": spool.state}
        event = once(event, self.repeated)
        streamed = wanted - folded
        if not self.state["seen"]:
            if streamed:
                self._send_event(event.only(streamed))
            return [] if anchor is None else [anchor]
        for group in dict.fromkeys(self.group[k] for k in event.spec.keys if k in streamed):
            self._send_if_due(group, event.only({k for k in streamed if self.group[k] == group}))
        return [] if anchor is None else [anchor]

    def _send_event(self, event: Event) -> None:
        fields = zip(event.spec.fields, event.values, strict=True)
        data = {self.options.prefix + f.key: f.tree.unflatten(v) for f, v in fields}
        ndims = {self.options.prefix + f.key: f.ndims for f in event.spec.fields}
        steps = dict(zip(event.spec.steps, event.steps, strict=True))
        logs = logdict.one_event(data, steps, ndims, event.spec.step_ndims)
        if self.options.every:  # outside of any loop, a window is one event
            for key in event.spec.keys:
                reduction = self.options.reduction(key, event.spec)
                if isinstance(reduction, Reduction):
                    name = self.options.prefix + key
                    logs.update(_only(logs, name).reduce(reduction))
        self.send(logs, event.spec, event.mask, event.batch)

    def send(self, logs: logdict, spec: Spec, mask: Array | None = None, batch: Any = ()) -> None:
        """One host call with this logdict; `mask` tells which lanes of the batch take part."""
        event = message(logs, self.state["context"], spec, mask, batch)
        _, token = emit(event, sink=self.sink, token=self.state["token"])
        self.state = self.state | {"token": token}

    def _send_if_due(self, group: str, event: Event) -> None:
        """Send events 0, n, 2n … of these keys. Off beat there is no host call at all."""
        assert self.options.interval is not None
        seen = self.state["seen"][group]
        due, more = seen == 0, jnp.ones_like(seen)
        if event.mask is not None:
            more = event.mask.astype(seen.dtype)
        if seen.ndim or event.mask is not None:  # each lane has its own beat
            event = event.masked(due)
            due = event.mask  # type: ignore[assignment]

        def send(token: Array) -> Array:
            child = self.at(self.state | {"token": token})
            child._send_event(event)
            return child.state["token"]

        token = lax.cond(jnp.any(due), send, lambda token: token, self.state["token"])
        seen = {**self.state["seen"], group: (seen + more) % self.options.interval}
        self.state = self.state | {"token": token, "seen": seen}

    def cross(self, state: Any, sites: dict[str, Any]) -> tuple[Any, Any]:
        rest, rest_specs = super().cross({k: v for k, v in state.items() if k != "folds"}, sites)
        inside = {k: v for k, v in state["folds"].items() if k in sites}
        folds, specs = self.folds.cross(inside, sites)
        return {**rest, "folds": folds}, {**rest_specs, "folds": specs}

    def back(self, state: Any, sites: dict[str, Any]) -> Any:
        folds = {**self.state["folds"], **self.folds.back(state["folds"], sites)}
        return {**state, "folds": folds}

    def finish(self) -> Array:
        """Send what was reduced over the whole call; returns the last token."""
        if self.folds.plan:
            spool = self.folds.at(self.state["folds"])
            self.send(spool.finish(), spool.some_spec)
        return self.state["token"]

    # --- windows ---------------------------------------------------------------------------------

    def loop(self, eqn: Any, args: list[Array]) -> list[Array] | None:
        if self.options.every is None:
            return None
        if self._unbounded(eqn.params):
            return None  # an iteration may log without bound: windows go around the loops inside
        cut = _cut_scan if eqn.primitive.name == "scan" else _cut_while
        return cut(self, eqn, args, self.options.every)

    def _unbounded(self, params: Any) -> bool:
        """May an iteration of this loop log any number of events that must all be kept?"""
        bodies = [params[n] for n in ("jaxpr", "cond_jaxpr", "body_jaxpr") if n in params]
        for found in (survey(b, self.options.select) for b in bodies):
            for key, most in found.most.items():
                if math.isinf(most) and not _reduced(key, found, self.options):
                    return True
        return False

    def window(self, found: Survey, carried: bool = False) -> Spool:
        """A fresh spool for the events of one window."""
        plan = make_plan(found.once(self.repeated), self.options, carried, self.lanes)
        return Spool(plan, self.options, self.repeated)

    def on_beat(self, spool: Spool, seen: Any) -> Any:
        """The initial state of a window, which goes on counting for `interval`."""
        go_on = lambda k, s: s | {"seen": seen[self.group[k]]} if "seen" in s else s
        return {k: go_on(k, s) for k, s in spool.state.items()}

    def beat(self, spool: Spool, seen: Any) -> Any:
        """The counts for `interval` after a window."""
        inside = {self.group[k]: s["seen"] for k, s in spool.state.items() if "seen" in s}
        return {**seen, **inside}

    def send_window(self, spool: Spool, token: Array) -> Array:
        child = self.at(self.state | {"token": token})
        if spool.plan:
            child.send(spool.finish(), spool.some_spec)
        return child.state["token"]


def message(
    logs: logdict, context: Any, spec: Spec, mask: Array | None = None, batch: Any = ()
) -> Event:
    """A logdict and its context as an event for a sink; `_host.contents` is the inverse."""
    leaves, tree = jax.tree.flatten((logs, context))
    leaves = [jnp.asarray(x) for x in leaves]
    field = Field("", tree, tuple(max(x.ndim - len(batch), 0) for x in leaves))
    spec = dataclasses.replace(spec, fields=(field,), steps=(), step_ndims=(), reduce=None)
    return Event(spec, [leaves], [], mask, batch)


def _only(logs: logdict, name: str) -> logdict:
    return logs.filter(lambda key, _: key == name)


def _reduced(key: str, found: Survey, options: Options) -> bool:
    return isinstance(options.reduction(key, found.sites[key][0].spec), Reduction)


def _groups(found: Survey) -> dict[str, str]:
    """Keys that are always logged together share a counter: key -> the first key of its group."""
    names: dict[Any, str] = {}
    where = {k: tuple(id(s.spec) for s in sites) for k, sites in found.sites.items()}
    return {k: names.setdefault(ids, k) for k, ids in where.items()}


def _counter(found: Survey, key: str) -> Array:
    sites = found.sites[key]
    return jnp.zeros(sites[0].batch if any(s.masked for s in sites) else (), jnp.int32)


def _cut_scan(stream: Stream, eqn: Any, args: list[Array], every: int) -> list[Array]:
    """A scan as a scan of windows, and one shorter window for the remainder."""
    params, body = eqn.params, eqn.params["jaxpr"]
    n_consts, n_carry = _compat.scan_arity(params)
    consts, carry, xs = split(args, n_consts, n_carry)
    length, reverse = params["length"], params["reverse"]
    whole, rest = divmod(length, every)
    found = survey(body, stream.options.select)

    def window(size: int, state: Any, xs: Any) -> Any:
        values, token, seen = state
        events = Survey()
        events.add(found, size, size, True)
        spool = stream.window(events)
        start = stream.on_beat(spool, seen)
        outs, new_state, rows = run_scan(params, [*consts, *values, *xs], spool, start, size)
        spool.absorb(new_state, rows)
        values, ys = split(outs, n_carry)
        return (values, stream.send_window(spool, token), stream.beat(spool, seen)), ys

    # In a reverse scan the remainder comes last in program order, but first in the arrays.
    start = rest if reverse else 0
    chunk = lambda x: x[start : start + whole * every].reshape(whole, every, *x.shape[1:])
    remainder = lambda x: x[:rest] if reverse else x[whole * every :]
    state = (carry, stream.state["token"], stream.state["seen"])
    parts = []
    if whole:
        step = lambda state, xs: window(every, state, xs)
        state, ys = lax.scan(step, state, [chunk(x) for x in xs], whole, reverse=reverse)
        parts.append([y.reshape(whole * every, *y.shape[2:]) for y in ys])
    if rest or not whole:
        state, ys = window(rest, state, [remainder(x) for x in xs])
        parts.append(ys)
    parts = parts[::-1] if reverse else parts
    ys = parts[0] if len(parts) == 1 else [jnp.concatenate(p) for p in zip(*parts, strict=True)]
    carry, token, seen = state
    stream.state = stream.state | {"token": token, "seen": seen}
    return [*carry, *ys]


def _cut_while(stream: Stream, eqn: Any, args: list[Array], every: int) -> list[Array]:
    """A while loop as a loop over windows; each runs up to `every` iterations."""
    select = stream.options.select
    in_cond, in_body = (survey(eqn.params[n], select) for n in ("cond_jaxpr", "body_jaxpr"))
    first, events = Survey(), Survey()
    first.add(in_cond, loop=True)
    events.add(in_body, 0, every, True)
    events.add(in_cond, 0, every, True)

    def outer(carry: Any) -> Any:
        values, pred, token, seen = carry
        spool = stream.window(events, carried=True)
        loop = While(eqn, args, spool)
        start = stream.on_beat(spool, seen)
        again = lambda c: (c[0] < every) & loop.keep_going(c[1])
        more = lambda c: (c[0] + 1, loop.step(c[1]))
        _, (values, pred, state) = lax.while_loop(
            again, more, (jnp.int32(0), (values, pred, start))
        )
        spool.absorb(state, {})
        return values, pred, stream.send_window(spool, token), stream.beat(spool, seen)

    spool = stream.window(first, carried=True)
    start = While(eqn, args, spool)
    values, pred, state = start.start(stream.on_beat(spool, stream.state["seen"]))
    spool.absorb(state, {})
    token = stream.send_window(spool, stream.state["token"])
    seen = stream.beat(spool, stream.state["seen"])
    keep_going = lambda c: start.keep_going((c[0], c[1], None))
    values, _, token, seen = lax.while_loop(keep_going, outer, (values, pred, token, seen))
    stream.state = stream.state | {"token": token, "seen": seen}
    return values
