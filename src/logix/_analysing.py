"""What a run does with what it has saved: loaders of it, and scores.

The calls of `run.influence` are there on the run itself too: `run.compute_influence_all(log)`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from ._analysis import Analysis
from ._compress import Layout
from ._loader import LogDataset, LogLoader
from ._saved import Saved
from ._statistics import finalize
from .store._writer import RowStore

Call = TypeVar("Call", bound=Callable[..., Any])


def _of_influence(call: Call) -> Call:
    """The same call of the run's `influence`."""

    @functools.wraps(call)
    def made(self: Any, *args: Any, **named: Any) -> Any:
        return call(self.influence, *args, **named)

    return made  # type: ignore[return-value]


class Analysing:
    """The part of `LogIX` that reads."""

    influence: Analysis
    _saved: Saved

    compute_influence = _of_influence(Analysis.compute_influence)
    compute_influence_all = _of_influence(Analysis.compute_influence_all)
    compute_self_influence = _of_influence(Analysis.compute_self_influence)
    compute_token_influence = _of_influence(Analysis.compute_token_influence)
    get_influence_scores = _of_influence(Analysis.get_influence_scores)

    @property
    def statistics(self) -> dict[str, dict[str, Any]]:
        """Sums over all that was logged."""
        raise NotImplementedError

    def has_statistics(self) -> bool:
        """Whether there are some on the disk."""
        return self._saved.has_statistics()

    def averages(self) -> dict[str, dict[str, Any]]:
        """Averages of all that was logged, by layer: `mean`, `variance`, `left`, `right` …

        `left` and `right` are K-FAC's covariances, of output gradients and of inputs.

        >>> import torch, logix
        >>> run, model = logix.LogIX("example"), torch.nn.Linear(3, 2)
        >>> run.setup({"statistic": "mean"})
        >>> run.watch(model)
        logix: watching ...
        >>> with run(data_id=["a", "b"]):
        ...     model(torch.ones(2, 3)).sum().backward()
        >>> run.averages()["weight"]["mean"].tolist()
        [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
        """
        return finalize(self.statistics)

    def store(self) -> RowStore:
        """What was saved."""
        return self._saved.store()

    @property
    def layout(self) -> Layout:
        """Where the gradient of each layer is in a row."""
        parts = self.store().manifest["layout"]
        grads = (p for p in parts if p.get("kind", "grad") == "grad")
        return [(p["name"], tuple(p["shape"]), p["offset"]) for p in grads]

    def build_log_dataset(self, flatten: bool = False) -> LogDataset:
        """What was saved, as a dataset: `(id, {layer: {"grad": row}})` by number."""
        return LogDataset(self.store(), flatten)

    def build_log_dataloader(
        self,
        batch_size: int = 16,
        num_workers: int = 0,
        pin_memory: bool = False,
        flatten: bool = False,
    ) -> LogLoader:
        """What was saved, in batches: `(ids, {layer: {"grad": rows}})`, or `(ids, rows)`."""
        return LogLoader(self.store(), batch_size, num_workers, pin_memory, flatten)
