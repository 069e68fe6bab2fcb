"""Which training images explain what a classifier says of a test image? And is the answer right?

A small network learns handwritten digits. `logix` keeps its per-sample gradients on the disk, and
scores every training image for every test image from them. Three checks of these scores:

- the linear datamodeling score (LDS): hundreds of networks are trained on random halves of the
  data. Do the scores predict how well each of them does on each test image?
- planted errors: a second network learns from labels of which some are wrong. Are those the
  images with the largest influence on themselves?
- a picture, to look at: what helped and what harmed a few test images, and the suspected labels.

Run it with `python examples/attribute_digits.py`; `--quick` retrains far fewer networks.
"""

from __future__ import annotations

import argparse
import pathlib
import time
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.functional import cross_entropy

import logix
from logix.evaluate import lds, mislabel_detection

OUT = pathlib.Path(__file__).resolve().parent / "out"
TRAIN, QUERIES, WRONG = 1000, 200, 50
KINDS = ("none", "diagonal", "kfac", "ekfac")  # preconditioners, all at their default damping
NAMES = dict(zip(KINDS, ["gradients as they are", *(f"preconditioned by {k}" for k in KINDS[1:])]))
QUICK = dict(subsets=40, seeds=2)
WIDTH, STEPS, BATCH, RATE, DECAY = 32, 400, 50, 5e-3, 0.1  # of every network that is trained


def main(subsets: int = 100, seeds: int = 5, out: pathlib.Path = OUT) -> dict[str, Any]:
    started = time.perf_counter()
    (x, y), queries = digits()

    # One network, and the scores (queries, train) that its gradients give.
    everything = torch.arange(TRAIN)[None]
    model = train(x, y, everything, seed=0)[0]
    said = predict([model], queries[0])[0]
    accuracy = float((said.argmax(-1) == queries[1]).float().mean())
    print(
        f"A network has learned {TRAIN} digits; of {QUERIES} test images it knows {accuracy:.1%}."
    )
    run = extract(model, x, y, "digits", out)
    run.eval()  # from here on, log only
    with run(data_id=[f"query {i}" for i in range(QUERIES)]):
        cross_entropy(model(queries[0]), queries[1], reduction="sum").backward()
    log = run.get_log()
    influence = run.influence.compute_influence_all
    scores = {kind: influence(log, hessian=kind).influence for kind in KINDS}

    # The same images, but some labels wrong: what has a large influence on itself?
    y_wrong, is_wrong = with_errors(y)
    print(f"Another learns the same digits, but {WRONG} of the labels are wrong.")
    misled = train(x, y_wrong, everything, seed=0)[0]
    wrong_run = extract(misled, x, y_wrong, "digits-wrong", out)
    own = {k: wrong_run.influence.compute_self_influence(hessian=k).influence for k in KINDS}
    found = {kind: mislabel_detection(own[kind], is_wrong) for kind in KINDS}

    # What retraining says.
    retraining = time.perf_counter()
    masks, outputs = retrain(x, y, *queries, subsets, seeds)
    seconds = time.perf_counter() - retraining
    print(f"{subsets * seeds} more, each on a random half of the digits, took {seconds:.1f} s.\n")
    quality = {kind: lds(scores[kind], masks, outputs) for kind in KINDS}
    ceiling = quality["none"].ceiling

    print("Do the scores predict how well each of these does on a test image? (LDS: 1 if always)")
    for kind, q in quality.items():
        print(f"  {NAMES[kind]:26s} {q.mean:.3f}   (95%: {q.low:.3f} to {q.high:.3f})")
    print(
        f"  {'the best that is possible':26s} {ceiling:.3f}   (retraining has noise of its own)\n"
    )
    chance = WRONG / TRAIN
    print(
        f"Of the {WRONG} images with the largest influence on themselves, so many labels are wrong"
    )
    for kind, f in found.items():
        print(f"  {NAMES[kind]:26s} {f.precision:4.0%}   (area under the ROC curve: {f.auroc:.3f})")
    print(f"  {'images at random':26s} {chance:4.0%}\n")

    path = out / "attribute_digits.png"
    suspects = own["kfac"].argsort()[::-1]
    picture(x, y, queries, said, scores["kfac"], suspects, y_wrong, path)
    print(f"picture: {path}\nlogs:    {run.path}/rows   (`logix info` tells what they are)")
    return {
        "lds": {kind: q.mean for kind, q in quality.items()} | {"ceiling": ceiling},
        "auroc": {kind: f.auroc for kind, f in found.items()},
        "precision": {kind: f.precision for kind, f in found.items()},
        "accuracy": accuracy,
        "seconds": {"retraining": seconds, "all": time.perf_counter() - started},
    }


