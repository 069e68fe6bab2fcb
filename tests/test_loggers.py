"""Loggers: what reaches a backend is what the program logged, run by run."""

from __future__ import annotations

import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lox
from lox._logdict import iterate_entries
from oracle import LANES, assert_same, record, stacked
from programs import TABLE

KEYS = jax.random.split(jax.random.key(7), len(LANES))


class Memory(lox.loggers.Logger):
    """Keeps everything, and counts the calls."""

    def __init__(self, **options):
        super().__init__(**options)
        self.infos, self.writes, self.host_calls = {}, {}, 0

    def open_run(self, info):
        self.infos[info.name] = info
        self.writes[info.name] = []
        return info.name

    def write_run(self, run, logs):
        self.writes[run].append(logs)

    def host_write(self, *args):
        self.host_calls += 1
        super().host_write(*args)

    def load(self, run):
        """All writes of a run as one logdict."""
        whole = lox.logdict()
        for logs in self.writes[run]:
            whole = whole + logs
        return whole


def inner_lanes(logs: lox.logdict, wanted: dict) -> dict:
    """The events of each key; lanes of a vmap inside of the run apart, as the oracle has them."""
    out = {}
    for key, entry in iterate_entries(logs):
        names = [n for n in wanted if n == key or n.startswith(f"{key}(")]
        for name in names:
            inner = re.findall(r"\d+", name[len(key) :])
            steps, value = dict(entry.steps), entry.value
            if inner and "lane" in steps:
                mine = steps.pop("lane") == int(inner[0])
                value = jax.tree.map(lambda x, mine=mine: x[mine], value)
                steps = {n: s[mine] for n, s in steps.items()}
            elif inner:
                at = (slice(None), *map(int, inner))
                value = jax.tree.map(lambda x, at=at: x[at], value)
                ranks = dict(zip(entry.steps, entry.layout.step_ndims))
                steps = {n: s[at] if ranks[n] else s for n, s in steps.items()}
            out[name] = (value, steps)
    return out


# --- what is logged arrives, for every program of the table --------------------------------------


@pytest.mark.parametrize("program", [p for p in TABLE if p.oracle], ids=lambda p: p.name)
def test_a_run_holds_what_its_lane_logged(program, tmp_path):
    f = program.build(lox.log)
    memory, save = Memory(), lox.loggers.SaveLogger(tmp_path)
    logger = lox.loggers.MultiLogger(memory, save)

    @jax.jit
    def one(key, x):
        state = logger.init(key, name="lane {lane}")
        return logger.tap(f, state)(x)

    got = jax.vmap(one)(KEYS, LANES)
    logger.flush()
    while_open = {run.name: run.load() for run in lox.runs(tmp_path)}
    logger.close()
    for i, x in enumerate(LANES):
        out, calls = record(program.build, x)
        assert_same(jax.tree.map(lambda y, i=i: y[i], got), out)
        want = stacked(calls)
        name = f"lane {i}"
        saved = lox.runs(tmp_path)[name].load()
        assert str(saved) == str(while_open[name])
        if any("(" in key for key in want):  # lanes inside may be at different numbers of events
            assert_same(inner_lanes(saved, want), want)
        else:
            assert_same(inner_lanes(memory.load(name), want), want)
            assert_same(inner_lanes(saved, want), want)


# --- the ways to write give the same run ---------------------------------------------------------


def loop(x):
    def step(c, i):
        c = c * 0.5 + i
        lox.log({"c": c, "twice": 2 * c}, step=i)
        return c, None

    return jax.lax.scan(step, x, jnp.arange(7))[0]


