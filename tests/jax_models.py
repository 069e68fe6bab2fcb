"""Models as their packages have them: what each is built of was written by others.

`MODELS[name]()` gives the loss, its parameters, a batch, and how to capture it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax import lax

from jax_networks import score

B, T, V = 2, 5, 11
KEY = jax.random.key(0)
MODELS: dict[str, Callable[[], tuple[Callable, Any, Any, dict[str, Any]]]] = {}


def numbers(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), jnp.float32)


def tokens() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(1, V, (B, T)))


def filled(shapes: Any, positive: bool = False) -> Any:
    """Numbers for arrays of which only the shapes are known: to initialise them takes longer."""
    random = np.random.default_rng(0)

    def fill(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return KEY
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return np.zeros(x.shape, x.dtype)
        found = random.standard_normal(x.shape) / 3
        found += sum(n > 1 for n in x.shape) == 1  # scales, mostly
        return jnp.asarray(np.abs(found) + 0.5 if positive else found, x.dtype)

    return jax.tree.map(fill, shapes)


def next_token(logits: Any, tokens: Any) -> Any:
    found = jax.nn.log_softmax(logits)[:-1]
    return -jnp.take_along_axis(found, tokens[1:, None], 1).sum()


def model(make: Callable) -> Callable:
    MODELS[make.__name__] = make
    return make


# --- Haiku ---------------------------------------------------------------------------------------


def of_haiku(network: Callable, x: Any, batched: bool = True) -> Any:
    """Not in training: averages over batches are part of the state."""
    made = hk.transform_with_state(network)
    one = x if batched else x[0]
    params, state = jax.eval_shape(lambda: made.init(KEY, one, True))
    state = filled(state, positive=True)

    def loss(params: Any, x: Any) -> Any:
        y = made.apply(params, state, None, x, False)[0]
        return jax.vmap(score)(y).sum() if batched else score(y)

    return loss, filled(params), x, {"batched": batched}


@model
def haiku_resnet() -> Any:
    sizes = dict(channels_per_group=(16,) * 4, num_classes=3, resnet_v2=True)
    network = lambda x, training: hk.nets.ResNet([1, 1, 1, 1], **sizes)(x, training)
    return of_haiku(network, numbers(B, 16, 16, 3))


@model
def haiku_mobilenet() -> Any:
    network = lambda x, training: hk.nets.MobileNetV1((1, 2), (8, 8), num_classes=3)(x, training)
    return of_haiku(network, numbers(B, 8, 8, 3))


@model
def haiku_lstm() -> Any:
    def network(x: Any, training: bool) -> Any:
        cell = hk.DeepRNN([hk.LSTM(4), hk.GRU(3)])
        return hk.dynamic_unroll(cell, x, cell.initial_state(None))[0]

    return of_haiku(network, numbers(B, T, 6), batched=False)


@model
def haiku_language_model() -> Any:
    """The transformer that Haiku's own package has as an example."""
    files = importlib.metadata.files("dm-haiku") or []
    [path] = [f.locate() for f in files if str(f) == "examples/transformer/model.py"]
    spec = importlib.util.spec_from_file_location("haiku_transformer", str(path))
    assert spec is not None
    assert spec.loader is not None
    theirs = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)

    def network(tokens: Any) -> Any:
        inner = theirs.Transformer(num_heads=2, num_layers=2, attn_size=4, dropout_rate=0.0)
        return theirs.LanguageModel(inner, model_size=8, vocab_size=V, pad_token=0)(tokens)

    made, x = hk.transform(network), tokens()
    loss = lambda p, x: jax.vmap(next_token)(made.apply(p, KEY, x), x).sum()
    return loss, filled(jax.eval_shape(made.init, KEY, x)), x, {"batched": True}


# --- Equinox -------------------------------------------------------------------------------------


def of_equinox(make: Callable, x: Any, call: Callable = lambda model, x: model(x)) -> Any:
    return lambda model, x: score(call(model, x)), filled(eqx.filter_eval_shape(make)), x, {}


@model
def equinox_mlp() -> Any:
    """Called twice, so that each layer is used by two calls."""
    return of_equinox(lambda: eqx.nn.MLP(6, 6, 5, 2, key=KEY), numbers(B, 6), lambda m, x: m(m(x)))


