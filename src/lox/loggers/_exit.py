"""Runs are closed when the interpreter ends, also by an exception or `sys.exit`."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from typing import Any

import jax

_told: set[str] = set()  # errors of stopped programs
_open: dict[int, tuple[Any, int]] = {}  # loggers with runs, kept alive until they are closed


def remember(logger: Any) -> None:
    _open[id(logger)] = (logger, os.getpid())


def forget(logger: Any) -> None:
    _open.pop(id(logger), None)


def wait_for_programs() -> Exception | None:
    """Wait until all host calls have been made. Returns the error of a program that was stopped.

    JAX tells of it again and again, until another program has run on that device; we tell it once.
    """
    try:
        jax.effects_barrier()
    except Exception as error:
        again = str(error) in _told
        _told.add(str(error))
        return None if again else error
    return None


@atexit.register
def _close_all() -> None:
    if not _open:
        return
    wait_for_programs()
    for logger, process in list(_open.values()):
        if process != os.getpid():
            continue  # a forked child must not end its parent's runs
        try:
            logger.close()
        except Exception as error:
            print(f"lox: {type(logger).__name__} had failed:", file=sys.stderr)
            traceback.print_exception(error)