WAYS = {
    "tap": lambda lg, s: lg.tap(loop, s),
    "tap every": lambda lg, s: lg.tap(loop, s, every=3),
    "spool": lambda lg, s: lg.spool(loop, s),
    "jit of tap": lambda lg, s: jax.jit(lg.tap(loop, s, every=2)),
    "tap of jit": lambda lg, s: lg.tap(jax.jit(loop), s),
    "log": lambda lg, s: lambda x: (lambda out: lg.log(s, out[1]) or out[0])(lox.spool(loop)(x)),
    "log in jit": lambda lg, s: jax.jit(
        lambda x: (lambda out: lg.log(s, out[1]) or out[0])(lox.spool(loop)(x))
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batched", [False, True])
def test_all_ways_write_the_same(way, batched):
    logger = Memory()
    _, want = lox.spool(loop)(1.0)
    if batched:
        states = jax.vmap(lambda k: logger.init(k, name="r{lane}"))(KEYS)
        out = jax.vmap(lambda s, x: WAYS[way](logger, s)(x))(states, jnp.ones(3))
    else:
        state = logger.init(KEYS[0], name="r0")
        out = WAYS[way](logger, state)(1.0)
    assert_same(np.ravel(out)[0], loop(1.0))
    logger.flush()
    for run in logger.writes:
        got = logger.load(run)
        assert_same(got.data, want.data)
        assert_same(got.steps, want.steps)
    assert len(logger.writes) == (3 if batched else 1)
    logger.close()


def test_states_of_many_runs_outside_of_vmap():
    logger = Memory()
    states = jax.vmap(lambda k: logger.init(k, name="r{lane}"))(KEYS)
    logger.tap(jax.vmap(loop), states, every=7)(jnp.arange(3.0))
    logger.log(states, {"all": 1.0, "own": jnp.arange(3.0)})
    logger.flush()
    for i in range(3):
        got = logger.load(f"r{i}")
        assert_same(got["c"], lox.spool(loop)(float(i))[1]["c"])
        np.testing.assert_array_equal([got["all"], got["own"]], [[1.0], [i]])
    logger.close()


def test_one_state_in_a_batch_is_one_run():
    logger = Memory()
    state = logger.init(KEYS[0], name="one")
    jax.vmap(lambda x: logger.tap(loop, state, every=7)(x))(jnp.arange(3.0))
    logger.flush()
    got = logger.load("one")
    assert got["c"].shape == (7, 3)
    assert got.step["c"].shape == (7,)
    assert_same(got["c"].T, lox.spool(jax.vmap(loop))(jnp.arange(3.0))[1]["c"])
    logger.close()


def test_batch_axes_that_fit_no_state_are_an_error():
    logger = Memory()
    states = jax.vmap(lambda k: logger.init(k, name="r{lane}"))(KEYS)
    logger.tap(jax.vmap(loop), states)(jnp.arange(2.0))
    with pytest.raises(lox.LogError, match=r"'c' has the batch axes \(2,\).*runs of shape \(3,\)"):
        logger.close()


@pytest.mark.parametrize("lanes", [1, 8, 256])
def test_one_host_call_for_each_write(lanes):
    logger = Memory()
    keys = jax.random.split(jax.random.key(0), lanes)

    @jax.jit
    def train(key, x):
        return logger.tap(loop, logger.init(key))(x)

    jax.vmap(train)(keys, jnp.arange(float(lanes)))
    logger.flush()
    assert logger.host_calls == 7
    assert len(logger.writes) == lanes
    last = list(logger.writes)[-1]
    assert_same(logger.load(last)["c"], lox.spool(loop)(lanes - 1.0)[1]["c"])
    logger.close()


def test_log_calls_in_a_function_keep_their_order():
    logger = Memory()
    state = logger.init(KEYS[0], name="run")

    @jax.jit
    def program(x):
        for i in range(20):
            logger.log(state, {"i": x + i})

        def step(c, k):
            for j in range(3):
                logger.log(state, {"k": 3 * k + j})
            return c, None

        return jax.lax.scan(step, x, jnp.arange(4))[0]

    program(0)
    logger.close()
    np.testing.assert_array_equal(logger.load("run")["i"], np.arange(20))
    np.testing.assert_array_equal(logger.load("run")["k"], np.arange(12))


def test_one_failing_run_takes_no_other_with_it():
    class Picky(Memory):
        def write_run(self, run, logs):
            if run == "r1":
                raise OSError(5, "bad sector")
            super().write_run(run, logs)

    logger = Picky()
    states = jax.vmap(lambda k: logger.init(k, name="r{lane}"))(KEYS)
    logger.log(states, {"x": jnp.arange(3.0)})
    with pytest.raises(OSError, match="bad sector"):
        logger.close()
    assert [len(logger.writes[f"r{i}"]) for i in range(3)] == [1, 0, 1]


# --- the state ----------------------------------------------------------------------------------


def test_a_state_is_data():
    logger = Memory()
    state = logger.init(KEYS[0], name="kept")
    leaves, tree = jax.tree.flatten(state)
    again = tree.unflatten([np.array(x) for x in leaves])
    jax.lax.scan(
        lambda s, i: (s, logger.log(s, lox.logdict({"i": i}, step=i))), again, jnp.arange(3)
    )
    logger.flush()
    np.testing.assert_array_equal(logger.load("kept")["i"], [0, 1, 2])
    logger.close()


def test_a_state_from_elsewhere_opens_its_run():
    first, second = Memory(), Memory()
    state = first.init(KEYS[0])
    states = jax.vmap(lambda k: first.init(k, name="s{lane}"))(KEYS)
    first.close()
    second.log(state, {"x": 1.0})
    jax.vmap(lambda s, x: second.log(s, {"x": x}))(states, jnp.arange(3.0))
    second.close()
    assert set(second.writes) == set(first.writes)
    np.testing.assert_array_equal(second.load("s2")["x"], [2.0])


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg", None])
def test_names_come_from_keys(impl):
    logger = Memory()
    make = (
        (lambda i: jax.random.PRNGKey(i))
        if impl is None
        else lambda i: jax.random.key(i, impl=impl)
    )
    for i in (0, 1):
        logger.init(make(i))
    assert len(logger.infos) == 2
    logger.close()


def test_keys_with_the_same_digits_do_not_collide():
    logger = Memory()
    for words in ([1, 23], [12, 3], [1, 0x23]):
        logger.init(jax.random.wrap_key_data(jnp.array(words, jnp.uint32)))
    assert len(logger.infos) == 3
    logger.close()


def test_names_from_templates():
    logger = Memory()
    lrs = jnp.array([0.1, 0.2], jnp.float32)
    begin = lambda lr: logger.init(KEYS[0], name="lr={lr} {net}", config=dict(lr=lr, net="mlp"))
    jax.jit(jax.vmap(begin))(lrs)
    jax.vmap(lambda lr: logger.init(KEYS[0], config=dict(lr=lr)))(lrs)
    jax.vmap(lambda k: logger.init(k, name="same"))(KEYS[:2])
    logger.flush()
    key = "-".join(f"{w:08x}" for w in np.asarray(jax.random.key_data(KEYS[0])))
    names = ["lr=0.1 mlp", "lr=0.2 mlp", f"{key}-0", f"{key}-1", "same-0", "same-1"]
    assert list(logger.infos) == names
    assert logger.infos["lr=0.2 mlp"].config == dict(lr=0.2, net="mlp")
    assert logger.infos["lr=0.2 mlp"].group == "lr"
    with pytest.raises(ValueError, match=r"asks for 'seed'.*\{key\}, \{lane\}"):
        logger.init(KEYS[0], name="{seed}")
    logger.close()


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda lg: lg.init(0), TypeError, r"got 0.*logger\.init\(jax\.random\.key\(0\)\)"),
        (lambda lg: lg.init(KEYS), ValueError, r"shape \(3,\).*jax\.vmap\(logger\.init\)\(keys\)"),
        (lambda lg: lg.init(KEYS[0], config=3), TypeError, r"config=dict\("),
        (lambda lg: Memory(exists="ask"), ValueError, r"exists='ask'.*overwrite"),
        (lambda lg: Memory(overflow="lose"), ValueError, r"overflow='lose'.*decimate"),
        (lambda lg: lox.loggers.MultiLogger([lg]), TypeError, r"MultiLogger takes loggers"),
    ],
)
def test_mistakes_are_named(call, kind, message):
    with pytest.raises(kind, match=message):
        call(Memory())


