"""The laws of saved runs: what is logged is read back, bit by bit, in every form a run can have."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from typing import NamedTuple
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import lox
from lox.store import compact, verify

KEY = jax.random.key(0)
FORMS = ["open", "crashed", "compacted", "closed", "kept", "resumed"]


# --- the oracle ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Write:
    """One call of `logger.log`. `rows`: do values and steps have a leading axis over events?"""

    data: dict
    steps: dict = dataclasses.field(default_factory=dict)
    rows: bool = False

    def logs(self):
        logs = lox.logdict(self.data, **self.steps)
        assert all(layout.events == self.rows for layout in logs.layouts.values())
        return logs


def stacked(writes):
    """What writes come to: for each key its values and its steps, stacked over events."""
    pieces = {}
    for w in writes:
        lead = np.asarray if w.rows else lambda x: np.asarray(x)[None]
        for key, value in w.data.items():
            pieces.setdefault(key, []).append(jax.tree.map(lead, (value, w.steps)))
    join = lambda *xs: np.concatenate(xs)
    found = {key: jax.tree.map(join, *of_key) for key, of_key in pieces.items()}
    return {k: v for k, v in found.items() if len(jax.tree.leaves(v)[0])}


def bits(x):
    x = np.asarray(x)
    return x.dtype, x.shape, x.tobytes()


def assert_holds(logs, want):
    """A logdict holds exactly these keys, values and steps: dtypes, shapes and bits."""
    assert list(logs) == list(want) or set(logs) == set(want)
    steps = logs.steps
    for key, (value, its_steps) in want.items():
        assert jax.tree.structure(logs[key]) == jax.tree.structure(value), key
        for got, x in zip(jax.tree.leaves(logs[key]), jax.tree.leaves(value), strict=True):
            assert bits(got) == bits(x), key
        assert {n for n in steps if key in steps[n]} == set(its_steps), key
        for name, x in its_steps.items():
            assert bits(steps[name][key]) == bits(x), (key, name)
    assert logs.mask == {}


def write_all(logger, writes, name="r"):
    state = logger.init(KEY, name=name, config={"lr": 0.5})
    for w in writes:
        logger.log(state, w.logs())


def in_form(path, form, writes):
    """A folder with the run "r" of these writes, in one of the forms."""
    root = path / "runs"
    logger = lox.SaveLogger(root, compact=form != "kept")
    if form == "resumed":
        write_all(logger, writes[: len(writes) // 2])
        logger.close()
        with lox.SaveLogger(root, exists="resume") as logger:
            write_all(logger, writes[len(writes) // 2 :])
        return root
    write_all(logger, writes)
    if form in ("crashed", "compacted"):  # a copy has no writer
        shutil.copytree(root, path / "copy")
        root = path / "copy"
        if form == "compacted":
            assert [os.path.basename(p) for p, _, _ in compact(root)] == ["r"]
    if form == "open":
        logger.flush()
    else:
        logger.close()
    return root


STATES = dict(open="open", crashed="crashed", compacted="crashed")


# --- what is logged is read back -----------------------------------------------------------------

DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "int4", "uint4"),
]
SHAPES = [(), (0,), (1,), (3,), (2, 3), (2, 0, 1)]
ODD_KEYS = [
    *("a/b", "time", "run", "step", "episode", "time_", "x.list.element", "x", "x.y", "x/0", ""),
    *("lox", "check", "ключ 🔑", "a b\n\t", "'\"\\", "{lane}", "%s", "None", "0"),
    f"lox-xxh3:{0:016x}:{0:010x}",
    f"lox-xxh3:{7:016x}:{8:010x}",
    "k" * 300,
]


class Pair(NamedTuple):
    left: float
    right: float


def random_values(rng, dtype, shape):
    """Any bits that a dtype can have."""
    dtype = jnp.dtype(dtype)
    if dtype.name == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.name in ("int4", "uint4"):
        return (rng.integers(0, 16, shape) - 8 * (dtype.name == "int4")).astype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(rng.bytes(size), dtype).reshape(shape)


def of_all_dtypes():
    rng = np.random.default_rng(0)
    keys = list(itertools.product(DTYPES, SHAPES))
    one = lambda lead: {f"{d}{s}": random_values(rng, d, (*lead, *s)) for d, s in keys}
    single = lambda i: Write(one(()), {"step": np.int32(i)})
    block = Write(one((3,)), {"step": np.arange(2, 5, dtype=np.int32)}, True)
    return [single(0), single(1), block, single(5)]


def of_special_numbers():
    patterns = {
        "float16": [0x7E01, 0xFE00, 0x7C00, 0x8000, 0x0001],
        "bfloat16": [0x7FC1, 0xFFC0, 0x7F80, 0x8000, 0x0001],
        "float32": [0x7FC00001, 0xFFC00000, 0x7F800001, 0xFF800000, 0x80000000, 1],
        "float64": [0x7FF8000000000001, 0x7FF0000000000001, 0xFFF0000000000000, 1 << 63, 1],
    }
    values = {d: np.array(p, f"u{jnp.dtype(d).itemsize}").view(d) for d, p in patterns.items()}
    singles = [Write({d: v[i] for d, v in values.items()}) for i in range(5)]
    return [*singles, Write({f"{d} whole": v for d, v in values.items()})]


def of_trees():
    value = lambda i: {
        "dict": {"b": np.float32(i), "a": [np.int8(i), (np.ones(2) * i, {"c": np.float64(i)})]},
        "tuple": (np.float32(i), None, np.arange(i, i + 3)),
        "list": [np.bool_(i % 2)],
    }
    return [Write(value(i), {"step": np.int64(i)}) for i in range(3)]


def of_odd_keys():
    first = Write({k: np.float32(i) for i, k in enumerate(ODD_KEYS)}, {"step": np.int32(3)})
    arrays = Write({k + "!": np.arange(i, i + 2) for i, k in enumerate(ODD_KEYS)})
    names = [n for n in ODD_KEYS if n not in ("", "step")]
    steps = {n: np.int32(i) for i, n in enumerate(names)}
    return [first, arrays, first, Write({"by odd steps": np.float32(1), "too": 2.5}, steps)]


def of_steps():
    both = lambda i: Write({"a": np.float32(i)}, {"step": np.int32(i), "episode": np.uint8(i // 2)})
    mixed = [Write({"b": i * 1.0}, {"epoch": i / 2}) for i in range(2)]
    rows = Write(
        {"a": np.arange(4, dtype=np.float32)},
        {"step": np.arange(4, dtype=np.int32), "episode": np.zeros(4, np.uint8)},
        True,
    )
    return [both(0), Write({"no step": 1}), *mixed, both(1), rows, Write({"no step": 2}), both(2)]


def of_changing_keys():
    """Which keys a write has changes, and what one lacks is no row of it."""
    names = "abcd"
    return [
        Write({k: np.float32(i) for j, k in enumerate(names) if (i >> j) & 1}, {"step": i})
        for i in range(1, 16)
    ]


def of_no_rows():
    nothing = np.zeros((0, 2), np.float32)
    return [
        Write({"a": nothing, "never": nothing}, {"step": np.zeros(0, np.int32)}, True),
        Write({"a": np.ones((1, 2), np.float32)}, {"step": np.zeros(1, np.int32)}, True),
        Write({"a": nothing}, {"step": np.zeros(0, np.int32)}, True),
    ]


def of_both_byte_orders():
    return [Write({"x": np.array([1.5, -2], order + "f4")}) for order in "<>"]


CASES = dict(
    dtypes=of_all_dtypes,
    special_numbers=of_special_numbers,
    trees=of_trees,
    odd_keys=of_odd_keys,
    steps=of_steps,
    changing_keys=of_changing_keys,
    no_rows=of_no_rows,
    nothing=list,
)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_read_back(tmp_path, case, form):
    writes = CASES[case]()
    want = stacked(writes)
    assert bool(want) == (case != "nothing")
    root = in_form(tmp_path, form, writes)
    [run] = lox.runs(root)
    assert_holds(run.load(), want)
    assert (run.name, run.state, run.config) == ("r", STATES.get(form, "closed"), {"lr": 0.5})
    counts = {key: len(jax.tree.leaves(value)[0]) for key, (value, _) in want.items()}
    assert run.counts == counts
    assert sorted(run.keys) == sorted(want)
    for key in list(want)[:20]:
        assert_holds(run.load(key), {key: want[key]})
    assert [(r.damage, r.torn) for r in verify(root)] == [([], 0)] * (1 + (form == "resumed"))


def test_native_byte_order_is_read_back(tmp_path):
    with lox.SaveLogger(tmp_path) as logger:
        write_all(logger, of_both_byte_orders())
    x = lox.runs(tmp_path)["r"].load()["x"]
    assert x.dtype == np.float32
    assert x.tolist() == [[1.5, -2], [1.5, -2]]


def test_containers_become_dicts_from_path_to_leaf(tmp_path):
    with lox.SaveLogger(tmp_path) as logger:
        state = logger.init(KEY, name="r")
        logger.log(state, {"p": Pair(1.5, np.arange(2)), "in": [Pair(2.5, 3.5)]})
    logs = lox.runs(tmp_path)["r"].load()
    assert logs["p"]["left"].tolist() == [1.5]
    assert logs["p"]["right"].tolist() == [[0, 1]]
    assert logs["in"][0]["right"].tolist() == [3.5]


@pytest.mark.parametrize("rows", [2, 7])
def test_many_row_groups(tmp_path, rows):
    """Compaction cuts long tables; all lanes and rows are found again."""
    keys = jax.random.split(KEY, 3)
    with mock.patch("lox.store._parquet.ROW_GROUP", rows):
        with lox.SaveLogger(tmp_path) as logger:
            states = jax.vmap(lambda k: logger.init(k, name="r{lane}"))(keys)
            for i in range(9):
                logger.log(states, {"x": np.arange(3) * 100 + i, "v": np.full((3, 2), i)})
            alone = jax.tree.map(lambda x: x[1], states)
            logger.log(alone, {"x": -1, "v": np.zeros(2, int)})
    assert pq.ParquetFile(tmp_path / "r0+2" / "0.parquet").num_row_groups > 2
    for lane, run in enumerate(lox.runs(tmp_path)):
        want = [lane * 100 + i for i in range(9)] + [-1] * (lane == 1)
        assert run.load()["x"].tolist() == want
        assert run.load("v")["v"][:9, 1].tolist() == list(range(9))


SCHEMAS = {  # dtype, shape, steps of each key
    "a": ("float32", (), ("step",)),
    "b": ("bfloat16", (2,), ("step",)),
    "c": ("int8", (0,), ()),
    "d": ("complex64", (), ("step", "episode")),
    "e": ("uint64", (1, 2), ("episode", "step")),
}


@st.composite
def one_write(draw):
    names = draw(st.sampled_from(sorted({s for *_, s in SCHEMAS.values()})))
    fitting = [k for k, (*_, s) in SCHEMAS.items() if s == names]
    keys = draw(st.lists(st.sampled_from(fitting), unique=True, min_size=1))
    rows = draw(st.integers(0, 3)) if names and draw(st.booleans()) else None
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    lead = () if rows is None else (rows,)
    data = {k: random_values(rng, SCHEMAS[k][0], (*lead, *SCHEMAS[k][1])) for k in keys}
    # A value of the length of the steps is what tells a row of events.
    return Write(data, {n: rng.integers(0, 99, lead) for n in names}, rows is not None)


@hypothesis.settings(max_examples=20, deadline=None, database=None)
@hypothesis.given(
    st.lists(one_write() | st.sampled_from(["flush", "resume", "compact"]), max_size=12)
)
def test_any_sequence_of_writes(steps):
    with tempfile.TemporaryDirectory() as root:
        logger = lox.SaveLogger(root)
        state = logger.init(KEY, name="r")
        writes = []
        for step in steps:
            if step == "flush":
                logger.flush()
            elif step == "compact":
                made = [path for path, _, _ in compact(root)]
                assert all("0.arrows" not in os.listdir(path) for path in made)
                assert lox.runs(root)["r"].path not in made  # it is being written
            elif step == "resume":
                logger.close()
                logger = lox.SaveLogger(root, exists="resume", compact=len(writes) % 2 == 0)
                state = logger.init(KEY, name="r")
            else:
                logger.log(state, step.logs())
                writes.append(step)
        assert_holds(lox.runs(root)["r"].load(), stacked(writes))
        logger.close()
        assert_holds(lox.runs(root)["r"].load(), stacked(writes))
        list(compact(root))
        assert_holds(lox.runs(root)["r"].load(), stacked(writes))
        assert not any(r.damage or r.torn for r in verify(root))


# --- a key that changes --------------------------------------------------------------------------

WIDER = [
    (np.float32(0.1), np.float64(0.1), "float64"),
    (jnp.bfloat16(0.1), np.float16(0.1), "float32"),
    (np.int8(-3), np.int32(70000), "int32"),
    (np.uint8(200), np.int8(-3), "int16"),
    (np.bool_(True), np.int16(7), "int16"),
    (np.int32(2**31 - 1), np.float32(0.5), "float64"),
    (np.float32(1.5), np.complex64(2j), "complex64"),
]
TOO_WIDE = [
    (np.int64(2**53 + 1), np.float32(0.5)),
    (np.uint64(2**64 - 1), np.int64(-1)),
    (np.int64(2**62 + 1), jnp.bfloat16(1)),
]


@pytest.mark.parametrize("shape", [(), (2,)])
@pytest.mark.parametrize(("first", "second", "dtype"), WIDER)
def test_changed_dtype_is_widened(tmp_path, first, second, dtype, shape):
    writes = [
        Write({"x": np.full(shape, np.asarray(v))}, {"step": 0}) for v in (first, second, first)
    ]
    with lox.SaveLogger(tmp_path) as logger:
        write_all(logger, writes)
    run = lox.runs(tmp_path)["r"]
    x = run.load()["x"]
    assert x.dtype == dtype
    assert [x[i].flat[0] for i in range(3)] == [first, second, first]
    frames = [run.to_pandas()["x"], run.to_xarray()["x"].to_numpy()]
    for column in frames:
        for i, want in enumerate((first, second, first)):
            assert np.asarray(column[i]).flat[0] == want


@pytest.mark.parametrize(("first", "second"), TOO_WIDE)
def test_numbers_never_change_silently(tmp_path, first, second):
    with lox.SaveLogger(tmp_path) as logger:
        write_all(logger, [Write({"x": v, "other": 1.0}) for v in (first, second)])
    run = lox.runs(tmp_path)["r"]
    logs = run.load()
    assert [logs["x"].tolist(), logs["x#2"].tolist()] == [[first], [second]]
    assert logs["other"].tolist() == [1, 1]
    frame = run.to_pandas()
    assert [frame["x"][0], frame["x#2"][1]] == [first, second]


CHANGES = {
    "shape": [Write({"x": 1.0}), Write({"x": np.ones(2)})],
    "rank": [Write({"x": np.ones(2)}), Write({"x": np.ones((1, 2))})],
    "tree": [Write({"x": 1.0}), Write({"x": {"a": 1.0}})],
    "leaves": [Write({"x": {"b": 1.0}}), Write({"x": {"a": 1.0}})],
    "steps": [Write({"x": 1.0}, {"step": 0}), Write({"x": 1.0}, {"episode": 0})],
    "no steps": [Write({"x": 1.0}, {"step": 0}), Write({"x": 1.0})],
    "shape of a step": [Write({"x": 1.0}, {"step": 0}), Write({"x": 1.0}, {"step": np.ones(2)})],
}


@pytest.mark.parametrize("form", ["open", "closed", "resumed"])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_key_has_several_forms(tmp_path, change, form):
    """Rows that don't fit together are apart, and can be sent elsewhere as they were."""
    writes = [dataclasses.replace(w, data={**w.data, "y": 2.0}) for w in CHANGES[change]]
    writes = [Write({"z": 3.0}), *writes, Write({"z": 4.0})]
    run = lox.runs(in_form(tmp_path, form, writes))["r"]
    first, second = CHANGES[change]
    logs = run.load()
    for name, write in (("x", first), ("x#2", second)):
        one = jax.tree.map(lambda x: x[0], logs[name])
        assert jax.tree.structure(one) == jax.tree.structure(write.data["x"])
        for got, want in zip(jax.tree.leaves(one), jax.tree.leaves(write.data["x"]), strict=True):
            np.testing.assert_array_equal(got, want)
        for step, want in write.steps.items():
            np.testing.assert_array_equal(logs.steps[step][name][0], want)
    assert (logs["y"].tolist(), logs["z"].tolist()) in (([2, 2], [3, 4]), ([2], [3, 4]))
    assert set(run.load("x")) == {"x", "x#2"}
    assert set(run.load(["x#2", "z"])) == {"x#2", "z"}
    with pytest.raises(KeyError, match="x#3"):
        run.load("x#3")
    if change in ("shape", "rank"):
        assert {"x", "x#2"} <= set(run.to_pandas().columns)
    with lox.SaveLogger(tmp_path / "again") as logger:
        lox.replay(run, logger)
    sent = lox.runs(tmp_path / "again")["r"].load()
    assert {k: str(v) for k, v in sent.items()} == {k: str(v) for k, v in logs.items()}


