"""What a run knows of a model: the layers it watches, and how their gradients are compressed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from . import _statistics
from ._compress import Compression, Projector
from ._config import Config, LoRAConfig
from ._saved import Saved


class Watching:
    """The part of `LogIX` that chooses what is logged from."""

    _saved: Saved

    def __init__(self, config: Config):
        self.config = config
        self.compression = Projector(Compression())
        self._model: Any = None
        self._units: dict[str, Any] = {}
        self._extra: dict[str, list[Any]] = {}  # of watch_activation: value, gradient

    @property
    def statistics(self) -> dict[str, dict[str, Any]]:
        """Sums over all that was logged."""
        raise NotImplementedError

    def _forget(self) -> None:
        raise NotImplementedError

    def watch(
        self, model: Any, type_filter: Any = None, name_filter: Any = None, strict: bool = False
    ) -> None:
        """Choose the layers of a model: all with trained parameters, or those the filters name.

        It prints what that covers, and how large a row is. With `strict`, a trained parameter that
        is not covered is an error.
        """
        from .torch._coverage import coverage
        from .torch._units import units

        found = units(model, type_filter, name_filter)
        covered = coverage(model, found)
        if strict and covered.missing:
            raise ValueError(f"watch(strict=True) covers {covered}")
        if not found:
            raise ValueError(
                f"no layer is left to watch: type_filter={type_filter!r}, name_filter="
                f"{name_filter!r}. Names are those of model.named_modules()."
            )
        self._model, self._units = model, found
        self._tell(f"watching {covered}; {self._row()}")

    def watch_activation(self, tensors: Mapping[str, Any]) -> None:
        """Log tensors of the forward pass, and their gradients, under names; inside of a batch.

        >>> import torch, logix
        >>> run, model = logix.LogIX("example"), torch.nn.Linear(3, 2)
        >>> run.setup({"forward": ["log"], "backward": ["log"]})
        >>> with run(data_id=[0, 1]):
        ...     h = model(torch.ones(2, 3))
        ...     run.watch_activation({"h": h})
        ...     h.sum().backward()
        >>> sorted(run.get_log()[1]["h"])
        ['backward', 'forward']
        """
        for name, x in tensors.items():
            self._extra[name] = [x.detach(), None]
            if x.requires_grad:
                x.register_hook(lambda g, name=name: self._extra[name].__setitem__(1, g.detach()))

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
        if isinstance(lora_config, Mapping):
            lora_config = LoRAConfig(**lora_config)
        chosen = lora_config or self.config.lora
        single = {k: v for k, v in dict(rank=rank, init=init, seed=seed).items() if v is not None}
        settings = dataclasses.replace(chosen, **single).compression()
        if lora_path is not None:
            self.compression = self._saved.projector(lora_path)
        elif settings.init == "pca":
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
        if watch and self._model is not None and (type_filter or name_filter):
            self.watch(self._model, type_filter, name_filter)
        elif self._units:
            self._tell(f"compressed; {self._row()}")

    def _row(self) -> str:
        from .torch._coverage import row_size, shapes

        whole = shapes(self._units)
        small = {name: self.compression.settings.shape(s) for name, s in whole.items()}
        size, values = row_size(whole), row_size(small)
        text = f"a row has {values:,} values ({_bytes(values * self._saved.itemsize)})"
        if values < size:
            text += f", {size / values:,.0f} times fewer than the gradients of these layers"
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