@model
def equinox_attention() -> Any:
    attention = lambda: eqx.nn.MultiheadAttention(2, 6, use_query_bias=True, key=KEY)
    return of_equinox(attention, numbers(B, T, 6), lambda m, x: m(x, x, x))


@model
def equinox_convolutions() -> Any:
    layers = lambda: [
        eqx.nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2, key=KEY),
        eqx.nn.GroupNorm(2, 6),
        eqx.nn.Lambda(jax.nn.gelu),
        eqx.nn.ConvTranspose2d(6, 3, 3, stride=2, key=KEY),
    ]
    return of_equinox(lambda: eqx.nn.Sequential(layers()), numbers(B, 4, 6, 6))


@model
def equinox_recurrent() -> Any:
    def call(cells: Any, x: Any) -> Any:
        first, second = cells
        h = lax.scan(lambda h, x: (first(x, h),) * 2, jnp.zeros(4), x)[1]
        start = jnp.zeros(3), jnp.zeros(3)
        return lax.scan(lambda s, x: (second(x, s),) * 2, start, h)[1][0]

    cells = lambda: (eqx.nn.GRUCell(6, 4, key=KEY), eqx.nn.LSTMCell(4, 3, key=KEY))
    return of_equinox(cells, numbers(B, T, 6), call)


@model
def equinox_layers_in_a_scan() -> Any:
    """Layers made by `filter_vmap`, their arrays scanned over."""

    def call(layers: Any, x: Any) -> Any:
        arrays, rest = eqx.partition(layers, eqx.is_array)
        return lax.scan(lambda h, own: (h + eqx.combine(own, rest)(h), None), x, arrays)[0]

    make = eqx.filter_vmap(lambda key: eqx.nn.MLP(6, 6, 8, 1, key=key))
    return of_equinox(lambda: make(jax.random.split(KEY, 3)), numbers(B, 6), call)


@model
def equinox_bounded_loop() -> Any:
    """As long as something holds, but not for ever."""

    def call(layer: Any, x: Any) -> Any:
        more = lambda state: (state[0] < 6) & (jnp.abs(state[1]).max() > 0.4)
        step = lambda state: (state[0] + 1, jnp.tanh(layer(state[1])))
        return eqx.internal.while_loop(more, step, (0, x), max_steps=8, kind="bounded")[1]

    return of_equinox(lambda: eqx.nn.Linear(6, 6, key=KEY), numbers(B, 6), call)


# --- Flax NNX ------------------------------------------------------------------------------------


def of_nnx(
    make: Callable, x: Any, loss: Callable = lambda model, x: score(model(x)), kind: Any = nnx.Param
) -> Any:
    graph, params, rest = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))), kind, ...)
    rest = filled(rest, positive=True)
    merged = lambda params: nnx.merge(graph, params, rest, copy=True)
    return lambda params, x: loss(merged(params), x), filled(params), x, {}


