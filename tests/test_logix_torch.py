"""Capturing gradients of each example: calls, parts of a batch, and what must be left as it was."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from logix.torch._call import Spreader, counts  # noqa: E402
from logix.torch._capture import Capture, without_weight_gradients  # noqa: E402
from logix.torch._coverage import coverage  # noqa: E402
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

B, T, D = 5, 4, 6


def mlp():
    return nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 2))


class Again(nn.Module):
    """A layer that is called several times, in checkpointed blocks or not."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.first, self.again, self.last = nn.Linear(D, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.reentrant = reentrant

    def forward(self, x):
        block = lambda h: torch.tanh(self.again(torch.tanh(self.again(h))))
        h = self.first(x)
        for _ in range(2):
            if self.reentrant is None:
                h = block(h)
            else:
                h = checkpoint(block, h, use_reentrant=self.reentrant)
        return self.last(h)


class Language(nn.Module):
    """Tied weights, and positions that are looked up once for all examples."""

    def __init__(self, batched=True):
        super().__init__()
        self.words, self.positions = nn.Embedding(9, D), nn.Embedding(6, D)
        self.head, self.batched = nn.Linear(D, 9, bias=False), batched
        self.head.weight = self.words.weight

    def forward(self, x):
        at = torch.arange(x.shape[1])
        at = at[None] if self.batched else at
        return self.head(torch.tanh(self.words(x) + self.positions(at)))


def tokens(n=B, length=T):
    return torch.randint(0, 9, (n, length))


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n, self.b = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, 2 * D)

    def forward(self, x):
        h = self.a(x)
        h += x
        h = self.n(torch.relu_(h))
        h *= 2
        p, q = self.b(h).chunk(2, -1)
        return p.clone().mul_(q) + self.b(h).split(D, -1)[0]


class Mask(nn.Module):
    """Attention with a mask that has no batch, and one that has."""

    def __init__(self, batch_first):
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, batch_first=batch_first)

    def forward(self, x):
        x = x if self.attention.batch_first else x.transpose(0, 1)
        later = torch.triu(torch.ones(T, T, dtype=torch.bool), 1)
        out = self.attention(x, x, x, attn_mask=later)[0]
        return out if self.attention.batch_first else out.transpose(0, 1)


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.cell = kind(D, 3, **options)

    def forward(self, x):
        x = x if self.cell.batch_first else x.transpose(0, 1)
        out, state = self.cell(x)
        out = out if self.cell.batch_first else out.transpose(0, 1)
        last = state if isinstance(state, torch.Tensor) else state[0] + state[1]
        return out.sum(1) + last.transpose(0, 1).flatten(1).sum(1, keepdim=True)


places = lambda: torch.randn(B, T, D)
square = lambda: torch.randn(T, T, D)  # as many examples as positions
MODELS = {
    "a layer called several times": (Again, places),
    "checkpointed": (lambda: Again(False), places),
    "checkpointed, reentrant": (lambda: Again(True), places),
    "in place": (InPlace, places),
    "tied, positions (1, T)": (Language, tokens),
    "tied, positions (T,)": (lambda: Language(False), tokens),
    "positions, square": (lambda: Language(False), lambda: tokens(T)),
    "one example": (Language, lambda: tokens(1)),
    "attention": (lambda: Mask(True), places),
    "attention, positions first": (lambda: Mask(False), places),
    "attention, square": (lambda: Mask(True), square),
    "attention, square, positions first": (lambda: Mask(False), square),
    "encoder": (lambda: nn.TransformerEncoderLayer(D, 2, 8, batch_first=True).eval(), places),
    "lstm": (lambda: Recurrent(nn.LSTM, batch_first=True, num_layers=2), places),
    "lstm, square": (lambda: Recurrent(nn.LSTM, batch_first=True, num_layers=2), square),
    "lstm, positions first": (lambda: Recurrent(nn.LSTM), places),
    "gru": (lambda: Recurrent(nn.GRU, batch_first=True, bidirectional=False), places),
    "weight norm": (
        lambda: nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(D, 2))),
        places,
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_are_those_of_a_loop(kind):
    make, data = MODELS[kind]
    model, x = make(), data()
    want = looped(model, x, loss_of)
    assert not coverage(model, units(model)).missing
    for weights in (True, False):
        assert_same(captured(model, x, loss_of, weights), want)
        model.zero_grad()
    assert_untouched(model)


