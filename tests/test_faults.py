"""What must hold whatever happens: processes die, disks fill up, bytes change, backends fail.

Nothing acknowledged is lost when the process dies, and corruption is always detected.
`LOX_KILLS` sets how many processes are killed at random moments.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kill_worker as worker
import lox
from kill_server import Server, kill
from kill_worker import FAR, described, expected, open_runs, write
from lox.store import compact, verify

KILLS = int(os.environ.get("LOX_KILLS", "60"))
SOAK = KILLS > 200
PATTERNS = (*(1 << i for i in range(8)), 0xFF, 0x30)  # what a byte is changed by
SHARDS = 3  # of the random kills, so that they can run beside each other

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and signals")


# --- processes -----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def shared_server():
    server = Server(worker.__file__, OPENBLAS_NUM_THREADS="1", JAX_PLATFORMS="cpu")
    yield server
    server.close()


@pytest.fixture
def server(shared_server):
    yield shared_server
    shared_server.end_jobs()


def until(done):
    """Wait for something that is bound to happen."""
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.0005)


def acknowledged(path):
    return path.read_text().split("\n")[:-1] if path.exists() else []


def writes_in(words):
    return sum(w.isdigit() for w in words)


def bits(x):
    x = np.asarray(x)
    return x.dtype, x.shape, x.tobytes()


def check_run(run, sure, maybe, lane=0):
    """A run holds the first `sure` writes, and of the next ones up to `maybe` what it holds."""
    logs = run.load()
    least, most = expected(sure, lane), expected(maybe, lane)
    assert set(logs) <= set(most)
    for key, want in most.items():
        rows = logs.get(key, want[:0])
        assert len(least[key]) <= len(rows) <= len(want), key
        assert bits(rows) == bits(want[: len(rows)]), key
        assert run.state == "open" or run.counts.get(key, 0) == len(rows)
    for key in {"a", "v"} & set(logs):
        steps = logs.step[key]
        assert bits(steps) == bits(np.arange(len(logs[key]), dtype=np.int32))
    return logs


def check_root(root, words, lanes=1):
    """All that must hold after a writer died with these acknowledgements."""
    done = writes_in(words)
    runs = lox.runs(root)
    assert not runs.damaged
    names = [f"r{lane}" for lane in range(lanes)]
    assert [r.name for r in runs] == names or ("opened" not in words and not runs)
    before = {}
    for run in runs:
        before[run.name] = check_run(run, done, done + 1, names.index(run.name))
        assert run.config == {"lr": 0.5, "lane": names.index(run.name)}
        assert run.state == "closed" or (run.state == "crashed" and "closed" not in words)
    reports = list(verify(root)) if os.path.isdir(root) else []
    assert [r.damage for r in reports] == [[] for _ in reports]

    if runs:
        states = {run.name: run.state for run in runs}
        list(compact(root))
        assert all(r.torn == 0 and not r.damage for r in verify(root))
        for run in lox.runs(root):
            assert run.state == states[run.name]  # what it was stays known
            assert_same_logs(run.load(), before[run.name])

    with lox.SaveLogger(root, exists="resume") as logger:
        open_runs(logger, lanes)
        write(logger, 999, lanes)
    for lane, name in enumerate(names):
        logs = lox.runs(root)[name].load()
        assert bits(logs["a"][-1]) == bits(np.float32(999.25 + 100 * lane))
        if name in before:
            assert_same_logs(logs.slice[:-1], before[name])
    assert not any(r.damage for r in verify(root))


def assert_same_logs(got, want):
    """The same rows and steps, bit by bit. A key without rows may be missing."""
    for key in {**got, **want}:
        rows = want[key] if key in want else got[key][:0]
        assert bits(got.get(key, rows[:0])) == bits(rows), key
        for name, by_key in want.steps.items():
            if key in by_key and key in got:
                assert bits(got.steps[name][key]) == bits(by_key[key])


# --- a writer that is killed ---------------------------------------------------------------------


@pytest.mark.parametrize("shard", range(SHARDS))
def test_killed_at_random_moments(server, tmp_path, shard):
    moment = random.Random(shard)
    moments = set()
    kills = tries = 0
    while kills < -(-KILLS // SHARDS):
        tries += 1
        assert tries < 10 * KILLS, "the writers are done before they are killed"
        root, ack = tmp_path / str(tries), tmp_path / f"{tries}.ack"
        job = dict(
            lanes=moment.choice([1, 3]),
            count=moment.choice([1, 10, 40]),
            compact=moment.random() < 0.8,
            sync_every=moment.choice([0.001, 1]),
        )
        [pid] = server.start(dict(job="write", root=str(root), ack=str(ack), **job))
        # Some time after some acknowledgement: all phases are hit, however fast the machine is.
        wanted = moment.randrange(job["count"] + 2)
        until(lambda ack=ack, wanted=wanted: len(acknowledged(ack)) >= wanted)
        time.sleep(moment.choice([0, 0.001, 0.01]) * moment.random())
        kill(pid)
        [end] = server.wait()
        kills += end == -signal.SIGKILL
        words = acknowledged(ack)
        check_root(str(root), words, job["lanes"])
        moments.add(words[-1] if words else "nothing")
        shutil.rmtree(root)
    assert len(moments) >= 5, moments  # not always at the same point


@pytest.mark.parametrize("half", [False, True], ids=["before", "half-way"])
@pytest.mark.parametrize("kind", ["compact", "keep"])
def test_killed_at_every_call(server, tmp_path, kind, half):
    """Every call that changes a file is once the last one, from the first run's folder to close."""
    for at in range(1000):
        root, ack = tmp_path / str(at), tmp_path / f"{at}.ack"
        job = dict(root=str(root), count=4, lanes=2, compact=kind == "compact")
        [end] = server.run(dict(job="crash", at=at, half=half, ack=str(ack), **job))
        words = acknowledged(ack)
        if end == 0:
            assert "closed" in words
            break
        assert end == -signal.SIGKILL
        check_root(str(root), words, 2)
    assert at > 15  # the calls of four writes, of opening and of closing


