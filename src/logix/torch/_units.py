"""Which modules of a model are watched, how each gives its records, and the names they get.

A unit is a module with parameters of its own. The weight of a layer is logged under the layer's
name, any other parameter under its own name. A parameter that several modules share is one layer,
named after the first of them, to which all of them add.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList

from ._experts import is_experts
from ._layers import Rule, rule_for
from ._watch import own_type

# Modules that use parameters of others without a call that has the batch in it: all of them, or
# those of modules of some name or type. Their gradients are found where the batch is.
_RELATIVE = ("relative_attention_bias",)
_CLOSED: dict[type | str, tuple[str, ...] | None] = {
    nn.MultiheadAttention: None,
    **dict.fromkeys(("T5Stack", "MT5Stack", "UMT5Stack", "Pop2PianoStack"), _RELATIVE),
    **dict.fromkeys(("SwitchTransformersStack", "MPNetEncoder"), _RELATIVE),
    "PeftModel": ("PromptEmbedding", "PromptEncoder"),
}
_CONTAINERS = (nn.ParameterList, nn.ParameterDict, ParametrizationList)
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # parts of names that are no one's choice


@dataclasses.dataclass
class Unit:
    """A module, and the layer that each of its watched parameters is logged as."""

    name: str
    module: nn.Module
    how: str  # "rule", "experts", or "recomputed"
    layers: dict[str, str]
    rule: Rule | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the gradient of one example, by layer."""
        return dict(self._shapes)

    @functools.cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        out: dict[str, tuple[int, ...]] = {}
        own = own_parameters(self.module)
        for parameter, layer in self.layers.items():
            shape = tuple(own[parameter].shape)
            if self.how == "experts":
                out |= {f"{layer}.{e}": shape[1:] for e in range(shape[0])}
            elif self.how == "rule" and len(shape) > 2 and self._is_plain_convolution():
                out[layer] = (shape[0], math.prod(shape[1:]))  # its kernel is one side
            else:
                out[layer] = shape
        return out

    @functools.cached_property
    def channels_first(self) -> bool:
        """Whether the second axis is not that of positions."""
        return isinstance(self.module, _ConvNd | nn.GroupNorm | _NormBase)

    @functools.cached_property
    def positions_first(self) -> bool:
        """Whether the first axis is that of positions, and the second that of examples."""
        return getattr(self.module, "batch_first", True) is False

    @functools.cached_property
    def looks_up(self) -> bool:
        return self.how == "rule" and isinstance(self.module, nn.Embedding)

    def _is_plain_convolution(self) -> bool:
        return isinstance(self.module, _ConvNd) and self.module.groups == 1


def inner(model: nn.Module) -> nn.Module:
    """The model inside of what `torch.compile` and DistributedDataParallel put around it."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        else:
            return model


def units(model: nn.Module, type_filter: Any = None, name_filter: Any = None) -> dict[str, Unit]:
    """The modules with trained parameters (with any, if none is trained), by name.

    Arguments:

    - `type_filter`: types, or words in the names of types ("Linear").
    - `name_filter`: words; a module's name must contain one of them.
    """
    several: Any = lambda x: [x] if isinstance(x, str | type) else list(x)
    kinds = None if type_filter is None else several(type_filter)
    words: list[str] | None = None if name_filter is None else several(name_filter)
    model = inner(model)
    frozen = not any(p.requires_grad for p in model.parameters())
    found: dict[str, Unit] = {}
    names: dict[int, str] = {}  # of parameters that have one
    for name, module, own in owners(model):
        if kinds is not None and not any(_is_kind(module, kind) for kind in kinds):
            continue
        layers = {}
        for parameter, p in own.items():
            path = f"{name}.{parameter}".lstrip(".")
            # What belongs to another module by name is chosen by that module's name too.
            known_by = path if "." in parameter else name
            if (frozen or p.requires_grad) and (words is None or any(w in known_by for w in words)):
                layers[parameter] = names.setdefault(id(p), path.removesuffix(".weight"))
        if layers:
            rule = rule_for(module)
            how = "experts" if is_experts(module) else "rule" if rule else "recomputed"
            found[name] = Unit(name, module, how, layers, rule)
    return found


def owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, nn.Parameter]]]:
    """Each module that has parameters, its name, and those of which it gives the gradients."""
    taken: set[str] = set()
    for name, module in model.named_modules():
        path = lambda parameter, name=name: f"{name}.{parameter}".lstrip(".")
        own = {k: p for k, p in own_parameters(module).items() if path(k) not in taken}
        if own and not isinstance(module, _CONTAINERS):
            taken |= {path(k) for k in own if "." in k}
            for part in _WRAPPERS:
                name = name.replace(part, "")
            yield name, module, own


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Its own, those in its lists and dicts of parameters, and those that it uses by itself."""
    own = dict(module.named_parameters(recurse=False))
    for kind in own_type(module).__mro__:
        key = kind if kind in _CLOSED else kind.__name__
        if key in _CLOSED:
            own |= dict(_inside(module, _CLOSED[key]))
    for name, child in module.named_children():
        if isinstance(child, _CONTAINERS) or name == "parametrizations":
            own |= {f"{name}.{k}": p for k, p in child.named_parameters()}
    return own


def _inside(module: nn.Module, words: tuple[str, ...] | None) -> Iterator[tuple[str, nn.Parameter]]:
    for path, child in module.named_modules():
        if words is None or {path.rpartition(".")[2], own_type(child).__name__} & {*words}:
            yield from child.named_parameters(path)


def _is_kind(module: nn.Module, kind: Any) -> bool:
    if isinstance(kind, str):
        return any(kind.lower() in k.__name__.lower() for k in type(module).__mro__)
    return isinstance(module, kind)
