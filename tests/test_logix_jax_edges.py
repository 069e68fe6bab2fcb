"""What is easily got wrong with losses of JAX: small ids, buffers that are filled anew, masks of
loops, examples that depend on each other, parameters used in several ways."""

from __future__ import annotations

import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import logix.jax
import lox
from jax_run import (
    N,
    as_rows,
    by_vmap,
    close,
    cut,
    examples,
    loss,
    make,
    parameters,
    same_statistics,
    sequence_loss,
    sequences,
)
from logix import _statistics

KFAC = {"save": "grad", "statistic": "kfac"}


def normal(*shape, seed=0):
    random = np.random.default_rng([seed, *shape])
    return jnp.asarray(random.normal(size=shape) * 0.5, jnp.float32)


def same_gradients(loss, params, batch):
    capture = logix.jax.capture(loss, params)
    got = jax.jit(capture.gradients)(params, batch)
    want = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))(params, batch)
    jax.tree.map(lambda x, y: close(x, y), got, want)
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(want))
    return capture


# --- look-ups by small integers -------------------------------------------------------------------

LOOK_UPS = {
    "index": lambda table, t: table[t],
    "take": lambda table, t: jnp.take(table, t, axis=0),
    "clip": lambda table, t: jnp.take(table, t, axis=0, mode="clip"),
    "fill": lambda table, t: jnp.take(table, t, axis=0, mode="fill", fill_value=0.0),
    "slice": lambda table, t: lax.dynamic_slice(table, (t[0], t[0] * 0), (1, 3)),
}


SMALL = [(np.uint8, 256), (np.uint8, 300), (np.int8, 100), (np.int8, 300), (np.uint32, 300)]


@pytest.mark.parametrize(("dtype", "rows"), SMALL)  # 256 is 0 in uint8, 300 is 44
def test_ids_of_few_bits(dtype, rows):
    ids = np.array([[255, 44, 44, 99], [0, 43, 200, 1]]).astype(dtype)
    params = {name: normal(rows, 3, seed=k) for k, name in enumerate(LOOK_UPS)}
    if dtype == np.int8 and rows > 127:
        del params["index"]  # JAX itself refuses it

    def looked_up(p, t):
        return sum(jnp.sum(jnp.sin(LOOK_UPS[name](table, t))) for name, table in p.items())

    capture = same_gradients(looked_up, params, jnp.asarray(ids))
    assert {t.rule for t in capture.coverage(params, ids).taken} == {"look-up"}


# --- arrays that change afterwards ----------------------------------------------------------------


def aligned(*shape):
    """An array that JAX takes without a copy."""
    size = 4 * int(np.prod(shape))
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(np.float32).reshape(shape)


def deep(p, e):
    h = e["x"]
    for _ in range(4):
        h = jnp.tanh(h @ p["w"])
    return jnp.sum((h * e["m"]) @ p["v"])


