"""What writers of files share: errors name the file, and a file that was removed is noticed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


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
