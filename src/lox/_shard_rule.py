"""The rule for `shard_map`: every shard's events are kept, on a leading axis over the shards.

A value that is the same on all shards (JAX tracks that) is kept once. The axis over the shards
counts as a batch axis. It is put in front while crossing the border, so that one PartitionSpec
serves all arrays of a group.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from . import _compat
from ._collect import Collector
from ._interpret import register
from ._rows import Rows
from ._rules import Args
from ._survey import Site, shards_of, survey


@register("shard_map")
def _shard_map(eqn: Any, args: Args, col: Collector) -> Args:
    params = eqn.params
    body = _compat.closed(params["jaxpr"])
    found = survey(body, lambda spec: set(spec.keys), shards_of(params))
    sites = {key: at[0] for key, at in found.sites.items()}
    axes_of = {key: () if s.shards is None else s.shards.axes for key, s in sites.items()}
    order = list(dict.fromkeys(axes_of.values()))
    state = col.borrow(body)
    outside, specs = col.cross(state, sites)
    outside = jax.tree.map(lambda x, s: _compat.reshard_for(x, params["mesh"], s), outside, specs)

    def run(state: Any, args: Args) -> Any:
        state = jax.tree.map(lambda x, s: x if s == P() else x[0], state, specs)
        outs, state, rows = col.run(body, args, state)
        state = jax.tree.map(lambda x, s: x if s == P() else x[None], state, specs)
        groups: dict[Any, dict[str, Rows]] = {}
        for key, r in rows.items():
            groups.setdefault(axes_of[key], {})[key] = _lift(r, axes_of[key])
        return outs, state, [groups.get(g, {}) for g in order]

    out = jax.shard_map(
        run,
        mesh=params["mesh"],
        in_specs=(specs, list(params["in_specs"])),
        out_specs=(list(params["out_specs"]), specs, [P(g) if g else P() for g in order]),
        axis_names=_compat.manual_axes(params),
        check_vma=params["check_vma"],
    )(outside, args)
    outs, state, groups = out
    rows = {k: _land(r, sites[k]) for group in groups for k, r in group.items()}
    col.absorb(col.back(state, sites), rows)
    return outs


def _lift(rows: Rows, axes: tuple[str, ...]) -> Rows:
    if not axes:
        return rows
    up = lambda x: _compat.as_varying(jnp.asarray(x), frozenset(axes))[None]
    return jax.tree.map(up, rows)


def _land(rows: Rows, site: Site) -> Rows:
    """Put the shard axis with the batch axes: inside of vmaps around the shard_map."""
    if site.shards is None:
        return rows
    n = site.outside
    batch = (*rows.batch[:n], site.shards.count, *rows.batch[n:])
    place = n if rows.single else n + 1
    moved = jax.tree.map(lambda x: jnp.moveaxis(x, 0, place), rows)
    return dataclasses.replace(moved, batch=batch)
