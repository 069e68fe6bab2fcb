"""Losses whose functions have derivatives of their own, with parameters among their arguments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_programs import Ids, program, square


@jax.custom_vjp
def _own_product(x, w):
    return x @ w


_own_product.defvjp(lambda x, w: (x @ w, (x, w)), lambda k, g: (g @ k[1].T, 2 * k[0].T @ g))


@program("product", dict(w=(4, 3)), (5, 4))
def own_product(p, x):
    return square(_own_product(x, p["w"]))


@program("product", dict(w=(3, 4, 4)), (5, 4))
def own_product_over_layers(p, x):
    step = lambda x, w: (jnp.tanh(_own_product(x, w.T)), None)
    return square(lax.scan(jax.checkpoint(step), x, p["w"])[0])


@program("product", dict(w=(4, 6)), (5, 4))
def own_product_of_a_part(p, x):
    return square(_own_product(jnp.tanh(x @ p["w"])[:, :4], 2 * p["w"][:, 2:5]))


@program("product", dict(w=(4, 3)), (5, 4))
def own_product_for_each_place(p, x):
    return square(jnp.tanh(jax.vmap(lambda x: _own_product(x[None], p["w"]))(x)))


@jax.custom_jvp
def _own_layer(w, b, x):
    return jnp.tanh(x @ w + b)


@_own_layer.defjvp
def _own_layer_jvp(primals, tangents):
    (w, b, x), (dw, db, dx) = primals, tangents
    y = _own_layer(w, b, x)
    return y, (1 - y**2) * (dx @ w + x @ dw + 0.5 * db)


@program({"w": "product", "b": "elementwise"}, dict(w=(4, 3), b=(3,)), (5, 4))
def own_layer(p, x):
    return square(_own_layer(p["w"], p["b"], x))


def _two_layers(x, w, v):
    y = jnp.tanh(jnp.einsum("td,hdk->thk", x, w))
    return jnp.argmax(y), y, jnp.einsum("thk,hkd->td", y, v)


@jax.custom_vjp
def _fused_layers(x, w, v, number):
    return _two_layers(x, w, v)


_fused_layers.defvjp(
    lambda x, w, v, number: (_two_layers(x, w, v), (x, w, v)),
    lambda kept, g: (*jax.vjp(_two_layers, *kept)[1](g), None),
)


@program("product", dict(w=(2, 4, 3), v=(2, 3, 4)), dict(x=(5, 4), i=Ids(0, 9, ())))
def fused_layers_with_several_results(p, e):
    best, y, z = _fused_layers(e["x"], p["w"], p["v"], e["i"])
    return best + square(y) + square(jnp.tanh(z))


@jax.custom_gradient
def _rounded_weights(x, w):
    ternary = jnp.sign(w)
    return x @ ternary, lambda g: (g @ ternary.T, x.T @ g)


@program("product", dict(w=(4, 3)), (5, 4))
def straight_through(p, x):
    return square(_rounded_weights(x, p["w"]))


def _reversible(w, v, x, y):
    y = y + jnp.tanh(x @ w)
    return x + jnp.tanh(y @ v), y


@jax.custom_vjp
def _reversible_block(w, v, x, y):
    return _reversible(w, v, x, y)


def _reversible_backward(kept, g):
    w, v, x, y = kept
    x = x - jnp.tanh(y @ v)
    y = y - jnp.tanh(x @ w)
    return jax.vjp(_reversible, w, v, x, y)[1](g)


_reversible_block.defvjp(
    lambda w, v, x, y: (_reversible(w, v, x, y), (w, v, *_reversible(w, v, x, y))),
    _reversible_backward,
)


@program("product", dict(w=(3, 4, 4), v=(3, 4, 4)), (5, 4))
def reversible_network(p, x):
    step = lambda h, ws: (_reversible_block(*ws, *h), None)
    return sum(map(square, lax.scan(step, (x, x), (p["w"], p["v"]))[0]))


@jax.custom_vjp
def _gradient_is_no_product(x, w):
    return x @ w


_gradient_is_no_product.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda k, g: (g @ k[1].T, jnp.sign(k[0].T @ g))
)


@program("whole", dict(w=(4, 3)), (5, 4))
def own_product_with_the_sign_of_a_gradient(p, x):
    return square(_gradient_is_no_product(x, p["w"]))


def _own(forward, backward, **how):
    """A function by its value, and its gradients."""
    fun = jax.custom_vjp(forward)
    kept = (lambda *args: args) if not how else (lambda *args: tuple(a.value for a in args))
    fun.defvjp(lambda *args: (forward(*kept(*args)), kept(*args)), backward, **how)
    return fun


_mlp = lambda x, w, v: jnp.tanh(x @ w) @ v
_own_mlp = _own(_mlp, lambda k, g: jax.vjp(_mlp, *k)[1](g))


@program("product", dict(w=(4, 2), u=(4, 1), v=(3, 4)), (5, 4))
def own_layers_of_scaled_matrices(p, x):
    return square(_own_mlp(x, jnp.concatenate([-p["w"], 3 * p["u"]], 1), p["v"] * 0.5))


FIXED = jnp.arange(20.0).reshape(5, 4)
_fixed_product = _own(
    lambda x, w: (x * FIXED) @ w,
    lambda k, g: (g @ k[1].T * FIXED, (k[0] * FIXED).T @ g),
)


@program("product", dict(w=(4, 3)), (5, 4))
def own_product_with_a_constant(p, x):
    return square(jnp.tanh(_fixed_product(x, p["w"])))


_rounded_product = _own(
    lambda x, w: x @ w,
    lambda k, g: (g @ k[1].T, (k[0].T @ g).astype(jnp.float8_e4m3fn).astype(jnp.float32)),
)


@program("whole", dict(w=(4, 3)), (5, 4))
def own_product_that_is_rounded(p, x):
    return square(_rounded_product(x, p["w"]))


_split_product = _own(
    lambda x, w, v: x @ jnp.concatenate([w, v], 1),
    lambda k, g: (g @ jnp.concatenate(k[1:], 1).T, *jnp.split(k[0].T @ g, [3], 1)),
)


@program("whole", dict(w=(4, 3), v=(4, 2)), (5, 4))
def own_product_whose_gradient_is_split(p, x):
    return square(_split_product(x, p["w"], p["v"]))


_own_with_temperature = _own(
    lambda x, w, t: x @ w * t,
    lambda k, g: (g @ k[1].T * k[2], k[0].T @ (g * k[2]), jnp.zeros(())),
)


@program({"w": "product", "t": "elementwise"}, dict(w=(4, 3), t=()), (5, 4))
def own_product_with_a_parameter_of_no_gradient(p, x):
    return square(_own_with_temperature(x, p["w"], p["t"])) + p["t"] ** 2


_of_perturbed = jax.custom_vjp(lambda w, x: x @ w)
_of_perturbed.defvjp(
    lambda w, x: (x.value @ w.value, (w.value, x.value, 1.0 if x.perturbed else None)),
    lambda k, g: (k[1].T @ g * (1.0 if k[2] is None else 2.0), g @ k[0].T),
    symbolic_zeros=True,
)


@program("whole", dict(w=(4, 3)), (5, 4))
def own_product_that_asks_what_has_a_gradient(p, x):
    return square(_of_perturbed(p["w"], x))


@jax.custom_jvp
def _own_loop(w, x):
    return x @ w


@_own_loop.defjvp
def _own_loop_jvp(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    half = lax.while_loop(lambda s: s[0] < 1, lambda s: (s[0] + 1, s[1] * 0.5), (0, dx))[1]
    return x @ w, x @ dw + half @ w


@program("whole", dict(w=(4, 3)), (5, 4))
def own_product_with_an_open_loop_for_the_data(p, x):
    return square(_own_loop(p["w"], x))


def _scaled_by(c):
    """A function whose derivative closes over a value that the loss has computed."""
    return _own(lambda y: y * c, lambda k, g: (g * c,))


@program({"w": "whole", "b": "elementwise"}, dict(w=(4, 3), b=(3,)), (5, 4))
def own_function_that_closes_over_the_data(p, x):
    c = jnp.sin(x.sum())
    return square(_scaled_by(c)(jnp.tanh(x @ p["w"]) + p["b"]))


@program("whole", dict(w=(2, 4, 4)), (5, 4))
def own_function_over_layers_that_closes_over_a_constant(p, x):
    c = jnp.arange(4.0)

    @jax.custom_jvp
    def scaled(y):
        return y * c

    scaled.defjvp(lambda primals, tangents: (primals[0] * c, tangents[0] * c))
    return square(lax.scan(lambda x, w: (scaled(jnp.tanh(x @ w)), None), x, p["w"])[0])
