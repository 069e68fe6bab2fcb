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
    later.initialize_from_log()
    assert later.statistics == {}


def test_overwriting_leaves_no_old_rows(tmp_path, problem):
    model, x, y = problem
    logged(make(tmp_path, model, {"save": "grad", "statistic": "kfac"}), model, x, y)
    logged(make(tmp_path, model, {"statistic": "raw"}, overwrite=True), model, x, y)
    later = logix.LogIX("run", {"root_dir": str(tmp_path)})
    with pytest.raises(FileNotFoundError):
        later.store()
    later.initialize_from_log()
    assert "raw" in later.statistics["0"]


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


# --- the calls, as scripts write them ------------------------------------------------------------


def test_the_module_is_the_run(tmp_path, problem):
    model, x, y = problem
    logix.init("before", {"root_dir": str(tmp_path)})
    run = logix.init(project="run", config={"root_dir": str(tmp_path)})
    logix.setup({"log": "grad", "save": "grad", "statistic": "kfac"})
    logix.watch(model)
    with logix(data_id=list(range(6)), mask=None):
        loss_of(model, x[:6], y[:6]).backward()
    logix.start(data_id=list(range(6, 12)), mask=None)
    loss_of(model, x[6:12], y[6:12]).backward()
    logix.end()
    with logix.log(list(range(12, 18))):
        loss_of(model, x[12:18], y[12:18]).backward()
    logix.finalize()
    assert run.path == str(tmp_path / "run")
    assert run.store().ids == list(range(18))
    assert len(logix.build_log_dataset()) == 18
    assert [len(ids) for ids, _ in logix.build_log_dataloader()] == [16, 2]
    logix.eval()
    with logix(data_id=["q"]):
        loss_of(model, x[:1], y[:1]).backward()
    log = logix.get_log(copy=True)
    assert run.store().ids == list(range(18))
    for kind in ("auto", "kfac"):
        scores = logix.compute_influence_all(log, logix.build_log_dataloader(), hessian=kind)
        same = logix.influence.compute_influence_all(log, hessian=kind, save=True)
        np.testing.assert_allclose(scores["influence"], same["influence"], rtol=1e-4)
        assert (scores["src_ids"], scores["tgt_ids"]) == (["q"], list(range(18)))
    assert len(logix.get_influence_scores()) == 2
    pair = run.compute_influence(log, log, mode="cosine", influence_groups=["0", "2"])
    assert set(pair["influence"]) >= {"0", "2"}
    np.testing.assert_allclose(pair["influence"]["2"], [[1.0]], rtol=1e-4)
    own = run.compute_self_influence(log)["influence"]
    np.testing.assert_allclose(own, run.influence.compute_self_influence(log)["influence"])
    later = logix.init("run", {"root_dir": str(tmp_path)})
    logix.initialize_from_log(state_path=str(tmp_path / "run"), lora_path=str(tmp_path / "run"))
    assert set(later.statistics) == set(run.statistics)
    logix.clear()
    assert later.statistics == {}
    assert later.get_log() == ([], {})
    with pytest.raises(AttributeError, match="'wacth'"):
        logix.wacth(model)


def test_what_is_saved_can_be_said_for_a_batch(tmp_path, problem):
    model, x, y = problem
    run = make(tmp_path, model, {"log": "grad"})

    def one(i, **how):
        with run(data_id=[i], **how):
            loss_of(model, x[:1], y[:1]).backward()

    one(0)
    one(1, save=True)
    run.save()
    one(2)
    one(3, save=False)
    run.start([4])
    loss_of(model, x[:1], y[:1]).backward()
    run.end(save=False)
    run.save(enable=False)
    run.start([5], save=False)
    loss_of(model, x[:1], y[:1]).backward()
    run.end(save=True)
    run.save(True)
    run.eval()
    one(6)
    one(7, save=True)  # asked for, so it is not dropped
    run.save()
    one(8)
    run.eval()
    run.setup({"save": "grad"})
    one(9)
    run.finalize()
    assert run.store().ids == [1, 2, 5, 7, 8, 9]
    with pytest.raises(RuntimeError, match="start"):
        run.end()


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        (["a", 3], ["a", 3]),
        ((1, 2), [1, 2]),
        (torch.tensor([4, 5]), [4, 5]),
        (np.array([6, 7], np.uint8), [6, 7]),
        ([np.int64(8), torch.tensor(9)], [8, 9]),
        (np.array(["b", "c"]), ["b", "c"]),
    ],
)
def test_ids_as_they_are_given(tmp_path, problem, given, ids):
    model, x, y = problem
    run = make(tmp_path, model, {"save": "grad"})
    with run(given):
        loss_of(model, x[:2], y[:2]).backward()
    run.finalize()
    assert run.store().ids == run.get_log()[0] == ids
    assert all(type(i) in (int, str) for i in run.store().ids)


