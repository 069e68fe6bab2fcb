"""Trackers: what was logged is what the backend's own reader sees."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import lox
import lox.wandb
from lox.loggers import Logger, RunExists
from lox.loggers._csv import CSVLogger
from lox.loggers._mlflow import MLflowLogger
from lox.loggers._rows import Index, Merger, rows_of
from lox.loggers._tensorboard import TensorBoardLogger
from lox.loggers._values import safe_name
from lox.loggers._wandb import WandbLogger

pytestmark = [
    # MLflow's own use of SQLAlchemy.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning:sqlite3"),
]

SRC = pathlib.Path(lox.__file__).parents[1]
Events = dict[str, list[tuple[float, float]]]  # of each key: the x axis and the value


# --- the readers ---------------------------------------------------------------------------------


def csv_rows(folder: pathlib.Path, name: str) -> list[dict[str, str]]:
    with open(folder / f"{safe_name(name)}.csv", newline="") as file:
        return list(csv.DictReader(file))


def csv_events(folder: pathlib.Path, name: str) -> Events:
    steps, events = ("step", "t", "index"), {}
    for row in csv_rows(folder, name):
        x = next(float(row[s]) for s in steps if row.get(s))
        for key, cell in row.items():
            if cell and key not in steps:
                events.setdefault(key, []).append((x, float(cell)))
    return events


def tensorboard_reader(folder: pathlib.Path, name: str) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / safe_name(name)), size_guidance={"scalars": 0}).Reload()


def tensorboard_events(folder: pathlib.Path, name: str) -> Events:
    reader = tensorboard_reader(folder, name)
    tags = reader.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in tags}


def wandb_file(file: pathlib.Path) -> list[Any]:
    """The records of a file, which is in LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, parts, records = file.read_bytes(), 7, [], []
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        _, size, kind = struct.unpack("<IHB", data[position : position + 7])
        if left < 7 or kind == 0:
            position += left
            continue
        parts.append(data[position + 7 : position + 7 + size])
        position += 7 + size
        if kind in (1, 4):  # whole, or the last part
            records.append(Record.FromString(b"".join(parts)))
            parts = []
    return records


def wandb_records(folder: pathlib.Path, name: str) -> list[Any]:
    """All records of a run, in order."""
    found = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        until = time.monotonic() + 20  # W&B's service ends the file a moment after the run
        while not any(r.HasField("exit") for r in wandb_file(file)):
            assert time.monotonic() < until, f"{file.name} was not ended"
            time.sleep(0.01)
        records = wandb_file(file)
        if any(r.HasField("run") and r.run.display_name == name for r in records):
            found += records
    return found


def wandb_rows(folder: pathlib.Path, name: str) -> list[dict[str, Any]]:
    return [
        {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in r.history.item}
        for r in wandb_records(folder, name)
        if r.HasField("history")
    ]


def wandb_axes(folder: pathlib.Path, name: str) -> dict[str, str]:
    records = wandb_records(folder, name)
    return {r.metric.name: r.metric.step_metric for r in records if r.HasField("metric")}


def wandb_events(folder: pathlib.Path, name: str) -> Events:
    axes, events = wandb_axes(folder, name), {}
    for row in wandb_rows(folder, name):
        for key, value in row.items():
            if key in axes and isinstance(value, int | float):
                events.setdefault(key, []).append((row[axes[key]], value))
    return events


def mlflow_run(folder: pathlib.Path, name: str) -> tuple[Any, Any]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("lox").experiment_id
    [run] = client.search_runs([experiment], f"attributes.run_name = '{name}'")
    return client, run


def mlflow_events(folder: pathlib.Path, name: str) -> Events:
    client, run = mlflow_run(folder, name)
    history = {k: client.get_metric_history(run.info.run_id, k) for k in run.data.metrics}
    # In the order they were logged in: MLflow's own is that of its table.
    return {
        k: [(m.step, m.value) for m in sorted(metrics, key=lambda m: m.timestamp)]
        for k, metrics in history.items()
    }


