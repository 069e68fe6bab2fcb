"""Which training images explain what a classifier says of a test image? In JAX, with Flax NNX.

The same question as in `attribute_digits.py`, of the same data, asked to a network of JAX. The
model is not changed in any way: `logix` reads the program of its loss. All networks are trained by
one `jax.jit`, mapped over what each of them may see.

Run it with `python examples/attribute_jax.py`; `--quick` retrains far fewer networks.
"""

from __future__ import annotations

import argparse
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import logix
from logix.evaluate import lds

OUT = pathlib.Path(__file__).resolve().parent / "out"
TRAIN, QUERIES = 1000, 200
KINDS = ("none", "diagonal", "kfac", "ekfac")  # preconditioners, all at their default damping
NAMES = dict(zip(KINDS, ["gradients as they are", *(f"preconditioned by {k}" for k in KINDS[1:])]))
QUICK = dict(subsets=40, seeds=2)
WIDTH, STEPS, BATCH, RATE, DECAY = 32, 400, 50, 5e-3, 0.1  # of every network that is trained


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        near = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        self.hidden = nnx.Linear(64, WIDTH, kernel_init=near, rngs=rngs)
        self.out = nnx.Linear(WIDTH, 10, kernel_init=near, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


graph = nnx.graphdef(Network(nnx.Rngs(0)))


def logits(params, x):
    return nnx.merge(graph, params)(x)


def loss(params, example):
    """Of one image: all that `logix` has to know."""
    each = optax.softmax_cross_entropy_with_integer_labels
    return each(logits(params, example["x"]), example["y"])


def main(subsets: int = 100, seeds: int = 5, out: pathlib.Path = OUT) -> dict[str, Any]:
    started = time.perf_counter()
    data, queries = digits()

    # One network, and the scores (queries, train) that its gradients give.
    params = jax.tree.map(lambda p: p[0], train(data, np.arange(TRAIN)[None], seed=0))
    right = logits(params, queries["x"]).argmax(-1) == queries["y"]
    print(f"A network has learned {TRAIN} digits; of {QUERIES} it knows {right.mean():.1%}.")

    run = logix.LogIX("digits-jax", {"root_dir": str(out / "logix")}, overwrite=True)
    run.setup({"log": "grad", "save": "grad", "statistic": ["diagonal", "kfac", "ekfac"]})
    run.watch(loss, params)
    batches = [{k: v[i : i + 100] for k, v in data.items()} for i in range(0, TRAIN, 100)]
    run.extract(batches, ids=range(TRAIN))
    run.finalize()
    print(run.coverage(), end="\n\n")

    log = run.log(queries, ids=[f"query {i}" for i in range(QUERIES)])
    influence = run.influence.compute_influence_all
    scores = {kind: influence(log, hessian=kind).influence for kind in KINDS}

    # What retraining says.
    retraining = time.perf_counter()
    masks, outputs = retrain(data, queries, subsets, seeds)
    seconds = time.perf_counter() - retraining
    print(f"{subsets * seeds} more, each on a random half of the digits, took {seconds:.1f} s.")
    quality = {kind: lds(scores[kind], masks, outputs) for kind in KINDS}
    print("Do the scores predict how well each of these does on a test image? (LDS: 1 if always)")
    for kind, q in quality.items():
        print(f"  {NAMES[kind]:26s} {q.mean:.3f}   (95%: {q.low:.3f} to {q.high:.3f})")
    ceiling = quality["none"].ceiling
    print(
        f"  {'the best that is possible':26s} {ceiling:.3f}   (retraining has noise of its own)\n"
    )

    path = out / "attribute_jax.png"
    picture(data, queries, np.asarray(right), scores["ekfac"], path)
    print(f"picture: {path}\nlogs:    {run.path}/rows   (`logix info` tells what they are)")
    return {
        "lds": {kind: q.mean for kind, q in quality.items()} | {"ceiling": ceiling},
        "accuracy": float(right.mean()),
        "seconds": {"retraining": seconds, "all": time.perf_counter() - started},
    }


def train(data: dict[str, Any], rows: np.ndarray, seed: int) -> Any:
    """The parameters of one network for each row of `rows` (networks, n), the images it may see."""
    rate = optax.linear_schedule(RATE, 0.0, STEPS)
    optimizer = optax.adamw(rate, weight_decay=DECAY)
    mean = lambda params, batch: jax.vmap(loss, in_axes=(None, 0))(params, batch).mean()

    def one(key, mine):
        start, key = jax.random.split(key)
        params = nnx.state(Network(nnx.Rngs(start)))

        def step(carry, key):
            params, state = carry
            chosen = mine[jax.random.randint(key, (BATCH,), 0, len(mine))]
            grads = jax.grad(mean)(params, jax.tree.map(lambda x: x[chosen], data))
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        keys = jax.random.split(key, STEPS)
        (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), keys)
        return params

    return jax.jit(jax.vmap(one))(
        jax.random.split(jax.random.key(seed), len(rows)), jnp.asarray(rows)
    )


