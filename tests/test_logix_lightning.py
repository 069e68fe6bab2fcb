"""logix in Lightning: rows against one example at a time, results, and nothing left behind."""

from __future__ import annotations

import os

import numpy as np
import pytest

torch = pytest.importorskip("torch")
L = pytest.importorskip("lightning")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from logix.lightning import LogIXArguments, patch  # noqa: E402

pytestmark = [
    # The loaders of these tests are tiny, and a worker would cost more than it gives.
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    # Lightning's own use of torch.
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning"),
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.drop(self.first(x).tanh()))


class Classifier(L.LightningModule):
    """Written for training: a mean loss, metrics, an optimizer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model, self.other = Net(), nn.Linear(2, 2)
        self.seen_in_training = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.seen_in_training.append(self.model.training)
        loss = F.cross_entropy(self.model(x), y)
        self.log("train_loss", loss)
        self.log_dict({"again": loss})
        return {"loss": loss}

    def predict_step(self, batch, batch_idx):
        return self.model(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def data(count=7, seed=0):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=rng)
    return TensorDataset(x, torch.randint(0, 3, (count,), generator=rng))


def own_gradients(model, dataset):
    model.eval()
    named = dict(model.named_parameters())
    rows = []
    for x, y in dataset:
        loss = F.cross_entropy(model(x[None]), y[None])
        rows.append(torch.autograd.grad(loss, list(named.values())))
    return {name: torch.stack(column).numpy() for name, column in zip(named, zip(*rows))}


def first_number(batch):
    """An id that an example carries."""
    return [f"{float(v):.6f}" for v in batch[0][:, 0]]


@pytest.fixture
def made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def make(module_class=Classifier, extractor=first_number, mask=None, trainer=None, **words):
        args = LogIXArguments("run", {"root_dir": "logix"}, **words)
        Module, Trainer = patch(
            module_class, L.Trainer, args, data_id_extractor=extractor, mask_extractor=mask
        )
        quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
        quiet |= dict(enable_model_summary=False, accelerator="cpu", devices=1)
        return Module(), Trainer(**quiet | (trainer or {}))

    return make


def rows_of(trainer):
    """Ids and {layer: rows}, in the order of the store."""
    loader = trainer.logix.build_log_dataloader(batch_size=1000)
    ((ids, logs),) = list(loader)
    return list(ids), {layer: np.asarray(kinds["grad"]) for layer, kinds in logs.items()}


def agrees(trainer, model, dataset, tolerance=1e-6):
    expected = own_gradients(model, dataset)
    ids, rows = rows_of(trainer)
    names = first_number(dataset.tensors)
    assert ids == names
    assert {n if n in expected else f"{n}.weight" for n in rows} == set(expected)
    for layer, found in rows.items():
        want = expected.get(layer, expected.get(f"{layer}.weight"))
        np.testing.assert_allclose(found, want, atol=tolerance)


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_row_is_the_gradient_of_one_examples_own_loss(shuffled, made):
    """Also where the loader shuffles and drops what does not fill a batch."""
    module, trainer = made()
    report = trainer.extract_log(module, DataLoader(data(), 3, shuffle=shuffled, drop_last=True))
    assert (report.rows, report.passes) == (7, 1)
    agrees(trainer, module.model, data())
    assert not any(module.seen_in_training)


def test_scores(made):
    module, trainer = made()
    train, test = data(), data(3, seed=1)
    trainer.extract_log(module, DataLoader(train, 4))
    mine, theirs = (own_gradients(module.model, d) for d in (train, test))
    flat = lambda g: np.concatenate([x.reshape(len(x), -1) for x in g.values()], 1)
    want = flat(theirs) @ flat(mine).T
    scores = trainer.influence(module, DataLoader(test, 2))
    np.testing.assert_allclose(scores["influence"], want, rtol=1e-4, atol=1e-5)
    assert scores["src_ids"] == first_number(test.tensors)
    assert scores["tgt_ids"] == first_number(train.tensors)
    best = trainer.influence(module, DataLoader(test, 2), top_k=1)
    np.testing.assert_allclose(best["influence"][:, 0], want.max(1), rtol=1e-4, atol=1e-5)
    own = trainer.self_influence(module)
    np.testing.assert_allclose(own["influence"], (flat(mine) ** 2).sum(1), rtol=1e-4)
    own = trainer.self_influence(module, DataLoader(test, 2))
    np.testing.assert_allclose(own["influence"], (flat(theirs) ** 2).sum(1), rtol=1e-4)


def test_compressed_with_statistics_and_read_by_another_trainer(made):
    module, trainer = made(lora=True, ekfac=True, rank=2)
    assert trainer.extract_log(module, DataLoader(data(), 4)).passes == 2
    queries = DataLoader(data(2, seed=1), 2)
    expected = trainer.influence(module, queries)
    _, again = made(initialize_from_log=True)
    other, _ = made()
    with pytest.raises(RuntimeError, match="initialize_from_log=True"):
        made()[1].influence(other, queries)
    found = again.influence(made(initialize_from_log=True)[0], queries)
    np.testing.assert_allclose(found["influence"], expected["influence"], rtol=1e-4)


def test_afterwards_the_module_predicts_trains_and_is_as_it_was(made):
    module, trainer = made(trainer=dict(max_epochs=1))
    module.train()
    module.model.first.eval()
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    modes = {n: m.training for n, m in module.named_modules()}
    trainer.extract_log(module, DataLoader(data(), 4))
    assert {n: m.training for n, m in module.named_modules()} == modes
    assert all(p.grad is None and p.requires_grad for p in module.parameters())
    assert all(torch.equal(p, before[n]) for n, p in module.named_parameters())
    out = trainer.predict(module, DataLoader(data(), 7))
    assert out[0].shape == (7, 3)
    module.train()
    module.seen_in_training.clear()
    trainer.fit(module, DataLoader(data(), 4))
    assert len(module.seen_in_training) == 2
    assert "train_loss" in trainer.callback_metrics


def test_no_file_of_a_logger_or_a_checkpoint_is_written(made, tmp_path):
    module, trainer = made(trainer=dict(logger=True, enable_checkpointing=True))
    loggers = trainer.loggers
    trainer.extract_log(module, DataLoader(data(), 4))
    assert os.listdir(tmp_path) == ["logix"]
    assert trainer.loggers == loggers != []


def test_precision_of_the_trainer_is_used(made):
    module, trainer = made(trainer=dict(precision="bf16-mixed"))
    seen = set()
    module.model.last.register_forward_hook(lambda m, x, out: seen.add(out.dtype))
    trainer.extract_log(module, DataLoader(data(), 4))
    assert seen == {torch.bfloat16}
    agrees(trainer, module.model, data(), tolerance=0.03)


def test_without_an_extractor_ids_are_hashes_of_the_content(made):
    module, trainer = made(extractor=None)
    trainer.extract_log(module, DataLoader(data(), 3))
    ids = rows_of(trainer)[0]
    assert len(set(ids)) == 7
    one = trainer.influence(module, DataLoader(data(), 5))
    assert one["src_ids"] == ids


class Words(L.LightningModule):
    """Sequences with padding, of which the loss is a sum over what is real."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(2, 3)

    def training_step(self, batch):  # Lightning allows it without a number too
        loss = F.cross_entropy(self.net(batch["x"]).mT, batch["y"], reduction="none")
        return (loss * batch["mask"]).sum()


