"""What a run knows of a model: the layers it watches, and how their gradients are compressed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from . import _statistics
from ._beside import load_compression
from ._compress import Compression, Projector
from ._config import Config, LoRAConfig, read_section
from ._group import group_of_processes
from ._rows import Activation
from ._saved import Saved


class Slot:
    """A tensor of the forward pass, and its gradient when it has come."""

    def __init__(self, value: Any, hooked: bool):
        self.value, self.hooked, self.gradient = value, hooked, None

    def note(self, gradient: Any) -> None:
        self.gradient = gradient.detach().clone()


class Watching:
    """The part of `LogIX` that chooses what is logged from."""

    _saved: Saved
    _fresh: dict[str, dict[str, Any]]

    def __init__(self, config: Config):
        self.config = config
        self.compression = Projector(Compression())
        self._model: Any = None
        self._units: dict[str, Any] = {}
        self._program: Any = None  # of a JAX loss
        self._extra: dict[str, Slot] = {}  # of watch_activation

    @property
    def statistics(self) -> dict[str, dict[str, Any]]:
        """Sums over all that was logged."""
        raise NotImplementedError

    def _forget(self) -> None:
        raise NotImplementedError

    def __repr__(self) -> str:
        layers = (
            len(self._units) if self._program is None else len(self._program.capture.watched.chosen)
        )
        return f"LogIX({self._saved.path!r}, layers watched: {layers})"

    def watch(
        self,
        model: Any,
        type_filter: Any = None,
        name_filter: Any = None,
        strict: bool = False,
        **how: Any,
    ) -> None:
        """Choose what is logged: the layers of a PyTorch model, or the parameters of a JAX loss.

            run.watch(model)                # layers with trained parameters
            run.watch(loss, params)         # loss(params, example): a number for one example

        It prints what that covers, and how large a row is: of a loss, at the first batch.

        Arguments, of a model:

        - `type_filter`, `name_filter`: only layers of these types, whose names contain these words.
        - `strict`: a trained parameter that is not covered, or shared with a layer that is not
          watched, is an error.

        Arguments, of a loss, by their names: those of `logix.jax.capture` (`filter`, `batched`,
        `logs`, `strict`, `names`).
        """
        if not hasattr(model, "named_modules"):
            params = how.pop("params", type_filter)
            if not callable(model) or params is None or name_filter is not None:
                raise TypeError(
                    "watch takes a torch.nn.Module, or a loss of JAX and its parameters: "
                    f"watch(loss, params). {type(model).__name__} was given."
                )
            from .jax import capture
            from .jax._program import Program

            self._program = Program(capture(model, params, strict=strict, **how), params)
            if (group := group_of_processes()) is not None:
                group.meet()  # now, since later one of them may have no batch
            self._model, self._units = None, {}
            return
        if how:
            raise TypeError(f"watch(model) does not know {sorted(how)}: they are for a loss of JAX")
        from .torch._coverage import coverage
        from .torch._units import units

        found = units(model, type_filter, name_filter)
        covered = coverage(model, found)
        if strict and (covered.missing or covered.halved):
            raise ValueError(f"watch(strict=True) covers {covered}")
        if not found:
            raise ValueError(
                f"no layer is left to watch: type_filter={type_filter!r}, name_filter="
                f"{name_filter!r}. Names are those of model.named_modules()."
            )
        self._model, self._units, self._program = model, found, None
        self._tell(f"watching {covered}; {self._row()}")

    def watch_activation(self, tensors: Mapping[str, Any]) -> None:
        """Log tensors of the forward pass, and their gradients, under names; inside of a batch.

        >>> import torch, logix
        >>> run, model = logix.LogIX("example"), torch.nn.Linear(3, 2)
        >>> run.setup({"log": ["forward", "backward"]})
        >>> run.watch(model)
        logix: watching ...
        >>> with run(data_id=[0, 1]):
        ...     h = model(torch.ones(2, 3))
        ...     run.watch_activation({"h": h})
        ...     h.sum().backward()
        >>> sorted(run.get_log()[1]["h"])
        ['backward', 'forward']
        """
        from .torch._context import in_backward

        for name, x in tensors.items():
            again = self._extra.get(name)
            if again is not None and not in_backward():
                raise ValueError(f"there is an activation {name!r} of this batch already")
            if again is not None and again.hooked:  # computed anew by a checkpoint
                continue
            slot = self._extra[name] = Slot(x.detach().clone(), x.requires_grad)
            if slot.hooked:
                x.register_hook(slot.note)

    def _activations(self, examples: int, mask: Any, scale: Any) -> list[Activation]:
        """What `watch_activation` has seen, like what is seen of layers: masked, and not scaled."""
        found = []
        for name, slot in self._extra.items():
            x, g = slot.value, slot.gradient
            if x.ndim == 0 or len(x) != examples:
                raise ValueError(
                    f"the activation {name!r} has the shape {tuple(x.shape)}, and there are "
                    f"{examples} ids: its first axis must be over the examples."
                )
            if g is not None and scale is not None:
                g = g.float() / scale
            one = Activation(name, x, g)
            if one.has_positions(mask):
                real = (mask != 0).reshape(*mask.shape, *[1] * (x.ndim - 2)).to(x.device)
                one = Activation(name, x * real, None if g is None else g * real)
            found.append(one)
        return found

    def add_lora(
        self,
        watch: bool = True,
        clear: bool = True,
        type_filter: Any = None,
        name_filter: Any = None,
        lora_path: str | None = None,
        lora_config: Any = None,
        *,
        rank: int | None = None,
        init: str | None = None,
        seed: int | None = None,
    ) -> None:
        """Compress gradients by projections of both sides of each layer, fixed by a seed.

        Arguments:

        - `watch`: watch only the layers that the filters name, if they name any.
        - `clear`: forget statistics, which are of gradients that were not compressed.
        - `lora_path`: a folder whose projections are used again.
        - `lora_config`: a `LoRAConfig` or a dict; by default that of the run's configuration.
        - `rank`, `init`, `seed`: single settings of it. `init="pca"` takes the eigenvectors of the
          covariances ("kfac") that the run has accumulated.
        """
        chosen = self.config.lora
        if lora_config is not None:
            chosen = read_section("lora_config", lora_config, LoRAConfig)
        single: dict[str, Any]
        single = {k: v for k, v in dict(rank=rank, init=init, seed=seed).items() if v is not None}
        settings = dataclasses.replace(chosen, **single).compression()
        if lora_path is not None:
            self.compression = load_compression(lora_path)
        elif settings.init == "pca" and (earlier := self._saved.earlier_pca(settings)) is not None:
            self.compression = earlier
        elif settings.init == "pca":
            if self._fresh and self._saved.processes > 1:
                raise RuntimeError(
                    "each process knows its own covariances only: call finalize() before "
                    'add_lora(init="pca"), to have those of all.'
                )
            averages = _statistics.finalize(self.statistics)
            if not any("right" in stats for stats in averages.values()):
                raise ValueError(
                    'init="pca" needs covariances: go over the data once with '
                    'setup({"statistic": "kfac"}) before, or use LogIXScheduler(run, lora="pca").'
                )
            self.compression = Projector.from_covariances(settings, averages)
        else:
            self.compression = Projector(settings)
        if clear:
            self._forget()
        if self._program is not None and (type_filter or name_filter):
            raise TypeError("parameters of a JAX loss are chosen by watch(loss, params, filter=…)")
        if watch and self._model is not None and (type_filter or name_filter):
            self.watch(self._model, type_filter, name_filter)
        elif self._shapes():
            self._tell(f"gradients are compressed; {self._row()}")

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the gradient of one example, by layer, as far as it is known yet."""
        if self._program is not None:
            return self._program.shapes
        if not self._units:
            return {}
        from .torch._coverage import shapes

        return shapes(self._units)

    def _row(self) -> str:
        whole, how = list(self._shapes().values()), self.compression.settings
        values, ratio = sum(math.prod(how.shape(s)) for s in whole), how.ratio(whole)
        text = f"a row has {values:,} values ({_bytes(values * self._saved.itemsize)})"
        if ratio > 1:
            text += f", {ratio:,.0f} times fewer than the gradients of these layers"
        return text

    def _tell(self, text: str) -> None:
        if self._saved.rank == 0:
            print(f"logix: {text}")


def _bytes(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000 or unit == "GB":
            return f"{n:,.0f} {unit}" if n >= 10 or unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    raise AssertionError
