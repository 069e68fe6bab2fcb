"""Records of one batch from a PyTorch model: what each call of a watched module becomes.

The user's own forward and backward pass gives, for every call of every watched module, its input
and the gradient of its output. A rule makes records of them, which are compressed at once: only
what is small is kept until the block ends. The gradients of the weights themselves are not needed,
and without them the pass is cheaper than a training step.

Examples are told apart by the first axis. A layer may also get all positions of all examples as
rows, one example after another, as mixtures of experts do; that is known by their number. Rows in
another order (tokens picked for an expert) are an error, unless by chance there are as many of them
as examples or as positions in every batch: then nothing shows that they were picked.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._record import Lookup, Outer, Record, Whole
from . import _experts, _recompute
from ._layers import wide
from ._parts import Part, together
from ._passes import Passes, unmasked
from ._scale import scales
from ._units import Unit
from ._watch import Seen, watching


class Capture:
    """The records of one batch of `batch` examples, filled by backward passes inside of `watch`."""

    def __init__(
        self,
        units: Mapping[str, Unit],
        batch: int,
        mask: Tensor | None = None,
        compress: Callable[[Record], Record] = lambda record: record,
    ):
        if mask is not None and (mask.ndim != 2 or len(mask) != batch):
            raise ValueError(
                f"mask has the shape {tuple(mask.shape)}, and there are {batch} ids: it must be "
                f"({batch}, positions), true where a position counts."
            )
        self.units, self.batch, self.compress = units, batch, compress
        self._passes = Passes(batch, None if mask is None else mask != 0)
        self._found: dict[tuple[str, str], list[Part]] = {}  # by unit and layer
        self.scale: Tensor | None = None  # of a GradScaler, by which the loss was multiplied

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """See what happens in the units. Afterwards the model is as it was, whatever happens."""
        modules = {name: unit.module for name, unit in self.units.items()}
        whole = {name for name, unit in self.units.items() if unit.how == "recomputed"}
        with (
            watching(modules, self._see, self.batch, whole),
            scales(self._note_scale),
            _no_bypass(),
        ):
            yield

    def _note_scale(self, scale: Tensor) -> None:
        self.scale = scale

    def _see(self, name: str, seen: Seen) -> None:
        unit, grads = self.units[name], seen.gradients
        if self.scale is not None:
            grads = [wide(g) / self.scale for g in grads]
            seen = seen._replace(gradients=grads)
        try:
            for layer, whole, masked in self._records(unit, seen):
                record = self.compress(_named(whole, layer))
                if isinstance(whole, Lookup) and isinstance(record, Outer):
                    # Rows of the table that were looked up where nothing counts.
                    record = dataclasses.replace(record, g=masked(record.g))
                if seen.borrowed:
                    record = _kept(record, [*seen.inputs, *grads])
                part = Part(seen.backward, seen.time, record)
                self._found.setdefault((name, layer), []).append(part)
        except (TypeError, RuntimeError, IndexError, ValueError, KeyError) as error:
            shapes = ", ".join(str(tuple(x.shape)) for x in seen.inputs)
            raise RuntimeError(
                f"layer {name!r} ({type(unit.module).__name__}), called with {shapes}: its "
                f"gradients by example could not be made: {error}. Or leave it out with "
                "name_filter, or teach it with @logix.torch.rule."
            ) from error

    def _records(
        self, unit: Unit, seen: Seen
    ) -> Iterator[tuple[str, Record, Callable[[Tensor], Tensor]]]:
        """With what masks a tensor of the same positions."""
        n, masked = self._passes.of(unit, seen)
        if unit.how == "recomputed":
            names = list(unit.layers)
            inputs, grads = seen.inputs, seen.gradients
            found = _recompute.gradients(unit.module, names, inputs, grads, seen.call, n, masked)
            for parameter, value in found.items():
                yield unit.layers[parameter], Whole("", value), masked
        elif unit.how == "experts":
            several = _experts.records(unit.module, seen.inputs, seen.gradients[0], n, masked)
            for parameter, layer in unit.layers.items():
                for e, record in enumerate(several[parameter]):
                    yield f"{layer}.{e}", record, masked
        else:
            assert unit.rule is not None
            found = _by_rule(unit, seen.inputs[0], seen.gradients[0], n, masked)
            for parameter, layer in unit.layers.items():
                yield layer, found[parameter], masked

    def records(self) -> list[Record]:
        """One for each layer of each unit, in their order; all calls of a unit are in one."""
        if not self._found:
            raise RuntimeError(
                "no gradient came to any watched layer. Call loss.backward() inside of the block, "
                "and watch(model) the model that the loss is computed with."
            )
        names, layers = {name for name, _ in self._found}, {layer for _, layer in self._found}
        unseen = [unit.name for unit in self.units.values() if unit.name not in names]
        # A module that only holds a parameter which others use is never called.
        unseen = [name for name in unseen if not set(self.units[name].layers.values()) <= layers]
        if unseen:
            raise RuntimeError(
                f"no gradient came to {', '.join(unseen[:5])}{' …' if len(unseen) > 5 else ''}: "
                f"{len(unseen)} of {len(self.units)} watched layers. If the loss does not depend "
                "on them, leave them out: watch(model, name_filter=[…])."
            )
        self._passes.check()
        order = [(u.name, layer) for u in self.units.values() for layer in u.shapes()]
        return [together(k[1], self._found[k], self.batch) for k in order if k in self._found]


def _by_rule(
    unit: Unit, x: Tensor, g: Tensor, n: int, masked: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    assert unit.rule is not None
    if len(g) != n:  # positions as rows
        x, g = (y.reshape(n, -1, *y.shape[1:]) for y in (x, g))
    if unit.channels_first:
        g = masked(g.transpose(1, 2)).transpose(1, 2) if g.ndim == 3 else g
    else:
        g = masked(g)
    found = dict(unit.rule(unit.module, x, g))
    for parameter in unit.layers:
        if parameter not in found:
            known = ", ".join(found) or "nothing"
            raise KeyError(f"its rule gives {known}, and nothing for the parameter {parameter!r}")
        record = found[parameter]
        if isinstance(record, Tensor):
            found[parameter] = Whole("", record)
        elif (
            isinstance(record, Outer) and masked is not unmasked
        ):  # inputs of positions that don't count are in no covariance
            side = lambda y: y if y.data_ptr() == g.data_ptr() else masked(y)
            found[parameter] = dataclasses.replace(record, a=side(record.a), g=side(record.g))
    return found


def _named(record: Record, layer: str) -> Record:
    """As `dataclasses.replace` would do it, which is slow for what is done for every layer."""
    named = object.__new__(type(record))
    named.__dict__.update(record.__dict__, layer=layer)
    return named


def _kept(record: Record, borrowed: list[Tensor]) -> Record:
    """The record with copies of what is not its own."""
    theirs = {x.untyped_storage().data_ptr() for x in borrowed}
    tensors = {k: v for k, v in vars(record).items() if isinstance(v, Tensor)}
    copies = {k: v.clone() for k, v in tensors.items() if v.untyped_storage().data_ptr() in theirs}
    return dataclasses.replace(record, **copies) if copies else record


@contextlib.contextmanager
def _no_bypass() -> Iterator[None]:
    """PyTorch's encoder layers have a path that calls no module, for when nothing is trained."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextlib.contextmanager
def without_weight_gradients(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """No parameter has a gradient inside; afterwards all flags are as they were."""
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    try:
        yield trained
    finally:
        for p in trained:
            p.requires_grad_(True)
