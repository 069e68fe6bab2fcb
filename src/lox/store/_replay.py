"""A saved run as a stream of logdicts again, in the order in which it was written."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash

from .._logdict import logdict

_COUNT = itertools.count()


def send_run(run: Any, logger: Any, rows: int) -> None:
    """See `lox.replay`."""
    # An identity of its own: a run may be replayed beside the original, and more than once.
    words = xxhash.xxh3_128_digest(f"{run.path} {run.name} {next(_COUNT)}".encode())
    ids = np.append(np.frombuffer(words, np.uint32), np.uint32(0))
    template = run.name.replace("{", "{{").replace("}", "}}")
    logger.host_open(template, "replay", ids[None], [run.config], run.group)
    for logs in windows(run, rows):
        logger.host_write(template, "replay", logs, ids)


def windows(run: Any, rows: int) -> Iterator[logdict]:
    """What was logged, cut into pieces in time. One write is never cut."""
    keys = run.timed()
    times = np.unique(np.concatenate([t for t, _ in keys.values()])) if keys else np.zeros(0)
    longest = max((len(t) for t, _ in keys.values()), default=0)
    pieces = max(1, -(-longest // rows))
    edges = [*times[:: max(1, -(-len(times) // pieces))], np.iinfo(np.int64).max]
    for start, stop in itertools.pairwise(edges):
        entries = {}
        for key, (time, entry) in keys.items():
            low, high = np.searchsorted(time, [start, stop])
            if high > low:
                entries[key] = entry.map_events(lambda x, _, at=slice(low, high): x[at])
        yield logdict.of_entries(entries)
