"""The transformations as calls: caching, selection, static arguments, callbacks, log_grad."""

from __future__ import annotations

import functools
import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import logify
import lox

XS = jnp.arange(6.0)

pytestmark = pytest.mark.usefixtures("all_passes")


def loop(xs):
    def step(c, x):
        lox.log({"c": c + x}, step=x)
        return c + x, None

    return lax.scan(step, 0.0, xs)[0]


# --- tracing and caching -------------------------------------------------------------------------


def counted(fun):
    """`fun`, and a list that grows each time Python runs it."""
    runs = []

    def counting(*args):
        runs.append(1)
        return fun(*args)

    return counting, runs


@pytest.mark.parametrize(
    "call",
    [
        lambda f, x: lox.spool(f)(x),
        lambda f, x: lox.spool(f, reduce={"c": "mean"}, argnames=["c"])(x),
        lambda f, x: lox.tap(f, lambda logs: None)(x),
        lambda f, x: lox.tap(f, lambda logs: None, every=2)(x),
    ],
    ids=["spool", "spool-options", "tap", "tap-every"],
)
def test_an_eager_call_traces_once_per_function_and_shape(call):
    f, runs = counted(loop)
    for _ in range(3):
        call(f, XS)
    assert len(runs) == 1
    call(f, XS[:3])
    assert len(runs) == 2


def test_an_inner_jit_is_traced_once_with_and_once_without_logs():
    g, runs = counted(loop)
    f = jax.jit(g)
    f(XS), lox.spool(f)(XS), f(XS), lox.spool(f)(XS), lox.spool(f, reduce="sum")(XS)
    assert len(runs) == 2
    assert f._cache_size() == 1


def test_the_users_function_stays_as_it_was():
    f = jax.jit(loop)
    before = f.lower(XS).as_text()
    lox.spool(f)(XS)
    lox.tap(f, lambda logs: None)(XS)
    assert f.lower(XS).as_text() == before
    assert f(XS) == 15.0


def test_caches_let_go_of_a_dropped_function():
    big = jnp.ones(1000)

    def f(x):
        lox.log({"x": x + big.sum()})
        return x

    def callback(logs):
        pass

    refs = [weakref.ref(f), weakref.ref(callback)]
    lox.spool(f)(1.0)
    lox.tap(f, callback)(1.0)
    jax.jit(lox.tap(f, callback))(1.0)
    lox.flush()
    del f, callback
    gc.collect()
    jax.clear_caches()  # of the user's own jit above
    gc.collect()
    assert [r() for r in refs] == [None, None]


def test_an_eager_tap_keeps_no_callback_alive():
    class Callback:
        def __call__(self, logs):
            pass

    callback = Callback()
    ref = weakref.ref(callback)
    lox.tap(loop, callback)(XS)
    del callback
    gc.collect()
    assert ref() is None


def test_methods_are_cached_by_their_object():
    class Model:
        def __init__(self, scale):
            self.scale, self.runs = scale, 0

        def step(self, x):
            self.runs += 1
            lox.log({"x": x * self.scale})
            return x

    a, b = Model(2.0), Model(3.0)
    for _ in range(2):
        assert lox.spool(a.step)(1.0)[1]["x"] == 2.0
        assert lox.spool(b.step)(1.0)[1]["x"] == 3.0
    assert (a.runs, b.runs) == (1, 1)


def test_a_function_that_closes_over_traced_values_is_traced_anew():
    class Model:
        def step(self, x):
            lox.log({"x": x * self.w})
            return x

    model = Model()

    def outer(w, x):
        model.w = w
        return lox.spool(model.step)(x)[1]["x"]

    assert jax.jit(outer)(2.0, 3.0) == 6.0
    assert jax.grad(outer)(2.0, 3.0) == 3.0
    np.testing.assert_array_equal(jax.vmap(outer)(jnp.arange(3.0), jnp.ones(3)), [0, 1, 2])


