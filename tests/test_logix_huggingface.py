"""logix in Hugging Face trainers: rows against one example at a time, ids, arguments, results."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from torch.nn import functional as F  # noqa: E402

from logix.huggingface import LogIXArguments, patch_trainer  # noqa: E402

VOCAB, WORDS = 24, 20
LABELS = 3


# --- tiny models, each with its examples and the sum of an example's own loss -----------------


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=1,
        eos_token_id=2, pad_token_id=0, resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama():
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=12, num_hidden_layers=2, pad_token_id=0,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
        attention_dropout=0.3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def opt():
    """Its layers drop out by a function, not by a module of their own."""
    config = transformers.OPTConfig(
        vocab_size=VOCAB, hidden_size=8, ffn_dim=12, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16, word_embed_proj_dim=8, dropout=0.3, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config)


def bert_config(**more):
    return transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=12, num_hidden_layers=1, pad_token_id=0,
        num_attention_heads=2, max_position_embeddings=16, num_labels=LABELS, **more,
    )  # fmt: skip


def bert():
    return transformers.BertForSequenceClassification(bert_config())


def bert_regression():
    config = bert_config(problem_type="regression")
    config.num_labels = 1
    return transformers.BertForSequenceClassification(config)


def bert_several_labels():
    config = bert_config(problem_type="multi_label_classification")
    return transformers.BertForSequenceClassification(config)


def bert_tokens():
    return transformers.BertForTokenClassification(bert_config())


def bert_masked():
    return transformers.BertForMaskedLM(bert_config())


def t5():
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_decoder_layers=1,
        num_heads=2, pad_token_id=0, decoder_start_token_id=0, eos_token_id=2,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def tokens(rng, length):
    return rng.integers(4, WORDS, length).tolist()


def language(rng, length):
    ids = tokens(rng, length)
    return dict(input_ids=ids, labels=[-100, *ids[1:]] if length > 4 else list(ids))


def pairs(rng, length):
    return dict(input_ids=tokens(rng, length), labels=tokens(rng, 9 - length))


def one_label(rng, length):
    return dict(input_ids=tokens(rng, length), labels=int(rng.integers(LABELS)))


def one_number(rng, length):
    return dict(input_ids=tokens(rng, length), labels=float(rng.normal()))


def several_labels(rng, length):
    return dict(input_ids=tokens(rng, length), labels=rng.integers(0, 2, LABELS).astype(float))


def label_for_each(rng, length):
    labels = rng.integers(0, LABELS, length).tolist()
    return dict(input_ids=tokens(rng, length), labels=[-100, *labels[1:]])


def shifted(logits, labels):
    return F.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum")


def aligned(logits, labels):
    return F.cross_entropy(logits[0], labels.reshape(-1), reduction="sum")


def of_classes(logits, labels):
    return F.cross_entropy(logits, labels, reduction="sum")


def squares(logits, labels):
    return (logits.reshape(()) - labels.reshape(())).square()


def each_class(logits, labels):
    return F.binary_cross_entropy_with_logits(logits, labels.float())


CASES = {
    "gpt2": (gpt2, language, shifted),
    "llama": (llama, language, shifted),
    "bert": (bert, one_label, of_classes),
    "bert, one number": (bert_regression, one_number, squares),
    "bert, several labels": (bert_several_labels, several_labels, each_class),
    "bert, tokens": (bert_tokens, label_for_each, aligned),
    "bert, masked": (bert_masked, label_for_each, aligned),
    "t5": (t5, pairs, aligned),
}
LENGTHS = (3, 6, 4, 5, 3)


def dataset(make, seed=0, lengths=LENGTHS):
    rng = np.random.default_rng(seed)
    return [make(rng, length) for length in lengths]


class Pad:
    """Pads on the right, with 0 or the label that is ignored, to the longest or to `to`."""

    def __init__(self, ignore=-100, to=0):
        self.ignore, self.to = ignore, to

    def __call__(self, examples):
        def stack(rows, fill):
            if not isinstance(rows[0], list):
                return torch.tensor(np.array(rows))
            width = max(self.to, *map(len, rows)) if len(rows) > 1 else max(self.to, len(rows[0]))
            return torch.tensor([r + [fill] * (width - len(r)) for r in rows])

        ids = stack([e["input_ids"] for e in examples], 0)
        mask = stack([[1] * len(e["input_ids"]) for e in examples], 0)
        labels = stack([e["labels"] for e in examples], self.ignore)
        labels = labels.float() if labels.is_floating_point() else labels
        return dict(input_ids=ids, attention_mask=mask, labels=labels)


def own_gradients(model, examples, loss_of):
    """{parameter: (examples, …)}, one example at a time, without padding."""
    model.eval()
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    rows = []
    for example in examples:
        batch = Pad()([example])
        loss = loss_of(model(**batch).logits.float(), batch["labels"])
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        rows.append(
            [torch.zeros_like(p) if g is None else g for p, g in zip(named.values(), found)]
        )
    return {name: torch.stack(column).numpy() for name, column in zip(named, zip(*rows))}


@pytest.fixture
def trainer_of(tmp_path):
    """Makes a patched trainer that writes below a folder of the test."""

    def make(model, train, base=transformers.Trainer, logix=None, training=None, **more):
        words = dict(data_id="index", log_batch_size=3, log_num_workers=0) | (logix or {})
        args = LogIXArguments("run", {"root_dir": str(tmp_path / "logix")}, **words)
        kind = transformers.TrainingArguments
        if issubclass(base, transformers.Seq2SeqTrainer):
            kind = transformers.Seq2SeqTrainingArguments
        how = dict(report_to=[], disable_tqdm=True, use_cpu=True) | (training or {})
        more.setdefault("data_collator", Pad())
        return patch_trainer(base)(
            logix_args=args,
            model=model,
            args=kind(output_dir=str(tmp_path / "trainer"), **how),
            train_dataset=train,
            **more,
        )

    return make


def rows_of(trainer):
    """Ids and {layer: rows}, in the order of the store."""
    loader = trainer.logix.build_log_dataloader(batch_size=1000)
    ((ids, logs),) = list(loader)
    return list(ids), {layer: np.asarray(kinds["grad"]) for layer, kinds in logs.items()}


def parameter(layer, expected):
    return layer if layer in expected else f"{layer}.weight"


def agrees(trainer, expected, order, tolerance=2e-5):
    """The rows are those gradients. A head whose weight is the embedding's is left out: without
    the embedding, its row is a part of that weight's gradient."""
    ids, rows = rows_of(trainer)
    assert ids == list(order)
    rows = {layer: found for layer, found in rows.items() if parameter(layer, expected) in expected}
    assert rows
    # A scale for all: the gradient of a key's bias, for one, is zero but for rounding.
    scale = max(np.abs(expected[parameter(layer, expected)]).max() for layer in rows)
    for layer, found in rows.items():
        want = expected[parameter(layer, expected)]
        np.testing.assert_allclose(
            found.reshape(want.shape), want, atol=tolerance * scale, err_msg=layer
        )
    return set(rows)