QUIET = {"silent": True, "x_disable_stats": True}
MAKE: dict[str, Callable[..., Logger]] = {
    "csv": CSVLogger,
    "tensorboard": TensorBoardLogger,
    "wandb": lambda folder, **o: WandbLogger(
        "p", mode="offline", dir=str(folder), settings=QUIET, **o
    ),
    "mlflow": lambda folder, **o: MLflowLogger(f"sqlite:///{folder}/mlflow.db", **o),
}
READ: dict[str, Callable[[pathlib.Path, str], Events]] = {
    "csv": csv_events,
    "tensorboard": tensorboard_events,
    "wandb": wandb_events,
    "mlflow": mlflow_events,
}


class Tracker:
    """One backend and its folder, for all tests: starting one takes seconds."""

    def __init__(self, kind: str, folder: pathlib.Path):
        self.kind, self.folder = kind, folder

    def logger(self, **options: Any) -> Logger:
        return MAKE[self.kind](self.folder, **options)

    def read(self, name: str) -> Events:
        return READ[self.kind](self.folder, name)

    def logged(self, name: str, *writes: Any, config: Any = None, **options: Any) -> Events:
        with self.logger(**options) as logger:
            state = logger.init(jax.random.key(0), name=name, config=config)
            for logs in writes:
                logger.log(state, logs)
        return self.read(name)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, pathlib.Path]:
    return {kind: tmp_path_factory.mktemp(kind) for kind in MAKE}


@pytest.fixture(scope="module", params=MAKE)
def tracker(request, folders) -> Tracker:
    return Tracker(request.param, folders[request.param])


@pytest.fixture(scope="module")
def wandb_folder(tmp_path_factory) -> pathlib.Path:
    return tmp_path_factory.mktemp("wandb_alone")


def logdict_of(data: dict, **steps: Any) -> lox.logdict:
    arrays = {k: np.asarray(v) for k, v in steps.items()}
    return lox.logdict({k: np.asarray(v) for k, v in data.items()}, **arrays)


def at(step: Any, **values: Any) -> lox.logdict:
    return logdict_of(values, step=step)


# --- rows ----------------------------------------------------------------------------------------


def plain_rows(logs: lox.logdict, index: Index | None = None) -> list[tuple[dict, dict]]:
    rows = rows_of(jax.tree.map(np.asarray, logs), index or Index())
    return [
        ({k: s.tolist() for k, s in r.steps.items()}, {k: v.tolist() for k, v in r.values.items()})
        for r in rows
    ]


def test_keys_at_the_same_step_share_a_row():
    logs = at([0, 1, 2, 3], a=[1, 2, 3, 4]) | at([1, 3], b=[5, 6])
    values = [v for _, v in plain_rows(logs)]
    assert values == [{"a": 1}, {"a": 2, "b": 5}, {"a": 3}, {"a": 4, "b": 6}]


def test_keys_at_different_steps_interleave():
    rows = plain_rows(at([0, 2], a=[1, 2]) | at([1, 3], b=[3, 4]))
    assert [s["step"] for s, _ in rows] == [0, 1, 2, 3]


def test_repeated_steps_are_rows_of_their_own():
    logs = at([4, 4, 1], a=[1, 2, 3]) | at([4, 4], b=[5, 6])
    values = [v for _, v in plain_rows(logs)]
    assert values == [{"a": 1, "b": 5}, {"a": 2, "b": 6}, {"a": 3}]


def test_the_axis_is_step_or_the_first_step_name():
    rows = rows_of(logdict_of(dict(a=[1]), t=[7], step=[3]), Index())
    assert (rows[0].axis, rows[0].x, rows[0].steps["t"]) == ("step", 3, 7)
    rows = rows_of(logdict_of(dict(a=[1]), t=[7], u=[3]), Index())
    assert (rows[0].axis, rows[0].x, rows[0].steps["u"]) == ("t", 7, 3)


def test_other_steps_that_differ_keep_rows_apart():
    logs = logdict_of(dict(a=[1]), step=[3], t=[0]) | logdict_of(dict(b=[1]), step=[3], t=[1])
    assert len(rows_of(logs, Index())) == 2


def test_a_step_that_differs_between_lanes_is_a_column_and_no_axis():
    entries = logdict_of(dict(a=[[1, 2]]), t=[[3, 4]])
    [(steps, _)] = plain_rows(entries)
    assert steps == {"index": 0, "t": [3, 4]}


