"""The same networks in every library of JAX and in PyTorch: the same rows, the same statistics."""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax import lax

import jax_models as models
import jax_networks as networks
import logix
import logix.jax
from logix._compress import gradients
from logix.jax._names import watched

B, T, D, H, V = 4, 6, 8, 2, 13
FACTORS = ("left", "right", "eigen", "raw")


def batch_for(kind):
    return np.random.default_rng(0).standard_normal((B, *networks.INPUTS[kind])).astype("f")


def called(path):
    """The name that PyTorch's front end has for it: a weight has the name of its layer."""
    layer, word = path.split("/")
    return f"{layer}.bias" if word in ("bias", "b", "offset") else layer


def rows(loss, params, batch, names=None, **how):
    """{layer: (examples, …)}, of records."""
    capture = logix.jax.capture(loss, params, strict=True, names=names, **how)
    return jax.jit(lambda batch: gradients(capture(params, batch)))(batch)


def assert_same(found, want, tolerance=1e-5):
    assert set(found) == set(want)
    for name, x in want.items():
        x, got = np.asarray(x), np.asarray(found[name])
        assert got.size == x.size, name
        near = tolerance * max(1e-2, np.abs(x).max())
        assert np.abs(got.reshape(x.shape) - x).max() <= near, name


def assert_same_statistics(found, want, tolerance=1e-4):
    assert set(found) == set(want)
    for layer, stats in want.items():
        own = [name for name in FACTORS if name in stats]
        assert own
        pick = lambda stats, own=own: {name: stats[name] for name in own}
        assert_same(pick(found[layer]), pick(stats), tolerance)


def jax_run(tmp_path, loss, params, batch, statistic, **how):
    run = logix.LogIX("jax", config={"root_dir": str(tmp_path)})
    run.setup({"log": "grad", "save": "grad", "statistic": statistic})
    run.watch(loss, params, strict=True, **how)
    run.extract([batch], ids=range(B))
    run.finalize()
    return run


def torch_run(tmp_path, model, batch, loss, statistic, mask=None):
    run = logix.LogIX("torch", config={"root_dir": str(tmp_path)})
    run.setup({"log": "grad", "save": "grad", "statistic": statistic})
    run.watch(model)
    for _ in range(2 if statistic == "ekfac" else 1):
        with run(data_id=list(range(B)), mask=mask):
            loss(model, batch).backward()
        run.finalize()
    return run


def shown(run):
    """{layer: rows}, of the last batch."""
    return {name: own["grad"].detach().numpy() for name, own in run.get_log()[1].items()}


# --- the same network in all libraries -----------------------------------------------------------


@pytest.mark.parametrize("kind", networks.SHAPES)
@pytest.mark.parametrize("library", [k for k in networks.LIBRARIES if k != "plain"])
def test_all_libraries_give_the_same_rows(library, kind):
    weights, x = networks.weights_of(kind), batch_for(kind)
    want = rows(*networks.plain(kind, weights), x, called)
    assert set(want) == {name.removesuffix(".weight") for name in weights}
    assert_same(rows(*networks.LIBRARIES[library](kind, weights), x, called), want)


@pytest.mark.parametrize("library", networks.LIBRARIES)
def test_parameters_are_named_by_their_paths(library):
    loss, params = networks.LIBRARIES[library]("mlp", networks.weights_of("mlp"))
    words = {"haiku": ("w", "b", "scale", "offset"), "equinox": ("weight", "bias") * 2}
    kernel, bias, scale, offset = words.get(library.split()[0], ("kernel", "bias", "scale", "bias"))
    want = {f"{layer}/{word}" for layer in ("first", "last") for word in (kernel, bias)}
    found = logix.jax.capture(loss, params).coverage(params, batch_for("mlp"))
    assert {taken.path for taken in found.taken} == want | {f"norm/{scale}", f"norm/{offset}"}


