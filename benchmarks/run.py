"""What logging costs, as ratios to doing the same by hand, measured side by side.

python benchmarks/run.py            all rows
python benchmarks/run.py spool tap  the rows whose name contains one of these words
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import loggers_ppo
import loggers_store
from _measure import compiled_bytes, once, optimised_hlo, race
from jax import lax

import lox

Row = tuple[str, str, str, bool | None]  # what, measured, target, met
ROWS: list[Callable[[], Iterator[Row]]] = []


def row(fun: Callable[[], Iterator[Row]]) -> Callable[[], Iterator[Row]]:
    ROWS.append(fun)
    return fun


def ratio(what: str, value: float, target: float, detail: str = "") -> Row:
    return what, f"{value:.3f}{detail}", f"≤ {target}", value <= target


W = jnp.eye(256) * 0.5
C = jnp.ones((64, 256))


def silent(*_: object, **__: object) -> None:
    pass


# --- a log that nobody asked for -----------------------------------------------------------------


@row
def untransformed() -> Iterator[Row]:
    def program(log):
        def f(x):
            for i in range(10):
                x = jnp.sin(x) + 0.1
                log({"x": x}, step=i)
            return x

        return jax.jit(f)

    logged, bare = program(lox.log), program(silent)
    x = jnp.ones(16)
    same = optimised_hlo(logged, x) == optimised_hlo(bare, x)
    yield "untransformed: optimised HLO", "identical" if same else "differs", "identical", same
    a, b = race(lambda: logged(x), lambda: bare(x), rounds=41, calls=2000)
    yield ratio("untransformed: dispatch time", a / b, 1.05, f" ({a * 1e6:.1f} µs)")


# --- spool ---------------------------------------------------------------------------------------


def training(log, hand: bool):
    """A loop with a matrix product per step. It logs a scalar and a row of 16."""

    def f(c, steps):
        def step(c, i):
            c = jnp.tanh(c @ W) + 1e-3 * i
            loss, row = c.mean(), c[0, :16]
            log({"loss": loss, "row": row}, step=i)
            return c, (loss, row, i, i) if hand else None

        return lax.scan(step, c, steps)

    return f


def small(log, hand: bool):
    """A loop whose body is little more than its logging."""

    def f(c, steps):
        def step(c, i):
            c = c * 0.999 + 0.1
            log({"loss": c}, step=i)
            return c, (c, i) if hand else None

        return lax.scan(step, c, steps)

    return f


@row
def spool_against_hand() -> Iterator[Row]:
    for n in (1_000, 10_000, 100_000):
        yield from _spool_case("64×256 by 256×256 a step", training, C, n)
    for n in (1_000, 10_000, 100_000):
        yield from _spool_case("scalar body", small, jnp.float32(1.0), n)


def _spool_case(label: str, program: Callable, c: jax.Array, n: int) -> Iterator[Row]:
    steps = jnp.arange(n, dtype=jnp.int32)
    spooled = jax.jit(lox.spool(program(lox.log, False)))
    by_hand = jax.jit(program(silent, True))
    calls = max(1, 20_000 // n) if program is small else 1
    rounds = 15 if n <= 10_000 else 5
    a, b = race(lambda: spooled(c, steps), lambda: by_hand(c, steps), rounds=rounds, calls=calls)
    what = f"spool / by hand, {n} steps, {label}"
    same = optimised_hlo(spooled, c, steps) == optimised_hlo(by_hand, c, steps)
    yield f"{what}: optimised HLO", "identical" if same else "differs", "", None
    yield ratio(f"{what}: run", a / b, 1.03, f" ({a * 1e3:.2f} ms)")
    mem = compiled_bytes(spooled, c, steps) / compiled_bytes(by_hand, c, steps)
    yield ratio(f"{what}: bytes", mem, 1.02)


@row
def reduce_memory() -> Iterator[Row]:
    fold = lambda n: compiled_bytes(lambda c: _fold_loop(c, n), jnp.float32(1.0))
    sizes = [fold(1_000), fold(1_000_000)]
    same = sizes[0] == sizes[1]
    yield (
        "reduce: bytes at 10⁶ steps / at 10³",
        f"{sizes[1] / sizes[0]:.3f} ({sizes[1]} B)",
        "1",
        same,
    )


def _fold_loop(c, n):
    def f(c):
        def step(c, _):
            c = c * 0.999 + 0.1
            lox.log({"loss": c})
            return c, None

        return lax.scan(step, c, None, length=n)[0]

    return lox.spool(f, reduce="mean")(c)


@row
def eager_second_call() -> Iterator[Row]:
    def f(x):
        def step(c, i):
            lox.log({"c": c}, step=i)
            return c + x, None

        return lax.scan(step, 0.0, jnp.arange(10))[0]

    @jax.jit
    def by_hand(x):
        return lax.scan(lambda c, i: (c + x, (c, i)), 0.0, jnp.arange(10))

    x = jnp.float32(2.0)
    a, b = race(lambda: lox.spool(f)(x), lambda: by_hand(x), rounds=41, calls=200)
    more = (a - b) * 1e6
    yield "eager spool, second call, µs more than by hand", f"{more:.1f}", "≤ 60", more <= 60


@row
def tracing() -> Iterator[Row]:
    def build(log, hand: bool):
        def f(x):
            kept = []
            for i in range(20):
                for _ in range(5):
                    x = jnp.sin(x) * 0.9
                log({f"x{i}": x}, step=i)
                kept.append((x, i))
            return (x, kept) if hand else x

        return f

    x = jnp.ones(8)
    trace_spool = lambda: jax.jit(lox.spool(build(lox.log, False))).lower(x)
    trace_hand = lambda: jax.jit(build(silent, True)).lower(x)
    trace_spool(), trace_hand()
    a, b = once(trace_spool, trace_hand, rounds=21)
    yield ratio(
        "spool / by hand, tracing + lowering, 200 equations, 20 logs",
        a / b,
        1.5,
        f" ({a * 1e3:.1f} ms)",
    )


# --- tap -----------------------------------------------------------------------------------------


def tapped_loop(log, n: int):
    def f(x):
        def step(c, i):
            c = jnp.sin(c) + 0.1
            log({"c": c}, step=i)
            return c, None

        return lax.scan(step, x, jnp.arange(n))[0]

    return f


def by_debug_callback(data, step):
    jax.debug.callback(silent, data["c"], step)


@row
def tap_one_lane() -> Iterator[Row]:
    x = jnp.float32(0.3)
    ours = jax.jit(lox.tap(tapped_loop(lox.log, 500), silent))
    theirs = jax.jit(tapped_loop(by_debug_callback, 500))
    a, b = race(lambda: ours(x), lambda: theirs(x), rounds=15)
    yield ratio(
        "tap / jax.debug.callback, one lane", a / b, 1.1, f" ({a / 500 * 1e6:.0f} µs an event)"
    )


@row
def tap_many_lanes() -> Iterator[Row]:
    xs = jnp.linspace(0.0, 1.0, 256)
    build_ours = lambda: jax.jit(jax.vmap(lox.tap(tapped_loop(lox.log, 20), silent)))
    build_theirs = lambda: jax.jit(jax.vmap(tapped_loop(by_debug_callback, 20)))
    build_bare = lambda: jax.jit(jax.vmap(tapped_loop(silent, 20)))
    compile_it = lambda build: lambda: build().lower(xs).compile()
    compile_ours, compile_theirs, compile_bare = once(
        *map(compile_it, (build_ours, build_theirs, build_bare)), rounds=3
    )
    ours, theirs = build_ours(), build_theirs()
    a, b = race(lambda: ours(xs), lambda: theirs(xs), rounds=5)
    yield (
        "tap, 256 lanes: times faster to run than jax.debug.callback",
        f"{b / a:.0f}",
        "≥ 50",
        b / a >= 50,
    )
    faster = compile_theirs / compile_ours
    detail = f" ({compile_ours * 1e3:.0f} ms; without any logging {compile_bare * 1e3:.0f} ms)"
    yield (
        "tap, 256 lanes: times faster to compile",
        f"{faster:.1f}{detail}",
        "≥ 10",
        faster >= 10,
    )


@row
def tap_in_windows() -> Iterator[Row]:
    def loop(log):
        def f(c):
            def step(c, i):
                c = jnp.tanh(c @ W)
                log({"mean": c.mean()}, step=i)
                return c, None

            return lax.scan(step, c, jnp.arange(2000))[0]

        return f

    tapped, bare = jax.jit(lox.tap(loop(lox.log), silent, every=100)), jax.jit(loop(silent))
    a, b = race(lambda: tapped(C), lambda: bare(C), rounds=15)
    yield ratio("tap(every=100) / no logging", a / b, 1.15, f" ({b / 2000 * 1e6:.0f} µs a step)")


def main() -> None:
    words = sys.argv[1:]
    device = jax.devices()[0]
    versions = f"Python {platform.python_version()}, JAX {jax.__version__}"
    print(f"{device.platform} ({device.device_kind}), {versions}\n", flush=True)
    print("| what | measured | target | |\n| --- | --- | --- | --- |", flush=True)
    for rows in [*ROWS, *loggers_store.ROWS, *loggers_ppo.ROWS]:
        if words and not any(w in rows.__name__ for w in words):
            continue
        for what, measured, target, met in rows():
            mark = {True: "yes", False: "NO", None: ""}[met]
            print(f"| {what} | {measured} | {target} | {mark} |", flush=True)


if __name__ == "__main__":
    main()
