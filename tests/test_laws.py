"""The laws of the design, each over the whole table of programs.

Compiling is what costs time here, so the variants of one law are compiled together.
"""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import lox
from oracle import CAPACITY, LANES, X, assert_same, by_lane, lane, record, silent, stacked
from programs import TABLE

spool = functools.partial(lox.spool, capacity=CAPACITY)


def over(keep=lambda p: True):
    return pytest.mark.parametrize("program", [p for p in TABLE if keep(p)], ids=lambda p: p.name)


def together(x, *funs):
    """The results of several functions of `x`, from one compiled program."""
    return jax.jit(lambda x: [f(x) for f in funs])(x)


def scalar(f):
    """A program as a scalar function, for gradients."""
    return lambda x: sum(jnp.sum(y) for y in jax.tree.leaves(f(x)))


def test_table_is_large():
    assert len(TABLE) >= 60


# --- 1: logging changes nothing ------------------------------------------------------------------


@over()
def test_result_is_unchanged(program):
    f, twin = program.build(lox.log), program.build(silent)
    want, *got = together(X, twin, f, lox.nolog(f), lambda x: spool(f)(x)[0])
    for out in got:
        assert_same(out, want)
    assert not jax.make_jaxpr(spool(lox.nolog(f)))(X).effects
    assert spool(lox.nolog(f))(X)[1] == {}


@over(lambda p: p.reverse_mode)
def test_gradient_is_unchanged(program):
    f, twin = scalar(program.build(lox.log)), scalar(program.build(silent))
    want, *got = together(
        X,
        jax.grad(twin),
        jax.grad(f),
        lambda x: spool(jax.grad(f))(x)[0],
        lambda x: jax.grad(spool(f), has_aux=True)(x)[0],
        lambda x: jax.grad(lox.tap(f, silent))(x),
    )
    for out in got:
        assert_same(out, want)
    (grad, logs), (grad_of_jit, logs_of_jit) = together(
        X, spool(jax.grad(lox.nolog(f))), spool(jax.grad(jax.jit(lox.nolog(f))))
    )
    assert_same([grad, grad_of_jit], [want, want])
    assert logs == logs_of_jit == {}


# --- 2: untransformed, a log is nothing ----------------------------------------------------------


@over()
def test_untransformed_is_identical(program):
    f, twin = program.build(lox.log), program.build(silent)
    jaxpr = jax.make_jaxpr(f)(X)
    assert not jaxpr.effects
    # The lines left out print the address of a rule of the user's.
    strip = lambda j: "\n".join(ln for ln in str(j).splitlines() if "0x" not in ln)
    assert strip(jaxpr) == strip(jax.make_jaxpr(twin)(X))
    text = lambda g: jax.jit(lambda x: g(x)).lower(X).as_text()
    assert text(f) == text(twin)


# --- 3: jit --------------------------------------------------------------------------------------


@over()
def test_spool_and_jit_commute(program):
    f = program.build(lox.log)
    want = spool(f)(X)
    for got in together(X, spool(jax.jit(lambda x: f(x))), spool(f)):
        assert_same(got, want)
    assert_same(spool(f)(X), want)
    assert_same(f(X), want[0])


# --- 4: vmap -------------------------------------------------------------------------------------


@over()
def test_spool_and_vmap_commute(program):
    f = program.build(lox.log)
    (out, inside), (out2, outside) = together(LANES, spool(jax.vmap(f)), jax.vmap(spool(f)))
    assert_same(out, out2)
    assert set(inside) == set(outside)
    if program.name == "in_custom_vmap":
        return  # its rule decides what runs under vmap
    if program.name not in ("cond_in_cond", "cond_of_jit_of_cond"):
        # There, lanes of a vmapped cond may take events that stand at different places.
        assert jax.tree.structure(inside) == jax.tree.structure(outside)
    alone = together(LANES, *[lambda xs, i=i: spool(f)(xs[i])[1] for i in range(len(LANES))])
    for i, logs in enumerate(alone):
        assert_same(by_lane(lane(inside, i)), by_lane(logs))
        assert_same(by_lane(lane(outside, i)), by_lane(logs))


