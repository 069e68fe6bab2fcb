"""Is a store what was written? All of its bytes, compared with their checksums."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from collections.abc import Iterator

from _loxio import Damaged

from .._progress import progress
from ._commits import Part
from ._reader import (
    MANIFEST,
    open_part,
    open_parts,
    read_manifest,
    read_writer,
    store_files,
    writer_numbers,
)
from ._rowtypes import mappable


@dataclasses.dataclass
class Report:
    """What `verify` has found: `damage` is empty if all is good."""

    path: str
    rows: int = 0
    nbytes: int = 0
    torn: int = 0  # bytes of an append that was never finished: not rows, and no damage
    damage: list[str] = dataclasses.field(default_factory=list)


def verify(
    path: str | os.PathLike[str], check: bool = True, show_progress: bool | None = None
) -> Report:
    """Compare a store with its checksums; with `check=False`, all but the rows and the ids."""
    path = os.fspath(path)
    report = Report(path)
    try:
        manifest = read_manifest(path)
    except Damaged as error:
        report.damage.append(str(error))
        return report
    known, parts = {MANIFEST}, []
    for writer in writer_numbers(path):
        known.add(f"{writer:04d}.json")
        try:
            state = read_writer(path, manifest, writer)
            open_parts(path, manifest, writer, strict=False)  # do they follow each other?
        except Damaged as error:
            report.damage.append(str(error))
            continue
        for number, listed in enumerate(state["parts"]):
            known |= {f"{listed['name']}.{kind}" for kind in ("rows", "ids", "commits")}
            try:
                part = open_part(path, manifest, state, number)
            except Damaged as error:
                report.damage.append(str(error))
                continue
            report.rows += len(part)
            report.nbytes += sum(part.ends().values())
            report.torn += sum(part.sizes.values()) - sum(part.ends().values())
            parts.append(part)
    if check:
        report.damage += _check(parts, show_progress)
    for name in sorted(set(store_files(path)) - known):
        # A part is listed before its first row is written.
        if size := os.path.getsize(os.path.join(path, name)):
            report.damage.append(f"{path} is damaged: no writer lists {name} ({size:,} bytes)")
    return report


def _check(parts: list[Part], show_progress: bool | None) -> list[str]:
    """What is wrong with the rows and ids of these parts, in their order."""
    damage: list[str] = []
    workers = min(8, os.cpu_count() or 1) if mappable() else 1  # threads need address space
    total = sum(map(len, parts))
    for part in progress(parts, total, "verifying", show_progress, lambda part: len(part)):
        appends = range(len(part.records))
        # Threads hash at the same time. A piece for each: an append may be a single small row.
        pieces = [appends[i::workers] for i in range(min(workers, len(appends)))]
        look = lambda piece, part=part: [(k, d) for k in piece for d in _damage(part, k)]
        if len(pieces) < 2:
            damage += [d for k in appends for d in _damage(part, k)]
            continue
        with concurrent.futures.ThreadPoolExecutor(len(pieces)) as pool:
            found = [one for piece in pool.map(look, pieces) for one in piece]
        damage += [d for _, d in sorted(found)]
    return damage


def _damage(part: Part, k: int) -> Iterator[str]:
    try:
        if found := part.rows_damage(k):
            yield found
        part.ids_of(k)
    except Damaged as error:
        yield str(error)
