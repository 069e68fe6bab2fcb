"""What a run makes of batches: statistics of all of them, rows of each, and the end of a pass."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from . import _statistics
from ._beside import SECOND
from ._config import Config
from ._finite import Finite, finite
from ._record import Record
from ._rows import Activation, some
from ._settings import Settings
from ._watching import Watching

# Words of statistics that need no gradient of a parameter.
OF_POSITIONS = frozenset(w for w in _statistics.WORDS if w.startswith(("forward", "backward")))


class Taking(Watching):
    """The part of `LogIX` that takes records."""

    def __init__(self, config: Config, nonfinite: str):
        super().__init__(config)
        self.settings = Settings()
        # Statistics of the passes before, of all processes; of this pass, of this process.
        self._earlier: dict[str, dict[str, Any]] = {}
        self._fresh: dict[str, dict[str, Any]] = {}
        self._written: Any = None  # what is on the disk of `_earlier`
        self._logging = True
        self.ids: list[Any] = []  # of the last batch
        self.records: list[Record] = []
        self._tensors: list[Activation] = []
        self._told: set[str] = set()
        self._finite = Finite(nonfinite)
        self._scheduled = False  # passes are counted by LogIXScheduler
        self._own_bases = False  # an `extract` has begun the second pass of EK-FAC
        self._everywhere = False  # the sums of this pass are those of all processes already

    def _kinds(self, save: bool | None) -> frozenset[str]:
        """What is saved of a batch."""
        if save is None:
            return self.settings.save if self._logging else frozenset()
        if not save:
            return frozenset()
        return self.settings.save or self.settings.log or frozenset({"grad"})

    def _summed(self) -> frozenset[str]:
        """What is summed over batches in this pass."""
        if not self._logging:
            return frozenset()
        return self.settings.statistics if self._has_bases() else self.settings.sums

    def _take(
        self,
        ids: list[Any],
        records: list[Record],
        tensors: list[Activation],
        mask: Any,
        save: bool | None,
    ) -> None:
        """What becomes of a batch."""
        what, kinds = self._summed(), self._kinds(save)
        # Whatever may be wrong with the batch is found before it has changed anything.
        good: Any = None
        if what or (kinds and self._finite.policy != "error"):  # else the store tells it
            found = finite(records)
            if found is not None:
                self._finite.note(ids, *found)
                good = found[0].nonzero()[0].tolist()
        chosen = lambda xs: xs if good is None else [some(x, good) for x in xs]
        if good is not None and self._finite.policy == "skip":
            ids, records, tensors = [ids[i] for i in good], chosen(records), chosen(tensors)
            mask, good = None if mask is None else mask[good], None
        if self.settings.log or not self._logging:  # else no one asks for them
            self.records = records
        self.ids, self._tensors = ids, tensors
        logged = [*records, *tensors]
        rows = None
        if kinds and ids:
            rows = self._saved.fit(len(ids), logged, kinds, self.compression).reserve(ids)
        if what and ids:
            self._begin_statistics()
            own = mask if mask is None or good is None else mask[good]
            self._add(chosen(records), chosen(tensors), what, own)
        if rows is not None:
            rows.hold()
            rows.write(logged)

    def _begin_statistics(self) -> None:
        if self._saved.replaces_statistics():
            self._tell("the statistics on the disk are replaced by those of this pass")
        if not self._fresh and self._has_bases():
            self._fresh = bases(self._earlier)

    def _add(
        self,
        records: Sequence[Record],
        tensors: Sequence[Activation],
        what: frozenset[str],
        mask: Any,
    ) -> None:
        add = functools.partial(_statistics.update, cpu=self.config.logging.cpu_offload)
        self._fresh = add(self._fresh, records, what, mask=mask)
        for x in tensors:
            own = mask if x.has_positions(mask) else None
            self._fresh = add(self._fresh, [x.as_record()], what & OF_POSITIONS, mask=own)

    @property
    def statistics(self) -> dict[str, dict[str, Any]]:
        """Sums over all that was logged. `averages` of them are means and covariances."""
        return _statistics.merge(self._earlier, self._fresh) if self._fresh else self._earlier

    @property
    def in_a_pass(self) -> bool:
        """Whether something was logged since `finalize`."""
        return bool(self._fresh)

    def _has_bases(self) -> bool:
        return any(b in s for s in self._earlier.values() for b in _statistics.BASES)

    def _forget(self) -> None:
        self._earlier, self._fresh, self._own_bases = {}, {}, False

    def finalize(self) -> None:
        """End a pass over the data: rows and statistics are on the disk, of all processes."""
        if self._program is not None:
            self._program.spare.keep(0)
        own = {} if self._everywhere and self._saved.rank else self._fresh
        fresh, self._fresh, self._everywhere = self._saved.finish(own), {}, False
        names = {name for stats in fresh.values() for name in stats}
        second = self._earlier is self._written and names <= {*SECOND, *_statistics.BASES}
        self._earlier = _statistics.merge(self._earlier, fresh)
        if "ekfac" in self.settings.statistics and not self._has_bases():
            self._earlier = self._saved.same(_statistics.with_bases(self._earlier))
            self._saved.same_data_again()  # the second pass of EK-FAC
        if cut := set(_statistics.diagonal_sides(self._earlier)) - self._told:
            self._tell(f"only the diagonal of the covariance is kept of {', '.join(sorted(cut))}")
            self._told |= cut
        if text := self._finite.told():
            print(f"logix: {text}")  # of each process
        self._saved.write(self._earlier, self.compression, second)
        self._written = self._earlier


def bases(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The eigenvectors alone."""
    known = {k: {n: s[n] for n in _statistics.BASES if n in s} for k, s in state.items()}
    return {layer: own for layer, own in known.items() if own}