def test_killed_while_compacting(server, tmp_path):
    whole = tmp_path / "whole"
    [pid] = server.start(
        dict(job="write", root=str(whole), ack=str(tmp_path / "w"), count=200, close=False)
    )
    until(lambda: writes_in(acknowledged(tmp_path / "w")) == 200)
    kill(pid)
    server.wait()
    moment = random.Random(0)
    ends = []
    for i in range(12):
        root = tmp_path / str(i)
        shutil.copytree(whole, root)
        [pid] = server.start(dict(job="compact", root=str(root)))
        time.sleep(moment.uniform(0, 0.04))
        kill(pid)
        ends += server.wait()
        check_root(str(root), acknowledged(tmp_path / "w"))
    assert -signal.SIGKILL in ends


def start_program(tmp_path, how, steps):
    command = [sys.executable, worker.__file__, "program", tmp_path / "runs", tmp_path / "ack", how]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    return subprocess.Popen(
        [*map(str, command), str(steps)], env=env, stderr=subprocess.PIPE, text=True
    )


def check_program(run, least, most):
    logs = run.load()
    n = len(logs["x"])
    assert least <= n <= most
    want = (np.arange(n) + [0.5, 1000.5][run.lane]).astype(np.float32)
    assert bits(logs["x"]) == bits(want)
    assert bits(logs["two"]) == bits(np.stack([want, -want], 1))
    assert bits(logs.step["x"]) == bits(np.arange(n, dtype=np.int32))


@pytest.mark.parametrize("after", [1, 40, 333])
def test_jitted_program_killed(tmp_path, after):
    process = start_program(tmp_path, "SIGKILL", 100_000)
    try:
        until(lambda: writes_in(acknowledged(tmp_path / "ack")) >= after)
    finally:
        process.kill()
        process.communicate()
    done = writes_in(acknowledged(tmp_path / "ack"))
    assert not any(r.damage for r in verify(tmp_path / "runs"))
    for _ in range(2):
        runs = lox.runs(tmp_path / "runs")
        assert [r.name for r in runs] == ["r0", "r1"]
        for run in runs:
            check_program(run, done, done + 1)
        list(compact(tmp_path / "runs"))


# --- a program that ends -------------------------------------------------------------------------

ENDS = {"end": 0, "exception": 1, "sys.exit": 3, "SIGTERM": -signal.SIGTERM, "os._exit": 4}
CLOSED = ("end", "exception", "sys.exit")


@pytest.mark.parametrize("how", ENDS)
def test_exit(server, tmp_path, how):
    root = str(tmp_path / "runs")
    assert server.run(dict(job="exit", root=root, how=how, count=7)) == [ENDS[how]]
    [run] = lox.runs(root)
    check_run(run, 7, 7)
    assert run.state == ("closed" if how in CLOSED else "crashed")
    assert os.path.exists(os.path.join(run.path, "0.parquet")) == (how in CLOSED)