def test_a_loader_may_fill_one_buffer_again_and_again(tmp_path):
    params = {"w": normal(512, 512) / 10, "v": normal(512, 8)}
    data = {"x": np.asarray(normal(256, 512)), "m": np.arange(256).reshape(-1, 1) // 64 % 2}
    buffer = {"x": aligned(64, 512), "m": aligned(64, 1)}
    given = {"numpy": buffer}
    if importlib.util.find_spec("torch"):
        given["torch"] = jax.tree.map(importlib.import_module("torch").from_numpy, buffer)

    def loader(given):
        for batch in cut(data, 64):
            for key in buffer:
                buffer[key][:] = batch[key]
            yield given

    def extracted(name, batches):
        run = make(tmp_path, KFAC, deep, params, name=name)
        run.add_lora(rank=4)
        run.extract(batches, range(256), mask=lambda batch: batch["m"])
        run.finalize()
        return run

    want = extracted(
        "apart", [{k: x.astype(np.float32) for k, x in b.items()} for b in cut(data, 64)]
    )
    for name, same in given.items():
        got = extracted(name, loader(same))
        close(got.store().rows(), want.store().rows())
        same_statistics(got.statistics, want.statistics)
    assert np.abs(want.store().rows()).max() > 0


def test_parameters_are_those_that_were_watched(tmp_path):
    params, data = jax.tree.map(lambda x: aligned(*x.shape), parameters()), examples()
    jax.tree.map(lambda x, y: x.__setitem__(..., y), params, parameters())
    run = make(tmp_path, {"save": "grad"}, params=params)
    params["l2"]["w"] += 1
    run.extract([data], range(N))
    params["l1"]["w"] += 1
    run.finalize()
    want = by_vmap(loss, parameters(), data)
    close(run.store().rows(), as_rows(want, run.layout))
    _, log = run.log(data, ids=range(N))
    close(log["l2/w"]["grad"], want["l2/w"])


# --- masks ----------------------------------------------------------------------------------------


def repeated(p, e, loop):
    step = lambda h, _: (jnp.tanh(h @ p["w"]), None)
    h = p["table"][e["i"]]
    h = lax.scan(step, h, None, length=2)[0] if loop else step(step(h, None)[0], None)[0]
    return jnp.sum((h**2).sum(-1) * e["mask"])


def test_a_mask_and_a_weight_that_a_loop_shares(tmp_path):
    params, data = sequences()
    params, runs = {"table": params["table"], "w": normal(4, 4)}, []
    for loop in (True, False):
        run = make(tmp_path, KFAC, partial(repeated, loop=loop), params, name=str(loop))
        run.extract([data], range(N), mask=lambda batch: batch["mask"])
        runs.append(run)
    same_statistics(runs[0].statistics, runs[1].statistics)
    assert int(runs[0].statistics["w"]["right_n"]) == 2 * int(data["mask"].sum()) < 2 * N * 3


def recurrent(p, e, around, inside):
    """A recurrent layer goes over the positions by itself; loops are around it, and inside."""
    once = lambda x: lambda h, _: (jnp.tanh(x @ p["w"] + h), None)
    position = lambda h, x: (lax.scan(once(x), h, None, length=inside)[0],) * 2
    layer = lambda x, _: (lax.scan(position, jnp.zeros(4), x)[1], None)
    x = lax.scan(layer, p["table"][e["i"]], None, length=around)[0]
    return jnp.sum((x**2).sum(-1) * e["mask"])


@pytest.mark.parametrize(("around", "inside"), [(1, 1), (2, 2)])
def test_a_mask_and_a_loop_over_the_positions(tmp_path, around, inside):
    """Statistics are those of the sequences without their padding, each by itself."""
    params, data = sequences()
    params = {"table": params["table"], "w": normal(4, 4)}
    loops = partial(recurrent, around=around, inside=inside)
    run = make(tmp_path, {"statistic": "kfac"}, loops, params)
    run.extract([data], range(N), mask=lambda batch: batch["mask"])
    capture, want, lengths = jax.jit(logix.jax.capture(loops, params)), {}, data["mask"].sum(1)
    for real in {*lengths.astype(int).tolist()}:
        alike = {name: x[lengths == real, :real] for name, x in data.items()}
        want = _statistics.update(want, capture(params, alike), ["kfac"])
    same_statistics(run.statistics, want)


def test_a_mask_that_no_layer_has_positions_for(tmp_path):
    run = make(tmp_path, KFAC)
    wide = lambda batch: np.ones((len(batch["x"]), 7))
    with pytest.raises(ValueError, match="mask has 7 positions, and no layer has so many places"):
        run.extract(cut(examples()), range(N), mask=wide)
    with pytest.raises(ValueError, match="mask has 7 positions"):
        run.log(examples(), mask=wide(examples()))


def test_a_mask_where_no_layer_has_positions(tmp_path):
    """The gradient of a bias is of all of an example: the loss has left out what does not count."""
    params, data = sequences()
    run = make(tmp_path, KFAC, sequence_loss, params, how=dict(filter="b"))
    run.extract([data], range(N), mask=lambda batch: batch["mask"])
    run.finalize()
    close(run.store().rows(), by_vmap(sequence_loss, params, data)["b"])


# --- losses of a batch ----------------------------------------------------------------------------


def each(p, b):
    """The loss of each example of a batch."""
    h = b["x"].astype(p["l1"]["w"].dtype) @ p["l1"]["w"] + p["l1"]["b"]
    return jnp.sum((jnp.tanh(h) @ p["l2"]["w"] - b["y"].astype(h.dtype)) ** 2, -1)


def coupled_in_gradients(p, b):
    h = b["x"] @ p["l1"]["w"]
    stopped = lax.stop_gradient(h)
    return each(p, b).mean() + jnp.mean((h - stopped) * stopped.mean(0))


def coupled_by_a_thousandth(p, b):
    losses = each(p, b)
    return losses.sum() * (1 + 1e-3 * losses.max() / losses.mean())


@pytest.mark.parametrize("coupled", [coupled_in_gradients, coupled_by_a_thousandth])
def test_examples_that_depend_on_each_other_a_little(tmp_path, coupled):
    run = make(tmp_path, KFAC, coupled, how=dict(batched=True))
    with pytest.raises(ValueError, match="They, or their gradients, depend on each other"):
        run.extract([examples()], range(N))


@pytest.mark.parametrize("reduce", [jnp.sum, jnp.mean, lambda x: x], ids=["sum", "mean", "each"])
def test_examples_that_do_not_in_bfloat16(tmp_path, reduce):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), parameters())
    whole = lambda p, b: reduce(each(p, b))
    run = make(tmp_path, {"save": "grad"}, whole, params, how=dict(batched=True))
    assert run.extract([examples(64)], range(64)) == 64