def base_of(name):
    return transformers.Seq2SeqTrainer if name == "t5" else transformers.Trainer


# --- rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_row_is_the_gradient_of_one_examples_own_loss(name, trainer_of):
    make_model, make, loss_of = CASES[name]
    torch.manual_seed(0)
    model, train = make_model(), dataset(make)
    expected = own_gradients(model, train, loss_of)
    trainer = trainer_of(model, train, base_of(name), dict(type_filter="linear"))
    report = trainer.extract_log()
    layers = agrees(trainer, expected, range(len(train)))
    assert report.rows == len(train)
    assert layers <= set(report.layers)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_all_parameters_of_a_model_have_rows(name, trainer_of, capsys):
    """But for what T5 computes once for all examples, which is said."""
    make_model, make, loss_of = CASES[name]
    torch.manual_seed(0)
    model, train = make_model(), dataset(make)
    expected = own_gradients(model, train, loss_of)
    trainer = trainer_of(model, train, base_of(name))
    trainer.extract_log()
    layers = agrees(trainer, expected, range(len(train)))
    shared = {n for n in expected if "relative_attention_bias" in n}
    assert {parameter(layer, expected) for layer in layers} == set(expected) - shared
    said = capsys.readouterr().out
    assert ("left out, as all examples share one gradient" in said) == bool(shared)
    assert all(n in said for n in shared)


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
def test_a_row_depends_neither_on_its_batch_nor_on_padding(name, trainer_of):
    make_model, make, _ = CASES[name]
    torch.manual_seed(0)
    model, train = make_model(), dataset(make)
    found = []
    for size, to in ((1, 0), (5, 0), (2, 11)):
        how = dict(log_batch_size=size, overwrite=True, type_filter=["lin"])
        trainer = trainer_of(model, train, logix=how, data_collator=Pad(to=to))
        trainer.extract_log()
        found.append(rows_of(trainer)[1])
    for layer, rows in found[0].items():
        for other in found[1:]:
            np.testing.assert_allclose(other[layer], rows, atol=2e-6, rtol=1e-4)