def test_spooled_programs_have_no_callbacks_and_can_be_exported():
    exported = jax.export.export(jax.jit(lambda x: dict(lox.spool(loop)(x)[1])))(XS)
    assert "custom_call" not in exported.mlir_module()
    np.testing.assert_array_equal(exported.call(XS)["c"], [0, 1, 3, 6, 10, 15])


def test_name_scopes_and_lines_survive():
    def f(x):
        with jax.named_scope("my_scope"):
            y = jnp.sin(x)
            lox.log({"y": y})
        return y

    text = jax.jit(lox.spool(f)).lower(1.0).as_text(debug_info=True)
    assert "my_scope" in text
    assert "test_transform.py" in text


# --- arguments -----------------------------------------------------------------------------------


def test_python_scalars_are_traced_as_by_jit():
    def f(x):
        lox.log({"x": x})
        return x

    out, logs = lox.spool(f)(2)
    assert out.dtype == jax.jit(f)(2).dtype
    assert out.weak_type
    assert logs["x"] == 2


def test_static_arguments():
    def f(x, n, mode="a"):
        for i in range(n):
            lox.log({"x": x}, step=i)
        return x if mode == "a" else -x

    assert lox.spool(f, static_argnums=1)(1.0, 3)[1]["x"].shape == (3,)
    assert lox.spool(f, static_argnames="n")(1.0, n=2)[1]["x"].shape == (2,)
    assert lox.spool(f, static_argnames=("n", "mode"))(1.0, 2, mode="b")[0] == -1.0
    seen = []
    assert lox.tap(f, seen.append, static_argnums=(1,), static_argnames=["mode"])(1.0, 2) == 1.0
    assert len(seen) == 2


def test_arguments_that_jax_cannot_trace_are_static():
    def f(model, x):
        lox.log({"y": model["act"](x)})
        return model["w"] * x

    model = {"act": jnp.sin, "w": 2.0, "name": "mlp"}
    out, logs = lox.spool(f)(model, jnp.float32(1.0))
    assert out == 2.0
    np.testing.assert_allclose(logs["y"], np.sin(1.0), rtol=1e-6)
    seen = []
    assert lox.tap(f, seen.append)(model, 1.0) == 2.0
    assert len(seen) == 1


def test_inner_jits_keep_donation_and_names():
    @functools.partial(jax.jit, donate_argnums=0)
    def inner(x):
        lox.log({"x": x})
        return x + 1

    jit_eqn = lambda f: next(e for e in jax.make_jaxpr(f)(XS).eqns if e.primitive.name == "jit")
    ours, jaxs = jit_eqn(lox.spool(inner)), jit_eqn(jax.jit(inner, inline=True))
    for name in ("donated_invars", "in_shardings", "name", "keep_unused"):
        assert ours.params[name] == jaxs.params[name]


# --- selection -----------------------------------------------------------------------------------


def tagged(x):
    lox.log({"loss": x, "acc": x * 2}, tags=["metric"])
    lox.log({"norm": x * 3}, tags=["debug", "slow"])
    lox.log({"plain": x})
    lox.log({"hidden": x}, explicit=True, tags="metric")
    return x


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({}, {"loss", "acc", "norm", "plain"}),
        ({"argnames": ["loss", "plain"]}, {"loss", "plain"}),
        ({"argnames": "hidden"}, {"hidden"}),
        ({"tags": ["metric", "slow"]}, {"loss", "acc", "norm"}),
        ({"tags": "metric"}, {"loss", "acc"}),
        ({"tags": ["metric"], "argnames": ["loss", "hidden", "norm"]}, {"loss", "hidden"}),
        ({"tags": []}, set()),
        ({"prefix": "t/", "argnames": ["loss"]}, {"t/loss"}),
    ],
)
def test_selection(options, keys):
    assert set(lox.spool(tagged, **options)(1.0)[1]) == keys
    seen = []
    lox.tap(tagged, seen.append, **options)(1.0)
    assert {k for logs in seen for k in logs} == keys


