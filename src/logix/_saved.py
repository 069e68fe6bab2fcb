"""What a run has on the disk: its rows, its statistics, its projections.

PROJECT/rows                a row store (see `_verify`), written by all processes of the run
PROJECT/statistics.npz      sums over all of them
PROJECT/projections.npz     of a PCA; random projections are made again from their seed
PROJECT/compression.json    how gradients were compressed
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from _loxio import read_small, write_small

from . import _statistics
from ._compress import Compression, Projector
from ._config import LoggingConfig
from ._outbox import Outbox
from ._rows import Entry, Logged, arrays, entries, some
from ._rowtypes import RowType
from ._store import RowStore, RowWriter

ROWS, STATISTICS, PROJECTIONS = "rows", "statistics.npz", "projections.npz"
COMPRESSION = "compression.json"


class Saved:
    """The folder of one run.

    Arguments:

    - `how`: resume, overwrite, duplicates, nonfinite: those of `RowWriter`.
    """

    def __init__(self, path: str, logging: LoggingConfig, how: dict[str, Any]):
        self.path, self.logging, self._how = path, logging, how
        self._outbox: Outbox | None = None
        self._layout: list[Entry] = []

    @property
    def rank(self) -> int:
        group = _group()
        return 0 if group is None else group.rank()

    @property
    def itemsize(self) -> int:
        return RowType(self.logging.dtype, 1).stored.itemsize

    def reserve(
        self, ids: Sequence[Any], logged: Sequence[Logged], kinds: frozenset[str], how: Projector
    ) -> Callable[[], None]:
        """Check that a batch may be written. What is returned writes it."""
        layout = entries(logged, kinds)
        sizes = {len(x) for record in logged for x in arrays(record).values()}
        if sizes != {len(ids)}:
            raise ValueError(f"{len(ids)} ids for a batch of {sorted(sizes - {len(ids)})[0]}")
        if self._outbox is None:
            self._outbox, self._layout = self._open(layout, how), layout
        elif layout != self._layout:
            raise ValueError(_difference(self._layout, layout))
        box = self._outbox
        names, keep = box.writer.reserve(ids)
        if len(keep) < len(ids):
            return lambda: box.put(
                [names[i] for i in keep], [some(x, keep) for x in logged], layout
            )
        return lambda: box.put(names, logged, layout)

    def _open(self, layout: Sequence[Entry], how: Projector) -> Outbox:
        group = _group()
        options = dict(self._how)
        if options["overwrite"] and self.rank == 0:
            for old in (STATISTICS, PROJECTIONS, COMPRESSION):  # of the run that is replaced
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.path, old))
        if group is not None:
            options |= dict(writer=group.rank(), run=group.agree())
            if group.rank() > 0:  # the first makes the store, the others join it
                group.wait()
                options["overwrite"] = False
        meta = dict(compression=how.settings.to_json())
        folder = os.path.join(self.path, ROWS)
        parts = [entry.to_json() for entry in layout]
        try:
            writer = RowWriter(folder, parts, dtype=self.logging.dtype, meta=meta, **options)
        finally:
            if group is not None and group.rank() == 0:
                group.wait()
        return Outbox(writer, self.logging.waiting, self.logging.num_workers > 0)

    def close(self) -> None:
        """Bring the rows to the disk."""
        if self._outbox is not None:
            outbox, self._outbox = self._outbox, None
            outbox.close()
            # A further pass over the same data finds its own rows there, and passes over them.
            self._how |= dict(resume=True, overwrite=False)

    def finish(self, local: Any) -> Any:
        """Close the rows; the sums of all processes."""
        self.close()
        group = _group()
        if group is None:
            return local
        group.wait()
        return group.merged(local, _statistics.BASES)

    def same(self, statistics: Any) -> Any:
        """The eigenvectors of the first process in all: each computes its own, up to rounding."""
        group = _group()
        return statistics if group is None else group.spread(statistics, _statistics.BASES)

    def write(self, statistics: Any, how: Projector) -> None:
        """Statistics and compression to the disk, by the first process."""
        group = _group()
        if self.rank == 0:
            os.makedirs(self.path, exist_ok=True)
            _check_finite(statistics)
            if statistics:
                _statistics.save(statistics, os.path.join(self.path, STATISTICS))
            if how.pca:
                how.save(os.path.join(self.path, PROJECTIONS))
            write_small(os.path.join(self.path, COMPRESSION), how.settings.to_json())
        if group is not None:
            group.wait()

    def statistics(self, path: str | None = None) -> Any:
        file = os.path.join(path or self.path, STATISTICS)
        if not os.path.exists(file):
            raise FileNotFoundError(
                f"there are no statistics at {path or self.path}. They are saved by finalize(), "
                'after setup({"statistic": …}).'
            )
        return _statistics.load(file)

    def projector(self, path: str | None = None) -> Projector:
        """The compression of what was saved."""
        path = path or self.path
        settings = Compression.from_json(read_small(os.path.join(path, COMPRESSION)))
        if settings.init == "pca" and settings.kind != "none":
            return Projector.load(settings, os.path.join(path, PROJECTIONS))
        return Projector(settings)

    def flush(self) -> None:
        if self._outbox is not None:
            self._outbox.flush()

    def store(self) -> RowStore:
        self.flush()
        return RowStore(os.path.join(self.path, ROWS))


def _group() -> Any:
    """The processes of this run, if PyTorch has started several."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return None
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return None
    from .torch import _ranks

    return _ranks


def _difference(old: Sequence[Entry], new: Sequence[Entry]) -> str:
    for a, b in zip(old, new):
        if (a.name, a.kind, a.shape) != (b.name, b.kind, b.shape):
            was, now = f"{a.kind} of {a.name!r} {a.shape}", f"{b.kind} of {b.name!r} {b.shape}"
            break
    else:
        was, now = f"{len(old)} entries", f"{len(new)}"
    return (
        f"all rows of a store are alike, and this batch differs from the first: {now} instead of "
        f"{was}. Pad sequences to one length if activations are saved; for another setup, begin "
        "another run."
    )


def _check_finite(statistics: Any) -> None:
    for layer, stats in statistics.items():
        for name, x in stats.items():
            if not bool((x == x).all()):
                raise ValueError(
                    f"the statistics {name!r} of layer {layer!r} have NaN in them: a batch had "
                    "gradients that are not finite. Nothing was saved over the earlier statistics."
                )
