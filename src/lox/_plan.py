"""The plan of a spool: for each key, how its events are kept.

    rows    every event, as extra outputs of the program (the number is known when compiling)
    ring    the latest `capacity` events in a carried buffer (loops without a static length), or
            every n-th event (`interval`)
    fold    a reduction, carried in constant memory

A plan is made from the survey of a jaxpr and the options of the user, before anything runs. The
places where one key is logged must agree, and that is checked here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from . import _errors
from ._event import Spec
from ._reduce import APPEND, Reduction, resolve
from ._survey import Shards, Site, Survey


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user asked of a transformation, in hashable form."""

    argnames: frozenset[str] | None = None
    tags: frozenset[str] | None = None
    keep_logs: bool = False
    interval: int | None = None
    reduce: Any = None  # None, a name, a Reduction, or a tuple of (key, reduction)
    prefix: str = ""
    capacity: int | None = None
    every: int | None = None

    def __hash__(self) -> int:  # part of a cache key that is looked up at every eager call
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in dataclasses.fields(self)))

    @staticmethod
    def make(argnames: Any, tags: Any, reduce: Any, **rest: Any) -> Options:
        """Check and normalise what the user wrote (once, where that can be remembered)."""
        try:
            return _remembered(argnames, tags, reduce, **rest)
        except TypeError:  # lists and dicts can't be looked up
            return Options.checked(argnames, tags, reduce, **rest)

    @staticmethod
    def checked(argnames: Any, tags: Any, reduce: Any, **rest: Any) -> Options:
        for name in ("interval", "capacity", "every"):
            value = rest.get(name)
            if value is not None and (isinstance(value, bool) or not _positive(value)):
                raise _errors.not_positive(name, value)
        if not isinstance(rest.get("prefix", ""), str):
            raise _errors.not_a_string("prefix", rest["prefix"])
        if isinstance(reduce, Mapping):
            reduce = tuple((k, resolve(r)) for k, r in reduce.items())
        else:
            reduce = resolve(reduce)
        return Options(argnames=_words(argnames), tags=_words(tags), reduce=reduce, **rest)

    def select(self, spec: Spec) -> set[str]:
        """The keys of a log call that are asked for."""
        if self.tags is not None and not self.tags.intersection(spec.tags):
            return set()
        if self.argnames is None:
            return set() if spec.explicit else set(spec.keys)
        return set(self.argnames.intersection(spec.keys))

    def reduction(self, key: str, spec: Spec) -> Any:
        """How this key is reduced: the log call's own word wins."""
        if spec.reduce is not None:
            return resolve(spec.reduce)
        if isinstance(self.reduce, tuple):
            return dict(self.reduce).get(key)
        return self.reduce


_remembered = functools.lru_cache(maxsize=128, typed=True)(Options.checked)


def _positive(value: Any) -> bool:
    return isinstance(value, int | np.integer) and bool(value > 0)


def _words(names: Any) -> frozenset[str] | None:
    if names is None:
        return None
    return frozenset([names] if isinstance(names, str) else names)


@dataclasses.dataclass(frozen=True)
class Track:
    """How one key is kept. Shapes are those of a value; `batch` includes the shards, if any."""

    key: str
    spec: Spec  # of its first log call
    kind: str  # "rows" | "ring" | "fold"
    tree: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    steps: tuple[str, ...]
    step_shapes: tuple[tuple[int, ...], ...]
    step_dtypes: tuple[Any, ...]
    batch: tuple[int, ...]
    shards: Shards | None
    varying: frozenset[str]  # manual mesh axes, where it is kept inside a shard_map
    avals: tuple[Any, ...]  # types of the leaves and steps where they are logged
    by_lane: bool  # do lanes of the batch count their events separately
    certain: bool  # is the number of events known when compiling
    may_be_none: bool  # may there be no event at all
    events: bool  # is an event axis wanted even for one event
    size: int  # rows of a ring
    interval: int
    reduction: Reduction | None


Plan = dict[str, Track]


def make_plan(
    found: Survey, options: Options, carried: bool = False, lanes: set[str] | None = None
) -> Plan:
    """Decide how every surveyed key is kept.

    With `carried`, nothing may leave as rows (the program is the body of a while loop). `lanes` is
    given for the plan of a window: its keys count by lane as elsewhere in the program, and a count
    for `interval` may not start at zero.
    """
    return {key: _track(key, found, options, carried, lanes) for key in found.sites}


