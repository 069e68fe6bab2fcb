"""Log per-sample gradients to a store, and ask which training examples explain a query.

    run = logix.init(project="mnist")
    logix.setup({"log": "grad", "save": "grad", "statistic": "kfac"})
    logix.watch(model)
    with run(data_id=batch): loss.backward()

The functions of the module act on the run of `init`. Neither torch nor JAX is imported until a
model is watched.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

from . import evaluate as evaluate
from . import utils as utils
from ._config import LoRAConfig as LoRAConfig
from ._run import LogIX as LogIX
from ._scheduler import LogIXScheduler as LogIXScheduler

_current: LogIX | None = None


def init(project: str, config: Any = None, **options: Any) -> LogIX:
    """Begin a run, on which the module's other functions act.

    >>> import logix
    >>> run = logix.init("digits")
    >>> logix.setup({"log": "grad", "statistic": "kfac"})
    >>> sorted(run.settings.statistics)
    ['kfac']

    Arguments: those of `LogIX`.
    """
    global _current
    run = LogIX(project, config, **options)
    if _current is not None and _current.path == run.path:
        _current.close()  # what an interrupted cell of a notebook has left open
    _current = run
    return run


def _run() -> LogIX:
    if _current is None:
        raise RuntimeError("there is no run yet. Call logix.init(project=…) first.")
    return _current


class NoRun(RuntimeError, AttributeError):
    """A function of the module was used before `init`.

    >>> import logix
    >>> issubclass(logix.NoRun, RuntimeError)
    True
    """


class _Module(types.ModuleType):
    """The module as a run: `logix.setup(…)`, `logix.influence`, `with logix(data_id=…):`."""

    def __getattr__(self, name: str) -> Any:
        if name == "jax":  # imported when it is asked for
            return importlib.import_module("logix.jax")
        if name.startswith("_") or not (hasattr(LogIX, name) or name == "influence"):
            raise AttributeError(f"module 'logix' has no attribute {name!r}")
        if _current is None:
            raise NoRun(f"logix.{name}: there is no run yet. Call logix.init(project=…) first.")
        return getattr(_current, name)

    def __call__(self, data_id: Any, mask: Any = None, **how: Any) -> Any:
        return _run()(data_id, mask, **how)


sys.modules[__name__].__class__ = _Module