def test_the_index_runs_for_each_key_and_can_be_restored():
    index = Index({"a": 10}.get)
    logs = lox.logdict({"a": np.arange(2.0)}, step=np.arange(2))
    bare = logs.reduce("append", keep_steps=False)
    [first, second] = plain_rows(bare, index)
    assert (first[0], second[0]) == ({"index": 10}, {"index": 11})
    assert plain_rows(bare, index)[0][0] == {"index": 12}


def test_pytrees_and_complex_numbers_have_a_name_for_each_part():
    tree = {"w": [np.zeros(1), np.ones(1)], "z": np.array([1 + 2j])}
    [(_, values)] = plain_rows(lox.logdict({"p": tree, "q": np.ones(1)}, step=np.zeros(1, int)))
    assert values == {"p/w/0": 0, "p/w/1": 1, "p/z/real": 1, "p/z/imag": 2, "q": 1}


def test_a_key_named_like_a_step_keeps_its_value():
    [row] = rows_of(logdict_of({"step": [5]}, step=[1]), Index())
    assert row.columns() == {"step": 1, "step_": 5}


def test_the_merger_holds_the_last_row_open():
    merger, index = Merger(), Index()
    write = lambda logs: merger.add(rows_of(logs, index))
    assert write(logdict_of(dict(a=[1, 2]), step=[0, 1]))[0].values == {"a": 1}
    assert write(logdict_of(dict(b=[3]), step=[1])) == []
    [row] = write(logdict_of(dict(a=[4]), step=[1]))  # `a` again: another row
    assert row.values == {"a": 2, "b": 3}
    assert [r.values for r in merger.close()] == [{"a": 4}]
    assert merger.close() == []


def test_names_are_safe_and_stay_different():
    names = ["a/b", "a%2Fb", "..", ".", "", " ", "x" * 500, "x" * 501, "ü", "a:b", "a b", "A"]
    safe = [safe_name(n) for n in names]
    assert len(set(safe)) == len(names)
    assert all(s.isascii() and len(s) <= 200 and not set(s) & set('/\\:*?"<>|\0') for s in safe)
    assert not {".", "..", ""} & set(safe)


# --- every tracker -------------------------------------------------------------------------------


def test_numbers_come_back_in_order(tracker):
    events = tracker.logged(
        "numbers", at([0, 10, 20], loss=[3.0, 2.0, 1.5], n=[1, 2, 3]), at(30, loss=-0.25)
    )
    assert events["loss"] == [(0, 3.0), (10, 2.0), (20, 1.5), (30, -0.25)]
    assert events["n"] == [(0, 1), (10, 2), (20, 3)]


def test_steps_may_go_backwards_and_repeat(tracker):
    writes = [at(s, a=float(i)) for i, s in enumerate([5, 3, 3, 9, 0])]
    events = tracker.logged("backwards", *writes, at([3, 3, 1], a=[7.0, 7.0, 7.0]))
    assert events["a"] == [
        *((5, 0), (3, 1), (3, 2), (9, 3), (0, 4)),
        *((3, 7), (3, 7), (1, 7)),
    ]


def test_other_steps_are_kept(tracker):
    logs = lox.logdict({"a": np.array([1.0, 2.0])}, step=np.array([4, 5]), epoch=np.array([0, 1]))
    other = lox.logdict({"b": 3.0}, t=8)
    events = tracker.logged("steps", logs, other)
    assert events["a"] == [(4, 1.0), (5, 2.0)]
    assert events["b"] == [(8, 3.0)]
    if tracker.kind == "wandb":
        rows = wandb_rows(tracker.folder, "steps")
        assert [r.get("epoch") for r in rows] == [0, 1, None]
        assert wandb_axes(tracker.folder, "steps") == {"a": "step", "b": "t"}
    else:
        assert events["epoch"] == [(4, 0), (5, 1)]


def test_events_without_steps_are_counted(tracker):
    events = tracker.logged("bare", {"a": 1.0}, {"a": 2.0, "b": 3.0}, {"a": 4.0})
    assert events["a"] == [(0, 1.0), (1, 2.0), (2, 4.0)]
    assert events["b"] == [(0, 3.0)]


TYPES = [
    *(np.float16, np.float32, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn),
    *(np.int8, np.int32, np.uint8, np.uint32, np.bool_, ml_dtypes.int4),
]


