"""Training loops and solvers as people write them: their logs come out exact."""

from __future__ import annotations

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimistix as optx
import pytest
from flax import nnx
from jax import lax

import lox
from oracle import assert_same

STEPS = 6
X = jax.random.normal(jax.random.key(1), (16, 3))
Y = jnp.sin(X).sum(1)


def tapped(f, *args, **options):
    seen = []
    out = lox.tap(f, seen.append, **options)(*args)
    return out, seen


def assert_logs(logs, want, rtol=1e-4):
    """Exactly these keys, with these events."""
    assert set(logs) == set(want)
    for key, values in want.items():
        np.testing.assert_allclose(logs[key], np.asarray(values), rtol=rtol, atol=1e-5)


# --- Equinox -------------------------------------------------------------------------------------


class Net(eqx.Module):
    layers: list
    activation: callable = eqx.field(static=True)
    scale: float = 0.5

    def __init__(self, key):
        keys = jax.random.split(key)
        self.layers = [eqx.nn.Linear(3, 8, key=keys[0]), eqx.nn.Linear(8, "scalar", key=keys[1])]
        self.activation = jnp.tanh

    def __call__(self, x):
        h = self.activation(self.layers[0](x)) * self.scale
        lox.log({"hidden": jnp.abs(h).mean()})
        return self.layers[1](h)


def eqx_loss(model, x, y):
    value = jnp.mean((jax.vmap(model)(x) - y) ** 2)
    lox.log({"loss": value})
    return value


def eqx_step(model, state, optimizer, i):
    value, grads = eqx.filter_value_and_grad(eqx_loss)(model, X, Y)
    norm = optax.tree.norm(eqx.filter(grads, eqx.is_array))
    lox.log({"norm": norm}, step=i)
    updates, state = optimizer.update(grads, state)
    return eqx.apply_updates(model, updates), state, (value, norm)


def eqx_train(model):
    """The whole training inside one scan; returns the model and, by hand, losses and norms."""
    optimizer = optax.adam(1e-2)
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def step(carry, i):
        params, state = carry
        model, state, by_hand = eqx_step(eqx.combine(params, static), state, optimizer, i)
        return (eqx.filter(model, eqx.is_inexact_array), state), by_hand

    init = (params, optimizer.init(params))
    (params, _), by_hand = lax.scan(step, init, jnp.arange(STEPS))
    return eqx.combine(params, static), by_hand


def eqx_by_hand(model):
    """The same as a Python loop, its values returned: losses, norms, hidden activations."""
    optimizer = optax.adam(1e-2)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state):
        hidden = jax.vmap(lambda x: jnp.abs(jnp.tanh(model.layers[0](x)) * model.scale).mean())(X)
        loss = lambda m: jnp.mean((jax.vmap(m)(X) - Y) ** 2)
        value, grads = eqx.filter_value_and_grad(loss)(model)
        updates, state = optimizer.update(grads, state)
        norm = optax.tree.norm(eqx.filter(grads, eqx.is_array))
        return eqx.apply_updates(model, updates), state, dict(loss=value, norm=norm, hidden=hidden)

    rows = []
    for _ in range(STEPS):
        model, state, row = step(model, state)
        rows.append(row)
    want = {key: np.stack([row[key] for row in rows], -1) for key in rows[0]}
    return model, want  # hidden has the lanes of its vmap first: (16, STEPS)


@pytest.fixture(scope="module")
def eqx_case():
    model = Net(jax.random.key(0))
    return model, *eqx_by_hand(model)


arrays = lambda tree: eqx.filter(tree, eqx.is_array)


def test_equinox_training(eqx_case):
    model, trained, want = eqx_case
    (got, (losses, norms)), logs = lox.spool(eqx_train)(model)
    assert_logs(logs, want)
    np.testing.assert_array_equal(logs["loss"], losses)
    np.testing.assert_array_equal(logs["norm"], norms)
    np.testing.assert_array_equal(logs.step["norm"], np.arange(STEPS))
    assert_same(arrays(got), arrays(trained), rtol=1e-3)


def test_equinox_filter_jit_inside_and_outside_of_spool(eqx_case):
    model, _, want = eqx_case
    inner = lambda m: arrays(eqx.filter_jit(eqx_train)(m))
    assert_logs(lox.spool(inner)(model)[1], want)
    assert_logs(eqx.filter_jit(lox.spool(eqx_train))(model)[1], want)
    plain = eqx.filter_jit(eqx_train)(model)
    assert_same(arrays(plain), arrays(lox.spool(eqx_train)(model)[0]))


