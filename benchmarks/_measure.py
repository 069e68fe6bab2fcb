"""Side-by-side timing: variants take turns, so that noise of the machine meets all of them."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax


def race(*variants: Callable[[], Any], rounds: int = 15, calls: int = 1) -> list[float]:
    """Median seconds per call of each variant, measured in turns after a warm-up."""
    for run in variants:
        jax.block_until_ready(run())
    times: list[list[float]] = [[] for _ in variants]
    for i in range(rounds):
        order = range(len(variants)) if i % 2 else reversed(range(len(variants)))
        for k in order:
            start = time.perf_counter()
            for _ in range(calls):
                out = variants[k]()
            jax.block_until_ready(out)
            jax.effects_barrier()
            times[k].append((time.perf_counter() - start) / calls)
    return [statistics.median(t) for t in times]


def once(*variants: Callable[[], Any], rounds: int = 5) -> list[float]:
    """Median seconds of each variant, for work that must be done afresh each time."""
    times: list[list[float]] = [[] for _ in variants]
    for _ in range(rounds):
        for k, run in enumerate(variants):
            start = time.perf_counter()
            run()
            times[k].append(time.perf_counter() - start)
    return [statistics.median(t) for t in times]


def optimised_hlo(fun: Callable, *args: Any) -> str:
    """All computations of the compiled program, without the names of source lines."""
    text = jax.jit(fun).lower(*args).compile().as_text()
    start = re.search(r"^(%|ENTRY)", text, re.MULTILINE)
    assert start is not None
    return re.sub(r", metadata=\{[^}]*\}", "", text[start.start() :])


def compiled_bytes(fun: Callable, *args: Any) -> int:
    """Temporary and output bytes of the compiled program."""
    stats = jax.jit(fun).lower(*args).compile().memory_analysis()
    return stats.temp_size_in_bytes + stats.output_size_in_bytes
