"""Per-sample gradients by a loop over the examples, to compare with what is captured."""

from __future__ import annotations

from contextlib import nullcontext as nothing

import pytest
import torch

from logix._compress import gradients
from logix.torch import _watch
from logix.torch._capture import Capture, without_weight_gradients
from logix.torch._units import inner, units


@pytest.fixture(autouse=True)
def seed():
    """The same random numbers in every test of a file that imports this."""
    torch.manual_seed(0)


def loss_of(model, x):
    """A sum over examples, in which every number of the output has a slope of its own."""
    y = model(x)
    return (torch.sin(y) * torch.arange(1.0, 1 + y[0].numel()).view_as(y[0])).sum()


def example(batch, i):
    """One example of a batch: a tensor, or a dict of tensors."""
    if isinstance(batch, dict):
        return {k: v[i : i + 1] for k, v in batch.items()}
    return batch[i : i + 1]


def length(batch):
    return len(next(iter(batch.values())) if isinstance(batch, dict) else batch)


def looped(model, batch, loss):
    """Gradients of each example by itself, by parameter; of trained parameters, or of all."""
    some = {n: p for n, p in inner(model).named_parameters() if p.requires_grad}
    frozen = {n: p for n, p in inner(model).named_parameters() if not some}
    for p in frozen.values():
        p.requires_grad_(True)
    watched = some or frozen
    rows = {name: [] for name in watched}
    for i in range(length(batch)):
        model.zero_grad()
        loss(model, example(batch, i)).backward()  # not autograd.grad: some checkpoints refuse it
        for name, p in watched.items():
            rows[name].append(torch.zeros_like(p) if p.grad is None else p.grad.clone())
    model.zero_grad()
    for p in frozen.values():
        p.requires_grad_(False)
    return {name: torch.stack(grads) for name, grads in rows.items()}


def captured(model, batch, loss, weights=True, mask=None, watched=None):
    capture = Capture(watched or units(model), length(batch), mask)
    with capture.watch(), nothing() if weights else without_weight_gradients(model):
        loss(model, batch).backward()
    return by_parameter(model, capture)


def by_parameter(model, capture):
    """Rows under the names that PyTorch gives the parameters; experts are stacked again."""
    known = dict(inner(model).named_parameters())
    found = gradients(capture.records())
    out = {}
    for name, rows in found.items():
        if name not in known and f"{name}.weight".lstrip(".") in known:
            name = f"{name}.weight".lstrip(".")
        stack, _, e = name.rpartition(".")
        if name in known:
            out[name] = rows
        else:
            assert e.isdigit(), name
            out.setdefault(stack, []).append(rows)
    return {k: torch.stack(v, 1) if isinstance(v, list) else v for k, v in out.items()}


def assert_same(found, want, rtol=1e-4):
    assert set(found) == set(want)
    for name, rows in want.items():
        got = found[name].reshape(rows.shape)
        atol = rtol * max(1e-3, float(rows.abs().max()))
        assert float((got - rows).abs().max()) <= atol, name


def assert_untouched(model):
    for module in inner(model).modules():
        assert not module._forward_hooks
        assert not any("logix" in key for key in module.__dict__)
        assert type(module) not in _watch._classes.values()
