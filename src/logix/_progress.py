"""A bar for what takes long: on a terminal only, and only once it has taken a second.

`LOGIX_PROGRESS=0` in the environment turns all bars off.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, TypeVar

T = TypeVar("T")
PATIENCE = 1.0  # seconds


def progress(
    iterable: Iterable[T],
    total: int | None = None,
    what: str = "",
    show: bool | None = None,
    size: Callable[[T], int] | None = None,
) -> Iterator[T]:
    """The same items, with a bar on stderr that says how far it is.

    >>> list(progress([1, 2, 3], what="counting"))
    [1, 2, 3]

    Arguments:

    - `total`: how much there will be; by default what `len` says, if it does.
    - `what`: what is done, in a word or two.
    - `show`: None for a bar on a terminal alone; True for a plain line elsewhere; False for none.
    - `size`: how much of `total` an item is (`lambda block: len(block)`), 1 if not given.
    """
    if os.environ.get("LOGIX_PROGRESS") == "0" or show is False:
        yield from iterable
        return
    terminal = sys.stderr is not None and sys.stderr.isatty()
    if not terminal and show is None:
        yield from iterable
        return
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    started, done, bar = time.monotonic(), 0, None
    try:
        for item in iterable:
            yield item
            done += size(item) if size else 1
            if terminal and bar is None and time.monotonic() - started > PATIENCE:
                bar = _bar(what, total)
            if bar is not None:
                bar.update(bar.task_ids[0], completed=done)
    finally:
        if bar is not None:
            bar.stop()
    if not terminal:
        took = time.monotonic() - started
        print(f"logix: {what}: {done:,} in {took:.1f} s", file=sys.stderr)


def _bar(what: str, total: int | None) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn())
    how: dict[str, Any] = dict(transient=True, redirect_stdout=False, redirect_stderr=False)
    bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), **how)
    bar.add_task(f"logix: {what}", total=total)
    bar.start()
    return bar