# --- 5: a loop is its unrolled self --------------------------------------------------------------


@over(lambda p: p.oracle)
@pytest.mark.parametrize("x", [X, -X], ids=["x", "minus_x"])
def test_events_are_those_of_plain_python(program, x):
    out, calls = record(program.build, x)
    got, logs = spool(program.build(lox.log))(x)
    assert_same(got, out)
    assert_same(by_lane(logs), stacked(calls))


# --- 6: derivatives ------------------------------------------------------------------------------


def check_events(want, *derived):
    """Each derived function logs these events, each exactly once."""
    for _, logs in together(X, *[spool(d) for d in derived]):
        assert_same(by_lane(logs), want)


@over(lambda p: p.reverse_mode and not p.reruns)
def test_grad_logs_each_event_once(program):
    f = program.build(lox.log)
    g, want = scalar(f), by_lane(spool(f)(X)[1])
    check_events(
        want,
        jax.grad(g),
        jax.value_and_grad(jax.jit(g)),
        jax.grad(jax.checkpoint(g)),
        lambda x: jax.vjp(g, x)[1](1.0),
    )
    [(_, logs)] = together(X, jax.grad(spool(g), has_aux=True))
    assert_same(by_lane(logs), want)


@over(lambda p: "custom_vjp" not in p.name and not p.reruns)
def test_forward_mode_logs_each_event_once(program):
    f = program.build(lox.log)
    one = jnp.ones_like(X)
    check_events(
        by_lane(spool(f)(X)[1]),
        lambda x: jax.jvp(f, (x,), (one,)),
        lambda x: jax.linearize(f, x)[0],
        lambda x: jax.linearize(f, x)[1](one),
        lambda x: jax.jvp(jax.checkpoint(f), (x,), (one,)),
        lambda x: jax.jvp(lambda y: jax.jvp(f, (y,), (one,))[1], (x,), (one,)),
    )


# In a second derivative a custom rule decides what runs.
# Constants alone are logged by every lane of jacfwd's vmap: nothing tells it from another vmap.
@over(lambda p: p.reverse_mode and not p.reruns and not re.search("custom|constant_value", p.name))
def test_hessian_logs_each_event_once(program):
    f = program.build(lox.log)
    g = scalar(f)
    check_events(
        by_lane(spool(f)(X)[1]),
        jax.hessian(g),
        jax.jacfwd(f),
        jax.jacrev(f),
        lambda x: jax.jvp(jax.grad(g), (x,), (jnp.ones_like(x),)),
        lambda x: jax.grad(lambda y: jax.grad(g)(y).sum())(x),
    )


# --- 7: reductions -------------------------------------------------------------------------------

REDUCTIONS = ["mean", "sum", "min", "max", "first", "last", "count", "var", "std"]


@over()
def test_reduction_inside_is_the_reduction_of_the_rows(program):
    f = program.build(lox.log)
    turn = TABLE.index(program) % 3  # three reductions each, in turns, to save time
    names = REDUCTIONS[turn::3]
    (_, logs), (_, thin), *reduced = together(
        X, spool(f), spool(f, interval=3), *[lox.spool(f, reduce=r) for r in names]
    )
    outside = jax.jit(lambda logs: [logs.reduce(r) for r in names])(logs)
    for name, (_, inside), rows in zip(names, reduced, outside, strict=True):
        assert_same(inside.data, rows.data)
        assert_same(inside.steps, rows.steps)
        assert name == "count" or set(inside.mask) <= set(rows.mask)
    every_third = lambda tree: jax.tree.map(lambda x: x[::3], tree)
    assert_same(by_lane(thin), {k: every_third(v) for k, v in by_lane(logs).items()})


# --- 8: tap --------------------------------------------------------------------------------------


def tap_together(x, *calls):
    """What each of several tapped functions of `x`, compiled together, sends to its callback.

    A call is a pair (transformation of a tapped function, options of tap).
    """
    streams: list[list] = [[] for _ in calls]
    funs = [
        make(lambda g, o=o, s=s: lox.tap(g, s.append, **o)) for (make, o), s in zip(calls, streams)
    ]
    together(x, *funs)
    lox.flush()
    return [joined(s) for s in streams]