@pytest.mark.parametrize("value", ["abc", None, {}, [], b"x", object()])
def test_value_that_is_no_array(tmp_path, value):
    """Named, and what was logged beside it or later is not lost."""
    logger = lox.SaveLogger(tmp_path)
    state = logger.init(KEY, name="r")
    try:
        logger.log(state, {"bad": value})
        logger.flush()
    except TypeError as error:
        assert "'bad'" in "".join([str(error), *getattr(error, "__notes__", ())])  # noqa: PT017
    logger.log(state, {"good": 1.0})
    logger.close()
    assert lox.runs(tmp_path)["r"].load().data == {"good": np.ones(1)}


# --- reading -------------------------------------------------------------------------------------


def test_unknown_key(tmp_path):
    run = lox.runs(in_form(tmp_path, "closed", of_steps()))["r"]
    with pytest.raises(KeyError, match=r"no key 'c'.*a, no step, b"):
        run.load(["a", "c"])
    with pytest.raises(KeyError, match=r"there is no run 'q'.*r"):
        lox.runs(tmp_path / "runs")["q"]


def test_order_of_chosen_keys(tmp_path):
    run = lox.runs(in_form(tmp_path, "closed", of_changing_keys()))["r"]
    assert list(run.load(["c", "a"])) == ["c", "a"]