def test_ids_of_all_parts_of_a_batch(tmp_path, problem):
    model, x, y = problem
    ids = []
    for batch in ((x[:3], y[:3]), [x[:3], y[:3]], {"x": x[:3], "y": y[:3]}, x[:3]):
        run = logix.LogIX("run", {"root_dir": str(tmp_path)})
        run.watch(model)
        with run(batch):
            loss_of(model, x[:3], y[:3]).backward()
        ids.append(run.get_log()[0])
        assert len(set(ids[-1])) == 3
        number = logix.utils.DataIDGenerator(mode="index")
        assert (number(batch), number(batch)) == ([0, 1, 2], [3, 4, 5])
        assert logix.utils.DataIDGenerator()(batch) == ids[-1]
    assert ids[0] == ids[1]
    with pytest.raises(TypeError, match="give a list"):
        run("abc").__enter__()


def test_logs_are_put_together(tmp_path, problem):
    model, x, y = problem
    run = make(tmp_path, model, {"log": "grad"})
    logs = []
    for i in range(0, N, B):
        with run(list(range(i, i + B))):
            loss_of(model, x[i : i + B], y[i : i + B]).backward()
        logs.append(run.get_log())
    ids, layers = logix.utils.merge_logs(logs)
    rows = torch.cat([kinds["grad"].reshape(N, -1) for kinds in layers.values()], 1)
    assert ids == list(range(N))
    np.testing.assert_allclose(rows, rows_by_loop(model, x, y), rtol=1e-4, atol=1e-6)


# --- compression ---------------------------------------------------------------------------------


def shapes_after(run, model, x, y):
    with run(data_id=[0]):
        loss_of(model, x[:1], y[:1]).backward()
    return {name: tuple(kinds["grad"].shape[1:]) for name, kinds in run.get_log()[1].items()}


def test_every_argument_of_add_lora(tmp_path, problem):
    model, x, y = problem
    run = make(tmp_path, model, {"log": "grad"})
    small = lambda r: {"0": (r, r), "0.bias": (min(8, r * r),), "2": (r, r), "2.bias": (3,)}
    run.add_lora(lora_config=logix.LoRAConfig(init="random", rank=2))
    assert shapes_after(run, model, x, y) == small(2)
    run.add_lora(lora_config={"rank": 3, "init": "sparse"})
    assert shapes_after(run, model, x, y) == small(3)
    run.add_lora(watch=True, clear=True, name_filter=["2"], rank=2)
    assert set(shapes_after(run, model, x, y)) == {"2", "2.bias"}
    run.watch(model)
    run.add_lora(watch=False, name_filter=["2"], rank=2)
    assert set(shapes_after(run, model, x, y)) == set(small(2))
    run.add_lora(type_filter=[nn.Linear])
    assert shapes_after(run, model, x, y)["0"] == (8, 5)  # rank 64 is more than they have
    for wrong, message in (
        (dict(lora_config={"rnak": 3}), r"does not know \['rnak'\]. Known are: init, rank"),
        (dict(init="pcaa"), "'pcaa' is not one of random, pca, sparse"),
        (dict(init="pca"), "needs covariances"),
        (dict(lora_config=dict(init="pca", parameter_sharing=True)), "shared projections"),
        (dict(rank=0), "rank=0"),
    ):
        with pytest.raises(ValueError, match=message):
            run.add_lora(**wrong)
    with pytest.raises(FileNotFoundError, match="no compression at"):
        run.add_lora(lora_path=str(tmp_path / "nothing"))


