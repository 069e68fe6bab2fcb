"""The laws of the design, each over the whole table of programs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import CAPACITY, LANES, X, assert_same, by_lane, lane, record, silent, stacked
from programs import TABLE

import lox

over = lambda keep=lambda p: True: pytest.mark.parametrize(
    "program", [p for p in TABLE if keep(p)], ids=lambda p: p.name
)
spool = functools.partial(lox.spool, capacity=CAPACITY)


def test_table_is_large():
    assert len(TABLE) >= 60


def scalar(f):
    """A program as a scalar function, for gradients."""
    return lambda x: sum(jnp.sum(y) for y in jax.tree.leaves(f(x)))


# --- 1: logging changes nothing ------------------------------------------------------------------


@over()
def test_result_is_unchanged(program):
    f, twin = program.build(lox.log), program.build(silent)
    want = twin(X)
    assert_same(f(X), want)
    assert_same(lox.nolog(f)(X), want)
    assert_same(spool(f)(X)[0], want)
    jaxpr = jax.make_jaxpr(spool(lox.nolog(f)))(X)
    assert not jaxpr.effects


@over(lambda p: p.reverse_mode)
def test_gradient_is_unchanged(program):
    f, twin = scalar(program.build(lox.log)), scalar(program.build(silent))
    want = jax.grad(twin)(X)
    assert_same(jax.grad(f)(X), want)
    assert_same(spool(jax.grad(f))(X)[0], want)
    assert_same(jax.grad(spool(f), has_aux=True)(X)[0], want)
    assert_same(jax.jit(jax.grad(spool(f), has_aux=True))(X)[0], want)


# --- 2: untransformed, a log is nothing ----------------------------------------------------------


@over()
def test_untransformed_is_identical(program):
    f, twin = program.build(lox.log), program.build(silent)
    jaxpr = jax.make_jaxpr(f)(X)
    assert not jaxpr.effects
    if program.name not in ("in_custom_jvp", "in_custom_vjp"):  # print addresses of closures
        strip = lambda j: "\n".join(ln for ln in str(j).splitlines() if "0x" not in ln)
        assert strip(jaxpr) == strip(jax.make_jaxpr(twin)(X))
    f.__name__ = twin.__name__ = "f" if hasattr(f, "__code__") else f.__name__
    text = lambda g: jax.jit(lambda x: g(x)).lower(X).as_text()
    assert text(f) == text(twin)


# --- 3: jit --------------------------------------------------------------------------------------


@over()
def test_spool_and_jit_commute(program):
    f = program.build(lox.log)
    want = spool(f)(X)
    assert_same(spool(jax.jit(lambda x: f(x)))(X), want)
    assert_same(jax.jit(spool(f))(X), want)
    assert_same(spool(f)(X), want)
    assert_same(f(X), want[0])


# --- 4: vmap -------------------------------------------------------------------------------------


@over()
def test_spool_and_vmap_commute(program):
    f = program.build(lox.log)
    (out, inside), (out2, outside) = spool(jax.vmap(f))(LANES), jax.vmap(spool(f))(LANES)
    assert_same(out, out2)
    assert set(inside) == set(outside)
    for i in range(len(LANES)):
        if program.name == "in_custom_vmap":
            continue
        _, alone = spool(f)(LANES[i])
        for logs in (lane(inside, i), lane(outside, i)):
            assert_same(by_lane(logs), by_lane(alone))


# --- 5: a loop is its unrolled self --------------------------------------------------------------


@over(lambda p: p.oracle)
@pytest.mark.parametrize("x", [X, -X], ids=["x", "minus_x"])
def test_events_are_those_of_plain_python(program, x):
    out, calls = record(program.build, x)
    got, logs = spool(program.build(lox.log))(x)
    assert_same(got, out)
    assert_same(by_lane(logs), stacked(calls))


# --- 6: derivatives ------------------------------------------------------------------------------


def primal_events(f, x):
    return by_lane(spool(f)(x)[1])


@over(lambda p: p.reverse_mode and not p.reruns)
def test_grad_logs_each_event_once(program):
    f = program.build(lox.log)
    want = primal_events(f, X)
    g = scalar(f)
    for derived in (
        jax.grad(g),
        jax.value_and_grad(g),
        jax.jit(jax.grad(g)),
        jax.grad(jax.jit(g)),
        jax.grad(jax.checkpoint(g)),
        lambda x: jax.vjp(g, x)[1](1.0),
    ):
        assert_same(primal_events(derived, X), want)
    assert_same(by_lane(jax.grad(spool(g), has_aux=True)(X)[1]), want)


@over(lambda p: "custom_vjp" not in p.name and not p.reruns)
def test_forward_mode_logs_each_event_once(program):
    f = program.build(lox.log)
    want = primal_events(f, X)
    one = jnp.ones_like(X)
    for derived in (
        lambda x: jax.jvp(f, (x,), (one,)),
        lambda x: jax.linearize(f, x)[0],
        lambda x: jax.linearize(f, x)[1](one),
        lambda x: jax.jvp(jax.checkpoint(f), (x,), (one,)),
        lambda x: jax.jvp(lambda y: jax.jvp(f, (y,), (one,))[1], (x,), (one,)),
    ):
        assert_same(primal_events(derived, X), want)


@over(lambda p: p.reverse_mode and not p.reruns)
def test_hessian_logs_each_event_once(program):
    if "custom_vjp" in program.name or "custom_jvp" in program.name:
        pytest.skip("a custom rule decides what runs in the second derivative")
    f = program.build(lox.log)
    want = primal_events(f, X)
    g = scalar(f)
    along = lambda x: jax.jvp(jax.grad(g), (x,), (jnp.ones_like(x),))
    assert_same(primal_events(along, X), want)
    twice = lambda x: jax.grad(lambda y: jax.grad(g)(y).sum())(x)
    assert_same(primal_events(twice, X), want)


# --- 7: reductions -------------------------------------------------------------------------------

REDUCTIONS = ["mean", "sum", "min", "max", "first", "last", "count", "var", "std"]


@over()
def test_reduction_inside_is_the_reduction_of_the_rows(program):
    f = program.build(lox.log)
    _, logs = spool(f)(X)
    for name in REDUCTIONS:
        inside, outside = lox.spool(f, reduce=name)(X)[1], logs.reduce(name)
        assert_same(inside.data, outside.data)
        assert_same(inside.steps, outside.steps)
        if name != "count":
            assert {k for k in inside.mask} <= {k for k in outside.mask}


@over()
def test_interval_keeps_every_nth(program):
    f = program.build(lox.log)
    _, logs = spool(f)(X)
    _, thin = spool(f, interval=3)(X)
    want = {k: lane_slice(v, 3) for k, v in by_lane(logs).items()}
    assert_same(by_lane(thin), want)


def lane_slice(tree, n):
    return jax.tree.map(lambda x: x[::n], tree)


# --- 8: tap --------------------------------------------------------------------------------------


def collect_tap(f, x, **options):
    seen = []
    out = lox.tap(f, seen.append, **options)(x)
    return out, seen


@over(lambda p: p.oracle and "vmap" not in p.name)
@pytest.mark.parametrize("x", [X, -X], ids=["x", "minus_x"])
def test_tap_streams_the_calls_of_plain_python(program, x):
    out, calls = record(program.build, x)
    got, seen = collect_tap(program.build(lox.log), x)
    assert_same(got, out)
    assert [list(s) for s in seen] == [list(data) for data, _, _ in calls]
    for s, (data, steps, _) in zip(seen, calls, strict=True):
        assert_same(s.data, data)
        for name, value in steps.items():
            for key in data:
                assert_same(s.steps[name][key], value)
        assert not s.mask


def joined(seen):
    """All the events that a stream carried."""
    whole = lox.logdict()
    for logs in seen:
        whole = whole + logs
    return whole


@over()
@pytest.mark.parametrize("every", [1, 3, 100])
def test_windows_lose_nothing(program, every):
    f = program.build(lox.log)
    _, seen = collect_tap(f, X, every=every)
    _, logs = spool(f)(X)
    assert_same(by_lane(joined(seen)), by_lane(logs))


@over()
def test_tap_of_vmap_and_vmap_of_tap(program):
    if program.name == "in_custom_vmap":
        pytest.skip("its rule decides what runs under vmap")
    f = program.build(lox.log)
    _, logs = spool(jax.vmap(f))(LANES)
    want = by_lane(logs)
    _, seen = collect_tap(jax.vmap(f), LANES)
    assert_same(by_lane(joined(seen)), want)
    seen = []
    jax.vmap(lox.tap(f, seen.append))(LANES)
    lox.flush()
    assert_same(by_lane(joined(seen)), want)


@over(lambda p: p.reverse_mode and not p.reruns)
def test_tap_under_grad(program):
    f = scalar(program.build(lox.log))
    want = primal_events(f, X)
    _, seen = collect_tap(jax.grad(f), X)
    assert_same(by_lane(joined(seen)), want)
    seen = []
    jax.grad(lox.tap(f, seen.append))(X)
    lox.flush()
    assert_same(by_lane(joined(seen)), want)


@over()
def test_tap_interval_and_reduce(program):
    f = program.build(lox.log)
    _, seen = collect_tap(f, X, interval=2)
    _, thin = spool(f, interval=2)(X)
    assert_same(by_lane(joined(seen)), by_lane(thin))
    _, seen = collect_tap(f, X, reduce="sum")
    _, total = lox.spool(f, reduce="sum")(X)
    assert len(seen) <= 1
    assert_same(by_lane(joined(seen)), by_lane(total))