def test_other_keys_are_not_touched(tmp_path):
    """Damage to one column does not matter to a reader of the others."""
    writes = [Write({"a": float(i), "b": float(i)}, {"step": i}) for i in range(50)]
    root = in_form(tmp_path, "closed", writes)
    file = root / "r" / "0.parquet"
    columns = pq.ParquetFile(file).metadata.row_group(0)
    [b] = [c for c in map(columns.column, range(columns.num_columns)) if c.path_in_schema == "b"]
    data = bytearray(file.read_bytes())
    data[b.data_page_offset + b.total_compressed_size // 2] ^= 1
    file.write_bytes(data)
    run = lox.runs(root)["r"]
    assert_holds(run.load("a"), {"a": stacked(writes)["a"]})
    with pytest.raises(lox.Damaged, match="'b'"):
        run.load("b")
    with pytest.raises(lox.Damaged):
        run.load()
    assert any(r.damage for r in verify(root))


def test_a_run_that_was_found_earlier(tmp_path):
    """It is read as it is now: more rows, closed, resumed or not."""
    logger = lox.SaveLogger(tmp_path)
    state = logger.init(KEY, name="r")
    logger.log(state, {"x": 1.0})
    run = lox.runs(tmp_path)["r"]
    logger.log(state, {"x": 2.0, "y": 1.0})
    assert run.load()["x"].tolist() == [1, 2]
    logger.close()
    assert run.load()["x"].tolist() == [1, 2]
    assert run.counts == {"x": 2, "y": 1}


def test_reading_while_writing(tmp_path):
    """A reader beside the writer sees whole writes only, more and more of them, and no error."""
    logger = lox.SaveLogger(tmp_path, sync_every=0.001)
    state = logger.init(KEY, name="r")
    total, failed, done = 300, [], threading.Event()

    def writer():
        try:
            for i in range(total):
                logger.log(state, lox.logdict({"x": float(i), "v": np.arange(64) * i}, step=i))
            logger.close()
        except BaseException as error:
            failed.append(error)
        done.set()

    thread = threading.Thread(target=writer)
    thread.start()
    seen = [0]
    while not done.is_set() or (seen[-1] < total and not failed):
        ended = done.is_set()
        logs = lox.runs(tmp_path)["r"].load()
        n = len(logs["x"]) if logs else 0
        assert n >= seen[-1]
        if n:
            assert logs["x"].tolist() == list(range(n))
            assert bits(logs["v"]) == bits(np.arange(n)[:, None] * np.arange(64))
            assert logs.step["v"].tolist() == list(range(n))
        seen.append(n)
        assert n == total or not ended
    thread.join()
    assert not failed
    assert len(set(seen)) >= 3  # nothing, some, all


def test_runs_are_listed(tmp_path):
    assert lox.runs(tmp_path / "nothing here") == []
    with lox.SaveLogger(tmp_path) as logger:
        for name in ("ppo-1", "ppo-2", "dqn"):
            logger.init(KEY, name=name, config={"algo": name[:3]})
    runs = lox.runs(tmp_path)
    assert [r.name for r in runs] == ["ppo-1", "ppo-2", "dqn"]  # the oldest first
    assert [r.name for r in runs.select("ppo*")] == ["ppo-1", "ppo-2"]
    assert runs["dqn"].config == {"algo": "dqn"}
    assert [r.rows for r in runs] == [0, 0, 0]
    assert repr(runs[0]) == "Run('ppo-1', closed, 0 rows, keys: )"
    assert [r.name for r in lox.runs(tmp_path / "dqn")] == ["dqn"]  # a single folder


# --- by other programs ---------------------------------------------------------------------------


def test_plain_arrow_reads_our_files(tmp_path):
    writes = [Write({"x": np.float32(i), "v": np.arange(2) + i}, {"step": i}) for i in range(4)]
    root = in_form(tmp_path, "crashed", writes)
    with pa.OSFile(str(root / "r" / "0.arrows")) as file:
        stream = pa.ipc.open_stream(file).read_all()
    list(compact(root))
    parquet = pq.read_table(root / "r" / "0.parquet")
    for table in (stream, parquet):
        assert table.column_names == ["run", "time", "step", "x", "v"]
        assert table["x"].to_pylist() == [0, 1, 2, 3]
        assert table["v"].to_pylist() == [[i, i + 1] for i in range(4)]
        assert table["step"].to_pylist() == [0, 1, 2, 3]
        assert table["run"].to_pylist() == [0] * 4


def of_frames():
    first = [
        Write({"x": np.float32(i / 3), "v": np.arange(3) * i, "half": jnp.bfloat16(i)}, {"step": i})
        for i in range(3)
    ]
    return [
        *first,
        Write({"eval": np.int32(7), "t": {"a": 1.0}}, {"step": 2}),
        Write({"once": True}),
    ]


@pytest.mark.parametrize("form", ["open", "closed", "resumed"])
def test_frames(tmp_path, form):
    run = lox.runs(in_form(tmp_path, form, of_frames()))["r"]
    want = stacked(of_frames())
    x = want["x"][0].tolist()

    table = run.to_arrow()
    assert table["x"].to_pylist() == [*x, None, None]
    assert table["eval"].to_pylist() == [None] * 3 + [7, None]
    assert table["step"].to_pylist() == [0, 1, 2, 2, None]
    assert table["half"].to_pylist() == [0, 1, 2, None, None]
    assert table["time"].to_pylist() == sorted(table["time"].to_pylist())

    frame = run.to_pandas()
    assert len(frame) == 5
    assert frame["x"][:3].tolist() == x
    assert frame["eval"][3] == 7
    assert [v.tolist() for v in frame["v"][:3]] == want["v"][0].tolist()
    assert bool(frame["once"][4]) is True
    assert run.to_pandas("x")["x"].dtype == np.float32
    assert list(run.to_pandas("x").columns) == ["time", "step", "x"]

    frame = run.to_polars()
    assert frame["x"].to_list()[:3] == x
    assert frame["v"].to_list()[:3] == want["v"][0].tolist()
    assert frame["eval"].to_list() == [None] * 3 + [7, None]

    data = run.to_xarray()
    assert bits(data["x"].to_numpy()) == bits(want["x"][0])
    assert bits(data["v"].to_numpy()) == bits(want["v"][0])
    assert data["x"].dims == data["v"].dims[:1]
    assert data["x"].coords["step"].to_numpy().tolist() == [0, 1, 2]
    assert data["eval"].to_numpy().tolist() == [7]
    assert data.attrs == {"lr": 0.5}


def test_frames_keep_keys_and_steps_apart(tmp_path):
    """A key may have the name of a step, of a column of ours, or of a dimension."""
    writes = [
        Write({"step": 5.0, "x": 1.0, "time": 8.0, "event": 9.0}, {"step": 0}),
        Write({"step": 7.0}, {"step": 1}),
        Write({"m": {"a": 1.0}, "ma": 2.0, "m/a": 3.0, "v": np.arange(3.0), "v_0": 4.0}),
    ]
    run = lox.runs(in_form(tmp_path, "closed", writes))["r"]
    tables = [run.to_arrow(), pa.Table.from_pandas(run.to_pandas(["step", "x"]))]
    for table in [*tables, run.to_polars().to_arrow()]:
        numbers = [
            c for c in table.columns if pa.types.is_integer(c.type) or c.type == pa.float64()
        ]
        found = [c.drop_null().to_pylist() for c in numbers]
        assert [0, 1] in found
        assert [5, 7] in found
    data = run.to_xarray()
    values = sorted(float(v) for name in data.data_vars for v in data[name].to_numpy().reshape(-1))
    assert values == sorted([5.0, 7.0, 1.0, 8.0, 9.0, 1.0, 2.0, 3.0, 0.0, 1.0, 2.0, 4.0])


def test_frames_of_an_empty_run(tmp_path):
    run = lox.runs(in_form(tmp_path, "closed", []))["r"]
    assert len(run.to_pandas()) == len(run.to_polars()) == run.to_arrow().num_rows == 0
    assert list(run.to_xarray().data_vars) == []


@pytest.mark.parametrize("rows", [1, 3, 10_000])
@pytest.mark.parametrize(
    "case", ["dtypes", "trees", "odd_keys", "steps", "changing_keys", "nothing"]
)
def test_replay(tmp_path, case, rows):
    writes = CASES[case]()
    run = lox.runs(in_form(tmp_path, "closed", writes))["r"]
    with lox.SaveLogger(tmp_path / "again") as logger:
        lox.replay(run, logger, rows=rows)
    [again] = lox.runs(tmp_path / "again")
    assert (again.name, again.config) == (run.name, run.config)
    assert_holds(again.load(), stacked(writes))


def test_replay_of_many_runs(tmp_path):
    keys = jax.random.split(KEY, 3)
    with lox.SaveLogger(tmp_path / "a") as logger:
        states = jax.vmap(lambda k: logger.init(k, name="{{r}}{lane}"))(keys)
        logger.log(states, {"x": jnp.arange(3.0)})
    with lox.SaveLogger(tmp_path / "b") as logger:
        lox.replay(lox.runs(tmp_path / "a"), logger)
    found = {r.name: r.load()["x"].tolist() for r in lox.runs(tmp_path / "b")}
    assert found == {"{r}0": [0], "{r}1": [1], "{r}2": [2]}


# --- names, and runs that are there already ------------------------------------------------------


def test_names_of_keys_do_not_collide(tmp_path):
    """(1, 23) and (12, 3), old keys and new ones, other kinds of keys."""
    pairs = [(1, 23), (12, 3), (0, 0), (0, 1), (1, 0), (2**32 - 1, 0), (0x10, 0x1)]
    keys = [jax.random.wrap_key_data(np.array(p, np.uint32)) for p in pairs]
    keys += [jax.random.key(0, impl="rbg"), jax.random.key(1, impl="rbg")]
    with lox.SaveLogger(tmp_path) as logger:
        for i, key in enumerate(keys):
            logger.log(logger.init(key), {"i": i})
    runs = lox.runs(tmp_path)
    assert len({r.name for r in runs}) == len(keys)
    assert [r.load()["i"].tolist() for r in runs] == [[i] for i in range(len(keys))]
    old = lox.SaveLogger(tmp_path, exists="resume")
    old.log(old.init(jax.random.PRNGKey(1)), {"i": 99})  # the same words: the same run
    old.close()
    assert lox.runs(tmp_path)[runs[3].name].load()["i"].tolist() == [3, 99]


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_templates(tmp_path, jitted):
    keys = jax.random.split(KEY, 2)
    rates = jnp.array([0.1, 0.25], jnp.float32)
    wrap = jax.jit if jitted else lambda f: f
    with lox.SaveLogger(tmp_path) as logger:
        both = lambda name: wrap(jax.vmap(lambda k, lr: logger.init(k, name, dict(lr=lr, n="x"))))
        both("a{lane}")(keys, rates)
        both("b-{lr}-{n}")(keys, rates)
        both("{key}!")(keys, rates)
        both("same")(keys, rates)
        wrap(jax.vmap(lambda lr: logger.init(KEY, config={"lr": lr})))(rates)
    names = [r.name for r in lox.runs(tmp_path)]
    key = lambda k: "-".join(f"{int(w):08x}" for w in jax.random.key_data(k))
    assert names == [
        *("a0", "a1", "b-0.1-x", "b-0.25-x"),
        *(f"{key(k)}!" for k in keys),
        *("same-0", "same-1", f"{key(KEY)}-0", f"{key(KEY)}-1"),
    ]
    runs = lox.runs(tmp_path)
    assert [r.config for r in runs[:2]] == [dict(lr=0.1, n="x"), dict(lr=0.25, n="x")]
    assert {r.group for r in runs[:2]} == {"a"}


def test_template_that_asks_for_too_much(tmp_path):
    with pytest.raises(ValueError, match=r"'missing'.*\{lr\}"):
        lox.SaveLogger(tmp_path).init(KEY, name="{missing}", config={"lr": 1})


NAMES = ["a/b", "..", ".", " ", "a" * 300, "é√", "ü" * 200, "nul\0x", "manifest.json", "lock"]
NAMES += ["a\nb", "{{x}}", "0.arrows", "~", "%2F", "a%2Fb", ".claim", "-", "A", "a"]


def test_any_name(tmp_path):
    with lox.SaveLogger(tmp_path) as logger:
        for i, name in enumerate(NAMES):
            logger.log(logger.init(KEY, name=name), {"i": i})
    want = {name.format(): [i] for i, name in enumerate(NAMES)}
    assert {r.name: r.load()["i"].tolist() for r in lox.runs(tmp_path)} == want
    assert not any(r.damage for r in verify(tmp_path))


@dataclasses.dataclass
class Config:
    lr: float
    layers: tuple = (1, 2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Leafy:
    a: float


CONFIGS = [
    (dict(a=1, b=0.5, c="x", d=None, e=True), dict(a=1, b=0.5, c="x", d=None, e=True)),
    (dict(x=jnp.float32(0.1), y=np.arange(2), z=np.int8(3)), dict(x=0.1, y=[0, 1], z=3)),
    (Config(0.5), dict(lr=0.5, layers=[1, 2])),
    (dict(net=dict(sizes=[8, 8])), dict(net=dict(sizes=[8, 8]))),
    (None, {}),
    (dict(big=2**70, inf=float("inf")), dict(big=2**70, inf=float("inf"))),
]


@pytest.mark.parametrize(("config", "want"), CONFIGS)
def test_config(tmp_path, config, want):
    with lox.SaveLogger(tmp_path) as logger:
        logger.init(KEY, name="r", config=config)
    assert lox.runs(tmp_path)["r"].config == want


@pytest.mark.parametrize("odd", [jnp.tanh, Leafy(0.5), Pair(1, 2), 1j, np.complex64(2j), {1, 2}])
def test_config_of_anything(tmp_path, odd):
    """What JSON can't hold is described, and never a reason to fail."""
    with lox.SaveLogger(tmp_path) as logger:
        logger.init(KEY, name="r", config={"odd": odd, "lr": 0.5})
    config = lox.runs(tmp_path)["r"].config
    assert config["lr"] == 0.5
    assert config["odd"] not in (None, "")


def test_wrong_arguments(tmp_path):
    with pytest.raises(ValueError, match=r"exists='ask'.*error, overwrite, resume"):
        lox.SaveLogger(tmp_path, exists="ask")
    logger = lox.SaveLogger(tmp_path)
    with pytest.raises(TypeError, match=r"random key.*jax.random.key"):
        logger.init(0)
    with pytest.raises(ValueError, match=r"jax.vmap\(logger.init\)"):
        logger.init(jax.random.split(KEY, 2))
    with pytest.raises(TypeError, match="MultiLogger takes loggers"):
        lox.MultiLogger(logger, "console")


def values(root):
    return {r.name: r.load()["x"].tolist() for r in lox.runs(root)}


def save(root, exists, x, keys=None, name="r{lane}", close=True):
    """Write `x` to each of the runs of one `init`."""
    logger = lox.SaveLogger(root, exists=exists)
    states = jax.vmap(lambda k: logger.init(k, name=name))(jax.random.split(KEY, 3))
    logger.log(states, {"x": np.full(3, x)})
    if close:
        logger.close()
    return logger, states


def test_existing_run_is_an_error(tmp_path):
    save(tmp_path, "error", 1)
    logger = lox.SaveLogger(tmp_path)
    with pytest.raises(lox.loggers.RunExists, match=r"'r1'.*resume.*overwrite.*name=") as caught:
        logger.init(KEY, name="r1")
    assert isinstance(caught.value, FileExistsError)
    logger.log(logger.init(KEY, name="new"), {"x": 2})
    with pytest.raises(lox.loggers.RunExists, match="'new'"):
        logger.init(KEY, name="new")  # in the same logger too
    logger.close()
    assert values(tmp_path) == {"r0": [1], "r1": [1], "r2": [1], "new": [2]}


def test_existing_run_is_overwritten(tmp_path):
    save(tmp_path, "error", 1)
    save(tmp_path, "overwrite", 2)
    assert values(tmp_path) == {"r0": [2], "r1": [2], "r2": [2]}
    with lox.SaveLogger(tmp_path, overwrite=True) as logger:  # one of a group
        logger.log(logger.init(KEY, name="r1"), {"x": 3})
    assert values(tmp_path) == {"r0": [2], "r1": [3], "r2": [2]}
    with lox.SaveLogger(tmp_path, overwrite=True) as logger:  # all of the group are gone then
        for name in ("r0", "r2"):
            logger.log(logger.init(KEY, name=name), {"x": 4})
    assert values(tmp_path) == {"r1": [3], "r0": [4], "r2": [4]}
    assert not any(r.damage for r in verify(tmp_path))
    assert sum(os.path.isdir(tmp_path / n) for n in os.listdir(tmp_path)) == 3


def test_overwriting_one_lane_of_an_open_group(tmp_path):
    logger, states = save(tmp_path, "overwrite", 1, close=False)
    again = logger.init(jax.random.key(7), name="r1")
    logger.log(again, {"x": 5})
    lanes = jax.tree.map(lambda x: x[np.array([0, 2])], states)
    logger.log(lanes, {"x": np.full(2, 2)})
    assert values(tmp_path) == {"r0": [1, 2], "r1": [5], "r2": [1, 2]}
    logger.close()
    assert values(tmp_path) == {"r0": [1, 2], "r1": [5], "r2": [1, 2]}


@pytest.mark.parametrize("crashed", [False, True])
def test_existing_run_is_resumed(tmp_path, crashed):
    first, _ = save(tmp_path / "first", "error", 1, close=not crashed)
    shutil.copytree(tmp_path / "first", tmp_path / "runs")  # its writer is gone
    first.close()
    root = tmp_path / "runs"
    save(root, "resume", 2)
    with lox.SaveLogger(root, exists="resume") as logger:  # one of a group, and a new one
        logger.log(logger.init(KEY, name="r1"), {"x": 3})
        logger.log(logger.init(KEY, name="new"), {"x": 4})
        logger.log(logger.init(KEY, name="r1"), {"x": 5})  # the one it has open
    want = {"r0": [1, 2], "r1": [1, 2, 3, 5], "r2": [1, 2], "new": [4]}
    assert values(root) == want
    assert list(compact(root)) if crashed else not list(compact(root))
    assert values(root) == want


def test_resumed_with_the_clock_set_back(tmp_path):
    save(tmp_path, "error", 1)
    start = time.time_ns() - 10**12
    with mock.patch("time.time_ns", return_value=start):
        save(tmp_path, "resume", 2)
    assert values(tmp_path) == {"r0": [1, 2], "r1": [1, 2], "r2": [1, 2]}


def test_live_run_is_left_alone(tmp_path):
    logger, states = save(tmp_path, "error", 1, close=False)
    for exists in ("error", "overwrite", "resume"):
        with pytest.raises(lox.loggers.RunExists, match="'r1'"):
            lox.SaveLogger(tmp_path, exists=exists).init(KEY, name="r1")
    logger.log(states, {"x": np.full(3, 2)})
    logger.close()
    assert values(tmp_path) == {"r0": [1, 2], "r1": [1, 2], "r2": [1, 2]}


# --- programs ------------------------------------------------------------------------------------


def log_low(x, i):
    lox.log({"low": x}, step=i)


def train(x):
    """Logs in a scan, in a branch that lanes take differently, in a while loop, and once."""

    def step(x, i):
        lox.log({"x": x, "v": jnp.stack([x, -x])}, step=i)
        jax.lax.cond(x % 3 < 1.5, log_low, lambda x, i: None, x, i)
        return x + 1, None

    x = jax.lax.scan(step, x, jnp.arange(6))[0]

    def body(x):
        lox.log({"in_while": x})
        return x - 2

    x = jax.lax.while_loop(lambda x: x > 5, body, x)
    lox.log({"end": x})
    return x


def trained(x):
    """The same in plain Python: the events of each key, and their steps."""
    found = {k: ([], []) for k in ("x", "v", "low", "in_while", "end")}
    for i in range(6):
        found["x"][0].append(x)
        found["v"][0].append([x, -x])
        if x % 3 < 1.5:
            found["low"][0].append(x)
            found["low"][1].append(i)
        found["x"][1].append(i)
        found["v"][1].append(i)
        x += 1
    while x > 5:
        found["in_while"][0].append(x)
        x -= 2
    found["end"][0].append(x)
    return {k: v for k, v in found.items() if v[0]}


def assert_trained(run, x, times=1):
    logs = run.load()
    want = trained(x)
    assert set(logs) == set(want)
    for key, (rows, steps) in want.items():
        assert logs[key].tolist() == rows * times, key
        if steps:
            assert logs.step[key].tolist() == steps * times, key


WAYS = {
    "tap": lambda logger, s: logger.tap(train, s),
    "tap every 4": lambda logger, s: logger.tap(train, s, every=4),
    "tap every 100": lambda logger, s: logger.tap(train, s, every=100),
    "spool": lambda logger, s: logger.spool(train, s, capacity=32),
    "log": lambda logger, s: lambda x: logger.log(s, lox.spool(train, capacity=32)(x)[1]),
}
WRAPS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "vmap": jax.vmap,
    "jit vmap": lambda f: jax.jit(jax.vmap(f)),
    "vmap jit": lambda f: jax.vmap(jax.jit(f)),
    "scan": lambda f: lambda *xs: jax.lax.scan(lambda _, y: (None, f(*y)), None, xs)[1],
}
STARTS = np.array([0.0, 1.0, 5.0], np.float32)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_writes_the_same_rows(tmp_path, way, wrap):
    """Inside and outside of jit, one run or one for each lane."""
    many = wrap in ("vmap", "jit vmap", "vmap jit")
    with lox.SaveLogger(tmp_path) as logger:
        init = lambda key: logger.init(key, name="r{lane}")
        call = WRAPS[wrap](lambda s, x: WAYS[way](logger, s)(x))
        if many:
            call(WRAPS[wrap](init)(jax.random.split(KEY, 3)), STARTS)
        elif wrap == "scan":
            state = init(KEY)
            call(jax.tree.map(lambda x: jnp.stack([x] * 2), state), jnp.stack([STARTS[1]] * 2))
        else:
            call(init(KEY), STARTS[1])
    runs = lox.runs(tmp_path)
    assert len(runs) == (3 if many else 1)
    for run in runs:
        assert_trained(run, float(STARTS[run.lane] if many else STARTS[1]), 1 + (wrap == "scan"))


def test_init_and_program_in_one_jit(tmp_path):
    with lox.SaveLogger(tmp_path) as logger:

        @jax.jit
        @jax.vmap
        def whole(key, x):
            state = logger.init(key, name="r{lane}", config={"start": x})
            return logger.tap(train, state)(x)

        whole(jax.random.split(KEY, 3), STARTS)
    for run in lox.runs(tmp_path):
        assert run.config == {"start": float(STARTS[run.lane])}
        assert_trained(run, float(STARTS[run.lane]))


def test_vmap_inside_of_one_run(tmp_path):
    """Lanes that are no runs are an axis of the value."""
    with lox.SaveLogger(tmp_path) as logger:
        state = logger.init(KEY, name="r")

        def fun(x):
            lox.log({"x": x}, step=3)
            return x

        logger.tap(lambda xs: jax.vmap(fun)(xs), state)(jnp.arange(4.0))
        jax.vmap(logger.tap(fun, state))(jnp.arange(4.0))
        logger.spool(jax.vmap(fun), state)(jnp.arange(4.0))
    logs = lox.runs(tmp_path)["r"].load()
    assert logs["x"].tolist() == [[0, 1, 2, 3]] * 3
    assert logs.step["x"].tolist() == [3] * 3


def test_one_lane_is_like_many(tmp_path):
    with lox.SaveLogger(tmp_path) as logger:
        states = jax.vmap(lambda k: logger.init(k, name="r{lane}"))(jax.random.split(KEY, 1))
        jax.vmap(lambda s, x: logger.tap(train, s)(x))(states, STARTS[:1])
    [run] = lox.runs(tmp_path)
    assert_trained(run, float(STARTS[0]))


def test_two_axes_of_lanes(tmp_path):
    keys = jax.random.split(KEY, (2, 3))
    xs = jnp.arange(6.0).reshape(2, 3)
    with lox.SaveLogger(tmp_path) as logger:
        states = jax.vmap(jax.vmap(lambda k: logger.init(k, name="r{lane}")))(keys)
        jax.jit(jax.vmap(jax.vmap(lambda s, x: logger.tap(train, s)(x))))(states, xs)
    runs = lox.runs(tmp_path)
    assert [r.name for r in runs] == [f"r{i}" for i in range(6)]
    for run, x in zip(runs, np.ravel(xs), strict=True):
        assert_trained(run, float(x))


class Counting(lox.SaveLogger):
    calls = 0

    def host_write(self, *args):
        self.calls += 1
        super().host_write(*args)


def test_256_lanes_in_one_host_call_per_write(tmp_path):
    lanes, steps = 256, 20
    with Counting(tmp_path) as logger:

        @jax.jit
        def run(keys, x):
            states = jax.vmap(lambda k: logger.init(k, name="seed{lane}"))(keys)

            def step(x, i):
                def log(s, x):
                    logger.log(s, lox.logdict({"x": x}, step=i))

                jax.vmap(log)(states, x)
                return x + 1, None

            return jax.lax.scan(step, x, jnp.arange(steps))[0]

        run(jax.random.split(KEY, lanes), jnp.arange(lanes) * 100.0)
        logger.flush()
        assert logger.calls == steps

        logger.calls = 0
        states = jax.vmap(lambda k: logger.init(k, name="tap{lane}"))(jax.random.split(KEY, lanes))

        def fun(x):
            step = lambda x, i: (lox.log({"x": x}, step=i), (x + 1, None))[1]
            return jax.lax.scan(step, x, jnp.arange(steps))[0]

        tapped = lambda s, x: logger.tap(fun, s, every=10)(x)
        jax.jit(jax.vmap(tapped))(states, jnp.arange(lanes) * 100.0)
        logger.flush()
        assert logger.calls == steps // 10
    runs = lox.runs(tmp_path)
    assert len(runs) == 2 * lanes
    for prefix in ("seed", "tap"):
        for lane in (0, 1, 100, 255):
            logs = runs[f"{prefix}{lane}"].load()
            assert logs["x"].tolist() == [lane * 100 + i for i in range(steps)]
            assert logs.step["x"].tolist() == list(range(steps))
    assert sum(r.rows for r in runs) == 2 * lanes * steps
    assert sum(os.path.isdir(tmp_path / n) for n in os.listdir(tmp_path)) == 2


def test_logdict_with_a_batch_of_states(tmp_path):
    """Eagerly, a plain dict is split over the states; what spool returned knows its axes."""
    with lox.SaveLogger(tmp_path) as logger:
        states = jax.vmap(lambda k: logger.init(k, name="r{lane}"))(jax.random.split(KEY, 3))
        logger.log(states, {"loss": jnp.arange(3.0)})
        _, logs = jax.vmap(lox.spool(train, capacity=32))(STARTS)
        logger.log(states, logs, prefix="p/")
    for run in lox.runs(tmp_path):
        assert run.load("loss")["loss"].tolist() == [run.lane]
        want = trained(float(STARTS[run.lane]))
        assert {k for k in run.keys if k != "loss"} == {f"p/{k}" for k in want}
        assert run.load("p/low")["p/low"].tolist() == want["low"][0]


def test_several_threads(tmp_path):
    with lox.SaveLogger(tmp_path) as logger:
        states = [logger.init(KEY, name=f"r{i}") for i in range(4)]

        def work(i):
            for j in range(50):
                logger.log(states[i], lox.logdict({"x": float(j)}, step=j))
                logger.log(states[0], {"all": i})

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
    for i in range(4):
        assert lox.runs(tmp_path)[f"r{i}"].load("x")["x"].tolist() == list(range(50))
    every = lox.runs(tmp_path)["r0"].load("all")["all"]
    assert np.bincount(every).tolist() == [50] * 4


# --- a state that travels ------------------------------------------------------------------------


def test_state_goes_through_a_scan(tmp_path):
    with lox.SaveLogger(tmp_path) as logger:
        state = logger.init(KEY, name="r")

        def step(state, i):
            logger.log(state, lox.logdict({"i": i}, step=i))
            return state, None

        after, _ = jax.jit(lambda s: jax.lax.scan(step, s, jnp.arange(4)))(state)
        logger.log(after, lox.logdict({"i": jnp.int32(4)}, step=jnp.int32(4)))
    assert lox.runs(tmp_path)["r"].load()["i"].tolist() == [0, 1, 2, 3, 4]


ELSEWHERE = """
import pickle, sys
import jax.numpy as jnp
import lox
root, file = sys.argv[1:]
states, alone = pickle.load(open(file, "rb"))
with lox.SaveLogger(root, exists="resume") as logger:
    logger.log(states, {"x": jnp.array([10.0, 11.0])})
    logger.log(alone, {"x": 12.0})
"""


def test_state_in_another_process(tmp_path):
    """As from a checkpoint: it knows its run. One of a batch alone, too."""
    root, file = tmp_path / "runs", tmp_path / "state.pickle"
    with lox.SaveLogger(root) as logger:
        init = lambda lr: logger.init(KEY, config={"lr": lr})
        states = jax.vmap(init)(jnp.array([0.1, 0.2]))
        logger.log(states, {"x": jnp.array([0.0, 1.0])})
    alone = jax.tree.map(lambda x: x[1], states)
    file.write_bytes(pickle.dumps(jax.tree.map(np.asarray, (states, alone))))
    command = [sys.executable, "-c", ELSEWHERE, str(root), str(file)]
    subprocess.run(command, check=True, timeout=60, env={**os.environ, "XLA_FLAGS": ""})
    runs = lox.runs(root)
    assert [r.load()["x"].tolist() for r in runs] == [[0, 10], [1, 11, 12]]
    assert [r.config for r in runs] == [{"lr": 0.1}, {"lr": 0.2}]


def test_importing_lox_imports_no_arrow():
    modules = {"pyarrow", "pandas", "polars", "xarray"}
    code = f"import sys, lox; print(sorted({modules} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]"