def test_what_is_not_selected_goes_further_out():
    inner = lambda x: lox.spool(tagged, argnames=["loss"])(x)[0]
    assert set(lox.spool(inner)(1.0)[1]) == {"acc", "norm", "plain"}
    inner = lambda x: lox.tap(tagged, lambda logs: None, tags=["debug"])(x)
    assert set(lox.spool(inner)(1.0)[1]) == {"loss", "acc", "plain"}


def test_log_returns_its_event():
    logs = lox.log({"a": 1.0, "b": jnp.ones(3)}, prefix="p/", step=4)
    assert set(logs) == {"p/a", "p/b"}
    assert logs.step == {"p/a": 4, "p/b": 4}


def test_reduce_of_the_log_call_wins():
    def f(xs):
        def step(c, x):
            lox.log({"a": x}, reduce="max")
            lox.log({"b": x})
            lox.log({"c": x})
            return c, None

        return lax.scan(step, 0.0, xs)[0]

    _, logs = lox.spool(f, reduce={"b": "sum", "a": "min"})(XS)
    assert (logs["a"], logs["b"], logs["c"].shape) == (5.0, 15.0, (6,))


def test_interval_holds_no_more_rows_than_it_returns():
    long = jnp.arange(10_000.0)
    memory = lambda f: jax.jit(f).lower(long).compile().memory_analysis()
    thin = memory(lox.spool(loop, interval=100))
    assert thin.output_size_in_bytes < 100 * 4 * 3
    assert thin.temp_size_in_bytes < 10_000


def test_capacity_keeps_the_latest_events_in_order():
    def f(n):
        def body(i, c):
            lox.log({"i": i}, step=10 * i)
            return c + i

        return lax.fori_loop(0, n, body, 0)

    spool = lox.spool(f, capacity=4)
    _, logs = spool(jnp.int32(7))
    np.testing.assert_array_equal(logs["i"], [3, 4, 5, 6])
    np.testing.assert_array_equal(logs.step["i"], [30, 40, 50, 60])
    assert logs.mask["i"].all()
    assert logs.count["i"] == 7
    _, logs = spool(jnp.int32(2))
    np.testing.assert_array_equal(logs["i"], [0, 1, 0, 0])
    np.testing.assert_array_equal(logs.mask["i"], [True, True, False, False])
    assert logs.count["i"] == 2
    np.testing.assert_array_equal(logs.compact()["i"], [0, 1])


# --- tap -----------------------------------------------------------------------------------------


def test_the_default_callback_prints(capsys):
    lox.tap(tagged, argnames=["loss"])(1.0)
    assert capsys.readouterr().out == "{'loss': 1.0}\n"


def test_a_callback_gets_numpy():
    seen = []
    lox.tap(lambda x: lox.log({"a": {"b": x}}, step=x), seen.append)(1.0)
    assert type(seen[0]["a"]["b"]) is np.ndarray
    assert type(seen[0].step["a"]) is np.ndarray


def test_one_host_call_for_all_lanes():
    seen = []
    jax.jit(jax.vmap(lox.tap(loop, seen.append)))(jnp.ones((256, 3)))
    lox.flush()
    assert [s["c"].shape for s in seen] == [(256,)] * 3