class Block(nnx.Module):
    """A layer of GPT-2."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(2, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(self.norms[0](x), mask=nnx.make_causal_mask(x[:, 0]))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Language(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.words = nnx.Embed(V, width, rngs=rngs)
        self.places = nnx.Embed(T, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.words(tokens) + self.places(jnp.arange(len(tokens)))
        for block in self.blocks:
            x = nnx.remat(Block.__call__)(block, x)
        return self.words.attend(self.norm(x))


@model
def nnx_language_model() -> Any:
    loss = lambda model, x: next_token(model(x), x)
    return of_nnx(lambda rngs: Language(8, rngs), tokens(), loss)


@model
def tunix_gemma() -> Any:
    """Gemma 2, of Google's library for post-training.

    Of the package only the file of the model is loaded, and what it needs: all of it would pull in
    two dozen others, for training with a cluster.
    """
    spec = importlib.util.find_spec("tunix")
    assert spec is not None, "pip install --no-deps google-tunix, as the Makefile does"
    sys.modules["tunix"] = importlib.util.module_from_spec(spec)  # not run
    from tunix.models.gemma import model as theirs

    kinds = theirs.AttentionType.LOCAL_SLIDING, theirs.AttentionType.GLOBAL
    config = theirs.ModelConfig(
        num_layers=2,
        num_embed=V,
        embed_dim=8,
        hidden_dim=12,
        num_heads=4,
        head_dim=4,
        num_kv_heads=2,
        final_logit_softcap=30.0,
        attn_logits_soft_cap=50.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=kinds,
        sliding_window_size=3,
        remat_config=theirs.RematConfig.BLOCK,
    )

    def loss(model: Any, x: Any) -> Any:
        mask = jnp.tril(jnp.ones((1, T, T), bool))
        return next_token(model(x[None], jnp.arange(T)[None], None, mask)[0][0], x)

    return of_nnx(lambda rngs: theirs.Gemma(config, rngs=rngs), tokens(), loss)


@model
def nnx_layers_in_a_scan() -> Any:
    make = nnx.vmap(lambda key: nnx.Linear(6, 6, rngs=nnx.Rngs(key)))
    each = lambda h, layer: h + jnp.tanh(layer(h))
    call = nnx.scan(each, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    layers = lambda _: make(jax.random.split(KEY, 3))
    return of_nnx(layers, numbers(B, T, 6), lambda model, x: score(call(x, model)))


@model
def nnx_convolutions() -> Any:
    layers = lambda rngs: [
        nnx.Conv(4, 6, (3, 3), feature_group_count=2, padding="CIRCULAR", rngs=rngs),
        nnx.BatchNorm(6, use_running_average=True, rngs=rngs),
        nnx.relu,
        nnx.ConvTranspose(6, 3, (3, 3), strides=2, rngs=rngs),
    ]
    return of_nnx(lambda rngs: nnx.Sequential(*layers(rngs)), numbers(B, 5, 5, 4))


@model
def nnx_recurrent() -> Any:
    return of_nnx(lambda rngs: nnx.RNN(nnx.OptimizedLSTMCell(6, 4, rngs=rngs)), numbers(B, 3, T, 6))


@model
def nnx_adapters() -> Any:
    """The matrices of LoRA alone; the layer under them is frozen."""
    make = lambda rngs: nnx.LoRALinear(6, 4, lora_rank=2, rngs=rngs)
    return of_nnx(make, numbers(B, T, 6), kind=nnx.LoRAParam)


# --- Flax Linen ----------------------------------------------------------------------------------


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x: Any, _: None) -> Any:
        x = x + linen.MultiHeadDotProductAttention(2, normalize_qk=True)(linen.LayerNorm()(x))
        h = linen.relu(linen.Dense(8)(linen.RMSNorm()(x)))
        return x + linen.DenseGeneral(8)(h), None


class LinenStack(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        axes = dict(variable_axes={"params": 0}, split_rngs={"params": True})
        return linen.scan(linen.remat(LinenBlock), **axes, length=3)()(x, None)[0]


def of_linen(model: Any, x: Any) -> Any:
    params = jax.eval_shape(model.init, KEY, x[0])["params"]
    return lambda p, x: score(model.apply({"params": p}, x)), filled(params), x, {}


@model
def linen_layers_in_a_scan() -> Any:
    return of_linen(LinenStack(), numbers(B, T, 8))


# --- Penzai --------------------------------------------------------------------------------------


def of_penzai(**how: Any) -> Any:
    """A transformer in the shape of Gemma."""
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common as variants

    config = variants.LlamalikeTransformerConfig(
        num_kv_heads=1,
        query_head_multiplier=2,
        embedding_dim=8,
        projection_dim=4,
        mlp_hidden_dim=12,
        num_decoder_blocks=2,
        vocab_size=V,
        mlp_variant="geglu_approx",
        rope_wavelength=10_000.0,
        tie_embedder_and_logits=True,
        attention_type=variants.AttentionTypeGlobalCausal(),
        rms_norm_eps=1e-6,
        parameter_dtype=jnp.float32,
        activation_dtype=jnp.float32,
        **how,
    )
    whole = variants.build_llamalike_transformer(config, init_base_rng=KEY)
    unbound, found = pz.unbind_params(whole, freeze=True)
    # By their own names: as a tuple they would have numbers.
    params = {str(p.label): p for p in found}

    def loss(params: Any, tokens: Any) -> Any:
        model = pz.bind_variables(unbound, params.values())
        named = pz.nx.wrap(tokens).tag("seq")
        logits = model(named, token_positions=pz.nx.arange("seq", len(tokens)))
        return next_token(logits.unwrap("seq", "vocabulary"), tokens)

    return loss, params, tokens(), {}


@model
def penzai_gemma() -> Any:
    return of_penzai(use_layer_stack=False)


@model
def penzai_gemma_in_a_scan() -> Any:
    return of_penzai(use_layer_stack=True)