def test_equinox_step_by_step(eqx_case):
    model, _, want = eqx_case
    optimizer = optax.adam(1e-2)

    @eqx.filter_jit
    def step(model, state, i):
        return lox.spool(lambda i: eqx_step(model, state, optimizer, i))(i)

    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    whole = lox.logdict()
    for i in range(STEPS):
        (model, state, _), logs = step(model, state, i)
        whole = whole + logs
    assert_logs(whole, want)


def test_equinox_module_as_the_function_itself():
    model = Net(jax.random.key(0))
    out, logs = lox.spool(model)(X[0])
    np.testing.assert_allclose(out, model(X[0]), rtol=1e-6)
    hidden = jnp.abs(jnp.tanh(model.layers[0](X[0])) * model.scale).mean()
    assert_logs(logs, {"hidden": hidden})


def test_equinox_training_over_seeds():
    keys = jax.random.split(jax.random.key(3), 2)
    train = lambda key: eqx_train(Net(key))[1]
    for (losses, norms), logs in (
        lox.spool(jax.vmap(train))(keys),
        jax.jit(jax.vmap(lox.spool(train)))(keys),
    ):
        np.testing.assert_array_equal(logs["loss"], losses)
        np.testing.assert_array_equal(logs["norm"], norms)
        assert logs["hidden"].shape == (2, 16, STEPS)
        np.testing.assert_array_equal(logs.step["norm"], [np.arange(STEPS)] * 2)
    _, alone = lox.spool(train)(keys[1])
    assert_same(jax.tree.map(lambda x: x[1], logs), alone, rtol=1e-4)


def test_equinox_tap_and_windows(eqx_case):
    model, _, want = eqx_case
    run = lambda m: eqx_train(m)[1]
    (losses, _), seen = tapped(run, model, argnames=["loss", "norm"])
    assert [list(s) for s in seen] == [["loss"], ["norm"]] * STEPS
    np.testing.assert_array_equal([s["loss"] for s in seen[::2]], losses)
    _, seen = tapped(run, model, every=4)
    assert [len(s["loss"]) for s in seen] == [4, 2]
    np.testing.assert_array_equal(np.concatenate([s["loss"] for s in seen]), losses)
    np.testing.assert_allclose(
        np.concatenate([s["hidden"] for s in seen], 1), want["hidden"], rtol=1e-4
    )


# --- Flax NNX ------------------------------------------------------------------------------------


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 8, rngs=rngs)
        self.last = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        h = nnx.tanh(self.first(x))
        lox.log({"hidden": jnp.abs(h).mean()})
        return self.last(h)[:, 0]


def nnx_loss(model):
    value = jnp.mean((model(X) - Y) ** 2)
    lox.log({"loss": value})
    return value


def nnx_train(key):
    model = NnxNet(nnx.Rngs(key))
    graph, params = nnx.split(model, nnx.Param)
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(carry, i):
        params, state = carry
        value, grads = jax.value_and_grad(lambda p: nnx_loss(nnx.merge(graph, p)))(params)
        lox.log({"norm": optax.tree.norm(grads)}, step=i)
        updates, state = optimizer.update(grads, state)
        return (optax.apply_updates(params, updates), state), value

    (params, _), losses = lax.scan(step, (params, optimizer.init(params)), jnp.arange(STEPS))
    return params, losses


def nnx_by_hand(key):
    """The same as a Python loop over plain arrays."""
    model = NnxNet(nnx.Rngs(key))
    w = [(p.kernel[...], p.bias[...]) for p in (model.first, model.last)]
    hidden_of = lambda w: jnp.tanh(X @ w[0][0] + w[0][1])
    loss = lambda w: jnp.mean(((hidden_of(w) @ w[1][0] + w[1][1])[:, 0] - Y) ** 2)
    trace, want = jax.tree.map(jnp.zeros_like, w), dict(loss=[], norm=[], hidden=[])
    derive = jax.jit(jax.value_and_grad(loss))
    for _ in range(STEPS):
        value, grads = derive(w)
        want["loss"].append(value)
        want["hidden"].append(jnp.abs(hidden_of(w)).mean())
        want["norm"].append(jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))))
        trace = jax.tree.map(lambda t, g: 0.9 * t + g, trace, grads)
        w = jax.tree.map(lambda p, t: p - 0.1 * t, w, trace)
    return want