def joined(seen):
    """All the events that a stream carried."""
    whole = lox.logdict()
    for logs in seen:
        whole = whole + logs
    return whole


@over(lambda p: p.oracle and "vmap" not in p.name)
def test_tap_streams_the_calls_of_plain_python(program):
    out, calls = record(program.build, X)
    seen = []
    assert_same(lox.tap(program.build(lox.log), seen.append)(X), out)
    assert [list(s) for s in seen] == [list(data) for data, _, _ in calls]
    for s, (data, steps, _) in zip(seen, calls, strict=True):
        assert_same(s.data, data)
        assert_same(s.steps, {name: dict.fromkeys(data, value) for name, value in steps.items()})
        assert not s.mask


@over()
def test_tap_sends_what_spool_returns(program):
    f = program.build(lox.log)
    (_, logs), (_, thin), (_, total) = together(
        X, spool(f), spool(f, interval=2), lox.spool(f, reduce="sum")
    )
    every = (1, 3, 100)[TABLE.index(program) % 3]
    by_call, windows, interval, both, summed = tap_together(
        X,
        *[(lambda tap: tap(f), o) for o in ({}, {"every": every})],
        (lambda tap: tap(f), {"interval": 2}),
        (lambda tap: tap(f), {"interval": 2, "every": 3}),
        (lambda tap: tap(f), {"reduce": "sum"}),
    )
    for got in (by_call, windows):
        assert_same(by_lane(got), by_lane(logs))
    assert_same(by_lane(interval), by_lane(thin))
    assert_same(by_lane(both), by_lane(thin))
    assert_same(by_lane(summed), by_lane(total))


@over(lambda p: p.name != "in_custom_vmap")
def test_tap_and_vmap_commute(program):
    f = program.build(lox.log)
    [(_, logs)] = together(LANES, spool(jax.vmap(f)))
    of_vmap, vmap_of, windows = tap_together(
        LANES,
        (lambda tap: tap(jax.vmap(f)), {}),
        (lambda tap: jax.vmap(tap(f)), {}),
        (lambda tap: tap(jax.vmap(f)), {"every": 2}),
    )
    for got in (of_vmap, vmap_of, windows):
        assert_same(by_lane(got), by_lane(logs))


@over(lambda p: p.reverse_mode and not p.reruns)
def test_tap_and_grad_commute(program):
    f = scalar(program.build(lox.log))
    want = by_lane(spool(f)(X)[1])
    of_grad, grad_of, windows = tap_together(
        X,
        (lambda tap: tap(jax.grad(f)), {}),
        (lambda tap: jax.grad(tap(f)), {}),
        (lambda tap: jax.grad(tap(f)), {"every": 2}),
    )
    for got in (of_grad, grad_of, windows):
        assert_same(by_lane(got), want)


# --- 9: transformations in each other ------------------------------------------------------------


@over()
def test_transformations_nest(program):
    f = program.build(lox.log)
    seen_inner, seen_outer = [], []

    def consumed(x):
        return spool(f)(x)[0]

    def kept(x):
        return spool(f, keep_logs=True)(x)[0]

    def tapped(x):
        return lox.tap(f, seen_inner.append)(x)

    def tapped_and_kept(x):
        return lox.tap(lox.tap(f, seen_inner.append, keep_logs=True), seen_outer.append)(x)

    (_, logs), (_, none), (_, again), (_, tap_none) = together(
        X, spool(f), spool(consumed), spool(kept), spool(tapped)
    )
    lox.flush()
    want = by_lane(logs)
    assert none == {}
    assert tap_none == {}
    assert_same(by_lane(again), want)
    assert_same(by_lane(joined(seen_inner)), want)
    seen_inner.clear()
    together(X, tapped_and_kept)
    lox.flush()
    assert_same(by_lane(joined(seen_inner)), want)
    assert_same(by_lane(joined(seen_outer)), want)