def test_all_types_of_numbers(tracker):
    values = {
        np.dtype(t).name: np.asarray(0.3 if i < 5 else 1).astype(t) for i, t in enumerate(TYPES)
    }
    if tracker.kind == "csv":
        with tracker.logger() as logger:
            logger.log(logger.init(jax.random.key(0), name="types"), at(0, **values))
        [row] = csv_rows(tracker.folder, "types")
        assert row.pop("step") == "0"
        back = {k: row[k] == "True" if k == "bool" else float(row[k]) for k in row}
        assert all(np.asarray(back[k]).astype(v.dtype) == v for k, v in values.items())
        assert row["float32"] == "0.3"
        return
    events = tracker.logged("types", at(0, **values))
    exact = {
        k: [(0, float(np.float32(v)) if tracker.kind == "tensorboard" else float(v))]
        for k, v in values.items()
    }
    assert events == exact


def test_what_is_not_finite(tracker):
    events = tracker.logged("infinite", at([0, 1, 2], a=[math.nan, math.inf, -math.inf]))
    [nan, high, low] = [v for _, v in events["a"]]
    most = sys.float_info.max if tracker.kind == "mlflow" else math.inf
    assert math.isnan(nan)
    assert (high, low) == (most, -most)


def test_a_step_that_is_no_whole_number(tracker):
    logs = lox.logdict({"a": np.array([1.0, 2.0])}, step=np.array([0.5, 1.5]))
    events = tracker.logged("halves", logs)
    if tracker.kind in ("csv", "wandb"):
        assert events["a"] == [(0.5, 1.0), (1.5, 2.0)]
    else:  # the x axis has whole numbers alone
        assert events["a"] == [(0, 1.0), (1, 2.0)]
        assert events["step"] == [(0, 0.5), (1, 1.5)]


def test_eight_seeds_are_eight_runs(tracker):
    def train(key, logger):
        state = logger.init(key, name="seed-{lane}", config={"lr": key_number(key)})

        def body(x, i):
            lox.log({"x": x, "i": i}, step=i)
            return x + 1, None

        run = lambda x: jax.lax.scan(body, x, jnp.arange(10))[0]
        return logger.tap(run, state, every=5)(key_number(key))

    key_number = lambda key: jax.random.key_data(key)[-1].astype(float) % 1024
    keys = jax.random.split(jax.random.key(1), 8)
    with tracker.logger() as logger:
        out = jax.jit(jax.vmap(lambda k: train(k, logger)))(keys)
        out.block_until_ready()
        logger.flush()
    for lane, first in enumerate(out - 10):
        events = tracker.read(f"seed-{lane}")
        assert events["x"] == [(i, first + i) for i in range(10)]
        assert events["i"] == [(i, i) for i in range(10)]


def test_a_spooled_program(tracker):
    def fun(x):
        lox.log({"x": x}, step=3)
        lox.log({"y": 2 * x}, step=3)
        return x

    with tracker.logger() as logger:
        state = logger.init(jax.random.key(0), name="spooled")
        assert logger.spool(fun, state)(1.5) == 1.5
    assert tracker.read("spooled") == {"x": [(3, 1.5)], "y": [(3, 3.0)]}


def test_a_run_that_exists(tracker):
    assert tracker.logged("again", {"a": 1.0})["a"] == [(0, 1.0)]
    with pytest.raises(RunExists, match=r"run 'again' exists.*exists='resume'"):
        tracker.logged("again", {"a": 2.0})
    assert tracker.logged("again", {"a": 2.0}, exists="overwrite")["a"] == [(0, 2.0)]
    resumed = tracker.logged("again", {"a": 3.0}, at(9, b=4.0), exists="resume")
    assert resumed["a"] == [(0, 2.0), (1, 3.0)]
    resumed = tracker.logged("again", {"a": 5.0, "c": 1.0}, exists="resume")
    assert resumed == {"a": [(0, 2.0), (1, 3.0), (2, 5.0)], "b": [(9, 4.0)], "c": [(0, 1.0)]}


def test_resume_begins_a_run_that_is_not_there(tracker):
    assert tracker.logged("fresh", at(1, a=1.0), exists="resume") == {"a": [(1, 1.0)]}


def test_a_run_that_is_taken_back_leaves_nothing(tracker):
    with tracker.logger() as logger:
        logger.init(jax.random.key(0), name="undone")
        logger.host_undo(["undone"])
    assert tracker.logged("undone", at(1, a=1.0)) == {"a": [(1, 1.0)]}


