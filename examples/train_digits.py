"""Train a small classifier on handwritten digits with eight seeds at once, and look at its curves.

The whole training run is one compiled program: a scan over steps, vmapped over seeds. The train
step says what is worth logging. What becomes of it is decided in `main`, from outside:

- `lox.tap` prints a line of progress while the program runs: one host call for all seeds;
- `lox.spool` returns the curves, thinned or reduced as asked for.

Run it with `make demo`, or `python examples/train_digits.py --steps 100`.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import lox

OUT = pathlib.Path(__file__).resolve().parent / "out"
WIDTHS = (64, 64, 32, 10)
BATCH = 64
EVALUATIONS = 40  # in a run
optimizer = optax.adam(2e-3)


# --- the program: it logs, and knows nothing of who listens --------------------------------------


def init(key):
    """Parameters of a multilayer perceptron."""
    keys = jax.random.split(key, len(WIDTHS) - 1)
    he = lambda k, m, n: jax.random.normal(k, (m, n)) * jnp.sqrt(2.0 / m)
    shapes = zip(keys, WIDTHS[:-1], WIDTHS[1:], strict=True)
    return [{"w": he(k, m, n), "b": jnp.zeros(n)} for k, m, n in shapes]


def evaluate(params, x, y):
    """Loss and accuracy."""
    *hidden, last = params
    for layer in hidden:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    logits = x @ last["w"] + last["b"]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    return loss, (logits.argmax(-1) == y).mean()


def train(key, train_set, test_set, steps):
    """One training run."""
    x, y = train_set
    init_key, batch_keys = jax.random.split(key)
    params = init(init_key)
    test_every = max(1, steps // EVALUATIONS)

    def step(carry, i):
        params, state = carry
        rows = jax.random.randint(jax.random.fold_in(batch_keys, i), (BATCH,), 0, len(x))
        value_and_grad = jax.value_and_grad(evaluate, has_aux=True)
        (loss, accuracy), grads = value_and_grad(params, x[rows], y[rows])
        lox.log({"loss": loss, "accuracy": accuracy}, step=i)
        lox.log({"grad_norm": optax.tree.norm(grads)}, reduce="max", step=i)
        updates, state = optimizer.update(grads, state)
        params = optax.apply_updates(params, updates)

        def test():
            loss, accuracy = evaluate(params, *test_set)
            lox.log({"test loss": loss, "test accuracy": accuracy}, step=i)

        jax.lax.cond((i + 1) % test_every == 0, test, lambda: None)
        return (params, state), None

    carry = (params, optimizer.init(params))
    (params, _), _ = jax.lax.scan(step, carry, jnp.arange(steps))
    return params


# --- the caller: it decides what becomes of the logs ---------------------------------------------


def main(steps: int, seeds: int, out: pathlib.Path) -> lox.logdict:
    train_set, test_set = digits()
    keys = jax.random.split(jax.random.key(0), seeds)
    one_run = functools.partial(train, train_set=train_set, test_set=test_set, steps=steps)
    program = jax.vmap(one_run)

    # Progress: eight lines in all, each the mean over its window of steps. `keep_logs` leaves the
    # events where they are, for the spools around it.
    curve = ["loss", "accuracy"]
    window = max(1, steps // 8)
    program = lox.tap(program, show, curve, every=window, reduce="mean", keep_logs=True)
    # The training curve: every fifth step is enough. The rest: every evaluation, and the largest
    # norm of a gradient, which its own log call asks to be reduced.
    program = lox.spool(program, curve, interval=5)
    program = lox.spool(program)

    print(f"{seeds} seeds, {steps} steps, {len(train_set[1])} images; compiling ...", flush=True)
    started = time.perf_counter()
    (_, curves), rest = jax.block_until_ready(jax.jit(program)(keys))
    lox.flush()  # every line of progress has been printed
    print(f"done in {time.perf_counter() - started:.1f} s, compilation included\n")

    # A step may or may not evaluate: `rest` has a row for each step and a mask. On the host the
    # rows that did not happen can go.
    logs = curves | rest.compact()
    table(logs)
    out.mkdir(parents=True, exist_ok=True)
    lox.save(logs, out / "train_digits.lox")
    picture(lox.load(out / "train_digits.lox"), out / "train_digits.png")
    print(f"\nlogs:    {_short(out / 'train_digits.lox')}   (read them with lox.load)")
    print(f"picture: {_short(out / 'train_digits.png')}")
    return logs


def show(logs: lox.logdict) -> None:
    """Called by the running program. Values are NumPy arrays, one entry for each seed."""
    step = int(np.max(logs.step["loss"])) + 1
    loss, accuracy = logs["loss"], logs["accuracy"]
    spread = f"{loss.min():.3f} to {loss.max():.3f}"
    print(f"  step {step:5d}   loss {loss.mean():.3f} ({spread})   accuracy {accuracy.mean():.3f}")


def digits():
    """The 8 by 8 pixel digits of scikit-learn, shuffled and split: no download."""
    bunch = load_digits()
    order = np.random.default_rng(0).permutation(len(bunch.target))
    pixels = jnp.asarray(bunch.data[order] / 16.0, jnp.float32)
    labels = jnp.asarray(bunch.target[order], jnp.int32)
    return (pixels[:1400], labels[:1400]), (pixels[1400:], labels[1400:])


def table(logs: lox.logdict) -> None:
    """The end of every curve: mean and standard deviation over seeds."""
    print(f"{'':14s} {'mean':>8s} {'std':>8s} {'worst':>8s}")
    last = logs.reduce("last")
    for key in ("loss", "test loss", "test accuracy", "grad_norm"):
        values = np.asarray(last[key])
        worst = values.min() if "accuracy" in key else values.max()
        print(f"{key:14s} {values.mean():8.4f} {values.std():8.4f} {worst:8.4f}")


def picture(logs: lox.logdict, path: pathlib.Path) -> None:
    """Loss and accuracy against steps: the mean over seeds, in a band from worst to best."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for axis, name in zip(axes, ("loss", "accuracy"), strict=True):
        for key, label, color in ((name, "train", "C0"), (f"test {name}", "test", "C3")):
            step, values = logs.step[key][0], logs[key]
            if label == "train":
                values = smooth(values)
            axis.fill_between(step, values.min(0), values.max(0), color=color, alpha=0.2, lw=0)
            axis.plot(step, values.mean(0), color=color, lw=1.8, label=label)
        axis.set(xlabel="step", title=name)
        axis.margins(x=0)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yscale("log")
    axes[1].set_ylim(min(0.7, float(logs["test accuracy"][:, -1].min())), 1.005)
    seeds = len(logs["loss"])
    axes[0].legend(frameon=False, title=f"mean and range of {seeds} seeds")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def smooth(values: np.ndarray, width: int = 5) -> np.ndarray:
    """A running mean over events, shorter at the ends."""
    sums = lambda x: np.convolve(x, np.ones(width), mode="same")
    if values.shape[1] < width:
        return values
    return np.stack([sums(row) for row in values]) / sums(np.ones(values.shape[1]))


def _short(path: pathlib.Path) -> str:
    here = pathlib.Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--out", type=pathlib.Path, default=OUT)
    arguments = parser.parse_args()
    main(arguments.steps, arguments.seeds, arguments.out)