def test_a_box_around_an_array_is_not_part_of_its_name():
    ones = linen.initializers.ones
    layer = linen.Dense(2, kernel_init=linen.with_partitioning(ones, (None, "model")))
    boxed = jax.eval_shape(layer.init, jax.random.key(0), jnp.ones(3))["params"]
    assert watched(boxed).paths == ("bias", "kernel")
    array = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert watched({"attention": Named(array, array)}).paths == (
        "attention/query",
        "attention/value",
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Named:
    """Has a `value` that is one of several."""

    query: Any
    value: Any


def test_a_scale_by_einsum_is_one_layer():
    params = {"scale": jnp.arange(1.0, 7.0), "kernel": jnp.ones((6, 3)) / 3}
    loss = lambda p, x: networks.score(jnp.einsum("td,d->td", x, p["scale"]) @ p["kernel"])
    plain = lambda p, x: networks.score((x * p["scale"]) @ p["kernel"])
    x = np.random.default_rng(0).standard_normal((B, T, 6)).astype("f")
    assert_same(rows(loss, params, x), rows(plain, params, x))


def torch_network(kind):
    torch = pytest.importorskip("torch")
    nn = torch.nn

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            shape = networks.SHAPES[kind]["first"]
            linear = kind == "mlp"
            self.first = nn.Linear(6, 5) if linear else nn.Conv2d(2, 4, 3, 2)
            self.norm, self.last = nn.LayerNorm(shape[0]), nn.Linear(shape[0], 3)

        def forward(self, x):
            if x.ndim == 4:  # JAX's "SAME" for these sizes and a stride of 2
                x = nn.functional.pad(x.permute(0, 3, 1, 2), (0, 1, 1, 1))
            h = self.first(x)
            h = h.flatten(2).mT if h.ndim == 4 else h[:, None]
            return self.last(torch.tanh(self.norm(h)).mean(1))

    model = Network()
    weights = {k: torch.tensor(w) for k, w in networks.weights_of(kind).items()}
    model.load_state_dict(weights)
    return model


def torch_score(model, x):
    """`networks.score`, of all examples."""
    y = model(x)
    return (y.sin() * y.new_ones(y[0].numel()).cumsum(0).view_as(y[0])).sum()


@pytest.mark.parametrize("kind", networks.SHAPES)
def test_rows_and_factors_are_those_of_pytorch(kind, tmp_path):
    torch = pytest.importorskip("torch")
    x = batch_for(kind)
    theirs = torch_run(tmp_path, torch_network(kind), torch.tensor(x), torch_score, "ekfac")
    loss, params = networks.nnx_split(kind, networks.weights_of(kind))
    ours = jax_run(tmp_path, loss, params, x, "ekfac", names=called)
    ids, found = ours.log(x, ids=range(B))
    assert ids == list(range(B))
    assert_same({name: own["grad"] for name, own in found.items()}, shown(theirs))
    assert_same_statistics(ours.averages(), theirs.averages())
    mine, other = (run.store() for run in (ours, theirs))
    assert sorted(mine.ids) == sorted(other.ids)


@pytest.mark.parametrize("writer", ["jax", "torch"])
def test_a_store_of_one_framework_is_scored_by_the_other(writer, tmp_path):
    torch = pytest.importorskip("torch")
    kind = "convolutions"
    x, model = batch_for(kind), torch_network(kind)
    loss, params = networks.equinox(kind, networks.weights_of(kind))

    def by_torch(run):
        run.watch(model)
        run.eval()
        with run(data_id=list(range(B))):
            torch_score(model, torch.tensor(x)).backward()
        return run.influence.compute_influence_all(run.get_log())

    def by_jax(run):
        run.watch(loss, params, names=called)
        return run.influence.compute_influence_all(run.log(x, ids=range(B)))

    if writer == "torch":
        torch_run(tmp_path, model, torch.tensor(x), torch_score, "kfac").close()
    else:
        jax_run(tmp_path, loss, params, x, "kfac", names=called).close()
    found = []
    for score in (by_torch, by_jax):
        run = logix.LogIX(writer, config={"root_dir": str(tmp_path)}, resume=True)
        run.initialize_from_log()
        found.append(np.asarray(score(run).influence))
        run.close()
    assert np.abs(found[0]).max() > 0.1
    assert_same({"scores": found[1]}, {"scores": found[0]}, 1e-4)


# --- a language model of several layers ----------------------------------------------------------

LAYERS = 2


def language_model(torch):
    """GPT-2 of transformers, tied embeddings and all; and its weights, those of layers stacked."""
    tf = pytest.importorskip("transformers")
    sizes = dict(n_embd=D, n_layer=LAYERS, n_head=H, vocab_size=V, n_positions=T)
    torch.manual_seed(0)
    model = tf.GPT2LMHeadModel(tf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=1)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    own = {k: p.detach().numpy() for k, p in model.transformer.named_parameters()}
    names = sorted(k.removeprefix("h.0.") for k in own if k.startswith("h.0."))
    stacked = {k: np.stack([own[f"h.{i}.{k}"] for i in range(LAYERS)]) for k in names}
    stacked["attn.c_attn.weight"] = stacked["attn.c_attn.weight"].reshape(LAYERS, D, 3, H, D // H)
    stacked["attn.c_attn.bias"] = stacked["attn.c_attn.bias"].reshape(LAYERS, 3, H, D // H)
    stacked["attn.c_proj.weight"] = stacked["attn.c_proj.weight"].reshape(LAYERS, H, D // H, D)
    rest = {k: w for k, w in own.items() if not k.startswith("h.")}
    return model, jax.tree.map(jnp.asarray, {"h": stacked, **rest})


def normal(x, scale, shift):
    x = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * scale + shift


def block(x, w):
    """One layer, with an axis for the heads."""
    h = normal(x, w["ln_1.weight"], w["ln_1.bias"])
    q, k, v = jnp.einsum("td,dchk->chtk", h, w["attn.c_attn.weight"]) + jnp.expand_dims(
        w["attn.c_attn.bias"], 2
    )
    seen = jnp.tril(jnp.ones((T, T), bool))
    a = jnp.einsum("htk,hsk->hts", q, k) / np.sqrt(D // H)
    a = jax.nn.softmax(jnp.where(seen, a, -jnp.inf))
    y = jnp.einsum("hts,hsk->thk", a, v)
    x = x + jnp.einsum("thk,hkd->td", y, w["attn.c_proj.weight"]) + w["attn.c_proj.bias"]
    h = normal(x, w["ln_2.weight"], w["ln_2.bias"])
    h = jax.nn.gelu(h @ w["mlp.c_fc.weight"] + w["mlp.c_fc.bias"])
    return x + h @ w["mlp.c_proj.weight"] + w["mlp.c_proj.bias"], None


def language_loss(p, tokens):
    x = p["wte.weight"][tokens] + p["wpe.weight"][jnp.arange(T)]
    x, _ = lax.scan(jax.checkpoint(block), x, p["h"])
    logits = normal(x, p["ln_f.weight"], p["ln_f.bias"]) @ p["wte.weight"].T
    found = jax.nn.log_softmax(logits)[:-1]
    return -jnp.take_along_axis(found, tokens[1:, None], 1).sum()


def as_in_torch(name):
    """`h/ln_1.weight[2]`, a layer of several, as `transformer.h.2.ln_1`."""
    path, _, layer = name.rstrip("]").partition("[")
    path = path.removeprefix("h/").removesuffix(".weight")
    return f"transformer.h.{layer}.{path}" if layer else f"transformer.{path}"


def turned(layer, stats):
    """GPT-2's own matrices are (in, out), and so are their rows; those of JAX are (out, in).

    The average over positions is one of the right side: of outputs here, of inputs there.
    """
    if ".c_" not in layer or "left" not in stats:
        return stats
    return {"left": stats["right"] * T, "right": stats["left"] / T, "eigen": stats["eigen"].T}


def test_layers_in_a_scan_are_those_of_pytorch(tmp_path):
    torch = pytest.importorskip("torch")
    model, params = language_model(torch)
    tokens = np.random.default_rng(0).integers(0, V, (B, T))

    def loss(model, tokens):
        logits = model(input_ids=tokens).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.mT, tokens[:, 1:], reduction="sum")

    theirs = torch_run(tmp_path, model, torch.tensor(tokens), loss, "ekfac")
    turn = lambda name, x: x.swapaxes(-1, -2) if ".c_" in name and x.ndim > 2 else x
    want = {name: turn(name, x) for name, x in shown(theirs).items()}
    ours = jax_run(tmp_path, language_loss, params, tokens, "ekfac")
    found = ours.log(tokens, ids=range(B))[1]
    assert_same({as_in_torch(name): own["grad"] for name, own in found.items()}, want)
    averages = {as_in_torch(layer): stats for layer, stats in ours.averages().items()}
    want = {layer: turned(layer, stats) for layer, stats in theirs.averages().items()}
    assert_same_statistics(averages, want)


# --- a mixture of experts ------------------------------------------------------------------------

EXPERTS, WIDE = 4, 5


def mixture(torch):
    """Mixtral's, of transformers."""
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    sizes = dict(hidden_size=D, intermediate_size=WIDE, num_local_experts=EXPERTS)
    config = modeling.MixtralConfig(**sizes, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = modeling.MixtralSparseMoeBlock(config).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return model, {k: jnp.asarray(p.detach().numpy()) for k, p in model.named_parameters()}


def routed(p, x):
    found = jax.nn.softmax(x @ p["gate.weight"].T)
    weight, expert = lax.top_k(found, 2)
    return weight / weight.sum(-1, keepdims=True), expert


def gated(h):
    gate, up = jnp.split(h, 2, -1)
    return jax.nn.silu(gate) * up


def sorted_by_expert(p, x):
    """Rows of all experts one after another, and `lax.ragged_dot`."""
    weight, expert = routed(p, x)
    order = jnp.argsort(expert.reshape(-1))
    sizes = jnp.bincount(expert.reshape(-1), length=EXPERTS)
    h = lax.ragged_dot(x[order // 2], p["experts.gate_up_proj"].swapaxes(1, 2), sizes)
    y = lax.ragged_dot(gated(h), p["experts.down_proj"].swapaxes(1, 2), sizes)
    y = jnp.zeros_like(x).at[order // 2].add(y * weight.reshape(-1)[order, None])
    return networks.score(y)


def sent_to_experts(p, x):
    """A place for every token at every expert, and `einsum`."""
    weight, expert = routed(p, x)
    sent = jax.nn.one_hot(expert, EXPERTS)
    h = jnp.einsum("tke,td->etd", sent, x)
    h = gated(jnp.einsum("etd,efd->etf", h, p["experts.gate_up_proj"]))
    y = jnp.einsum("etf,edf->etd", h, p["experts.down_proj"])
    return networks.score(jnp.einsum("etd,tk,tke->td", y, weight, sent))


@pytest.mark.parametrize("loss", [sorted_by_expert, sent_to_experts])
def test_experts_are_those_of_pytorch(loss, tmp_path):
    torch = pytest.importorskip("torch")
    model, params = mixture(torch)
    x = np.random.default_rng(0).standard_normal((B, T, D)).astype("f")
    theirs = torch_run(tmp_path, model, torch.tensor(x), torch_score, "ekfac", torch.ones(B, T))
    ours = jax_run(tmp_path, loss, params, x, "ekfac")
    name = lambda layer: layer.removesuffix(".weight").replace("[", ".").rstrip("]")
    found = ours.log(x, ids=range(B))[1]
    assert_same({name(layer): own["grad"] for layer, own in found.items()}, shown(theirs))
    experts = lambda run: {name(k): s for k, s in run.averages().items() if "experts" in k}
    assert len(experts(ours)) == 2 * EXPERTS
    assert_same_statistics(experts(ours), experts(theirs))


# --- models of others ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what their packages call
@pytest.mark.parametrize("name", models.MODELS)
def test_every_parameter_of_a_model(name):
    loss, params, batch, how = models.MODELS[name]()
    capture = logix.jax.capture(loss, params, strict=True, **how)
    arrays, rest = eqx.partition(params, eqx.is_array)
    single = lambda x: x[None] if how.get("batched") else x
    own = lambda arrays, x: loss(eqx.combine(arrays, rest), single(x))
    want = jax.jit(jax.vmap(jax.grad(own), in_axes=(None, 0)))(arrays, batch)
    found = jax.jit(lambda x: eqx.filter(capture.gradients(params, x), eqx.is_array))(batch)
    flat = lambda tree: {str(k): x for k, x in jax.tree_util.tree_flatten_with_path(tree)[0]}
    assert np.mean([np.abs(x).max() > 1e-3 for x in flat(want).values()]) > 0.8
    assert_same(flat(found), flat(want), 3e-5)
