"""PPO on CartPole with eight seeds at once: watched live, saved as runs, plotted with its band.

Environment, agent and optimiser are one compiled program, vmapped over seeds. `train` says what is
worth logging and knows nothing of who listens. That is decided in `main`, from outside:

- a live table in the terminal, with the mean over seeds and the time that is left;
- a run on disk for each seed, read back at the end;
- a run for each seed in Weights & Biases, offline, if it is installed.

Run it with `make demo`, or `python examples/ppo_seeds.py --updates 100 --seeds 4`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import pathlib
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lox

OUT = pathlib.Path(__file__).resolve().parent / "out"


@dataclasses.dataclass(frozen=True)
class Settings:
    updates: int = 300
    envs: int = 8
    horizon: int = 64  # steps of each environment in an update
    epochs: int = 4
    minibatches: int = 4
    width: int = 64
    learning_rate: float = 1e-3  # at first; it falls to zero
    max_grad_norm: float = 0.5
    discount: float = 0.99
    gae: float = 0.95
    clip: float = 0.2
    value_weight: float = 0.5
    entropy_weight: float = 0.01


# --- the environment: a pole on a cart, after Barto, Sutton and Anderson (1983) ------------------

GRAVITY, FORCE, CART, POLE, HALF_LENGTH, DT, TIME_LIMIT = 9.8, 10.0, 1.0, 0.1, 0.5, 0.02, 500


def reset(key):
    """Position, speed, angle and spin of a pole that is nearly upright."""
    return jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)


def push(state, action):
    """The state after a push to the left (0) or right (1), and whether the pole has fallen."""
    _, speed, angle, spin = state
    sin, cos, mass = jnp.sin(angle), jnp.cos(angle), CART + POLE
    force = jnp.where(action == 1, FORCE, -FORCE) + POLE * HALF_LENGTH * spin**2 * sin
    lever = HALF_LENGTH * (4 / 3 - POLE * cos**2 / mass)
    turn = (GRAVITY * sin - cos * force / mass) / lever
    pull = (force - POLE * HALF_LENGTH * turn * cos) / mass
    state = state + DT * jnp.stack([speed, pull, spin, turn])
    return state, (jnp.abs(state[0]) > 2.4) | (jnp.abs(state[2]) > jnp.deg2rad(12))


# --- the agent: two perceptrons, as a plain pytree -----------------------------------------------


def init(key, width):
    keys = iter(jax.random.split(key, 6))

    def layer(m, n, scale=1.0):
        return {"w": scale * m**-0.5 * jax.random.normal(next(keys), (m, n)), "b": jnp.zeros(n)}

    perceptron = lambda n, scale: [layer(4, width), layer(width, width), layer(width, n, scale)]
    return {"actor": perceptron(2, 0.01), "critic": perceptron(1, 1.0)}


def apply(layers, x):
    *hidden, last = layers
    for layer in hidden:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ last["w"] + last["b"]


def policy(params, state):
    """The logarithm of the probability of each action."""
    return jax.nn.log_softmax(apply(params["actor"], state))


def value(params, state):
    return apply(params["critic"], state)[..., 0]


def of_action(logp, action):
    return jnp.take_along_axis(logp, action[..., None], -1)[..., 0]


# --- PPO: it logs, and knows nothing of who listens ----------------------------------------------


def rollout(params, env, key, settings):
    """Play. What is done begins anew. Returns the environments, and (horizon, envs) of all seen."""

    def step(env, key):
        act_key, reset_key = jax.random.split(key)
        state, age, score = env
        logp = policy(params, state)
        action = jax.random.categorical(act_key, logp)
        after, fell = jax.vmap(push)(state, action)
        age = age + 1  # which is also the return: every step is rewarded with 1
        done = fell | (age == TIME_LIMIT)
        seen = dict(state=state, action=action, logp=of_action(logp, action))
        seen |= dict(after=after, fell=fell, done=done)
        fresh = jax.vmap(reset)(jax.random.split(reset_key, settings.envs))
        state = jnp.where(done[:, None], fresh, after)
        return (state, jnp.where(done, 0, age), jnp.where(done, age, score)), seen

    return jax.lax.scan(step, env, jax.random.split(key, settings.horizon))


def advantages(params, seen, settings):
    """Generalised advantage estimation. The time limit is no failure: what follows has a value."""
    now, later = value(params, seen["state"]), value(params, seen["after"])
    surprise = 1.0 + settings.discount * jnp.where(seen["fell"], 0.0, later) - now

    def back(ahead, x):
        surprise, done = x
        ahead = surprise + settings.discount * settings.gae * jnp.where(done, 0.0, ahead)
        return ahead, ahead

    start = jnp.zeros(settings.envs)
    _, advantage = jax.lax.scan(back, start, (surprise, seen["done"]), reverse=True)
    return dict(advantage=advantage, target=advantage + now)


def objective(params, batch, settings):
    """The clipped objective, and what is worth knowing of it."""
    logp = policy(params, batch["state"])
    change = of_action(logp, batch["action"]) - batch["logp"]
    ratio = jnp.exp(change)
    bounded = jnp.clip(ratio, 1 - settings.clip, 1 + settings.clip)
    advantage = jax.nn.standardize(batch["advantage"])
    policy_loss = -jnp.minimum(ratio * advantage, bounded * advantage).mean()
    value_loss = 0.5 * jnp.square(value(params, batch["state"]) - batch["target"]).mean()
    entropy = -(jnp.exp(logp) * logp).sum(-1).mean()
    loss = policy_loss + settings.value_weight * value_loss - settings.entropy_weight * entropy
    stats = {"loss": loss, "policy_loss": policy_loss, "value_loss": value_loss}
    stats |= {"entropy": entropy, "kl": (ratio - 1 - change).mean()}
    return loss, stats | {"clip_fraction": (ratio != bounded).mean()}


def train(key, settings):
    """One training run."""
    init_key, env_key, run_key = jax.random.split(key, 3)
    steps = settings.updates * settings.epochs * settings.minibatches
    optimizer = optax.chain(
        optax.clip_by_global_norm(settings.max_grad_norm),
        optax.adam(optax.linear_schedule(settings.learning_rate, 0.0, steps)),
    )

    def learn(carry, batch):
        params, opt = carry
        grads, stats = jax.grad(objective, has_aux=True)(params, batch, settings)
        stats["grad_norm"] = optax.tree.norm(grads)
        updates, opt = optimizer.update(grads, opt)
        return (optax.apply_updates(params, updates), opt), stats

    def update(carry, i):
        params, opt, env = carry
        play_key, order_key = jax.random.split(jax.random.fold_in(run_key, i))
        env, seen = rollout(params, env, play_key, settings)
        seen |= advantages(params, seen, settings)
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), seen)

        def epoch(carry, key):
            rows = jax.random.permutation(key, settings.horizon * settings.envs)
            shuffled = lambda x: x[rows].reshape(settings.minibatches, -1, *x.shape[1:])
            return jax.lax.scan(learn, carry, jax.tree.map(shuffled, flat))

        epochs = jax.random.split(order_key, settings.epochs)
        (params, opt), stats = jax.lax.scan(epoch, (params, opt), epochs)
        played = {"return": env[2].mean(), "episodes": seen["done"].sum()}
        lox.log(played | jax.tree.map(jnp.mean, stats), step=i)
        return (params, opt, env), None

    params, zeros = init(init_key, settings.width), jnp.zeros(settings.envs, int)
    env = (jax.vmap(reset)(jax.random.split(env_key, settings.envs)), zeros, zeros)
    carry = (params, optimizer.init(params), env)
    (params, _, _), _ = jax.lax.scan(update, carry, jnp.arange(settings.updates))
    return params


# --- the caller: it decides what becomes of the logs ---------------------------------------------


def main(settings: Settings, seeds: int, out: pathlib.Path, wandb: bool = False) -> lox.logdict:
    loggers = [
        lox.loggers.ConsoleLogger(total=settings.updates),
        lox.loggers.SaveLogger(out / "runs", exists="overwrite"),
    ]
    if wandb:
        offline = dict(mode="offline", dir=out, settings={"silent": True})
        loggers += [lox.loggers.WandbLogger("cartpole", exists="overwrite", **offline)]

    with lox.loggers.MultiLogger(*loggers) as logger:
        begin = lambda key: logger.init(key, name="ppo-{lane}", config=settings)
        run = lambda key, state: logger.tap(train, state, every=10)(key, settings)
        keys = jax.random.split(jax.random.key(0), seeds)
        states = jax.vmap(begin)(keys)  # one run for each seed
        jax.block_until_ready(jax.jit(jax.vmap(run))(keys, states))

    # Read the runs back, and put an axis over seeds in front, as `vmap` does.
    runs = lox.runs(out / "runs")
    logs = [runs[f"ppo-{i}"].load() for i in range(seeds)]
    logs = jax.tree.map(lambda *each: np.stack(each), *logs)
    figure = logs.plot("return", "entropy", band="minmax", size=(5.0, 3.2))
    figure.suptitle(f"PPO on CartPole: mean and range of {seeds} seeds", fontsize=11)
    figure.savefig(out / "ppo_seeds.png", dpi=150)

    last = logs["return"][:, -10:].mean(1)
    here = out.relative_to(pathlib.Path.cwd()) if out.is_relative_to(pathlib.Path.cwd()) else out
    print(f"return   {last.mean():.0f} ± {last.std():.0f} in the last updates, 500 is the most")
    print(f"picture  {here}/ppo_seeds.png")
    print(f"runs     {here}/runs; see them with")
    lox_command = "lox" if shutil.which("lox") else os.path.relpath(sys.exec_prefix) + "/bin/lox"
    print(f"         {lox_command} ls {here}/runs")
    print(f"         {lox_command} plot {here}/runs/ppo return")
    return logs


if __name__ == "__main__":
    installed = importlib.util.find_spec("wandb") is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=Settings.updates)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--out", type=pathlib.Path, default=OUT)
    parser.add_argument("--wandb", action=argparse.BooleanOptionalAction, default=installed)
    given = parser.parse_args()
    main(Settings(updates=given.updates), given.seeds, given.out, given.wandb)