@pytest.mark.parametrize("sizes", [[2, 3], [4, 1], [1, 1, 1, 1, 1], [2, 1, 2]])
@pytest.mark.parametrize("kind", ["mlp", *list(MODELS)[:6]])
def test_parts_of_a_batch(kind, sizes):
    """Gradient accumulation, and several forward passes before one backward pass."""
    make, data = MODELS.get(kind, (mlp, lambda: torch.randn(B, D)))
    model, x = make(), data()
    want = looped(model, x, loss_of)

    def one_by_one(model, x):
        *first, last = torch.split(x, sizes)
        for part in first:
            loss_of(model, part).backward()
        return loss_of(model, last)

    assert_same(captured(model, x, one_by_one), want)
    at_once = lambda model, x: sum(loss_of(model, part) for part in torch.split(x, sizes))
    if "reentrant" in kind:
        with pytest.raises(ValueError, match="'again': several forward passes"):
            captured(model, x, at_once)
    else:
        assert_same(captured(model, x, at_once), want)


@pytest.mark.parametrize("shape", [(B, T), (B, 1), (B,)])
def test_a_lookup_of_each_example_is_not_waited_for(shape):
    """What is on the device "meta" has no values that could be seen."""
    table, x = nn.Embedding(9, D, device="meta"), torch.zeros(shape, dtype=int, device="meta")
    out = table(x)
    assert Spreader()(table, out, x, B, "words") is out
    with pytest.raises((RuntimeError, NotImplementedError)):
        counts(x)


def test_parts_of_different_lengths():
    model = Language()
    x, y = tokens(2, 6), tokens(3, 3)
    capture = Capture(units(model), 5)
    with capture.watch(), without_weight_gradients(model):
        loss_of(model, x).backward()
        loss_of(model, y).backward()
    found, parts = by_parameter(model, capture), [looped(model, z, loss_of) for z in (x, y)]
    assert_same(found, {k: torch.cat([p[k] for p in parts]) for k in found})


@pytest.mark.parametrize(
    ("ids", "sizes"), [(4, [5]), (6, [5]), (10, [5]), (5, [5, 5]), (3, [3, 2])]
)
def test_a_wrong_number_of_ids_names_the_layer(ids, sizes):
    model = mlp()
    capture = Capture(units(model), ids)
    with capture.watch():
        for size in sizes:
            loss_of(model, torch.randn(size, D)).backward()
    with pytest.raises(ValueError, match=rf"layer '0' was called.*{ids} ids"):
        capture.records()


def test_two_backward_passes_over_one_forward_pass_add_up():
    model, x = mlp(), torch.randn(B, D)
    want = looped(model, x, loss_of)

    def twice(model, x):
        loss = loss_of(model, x)
        loss.backward(retain_graph=True)
        return loss

    assert_same(captured(model, x, twice), {k: 2 * rows for k, rows in want.items()})


class Routed(nn.Module):
    """Tokens are picked for each expert, so nothing tells whose they are."""

    def __init__(self):
        super().__init__()
        self.expert, self.head = nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x):
        flat = x.reshape(-1, D)
        some = flat[:, 0] > 0
        out = torch.zeros_like(flat)
        out[some] = self.expert(flat[some])
        return self.head(out.view_as(x)) if self.training else out.view_as(x).sum(1)


@pytest.mark.parametrize("training", [True, False])
def test_routed_tokens_are_an_error(training):
    model, x = Routed().train(training), torch.randn(B, 2, D)
    x[..., 0] = 1 - 2 * (torch.arange(B * 2).view(B, 2) % 3 == 0)  # six of ten tokens
    watched = units(model, name_filter=None if training else ["expert"])
    with pytest.raises((RuntimeError, ValueError), match=r"layer 'expert'.*6"):
        captured(model, x, loss_of, watched=watched)


def test_an_input_changed_in_place_is_an_error():
    class Changed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(D, D)

        def forward(self, x):
            h = x.clone()
            y = self.a(h)
            h.add_(1)
            return y

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        captured(Changed(), torch.randn(B, D), loss_of, weights=False)


class Unknown(nn.Module):
    """No rule is for it, so it is computed again."""

    def __init__(self, fun):
        super().__init__()
        self.by, self.fun = nn.Parameter(torch.ones(D)), fun

    def forward(self, x):
        return self.fun(x, self.by)


@pytest.mark.parametrize(
    ("fun", "text"),
    [
        (lambda x, w: nn.functional.dropout(x * w), "random numbers.*model.eval"),
        (lambda x, w: (x - x.mean(0)) * w, "mix examples"),
        (lambda x, w: x.add_(1) * w, "changes its input in place"),
    ],
)
def test_what_can_not_be_computed_again_is_an_error(fun, text):
    model = nn.Sequential(nn.Linear(D, D), Unknown(fun))
    with pytest.raises(RuntimeError, match=text):
        captured(model, torch.randn(B, D), loss_of, weights=False)
    assert_untouched(model)


def test_what_depends_on_values_is_computed_one_by_one():
    model = nn.Sequential(Unknown(lambda x, w: x * w if x.sum() > 0 else x - w))
    x = torch.randn(B, D).abs()
    assert_same(captured(model, x, loss_of), looped(model, x, loss_of))