# --- runs that exist ----------------------------------------------------------------------------


def test_a_second_init_is_an_error_and_the_first_run_goes_on():
    logger = Memory()
    state = logger.init(KEYS[0], name="run")
    with pytest.raises(lox.loggers.RunExists, match="exists='resume'"):
        logger.init(KEYS[0], name="run")
    logger.log(state, {"x": 1.0})
    logger.close()
    np.testing.assert_array_equal(logger.load("run")["x"], [1.0])


def test_an_error_of_init_under_vmap_is_raised_by_the_next_call():
    logger = Memory()
    logger.init(KEYS[0], name="s0")
    states = jax.vmap(lambda k: logger.init(k, name="s{lane}"))(KEYS)
    with pytest.raises(lox.loggers.RunExists, match="'s0'"):
        logger.tap(jax.vmap(loop), states)(jnp.arange(3.0))
    logger.close()


def test_an_error_of_init_in_jit_is_raised_by_flush_and_nothing_is_mixed():
    logger = Memory()
    train = jax.jit(lambda key, x: logger.tap(loop, logger.init(key, name="run"), every=7)(x))
    train(KEYS[0], 1.0)
    logger.flush()
    train(KEYS[0], 2.0)
    with pytest.raises(lox.loggers.RunExists):
        logger.flush()
    logger.close()
    assert_same(logger.load("run")["c"], lox.spool(loop)(1.0)[1]["c"])