@pytest.mark.parametrize("how", ["exception", "sys.exit", "SIGTERM"])
def test_jitted_program_exits(tmp_path, how):
    process = start_program(tmp_path, how, 50)
    _, error = process.communicate(timeout=60)
    assert process.returncode == ENDS[how]
    assert ("the program's own error" in error) == (how == "exception")
    runs = lox.runs(tmp_path / "runs")
    assert len(runs) == 2
    for run in runs:
        check_program(run, 50, 50)
        assert run.state == ("closed" if how in CLOSED else "crashed")


def test_with_block_left_by_exception(tmp_path):
    error = ZeroDivisionError("the program's own")
    with pytest.raises(ZeroDivisionError) as caught:  # noqa: PT012
        with lox.SaveLogger(tmp_path) as logger:
            state = logger.init(jax.random.key(0), name="r")
            logger.log(state, {"x": 1.5})
            raise error
    assert caught.value is error
    [run] = lox.runs(tmp_path)
    assert run.state == "closed"
    assert run.load()["x"].tolist() == [1.5]


# --- several processes ---------------------------------------------------------------------------


def test_four_processes_in_one_folder(server, tmp_path):
    root = str(tmp_path / "runs")
    job = dict(job="race", root=root, start=str(tmp_path / "go"), count=25, lanes=2)
    server.start(*(dict(job, key=k, name=f"p{k}-{{lane}}") for k in range(4)))
    (tmp_path / "go").touch()
    assert server.wait() == [0] * 4
    runs = lox.runs(root)
    assert sorted(r.name for r in runs) == [f"p{k}-{i}" for k in range(4) for i in range(2)]
    for run in runs:
        check_run(run, 25, 25, run.lane)
    assert not any(r.damage for r in verify(root))


@pytest.mark.parametrize("exists", ["error", "resume", "overwrite"])
def test_race_for_one_name(server, tmp_path, exists):
    """Exactly one process gets the run; the others are told."""
    for attempt in range(3):
        root = str(tmp_path / str(attempt))
        acks = [tmp_path / f"{attempt}-{i}" for i in range(4)]
        job = dict(job="race", root=root, count=3, exists=exists, close=False)
        start = str(tmp_path / f"{attempt}-go")
        pids = server.start(*(dict(job, start=start, ack=str(a)) for a in acks))
        open(start, "w").close()
        last = lambda ack: acknowledged(ack)[-1:]
        until(lambda acks=acks, last=last: all(last(a) in (["exists"], ["2"]) for a in acks))
        words = [acknowledged(a) for a in acks]
        [winner] = [i for i, w in enumerate(words) if "opened" in w]
        [run] = lox.runs(root)
        assert run.state == "open"
        check_run(run, 3, 3)
        with pytest.raises(lox.loggers.RunExists, match="r0"):
            open_runs(lox.SaveLogger(root, exists=exists))
        kill(pids[winner])
        server.wait()
        assert lox.runs(root)["r0"].state == "crashed"


def test_reading_while_another_process_writes(server, tmp_path):
    """A reader sees a prefix that grows, also while the run is closed and compacted."""
    seen_states = set()
    for attempt in range(4):
        root = str(tmp_path / str(attempt))
        total = 60
        server.start(dict(job="write", root=root, count=total, pause=0.0005, sync_every=0.002))
        seen, held = 0, None
        deadline = time.monotonic() + 60
        while seen < total or held.state != "closed":
            assert time.monotonic() < deadline
            runs = lox.runs(root)
            assert not runs.damaged
            if not runs:
                continue
            # One found earlier is as good: it is read as it is now.
            held = held if held is not None and seen % 2 else runs["r0"]
            seen_states.add(held.state)
            # The latest write may be in one of its two tables only.
            logs = check_run(held, max(seen - 1, 0), total)
            assert not any(r.damage for r in verify(root))
            seen = len(logs["b"]) if "b" in logs else 0
            if seen == total:
                held = lox.runs(root)["r0"]
        assert server.wait() == [0]
    assert "open" in seen_states


def test_two_compactions_at_once(server, tmp_path):
    """Whoever comes second leaves what the first one made."""
    root = str(tmp_path / "runs")
    for name in ("one", "two"):
        job = dict(job="exit", root=root, how="os._exit", count=3, name=name)
        assert server.run(job) == [ENDS["os._exit"]]
    slow = compact(root)
    next(slow)
    list(compact(root))
    list(slow)
    assert not any(r.damage for r in verify(root))
    for name in ("one", "two"):
        run = lox.runs(root)[name]
        assert (run.state, os.listdir(run.path).count("0.parquet")) == ("crashed", 1)
        check_run(run, 3, 3)


