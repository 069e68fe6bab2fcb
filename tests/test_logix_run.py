"""A run of logix from its first call to its scores, with PyTorch models."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import logix  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[1]
N, B = 24, 6


@pytest.fixture
def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.randn(N, 5), torch.randint(0, 3, (N,))


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="sum")


def logged(run, model, x, y, ids=None):
    ids = list(range(len(x))) if ids is None else ids
    for i in range(0, len(x), B):
        with run(data_id=ids[i : i + B]):
            loss_of(model, x[i : i + B], y[i : i + B]).backward()
    run.finalize()


def rows_by_loop(model, x, y):
    rows = []
    for i in range(len(x)):
        grads = torch.autograd.grad(loss_of(model, x[i : i + 1], y[i : i + 1]), model.parameters())
        rows.append(torch.cat([g.reshape(-1) for g in grads]))
    return torch.stack(rows).numpy()


def make(tmp_path, model, words, **options):
    run = logix.LogIX("run", {"root_dir": str(tmp_path)}, **options)
    run.setup(words)
    run.watch(model)
    return run


def query_log(run, model, x, y):
    run.eval()
    with run(data_id=[f"q{i}" for i in range(len(x))]):
        loss_of(model, x, y).backward()
    return run.get_log()


def test_rows_are_the_gradients(tmp_path, problem):
    model, x, y = problem
    run = make(tmp_path, model, {"log": "grad", "save": "grad"})
    logged(run, model, x, y)
    store = run.store()
    assert store.ids == list(range(N))
    np.testing.assert_allclose(store.rows(), rows_by_loop(model, x, y), rtol=1e-4, atol=1e-6)
    assert [name for name, _, _ in run.layout] == ["0", "0.bias", "2", "2.bias"]
    assert sum(len(ids) for ids, _ in run.build_log_dataloader(batch_size=7)) == N


def test_scores_are_products_with_the_inverse(tmp_path, problem):
    model, x, y = problem
    run = make(tmp_path, model, {"log": "grad", "save": "grad", "statistic": "raw"})
    logged(run, model, x, y)
    log = query_log(run, model, x[:3] + 0.1, y[:3])
    train, queries = rows_by_loop(model, x, y), rows_by_loop(model, x[:3] + 0.1, y[:3])
    want = np.zeros((3, N))
    for _, shape, offset in run.layout:
        part = slice(offset, offset + int(np.prod(shape)))
        own = train[:, part].astype(np.float64)
        matrix = own.T @ own / N + 0.5 * np.eye(own.shape[1])
        want += queries[:, part] @ np.linalg.solve(matrix, own.T)
    for _ in range(2):  # a second query gives the same numbers as the first
        got = run.influence.compute_influence_all(log, hessian="raw", damping=0.5)
        np.testing.assert_allclose(got["influence"], want, rtol=1e-3, atol=1e-4)
    assert (got["src_ids"], got["tgt_ids"]) == (["q0", "q1", "q2"], list(range(N)))
    plain = run.influence.compute_influence_all(log, precondition=False)
    np.testing.assert_allclose(plain["influence"], queries @ train.T, rtol=1e-4, atol=1e-4)
    top = run.influence.compute_influence_all(log, precondition=False, top_k=4)
    best = np.sort(plain["influence"], 1)[:, :-5:-1]
    np.testing.assert_allclose(top["influence"], best, rtol=1e-5)


@pytest.mark.parametrize("statistic", ["none", "diagonal", "kfac", "ekfac", "raw"])
def test_every_statistic_gives_positive_self_influence(tmp_path, problem, statistic):
    model, x, y = problem
    run = make(tmp_path, model, {"log": "grad", "save": "grad", "statistic": statistic})
    logged(run, model, x, y)
    if statistic == "ekfac":  # the second pass is in the eigenbasis of the first
        run.setup({"log": "grad", "statistic": "ekfac"})
        logged(run, model, x, y)
    own = run.influence.compute_self_influence(query_log(run, model, x, y))
    assert own["influence"].shape == (N,)
    assert (own["influence"] > 0).all()
    again = logix.LogIX("run", {"root_dir": str(tmp_path)})
    if statistic != "none":
        again.initialize_from_log()
        assert set(again.statistics) == set(run.statistics)


def test_compression_gives_the_same_rows_next_year(tmp_path, problem):
    model, x, y = problem
    run = make(tmp_path, model, {"log": "grad", "save": "grad", "statistic": "kfac"})
    run.add_lora(rank=4)
    logged(run, model, x, y)
    assert run.store().rows().shape[1] < rows_by_loop(model, x[:1], y[:1]).shape[1]
    later = logix.LogIX("run", {"root_dir": str(tmp_path)})
    later.initialize_from_log()
    later.setup({"log": "grad"})
    later.watch(model)
    _, layers = query_log(later, model, x, y)
    saved = {k: v for _, batch in run.build_log_dataloader(N) for k, v in batch.items()}
    for name, kinds in layers.items():
        np.testing.assert_allclose(kinds["grad"].numpy(), saved[name]["grad"], rtol=1e-4, atol=1e-6)


def test_an_earlier_run_is_never_mixed_in(tmp_path, problem):
    model, x, y = problem
    logged(make(tmp_path, model, {"save": "grad"}), model, x[:12], y[:12])
    with pytest.raises(FileExistsError):
        logged(make(tmp_path, model, {"save": "grad"}), model, x, y)
    again = make(tmp_path, model, {"save": "grad"}, resume=True)
    logged(again, model, x, y)
    assert again.store().ids == list(range(N))


def test_two_passes_save_the_rows_once(tmp_path, problem):
    model, x, y = problem
    run = make(tmp_path, model, {"save": "grad", "statistic": "ekfac"})
    for _ in range(2):
        logged(run, model, x, y)
    assert run.store().ids == list(range(N))
    assert (run.influence.compute_self_influence(hessian="ekfac")["influence"] > 0).all()


def test_the_first_of_two_passes_is_not_enough(tmp_path, problem):
    model, x, y = problem
    run = make(tmp_path, model, {"save": "grad", "statistic": "ekfac"})
    logged(run, model, x, y)
    with pytest.raises(ValueError, match="no statistics for 'ekfac' of these layers: '0', '2'"):
        run.influence.compute_self_influence(hessian="ekfac")


def test_the_command_line_takes_a_run(tmp_path, problem, capsys):
    from logix.cli import main

    model, x, y = problem
    logged(make(tmp_path, model, {"save": "grad"}), model, x, y)
    for command in ("info", "verify"):
        assert main([command, str(tmp_path / "run")]) == 0
        assert "24" in capsys.readouterr().out


def test_overwriting_leaves_no_old_statistics(tmp_path, problem):
    model, x, y = problem
    logged(make(tmp_path, model, {"save": "grad", "statistic": "kfac"}), model, x, y)
    logged(make(tmp_path, model, {"save": "grad"}, overwrite=True), model, x[:6], y[:6])
    later = logix.LogIX("run", {"root_dir": str(tmp_path)})
    assert later.store().ids == list(range(6))
    with pytest.raises(FileNotFoundError):
        later.initialize_from_log()


def test_an_exception_loses_nothing_and_leaves_the_run_usable(tmp_path, problem):
    model, x, y = problem
    run = make(tmp_path, model, {"save": "grad"})

    def failing():
        with run(data_id=[100, 101]):
            loss_of(model, x[:2], y[:2]).backward()
            raise ZeroDivisionError

    with run(data_id=[0, 1]):
        loss_of(model, x[:2], y[:2]).backward()
    with pytest.raises(ZeroDivisionError):
        failing()
    with run(data_id=[2, 3]):
        loss_of(model, x[2:4], y[2:4]).backward()
    run.finalize()
    assert run.store().ids == [0, 1, 2, 3]
    assert not any(m._forward_hooks for m in model.modules())


def test_ids_of_the_content(tmp_path, problem):
    model, x, y = problem
    run = make(tmp_path, model, {"save": "grad"})
    with run(data_id=x[:3]):
        loss_of(model, x[:3], y[:3]).backward()
    first, _ = run.get_log()
    again = x[[2, 5, 6]]
    with pytest.raises(ValueError, match=f"the id '{first[2]}' is there already"):
        with run(data_id=again):
            loss_of(model, again, y[:3]).backward()
    run.finalize()
    assert run.store().ids == first


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"log": "gard"}, r"log: 'gard' is not known. Known are: forward, backward, grad"),
        ({"statistic": "kfca"}, r"statistic: 'kfca'.*kfac, ekfac"),
        ({"grad": ["covarance"]}, r"grad: 'covarance'.*log, covariance"),
        ({"grads": ["log"]}, r"does not know \['grads'\]"),
    ],
)
def test_unknown_words_are_named(words, message):
    with pytest.raises(ValueError, match=message):
        logix.LogIX("run").setup(words)


def test_the_second_form_of_setup():
    run = logix.LogIX("run")
    run.setup({"grad": ["log"], "forward": ["covariance"], "backward": ["covariance"]})
    assert run.settings.statistics == {"kfac"}
    assert run.settings.log == {"grad"}


def test_mistakes_are_named(tmp_path, problem):
    model, x, y = problem
    run = logix.LogIX("run", {"root_dir": str(tmp_path)})
    with pytest.raises(RuntimeError, match="watch"):
        run([0]).__enter__()
    run.watch(model)
    with pytest.raises(RuntimeError, match="backward"):
        with run([0]):
            pass
    with pytest.raises(ValueError, match=r"'0' was called with batches of \[3\]"):
        with run([0, 1]):
            loss_of(model, x[:3], y[:3]).backward()


def test_coverage_is_told(problem, capsys):
    model, _, _ = problem
    run = logix.LogIX("run")
    run.watch(model, strict=True)
    assert "2 layers, 75 of 75 parameters (100.0%)" in capsys.readouterr().out
    run.watch(model, name_filter=["2"])
    assert "27 of 75 parameters (36.0%); not covered: 0.weight, 0.bias" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"not covered: 0\.weight"):
        run.watch(model, name_filter=["2"], strict=True)


def test_start_and_end_are_the_block(tmp_path, problem):
    model, x, y = problem
    run = make(tmp_path, model, {"log": "grad"})
    run.save()
    run.start([0, 1])
    loss_of(model, x[:2], y[:2]).backward()
    run.end()
    run.save(False)
    with run([2]):
        loss_of(model, x[:1], y[:1]).backward()
    run.finalize()
    assert run.store().ids == [0, 1]
    run.clear()
    assert run.statistics == {}


def test_importing_logix_imports_no_framework():
    code = "import sys, logix; print(*[m for m in ('torch', 'jax', 'lox') if m in sys.modules])"
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=ROOT / "src", capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("lora", ["none", "random", "pca"])
@pytest.mark.parametrize("hessian", ["none", "kfac", "ekfac"])
def test_scheduler_makes_the_passes(tmp_path, problem, lora, hessian):
    model, x, y = problem
    run = logix.LogIX("run", {"root_dir": str(tmp_path)})
    run.watch(model)
    schedule = logix.LogIXScheduler(run, lora, hessian, "grad", rank=3)
    passes = 0
    for _ in schedule:
        logged(run, model, x, y)
        passes += 1
    assert passes == len(schedule) == 1 + (lora == "pca") + (hessian == "ekfac")
    assert len(run.store()) == N
    want = rows_by_loop(model, x, y)
    assert (run.store().rows().shape == want.shape) == (lora == "none")
    own = run.influence.compute_self_influence()
    assert (own["influence"] > 0).all()
    assert own["src_ids"] == list(range(N))
    if hessian != "none":  # another process scores the same
        later = logix.LogIX("run", {"root_dir": str(tmp_path)})
        later.initialize_from_log()
        later.watch(model)
        _, layers = query_log(later, model, x, y)
        rows = np.concatenate([kinds["grad"].reshape(N, -1) for kinds in layers.values()], 1)
        np.testing.assert_allclose(rows, run.store().rows(), rtol=1e-3, atol=1e-5)