def test_a_mask_and_another_name_of_the_model(made):
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(4, 5, 2, generator=rng), torch.randint(0, 3, (4, 5), generator=rng)
    mask = torch.arange(5) < torch.tensor([[2], [5], [1], [3]])
    rows = [dict(x=a, y=b, mask=c, name=i) for i, (a, b, c) in enumerate(zip(x, y, mask))]
    module, trainer = made(
        Words,
        lambda batch: batch["name"],
        lambda batch: batch["mask"],
        model_key="net",
        hessian="kfac",
    )
    trainer.extract_log(module, DataLoader(rows, 3))
    ids, found = rows_of(trainer)
    assert ids == [0, 1, 2, 3]
    for i in range(4):
        kept = mask[i]
        loss = F.cross_entropy(module.net(x[i][kept]), y[i][kept], reduction="sum")
        (want,) = torch.autograd.grad(loss, [module.net.weight])
        (name,) = (n for n, rows in found.items() if rows.ndim == 3)
        np.testing.assert_allclose(found[name][i], want.numpy(), atol=1e-5)


class Hidden(Classifier):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.model(batch[0]), batch[1], reduction="none").mean()


class Nothing(Classifier):
    def training_step(self, batch, batch_idx):
        return None


class Manual(Classifier):
    automatic_optimization = False


@pytest.mark.parametrize(
    ("module_class", "error", "message"),
    [
        (Hidden, ValueError, r"not a sum over examples.*`loss\.sum\(\)`"),
        (Nothing, TypeError, "returned NoneType: its rows would be missing"),
        (Manual, NotImplementedError, "automatic_optimization=False"),
    ],
)
def test_modules_without_a_loss_of_each_example(module_class, error, message, made):
    module, trainer = made(module_class)
    with pytest.raises(error, match=message):
        trainer.extract_log(module, DataLoader(data(), 3))


def test_a_wrong_key_or_an_unpatched_module(made):
    module, trainer = made(model_key="net")
    with pytest.raises(AttributeError, match=r"no attribute 'net'.*'model', 'other'"):
        trainer.extract_log(module, DataLoader(data(), 3))
    with pytest.raises(TypeError, match="Classifier is not the patched class"):
        trainer.extract_log(Classifier(), DataLoader(data(), 3))