# --- files that are changed ----------------------------------------------------------------------

FORMS = ["crashed", "synced", "kept", "closed"]


def small_run(path, form):
    """A run of three writes. Crashed, the same with all of it on disk, or closed in both ways."""
    live = lox.SaveLogger(path / "live", sync_every=FAR, compact=form == "closed")
    open_runs(live)
    for i in range(3):
        logs = lox.logdict(
            {"a": np.float32(i + 0.1), "v": np.arange(3, dtype=np.int16) + i}, step=i
        )
        live.host_write("r{lane}", worker.KIND, logs, worker.ids()[0])
    if form == "synced":
        live.flush()
    if form in ("kept", "closed"):
        live.close()
    root = path / form
    shutil.copytree(path / "live", root)
    live.close()
    run = lox.runs(root)["r0"]
    assert run.state == ("closed" if form in ("kept", "closed") else "crashed")
    files = [n for n in os.listdir(root / "r0") if n != "lock"]
    data = {"crashed": ["0.arrows"], "synced": ["0.arrows", "synced.json"], "kept": ["0.arrows"]}
    assert sorted(files) == sorted([*data.get(form, ["0.parquet"]), "manifest.json"])
    if form == "synced":
        files.remove("manifest.json")  # the same as when crashed
    return root, run.load(), [root / "r0" / n for n in sorted(files)]


def is_damaged(root):
    return any(r.damage for r in verify(root))


def loaded(root, **options):
    """What a reader gets, or None if it is told that something is wrong."""
    runs = lox.runs(root)
    if runs.damaged:
        assert not runs
        return None
    try:
        return runs["r0"].load(**options)
    except lox.Damaged:
        return None


def assert_some_rows_of(got, want):
    """Nothing but rows that were written, in order, keys and steps in line."""
    assert set(got) <= set(want)
    for key in got:
        kept = np.flatnonzero(np.isin(want.step[key], got.step[key]))
        assert bits(got[key]) == bits(want[key][kept])
        assert bits(got.step[key]) == bits(want.step[key][kept])


@pytest.mark.parametrize("form", FORMS)
def test_every_byte_flipped(tmp_path, form):
    root, want, files = small_run(tmp_path, form)
    for path in files:
        good = path.read_bytes()
        for at in range(len(good)):
            for pattern in PATTERNS if SOAK else (PATTERNS[at % len(PATTERNS)],):
                path.write_bytes(good[:at] + bytes([good[at] ^ pattern]) + good[at + 1 :])
                where = f"{path.name} byte {at} ^ {pattern}"
                assert is_damaged(root), where
                logs = loaded(root)
                if logs is not None:
                    assert_same_logs(logs, want)
                    continue
                logs = loaded(root, damaged="skip")
                if logs is not None:
                    assert_some_rows_of(logs, want)
        path.write_bytes(good)
    assert not is_damaged(root)
    assert_same_logs(loaded(root), want)


@pytest.mark.parametrize("form", FORMS)
def test_truncated_at_every_byte(tmp_path, form):
    root, want, files = small_run(tmp_path, form)
    for path in files:
        good = path.read_bytes()
        rows = []
        for size in range(len(good)):
            path.write_bytes(good[:size])
            logs = loaded(root)
            if form == "crashed" and path.name == "0.arrows":
                # As after a kill in the middle of a write: what is whole is there, no alarm.
                assert not is_damaged(root), size
                assert_same_logs(logs, want.slice[: len(logs.get("a", ()))])
                rows.append(len(logs.get("a", ())))
            else:
                assert is_damaged(root), (path.name, size)
                assert logs is None, (path.name, size)
        path.write_bytes(good)
        assert rows == sorted(rows)
        assert set(rows) <= {0, 1, 2}
        assert bool(rows) == (form == "crashed" and path.name == "0.arrows")
    assert_same_logs(loaded(root), want)


@pytest.mark.parametrize("form", FORMS)
def test_bytes_added(tmp_path, form):
    root, want, files = small_run(tmp_path, form)
    for path in files:
        good = path.read_bytes()
        for more in (b"\0", b"\0" * 64, b"\xff" * 64, b"lox" * 20, good[-40:]):
            path.write_bytes(good + more)
            if path.name != "0.arrows":  # a stream may have been cut off in the middle of a write
                assert is_damaged(root), (path.name, more)
            logs = loaded(root)
            if logs is not None:
                assert_same_logs(logs, want)
        path.write_bytes(good)


