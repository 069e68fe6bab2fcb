"""What a program logs, found by running it as plain Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import lox

X = jnp.array([0.7, -0.4, 1.3, 0.2], jnp.float32)
LANES = jnp.stack([X, -X, X * 0.5 + 0.1])
CAPACITY = 64


def silent(data: Any, **_: Any) -> None:
    """A log that does nothing: the program without logs."""


def record(build: Callable, x: Any) -> tuple[Any, list[tuple[dict, dict, tuple]]]:
    """Run a program as plain Python; returns its result and its log calls in order.

    Control flow runs in Python under `disable_jit`. vmap becomes a loop over lanes, whose number
    goes with each call; remat becomes nothing.
    """
    calls, lanes = [], []

    def log(data, *, tags=(), explicit=False, prefix="", reduce=None, **steps):
        to_numpy = lambda d: {k: jax.tree.map(np.asarray, v) for k, v in d.items()}
        calls.append((to_numpy(data), to_numpy(steps), tuple(lanes)))

    def vmap(f):
        def mapped(xs):
            outs = []
            for i, x in enumerate(xs):
                lanes.append(i)
                outs.append(f(x))
                lanes.pop()
            return jax.numpy.stack(outs)

        return mapped

    with mock.patch("jax.vmap", vmap), mock.patch("jax.checkpoint", lambda f, **_: f):
        with jax.disable_jit():
            out = build(log)(jax.numpy.asarray(x))
    return out, calls


def stacked(calls: list[tuple[dict, dict, tuple]]) -> dict[str, tuple[Any, dict]]:
    """For each key (and lane), its values and steps stacked over events."""
    events: dict[str, list] = {}
    for data, steps, lane in calls:
        for key, value in data.items():
            events.setdefault(f"{key}{lane or ''}", []).append((value, steps))
    stack = lambda items: jax.tree.map(lambda *xs: np.stack(xs), *items)
    return {k: stack(v) for k, v in events.items()}


def events_of(logs: lox.logdict) -> dict[str, tuple[Any, dict]]:
    """The same of a logdict, rows that are not real left out."""
    out = {}
    for key in logs:
        only = logs.filter(lambda k, _, key=key: k == key).compact()
        if key not in only:
            continue
        whole = only.reduce("append")
        steps = {name: by_key[key] for name, by_key in whole.steps.items() if key in by_key}
        value = jax.tree.map(np.asarray, whole[key])
        if len(jax.tree.leaves(value)[0]):
            out[key] = (value, jax.tree.map(np.asarray, steps))
    return out


def by_lane(logs: lox.logdict) -> dict[str, tuple[Any, dict]]:
    """Events with the lanes of vmaps apart, since those may have different numbers of them."""
    out = {}
    logs = jax.tree.map(np.asarray, logs)  # on the host everything below is quick
    for key in logs:
        one, layout = logs.filter(lambda k, _, key=key: k == key), logs.layouts[key]
        leaf = jax.tree.leaves(one[key])[0]
        lanes = leaf.shape[: leaf.ndim - layout.ndims[0] - layout.events]
        for index in np.ndindex(lanes):
            found = events_of(jax.tree.map(lambda x, index=index: x[index], one))
            if key in found:
                out[f"{key}{index or ''}"] = found[key]
    return out


def lane(tree: Any, i: int) -> Any:
    return jax.tree.map(lambda x: x[i], tree)


def assert_same(a: Any, b: Any, rtol: float = 1e-5) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b), (a, b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.shape == y.shape, (a, b)
        if x.dtype == bool or y.dtype == bool:
            np.testing.assert_array_equal(x, y)
        else:
            np.testing.assert_allclose(
                x.astype(np.float64), y.astype(np.float64), rtol=rtol, atol=1e-5
            )
