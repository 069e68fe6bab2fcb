"""Errors that name the file, and say what is wrong with it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


class Damaged(Exception):
    """A file of a saved run is not what was written: a disk or a copy has changed it.

    >>> import jax, lox, pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp())
    >>> with lox.loggers.SaveLogger(path) as logger:
    ...     logger.log(logger.init(jax.random.key(0), name="first"), {"x": 1.0})
    >>> file = path / "first" / "0.parquet"
    >>> _ = file.write_bytes(file.read_bytes()[:-1])
    >>> try:
    ...     lox.runs(path)["first"].load()
    ... except lox.Damaged as error:
    ...     print("bytes instead of" in str(error))
    True
    """


Damaged.__module__ = "lox"  # as users know it


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Errors of the system say which file they are about."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or os.fspath(path)
        raise


def check_there(handle: int, path: str | os.PathLike[str]) -> None:
    """Writing goes on without an error when a file is removed, and all of it is lost."""
    if os.fstat(handle).st_nlink == 0:
        raise FileNotFoundError(f"{os.fspath(path)} was removed while the run was being written")
