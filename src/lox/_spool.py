"""The collector behind `spool`: keeps events as rows, in a ring, or folded, as the plan says."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from . import _errors
from ._collect import Collector, State, keys_in
from ._compat import as_varying, explicit_sharding, reshard_like
from ._event import Array, Axis, Event, Spec, once
from ._logdict import Entry, Layout, logdict
from ._plan import Options, Plan, Track
from ._primitive import emit_if_collecting, read
from ._reduce import REDUCTIONS, over_lanes, select
from ._rows import Rows, expand
from ._survey import Site


def pass_on(options: Options, event: Event, anchor: Any) -> tuple[set[str], Any]:
    """Hand what is not asked for (or to be kept) to a transformation further out.

    Returns the keys that are asked for, and the anchor to go on with.
    """
    wanted = options.select(event.spec)
    rest = set(event.spec.keys) - (set() if options.keep_logs else wanted)
    return wanted, emit_if_collecting(event.only(rest), anchor) if rest else anchor


class Spool(Collector):
    """Collect the planned keys; pass on the others, and all with `keep_logs`."""

    defers = True

    def __init__(self, plan: Plan, options: Options, repeated: frozenset[Axis] = frozenset()):
        super().__init__({t.key: _started(t) for t in plan.values() if t.kind != "rows"})
        self.plan, self.options, self.repeated = plan, options, repeated

    def borrow(self, *jaxprs: Any) -> State:
        inside = frozenset().union(*(keys_in(j) for j in jaxprs))
        return {k: v for k, v in self.state.items() if k in inside}

    def event(self, args: list[Array], params: dict[str, Any]) -> list[Array]:
        event, anchor, _ = read(args, params)
        wanted, anchor = pass_on(self.options, event, anchor)
        self.keep(event.only(wanted))
        return [] if anchor is None else [anchor]

    def keep(self, event: Event) -> None:
        """Take in all keys of an event."""
        event = once(event, self.repeated)
        for field, leaves in zip(event.spec.fields, event.values, strict=True):
            self._keep(self.plan[field.key], event, leaves)

    @property
    def some_spec(self) -> Spec:
        """The description of some log call, for messages about them all."""
        return next(iter(self.plan.values())).spec

    def _keep(self, track: Track, event: Event, leaves: list[Array]) -> None:
        cast = lambda x, dtype: as_varying(_cast(x, dtype), track.varying)
        leaves = [cast(x, d) for x, d in zip(leaves, track.dtypes, strict=True)]
        steps = [cast(x, d) for x, d in zip(event.steps, track.step_dtypes, strict=True)]
        if track.kind == "rows":
            rows = Rows(leaves, steps, event.mask, event.batch, True)
            self.absorb({}, {track.key: rows})
        else:
            add = _push if track.kind == "ring" else _fold
            state = _gated(add, track, self.state[track.key], leaves, steps, event)
            self.state = {**self.state, track.key: state}

    def cross(self, state: State, sites: dict[str, Site]) -> tuple[Any, Any]:
        out, specs = {}, {}
        for key, value in state.items():
            shards = sites[key].shards
            spec = P() if shards is None else P(shards.axes)
            out[key] = _move_shards(value, sites[key], to_front=True)
            specs[key] = jax.tree.map(lambda _, s=spec: s, value)
        return out, specs

    def back(self, state: Any, sites: dict[str, Site]) -> State:
        return {k: _move_shards(v, sites[k], to_front=False) for k, v in state.items()}

    def finish(self) -> logdict:
        """The logdict of all that was collected."""
        entries = {}
        for key, track in self.plan.items():
            if track.kind == "rows":
                entry = _finish_rows(track, self.rows[key])
            elif track.kind == "ring":
                entry = _finish_ring(track, self.state[key])
            else:
                entry = _finish_fold(track, self.state[key])
            entries[self.options.prefix + key] = entry
        return logdict.of_entries(entries)


def _move_shards(state: Any, site: Site, to_front: bool) -> Any:
    """Move the shard axis between its place among the batch axes and the front."""
    if site.shards is None:
        return state

    def move(x: Array, ring: int) -> Array:
        ends = site.outside + ring, 0
        return jnp.moveaxis(x, *(ends if to_front else ends[::-1]))

    return {k: jax.tree.map(lambda x, r=k == "ring": move(x, r), v) for k, v in state.items()}


def _cast(x: Array, dtype: Any) -> Array:
    return jax.lax.convert_element_type(x, dtype)  # also makes a weakly typed value strong


# --- state ---------------------------------------------------------------------------------------
# Every array of a state has the batch axes in front, but a ring's buffers have the ring axis first.


def _started(track: Track) -> Any:
    try:
        return _typed(track, _initial(track))
    except TypeError as error:  # a reduction that can't take such values
        raise _errors.in_log(error, [track.key], track.spec.line) from error


def _initial(track: Track) -> Any:
    lanes = track.batch if track.by_lane else ()
    state: dict[str, Any] = {"count": jnp.zeros(lanes, jnp.int32)}
    if track.interval > 1:
        state["seen"] = jnp.zeros(lanes, jnp.int32)
    zeros = lambda shape, dtype: jnp.zeros((*track.batch, *shape), dtype)
    values = [zeros(s, d) for s, d in zip(track.shapes, track.dtypes, strict=True)]
    steps = [zeros(s, d) for s, d in zip(track.step_shapes, track.step_dtypes, strict=True)]
    if track.kind == "ring":
        ring = lambda x: jnp.zeros((track.size, *x.shape), x.dtype)
        return state | {"ring": jax.tree.map(ring, (values, steps))}
    assert track.reduction is not None
    init = over_lanes(track.reduction.init, len(track.batch))
    kept = [init(x) for x in (values[:1] if track.reduction.name == "count" else values)]
    return state | {"fold": kept, "steps": steps}


def _typed(track: Track, state: Any) -> Any:
    """The initial state with the types it has after an event: what loops carry must not change."""
    if track.shards is None:
        state = jax.tree.map(lambda x: as_varying(x, track.varying), state)
    if not any(explicit_sharding(a) for a in track.avals):
        return state
    nb, n = len(track.batch), len(track.shapes)
    values, steps = track.avals[:n], track.avals[n:]
    lanes = lambda x: reshard_like(x, values[0], nb)
    if track.kind == "ring":
        behind = lambda xs, avals: [reshard_like(x, a, a.ndim, 1) for x, a in zip(xs, avals)]
        ring = behind(state["ring"][0], values), behind(state["ring"][1], steps)
        return {k: lanes(v) for k, v in state.items() if k != "ring"} | {"ring": ring}

    def like(x: Array, aval: Any) -> Array:
        return reshard_like(x, aval, aval.ndim if x.shape == aval.shape else nb)

    fold = [jax.tree.map(lambda x, a=a: like(x, a), s) for s, a in zip(state["fold"], values)]
    last = [like(x, a) for x, a in zip(state["steps"], steps, strict=True)]
    counts = {k: lanes(v) for k, v in state.items() if k not in ("fold", "steps")}
    return counts | {"fold": fold, "steps": last}


def _gated(add: Any, track: Track, state: Any, leaves: Any, steps: Any, event: Event) -> Any:
    """Add one event, unless `interval` or its mask leave it out."""
    keep = event.mask
    if keep is not None and state["count"].ndim == 0 and keep.ndim:
        raise AssertionError("a masked event needs counts by lane")
    if track.interval > 1:
        seen, due = state["seen"], state["seen"] == 0
        happened = 1 if keep is None else keep.astype(jnp.int32)
        keep = due if keep is None else keep & due
        state = state | {"seen": (seen + happened) % track.interval}
    return add(track, state, leaves, steps, event.batch, keep)


def _push(track: Track, state: Any, leaves: Any, steps: Any, batch: Any, keep: Any) -> Any:
    """Write an event into the ring, over the oldest."""
    if track.size == 0:
        return state  # in a loop that never runs

    def push(ring: Any, count: Array, new: Any, keep: Array | None) -> tuple[Any, Array]:
        slot = jax.lax.rem(count, jnp.int32(track.size))

        def write(buffer: Array, x: Array) -> Array:
            if keep is not None:
                old = jax.lax.dynamic_index_in_dim(buffer, slot, keepdims=False)
                x = jnp.where(keep, x, old)
            return jax.lax.dynamic_update_index_in_dim(buffer, x, slot, 0)

        more = jnp.int32(1) if keep is None else keep.astype(jnp.int32)
        return jax.tree.map(write, ring, new), count + more

    fun: Any = push
    if state["count"].ndim:
        keep = jnp.ones(batch, bool) if keep is None else keep
        for _ in batch:
            fun = jax.vmap(fun, in_axes=(1, 0, 0, 0), out_axes=(1, 0))
    ring, count = fun(state["ring"], state["count"], (leaves, steps), keep)
    return state | {"ring": ring, "count": count}


def _fold(track: Track, state: Any, leaves: Any, steps: Any, batch: Any, keep: Any) -> Any:
    """Update the reduction by one event, and the step that stands for it."""
    assert track.reduction is not None
    update = over_lanes(track.reduction.update, len(batch))
    fold = [update(s, x) for s, x in zip(state["fold"], leaves)]
    if track.reduction.name == "first":
        steps = select(state["count"] == 0, steps, state["steps"])
    if keep is not None:
        fold = select(keep, fold, state["fold"])
        steps = select(keep, steps, state["steps"])
    more = jnp.int32(1) if keep is None else keep.astype(jnp.int32)
    return state | {"fold": fold, "steps": steps, "count": state["count"] + more}


# --- results -------------------------------------------------------------------------------------


def _finish_rows(track: Track, rows: Rows) -> Entry:
    if track.events:
        rows = expand(rows)
        nb = len(track.batch)
        rows = jax.tree.map(lambda x: jnp.moveaxis(x, 0, nb), rows) if nb else rows
    return _entry(track, rows.values, rows.steps, not rows.single, rows.mask, None)


def _finish_ring(track: Track, state: Any) -> Entry:
    values, steps = state["ring"]
    count = jnp.broadcast_to(state["count"], track.batch)

    def in_order(x: Array) -> Array:
        order: Any = lambda buf, n: jnp.roll(buf, jnp.where(n > track.size, -n, 0), 0)
        if state["count"].ndim == 0:
            return order(x, state["count"])
        for _ in track.batch:
            order = jax.vmap(order, in_axes=(1, 0), out_axes=1)
        return order(x, count)

    bounded = track.certain or track.size == 0
    if not bounded:
        values, steps = jax.tree.map(in_order, (values, steps))
    front = lambda x: jnp.moveaxis(x, 0, len(track.batch))
    values, steps = jax.tree.map(front, (values, steps))
    mask = None if bounded else jnp.arange(track.size) < count[..., None]
    if not track.events:
        drop = lambda x: jnp.squeeze(x, len(track.batch))
        values, steps, mask = jax.tree.map(drop, (values, steps, mask))
    return _entry(track, values, steps, track.events, mask, None if bounded else count)


def _finish_fold(track: Track, state: Any) -> Entry:
    assert track.reduction is not None
    finish = over_lanes(track.reduction.finish, len(track.batch))
    values, steps, mask = [finish(s) for s in state["fold"]], state["steps"], None
    if track.may_be_none and track.reduction is not REDUCTIONS["count"]:
        mask = jnp.broadcast_to(state["count"] > 0, track.batch)
        blank = lambda x: jnp.zeros_like(x)
        values = select(mask, values, jax.tree.map(blank, values))
    if track.reduction.name == "count":
        track = dataclasses.replace(track, tree=jax.tree.structure(0))
    count = jnp.broadcast_to(state["count"], track.batch)
    return _entry(track, values, steps, False, mask, count)


def _entry(track: Track, values: Any, steps: Any, events: bool, mask: Any, count: Any) -> Entry:
    outer = len(track.batch) + events
    value = track.tree.unflatten(values)  # the result of a user's reduction may be a pytree
    ndims = tuple(x.ndim - outer for x in jax.tree.leaves(value))
    layout = Layout(events, ndims, tuple(s.ndim - outer for s in steps))
    named = dict(zip(track.steps, steps, strict=True))
    return Entry(value, named, layout, mask, count)
