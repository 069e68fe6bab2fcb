"""The files beside a run's rows: sums of statistics, and how gradients were compressed.

Sums of EK-FAC have a file of their own: a second pass over the data adds to them alone, and what
the first one has found (gigabytes, for a language model) is not written again.

Arrays are npz, with a checksum of all of them among them: those of its members say nothing of their
names and number, and NumPy does not come to them if a changed header announces fewer bytes. All
files are written by rename, whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import xxhash

from _loxio import Damaged, read_small, write_small

from . import _statistics
from ._array import to_numpy
from ._compress import Compression, Projector
from .store._reader import read_manifest

STATISTICS, EIGEN, PROJECTIONS = "statistics.npz", "eigen.npz", "projections.npz"
ROWS, COMPRESSION = "rows", "compression.json"
CHECK = "xxh3"
State = Mapping[str, Mapping[str, Any]]
SECOND, _OF = ("eigen", "eigen_n"), "of"  # what EK-FAC sums in its second pass


def save(file: str, arrays: State) -> int:
    """Arrays to a file, `{layer: {name: array}}`. Returns their checksum."""
    arrays = {layer: {n: to_numpy(x) for n, x in own.items()} for layer, own in arrays.items()}
    check = _checksum(arrays)
    own = {**arrays.get("", {}), CHECK: np.uint64(check)}
    _statistics.save({**arrays, "": own}, file)
    return check


def load(file: str) -> dict[str, dict[str, Any]]:
    """What `save` has written, or an error."""
    try:
        with open(file, "rb") as opened:  # NumPy leaves a file open that it can't read
            arrays = _statistics.load(cast(Any, opened))
        check = int(arrays[""].pop(CHECK))
    except FileNotFoundError:
        raise
    except Exception as error:  # whatever changed bytes lead a reader of zip files to
        raise Damaged(f"{file} is not what was written: {error}") from error
    arrays = {layer: named for layer, named in arrays.items() if named}
    if check != _checksum(arrays):
        raise Damaged(f"{file} is not what was written: its checksum is another")
    return arrays


def has_arrays(file: str) -> bool:
    """Whether there is something in a file, or may be."""
    try:
        with zipfile.ZipFile(file) as members:
            return len(members.namelist()) > 1  # beside the checksum
    except FileNotFoundError:
        return False
    except zipfile.BadZipFile:
        return True


def _checksum(arrays: State) -> int:
    digest = xxhash.xxh3_64()
    for layer in sorted(arrays):
        for name in sorted(arrays[layer]):
            x = to_numpy(arrays[layer][name])
            digest.update(f"{layer}\0{name}\0{x.dtype.str}{x.shape}\0".encode())
            digest.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
    return digest.intdigest()


def save_compression(path: str, how: Projector) -> None:
    if how.pca:
        save(os.path.join(path, PROJECTIONS), how.pca)
    write_small(os.path.join(path, COMPRESSION), how.settings.to_json())


def load_compression(path: str) -> Projector:
    """That of the run at a path."""
    file = os.path.join(path, COMPRESSION)
    if not os.path.exists(file):
        raise FileNotFoundError(
            f"there is no compression at {path}. It is the folder of a run, root_dir/project, and "
            "is written with the first row, or by finalize()."
        )
    settings = Compression.from_json(read_small(file))
    if settings.init == "pca" and settings.kind != "none":
        return Projector(settings, load(os.path.join(path, PROJECTIONS)))
    return Projector(settings)


def saved_pca(path: str, settings: Compression) -> Projector | None:
    """The PCA by which the rows at a path were compressed, if it has these settings."""
    try:
        wanted = read_manifest(os.path.join(path, ROWS))["meta"]
        how = Projector(settings, load(os.path.join(path, PROJECTIONS)))
    except (FileNotFoundError, Damaged):
        return None
    return how if fingerprint(how) == wanted else None


def fingerprint(how: Projector) -> dict[str, Any]:
    """What two rows must have alike to be compared: it is in the manifest of the rows."""
    found: dict[str, Any] = dict(compression=how.settings.to_json())
    if how.pca:
        found["projections"] = f"{_checksum(how.pca):016x}"
    return found


def save_statistics(path: str, statistics: State, before: int | None = None) -> int:
    """Sums, if they are finite. Returns the checksum of those of the first pass.

    `before`: their checksum, if they are as they were when they were written.
    """
    for layer, stats in statistics.items():
        for name, x in stats.items():
            if not bool((x - x == 0).all()):
                raise ValueError(
                    f"the statistics {name!r} of layer {layer!r} have NaN or infinity in them: a "
                    "batch had gradients that are not finite. Nothing was saved over the earlier "
                    "statistics. clear() forgets them, to go over the data again."
                )
    eigen = {k: {n: x for n, x in own.items() if n in SECOND} for k, own in statistics.items()}
    first = {k: {n: x for n, x in own.items() if n not in SECOND} for k, own in statistics.items()}
    file, second = os.path.join(path, STATISTICS), os.path.join(path, EIGEN)
    if before is None or not os.path.exists(file):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(second)  # in other eigenvectors
        before = save(file, first)
    if any(eigen.values()):
        save(second, {**eigen, _OF: {_OF: np.uint64(before)}})
    return before


def load_statistics(path: str) -> dict[str, dict[str, Any]]:
    """What `save_statistics` has written."""
    file = os.path.join(path, STATISTICS)
    found, second = load(file), os.path.join(path, EIGEN)
    if os.path.exists(second):
        eigen = load(second)
        if int(eigen.pop(_OF)[_OF]) != _checksum(found):
            raise Damaged(f"{second} does not belong to {file}: it is in other eigenvectors")
        for layer, own in eigen.items():
            found.setdefault(layer, {}).update(own)
    return found


def damage_beside(path: str) -> list[str]:
    """What is wrong with the files beside the rows of the run at a path."""
    found = []
    for read, file in ((load_statistics, STATISTICS), (load_compression, COMPRESSION)):
        if os.path.exists(os.path.join(path, file)):
            try:
                read(path)
            except (Damaged, FileNotFoundError) as error:
                found.append(str(error))
    return found