@pytest.mark.parametrize("every", [1, 2, 4, 6, 7])
def test_windows_come_in_order_with_their_remainder(every):
    seen = []
    lox.tap(loop, seen.append, every=every)(XS)
    sizes = [len(s["c"]) for s in seen]
    assert sizes == [every] * (6 // every) + ([6 % every] if 6 % every else [])
    np.testing.assert_array_equal(np.concatenate([s.step["c"] for s in seen]), XS)


def test_windows_are_reduced():
    seen = []
    lox.tap(loop, seen.append, every=4, reduce="max")(XS)
    assert [float(s["c"]) for s in seen] == [6.0, 15.0]
    assert [float(s.step["c"]) for s in seen] == [3.0, 5.0]


def test_windows_keep_the_beat_of_interval():
    seen = []
    lox.tap(loop, seen.append, every=4, interval=3)(XS)
    assert [list(s.step["c"]) for s in seen] == [[0.0, 3.0]]


def test_reduced_windows_hold_while_loops():
    def f(n):
        def step(c, _):
            return lax.while_loop(lambda k: k < n, lambda k: (lox.log({"k": k}), k + 1)[1], 0), None

        return lax.scan(step, 0, None, length=6)[0]

    seen = []
    lox.tap(f, seen.append, every=3, reduce="sum")(4)
    assert [int(s["k"]) for s in seen] == [18, 18]


def test_a_loop_that_does_not_run_makes_no_call():
    seen = []
    lox.tap(loop, seen.append, every=3)(XS[:0])
    assert seen == []


def test_a_callback_need_not_be_hashable():
    class Callback(list):
        __call__ = list.append

    seen = Callback()
    jax.jit(lox.tap(loop, seen))(XS)
    lox.flush()
    assert len(seen) == 6


def test_what_is_selected_changes_no_shape():
    def loss(w, x):
        lox.log({"w": w * 2})
        lox.log({"x": x})
        return w * x

    f = jax.vmap(jax.grad(loss), in_axes=(None, 0))
    assert lox.spool(f)(2.0, XS)[1]["w"].shape == (6,)
    assert lox.spool(f, argnames=["w"])(2.0, XS)[1]["w"].shape == (6,)


def test_the_cache_of_a_function_is_bounded():
    def f(x, name):
        lox.log({name: x})
        return x

    for i in range(100):
        assert list(lox.spool(f)(1.0, str(i))[1]) == [str(i)]
    from lox import _cache

    assert len(_cache._of(f)) <= _cache.LIMIT


def test_objects_without_weak_references_are_cached():
    class Model:
        __slots__ = ("runs",)

        def __call__(self, x):
            self.runs += 1
            lox.log({"x": x})
            return x

    model = Model()
    model.runs = 0
    for _ in range(3):
        lox.spool(model)(1.0)
    assert model.runs == 1


def test_a_whole_call_is_reduced_and_sent_once():
    seen = []
    lox.tap(loop, seen.append, reduce="mean")(XS)
    assert len(seen) == 1
    np.testing.assert_allclose(seen[0]["c"], 35 / 6, rtol=1e-6)


def test_an_exception_reaches_the_user_of_an_eager_call():
    class Full(Exception):
        pass

    seen = []

    def callback(logs):
        seen.append(logs)
        raise Full("disk")

    with pytest.raises(Full, match="disk") as caught:
        lox.tap(loop, callback)(XS)
    assert len(seen) == 6, "the program goes on"
    assert caught.traceback[-1].name == "callback"
    assert any("5 more" in note for note in caught.value.__notes__)
    lox.flush()


def test_an_exception_under_jit_is_raised_by_flush():
    def callback(logs):
        raise KeyError("k")

    jax.jit(lox.tap(loop, callback))(XS)
    with pytest.raises(KeyError):
        lox.flush()
    lox.flush()


def test_threads_have_their_own_callbacks():
    results = {}

    def work(name):
        seen = []
        for _ in range(5):
            lox.tap(loop, seen.append)(XS + name)
        results[name] = seen

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for name, seen in results.items():
        steps = [float(s.step["c"]) for s in seen]
        assert steps == [x + name for x in range(6)] * 5


# --- log_grad and backward rules -----------------------------------------------------------------


def test_log_grad_logs_the_cotangent():
    def loss(w):
        h = lox.log_grad(jnp.sin(w), "dh", step=3)
        lox.log({"h": h})
        return (h**2).sum()

    w = jnp.array([0.3, 0.7])
    grad, logs = lox.spool(jax.grad(loss))(w)
    np.testing.assert_allclose(grad, 2 * np.sin(w) * np.cos(w), rtol=1e-6)
    np.testing.assert_allclose(logs["dh"], 2 * np.sin(w), rtol=1e-6)
    assert logs.step["dh"] == 3
    assert list(lox.spool(loss)(w)[1]) == ["h"], "no backward pass, no event"


def test_log_grad_costs_nothing_by_itself():
    f, bare = (lambda x: lox.log_grad(x, "d") * 2), (lambda x: x * 2)
    assert str(jax.make_jaxpr(jax.grad(f))(1.0)) == str(jax.make_jaxpr(jax.grad(bare))(1.0))


def chain(ws, probe):
    def step(c, w):
        c = probe(jnp.tanh(c * w), w)
        return c, None

    return lax.scan(step, 1.0, ws)[0]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, jax.jit], ids=["", "remat", "jit"])
