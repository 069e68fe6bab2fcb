"""What a run keeps: activations beside gradients, statistics over passes, settings of logging."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import logix  # noqa: E402
from _loxio import Damaged  # noqa: E402
from logix import _outbox  # noqa: E402

N, B, T = 12, 4, 3


class Sequences(nn.Module):
    """Two layers over sequences, and a place to watch a tensor at."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.run = nn.Linear(5, 4), nn.Linear(4, 2), None

    def forward(self, x):
        h = self.a(x)
        if self.run is not None:
            self.run.watch_activation({"h": h})
        return self.b(torch.tanh(h))


@pytest.fixture
def problem():
    torch.manual_seed(0)
    return Sequences(), torch.randn(N, T, 5)


def make(tmp_path, model, words, logging=None, **options):
    run = logix.LogIX("run", {"root_dir": str(tmp_path), "logging": logging}, **options)
    run.setup(words)
    run.watch(model)
    return run


def go(run, model, x, ids=None, **how):
    ids = range(len(x)) if ids is None else ids
    for i in range(0, len(x), B):
        with run(data_id=list(ids[i : i + B]), **how):
            model(x[i : i + B]).square().sum().backward()


def by_loop(model, x):
    rows = []
    for one in x:
        grads = torch.autograd.grad(model(one[None]).square().sum(), model.parameters())
        rows.append(torch.cat([g.reshape(-1) for g in grads]))
    return torch.stack(rows).numpy()


def sides(model, x):
    """What goes into both layers, and the gradients of what comes out, of all examples."""
    h = model.a(x)
    z = torch.tanh(h)
    out = model.b(z)
    g = torch.autograd.grad(out.square().sum(), [h, out])
    return {"a": (x, g[0]), "b": (z, g[1]), "h": (h, g[0])}


def close(got, want, **how):
    got, want = (np.asarray(v.detach() if hasattr(v, "detach") else v) for v in (got, want))
    np.testing.assert_allclose(got, want, **{"rtol": 1e-4, "atol": 1e-6, **how})


# --- activations ---------------------------------------------------------------------------------


def test_rows_hold_gradients_then_inputs_then_output_gradients(tmp_path, problem):
    model, x = problem
    run = make(tmp_path, model, {"save": ["backward", "forward", "grad"]})
    model.run = run
    go(run, model, x)
    run.finalize()
    model.run = None
    want, store = sides(model, x), run.store()
    kinds = [(part["kind"], part["name"]) for part in store.manifest["layout"]]
    assert kinds == [
        *[("grad", name) for name in ("a", "a.bias", "b", "b.bias")],
        *[("forward", name) for name in ("a", "b", "h")],
        *[("backward", name) for name in ("a", "b", "h")],
    ]
    grads = by_loop(model, x)
    ((ids, logs),) = run.build_log_dataloader(batch_size=N)
    assert ids == list(range(N))
    close(store.rows()[:, : grads.shape[1]], grads)
    for name, (went_in, came_back) in want.items():
        close(logs[name]["forward"], went_in)
        close(logs[name]["backward"], came_back)
    one, own = run.build_log_dataset()[5]
    assert one == 5
    close(own["h"]["forward"], want["h"][0][5])
    # Scores are products of gradients alone.
    log = run.get_log()
    assert set(log[1]["a"]) == {"grad", "forward", "backward"}
    close(log[1]["h"]["backward"], want["h"][1][-B:])
    got = run.compute_influence_all(log, precondition=False)["influence"]
    close(got, grads[-B:] @ grads.T, rtol=1e-3)
    (flat,) = run.build_log_dataloader(batch_size=N, flatten=True)
    np.testing.assert_array_equal(flat[1], store.rows())


