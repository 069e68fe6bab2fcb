"""The examples run, with short settings, and what they log is right."""

from __future__ import annotations

import functools
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import lox
from example_files import EXAMPLES, load

pytest.importorskip("sklearn")
pytest.importorskip("optax")
pytest.importorskip("matplotlib")


def script(name, *options):
    """Run an example as a user does. Returns what it printed."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py"), *options]
    paths = [str(pathlib.Path(lox.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"  # as in the other tests: they compile quickly
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def spooled(train, seeds):
    """What the runs of an example should have: the same program, its logs returned."""
    keys = jax.random.split(jax.random.key(0), seeds)
    return jax.jit(jax.vmap(lox.spool(train)))(keys)[1]


def assert_saved(path, name, logs, seeds):
    """There is a run for each seed, with exactly these logs."""
    runs = lox.runs(path)
    assert [run.name for run in runs] == [f"{name}-{i}" for i in range(seeds)]
    for i, run in enumerate(runs):
        saved = run.load()
        assert run.state == "closed"
        assert set(saved) == set(logs)
        for key in logs:
            assert saved[key].dtype == logs[key].dtype
            np.testing.assert_array_equal(saved[key], logs[key][i], err_msg=key)
        assert set(saved.steps) == set(logs.steps)
        for step, of_key in logs.steps.items():
            assert set(saved.steps[step]) == set(of_key)
            for key, want in of_key.items():
                np.testing.assert_array_equal(saved.steps[step][key], want[i], err_msg=key)


@pytest.fixture(scope="module")
def train_digits():
    return load("train_digits")


def test_train_digits(train_digits, tmp_path, capsys):
    steps, seeds = 80, 3
    logs = train_digits.main(steps=steps, seeds=seeds, out=tmp_path)
    lines = capsys.readouterr().out.splitlines()

    # The spool: every fifth step, every evaluation, one maximum; all seeds in front.
    assert logs["loss"].shape == logs["accuracy"].shape == (seeds, steps // 5)
    np.testing.assert_array_equal(logs.step["loss"], [range(0, steps, 5)] * seeds)
    assert logs["test loss"].shape == (seeds, train_digits.EVALUATIONS)
    np.testing.assert_array_equal(logs.step["test loss"], [range(1, steps, 2)] * seeds)
    assert logs["grad_norm"].shape == (seeds,)
    assert not logs.mask

    # The tap: one call for each window of all seeds.
    progress = [line for line in lines if line.startswith("  step")]
    assert [int(line.split()[1]) for line in progress] == list(range(10, steps + 1, 10))

    # It learns, and the seeds differ.
    loss = np.asarray(logs["loss"])
    assert (loss[:, -3:].mean(1) < 0.7 * loss[:, :3].mean(1)).all()
    assert len(np.unique(loss[:, 0])) == seeds

    # What it wrote.
    again = lox.load(tmp_path / "train_digits.lox")
    assert set(again) == set(logs)
    np.testing.assert_array_equal(again["test accuracy"], logs["test accuracy"])
    assert (tmp_path / "train_digits.png").stat().st_size > 10_000
    assert lines[-1].endswith("train_digits.png")


def test_train_digits_as_a_script(tmp_path):
    # Steps that are no multiple of anything.
    printed = script("train_digits", "--steps", "7", "--seeds", "2", "--out", str(tmp_path))
    assert "test accuracy" in printed
    assert (tmp_path / "train_digits.png").exists()


# --- PPO -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ppo_seeds():
    return load("ppo_seeds")


def test_ppo_seeds(ppo_seeds, tmp_path, capsys):
    settings, seeds = ppo_seeds.Settings(updates=24, envs=4, width=32), 3  # no multiple of every=
    logs = ppo_seeds.main(settings, seeds, tmp_path)
    printed = capsys.readouterr().out
    want = spooled(functools.partial(ppo_seeds.train, settings=settings), seeds)
    assert_saved(tmp_path / "runs", "ppo", want, seeds)
    assert lox.runs(tmp_path / "runs")[0].config["horizon"] == settings.horizon

    # It returns what it read, all seeds in front.
    assert set(logs) == set(want)
    np.testing.assert_array_equal(logs["kl"], want["kl"])
    np.testing.assert_array_equal(logs.step["kl"], [range(24)] * seeds)

    # It learns, and the seeds differ.
    assert (logs["return"][:, -3:].mean(1) > 2 * logs["return"][:, :3].mean(1)).all()
    assert len(np.unique(logs["loss"][:, 0])) == seeds

    # The console, the picture, and what to do next.
    assert "3 runs · step 23/24 · 100%" in printed
    assert (tmp_path / "ppo_seeds.png").stat().st_size > 10_000
    assert f"lox plot {tmp_path}/runs/ppo return" in printed


def test_ppo_seeds_as_a_script(tmp_path):
    options = ["--updates", "3", "--seeds", "2", "--out", str(tmp_path), "--no-wandb"]
    assert "return" in script("ppo_seeds", *options)
    assert [run.rows for run in lox.runs(tmp_path / "runs")] == [3, 3]
    assert (tmp_path / "ppo_seeds.png").exists()


def test_ppo_seeds_in_wandb(ppo_seeds, tmp_path):
    pytest.importorskip("wandb")
    settings = ppo_seeds.Settings(updates=2, envs=2, horizon=4, epochs=1, minibatches=1, width=4)
    for _ in range(2):  # the second time, over the same runs
        ppo_seeds.main(settings, 2, tmp_path, wandb=True)
    assert [run.rows for run in lox.runs(tmp_path / "runs")] == [2, 2]
    files = sorted(file.name for file in tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert files == ["run-ppo-0.wandb", "run-ppo-1.wandb"]


def test_cart_pole_falls_as_it_should(ppo_seeds):
    """Beside the equations of motion, solved as a linear system and not by hand."""
    rng = np.random.default_rng(0)
    for action in (0, 1):
        state = rng.uniform(-0.1, 0.1, 4)
        _, speed, angle, spin = state
        m, half, mass = ppo_seeds.POLE, ppo_seeds.HALF_LENGTH, ppo_seeds.POLE + ppo_seeds.CART
        force = ppo_seeds.FORCE if action else -ppo_seeds.FORCE
        # Newton for both bodies along the track; torque about the pivot of a rod of length 2 half.
        matrix = [[mass, m * half * np.cos(angle)], [np.cos(angle), 4 / 3 * half]]
        drive = [force + m * half * spin**2 * np.sin(angle), ppo_seeds.GRAVITY * np.sin(angle)]
        pull, turn = np.linalg.solve(matrix, drive)
        want = state + ppo_seeds.DT * np.array([speed, pull, spin, turn])
        after, fell = ppo_seeds.push(np.asarray(state, np.float32), action)
        np.testing.assert_allclose(after, want, rtol=1e-4, atol=1e-6)
        assert not fell
    assert ppo_seeds.push(np.array([2.4, 1.0, 0.0, 0.0], np.float32), 1)[1]  # off the track
    assert ppo_seeds.push(np.array([0.0, 0.0, -0.21, 0.0], np.float32), 1)[1]  # fallen


# --- Flax ----------------------------------------------------------------------------------------


def test_train_mlp(tmp_path, capsys):
    pytest.importorskip("flax")
    train_mlp = load("train_mlp")
    epochs, seeds = 3, 3
    logs = train_mlp.main(epochs, seeds, tmp_path)
    printed = capsys.readouterr().out
    train_set, test_set = train_mlp.digits()
    batches = len(train_set[1]) // train_mlp.BATCH

    def train(key):
        return train_mlp.train(key, train_set, test_set, epochs)

    want = spooled(train, seeds)
    assert_saved(tmp_path / "runs", "mlp", want, seeds)
    assert want["loss"].shape == (seeds, epochs * batches)
    assert want["dead units"].shape == (seeds, epochs)
    assert want["test accuracy by digit"].shape == (seeds, epochs, 10)
    np.testing.assert_array_equal(logs.epoch["test accuracy"], [range(epochs)] * seeds)
    np.testing.assert_array_equal(logs["test accuracy"], want["test accuracy"])
    assert (logs["test accuracy"][:, -1] > 0.8).all()
    assert f"3 runs · step {epochs * batches - 1}/{epochs * batches} · 100%" in printed
    assert (tmp_path / "train_mlp.png").stat().st_size > 10_000


def test_train_mlp_as_a_script(tmp_path):
    pytest.importorskip("flax")
    printed = script("train_mlp", "--epochs", "1", "--seeds", "2", "--out", str(tmp_path))
    assert "test accuracy" in printed
    assert (tmp_path / "train_mlp.png").exists()
