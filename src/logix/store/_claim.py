"""Whose a store is: whether it may be continued, must be left alone, or is replaced."""

from __future__ import annotations

import math
import os
import time
import uuid
from collections.abc import Sequence
from typing import Any

from _loxio import Damaged, is_held, write_small

from ._reader import FORMAT, KIND, MANIFEST, read_manifest, store_files


def row_size(layout: Sequence[dict[str, Any]]) -> int:
    """Values in a row. A layout is a list of {name, shape, offset}, without gaps."""
    size = 0
    for part in layout:
        if part["offset"] != size:
            raise ValueError(f"{part['name']!r} is at offset {part['offset']} instead of {size}")
        size += math.prod(part["shape"])
    return size


def claim(
    path: str, wanted: dict[str, Any], writer: int, run: str | None, resume: bool, overwrite: bool
) -> dict[str, Any]:
    """The manifest of the store that is there and may be written to, or of a new one."""
    there = store_files(path)
    new_here = f"{writer:04d}.json" not in there
    known = None
    try:
        known = read_manifest(path) if there else None
    except Damaged:
        if not overwrite or there == [MANIFEST]:  # it may be something else's
            raise
    if known and (resume or (new_here and run is not None and run == known["run"])):
        for key, value in wanted.items():
            if known[key] != value:
                raise ValueError(
                    f"{path} has {key}={_short(known[key])}, not {_short(value)}: it was written "
                    "in another way, and can't be continued in this one. Use the same model, setup "
                    "and compression (initialize_from_log() brings them back), or overwrite=True."
                )
        return known
    if there and not overwrite:
        how = "pass resume=True to continue it, overwrite=True to remove it, or another path"
        raise FileExistsError(f"there is a store at {path}: {how}")
    clear(path, writer)
    new = dict(kind=KIND, format=FORMAT, store=uuid.uuid4().hex, run=run, **wanted)
    new["created"] = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + "Z"
    write_small(os.path.join(path, MANIFEST), new)
    return new


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else f"{text[:160]} … ({len(text):,} characters)"


def clear(path: str, writer: int | None = None) -> None:
    """Remove the store at a path, unless another writer than this one is writing it."""
    locks = {n for n in os.listdir(path) if n.endswith(".lock") and n[:-5].isdigit()}
    locks -= {f"{writer:04d}.lock"} if writer is not None else set()
    if any(is_held(os.path.join(path, n)) for n in locks):
        raise FileExistsError(f"the store at {path} is being written by another process")
    files = {*store_files(path), *locks}
    for name in sorted(files, key=lambda n: n != MANIFEST):  # first what makes it a store
        os.unlink(os.path.join(path, name))
