"""Generated programs, each run by JAX under lox and by a plain Python interpreter.

A program is a nested tuple of statements that change one number `x`; `t` is the index of the
innermost loop or lane. All numbers are small integers held in float32, so both runs are exact.

LOX_EXAMPLES=500 in the environment makes the run longer, and shrinks what it finds.
"""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, Phase, assume, example, given, settings
from hypothesis import strategies as st
from jax import lax

import lox
from oracle import assert_same, by_lane, lane, stacked

EXAMPLES = int(os.environ.get("LOX_EXAMPLES", "0"))
STARTS = (1.0, 4.0, 6.0)
M = 101.0
MOST = 300  # events of one program

settings.register_profile(
    "generated",
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate] + [Phase.shrink] * bool(EXAMPLES),
    suppress_health_check=list(HealthCheck),
)


def examples(n):
    profile = settings.get_profile("generated")
    return settings(profile, max_examples=EXAMPLES or max(4, n // 2))


# --- the grammar ---------------------------------------------------------------------------------

KINDS = ("scalar", "stepped", "vector", "tree", "constant", "pair")
WRAPPERS = ("jit", "remat", "jvp", "vjp", "nolog", "spool", "keep")

small = st.integers(0, 3)
logs = st.tuples(st.just("log"), st.sampled_from(KINDS))
arith = st.tuples(st.just("arith"), st.integers(0, 5), st.integers(0, 9))


def block(inner):
    return st.lists(inner, min_size=1, max_size=3).map(tuple)


def deeper(inner):
    body = block(inner)
    return st.one_of(
        st.tuples(st.just("scan"), small, st.booleans(), st.integers(1, 2), body),
        st.tuples(st.just("fori"), small, body),
        st.tuples(st.just("while"), small, st.one_of(st.just(()), block(logs)), body),
        st.tuples(st.just("switch"), st.lists(body | st.just(()), min_size=2, max_size=3)),
        st.tuples(st.just("vmap"), st.integers(1, 3), body),
        st.tuples(st.sampled_from(WRAPPERS), body),
    )


programs = block(st.recursive(logs | logs | arith, deeper, max_leaves=8))


# --- executed by JAX -----------------------------------------------------------------------------


def value_of(kind, x, t, stack):
    """The data and steps of a log statement."""
    if kind == "scalar":
        return {"s": x}, {}
    if kind == "stepped":
        return {"t": x}, {"step": t}
    if kind == "vector":
        return {"v": stack([x, t])}, {}
    if kind == "tree":
        return {"p": {"a": x, "b": (t,)}}, {"step": t, "epoch": x}
    if kind == "constant":
        return {"c": 1.5}, {}
    return {"m": x, "n": t}, {}


def compiled(program):
    """The program as a JAX function of x. Keys are named by the lanes around them."""
    return lambda x: _block(program, x, jnp.float32(0), "")


def _block(program, x, t, lanes):
    for statement in program:
        x = _statement(statement, x, t, lanes)
    return x


def _statement(statement, x, t, lanes):
    name, *args, body = statement
    run = lambda x, t: _block(body, x, t, lanes)
    if name == "log":
        data, steps = value_of(body, x, t, jnp.stack)
        lox.log(data, prefix=lanes, **steps)
        return x
    if name == "arith":
        return lax.rem(args[0] * x + t + body, M)
    if name == "scan":
        length, reverse, unroll = args
        step = lambda x, t: (run(x, t), t)
        return lax.scan(step, x, jnp.arange(float(length)), reverse=reverse, unroll=unroll)[0]
    if name == "fori":
        return lax.fori_loop(0, args[0], lambda i, x: run(x, i.astype(jnp.float32)), x)
    if name == "while":
        most, condition = args
        n = lax.rem(x, most + 1.0)

        def keep_going(c):
            _block(condition, c[1], c[0], lanes)
            return c[0] < n

        return lax.while_loop(keep_going, lambda c: (c[0] + 1, run(c[1], c[0])), (t * 0, x))[1]
    if name == "switch":
        branches = [lambda x, t, b=b: _block(b, x, t, lanes) for b in body]
        return lax.switch(lax.rem(x, 1.0 * len(body)).astype(jnp.int32), branches, x, t)
    if name == "vmap":
        inside = lambda i: _block(body, lax.rem(x + i, M), i, f"{lanes}{args[0]}x")
        return lax.rem(jax.vmap(inside)(jnp.arange(float(args[0]))).sum(), M)
    return _wrapped(name, run)(x, t)


def _wrapped(name, run):
    if name == "jit":
        return jax.jit(run)
    if name == "remat":
        return jax.checkpoint(run)
    if name == "nolog":
        return lox.nolog(run)
    if name == "jvp":
        g = jax.custom_jvp(run)
        g.defjvp(lambda xs, dots: (g(*xs), 2 * dots[0]))
        return g
    if name == "vjp":
        g = jax.custom_vjp(run)
        g.defvjp(lambda x, t: (g(x, t), x), lambda x, ct: (ct * x, jnp.zeros_like(ct)))
        return g

    def counted(x, t):
        x, logs = lox.spool(run, reduce="count", keep_logs=name == "keep")(x, t)
        return lax.rem(x + sum(jnp.sum(n).astype(x.dtype) for n in logs.values()), M)

    return counted


# --- executed by Python --------------------------------------------------------------------------


class Plain:
    """Runs a program and keeps its log calls: (data, steps, lane)."""

    def __init__(self, program, x):
        self.calls, self.lane = [], ()
        self.result = self.block(program, np.float32(x), np.float32(0), "")

    def block(self, program, x, t, lanes):
        for statement in program:
            x = np.float32(self.statement(statement, x, np.float32(t), lanes))
        return x

    def statement(self, statement, x, t, lanes):
        name, *args, body = statement
        if name == "log":
            data, steps = value_of(body, x, t, np.stack)
            self.calls.append(({lanes + k: v for k, v in data.items()}, steps, self.lane))
        elif name == "arith":
            x = (args[0] * x + t + body) % M
        elif name in ("scan", "fori"):
            order = range(args[0])
            for i in reversed(order) if name == "scan" and args[1] else order:
                x = self.block(body, x, i, lanes)
        elif name == "while":
            most, condition = args
            i, n = 0, x % (most + 1)
            self.block(condition, x, i, lanes)
            while i < n:
                x = self.block(body, x, i, lanes)
                i += 1
                self.block(condition, x, i, lanes)
        elif name == "switch":
            x = self.block(body[int(x % len(body))], x, t, lanes)
        elif name == "vmap":
            outs, lane = [], self.lane
            for i in range(args[0]):
                self.lane = (*lane, i)
                outs.append(self.block(body, (x + i) % M, i, f"{lanes}{args[0]}x"))
            self.lane = lane
            x = sum(outs) % M
        else:
            before = len(self.calls)
            x = self.block(body, x, t, lanes)
            if name in ("spool", "keep"):
                x = (x + sum(len(data) for data, _, _ in self.calls[before:])) % M
            if name in ("spool", "nolog"):
                del self.calls[before:]
        return x


def holds(program, *names):
    """Is one of these statements anywhere in the program?"""
    if isinstance(program, str):
        return program in names
    return isinstance(program, tuple | list) and any(holds(p, *names) for p in program)


def has_reverse_mode(program):
    """While loops can be differentiated in reverse only inside a custom rule."""
    if not isinstance(program, tuple | list) or not program or program[0] in ("jvp", "vjp"):
        return True
    return program[0] != "while" and all(has_reverse_mode(p) for p in program)


def oracle(program, *starts):
    runs = [Plain(program, x) for x in starts]
    assume(any(r.calls for r in runs) and max(len(r.calls) for r in runs) < MOST)
    return runs if len(runs) > 1 else runs[0]


def spool(f, **options):
    return lox.spool(f, capacity=MOST, **options)


# --- the laws ------------------------------------------------------------------------------------

SCALAR, TREE = (("log", "scalar"),), (("log", "tree"),)
NONE = (("fori", 0, SCALAR),)  # a loop that never runs


@examples(25)
@given(programs, st.sampled_from(STARTS))
@example((*TREE, ("switch", [NONE, SCALAR])), 6.0)
@example((*TREE, ("while", 3, (), NONE), *SCALAR), 1.0)
def test_spool_returns_the_events(program, x):
    want = oracle(program, x)
    f = compiled(program)
    assert f(x) == want.result
    got, logs = spool(f)(x)
    assert got == want.result
    assert_same(by_lane(logs), stacked(want.calls), rtol=0)


@examples(8)
@given(programs)
def test_spool_and_vmap_commute(program):
    wants = oracle(program, *STARTS)
    f, xs = compiled(program), jnp.array(STARTS)
    for out, logs in (spool(jax.vmap(f))(xs), jax.jit(jax.vmap(spool(f)))(xs)):
        np.testing.assert_array_equal(out, [w.result for w in wants])
        for i, want in enumerate(wants):
            assert_same(by_lane(lane(logs, i)), stacked(want.calls), rtol=0)


# Loops whose bodies log what they pass through unchanged.
PASSING = (("fori", 2, (("switch", [SCALAR, SCALAR]),)),)
PASSING_REMAT = (("fori", 3, (("remat", (("scan", 1, False, 1, SCALAR),)),)),)


@examples(10)
@given(programs.filter(has_reverse_mode), st.sampled_from(STARTS))
@example(PASSING, 1.0)
@example(PASSING_REMAT, 1.0)
@example((("scan", 2, False, 1, (("fori", 2, (*SCALAR, *TREE)),)),), 1.0)
def test_grad_logs_every_event_once(program, x):
    want = oracle(program, x)
    f = compiled(program)
    grad, logs = spool(jax.grad(f))(x)
    assert grad == jax.grad(f)(x)
    assert_same(by_lane(logs), stacked(want.calls), rtol=0)
    grad2, logs = jax.jit(jax.grad(spool(f), has_aux=True))(x)
    assert grad2 == grad
    assert_same(by_lane(logs), stacked(want.calls), rtol=0)


@examples(8)
@given(programs.filter(has_reverse_mode))
@example(PASSING)
@example(PASSING_REMAT)
def test_vmap_of_grad_logs_every_event_once(program):
    wants = oracle(program, *STARTS)
    _, logs = spool(jax.vmap(jax.grad(compiled(program))))(jnp.array(STARTS))
    for i, want in enumerate(wants):
        assert_same(by_lane(lane(logs, i)), stacked(want.calls), rtol=0)


@examples(8)
@given(programs.filter(lambda p: not holds(p, "vjp")), st.sampled_from(STARTS))
@example((("scan", 3, False, 1, (("while", 0, TREE, TREE),)),), 1.0)
def test_jvp_logs_every_event_once(program, x):
    want = oracle(program, x)
    f = compiled(program)
    (out, _), logs = spool(lambda x: jax.jvp(f, (x,), (1.0,)))(x)
    assert out == want.result
    assert_same(by_lane(logs), stacked(want.calls), rtol=0)


@examples(8)
@given(programs, st.sampled_from(STARTS), st.integers(1, 4))
@example((*SCALAR, *NONE), 1.0, 1)
def test_capacity_keeps_the_latest_of_a_while_loop(program, x, capacity):
    looped = (("while", 3, (), program),)
    want = oracle(looped, x)
    _, logs = lox.spool(compiled(looped), capacity=capacity)(x)
    events = stacked(want.calls)
    latest = {k: jax.tree.map(lambda v: v[-capacity:], e) for k, e in events.items()}
    assert_same(by_lane(logs), latest, rtol=0)
    counts = {f"{k}{i or ''}": n for k, c in logs.count.items() for i, n in np.ndenumerate(c) if n}
    assert counts == {k: len(jax.tree.leaves(e)[0]) for k, e in events.items()}


@examples(8)
@given(programs, st.sampled_from(STARTS), st.integers(2, 3))
@example((*TREE, *NONE), 1.0, 2)
def test_interval_keeps_every_nth_event(program, x, n):
    want = oracle(program, x)
    thin = {k: jax.tree.map(lambda v: v[::n], e) for k, e in stacked(want.calls).items()}
    _, logs = spool(compiled(program), interval=n)(x)
    assert_same(by_lane(logs), thin, rtol=0)


REDUCE = {
    "sum": lambda v: v.sum(0),
    "mean": lambda v: v.mean(0),
    "max": lambda v: v.max(0),
    "min": lambda v: v.min(0),
    "last": lambda v: v[-1],
    "first": lambda v: v[0],
    "std": lambda v: v.std(0),
}


@examples(12)
@given(programs, st.sampled_from(STARTS), st.sampled_from(sorted(REDUCE)))
def test_reductions_are_those_of_the_events(program, x, name):
    want = oracle(program, x)
    reduced = {}
    for key, (value, steps) in stacked(want.calls).items():
        pick = REDUCE["first" if name == "first" else "last"]
        reduced[key] = jax.tree.map(REDUCE[name], value), jax.tree.map(pick, steps)
    _, logs = lox.spool(compiled(program), reduce=name)(x)
    one = lambda v: jax.tree.map(lambda a: a[0], v)
    assert_same({k: one(e) for k, e in by_lane(logs).items()}, reduced)


# --- tap -----------------------------------------------------------------------------------------


def joined(seen):
    whole = lox.logdict()
    for logs in seen:
        whole = whole + logs
    return by_lane(whole)


@examples(15)
@given(programs.filter(lambda p: not holds(p, "vmap")), st.sampled_from(STARTS))
def test_tap_streams_the_calls_in_order(program, x):
    want = oracle(program, x)
    seen = []
    assert lox.tap(compiled(program), seen.append)(x) == want.result
    assert_same([(s.data, s.steps) for s in seen], [_as_call(*c[:2]) for c in want.calls], rtol=0)


def _as_call(data, steps):
    return data, {name: dict.fromkeys(data, value) for name, value in steps.items()}


@examples(8)
@given(programs, st.integers(1, 4))
def test_tap_of_vmap_carries_the_events_of_every_lane(program, every):
    wants = oracle(program, *STARTS)
    f, xs = compiled(program), jnp.array(STARTS)
    want = {}
    for i, w in enumerate(wants):
        calls = [(data, steps, (i, *lanes)) for data, steps, lanes in w.calls]
        want |= stacked(calls)
    seen = []
    lox.tap(jax.vmap(f), seen.append)(xs)
    assert_same(joined(seen), want, rtol=0)
    seen.clear()
    lox.tap(jax.vmap(f), seen.append, every=every)(xs)
    assert_same(joined(seen), want, rtol=0)


@examples(12)
@given(programs, st.sampled_from(STARTS), st.integers(1, 4))
@example((("while", 1, TREE, NONE),), 1.0, 1)
@example((("while", 1, TREE, (("fori", 0, (("while", 1, (), SCALAR),)),)),), 1.0, 1)
def test_windows_lose_nothing(program, x, every):
    want = oracle(program, x)
    seen = []
    assert lox.tap(compiled(program), seen.append, every=every)(x) == want.result
    assert_same(joined(seen), stacked(want.calls), rtol=0)


@examples(8)
@given(programs, st.sampled_from(STARTS), st.integers(2, 3))
@example((("vmap", 3, (("switch", [SCALAR, ()]), *SCALAR)),), 1.0, 2)
def test_tap_interval_sends_every_nth_event(program, x, n):
    want = oracle(program, x)
    thin = {k: jax.tree.map(lambda v: v[::n], e) for k, e in stacked(want.calls).items()}
    seen = []
    lox.tap(compiled(program), seen.append, interval=n)(x)
    assert_same(joined(seen), thin, rtol=0)


@examples(8)
@given(programs.filter(has_reverse_mode), st.sampled_from(STARTS))
@example(PASSING, 1.0)
def test_tap_under_grad_sends_every_event_once(program, x):
    want = oracle(program, x)
    seen = []
    jax.grad(lox.tap(compiled(program), seen.append))(x)
    lox.flush()
    assert_same(joined(seen), stacked(want.calls), rtol=0)