def test_resume_goes_on_with_an_open_run():
    logger = Memory(exists="resume")
    for x in (1.0, 2.0):
        logger.log(logger.init(KEYS[0], name="run"), {"x": x})
    logger.close()
    np.testing.assert_array_equal(logger.load("run")["x"], [1.0, 2.0])


# --- what fails ---------------------------------------------------------------------------------


class Failing(Memory):
    def write_run(self, run, logs):
        raise BrokenPipeError(32, "tracker down")


def test_a_failing_backend_stops_nobody():
    bad, good = Failing(), Memory()
    logger = lox.loggers.MultiLogger(bad, good)
    y = logger.tap(loop, logger.init(KEYS[0], name="run"))(1.0)
    assert_same(y, loop(1.0))
    with pytest.raises(BrokenPipeError, match="tracker down") as raised:
        logger.close()
    notes = " ".join(raised.value.__notes__)
    assert "Failing could not write 'c' (1, 1), 'twice' (1, 1)" in notes
    assert "failed 6 more time(s)" in notes
    assert_same(good.load("run")["c"], lox.spool(loop)(1.0)[1]["c"])


def test_strict_raises_at_once():
    logger = Failing(strict=True)
    state = logger.init(KEYS[0], name="run")
    with pytest.raises(BrokenPipeError):
        logger.log(state, {"x": 1.0})
    with pytest.raises(BrokenPipeError):
        logger.tap(loop, state)(1.0)
    with pytest.raises(Exception, match="tracker down"):
        jax.block_until_ready(jax.jit(logger.tap(loop, state))(1.0))
    with pytest.raises(BrokenPipeError):
        logger.close()


def test_an_init_that_fails_in_one_logger_leaves_no_run_in_another(tmp_path):
    class Down(Memory):
        def open_run(self, info):
            raise ConnectionError("no route to tracker")

    logger = lox.loggers.MultiLogger(lox.loggers.SaveLogger(tmp_path), Down())
    with pytest.raises(ConnectionError):
        logger.init(KEYS[0], name="run")
    assert lox.runs(tmp_path) == []
    logger.close()