# --- attribution: the part that uses logix -------------------------------------------------------


def extract(model: nn.Module, x: Tensor, y: Tensor, name: str, out: pathlib.Path) -> logix.LogIX:
    """Log a gradient per training image, with the statistics of every preconditioner."""
    run = logix.LogIX(name, {"root_dir": str(out / "logix")}, overwrite=True)
    run.watch(model)
    # One pass saves the gradients and finds K-FAC's eigenvectors, another measures along them.
    first = {"log": "grad", "save": "grad", "statistic": ["diagonal", "kfac", "ekfac"]}
    for words in (first, {"log": "grad", "statistic": "ekfac"}):
        run.setup(words)
        for ids in torch.arange(len(x)).split(100):
            with run(data_id=ids):  # a sum: each image's gradient is that of its own loss
                cross_entropy(model(x[ids]), y[ids], reduction="sum").backward()
        run.finalize()
    return run


# --- training: many networks at once -------------------------------------------------------------


def train(x: Tensor, y: Tensor, rows: Tensor, seed: int) -> list[nn.Module]:
    """One network for each row of `rows` (networks, n), the images it may see."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        make = lambda: nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
        models: list[nn.Module] = [make() for _ in rows]
        parameters, _ = stack_module_state(models)
        forward = vmap(lambda p, inputs: functional_call(models[0], p, (inputs,)))
        optimizer = torch.optim.AdamW(parameters.values(), weight_decay=DECAY)
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
            batch = rows.gather(1, torch.randint(rows.shape[1], (len(rows), BATCH)))
            logits = forward(parameters, x[batch]).flatten(0, 1)
            # Networks share no parameter: the gradient of their sum is that of each.
            loss = cross_entropy(logits, y[batch].flatten(), reduction="sum") / BATCH
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for i, model in enumerate(models):
        model.load_state_dict({name: p[i].detach() for name, p in parameters.items()})
    return models


@torch.no_grad()
def predict(models: list[nn.Module], x: Tensor) -> Tensor:
    """Log-probabilities (networks, images, classes)."""
    return torch.stack([model(x).log_softmax(-1) for model in models])


def retrain(x, y, query_x, query_y, subsets: int, seeds: int) -> tuple[np.ndarray, np.ndarray]:
    """Random halves of the data (subsets, train), and the log-likelihood of each query's label
    under networks trained on them (subsets, seeds, queries)."""
    rng = np.random.default_rng(1)
    halves = np.stack([rng.permutation(TRAIN)[: TRAIN // 2] for _ in range(subsets)])
    masks = np.zeros((subsets, TRAIN), bool)
    np.put_along_axis(masks, halves, True, axis=1)
    rows = torch.from_numpy(np.repeat(halves, seeds, axis=0))
    logs = predict(train(x, y, rows, seed=1), query_x)
    outputs = logs[:, torch.arange(len(query_y)), query_y]
    return masks, outputs.reshape(subsets, seeds, -1).numpy()


# --- data and picture ----------------------------------------------------------------------------


def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The 8 by 8 pixel digits of scikit-learn, shuffled and split: no download."""
    bunch = load_digits()
    order = np.random.default_rng(0).permutation(len(bunch.target))[: TRAIN + QUERIES]
    x = torch.tensor(bunch.data[order] / 16.0, dtype=torch.float32)
    y = torch.tensor(bunch.target[order])
    return (x[:TRAIN], y[:TRAIN]), (x[TRAIN:], y[TRAIN:])


