"""Runs of logix whose process is killed, whose disk is full, whose files are changed.

What was acknowledged is there, what is there is right, and the run can be continued.
"""

from __future__ import annotations

import errno
import os
import pathlib
import random
import signal
import threading
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import logix  # noqa: E402
import logix_kill_worker as worker  # noqa: E402
from kill_server import Server, kill  # noqa: E402
from logix._outbox import Outbox  # noqa: E402
from logix._record import Whole  # noqa: E402
from logix._rows import entries  # noqa: E402
from logix.store._writer import RowStore, RowWriter  # noqa: E402
from logix_kill_worker import FAR, B, batch, expected, log, loss_of, started  # noqa: E402
from lox import Damaged  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
KILLS = int(os.environ.get("LOX_KILLS", "14"))
COUNT = 8  # batches


@pytest.fixture(scope="module")
def shared_server():
    path = os.pathsep.join([str(HERE), str(HERE.parent / "src")])
    server = Server(worker.__file__, PYTHONPATH=path, OMP_NUM_THREADS="1")
    yield server
    server.close()


@pytest.fixture
def server(shared_server):
    yield shared_server
    shared_server.end_jobs()


def words_in(path):
    return path.read_text().split("\n")[:-1] if path.exists() else []


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The same run, undisturbed."""
    return worker.passes(str(tmp_path_factory.mktemp("whole")), COUNT)


def check(root, words):
    """What is there after a kill begins what was logged: all that was sure, and it is right."""
    sure = max([int(w) for w in words if w.isdigit()], default=0)
    if "pass0" in words:
        sure = COUNT
    rows = pathlib.Path(root) / "run" / "rows"
    run = logix.LogIX("run", {"root_dir": str(root)})
    if not sure and not (rows / "manifest.json").exists():
        return
    store = run.store()
    assert len(store) % B == 0
    assert sure * B <= len(store) <= COUNT * B
    assert store.ids == list(range(len(store)))
    np.testing.assert_array_equal(store.rows(), expected(len(store) // B))
    assert store.verify().damage == []
    if "pass0" in words:
        run.initialize_from_log()
    try:
        run.initialize_from_log()
    except FileNotFoundError:
        assert "pass0" not in words
    else:
        stats = run.statistics[
            "weight" if "weight" in run.statistics else next(iter(run.statistics))
        ]
        assert int(stats["left_n"]) == COUNT * B
        assert int(stats.get("eigen_n", COUNT * B)) == COUNT * B
        assert "eigen" in stats or "pass1" not in words


def check_continued(root, whole):
    """Going over the data again gives what an undisturbed run gives, each row once."""
    run = worker.passes(str(root), COUNT, resume=True)
    assert run.store().ids == list(range(COUNT * B))
    np.testing.assert_array_equal(run.store().rows(), expected(COUNT))
    assert run.store().verify().damage == []
    assert set(run.statistics) == set(whole.statistics)
    for layer, stats in whole.statistics.items():
        assert set(run.statistics[layer]) == set(stats)
        for name, value in stats.items():
            np.testing.assert_allclose(run.statistics[layer][name], value, rtol=1e-5, atol=1e-6)


# --- killed --------------------------------------------------------------------------------------


def test_killed_at_random_moments(server, tmp_path, whole):
    took = FAR
    for k in range(2):  # the first one waits for the server
        begun, root, ack = time.monotonic(), tmp_path / f"r{k}", tmp_path / f"a{k}"
        job = dict(job="passes", root=str(root), ack=str(ack), count=COUNT)
        [pid] = server.start(job)
        while "pass1" not in words_in(ack):
            time.sleep(0.001)
        took = time.monotonic() - begun
        kill(pid)
        server.wait()
        check(root, words_in(ack))
    unfinished = 0
    for k in range(KILLS):
        root, ack = tmp_path / str(k), tmp_path / f"ack{k}"
        every = random.choice([1, 3])
        job = dict(job="passes", root=str(root), ack=str(ack), count=COUNT, every=every)
        [pid] = server.start(job)
        time.sleep(random.uniform(0.1, 1) * took)
        kill(pid)
        assert server.wait() == [-signal.SIGKILL]
        words = words_in(ack)
        unfinished += "pass1" not in words
        check(root, words)
        check_continued(root, whole)
    assert unfinished


@pytest.mark.parametrize("half", [False, True])
def test_killed_at_a_call(server, tmp_path, whole, half):
    """Before one of the calls that change a file, those of `finalize` too."""
    at, end = 1 + half, None
    while end != 0:
        root, ack = tmp_path / str(at), tmp_path / f"ack{at}"
        job = dict(job="crash", root=str(root), ack=str(ack), count=COUNT, every=2)
        [end] = server.run(dict(at=at, half=half, **job))
        assert end in (0, -signal.SIGKILL)
        check(root, words_in(ack))
        if at % 5 == 0:
            check_continued(root, whole)
        at += 4
    assert at > 40
    assert words_in(ack)[-1] == "done"


@pytest.mark.parametrize("how", ["end", "exception", "sys.exit", "interrupt", "fork"])
def test_a_program_that_ends_waits_for_its_rows(server, tmp_path, how):
    [end] = server.run(dict(job="exit", root=str(tmp_path), count=COUNT, how=how))
    assert end == {"exception": 1, "sys.exit": 3, "interrupt": -signal.SIGINT}.get(how, 0)
    store = logix.LogIX("run", {"root_dir": str(tmp_path)}).store()
    assert store.ids == list(range(COUNT * B))
    np.testing.assert_array_equal(store.rows(), expected(COUNT))
    assert store.verify().damage == []


# --- a full disk, and other errors beside the caller ---------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("limit", [0, 500])
def test_a_full_disk(server, tmp_path, limit, workers):
    ack = tmp_path / "ack"
    job = dict(root=str(tmp_path), ack=str(ack), limit=limit, count=COUNT, workers=workers)
    assert server.run(dict(job="limit", **job)) == [0]
    *told, closed = words_in(ack)
    assert closed == "closed"
    assert 0 < len(told) < COUNT
    assert all(w.startswith(f"OSError:{errno.EFBIG}:{tmp_path}") for w in told)
    store = logix.LogIX("run", {"root_dir": str(tmp_path)}).store()
    assert sorted(store.ids) == list(range(COUNT * B))
    order = np.argsort(store.ids)
    np.testing.assert_array_equal(store.rows()[order], expected(COUNT))
    assert store.verify().damage == []


def failing_write(monkeypatch, bad):
    """The disk does not take rows that begin with this number."""
    real = os.write

    def write(handle, data):
        if bytes(data[:4]) == np.float32(bad).tobytes():
            raise OSError(errno.ENOSPC, "no space left")
        return real(handle, data)

    monkeypatch.setattr(os, "write", write)


@pytest.mark.parametrize("at", ["call", "flush", "finalize", "store"])
def test_errors_of_the_thread_are_raised_once(tmp_path, monkeypatch, at):
    run, model = started(str(tmp_path))
    log(run, model, 0)
    run.flush()
    failing_write(monkeypatch, 1.0)  # batch 1
    log(run, model, 1)
    if at == "call":
        deadline = time.monotonic() + 30
        while run._saved._outbox._error is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    else:
        log(run, model, 2)
    ask = {
        "call": lambda: log(run, model, 2),
        "flush": run.flush,
        "finalize": run.finalize,
        "store": run.store,
    }
    with pytest.raises(OSError, match="no space left") as caught:
        ask[at]()
    assert "3 rows were not saved, of the ids 3, 4, 5" in caught.value.__notes__[0]
    monkeypatch.undo()
    if at == "call":
        log(run, model, 2)
    run.flush()
    assert run.store().ids == [0, 1, 2, 6, 7, 8]
    log(run, model, 1)  # they may be logged again
    log(run, model, 3)
    run.finalize()
    store = run.store()
    assert sorted(store.ids) == list(range(12))
    np.testing.assert_array_equal(store.rows()[np.argsort(store.ids)], expected(4))


@pytest.mark.parametrize("workers", [0, 1])
def test_rows_that_are_not_finite(tmp_path, workers):
    run, model = started(str(tmp_path), {"num_workers": workers})
    run.setup({"save": "grad"})

    def nan(i):
        with run(data_id=list(range(B * i, B * (i + 1)))):
            loss_of(model, batch(i) * float("nan")).backward()
        run.flush()

    log(run, model, 0)
    for i in range(1, 5):  # more of them than there are buffers
        with pytest.raises(ValueError, match=f"the row of {B * i} has values that are not finite"):
            nan(i)
    log(run, model, 1)
    run.finalize()
    assert run.store().ids == [0, 1, 2, 3, 4, 5]
    np.testing.assert_array_equal(run.store().rows(), expected(2))


@pytest.mark.parametrize("beside", [False, True])
def test_batches_that_can_not_be_copied_take_no_room(tmp_path, beside):
    rows = lambda device: [Whole("w", torch.ones(B, 4, device=device))]
    layout = entries(rows("cpu"), frozenset({"grad"}))
    box = Outbox(RowWriter(tmp_path, [e.to_json() for e in layout]), 0, beside)

    def put(k, device):
        names, _, passed = box.writer.plan([f"{k}.{i}" for i in range(B)])
        box.writer.reserve(names, passed)
        box.put(names, rows(device), layout)

    def several():
        for _ in range(5):  # more of them than there are buffers
            with pytest.raises((RuntimeError, NotImplementedError)):
                put(0, "meta")  # what is there has no numbers
        put(0, "cpu")
        done.set()

    done = threading.Event()
    threading.Thread(target=several, daemon=True).start()
    assert done.wait(30), "it waits for a buffer"
    put(1, "cpu")
    box.close()
    store = RowStore(tmp_path)
    assert store.ids == [f"{k}.{i}" for k in range(2) for i in range(B)]
    np.testing.assert_array_equal(store.rows(), np.ones((2 * B, 4)))


@pytest.mark.parametrize("bad", [1e25, -1e25])
def test_statistics_that_are_not_finite_are_not_saved(tmp_path, bad):
    """Gradients are finite here, but their squares are not."""
    run, model = started(str(tmp_path))
    run.setup({"statistic": "kfac"})
    log(run, model, 0)
    run.finalize()
    file = tmp_path / "run" / "statistics.npz"
    before = file.read_bytes()
    with run(data_id=[3, 4, 5]):
        loss_of(model, batch(1) * bad).backward()
    with pytest.raises(ValueError, match=r"of layer .* have NaN or infinity"):
        run.finalize()
    assert file.read_bytes() == before
    run.clear()
    run.initialize_from_log()
    log(run, model, 1)
    run.finalize()
    assert file.read_bytes() != before


# --- errors in the block -------------------------------------------------------------------------


def state_of(model):
    return [p.requires_grad for p in model.parameters()], [
        len(m._forward_hooks) for m in model.modules()
    ]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_an_error_in_the_block(tmp_path, error, when):
    run, model = started(str(tmp_path))
    model.bias.requires_grad_(False)
    run.watch(model)
    before = state_of(model)
    log(run, model, 0)

    def failing():
        with run(data_id=[3, 4, 5]):
            if when == "before":
                raise error
            loss = loss_of(model, batch(1))
            if when == "between":
                raise error
            loss.backward()
            raise error

    for _ in range(3):
        with pytest.raises(error):
            failing()
        assert state_of(model) == before
        assert run.get_log() == ([], {})
    for i in range(1, 4):
        log(run, model, i)
    run.finalize()
    assert run.store().ids == list(range(12))
    np.testing.assert_array_equal(run.store().rows(), expected(4)[:, :8])
    assert int(next(iter(run.statistics.values()))["left_n"]) == 12


def test_a_batch_that_was_begun_and_not_ended(tmp_path):
    run, model = started(str(tmp_path))
    before = state_of(model)
    log(run, model, 0)
    run.start([3, 4, 5])
    loss_of(model, batch(1)).backward()  # and an error keeps `end` from being called
    run.start([3, 4, 5])
    loss_of(model, batch(1)).backward()
    run.end()
    assert state_of(model) == before
    run.finalize()
    np.testing.assert_array_equal(run.store().rows(), expected(2))


def test_duplicates_are_found_at_once_and_change_nothing(tmp_path):
    run, model = started(str(tmp_path))
    log(run, model, 0)
    log(run, model, 1)
    with pytest.raises(ValueError, match="the id 0 is there already"):
        log(run, model, 0)
    assert int(next(iter(run.statistics.values()))["left_n"]) == 6
    log(run, model, 2)
    run.finalize()
    np.testing.assert_array_equal(run.store().rows(), expected(3))


# --- changed files -------------------------------------------------------------------------------


def small_run(root):
    model = torch.nn.Linear(3, 3, bias=False)
    run = logix.LogIX("run", {"root_dir": str(root)})
    run.setup({"statistic": "kfac"})
    run.watch(model)

    def go():
        with run(data_id=[0, 1]):
            model(torch.randn(2, 3)).square().sum().backward()
        run.finalize()

    go()
    run.add_lora(init="pca", rank=2)
    run.setup({"save": "grad", "statistic": "kfac"})
    go()
    return root / "run"


def read_all(path):
    run = logix.LogIX("run", {"root_dir": str(path.parent)})
    run.initialize_from_log()
    arrays = {**run.statistics, **{f"pca {k}": v for k, v in run.compression.pca.items()}}
    return run.compression.settings, {
        k: {n: np.asarray(v) for n, v in s.items()} for k, s in arrays.items()
    }


def same(got, want):
    return got[0] == want[0] and all(
        set(got[1]) == set(want[1])
        and set(got[1][k]) == set(s)
        and all(
            got[1][k][n].dtype == x.dtype and np.array_equal(got[1][k][n], x) for n, x in s.items()
        )
        for k, s in want[1].items()
    )


@pytest.mark.parametrize("name", ["statistics.npz", "projections.npz", "compression.json"])
def test_changed_bytes_are_found(tmp_path, name):
    """Of a flipped bit either an error comes, or what was written: never something else."""
    path = small_run(tmp_path)
    want, file = read_all(path), path / name
    data = file.read_bytes()
    found = 0
    half = len(data) // 2  # the second one has the names and places of all arrays
    for place in (*range(0, half, 5), *range(half, len(data))):
        changed = bytearray(data)
        changed[place] ^= 1 << (place % 8)
        file.write_bytes(changed)
        try:
            assert same(read_all(path), want), place
        except (Damaged, FileNotFoundError):
            found += 1
    assert found > len(data) // 4
    for size in range(0, len(data), 23):
        file.write_bytes(data[:size])
        with pytest.raises(Damaged):
            read_all(path)
    file.unlink()
    with pytest.raises(FileNotFoundError):
        read_all(path)
