"""Whole models of transformers and PEFT: every trained parameter, against a loop over examples."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
tf = pytest.importorskip("transformers")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from logix.torch import _recompute  # noqa: E402
from logix.torch._coverage import coverage  # noqa: E402
from logix.torch._units import units  # noqa: E402
from torch_oracle import assert_same, assert_untouched, captured, looped  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
B, T, V = 3, 6, 31
SIZE = dict(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=V)
WIDE = dict(**SIZE, intermediate_size=12)
GROUPED = dict(**WIDE, num_key_value_heads=1)
EXPERTS = dict(num_experts_per_tok=2, num_key_value_heads=1)
TOKENS = dict(bos_token_id=0, eos_token_id=1, pad_token_id=2)
T5 = dict(d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2, vocab_size=V)
BART = dict(d_model=8, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=12, vocab_size=V)
BART |= dict(decoder_ffn_dim=12, encoder_attention_heads=2, decoder_attention_heads=2)
VIT = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12)
OPT = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=V, ffn_dim=12)
GPT2 = dict(n_embd=8, n_layer=2, n_head=2, vocab_size=V, n_positions=9)

MODELS = {
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2, **TOKENS)),
    "neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**WIDE, **TOKENS)),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED)),
    "gemma": lambda: tf.GemmaForCausalLM(tf.GemmaConfig(**GROUPED, head_dim=4)),
    "opt": lambda: tf.OPTForCausalLM(tf.OPTConfig(**OPT, **TOKENS, word_embed_proj_dim=8)),
    "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**WIDE, max_position_embeddings=9)),
    "t5": lambda: tf.T5ForConditionalGeneration(tf.T5Config(**T5, decoder_start_token_id=0)),
    "bart": lambda: tf.BartForConditionalGeneration(tf.BartConfig(**BART, **TOKENS)),
    "vit": lambda: tf.ViTForImageClassification(tf.ViTConfig(**VIT, image_size=8, patch_size=4)),
    "mixtral": lambda: tf.MixtralForCausalLM(
        tf.MixtralConfig(**WIDE, **EXPERTS, num_local_experts=4)
    ),
    "qwen2 moe": lambda: tf.Qwen2MoeForCausalLM(
        tf.Qwen2MoeConfig(
            **WIDE,
            **EXPERTS,
            num_experts=4,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=12,
        )
    ),
    "gpt-oss": lambda: tf.GptOssForCausalLM(
        tf.GptOssConfig(**WIDE, **EXPERTS, num_local_experts=4, head_dim=4, **TOKENS)
    ),
}
EXPERT_MODELS = ("mixtral", "qwen2 moe", "gpt-oss")
MASKED = ("gpt2", "neox", "llama", "gemma", "opt", "bert", *EXPERT_MODELS)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def made(kind):
    model = MODELS[kind]() if isinstance(kind, str) else kind
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model.eval()


def batch_for(kind, padded=False):
    if kind == "vit":
        return {"pixel_values": torch.randn(B, 3, 8, 8)}
    batch = {"input_ids": torch.randint(3, V, (B, T))}
    if padded:
        batch["attention_mask"] = (torch.arange(T) < torch.tensor([[6], [4], [2]])).long()
    if kind in ("t5", "bart"):
        batch["decoder_input_ids"] = torch.randint(3, V, (B, 5))
    return batch


def loss_of(model, batch):
    logits = model(**batch).logits
    if "input_ids" not in batch or "decoder_input_ids" in batch:
        return (
            torch.sin(logits) * torch.linspace(1, 2, logits[0].numel()).view_as(logits[0])
        ).sum()
    logits = logits[:, -T:]  # after the positions of a prompt
    each = F.cross_entropy(logits[:, :-1].mT, batch["input_ids"][:, 1:], reduction="none")
    return (each * batch.get("attention_mask", torch.ones(B, T))[: len(each), 1:]).sum()


def assert_captured(model, batch, run=None, **how):
    want = looped(model, batch, loss_of)
    assert not coverage(model, units(model)).missing
    for weights in (True, False):
        assert_same(
            captured(model if run is None else run, batch, loss_of, weights, **how), want, rtol=3e-4
        )
        model.zero_grad()
    assert_untouched(model)


@pytest.mark.parametrize("kind", MODELS)
def test_every_parameter_of_a_model(kind):
    assert_captured(made(kind), batch_for(kind))
    slow = {kind.__name__ for kind in _recompute._LOOP}
    assert not any("Norm" in name or "Embeddings" in name for name in slow)  # not one by one


@pytest.mark.parametrize("kind", ["t5", "bart", *MASKED])
def test_padded_examples(kind):
    batch = batch_for(kind, padded=True)
    mask = batch["attention_mask"] if kind in MASKED else None
    assert_captured(made(kind), batch, mask=mask)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "vit", "t5", "mixtral", "gpt-oss"])
def test_a_compiled_model_has_one_graph(kind):
    torch._dynamo.reset()
    model = made(kind)
    model.config.use_cache = False
    if kind in EXPERT_MODELS:
        model.config._experts_implementation = "batched_mm"
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_captured(model, batch_for(kind), run=compiled)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "t5", "gpt-oss"])
def test_gradient_checkpointing(kind):
    model, batch = made(kind), batch_for(kind)
    model.config.use_cache = False
    want = looped(model, batch, loss_of)
    model.gradient_checkpointing_enable()
    for module in model.train().modules():  # with nothing random
        for name in ("p", "dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    for weights in (True, False):
        assert_same(captured(model, batch, loss_of, weights), want, rtol=3e-4)


@pytest.mark.parametrize("how", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("kind", EXPERT_MODELS)
def test_experts_without_tokens_have_zeros(kind, how):
    model = made(kind)
    model.config._experts_implementation = how
    batch = {"input_ids": torch.randint(3, V, (2, 2))}
    router = next(m for n, m in model.named_modules() if n.endswith((".gate", ".router")))
    with torch.no_grad():
        router.weight[0] = -100 * router.weight[1]  # one of the two is far below the others
        router.weight[2:4] = 0
    want = looped(model, batch, lambda m, b: m(**b).logits.sin().sum())
    found = captured(model, batch, lambda m, b: m(**b).logits.sin().sum(), weights=False)
    stacked = [n for n in want if "experts" in n and n.endswith("down_proj")]
    used = torch.stack([want[n].flatten(2).any(-1) for n in stacked])
    assert stacked
    assert not used.all()
    assert_same(found, want, rtol=3e-4)


def test_gradient_accumulation_of_positions_as_rows():
    """Parts of a batch, one of them shorter, in a model that works on rows of positions."""
    model, batch = made("qwen2 moe"), batch_for("qwen2 moe", padded=True)
    batch["attention_mask"][1:] = batch["attention_mask"][1:2]  # two examples of four positions
    want = looped(model, batch, loss_of)

    def in_parts(model, batch):
        first = {k: v[:1] for k, v in batch.items()}
        loss_of(model, first).backward()
        return loss_short(model, {k: v[1:, :4] for k, v in batch.items()})

    def loss_short(model, batch):
        each = F.cross_entropy(
            model(**batch).logits[:, :-1].mT, batch["input_ids"][:, 1:], reduction="none"
        )
        return each.sum()

    for mask in (None, batch["attention_mask"]):
        assert_same(captured(model, batch, in_parts, mask=mask), want, rtol=3e-4)


def adapters():
    peft = pytest.importorskip("peft")
    lora = lambda **k: peft.LoraConfig(r=2, task_type="CAUSAL_LM", **k)
    virtual = dict(num_virtual_tokens=3, task_type="CAUSAL_LM")
    feed = dict(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    return {
        "lora": ("llama", lora(target_modules="all-linear")),
        "lora of conv1d": ("gpt2", lora(target_modules=["c_attn"], fan_in_fan_out=True)),
        "lora of embeddings": ("gpt2", lora(target_modules=["wte", "wpe"])),
        "lora with a head": ("llama", lora(target_modules=["q_proj"], modules_to_save=["lm_head"])),
        "dora": ("llama", lora(target_modules=["q_proj", "down_proj"], use_dora=True)),
        "ia3": ("llama", peft.IA3Config(**feed, task_type="CAUSAL_LM")),
        "prompt": ("llama", peft.PromptTuningConfig(**virtual)),
        "prefix": ("llama", peft.PrefixTuningConfig(**virtual)),
        "p-tuning": ("llama", peft.PromptEncoderConfig(**virtual, encoder_hidden_size=5)),
    }


ADAPTERS = ["lora", "lora of conv1d", "lora of embeddings", "lora with a head", "dora", "ia3"]
ADAPTERS += ["prompt", "prefix", "p-tuning"]


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters(kind):
    peft = pytest.importorskip("peft")
    base, config = adapters()[kind]
    model = peft.get_peft_model(made(base), config).eval()
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        nn.init.normal_(p, std=0.3)
    watched = units(model)
    found = coverage(model, watched)
    assert found.covered == found.total == sum(p.numel() for p in trained)
    assert_captured(model, batch_for(base))