def with_errors(y: Tensor) -> tuple[Tensor, np.ndarray]:
    """Labels of which some are another digit, and which these are."""
    rng = np.random.default_rng(2)
    is_wrong = np.zeros(len(y), bool)
    is_wrong[rng.permutation(len(y))[:WRONG]] = True
    shift = torch.from_numpy(np.where(is_wrong, rng.integers(1, 10, len(y)), 0))
    return (y + shift) % 10, is_wrong


def picture(
    x: Tensor,
    y: Tensor,
    queries: tuple[Tensor, Tensor],
    logs: Tensor,
    scores: np.ndarray,
    suspects: np.ndarray,
    labels: Tensor,
    path: pathlib.Path,
    k: int = 6,
) -> None:
    """A few test images, each with the training images that helped and harmed it most; and the
    training images with the largest influence on themselves where some `labels` are wrong."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    query_x, query_y = queries
    hardest: dict[int, int] = {}  # of each digit, the image whose label is the least likely
    for q in logs[torch.arange(len(query_y)), query_y].argsort().tolist():
        hardest.setdefault(int(query_y[q]), q)
    chosen = [hardest[digit] for digit in sorted(hardest)[2:9]]
    columns = [1.3, 0.5, *[1] * k, 0.35, *[1] * k]  # the query, a gap, helped, a gap, harmed
    lines = [*[1] * len(chosen), 0.55, 1]  # test images, a gap, self-influence
    figure, axes = plt.subplots(
        len(lines), len(columns), figsize=(10.5, 9.6), width_ratios=columns, height_ratios=lines
    )
    figure.subplots_adjust(left=0.02, right=0.99, bottom=0.04, top=0.92, wspace=0.12, hspace=0.34)
    for axis in axes.flat:
        axis.axis("off")

    def show(axis: Any, image: Tensor, text: str, color: str) -> None:
        axis.axis("on")
        axis.imshow(image.numpy().reshape(8, 8), cmap="gray_r", vmin=0, vmax=1)
        axis.set_title(text, fontsize=9, pad=3, color=color)
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set(color=color, linewidth=1.2)

    def write(line: int, column: int, above: float, text: str, **style: Any) -> None:
        top = axes[line, 2].get_position().y1  # of small images, also for what is above a large one
        figure.text(axes[line, column].get_position().x0, top + above, text, **style)

    title, note = dict(fontsize=12, weight="bold"), dict(fontsize=9, color="0.35")
    for line, q in zip(axes, chosen):
        label, said = int(query_y[q]), int(logs[q].argmax())
        says = f"a {label}" if said == label else f"a {label}, taken for {said}"
        show(line[0], query_x[q], says, "black")
        order = scores[q].argsort()
        for axis, i in zip([*line[2 : 2 + k], *line[3 + k :]], [*order[: -k - 1 : -1], *order[:k]]):
            show(axis, x[i], f"{y[i]}", "C0" if y[i] == label else "C3")
    for column, text in {0: "test image", 2: "helped most", 3 + k: "harmed most"}.items():
        write(0, column, 0.045, text, **title)
    text = "training images with their labels, blue if the test image has the same"
    write(0, 2, 0.026, text, **note)

    for axis, i in zip([*axes[-1, 2 : 2 + k], *axes[-1, 3 + k :]], suspects):
        wrong = labels[i] != y[i]
        text = f"{labels[i]}, is a {y[i]}" if wrong else f"{labels[i]}"
        show(axis, x[i], text, "C3" if wrong else "black")
    write(-1, 2, 0.045, "largest influence on themselves", **title)
    text = f"with {WRONG / len(x):.0%} of all labels wrong: red if its own is, black if it is right"
    write(-1, 2, 0.026, text, **note)
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="retrain far fewer networks")
    parser.add_argument("--out", type=pathlib.Path, default=OUT)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the matrices are small: a second thread would only wait
    main(**(QUICK if arguments.quick else {}), out=arguments.out)
