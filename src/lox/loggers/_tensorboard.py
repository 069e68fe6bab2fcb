"""`TensorBoardLogger`: event files that TensorBoard shows, one folder for each run."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import pathlib
import socket
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from _loxio import check_there

from .._logdict import logdict
from .._optional import need
from ._base import Logger
from ._names import RunInfo, run_exists
from ._rows import Index, Row, rows_of
from ._values import Unheld, histogram, images, is_array, is_number, safe_name, whole

PATTERN = "events.out.tfevents.*"


@dataclasses.dataclass
class _Run:
    file: Any
    records: Any  # tensorboard's writer of records, with their checksums
    index: Index


class TensorBoardLogger(Logger):
    """Write runs as TensorBoard's event files: `tensorboard --logdir runs` shows them.

    Numbers become scalars (which TensorBoard holds as float32), arrays histograms of their values,
    and the keys in `images` images. The x axis is `step`; other step names are scalars too.

    >>> import jax, lox, pathlib, tempfile
    >>> from lox.loggers import TensorBoardLogger
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> with TensorBoardLogger(folder) as logger:
    ...     state = logger.init(jax.random.key(0), name="first", config={"lr": 0.1})
    ...     logger.log(state, lox.logdict({"loss": 0.5}, step=10))
    >>> len(list((folder / "first").glob("events.out.tfevents.*")))
    1

    Arguments:

    - `path`: the folder that the folders of the runs are in.
    - `images`: keys that are images: (height, width), or with 1, 3 or 4 channels as a last axis.
    - `options`: those of `lox.loggers.Logger`.
    """

    def __init__(
        self, path: str | os.PathLike = "./runs", images: Sequence[str] = (), **options: Any
    ):
        super().__init__(**options)
        self.path, self.images = pathlib.Path(path), frozenset(images)
        self._unheld = Unheld(type(self).__name__)

    def open_run(self, info: RunInfo) -> _Run:
        writer = need("tensorboard.summary.writer.record_writer", "tensorboard")
        folder = self.path / safe_name(info.name)
        old = sorted(folder.glob(PATTERN))
        if old and self.exists == "error":
            raise run_exists(type(self).__name__, info.name, str(self.path))
        if self.exists == "overwrite":
            for file in old:
                file.unlink()
            old = []
        folder.mkdir(parents=True, exist_ok=True)
        # Not tensorboard's EventFileWriter: that has a thread for each run, this logger has one.
        file = _new_file(folder)
        run = _Run(file, writer.RecordWriter(file), Index(_last_steps(old) if old else None))
        self._put(run, file_version="brain.Event:2")
        if info.config:
            self._put(run, step=0, summary=_config(info.config))
        file.flush()
        return run

    def write_run(self, run: _Run, logs: logdict) -> None:
        summary = _protos().summary_pb2.Summary
        check_there(run.file.fileno(), run.file.name)
        for row in rows_of(logs, run.index):
            self._put(run, step=whole(row.x), summary=summary(value=self._values(row)))
        run.file.flush()
        self._unheld.warn()

    def close_run(self, run: _Run) -> None:
        with run.file:
            check_there(run.file.fileno(), run.file.name)

    def undo_run(self, run: _Run) -> None:
        run.file.close()
        pathlib.Path(run.file.name).unlink()

    def flush_run(self, run: _Run) -> None:
        check_there(run.file.fileno(), run.file.name)
        run.file.flush()
        os.fsync(run.file.fileno())

    def _put(self, run: _Run, **event: Any) -> None:
        record = _protos().event_pb2.Event(wall_time=time.time(), **event)
        run.records.write(record.SerializeToString())

    def _values(self, row: Row) -> list[Any]:
        new = _protos().summary_pb2.Summary.Value
        x_is_exact = row.x.dtype.kind in "iu"
        columns = row.columns()
        if x_is_exact:
            del columns[row.axis]
        out = []
        for key, value in columns.items():
            if key in self.images:
                pictures = images(key, value)
                out += [new(tag=tag, image=_image(x)) for tag, x in pictures]
            elif is_number(value):
                out.append(new(tag=key, simple_value=float(value)))
            elif is_array(value):
                proto, others = _histogram(value)
                out.append(new(tag=key, histo=proto))
                if others:
                    out.append(new(tag=f"{key}/not_finite", simple_value=others))
            else:
                self._unheld.add(key, value)
        return out


@functools.cache
def _protos() -> Any:
    for name in ("event", "summary", "tensor", "types"):
        need(f"tensorboard.compat.proto.{name}_pb2", "tensorboard")
    return need("tensorboard.compat.proto", "tensorboard")


def _new_file(folder: pathlib.Path) -> Any:
    host, process, moment = socket.gethostname(), os.getpid(), time.time_ns()
    # TensorBoard reads the files of a folder in the order of their names.
    seconds, rest = divmod(moment, 10**9)
    name = f"events.out.tfevents.{seconds:010d}.{host}.{process}.{rest:09d}"
    return io.BufferedWriter(io.FileIO(folder / name, "x"))


def _config(config: dict[str, Any]) -> Any:
    """A text for the tab of texts: a table in Markdown."""
    pb = _protos()
    cells = [(k, json.dumps(v, default=repr).replace("|", "\\|")) for k, v in config.items()]
    table = "\n".join(["| | |", "| --- | --- |", *(f"| {k} | {v} |" for k, v in cells)])
    plugin = pb.summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
    metadata = pb.summary_pb2.SummaryMetadata(plugin_data=plugin)
    text = pb.tensor_pb2.TensorProto(dtype=pb.types_pb2.DT_STRING, string_val=[table.encode()])
    value = pb.summary_pb2.Summary.Value(tag="config", metadata=metadata, tensor=text)
    return pb.summary_pb2.Summary(value=[value])


def _histogram(x: np.ndarray) -> tuple[Any, int]:
    found = histogram(x)
    values = found.values if found.values.size else np.zeros(1)
    with np.errstate(over="ignore"):
        proto = _protos().summary_pb2.HistogramProto(
            min=values.min(),
            max=values.max(),
            num=found.values.size,
            sum=found.values.sum(),
            sum_squares=np.square(found.values).sum(),
            bucket_limit=found.edges[1:],
            bucket=found.counts,
        )
    return proto, found.others


def _image(x: np.ndarray) -> Any:
    from_array = need("PIL.Image", "tensorboard").fromarray
    height, width, channels = x.shape
    file = io.BytesIO()
    from_array(x[..., 0] if channels == 1 else x).save(file, format="PNG")
    return _protos().summary_pb2.Summary.Image(
        height=height, width=width, colorspace=channels, encoded_image_string=file.getvalue()
    )


def _last_steps(files: list[pathlib.Path]) -> Any:
    """Where the events of a key go on in a run that is resumed: read when first asked for."""
    found: dict[str, int] = {}
    waiting = list(files)

    def restore(key: str) -> int:
        loader = need("tensorboard.backend.event_processing.event_file_loader", "tensorboard")
        while waiting:
            for event in loader.RawEventFileLoader(str(waiting.pop())).Load():
                event = _protos().event_pb2.Event.FromString(event)
                for value in event.summary.value:
                    found[value.tag] = max(found.get(value.tag, 0), event.step + 1)
        return found.get(key, 0)

    return restore
