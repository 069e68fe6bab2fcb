"""Watching a compiled model: one graph, as few programs as can be, the old one afterwards."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

from logix.torch._capture import Capture, without_weight_gradients  # noqa: E402
from logix.torch._units import units  # noqa: E402
from torch_oracle import assert_same, assert_untouched, by_parameter, captured, looped  # noqa: E402

# Of the compiler itself, whatever it compiles.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
B, T, D = 5, 4, 6


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.scale = nn.LayerNorm(D), nn.Linear(D, D), Scale()

    def forward(self, x):
        return x + self.scale(torch.tanh(self.linear(self.norm(x))), by=2)


class Scale(nn.Module):
    """Without a rule, and called with more than tensors."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))

    def forward(self, x, by, extra=None):
        return self.weight**by * x


def loss_of(model, x):
    y = model(x)
    return (torch.sin(y) * torch.arange(1.0, 1 + y[0].numel()).view_as(y[0])).sum()


def graphs():
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_model_compiled_before_the_block(backend):
    model, x = nn.Sequential(Block(), Block()), torch.randn(B, T, D)
    want = looped(model, x, loss_of)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    plain = loss_of(compiled, x)
    plain.backward()
    assert graphs() == 1
    assert list(units(compiled)) == list(units(model))
    for _ in range(2):
        assert_same(captured(compiled, x, loss_of), want)
        assert graphs() == 2  # one with the watching
    model.zero_grad()
    assert torch.equal(loss_of(compiled, x), plain)
    assert graphs() == 2  # the one before, again
    assert_untouched(model)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_equal_blocks_share_a_program(backend):
    model, x = nn.Sequential(*[Block() for _ in range(12)]), torch.randn(B, T, D)
    want = looped(model, x, loss_of)
    for block in model:
        block.compile(backend=backend, fullgraph=True)
    loss_of(model, x).backward()
    before = graphs()  # the first block's input has no gradient
    assert before <= 2
    for _ in range(2):
        assert_same(captured(model, x, loss_of, weights=False), want)
        assert graphs() <= 2 * before
    after = graphs()
    loss_of(model, x).backward()
    assert graphs() == after


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_records_outlive_the_program_that_made_them(backend):
    """Its memory is used again by the next batch."""
    model, x = nn.Sequential(Block(), Block()), torch.randn(2, B, T, D)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    wants, watched, captures = [looped(model, y, loss_of) for y in x], units(compiled), []
    for y in x:
        captures.append(Capture(watched, B))
        with captures[-1].watch(), without_weight_gradients(model):
            loss_of(compiled, y).backward()
    for capture, want in zip(captures, wants, strict=True):
        assert_same(by_parameter(model, capture), want)


def test_parts_of_a_batch():
    model, x = nn.Sequential(Block(), nn.Linear(D, 2)), torch.randn(B, T, D)
    want = looped(model, x, loss_of)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def one_by_one(model, x):
        loss_of(model, x[:2]).backward()
        return loss_of(model, x[2:])

    assert_same(captured(compiled, x, one_by_one), want)
    at_once = lambda model, x: loss_of(model, x[:2]) + loss_of(model, x[2:])
    with pytest.raises(ValueError, match=r"several forward passes.*Call backward\(\) after each"):
        captured(compiled, x, at_once)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(9, D), nn.Embedding(T, D)

    def forward(self, x):
        return torch.tanh(self.words(x) + self.positions(torch.arange(x.shape[1])))


def test_positions_that_are_looked_up_once():
    model = Positions()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for n in (1, B, T):
        x = torch.randint(0, 9, (n, T))
        assert_same(captured(compiled, x, loss_of), looped(model, x, loss_of))


def test_an_argument_that_is_lost_is_named():
    class Options:
        by = 2

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(D))

        def forward(self, x, options):
            return self.weight**options.by * x

    odd, options = Odd(), Options()
    model = lambda x: odd(x, options)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    capture = Capture(units(odd), B)
    with capture.watch(), pytest.raises(RuntimeError, match="called with a Options, which is lost"):
        loss_of(compiled, torch.randn(B, D)).backward()