def test_the_model_is_as_before(trainer_of):
    model, train = gpt2(), dataset(language)
    model.train()
    model.transformer.h[0].eval()
    model.transformer.wpe.weight.requires_grad_(False)
    modes = {n: m.training for n, m in model.named_modules()}
    flags = {n: p.requires_grad for n, p in model.named_parameters()}
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    trainer = trainer_of(model, train, logix=dict(type_filter="lin"))
    trainer.extract_log()
    trainer.influence()
    assert {n: m.training for n, m in model.named_modules()} == modes
    assert {n: p.requires_grad for n, p in model.named_parameters()} == flags
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())
    assert trainer.optimizer is None


@pytest.mark.parametrize("make_model", [gpt2, llama, opt], ids=["gpt2", "llama", "opt"])
def test_gradient_checkpointing_changes_no_row(make_model, trainer_of):
    torch.manual_seed(0)
    model, train = make_model(), dataset(language)
    expected = own_gradients(model, train, shifted)
    calls = []
    kind = transformers.modeling_layers.GradientCheckpointingLayer
    block = next(m for m in model.modules() if isinstance(m, kind))
    block.register_forward_pre_hook(lambda *_: calls.append(1))
    how = dict(gradient_checkpointing=True)
    trainer = trainer_of(model, train, logix=dict(type_filter="lin"), training=how)
    trainer.extract_log()
    agrees(trainer, expected, range(len(train)))
    # Two batches, each once forward and once again backward; and the five passes of the check.
    assert len(calls) == 2 * 2 + 5
    assert not model.is_gradient_checkpointing


def test_autocast_of_the_arguments_is_used(trainer_of):
    torch.manual_seed(0)
    model, train = llama(), dataset(language)
    expected = own_gradients(model, train, shifted)
    seen = set()
    model.lm_head.register_forward_hook(lambda m, x, out: seen.add(out.dtype))
    trainer = trainer_of(model, train, logix=dict(type_filter="lin"), training=dict(bf16=True))
    trainer.extract_log()
    assert seen == {torch.bfloat16}
    agrees(trainer, expected, range(len(train)), tolerance=0.05)


def test_label_smoothing_is_summed_too(trainer_of):
    torch.manual_seed(0)
    model, train = llama(), dataset(language)

    def smooth(logits, labels):
        kept = labels[0, 1:] != -100
        return F.cross_entropy(
            logits[0, :-1][kept], labels[0, 1:][kept], reduction="sum", label_smoothing=0.2
        )

    expected = own_gradients(model, train, smooth)
    how = dict(label_smoothing_factor=0.2)
    trainer = trainer_of(model, train, logix=dict(type_filter="lin"), training=how)
    trainer.extract_log()
    agrees(trainer, expected, range(len(train)))