def test_a_closed_logger_says_so():
    logger = Memory()
    state = logger.init(KEYS[0])
    logger.close()
    logger.close()
    for call in (lambda: logger.init(KEYS[1]), lambda: logger.log(state, {"x": 1.0})):
        with pytest.raises(ValueError, match="this Memory is closed"):
            call()


def test_the_programs_own_error_is_the_one_to_see():
    def program():
        with Failing() as logger:
            logger.log(logger.init(KEYS[0]), {"x": 1.0})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as raised:
        program()
    assert "tracker down" in raised.value.__notes__[0]


# --- slow backends ------------------------------------------------------------------------------


class Slow(Memory):
    """Writes only while the gate is open."""

    def __init__(self, **options):
        super().__init__(**options)
        self.gate, self.busy = threading.Event(), threading.Event()

    def write_run(self, run, logs):
        self.busy.set()
        assert self.gate.wait(20)
        super().write_run(run, logs)


def fill(logger, count):
    """One write that the backend is busy with, and then some that wait."""
    state = logger.init(KEYS[0], name="run")
    logger.log(state, {"i": -1})
    assert logger.busy.wait(20)
    for i in range(count):
        logger.log(state, {"i": i})


def test_drop_oldest():
    logger = Slow(overflow="drop_oldest", capacity=4)
    fill(logger, 10)
    logger.gate.set()
    with pytest.warns(RuntimeWarning, match="gave up 6 writes.*drop_oldest"):
        logger.close()
    np.testing.assert_array_equal(logger.load("run")["i"], [-1, 6, 7, 8, 9])
    assert logger.dropped == 6


def test_decimate_keeps_an_even_picture():
    logger = Slow(overflow="decimate", capacity=8)
    fill(logger, 100)
    logger.gate.set()
    with pytest.warns(RuntimeWarning, match="decimate"):
        logger.close()
    kept = logger.load("run")["i"]
    assert logger.dropped == 101 - len(kept)
    assert len(kept) <= 9 + 1
    gaps = np.diff(kept[1:])
    assert gaps.max() <= 2 * gaps.min()
    assert kept[-1] > 75


def test_block_loses_nothing():
    logger = Slow(overflow="block", capacity=2)
    opener = threading.Timer(0.2, logger.gate.set)
    opener.start()
    fill(logger, 50)
    logger.close()
    np.testing.assert_array_equal(logger.load("run")["i"], [-1, *range(50)])
    assert logger.dropped == 0


def test_a_backend_that_hangs_is_given_up():
    hangs, good = Slow(timeout=0.2, capacity=1), Memory()
    logger = lox.loggers.MultiLogger(hangs, good)
    y = logger.tap(loop, logger.init(KEYS[0], name="run"))(1.0)
    assert_same(y, loop(1.0))
    with pytest.warns(RuntimeWarning, match="gave up"), pytest.raises(TimeoutError, match="Slow"):
        logger.close()
    assert_same(good.load("run")["c"], lox.spool(loop)(1.0)[1]["c"])
    assert hangs.dropped > 0
    hangs.gate.set()


# --- what a batch means -------------------------------------------------------------------------


def test_a_lane_that_never_logs_begins_no_run():
    logger = Memory()

    @jax.vmap
    def maybe(key, wanted):
        run = lambda key: logger.tap(loop, logger.init(key, name="r{lane}"))(1.0)
        return jax.lax.cond(wanted, run, lambda key: 0.0, key)

    maybe(jax.random.split(jax.random.key(0), 4), jnp.array([True, False, True, False]))
    logger.flush()
    assert sorted(logger.writes) == ["r0", "r2"]
    assert [len(logger.load(r)["c"]) for r in ("r0", "r2")] == [7, 7]
    logger.close()