def test_the_config_is_kept(tracker):
    config = {"lr": jnp.float32(0.1), "model": {"depth": 2}, "name": "a|b"}
    tracker.logged("config", at(0, a=1.0), config=config)
    plain = {"lr": 0.1, "model": {"depth": 2}, "name": "a|b"}
    if tracker.kind == "csv":
        assert json.loads((tracker.folder / "config.json").read_text()) == plain
    elif tracker.kind == "tensorboard":
        [event] = tensorboard_reader(tracker.folder, "config").Tensors("config")
        [text] = event.tensor_proto.string_val
        assert b"| lr | 0.1 |" in text
        assert b'| name | "a\\|b" |' in text
    elif tracker.kind == "wandb":
        [run] = [r.run for r in wandb_records(tracker.folder, "config") if r.HasField("run")][:1]
        kept = {u.key: json.loads(u.value_json) for u in run.config.update}
        assert {k: kept[k] for k in plain} == plain
    else:
        _, run = mlflow_run(tracker.folder, "config")
        assert run.data.params == {"lr": "0.1", "model/depth": "2", "name": "a|b"}


def test_names_of_runs_and_keys_may_be_anything(tracker):
    key = "a, b=*/ü.. " + "x" * 300
    events = tracker.logged("sweep/1 ü", {key: 1.0, "b": 2.0})
    assert events.pop("b") == [(0, 2.0)]
    if tracker.kind == "wandb":
        [row] = wandb_rows(tracker.folder, "sweep/1 ü")
        assert row[key] == 1.0
    else:
        [(name, values)] = events.items()
        assert values == [(0, 1.0)]
        assert name == key or tracker.kind == "mlflow"


# --- what some trackers have ---------------------------------------------------------------------

PICTURE = np.linspace(0, 1, 2 * 3 * 3).reshape(2, 3, 3).astype(np.float32)


def test_tensorboard_has_histograms_and_images(tmp_path):
    from PIL import Image

    tracker = Tracker("tensorboard", tmp_path)
    values = np.array([1.0, 2.0, 2.0, 5.0, np.nan], np.float32)
    logs = {"h": values, "picture": PICTURE, "gray": PICTURE[..., 0], "two": PICTURE[None][[0, 0]]}
    events = tracker.logged("a", at(7, **logs), images=["picture", "gray", "two"])
    reader = tensorboard_reader(tmp_path, "a")
    [event] = reader.Histograms("h")
    found = event.histogram_value
    assert (event.step, found.min, found.max, found.num, found.sum) == (7, 1, 5, 4, 10)
    assert (found.sum_squares, sum(found.bucket)) == (34, 4)
    assert found.bucket_limit[-1] == 5
    assert events["h/not_finite"] == [(7, 1)]
    assert reader.Tags()["images"] == ["picture", "gray", "two/0", "two/1"]
    pixels = np.round(PICTURE * 255).astype(np.uint8)
    for tag, want in (("picture", pixels), ("gray", pixels[..., 0]), ("two/1", pixels)):
        [shown] = reader.Images(tag)
        image = np.asarray(Image.open(io.BytesIO(shown.encoded_image_string)))
        np.testing.assert_array_equal(image, want)


def test_wandb_has_histograms_and_images(wandb_folder):
    from PIL import Image

    tracker = Tracker("wandb", wandb_folder)
    values = np.array([1.0, 2.0, 2.0, 5.0, np.inf])
    tracker.logged("a", at(7, h=values, picture=PICTURE), images=["picture"])
    [row] = wandb_rows(wandb_folder, "a")
    assert row["h/_type"] == "histogram"
    assert (sum(row["h/values"]), row["h/bins"][0], row["h/bins"][-1]) == (4, 1, 5)
    assert (row["h/not_finite"], row["step"]) == (1, 7)
    [file] = wandb_folder.glob("wandb/offline-run-*/files/media/images/*.png")
    np.testing.assert_array_equal(np.asarray(Image.open(file)), np.round(PICTURE * 255))


def test_mlflow_has_images(tmp_path, monkeypatch):
    from PIL import Image

    monkeypatch.chdir(tmp_path)  # which is where MLflow keeps artifacts
    Tracker("mlflow", tmp_path).logged("a", at(7, picture=PICTURE), images=["picture"])
    client, run = mlflow_run(tmp_path, "a")
    files = [f.path for f in client.list_artifacts(run.info.run_id, "images")]
    [name] = [f for f in files if f.endswith(".png")]
    assert name.startswith("images/picture+step+7+")
    image = np.asarray(Image.open(client.download_artifacts(run.info.run_id, name)))
    np.testing.assert_array_equal(image, np.round(PICTURE * 255))


