"""`logdict`: a dict of logged values that also knows their steps, masks and counts. A pytree."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from . import _errors, _html, _plot
from ._entry import Array, Entry, Layout, compacted, concatenated, count_of, entry_of, reduced
from ._format import plain
from ._reduce import resolve


class logdict(dict):
    """A dict of logged values, with the steps they were logged at. A pytree.

    >>> import jax.numpy as jnp, lox
    >>> logs = lox.logdict({"loss": jnp.array([3.0, 2.0, 1.0])}, step=jnp.array([0, 10, 20]))
    >>> logs
    {'loss': [3.0, 2.0, 1.0]}
    >>> logs.slice[1:]
    {'loss': [2.0, 1.0]}
    >>> logs.reduce("mean").step["loss"]
    Array(20, dtype=int32)

    Arguments:

    - `data`: maps names to values.
    - `steps`: arrays. If they have a leading axis that the values have too, it is the event axis:
      the key is a row of events. Otherwise each key is one value.
    """

    def __init__(self, data: Mapping[str, Any] | None = None, /, **steps: Any):
        super().__init__()
        for name in steps:
            if name in RESERVED:
                raise _errors.step_name_taken(name, "logdict")
        if isinstance(data, logdict) and not steps:
            for key, entry in data._entries.items():
                self._put(key, entry)
            return
        for key, value in (data or {}).items():
            self._put(key, entry_of(value, steps))

    @classmethod
    def one_event(
        cls,
        data: Mapping[str, Any],
        steps: dict[str, Any],
        ndims: Mapping[str, tuple[int, ...]],
        step_ndims: tuple[int, ...],
    ) -> logdict:
        """The logdict of a single event. Ranks are those of the values, without batch axes."""
        logs = cls()
        for key, value in data.items():
            layout = Layout(False, ndims[key], step_ndims)
            logs._put(key, Entry(value, dict(steps), layout))
        return logs

    @classmethod
    def of_entries(cls, entries: Mapping[str, Entry]) -> logdict:
        logs = cls()
        for key, entry in entries.items():
            logs._put(key, entry)
        return logs

    @functools.cached_property
    def _entries(self) -> dict[str, Entry]:
        static, children = self.__dict__.pop("_packed", ((), ()))
        return {
            key: Entry(value, dict(zip(names, steps, strict=True)), layout, mask, count)
            for (key, names, layout), (value, steps, mask, count) in zip(static, children)
        }

    def _put(self, key: str, entry: Entry) -> None:
        dict.__setitem__(self, key, entry.value)
        self._entries[key] = entry

    # --- what it holds -----------------------------------------------------------------------

    @property
    def data(self) -> dict[str, Any]:
        """The values alone, as a plain dict."""
        return dict(self)

    @property
    def steps(self) -> dict[str, dict[str, Array]]:
        """For every step name, the steps of each key."""
        out: dict[str, dict[str, Array]] = {}
        for key, entry in self._entries.items():
            for name, value in entry.steps.items():
                out.setdefault(name, {})[key] = value
        return out

    @property
    def mask(self) -> dict[str, Array]:
        """Where it was not known when compiling which events happen: true for the real rows."""
        return {k: e.mask for k, e in self._entries.items() if e.mask is not None}

    @property
    def count(self) -> dict[str, Any]:
        """How many events of each key happened, also when fewer were kept."""
        return {k: count_of(e) for k, e in self._entries.items()}

    @property
    def layouts(self) -> dict[str, Layout]:
        """For each key, whether it is a row of events, and the rank of its values."""
        return {k: e.layout for k, e in self._entries.items()}

    def __getattr__(self, name: str) -> dict[str, Array]:
        if name.startswith("_"):
            raise AttributeError(name)
        steps = self.steps
        if name in steps:
            return steps[name]
        known = ", ".join(steps) or "none"
        raise AttributeError(f"no key was logged with a step {name!r}. Steps here: {known}.")

    # --- changing it as a dict ---------------------------------------------------------------

    def __setitem__(self, key: str, value: Any) -> None:
        old = self._entries.get(key)
        entry = entry_of(value, {}) if old is None else dataclasses.replace(old, value=value)
        self._put(key, entry)

    def __delitem__(self, key: str) -> None:
        dict.__delitem__(self, key)
        del self._entries[key]

    def pop(self, key: str, *default: Any) -> Any:
        self._entries.pop(key, None)
        return dict.pop(self, key, *default)

    def popitem(self) -> tuple[str, Any]:
        key, value = dict.popitem(self)
        del self._entries[key]
        return key, value

    def clear(self) -> None:
        dict.clear(self)
        self._entries.clear()

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def copy(self) -> logdict:
        return logdict(self)

    __copy__ = copy

    def __reduce__(self) -> Any:
        return logdict.of_entries, (dict(self._entries),)

    def __or__(self, other: Mapping[str, Any]) -> logdict:  # type: ignore[override]
        """Merge; of a key in both, the right one's is kept."""
        out = logdict(self)
        out.update(other)
        return out

    def __ror__(self, other: Mapping[str, Any]) -> logdict:  # type: ignore[override]
        return logdict(other) | self

    def __ior__(self, other: Any) -> logdict:  # type: ignore[misc, override]
        self.update(other)
        return self

    def update(self, other: Any = (), /, **more: Any) -> None:
        if isinstance(other, logdict):
            for key, entry in other._entries.items():
                self._put(key, entry)
        else:
            more = dict(other) | more
        for key, value in more.items():
            self._put(key, entry_of(value, {}))

    # --- working with it ---------------------------------------------------------------------

    def __add__(self, other: logdict) -> logdict:
        """The events of both, in order, key by key."""
        entries = dict(self._entries)
        for key, entry in other._entries.items():
            mine = entries.get(key)
            entries[key] = entry if mine is None else concatenated(key, mine, entry)
        return logdict.of_entries(entries)

    def filter(self, keep: Callable[[str, Any], Any]) -> logdict:
        """The keys for which `keep(key, value)` is true."""
        entries = self._entries.items()
        return logdict.of_entries({k: e for k, e in entries if keep(k, e.value)})

    def prefix(self, prefix: str) -> logdict:
        """The same with `prefix` in front of every key."""
        return logdict.of_entries({prefix + k: e for k, e in self._entries.items()})

    def reduce(self, mode: Any, keep_steps: bool = True) -> logdict:
        """Reduce each key over its events, as `spool(f, reduce=…)` does inside the program.

        A dict from key to reduction leaves the other keys as they are.
        """
        if isinstance(mode, Mapping):
            how = {k: resolve(r) for k, r in mode.items()}
        else:
            how = dict.fromkeys(self, resolve(mode))
        entries = self._entries.items()
        out = {k: reduced(e, how[k], keep_steps) if k in how else e for k, e in entries}
        return logdict.of_entries(out)

    @property
    def slice(self) -> _Slicer:
        """`logs.slice[a:b:c]` cuts every row of events; single values stay as they are."""
        return _Slicer(self)

    def compact(self) -> logdict:
        """Drop the rows that are not real (on the host). What is left has no mask."""
        out = {}
        for key, entry in self._entries.items():
            if isinstance(entry.mask, jax.core.Tracer):
                raise _errors.traced_compact(key)
            if entry.mask is not None and not entry.layout.events and not np.any(entry.mask):
                continue
            whole = compacted(entry)
            if whole is None:
                raise _errors.ragged(key)
            out[key] = whole
        return logdict.of_entries(out)

    def plot(self, *keys: str, **options: Any) -> Any:
        """Draw keys (all, if none is named) over their steps. Takes the options of `_plot.plot`."""
        return _plot.plot(self, keys or None, **options)

    def _repr_html_(self) -> str:
        return _html.html_table(self)

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{k!r}: {plain(v)}" for k, v in self.items()) + "}"

    __str__ = __repr__


