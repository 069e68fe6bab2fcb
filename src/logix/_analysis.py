"""Influence of a run's logs: `run.influence`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ._array import to_numpy
from ._compress import Layout, flatten, layout
from ._influence import Influence, scores, self_influence
from ._precondition import Preconditioner, auto, prepare

Log = tuple[Sequence[Any], Mapping[str, Mapping[str, Any]]]  # ids, {layer: {"grad": rows}}


class Analysis:
    """The analyses of one run. Statistics are those that the run has accumulated."""

    def __init__(self, run: Any):
        self._run = run

    def compute_influence(
        self,
        src_log: Log,
        tgt_log: Log,
        mode: str = "dot",
        precondition: bool = True,
        hessian: str = "auto",
        influence_groups: Sequence[str] | None = None,
        damping: float | None = None,
    ) -> Influence:
        """Scores between two logs that are in memory."""
        ids, rows, where = _rows(src_log)
        tgt_ids, tgt_rows, _ = _rows(tgt_log)
        inverse = self._inverse(precondition, hessian, damping)
        named: dict[str, Any] = dict(query_ids=ids, layout=where, groups=influence_groups)
        return scores(rows, [(tgt_ids, tgt_rows)], mode, inverse, **named)

    def compute_influence_all(
        self,
        src_log: Log,
        loader: Any = None,
        mode: str = "dot",
        precondition: bool = True,
        hessian: str = "auto",
        influence_groups: Sequence[str] | None = None,
        damping: float | None = None,
        top_k: int | None = None,
    ) -> Influence:
        """Scores of a log with all that the run has saved (or what `loader` gives)."""
        ids, rows, where = _rows(src_log)
        inverse = self._inverse(precondition, hessian, damping)
        blocks = self._run.store().blocks() if loader is None else loader.blocks()
        named: dict[str, Any] = dict(query_ids=ids, layout=where, groups=influence_groups)
        return scores(rows, blocks, mode, inverse, top_k=top_k, **named)

    def compute_self_influence(
        self,
        src_log: Log | None = None,
        precondition: bool = True,
        hessian: str = "auto",
        influence_groups: Sequence[str] | None = None,
        damping: float | None = None,
    ) -> Influence:
        """The score of each example with itself; of all that was saved, if no log is given."""
        inverse = self._inverse(precondition, hessian, damping)
        if src_log is None:
            blocks, where = self._run.store().blocks(), self._run.layout
        else:
            ids, rows, where = _rows(src_log)
            blocks = [(ids, rows)]
        return self_influence(blocks, inverse, layout=where, groups=influence_groups)

    def _inverse(
        self, precondition: bool, hessian: str, damping: float | None
    ) -> Preconditioner | None:
        statistics = self._run.statistics
        kind = auto(statistics) if hessian == "auto" else hessian
        return prepare(kind, statistics, damping) if precondition and kind != "none" else None


def _rows(log: Log) -> tuple[list[Any], Any, Layout]:
    ids, layers = log
    grads = {name: kinds["grad"] for name, kinds in layers.items()}
    where = layout({name: tuple(g.shape[1:]) for name, g in grads.items()})
    return list(ids), to_numpy(flatten(grads, where)), where