def test_nnx_training():
    key = jax.random.key(0)
    want = nnx_by_hand(key)
    plain = jax.tree.leaves(jax.jit(nnx_train)(key)[0])
    for (params, losses), logs in (lox.spool(jax.jit(nnx_train))(key), lox.spool(nnx_train)(key)):
        assert_same(jax.tree.leaves(params), plain)
        assert_logs(logs, want)
        np.testing.assert_array_equal(logs["loss"], losses)
        np.testing.assert_array_equal(logs.step["norm"], np.arange(STEPS))


def test_nnx_training_over_seeds():
    keys = jax.random.split(jax.random.key(5), 3)
    (_, losses), logs = lox.spool(jax.vmap(nnx_train))(keys)
    np.testing.assert_array_equal(logs["loss"], losses)
    for i, key in enumerate(keys):
        assert_logs(jax.tree.map(lambda x, i=i: x[i], logs), nnx_by_hand(key))


def test_nnx_objects_trained_by_an_outer_python_loop():
    def train():
        model = NnxNet(nnx.Rngs(jax.random.key(0)))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer):
            value, grads = nnx.value_and_grad(nnx_loss)(model)
            optimizer.update(model, grads)
            return value

        return [step(model, optimizer) for _ in range(STEPS)]

    losses, logs = lox.spool(train)()
    np.testing.assert_array_equal(logs["loss"], losses)
    want = nnx_by_hand(jax.random.key(0))
    assert_logs(logs, {k: want[k] for k in ("loss", "hidden")})


# --- optax ---------------------------------------------------------------------------------------

schedule = optax.warmup_cosine_decay_schedule(0.0, 0.3, 2, STEPS)


def optax_train(w, scale=1.0):
    optimizer = optax.sgd(lambda i: scale * schedule(i))
    loss = lambda w: jnp.mean((jnp.tanh(X @ w) - Y) ** 2)

    def step(carry, i):
        w, state = carry
        value, grads = jax.value_and_grad(loss)(w)
        count = optax.tree.get(state, "count")
        lox.log({"loss": value, "rate": scale * schedule(count)}, step=i)
        updates, state = optimizer.update(grads, state)
        w = optax.apply_updates(w, updates)
        lax.cond(i % 2 == 1, lambda: lox.log({"w": w}, step=i) and None, lambda: None)
        return (w, state), value

    (w, _), losses = lax.scan(step, (w, optimizer.init(w)), jnp.arange(STEPS))
    return loss(w), losses


def optax_by_hand(w, scale=1.0):
    loss = lambda w: jnp.mean((jnp.tanh(X @ w) - Y) ** 2)
    want, derive = dict(loss=[], rate=[], w=[]), jax.jit(jax.value_and_grad(loss))
    for i in range(STEPS):
        value, grad = derive(w)
        want["loss"].append(value)
        want["rate"].append(scale * float(schedule(i)))
        w = w - want["rate"][-1] * grad
        if i % 2:
            want["w"].append(w)
    return loss(w), want


W = jnp.array([0.1, -0.2, 0.3])


