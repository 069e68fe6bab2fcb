"""The examples of logix run, with short settings, and what they find is right."""

from __future__ import annotations

import importlib.util
import pathlib

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

import logix  # noqa: E402

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_attribute_digits(one_thread, tmp_path, capsys):
    example = load("attribute_digits")
    state = torch.random.get_rng_state()
    found = example.main(**example.QUICK, out=tmp_path)
    printed = capsys.readouterr().out
    assert torch.equal(state, torch.random.get_rng_state())
    assert found["accuracy"] > 0.9

    # Scores predict what retraining does, and curvature makes them better.
    quality = found["lds"]
    assert quality["none"] > 0.2
    for kind in ("kfac", "ekfac"):
        assert quality["none"] + 0.1 < quality[kind] < quality["ceiling"] <= 1

    # Planted errors are found: by chance, one in twenty would be.
    assert min(found["auroc"].values()) > 0.9
    assert min(found["precision"].values()) > 0.5

    # What it wrote, and what it printed of it.
    for name in ("digits", "digits-wrong"):
        run = logix.LogIX(name, {"root_dir": str(tmp_path / "logix")})
        run.initialize_from_log()
        assert run.store().ids == list(range(example.TRAIN))
        assert run.statistics
    assert (tmp_path / "attribute_digits.png").stat().st_size > 10_000
    assert f"{quality['kfac']:.3f}" in printed
    assert f"{quality['ceiling']:.3f}" in printed


def test_planted_errors_are_errors():
    example = load("attribute_digits")
    (_, y), _ = example.digits()
    labels, is_wrong = example.with_errors(y)
    assert is_wrong.sum() == example.WRONG
    assert ((labels != y).numpy() == is_wrong).all()
    assert labels.min() == 0
    assert labels.max() == 9