def _track(
    key: str, found: Survey, options: Options, carried: bool, lanes: set[str] | None
) -> Track:
    sites = found.sites[key]
    first = sites[0]
    for site in sites[1:]:
        _check_agree(key, first, site, options)
    values = list(zip(*(s.values for s in sites), strict=True))
    dtypes = tuple(_common_dtype(key, avals, sites) for avals in values)
    step_avals = list(zip(*(s.steps for s in sites), strict=True))
    step_dtypes = tuple(_common_dtype(key, avals, sites) for avals in step_avals)
    inner = len(first.batch)
    shards = first.shards
    reduction = options.reduction(key, first.spec)
    interval = options.interval or 1
    most, masked = found.most[key], any(s.masked for s in sites)
    if isinstance(reduction, Reduction):
        kind, size = "fold", 0
    elif math.isfinite(most):
        kind = "ring" if interval > 1 or carried or key in found.carried else "rows"
        size = math.ceil(most / interval)
    elif options.capacity is not None:
        kind, size = "ring", int(options.capacity)
    else:
        raise _errors.unbounded(key, first.spec.line)
    return Track(
        key=key,
        spec=first.spec,
        kind=kind,
        tree=first.field.tree,
        shapes=tuple(tuple(a.shape[inner:]) for a in first.values),
        dtypes=dtypes,
        steps=first.spec.steps,
        step_shapes=tuple(tuple(a.shape[inner:]) for a in first.steps),
        step_dtypes=step_dtypes,
        batch=_outer_batch(first),
        shards=shards,
        varying=frozenset().union(*(s.varying for s in sites)),
        avals=(*first.values, *first.steps),
        by_lane=masked or shards is not None or key in (lanes or ()),
        certain=found.least[key] == most and (lanes is None or interval == 1),
        may_be_none=found.least[key] == 0,
        events=reduction == APPEND or most != 1 or key in found.looped,
        size=size,
        interval=interval,
        reduction=reduction if kind == "fold" else None,
    )


def _outer_batch(site: Site) -> tuple[int, ...]:
    if site.shards is None:
        return site.batch
    return (*site.batch[: site.outside], site.shards.count, *site.batch[site.outside :])


def _check_agree(key: str, a: Site, b: Site, options: Options) -> None:
    lines = a.spec.line, b.spec.line
    if a.field.tree != b.field.tree:
        raise _errors.two_shapes(key, str(a.field.tree), str(b.field.tree), *lines)
    for x, y in zip(a.values, b.values, strict=True):
        if x.shape[len(a.batch) :] != y.shape[len(b.batch) :]:
            raise _errors.two_shapes(key, x.str_short(), y.str_short(), *lines)
    if _outer_batch(a) != _outer_batch(b):
        raise _errors.two_batches(key, _outer_batch(a), _outer_batch(b), *lines)
    if a.spec.steps != b.spec.steps:
        raise _errors.two_steps(key, a.spec.steps, b.spec.steps, *lines)
    for name, x, y in zip(a.spec.steps, a.steps, b.steps, strict=True):
        if x.shape[len(a.batch) :] != y.shape[len(b.batch) :]:
            raise _errors.two_shapes(f"{key} (step {name})", x.str_short(), y.str_short(), *lines)
    r, q = options.reduction(key, a.spec), options.reduction(key, b.spec)
    if r != q:
        raise _errors.two_reductions(key, _reduction_name(r), _reduction_name(q), lines)


def _reduction_name(reduction: Any) -> str:
    return getattr(reduction, "name", str(reduction))


def _common_dtype(key: str, avals: tuple[Any, ...], sites: list[Site]) -> Any:
    """The dtype that holds the values of all sites exactly.

    A Python number has no dtype of its own: it takes that of the arrays, where that is of its kind
    (a float may take a float16) or above (an integer may take a float), and has room for it.
    """
    pairs = list(zip(avals, sites, strict=True))
    if all(a.weak_type for a in avals):
        return np.dtype(jnp.result_type(*(a.dtype for a in avals)))
    out, first = None, sites[0]
    for weak in (False, True):
        for aval, site in pairs:
            if aval.weak_type is not weak:
                continue
            dtype = np.dtype(aval.dtype)
            if out is None:
                out, first = dtype, site
                continue
            if weak and (_kind(dtype) < _kind(out) or _kind(dtype) == _kind(out) >= 2):
                continue
            new = np.dtype(jnp.promote_types(out, dtype))
            if not (_exact(out, new) and _exact(dtype, new)):
                raise _errors.two_dtypes(key, str(out), str(dtype), first.spec.line, site.spec.line)
            out = new
    return out


def _kind(dtype: Any) -> int:
    """0 for bool, 1 for integers, 2 for floats, 3 for complex numbers."""
    kinds = (jnp.integer, jnp.floating, jnp.complexfloating)
    return next((i for i, k in enumerate(kinds, 1) if jnp.issubdtype(dtype, k)), 0)


def _exact(a: Any, b: Any) -> bool:
    """Does dtype `b` hold every value of dtype `a`?"""
    a, b = np.dtype(a), np.dtype(b)
    if a == b or a == np.bool_:
        return True
    if jnp.issubdtype(a, jnp.integer):
        if jnp.issubdtype(b, jnp.integer):
            return jnp.iinfo(b).min <= jnp.iinfo(a).min and jnp.iinfo(a).max <= jnp.iinfo(b).max
        return jnp.iinfo(a).bits <= jnp.finfo(b).nmant
    if jnp.issubdtype(b, jnp.integer):
        return False
    return jnp.finfo(a).nmant <= jnp.finfo(b).nmant and jnp.finfo(a).maxexp <= jnp.finfo(b).maxexp