def test_mlflow_server_that_is_down_is_named():
    logger = MLflowLogger("http://127.0.0.1:9")
    with pytest.raises(ConnectionError, match="can't be reached"):
        logger.init(jax.random.key(0))


@pytest.mark.parametrize("kind", ["csv", "tensorboard"])
def test_a_folder_that_is_removed_is_noticed(kind, tmp_path):
    logger = Tracker(kind, tmp_path / "runs").logger()
    state = logger.init(jax.random.key(0), name="a")
    logger.log(state, {"x": 1.0})
    logger.flush()
    shutil.rmtree(tmp_path / "runs")
    logger.log(state, {"x": 2.0})
    with pytest.raises(FileNotFoundError, match="was removed while the run was being written"):
        logger.close()


@pytest.mark.parametrize("kind", ["csv", "tensorboard", "mlflow"])
def test_a_run_named_by_a_key_that_is_taken_gets_a_number(kind, tmp_path):
    for value in (1.0, 2.0):
        with Tracker(kind, tmp_path).logger() as logger:
            logger.log(logger.init(jax.random.key(3)), {"x": value})
            [name] = logger._roster.handles
    assert name == "00000000-00000003~2"


def test_wandb_has_a_run_for_each_seed_in_one_group(wandb_folder):
    init = lambda key: logger.init(key, name="seed/{lane}").id
    with Tracker("wandb", wandb_folder).logger(tags=["x"], config={"shared": 1}) as logger:
        jax.vmap(init)(jax.random.split(jax.random.key(0), 3))
    runs = [
        next(r.run for r in wandb_records(wandb_folder, f"seed/{i}") if r.HasField("run"))
        for i in range(3)
    ]
    assert {r.run_group for r in runs} == {"seed"}
    assert len({r.run_id for r in runs}) == 3
    assert [u.value_json for r in runs for u in r.config.update if u.key == "shared"] == ["1"] * 3


def test_wandb_rows_are_merged_and_each_is_ahead_of_the_last(wandb_folder):
    tracker = Tracker("wandb", wandb_folder)
    tracker.logged("merged", at(3, a=1.0), at(3, b=2.0), at(1, a=3.0))
    tracker.logged("merged", at(1, a=4.0), at(0, a=5.0), exists="resume")
    rows = wandb_rows(wandb_folder, "merged")
    assert [(r["step"], r["a"], r.get("b")) for r in rows] == [
        *((3, 1, 2), (1, 3, None), (1, 4, None), (0, 5, None))
    ]
    own = [r["_step"] for r in rows]
    assert own == sorted(set(own)), "W&B drops rows at which its own step does not rise"


def test_wandb_in_three_functions(wandb_folder):
    options = dict(project="p", mode="offline", dir=str(wandb_folder), settings=QUIET)

    def train(key, x, name, finish=lambda run: None):
        run = lox.wandb.init(key, name=name + "-{lane}", config={"x": x}, **options)
        lox.wandb.log(run, lox.logdict({"x": x}, step=4), prefix="a/")
        finish(run)
        return run

    keys, x = jax.random.split(jax.random.key(0), 2), jnp.arange(2.0)
    runs = jax.jit(jax.vmap(lambda k, x: train(k, x, "outside")))(keys, x)
    jax.vmap(lox.wandb.log)(runs, {"last": x + 5})
    inside = jax.jit(jax.vmap(lambda k, x: train(k, x, "inside", lox.wandb.finish)))(keys, x)
    assert inside.logger is runs.logger
    lox.wandb.finish(runs)
    for lane in range(2):
        assert wandb_events(wandb_folder, f"inside-{lane}") == {"a/x": [(4, lane)]}
        events = wandb_events(wandb_folder, f"outside-{lane}")
        assert events == {"a/x": [(4, lane)], "last": [(0, 5.0 + lane)]}
    runs.logger.close()


@pytest.mark.parametrize("name", ["name", "id", "resume", "reinit"])
def test_wandb_names_what_goes_elsewhere(name):
    with pytest.raises(TypeError, match=f"takes no '{name}'. Use "):
        WandbLogger(**{name: "x"})


