"""The console: what its board knows against NumPy, and what is seen of it where."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
import textwrap
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import lox
from lox._entry import Entry, Layout
from lox._logdict import logdict
from lox.loggers import _board_view, _live, _screen
from lox.loggers._board import HISTORY, Board
from lox.loggers._console import ConsoleLogger


class Tty(io.StringIO):
    def isatty(self):
        return True


def rows(values, mask=None, **steps) -> logdict:
    """A message: (runs, E, …) for each key."""
    values = values if isinstance(values, dict) else {"x": values}
    ranks = tuple(s.ndim - 2 for s in steps.values())
    make = lambda v: Entry(v, dict(steps), Layout(True, (v.ndim - 2,), ranks), mask)
    return logdict.of_entries({k: make(np.asarray(v)) for k, v in values.items()})


def one_line(board: Board):
    [line] = board.snapshot().lines
    return line


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert not isinstance(sys.stdout, _live.Above)
    assert not _screen.PAINTER._targets
    deadline = time.monotonic() + 2
    while any(t.name == "lox console" for t in threading.enumerate()):
        assert time.monotonic() < deadline, "the thread goes on"
        time.sleep(0.01)


# --- the board -----------------------------------------------------------------------------------


def test_numbers_over_runs_are_those_of_numpy():
    values = np.random.default_rng(0).normal(size=(256, 3)).astype(np.float32)
    board = Board()
    board.write(board.open(256), rows(values, step=np.tile([4, 5, 6], (256, 1))))
    line, last = one_line(board), values[:, -1].astype(float)
    np.testing.assert_allclose(
        [line.mean, line.std, line.low, line.high],
        [last.mean(), last.std(), last.min(), last.max()],
    )
    assert (line.runs, line.bad, line.behind, line.ahead) == (256, 0, 6, 6)
    np.testing.assert_allclose(line.history, values.mean(0), rtol=1e-5)


def test_runs_may_come_one_by_one_and_later():
    board = Board()
    a, b = board.open(2)
    board.write([b], rows([[2.0]], step=np.array([[1]])))
    assert (one_line(board).runs, one_line(board).mean) == (1, 2.0)
    [c] = board.open(1)
    board.write([a, c], rows([[4.0], [6.0]], step=np.array([[1], [9]])))
    line = one_line(board)
    assert (line.runs, line.mean, line.behind, line.ahead) == (3, 4.0, 1, 9)
    board.write([c, a], rows([[0.0], [1.0]], step=np.array([[10], [10]])))
    assert (one_line(board).low, one_line(board).high) == (0.0, 2.0)
    assert board.snapshot().runs == 3


def test_of_masked_events_the_last_that_happened_is_shown():
    mask = np.array([[True, False], [True, True], [False, False]])
    board = Board()
    board.write(board.open(3), rows([[1.0, 99.0], [2.0, 3.0], [99.0, 99.0]], mask))
    line = one_line(board)
    assert (line.runs, line.low, line.high) == (2, 1.0, 3.0)
    assert (line.behind, line.ahead) == (1, 2), "events are counted"


def test_arrays_are_shown_by_their_mean_and_shape():
    board = Board()
    board.write(board.open(2), rows(np.arange(24.0).reshape(2, 2, 2, 3)))
    line = one_line(board)
    assert (line.shape, line.low, line.high) == ((2, 3), 8.5, 20.5)
    assert "x [2×3]" in str(_board_view.frame(board.snapshot(), 100))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", "bool", "complex64", "uint8"])
def test_types(dtype):
    board = Board()
    board.write(board.open(2), rows(np.asarray(jnp.ones((2, 1), dtype))))
    assert one_line(board).mean == 1.0


def test_pytrees_text_and_arrays_without_elements():
    board = Board()
    entry = Entry({"a": np.ones((1, 1)), "b": np.zeros((1, 1, 0))}, {}, Layout(True, (0, 1)))
    board.write(board.open(1), logdict.of_entries({"tree": entry}))
    board.write([0], rows({"note": np.array([["hello"]])}))
    lines = {x.key: x for x in board.snapshot().lines}
    assert list(lines) == ["tree/a", "tree/b", "note"]
    assert np.isnan(lines["tree/b"].mean)
    assert "hello" in str(_board_view.frame(board.snapshot(), 100))
    assert "note hello" in _board_view.line(board.snapshot())
    assert "hello" in _board_view.html(board.snapshot())


def test_the_history_of_many_events_is_short_and_evenly_spaced():
    board = Board()
    runs = board.open(2)
    for start, stop in [(0, 1), (1, 7), (7, 5000), *((i, i + 1) for i in range(5000, 5300))]:
        board.write(runs, rows(np.tile(np.arange(start, stop), (2, 1))))
    history = one_line(board).history
    assert HISTORY / 4 < len(history) <= HISTORY
    assert len(set(np.diff(history))) == 1


def test_what_is_not_finite_is_counted_and_red():
    board = Board()
    runs = board.open(3)
    board.write(
        runs, rows({"some": [[1.0], [np.nan], [3.0]], "all": [[np.nan]] * 3, "inf": [[np.inf]] * 3})
    )
    some, every, inf = board.snapshot().lines
    assert (some.mean, some.bad, every.bad) == (2.0, 1, 3)
    assert np.isnan(every.mean)
    assert inf.mean == np.inf
    frame = _board_view.frame(board.snapshot(), 120)
    red = [text.strip() for line in frame.lines for text, style in line if style == "bad"]
    assert {"1/3 not finite", "nan", "inf"} <= set(red)
    assert "(1/3 not finite)" in _board_view.line(board.snapshot())
    assert '<span class="bad">nan</span>' in _board_view.html(board.snapshot())


def test_speed_and_time_left():
    now = [0.0]
    board = Board(total=100, clock=lambda: now[0])
    runs = board.open(4)
    for i in range(30):
        now[0] = i * 0.5
        board.write(runs, rows(np.zeros((4, 1)), step=np.full((4, 1), i)))
        shot = board.snapshot()
    assert shot.rate == pytest.approx(2.0)
    assert shot.done == 30, "steps that begin at 0"
    assert shot.left == pytest.approx(70 / 2.0)
    assert "4 runs · 2.000 steps/s" in _board_view.head(shot)
    assert "30/100" in str(_board_view.frame(shot, 100))
    assert "eta 0:00:35" in str(_board_view.frame(shot, 100))
    now[0] += 60
    assert board.snapshot().rate < 0.1, "it stands still"
    assert board.snapshot(final=True).rate == pytest.approx(2.0), "that of the whole time"


def test_progress_is_measured_in_steps_if_there_are_any():
    board = Board(total=10)
    runs = board.open(1)
    board.write(runs, rows({"count": np.zeros((1, 7))}))
    assert board.snapshot().done == 7
    board.write(runs, rows({"other": np.zeros((1, 1))}, time=np.array([[0.5]])))
    assert (board.snapshot().axis, board.snapshot().done) == ("time", 0.5)
    board.write(runs, rows({"x": np.zeros((1, 2))}, step=np.array([[2, 3]])))
    assert (board.snapshot().axis, board.snapshot().done) == ("step", 3)


def test_keys_are_chosen_by_patterns():
    board = Board(keys=["loss/*", "lr"])
    board.write(board.open(1), rows({k: [[1.0]] for k in ("loss/a", "lr", "lrate", "b")}))
    assert [x.key for x in board.snapshot().lines] == ["loss/a", "lr"]


def test_the_table_fits():
    board = Board(total=10)
    data = {f"a/rather/long/name/{i}": [[1.0], [2.0]] for i in range(20)}
    board.write(board.open(2), rows(data, step=np.ones((2, 1), int)))
    for width in (30, 50, 80, 200):
        lines = str(_board_view.frame(board.snapshot(), width, 12)).splitlines()
        assert max(map(len, lines)) <= width
        assert len(lines) <= 12
        assert lines[-1].startswith("… 12 more keys")
    assert len(str(_board_view.frame(board.snapshot(), 80)).splitlines()) == 23
    assert "and 12 more keys" in _board_view.line(board.snapshot())


def test_a_write_of_many_runs_costs_as_much_as_one():
    def cost(count):
        board = Board()
        runs = board.open(count)
        logs = rows({f"k{i}": np.ones((count, 1)) for i in range(10)}, step=np.zeros((count, 1)))
        best = 1.0
        for _ in range(30):
            start = time.perf_counter()
            for _ in range(10):
                board.write(list(runs), logs)
            best = min(best, (time.perf_counter() - start) / 10)
        return best

    assert cost(256) < 2 * cost(1) + 5e-5


# --- programs ------------------------------------------------------------------------------------


def train(logger, state, lr):
    def update(x, i):
        lox.log({"loss": x**2}, step=i)
        return x - lr * x, None

    return logger.tap(lambda x: jax.lax.scan(update, x, jnp.arange(20))[0], state)(1.0)


def test_256_vmapped_runs_in_jit():
    out = io.StringIO()
    rates = jnp.linspace(0.0, 0.5, 256)
    with ConsoleLogger(total=20, file=out) as logger:
        states = jax.vmap(logger.init)(jax.random.split(jax.random.key(0), 256))
        jax.jit(jax.vmap(lambda s, r: train(logger, s, r)))(states, rates)
    [line] = out.getvalue().splitlines()
    x = np.ones(256, np.float32)
    for _ in range(19):
        x = x - np.asarray(rates) * x
    shot = logger._board.snapshot(final=True)
    assert shot.runs == 256
    np.testing.assert_allclose(shot.lines[0].mean, (x**2).mean(), rtol=1e-4)
    np.testing.assert_allclose(shot.lines[0].std, (x**2).std(), rtol=1e-4)
    assert re.match(
        r"\[0:00:\d\d\] 256 runs · step 19/20 · 100% · .* · loss 0\.\d+ ± 0\.\d+$", line
    )


def test_the_same_key_again_goes_on():
    with ConsoleLogger(file=io.StringIO()) as logger:
        for _ in range(2):
            logger.log(logger.init(jax.random.key(0)), {"x": 1.0})
    assert logger._board.snapshot().runs == 1
    assert logger._board.snapshot().lines[0].ahead == 2


def test_nothing_is_printed_of_nothing():
    out, tty = io.StringIO(), Tty()
    with ConsoleLogger(file=out) as a, ConsoleLogger(file=tty) as b:
        a.init(jax.random.key(0))
        b.init(jax.random.key(0))
    assert out.getvalue() == tty.getvalue() == ""


def test_lines_from_time_to_time():
    out = io.StringIO()
    with ConsoleLogger(file=out, interval=0.3) as logger:
        state = logger.init(jax.random.key(0))
        for i in range(10):
            logger.log(state, logdict({"x": float(i)}, step=i))
            time.sleep(0.1)
    lines = out.getvalue().splitlines()
    assert 2 <= len(lines) <= 4
    assert "step 9" in lines[-1]
    assert all("\x1b" not in line for line in lines)


def test_at_most_four_frames_a_second_and_none_in_the_callback(monkeypatch):
    frames, threads = [], set()
    show = _live.LiveTables.show

    def noted(self, *args):
        frames.append(time.monotonic())
        threads.add(threading.current_thread().name)
        show(self, *args)

    monkeypatch.setattr(_live.LiveTables, "show", noted)
    with ConsoleLogger(file=Tty(), refresh=0.001) as logger:
        state = logger.init(jax.random.key(0))
        until = time.monotonic() + 10
        while len(frames) < 4 and time.monotonic() < until:
            logger.log(state, {"x": 1.0})
            time.sleep(0.001)
    assert len(frames) >= 4
    assert min(np.diff(frames)) > 0.24
    assert threads == {"lox console"}


def test_the_last_state_stays_on_the_terminal():
    tty = Tty()
    with ConsoleLogger(total=10, file=tty) as logger:
        states = jax.vmap(logger.init)(jax.random.split(jax.random.key(0), 2))
        time.sleep(0.4)
        log = lambda state, x: logger.log(state, logdict({"x": x}, step=9))
        jax.vmap(log)(states, jnp.array([1.0, 3.0]))
    last = plain(tty.getvalue())
    assert "2 runs" in last
    assert re.search(r"x +2\.000 +± 1 +1\.000 … 3\.000 +▄ +9", last)
    assert " 9/10 " in last


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_several_loggers_share_a_terminal():
    tty = Tty()
    with ConsoleLogger(file=tty) as a:
        state = a.init(jax.random.key(0))
        a.log(state, {"of a": 1.0})
        with ConsoleLogger(file=tty) as b:
            b.log(b.init(jax.random.key(1)), {"of b": 2.0})
            time.sleep(0.6)
            assert len(_live._shared) == 1
            both = tty.getvalue()
        a.log(state, {"of a": 3.0})
        time.sleep(0.4)
    assert not _live._shared
    assert "of a" in both
    assert "of b" in both
    end = tty.getvalue()[len(both) :]
    assert "of b" in end
    assert "3.000" in end


def test_a_live_display_of_the_user_is_no_harm(monkeypatch):
    from rich.live import Live

    tty = Tty()
    monkeypatch.setattr(sys, "stdout", tty)
    console = Console(file=tty)
    monkeypatch.setattr(_live, "get_console", lambda: console)
    with Live("theirs", console=console, auto_refresh=False):
        with ConsoleLogger() as logger:
            logger.log(logger.init(jax.random.key(0)), {"ours": 1.0})
            time.sleep(0.4)
    assert "ours" in tty.getvalue()


def test_an_error_of_the_display_is_raised_at_close(monkeypatch):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError("no space left")

    logger = ConsoleLogger(file=Full())
    logger.log(logger.init(jax.random.key(0)), {"x": 1.0})
    with pytest.raises(OSError, match="no space left"):
        logger.close()
    logger.close()


def test_an_error_of_the_program_ends_the_display():
    tty = Tty()

    def fails():
        with ConsoleLogger(file=tty) as logger:
            logger.log(logger.init(jax.random.key(0)), {"x": 1.0})
            time.sleep(0.4)
            raise RuntimeError("the program's own")

    with pytest.raises(RuntimeError, match="the program's own"):
        fails()
    assert tty.getvalue().rindex("\x1b[?25h") > tty.getvalue().rindex("\x1b[?25l")


SCRIPT = """
    import sys, time, jax, lox
    from lox.loggers._console import ConsoleLogger
    logger = ConsoleLogger(total=40)
    state = logger.init(jax.random.key(0))
    for i in range(40):
        logger.log(state, lox.logdict({"loss": 1.0 / (i + 1)}, step=i))
        time.sleep(0.02)
        if i == 20:
            print("printed by the user [/b]")
            print("part", end="", flush=True)
            print("warned", file=sys.stderr)
    ENDING
