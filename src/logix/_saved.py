"""What a run has on the disk: its rows, its statistics, its projections.

PROJECT/rows                a row store (see `store`), written by all processes of the run
PROJECT/statistics.npz      sums over all of them
PROJECT/eigen.npz           those of EK-FAC's second pass
PROJECT/projections.npz     of a PCA; random projections are made again from their seed
PROJECT/compression.json    how gradients were compressed: there before the first row
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from _loxio import Damaged

from . import _statistics
from ._beside import (
    COMPRESSION,
    EIGEN,
    PROJECTIONS,
    ROWS,
    STATISTICS,
    fingerprint,
    has_arrays,
    load_compression,
    load_statistics,
    save_compression,
    save_statistics,
    saved_pca,
)
from ._compress import Compression, Projector
from ._config import LoggingConfig
from ._group import group_of_processes, together
from ._outbox import Fit, Outbox
from ._record import Lookup
from ._rows import Entry, Logged, arrays, difference, entries
from .store._claim import clear
from .store._opened import Opened
from .store._rowtypes import RowType
from .store._writer import RowStore, RowWriter

# Passes that were ended at a path: a number that all processes have alike.
_passes: Counter[str] = Counter()


class Saved:
    """The folder of one run. `how`: resume, overwrite, duplicates, nonfinite, as of `RowWriter`."""

    def __init__(self, path: str, logging: LoggingConfig, how: dict[str, Any]):
        self.path, self.logging, self._how = path, logging, how
        self._opened = Opened(os.path.join(path, ROWS))
        self._outbox: Outbox | None = None
        self.fits: dict[Any, Fit] = {}  # while rows go there: of batches that came before
        self._layout: list[Entry] = []
        self._compression: Projector | None = None
        self._replaces = bool(how["overwrite"])  # the files beside the rows, until it is done
        self._has_rows = False  # this run has written rows, in any of its processes
        self._first: int | None = None  # the checksum of what a first pass has summed
        self._own_statistics = False  # those on the disk were read or written by this run

    @property
    def rank(self) -> int:
        group = group_of_processes()
        return 0 if group is None else group.rank()

    @property
    def processes(self) -> int:
        group = group_of_processes()
        return 1 if group is None else group.world()

    @property
    def itemsize(self) -> int:
        return RowType(self.logging.dtype, 1).stored.itemsize

    # --- rows --------------------------------------------------------------------------------

    def fit(
        self, size: int, logged: Sequence[Logged], kinds: frozenset[str], how: Projector
    ) -> Fit:
        """Check that batches of a size may be written. Of arrays only the shapes are looked at."""
        layout = entries(logged, kinds)
        if not layout:
            raise ValueError(f"there is nothing to save: no layer has {' or '.join(sorted(kinds))}")
        saved = {entry.name.partition("[")[0] for entry in layout} | {e.name for e in layout}
        logged = [record for record in logged if record.layer in saved]
        for record in logged:
            for x in arrays(record).values():
                if x.shape[0] != size:
                    raise ValueError(f"{size} ids for a batch of {x.shape[0]} in {record.layer!r}")
        tables = [r.layer for r in logged if isinstance(r, Lookup)] if "forward" in kinds else []
        if tables and self.logging.dtype != "float32":
            raise ValueError(
                f"what goes into {tables[0]!r} are rows of a table, which {self.logging.dtype} "
                'would round. Use log_dtype="float32", or leave it out with name_filter.'
            )
        if self._outbox is None:
            self._outbox = self._open(layout, how)
            self._layout, self._compression = layout, how
        if layout != self._layout:
            raise ValueError(difference(self._layout, layout))
        if how is not self._compression:
            assert self._compression is not None
            if fingerprint(how) != fingerprint(self._compression):
                raise ValueError(
                    f"all rows of a store are compressed in one way: {how.settings} differs from "
                    f"{self._compression.settings}, or has other projections. Begin another run."
                )
            self._compression = how
        return Fit(self._outbox, layout, saved)

    def _open(self, layout: Sequence[Entry], how: Projector) -> Outbox:
        group = group_of_processes()
        options = dict(self._how)
        if group is not None:
            # No process waits for another here: one may have no batch at all. Whoever comes first
            # makes the store; the others know it by the text that they agree on.
            text = group.agreed(f"{self.path}:{_passes[self.path]}")
            options |= dict(writer=group.rank(), run=text)
        self._replace()
        parts = [entry.to_json() for entry in layout]
        folder, dtype = os.path.join(self.path, ROWS), self.logging.dtype
        writer = RowWriter(folder, parts, dtype=dtype, meta=fingerprint(how), **options)
        try:
            self._describe(how)
        except BaseException:
            writer.close()
            raise
        self._has_rows = True
        return Outbox(writer, self.logging.waiting, self.logging.num_workers > 0)

    def _replace(self) -> None:
        """What is beside the rows of the run that is overwritten goes, once."""
        if self._replaces and self.rank == 0:
            self._remove(EIGEN, STATISTICS, PROJECTIONS, COMPRESSION)
        # The first process may not have come to it yet: what is there may be replaced all the same.
        self._own_statistics |= self._replaces
        self._replaces = False

    def _describe(self, how: Projector) -> None:
        """Before the first row: one whose projections are not known is worthless."""
        try:
            same = fingerprint(load_compression(self.path)) == fingerprint(how)
        except (FileNotFoundError, Damaged):
            same = False
        if self.rank == 0 and not same:
            self._remove(EIGEN, STATISTICS)  # those of a pass before, of other gradients
        save_compression(self.path, how)

    def _remove(self, *names: str) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.path, name))

    def check(self) -> None:
        """Raise what went wrong beside the caller."""
        if self._outbox is not None:
            self._outbox.check()

    def same_data_again(self) -> None:
        """The next pass gives the same rows once more: they are passed over."""
        self._how |= dict(again=True)

    @property
    def resumes(self) -> bool:
        """Whether rows may be there already; the same in all processes."""
        return bool(self._how["resume"])

    def flush(self) -> None:
        if self._outbox is not None:
            self._outbox.flush()

    def close(self) -> None:
        """Bring the rows to the disk."""
        if self._outbox is not None:
            outbox, self._outbox, self.fits = self._outbox, None, {}
            self._how |= dict(resume=True, overwrite=False, again=False)
            outbox.close()

    def store(self) -> RowStore:
        self.flush()
        try:
            return self._opened()
        except FileNotFoundError:
            raise FileNotFoundError(
                f"no rows are saved at {self.path}. Is it the right project? Rows are saved after "
                'setup({"save": "grad"}).'
            ) from None

    # --- statistics --------------------------------------------------------------------------

    def has_statistics(self) -> bool:
        return has_arrays(os.path.join(self.path, STATISTICS))

    def replaces_statistics(self) -> bool:
        """Whether those of an earlier run will be lost. It is an error if nobody asked for that."""
        if self._own_statistics or self._replaces:
            return False
        self._own_statistics = True
        there = self.has_statistics()
        if there and not self._how["resume"]:
            self._own_statistics = False
            raise FileExistsError(
                f"there are statistics at {self.path}. Call initialize_from_log() to go on with "
                "them, pass resume=True or overwrite=True to replace them, or use another project."
            )
        return there

    def finish(self, local: Any) -> Any:
        """Close the rows; the sums of all processes."""
        self._has_rows = any(together(self.close, self._has_rows))
        group = group_of_processes()
        if group is None:
            return local
        if self._has_rows:
            self._how |= dict(resume=True, overwrite=False, again=False)
        _passes[self.path] += 1
        return group.merged(local, _statistics.BASES)

    def same(self, statistics: Any) -> Any:
        """The eigenvectors of the first process in all: each computes its own, up to rounding."""
        group = group_of_processes()
        return statistics if group is None else group.spread(statistics, _statistics.BASES)

    def write(self, statistics: Any, how: Projector, second: bool = False) -> None:
        """Statistics and compression to the disk, by the first process.

        `second`: since they were written last, only sums of EK-FAC's second pass have changed.
        """
        own = lambda: self._write(statistics, how, second)
        together(own if self.rank == 0 else lambda: None)
        self._replaces = False
        self._own_statistics |= bool(statistics)

    def _write(self, statistics: Any, how: Projector, second: bool) -> None:
        if not statistics and not self._has_rows:
            return  # what is there is of another run
        os.makedirs(self.path, exist_ok=True)
        self._replace()
        rows = os.path.join(self.path, ROWS)
        if self._how["overwrite"] and not self._has_rows and os.path.isdir(rows):
            clear(rows)  # statistics beside them would be of another run
        before = self._first if second else None
        self._first = save_statistics(self.path, statistics, before)
        save_compression(self.path, how)

    def statistics(self, path: str | None = None) -> Any:
        """Those that `finalize` has saved."""
        file = os.path.join(path or self.path, STATISTICS)
        if not os.path.exists(file):
            raise FileNotFoundError(
                f"there are no statistics at {path or self.path}. They are saved by finalize(), "
                'after setup({"statistic": …}).'
            )
        self._own_statistics |= os.path.abspath(path or self.path) == os.path.abspath(self.path)
        return load_statistics(path or self.path)

    def earlier_pca(self, settings: Compression) -> Projector | None:
        """That of the rows which are continued: one made anew might differ in its last bits."""
        return saved_pca(self.path, settings) if self._how["resume"] else None
