"""Which training sentences made a language model say what it says?

A small language model learns 200 sentences of 40 facts about made-up towns, inventors, animals and
ships (data/made_up_facts.txt), then answers a question about each fact in words that it has not
seen for it. `logix` keeps a compressed gradient of every training sentence on the disk, and scores
every sentence for every answer. As the facts are known, so is what a good score must find: the
sentences that state the fact which was asked for. The example

- prints the three sentences with the highest score for a few questions,
- counts how often the first of them states the right fact, beside what chance would give,
- tells which words of a sentence the score comes from,
- and draws all of it (out/attribute_lm.png).

Run it with `python examples/attribute_lm.py`; `--quick` takes a smaller model.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import logix

HERE = pathlib.Path(__file__).resolve().parent
OUT = HERE / "out"
KINDS = ("none", "kfac", "ekfac")  # preconditioners, all at their default damping
BEST = "ekfac"
Place = tuple[str, str, float]  # the word at it, the next one, and the place's share of a score
PAD, END = 0, 1  # tokens that are no words; END begins and ends a sentence
QUICK = dict(width=64, epochs=30, rate=4e-3)


def main(
    width: int = 128, epochs: int = 20, rate: float = 2e-3, out: pathlib.Path = OUT
) -> dict[str, Any]:
    started = time.perf_counter()
    facts = read(HERE / "data" / "made_up_facts.txt")
    sentences = [sentence for fact in facts for sentence in fact.sentences]
    states = np.repeat(np.arange(len(facts)), len(sentences) // len(facts))  # which fact
    words = Words(sentences)
    tokens = words.tokens(sentences)

    # 1. Train. This part knows nothing of logix.
    model = language_model(len(words), width)
    size = sum(p.numel() for p in model.parameters())
    print(f"{len(sentences)} sentences, {len(facts)} facts; a model of {size:,} parameters")
    loss = train(model, tokens, epochs, rate)
    print(f"trained in {time.perf_counter() - started:.0f} s, to a loss of {loss:.2f} per word")

    # 2. Ask. `asked` ends with what the model answers, right or wrong: that is to be explained.
    asked, answers = ask(model, words, [f.question for f in facts])
    right = np.array([a == f.answer for a, f in zip(answers, facts)])
    print(f"it answers {right.sum()} of {len(facts)} questions right\n")

    # 3. Log the gradient of each sentence, then that of each answer.
    run, log = extract(model, tokens, asked, out)

    # 4. Score all sentences for all answers.
    results = {k: run.influence.compute_influence_all(log, mode="cosine", hessian=k) for k in KINDS}
    scores = {kind: result.influence for kind, result in results.items()}  # (questions, sentences)
    first = {kind: states[x.argmax(1)] == np.arange(len(facts)) for kind, x in scores.items()}
    chance = 1 / len(facts)  # each has as many sentences

    for i in np.linspace(0, len(facts), 3, endpoint=False, dtype=int):
        verdict = "" if right[i] else f" (wrong: it is {facts[i].answer})"
        print(f"Question: {facts[i].question} …   The model says: {answers[i]}{verdict}")
        for j in scores[BEST][i].argsort()[::-1][:3]:
            mark = "this fact" if states[j] == i else facts[states[j]].name
            print(f"  {scores[BEST][i, j]:6.3f}  {sentences[j]:52s} ({mark})")
        print()

    print("How often the sentence with the highest score states the fact that was asked for:")
    for kind, hits in first.items():
        what = "gradients as they are" if kind == "none" else f"preconditioned by {kind}"
        print(f"  {what:24s} {hits.mean():5.0%}")
    print(f"  {'a sentence at random':24s} {chance:5.1%}\n")

    # 5. Which words of a sentence does a score come from?
    i = int(scores[BEST].max(1).argmax())  # the clearest of all
    j = int(scores[BEST][i].argmax())
    by_word = word_scores(run, model, log, tokens[j : j + 1], words)[i]
    print(f"Why does {sentences[j]!r} explain {facts[i].question + ' ' + answers[i]!r}?")
    print("What the model learns at each of its words, when it has to tell the next one:")
    whole = sum(score for _, _, score in by_word)
    for word, following, score in by_word:
        bar = "#" * round(30 * max(score / whole, 0))
        print(f"  {word:>10s} → {following:10s} {score / whole:+5.0%} of the score  {bar}")

    path = out / "attribute_lm.png"
    picture(facts, scores[BEST], f"{facts[i].question} … {answers[i]}", by_word, path)
    seconds = time.perf_counter() - started
    print(f"\npicture: {path}\nlogs:    {run.path}\n{seconds:.0f} s in all")
    return {
        "right": float(right.mean()),
        "first": {kind: float(hits.mean()) for kind, hits in first.items()},
        "chance": chance,
        "words": by_word,
        "answer": answers[i],
        "seconds": seconds,
    }


# --- attribution: the part that uses logix -------------------------------------------------------


def extract(
    model: nn.Module, tokens: Tensor, asked: Tensor, out: pathlib.Path
) -> tuple[logix.LogIX, Any]:
    """Log the gradient of each training sentence to the disk, and of each answer to memory."""
    run = logix.LogIX("facts", {"root_dir": str(out / "logix")}, overwrite=True)
    run.watch(model)
    run.add_lora(rank=64)  # each layer's gradient becomes 64 × 64 numbers, or fewer
    # One pass saves the gradients and finds K-FAC's eigenvectors, another measures along them.
    first = {"log": "grad", "save": "grad", "statistic": ["kfac", "ekfac"]}
    for what in (first, {"log": "grad", "statistic": "ekfac"}):
        run.setup(what)
        for ids in torch.arange(len(tokens)).split(50):
            with run(data_id=ids, mask=tokens[ids] != PAD):
                losses(model, tokens[ids]).sum().backward()
        run.finalize()
    run.eval()  # from here on, log only
    with run(data_id=list(range(len(asked))), mask=asked != PAD):
        answer_losses(model, asked).sum().backward()  # of the answer alone, not of the question
    return run, run.get_log()


def word_scores(
    run: logix.LogIX, model: nn.Module, log: Any, tokens: Tensor, words: Words
) -> list[list[Place]]:
    """For each question: what each place of one sentence adds to its score."""
    with run(data_id=["sentence"], mask=tokens != PAD):
        losses(model, tokens).sum().backward()
    by_place = run.influence.compute_token_influence(log, hessian=BEST).influence[:, 0]
    names = ["(start)", *words.text(tokens[0]).split(), "(end)"]
    return [list(zip(names, names[1:], map(float, places))) for places in by_place]


# --- the model: a Llama of a few layers ----------------------------------------------------------


def language_model(words: int, width: int) -> nn.Module:
    sizes = dict(hidden_size=width, intermediate_size=4 * width, num_hidden_layers=3)
    special = dict(pad_token_id=PAD, bos_token_id=END, eos_token_id=END)
    config = LlamaConfig(vocab_size=words, num_attention_heads=4, **sizes, **special)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def losses(model: nn.Module, tokens: Tensor) -> Tensor:
    """(sentences, places): of predicting each next token; 0 where there is none."""
    logits = model(input_ids=tokens, attention_mask=(tokens != PAD).long()).logits[:, :-1]
    goals = tokens[:, 1:].masked_fill(tokens[:, 1:] == PAD, -100)
    return cross_entropy(logits.transpose(1, 2), goals, reduction="none", ignore_index=-100)


def answer_losses(model: nn.Module, asked: Tensor) -> Tensor:
    last = (asked != PAD).sum(1) - 1
    return losses(model, asked).gather(1, last[:, None] - 1)[:, 0]


def train(model: nn.Module, tokens: Tensor, epochs: int, rate: float) -> float:
    random = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    for epoch in range(epochs):
        optimizer.param_groups[0]["lr"] = rate * (1 - epoch / epochs)
        for batch in torch.randperm(len(tokens), generator=random).split(20):
            loss = losses(model, tokens[batch]).sum() / (tokens[batch, 1:] != PAD).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()
    return loss.item()


@torch.no_grad()
def ask(model: nn.Module, words: Words, questions: list[str]) -> tuple[Tensor, list[str]]:
    """The questions' tokens with the model's answer, one word, at their end; and these words."""
    tokens = nn.functional.pad(words.tokens(questions, end=False), (0, 1), value=PAD)
    last = (tokens != PAD).sum(1)
    logits = model(input_ids=tokens, attention_mask=(tokens != PAD).long()).logits
    said = logits[torch.arange(len(tokens)), last - 1].argmax(-1)
    tokens[torch.arange(len(tokens)), last] = said
    return tokens, [words.text(word[None]) for word in said]


# --- text ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Fact:
    """What the file says of one fact: sentences to train on, and a question that is not."""

    name: str
    sentences: list[str]
    question: str = ""
    answer: str = ""


def read(path: pathlib.Path) -> list[Fact]:
    facts: list[Fact] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            facts.append(Fact(line.strip("[]"), []))
        elif line.startswith("? "):
            facts[-1].question, facts[-1].answer = line[2:].split(" = ")
        elif line and not line.startswith("#"):
            facts[-1].sentences.append(line)
    return facts


class Words:
    """A tokenizer: every word is a token."""

    def __init__(self, sentences: list[str]):
        self.words = ["(pad)", "", *sorted({word for s in sentences for word in s.split()})]
        self.index = {word: i for i, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def tokens(self, texts: list[str], end: bool = True) -> Tensor:
        """(texts, longest), filled up with PAD."""
        rows = [[END, *(self.index[w] for w in t.split()), *([END] if end else [])] for t in texts]
        return nn.utils.rnn.pad_sequence([torch.tensor(r) for r in rows], True, PAD)

    def text(self, tokens: Tensor) -> str:
        return " ".join(self.words[i] for i in tokens.tolist() if i not in (PAD, END))


# --- picture -------------------------------------------------------------------------------------


def picture(
    facts: list[Fact], scores: np.ndarray, asked: str, by_word: list[Place], path: pathlib.Path
) -> None:
    """All scores, questions by sentences; and one sentence, coloured by where its score is from."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(11, 7.4))
    axes = figure.add_axes((0.085, 0.27, 0.83, 0.62))
    bold = dict(ha="left", fontsize=12, weight="bold")
    limit = float(np.quantile(np.abs(scores), 0.995))
    colors = dict(cmap="RdBu", vmin=-limit, vmax=limit)
    image = axes.imshow(scores, **colors, aspect="auto", interpolation="nearest")
    topics, each = [f.name.split(",")[0] for f in facts], scores.shape[1] / len(facts)
    starts = [i for i, topic in enumerate(topics) if i == 0 or topic != topics[i - 1]]
    for i in starts[1:]:
        axes.axhline(i - 0.5, color="0.35", linewidth=0.6)
        axes.axvline(i * each - 0.5, color="0.35", linewidth=0.6)
    middle = [(a + b) / 2 - 0.5 for a, b in zip(starts, [*starts[1:], len(facts)])]
    axes.set_yticks(middle, names := [f"{topics[i]}s" for i in starts], fontsize=10)
    axes.set_xticks([(m + 0.5) * each - 0.5 for m in middle], names, fontsize=10)
    axes.tick_params(length=0)
    axes.set_ylabel("questions, one a fact", fontsize=10)
    axes.set_xlabel(f"training sentences, {each:.0f} a fact, in the same order", fontsize=10)
    figure.suptitle("Which sentences made the model answer that?", x=0.085, y=0.97, **bold)
    note = "Sentences that state the fact which was asked for are on the diagonal."
    figure.text(0.085, 0.908, note, fontsize=10, color="0.35")
    bar = figure.colorbar(image, cax=figure.add_axes((0.93, 0.27, 0.013, 0.62)))
    bar.ax.tick_params(labelsize=8)
    bar.set_label("score (cosine)", fontsize=9)

    figure.text(0.085, 0.145, f"“{asked}”", **bold)
    note = (
        "The sentence with the highest score. Blue: where, telling the next word, it taught that."
    )
    figure.text(0.085, 0.108, note, fontsize=10, color="0.35")
    largest = max(abs(score) for _, _, score in by_word)
    x, renderer = 0.092, figure.canvas.get_renderer()  # type: ignore[attr-defined]
    for word, _, score in by_word:
        color = plt.get_cmap("RdBu")(0.5 + 0.42 * score / largest)
        box = dict(boxstyle="round,pad=0.35", facecolor=color, edgecolor="none")
        ink = "white" if abs(score) > 0.6 * largest else "black"
        text = figure.text(x, 0.05, word, fontsize=12, bbox=box, color=ink)
        x += text.get_window_extent(renderer).width / figure.bbox.width + 0.018
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model")
    parser.add_argument("--out", type=pathlib.Path, default=OUT)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the matrices are small: a second thread would only wait
    main(**(QUICK if arguments.quick else {}), out=arguments.out)
