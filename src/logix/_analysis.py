"""Influence of a run's logs: `run.influence`.

A log is `(ids, {layer: {"grad": rows}})`, as `run.get_log()` gives it. Its layers are found by
their names, in whatever order they come. Scores are computed where the log is: on a GPU, the saved
rows are read ahead and sent there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ._array import as_float, to_numpy
from ._beside import fingerprint
from ._compress import layout, unflatten
from ._influence import Influence, gpu_of, scores, self_influence, token_shares
from ._loader import Layers, Log, listed, log_gradients, log_rows
from ._precondition import (
    GRID,
    KINDS,
    RELATIVE,
    Preconditioner,
    auto,
    prepare,
    search_damping,
)
from ._progress import progress
from ._record import Record
from .store._readahead import ahead
from .store._reader import RowStore

HESSIANS = ("auto", *KINDS)


class Analysis:
    """The analyses of one run. Statistics are those that the run has accumulated.

    >>> import tempfile, torch, logix
    >>> model, x = torch.nn.Linear(3, 2), torch.eye(3)
    >>> run = logix.LogIX("example", config={"root_dir": tempfile.mkdtemp()})
    >>> run.setup({"log": "grad", "save": "grad", "statistic": "kfac"})
    >>> run.watch(model)
    logix: watching ...100.0%...
    >>> with run(data_id=["a", "b", "c"]):
    ...     model(x).square().sum().backward()
    >>> run.finalize()
    >>> run.eval()
    >>> with run(data_id=["query"]):
    ...     model(x[1:2]).square().sum().backward()
    >>> result = run.influence.compute_influence_all(run.get_log(), top_k=2)
    >>> result
    Influence(influence: (1, 2), src_ids: 1 ['query'], tgt_ids: of each query its best 2)
    >>> result.tgt_ids[0][0]
    'b'

    What all calls have in common:

    - `src_log`: the queries. `run.get_log()` after they went through `with run(data_id=…):`.
    - `mode`: `"dot"`, `"cosine"` or `"l2"`.
    - `precondition`, `hessian`: products with the inverse of this curvature, `"auto"` for the best
      that the statistics allow (none, if there are no statistics).
    - `influence_groups`: words; also the scores of the layers whose name contains each of them.
    - `damping`: λ for all layers; None: 0.1 × the mean eigenvalue of each layer's own.
    - `relative_damping`: another multiple than 0.1; `select_damping` finds a good one.
    - `save`: keep the result, for `get_influence_scores`.
    - `top_k`, `largest`: only the k largest (or smallest) scores of each query.
    - `per_layer`: also the scores of each layer.
    - `device`: where to compute (`"cuda"`); by default where the log is.
    """

    def __init__(self, run: Any):
        self._run = run
        self._saved: list[Influence] = []
        # The latest preconditioner without damping, and what it was made of.
        self._ready: tuple[Any, Preconditioner | None] = (None, None)

    def compute_influence(
        self,
        src_log: Log,
        tgt_log: Log,
        mode: str = "dot",
        precondition: bool = True,
        hessian: str = "auto",
        influence_groups: Sequence[str] | None = None,
        damping: float | None = None,
        save: bool = False,
        *,
        top_k: int | None = None,
        largest: bool = True,
        per_layer: bool = False,
        device: Any = None,
        relative_damping: float | None = None,
    ) -> Influence:
        """Scores between two logs that are in memory."""
        inverse = self._inverse(precondition, hessian, damping, relative_damping)
        ids, rows, layers = log_rows(src_log, "src_log", None, device)
        tgt_ids, tgt_rows, _ = log_rows(tgt_log, "tgt_log", layers, device)
        named: dict[str, Any] = dict(query_ids=ids, layout=layers.where, groups=influence_groups)
        named |= dict(per_layer=per_layer, top_k=top_k, largest=largest)
        return self._kept(save, scores(rows, [(tgt_ids, tgt_rows)], mode, inverse, **named))

    def compute_influence_all(
        self,
        src_log: Log,
        loader: Any = None,
        mode: str = "dot",
        precondition: bool = True,
        hessian: str = "auto",
        influence_groups: Sequence[str] | None = None,
        damping: float | None = None,
        save: bool = False,
        *,
        top_k: int | None = None,
        largest: bool = True,
        per_layer: bool = False,
        device: Any = None,
        relative_damping: float | None = None,
    ) -> Influence:
        """Scores of a log with all that the run has saved, or with what `loader` gives.

        `loader`: that of `build_log_dataloader`, or any iterable of `(ids, {layer: {"grad": …}})`
        or `(ids, rows)`, with rows as they are saved.
        """
        inverse = self._inverse(precondition, hessian, damping, relative_damping)
        store = self._run.store() if loader is None else getattr(loader, "store", None)
        blocks: Iterable[Any]
        if isinstance(store, RowStore):
            self._check_compression(store)
            ids, rows, layers = log_rows(src_log, "src_log", Layers.of(store), device)
            blocks = ahead(store, device=gpu_of(rows), width=layers.width)
            blocks = progress(blocks, len(store), "scores", size=_count)
        else:
            # Flat rows have the order of what is saved; if nothing is, that of the log's layers.
            saved, grads = self._saved_layers(), log_gradients(src_log)
            fits = saved is not None and (grads is None or not saved.differences(grads))
            ids, rows, layers = log_rows(src_log, "src_log", saved if fits else None, device)
            blocks = (log_rows(log, "a batch of the loader", layers)[:2] for log in loader)
            blocks = progress(blocks, None, "scores", size=_count)
        named: dict[str, Any] = dict(query_ids=ids, layout=layers.where, groups=influence_groups)
        named |= dict(per_layer=per_layer, top_k=top_k, largest=largest)
        return self._kept(save, scores(rows, blocks, mode, inverse, **named))

    def compute_self_influence(
        self,
        src_log: Log | None = None,
        precondition: bool = True,
        hessian: str = "auto",
        influence_groups: Sequence[str] | None = None,
        damping: float | None = None,
        save: bool = False,
        *,
        per_layer: bool = False,
        device: Any = None,
        relative_damping: float | None = None,
    ) -> Influence:
        """The score of each example with itself; of all that was saved, if no log is given."""
        inverse = self._inverse(precondition, hessian, damping, relative_damping)
        blocks: Iterable[Any]
        if src_log is None:
            store = self._run.store()
            layers = Layers.of(store)
            blocks = ahead(store, device=device, width=layers.width)
            blocks = progress(blocks, len(store), "self-influence", size=_count)
        else:
            ids, rows, layers = log_rows(src_log, "src_log", None, device)
            blocks = [(ids, rows)]
        named: dict[str, Any] = dict(groups=influence_groups, per_layer=per_layer)
        named["layout"] = layers.where
        return self._kept(save, self_influence(blocks, inverse, **named))

    def compute_token_influence(
        self,
        src_log: Log,
        tgt: tuple[Sequence[Any], Sequence[Record]] | None = None,
        precondition: bool = True,
        hessian: str = "auto",
        damping: float | None = None,
        save: bool = False,
        *,
        positions: int | None = None,
        relative_damping: float | None = None,
    ) -> Influence:
        """Which tokens of the batch that was logged last carry its scores: (queries, batch, T).

            with run(data_id=ids): loss.backward()
            run.influence.compute_token_influence(query_log)

        The sum over T, and `rest`, is what `compute_influence` gives (in the mode "dot"). `rest`,
        (queries, batch), is the share of all that has no position, such as biases. Positions that
        the mask left out score 0. To see the tokens of a query, log the query last, and give the
        log of the training examples as `src_log`.

        Arguments:

        - `tgt`: ids and records of another batch than the last.
        - `positions`: T, where layers have different numbers of positions.
        """
        tgt_ids, records = tgt or (self._run.ids, self._run.records)
        if not records:
            raise ValueError(
                "there is no batch whose tokens could be scored. Log one first: "
                "with run(data_id=ids): loss.backward()"
            )
        shapes = {r.layer: tuple(map(int, r.shape)) for r in records}
        batch = Layers(layout(shapes), "the batch whose tokens are scored", 0)
        inverse = self._inverse(precondition, hessian, damping, relative_damping)
        ids, rows, layers = log_rows(src_log, "src_log", batch)
        rows = as_float(rows)
        rows = rows if inverse is None else inverse.rows(rows, layers.where)
        queries = unflatten(rows, layers.where)
        found, rest = token_shares(queries, records, positions)
        tgt_ids, count = listed(tgt_ids), found.shape[1]
        if len(tgt_ids) != count:
            raise ValueError(f"{len(tgt_ids)} ids for a batch of {count}: give tgt=(ids, records)")
        return self._kept(save, Influence(ids, to_numpy(found), tgt_ids, to_numpy(rest)))

    def select_damping(
        self, score: Callable[[float], float], relatives: Iterable[float] = GRID, refine: int = 1
    ) -> tuple[float, dict[float, float]]:
        """The `relative_damping` with the highest score, and the scores of all that were tried.

            found = lambda r: run.influence.compute_influence_all(log, relative_damping=r)
            best, tried = run.influence.select_damping(lambda r: lds(found(r).influence, …).mean)

        Arguments:

        - `score`: how good scores with that damping are, on held-out queries.
        - `relatives`: what is tried first.
        - `refine`: how often the geometric means with the best one's neighbours are tried too.
        """
        return search_damping(score, relatives, refine)

    def get_influence_scores(self) -> list[Influence]:
        """The results of all calls with `save=True`, in their order."""
        return list(self._saved)

    # --- parts of these ----------------------------------------------------------------------

    def _kept(self, save: bool, result: Influence) -> Influence:
        if save:
            self._saved.append(result)
        return result

    def _inverse(
        self, precondition: bool, hessian: str, damping: float | None, relative: float | None
    ) -> Preconditioner | None:
        if hessian not in HESSIANS:
            raise ValueError(f"unknown hessian {hessian!r}. Known are: {', '.join(HESSIANS)}")
        statistics = self._run.statistics
        if damping is not None and relative is not None:
            raise ValueError("damping is λ itself, relative_damping a multiple: give one of them")
        for name, value in (("damping", damping), ("relative_damping", relative)):
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name}={value}: it must be finite and not negative")
        kind = auto(statistics) if hessian == "auto" else hessian
        if precondition and not statistics and self._run.has_statistics():
            raise RuntimeError(
                "this run has no statistics, but there are some on the disk. Call "
                "run.initialize_from_log() to use them, or pass precondition=False."
            )
        if not precondition or kind == "none":
            return None
        values = [x for stats in statistics.values() for x in stats.values()]
        counts = [int(x) for s in statistics.values() for n, x in s.items() if n.endswith("_n")]
        # Sums may grow in place, but never without their counts.
        (known, ready), key = self._ready, (kind, list(statistics), counts, [*map(id, values)])
        if ready is None or known[0] != key:
            ready = prepare(kind, statistics)
            self._ready = (key, values), ready
        return ready.damped(damping, RELATIVE if relative is None else relative)

    def _check_compression(self, store: RowStore) -> None:
        """Gradients that were projected in different ways have the same shapes, and no meaning."""
        how, meta = self._run.compression, store.manifest["meta"]
        if "compression" in meta and fingerprint(how) != meta:
            raise ValueError(
                f"the rows at {store.path} were compressed by {meta['compression']}, and this run "
                f"compresses by {how.settings.to_json()}, or by another PCA. Call "
                "run.initialize_from_log() before the queries are logged."
            )

    def _saved_layers(self) -> Layers | None:
        try:
            return Layers.of(self._run.store())
        except FileNotFoundError:
            return None


def _count(block: tuple[Sequence[Any], Any]) -> int:
    return len(block[0])
