"""Calls of a run over a loss of JAX that cannot be meant: each is told, with the call that can."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import logix
import logix.jax
import lox
from jax_run import N, close, cut, examples, loss, make, parameters, same_statistics

KFAC = {"save": "grad", "statistic": "kfac"}
EKFAC = {"save": "grad", "statistic": "ekfac"}


# --- what a run is asked to do --------------------------------------------------------------------


def test_ekfac_in_two_calls(tmp_path):
    first, second = examples(), examples(seed=1)
    run = make(tmp_path, EKFAC)
    run.extract(cut(first, 5), range(N))
    with pytest.raises(ValueError, match="give all batches in one call, or use statistic='kfac'"):
        run.extract(cut(second), range(N, 2 * N))
    want = jax.tree.map(np.array, run.statistics)
    run.setup(KFAC)
    assert run.extract(cut(second, 5), range(N, 2 * N)) == N
    assert int(run.statistics["l1/w"]["left_n"]) == 2 * N
    run.setup(EKFAC)
    for begin in (run.clear, partial(run.add_lora, rank=2)):
        begin()
        run.extract(cut(first, 5), save=False)
        assert int(run.statistics["l1/w"]["eigen_n"]) == N
        if run.compression.settings.kind == "none":
            same_statistics(run.statistics, want, 1e-4)


def test_ekfac_goes_on_with_what_an_earlier_run_has_saved(tmp_path):
    """In its eigenvectors: only the sums of squares in them grow."""
    run = make(tmp_path, EKFAC)
    run.extract(cut(examples(), 5), range(N))
    run.finalize()
    before = run.statistics["l1/w"]
    run = make(tmp_path, EKFAC, resume=True)
    run.initialize_from_log()
    run.extract(cut(examples(seed=1), 5), range(N, 2 * N))
    run.finalize()
    after = run.statistics["l1/w"]
    assert (int(after["eigen_n"]), int(after["left_n"])) == (2 * N, N)
    close(after["left_basis"], before["left_basis"])
    assert len(run.store()) == 2 * N


def test_nothing_to_do(tmp_path):
    batches = [examples()]
    run = logix.LogIX("run", {"root_dir": str(tmp_path)})
    run.watch(loss, parameters())
    nothing = pytest.raises(ValueError, match=r"neither saved nor summed.*run.setup.*run.log")
    with nothing:
        run.extract(batches, range(N))
    run.setup({"log": "grad"})
    with nothing:
        run.extract(batches, range(N))
    run.setup(KFAC)
    run.eval()
    with nothing:
        run.extract(batches, range(N))
    with pytest.raises(ValueError, match=r"log saves nothing: run.extract\(\[batch\], ids=ids\)"):
        run.log(examples(), save=True)
    assert run.extract(batches, range(N), save=True) == N
    run.finalize()
    assert len(run.store()) == N
    assert not run.statistics


# --- mistakes -------------------------------------------------------------------------------------


def logged_loss(p, e):
    lox.log({"hidden": e["x"] @ p["l1"]["w"]})
    return loss(p, e)


DATA = examples()
WITH_TEXT = {**DATA, "text": np.array(list("abcdefghij"))}
MISTAKES = {
    "strings": ([WITH_TEXT], range(N), r"\['text'\] is of <U1, which JAX has not.*ids='key'"),
    "one batch": (DATA, range(N), r"One batch alone is given as \[batch\]"),
    "one array": (DATA["x"][0], range(N), r"One batch alone is given as \[batch\]"),
    "no key": ([DATA], "id", r"ids='id'.*its keys are \['x', 'y'\]"),
    "no dict": ([DATA["x"]], "id", "ids='id'.*it is no dict"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told(tmp_path, name):
    batches, ids, text = MISTAKES[name]
    with pytest.raises((TypeError, ValueError), match=text):
        make(tmp_path, KFAC).extract(batches, ids)


@pytest.mark.parametrize("patterns", [["h*", "out/*"], "out/*"])
def test_logs_that_match_nothing(patterns):
    with pytest.raises(ValueError, match=r"logs='out/\*': the loss logs no such .* Found: hidden"):
        logix.jax.capture(logged_loss, parameters(), logs=patterns)(parameters(), DATA)


def test_all_parameters_without_a_gradient_are_named():
    odd = {"n": jnp.arange(3), "key": jax.random.PRNGKey(0), "z": jnp.ones(2) * 1j}
    text = r"'key' is of uint32, 'n' is of int32, 'z' is of complex64.*not in \['key', 'n', 'z'\]"
    with pytest.raises(TypeError, match=text):
        logix.jax.capture(loss, {**parameters(), **odd})
