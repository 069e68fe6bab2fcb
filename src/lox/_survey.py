"""What a traced program logs, found without running it.

`survey` walks a jaxpr, through everything that may hold a log, and lists for each key the places it
is logged at and how many events there can be. From that, collectors are planned before the first
equation is interpreted. What could lose a log is an error here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jax.core import ShapedArray

from . import _compat, _errors
from ._event import Axis, Field, Spec
from ._hidden import check_hidden, first_log
from ._primitive import is_log, log_p


@dataclasses.dataclass(frozen=True)
class Shards:
    """The manual axes of a shard_map. Unless `checked`, JAX does not track what is replicated."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    checked: bool

    @property
    def count(self) -> int:
        return math.prod(self.sizes)

    def differing(self, axes: frozenset[str]) -> Shards | None:
        """Those axes over which a value differs; None if it is the same on all shards."""
        if not self.checked:
            return self
        kept = [(a, n) for a, n in zip(self.axes, self.sizes, strict=True) if a in axes]
        if not kept:
            return None
        return Shards(tuple(a for a, _ in kept), tuple(n for _, n in kept), True)


@dataclasses.dataclass(frozen=True)
class Site:
    """One key at one log call, with the types of its arrays (batch axes in front)."""

    spec: Spec
    field: Field
    values: tuple[Any, ...]  # avals of the leaves
    steps: tuple[Any, ...]  # avals of the steps
    batch: tuple[int, ...]
    copies: tuple[bool, ...]
    derived: bool
    outside: int
    masked: bool
    varying: frozenset[str]  # manual mesh axes over which its types vary
    shards: Shards | None  # the part of a shard_map's mesh over which it differs


@dataclasses.dataclass
class Survey:
    """For each key in order of first appearance: its sites, and bounds on its number of events."""

    sites: dict[str, list[Site]] = dataclasses.field(default_factory=dict)
    least: dict[str, float] = dataclasses.field(default_factory=dict)
    most: dict[str, float] = dataclasses.field(default_factory=dict)
    looped: set[str] = dataclasses.field(default_factory=set)  # keys logged in some loop
    carried: set[str] = dataclasses.field(default_factory=set)  # keys logged in some while loop
    # Of every event, selected or not: each batch axis, are its lanes copies, is it derived.
    axes: list[tuple[Axis, bool, bool]] = dataclasses.field(default_factory=list)

    def add(self, other: Survey, least: float = 1, most: float = 1, loop: bool = False) -> None:
        """Add what `other` logs, between `least` and `most` times."""
        self.axes += other.axes
        self.looped |= set(other.sites) if loop else other.looped
        self.carried |= set(other.sites) if math.isinf(most) else other.carried
        for key, sites in other.sites.items():
            self.sites.setdefault(key, []).extend(sites)
            self.least[key] = self.least.get(key, 0) + other.least[key] * least
            times = other.most[key] * most if other.most[key] and most else 0  # 0 · ∞ is 0 here
            self.most[key] = self.most.get(key, 0) + times

    def repeated(self) -> frozenset[Axis]:
        """Batch axes (position and size) that only repeat what is logged, as in `jax.jacfwd`.

        That maps over tangents alone: events of the function itself are the same in all lanes.
        """
        candidates = {axis for axis, copy, derived in self.axes if copy and derived}
        return frozenset(candidates - {axis for axis, copy, _ in self.axes if not copy})

    def once(self, axes: frozenset[Axis]) -> Survey:
        """The same without those of these batch axes whose lanes are copies."""
        if not axes:
            return self
        sites = {k: [_once(s, axes) for s in found] for k, found in self.sites.items()}
        return dataclasses.replace(self, sites=sites)

    def only(self, keys: set[str]) -> Survey:
        """The same, of some keys alone."""
        part = lambda d: {k: v for k, v in d.items() if k in keys}
        sets = self.looped & keys, self.carried & keys
        return Survey(part(self.sites), part(self.least), part(self.most), *sets)


def _once(site: Site, axes: frozenset[Axis]) -> Site:
    n = len(site.batch)
    keep = [i for i in range(n) if not (site.copies[i] and (i, site.batch[i]) in axes)]

    def shrunk(aval: Any) -> Any:
        shape = (*(aval.shape[i] for i in keep), *aval.shape[n:])
        return ShapedArray(shape, aval.dtype, weak_type=aval.weak_type)

    return dataclasses.replace(
        site,
        values=tuple(shrunk(a) for a in site.values),
        steps=tuple(shrunk(a) for a in site.steps),
        batch=tuple(site.batch[i] for i in keep),
        copies=tuple(site.copies[i] for i in keep),
        outside=sum(i < site.outside for i in keep),
    )