# --- functions with a derivative that closes over something ------------------------------------


def scaled_by(c):
    fun = jax.custom_vjp(lambda y: y * c)
    fun.defvjp(lambda y: (y * c, None), lambda _, g: (g * c,))
    return fun


def test_a_derivative_that_closes_over_a_value_of_the_loss_is_named():
    loss = lambda p, x: scaled_by(jnp.sin(x[0]))(x @ p["w"]).sum()
    params, batch = {"w": normal(4, 5)}, normal(3, 4)
    found = same_gradients(loss, params, batch)
    match = r"w \(vmap\(grad\), because of the custom_vjp function .* hand them over as arguments\)"
    with pytest.raises(ValueError, match=f"strict=True: no rule for {match}"):
        logix.jax.capture(loss, params, strict=True)(params, batch)
    assert found.coverage(params, batch).fallbacks

    def logged(p, x):
        lox.log({"h": x @ p["w"]})
        return loss(p, x)

    with pytest.raises(ValueError, match="nothing can be logged beside the custom_vjp function"):
        logix.jax.capture(logged, params, logs="h")(params, batch)
    assert same_gradients(logged, params, batch).coverage(params, batch).fallbacks


def test_a_derivative_that_closes_over_what_is_outside_of_the_loss():
    params, batch, c = {"w": normal(4, 5)}, normal(3, 4), jnp.arange(5.0)

    def gradients(c):
        loss = lambda p, x: scaled_by(jnp.arange(5.0) if c is None else c)(x @ p["w"]).sum()
        capture = logix.jax.capture(loss, params, strict=c is not None)
        return capture.gradients(params, batch)

    for got in (gradients(c), jax.jit(gradients)(c), gradients(None)):
        np.testing.assert_allclose(got["w"], batch[:, :, None] * c, rtol=1e-6)


def closes(c, of=jnp.tanh):
    fun = jax.custom_jvp(of)
    fun.defjvp(lambda primals, tangents: (of(*primals), tangents[0] * c))
    return fun


def for_the_data_alone(p, x):
    h = closes(x.sum())(x) @ p["w"]
    lox.log({"h": h})
    return (h**2).sum()


def in_what_another_function_computes(p, x):
    tanh = closes(x.sum())
    fun = jax.custom_vjp(lambda y: tanh(y))
    fun.defvjp(lambda y: (jnp.tanh(y), y), lambda y, g: (g * y,))
    return (fun(x @ p["w"]) ** 2).sum()


def carried_round(p, x):
    tanh = closes(x.sum())
    step = lambda s, _: ((tanh(s[1]) @ p["w"], s[0] * 1.5), None)
    return (lax.scan(step, (x, x), length=3)[0][1] ** 2).sum()


def on_a_mesh(p, x):
    c, mesh = x.sum(), jax.make_mesh((2,), ("m",), axis_types=(jax.sharding.AxisType.Auto,))
    body = lambda x, w: lax.psum(closes(c)(x @ w), "m")
    specs = dict(in_specs=(P(None, "m"), P("m")), out_specs=P())
    return (jax.shard_map(body, mesh=mesh, **specs)(x, p["w"]) ** 2).sum()


