"""What watching leaves as it was, what it covers, and how it is taught."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import logix.torch  # noqa: E402
from logix.torch import _layers  # noqa: E402
from logix.torch._capture import Capture, without_weight_gradients  # noqa: E402
from logix.torch._coverage import coverage, row_size, shapes  # noqa: E402
from logix.torch._units import units  # noqa: E402
from torch_oracle import (  # noqa: E402
    assert_same,
    assert_untouched,
    by_parameter,
    captured,
    looped,
    loss_of,
)
from torch_oracle import seed as seed  # noqa: E402 (a fixture)

B, D = 5, 6


def mlp():
    return nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(9, D), nn.Linear(D, 9)
        self.head.weight = self.words.weight
        self.twin, self.other = nn.Linear(D, D), nn.Linear(D, D, bias=False)
        self.other.weight = self.twin.weight
        self.alias = self.twin

    def forward(self, x):
        return self.head(torch.tanh(self.other(torch.tanh(self.alias(self.words(x))))))


def test_an_exception_leaves_the_model_as_it_was():
    model = mlp()
    model[0].bias.requires_grad_(False)
    before = [(type(m), dict(m.__dict__)) for m in model.modules()]

    def failing():
        with Capture(units(model), 1).watch(), without_weight_gradients(model):
            assert not any(p.requires_grad for p in model.parameters())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert [p.requires_grad for p in model[0].parameters()] == [True, False]
    assert [(type(m), dict(m.__dict__)) for m in model.modules()] == before
    assert_untouched(model)


def test_a_copy_is_not_watched():
    model, x = mlp(), torch.randn(B, D)
    want, state = model(x), model.state_dict()
    capture = Capture(units(model), B)
    with capture.watch():
        inside = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        assert list(model.state_dict()) == list(state)
        assert str(model) == str(inside[0])
        assert isinstance(model[0], nn.Linear)
        loss_of(model, x).backward()
    for other in (*inside, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_untouched(other)
        assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
        assert torch.equal(other(x), want)


def test_two_captures_at_once_see_the_same():
    model, x = mlp(), torch.randn(B, D)
    want = looped(model, x, loss_of)
    outer, inner = Capture(units(model), B), Capture(units(model, name_filter=["0", "2"]), B)
    with outer.watch():
        with inner.watch():
            loss_of(model, x).backward()
        assert "logix_number" in model[0].__dict__  # the outer one is still there
    assert_untouched(model)
    assert_same(by_parameter(model, outer), want)
    assert_same(by_parameter(model, inner), {k: v for k, v in want.items() if k[0] in "02"})


@pytest.mark.parametrize("block", [torch.no_grad, torch.inference_mode])
def test_passes_without_gradients_are_not_seen(block):
    model, x = mlp(), torch.randn(B, D)
    want, capture = looped(model, x, loss_of), Capture(units(model), B)
    with capture.watch():
        with block():
            model(torch.randn(3, D))
        loss_of(model, x).backward()
    assert_same(by_parameter(model, capture), want)


def test_no_backward_pass_is_an_error():
    model = mlp()
    capture = Capture(units(model), B)
    with capture.watch():
        model(torch.randn(B, D))
    with pytest.raises(RuntimeError, match=r"Call loss\.backward\(\) inside"):
        capture.records()


def test_layers_that_the_loss_does_not_depend_on_are_named():
    model = nn.ModuleDict({"used": nn.Linear(D, 2), "idle": nn.Linear(D, 2)})
    with pytest.raises(RuntimeError, match="no gradient came to idle: 1 of 2"):
        captured(model, torch.randn(B, D), lambda model, x: model["used"](x).sum())


def test_a_forward_that_was_replaced():
    """As packages do that move arguments between devices."""
    model, x = mlp(), torch.randn(B, D)
    own = model[0].forward
    model[0].forward = lambda x: 2 * own(x)
    replaced = model[0].forward
    assert_same(captured(model, x, loss_of, weights=False), looped(model, x, loss_of))
    assert model[0].forward is replaced


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_scaled_loss_gives_the_same_rows(dtype):
    model, x = mlp(), torch.randn(B, D)
    scaler, before = torch.amp.GradScaler("cpu", init_scale=1024.0), torch.amp.GradScaler.scale

    def loss(model, x, scaled=True):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            found = loss_of(model, x)
        return scaler.scale(found) if scaled else found

    want = captured(model, x, lambda model, x: loss(model, x, False))
    outer, inner = Capture(units(model), B), Capture(units(model), B)
    with outer.watch():
        with inner.watch():
            loss(model, x).backward()
    for capture in (outer, inner):
        assert_same(by_parameter(model, capture), want, rtol=1e-3)
    with contextlib.suppress(ZeroDivisionError), inner.watch():
        raise ZeroDivisionError
    assert torch.amp.GradScaler.scale is before


def test_only_trained_parameters_are_watched():
    model = mlp()
    model[0].requires_grad_(False)
    model[3].weight.requires_grad_(False)
    assert {u.name: list(u.layers) for u in units(model).values()} == {
        "2": ["weight", "bias"],
        "3": ["bias"],
    }
    x = torch.randn(B, D)
    assert_same(captured(model, x, loss_of), looped(model, x, loss_of))


def test_if_none_is_trained_all_are_watched():
    model, x = mlp().requires_grad_(False), torch.randn(B, D)
    want = looped(model, x, loss_of)
    assert len(want) == 6
    assert_same(captured(model, x, loss_of), want)
    assert not any(p.requires_grad for p in model.parameters())


def test_filters():
    model = mlp()
    assert list(units(model)) == ["0", "2", "3"]
    assert list(units(model, type_filter=[nn.Linear])) == ["0", "3"]
    assert list(units(model, type_filter="norm")) == ["2"]
    assert list(units(model, name_filter=["3"])) == ["3"]


def test_tied_weights_are_one_layer():
    model, x = Tied(), torch.randint(0, 9, (B, 3))
    watched = units(model)
    assert shapes(watched) == {
        "words": (9, D),
        "head.bias": (9,),
        "twin": (D, D),
        "twin.bias": (D,),
    }
    assert row_size(shapes(watched)) == 9 * D + 9 + D * D + D
    assert_same(captured(model, x, loss_of, weights=False), looped(model, x, loss_of))


def test_coverage_reads_well():
    model = Tied()
    assert str(coverage(model, units(model))) == (
        "4 layers, 105 of 105 parameters (100.0%); shared weights, counted once: words = head, "
        "twin = other"
    )
    assert str(coverage(model, units(model, name_filter=["words", "twin"]))) == (
        "2 layers, 96 of 105 parameters (91.4%); not covered: head.bias; shared with a module that "
        "is not watched, so a part is not seen: words, twin"
    )
    model = nn.Sequential(nn.LSTM(D, 2), nn.LSTM(2, 2), nn.MultiheadAttention(D, 1))
    model[2].requires_grad_(False)
    assert str(coverage(model, units(model))) == (
        "2 layers, 128 of 128 parameters (100.0%); without a rule, so computed again for each "
        "example: 2 LSTM"
    )


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.ones(D))

    def forward(self, x):
        return self.by * x


@pytest.fixture
def rules(monkeypatch):
    monkeypatch.setattr(_layers, "RULES", dict(_layers.RULES))


def test_a_rule_teaches_a_type(rules):
    model, x = nn.Sequential(Scale(), nn.Linear(D, 2)), torch.randn(B, 3, D)
    assert units(model)["0"].how == "recomputed"
    want, seen = looped(model, x, loss_of), []

    @logix.torch.rule(Scale)
    def scale(module, x, g):
        seen.append(module)
        return {"by": (g * x).sum(1)}

    assert_same(captured(model, x, loss_of), want)
    assert seen == [model[0]]


def test_rules_say_what_is_wrong(rules):
    with pytest.raises(TypeError, match="a type of modules or its full name"):
        logix.torch.rule(3)(print)
    with pytest.raises(TypeError, match=r"@rule\(MyLayer\)"):
        logix.torch.rule()
    logix.torch.rule(Scale)(lambda module, x, g: {"to": g})
    with pytest.raises(RuntimeError, match=r"layer '0' \(Scale\).*gives to.*'by'"):
        captured(nn.Sequential(Scale()), torch.randn(B, D), loss_of)


@pytest.mark.parametrize("shape", [(B,), (B - 1, 3), (B, 3, 1)])
def test_a_mask_of_another_shape_is_an_error(shape):
    with pytest.raises(ValueError, match=r"mask has the shape .* there are 5 ids"):
        Capture(units(mlp()), B, torch.ones(shape))
