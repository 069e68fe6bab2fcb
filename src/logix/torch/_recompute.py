"""Per-sample gradients of any module: it is computed again for each example, and differentiated.

For modules that no rule knows (other people's norms, routers, adapters). It costs the module's own
forward and backward pass a second time, and holds the gradients of all examples as they are.

Where the batch is in each argument and in each output is found by trying: what the module gives for
the first and for the last example alone must be what it gives for them in the batch. So a module
that mixes examples, or draws random numbers, is an error.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ._call import Call
from ._layers import wide
from ._units import own_parameters
from ._watch import own_type, unwatched

# The axis of the batch; "rows" of all examples, one after another; "spread" if the watching has put
# it in front; None if there is none.
Place = int | str | None

_LOOP: set[type] = set()  # types that vmap can't take
# What is known of calls that can be read in one way only.
_PLACES: dict[Any, tuple[list[Place], list[Place], list[str]]] = {}


def gradients(
    module: nn.Module,
    names: list[str],
    inputs: list[Tensor],
    grads: list[Tensor],
    call: Call,
    n: int,
    masked: Callable[[Tensor], Tensor] = lambda g: g,
) -> dict[str, Tensor]:
    """{name: (n, …)}, for a call with `n` examples."""
    inputs, grads = [_wide(x) for x in inputs], [_wide(g) for g in grads]
    own = own_parameters(module)
    parameters = {k: _wide(own[k].detach()) for k in names}
    fixed = {k: _wide(x.detach()) for k, x in _state(module) if k not in parameters}

    def outputs(p: dict[str, Tensor], inputs: list[Tensor]) -> list[Tensor]:
        args, kwargs = _without_cache(module, *call.with_tensors(inputs), inputs)
        # Where another module has the same parameter, that one gives its gradient.
        out = torch.func.functional_call(module, {**fixed, **p}, args, kwargs, tie_weights=False)
        leaves = pytree.tree_flatten(out)[0]
        return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]

    def run(p: dict[str, Tensor], pieces: list[Tensor]) -> list[Tensor]:
        own = iter(pieces)
        return outputs(p, [x if place is None else next(own) for x, place in zip(inputs, places)])

    with unwatched(), _plainly(module), torch.enable_grad():
        places, out_places, used = _places(module, outputs, parameters, inputs, grads, n)
        unused = {k: p.new_zeros((n, *p.shape)) for k, p in parameters.items() if k not in used}
        parameters = {k: parameters[k] for k in used}
        if not used:
            return unused
        pieces = [_cut(x, place, n) for x, place in zip(inputs, places) if place is not None]
        g = [_cut(y, place, n, masked) for y, place in zip(grads, out_places)]
        found = _rows(own_type(module), run, parameters, pieces, g, n)
    return {**{k: rows.detach() for k, rows in found.items()}, **unused}


@contextlib.contextmanager
def _plainly(module: nn.Module) -> Iterator[None]:
    """Neither compiled nor checkpointed: a checkpoint would look for parameters that are gone."""
    saving = [m for m in module.modules() if getattr(m, "gradient_checkpointing", False)]
    try:
        for m in saving:
            m.gradient_checkpointing = False
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for m in saving:
            m.gradient_checkpointing = True


def _rows(
    kind: type,
    run: Any,
    parameters: dict[str, Tensor],
    pieces: list[Tensor],
    g: list[Tensor],
    n: int,
) -> dict[str, Tensor]:
    """Of all examples at once if that is possible."""
    fitted = lambda out, g: [y.to(x.dtype).reshape(x.shape) for x, y in zip(out, g)]

    def of_one(pieces: list[Tensor], g: list[Tensor]) -> dict[str, Tensor]:
        out, pull = torch.func.vjp(lambda p: run(p, pieces), parameters)
        return pull(fitted(out, g))[0]

    if kind not in _LOOP:
        try:
            with warnings.catch_warnings():  # of operations that vmap does one by one
                warnings.simplefilter("ignore")
                return torch.func.vmap(of_one, randomness="error")(pieces, g)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, NotImplementedError):
            # Its path depends on values, or an operation has no rule. The module itself is all
            # right, for it has just been called: what else is wrong, the loop will say.
            _LOOP.add(kind)
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for b in range(n):
        leaves = {k: p.detach().requires_grad_() for k, p in parameters.items()}
        out = run(leaves, [x[b] for x in pieces])
        pairs = [(x, y) for x, y in zip(out, fitted(out, [y[b] for y in g])) if x.requires_grad]
        ends, ys = zip(*pairs) if pairs else ((), ())
        own = torch.autograd.grad(ends, list(leaves.values()), ys, allow_unused=True)
        for (name, p), row in zip(leaves.items(), own):
            rows[name].append(torch.zeros_like(p) if row is None else row)
    return {name: torch.stack(several) for name, several in rows.items()}


def _places(
    module: nn.Module,
    outputs: Any,
    parameters: dict[str, Tensor],
    inputs: list[Tensor],
    grads: list[Tensor],
    n: int,
) -> tuple[list[Place], list[Place], list[str]]:
    """Where the batch is in each input and in each output; and the parameters that are used."""
    last = getattr(module, "batch_first", True) is False
    first, *rest = (_possible(x, n, last) for x in inputs)
    training = tuple(m.training for m in module.modules())
    shapes = tuple((x.shape, x.dtype) for x in inputs)
    key = own_type(module), training, n, shapes, tuple(parameters)
    if key in _PLACES:
        return _PLACES[key]
    run = lambda inputs: outputs(parameters, inputs)
    together, used = _once(outputs, parameters, inputs)
    cause: Exception | None = None
    with torch.no_grad():
        for places in itertools.islice(itertools.product(first[:1], *rest), 64):
            try:
                alone = [run(_pieces(inputs, places, i, n)) for i in {0, n - 1}]
            except (RuntimeError, ValueError, IndexError) as error:  # shapes that don't fit
                cause = error
                continue
            found = [_equal_places(y, ys, n, last) for y, *ys in zip(together, *alone)]
            if all(found):
                outside = [_outside(y, g, p[0]) for y, g, p in zip(together, grads, found)]
                result = list(places), outside, used
                if not rest:  # with others, the values in the next batch may tell more
                    _PLACES[key] = result
                return result
    raise ValueError(
        "for an example alone it gives something else than for the same example in the batch; "
        "does it mix examples, as batch norms do?"
    ) from cause


def _possible(x: Tensor, n: int, last: bool) -> list[Place]:
    """Where the batch may be, the likeliest first."""
    axes: list[Place] = [i for i in ((1, 0) if last else (0, 1)) if x.ndim > i and x.shape[i] == n]
    rows: list[Place] = ["rows"] if x.ndim > 0 and x.shape[0] and x.shape[0] % n == 0 else []
    return [*axes, *rows, None] if x.ndim == 2 and not axes else [*axes, None, *rows]


def _outside(y: Tensor, g: Tensor, place: Place) -> Place:
    """Where the batch is in the gradient of an output."""
    return "spread" if place is None and y.shape != g.shape else place


def _cut(
    x: Tensor, place: Place, n: int, masked: Callable[[Tensor], Tensor] = lambda x: x
) -> Tensor:
    """(n, …): what the module is given for each example."""
    if place is None:
        if x.any():
            raise ValueError("one of its outputs has no axis for the examples")
        return x.expand(n, *x.shape)
    if place == "spread":
        return masked(x)
    if place == "rows":
        return masked(x.reshape(n, -1, *x.shape[1:]))
    assert isinstance(place, int)
    return masked(x.movedim(place, 0)).unsqueeze(1 + place)


def _pieces(inputs: list[Tensor], places: Any, i: int, n: int) -> list[Tensor]:
    return [x if p is None else _cut(x, p, n)[i] for x, p in zip(inputs, places)]


def _equal_places(y: Tensor, alone: list[Tensor], n: int, last: bool) -> list[Place]:
    """Where the outputs for the first and the last example are in that for all of them."""

    def equal(a: Tensor, b: Tensor) -> bool:
        if a.shape != b.shape:
            return False
        a, b = (torch.nan_to_num(x.float(), 0.0, 0.0, 0.0) for x in (a, b))
        largest = b.abs().max() if b.numel() else 0.0
        return bool(((a - b).abs() <= 1e-3 * largest + 1e-12).all())

    examples = (0, n - 1) if len(alone) > 1 else (0,)
    return [
        place
        for place in _possible(y, n, last)
        if all(
            equal(a, y if place is None else _cut(y, place, n)[i]) for i, a in zip(examples, alone)
        )
    ]


def _once(
    outputs: Any, parameters: dict[str, Tensor], inputs: list[Tensor]
) -> tuple[list[Tensor], list[str]]:
    """The outputs for the batch, and the parameters that they depend on."""
    device = inputs[0].device
    state = torch.cuda.get_rng_state if device.type == "cuda" else lambda _: torch.get_rng_state()
    before = state(device)
    leaves = {k: p.detach().requires_grad_() for k, p in parameters.items()}
    out = outputs(leaves, inputs)
    if not torch.equal(before, state(device)):
        if device.type == "cuda":
            torch.cuda.set_rng_state(before, device)
        else:
            torch.set_rng_state(before)
        raise ValueError(
            "it draws random numbers (dropout in training mode?), and computed again it would draw "
            "others. Call model.eval() before logging"
        )
    ends = [x for x in out if x.requires_grad]
    ones = [torch.zeros_like(x) for x in ends]
    found = (
        torch.autograd.grad(ends, list(leaves.values()), ones, allow_unused=True) if ends else ()
    )
    used = [k for k, g in zip(leaves, found) if g is not None]
    return [x.detach() for x in out], used


def _without_cache(
    module: nn.Module, args: Any, kwargs: Any, inputs: list[Tensor]
) -> tuple[Any, Any]:
    """Keys and values that the call has added to a cache must not be added twice."""

    def replaced(x: Any) -> Any:
        if not (hasattr(x, "get_seq_length") and hasattr(x, "update")):
            return x
        if x.get_seq_length(getattr(module, "layer_idx", 0) or 0) > max(inputs[0].shape[1:2]):
            raise ValueError("it is called with a cache of earlier positions: use_cache=False")
        return None

    return pytree.tree_map(replaced, (args, kwargs))


def _wide(x: Tensor) -> Tensor:
    return wide(x) if x.is_floating_point() else x


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    for name, x in module.named_buffers():
        yield name, x.clone()  # a module may change them