def test_log_grad_through_scan_remat_and_vmap(wrap):
    ws = jnp.array([0.5, 1.5, -0.7])
    # The cotangent of c_i is the gradient with respect to something added to it.
    shifted = lambda d: chain_shifted(ws, d)
    want = jax.grad(shifted)(jnp.zeros(3))
    f = wrap(lambda ws: chain(ws, lambda c, w: lox.log_grad(c, "dc", step=w)))
    _, logs = lox.spool(jax.grad(f))(ws)
    np.testing.assert_allclose(logs["dc"], want[::-1], rtol=1e-5)
    np.testing.assert_allclose(logs.step["dc"], ws[::-1])
    _, lanes = lox.spool(jax.vmap(jax.grad(f)))(jnp.stack([ws, ws]))
    np.testing.assert_allclose(lanes["dc"], np.stack([want[::-1]] * 2), rtol=1e-5)


def chain_shifted(ws, d):
    step = lambda c, x: (jnp.tanh(c * x[0]) + x[1], None)
    return lax.scan(step, 1.0, (ws, d))[0]


def test_log_grad_of_shared_weights_is_logged_by_lane():
    xs = jnp.arange(1.0, 4.0)
    loss = lambda w: jax.vmap(lambda x: lox.log_grad(w, "dw") * x)(xs).sum()
    grad, logs = lox.spool(jax.grad(loss))(2.0)
    assert grad == 6.0
    np.testing.assert_array_equal(logs["dw"], xs)


def test_logs_of_a_custom_backward_rule():
    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    def fwd(x):
        lox.log({"fwd": x})
        return jnp.sin(x), x

    def bwd(x, ct):
        lox.log({"bwd": ct})
        return (ct * jnp.cos(x),)

    f.defvjp(fwd, bwd)

    def g(x):
        return lax.scan(lambda c, _: (f(c) * 2, None), x, None, length=3)[0]

    for h in (g, jax.checkpoint(g), jax.jit(g)):
        _, logs = lox.spool(jax.grad(h))(0.5)
        assert logs["fwd"].shape == (3,)
        np.testing.assert_allclose(logs["bwd"][0], 2.0)
        assert logs["bwd"].shape == (3,)
    _, logs = lox.spool(jax.vmap(jax.grad(g)))(XS)
    assert logs["bwd"].shape == (6, 3)


# --- numbers -------------------------------------------------------------------------------------


def test_a_float32_mean_over_a_million_events_is_right():
    rng = np.random.default_rng(0)
    xs = (rng.random(1_000_000) * 1e3 + 1e4).astype(np.float32)

    def f(xs):
        def step(c, x):
            lox.log({"x": x})
            return c, None

        return lax.scan(step, 0.0, xs)[0]

    wide = xs.astype(np.float64)
    want = {"mean": wide.mean(), "sum": wide.sum(), "var": wide.var(), "std": wide.std()}
    for name, value in want.items():
        got = lox.spool(f, reduce=name)(xs)[1]["x"]
        np.testing.assert_allclose(float(got), value, rtol=1e-5)


