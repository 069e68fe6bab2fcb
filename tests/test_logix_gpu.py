"""On a GPU: the same rows, statistics and scores as on the CPU, and nothing waits in between."""

from __future__ import annotations

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
from torch import nn  # noqa: E402

import logix  # noqa: E402

N, B, T = 24, 6, 5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        h = self.embed(x)
        h = h + self.down(torch.tanh(self.up(self.norm(h))))
        return h @ self.embed.weight.T


def loss_of(model, x):
    logits = model(x)[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, x[:, 1:].flatten(), reduction="sum")


@pytest.fixture
def problem():
    torch.manual_seed(0)
    return Net(), torch.randint(0, 11, (N, T))


def scored(root, model, x, where, hessian, **config):
    model, x = copy.deepcopy(model).to(where), x.to(where)
    run = logix.LogIX(f"run-{where}", {"root_dir": str(root), **config})
    run.watch(model, name_filter=["norm", "up", "down"])
    for _ in logix.LogIXScheduler(run, "random", hessian, "grad", rank=4):
        for i in range(0, N, B):
            with run(data_id=list(range(i, i + B))):
                loss_of(model, x[i : i + B]).backward()
        run.finalize()
    run.eval()
    with run(data_id=["a", "b", "c"]):
        loss_of(model, x[:3]).backward()
    return run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("hessian", ["none", "kfac", "ekfac", "raw"])
def test_a_gpu_gives_what_the_cpu_gives(tmp_path, problem, hessian, dtype):
    model, x = problem
    config = {"logging": {"log_dtype": dtype}}
    cpu, gpu = (scored(tmp_path, model, x, w, hessian, **config) for w in ("cpu", "cuda"))
    close = dict(rtol=2e-2, atol=2e-2) if dtype != "float32" else dict(rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(gpu.store().rows(), cpu.store().rows(), **close)
    log = gpu.get_log()
    assert log[1]["up"]["grad"].device.type == "cuda"
    for top in (None, 5):
        for mode in ("dot", "cosine", "l2"):
            a = gpu.influence.compute_influence_all(log, mode=mode, top_k=top)
            b = cpu.influence.compute_influence_all(cpu.get_log(), mode=mode, top_k=top)
            scale = float(np.abs(b["influence"]).max())
            np.testing.assert_allclose(a["influence"], b["influence"], rtol=0.05, atol=2e-2 * scale)
    tokens = gpu.influence.compute_token_influence(log)
    assert tokens["influence"].shape == (3, 3, T)


def test_statistics_may_stay_on_the_host(tmp_path, problem):
    model, x = problem
    run = scored(tmp_path, model, x, "cuda", "kfac", logging={"cpu_offload": True})
    for stats in run.statistics.values():
        assert all(not hasattr(v, "is_cuda") or not v.is_cuda for v in stats.values())


def test_float16_with_a_scaler(tmp_path, problem):
    model, x = problem
    model, x = model.cuda(), x.cuda()
    rows = []
    for scaled in (False, True):
        run = logix.LogIX(f"run{scaled}", {"root_dir": str(tmp_path)})
        run.setup({"save": "grad"})
        run.watch(model, type_filter=[nn.Linear])
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12)
        with run(data_id=list(range(N))):
            with torch.autocast("cuda", torch.float16, enabled=scaled):
                loss = loss_of(model, x)
            (scaler.scale(loss) if scaled else loss).backward()
        rows.append(run.store().rows())
    assert np.linalg.norm(rows[0] - rows[1]) < 0.02 * np.linalg.norm(rows[0])


@pytest.mark.filterwarnings("ignore")  # what the compiler warns of is its own
def test_compiled(tmp_path, problem):
    model, x = problem
    model, x = model.cuda(), x.cuda()
    rows = []
    for forward in (model, torch.compile(model, fullgraph=True)):
        run = logix.LogIX(f"run{len(rows)}", {"root_dir": str(tmp_path)})
        run.setup({"save": "grad"})
        run.watch(model, name_filter=["norm", "up", "down"])
        with run(data_id=list(range(N))):
            loss_of(forward, x).backward()
        rows.append(run.store().rows())
    np.testing.assert_allclose(rows[0], rows[1], rtol=1e-3, atol=1e-4)
