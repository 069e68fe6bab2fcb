"""`WandbLogger`: runs in Weights & Biases, one for each run of the program.

W&B has a step of its own for every row and drops rows at which it goes backwards. It is left alone,
as a count of rows: the program's steps are logged as values, and each key is told which of them is
its x axis. So steps may repeat or go backwards, and nothing is lost.
"""

from __future__ import annotations

import atexit
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Sequence
from typing import Any

from .._logdict import logdict
from .._optional import need
from . import _exit
from ._base import Logger
from ._names import RunInfo, run_exists
from ._rows import INDEX, Index, Merger, Row, rows_of
from ._values import Unheld, histogram, images, is_array, is_number

RESUME = {"error": "never", "resume": "allow", "overwrite": None}
INDICES = "lox-index.json"
OWN_KEYS = {"_step", "_runtime", "_timestamp", "_wandb"}
NOT_HERE = {
    "name": "logger.init(key, name=…)",
    "id": "logger.init(key, name=…), for the id is made of the name",
    "resume": "WandbLogger(exists='error' | 'overwrite' | 'resume')",
    "reinit": "nothing: several runs at once are fine",
}


@dataclasses.dataclass
class _Run:
    run: Any  # wandb's own
    index: Index
    first_row: int | None  # W&B's own step to go on from, in a run that is resumed offline
    merger: Merger = dataclasses.field(default_factory=Merger)
    defined: set[str] = dataclasses.field(default_factory=set)  # keys that have an x axis