def test_other_lengths_are_named_and_the_run_goes_on(tmp_path, problem):
    model, x = problem
    run = make(tmp_path, model, {"save": ["grad", "forward"], "statistic": "kfac"})
    go(run, model, x[:4])
    with pytest.raises(ValueError, match=r"forward of 'a' \(2, 5\) instead of forward of 'a' \(3"):
        go(run, model, x[4:8, :2], ids=range(4, 8))
    go(run, model, x[4:8], ids=range(4, 8))
    run.finalize()
    assert run.store().ids == list(range(8))
    assert int(run.statistics["a"]["left_n"]) == 8  # the one that failed is not counted


def test_watched_tensors_have_statistics_with_the_mask(tmp_path, problem):
    model, x = problem
    run = make(tmp_path, model, {"forward": ["mean", "log"], "backward": ["mean"]})
    model.run, mask = run, torch.tensor([[1, 1, 0]] * B)
    go(run, model, x[:B], mask=mask)
    model.run = None
    h = sides(model, x[:B])["h"][0]
    from logix._statistics import finalize

    close(finalize(run.statistics)["h"]["forward_mean"], h[:, :2].mean((0, 1)))
    _, logs = run.get_log()
    close(logs["h"]["forward"][:, :2], h[:, :2])
    assert float(logs["h"]["forward"][:, 2].abs().max()) == 0
    assert set(logs["h"]) == {"forward"}


def test_a_tensor_is_kept_as_it_was(problem):
    model, x = problem
    run = logix.LogIX("run")
    run.setup({"log": "forward"})
    run.watch(model)
    with run(data_id=[0, 1]):
        h = model.a(x[:2])
        run.watch_activation({"h": h})
        want = h.detach().clone()
        model.b(h.tanh_()).square().sum().backward()
    close(run.get_log()[1]["h"]["forward"], want)


def test_gradients_of_a_watched_tensor_are_not_scaled(problem):
    model, x = problem
    run = logix.LogIX("run")
    run.setup({"log": ["grad", "backward"]})
    run.watch(model)
    want, model.run = sides(model, x[:2])["h"][1], run
    with run(data_id=[0, 1]):
        loss = model(x[:2]).square().sum()
        torch.amp.GradScaler("cpu", init_scale=1024.0).scale(loss).backward()
    logs = run.get_log()[1]
    close(logs["h"]["backward"], want)
    close(logs["a"]["backward"], want)


def test_tensors_that_do_not_fit_are_named(problem):
    model, x = problem
    run = logix.LogIX("run")
    run.watch(model)

    def log(*tensors):
        with run(data_id=[0, 1]):
            for tensor in tensors:
                run.watch_activation({"h": tensor})
            model(x[:2]).sum().backward()

    with pytest.raises(ValueError, match=r"'h' has the shape \(1, 3, 5\), and there are 2 ids"):
        log(x[:1])
    with pytest.raises(ValueError, match=r"'h' has the shape \(\)"):
        log(x.sum())
    with pytest.raises(ValueError, match="'h' of this batch already"):
        log(x[:2], x[:2])
    log(x[:2])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_watched_tensor_in_a_checkpoint(problem, reentrant):
    from torch.utils.checkpoint import checkpoint

    model, x = problem
    run = logix.LogIX("run")
    run.setup({"log": ["forward", "backward"]})
    run.watch(model)
    want = sides(model, x[:2])["h"]
    model.run, x = run, x[:2].clone().requires_grad_()
    with run(data_id=[0, 1]):
        checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
    got = run.get_log()[1]["h"]
    close(got["forward"], want[0])
    close(got["backward"], want[1])


# --- statistics over passes and processes --------------------------------------------------------


def eigen(run):
    return {k: np.asarray(s["eigen"]) for k, s in run.statistics.items() if "eigen" in s}


