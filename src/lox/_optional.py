"""Packages that only some loggers need: imported when used, and named when they are missing."""

from __future__ import annotations

import importlib
from types import ModuleType


def need(module: str, extra: str) -> ModuleType:
    """Import a module, or say which command installs it."""
    try:
        importlib.import_module(module.split(".")[0])
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).split(".")[0]
        what = f'"jaxlox[{extra}]"' if extra else "jaxlox"
        raise ImportError(
            f"this needs the package {missing!r}: pip install {what}", name=missing
        ) from error