def test_labels_that_are_ignored_by_another_number(trainer_of):
    torch.manual_seed(0)
    model, train = llama(), dataset(language)
    expected = own_gradients(model, train, shifted)
    swapped = [e | dict(labels=[-7 if t == -100 else t for t in e["labels"]]) for e in train]
    how = dict(type_filter="lin", ignore_idx=-7)
    trainer = trainer_of(model, swapped, logix=how, data_collator=Pad(ignore=-7))
    trainer.extract_log()
    agrees(trainer, expected, range(len(train)))


class Weighted(transformers.Trainer):
    """The usual example of a loss of one's own: classes with weights."""

    weights = torch.tensor([1.0, 2.0, 5.0])

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.CrossEntropyLoss(weight=self.weights)(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


class Averaged(transformers.Trainer):
    """A mean that nobody can see."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(**inputs).logits
        return F.cross_entropy(logits, inputs["labels"], reduction="none").mean()


def test_a_loss_of_the_trainer_is_used(trainer_of):
    torch.manual_seed(0)
    model, train = bert(), dataset(one_label)
    weighted = lambda logits, y: F.cross_entropy(logits, y, Weighted.weights, reduction="sum")
    expected = own_gradients(model, train, weighted)
    trainer = trainer_of(model, train, Weighted, dict(type_filter="lin"))
    trainer.extract_log()
    agrees(trainer, expected, range(len(train)))


def test_a_loss_that_is_no_sum_is_an_error(trainer_of):
    trainer = trainer_of(bert(), dataset(one_label), Averaged, dict(type_filter="lin"))
    with pytest.raises(ValueError, match=r"not a sum over examples.*loss\.sum\(\)"):
        trainer.extract_log()


def test_of_a_model_with_adapters_only_these_have_rows(trainer_of):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model, train = peft.get_peft_model(llama(), config), dataset(language)
    expected = own_gradients(model, train, shifted)
    assert expected
    trainer = trainer_of(model, train)
    trainer.extract_log()
    layers = agrees(trainer, expected, range(len(train)))
    assert {parameter(layer, expected) for layer in layers} == set(expected)


# --- ids ---------------------------------------------------------------------------------------


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<bos>", "<eos>", "<unk>", *(f"w{i}" for i in range(4, VOCAB))]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>",
        unk_token="<unk>",
    )  # fmt: skip


def test_ids_are_texts(trainer_of):
    train = dataset(language)
    trainer = trainer_of(
        llama(), train, logix=dict(data_id="detokenize"), processing_class=tokenizer()
    )
    trainer.extract_log()
    assert rows_of(trainer)[0] == [" ".join(f"w{t}" for t in e["input_ids"]) for e in train]


def test_without_a_tokenizer_ids_are_hashes_and_it_is_said(trainer_of, capsys):
    trainer = trainer_of(llama(), dataset(language), logix=dict(data_id="detokenize"))
    trainer.extract_log()
    assert "ids are hashes: data_id='detokenize' needs a tokenizer" in capsys.readouterr().out
    ids = rows_of(trainer)[0]
    assert len(set(ids)) == len(LENGTHS)
    assert {len(i) for i in ids} == {32}


def test_a_hash_depends_on_nothing_but_the_example(trainer_of):
    train = dataset(language)
    found = []
    for size, data in ((1, train), (4, train[::-1])):
        how = dict(data_id="hash", log_batch_size=size, overwrite=True)
        trainer = trainer_of(llama(), data, logix=how)
        trainer.extract_log()
        found.append(rows_of(trainer)[0])
    assert found[0] == found[1][::-1]


@pytest.mark.parametrize("data_id", ["name", lambda example: example["name"]])
def test_ids_of_a_column_that_the_model_does_not_take(data_id, trainer_of):
    train = [e | dict(name=f"n{i}") for i, e in enumerate(dataset(language))]
    trainer = trainer_of(llama(), train, logix=dict(data_id=data_id))
    trainer.extract_log()
    assert rows_of(trainer)[0] == ["n0", "n1", "n2", "n3", "n4"]


def test_a_column_that_is_not_there_is_an_error(trainer_of):
    trainer = trainer_of(llama(), dataset(language), logix=dict(data_id="nmae"))
    with pytest.raises(KeyError, match="'nmae' is none of detokenize, hash, index, and no column"):
        trainer.extract_log()


def test_equal_examples_keep_their_rows_and_it_is_said(trainer_of, capsys):
    train = dataset(language)
    train = [*train, train[0], train[2]]
    trainer = trainer_of(llama(), train, logix=dict(data_id="hash"))
    report = trainer.extract_log()
    assert (report.rows, report.shared_ids) == (7, 4)
    assert "4 share their id" in capsys.readouterr().out
    ids, rows = rows_of(trainer)
    assert len(ids) == 7
    for found in rows.values():
        np.testing.assert_allclose(found[0], found[5], atol=1e-6)
    assert trainer.influence(train[:2])["influence"].shape == (2, 7)


def test_a_dataset_without_a_length(trainer_of):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from dataset(language)

    trainer = trainer_of(llama(), Stream(), training=dict(max_steps=1))
    assert trainer.extract_log().rows == len(LENGTHS)
    assert rows_of(trainer)[0] == list(range(len(LENGTHS)))


# --- results -----------------------------------------------------------------------------------


def test_as_the_document_shows(trainer_of):
    how = dict(lora=True, ekfac=True, rank=3)
    trainer = trainer_of(gpt2(), dataset(language), logix=how)
    report = trainer.extract_log()
    assert report.passes == 2
    scores = trainer.influence()  # without an eval dataset, the train dataset asks
    assert scores["influence"].shape == (5, 5)
    assert scores["src_ids"] == scores["tgt_ids"] == list(range(5))
    own = trainer.self_influence()
    assert own["src_ids"] == list(range(5))
    np.testing.assert_allclose(np.diag(scores["influence"]), own["influence"], rtol=1e-3)
    np.testing.assert_allclose(scores["influence"], scores["influence"].T, rtol=1e-3, atol=1e-5)


def test_scores_are_products_of_rows(trainer_of):
    torch.manual_seed(0)
    model, train, test = llama(), dataset(language), dataset(language, 1, (4, 6))
    mine, theirs = (own_gradients(model, data, shifted) for data in (train, test))
    trainer = trainer_of(model, train, logix=dict(type_filter="lin"), eval_dataset=test)
    trainer.extract_log()
    layers = list(rows_of(trainer)[1])
    flat = lambda grads: np.concatenate(
        [grads[parameter(n, grads)].reshape(len(grads[parameter(n, grads)]), -1) for n in layers], 1
    )
    want = flat(theirs) @ flat(mine).T
    np.testing.assert_allclose(trainer.influence()["influence"], want, rtol=1e-3, atol=1e-4)
    best = trainer.influence(top_k=2)
    order = np.argsort(-want, axis=1)[:, :2]
    assert best["tgt_ids"] == order.tolist()
    np.testing.assert_allclose(
        best["influence"], np.take_along_axis(want, order, 1), rtol=1e-3, atol=1e-4
    )
    own = trainer.self_influence(test)
    np.testing.assert_allclose(own["influence"], (flat(theirs) ** 2).sum(1), rtol=1e-3)


def test_another_process_scores_with_what_is_saved(trainer_of):
    torch.manual_seed(0)
    model, train, test = llama(), dataset(language), dataset(language, 1, (4, 6))
    how = dict(lora="random", rank=3, hessian="kfac")
    first = trainer_of(model, train, logix=how)
    first.extract_log()
    again = trainer_of(model, None, logix=dict(initialize_from_log=True), eval_dataset=test)
    expected = first.influence(test)
    found = again.influence()
    np.testing.assert_allclose(found["influence"], expected["influence"], rtol=1e-5)
    assert found["tgt_ids"] == expected["tgt_ids"]
    np.testing.assert_allclose(
        again.self_influence()["influence"], first.self_influence()["influence"], rtol=1e-5
    )


def test_groups_of_layers(trainer_of):
    how = dict(type_filter="lin", influence_groups=["mlp", "attn"])
    trainer = trainer_of(llama(), dataset(language), logix=how)
    trainer.extract_log()
    scores = trainer.influence()["influence"]
    assert set(scores) == {"total", "mlp", "attn"}
    assert scores["mlp"].shape == (5, 5)


def test_small_batches_of_queries_are_scored_together_or_apart(trainer_of, monkeypatch):
    train = dataset(language)
    trainer = trainer_of(llama(), train, logix=dict(type_filter="lin", log_batch_size=2))
    trainer.extract_log()
    together = trainer.influence(), trainer.influence(top_k=3)
    monkeypatch.setattr("logix.integrations._extraction.QUERY_BYTES", 0)
    for one, other in zip(together, (trainer.influence(), trainer.influence(top_k=3))):
        np.testing.assert_allclose(one["influence"], other["influence"], rtol=1e-5, atol=1e-6)
        assert one["tgt_ids"] == other["tgt_ids"]
        assert one["src_ids"] == other["src_ids"] == list(range(5))


def test_nothing_is_replaced_unasked(trainer_of):
    model, train = llama(), dataset(language)
    trainer_of(model, train).extract_log()
    with pytest.raises(FileExistsError, match=r"LogIXArguments\(overwrite=True\)"):
        trainer_of(model, train).extract_log()
    trainer = trainer_of(model, train[:2], logix=dict(overwrite=True))
    trainer.extract_log()
    assert rows_of(trainer)[0] == [0, 1]


def test_scores_before_anything_is_extracted_are_an_error(trainer_of):
    trainer = trainer_of(llama(), dataset(language))
    for call in (trainer.influence, trainer.self_influence):
        with pytest.raises(RuntimeError, match="initialize_from_log=True"):
            call()


def test_one_of_several_eval_datasets_has_to_be_named(trainer_of):
    train, test = dataset(language), dataset(language, 1, (4, 6))
    trainer = trainer_of(llama(), train, eval_dataset={"a": test, "b": train})
    trainer.extract_log()
    with pytest.raises(TypeError, match=r"influence\(trainer.eval_dataset\['a'\]\)"):
        trainer.influence()
    assert trainer.influence(trainer.eval_dataset["a"])["influence"].shape == (2, 5)


def test_statistics_alone(trainer_of):
    how = dict(save="none", hessian="kfac")
    trainer = trainer_of(llama(), dataset(language), logix=how)
    assert trainer.extract_log().rows == 5
    with pytest.raises(RuntimeError, match="save='grad'"):
        trainer.influence()
    assert trainer.self_influence()["src_ids"] == list(range(5))


# --- arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({}, ("none", None, "grad")),
        (dict(lora=True, ekfac=True), ("random", "ekfac", "grad")),
        (dict(lora="random", hessian="ekfac", save="grad"), ("random", "ekfac", "grad")),
        (dict(lora=False, raw=True, save="none"), ("none", "raw", "none")),
        (dict(lora="pca", kfac=True, hessian="kfac"), ("pca", "kfac", "grad")),
        (dict(hessian="none"), ("none", "none", "grad")),
    ],
)
def test_both_forms_of_the_arguments(words, expected):
    args = LogIXArguments("project", **words)
    assert (args.lora, args.hessian, args.save) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (dict(lora="radnom"), "lora='radnom' is not known. Known are: none, random, sparse, pca"),
        (dict(hessian="fisher"), "hessian='fisher' is not known. Known are: none"),
        (dict(save="grads"), "save='grads' is not known. Known are: none, .*grad"),
        (dict(influence_mode="cos"), "influence_mode='cos' is not known. Known are: dot"),
        (dict(type_filter=["dense"]), "'dense' is not known. Known are: lin, conv, emb"),
        (dict(ekfac=True, hessian="kfac"), "ekfac=True and hessian='kfac' contradict"),
        (dict(ekfac=True, kfac=True), "kfac=True and ekfac=True contradict"),
        (dict(kfac=True, hessian="none"), "kfac=True and hessian='none' contradict"),
        (dict(resume=True, overwrite=True), "pass one"),
        (dict(log_batch_size=0), "log_batch_size=0"),
    ],
)
def test_words_that_are_not_known_and_contradictions(words, message):
    with pytest.raises(ValueError, match=message):
        LogIXArguments("project", **words)


def test_layers_by_type():
    from transformers.pytorch_utils import Conv1D

    nn = torch.nn
    of = lambda kinds: set(LogIXArguments("project", type_filter=kinds).layer_types())
    assert of("lin") == of(["linear"]) == {nn.Linear, Conv1D}
    assert of(["emb", nn.Linear]) == {nn.Embedding, nn.Linear}
    assert nn.Conv2d in of("conv")
    assert LogIXArguments("project").layer_types() is None


def test_a_trainer_without_arguments_is_an_error():
    with pytest.raises(TypeError, match=r"logix_args=LogIXArguments\(project, …\)"):
        patch_trainer(transformers.Trainer)(model=llama())


# --- several processes -------------------------------------------------------------------------


def test_several_processes_divide_the_data_and_nothing_comes_twice():
    from logix.integrations._examples import Collate, loader_of

    args = LogIXArguments("project", data_id="index")
    collate = Collate(args, lambda examples: examples, None)
    for length, processes in ((7, 2), (5, 3), (1, 2), (6, 1)):
        data = list(range(100, 100 + length))
        found = []
        for process in range(processes):
            loader = loader_of(data, collate, 2, 0, False, process, processes)
            found += [(i, x) for ids, batch in loader for i, x in zip(ids, batch)]
        assert found == list(enumerate(data))


def work(folder):
    """One of several processes, as torchrun starts them: writes what it has found."""
    import json

    torch.manual_seed(0)
    train = dataset(language)
    args = LogIXArguments(
        "run", {"root_dir": f"{folder}/logix"}, data_id="index", log_batch_size=2, hessian="kfac",
        type_filter="lin",
    )  # fmt: skip
    trainer = patch_trainer(transformers.Trainer)(
        logix_args=args,
        model=llama(),
        args=transformers.TrainingArguments(
            f"{folder}/trainer", use_cpu=True, report_to=[], disable_tqdm=True
        ),
        train_dataset=train,
        data_collator=Pad(),
    )
    report, scores = trainer.extract_log(), trainer.influence()
    found = dict(rows=report.rows, ids=scores["tgt_ids"], queries=scores["src_ids"])
    found["influence"] = scores["influence"].tolist()
    found["sizes"] = [float(np.linalg.norm(x)) for x in rows_of(trainer)[1].values()]
    found["own"] = trainer.self_influence()["influence"].tolist()
    with open(f"{folder}/{trainer.args.process_index}.json", "w") as file:
        json.dump(found, file)


def test_two_processes_find_what_one_finds(tmp_path):
    import json
    import os
    import socket
    import subprocess
    import sys

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "two").mkdir()
    (tmp_path / "one").mkdir()

    def start(folder, **extra):
        code = f"import test_logix_huggingface as t; t.work({str(tmp_path / folder)!r})"
        env = {**os.environ, "OMP_NUM_THREADS": "1", **extra}
        env["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *sys.path])
        return subprocess.Popen([sys.executable, "-c", code], env=env)

    address = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2")
    jobs = [start("two", RANK=str(r), LOCAL_RANK=str(r), **address) for r in range(2)]
    jobs.append(start("one"))
    try:
        assert [job.wait(timeout=300) for job in jobs] == [0, 0, 0]
    finally:
        for job in jobs:
            job.kill()
    one = json.loads((tmp_path / "one" / "0.json").read_text())
    assert one["ids"] == list(range(len(LENGTHS)))
    for rank in range(2):
        two = json.loads((tmp_path / "two" / f"{rank}.json").read_text())
        assert two["rows"] == one["rows"] == len(LENGTHS)
        assert two["queries"] == one["queries"] == one["ids"]
        assert two["ids"] == one["ids"]
        np.testing.assert_allclose(two["influence"], one["influence"], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(two["sizes"], one["sizes"], rtol=1e-3)
        np.testing.assert_allclose(two["own"], one["own"], rtol=1e-3, atol=1e-4)