def test_reductions_go_over_events_only():
    def f(xs):
        def step(c, x):
            lox.log({"v": jnp.stack([x, -x])})
            return c, None

        return lax.scan(step, 0.0, xs)[0]

    _, logs = lox.spool(f, reduce="mean")(XS)
    np.testing.assert_allclose(logs["v"], [2.5, -2.5])


def test_a_users_reduction_may_return_a_pytree():
    extent = lox.Reduction(
        init=lambda x: (jnp.full_like(x, jnp.inf), jnp.full_like(x, -jnp.inf)),
        update=lambda s, x: (jnp.minimum(s[0], x), jnp.maximum(s[1], x)),
        merge=lambda a, b: (jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1])),
        finish=lambda s: {"low": s[0], "high": s[1]},
    )
    inside = lox.spool(loop, reduce=extent)(XS)[1]["c"]
    outside = lox.spool(loop)(XS)[1].reduce(extent)["c"]
    assert inside == outside == {"low": 0.0, "high": 15.0}


def test_half_precision_is_averaged_in_float32():
    def f():
        def step(c, _):
            lox.log({"x": jnp.bfloat16(1.01)})
            return c, None

        return lax.scan(step, 0.0, None, length=1000)[0]

    _, logs = lox.spool(f, reduce="sum")()
    assert logs["x"].dtype == jnp.float32
    np.testing.assert_allclose(logs["x"], 1000 * float(jnp.bfloat16(1.01)), rtol=1e-6)


# --- logify --------------------------------------------------------------------------------------


def test_logify_commutes_with_jit_vmap_and_grad():
    def f(x):
        logify.log("x", x, "mean")
        logify.log("x", x * 3, "mean")
        logify.log("x", x, "sum")
        return x**2

    _, logs = jax.vmap(logify.logify(f))(XS)
    np.testing.assert_allclose(logs.asdict()["x"]["mean"], 2 * XS)
    _, logs = logify.logify(jax.vmap(jax.jit(f)))(XS)
    np.testing.assert_allclose(logs.asdict()["x"]["mean"], 2 * XS)
    np.testing.assert_allclose(logs.asdict()["x"]["sum"], XS)
    grad, logs = logify.logify(jax.grad(f))(2.0)
    assert grad == 4.0
    assert logs.asdict()["x"]["mean"] == 4.0
    grad, logs = jax.grad(logify.logify(f), has_aux=True)(2.0)
    assert grad == 4.0


def test_logify_and_lox_do_not_mix():
    def f(x):
        logify.log("a", x)
        lox.log({"b": x})
        return x

    assert set(logify.logify(f)(1.0)[1].asdict()) == {"a"}
    assert set(lox.spool(logify.logify(f))(1.0)[1]) == {"b"}


# --- settings of JAX -----------------------------------------------------------------------------


def test_with_jit_disabled():
    seen = []
    with jax.disable_jit():
        _, logs = lox.spool(loop)(XS)
        assert lox.spool(loop, reduce="mean")(XS)[1]["c"] == logs["c"].mean()
        lox.tap(loop, seen.append)(XS)
    np.testing.assert_array_equal(logs["c"], np.cumsum(XS))
    assert [s["c"].shape for s in seen] == [()] * 6


def test_with_64_bits():
    with jax.enable_x64(True):
        _, logs = lox.spool(loop, reduce="mean")(jnp.arange(4.0))
        assert logs["c"].dtype == np.float64
        assert lox.spool(loop)(jnp.arange(4.0))[1]["c"].dtype == np.float64


def test_with_checks_for_nans_and_leaks():
    def f(x):
        lax.cond(x > 0, lambda: (lox.log({"a": x}), 0)[1], lambda: 0)
        return x

    with jax.debug_nans(True):
        assert not lox.spool(f, reduce="mean")(-1.0)[1].mask["a"]
    with jax.checking_leaks():  # (of a differentiated loop with any effect, JAX reports its own)
        assert lox.spool(jax.vmap(loop))(jnp.ones((2, 3)))[1]["c"].shape == (2, 3)