def retrain(data, queries, subsets: int, seeds: int) -> tuple[np.ndarray, np.ndarray]:
    """Random halves of the data (subsets, train), and the log-likelihood of each query's label
    under networks trained on them (subsets, seeds, queries)."""
    rng = np.random.default_rng(1)
    halves = np.stack([rng.permutation(TRAIN)[: TRAIN // 2] for _ in range(subsets)])
    masks = np.zeros((subsets, TRAIN), bool)
    np.put_along_axis(masks, halves, True, axis=1)
    networks = train(data, np.repeat(halves, seeds, axis=0), seed=1)
    likely = lambda params: -jax.vmap(loss, in_axes=(None, 0))(params, queries)
    outputs = np.asarray(jax.jit(jax.vmap(likely))(networks))
    return masks, outputs.reshape(subsets, seeds, -1)


def digits() -> tuple[dict[str, Any], dict[str, Any]]:
    """The 8 by 8 pixel digits of scikit-learn, shuffled and split: no download."""
    bunch = load_digits()
    order = np.random.default_rng(0).permutation(len(bunch.target))[: TRAIN + QUERIES]
    x, y = (bunch.data[order] / 16).astype(np.float32), bunch.target[order].astype(np.int32)
    part = lambda some: {"x": jnp.asarray(x[some]), "y": jnp.asarray(y[some])}
    return part(slice(TRAIN)), part(slice(TRAIN, None))


def picture(data, queries, right: np.ndarray, scores: np.ndarray, path: pathlib.Path) -> None:
    """Test images that the network gets wrong, with what helped and harmed each of them most."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    chosen, k = [*np.flatnonzero(~right), *np.flatnonzero(right)][:6], 5
    gaps = [1.2, *[1] * k, 0.4, *[1] * k]
    figure, axes = plt.subplots(6, 2 * k + 2, figsize=(9, 6.4), width_ratios=gaps)
    figure.subplots_adjust(left=0.02, right=0.99, bottom=0.02, top=0.87, wspace=0.1, hspace=0.35)
    for line, q in zip(axes, chosen):
        order, label = scores[q].argsort(), int(queries["y"][q])
        shown = [(queries, q), *((data, i) for i in order[: -k - 1 : -1]), None]
        for axis, what in zip(line, [*shown, *((data, i) for i in order[:k])]):
            axis.axis("off")
            if what is not None:
                source, i = what
                axis.imshow(np.asarray(source["x"][i]).reshape(8, 8), cmap="gray_r", vmin=0, vmax=1)
                same = int(source["y"][i]) == label
                color = "black" if source is queries else "C0" if same else "C3"
                axis.set_title(str(int(source["y"][i])), fontsize=9, pad=2, color=color)
    for column, text in {0: "test image", 1: "helped most", k + 2: "harmed most"}.items():
        at = axes[0, column].get_position().x0
        figure.text(at, 0.955, text, fontsize=11, weight="bold")
        if column == 1:
            note = "training images with their labels, blue if the test image has the same"
            figure.text(at, 0.925, note, fontsize=9, color="0.35")
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="retrain far fewer networks")
    parser.add_argument("--out", type=pathlib.Path, default=OUT)
    arguments = parser.parse_args()
    main(**(QUICK if arguments.quick else {}), out=arguments.out)
