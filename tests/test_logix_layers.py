"""Every kind of layer, in every way of running it, against a loop over examples."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from torch_oracle import (  # noqa: E402
    assert_same,
    assert_untouched,
    captured,
    looped,
    loss_of,
)
from torch_oracle import seed as seed  # noqa: E402 (a fixture)

# The first is of torch.compile, whenever a program has an autograd function in it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning"),
]
B, T = 5, 4


def floats(*shape):
    return lambda: torch.randn(B, *shape)


def ids(*shape):
    return lambda: torch.randint(0, 7, (B, *shape))


def conv(kind, **options):
    return lambda: kind(4, 6, 3, **options)


def transposed_linear():
    return pytest.importorskip("transformers").pytorch_utils.Conv1D(2, 3)


def batch_norm(kind):
    def make():
        module = kind(4).eval()
        module.running_mean.normal_()
        module.running_var.uniform_(0.5, 2)
        return module

    return make


class Scaled(nn.Linear):
    """Derived from a layer that has a rule, but with another gradient."""

    def forward(self, x):
        return 3 * super().forward(x)


class Norm(nn.Module):
    """Known to no rule."""

    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (1 + self.by) * x / x.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()


PLACES = {  # layers over (B, T, …), which a mask is for
    "linear": (lambda: nn.Linear(3, 2), floats(T, 3)),
    "linear without bias": (lambda: nn.Linear(3, 2, bias=False), floats(T, 3)),
    "transposed linear": (transposed_linear, floats(T, 3)),
    "embedding": (lambda: nn.Embedding(7, 3), ids(T)),
    "embedding with padding": (lambda: nn.Embedding(7, 3, padding_idx=2), ids(T)),
    "layer norm": (lambda: nn.LayerNorm(3), floats(T, 3)),
    "layer norm without bias": (lambda: nn.LayerNorm(3, bias=False), floats(T, 3)),
    "rms norm": (lambda: nn.RMSNorm(3), floats(T, 3)),
    "derived linear": (lambda: Scaled(3, 2), floats(T, 3)),
    "unknown norm": (Norm, floats(T, 3)),
}
LAYERS = {
    **PLACES,
    "linear over examples": (lambda: nn.Linear(3, 2), floats(3)),
    "linear over many places": (lambda: nn.Linear(3, 2), floats(2, T, 3)),
    "embedding of examples": (lambda: nn.Embedding(7, 3), ids()),
    "conv1d": (conv(nn.Conv1d), floats(4, 9)),
    "conv2d": (conv(nn.Conv2d), floats(4, 7, 8)),
    "conv3d": (conv(nn.Conv3d), floats(4, 5, 4, 6)),
    "conv stride": (conv(nn.Conv2d, stride=(2, 1), padding=(1, 2)), floats(4, 7, 8)),
    "conv dilation": (conv(nn.Conv2d, dilation=2, padding=2), floats(4, 7, 8)),
    "conv groups": (conv(nn.Conv2d, groups=2, bias=False), floats(4, 7, 8)),
    "conv3d groups": (conv(nn.Conv3d, groups=2, padding="same"), floats(4, 3, 4, 3)),
    "conv depthwise": (lambda: nn.Conv1d(4, 8, 3, groups=4, dilation=2), floats(4, 9)),
    "conv same": (conv(nn.Conv2d, padding="same", dilation=(1, 2)), floats(4, 7, 8)),
    "conv same, even": (lambda: nn.Conv1d(4, 6, 4, padding="same"), floats(4, 9)),
    "conv valid": (conv(nn.Conv2d, padding="valid"), floats(4, 7, 8)),
    "conv reflect": (conv(nn.Conv2d, padding=1, padding_mode="reflect"), floats(4, 7, 8)),
    "conv replicate": (conv(nn.Conv1d, padding=2, padding_mode="replicate"), floats(4, 9)),
    "conv circular": (conv(nn.Conv2d, padding=(1, 2), padding_mode="circular"), floats(4, 7, 8)),
    "conv same, reflect": (
        conv(nn.Conv2d, padding="same", padding_mode="reflect", dilation=2),
        floats(4, 7, 8),
    ),
    "layer norm, two axes": (lambda: nn.LayerNorm((T, 3)), floats(2, T, 3)),
    "group norm": (lambda: nn.GroupNorm(2, 4), floats(4, 5, 3)),
    "batch norm, flat": (batch_norm(nn.BatchNorm1d), floats(4)),
    "batch norm 1d": (batch_norm(nn.BatchNorm1d), floats(4, 5)),
    "batch norm 2d": (batch_norm(nn.BatchNorm2d), floats(4, 3, 5)),
}
BIAS_ONLY = [kind for kind in LAYERS if "without" not in kind and kind.startswith(("lin", "conv1"))]


def made(kind):
    make, data = LAYERS[kind]
    model = nn.Sequential(make())
    for p in model.parameters():
        nn.init.normal_(p)
    return model, data()


def assert_captured(model, x, want, run=None, rtol=1e-4, **how):
    """With and without gradients of the weights."""
    for weights in (True, False):
        assert_same(captured(model if run is None else run, x, loss_of, weights, **how), want, rtol)
        assert all((p.grad is not None) == weights for p in model.parameters())
        assert all(p.requires_grad for p in model.parameters())
        model.zero_grad()
    assert_untouched(model)


@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_are_those_of_a_loop(kind):
    model, x = made(kind)
    assert_captured(model, x, looped(model, x, loss_of))


@pytest.mark.parametrize("kind", LAYERS)
def test_float64_stays_float64(kind):
    model, x = made(kind)
    model, x = model.double(), x.double() if x.is_floating_point() else x
    found = captured(model, x, loss_of)
    assert all(rows.dtype == torch.float64 for rows in found.values())
    assert_same(found, looped(model, x, loss_of), rtol=1e-10)


@pytest.mark.parametrize("kind", BIAS_ONLY)
def test_a_frozen_weight_has_no_row(kind):
    model, x = made(kind)
    model[0].weight.requires_grad_(False)
    want = looped(model, x, loss_of)
    assert set(want) == {"0.bias"}
    assert_same(captured(model, x, loss_of), want)


class Checkpointed(nn.Sequential):
    """The block is computed again in the backward pass."""

    reentrant = False

    def forward(self, x):
        start = torch.zeros((), requires_grad=True)  # a reentrant one needs a gradient to pass on
        block = lambda x, start: self[0](x) + start
        return checkpoint(block, x, start, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_checkpointing(kind, reentrant):
    model, x = made(kind)
    again = Checkpointed(model[0])
    again.reentrant = reentrant
    assert_captured(again, x, looped(model, x, loss_of))


@pytest.mark.parametrize("kind", LAYERS)
def test_compiled(kind):
    """With the watching in one graph."""
    torch._dynamo.reset()
    model, x = made(kind)
    want = looped(model, x, loss_of)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_captured(model, x, want, run=compiled)


@pytest.mark.parametrize("kind", LAYERS)
def test_autocast(kind):
    """The same as a loop in bfloat16, up to its precision, and with sums in float32."""
    model, x = made(kind)

    def loss(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, x)

    want, exact = looped(model, x, loss), looped(model, x, loss_of)
    for weights in (True, False):
        found = captured(model, x, loss, weights)
        assert set(found) == set(want)
        for name, got in found.items():
            assert got.dtype == torch.float32
            error = (got.reshape(exact[name].shape) - exact[name]).norm()
            loop = (want[name] - exact[name]).norm()
            assert error <= 2 * loop + 1e-3 * exact[name].norm(), name


@pytest.mark.parametrize("run", ["eager", "checkpointed", "compiled"])
@pytest.mark.parametrize("kind", PLACES)
def test_masked_places_have_no_gradient(kind, run):
    """The same as sequences that end where the mask does."""
    torch._dynamo.reset()
    model, x = made(kind)
    loss = lambda model, x: torch.sin(model(x)).sum()
    lengths = [1 + i % T for i in range(B)]
    mask = torch.arange(T) < torch.tensor(lengths)[:, None]
    other = {
        "eager": lambda: model,
        "checkpointed": lambda: Checkpointed(model[0]),
        "compiled": lambda: torch.compile(model, backend="aot_eager", fullgraph=True),
    }[run]()
    for weights in (True, False):
        found = captured(other, x, loss, weights, mask)
        for i, n in enumerate(lengths):
            short = looped(model, x[i : i + 1, :n], loss)
            assert_same({k: rows[i : i + 1] for k, rows in found.items()}, short)


def test_a_mask_is_for_positions_not_for_channels():
    """As many channels as positions, and a convolution along the positions."""
    model = nn.Sequential(nn.Conv1d(T, 3, 1), nn.Conv1d(3, T, 3, padding=1))
    x, mask = torch.randn(B, T, T), torch.arange(T) < torch.arange(B)[:, None]
    found = captured(model, x, lambda model, x: torch.sin(model(x)).sum(), mask=mask)
    for i in range(B):
        loss = lambda model, x, i=i: (torch.sin(model(x)) * mask[i, None]).sum()
        want = looped(model, x[i : i + 1], loss)["1.weight"][0]
        torch.testing.assert_close(found["1.weight"][i].reshape(want.shape), want)


def test_batch_norm_in_training_mode_is_an_error():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with pytest.raises(RuntimeError, match=r"'1' \(BatchNorm1d\).*model\.eval\(\)"):
        captured(model, torch.randn(B, 3), loss_of)
    assert_untouched(model)
