"""What goes wrong at the command line: a message for the user, and an exit code."""

from __future__ import annotations

DAMAGED, MISTAKE, FAILED, INTERRUPTED = 1, 2, 3, 130


class Mistake(Exception):
    """What was asked for can't be done. The message says why, and what can be."""


def message(error: BaseException) -> str:
    """The text of an error, without Python's quotes around that of a `KeyError`."""
    if isinstance(error, KeyError) and len(error.args) == 1:
        return str(error.args[0])
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    return str(error) or type(error).__name__