def test_mlflow_names_once_what_it_can_not_hold(folders):
    folder = folders["mlflow"]
    logger = MAKE["mlflow"](folder)
    state = logger.init(jax.random.key(0), name="arrays")
    logs = [at(step, h=np.zeros(3, np.float32), a=1.0) for step in range(3)]
    named = r"MLflowLogger can't hold 'h' \(float32\[3\]\)"
    with pytest.warns(RuntimeWarning, match=named) as seen:  # noqa: PT031
        for one in logs:
            logger.log(state, one)
        logger.close()
    assert len(seen) == 1
    assert mlflow_events(folder, "arrays") == {"a": [(0, 1.0), (1, 1.0), (2, 1.0)]}
    assert mlflow_run(folder, "arrays")[1].info.status == "FINISHED"
    many = lox.logdict({"a": np.arange(2500.0)}, step=np.arange(2500))
    assert len(Tracker("mlflow", folder).logged("many", many)["a"]) == 2500


def test_csv_holds_arrays_and_new_keys(tmp_path):
    tracker = Tracker("csv", tmp_path)
    array = np.array([[0.1, np.nan], [1e20, -0.0]], np.float32)
    with tracker.logger() as logger:
        state = logger.init(jax.random.key(0), name="a")
        logger.log(state, at([0, 1], a=[1.0, 2.0]))
        assert (tmp_path / "a.csv").read_text() == "step,a\n0,1.0\n1,2.0\n"  # at once
        logger.log(state, at(1, b=array))
        logger.log(state, lox.logdict({"a": 3.0, "c": 1}, step=2, t=5))
        lines = (tmp_path / "a.csv").read_text().splitlines()
        assert lines[0] == "step,t,a,b,c"
        assert lines[1:] == ["0,,1.0,,", lines[2], "2,5,3.0,,1"]
    back = np.array(json.loads(csv_rows(tmp_path, "a")[1]["b"]), np.float32)
    np.testing.assert_array_equal(back, array)
    assert back.tobytes() == array.tobytes()


def test_csv_numbers_read_back_identical(tmp_path):
    bits = np.random.default_rng(0).integers(0, 2**32, 500, np.uint32)
    values = bits.view(np.float32)
    wide = values.astype(np.float64) / 3
    half = (bits >> 16).astype(np.uint16).view(ml_dtypes.bfloat16)
    Tracker("csv", tmp_path).logged("a", at(np.arange(500), v=values, w=wide, h=half))
    rows = csv_rows(tmp_path, "a")
    for key, want in (("v", values), ("w", wide), ("h", half)):
        back = np.array([float(r[key]) for r in rows]).astype(want.dtype)
        np.testing.assert_array_equal(back.astype(float), want.astype(float))


def test_csv_goes_on_behind_the_last_whole_row(tmp_path):
    tracker = Tracker("csv", tmp_path)
    tracker.logged("a", at([0, 1], a=[1.0, 2.0]))
    with open(tmp_path / "a.csv", "a") as file:
        file.write("2,3.")
    assert tracker.logged("a", at(3, a=4.0), exists="resume")["a"] == [(0, 1), (1, 2), (3, 4)]


def test_csv_that_can_not_be_written_keeps_what_it_has(tmp_path, monkeypatch):
    logger = CSVLogger(tmp_path)
    state = logger.init(jax.random.key(0), name="a")
    logger.log(state, at(0, a=1.0))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    logger.log(state, at(1, a=2.0, b=1.0))  # a new column
    with pytest.raises(OSError, match="No space left"):
        logger.flush()
    monkeypatch.undo()
    logger.log(state, at(2, a=3.0))
    logger.close()
    assert (0, 1.0) in csv_events(tmp_path, "a")["a"]
    assert (2, 3.0) in csv_events(tmp_path, "a")["a"]


# --- packages ------------------------------------------------------------------------------------

PACKAGES = ("tensorboard", "wandb", "mlflow", "sqlalchemy", "alembic", "PIL", "pandas")


def test_importing_lox_imports_no_tracker():
    code = (
        "import sys, lox, lox.loggers, lox.wandb, lox.loggers._csv, lox.loggers._tensorboard,"
        f"lox.loggers._mlflow; print([p for p in {PACKAGES} if p in sys.modules])"
    )
    out = python(code)
    assert out == "[]"