class WandbLogger(Logger):
    """Write runs to Weights & Biases: one W&B run for each, in a group if they begin together.

    Numbers stay numbers, arrays become histograms of their values, and the keys in `images` images.
    Steps are columns, and the x axes of the other keys.

    >>> import jax, lox, pathlib, tempfile
    >>> from lox.loggers import WandbLogger
    >>> folder = tempfile.mkdtemp()
    >>> quiet = {"silent": True}
    >>> with WandbLogger("digits", mode="offline", dir=folder, settings=quiet) as logger:
    ...     state = logger.init(jax.random.key(0), name="first", config={"lr": 0.1})
    ...     logger.log(state, lox.logdict({"loss": 0.5}, step=10))
    >>> [file.name for file in pathlib.Path(folder).glob("wandb/offline-run-*/*.wandb")]
    ['run-first.wandb']

    Arguments:

    - `project`: W&B's project.
    - `group`: the group of the runs. By default, those of one `init` under `vmap` are a group.
    - `images`: keys that are images: (height, width), or with 1, 3 or 4 channels as a last axis.
    - `exists`, `strict`, `overflow`, `capacity`, `timeout`: those of `lox.loggers.Logger`.
    - `init`: further arguments of `wandb.init`: `entity`, `mode`, `dir`, `tags`, `job_type` ….
    """

    def __init__(
        self,
        project: str | None = None,
        group: str | None = None,
        images: Sequence[str] = (),
        *,
        exists: str | None = None,
        strict: bool = False,
        overflow: str = "block",
        capacity: int = 1024,
        timeout: float = 60.0,
        **init: Any,
    ):
        super().__init__(
            exists=exists, strict=strict, overflow=overflow, capacity=capacity, timeout=timeout
        )
        for name in NOT_HERE.keys() & init:
            raise TypeError(f"WandbLogger takes no {name!r}. Use {NOT_HERE[name]}.")
        self.images = frozenset(images)
        self._group = group
        if init.get("dir") is not None:  # W&B's service may have been started elsewhere
            init["dir"] = os.path.abspath(init["dir"])
        self._init = {"project": project, **init}
        self._wandb: Any = None
        self._unheld = Unheld(type(self).__name__)

    def open_run(self, info: RunInfo) -> _Run:
        wandb = self._wandb = need("wandb", "wandb")
        run_id = _run_id(info.name)
        folder = self._folder(wandb)
        offline = self._is_offline(wandb)
        # Offline, W&B can't know what is there, and would add a second file for the same run.
        old = sorted(folder.glob("offline-run-*/run-*.wandb")) if offline else []
        old = [file for file in old if file.name == f"run-{run_id}.wandb"]
        if old and self.exists == "error":
            raise run_exists(type(self).__name__, info.name, str(folder))
        if self.exists == "overwrite":
            for file in old:
                shutil.rmtree(file.parent)
            old = []
        if "dir" in self._init:
            os.makedirs(self._init["dir"], exist_ok=True)  # else W&B warns of it
        options: dict[str, Any] = {
            **self._init,
            "name": info.name,
            # Online, W&B itself gives another id to a run whose key was used before.
            "id": None if self._numbers and info.from_key and not offline else run_id,
            "group": self._group or info.group,
            "config": {**self._init.get("config", {}), **info.config},
            "reinit": "create_new",
            "resume": None if offline else RESUME[self.exists],
        }
        try:
            run = wandb.init(**options)
        except Exception as error:
            error.add_note(
                "lox: W&B could not be reached, or refused. Log in with `wandb login`, or write "
                "to disk with WandbLogger(…, mode='offline') and use `wandb sync` later"
            )
            raise
        # W&B ends its runs when the interpreter does. What waits here must get there before.
        atexit.register(_exit._close_all)
        # No more rows than bytes: a step of W&B that is behind all rows before.
        first_row = sum(file.stat().st_size for file in old) or None
        return _Run(run, Index(_following(run, old)), first_row)

    def write_run(self, run: _Run, logs: logdict) -> None:
        self._log(run, run.merger.add(rows_of(logs, run.index)))

    def flush_run(self, run: _Run) -> None:
        self._log(run, run.merger.close())
        if run.run.offline:
            file = pathlib.Path(run.run.dir).parent / INDICES
            file.write_text(json.dumps(run.index.next))

    def close_run(self, run: _Run) -> None:
        try:
            self.flush_run(run)
        finally:
            run.run.finish()

    def undo_run(self, run: _Run) -> None:
        run.run.finish()
        if run.run.offline:
            shutil.rmtree(pathlib.Path(run.run.dir).parent)

    def _log(self, run: _Run, rows: list[Row]) -> None:
        for row in rows:
            cells: dict[str, Any] = {}
            for key, value in row.columns().items():
                cells |= self._cells(f"lox/{key}" if key in OWN_KEYS else key, value)
            for key in cells:
                if key not in run.defined and key not in row.steps:
                    run.defined.add(key)
                    if "*" not in key:  # which W&B takes for a pattern
                        run.run.define_metric(key, step_metric=row.axis, step_sync=False)
            run.run.log(cells, step=run.first_row, commit=True)
            run.first_row = None
        self._unheld.warn()

    def _cells(self, key: str, value: Any) -> dict[str, Any]:
        """What W&B is given for a value."""
        if key in self.images:
            array = need("PIL.Image", "wandb").fromarray
            every = [x[..., 0] if x.shape[-1] == 1 else x for _, x in images(key, value)]
            shown = [self._wandb.Image(array(x)) for x in every]
            return {key: shown[0] if len(shown) == 1 else shown}
        if is_number(value):
            return {key: int(value) if value.dtype.kind in "biu" else float(value)}
        if is_array(value):
            found = histogram(value)
            cells = {key: self._wandb.Histogram(np_histogram=(found.counts, found.edges))}
            return cells | ({f"{key}/not_finite": found.others} if found.others else {})
        if value.dtype.kind in "US":
            return {key: str(value)} if value.ndim == 0 else {key: value.tolist()}
        self._unheld.add(key, value)
        return {}

    def _folder(self, wandb: Any) -> pathlib.Path:
        if self._init.get("dir") is None:
            return pathlib.Path(wandb.setup().settings.wandb_dir)
        return pathlib.Path(wandb.Settings(root_dir=str(self._init["dir"])).wandb_dir)

    def _is_offline(self, wandb: Any) -> bool:
        settings = self._init.get("settings") or {}
        given = settings.get("mode") if isinstance(settings, dict) else settings.mode
        modes = (self._init.get("mode"), given, wandb.setup().settings.mode)
        return next(mode for mode in modes if mode is not None) in ("offline", "dryrun")


def _run_id(name: str) -> str:
    """An id that W&B takes, also in addresses. Different names have different ids."""
    safe = re.sub(r"[^a-zA-Z0-9_-]+", "-", name)[:100].strip("-")
    return safe if safe == name else f"{safe}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _following(run: Any, old: list[pathlib.Path]) -> Callable[[str], int]:
    """Where the events of a key that have no step go on, in a run that is resumed."""
    known: dict[str, int] = {}
    for file in old:
        indices = file.with_name(INDICES)
        known |= json.loads(indices.read_text()) if indices.exists() else {}
    behind = int(run.summary.get(INDEX, -1)) + 1 if run.resumed else 0
    return lambda key: known.get(key, behind)