def test_pca_is_of_the_pass_before_and_comes_back_from_its_path(tmp_path, problem):
    model, x, y = problem
    run = make(tmp_path, model, {"statistic": "kfac"})
    logged(run, model, x, y)
    left = np.asarray(run.statistics["0"]["left"])
    run.add_lora(lora_config=logix.LoRAConfig(init="pca", rank=2))
    assert run.statistics == {}
    run.setup({"log": "grad", "save": "grad"})
    logged(run, model, x, y)
    best = np.linalg.eigh(left)[1][:, -2:]
    used = np.asarray(run.compression.matrix("0", "left", 8))
    np.testing.assert_allclose(np.abs(best.T @ used), np.eye(2), atol=1e-4)
    other = logix.LogIX("other", {"root_dir": str(tmp_path)})
    other.watch(model)
    other.add_lora(lora_path=str(tmp_path / "run"))
    _, layers = query_log(other, model, x, y)
    rows = np.concatenate([kinds["grad"].reshape(N, -1) for kinds in layers.values()], 1)
    np.testing.assert_allclose(rows, run.store().rows(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("groups", "same"),
    [(None, "abcd"), (["enc", "dec"], "ab cd"), (["dec"], "a b cd")],
)
def test_layers_of_one_size_share_their_projections(groups, same):
    names = dict(a="enc.0", b="enc.1", c="dec.0", d="dec.1")
    model = nn.ModuleDict(
        {k: nn.ModuleList([nn.Linear(6, 6) for _ in "01"]) for k in ("enc", "dec")}
    )
    run = logix.LogIX("run")
    run.watch(model)
    config = dict(rank=3, parameter_sharing=True, parameter_sharing_groups=groups)
    run.add_lora(lora_config=config)
    from logix._record import Outer

    side = torch.randn(1, 1, 6)
    rows = {k: run.compression.record(Outer(n, side, side)).a for k, n in names.items()}
    for one in names:
        for two in names:
            shared = any(one in group and two in group for group in same.split())
            assert torch.equal(rows[one], rows[two]) == shared, (one, two)


# --- configuration -------------------------------------------------------------------------------


def test_configuration_from_a_file(tmp_path, problem):
    model, x, y = problem
    path = tmp_path / "config.yaml"
    path.write_text(
        f"root_dir: {tmp_path}\n"
        "logging:\n  flush_threshold: 1000\n  num_workers: 0\n  cpu_offload: true\n"
        "  log_dtype: float16\n"
        "lora:\n  init: random\n  rank: 2\n  parameter_sharing: false\n"
        "  parameter_sharing_groups:\n"
    )
    run = logix.LogIX("run", config=str(path))
    run.setup({"save": "grad"})
    run.watch(model)
    run.add_lora()
    logged(run, model, x, y)
    assert run.store().manifest["dtype"] == "float16"
    assert run.store().rows().shape == (N, 2 * 2 + 4 + 2 * 2 + 3)
    assert (run.path, run.config.logging.waiting) == (str(tmp_path / "run"), 1000)
    other = logix.LogIX("run", config=path, logging_config={"log_dtype": "int8"})
    assert (other.config.logging.log_dtype, other.config.lora.rank) == ("int8", 2)
    assert other.config.logging.num_workers == 1
    assert logix.LogIX("run", logging_config={"num_workers": 0}).config.root_dir == "./logix"
    assert logix.LogIX("run", {"root_dir": tmp_path}).path == str(tmp_path / "run")


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (
            {"rootdir": "."},
            ValueError,
            r"does not know \['rootdir'\]. Known are: root_dir, logging",
        ),
        ({"logging": {"dtype": "int8"}}, ValueError, "Known are: flush_threshold, num_workers"),
        ({"logging": {"log_dtype": "int4"}}, ValueError, "not one of none, float32, float16"),
        ({"logging": {"flush_threshold": "1GB"}}, TypeError, "flush_threshold='1GB' should be"),
        ({"logging": 3}, TypeError, "logging is a dict of settings, not 3"),
        ({"lora": {"rank": True}}, TypeError, "rank=True should be of the type int"),
        ({"lora": {"init": "pcaa"}}, ValueError, "is not one of random, pca, sparse"),
        (3, TypeError, "a dict or the path of a YAML file, not int"),
    ],
)
def test_mistakes_in_the_configuration_are_named(config, error, message):
    with pytest.raises(error, match=message):
        logix.LogIX("run", config)


