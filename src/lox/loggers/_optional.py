"""Packages that only some loggers need: imported when used, and named when they are missing."""

from __future__ import annotations

import importlib
from types import ModuleType


def need(module: str, extra: str) -> ModuleType:
    """Import a module, or say which command installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).split(".")[0]
        raise ImportError(
            f'this needs the package {missing!r}: pip install "jaxlox[{extra}]"', name=missing
        ) from error