def test_a_batch_around_that_of_the_runs_is_an_axis_of_the_value():
    logger = Memory()
    states = jax.vmap(lambda k: logger.init(k, name="r{lane}"))(KEYS)
    xs = jnp.arange(6.0).reshape(2, 3)
    each = lambda xs: jax.vmap(lambda s, x: logger.tap(loop, s, every=7)(x))(states, xs)
    jax.vmap(each)(xs)
    logger.flush()
    want = lox.spool(jax.vmap(jax.vmap(loop)))(xs)[1]["c"]  # (2, 3, 7)
    for i in range(3):
        got = logger.load(f"r{i}")
        assert_same(got["c"], np.moveaxis(want[:, i], 1, 0))
        assert got.step["c"].shape == (7,)
    logger.close()


def test_finish_ends_runs_one_by_one(tmp_path):
    logger = lox.loggers.SaveLogger(tmp_path)
    states = jax.vmap(lambda k: logger.init(k, name="r{lane}"))(KEYS)
    other = logger.init(KEYS[0], name="other")
    logger.log(states, {"x": jnp.arange(3.0)})
    logger.finish(other)
    logger.finish(jax.tree.map(lambda x: x[1], states))
    assert [r.state for r in lox.runs(tmp_path)] == ["open"] * 3 + ["closed"]
    logger.log(jax.tree.map(lambda x: x[2], states), {"x": 5.0})
    logger.close()
    assert {r.state for r in lox.runs(tmp_path)} == {"closed"}
    np.testing.assert_array_equal(lox.runs(tmp_path)["r2"].load()["x"], [2.0, 5.0])


def test_keys_in_many_branches_have_few_files(tmp_path):
    def f(key):
        def step(c, i):
            u = jax.random.uniform(jax.random.fold_in(key, i), (6,))
            for j in range(6):
                jax.lax.cond(
                    u[j] < 0.5, lambda j=j: [lox.log({f"k{j}": u[j]}, step=i), 0][1], lambda: 0
                )
            return c, None

        return jax.lax.scan(step, 0.0, jnp.arange(200))[0]

    logger = lox.loggers.SaveLogger(tmp_path)
    logger.tap(f, logger.init(KEYS[0], name="run"), every=1)(KEYS[1])
    logger.flush()
    files = [p for p in (tmp_path / "run").iterdir() if p.suffix == ".arrows"]
    assert len(files) <= 12
    logger.close()
    _, want = lox.spool(f)(KEYS[1])
    got, want = lox.runs(tmp_path)["run"].load(), want.compact()
    for key in want:
        np.testing.assert_array_equal(got[key], want[key])
        np.testing.assert_array_equal(got.step[key], want.step[key])


def test_ctrl_c_stops_the_program_and_leaves_no_hole(tmp_path):
    class Interrupted(lox.loggers.SaveLogger):
        def write_runs(self, runs, logs):
            if int(np.max(logs["c"])) >= 5:
                raise KeyboardInterrupt
            super().write_runs(runs, logs)

    def count(x):
        def step(c, i):
            lox.log({"c": c}, step=i)
            return c + 1, None

        return jax.lax.scan(step, x, jnp.arange(1000))[0]

    logger = Interrupted(tmp_path)
    state = logger.init(KEYS[0], name="run")
    with pytest.raises(KeyboardInterrupt):
        logger.tap(count, state)(0)
    with pytest.raises(Exception, match="KeyboardInterrupt"):
        jax.block_until_ready(jax.jit(logger.tap(count, state))(0))
    try:
        logger.close()
    except Exception as error:
        assert "KeyboardInterrupt" in str(error)  # noqa: PT017 (a GPU tells of it again)
    np.testing.assert_array_equal(lox.runs(tmp_path)["run"].load()["c"], [*range(5), *range(5)])


def test_a_tracker_that_does_not_answer_does_not_hold_up_the_program():
    class Unreachable(Memory):
        def open_run(self, info):
            threading.Event().wait(20)

    logger = Unreachable(timeout=0.2)
    with pytest.raises(TimeoutError, match="Unreachable could not begin a run"):
        logger.init(KEYS[0])
    logger.close()
