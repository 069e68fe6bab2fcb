"""`LogIX`: one run. It watches a model, and turns each batch into rows and statistics.

with run(data_id=ids):          hooks are on the model
    loss.backward()             records
# after the block:              records -> compression -> statistics, rows -> store
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from . import _statistics
from ._analysis import Analysis
from ._array import to_numpy
from ._compress import Compression, Layout, Projector, flatten, gradients, layout, unflatten
from ._ids import content_ids
from ._record import Lookup, Outer, Record
from ._settings import Settings, parse
from ._store import RowStore, RowWriter

STATISTICS, PCA = "statistics.npz", "projections.npz"


class LogIX:
    """A run: what is logged of a model, where it is kept, and what is computed from it.

    >>> import tempfile, torch, logix
    >>> model = torch.nn.Linear(3, 2)
    >>> run = logix.LogIX("example", config={"root_dir": tempfile.mkdtemp()})
    >>> run.setup({"log": "grad", "save": "grad", "statistic": "kfac"})
    >>> run.watch(model)
    logix: watching 1 layers, 8 of 8 parameters (100.0%)
    >>> with run(data_id=["a", "b"]):
    ...     model(torch.ones(2, 3)).sum().backward()
    >>> run.finalize()
    >>> len(run.store())
    2

    Arguments:

    - `project`: the name of the run's folder.
    - `config`: a dict with `root_dir` (`"./logix"`).
    - `resume`: go on with what is saved; ids that are there are passed over.
    - `overwrite`: remove what is saved under this name.
    - `duplicates`: what becomes of an id that is there already: `"error"`, `"keep_first"` or
      `"keep_all"`.
    """

    def __init__(
        self,
        project: str,
        config: Mapping[str, Any] | None = None,
        *,
        resume: bool = False,
        overwrite: bool = False,
        duplicates: str = "error",
    ):
        self.project, self.config = project, dict(config or {})
        self.path = os.path.join(self.config.get("root_dir", "./logix"), project)
        self.settings, self.compression = Settings(), Projector(Compression())
        self.statistics: dict[str, dict[str, Any]] = {}
        self.influence = Analysis(self)
        self._how: dict[str, Any] = dict(resume=resume, overwrite=overwrite, duplicates=duplicates)
        self._model: Any = None
        self._layers: dict[str, Any] = {}
        self._writer: RowWriter | None = None
        self._open: Any = None
        self._logging = True
        self._log: tuple[list[Any], dict[str, dict[str, Any]]] = ([], {})

    # --- what to do --------------------------------------------------------------------------

    def setup(self, words: Mapping[str, Any]) -> None:
        """Say what to log, save and accumulate."""
        self.settings = parse(words)
        if self.settings.save - {"grad"}:
            raise NotImplementedError("only 'grad' can be saved in this version")

    def watch(
        self, model: Any, type_filter: Any = None, name_filter: Any = None, strict: bool = False
    ) -> None:
        """Choose the layers of a model: all that have a rule, or those that the filters name.

        It prints what that covers. With `strict`, a trainable parameter that is not covered is an
        error.
        """
        from .torch._capture import watched
        from .torch._coverage import coverage

        layers = watched(model, type_filter, name_filter)
        found = coverage(model, layers)
        if strict and found.missing:
            raise ValueError(f"watch(strict=True) covers {found}")
        print(f"logix: watching {found}")
        self._model, self._layers = model, layers

    def add_lora(self, rank: int = 64, seed: int = 0) -> None:
        """Compress gradients by fixed random projections of both sides of each layer."""
        self.compression = Projector(Compression("logra", rank=rank, seed=seed))

    def eval(self) -> None:
        """Log, but save nothing and accumulate nothing any more."""
        self._logging = False

    # --- one batch ---------------------------------------------------------------------------

    def save(self, enable: bool = True) -> None:
        """Save what is logged from here on, or not."""
        kinds = frozenset({"grad"}) if enable else frozenset()
        self.settings = dataclasses.replace(self.settings, save=kinds)

    def clear(self) -> None:
        """Forget statistics, compression and the last log. What is saved stays."""
        self.statistics, self._log = {}, ([], {})
        self.compression, self._logging = Projector(Compression()), True

    def start(self, data_id: Any, mask: Any = None) -> None:
        """The same as entering `with run(data_id, mask)`; `end` leaves it."""
        self._open = self(data_id, mask)
        self._open.__enter__()

    def end(self) -> None:
        """Take what was logged since `start`."""
        self._open.__exit__(None, None, None)

    @contextlib.contextmanager
    def __call__(self, data_id: Any, mask: Any = None) -> Iterator[None]:
        from .torch._capture import Capture

        if self._model is None:
            raise RuntimeError("there is no model to log from. Call watch(model) first.")
        ids = _ids(data_id)
        capture = Capture(self._layers, mask)
        with capture.hooks(self._model):
            yield
        self._take(ids, capture.records(), mask)

    def _take(self, ids: list[Any], records: list[Record], mask: Any) -> None:
        if not records:
            raise RuntimeError(
                "no gradient came to any watched layer. Call loss.backward() inside."
            )
        small = [self.compression.record(r) for r in records]
        grads = gradients(small)
        for layer, grad in grads.items():
            if len(grad) != len(ids):
                raise ValueError(f"{len(ids)} ids, but {layer!r} has a batch of {len(grad)}")
        self._log = (ids, _shown(self.settings.log, small, grads))
        if not self._logging:
            return
        what = set(self.settings.statistics)
        if "ekfac" in what and not self._has_bases():
            what = what - {"ekfac"} | {"kfac"}  # the pass that finds the eigenvectors
        if what:
            self.statistics = _statistics.update(self.statistics, small, what, mask=mask)
        if "grad" in self.settings.save:
            where = layout({name: tuple(g.shape[1:]) for name, g in grads.items()})
            self._write(where).append(ids, to_numpy(flatten(grads, where)))

    def _write(self, where: Layout) -> RowWriter:
        if self._writer is None:
            parts = [dict(name=n, shape=list(s), offset=o) for n, s, o in where]
            meta = dict(compression=self.compression.settings.to_json())
            folder = os.path.join(self.path, "rows")
            if self._how["overwrite"]:
                for old in (STATISTICS, PCA):  # of the run that is replaced
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(os.path.join(self.path, old))
            self._writer = RowWriter(folder, parts, meta=meta, **self._how)
        return self._writer

    def _has_bases(self) -> bool:
        return any("left_basis" in stats for stats in self.statistics.values())

    def get_log(self) -> tuple[list[Any], dict[str, dict[str, Any]]]:
        """The ids and logs of the last batch: `(ids, {layer: {"grad": rows}})`."""
        return self._log

    # --- afterwards --------------------------------------------------------------------------

    def finalize(self) -> None:
        """End a pass over the data: rows and statistics are on the disk."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            # A further pass over the same data finds its own rows there, and passes over them.
            self._how |= dict(resume=True, overwrite=False)
        if "ekfac" in self.settings.statistics and not self._has_bases():
            self.statistics = _statistics.with_bases(self.statistics)
        if self.statistics:
            os.makedirs(self.path, exist_ok=True)
            _statistics.save(self.statistics, os.path.join(self.path, STATISTICS))
        if self.compression.pca:
            os.makedirs(self.path, exist_ok=True)
            self.compression.save(os.path.join(self.path, PCA))

    def initialize_from_log(self) -> None:
        """Statistics and compression as an earlier run under this name has saved them."""
        self.statistics = _statistics.load(os.path.join(self.path, STATISTICS))
        meta = self.store().manifest["meta"]
        settings, pca = Compression.from_json(meta["compression"]), os.path.join(self.path, PCA)
        is_pca = settings.init == "pca" and settings.kind != "none"
        self.compression = Projector.load(settings, pca) if is_pca else Projector(settings)

    def store(self) -> RowStore:
        """What was saved."""
        return RowStore(os.path.join(self.path, "rows"))

    @property
    def layout(self) -> Layout:
        """Where each layer is in a row."""
        parts = self.store().manifest["layout"]
        return [(p["name"], tuple(p["shape"]), p["offset"]) for p in parts]

    def build_log_dataloader(self, batch_size: int = 16, flatten: bool = False) -> Any:
        """What was saved, in batches: `(ids, {layer: {"grad": rows}})`, or `(ids, rows)`."""
        return Loader(self.store(), self.layout, batch_size, flatten)