def test_optax_schedule_and_a_log_every_other_step():
    (final, losses), logs = lox.spool(optax_train)(W)
    want_final, want = optax_by_hand(W)
    np.testing.assert_allclose(final, want_final, rtol=1e-4)
    np.testing.assert_array_equal(logs["loss"], losses)
    np.testing.assert_array_equal(logs.mask["w"], [False, True] * (STEPS // 2))
    assert_logs(logs.compact(), want)
    np.testing.assert_array_equal(logs.compact().step["w"], [1, 3, 5])


def test_optax_reduced_and_thinned():
    _, want = optax_by_hand(W)
    _, logs = lox.spool(optax_train, reduce={"loss": "min", "rate": "max", "w": "mean"})(W)
    best = dict(loss=np.min(want["loss"]), rate=np.max(want["rate"]), w=np.mean(want["w"], 0))
    assert_logs(logs, best)
    assert logs.step["w"] == 5
    _, logs = lox.spool(optax_train, interval=4)(W)
    assert_logs(logs.compact(), {k: v[::4] for k, v in want.items()})
    np.testing.assert_array_equal(logs.step["loss"], [0, 4])


def test_gradient_through_training_logs_each_event_once():
    loss = lambda scale: optax_train(W, scale)[0]
    grad, logs = lox.spool(jax.grad(loss))(0.7)
    np.testing.assert_allclose(grad, jax.grad(loss)(0.7), rtol=1e-5)
    assert_logs(logs.compact(), optax_by_hand(W, 0.7)[1])
    both = lambda scale: lox.spool(loss)(scale)
    grad2, logs = jax.jit(jax.grad(both, has_aux=True))(0.7)
    np.testing.assert_allclose(grad2, grad, rtol=1e-5)
    assert_logs(logs.compact(), optax_by_hand(W, 0.7)[1])


def test_optax_over_seeds():
    ws = jnp.stack([W, 2 * W, -W])
    (final, _), logs = lox.spool(jax.vmap(optax_train))(ws)
    for i, w in enumerate(ws):
        want_final, want = optax_by_hand(w)
        np.testing.assert_allclose(final[i], want_final, rtol=1e-4)
        assert_logs(jax.tree.map(lambda x, i=i: x[i], logs).compact(), want)


# --- diffrax -------------------------------------------------------------------------------------


def field(t, y, rate):
    lox.log({"y": y}, step=t)
    return -rate * y


def solve(rate, solver=None, **options):
    return diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        solver or diffrax.Euler(),
        *(0.0, 1.0, 0.25, jnp.array([1.0, 2.0]), rate),
        saveat=diffrax.SaveAt(t0=True, steps=True),
        max_steps=16,
        **options,
    )


EULER = np.array([1.0, 2.0]) * np.array([[1.0], [0.75], [0.5625], [0.421875]])
TIMES = [0.0, 0.25, 0.5, 0.75]


def test_diffrax_field_is_logged_at_every_step():
    sol, logs = lox.spool(solve, capacity=10)(1.0)
    assert logs.count["y"] == sol.stats["num_steps"] == 4
    kept = logs.compact()
    np.testing.assert_array_equal(kept["y"], EULER)
    np.testing.assert_array_equal(kept["y"], sol.ys[:4])
    np.testing.assert_array_equal(kept.step["y"], TIMES)
    np.testing.assert_array_equal(sol.ys, solve(1.0).ys)


def test_diffrax_reductions_and_capacity():
    _, logs = lox.spool(solve, reduce="count")(1.0)
    assert logs["y"] == 4
    _, logs = lox.spool(solve, reduce="last")(1.0)
    np.testing.assert_array_equal(logs["y"], EULER[-1])
    assert logs.step["y"] == 0.75
    _, logs = lox.spool(solve, capacity=3)(1.0)
    np.testing.assert_array_equal(logs["y"], EULER[1:])
    assert logs.count["y"] == 4
    with pytest.raises(lox.LogError, match="capacity=1000"):
        lox.spool(solve)(1.0)


def test_diffrax_adaptive_steps_are_counted():
    adaptive = dict(
        solver=diffrax.Tsit5(), stepsize_controller=diffrax.PIDController(rtol=1e-4, atol=1e-4)
    )
    sol, logs = lox.spool(lambda r: solve(r, **adaptive), reduce="count")(3.0)
    # First same as last: six evaluations a step, and one to begin with.
    assert logs["y"] == 6 * sol.stats["num_steps"] + 1
    _, seen = tapped(lambda r: solve(r, **adaptive), 3.0)
    assert len(seen) == logs["y"]
    _, rows = lox.spool(lambda r: solve(r, **adaptive), capacity=100)(3.0)
    np.testing.assert_array_equal(np.stack([s["y"] for s in seen]), rows.compact()["y"])


def test_diffrax_tap_in_order():
    _, seen = tapped(solve, 1.0)
    np.testing.assert_array_equal([s["y"] for s in seen], EULER)
    assert [float(s.step["y"]) for s in seen] == TIMES
    _, seen = tapped(solve, 1.0, every=3)
    np.testing.assert_array_equal(np.concatenate([s["y"] for s in seen]), EULER)


def test_diffrax_over_rates():
    rates = jnp.array([0.0, 1.0, 2.0])
    ys, logs = lox.spool(jax.vmap(lambda r: solve(r).ys), capacity=10)(rates)
    np.testing.assert_array_equal(logs.count["y"], [4, 4, 4])
    np.testing.assert_allclose(logs["y"][:, :4], ys[:, :4], rtol=1e-6)


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_diffrax_derivative_logs_each_event_once(mode):
    direct, forward = diffrax.DirectAdjoint(), diffrax.ForwardMode()
    f = lambda r: solve(r, adjoint=direct if mode == "reverse" else forward).ys[4].sum()
    derive = jax.grad(f) if mode == "reverse" else lambda r: jax.jvp(f, (r,), (1.0,))[1]
    slope, logs = lox.spool(derive, capacity=20)(1.0)
    np.testing.assert_allclose(slope, -3 * 4 * 0.25 * 0.75**3, rtol=1e-5)
    np.testing.assert_allclose(logs.compact()["y"], EULER, rtol=1e-6)


# --- optimistix ----------------------------------------------------------------------------------


def residual(y, a):
    r = y**2 - a
    lox.log({"y": y, "r": r})
    return r


def newton(a):
    solver = optx.Newton(rtol=1e-5, atol=1e-5)
    sol = optx.root_find(residual, solver, jnp.float32(1.0), a, throw=False)
    return sol.value, sol.stats["num_steps"]


def newton_by_hand(a, steps):
    y, ys = np.float32(1.0), []
    for _ in range(steps):
        ys.append(y)
        y = y - (y * y - np.float32(a)) / (2 * y)
    return np.array(ys)


def test_newton_logs_every_iterate():
    (root, steps), logs = lox.spool(newton, capacity=20)(2.0)
    np.testing.assert_allclose(root, np.sqrt(2.0), rtol=1e-6)
    want = newton_by_hand(2.0, int(steps))
    assert logs.count["y"] == steps
    assert_logs(logs.compact(), {"y": want, "r": want**2 - 2.0})
    _, seen = tapped(newton, 2.0)
    np.testing.assert_allclose([s["y"] for s in seen], want, rtol=1e-6)


def test_bisection_reduced():
    def bisect(a):
        solver, options = optx.Bisection(rtol=1e-3, atol=1e-3), dict(lower=0.0, upper=3.0)
        sol = optx.root_find(residual, solver, jnp.float32(1.0), a, options=options, throw=False)
        return sol.value, sol.stats["num_steps"]

    (_, steps), logs = lox.spool(bisect, reduce={"y": "last", "r": "count"})(2.0)
    lower, upper, y = 0.0, 3.0, 1.0
    for _ in range(int(steps) - 1):
        lower, upper = (y, upper) if y * y < 2.0 else (lower, y)
        y = (lower + upper) / 2
    assert logs["y"] == np.float32(y)
    assert logs["r"] == steps + 2  # the two ends as well


def test_gauss_newton_logs_every_iterate():
    target = jnp.array([1.0, 2.0, 0.5])

    def residuals(p, _):
        lox.log({"p": p})
        return jnp.array([p[0], p[1] * p[0], p[1] ** 2]) - target

    def fit(p):
        solver = optx.GaussNewton(rtol=1e-4, atol=1e-4)
        sol = optx.least_squares(residuals, solver, p, throw=False)
        return sol.value, sol.stats["num_steps"]

    (value, steps), logs = lox.spool(fit, capacity=50)(jnp.array([2.0, 1.0]))
    bare = lambda p: np.array([p[0], p[1] * p[0], p[1] ** 2]) - np.asarray(target)
    p, want = np.array([2.0, 1.0]), []
    for _ in range(int(steps)):
        want.append(p)
        jacobian = np.array([[1, 0], [p[1], p[0]], [0, 2 * p[1]]])
        p = p - np.linalg.lstsq(jacobian, bare(p), rcond=None)[0]
    np.testing.assert_allclose(logs.compact()["p"], want, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(value, p, rtol=1e-3)


def test_gradient_through_a_root_is_unchanged():
    grad = jax.grad(lambda a: newton(a)[0])
    np.testing.assert_allclose(lox.spool(grad, capacity=50)(2.0)[0], grad(2.0), rtol=1e-6)
    both = jax.grad(lambda a: lox.spool(lambda a: newton(a)[0], capacity=50)(a), has_aux=True)
    out, logs = both(2.0)
    np.testing.assert_allclose(out, grad(2.0), rtol=1e-6)
    np.testing.assert_allclose(logs.compact()["y"], newton_by_hand(2.0, int(newton(2.0)[1])))
