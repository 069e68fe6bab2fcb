"""The laws of `logix.jax.capture`, for every program of `jax_programs` and the files beside it."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_programs_conv
import jax_programs_own
import logix.jax
import lox
from jax_programs import EXAMPLES, PROGRAMS, mlp, square
from logix._compress import gradients
from logix._record import Lookup, Outer, Whole

assert jax_programs_conv.WIDE  # these files have added theirs
assert jax_programs_own.FIXED.size
over_programs = pytest.mark.parametrize("name", PROGRAMS)


def oracle(program, params, batch):
    """The gradient of each example, by JAX."""
    one = jax.grad(program.loss)
    if program.mappable:
        return jax.jit(jax.vmap(one, in_axes=(None, 0)))(params, batch)
    example = lambda i: jax.tree.map(lambda x: x[i], batch)
    found = [jax.jit(one)(params, example(i)) for i in range(EXAMPLES)]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *found)


def assert_close(got, want, rtol=2e-5):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert x.shape == y.shape
        scale = float(np.abs(y).max()) if y.size else 0
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * (scale + 1e-3))


def rules(coverage):
    return {t.path: "whole" if t.fallback else t.rule for t in coverage.taken}


@over_programs
def test_gradients_are_those_of_jax_and_each_parameter_is_taken_by_its_rule(name):
    program = PROGRAMS[name]
    params, batch = program.data()
    capture = logix.jax.capture(program.loss, params)
    got = jax.jit(capture.gradients)(params, batch)
    assert_close(got, oracle(program, params, batch), program.rtol)
    assert rules(capture.coverage(params, batch)) == program.rules


WITHOUT_CASTS = [name for name, program in PROGRAMS.items() if program.rtol < 1e-4]


@pytest.mark.parametrize("name", WITHOUT_CASTS[::4])
def test_gradients_in_float64(name):
    with jax.enable_x64(True):
        program = PROGRAMS[name]
        params, batch = program.data(jnp.float64)
        got = jax.jit(logix.jax.capture(program.loss, params).gradients)(params, batch)
        assert_close(got, oracle(program, params, batch), 1e-10)


SOME = [*list(PROGRAMS)[1::4], "ragged_experts"]


@pytest.mark.parametrize("name", SOME)
def test_mapped_over_stacked_parameters(name):
    program = PROGRAMS[name]
    params, batch = program.data()
    capture = logix.jax.capture(program.loss, params)
    seeds = jax.tree.map(lambda x: jnp.stack([x, x * 1.1]), params)
    got = jax.jit(jax.vmap(capture.gradients, in_axes=(0, None)))(seeds, batch)
    for k in range(2):
        one = lambda xs, k=k: jax.tree.map(lambda x: x[k], xs)
        assert_close(one(got), oracle(program, one(seeds), batch), program.rtol)


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_random_keys_in_a_batch(make):
    def loss(p, e):
        drop = jax.random.bernoulli(e["key"], 0.5, (4,))
        return square(jnp.where(drop, e["x"], 0) @ p["w"])

    params = {"w": jnp.ones((4, 5))}
    batch = {"x": jnp.ones((6, 4)), "key": jax.random.split(make(0), 6)}
    got = jax.jit(logix.jax.capture(loss, params).gradients)(params, batch)
    assert_close(got, jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, batch))


def records_of(capture, params, batch):
    return jax.jit(capture)(params, batch)


SHAPES = {
    "mlp_at_places": {"w1": (Outer, 1), "b1": (Whole, 1), "w2": (Outer, 1), "b2": (Whole, 1)},
    "heads": {"q": (Outer, 1), "o": (Outer, 1)},
    "tied_embedding": {"emb": (Lookup | Outer, 2)},
    "split_columns": {"w": (Outer, 3)},
    "applied_twice": {"w": (Outer, 2)},
    "scan_over_layers": {
        f"{n}[{k}]": (Outer if n == "w" else Whole, 1) for n in "wbg" for k in range(3)
    },
    "scan_in_scan": {
        f"{n}[{j}][{k}]": (Outer if n == "w" else Whole, 1)
        for n in "wbg"
        for j in range(2)
        for k in range(3)
    },
    "a_matrix_for_each_head": {f"w[{k}]": (Outer, 1) for k in range(2)},
    "one_of_several": {"w[2]": (Outer, 1)},
    "scan_over_a_stack": {
        "a/w": (Outer, 1), "a/b": (Whole, 1), "c/w": (Outer, 1), "c/b": (Whole, 1),
    },
    "conv_2d": {"k": (Outer, 1), "v": (Outer, 1)},
    "ragged_experts": {"r": (Outer, 1), **{f"w[{k}]": (Outer, 1) for k in range(3)}},
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_a_record_for_each_layer_and_use(name):
    program = PROGRAMS[name]
    params, batch = program.data()
    records = records_of(logix.jax.capture(program.loss, params), params, batch)
    count = {}
    for record in records:
        kind, _ = SHAPES[name][record.layer]
        assert isinstance(record, kind)
        count[record.layer] = count.get(record.layer, 0) + 1
    assert count == {layer: n for layer, (_, n) in SHAPES[name].items()}


def noisy(w):
    return w + jnp.cumsum(0 * w, -1)  # no rule goes through this, and nothing is changed by it


@pytest.mark.parametrize(
    "name", ["from_the_right", "from_the_left", "heads", "conv_2d", "embedding", "scan_over_layers"]
)
def test_a_fallback_is_written_as_a_rule_would_do(name):
    program = PROGRAMS[name]
    params, batch = program.data()
    matrices = lambda p: {k: noisy(x) if k != "b" and k != "g" else x for k, x in p.items()}
    other = lambda p, e: program.loss(matrices(p), e)
    rows = {}
    for loss in (program.loss, other):
        capture = logix.jax.capture(loss, params)
        grads = gradients(jax.jit(capture)(params, batch))
        rows[loss] = {k: x.reshape(EXAMPLES, -1) for k, x in grads.items()}
    assert len(capture.coverage(params, batch).fallbacks) >= 1
    assert_close(rows[other], rows[program.loss])


def sizes_in(jaxpr):
    """Of all values that a program makes, as numbers of entries."""
    for eqn in jaxpr.eqns:
        yield from (math.prod(v.aval.shape) for v in eqn.outvars)
        for value in eqn.params.values():
            for body in value if isinstance(value, tuple | list) else [value]:
                inside = getattr(body, "jaxpr", body)
                if hasattr(inside, "eqns"):
                    yield from sizes_in(inside)


def wide(p, x):
    return mlp(p, {"x": x, "y": jnp.zeros(3)})


def wide_scan(p, x):
    step = lambda x, w: (jnp.tanh(x @ w), None)
    return square(lax.scan(jax.checkpoint(step), x, p["w"])[0])


def wide_embedding(p, i):
    return square(jnp.tanh(p["e"][i]) @ p["e"].T)


def wide_conv(p, x):
    numbers = ("NWC", "WIO", "NWC")
    y = lax.conv_general_dilated(x[None], p["k"], (1,), "SAME", dimension_numbers=numbers)
    return square(jnp.tanh(y))


def wide_heads(p, x):
    return square(jnp.einsum("tm,mhd->thd", x, p["q"]))


LARGE = {
    "mlp": (wide, dict(w1=(64, 65), b1=(65,), w2=(65, 3), b2=(3,)), jnp.ones((8, 64))),
    "scan": (wide_scan, dict(w=(3, 64, 64)), jnp.ones((8, 2, 64))),
    "embedding": (wide_embedding, dict(e=(128, 64)), jnp.zeros((8, 3), int)),
    "conv": (wide_conv, dict(k=(3, 64, 64)), jnp.ones((8, 4, 64))),
    "heads": (wide_heads, dict(q=(64, 4, 16)), jnp.ones((8, 2, 64))),
}


@pytest.mark.parametrize("name", LARGE)
def test_no_gradient_of_a_matrix_is_made_for_each_example(name):
    loss, shapes, batch = LARGE[name]
    params = {k: jnp.ones(shape) for k, shape in shapes.items()}
    largest = max(math.prod(shape) for shape in shapes.values())
    one = max(math.prod(shape[-2:]) if len(shape) > 2 else 1 for shape in shapes.values())
    each = len(batch) * max(one, 64 * 64)
    made = lambda f: max(sizes_in(jax.make_jaxpr(f)(params, batch).jaxpr))
    assert made(jax.vmap(jax.grad(loss), in_axes=(None, 0))) >= each  # the yardstick
    assert made(logix.jax.capture(loss, params)) < max(each, largest + 1)


def test_the_compiled_program_holds_no_gradient_of_a_matrix(all_passes):
    loss, shapes, batch = LARGE["mlp"]
    params = {k: jnp.ones(shape) for k, shape in shapes.items()}
    capture = logix.jax.capture(loss, params)
    temp = lambda f: jax.jit(f).lower(params, batch).compile().memory_analysis().temp_size_in_bytes
    norms = lambda p, b: [
        (r.a**2).sum() * (r.g**2).sum() for r in capture(p, b) if r.layer[0] == "w"
    ]
    assert temp(norms) < 8 * 64 * 65 * 4 / 2


# --- several devices ------------------------------------------------------------------------------


def mesh_of(kind=jax.sharding.AxisType.Auto, shape=(8,), names=("d",)):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


ON_DEVICES = ["mlp", "scan_of_remat", "tied_embedding", "conv_in_groups", "experts", "branches"]


AXIS_TYPES = [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit]


@pytest.mark.parametrize("kind", AXIS_TYPES, ids=["auto", "explicit"])
@pytest.mark.parametrize("name", ON_DEVICES)
def test_examples_on_several_devices(name, kind):
    program = PROGRAMS[name]
    params, batch = program.data()
    batch = jax.tree.map(lambda x: jnp.concatenate([x, x, x])[:8], batch)
    want, mesh = oracle(program, params, batch), mesh_of(kind)
    put = lambda xs, spec: jax.device_put(xs, NamedSharding(mesh, spec))
    capture = logix.jax.capture(program.loss, params)
    params, batch = put(params, P()), put(batch, P("d"))
    got = jax.jit(capture.gradients)(params, batch)
    assert_close(jax.device_get(got), jax.device_get(want), program.rtol)
    for record in jax.jit(capture)(params, batch):
        assert all(x.sharding.spec[0] == "d" for x in jax.tree.leaves(record))


def test_parameters_on_several_devices():
    program = PROGRAMS["from_the_right"]
    params, batch = {"w": jnp.arange(32.0).reshape(4, 8) / 9}, jnp.ones((8, 3, 4))
    want, mesh = oracle(program, params, batch), mesh_of(shape=(2, 4), names=("d", "m"))
    put = lambda xs, *spec: jax.device_put(xs, NamedSharding(mesh, P(*spec)))
    capture = logix.jax.capture(program.loss, params)
    got = jax.jit(capture.gradients)(put(params, None, "m"), put(batch, "d"))
    assert_close(jax.device_get(got), jax.device_get(want))


def sharded(body, specs, x):
    """A loss whose body runs on four shards."""
    mesh = mesh_of(shape=(4,), names=("m",))
    return jax.shard_map(body, mesh=mesh, in_specs=(specs, x), out_specs=P())


def columns(p, x):
    h = jnp.tanh(x @ p["w"] + p["b"])
    return lax.psum(square(h @ p["v"]), "m")


def rows(p, x):
    return square(lax.psum(jnp.tanh(x @ p["w"] + p["b"]) @ p["v"], "m"))


def everywhere(p, x):
    return lax.psum(square(jnp.tanh(x @ p["w"] + p["b"]) @ p["v"]), "m")


CUT = {"w": P(None, "m"), "b": P("m"), "v": P("m", None)}
SHARDED = {
    "columns": sharded(columns, CUT, P()),
    "rows": sharded(rows, CUT, P()),
    "replicated": sharded(everywhere, dict.fromkeys("wbv", P()), P("m")),
    "in_scan": lambda p, x: square(
        lax.scan(lambda c, x: (c + SHARDED["rows"](p, jnp.sin(c) * x), None), 0.0, x[:, None])[0]
    ),
}


@pytest.mark.parametrize("name", SHARDED)
def test_inside_of_shard_map(name):
    loss = SHARDED[name]
    random = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)
    params, batch = {"w": make(5, 8), "b": make(8), "v": make(8, 3)}, make(3, 4, 5)
    capture = logix.jax.capture(loss, params)
    got = jax.jit(capture.gradients)(params, batch)
    want = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))(params, batch)
    assert_close(jax.device_get(got), jax.device_get(want))
    found = rules(capture.coverage(params, batch))
    assert found == {"w": "product", "b": "elementwise", "v": "product"}


# --- losses of a batch, filters, names ------------------------------------------------------------


def batch_loss(p, e):
    h = jnp.tanh(e["x"] @ p["w1"] + p["b1"])
    return ((h @ p["w2"] + p["b2"] - e["y"]) ** 2).sum()


@pytest.mark.parametrize("name", ["mlp", "mlp_at_places"])
def test_a_loss_of_a_batch(name):
    params, batch = PROGRAMS[name].data()
    one = logix.jax.capture(batch_loss, params)
    all_of_them = logix.jax.capture(batch_loss, params, batched=True)
    assert_close(all_of_them.gradients(params, batch), one.gradients(params, batch))
    mean = logix.jax.capture(lambda p, e: batch_loss(p, e)[None], params, batched=True)
    assert_close(mean.gradients(params, batch), one.gradients(params, batch))


FILTERS = {
    "pattern": ("w*", {"w1", "w2"}),
    "patterns": (["w1", "b*"], {"w1", "b1", "b2"}),
    "function": (lambda path: path.endswith("2"), {"w2", "b2"}),
}


@pytest.mark.parametrize("name", FILTERS)
def test_filters(name):
    choice, kept = FILTERS[name]
    program = PROGRAMS["mlp"]
    params, batch = program.data()
    capture = logix.jax.capture(program.loss, params, filter=choice)
    want = {k: v if k in kept else None for k, v in oracle(program, params, batch).items()}
    assert_close(capture.gradients(params, batch), want)
    assert {t.path for t in capture.coverage(params, batch).taken} == kept
    assert {r.layer for r in capture(params, batch)} == kept


def test_a_frozen_base_under_adapters():
    program = PROGRAMS["adapter"]
    params, batch = program.data()
    capture = logix.jax.capture(program.loss, params, filter=["a", "b"], strict=True)
    assert_close(capture.gradients(params, batch), oracle(program, params, batch) | {"w": None})


FROZEN_EXPERTS = {
    "plain": lambda p, x: p["a"] @ jax.nn.relu(lax.ragged_dot(x @ p["a"], p["w"], SIZES)),
    "jit": lambda p, x: jax.jit(lax.ragged_dot)(x @ p["a"], p["w"], SIZES),
    "remat": lambda p, x: jax.checkpoint(lax.ragged_dot)(x @ p["a"], p["w"], SIZES),
    "scan": lambda p, x: lax.scan(
        lambda x, _: (jnp.tanh(lax.ragged_dot(x, p["w"], SIZES)), None), x @ p["a"], length=2
    )[0],
    "made of others": lambda p, x: lax.ragged_dot(x, p["w"] * p["a"].sum(), SIZES) @ p["a"],
}
SIZES = jnp.asarray([1, 0, 2], jnp.int32)


@pytest.mark.parametrize("name", FROZEN_EXPERTS)
def test_a_ragged_product_with_what_is_not_watched(name):
    random = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)
    params, batch = {"a": make(4, 4), "w": make(3, 4, 4)}, make(2, 4, 4)
    loss = lambda p, x: square(FROZEN_EXPERTS[name](p, x))
    got = jax.jit(logix.jax.capture(loss, params, filter="a").gradients)(params, batch)["a"]
    want = [jax.jit(jax.grad(loss))(params, x)["a"] for x in batch]
    assert_close(got, jnp.stack(want))


def test_leaves_that_are_no_arrays_stay_where_they_are():
    params = {"w": jnp.ones((4, 5)), "activation": jnp.tanh, "nothing": None, "n": 3}
    loss = lambda p, x: square(p["activation"](x @ p["w"]) * p["n"])
    got = logix.jax.capture(loss, params).gradients(params, jnp.ones((2, 4)))
    assert got["w"].shape == (2, 4, 5)
    assert (got["activation"], got["n"]) == (jnp.tanh, 3)


@pytest.mark.parametrize("names", [{"w1": "first"}, lambda path: "first" if path == "w1" else path])
def test_names(names):
    program = PROGRAMS["mlp"]
    params, batch = program.data()
    capture = logix.jax.capture(program.loss, params, names=names)
    assert {r.layer for r in capture(params, batch)} == {"first", "b1", "w2", "b2"}
    assert_close(capture.gradients(params, batch), oracle(program, params, batch))


def test_paths_and_brackets():
    params = {"a[1]": [jnp.ones((3, 4, 4)), jnp.ones((4, 4))], "a": jnp.ones((2, 4, 4))}

    def loss(p, x):
        x = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["a[1]"][0])[0]
        return square(x @ p["a[1]"][1] @ p["a"][1])

    batch = jnp.ones((2, 3, 4))
    capture = logix.jax.capture(loss, params)
    layers = {r.layer for r in capture(params, batch)}
    assert layers == {"a[1]/0[0]", "a[1]/0[1]", "a[1]/0[2]", "a[1]/1", "a[1]"}
    want = jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, batch)
    assert_close(capture.gradients(params, batch), want)


def test_coverage_as_text():
    program = PROGRAMS["merged_adapter"]
    params, batch = program.data()
    found = logix.jax.capture(program.loss, params).coverage(params, batch)
    assert "vmap(grad), because of dot_general: a product of two parameters" in str(found)
    assert "3 parameter arrays, 38 of 38 values (100.0%)" in found.summary()
    assert [path.split(" ")[0] for path in found.fallbacks] == ["a", "b", "w"]


# --- what the model logs itself -------------------------------------------------------------------


def hidden(p, x):
    h = jnp.tanh(x @ p["w"])
    lox.log({"h/1": h, "other": h})
    return h


def by_hand(body, params, batch):
    """The value, and the gradient for it, of `h`, which the rest of the loss is a function of."""

    def one(x):
        value, rest = body(params, x)
        return value, jax.grad(rest)(value)

    return jax.vmap(one)(batch)


def plain(p, x):
    return square(hidden(p, x) @ p["v"])


def in_jit(p, x):
    return square(jax.jit(hidden)(p, x) @ p["v"])


def in_remat(p, x):
    return jax.checkpoint(plain)(p, x)


def made_outside(p, x):
    h = jnp.tanh(x @ p["w"])

    @jax.jit
    def inner(h):
        lox.log({"h/1": h})
        return h @ p["v"]

    return square(inner(h))


LOGGED = {"plain": plain, "jit": in_jit, "remat": in_remat, "outside": made_outside}


@pytest.fixture
def small():
    random = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)
    return {"w": make(4, 4), "v": make(4, 4)}, make(3, 2, 4)


@pytest.mark.parametrize("name", LOGGED)
def test_logged_values_and_their_gradients(name, small):
    params, batch = small
    capture = logix.jax.capture(LOGGED[name], params, logs="h/*")
    logged = jax.jit(lambda p, b: capture.everything(p, b)[2])(params, batch)
    rest = lambda h: square(h @ params["v"])
    value, grad = by_hand(lambda p, x: (jnp.tanh(x @ p["w"]), rest), params, batch)
    assert {x.layer for x in logged} == {"h/1"}
    forward = sum(x.forward for x in logged) / len(logged)
    assert_close(forward, value)
    assert_close(sum(x.backward for x in logged), grad)
    got = capture.gradients(params, batch)
    assert_close(got, jax.vmap(jax.grad(LOGGED[name]), in_axes=(None, 0))(params, batch))


def test_logs_in_a_scan(small):
    params, batch = small

    def loss(p, x):
        def step(x, w):
            h = jnp.tanh(x @ w)
            lox.log({"h/1": h})
            return h, None

        return square(lax.scan(step, x, jnp.stack([p["w"], p["v"]]))[0])

    capture = logix.jax.capture(loss, params, logs=["h/*"])
    [found] = capture.everything(params, batch)[2]
    first = jnp.tanh(batch @ params["w"])
    second = jnp.tanh(first @ params["v"])
    assert_close(found.forward, jnp.stack([first, second], 1))
    after = lambda h: square(jnp.tanh(h @ params["v"]))
    want = jnp.stack([jax.vmap(jax.grad(after))(first), jax.vmap(jax.grad(square))(second)], 1)
    assert_close(found.backward, want)


def test_logs_of_inputs_and_of_integers(small):
    params, batch = small

    def loss(p, x):
        lox.log({"h": {"x": x, "best": x.argmax(-1)}, "w": p["w"]})
        return square(x @ p["w"]) + square(p["v"])

    capture = logix.jax.capture(loss, params, logs=["h*"])
    found = {x.layer: x for x in capture.everything(params, batch)[2]}
    assert set(found) == {"h/x", "h/best"}
    assert_close(found["h/x"].forward, batch)
    assert_close(found["h/x"].backward, 2 * batch @ params["w"] @ params["w"].T)
    assert_close(found["h/best"].forward, batch.argmax(-1))
    assert found["h/best"].backward is None


def test_a_value_logged_under_two_names(small):
    params, batch = small

    def loss(p, x):
        h = x @ p["w"]
        lox.log({"h/1": h, "h/2": h})
        return square(h @ p["v"])

    found = logix.jax.capture(loss, params, logs=["h/*"]).everything(params, batch)[2]
    assert [x.layer for x in found] == ["h/1", "h/2"]
    for x in found:
        assert_close(x.forward, batch @ params["w"])
        assert_close(x.backward, 2 * batch @ params["w"] @ params["v"] @ params["v"].T)


def test_logs_in_a_branch_count_where_it_is_taken(small):
    params, batch = small
    batch = batch.at[1].multiply(-1)

    def loss(p, x):
        return square(lax.cond(x.sum() > 0, lambda x: hidden(p, x), lambda x: x @ p["v"], x))

    capture = logix.jax.capture(loss, params, logs=["h/*"])
    [found] = jax.jit(lambda p, b: capture.everything(p, b)[2])(params, batch)
    taken = (batch.sum((1, 2)) > 0)[:, None, None]
    assert 0 < taken.sum() < len(taken)
    h = jnp.where(taken, jnp.tanh(batch @ params["w"]), 0)
    assert_close(found.forward, h)
    assert_close(found.backward, 2 * h)


def test_a_log_inside_of_a_custom_derivative(small):
    params, batch = small

    @jax.custom_vjp
    def own(x):
        lox.log({"h/1": x})
        return jnp.sin(x)

    own.defvjp(lambda x: (own(x), x), lambda x, g: (g * jnp.cos(x),))
    loss = lambda p, x: square(own(x @ p["w"]) @ p["v"])
    with pytest.raises(ValueError, match=r"'h/1' is logged inside of custom_vjp_call.*Log it outs"):
        logix.jax.capture(loss, params, logs=["h/*"])(params, batch)
    got = logix.jax.capture(loss, params).gradients(params, batch)
    assert_close(got, jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, batch))


def test_unwanted_logs_are_dropped(small):
    params, batch = small

    def loss(p, x):
        lox.log({"x": x})
        step = lambda x, _: (jax.jit(hidden)(p, x), lox.log({"y": x}))
        out = lax.scan(step, x, None, length=2)[0] @ p["v"]
        lox.log({"out": out})
        return square(out)

    capture = logix.jax.capture(loss, params, logs=["out"])
    losses, _, logged = capture.everything(params, batch)
    assert [x.layer for x in logged] == ["out"]
    assert_close(losses, jax.vmap(lambda x: loss(params, x))(batch))
    assert_close(
        capture.gradients(params, batch),
        jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, batch),
    )


# --- errors ---------------------------------------------------------------------------------------


def capturing(loss, params, batch, **how):
    return lambda: logix.jax.capture(loss, params, **how)(params, batch)


W, X = {"w": jnp.ones((4, 5))}, jnp.ones((2, 4))
UNUSED = {**W, "u": jnp.ones(3), "s": jnp.ones(3)}
ERRORS = {
    "not scalar": (
        capturing(lambda p, x: x @ p["w"], W, X),
        ValueError,
        r"one floating-point number; it is float32\[5\]\. .*batched=True",
    ),
    "not scalar, of a batch": (
        capturing(lambda p, x: (x @ p["w"]).sum(1, keepdims=True), W, X, batched=True),
        ValueError,
        "Sum it over the examples",
    ),
    "several": (
        capturing(lambda p, x: (square(x @ p["w"]), x), W, X),
        ValueError,
        r"it is float32\[\], float32\[4\]",
    ),
    "integer loss": (
        capturing(lambda p, x: (x @ p["w"]).argmax(), W, X),
        ValueError,
        r"it is int32\[\]",
    ),
    "integer parameter": (
        capturing(lambda p, x: square(x @ p["w"]), {"n": {"ids": jnp.arange(3)}, **W}, X),
        TypeError,
        r"the parameter 'n/ids' is of int32.*filter=lambda path: path not in \['n/ids'\]",
    ),
    "nothing left": (
        capturing(lambda p, x: square(x @ p["w"]), W, X, filter="*/kernel"),
        ValueError,
        r"no parameter is left to watch: filter='\*/kernel'\. The paths are: w",
    ),
    "no filter": (
        capturing(lambda p, x: square(x @ p["w"]), W, X, filter=[3]),
        TypeError,
        r"filter=\[3\]: a function of a path, or patterns",
    ),
    "unused": (
        capturing(lambda p, x: square(x @ p["w"]), UNUSED, X),
        ValueError,
        r"does not depend on 's', 'u' in any way.*filter=lambda path: path not in \['s', 'u'\]",
    ),
    "stopped": (
        capturing(lambda p, x: square(x @ lax.stop_gradient(p["w"])), W, X),
        ValueError,
        "does not depend on 'w'",
    ),
    "rounded": (
        capturing(lambda p, x: square(x @ p["w"].astype(int).astype(float)), W, X),
        ValueError,
        "does not depend on 'w'",
    ),
    "first axes": (
        capturing(lambda p, e: square(e["x"] @ p["w"]), W, {"x": X, "y": jnp.ones(3)}),
        ValueError,
        r"first axis is over the examples.*\['x'\].*\(2,\).*\['y'\].*\(3,\)",
    ),
    "no axis": (
        capturing(lambda p, e: square(e["x"] @ p["w"]), W, {"x": X, "y": 1.0}),
        ValueError,
        "first axis is over the examples",
    ),
    "no batch": (
        capturing(lambda p, e: square(p["w"]), W, {}),
        ValueError,
        "first axis is over the examples",
    ),
    "structure": (
        lambda: logix.jax.capture(lambda p, x: square(x @ p["w"]), W)({"v": W["w"]}, X),
        ValueError,
        r"another structure than those that are watched",
    ),
    "strict": (
        capturing(lambda p, x: square(x @ jnp.cumsum(p["w"], 1)), W, X, strict=True),
        ValueError,
        r"strict=True: no rule for w \(vmap\(grad\), because of cumsum and dot_general\)",
    ),
    "a constant is logged": (
        capturing(lambda p, x: (lox.log({"h": 2.0}), square(x @ p["w"]))[1], W, X, logs="h"),
        ValueError,
        "'h' is the same for all examples.*Leave it out of logs=",
    ),
    "unknown name": (
        capturing(lambda p, x: square(x @ p["w"]), W, X, names={"v": "first"}),
        ValueError,
        r"names= has no parameter \['v'\]",
    ),
    "name given twice": (
        capturing(PROGRAMS["applied_twice"].loss, {"w": W, "v": W}, X, names=lambda path: "one"),
        ValueError,
        r"several parameters the same name: \['one'\]",
    ),
    "name of a layer": (
        capturing(lambda p, x: square(x @ p["w"]), {**W, "w[1]": W["w"]}, X),
        ValueError,
        r"'w\[1\]' may also be a layer of 'w'",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    call, kind, text = ERRORS[name]
    with pytest.raises(kind, match=re.compile(text, re.DOTALL)):
        call()


def test_names_of_stacked_layers():
    params = {"w": jnp.ones((3, 4, 4)), "b": jnp.zeros((3, 4))}
    layer = lambda x, own: (jnp.tanh(x @ own["w"] + own["b"]), None)
    loss = lambda params, x: lax.scan(layer, x, params)[0].sum()
    batch = jnp.arange(8.0).reshape(2, 4)
    named = lambda **names: logix.jax.capture(loss, params, names=names)
    capture = named(w="h.{}.fc", b="h.{}.fc.bias")
    records = capture(params, batch)
    wanted = [f"h.{i}.fc{end}" for end in ("", ".bias") for i in range(3)]
    assert [r.layer for r in records] == wanted
    plain = logix.jax.capture(loss, params)
    assert_close(capture.gradients(params, batch), plain.gradients(params, batch))
    with pytest.raises(ValueError, match=r"has 2 places .* this parameter has 1"):
        named(w="h.{}.{}")(params, batch)
    with pytest.raises(ValueError, match="the same name"):
        named(w="h.{}", b="h.{}")(params, batch)
