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
    keys = run.forms()
    all_times = [t for of_key in keys.values() for t, _ in of_key]
    times = np.unique(np.concatenate(all_times)) if all_times else np.zeros(0)
    pieces = max(1, -(-max(map(len, all_times), default=0) // rows))
    edges = [*times[:: max(1, -(-len(times) // pieces))], np.iinfo(np.int64).max]
    for start, stop in itertools.pairwise(edges):
        for n in range(max(map(len, keys.values()))):  # a logdict has one form of a key
            entries = {}
            for key, of_key in keys.items():
                if n < len(of_key):
                    time, entry = of_key[n]
                    low, high = np.searchsorted(time, [start, stop])
                    if high > low:
                        cut = lambda x, _, at=slice(low, high): x[at]
                        entries[key] = entry.map_events(cut)
            if entries:
                yield logdict.of_entries(entries)