def test_ekfac_in_another_process_is_that_of_one(tmp_path, problem):
    model, x = problem
    one = make(tmp_path / "one", model, {"save": "grad", "statistic": "ekfac"})
    for _ in range(2):
        go(one, model, x)
        one.finalize()
    assert int(one.statistics["a"]["left_n"]) == N  # the second pass adds eigenvalues alone
    assert int(one.statistics["a"]["eigen_n"]) == N
    first = make(tmp_path / "two", model, {"save": "grad", "statistic": "ekfac"})
    go(first, model, x)
    first.finalize()
    second = make(tmp_path / "two", model, {"save": "grad", "statistic": "ekfac"}, resume=True)
    second.initialize_from_log()
    go(second, model, x)
    second.finalize()
    assert second.store().ids == list(range(N))
    assert set(eigen(one)) == {"a", "b"}
    for layer, values in eigen(one).items():
        close(eigen(second)[layer], values)
    scores = [run.compute_self_influence()["influence"] for run in (one, second)]
    close(scores[1], scores[0], rtol=1e-3)


def test_more_data_later_is_all_data(tmp_path, problem):
    model, x = problem
    words = {"save": "grad", "statistic": "kfac"}
    for part, options in ((range(8), {}), (range(8, N), {"resume": True})):
        run = make(tmp_path / "two", model, words, **options)
        if options:
            run.initialize_from_log()
        go(run, model, x[list(part)], ids=part)
        run.finalize()
    whole = make(tmp_path / "one", model, words)
    go(whole, model, x)
    whole.finalize()
    assert run.store().ids == whole.store().ids
    for layer, stats in whole.statistics.items():
        for name, value in stats.items():
            close(run.statistics[layer][name], value)


def test_finalizing_twice_changes_nothing(tmp_path, problem):
    model, x = problem
    run = make(tmp_path, model, {"save": "grad", "statistic": "ekfac"})
    go(run, model, x)
    run.finalize()
    before = {k: {n: np.asarray(v).copy() for n, v in s.items()} for k, s in run.statistics.items()}
    files = {f: f.read_bytes() for f in (tmp_path / "run" / "rows").iterdir()}
    for _ in range(2):
        run.finalize()
        later = logix.LogIX("run", {"root_dir": str(tmp_path)})
        later.initialize_from_log()
        for state in (run.statistics, later.statistics):
            assert {k: set(s) for k, s in state.items()} == {k: set(s) for k, s in before.items()}
            for layer, stats in before.items():
                for name, value in stats.items():
                    np.testing.assert_array_equal(state[layer][name], value)
    assert {f: f.read_bytes() for f in (tmp_path / "run" / "rows").iterdir()} == files


def test_looking_at_statistics_does_not_change_them(tmp_path, problem):
    model, x = problem
    run = make(tmp_path, model, {"statistic": "kfac"})
    for i in range(0, N, B):
        go(run, model, x[i : i + B])
        assert int(run.statistics["a"]["left_n"]) == i + B
    run.finalize()
    assert int(run.statistics["a"]["left_n"]) == N


def test_statistics_of_another_run_are_not_replaced_unasked(tmp_path, problem, capsys):
    model, x = problem
    first = make(tmp_path, model, {"statistic": "kfac"})
    go(first, model, x)
    first.finalize()
    files = {f: f.read_bytes() for f in (tmp_path / "run").iterdir()}
    other = make(tmp_path, model, {"statistic": "kfac"})
    for _ in range(2):
        with pytest.raises(FileExistsError, match="initialize_from_log"):
            go(other, model, x[:B])
    other.eval()
    go(other, model, x[:B])
    other.finalize()  # of a run that has nothing
    assert {f: f.read_bytes() for f in (tmp_path / "run").iterdir()} == files
    again = make(tmp_path, model, {"statistic": "kfac"}, resume=True)
    capsys.readouterr()
    go(again, model, x[:B])
    assert "statistics on the disk are replaced" in capsys.readouterr().out
    again.finalize()
    again.initialize_from_log()
    assert int(again.statistics["a"]["left_n"]) == B