def python(code: str, *args: str) -> str:
    run = [sys.executable, "-c", code, *args]
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    out = subprocess.run(run, capture_output=True, text=True, env=env, timeout=120)
    assert out.returncode == 0, out.stderr
    return out.stdout.strip()


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_named_with_its_command(kind, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, kind, None)
    logger = MAKE[kind](tmp_path)
    with pytest.raises(ImportError, match=rf'pip install "jaxlox\[{kind}\]"'):
        logger.init(jax.random.key(0))


def test_all_is_there_when_nobody_closes(tmp_path):
    """A program that just ends. W&B ends its own runs then, and must not do so before."""
    code = f"""
import pathlib, sys, jax, lox
from lox.loggers._wandb import WandbLogger
from lox.loggers._tensorboard import TensorBoardLogger
folder = pathlib.Path(sys.argv[1])
wandb = WandbLogger("p", mode="offline", dir=folder / "w", settings={QUIET})
for logger in (wandb, TensorBoardLogger(folder / "t")):
    state = logger.init(jax.random.key(0), name="a")
    for i in range(100):
        logger.log(state, lox.logdict({{"i": i}}, step=i))
"""
    python(code, str(tmp_path))
    every = [(i, i) for i in range(100)]
    assert wandb_events(tmp_path / "w", "a")["i"] == every
    assert tensorboard_events(tmp_path / "t", "a")["i"] == every


# --- trackers that can't keep up -----------------------------------------------------------------


class Gated(Logger):
    """A backend that takes nothing until it is let to."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.gate, self.busy, self.written = threading.Event(), threading.Event(), []

    def open_run(self, info: Any) -> str:
        return info.name

    def write_run(self, run: str, logs: lox.logdict) -> None:
        self.busy.set()
        self.gate.wait(20)
        self.written += logs["i"].tolist()


def fill(logger: Gated, count: int) -> None:
    state = logger.init(jax.random.key(0), name="a")
    for i in range(count):
        logger.log(state, {"i": i})
        logger.busy.wait(20)  # the first is in the backend, the others wait


def test_the_oldest_are_dropped():
    logger = Gated(overflow="drop_oldest", capacity=4)
    fill(logger, 11)
    assert logger.dropped == 6
    logger.gate.set()
    with pytest.warns(RuntimeWarning, match="Gated gave up 6 writes.*drop_oldest"):
        logger.close()
    assert logger.written == [0, 7, 8, 9, 10]


def test_every_second_is_dropped():
    logger = Gated(overflow="decimate", capacity=4)
    fill(logger, 41)
    logger.gate.set()
    with pytest.warns(RuntimeWarning, match="decimate"):
        logger.close()
    assert logger.written[0] == 0
    assert logger.written == sorted(set(logger.written))
    assert len(logger.written) <= 5
    assert logger.dropped + len(logger.written) == 41


def test_the_program_waits():
    logger = Gated(overflow="block", capacity=4)
    timer = threading.Timer(0.3, logger.gate.set)
    timer.start()
    since = time.monotonic()
    fill(logger, 20)
    assert time.monotonic() - since > 0.25
    logger.close()
    assert logger.written == list(range(20))
    assert logger.dropped == 0


def test_a_tracker_that_hangs_does_not_stop_the_program():
    logger = Gated(overflow="block", capacity=2, timeout=0.2)
    since = time.monotonic()
    fill(logger, 10)
    with pytest.warns(RuntimeWarning, match="gave up"), pytest.raises(TimeoutError, match="Gated"):
        logger.close()
    assert time.monotonic() - since < 5
    assert logger.dropped == 10
    logger.gate.set()


def test_a_tracker_that_is_down_does_not_stop_the_program(tmp_path):
    class Down(TensorBoardLogger):
        def write_run(self, run, logs):
            raise ConnectionError("no route to host")

    logger = Down(tmp_path)
    state = logger.init(jax.random.key(0), name="a")

    def fun(x):
        lox.log({"x": x})
        return x + 1

    assert jax.jit(logger.tap(fun, state))(1.0) == 2.0
    with pytest.raises(ConnectionError, match="no route to host") as error:
        logger.close()
    assert "Down could not write 'x'" in "".join(error.value.__notes__)