"""


@pytest.mark.parametrize("ending", ["logger.close()", "raise ValueError('oops')", "sys.exit(3)"])
def test_in_a_real_terminal(ending):
    code = textwrap.dedent(SCRIPT).replace("ENDING", ending)
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30", "JAX_PLATFORMS": "cpu"}
    main, side = pty.openpty()
    run = [sys.executable, "-c", code]
    process = subprocess.Popen(run, stdout=side, stderr=side, stdin=subprocess.DEVNULL, env=env)
    os.close(side)
    data = b""
    with contextlib.suppress(OSError):  # the other side is closed: the end
        while piece := os.read(main, 65536):
            data += piece
    os.close(main)
    code = process.wait()
    text = data.decode()
    assert code == {"l": 0, "r": 1, "s": 3}[ending[0]], text
    for word in ("printed by the user [/b]", "part", "warned"):
        assert word in plain(text)
    assert text.count("\x1b[?25h") >= 1
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    # Drawn in place several times, and once more at the end.
    assert 2 <= text.count("loss") <= 12
    end = plain(text).splitlines()
    assert any(re.search(r"━ 40/40 +100%", x) for x in end[-10:])
    assert any(re.match(r"loss +0\.0250 +[▁-█]+ +39", x) for x in end[-10:])
    assert ("ValueError: oops" in text) == ("oops" in ending)


# --- notebooks -----------------------------------------------------------------------------------


def test_in_a_notebook(monkeypatch):
    IPython = pytest.importorskip("IPython")
    pytest.importorskip("IPython.display")
    shown = []
    monkeypatch.setattr(IPython, "get_ipython", lambda: type("Shell", (), {"kernel": object()})())
    monkeypatch.setattr(
        IPython.display, "display", lambda x, display_id: shown.append(("new", display_id, x.data))
    )
    monkeypatch.setattr(
        IPython.display,
        "update_display",
        lambda x, display_id: shown.append(("again", display_id, x.data)),
    )
    with ConsoleLogger(total=10) as logger:
        state = logger.init(jax.random.key(0))
        for i in range(6):
            logger.log(state, logdict({"<loss>": float(i)}, step=i))
            time.sleep(0.1)
    assert [kind for kind, _, _ in shown[:2]] == ["new", "again"]
    assert len({display_id for _, display_id, _ in shown}) == 1
    assert 3 <= len(shown) <= 5
    assert "no events yet" in shown[0][2]
    assert "&lt;loss&gt;" in shown[-1][2]
    assert "5.000" in shown[-1][2]
    assert 'value="0.6000"' in shown[-1][2]
    assert "<svg" in shown[-1][2]


def test_a_plain_python_with_ipython_is_no_notebook():
    pytest.importorskip("IPython")
    target = _screen.target_for(Board(), 0.25, 10.0, None)
    assert isinstance(target, _screen.Plain)
