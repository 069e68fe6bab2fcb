"""Checking every byte of what is saved, and closing what a crash left open."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

import xxhash

from _loxio import Damaged, hold

from ._catalog import folders
from ._folder import Folder
from ._scan import Damage, contents, scan
from ._writer import LOCK, MANIFEST, end_folder


@dataclasses.dataclass
class Report:
    """What `verify` found in one folder."""

    path: str
    state: str
    files: int = 0
    bytes: int = 0
    torn: int = 0  # bytes of a write that was never finished: expected after a crash
    damage: list[Damage] = dataclasses.field(default_factory=list)


def verify(root: str) -> Iterator[Report]:
    """Check every checksum of every folder of runs under a path: a report for each.

    >>> import jax, lox, lox.store, tempfile
    >>> path = tempfile.mkdtemp()
    >>> with lox.loggers.SaveLogger(path) as logger:
    ...     logger.log(logger.init(jax.random.key(0)), {"x": 1.0})
    >>> [(report.state, report.damage) for report in lox.store.verify(path)]
    [('closed', [])]
    """
    found, damaged = folders(root)
    for error in damaged:
        name = str(error).split(" is damaged")[0]
        yield Report(os.path.dirname(name), "damaged", 1, 0, 0, [Damage(name, 0, 0, str(error))])
    for folder in found:
        yield verify_folder(folder)


def verify_folder(folder: Folder) -> Report:
    report = _checked(folder)
    while report.damage and folder.refresh():  # it was closed while we looked
        report = _checked(folder)
    return report


def _checked(folder: Folder) -> Report:
    size = os.path.getsize(os.path.join(folder.path, MANIFEST))
    report = Report(folder.path, folder.state, 1, size)
    try:
        if "tables" in folder.manifest:
            for record in folder.manifest["tables"]:
                _check_parquet(folder.path, record, report)
        else:
            for name, at_least in folder.stream_sizes().items():
                path = os.path.join(folder.path, name)
                closed = folder.manifest["state"] == "closed"
                seen = scan(path, at_least, live=True, at_most=at_least if closed else None)
                report.files, report.bytes = report.files + 1, report.bytes + len(seen.data)
                report.torn += seen.torn
                report.damage += seen.damage
    except (Damaged, FileNotFoundError) as error:
        report.damage.append(Damage(folder.path, 0, 0, str(error)))
    return report


def _check_parquet(path: str, record: dict, report: Report) -> None:
    data = contents(os.path.join(path, record["file"]))
    report.files, report.bytes = report.files + 1, report.bytes + len(data)
    if len(data) != record["bytes"]:
        what = f"{len(data)} bytes instead of {record['bytes']}"
        report.damage.append(Damage(record["file"], 0, len(data), what))
    elif xxhash.xxh3_64_hexdigest(data) != record["xxh3"]:
        for name, chunks in record["chunks"].items():
            for start, size, digest in chunks:
                if xxhash.xxh3_64_hexdigest(data[start : start + size]) != digest:
                    what = f"column {name!r} is damaged"
                    report.damage.append(Damage(record["file"], start, start + size, what))
        if not report.damage or report.damage[-1].file != record["file"]:
            report.damage.append(Damage(record["file"], 0, len(data), "not what was written"))


def compact(root: str) -> Iterator[tuple[str, int, int]]:
    """Close what crashed, and turn streams into Parquet files. Yields path, bytes before, after.

    >>> import jax, lox, lox.store, tempfile
    >>> path = tempfile.mkdtemp()
    >>> with lox.loggers.SaveLogger(path, compact=False) as logger:
    ...     logger.log(logger.init(jax.random.key(0)), {"x": 1.0})
    >>> for folder, before, after in lox.store.compact(path):
    ...     print(before > 0, after > 0)
    True True
    """
    first: Damaged | None = None
    for folder in folders(root)[0]:
        lock = hold(os.path.join(folder.path, LOCK))
        if lock is None:
            continue  # it is being written
        try:
            folder.refresh()  # another may have done it meanwhile
            if "tables" not in folder.manifest:
                before = folder_size(folder.path)
                _compact(folder)
                yield folder.path, before, folder_size(folder.path)
        except Damaged as error:  # the others can be closed all the same
            first = first or error
        finally:
            lock.release()
    if first is not None:
        raise first


def _compact(folder: Folder) -> None:
    closed = folder.manifest["state"] == "closed"
    sizes = {}
    for name, size in folder.stream_sizes().items():
        found = scan(os.path.join(folder.path, name), size, at_most=size if closed else None)
        if found.damage:
            raise Damaged(f"{folder.path}: {found.damage[0]}")
        sizes[name] = len(found.data) - found.torn  # what is torn was never acknowledged
    manifest = {k: v for k, v in folder.manifest.items() if k != "streams"}
    if not closed:
        manifest["crashed"] = True  # what it was stays known
    end_folder(folder.path, manifest, sizes, compact=True)


def folder_size(path: str) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
