"""The examples run, with short settings, and what they log is right."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import lox

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"
pytest.importorskip("sklearn")
pytest.importorskip("optax")
pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def train_digits():
    spec = importlib.util.spec_from_file_location("train_digits", EXAMPLES / "train_digits.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    command = [sys.executable, "-W", "error", str(EXAMPLES / "train_digits.py")]
    options = ["--steps", "7", "--seeds", "2", "--out", str(tmp_path)]  # no multiple of anything
    paths = [str(pathlib.Path(lox.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    done = subprocess.run(
        [*command, *options], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout
    assert (tmp_path / "train_digits.png").exists()
