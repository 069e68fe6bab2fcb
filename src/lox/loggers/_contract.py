"""What a backend writes: how to begin a run, write events, and end it. All values are NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from .._logdict import logdict
from ._lanes import each_run
from ._names import RunInfo


class Contract:
    """The methods that a logger calls. A backend writes the first three, and others if it must."""

    slow: ClassVar[bool] = True  # called from a thread of its own, behind a queue

    def open_run(self, info: RunInfo) -> Any:
        """Begin a run. What it returns is given to the other methods."""
        raise NotImplementedError

    def write_run(self, run: Any, logs: logdict) -> None:
        """Write events. Every key of `logs` is a row of events, in order; all values are NumPy."""
        raise NotImplementedError

    def close_run(self, run: Any) -> None:
        """End a run."""

    def replace_run(self, run: Any) -> None:
        """End an open run that a new one of the same name replaces."""
        self.close_run(run)

    def undo_run(self, run: Any) -> None:
        """Forget a run that has just begun, if the backend can."""
        self.close_run(run)

    def flush_run(self, run: Any) -> None:
        """Make sure that what was written is where it belongs."""

    # A backend that can treat many runs at once replaces these.

    def open_runs(self, infos: Sequence[RunInfo]) -> list[Any]:
        opened: list[Any] = []
        try:
            for info in infos:
                opened.append(self.open_run(info))
        except Exception:
            for run in opened:  # all or none
                self.undo_run(run)
            raise
        return opened

    def write_runs(self, runs: list[Any], logs: logdict) -> None:
        """Write events of several runs: `logs` has an axis over them in front (see `_lanes`)."""
        errors = []
        for lane, own in each_run(logs, len(runs)):
            try:
                self.write_run(runs[lane], own)
            except Exception as error:  # one run that fails is no reason to lose the others
                errors.append(error)
        if errors:
            raise errors[0]