# --- with training -------------------------------------------------------------------------------


def test_extraction_leaves_no_gradients_and_a_lost_step_is_told(tmp_path, problem):
    model, x, y = problem
    model[0].bias.requires_grad_(False)
    flags = [p.requires_grad for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    run = make(tmp_path, model, {"log": "grad"})

    def extract():
        with run(data_id=[0, 1]):
            loss_of(model, x[:2], y[:2]).backward()
        assert [p.requires_grad for p in model.parameters()] == flags
        assert all(p.grad is None for p in model.parameters())

    extract()
    other.step()  # has nothing to do with it
    with pytest.raises(RuntimeError, match="weight_grads=True"):
        optimizer.step()
    optimizer.step()  # told once
    extract()

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        return loss

    before = [p.clone() for p in model.parameters()]
    optimizer.step(closure)
    changed = [not torch.equal(p, q) for p, q in zip(before, model.parameters())]
    assert changed == flags
    optimizer.zero_grad()
    extract()
    loss_of(model, x, y).backward()  # training goes on
    optimizer.step()


def test_gradients_for_training_are_the_plain_ones(tmp_path, problem):
    """Of several blocks, too, whose gradients are accumulated."""
    model, x, y = problem
    run = make(tmp_path, model, {"save": "grad"})
    plain = []
    for i in range(0, N, B):
        loss_of(model, x[i : i + B], y[i : i + B]).backward()
        plain.append([p.grad.clone() for p in model.parameters()])
    model.zero_grad()
    for k, i in enumerate(range(0, N, B)):
        with run(data_id=list(range(i, i + B)), weight_grads=True):
            loss_of(model, x[i : i + B], y[i : i + B]).backward()
        for p, want in zip(model.parameters(), plain[k]):
            assert torch.equal(p.grad, want)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    run.finalize()
    assert run.store().ids == list(range(N))


@pytest.mark.parametrize("weight_grads", [False, True])
def test_two_runs_at_once(tmp_path, problem, weight_grads):
    model, x, y = problem
    runs = [logix.LogIX(name, {"root_dir": str(tmp_path)}) for name in "ab"]
    for run in runs:
        run.setup({"save": "grad"})
        run.watch(model)
    runs[1].add_lora(rank=2)
    for i in range(0, N, B):
        ids = list(range(i, i + B))
        with runs[0](ids, weight_grads=weight_grads), runs[1](ids, weight_grads=weight_grads):
            loss_of(model, x[i : i + B], y[i : i + B]).backward()
    alone = logix.LogIX("alone", {"root_dir": str(tmp_path)})
    alone.setup({"save": "grad"})
    alone.watch(model)
    alone.add_lora(rank=2)
    logged(alone, model, x, y)
    for run, want in zip(runs, (rows_by_loop(model, x, y), alone.store().rows())):
        run.finalize()
        assert run.store().ids == list(range(N))
        np.testing.assert_allclose(run.store().rows(), want, rtol=1e-4, atol=1e-6)
    assert all(p.requires_grad for p in model.parameters())
    assert all((p.grad is None) != weight_grads for p in model.parameters())


def test_a_damping_is_selected_by_what_queries_know(tmp_path, problem):
    model, x, y = problem
    run = make(tmp_path, model, {"save": "grad", "statistic": "kfac"})
    logged(run, model, x, y)
    log = query_log(run, model, x[:3] + 0.1, y[:3])
    found = lambda **how: run.influence.compute_influence_all(log, **how)["influence"]
    want = found(relative_damping=0.03)
    best, tried = run.influence.select_damping(
        lambda r: -float(np.abs(found(relative_damping=r) - want).max()), refine=6
    )
    assert 0.02 < best < 0.045
    assert tried[best] == max(tried.values())
    np.testing.assert_allclose(found(relative_damping=0.1), found(), rtol=1e-6)
    with pytest.raises(ValueError, match="give one of them"):
        found(damping=1.0, relative_damping=0.1)


@pytest.mark.parametrize("policy", ["error", "keep_first", "keep_all"])
def test_a_second_epoch_is_held_to_the_policy(tmp_path, problem, policy):
    """The model has changed: the rows of the same ids are others."""
    model, x, y = problem
    run = make(tmp_path, model, {"save": "grad"}, duplicates=policy)
    logged(run, model, x, y)
    first = run.store().rows().copy()
    nn.init.normal_(model[0].weight)
    if policy == "error":
        with pytest.raises(ValueError, match="there already"):
            logged(run, model, x, y)
        return
    logged(run, model, x, y)
    rows = run.store().rows()
    assert len(rows) == (2 * N if policy == "keep_all" else N)
    np.testing.assert_array_equal(rows[:N], first)
    if policy == "keep_all":
        np.testing.assert_allclose(rows[N:], rows_by_loop(model, x, y), rtol=1e-4, atol=1e-6)


def test_queries_of_another_projection_are_refused(tmp_path, problem):
    model, x, y = problem
    run = make(tmp_path, model, {"save": "grad"})
    run.add_lora(rank=2, seed=1)
    logged(run, model, x, y)
    other = logix.LogIX("run", {"root_dir": str(tmp_path)})
    other.watch(model)
    other.add_lora(rank=2, seed=2)
    with pytest.raises(ValueError, match="initialize_from_log"):
        other.influence.compute_influence_all(query_log(other, model, x[:2], y[:2]))


def test_statistics_on_the_disk_are_not_forgotten(tmp_path, problem):
    model, x, y = problem
    logged(make(tmp_path, model, {"save": "grad", "statistic": "kfac"}), model, x, y)
    later = logix.LogIX("run", {"root_dir": str(tmp_path)})
    later.watch(model)
    log = query_log(later, model, x[:2], y[:2])
    with pytest.raises(RuntimeError, match="initialize_from_log"):
        later.influence.compute_influence_all(log)
    later.influence.compute_influence_all(log, precondition=False)
    with pytest.raises(ValueError, match="not negative"):
        later.influence.compute_influence_all(log, precondition=False, damping=-1.0)


def test_a_pass_ends_with_the_next_one(tmp_path, problem):
    """Also if the user did not say so."""
    model, x, y = problem
    run = logix.LogIX("run", {"root_dir": str(tmp_path)})
    run.watch(model)
    for _ in logix.LogIXScheduler(run, hessian="ekfac", save="grad"):
        with run(data_id=list(range(N))):
            loss_of(model, x, y).backward()
    assert int(run.statistics["0"]["right_n"]) == int(run.statistics["0"]["eigen_n"]) == N


def test_an_example_that_is_not_finite_spoils_nothing(tmp_path, problem):
    model, x, y = problem
    run = make(tmp_path, model, {"save": "grad", "statistic": "kfac"})
    bad = x.clone()
    bad[2] = float("nan")
    with pytest.raises(ValueError, match=r"gradient of 'c' is not finite in layer '0'"):
        with run(data_id=list("abcd")):
            loss_of(model, bad[:4], y[:4]).backward()
    logged(run, model, x, y)
    assert len(run.store()) == N
    assert np.isfinite(run.influence.compute_self_influence()["influence"]).all()


def test_a_mask_that_fits_no_layer_is_an_error(tmp_path):
    model, x = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 2)), torch.randint(0, 7, (2, 5))
    run = make(tmp_path, model, {"log": "grad"})
    with pytest.raises(ValueError, match="the mask has 6 positions, which no watched layer has"):
        with run(data_id=["a", "b"], mask=torch.ones(2, 6)):
            model(x).sum().backward()


def test_init_again_takes_over_an_interrupted_run(tmp_path, problem):
    model, x, y = problem
    where = dict(config={"root_dir": str(tmp_path)})
    for _ in range(2):
        run = logix.init("again", **where, resume=True)
        run.setup({"save": "grad"})
        run.watch(model)
        with run(data_id=[0, 1]):
            loss_of(model, x[:2], y[:2]).backward()
    assert len(run.store()) == 2
    run.close()


def test_one_word_is_one_group(tmp_path, problem):
    model, x, y = problem
    run = make(tmp_path, model, {"save": "grad"})
    logged(run, model, x, y)
    found = run.influence.compute_self_influence(influence_groups="bias")
    assert set(found["influence"]) == {"total", "bias"}


def test_a_block_that_is_not_entered_says_so(problem):
    run = logix.LogIX("run")
    run.watch(problem[0])
    with pytest.warns(RuntimeWarning, match="logs nothing"):
        run.log([0, 1])
