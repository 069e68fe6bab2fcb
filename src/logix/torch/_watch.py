"""Seeing what goes into a module, and the gradients of what comes out of it, compiled or not.

While a module is watched it has another class: one derived from its own, whose `forward` passes the
outputs through a function that changes nothing. In the backward pass that function hands over the
inputs and the gradients. So there are no hooks on the model, and

- `torch.compile` checks the class of a module at each call (hooks it does not look at). A compiled
  model is compiled once more, with the watching in the same single graph; the program without it
  is kept, and is used again afterwards.
- inputs are saved as autograd saves them: checkpointing frees and recomputes them, and changing one
  in place is an error instead of a wrong number.
- the gradients of weights are not needed: a probe that has a gradient makes the outputs have one.

One thing is changed: what is looked up once for all examples is repeated for each of them, so that
their gradients are not summed before they are seen (`Spreader`). It has the same values.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ._call import Call, Spreader, changed_in_place, versions, written


class Seen(NamedTuple):
    """One call of a module, when its gradients are there."""

    inputs: list[Tensor]  # the tensors among its arguments
    gradients: list[Tensor]  # of its floating outputs
    call: Call  # rebuilds the arguments from the inputs
    backward: int  # the backward pass that it belongs to
    time: int  # a call that came later has a higher one; -1 if that is not known
    borrowed: bool  # the tensors belong to a compiled program, which will use their memory again


Sight = Callable[[Seen], None]
_SIGHTS: dict[int, list[Sight]] = {}  # of each watched module, by the number it carries
_OURS = ("logix_number", "logix_probe", "logix_place", "logix_forward")
_KEPT: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()  # number, probe
_numbers, _clock = itertools.count(), itertools.count()
_classes: dict[tuple[type, bool, bool], type] = {}
_spread = Spreader()
_blind = False


@contextlib.contextmanager
def watching(
    modules: Mapping[str, nn.Module], see: Callable[[str, Seen], None], batch: int, whole: set[str]
) -> Iterator[None]:
    """Calls `see(name, seen)` for each call of each module that has a gradient.

    `batch` is the number of examples. `whole` names the modules whose calls will be made again.
    """
    added, _spread.size = [], None
    try:
        for name, module in modules.items():
            number = _watch(module, (batch, name), name in whole)
            sight = functools.partial(see, name)
            _SIGHTS.setdefault(number, []).append(sight)
            added.append((module, number, sight))
        yield
    finally:
        for module, number, sight in added:
            _SIGHTS[number].remove(sight)
            if not _SIGHTS[number]:
                _unwatch(module)


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """For calling modules again, while they are watched, without being seen."""
    global _blind
    before, _blind = _blind, True
    try:
        yield
    finally:
        _blind = before


def own_type(module: nn.Module) -> type:
    """The type that it has while it is not watched."""
    kind = type(module)
    return kind.__mro__[1] if "logix_number" in module.__dict__ else kind


def _watch(module: nn.Module, place: tuple[int, str], whole: bool) -> int:
    own = module.__dict__
    if "logix_number" not in own:
        number, probe = _KEPT.get(module) or (torch.tensor(next(_numbers)), None)
        where = next((p.device for p in module.parameters()), torch.device("cpu"))
        if probe is None or probe.device != where:
            probe = torch.zeros((), device=where, requires_grad=True)
        # Tensors: with an int, a block that is compiled once for all layers would be compiled anew
        # for each of them. Not buffers: the state dict stays what it is.
        own["logix_number"], own["logix_probe"], own["logix_place"] = number, probe, place
        _KEPT[module] = number, probe
        if "forward" in own:  # someone has put another function in place of the type's
            own["logix_forward"] = own.pop("forward")
        _turn_into(module, _watched_class(type(module), whole, "logix_forward" in own))
    return int(own["logix_number"])


def _unwatch(module: nn.Module) -> None:
    own = module.__dict__
    del _SIGHTS[int(own["logix_number"])]
    if "logix_forward" in own:
        own["forward"] = own["logix_forward"]
    _turn_into(module, own_type(module))
    own["logix_probe"].grad = None
    for name in _OURS:
        own.pop(name, None)


def _turn_into(module: nn.Module, kind: type) -> None:
    object.__setattr__(module, "__class__", kind)  # a module's own __setattr__ is slower


def _watched_class(kind: Any, whole: bool, replaced: bool) -> type:
    key = kind, whole, replaced
    if key not in _classes:

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            before = versions((args, kwargs)) if whole else None
            if replaced:
                out = self.logix_forward(*args, **kwargs)
            else:
                out = kind.forward(self, *args, **kwargs)
            if _blind or not torch.is_grad_enabled():
                return out  # no gradient will come, or none is wanted
            if not kwargs and all(isinstance(x, Tensor) for x in args):
                inputs, call = args, None
            else:
                leaves = pytree.tree_flatten((args, kwargs))[0]
                inputs = tuple(x for x in leaves if isinstance(x, Tensor))
                call = (args, kwargs) if whole else None
            if before is not None:
                changed_in_place(self, before, versions((args, kwargs)))
            if inputs and isinstance(out, Tensor) and not _has_gradient(inputs[0]):
                out = _spread(self, out, inputs[0], *self.logix_place)
            elif inputs and not torch.compiler.is_compiling():
                _spread.note(inputs[0])
            text = "" if call is None else written(call)
            state = self.logix_number, self.logix_probe, text, call
            if isinstance(out, Tensor):
                return _See.apply(*state, 1, out, *inputs)[0]
            leaves, tree = pytree.tree_flatten(out)
            seen = [i for i, x in enumerate(leaves) if _has_gradient(x)]
            if not seen:
                return out
            found = _See.apply(*state, len(seen), *(leaves[i] for i in seen), *inputs)
            for i, x in zip(seen, found):
                leaves[i] = x
            return pytree.tree_unflatten(leaves, tree)

        _classes[key] = _derived(kind, forward)
    return _classes[key]


def _derived(kind: Any, forward: Any) -> type:
    def reduce(self: Any, protocol: Any) -> Any:
        """A copy is not watched."""
        state = {k: v for k, v in self.__dict__.items() if k not in _OURS}
        if "logix_forward" in self.__dict__:
            state["forward"] = self.logix_forward
        return object.__new__, (kind,), state

    content = {"forward": forward, "__reduce_ex__": reduce, "__module__": kind.__module__}
    return type(kind)(kind.__name__, (kind,), content)


def _has_gradient(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


class _See(torch.autograd.Function):
    """The identity of some outputs, which keeps the inputs until the gradients are there."""

    @staticmethod
    def forward(
        ctx: Any,
        number: Tensor,
        probe: Tensor,
        text: str,
        arguments: Any,
        count: int,
        *tensors: Tensor,
    ) -> Any:
        ctx.save_for_backward(number, *tensors[count:])
        ctx.text, ctx.arguments, ctx.rest = text, None, len(tensors) - count
        ctx.within, ctx.time = -1, -1
        if not torch.compiler.is_compiling():
            ctx.arguments = _without_tensors(arguments)
            # A checkpoint may compute its block again in the backward pass, with one of its own.
            ctx.within = torch._C._current_graph_task_id()
            ctx.time = next(_clock) if ctx.within < 0 else -1
        # Not a view: what comes next may work in place.
        return tuple(x.detach() for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        number, *inputs = ctx.saved_tensors
        if torch.compiler.is_compiling():
            done = _see_compiled(number, list(inputs), list(gradients), ctx.text)
        else:
            done = None
            now = torch._C._current_graph_task_id() if ctx.within < 0 else ctx.within
            call = Call(ctx.text, ctx.arguments)
            _see(int(number), Seen(inputs, list(gradients), call, now, ctx.time, False))
        return None, done, None, None, None, *gradients, *(None,) * ctx.rest


def _without_tensors(arguments: Any) -> Any:
    """They are saved by autograd, which frees them in time."""
    return pytree.tree_map(lambda x: ... if isinstance(x, Tensor) else x, arguments)


def _see(number: int, seen: Seen) -> None:
    _spread.size = None  # what is called next belongs to another pass
    sights, kind = list(_SIGHTS.get(number, ())), seen.gradients[0].device.type
    if torch.is_grad_enabled() or torch.is_autocast_enabled(kind):
        with torch.no_grad(), torch.autocast(kind, enabled=False):
            for sight in sights:
                sight(seen)
    else:  # as it is nearly always, and quicker
        for sight in sights:
            sight(seen)


def _with_autograd() -> Any:
    """Inside of an operation PyTorch knows no gradients, but some are to be computed there."""
    key, without = torch._C.DispatchKey, torch._C._dispatch_tls_local_exclude_set()
    for one in (key.AutogradOther, key.AutogradCPU, key.AutogradCUDA, key.AutogradMPS):
        without = without.remove(one)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), without)


@torch.library.custom_op("logix::see", mutates_args=())
def _see_compiled(
    number: Tensor, inputs: list[Tensor], gradients: list[Tensor], call: str
) -> Tensor:
    now = torch._C._current_graph_task_id()
    with _with_autograd():
        _see(int(number), Seen(inputs, gradients, Call(call, None), now, -1, True))
    # The gradient of the probe, so that a compiler can't leave the call out.
    return torch.zeros((), device=gradients[0].device)


@_see_compiled.register_fake
def _(number: Tensor, inputs: list[Tensor], gradients: list[Tensor], call: str) -> Tensor:
    return torch.empty((), device=gradients[0].device)
