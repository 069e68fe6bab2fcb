"""A logdict in one file, and back. A zip of plain `.npy` arrays (no pickle) and one of JSON."""

from __future__ import annotations

import contextlib
import io
import json
import os
import uuid
import zipfile
from typing import Any

import jax
import numpy as np

from ._entry import Entry, Layout
from ._event import structure
from ._logdict import iterate_entries, logdict

_FORMAT = 1
_INDEX = "index.json"


def save(logs: logdict, path: str | os.PathLike[str]) -> None:
    """Write a logdict to one file, steps, masks and counts included.

    The file appears under its name only when it is complete.

    >>> import lox, os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "run.lox")
    >>> lox.save(lox.logdict({"loss": 1.5}), path)
    >>> lox.load(path)
    {'loss': 1.5}
    """
    if not isinstance(logs, logdict):
        raise TypeError(f"lox.save takes a logdict, got {type(logs).__name__}. Wrap it: logdict(…)")
    path = os.path.abspath(os.fspath(path))
    folder = os.path.dirname(path)
    temporary = os.path.join(folder, f".lox-{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            _write(logs, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_folder(folder)


def load(path: str | os.PathLike[str]) -> logdict:
    """Read a logdict that `save` wrote. Its values are NumPy arrays.

    >>> import lox, os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "run.lox")
    >>> lox.save(lox.logdict({"loss": 1.5}, step=3), path)
    >>> logs = lox.load(path)
    >>> logs, int(logs.step["loss"])
    ({'loss': 1.5}, 3)
    """
    with zipfile.ZipFile(path) as archive:
        index = json.loads(archive.read(_INDEX))
        if index["format"] != _FORMAT:
            raise ValueError(f"{path} has format {index['format']}, this lox reads {_FORMAT}.")
        arrays = [_read_array(archive, i, dtype) for i, dtype in enumerate(index["dtypes"])]
    pick = lambda i: None if i is None else arrays[i]
    entries = {}
    for item in index["entries"]:
        layout = Layout(item["events"], tuple(item["ndims"]), tuple(item["step_ndims"]))
        value = decode(item["value"], arrays)
        steps = {name: arrays[i] for name, i in item["steps"]}
        entries[item["key"]] = Entry(value, steps, layout, pick(item["mask"]), pick(item["count"]))
    return logdict.of_entries(entries)


def _write(logs: logdict, file: Any) -> None:
    arrays: list[np.ndarray] = []

    def put(x: Any) -> int:
        arrays.append(np.asarray(x))
        return len(arrays) - 1

    maybe = lambda x: None if x is None else put(x)
    entries = [
        dict(
            key=key,
            value=encode(key, e.value, put),
            steps=[(name, put(s)) for name, s in e.steps.items()],
            events=e.layout.events,
            ndims=e.layout.ndims,
            step_ndims=e.layout.step_ndims,
            mask=maybe(e.mask),
            count=maybe(e.count),
        )
        for key, e in iterate_entries(logs)
    ]
    index = dict(format=_FORMAT, dtypes=[x.dtype.name for x in arrays], entries=entries)
    with zipfile.ZipFile(file, "w") as archive:
        for i, x in enumerate(arrays):
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, _storable(x), allow_pickle=False)
            archive.writestr(f"{i}.npy", buffer.getvalue())
        archive.writestr(_INDEX, json.dumps(index))


def _storable(x: np.ndarray) -> np.ndarray:
    """NumPy's format does not know bfloat16 and its like: their bits are stored."""
    if x.dtype.isbuiltin == 1:
        return x
    return np.asarray(x, order="C").view(np.dtype(f"u{x.dtype.itemsize}"))


def _read_array(archive: zipfile.ZipFile, i: int, dtype: str) -> np.ndarray:
    x = np.lib.format.read_array(io.BytesIO(archive.read(f"{i}.npy")), allow_pickle=False)
    return x if x.dtype.name == dtype else x.view(jax.numpy.dtype(dtype))


def encode(key: str, tree: Any, put: Any) -> Any:
    """A pytree of dicts, lists, tuples and None as JSON, arrays by their number."""
    again = lambda x: encode(key, x, put)
    if type(tree) is dict and all(isinstance(k, str | int) for k in tree):
        return {"dict": [[k, again(v)] for k, v in tree.items()]}
    if type(tree) is list:
        return {"list": [again(v) for v in tree]}
    if type(tree) is tuple:
        return {"tuple": [again(v) for v in tree]}
    if tree is None:
        return {"none": 0}
    if structure(tree) == structure(0):
        return put(tree)
    raise TypeError(
        f"lox.save: the value of {key!r} holds a {type(tree).__name__}; a file can hold arrays in "
        "dicts, lists and tuples. Convert it before logging, e.g. with dataclasses.asdict."
    )


def decode(code: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(code, int):
        return arrays[code]
    [(kind, items)] = code.items()
    if kind == "dict":
        return {k: decode(v, arrays) for k, v in items}
    if kind == "none":
        return None
    decoded = [decode(v, arrays) for v in items]
    return tuple(decoded) if kind == "tuple" else decoded


def _sync_folder(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
