"""The runs under one path: finding them, and beginning new ones without mixing them up."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any

from _loxio import Damaged, exclusive, hold, write_small

from ._folder import Folder
from ._writer import FORMAT, LOCK, MANIFEST, FolderWriter

_CLAIM = ".claim"


def folders(root: str) -> tuple[list[Folder], list[Damaged]]:
    """All folders of runs, the oldest first, and what is wrong with those that can't be read."""
    found, damaged = [], []
    is_one = os.path.isfile(os.path.join(root, MANIFEST))
    for name in ["."] if is_one else sorted(os.listdir(root)):
        path = os.path.normpath(os.path.join(root, name))
        try:
            found.append(_folder(path))
        except NotADirectoryError:
            continue
        except FileNotFoundError:  # not a run, or one that is just being made or removed
            if any(f.endswith((".arrows", ".parquet")) for f in _files(path)):
                damaged.append(Damaged(f"{path} is damaged: its {MANIFEST} is missing"))
        except Damaged as error:
            damaged.append(error)
    return sorted(found, key=lambda f: f.manifest["created_ns"]), damaged


# Folders as they were when last seen; a manifest is never changed in place.
_seen: dict[str, tuple[tuple[int, int], Folder]] = {}


def _folder(path: str) -> Folder:
    found = os.stat(os.path.join(path, MANIFEST))
    version = (found.st_ino, found.st_mtime_ns)
    known = _seen.get(path)
    if known is None or known[0] != version:
        known = _seen[path] = (version, Folder(path))
    return known[1]


def _files(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


class Taken(Exception):
    """A run of this name is there already."""

    def __init__(self, name: str, why: str = ""):
        super().__init__(name, why)
        self.name, self.why = name, why


def begin(root: str, runs: Sequence[dict[str, Any]], group: str, exists: str) -> FolderWriter:
    """A new folder for these runs (each a dict with `name` and `config`)."""
    os.makedirs(root, exist_ok=True)
    names = [r["name"] for r in runs]
    with exclusive(os.path.join(root, _CLAIM)):
        known = folders(root)[0]
        latest = max((f.manifest["created_ns"] for f in known), default=0)
        for folder in known:
            again = [n for n in names if n in folder.lanes]
            if again and exists == "error":
                raise Taken(again[0])
            if again:
                _prepare(folder, again, exists)
        manifest = dict(
            format=FORMAT,
            state="open",
            group=group,
            created=time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + "Z",
            created_ns=max(time.time_ns(), latest + 1),  # also if the clock was set back
            host=socket.gethostname(),
            process=os.getpid(),
            runs=list(runs),
        )
        return FolderWriter(os.path.join(root, _free_name(root, names)), manifest)


def _prepare(folder: Folder, names: list[str], exists: str) -> None:
    """Make room for new runs of these names, if nobody writes to the old ones."""
    lock = hold(os.path.join(folder.path, LOCK))
    if lock is None:
        raise Taken(names[0], "it is being written by another process, or another logger")
    try:
        folder.refresh()
        if exists == "overwrite":
            if set(folder.lanes) <= set(names):
                shutil.rmtree(folder.path)
                return
            for run in folder.manifest["runs"]:
                if run["name"] in names:
                    run["dropped"] = True
            write_small(os.path.join(folder.path, MANIFEST), folder.manifest)
    finally:
        lock.release()


def _free_name(root: str, names: list[str]) -> str:
    """A name for a folder that tells whose it is."""
    first = urllib.parse.quote(names[0], safe=" ()+,-.=@[]_{}~").lstrip(".") or "run"
    if len(first) > 120:
        first = first[:100] + "~" + hashlib.sha1(names[0].encode()).hexdigest()[:12]
    base = first if len(names) == 1 else f"{first}+{len(names) - 1}"
    name, n = base, 1
    while os.path.exists(os.path.join(root, name)):
        n += 1
        name = f"{base}~{n}"  # the same runs, resumed
    return name