class Loader:
    """Batches of a store."""

    def __init__(self, store: RowStore, where: Layout, batch_size: int, flatten: bool):
        self.store, self.where, self.batch_size, self.flatten = store, where, batch_size, flatten

    def blocks(self) -> Iterator[tuple[list[Any], np.ndarray]]:
        return self.store.blocks()

    def __len__(self) -> int:
        return -(-len(self.store) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[list[Any], Any]]:
        for ids, rows in self.store.blocks(self.batch_size):
            if self.flatten:
                yield ids, rows
            else:
                yield ids, {k: {"grad": v} for k, v in unflatten(rows, self.where).items()}


def _shown(
    kinds: frozenset[str], records: Sequence[Record], grads: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {name: {"grad": g} for name, g in grads.items()}
    for record in records:
        if "forward" in kinds and isinstance(record, Outer):
            out[record.layer]["forward"] = record.a
        if "backward" in kinds and isinstance(record, Outer | Lookup):
            out[record.layer]["backward"] = record.g
    return out


def _ids(data_id: Any) -> list[Any]:
    """Ids as they are given; of a batch, ids of its content."""
    if isinstance(data_id, list | tuple) and all(isinstance(x, str | int) for x in data_id):
        return list(data_id)
    array = to_numpy(data_id) if hasattr(data_id, "dtype") else data_id
    if isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype.kind in "iu":
        return array.tolist()
    return content_ids(array)
