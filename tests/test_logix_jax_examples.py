"""The example of logix for JAX runs, with short settings, and what it finds is right."""

from __future__ import annotations

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("flax")

import logix
from example_files import load


def test_attribute_jax(tmp_path, capsys):
    example = load("attribute_jax")
    found = example.main(**example.QUICK, out=tmp_path)
    printed = capsys.readouterr().out
    assert found["accuracy"] > 0.9
    quality = found["lds"]
    assert quality["none"] > 0.2
    for kind in ("kfac", "ekfac"):
        assert quality["none"] + 0.1 < quality[kind] < quality["ceiling"] <= 1
    run = logix.LogIX("digits-jax", {"root_dir": str(tmp_path / "logix")})
    run.initialize_from_log()
    assert run.store().ids == list(range(example.TRAIN))
    assert (tmp_path / "attribute_jax.png").stat().st_size > 10_000
    assert f"preconditioned by kfac     {quality['kfac']:.3f}" in printed
    assert "hidden/kernel" in printed