class _Slicer:
    def __init__(self, logs: logdict):
        self._logs = logs

    def __getitem__(self, index: slice) -> logdict:
        if not isinstance(index, slice):
            raise TypeError(f"write logs.slice[a:b:c] with a slice, got {index!r}")

        def cut(x: Array, axis: int) -> Array:
            return x[(slice(None),) * axis + (index,)]

        entries = self._logs._entries.items()
        cut_all = lambda e: e.map_events(cut) if e.layout.events else e
        return logdict.of_entries({k: cut_all(e) for k, e in entries})


def _flatten(logs: logdict) -> tuple[Any, Any]:
    packed = logs.__dict__.get("_packed")
    if packed is not None:  # as it came out of a compiled function
        static, children = packed
        return children, static
    children, static = [], []
    for key, e in logs._entries.items():
        children.append((e.value, tuple(e.steps.values()), e.mask, e.count))
        static.append((key, tuple(e.steps), e.layout))
    return children, tuple(static)


def _flatten_with_keys(logs: logdict) -> tuple[Any, Any]:
    children, static = _flatten(logs)
    names = [jax.tree_util.DictKey(key) for key, _, _ in static]
    return list(zip(names, children, strict=True)), static


def _unflatten(static: Any, children: Any) -> logdict:
    # This runs at every call of a compiled function: the entries are made when first asked for.
    logs = logdict.__new__(logdict)
    children = tuple(children)
    for (key, _, _), child in zip(static, children):
        dict.__setitem__(logs, key, child[0])
    logs.__dict__["_packed"] = (static, children)
    return logs


jax.tree_util.register_pytree_with_keys(logdict, _flatten_with_keys, _unflatten, _flatten)


def iterate_entries(logs: logdict) -> Iterator[tuple[str, Entry]]:
    """Every key with all that belongs to it, for the modules that store or show logdicts."""
    return iter(logs._entries.items())


# Attributes of logdict: no step may have one of these names, for `logs.<step>` reads the steps.
RESERVED = frozenset(n for n in dir(logdict) if not n.startswith("__")) | {"tags", "explicit"}
