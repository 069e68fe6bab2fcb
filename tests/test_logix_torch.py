"""Per-sample gradients of PyTorch layers, against a loop over examples."""

from __future__ import annotations

from contextlib import nullcontext as nothing

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from logix._compress import gradients  # noqa: E402
from logix.torch import _watch  # noqa: E402
from logix.torch._capture import Capture, without_weight_gradients  # noqa: E402
from logix.torch._units import units  # noqa: E402

B, T = 5, 4


def floats(*shape):
    return lambda: torch.randn(B, *shape)


def ids(*shape):
    return lambda: torch.randint(0, 7, (B, *shape))


def conv(kind, **options):
    return lambda: kind(4, 6, 3, **options)


LAYERS = {
    "linear": (lambda: nn.Linear(3, 2), floats(3)),
    "linear without bias": (lambda: nn.Linear(3, 2, bias=False), floats(3)),
    "linear over places": (lambda: nn.Linear(3, 2), floats(T, 3)),
    "linear over many places": (lambda: nn.Linear(3, 2), floats(2, T, 3)),
    "embedding": (lambda: nn.Embedding(7, 3), ids(T)),
    "embedding with padding": (lambda: nn.Embedding(7, 3, padding_idx=2), ids(T)),
    "conv1d": (conv(nn.Conv1d), floats(4, 9)),
    "conv2d": (conv(nn.Conv2d), floats(4, 7, 8)),
    "conv3d": (conv(nn.Conv3d), floats(4, 5, 4, 6)),
    "conv stride": (conv(nn.Conv2d, stride=(2, 1), padding=(1, 2)), floats(4, 7, 8)),
    "conv dilation": (conv(nn.Conv2d, dilation=2, padding=2), floats(4, 7, 8)),
    "conv groups": (conv(nn.Conv2d, groups=2), floats(4, 7, 8)),
    "conv depthwise": (lambda: nn.Conv1d(4, 8, 3, groups=4, dilation=2), floats(4, 9)),
    "conv same": (conv(nn.Conv2d, padding="same", dilation=(1, 2)), floats(4, 7, 8)),
    "conv valid": (conv(nn.Conv2d, padding="valid"), floats(4, 7, 8)),
    "conv reflect": (conv(nn.Conv2d, padding=1, padding_mode="reflect"), floats(4, 7, 8)),
    "conv replicate": (conv(nn.Conv1d, padding=2, padding_mode="replicate"), floats(4, 9)),
    "conv circular": (conv(nn.Conv2d, padding=(1, 2), padding_mode="circular"), floats(4, 7, 8)),
    "layer norm": (lambda: nn.LayerNorm(3), floats(T, 3)),
    "layer norm, two axes": (lambda: nn.LayerNorm((T, 3)), floats(2, T, 3)),
    "rms norm": (lambda: nn.RMSNorm(3), floats(T, 3)),
    "group norm": (lambda: nn.GroupNorm(2, 4), floats(4, 5, 3)),
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def loss_of(model, x):
    return (
        torch.sin(model(x)) * torch.arange(1.0, 1 + model(x)[0].numel()).view_as(model(x)[0])
    ).sum()


def looped(model, x, loss=loss_of):
    """Gradients of each example by itself, by parameter."""
    rows = {name: [] for name, _ in model.named_parameters()}
    for i in range(len(x)):
        grads = torch.autograd.grad(loss(model, x[i : i + 1]), list(model.parameters()))
        for name, grad in zip(rows, grads, strict=True):
            rows[name].append(grad)
    return {name: torch.stack(grads) for name, grads in rows.items()}


def captured(model, x, loss=loss_of, weights=True, mask=None):
    capture = Capture(units(model), len(x), mask)
    with capture.watch(), nothing() if weights else without_weight_gradients(model):
        loss(model, x).backward()
    return by_parameter(model, capture)


def by_parameter(model, capture):
    """Rows under the names that PyTorch gives the parameters."""
    known = dict(model.named_parameters())
    found = gradients(capture.records())
    return {n if n in known else f"{n}.weight".lstrip("."): g for n, g in found.items()}


def assert_untouched(model):
    for module in model.modules():
        assert not module._forward_hooks
        assert not any("logix" in key for key in module.__dict__)
        assert "torch" in type(module).__module__ or type(module).__module__ == __name__
        assert type(module).__mro__.count(type(module)) == 1
        assert type(module) not in _watch._classes.values()


def assert_same(found, want, rtol=1e-4):
    assert set(found) == set(want)
    for name, rows in want.items():
        got = found[name].reshape(rows.shape).float()
        atol = 1e-5 * max(1.0, float(rows.abs().max()))
        torch.testing.assert_close(got, rows.float(), rtol=rtol, atol=atol, msg=name)


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_are_those_of_a_loop(kind, weights):
    make, data = LAYERS[kind]
    model = nn.Sequential(make())
    for p in model.parameters():
        nn.init.normal_(p)
    x = data()
    want = looped(model, x)
    model.zero_grad()
    assert_same(captured(model, x, weights=weights), want)
    assert all((p.grad is not None) == weights for p in model.parameters())
    assert all(p.requires_grad for p in model.parameters())
    assert_untouched(model)


class Shared(nn.Module):
    """A layer that is called twice, and a checkpointed block."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.first, self.again = nn.Linear(3, 4), nn.Linear(4, 4)
        self.last, self.checkpointed = nn.Linear(4, 2), checkpointed

    def forward(self, x):
        block = lambda h: torch.tanh(self.again(torch.tanh(self.again(h))))
        h = torch.tanh(self.first(x))
        h = checkpoint(block, h, use_reentrant=False) if self.checkpointed else block(h)
        return self.last(h)


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_a_layer_called_twice(checkpointed, weights):
    model = Shared(checkpointed)
    x = torch.randn(B, 3)
    want = looped(model, x)
    assert_same(captured(model, x, weights=weights), want)


def test_masked_places_have_no_gradient():
    """The same as sequences that end where the mask does."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(B, T, 3)
    lengths = [1 + i % T for i in range(B)]
    mask = torch.arange(T) < torch.tensor(lengths)[:, None]
    loss = lambda m, x: torch.sin(m(x)).sum()
    found = captured(model, x, loss, mask=mask)
    for i, n in enumerate(lengths):
        short = looped(model, x[i : i + 1, :n], loss)
        for name, rows in short.items():
            torch.testing.assert_close(found[name][i], rows[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    x = torch.randn(B, 8)
    want = looped(model, x)
    capture = Capture(units(model), B)
    with capture.watch():
        with torch.autocast("cpu", dtype):
            loss = loss_of(model, x)
        loss.backward()
    for name, got in by_parameter(model, capture).items():
        assert got.dtype == torch.float32
        assert (got - want[name]).norm() < 0.05 * want[name].norm()


def test_an_exception_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[0].bias.requires_grad_(False)

    def failing():
        with Capture(units(model), 1).watch(), without_weight_gradients(model):
            assert not any(p.requires_grad for p in model.parameters())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert [p.requires_grad for p in model.parameters()] == [True, False, True, True]
    assert_untouched(model)


def test_filters():
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.ReLU(), nn.Linear(2, 2))
    assert list(units(model)) == ["0", "1", "3"]
    assert list(units(model, type_filter=[nn.Linear])) == ["0", "3"]
    assert list(units(model, name_filter=["3"])) == ["3"]
