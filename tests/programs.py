"""The table of programs over which the laws are tested.

Each program is a function `build(log)` that returns `f(x)` for a float32 vector x of length 4. With
`log=lox.log` it is the program under test; with a function that does nothing, its twin without
logs; with a recorder, under `jax.disable_jit()`, its own oracle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Program:
    name: str
    build: Callable[[Any], Callable]
    loops_while: bool = False  # needs capacity= or reduce=
    reverse_mode: bool = True  # can be differentiated in reverse
    oracle: bool = True  # runs under jax.disable_jit
    reruns: bool = False  # its derivative runs (and logs) it again, or JAX has none


TABLE: list[Program] = []


def program(**flags: Any) -> Callable:
    def add(build: Callable) -> Callable:
        TABLE.append(Program(build.__name__, build, **flags))
        return build

    return add


WHILE = dict(loops_while=True, reverse_mode=False)


def _inc(x):
    return jnp.sin(x) + 0.5 * x


# --- straight lines ------------------------------------------------------------------------------


@program()
def one_value(log):
    def f(x):
        log({"a": x})
        return x * 2

    return f


@program()
def two_calls_one_key(log):
    def f(x):
        log({"a": x})
        log({"a": x * 2})
        return x.sum()

    return f


@program()
def two_keys_one_call(log):
    def f(x):
        log({"a": x, "b": x.sum()}, step=3)
        return x

    return f


@program()
def pytree_value(log):
    def f(x):
        log({"a": {"w": x, "b": (x[0], [x[1:]])}}, step=1)
        log({"a": {"w": x + 1, "b": (x[0] * 2, [x[1:]])}}, step=2)
        return x.sum()

    return f


@program()
def constant_value(log):
    def f(x):
        log({"c": 1.5, "i": 3, "b": True})
        return x + 1

    return f


@program()
def nothing_logged(log):
    def f(x):
        return x + 1

    return f


@program()
def many_steps(log):
    def f(x):
        log({"a": x}, step=0, episode=1, epoch=jnp.float32(0.5))
        log({"a": x}, step=1, episode=1, epoch=jnp.float32(1.0))
        return x

    return f


@program()
def dtypes(log):
    def f(x):
        log({"i": x.astype(jnp.int32), "h": x.astype(jnp.bfloat16), "b": x > 0})
        log({"i": x.astype(jnp.int32) + 1, "h": x.astype(jnp.bfloat16), "b": x > 1})
        return x

    return f


# --- calls ---------------------------------------------------------------------------------------


@program()
def in_jit(log):
    @jax.jit
    def g(x):
        log({"a": x})
        return _inc(x)

    return lambda x: g(x) + g(x * 2)


@program()
def jit_in_jit(log):
    @jax.jit
    def g(x):
        log({"inner": x})
        return x + 1

    @jax.jit
    def h(x):
        y = g(x) + g(x + 2)
        log({"outer": y})
        return y

    return lambda x: h(h(x))


@program()
def in_remat(log):
    @jax.checkpoint
    def g(x):
        y = jnp.sin(x)
        log({"a": y})
        return jnp.cos(y)

    return lambda x: g(g(x))


@program()
def in_remat_with_policy(log):
    def g(x):
        y = jnp.sin(x) @ jnp.ones((4, 4))
        log({"a": y})
        return jnp.cos(y)

    return jax.checkpoint(g, policy=jax.checkpoint_policies.dots_saveable)


@program()
def in_custom_jvp(log):
    @jax.custom_jvp
    def g(x):
        log({"a": x})
        return jnp.sin(x)

    @g.defjvp
    def rule(primals, tangents):
        return g(primals[0]), 2.0 * tangents[0]

    return lambda x: g(x) * 3


@program()
def in_custom_vjp(log):
    @jax.custom_vjp
    def g(x):
        log({"a": x})
        return jnp.sin(x)

    g.defvjp(lambda x: (g(x), x), lambda x, ct: (ct * 2,))
    return lambda x: g(x) * 3


@program()
def in_named_scope(log):
    def f(x):
        with jax.named_scope("outer"):
            log({"a": x})
            return x + 1

    return f


@program(oracle=False, reverse_mode=False, reruns=True)
def in_custom_vmap(log):
    @jax.custom_batching.custom_vmap
    def g(x):
        log({"a": x})
        return x * 2

    @g.def_vmap
    def rule(size, batched, x):
        return jax.vmap(lambda x: _logged_twice(log, x))(x), batched[0]

    return g


def _logged_twice(log, x):
    log({"a": x})
    return x * 2


@program()
def in_vmap(log):
    def g(x):
        log({"a": x}, step=0)
        return x * 2

    return lambda x: jax.vmap(g)(x.reshape(2, 2))


@program(oracle=False, reruns=True)
def in_linear_solve(log):
    def f(x):
        a = jnp.diag(jnp.arange(1.0, 5.0))

        def solve(matvec, b):
            out = b / jnp.arange(1.0, 5.0)
            log({"a": out})
            return out

        return lax.custom_linear_solve(lambda v: a @ v, x, solve, symmetric=True)

    return f


# --- scans ---------------------------------------------------------------------------------------


@program()
def in_scan(log):
    def f(x):
        def step(c, t):
            c = _inc(c + t)
            log({"a": c}, step=t)
            return c, c * 2

        return lax.scan(step, 0.0, x)

    return f


@program()
def in_scan_reverse(log):
    def f(x):
        def step(c, t):
            log({"a": c + t})
            return _inc(c + t), c

        return lax.scan(step, 0.0, x, reverse=True)

    return f


@program()
def in_scan_unrolled(log):
    def f(x):
        def step(c, t):
            log({"a": c}, step=t)
            return _inc(c + t), None

        return lax.scan(step, 0.0, x, unroll=3)[0]

    return f


@program()
def in_scan_twice_per_step(log):
    def f(x):
        def step(c, t):
            log({"a": c})
            log({"a": t})
            log({"b": c})
            return _inc(c + t), t

        return lax.scan(step, 0.0, x)

    return f


@program()
def in_scan_constant(log):
    def f(x):
        def step(c, t):
            log({"a": 1.0, "x0": x[0]})
            return _inc(c + t), None

        return lax.scan(step, 0.0, x)[0]

    return f


@program()
def in_scan_of_one(log):
    def f(x):
        def step(c, t):
            log({"a": t})
            return c + t, None

        return lax.scan(step, 0.0, x[:1])[0]

    return f


@program()
def in_scan_without_xs(log):
    def f(x):
        def step(c, _):
            log({"a": c})
            return _inc(c), None

        return lax.scan(step, x, None, length=3)[0]

    return f


@program()
def before_in_and_after_scan(log):
    def f(x):
        log({"a": x.sum()})

        def step(c, t):
            log({"a": c})
            return c + t, None

        y, _ = lax.scan(step, 0.0, x)
        log({"a": y})
        return y

    return f


@program()
def two_scans_one_key(log):
    def f(x):
        def step(c, t):
            log({"a": t})
            return c + t, None

        y, _ = lax.scan(step, 0.0, x)
        return lax.scan(step, y, x[:2])[0]

    return f


@program()
def scan_in_scan(log):
    def f(x):
        def outer(c, t):
            def inner(d, u):
                log({"inner": d + u}, step=u)
                return _inc(d + u), None

            d, _ = lax.scan(inner, c, x[:3])
            log({"outer": d + t})
            return d, None

        return lax.scan(outer, 0.0, x)[0]

    return f


@program()
def scan_in_reverse_scan(log):
    def f(x):
        def outer(c, t):
            def inner(d, u):
                log({"a": d + u})
                return _inc(d + u), None

            return lax.scan(inner, c + t, x[:2], reverse=True)[0], None

        return lax.scan(outer, 0.0, x, reverse=True)[0]

    return f


@program()
def static_fori(log):
    def f(x):
        def body(i, c):
            log({"a": c}, step=i)
            return _inc(c + x[i])

        return lax.fori_loop(0, 4, body, 0.0)

    return f


@program()
def map_over_rows(log):
    def f(x):
        def g(t):
            log({"a": t})
            return t * 2

        return lax.map(g, x)

    return f


@program(oracle=False)
def map_in_batches(log):
    def f(x):
        def g(t):
            log({"a": t})
            return t * 2

        return lax.map(g, x, batch_size=2)

    return f


@program()
def jit_in_scan(log):
    @jax.jit
    def g(x):
        log({"a": x})
        return _inc(x)

    return lambda x: lax.scan(lambda c, t: (g(c + t), None), 0.0, x)[0]


@program()
def remat_in_scan(log):
    @jax.checkpoint
    def g(c, t):
        y = jnp.sin(c + t)
        log({"a": y}, step=t)
        return jnp.cos(y)

    return lambda x: lax.scan(lambda c, t: (g(c, t), None), 0.0, x)[0]


@program()
def scan_in_remat(log):
    @jax.checkpoint
    def g(x):
        def step(c, t):
            log({"a": c, "k": x[0]})
            return jnp.sin(c + t), None

        return lax.scan(step, 0.0, x)[0]

    return g


@program()
def custom_jvp_in_scan(log):
    @jax.custom_jvp
    def g(x):
        log({"a": x})
        return jnp.sin(x)

    @g.defjvp
    def rule(primals, tangents):
        return g(primals[0]), jnp.cos(primals[0]) * tangents[0]

    return lambda x: lax.scan(lambda c, t: (g(c + t), None), 0.0, x)[0]


@program()
def custom_vjp_in_scan(log):
    @jax.custom_vjp
    def g(x):
        log({"a": x})
        return jnp.sin(x)

    g.defvjp(lambda x: (g(x), x), lambda x, ct: (ct * jnp.cos(x),))
    return lambda x: lax.scan(lambda c, t: (g(c + t), None), 0.0, x)[0]


@program()
def scan_in_custom_vjp(log):
    def body(x):
        def step(c, t):
            log({"a": c})
            return jnp.sin(c + t), None

        return lax.scan(step, 0.0, x)[0]

    g = jax.custom_vjp(body)
    g.defvjp(lambda x: (g(x), x), lambda x, ct: (jnp.ones_like(x) * ct,))
    return g


@program()
def vmap_in_scan(log):
    def g(t):
        log({"a": t}, step=0)
        return jnp.sin(t)

    def f(x):
        rows = x.reshape(2, 2)
        return lax.scan(lambda c, _: (jax.vmap(g)(c), None), rows.sum(0), None, length=3)[0]

    return f


@program()
def scan_in_vmap(log):
    def g(t):
        def step(c, u):
            log({"a": c * t})
            return _inc(c + u), None

        return lax.scan(step, t, jnp.arange(3.0))[0]

    return lambda x: jax.vmap(g)(x)


# --- branches ------------------------------------------------------------------------------------


@program()
def cond_same_key(log):
    def f(x):
        def yes(x):
            log({"a": x})
            return x * 2

        def no(x):
            log({"a": -x})
            return x * 3

        return lax.cond(x[0] > 0, yes, no, x)

    return f


@program()
def cond_one_sided(log):
    def f(x):
        def yes(x):
            log({"a": x}, step=7)
            return x * 2

        return lax.cond(x[0] > 0, yes, lambda x: x, x)

    return f


@program()
def cond_different_keys(log):
    def f(x):
        def yes(x):
            log({"a": x.sum()})
            return x * 2

        def no(x):
            log({"b": x, "c": 1})
            return x * 3

        return lax.cond(x[0] > 0, yes, no, x)

    return f


@program()
def cond_different_counts(log):
    def f(x):
        def yes(x):
            log({"a": x[0]})
            log({"a": x[1]})
            log({"a": x[2]})
            return x * 2

        def no(x):
            log({"a": x[3]})
            return x * 3

        return lax.cond(x[0] > 0, yes, no, x)

    return f


@program()
def switch_three(log):
    def f(x):
        def branch(n):
            def run(x):
                for i in range(n):
                    log({"a": x[i]}, step=i)
                return x * n

            return run

        index = (jnp.abs(x[0]) * 10).astype(jnp.int32) % 3
        return lax.switch(index, [branch(0), branch(1), branch(2)], x)

    return f


@program()
def cond_in_cond(log):
    def f(x):
        def yes(x):
            def inner(x):
                log({"a": x.sum()})
                return x

            return lax.cond(x[1] > 0, inner, lambda x: x * 2, x)

        def no(x):
            log({"a": x[0]})
            return x

        return lax.cond(x[0] > 0, yes, no, x)

    return f


@program()
def cond_in_scan(log):
    def f(x):
        def step(c, t):
            def yes(c):
                log({"a": c + t}, step=t)
                return _inc(c)

            return lax.cond(t > 0, yes, lambda c: c + t, c), c

        return lax.scan(step, 0.0, x)

    return f


@program()
def scan_in_cond(log):
    def f(x):
        def yes(x):
            def step(c, t):
                log({"a": t})
                return c + t, None

            return lax.scan(step, 0.0, x)[0]

        def no(x):
            log({"a": x[0]})
            return x[0]

        return lax.cond(x[0] > 0, yes, no, x)

    return f


@program()
def cond_in_remat_in_scan(log):
    @jax.checkpoint
    def g(c, t):
        def yes(c):
            log({"a": c})
            return jnp.sin(c)

        return lax.cond(t > 0, yes, lambda c: c * 2, c + t)

    return lambda x: lax.scan(lambda c, t: (g(c, t), None), 0.0, x)[0]


@program()
def cond_in_vmap(log):
    def g(t):
        def yes(t):
            log({"a": t})
            return jnp.sin(t)

        return lax.cond(t > 0, yes, lambda t: t, t)

    return lambda x: jax.vmap(g)(x)


@program()
def different_keys_in_vmap_in_scan(log):
    def g(t):
        def yes(t):
            log({"a": t})
            return jnp.sin(t)

        def no(t):
            log({"b": t, "one": 1.0})
            return t * 2

        return lax.cond(t > 0, yes, no, t)

    return lambda x: lax.scan(lambda c, _: (jax.vmap(g)(c) - 0.3, None), x, None, length=3)[0]


@program()
def cond_of_jit_of_cond(log):
    @jax.jit
    def g(x):
        def yes(x):
            log({"a": x})
            return x * 2

        return lax.cond(x > 0, yes, lambda x: x, x)

    return lambda x: lax.cond(x[0] > 0, lambda x: g(x[1]), lambda x: g(x[2]), x)


# --- while loops ---------------------------------------------------------------------------------


@program(**WHILE)
def in_while(log):
    def f(x):
        def body(c):
            log({"a": c}, step=c)
            return c + 1.0

        return lax.while_loop(lambda c: c < 3 + x[0], body, 0.0)

    return f


@program(**WHILE)
def dynamic_fori(log):
    def f(x):
        n = (jnp.abs(x[0]) * 10).astype(jnp.int32) % 5

        def body(i, c):
            log({"a": c}, step=i)
            return c + x[1] * i

        return lax.fori_loop(0, n, body, 0.0)

    return f


@program(**WHILE)
def while_condition_logs(log):
    def f(x):
        def cond(c):
            log({"cond": c})
            return c < 2 + x[0]

        def body(c):
            log({"body": c * 2})
            return c + 1.0

        return lax.while_loop(cond, body, 0.0)

    return f


@program(**WHILE)
def while_in_scan(log):
    def f(x):
        def step(c, t):
            def body(d):
                log({"a": d + t})
                return d + 1.0

            return lax.while_loop(lambda d: d < t * 2, body, 0.0), c

        return lax.scan(step, 0.0, x)

    return f


@program(**WHILE)
def scan_in_while(log):
    def f(x):
        def body(c):
            def step(d, t):
                log({"a": d}, step=t)
                return d + jnp.abs(t), None

            return lax.scan(step, c + 0.5, x[:2])[0]

        return lax.while_loop(lambda c: c < 4.0, body, 0.0)

    return f


@program(**WHILE)
def while_in_while(log):
    def f(x):
        def outer(c):
            def inner(d):
                log({"inner": d})
                return d + 1.0

            d = lax.while_loop(lambda d: d < c + x[0], inner, 0.0)
            log({"outer": d})
            return c + 1.0

        return lax.while_loop(lambda c: c < 3, outer, 0.0)

    return f


@program(**WHILE)
def cond_in_while(log):
    def f(x):
        def body(c):
            def yes(c):
                log({"a": c})
                return c + 1.0

            return lax.cond(jnp.sin(c * 3) > 0, yes, lambda c: c + 0.5, c)

        return lax.while_loop(lambda c: c < 3 + x[0], body, 0.0)

    return f


@program(**WHILE)
def while_in_cond(log):
    def f(x):
        def body(c):
            log({"a": c})
            return c + 1.0

        def yes(x):
            return lax.while_loop(lambda c: c < 3, body, x[1])

        return lax.cond(x[0] > 0, yes, lambda x: x[0], x)

    return f


@program(**WHILE)
def while_in_vmap(log):
    def g(t):
        def body(c):
            log({"a": c + t}, step=c)
            return c + 1.0

        return lax.while_loop(lambda c: c < 2 * t, body, 0.0)

    return lambda x: jax.vmap(g)(x)


@program(**WHILE)
def condition_logs_in_vmap(log):
    def g(t):
        def cond(c):
            log({"cond": c})
            return c < 2 * t

        return lax.while_loop(cond, lambda c: c + 1.0, 0.0)

    return lambda x: jax.vmap(g)(x)


@program(**WHILE)
def scan_in_while_in_cond_in_vmap(log):
    def g(t):
        def body(c):
            def step(d, u):
                log({"a": d * u}, step=u)
                return d + 0.4, None

            return lax.scan(step, c, jnp.arange(2.0))[0]

        def yes(t):
            return lax.while_loop(lambda c: c < 2 * t, body, 0.0)

        return lax.cond(t > 0, yes, lambda t: t, t)

    return lambda x: jax.vmap(g)(x)


@program(**WHILE)
def jit_in_while(log):
    @jax.jit
    def g(c):
        log({"a": c})
        return c + 1.0

    return lambda x: lax.while_loop(lambda c: c < 3 + x[0], g, 0.0)


@program(**WHILE)
def remat_in_while(log):
    @jax.checkpoint
    def g(c):
        log({"a": c})
        return c + 1.0

    return lambda x: lax.while_loop(lambda c: c < 3 + x[0], g, 0.0)


@program(**WHILE)
def custom_vjp_in_while(log):
    @jax.custom_vjp
    def g(c):
        log({"a": c})
        return c + 1.0

    g.defvjp(lambda c: (g(c), None), lambda _, ct: (ct,))
    return lambda x: lax.while_loop(lambda c: c < 3 + x[0], g, 0.0)


@program(**WHILE)
def while_next_to_scan(log):
    def f(x):
        def step(c, t):
            log({"a": c, "only_scan": t})
            return c + t, None

        y, _ = lax.scan(step, 0.0, x)

        def body(c):
            log({"a": c})
            return c + 1.0

        return lax.while_loop(lambda c: c < y + 2, body, y)

    return f


# --- derivatives inside the program --------------------------------------------------------------


@program(oracle=False)
def grad_inside_scan(log):
    def loss(w, t):
        h = jnp.tanh(w * t)
        log({"h": h})
        return (h - 1.0) ** 2

    def f(x):
        def step(w, t):
            value, grad = jax.value_and_grad(loss)(w, t)
            log({"loss": value, "grad": grad}, step=t)
            return w - 0.1 * grad, None

        return lax.scan(step, 0.5, x)[0]

    return f


@program(oracle=False)
def grad_of_scan_inside(log):
    def loss(w, x):
        def step(c, t):
            c = jnp.tanh(c * w + t)
            log({"c": c, "w": w})
            return c, None

        return lax.scan(step, 0.0, x)[0]

    return lambda x: jax.grad(loss)(0.7, x) * x


@program(oracle=False)
def grad_of_remat_scan_inside(log):
    def loss(w, x):
        @jax.checkpoint
        def step(c, t):
            c = jnp.tanh(c * w + t)
            log({"c": c, "w": w})
            return c, None

        return lax.scan(step, 0.0, x)[0]

    return lambda x: jax.grad(loss)(0.7, x) * x


@program(oracle=False)
def jvp_inside(log):
    def g(w):
        log({"w": w})
        return jnp.sin(w)

    return lambda x: jax.jvp(g, (x,), (x * 2,))[1]


@program(oracle=False)
def vmap_of_grad_inside(log):
    def g(w):
        def step(c, _):
            log({"c": c * w})
            return jnp.sin(c * w), None

        return lax.scan(step, 1.0, None, length=3)[0]

    return lambda x: jax.vmap(jax.grad(g))(x)