Select = Callable[[Spec], set[str]]


def survey(jaxpr: Any, select: Select, shards: Shards | None = None) -> Survey:
    """What `jaxpr` logs under the keys that `select` picks of each log call."""
    found = Survey()
    for eqn in _compat.closed(jaxpr).eqns:
        if not is_log(eqn.effects):
            check_hidden(eqn)
        elif eqn.primitive is log_p:
            _visit_log(found, eqn, select, shards)
        else:
            found.add(_inner(eqn, select, shards))
    return found


def _visit_log(found: Survey, eqn: Any, select: Select, shards: Shards | None) -> None:
    spec, b = eqn.params["spec"], eqn.params["batch_dims"]
    avals = [v.aval for v in eqn.invars]
    wanted, masked = select(spec), eqn.params["masked"]
    leaves = iter(avals)
    values = [tuple(next(leaves) for _ in f.ndims) for f in spec.fields]
    steps = tuple(next(leaves) for _ in spec.steps)
    batch = tuple(values[0][0].shape[:b])
    lanes = zip(enumerate(batch), eqn.params["copies"], strict=True)
    found.axes += [(axis, copy, eqn.params["derived"]) for axis, copy in lanes]
    shared = [*steps, *([avals[-1]] if masked else [])]
    for field, leaf_avals in zip(spec.fields, values, strict=True):
        if field.key in wanted:
            varying = frozenset().union(*(_compat.varying_axes(a) for a in [*leaf_avals, *shared]))
            held = None if shards is None else shards.differing(varying)
            site = Site(
                spec=spec,
                field=field,
                values=leaf_avals,
                steps=steps,
                batch=batch,
                copies=eqn.params["copies"],
                derived=eqn.params["derived"],
                outside=eqn.params["outside"],
                masked=masked,
                varying=varying,
                shards=held,
            )
            one = Survey({field.key: [site]}, {field.key: 0 if masked else 1}, {field.key: 1})
            found.add(one)


def _inner(eqn: Any, select: Select, shards: Shards | None) -> Survey:
    """What the bodies of a higher-order equation log, with the number of times they run."""
    params, name = eqn.params, eqn.primitive.name
    if name == "cond":
        return _either([survey(b, select, shards) for b in params["branches"]])
    out = Survey()
    if name == "scan":
        out.add(survey(params["jaxpr"], select, shards), params["length"], params["length"], True)
    elif name == "while":
        out.add(survey(params["cond_jaxpr"], select, shards), 1, math.inf, True)
        out.add(survey(params["body_jaxpr"], select, shards), 0, math.inf, True)
    elif name == "shard_map":
        if shards is not None:
            raise _errors.no_rule(name, first_log(eqn), "it is inside another shard_map")
        out.add(survey(params["jaxpr"], select, shards_of(params)))
    else:
        for body in bodies(eqn):
            out.add(survey(body, select, shards))
    return out


def shards_of(params: dict[str, Any]) -> Shards:
    """The manual axes of a shard_map equation, in the order of its mesh."""
    manual, mesh = _compat.manual_axes(params), params["mesh"]
    axes = tuple(a for a in mesh.axis_names if a in manual)
    return Shards(axes, tuple(mesh.shape[a] for a in axes), params["check_vma"])


def _either(branches: list[Survey]) -> Survey:
    out = Survey()
    for branch in branches:
        out.axes += branch.axes
        out.looped |= branch.looped
        out.carried |= branch.carried
        for key, sites in branch.sites.items():
            out.sites.setdefault(key, []).extend(sites)
    for key in out.sites:
        out.least[key] = min(b.least.get(key, 0) for b in branches)
        out.most[key] = max(b.most.get(key, 0) for b in branches)
    return out


# Primitives with a rule in `_rules`, and the parameter that holds what they run. Rules add to it.
BODIES: dict[str, str] = {}


def bodies(eqn: Any) -> list[Any]:
    """The jaxprs that a higher-order equation runs; an error if lox does not know it."""
    parameter = BODIES.get(eqn.primitive.name)
    if parameter is None:
        raise _errors.no_rule(eqn.primitive.name, first_log(eqn))
    body = eqn.params[parameter]
    return [_compat.closed(getattr(body, "solve", body))]
