"""The row store: what was committed comes back, bit by bit, or is said to be damaged.

`LOX_KILLS` sets how many writers are killed at random moments. Run as a program, this file does
what needs a process without JAX and threads: writers that are forked and killed, limited memory.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from unittest import mock

import numpy as np
import pytest

from _loxio import Damaged, read_small
from logix.cli import main as cli
from logix.store import _writer
from logix.store._ids import as_ids, content_ids, decode_ids, encode_ids
from logix.store._rowtypes import DTYPES, RowType
from logix.store._verify import verify
from logix.store._writer import RowStore, RowWriter

KILLS = int(os.environ.get("LOX_KILLS", "60"))
LAYOUT = [{"name": "a", "shape": (2, 2), "offset": 0}, {"name": "b", "shape": [3], "offset": 4}]
D = 7


def rows_of(n, start=0, d=D):
    """Row i is the same whoever asks for it, and exact in every dtype but int8."""
    i = np.arange(start, start + n, dtype=np.float32)[:, None] % 64
    return (i + np.arange(d, dtype=np.float32) / 4) % 32 - 8


def write(path, n=10, batch=4, first=0, ids=str, **options):
    with RowWriter(path, LAYOUT, **options) as writer:
        for i in range(first, first + n, batch):
            stop = min(i + batch, first + n)
            writer.append([ids(j) for j in range(i, stop)], rows_of(stop - i, i))
    return str(path)


# --- how a row is stored -------------------------------------------------------------------------


def values(d=37):
    r = np.random.default_rng(0)
    x = r.normal(size=(200, d)).astype(np.float32) * np.exp(r.uniform(-20, 8, (200, 1)))
    x[0], x[1, :], x[2, 0] = 0, -1, 1e-30
    return x.astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_as_documented(dtype):
    import ml_dtypes

    x, kind = values(), RowType(dtype, 37)
    block = kind.encode(x)
    assert (block.dtype, block.shape) == (np.uint8, (200, kind.nbytes))
    got = kind.decode(block)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(kind.decode(kind.encode(got)), got)
    if dtype == "int8":
        scale = np.abs(x).max(1, keepdims=True) / np.float32(127)
        assert (np.abs(got - x) <= scale * 0.50001).all()
        np.testing.assert_array_equal(got[0], 0)
        assert kind.nbytes == 37 + 4
    else:
        to = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
        np.testing.assert_array_equal(got, x.astype(to).astype(np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(tmp_path, dtype, bad):
    x = rows_of(3)
    x[1, 2] = bad
    with RowWriter(tmp_path / "no", LAYOUT, dtype) as writer:
        with pytest.raises(ValueError, match=r"row of 'b' has values that are not finite.*'keep'"):
            writer.append(["a", "b", "c"], x)
        assert len(RowStore(tmp_path / "no")) == 0
    with RowWriter(tmp_path / "yes", LAYOUT, dtype, nonfinite="keep") as writer:
        writer.append(["a", "b", "c"], x)
    got = RowStore(tmp_path / "yes").rows()
    if dtype == "int8":
        assert np.isnan(got[1]).all()
        assert np.isfinite(got[[0, 2]]).all()
    else:
        np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize(("dtype", "big"), [("float16", 1e5), ("bfloat16", 3.4e38)])
def test_values_that_are_too_large(dtype, big):
    x = rows_of(2)
    x[1, 0] = big
    with pytest.raises(ValueError, match=f"row 1 has values too large for {dtype}"):
        RowType(dtype, D).encode(x)
    with pytest.raises(ValueError, match="not finite"):
        RowType("float32", D).encode(np.full((1, D), 1e300))


def test_int8_at_the_ends_of_the_range():
    kind = RowType("int8", 2)
    big = np.finfo(np.float32).max
    x = np.array([[big, -big], [1e-45, 0], [3e-38, -1e-38]], np.float32)
    got = kind.decode(kind.encode(x))
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got[0], x[0], rtol=1e-6)
    np.testing.assert_allclose(got[1:], x[1:], atol=1.2e-38)


@pytest.mark.parametrize("source", [np.float64, np.float16, np.int32])
def test_other_dtypes_of_rows(tmp_path, source):
    with RowWriter(tmp_path, LAYOUT) as writer:
        writer.append([1, 2, 3], rows_of(3).astype(source)[:, ::-1][:, ::-1])
    np.testing.assert_array_equal(RowStore(tmp_path).rows(), rows_of(3).astype(source))


# --- ids -----------------------------------------------------------------------------------------

KINDS = {
    "str": ["a", "", "ü€𝄞", "x" * 1000, "\ud800", "12345678"],
    "int": [0, -1, 2**63 - 1, -(2**63)],
    "numpy": np.arange(5, dtype=np.uint8),
    "mixed": [1, "1", np.int16(7), np.str_("np"), "\x00"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_ids_come_back(tmp_path, kind):
    ids = list(KINDS[kind])
    with RowWriter(tmp_path, LAYOUT) as writer:
        writer.append(KINDS[kind], rows_of(len(ids)))
    store = RowStore(tmp_path)
    assert store.ids == [i if isinstance(i, str) else int(i) for i in ids]
    assert {type(i) for i in store.ids} <= {int, str}
    assert [store.find(i) for i in ids] == list(range(len(ids)))
    assert decode_ids(encode_ids(as_ids(ids)), len(ids)) == store.ids
    with pytest.raises(KeyError, match="'nobody'"):
        store.find("nobody")


@pytest.mark.parametrize("bad", [True, 1.5, None, b"x", (1,), np.bool_(True)])
def test_what_is_no_id(bad):
    with pytest.raises(TypeError, match="str or an integer"):
        as_ids([bad])


def test_ids_that_do_not_fit(tmp_path):
    with pytest.raises(ValueError, match="64 bits"):
        as_ids([2**63])
    with pytest.raises(TypeError, match="one for each row"):
        as_ids("abc")
    with RowWriter(tmp_path, LAYOUT) as writer:
        with pytest.raises(ValueError, match=r"2 ids for rows of the shape \(3, 7\)"):
            writer.append(["a", "b"], rows_of(3))
        with pytest.raises(ValueError, match=r"\(B, 7\)"):
            writer.append(["a"], np.zeros((1, 6)))


def test_content_ids():
    x, y = np.arange(12.0).reshape(4, 3), np.arange(4)
    batch = {"x": x, "y": y, "text": ["a", "bb", "a", ""]}
    ids = content_ids(batch)
    assert len(set(ids)) == 4
    assert all(len(i) == 32 for i in ids)
    part = {"text": np.array(["bb", "a"]), "y": y[1:3], "x": np.asfortranarray(x[1:3])}
    assert content_ids(part) == ids[1:3]
    assert content_ids(x.astype(">f8")) == content_ids(x)
    others = [x.astype(np.float32), x.reshape(4, 3, 1), (x,), {"x": x}, x + 1, (x, x[:, :0])]
    assert len({content_ids(o)[0] for o in [x, *others]}) == 7
    # Stable over years: these must not change.
    assert content_ids(np.array([[1, 2]], np.int32)) == ["8ebe655e586edfec1d046a10f48c6ee7"]
    with pytest.raises(ValueError, match="first axis"):
        content_ids({"x": x, "y": y[:2]})
    with pytest.raises(TypeError, match="axis over examples"):
        content_ids(3.0)


# --- round trips ---------------------------------------------------------------------------------


@pytest.mark.parametrize("map_bytes", [0, None], ids=["windows", "mapped"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(tmp_path, dtype, map_bytes):
    meta = {"seed": 7, "shape": (1, 2)}
    write(tmp_path, 23, dtype=dtype, shard_bytes=100, meta=meta)
    assert len(list(tmp_path.glob("*.rows"))) > 1
    store = RowStore(tmp_path, map_bytes=map_bytes)
    want = rows_of(23)
    if dtype == "int8":
        kind = RowType(dtype, D)
        want = kind.decode(kind.encode(want))
    assert len(store) == 23
    assert store.ids == [str(i) for i in range(23)]
    assert store.manifest["meta"] == {"seed": 7, "shape": [1, 2]}
    assert store.manifest["layout"][0] == {"name": "a", "shape": [2, 2], "offset": 0}
    for start in range(24):
        for stop in range(start, 24):
            np.testing.assert_array_equal(store.rows(start, stop), want[start:stop])
    np.testing.assert_array_equal(store.rows(-3), want[-3:])
    for size in (1, 5, 23, 99):
        ids, blocks = zip(*store.blocks(size))
        assert [i for part in ids for i in part] == store.ids
        assert {len(b) for b in blocks[:-1]} <= {size}
        np.testing.assert_array_equal(np.concatenate(blocks), want)
    report = store.verify()
    assert (report.rows, report.damage, report.torn) == (23, [], 0)


def test_mapped_rows_are_not_copied(tmp_path):
    write(tmp_path, 20, batch=20)
    block = RowStore(tmp_path).rows(3, 9)
    assert not block.flags.owndata
    assert not block.flags.writeable


def test_empty(tmp_path):
    write(tmp_path, 0)
    store = RowStore(tmp_path)
    assert (len(store), store.ids, list(store.blocks()), store.rows().shape) == (0, [], [], (0, D))
    assert not store.verify().damage
    with pytest.raises(FileNotFoundError, match="no store"):
        RowStore(tmp_path / "none")


def test_bad_options(tmp_path):
    for options, match in [
        (dict(dtype="int4"), "int4"),
        (dict(duplicates="last"), "keep_first"),
        (dict(nonfinite="no"), "nonfinite"),
        (dict(resume=True, overwrite=True), "pass one"),
    ]:
        with pytest.raises(ValueError, match=match):
            RowWriter(tmp_path, LAYOUT, **options)
    with pytest.raises(ValueError, match="offset 5 instead of 4"):
        RowWriter(tmp_path, [LAYOUT[0], {**LAYOUT[1], "offset": 5}])
    assert not list(tmp_path.iterdir())


def test_reading_while_it_is_written(tmp_path):
    writer = RowWriter(tmp_path, LAYOUT, shard_bytes=200)
    store = RowStore(tmp_path)
    for i in range(20):
        writer.append([i], rows_of(1, i))
        assert len(store) == i
        store.refresh()
        assert store.ids == list(range(i + 1))
        np.testing.assert_array_equal(store.rows(), rows_of(i + 1))
    assert not store.verify().damage
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.append([99], rows_of(1))


# --- several writers, and duplicates -------------------------------------------------------------


def test_several_writers(tmp_path):
    writers = [RowWriter(tmp_path, LAYOUT, writer=w, run="r1") for w in range(3)]
    for i in range(12):
        writers[i % 3].append([i], rows_of(1, i))
    for w in writers:
        w.close()
    store = RowStore(tmp_path)
    assert store.ids == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]
    np.testing.assert_array_equal(store.rows(), np.concatenate([rows_of(1, i) for i in store.ids]))
    with pytest.raises(FileExistsError, match="resume=True"):  # an earlier run's
        RowWriter(tmp_path, LAYOUT, writer=3, run="r2")
    with pytest.raises(ValueError, match="has dtype='float32', not 'int8'"):
        RowWriter(tmp_path, LAYOUT, "int8", writer=3, run="r1")
    with RowWriter(tmp_path, LAYOUT, writer=1, run="r2", overwrite=True) as first:
        with RowWriter(tmp_path, LAYOUT, writer=0, run="r2", overwrite=True) as second:
            first.append(["x"], rows_of(1))
            second.append(["y"], rows_of(1))
            with pytest.raises(FileExistsError, match="being written"):
                RowWriter(tmp_path, LAYOUT, writer=7, overwrite=True)
            with pytest.raises(FileExistsError, match="just now"):
                RowWriter(tmp_path, LAYOUT, writer=1, resume=True)
    assert RowStore(tmp_path).ids == ["y", "x"]
    assert not verify(tmp_path).damage


def test_duplicates_of_one_writer(tmp_path):
    with RowWriter(tmp_path / "error", LAYOUT) as writer:
        writer.append([1, 2], rows_of(2))
        for ids in ([3, 2], [3, 3]):
            with pytest.raises(ValueError, match=rf"the id {ids[1]} is there already"):
                writer.append(ids, rows_of(2))
        assert writer.append([3], rows_of(1)) == 1
    assert RowStore(tmp_path / "error").ids == [1, 2, 3]
    with RowWriter(tmp_path / "first", LAYOUT, duplicates="keep_first") as writer:
        assert writer.append([1, 2, 1], rows_of(3)) == 2
        assert writer.append([2, 3], rows_of(2, 3)) == 1
        assert writer.append([2, 3], rows_of(2, 9)) == 0
    store = RowStore(tmp_path / "first")
    assert store.ids == [1, 2, 3]
    np.testing.assert_array_equal(store.rows(), rows_of(5)[[0, 1, 4]])
    with RowWriter(tmp_path / "all", LAYOUT, duplicates="keep_all") as writer:
        assert writer.append([1, 2, 1], rows_of(3)) == 3
        assert writer.append([1], rows_of(1, 3)) == 1
    assert RowStore(tmp_path / "all").ids == [1, 2, 1, 1]
    first = RowStore(tmp_path / "all", duplicates="keep_first")
    assert first.ids == [1, 2]
    np.testing.assert_array_equal(first.rows(), rows_of(2))


def test_duplicates_of_several_writers(tmp_path):
    for w in range(2):
        with RowWriter(tmp_path, LAYOUT, writer=w, run="r") as writer:
            ids = [["a", "b", "c"], ["b", "d", "a", "c", "e"]][w]
            writer.append(ids, rows_of(len(ids), 10 * w))
    with pytest.raises(ValueError, match=r"'b'.*keep_first"):
        RowStore(tmp_path)
    store = RowStore(tmp_path, duplicates="keep_first")
    assert store.ids == ["a", "b", "c", "d", "e"]
    want = np.concatenate([rows_of(3), rows_of(5, 10)[[1, 4]]])
    np.testing.assert_array_equal(store.rows(), want)
    np.testing.assert_array_equal(store.rows(2, 4), want[2:4])
    assert len(RowStore(tmp_path, duplicates="keep_all")) == 8


@pytest.mark.parametrize("duplicates", ["error", "keep_first", "keep_all"])
def test_resume_passes_over_what_is_there(tmp_path, duplicates):
    replay = [1, 2, 3, 4, 5] if duplicates == "error" else [1, 2, 1, 3, 1]
    with RowWriter(tmp_path, LAYOUT, duplicates=duplicates) as writer:
        writer.append(replay[:3], rows_of(3))
    with RowWriter(tmp_path, LAYOUT, duplicates=duplicates, resume=True) as writer:
        writer.append(replay[:2], rows_of(2))
        writer.append(replay[2:], rows_of(3, 2))
        if duplicates == "error":
            with pytest.raises(ValueError, match="id 1 is there"):
                writer.append([1], rows_of(1))
    store = RowStore(tmp_path)
    want = [1, 2, 3] if duplicates == "keep_first" else replay
    assert store.ids == want
    at = [0, 1, 3] if duplicates == "keep_first" else range(5)
    np.testing.assert_array_equal(store.rows(), rows_of(5)[list(at)])
    # Another rank may be given what this one had written.
    with RowWriter(tmp_path, LAYOUT, duplicates=duplicates, writer=1, resume=True) as writer:
        assert writer.append(want, rows_of(len(want))) == 0
    assert RowStore(tmp_path).ids == want


def test_a_store_that_is_there(tmp_path):
    path = write(tmp_path / "s", 10, shard_bytes=60)
    for options in ({}, {"writer": 1}, {"run": "new"}, {"writer": 1, "run": "new"}):
        with pytest.raises(FileExistsError, match=r"there is a store at .*overwrite=True"):
            RowWriter(path, LAYOUT, **options)
    assert len(RowStore(path)) == 10
    for options, match in [({"dtype": "int8"}, "dtype"), ({"meta": {"seed": 1}}, "meta")]:
        with pytest.raises(ValueError, match=f"has {match}="):
            RowWriter(path, LAYOUT, resume=True, **options)
    (tmp_path / "s" / "mine.txt").write_text("stays")
    write(path, 3, first=50, overwrite=True)
    assert RowStore(path).ids == ["50", "51", "52"]  # nothing of the earlier one
    assert sorted(os.listdir(path)) == sorted(
        [".claim", "0000.json", "0000.lock", "manifest.json", "mine.txt"]
        + [f"0000-0000.{kind}" for kind in ("rows", "ids", "commits")]
    )
    os.unlink(os.path.join(path, "manifest.json"))
    with pytest.raises(Damaged, match="manifest"):
        RowWriter(path, LAYOUT)
    assert verify(path).damage
    write(path, 2, overwrite=True)
    assert len(RowStore(path)) == 2
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text("{}")
    with pytest.raises(Damaged):  # not ours to remove
        RowWriter(tmp_path / "other", LAYOUT, overwrite=True)


# --- damage --------------------------------------------------------------------------------------


def small_store(path):
    for w in range(2):
        write(path, 5, 2, 5 * w, dtype="bfloat16", writer=w, run="r", shard_bytes=50)
    files = [p for p in sorted(path.iterdir()) if p.stat().st_size]
    assert len(files) == 3 + 2 * 2 * 3
    return files


def check_damaged(path, what):
    assert verify(path).damage, what
    with contextlib.suppress(Damaged):
        store = RowStore(path, map_bytes=0)
        for place, i in enumerate(store.ids):
            with contextlib.suppress(Damaged):
                got = store.rows(place, place + 1)
                np.testing.assert_array_equal(got, rows_of(1, int(i)), what)


def test_every_byte_flipped(tmp_path):
    for file in small_store(tmp_path):
        data = file.read_bytes()
        for at in range(len(data)):
            pattern = (0x01, 0x80, 0xFF, 0x20)[at % 4]
            file.write_bytes(data[:at] + bytes([data[at] ^ pattern]) + data[at + 1 :])
            check_damaged(tmp_path, f"{file.name} at {at}")
        file.write_bytes(data)
    assert not verify(tmp_path).damage


def test_truncated_at_every_byte(tmp_path):
    for file in small_store(tmp_path):
        data = file.read_bytes()
        for size in range(len(data)):
            file.write_bytes(data[:size])
            check_damaged(tmp_path, f"{file.name} of {size}")
        file.unlink()
        if file.name != "0001.json":  # then its parts tell
            check_damaged(tmp_path, f"{file.name} removed")
        assert verify(tmp_path).damage
        file.write_bytes(data)
    assert not verify(tmp_path).damage


def test_files_of_another_store(tmp_path):
    """Good in themselves, and in the wrong place."""
    small_store(tmp_path / "a") and small_store(tmp_path / "b")
    for name in [p.name for p in (tmp_path / "a").iterdir() if p.suffix in (".commits", ".json")]:
        shutil.copytree(tmp_path / "a", tmp_path / "c")
        shutil.copy(tmp_path / "b" / name, tmp_path / "c" / name)
        assert verify(tmp_path / "c").damage, name
        shutil.rmtree(tmp_path / "c")


@pytest.mark.parametrize("kind", ["rows", "ids", "commits"])
def test_resume_after_a_loss_of_power(tmp_path, kind):
    """What had not reached the disk may be there in part: it is dropped, and written again."""
    writer = RowWriter(tmp_path, LAYOUT, sync_every=1e9)
    writer.append([0, 1], rows_of(2))
    writer.flush()
    writer.append([2], rows_of(1, 2))
    writer.append([3], rows_of(1, 3))
    writer._lock.release()
    file = tmp_path / f"0000-0000.{kind}"
    data, step = file.read_bytes(), {"rows": 4 * D, "ids": 12, "commits": 64}[kind]
    file.write_bytes(data[:-step] + bytes(step))
    assert verify(tmp_path).damage
    with pytest.warns(RuntimeWarning, match="not reached the disk"):
        writer = RowWriter(tmp_path, LAYOUT, resume=True)
    assert RowStore(tmp_path).ids == [0, 1, 2]
    writer.append([0, 1, 2, 3], rows_of(4))
    writer.close()
    assert RowStore(tmp_path).ids == [0, 1, 2, 3]
    np.testing.assert_array_equal(RowStore(tmp_path).rows(), rows_of(4))
    assert not verify(tmp_path).damage
    data = file.read_bytes()
    file.write_bytes(bytes(1) + data[1:] if data[0] else b"\1" + data[1:])
    if kind == "rows":  # found when they are read
        RowWriter(tmp_path, LAYOUT, resume=True).close()
        with pytest.raises(Damaged, match="rows 0–1"):
            RowStore(tmp_path).rows(1, 2)
    else:  # on the disk once, and gone
        with pytest.raises(Damaged):
            RowWriter(tmp_path, LAYOUT, resume=True)


# --- disks that are full -------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [True, False], ids=["taken back", "torn"])
@pytest.mark.parametrize("at", range(6))
def test_no_space(tmp_path, at, cut):
    """Each of the writes of two appends fails once, half-way."""
    real, calls = os.write, []

    def fail(handle, data):
        calls.append(handle)
        if len(calls) == at + 1:
            real(handle, bytes(data)[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data)

    def stuck(handle, size):
        raise OSError(errno.EIO, "Input/output error")

    with RowWriter(tmp_path, LAYOUT, sync_every=1e9) as writer:
        writer.append(["first"], rows_of(1))
        failed = []
        with mock.patch("os.write", fail), contextlib.ExitStack() as stack:
            if not cut:
                stack.enter_context(mock.patch("os.ftruncate", stuck))
            for i in range(2):
                if i != at // 3:
                    writer.append([i], rows_of(1, i))
                    continue
                with pytest.raises(OSError, match="No space left") as caught:
                    writer.append([i], rows_of(1, i))
                assert str(tmp_path) in str(caught.value)
                failed.append(i)
        assert failed == [at // 3]
        assert len(RowStore(tmp_path)) == 2
        for i in [*failed, 2]:
            writer.append([i], rows_of(1, i))  # and again, when there is room
    store = RowStore(tmp_path)
    assert sorted(map(str, store.ids)) == ["0", "1", "2", "first"]
    for i in range(3):
        at_row = store.find(i)
        np.testing.assert_array_equal(store.rows(at_row, at_row + 1), rows_of(1, i))
    assert not verify(tmp_path).damage
    assert bool(verify(tmp_path).torn) == (not cut)


def test_error_of_a_sync_is_raised(tmp_path):
    writer = RowWriter(tmp_path, LAYOUT, sync_every=0)
    writer.append([0], rows_of(1))
    writer._thread.join()
    with mock.patch("os.fsync", side_effect=OSError(errno.EIO, "Input/output error")):
        writer.append([1], rows_of(1, 1))
        writer._thread.join()
    with pytest.raises(OSError, match="Input/output"):
        writer.append([2], rows_of(1, 2))
    writer.append([2], rows_of(1, 2))  # told once
    writer.close()
    assert RowStore(tmp_path).ids == [0, 1, 2]


def test_syncing_beside_many_shards(tmp_path):
    """A thread that syncs, and parts that come and go."""
    with RowWriter(tmp_path, LAYOUT, sync_every=0, shard_bytes=60) as writer:
        for i in range(150):
            writer.append([i], rows_of(1, i))
    assert RowStore(tmp_path).ids == list(range(150))
    assert not verify(tmp_path).damage


def test_rows_are_brought_to_the_disk_as_they_come(tmp_path, monkeypatch):
    """Not only after a while: what is listed has reached the disk."""
    monkeypatch.setattr(_writer, "SYNC_BYTES", 50)
    listed = lambda: read_small(str(tmp_path / "0000.json"))["parts"]
    with RowWriter(tmp_path, LAYOUT, sync_every=1e9) as writer:
        writer.append([0], rows_of(1, 0))
        assert [part["rows"] for part in listed()] == [0]
        for i in range(1, 20):
            writer.append([i], rows_of(1, i))
            writer._thread.join()
        assert listed()[0]["rows"] >= 18 * writer.type.nbytes
    assert not verify(tmp_path).damage


# --- the command line ----------------------------------------------------------------------------


def test_command_line(tmp_path, capsys):
    path = write(tmp_path / "s", 10, meta={"seed": 5})
    assert cli(["verify", path]) == 0
    assert "good, 10 rows" in capsys.readouterr().out
    assert cli(["info", path]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("10 of 7 values", "float32", "closed", "2×2", "seed", "5"))
    assert cli(["ls", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"{path}  10 × 7 float32")
    assert cli(["ls", str(tmp_path / "none")]) == 2
    assert cli(["verify", str(tmp_path / "none")]) == 2
    assert cli(["nonsense"]) == 2
    capsys.readouterr()
    file = tmp_path / "s" / "0000-0000.rows"
    file.write_bytes(b"\7" + file.read_bytes()[1:])
    assert cli(["verify", path]) == 1
    assert "rows 0–3 are not what was written" in capsys.readouterr().out
    assert cli(["verify", path, "--quick"]) == 0
    file.write_bytes(file.read_bytes()[:-1])
    assert [cli([c, path]) for c in ("verify", "info", "ls")] == [1, 1, 1]
    assert subprocess.run([sys.executable, "-m", "logix", "verify", path]).returncode == 1


# --- processes -----------------------------------------------------------------------------------


def in_a_process(*args):
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", __file__, *map(str, args)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("shard", range(2))
def test_killed_at_random_moments(tmp_path, shard):
    out = json.loads(in_a_process("kill", tmp_path, shard, -(-max(KILLS, 40) // 2)))
    assert out["kills"] >= 20
    assert len(out["moments"]) >= 5  # not always at the same point


def test_larger_than_memory(tmp_path):
    out = json.loads(in_a_process("large", tmp_path))
    assert out["store"] >= 4 * out["allowed"]
    assert out["resident"] <= out["allowed"]


def kill_writers(root, seed, kills):
    """A child acknowledges each append through a pipe; it is killed, and resumed, to the end."""
    moment, done, moments, number = random.Random(seed), 0, set(), 0
    while done < kills:
        number += 1
        path = os.path.join(root, str(number))
        dtype = moment.choice(DTYPES)
        total = moment.choice([30, 200])
        options = dict(dtype=dtype, sync_every=moment.choice([0, 0.005, 1]), resume=True)
        options["shard_bytes"] = moment.choice([200, 5000, 1 << 30])
        sure = 0
        for attempt in range(6):
            read, send = os.pipe()
            child = os.fork()
            if child == 0:
                work(path, total, moment.random() if attempt else 1.0, send, options)
            os.close(send)
            wanted = moment.randrange(total // 3)
            got = b""
            while len(got) < wanted and (more := os.read(read, 64)):
                got += more
            time.sleep(moment.choice([0, 0.0005, 0.003]) * moment.random())
            os.kill(child, signal.SIGKILL)
            while more := os.read(read, 4096):
                got += more
            os.close(read)
            end = os.waitpid(child, 0)[1]
            assert end in (0, signal.SIGKILL), "the writer failed by itself"
            done += end == signal.SIGKILL
            moments.add(len(got))
            sure = max(sure, min(total, 3 * got.count(b".")))
            if sure or os.path.exists(os.path.join(path, "manifest.json")):
                sure = check_prefix(path, dtype, sure, total)
        with RowWriter(path, LAYOUT, **options) as writer:
            append_all(writer, total, lambda: None)
        assert check_prefix(path, dtype, total, total) == total
        assert verify(path).torn == 0
        shutil.rmtree(path)
    print(json.dumps(dict(kills=done, moments=sorted(moments))))


def append_all(writer, total, acknowledge):
    for i in range(0, total, 3):
        n = min(3, total - i)
        writer.append([j if j % 2 else str(j) for j in range(i, i + n)], rows_of(n, i))
        acknowledge()


def work(path, total, close, send, options):
    try:
        writer = RowWriter(path, LAYOUT, **options)
        append_all(writer, total, lambda: os.write(send, b"."))
        if close > 0.5:
            writer.close()
        os.write(send, b"c")
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
    os._exit(1)


def check_prefix(path, dtype, sure, total):
    """The store holds the first rows, at least those that are sure. Returns how many."""
    assert verify(path).damage == []
    store = RowStore(path)
    n, kind = len(store), RowType(dtype, D)
    assert sure <= n <= total, (sure, n, total)
    assert store.ids == [j if j % 2 else str(j) for j in range(n)]
    want = kind.decode(kind.encode(rows_of(n))) if n else rows_of(0)
    np.testing.assert_array_equal(store.rows(), want)
    return n


def read_large(root):
    """All of a store, where no more than a quarter of it can be mapped."""
    d, n, allowed = 4096, 16384, 64 << 20
    block = np.arange(256 * d, dtype=np.float32).reshape(256, d)
    with RowWriter(root, [{"name": "w", "shape": [d], "offset": 0}], sync_every=1e9) as writer:
        for i in range(0, n, 256):
            writer.append(range(i, i + 256), block + i)
    status = pathlib.Path("/proc/self/status").read_text()
    size = lambda name, text: int(text.split(f"{name}:")[1].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (size("VmSize", status) + allowed,) * 2)
    before = size("VmRSS", status)
    most = count = 0
    store = RowStore(root)
    for ids, rows in store.blocks(1000):
        assert rows[0, 1] == ids[0] // 256 * 256 + (ids[0] % 256) * d + 1
        assert float(rows[:, 0].sum()) >= 0
        count += len(ids)
        now = size("VmRSS", pathlib.Path("/proc/self/status").read_text())
        most = max(most, now - before)
    assert count == n
    assert not verify(root).damage
    print(json.dumps(dict(store=n * d * 4, allowed=allowed, resident=most)))


if __name__ == "__main__":
    warnings.simplefilter("error")
    if sys.argv[1] == "kill":
        kill_writers(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        read_large(sys.argv[2])