@pytest.mark.parametrize("form", FORMS)
def test_missing_file(tmp_path, form):
    """A file that is known to have been there is missed; a folder without manifest is no run."""
    root, _, files = small_run(tmp_path, form)
    for path in files:
        good = path.read_bytes()
        path.unlink()
        logs = loaded(root) if len(lox.runs(root)) else None
        if path.name.startswith("0") and form != "crashed":
            assert is_damaged(root), path
            assert logs is None
        path.write_bytes(good)
    assert not is_damaged(root)


# --- a disk that fails ---------------------------------------------------------------------------


class Failing:
    """Replaces a function of `os`: its calls from number `at` on fail, `times` of them."""

    def __init__(self, name, code, at=0, times=1, short=False):
        self.name, self.code, self.at, self.times, self.short = name, code, at, times, short
        self.real, self.calls, self.failed = getattr(os, name), 0, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if not self.at < self.calls <= self.at + self.times:
            return self.real(*args, **kwargs)
        if self.short and self.calls == self.at + 1:
            return self.real(args[0], args[1][: len(args[1]) // 2])
        self.failed += 1
        path = () if isinstance(args[0], int) else (args[0],)  # as the real ones do
        raise OSError(self.code, os.strerror(self.code), *path)

    def __enter__(self):
        self.patch = mock.patch(f"os.{self.name}", self)
        self.patch.start()
        return self

    def __exit__(self, *error):
        self.patch.stop()


def faulty_session(root, compacting):
    """Open, write, flush, write, close. Returns what was raised where it may be raised."""
    logger = lox.SaveLogger(root, sync_every=FAR, compact=compacting)
    raised = []

    def attempt(do):
        try:
            do()
        except OSError as error:
            raised.append(error)

    attempt(lambda: open_runs(logger))
    for i in range(3):
        write(logger, i)
    attempt(logger.flush)
    for i in range(3, 6):
        write(logger, i)
    attempt(logger.flush)
    attempt(logger.close)
    return raised


def check_faulty(root, raised, code, most_lost):
    """Errors have their own type and name a file; a write is there as a whole or not at all."""
    for error in raised:
        assert error.errno == code
        told = "\n".join([*described(error), str(error.filename)])
        assert root in told, f"does not name the file: {told}"
        assert "SaveLogger" in told, f"does not name the logger: {told}"
    assert not any(r.damage for r in verify(root))
    [run] = lox.runs(root)
    logs = run.load()
    there = logs.step["a"].tolist()
    assert len(there) >= 6 - most_lost
    assert raised or there == list(range(6))
    whole = expected(6)
    of_late = [i for i in there if i >= 3]
    picks = {"a": there, "v": there, "b": there, "late": [i - 3 for i in of_late]}
    for key, pick in picks.items():
        assert bits(logs.get(key, whole[key][:0])) == bits(whole[key][pick]), key
    list(compact(root))
    assert_same_logs(lox.runs(root)["r0"].load(), logs)
    assert not any(r.damage for r in verify(root))


FAULTS = [
    ("write", errno.ENOSPC, False),
    ("write", errno.EIO, False),
    ("write", errno.ENOSPC, True),
    ("fsync", errno.EIO, False),
    ("replace", errno.EIO, False),
    ("mkdir", errno.ENOSPC, False),
]


@pytest.mark.parametrize("compacting", [True, False], ids=["compact", "keep"])
@pytest.mark.parametrize(("name", "code", "short"), FAULTS)
def test_one_call_fails(tmp_path, name, code, short, compacting):
    """Each call in turn fails once. Then there is space again, and later writes are kept."""
    for at in range(200):
        root = str(tmp_path / str(at))
        with Failing(name, code, at, 1 + short, short) as fault:
            raised = faulty_session(root, compacting)
        if not fault.failed:
            break
        assert raised, f"call {at} of os.{name} failed and nobody was told"
        check_faulty(root, raised, code, most_lost=1)
    assert at > (1 if name == "mkdir" else 2)


@pytest.mark.parametrize(("name", "code", "short"), FAULTS[:4])
def test_all_calls_fail_for_a_while(tmp_path, name, code, short):
    for at in range(8):
        root = str(tmp_path / str(at))
        logger = lox.SaveLogger(root, sync_every=FAR)
        open_runs(logger)
        raised = []
        with Failing(name, code, at, 10**9, short) as fault:
            for i in range(6):
                write(logger, i)
            try:
                logger.flush()
            except OSError as error:
                raised.append(error)
        assert len(raised) == bool(fault.failed)
        for i in range(6, 9):
            write(logger, i)
        logger.close()
        for error in raised:
            assert error.errno == code
            assert root in "".join([*described(error), str(error.filename)])
        [run] = lox.runs(root)
        steps = run.load().step["a"].tolist()
        assert steps[-3:] == [6, 7, 8]
        assert steps == sorted(set(steps))
        assert not any(r.damage for r in verify(root))
    assert not fault.failed or name == "write"


def test_short_writes(tmp_path):
    """A write that takes only some bytes each time is no error."""
    real = os.write
    with mock.patch("os.write", lambda handle, data: real(handle, bytes(data)[:7])):
        assert faulty_session(str(tmp_path), True) == []
    check_run(lox.runs(tmp_path)["r0"], 6, 6)
    assert lox.runs(tmp_path)["r0"].state == "closed"


@pytest.mark.parametrize("compacting", [True, False], ids=["compact", "keep"])
def test_write_that_can_not_be_taken_back(tmp_path, compacting):
    root = str(tmp_path / "runs")
    logger = lox.SaveLogger(root, sync_every=FAR, compact=compacting)
    open_runs(logger)
    write(logger, 0)
    with Failing("write", errno.ENOSPC, 0, 2, short=True), Failing("ftruncate", errno.EIO, 0, 99):
        write(logger, 1)
    write(logger, 2)
    with pytest.raises(OSError, match="space"):
        logger.flush()
    logger.close()
    assert lox.runs(root)["r0"].load().step["a"].tolist() == [0, 2]
    assert not any(r.damage for r in verify(root))


@pytest.mark.parametrize("limit", [0, 900, 2000])
def test_file_size_limit(server, tmp_path, limit):
    """The operating system itself refuses to let files grow."""
    root, ack = str(tmp_path / "runs"), tmp_path / "ack"
    assert server.run(dict(job="limit", root=root, ack=str(ack), limit=limit, count=10)) == [0]
    told, closed = acknowledged(ack)
    code, kind, *words = json.loads(told)
    assert (code, kind, closed) == (errno.EFBIG, "OSError", "closed")
    assert root in "".join(words)
    steps = lox.runs(root)["r0"].load().step["a"].tolist()
    assert steps[-10:] == list(range(10, 20))
    assert steps == sorted(set(steps))
    assert len(steps) < 20
    assert not any(r.damage for r in verify(root))


def test_error_of_the_syncing_thread_is_raised_at_flush(tmp_path):
    logger = lox.SaveLogger(tmp_path, sync_every=0.001)
    open_runs(logger)
    with Failing("fsync", errno.EIO, 0, 1) as fault:
        write(logger, 0)
        until(lambda: fault.failed)
    with pytest.raises(OSError, match="Input/output") as caught:
        logger.flush()
    assert str(tmp_path) in "".join(described(caught.value))
    write(logger, 1)
    logger.close()
    check_run(lox.runs(tmp_path)["r0"], 2, 2)


def test_directory_removed(tmp_path):
    root, other = str(tmp_path / "runs"), str(tmp_path / "other")
    logger = lox.MultiLogger(lox.SaveLogger(root), lox.SaveLogger(other))
    open_runs(logger)
    write(logger, 0)
    shutil.rmtree(root)
    for i in range(1, 5):
        write(logger, i)
    with pytest.raises(FileNotFoundError) as caught:
        logger.flush()
    assert root in "".join(described(caught.value))
    write(logger, 5)
    with pytest.raises(FileNotFoundError) as caught:
        logger.close()
    assert root in "".join(described(caught.value))
    run = lox.runs(other)["r0"]
    check_run(run, 6, 6)
    assert run.state == "closed"


@pytest.mark.parametrize("where", ["file", "inside a file", "/proc", "read-only"])
def test_path_that_can_not_be_made(tmp_path, where):
    (tmp_path / "file").touch()
    (tmp_path / "closed").mkdir(mode=0o500)
    path = {
        "file": tmp_path / "file",
        "inside a file": tmp_path / "file" / "runs",
        "/proc": "/proc/lox",
        "read-only": tmp_path / "closed" / "runs",
    }[where]
    if where == "read-only" and os.access(tmp_path / "closed", os.W_OK):
        pytest.skip("this user may write anywhere")
    logger = lox.SaveLogger(path)
    with pytest.raises(OSError) as caught:
        logger.init(jax.random.key(0), name="r")
    assert caught.value.errno
    assert str(path) in "".join(described(caught.value))

    # Inside of a program: the next eager call or flush tells, and the siblings have everything.
    other = tmp_path / "other"
    both = lox.MultiLogger(lox.SaveLogger(path), lox.SaveLogger(other))
    states = jax.jit(jax.vmap(lambda k: both.init(k, name="r{lane}")))(
        jax.random.split(jax.random.key(0), 3)
    )
    run = jax.jit(jax.vmap(lambda s, x: both.tap(logged, s)(x)))
    out = run(states, jnp.arange(3.0))
    np.testing.assert_array_equal(out, [1, 2, 3])
    with pytest.raises(type(caught.value)) as again:
        both.flush()
    assert str(path) in "".join(described(again.value))
    run(states, jnp.arange(3.0))
    with pytest.raises(type(caught.value)):  # by the events that came since
        both.close()
    assert [r.load()["x"].tolist() for r in lox.runs(other)] == [[0, 0], [1, 1], [2, 2]]


# --- a backend that fails ------------------------------------------------------------------------


def logged(x):
    lox.log({"x": x})
    return x + 1


class Down(Exception):
    """An error of the backend's own type."""


class Broken(lox.loggers.Logger):
    """Fails where it is told to."""

    def __init__(self, at=("write",), after=0, **options):
        super().__init__(**options)
        self.at, self.left, self.written = at, after, []

    def fail(self, what):
        if what in self.at:
            self.left -= 1
            if self.left < 0:
                raise Down(f"the tracker is down ({what})")

    def open_run(self, info):
        self.fail("open")
        return info.name

    def write_run(self, run, logs):
        self.fail("write")
        self.written.append((run, logs["x"].tolist()))

    def flush_run(self, run):
        self.fail("flush")

    def close_run(self, run):
        self.fail("close")


class Quick(Broken):
    slow = False


class Hanging(Broken):
    def __init__(self, **options):
        super().__init__(at=(), **options)
        self.release = threading.Event()

    def write_run(self, run, logs):
        self.release.wait(60)


@pytest.fixture
def sibling(tmp_path):
    return lox.SaveLogger(tmp_path / "sibling")


def in_sibling(sibling):
    return {r.name: r.load()["x"].tolist() for r in lox.runs(sibling.path)}


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("kind", [Broken, Quick])
@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
def test_backend_that_raises(sibling, kind, first, jitted):
    broken = kind(after=1)
    logger = lox.MultiLogger(*((broken, sibling) if first else (sibling, broken)))
    state = logger.init(jax.random.key(0), name="r")
    fun = logger.tap(logged, state)
    fun = jax.jit(fun) if jitted else fun
    for i in range(4):
        assert fun(float(i)) == i + 1  # the program goes on
    with pytest.raises(Down, match=r"down \(write\)") as caught:
        logger.flush()
    told = "".join(described(caught.value))
    assert "could not write 'x'" in told
    assert kind.__name__ in told
    assert "2 more" in told
    logger.flush()  # raised once
    logger.log(state, {"x": 9.0})
    with pytest.raises(Down):
        logger.close()
    assert broken.written == [("r", [0.0])]
    assert in_sibling(sibling) == {"r": [0, 1, 2, 3, 9]}
    assert lox.runs(sibling.path)["r"].state == "closed"


@pytest.mark.parametrize("kind", [Broken, Quick])
def test_backend_that_recovers(kind):
    logger = kind(after=0)
    state = logger.init(jax.random.key(0), name="r")
    logger.log(state, {"x": 1.0})
    with pytest.raises(Down):
        logger.flush()
    logger.left = 10**9
    logger.log(state, {"x": 2.0})
    logger.close()
    assert logger.written == [("r", [2.0])]


@pytest.mark.parametrize("at", ["flush", "close"])
def test_backend_that_raises_at_the_end(sibling, at):
    logger = lox.MultiLogger(Broken(at=(at,)), sibling)
    states = jax.vmap(lambda k: logger.init(k, name="r{lane}"))(
        jax.random.split(jax.random.key(0), 3)
    )
    jax.vmap(lambda s, x: logger.tap(logged, s)(x))(states, jnp.arange(3.0))
    with pytest.raises(Down, match=at):
        logger.flush() if at == "flush" else logger.close()
    if at == "flush":
        logger.close()
    assert in_sibling(sibling) == {"r0": [0], "r1": [1], "r2": [2]}
    assert logger.loggers[0].written == [("r0", [0]), ("r1", [1]), ("r2", [2])]


def test_backend_that_can_not_open(sibling):
    logger = Broken(at=("open",))
    with pytest.raises(Down, match="open") as caught:
        logger.init(jax.random.key(0), name="r")
    assert "could not begin 'r'" in "".join(described(caught.value))

    logger = lox.MultiLogger(Broken(at=("open",)), sibling)
    state = jax.jit(lambda k: logger.init(k, name="r"))(jax.random.key(0))
    jax.block_until_ready(state)
    with pytest.raises(Down, match="open"):
        logger.tap(logged, state)(1.0)
    assert logger.tap(logged, state)(2.0) == 3.0  # told once; then the program goes on
    with pytest.raises(Down, match="open"):
        logger.close()
    assert in_sibling(sibling) == {"r": [2]}


def test_one_run_can_not_be_opened(tmp_path):
    """The logger's other runs have their events."""
    logger = Quick(at=("open",), after=1)
    ok = logger.init(jax.random.key(0), name="ok")
    bad = jax.jit(lambda k: logger.init(k, name="bad"))(jax.random.key(1))
    jax.block_until_ready(bad)
    with pytest.raises(Down):
        logger.flush()
    logger.log(ok, {"x": 1.0})
    logger.log(bad, {"x": 2.0})
    with pytest.raises(Down):
        logger.close()
    assert logger.written == [("ok", [1.0])]


@pytest.mark.parametrize("lanes", [1, 16])
def test_backend_that_hangs(sibling, lanes):
    hanging = Hanging(timeout=0.2, capacity=4)
    logger = lox.MultiLogger(hanging, sibling)
    states = jax.vmap(lambda k: logger.init(k, name="r{lane}"))(
        jax.random.split(jax.random.key(0), lanes)
    )
    fun = jax.vmap(lambda s, x: logger.tap(logged, s)(x))
    try:
        for i in range(8):
            fun(states, jnp.full(lanes, float(i)))
        start = time.monotonic()
        with pytest.raises(TimeoutError, match="Hanging") as caught:
            logger.flush()
        assert "timeout=" in "".join(described(caught.value))
        with pytest.warns(RuntimeWarning, match="gave up"), pytest.raises(TimeoutError):
            logger.close()
        assert time.monotonic() - start < 3  # not once for each run
        assert hanging.dropped == 8
        assert in_sibling(sibling) == {f"r{i}": list(range(8)) for i in range(lanes)}
    finally:
        hanging.release.set()


def test_strict_raises_at_once(sibling):
    logger = lox.MultiLogger(Broken(strict=True), sibling)
    state = logger.init(jax.random.key(0), name="r")
    with pytest.raises(Down, match="write"):
        logger.log(state, {"x": 1.0})
    with pytest.raises(Down, match="write"):
        logger.tap(logged, state)(2.0)
    with pytest.raises(Down, match="write"):
        logger.spool(logged, state)(3.0)
    with pytest.raises(Down):
        logger.flush()
    logger.flush()
    logger.close()
    assert in_sibling(sibling) == {"r": [1, 2, 3]}


def test_strict_stops_a_jitted_program(sibling):
    logger = lox.MultiLogger(Broken(strict=True, after=2), sibling)
    state = logger.init(jax.random.key(0), name="r")

    def train(x):
        step = lambda x, i: (logged(x), None)
        return jax.lax.scan(step, x, jnp.arange(50))[0]

    with pytest.raises(jax.errors.JaxRuntimeError, match="the tracker is down"):
        jax.block_until_ready(jax.jit(logger.tap(train, state))(0.0))
    with pytest.raises(Down, match="write"):
        logger.flush()
    logger.close()
    assert in_sibling(sibling) == {"r": [0, 1, 2]}  # it was stopped, not run to its end


def test_closed_logger_takes_no_more(tmp_path):
    logger = lox.SaveLogger(tmp_path)
    state = logger.init(jax.random.key(0), name="r")
    program = jax.jit(logger.tap(logged, state))
    program(1.0)
    logger.close()
    logger.close()  # twice is once
    calls = [
        lambda: logger.log(state, {"x": 1.0}),
        lambda: logger.init(jax.random.key(1)),
        lambda: logger.tap(logged, state)(1.0),
        lambda: logger.spool(logged, state)(1.0),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="closed"):
            call()
    assert program(2.0) == 3.0  # compiled before: it runs, and its events are told of
    with pytest.raises(ValueError, match="closed"):
        logger.flush()
    assert lox.runs(tmp_path)["r"].load()["x"].tolist() == [1.0]


def test_thousands_of_errors_are_one(sibling):
    """What a broken backend keeps does not grow."""
    logger = Quick(after=0)
    state = logger.init(jax.random.key(0), name="r")
    for _ in range(200):
        logger.log(state, {"x": 1.0})
    with pytest.raises(Down) as caught:
        logger.flush()
    assert "199 more" in "".join(described(caught.value))
    assert len(caught.value.__notes__) <= 3
    logger.close()