def test_projections_are_there_before_the_rows(tmp_path, problem):
    model, x = problem
    run = make(tmp_path, model, {"statistic": "kfac"})
    go(run, model, x)
    run.finalize()
    run.add_lora(init="pca", rank=2)
    run.setup({"save": "grad"})
    go(run, model, x[:B])
    run.flush()  # and here it might be killed
    later = logix.LogIX("run", {"root_dir": str(tmp_path)})
    later.add_lora(lora_path=str(tmp_path / "run"))
    later.watch(model)
    go(later, model, x[:B])
    rows = np.concatenate([v["grad"].reshape(B, -1) for v in later.get_log()[1].values()], 1)
    close(rows, later.store().rows())
    with pytest.raises(FileNotFoundError):  # those of the pass before are of other gradients
        later.initialize_from_log()
    run.finalize()


def test_a_pca_goes_on_after_a_crash(tmp_path, problem):
    model, x = problem
    run = logix.LogIX("run", {"root_dir": str(tmp_path)})
    run.watch(model)
    for last in logix.LogIXScheduler(run, "pca", "kfac", "grad", rank=2):
        go(run, model, x[:B] if last else x)
        run.close() if last else run.finalize()
    begun = run.store().rows()
    again = logix.LogIX("run", {"root_dir": str(tmp_path)}, resume=True)
    again.watch(model)
    for last in logix.LogIXScheduler(again, "pca", "kfac", "grad", rank=2):
        order = range(N) if last else range(N - 1, -1, -1)  # sums in another order: other last bits
        go(again, model, x[list(order)], ids=order)
        again.finalize()
    assert again.store().ids == list(range(N))
    np.testing.assert_array_equal(again.store().rows()[:B], begun)
    want = again.store().rows()
    later = logix.LogIX("run", {"root_dir": str(tmp_path)})
    later.initialize_from_log()
    later.watch(model)
    with later(data_id=list(range(N))):
        model(x).square().sum().backward()
    close(np.concatenate([v["grad"].reshape(N, -1) for v in later.get_log()[1].values()], 1), want)
    assert int(later.statistics["a"]["left_n"]) == N


def test_a_shared_weight_has_what_goes_through_each_of_its_modules(tmp_path):
    torch.manual_seed(0)
    table, head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
    head.weight = table.weight
    model, x = nn.Sequential(table, nn.Tanh(), head), torch.randint(0, 7, (N, T))
    run = make(tmp_path, model, {"save": ["grad", "forward", "backward"]})
    for i in range(0, N, B):
        with run(data_id=list(range(i, i + B))):
            model(x[i : i + B]).square().sum().backward()
    run.finalize()
    ((_, logs),) = run.build_log_dataloader(batch_size=N)
    h = torch.tanh(table(x))
    assert set(logs) == {"0", "0[1]"}
    close(logs["0"]["forward"], x)
    close(logs["0[1]"]["forward"], h)
    close(logs["0[1]"]["backward"], 2 * head(h))
    close(logs["0"]["grad"].reshape(N, -1), by_loop(model, x))
    last = run.get_log()[1]
    close(last["0[1]"]["forward"], h[-B:])
    close(last["0"]["grad"], logs["0"]["grad"][-B:])


def test_rows_of_two_projections_do_not_mix(tmp_path, problem):
    model, x = problem
    run = make(tmp_path, model, {"save": "grad"})
    run.add_lora(rank=2)
    go(run, model, x[:B])
    run.add_lora(rank=2, seed=1)
    with pytest.raises(ValueError, match="compressed in one way"):
        go(run, model, x[B:], ids=range(B, N))
    run.add_lora(rank=2)
    go(run, model, x[B:], ids=range(B, N))
    run.finalize()
    assert run.store().ids == list(range(N))
    again = make(tmp_path, model, {"save": "grad"}, resume=True)
    again.add_lora(rank=2, seed=1)
    with pytest.raises(ValueError, match="written in another way"):
        go(again, model, x)


# --- settings of the logging ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("none", 1e-5), ("float32", 1e-5), ("float16", 2e-3), ("bfloat16", 2e-2), ("int8", 2e-2)],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_every_dtype_is_written_and_read(tmp_path, problem, dtype, tolerance, workers):
    model, x = problem
    logging = dict(log_dtype=dtype, num_workers=workers, flush_threshold=0, cpu_offload=True)
    run = make(tmp_path, model, {"save": "grad", "statistic": "kfac"}, logging)
    go(run, model, x)
    run.finalize()
    want = by_loop(model, x)
    assert np.abs(run.store().rows() - want).max() <= tolerance * np.abs(want).max()
    assert run.store().manifest["dtype"] == ("float32" if dtype == "none" else dtype)
    assert all(isinstance(v, np.ndarray) for s in run.statistics.values() for v in s.values())


