"""`MLflowLogger`: runs in an MLflow tracking store, a database on disk by default."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Sequence
from typing import Any

from .._logdict import logdict
from .._optional import need
from ._base import Logger
from ._names import RunInfo, run_exists
from ._rows import Index, rows_of
from ._values import Unheld, images, is_number, whole

METRICS, PARAMS, LENGTH = 1000, 100, 250  # the most that MLflow takes at a time, and in a name
INTERVAL = 1.0  # seconds between two calls for a run: each takes a transaction of the database


@dataclasses.dataclass
class _Run:
    id: str
    index: Index
    is_new: bool
    moment: int = 0  # the time of what was logged last, in milliseconds
    waiting: list[Any] = dataclasses.field(default_factory=list)  # metrics that are not sent yet
    sent: float = -INTERVAL


class MLflowLogger(Logger):
    """Write runs to MLflow: numbers as metrics, the config as parameters.

    The x axis is `step`; other step names are metrics of their own. MLflow has no arrays: keys that
    hold them are named in a warning. It stores infinity as the largest number.

    >>> import jax, lox, tempfile
    >>> from lox.loggers import MLflowLogger
    >>> store = f"sqlite:///{tempfile.mkdtemp()}/mlflow.db"
    >>> with MLflowLogger(store) as logger:
    ...     state = logger.init(jax.random.key(0), name="first", config={"lr": 0.1})
    ...     logger.log(state, lox.logdict({"loss": 0.5}, step=10))
    >>> from mlflow import MlflowClient
    >>> client = MlflowClient(store)
    >>> [run] = client.search_runs([client.get_experiment_by_name("lox").experiment_id])
    >>> run.info.run_name, run.data.metrics, run.data.params
    ('first', {'loss': 0.5}, {'lr': '0.1'})

    Arguments:

    - `tracking_uri`: a database or a server: `"sqlite:///mlflow.db"`, `"http://…"`.
    - `experiment`: the experiment that the runs belong to. Made, if there is none of that name.
    - `tags`: tags for every run.
    - `images`: keys that are images: (height, width), or with 1, 3 or 4 channels as a last axis.
      They are artifacts of the run.
    - `options`: those of `lox.loggers.Logger`.
    """

    def __init__(
        self,
        tracking_uri: str = "sqlite:///mlflow.db",
        experiment: str = "lox",
        tags: dict[str, str] | None = None,
        images: Sequence[str] = (),
        **options: Any,
    ):
        super().__init__(**options)
        self.images = frozenset(images)
        self.tracking_uri, self.experiment, self.tags = tracking_uri, experiment, tags or {}
        self._client: Any = None
        self._experiment_id: str | None = None
        self._unheld = Unheld(type(self).__name__)
        self._names: dict[str, str] = {}

    def open_run(self, info: RunInfo) -> _Run:
        self._connect()
        client = self._client
        old = self._runs_named(info.name)
        if old and self.exists == "error":
            where = f"the experiment {self.experiment!r} of {self.tracking_uri}"
            raise run_exists(type(self).__name__, info.name, where)
        if old and self.exists == "resume":
            run = old[0]
            client.update_run(run.info.run_id, status="RUNNING")
            self._put_params(run.info.run_id, info, run.data.params)
            return _Run(run.info.run_id, Index(self._last_step_of(run.info.run_id)), False)
        for run in old:
            client.delete_run(run.info.run_id)
        tags = {"lox.group": info.group, **self.tags}
        run = client.create_run(self._experiment_id, run_name=info.name, tags=tags)
        self._put_params(run.info.run_id, info, {})
        return _Run(run.info.run_id, Index(), True)

    def write_run(self, run: _Run, logs: logdict) -> None:
        metric = need("mlflow.entities", "mlflow").Metric
        run.moment = max(run.moment + 1, time.time_ns() // 10**6)
        before = None
        for row in rows_of(logs, run.index):
            step = whole(row.x)
            if before is not None and step <= before:
                # Of metrics that agree in everything, the time included, MLflow keeps one.
                run.moment += 1
            before = step
            columns = row.columns()
            if row.x.dtype.kind in "iu":  # else the metric's step is not exact
                del columns[row.axis]
            for key, value in columns.items():
                if key in self.images:
                    for name, x in images(key, value):
                        x = x[..., 0] if x.shape[-1] == 1 else x
                        self._client.log_image(run.id, x, key=self._name(name), step=step)
                elif is_number(value):
                    number = metric(self._name(key), float(value), run.moment, step)
                    run.waiting.append(number)
                else:
                    self._unheld.add(key, value)
        if len(run.waiting) >= METRICS or time.monotonic() - run.sent >= INTERVAL:
            self.flush_run(run)
        self._unheld.warn()

    def flush_run(self, run: _Run) -> None:
        batch, run.waiting = run.waiting, []
        for start in range(0, len(batch), METRICS):
            self._client.log_batch(run.id, metrics=batch[start : start + METRICS])
        run.sent = time.monotonic()

    def close_run(self, run: _Run) -> None:
        self.flush_run(run)
        self._client.set_terminated(run.id)

    def undo_run(self, run: _Run) -> None:
        self.close_run(run)
        if run.is_new:
            self._client.delete_run(run.id)

    def _connect(self) -> None:
        if self._client is not None:
            return
        if self.tracking_uri.startswith("sqlite"):
            need("sqlalchemy", "mlflow")
            need("alembic", "mlflow")
        # It says at length that it makes the tables of a new database.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
        _check_reachable(self.tracking_uri)
        client = need("mlflow", "mlflow").MlflowClient(self.tracking_uri)
        found = client.get_experiment_by_name(self.experiment)
        if found is None:
            self._experiment_id = client.create_experiment(self.experiment)
        else:
            self._experiment_id = found.experiment_id
        self._client = client

    def _runs_named(self, name: str) -> list[Any]:
        """The runs of this name, the newest first."""
        quoted = name.replace("'", "''")
        return list(
            self._client.search_runs(
                [self._experiment_id],
                filter_string=f"attributes.run_name = '{quoted}'",
                order_by=["attributes.start_time DESC"],
            )
        )

    def _put_params(self, run_id: str, info: RunInfo, there: dict[str, str]) -> None:
        """The config. A parameter that is there stays as it is: MLflow lets none be changed."""
        param = need("mlflow.entities", "mlflow").Param
        new = {self._name(k): _text(v) for k, v in _flat(info.config)}
        params = [param(k, v) for k, v in new.items() if k not in there]
        for start in range(0, len(params), PARAMS):
            self._client.log_batch(run_id, params=params[start : start + PARAMS])
        changed = [k for k, v in new.items() if there.get(k, v) != v]
        if changed:
            warnings.warn(
                f"run {info.name!r} keeps the parameters it began with: MLflow does not change "
                + ", ".join(f"{k} from {there[k]} to {new[k]}" for k in changed),
                RuntimeWarning,
                stacklevel=2,
            )

    def _last_step_of(self, run_id: str) -> Any:
        def restore(key: str) -> int:
            history = self._client.get_metric_history(run_id, self._name(key))
            return max((m.step + 1 for m in history), default=0)

        return restore

    def _name(self, key: str) -> str:
        """A key as MLflow takes names. Two keys never get the same."""
        name = self._names.get(key)
        if name is None:
            name = re.sub(r"[^\w. /-]", "_", key, flags=re.ASCII)[:LENGTH]
            name = "/".join(part if part.strip(".") else "_" for part in name.split("/"))
            start, tries = name[: LENGTH - 8], 1
            while name in self._names.values():
                tries += 1
                name = f"{start}_{tries}"
            self._names[key] = name
        return name


def _check_reachable(uri: str) -> None:
    """MLflow would go on trying for minutes."""
    if not uri.startswith("http"):
        return
    try:
        urllib.request.urlopen(uri, timeout=10).close()
    except urllib.error.HTTPError:
        pass  # it answers
    except OSError as error:
        raise ConnectionError(
            f"the MLflow server {uri} can't be reached: {error}. Start it with `mlflow server`, or "
            "write to a file: MLflowLogger('sqlite:///mlflow.db')."
        ) from error


def _flat(config: dict[str, Any], prefix: str = "") -> Any:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=repr)