def with_an_argument_that_has_none(p, x):
    c, fun = x.sum(), jax.custom_jvp(lambda y, z: jnp.tanh(y) * z)

    def derivative(primals, tangents):
        if not isinstance(tangents[1], jax.custom_derivatives.SymbolicZero):
            raise NotImplementedError("no derivative for z")
        return fun(*primals), tangents[0] * c

    fun.defjvp(derivative, symbolic_zeros=True)
    return (fun(x @ p["w"], x) ** 2).sum()


CLOSING = {
    for_the_data_alone: False,
    in_what_another_function_computes: False,
    carried_round: True,
    on_a_mesh: True,
    with_an_argument_that_has_none: True,
}


@pytest.mark.parametrize("loss", CLOSING)
def test_only_derivatives_that_are_taken_count(loss):
    params, batch = {"w": normal(4, 4)}, normal(3, 5, 4)
    capture = same_gradients(loss, params, batch)
    assert bool(capture.coverage(params, batch).fallbacks) == CLOSING[loss]
    want = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))(params, batch)
    got = jax.jit(capture.gradients)(params, batch)
    np.testing.assert_allclose(got["w"], want["w"], rtol=1e-4, atol=1e-4)
    if loss is for_the_data_alone:
        logix.jax.capture(loss, params, logs="h", strict=True)(params, batch)


@pytest.mark.parametrize("own", [True, False])
def test_a_derivative_that_closes_over_a_value_of_a_batch(own):
    def loss(p, x):
        c = x.sum((1, 2), keepdims=True) if own else x.sum()
        fun = jax.custom_vjp(jnp.tanh)
        fun.defvjp(lambda y: (jnp.tanh(y), y), lambda y, g: (g * c,))
        return (fun(x @ p["w"]) ** 2).sum((1, 2))

    params, batch = {"w": normal(4, 4)}, normal(3, 5, 4)
    capture = logix.jax.capture(loss, params, batched=True)
    if not own:
        with pytest.raises(ValueError, match="depend on each other"):
            capture.gradients(params, batch)
        return
    alone = jax.grad(lambda p, x: loss(p, x[None])[0])
    want = jax.vmap(alone, in_axes=(None, 0))(params, batch)
    np.testing.assert_allclose(capture.gradients(params, batch)["w"], want["w"], rtol=1e-5)


# --- layers of a parameter ------------------------------------------------------------------------


def layers(loss, params, batch):
    """Which parameters are fallbacks, and the layers, once gradients are those of JAX."""
    capture = same_gradients(loss, params, batch)
    taken = {t.path: t.fallback for t in capture.coverage(params, batch).taken}
    return taken, {r.layer for r in jax.eval_shape(capture, params, batch)}


def test_a_matrix_of_which_a_row_is_used_beside_it():
    beside = lambda p, x: (x @ p["w"]).sum() ** 2 + jnp.tanh(p["w"][2]).sum() * x[0]
    params, batch = {"w": normal(4, 5)}, normal(3, 4)
    assert layers(beside, params, batch) == ({"w": True}, {"w"})
    with pytest.raises(ValueError, match=r"strict=True: no rule for w \(.*tanh"):
        logix.jax.capture(beside, params, strict=True)(params, batch)


def test_a_tied_table_of_which_a_row_is_added():
    def tied(p, t):
        h = jnp.tanh(p["table"][t] + p["table"][0])
        return -jax.nn.log_softmax(h @ p["table"].T)[0, t].sum()

    params, batch = {"table": normal(7, 4)}, jnp.array([[1, 2, 2], [0, 6, 5]])
    assert layers(tied, params, batch)[1] == {"table"}


def test_one_row_of_a_table():
    one = lambda p, x: jnp.sum(jnp.tanh(x @ p["w"] + p["pos"][0]))
    params, batch = {"w": normal(4, 5), "pos": normal(6, 5)}, normal(3, 4)
    assert layers(one, params, batch)[1] == {"w", "pos"}


@pytest.mark.parametrize("loop", ["python", "scan"])
def test_stacked_biases(loop):
    def stacked(p, x):
        if loop == "scan":
            return jnp.sum(lax.scan(lambda h, b: (jnp.tanh(h @ p["w"] + b), None), x, p["b"])[0])
        for k in range(3):
            x = jnp.tanh(x @ p["w"] + p["b"][k])
        return jnp.sum(x)

    params = {"w": normal(4, 4), "b": normal(3, 4)}
    taken, found = layers(stacked, params, normal(2, 4))
    assert taken == {"w": False, "b": False}
    assert found == {"w", "b[0]", "b[1]", "b[2]"}