def test_models_in_float64(tmp_path, problem):
    model, x = problem
    model, x = model.double(), x.double()
    run = make(tmp_path, model, {"save": ["grad", "forward"], "statistic": "ekfac"})
    for _ in range(2):
        go(run, model, x)
        run.finalize()
    want = by_loop(model, x)
    close(run.store().rows()[:, : want.shape[1]], want)


@pytest.mark.parametrize("block", [1, 200, 1 << 23])
@pytest.mark.parametrize("waiting", [0, 1000])
def test_a_slow_disk_gets_all_rows_in_order(tmp_path, monkeypatch, block, waiting):
    """Buffers are used again, and never before they are written."""
    model = nn.Linear(6, 1, bias=False)
    real = os.write
    monkeypatch.setattr(os, "write", lambda *a: (time.sleep(0.002), real(*a))[1])
    monkeypatch.setattr(_outbox, "BLOCK", block)
    made = []
    run = make(tmp_path, model, {"save": "grad"}, dict(flush_threshold=waiting))
    sizes = [1, 5, 2, 7, 3, 7, 1, 4]
    x = torch.randn(sum(sizes), 6)
    at = 0
    for size in sizes:
        with run(data_id=list(range(at, at + size))):
            model(x[at : at + size]).sum().backward()
        made.append(run._saved._outbox._made)
        at += size
    run.finalize()
    assert run.store().ids == list(range(len(x)))
    np.testing.assert_array_equal(run.store().rows(), x.numpy())
    rows = min(7, max(1, block // 24))
    assert max(made) <= max(2, waiting // (24 * min(rows, min(sizes))))


def test_a_second_pass_writes_only_what_it_changed(tmp_path, problem):
    """The first pass of EK-FAC may have taken gigabytes."""
    model, x = problem
    run = make(tmp_path, model, {"statistic": "ekfac"})
    once = lambda: (go(run, model, x), run.finalize())
    once()
    first, second = tmp_path / "run" / "statistics.npz", tmp_path / "run" / "eigen.npz"
    before = first.stat().st_mtime_ns, first.read_bytes()
    assert not second.exists()
    once()
    assert (first.stat().st_mtime_ns, first.read_bytes()) == before
    again = logix.LogIX("run", {"root_dir": str(tmp_path)})
    again.initialize_from_log()
    for layer, stats in run.statistics.items():
        assert set(again.statistics[layer]) == set(stats)
        for name, value in stats.items():
            np.testing.assert_array_equal(np.asarray(again.statistics[layer][name]), value)
    eigen = second.read_bytes()
    run.setup({"statistic": ["kfac", "ekfac"]})
    once()  # both change now, and fit each other
    logix.LogIX("run", {"root_dir": str(tmp_path)}).initialize_from_log()
    assert first.read_bytes() != before[1]
    second.write_bytes(eigen)  # that of before
    with pytest.raises(Damaged, match="other eigenvectors"):
        logix.LogIX("run", {"root_dir": str(tmp_path)}).initialize_from_log()


def test_rows_of_a_table_are_not_rounded(tmp_path):
    model = nn.Sequential(nn.Embedding(7, 3), nn.Flatten(), nn.Linear(6, 2))
    config = {"root_dir": str(tmp_path), "logging": {"log_dtype": "bfloat16"}}
    run = logix.LogIX("run", config)
    run.setup({"save": ["grad", "forward"]})
    run.watch(model)
    with pytest.raises(ValueError, match="rows of a table, which bfloat16 would round"):
        with run([0, 1]):
            model(torch.randint(0, 7, (2, 2))).sum().backward()
