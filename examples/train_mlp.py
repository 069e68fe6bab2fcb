"""A Flax NNX model on handwritten digits, with several seeds: watched live, saved, plotted.

All epochs are one compiled program. Logs stand where the numbers are: in the model, in the loss,
after each epoch. Some have a step, some an epoch as well; one is an array.

Run it with `python examples/train_mlp.py`, or with `--epochs 10 --seeds 3`.
"""

from __future__ import annotations

import argparse
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import lox

OUT = pathlib.Path(__file__).resolve().parent / "out"
BATCH = 50


class MLP(nnx.Module):
    def __init__(self, rngs, width=128):
        self.first = nnx.Linear(64, width, rngs=rngs)
        self.second = nnx.Linear(width, width, rngs=rngs)
        self.last = nnx.Linear(width, 10, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x, train=False):
        x = nnx.relu(self.first(x))
        x = nnx.relu(self.second(self.dropout(x, deterministic=not train)))
        if not train:
            lox.log({"dead units": (x == 0).all(0).sum()})
        return self.last(x)


# The parts of the program: they log, and know nothing of who listens.


def loss_fn(model, x, y, i):
    logits = model(x, train=True)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    lox.log({"loss": loss, "accuracy": (logits.argmax(-1) == y).mean()}, step=i)
    return loss


def evaluate(model, x, y, **steps):
    right = (model(x).argmax(-1) == y).astype(float)
    of_digit = jax.nn.one_hot(y, 10, axis=0)
    by_digit = of_digit @ right / of_digit.sum(1)
    lox.log({"test accuracy": right.mean(), "test accuracy by digit": by_digit}, **steps)


def train(key, train_set, test_set, epochs):
    """One training run: all epochs, inside of whatever transforms it."""
    rngs = nnx.Rngs(key)
    model = MLP(rngs)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    images, labels = train_set
    batches = len(labels) // BATCH

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def step(carry, batch):
        model, optimizer = carry
        grads = nnx.grad(loss_fn)(model, *batch)
        optimizer.update(model, grads)
        return carry

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def epoch(carry, i):
        model, optimizer, rngs = carry
        rows = jax.random.permutation(rngs.shuffle(), len(labels))[: batches * BATCH]
        rows = rows.reshape(batches, BATCH)
        steps = i * batches + jnp.arange(batches)
        step((model, optimizer), (images[rows], labels[rows], steps))
        evaluate(model, *test_set, step=steps[-1], epoch=i)
        return carry

    epoch((model, optimizer, rngs), jnp.arange(epochs))
    return nnx.state(model, nnx.Param)


def main(epochs: int, seeds: int, out: pathlib.Path) -> lox.logdict:
    train_set, test_set = digits()
    steps = epochs * (len(train_set[1]) // BATCH)
    console = lox.loggers.ConsoleLogger(total=steps, keys=["loss", "test *", "dead units"])
    save = lox.loggers.SaveLogger(out / "runs", exists="overwrite")

    with lox.loggers.MultiLogger(console, save) as logger:

        @jax.jit
        @jax.vmap
        def run(key):
            # The program begins its runs itself: one for each seed.
            state = logger.init(key, name="mlp-{lane}", config=dict(epochs=epochs, batch=BATCH))
            # One host call for each epoch, with the events of all its steps.
            train_one = functools.partial(train, epochs=epochs)
            return logger.tap(train_one, state, every=1)(key, train_set, test_set)

        jax.block_until_ready(run(jax.random.split(jax.random.key(0), seeds)))

    runs = lox.runs(out / "runs")
    logs = [runs[f"mlp-{i}"].load("test accuracy") for i in range(seeds)]
    logs = jax.tree.map(lambda *each: np.stack(each), *logs)
    figure = logs.plot(x="epoch", band="minmax", size=(6.0, 3.6))
    figure.savefig(out / "train_mlp.png", dpi=150)
    last = logs["test accuracy"][:, -1]
    print(f"test accuracy {last.mean():.3f} ± {last.std():.3f}: {out / 'train_mlp.png'}")
    return logs


def digits():
    """The 8 by 8 pixel digits of scikit-learn: no download."""
    data = load_digits()
    split = train_test_split(data.data / 16, data.target, test_size=0.25, random_state=0)
    images, test_images, labels, test_labels = map(jnp.asarray, split)
    return (images, labels), (test_images, test_labels)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--out", type=pathlib.Path, default=OUT)
    given = parser.parse_args()
    main(given.epochs, given.seeds, given.out)
