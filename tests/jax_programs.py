"""Losses of one example, for the laws of `logix.jax`: one for each way to use a parameter.

Those with convolutions and with derivatives of their own are in files beside this one.

`@program(rules, params, example)` adds one to the table. `rules` says by which rule each parameter
has to be taken, "whole" for what no rule matches; `params` and `example` are shapes, or `ids`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

EXAMPLES = 3
HALF = jnp.float32(0.5)
IMAGE = ("NHWC", "HWIO", "NHWC")
PROGRAMS: dict[str, Program] = {}


@dataclasses.dataclass(frozen=True)
class Ids:
    low: int
    high: int
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    loss: Callable
    rules: dict[str, str]
    shapes: tuple[Any, Any]
    mappable: bool  # whether JAX can map its gradient over examples
    rtol: float

    def data(self, dtype: Any = jnp.float32) -> tuple[Any, Any]:
        """Parameters and a batch."""
        random = np.random.default_rng(0)

        def make(shape: Any, front: tuple[int, ...]) -> Any:
            if isinstance(shape, Ids):
                return jnp.asarray(random.integers(shape.low, shape.high, front + shape.shape))
            return jnp.asarray(random.standard_normal(front + shape) * 0.7, dtype)

        leaf = lambda x: isinstance(x, Ids | tuple)
        params, example = self.shapes
        params = jax.tree.map(lambda s: make(s, ()), params, is_leaf=leaf)
        return params, jax.tree.map(lambda s: make(s, (EXAMPLES,)), example, is_leaf=leaf)


def program(
    rules: Any, params: Any, example: Any, mappable: bool = True, rtol: float = 2e-5
) -> Callable[[Callable], Callable]:
    def add(loss: Callable) -> Callable:
        names = dict.fromkeys(params, rules) if isinstance(rules, str) else rules
        assert loss.__name__ not in PROGRAMS
        PROGRAMS[loss.__name__] = Program(loss, names, (params, example), mappable, rtol)
        return loss

    return add


# --- products ------------------------------------------------------------------------------------

LAYERS = {"w1": "product", "b1": "elementwise", "w2": "product", "b2": "elementwise"}
MLP = dict(w1=(4, 5), b1=(5,), w2=(5, 3), b2=(3,))


@program(LAYERS, MLP, dict(x=(4,), y=(3,)))
def mlp(p, e):
    h = jax.nn.relu(e["x"] @ p["w1"] + p["b1"])
    return ((h @ p["w2"] + p["b2"] - e["y"]) ** 2).sum()


@program(LAYERS, MLP, dict(x=(6, 4), y=(6, 3)))
def mlp_at_places(p, e):
    return mlp(p, e)


@program(LAYERS, MLP, dict(x=(1, 4), y=(1, 3)))
def mlp_at_one_place(p, e):
    return mlp(p, e)


def square(y):
    return (y**2).sum()


@program("product", dict(w=(4, 5)), (3, 4))
def from_the_right(p, x):
    return square(jnp.tanh(x) @ p["w"])


@program("product", dict(w=(4, 5)), (5, 3))
def from_the_left(p, x):
    return square(p["w"] @ jnp.tanh(x))


@program("product", dict(w=(4, 5)), (5,))
def matrix_times_vector(p, x):
    return square(p["w"] @ x)


@program("product", dict(w=(4, 5)), (3, 5))
def transposed_right(p, x):
    return square(x @ p["w"].T)


@program("product", dict(w=(4, 5)), (4, 3))
def transposed_left(p, x):
    return square(p["w"].T @ x)


@program("product", dict(w=(4, 5)), (2, 3, 4))
def several_places(p, x):
    return square(x @ p["w"])


@program("product", dict(q=(6, 2, 3), o=(2, 3, 6)), (4, 6))
def heads(p, x):
    return square(jnp.einsum("thd,hdm->tm", jnp.einsum("tm,mhd->thd", x, p["q"]), p["o"]))


@program("product", dict(w=(2, 3, 5)), (4, 2, 3))
def a_matrix_for_each_head(p, x):
    return square(jnp.einsum("thd,hdk->thk", x, p["w"]))


@program("product", dict(w=(5, 3, 2)), (4, 2, 3))
def a_matrix_for_each_head_last(p, x):
    return square(jnp.einsum("thd,kdh->kth", x, p["w"]))


@program("product", dict(w=(2, 3, 4)), (5, 4, 2, 3))
def all_axes_contracted(p, x):
    return square(jnp.einsum("tcab,abc->t", x, p["w"]))


@program("product", dict(w=(2, 3)), (4,))
def no_axis_contracted(p, x):
    return square(jnp.tanh(jnp.einsum("t,ab->tab", x, p["w"])))


@program("product", dict(v=(4,)), (3, 4))
def vector_in_a_dot(p, x):
    return square(x @ p["v"])


@program({"a": "elementwise", "b": "elementwise"}, dict(a=(), b=(1,)), (3,))
def scalars(p, x):
    return square(jnp.tanh(x * p["a"] + p["b"]))


@program("product", dict(u=(1, 4), v=(4, 1), s=(1, 1)), (3, 1))
def axes_of_one(p, x):
    return square(jnp.tanh(x @ p["u"]) @ p["v"] @ p["s"])


@program({"w": "product", "s": "product"}, dict(w=(4, 4), s=(4, 4)), (3, 4), rtol=0.05)
def in_bfloat16(p, x):
    y = x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)
    return square(y.astype(jnp.float32) @ p["s"])


# --- views ---------------------------------------------------------------------------------------


@program("product", dict(w=(4, 6)), (3, 4))
def first_columns(p, x):
    return square(x @ p["w"][:, :2])


@program("product", dict(w=(4, 6)), (3, 4))
def split_columns(p, x):
    q, k, v = jnp.split(p["w"], 3, axis=1)
    return square(x @ q) + square(jnp.tanh(x @ k) * (x @ v))


@program("product", dict(w=(4, 6)), (3, 4))
def overlapping_columns(p, x):
    return square(jnp.tanh(x @ p["w"][:, 1:4]) + x @ p["w"][:, 2:5])


@program("product", dict(w=(6, 4)), (3, 2))
def some_rows(p, x):
    return square(x @ p["w"][1:3]) + square(jnp.sin(x) @ p["w"][4:])


@program("product", dict(w=(3, 4, 5)), (2, 4))
def one_of_several(p, x):
    return square(x @ p["w"][2])


@program("product", dict(w=(3, 4, 4)), (2, 4))
def each_of_several(p, x):
    for k in range(3):
        x = jnp.tanh(x @ p["w"][k])
    return square(x)


@program("product", dict(a=(4, 2), b=(4, 3)), (5, 4))
def columns_joined(p, x):
    return square(x @ jnp.concatenate([p["a"], p["b"]], 1))


@program("product", dict(a=(2, 5), b=(3, 5)), (4, 5))
def rows_joined(p, x):
    return square(jnp.tanh(x) @ jnp.concatenate([p["a"], p["b"]]).T)


@program("product", dict(a=(4, 3), b=(4, 3)), (2, 5, 4))
def stacked(p, x):
    return square(jnp.einsum("gtd,gdk->gtk", x, jnp.stack([p["a"], p["b"]])))


@program("product", dict(a=(4, 3), b=(4, 3)), (5, 4))
def stacked_between(p, x):
    return square(jnp.einsum("td,dgk->tgk", x, jnp.stack([p["a"], p["b"]], 1)))


@program("product", dict(w=(4, 6)), (3, 4))
def columns_as_heads(p, x):
    return square(jnp.einsum("tm,mhd->htd", x, p["w"].reshape(4, 2, 3)))


@program("product", dict(w=(4, 6)), (3, 2, 2))
def rows_as_heads(p, x):
    return square(jnp.einsum("thk,hkd->td", x, p["w"].reshape(2, 2, 6)))


@program("product", dict(w=(4, 2, 3)), (3, 4))
def heads_merged(p, x):
    return square(x @ p["w"].reshape(4, 6))


@program("product", dict(w=(4, 2, 3)), (3, 6))
def heads_transposed_and_merged(p, x):
    return square(x @ p["w"].transpose(2, 1, 0).reshape(6, 4))


@program("product", dict(w=(20,)), (3, 4))
def vector_as_matrix(p, x):
    return square(x @ p["w"].reshape(4, 5))


@program("product", dict(w=(12, 5)), (3, 4))
def a_third_of_the_rows(p, x):
    return square(x @ p["w"].reshape(3, 4, 5)[1])


@program("whole", dict(w=(4, 6)), (3, 6))
def reshaped_across(p, x):
    return square(x @ p["w"].reshape(6, 4))


@program("product", dict(w=(4, 6)), (3, 4))
def every_other_column(p, x):
    return square(x @ p["w"][:, ::2])


@program("product", dict(w=(6, 4)), (3, 2))
def interleaved(p, x):
    return square(jnp.tanh(x @ p["w"][1::3, ::2]) * (x @ p["w"][1::3, 1::2]) @ p["w"][:2].T[:2])


@program("whole", dict(w=(4, 5)), (3, 4))
def every_other_column_of_five(p, x):
    return square(x @ p["w"][:, ::2])


# --- several uses ---------------------------------------------------------------------------------


@program("product", dict(w=(4, 4)), (3, 4))
def applied_twice(p, x):
    return square(jnp.tanh(x @ p["w"]) @ p["w"])


@program("product", dict(w=(5, 3)), (4, 5))
def autoencoder(p, x):
    return square(jnp.tanh(x @ p["w"]) @ p["w"].T - x)


@program({"emb": "look-up, product"}, dict(emb=(7, 4)), dict(i=Ids(0, 7, (5,))))
def tied_embedding(p, e):
    x = jnp.tanh(p["emb"][e["i"]])
    return -jax.nn.log_softmax(x @ p["emb"].T)[jnp.arange(5), e["i"]].mean()


@program("product", dict(w=(4, 4)), (3, 4))
def stopped_once(p, x):
    return square(jnp.tanh(x @ p["w"]) @ lax.stop_gradient(p["w"]))


@program({"w": "product", "u": "product"}, dict(w=(3, 4), u=(4, 4)), (6, 3))
def recurrent(p, x):
    step = lambda h, x: (jnp.tanh(x @ p["w"] + h @ p["u"]), None)
    return square(lax.scan(step, jnp.zeros(4), x)[0])


@program({"w": "whole", "v": "product"}, dict(w=(4, 5), v=(5,)), (3, 4))
def weight_decay(p, x):
    return square(x @ p["w"] @ p["v"]) + 0.1 * square(p["w"])


# --- constructs -----------------------------------------------------------------------------------


@program("product", dict(w=(4, 5), v=(5, 4)), (3, 4))
def inside_jit(p, x):
    inner = jax.jit(lambda w, x: jnp.tanh(x @ w))
    outer = jax.jit(lambda p, x: inner(p["v"], inner(p["w"], x)))
    return square(outer(p, outer(p, x)))


BLOCKS = {"w": "product", "b": "elementwise", "g": "elementwise"}
STACKED = dict(w=(3, 4, 4), b=(3, 4), g=(3, 4))


def block(x, p):
    x = x - x.mean(-1, keepdims=True)
    x = x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["g"]
    return x + jnp.tanh(x @ p["w"] + p["b"]), None


@program(BLOCKS, STACKED, (2, 4))
def scan_over_layers(p, x):
    return square(lax.scan(block, x, p)[0])


@program(BLOCKS, STACKED, (2, 4))
def scan_reversed(p, x):
    return square(lax.scan(block, x, p, reverse=True)[0])


@program(BLOCKS, STACKED, (2, 4))
def scan_unrolled(p, x):
    return square(lax.scan(block, x, p, unroll=2)[0])


@program(BLOCKS, STACKED, (2, 4))
def scan_of_remat(p, x):
    return square(lax.scan(jax.checkpoint(block), x, p)[0])


@program(BLOCKS, dict(w=(2, 3, 4, 4), b=(2, 3, 4), g=(2, 3, 4)), (2, 4))
def scan_in_scan(p, x):
    return square(lax.scan(lambda x, q: lax.scan(block, x, q), x, p)[0])


@program(
    {"a/w": "product", "a/b": "elementwise", "c/w": "product", "c/b": "elementwise"},
    dict(a=dict(w=(4, 4), b=(4,)), c=dict(w=(4, 4), b=(4,))),
    (2, 4),
)
def scan_over_a_stack(p, x):
    both = jax.tree.map(lambda *xs: jnp.stack(xs), p["a"], p["c"])
    return square(lax.scan(lambda x, q: (jnp.tanh(x @ q["w"] + q["b"]), None), x, both)[0])


@program({"w": "product", "u": "product"}, dict(w=(3, 4, 4), u=(4, 4)), (2, 4))
def shared_and_stacked(p, x):
    def layer(x, w):
        return jnp.tanh(x @ w) @ p["u"], None

    return square(lax.scan(layer, x, p["w"])[0])


@program("product", dict(w=(4, 4)), (2, 4))
def for_loop(p, x):
    return square(lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ p["w"]), x))


@program({"w": "elementwise", "u": "product"}, dict(w=(0, 4, 4), u=(4, 4)), (2, 4))
def no_layers(p, x):
    step = lambda x, w: (jnp.tanh(x @ w @ p["u"]), None)
    return square(lax.scan(step, x, p["w"])[0] @ p["u"])


@program({"w": "product", "b": "elementwise"}, dict(w=(4, 4), b=(4,)), (2, 4))
def carried_through_a_loop(p, x):
    step = lambda _, c: (c[0], jnp.tanh(c[1] @ c[0]["w"] + c[0]["b"]))
    p, x = lax.fori_loop(0, 3, step, (p, x))
    return square(x @ p["w"])


@program("product", dict(w=(3, 4, 4)), (2, 4))
def for_loop_over_layers(p, x):
    return square(lax.fori_loop(0, 3, lambda k, x: jnp.tanh(x @ p["w"][k]), x))


@program({"w": "product", "b": "elementwise"}, dict(w=(5, 4, 4), b=(5, 4)), (2, 4))
def for_loop_over_some_layers(p, x):
    layer = lambda k, x: jnp.tanh(x @ p["w"][k] + p["b"][k])
    return square(lax.fori_loop(1, 4, layer, x))


@program("product", dict(w=(3, 4, 4)), (2, 4))
def for_loop_down(p, x):
    return square(lax.fori_loop(0, 3, lambda k, x: jnp.tanh(x @ p["w"][2 - k]), x))


@program("product", dict(w=(2, 3, 4, 4)), (2, 4))
def for_loop_in_for_loop(p, x):
    layer = lambda j, k, x: jnp.tanh(x @ p["w"][j, k])
    inside = lambda j, x: lax.fori_loop(0, 3, lambda k, x: layer(j, k, x), x)
    return square(lax.fori_loop(0, 2, jax.checkpoint(inside), x))


@program("product", dict(w=(4, 3, 4)), (2, 4))
def scan_over_numbers_of_layers(p, x):
    step = lambda x, k: (jnp.tanh(x @ jnp.take(p["w"], k, axis=1)), None)
    return square(lax.scan(step, x, jnp.arange(3), reverse=True)[0])


@program("product", dict(w=(4, 4, 4)), (2, 4))
def scan_that_counts_by_itself(p, x):
    step = lambda c, _: (
        (jnp.tanh(c[0] @ lax.dynamic_index_in_dim(p["w"], c[1], 0, False)), c[1] + 1),
        None,
    )
    return square(lax.scan(step, (x, 1), None, length=3, reverse=True)[0][0])


@program("whole", dict(w=(3, 4, 4)), (2, 4))
def for_loop_with_layers_shared_by_two(p, x):
    return square(lax.fori_loop(0, 6, lambda k, x: jnp.tanh(x @ p["w"][k // 2]), x))


@program("whole", dict(w=(12, 4, 4)), (2, 4))
def loop_with_a_counter_that_is_rounded(p, x):
    step = lambda c, _: ((jnp.tanh(c[0] @ p["w"][(c[1] * 3).astype(int)]), c[1] + 1 / 3), None)
    return square(lax.scan(step, (x, jnp.float32(0)), None, length=10)[0][0])


@program("whole", dict(w=(4, 4, 4)), (2, 4))
def loop_with_a_counter_that_is_divided_by_zero(p, x):
    step = lambda k, x: jnp.tanh(x @ p["w"][lax.rem(k + 1, 0 * k)])
    return square(lax.fori_loop(0, 3, step, x))


@program({"w": "whole", "v": "product"}, dict(w=(3, 4, 4), v=(4, 3)), (2, 4))
def loop_that_does_not_run(p, x):
    return square(lax.fori_loop(0, 0, lambda k, x: jnp.tanh(x @ p["w"][k]), x) @ p["v"])


@program("whole", dict(w=(3, 4, 4)), dict(x=(2, 4), k=Ids(0, 3, ())))
def for_loop_from_a_layer_that_the_data_says(p, e):
    return square(lax.fori_loop(0, 2, lambda k, x: jnp.tanh(x @ p["w"][k + e["k"]]), e["x"]))


@program(
    dict(w="product", e="look-up", k="convolution"),
    dict(w=(4, 5), e=(6, 4), k=(3, 3, 1, 2)),
    dict(x=(3, 4), i=Ids(0, 6, (3,)), z=(5, 5, 1)),
)
def scaled(p, e):
    y = (e["x"] + (p["e"] * 2)[e["i"]]) @ (-p["w"] / jnp.sqrt(4.0))
    z = lax.conv_general_dilated(e["z"][None], p["k"] * HALF, (1, 1), "SAME", None, None, IMAGE)
    return square(jnp.tanh(y)) + square(jnp.tanh(z))


@program("elementwise", dict(w=(4, 5)), dict(x=(3, 4), s=()))
def scaled_by_data(p, e):
    return square(jnp.tanh(e["x"] @ (p["w"] * e["s"])))


@program("product", dict(w=(4, 4)), dict(x=(2, 4), n=Ids(0, 5, ())))
def bounded_while(p, e):
    step = lambda x, k: (jnp.where(k < e["n"], jnp.tanh(x @ p["w"]), x), None)
    return square(lax.scan(step, e["x"], jnp.arange(4))[0])


def _remat(policy):
    def loss(p, e):
        return jax.checkpoint(mlp, policy=policy)(p, e)

    return loss


for _name in ("nothing_saveable", "everything_saveable", "dots_with_no_batch_dims_saveable"):
    _loss = _remat(getattr(jax.checkpoint_policies, _name))
    _loss.__name__ = f"remat_{_name}"
    program(LAYERS, MLP, dict(x=(6, 4), y=(6, 3)))(_loss)


@program({"w": "product", "v": "product", "b": "elementwise"},
         dict(w=(4, 5), v=(4, 5), b=(5,)), (3, 4))  # fmt: skip
def branches(p, x):
    yes = lambda p, x: jnp.tanh(x @ p["w"]) + p["b"]
    return square(lax.cond(x.sum() > 0, yes, lambda p, x: x @ p["v"], p, x))


@program({"w": "product"}, dict(w=(3, 4, 5)), dict(x=(2, 4), k=Ids(0, 3, ())))
def switched(p, e):
    options = [lambda x, k=k: jnp.tanh(x @ p["w"][k]) for k in range(3)]
    return square(lax.switch(e["k"], options, e["x"]))


@program("product", dict(w=(4, 4)), (3, 2, 4))
def branch_in_scan(p, x):
    def step(h, x):
        new = lax.cond(x.sum() > 0, lambda h: jnp.tanh(h @ p["w"]), lambda h: h + x, h)
        return new, None

    return square(lax.scan(step, jnp.ones((2, 4)), x)[0])


@jax.custom_jvp
def _swish(x):
    return x * jax.nn.sigmoid(x)


@_swish.defjvp
def _swish_jvp(primals, tangents):
    s = jax.nn.sigmoid(primals[0])
    return primals[0] * s, tangents[0] * (s + primals[0] * s * (1 - s))


@jax.custom_vjp
def _clipped(x):
    return jnp.sin(x)


_clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g, -1, 1) * jnp.cos(x),))


@program(LAYERS, MLP, dict(x=(6, 4), y=(6, 3)))
def own_derivatives(p, e):
    h = _swish(_clipped(e["x"] @ p["w1"] + p["b1"]))
    return square(jax.nn.softmax(jax.nn.gelu(h) @ p["w2"] + p["b2"]) - e["y"])


@jax.custom_vjp
def _fused_norm(x, scale):
    return x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def _plain_norm(x, scale):
    return x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


_fused_norm.defvjp(
    lambda x, scale: (_plain_norm(x, scale), (x, scale)),
    lambda kept, g: jax.vjp(_plain_norm, *kept)[1](g),
)


@program({"g": "elementwise", "w": "product"}, dict(g=(4,), w=(4, 3)), (5, 4))
def fused_norm(p, x):
    return square(_fused_norm(x, p["g"]) @ p["w"])


# --- norms and biases -----------------------------------------------------------------------------


@program("elementwise", dict(g=(4,), b=(4,)), (5, 4))
def layer_norm(p, x):
    x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return square(jnp.tanh(x * p["g"] + p["b"]))


@program("elementwise", dict(g=(4,)), (5, 4))
def rms_norm(p, x):
    return jax.nn.logsumexp(x * lax.rsqrt((x**2).mean(-1, keepdims=True)) * (1 + p["g"]))


@program({"w": "product", "b": "elementwise"}, dict(w=(4, 2, 3), b=(2, 3)), (5, 4))
def bias_of_heads(p, x):
    return square(jnp.tanh(jnp.einsum("tm,mhd->thd", x, p["w"]) + p["b"]))


@program({"w": "product", "b": "elementwise"}, dict(w=(4, 5), b=(5,)), (3, 4))
def bias_through_cumsum(p, x):
    return square(jnp.cumsum(x @ p["w"] + jnp.exp(p["b"]), 0))


@program({"w": "product"}, dict(w=(4, 4)), (5, 4))
def after_associative_scan(p, x):
    return square(lax.associative_scan(jnp.multiply, jnp.tanh(x @ p["w"])) @ p["w"])


# --- embeddings -----------------------------------------------------------------------------------


@program("look-up", dict(e=(7, 4)), Ids(0, 7, (5,)))
def embedding(p, i):
    return square(jnp.tanh(p["e"][i]))


@program("look-up", dict(e=(7, 4)), Ids(-9, 9, (2, 5)))
def embedding_with_any_ids(p, i):
    return square(jnp.tanh(p["e"][i]))


@program("look-up", dict(e=(7, 4)), Ids(-9, 9, (5,)))
def embedding_filled(p, i):
    return square(jnp.tanh(jnp.take(p["e"], i, axis=0, mode="fill", fill_value=0)))


@program("look-up", dict(e=(7, 4)), Ids(-9, 9, (5,)))
def embedding_clipped(p, i):
    return square(jnp.tanh(jnp.take(p["e"], i, axis=0, mode="clip")))


@program("look-up", dict(e=(7, 4)), Ids(-9, 9, (5,)))
def embedding_wrapped(p, i):
    return square(jnp.tanh(jnp.take(p["e"], i, axis=0, mode="wrap")))


@program("look-up", dict(e=(4, 7)), Ids(0, 7, (5,)))
def embedding_in_columns(p, i):
    return square(jnp.tanh(jnp.take(p["e"], i, axis=1)))


@program("whole", dict(e=(7, 2, 3)), Ids(0, 7, (5,)))
def embedding_of_matrices(p, i):
    return square(jnp.tanh(p["e"][i]))


@program("look-up", dict(e=(7, 4)), Ids(0, 7, ()))
def embedding_of_one(p, i):
    return square(jnp.tanh(p["e"][i]))


@program("look-up", dict(e=(7, 4)), Ids(0, 7, (5,)), rtol=0.02)
def embedding_cast(p, i):
    return square(jnp.tanh(p["e"].astype(jnp.bfloat16)[i].astype(jnp.float32)))


@program("look-up", dict(e=(7, 4)), Ids(0, 5, (6,)))
def embedding_in_some_rows(p, i):
    return square(jnp.tanh(p["e"][1:6, 1:][i]))


@program("look-up", dict(e=(4, 5), more=(3, 5)), Ids(0, 7, (6,)))
def embedding_extended(p, i):
    return square(jnp.tanh(jnp.concatenate([p["e"], p["more"]])[i]))


@program("look-up", dict(e=(2, 3, 5)), Ids(0, 6, (6,)))
def embedding_merged(p, i):
    return square(jnp.tanh(p["e"].reshape(6, 5)[i]))


@program("whole", dict(e=(2, 3, 5)), Ids(0, 6, (6,)))
def embedding_transposed_and_merged(p, i):
    return square(jnp.tanh(p["e"].swapaxes(0, 1).reshape(6, 5)[i]))


@program("look-up", dict(e=(3, 7, 4)), Ids(0, 7, (3,)))
def embedding_over_layers(p, i):
    step = lambda x, e: (jnp.tanh(x + e[i]), None)
    return square(lax.scan(step, jnp.zeros((3, 4)), p["e"])[0])


@program("product", dict(e=(7, 4)), Ids(0, 7, (5,)))
def one_hot(p, i):
    return square(jnp.tanh(jax.nn.one_hot(i, 7) @ p["e"]))


@program({"e": "look-up", "pos": "elementwise"}, dict(e=(7, 4), pos=(8, 4)), Ids(0, 7, (5,)))
def positions(p, i):
    return square(jnp.tanh(p["e"][i] + p["pos"][:5]))


@program("look-up", dict(pos=(8, 4)), dict(x=(5, 4), at=Ids(0, 4, ())))
def positions_from(p, e):
    return square(jnp.tanh(e["x"] + lax.dynamic_slice_in_dim(p["pos"], e["at"], 5)))


# --- turned round ---------------------------------------------------------------------------------


@program("product", dict(w=(4, 6)), (3, 4))
def flipped(p, x):
    return square(jnp.tanh(x @ jnp.flip(p["w"]))) + square(x @ p["w"][:, ::-1][:, 1:4])


@program("product", dict(w=(4, 6)), (3, 2))
def flipped_and_reshaped(p, x):
    heads = jnp.flip(p["w"], 1).reshape(4, 3, 2)
    return square(jnp.tanh(jnp.einsum("td,mhd->tmh", x, heads)))


@program("product", dict(w=(3, 4, 4)), (2, 4))
def flipped_layers(p, x):
    step = lambda h, w: (jnp.tanh(h @ w), None)
    return square(lax.scan(step, x, p["w"][::-1])[0])


@program("product", dict(w=(4, 3), v=(4, 2)), (5, 4))
def flipped_beside_another(p, x):
    return square(jnp.tanh(x @ jnp.concatenate([p["w"], p["v"]], 1)[:, ::-1]))


@program("elementwise", dict(b=(4,)), (3, 4))
def flipped_bias(p, x):
    return square(jnp.tanh(x + p["b"][::-1]))


# --- experts --------------------------------------------------------------------------------------


@program("product", dict(r=(4, 3), w=(3, 4, 5), v=(3, 5, 4)), (6, 4))
def experts(p, x):
    gate = jax.nn.softmax(x @ p["r"])
    dispatch = jax.nn.one_hot(gate.argmax(-1), 3)
    inside = jnp.einsum("te,td->etd", dispatch, x)
    y = jnp.einsum("etf,efd->etd", jnp.tanh(jnp.einsum("etd,edf->etf", inside, p["w"])), p["v"])
    return square(jnp.einsum("te,te,etd->td", gate, dispatch, y))


@program("whole", dict(w=(3, 4, 5)), dict(x=(6, 4), k=Ids(0, 3, (6,))))
def experts_looked_up(p, e):
    return square(jnp.tanh(jnp.einsum("td,tdf->tf", e["x"], p["w"][e["k"]])))


@program({"r": "product", "w": "ragged product"}, dict(r=(4, 3), w=(3, 4, 5)), (6, 4), False)
def ragged_experts(p, x):
    gate = jax.nn.softmax(x @ p["r"])
    best = gate.argmax(-1)
    order = jnp.argsort(best)
    y = lax.ragged_dot(x[order], p["w"], jnp.bincount(best, length=3).astype(jnp.int32))
    return square(jnp.tanh(y) * gate.max(-1)[order][:, None])


@program("ragged product", dict(w=(2, 3, 4, 4)), dict(x=(6, 4), n=Ids(0, 3, (3,))), False)
def ragged_in_scan(p, e):
    step = lambda x, w: (x + jnp.tanh(lax.ragged_dot(x, w, e["n"])), None)
    return square(lax.scan(step, e["x"], p["w"])[0])


@program("ragged product", dict(w=(3, 5, 4)), dict(x=(6, 4), n=Ids(0, 3, (3,))), False)
def ragged_transposed(p, e):
    return square(jnp.tanh(lax.ragged_dot(e["x"], p["w"].swapaxes(1, 2), e["n"])))


# --- adapters -------------------------------------------------------------------------------------


@program("product", dict(w=(4, 5), a=(4, 2), b=(2, 5)), (3, 4))
def adapter(p, x):
    return square(jnp.tanh(x @ p["w"] + (x @ p["a"]) @ p["b"]))


@program("whole", dict(w=(4, 5), a=(4, 2), b=(2, 5)), (3, 4))
def merged_adapter(p, x):
    return square(jnp.tanh(x @ (p["w"] + p["a"] @ p["b"])))


@program({"q": "whole", "w": "product"}, dict(q=(2, 4), w=(4, 5)), (3, 5))
def learned_queries(p, x):
    return square(jax.nn.softmax((p["q"] @ p["w"]) @ x.T) @ x)


@program("whole", dict(w=(4, 5)), (3, 4))
def orthogonal(p, x):
    return square(x @ p["w"]) + square(p["w"].T @ p["w"] - jnp.eye(5))


# --- mapped inside --------------------------------------------------------------------------------


@program({"w": "product", "b": "elementwise"}, dict(w=(4, 5), b=(5,)), (3, 4))
def vmap_over_places(p, x):
    return jax.vmap(lambda x: square(jnp.tanh(x @ p["w"] + p["b"])))(x).sum()


@program({"w": "product", "b": "elementwise"}, dict(w=(2, 4, 5), b=(2, 5)), (3, 4))
def vmap_over_heads(p, x):
    head = lambda p, x: jnp.tanh(x @ p["w"] + p["b"])
    return square(jax.vmap(head, in_axes=(0, None))(p, x))


@program({"w": "product"}, dict(w=(4, 2, 5)), (3, 2, 4))
def vmap_over_a_middle_axis(p, x):
    return square(jnp.tanh(jax.vmap(jnp.matmul, in_axes=(1, 1), out_axes=2)(x, p["w"])))


@program({"e": "look-up"}, dict(e=(7, 4)), Ids(0, 7, (5,)))
def vmap_of_look_up(p, i):
    return square(jnp.tanh(jax.vmap(lambda i: p["e"][i])(i)))


@program({"e": "look-up"}, dict(e=(2, 7, 4)), Ids(0, 7, (2, 5)))
def vmap_of_look_up_in_several(p, i):
    return square(jnp.tanh(jax.vmap(lambda e, i: e[i])(p["e"], i)))


@program({"k": "convolution"}, dict(k=(3, 3, 2, 4)), (3, 5, 5, 2))
def vmap_of_conv(p, x):
    conv = partial(lax.conv_general_dilated, dimension_numbers=IMAGE)
    return square(jax.vmap(lambda x: jnp.tanh(conv(x[None], p["k"], (1, 1), "SAME")))(x))


@program({"w": "product", "b": "elementwise"}, dict(w=(4, 5), b=(5,)), (3, 4))
def lax_map(p, x):
    return lax.map(lambda x: square(jnp.tanh(x @ p["w"] + p["b"])), x).sum()
