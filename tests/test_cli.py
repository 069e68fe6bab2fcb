"""The command `lox`: every command and option, exit codes, and what other programs read of it."""

from __future__ import annotations

import csv
import json
import os
import pathlib
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import lox
from lox import cli
from lox.cli import _output, _rows
from lox.store._catalog import begin
from lox.store._follow import Follower
from test_trackers import wandb_records, wandb_rows

SRC = pathlib.Path(lox.__file__).parents[1]
COMMANDS = ("ls", "show", "tail", "plot", "export", "verify", "compact")
ENV = {
    **os.environ,
    "PYTHONPATH": str(SRC),
    "JAX_PLATFORMS": "no_such_platform",  # whoever starts a backend fails
}
STEPS = np.arange(50)


def fill(path) -> None:
    """Four seeds in one folder, a single run of several tables, and one that was killed."""
    with lox.loggers.SaveLogger(path) as logger:
        keys = jax.random.split(jax.random.key(0), 4)
        states = jax.vmap(lambda k: logger.init(k, "ppo-{lane}", {"lr": 0.1, "env": "cart"}))(keys)
        lanes = np.arange(4.0, dtype=np.float32)[:, None]
        data = {"loss": lanes + 100.0 / (STEPS + 1), "return": lanes * STEPS}
        steps = np.broadcast_to(STEPS, (4, 50))
        logger.log(states, batch(data, step=steps, frames=steps * 8))
        state = logger.init(jax.random.key(1), "base", {"lr": 0.5})
        for i in range(20):
            values = {"loss": np.float32(i / 3), "norms": np.arange(3, dtype=np.float32) * i}
            logger.log(state, lox.logdict(values, step=np.int32(i)))
            if i % 5 == 0:
                logger.log(state, lox.logdict({"eval/score": float(i)}, step=i))
        last = {"loss": np.float32("nan"), "norms": np.zeros(3, np.float32)}
        logger.log(state, lox.logdict(last, step=np.int32(20)))
    crashed(path, "killed", 5)


def batch(data, **steps):
    """A logdict of several runs, each with a row of events."""
    one = lambda i: lox.logdict(
        {k: x[i] for k, x in data.items()}, **{n: s[i] for n, s in steps.items()}
    )
    return jax.tree.map(lambda *xs: np.stack(xs), *map(one, range(4)))


def crashed(path, name: str, rows: int) -> None:
    writer = begin(str(path), [dict(name=name, config={})], name, "error")
    for i in range(rows):
        write(writer, i)
    writer._release()  # as if the process had died


def write(writer, i: int, key: str = "loss") -> None:
    logs = lox.logdict({key: np.array([[float(i)]])}, step=np.array([[i]]))
    entry = logs._entries[key]
    layout = type(entry.layout)(True, (0,), (0,))
    entry = type(entry)(entry.value, entry.steps, layout)
    writer.write(np.array([0], np.int32), lox.logdict.of_entries({key: entry}))


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("original") / ".lox"
    fill(path)
    return path


@pytest.fixture
def store(original, tmp_path, monkeypatch):
    """A folder of runs that a test may change; the working directory is around it."""
    shutil.copytree(original, tmp_path / ".lox")
    monkeypatch.chdir(tmp_path)
    return tmp_path / ".lox"


@pytest.fixture
def run(capsys):
    """Run a command: its exit code, output, and messages."""

    def run(*args: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main([str(a) for a in args])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return run


def table(text: str) -> list[dict[str, str]]:
    """Lines with tabs, as `cut` sees them."""
    first, *lines = text.strip("\n").split("\n")
    names = first.split("\t")
    return [dict(zip(names, line.split("\t"), strict=True)) for line in lines]


def flip(path: pathlib.Path, at: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 0x10
    path.write_bytes(data)


# --- the command itself ---------------------------------------------------------------------------


def python_m_lox(*args: str, cwd=None, **more) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "lox", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=ENV, **more)


def test_python_m_lox_starts_no_backend(store):
    done = python_m_lox("ls", "--json", cwd=store.parent)
    assert (done.returncode, done.stderr) == (0, "")
    assert [r["name"] for r in json.loads(done.stdout)] == ALL
    assert python_m_lox("--help").returncode == 0


def test_other_commands_start_no_backend(store):
    script = (
        "import lox.cli, sys\n"
        "for args in (['show', 'base'], ['tail', 'ppo'], ['plot', 'ppo', 'loss'], ['verify'],"
        " ['export', 'base', '--to', 'csv'], ['export', 'ppo', '--to', 'json', '-o', 'o'],"
        " ['compact']):\n"
        "    assert lox.cli.main(args) == 0, args\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends\n"
        "assert not {'wandb', 'tensorboard', 'mlflow', 'matplotlib'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=store.parent, env=ENV)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_that_parse(run, command):
    code, out, _ = run(command, "--help")
    assert code == 0
    examples = re.findall(r"^  (lox .*)$", out.split("examples:")[1], re.MULTILINE)
    assert examples
    for example in examples:
        name, *args = shlex.split(example)
        assert name == "lox"
        assert args[0] == command
        assert cli.parser().parse_args(args).run


def test_help_lists_the_commands(run):
    code, out, _ = run("--help")
    assert code == 0
    for command in COMMANDS:
        assert re.search(rf"^    {command} ", out, re.MULTILINE)
    assert run("--version") == (0, f"lox {lox.__version__}\n", "")


def test_usage_errors(run):
    for args in ([], ["nothing"], ["show"], ["export", "x"], ["tail", "x", "-n", "-3"]):
        code, out, err = run(*args)
        assert (code, out) == (2, "")
        assert "usage: lox" in err


def test_unknown_run_names_the_known_ones(store, run):
    for args in (["show"], ["tail"], ["plot"], ["export", "--to", "csv"]):
        code, out, err = run(args[0], "ppo-9", *args[1:])
        assert (code, out) == (2, "")
        assert "there is no run 'ppo-9'" in err
        assert "ppo-0, ppo-1, ppo-2, ppo-3, base, killed" in err
        assert "Did you mean ppo-" in err


def test_missing_folders(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    assert run("ls")[0] == 2
    assert "there is no folder ./.lox" in run("ls")[2]
    for args in (["ls", "no"], ["verify", "no"], ["compact", "no"], ["show", "x"]):
        assert run(*args)[0] == 2
    (tmp_path / ".lox").mkdir()
    assert run("ls") == (0, "", "there are no runs in ./.lox\n")
    assert run("show", "x")[2] == "lox: there is no run 'x': there are no runs in ./.lox\n"
    for command in ("verify", "compact"):
        assert run(command)[0] == 2


def test_bugs_are_told_from_mistakes(store, run, monkeypatch, capsys):
    def broken(*args):
        raise RuntimeError("of ours")

    monkeypatch.setattr("lox.cli._ls.summaries", broken)
    assert run("ls") == (3, "", "lox: RuntimeError: of ours\n(LOX_DEBUG=1 shows where)\n")
    monkeypatch.setenv("LOX_DEBUG", "1")
    with pytest.raises(RuntimeError):
        cli.main(["ls"])
    monkeypatch.setattr(
        "lox.cli._ls.summaries", lambda root: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    assert cli.main(["ls"]) == 130


def test_a_reader_that_has_seen_enough(store):
    command = f"{sys.executable} -m lox tail base -n 1000 | head -n 1; exit ${{PIPESTATUS[0]}}"
    shell = ["bash", "-c", command]
    done = subprocess.run(shell, capture_output=True, text=True, cwd=store.parent, env=ENV)
    assert done.stderr == ""
    assert done.returncode == 0
    assert done.stdout.count("\n") == 1


# --- which runs are meant -------------------------------------------------------------------------

PPO = [f"ppo-{i}" for i in range(4)]
ALL = [*PPO, "base", "killed"]


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("base", ["base"]),
        ("ppo", PPO),
        ("ppo-*", PPO),
        ("ppo-[12]", ["ppo-1", "ppo-2"]),
        ("*", ALL),
        (".lox/base", ["base"]),
        (".lox/ppo-0+3", PPO),
        (".lox/ppo-2", ["ppo-2"]),
        (".lox", ALL),
        (".", ALL),
    ],
)
def test_runs_by_name_group_pattern_and_path(store, run, asked, meant):
    code, out, _ = run("show", asked, "--json")
    assert code == 0
    shown = json.loads(out)
    assert [r["name"] for r in (shown if isinstance(shown, list) else [shown])] == meant


def test_path_option(store, run, tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    assert run("show", "base")[0] == 2
    monkeypatch.chdir(store)
    assert run("show", "base", "--path", "..")[0] == 0
    assert run("tail", "base", "--path", store)[0] == 0
    assert run("show", store / "base")[0] == 0


def test_resumed_runs_are_one(store, run):
    with lox.loggers.SaveLogger(store, exists="resume") as logger:
        state = logger.init(jax.random.key(1), "base", {"more": 1})
        logger.log(state, lox.logdict({"loss": np.float32(7)}, step=np.int32(21)))
    shown = json.loads(run("show", ".lox/base~2", "--json")[1])
    assert len(shown["folders"]) == 2
    assert shown["config"] == {"lr": 0.5, "more": 1}
    assert shown["keys"][0]["events"] == 22
    last = run("tail", "base", "-n", "2", "--keys", "loss")[1].splitlines()
    assert [line.split("\t")[1:] for line in last] == [
        ["step=20", "loss=nan"],
        ["step=21", "loss=7.0"],
    ]


# --- ls and show ----------------------------------------------------------------------------------


def test_ls(store, run):
    code, out, err = run("ls")
    assert (code, err) == (0, "")
    rows = {r["name"]: r for r in table(out)}
    assert list(rows) == ALL
    assert rows["ppo-1"]["group"] == "ppo"
    assert [rows[n]["state"] for n in ("base", "killed")] == ["closed", "crashed"]
    assert [rows[n]["rows"] for n in ("ppo-0", "base", "killed")] == ["50", "25", "5"]
    assert [rows[n]["keys"] for n in ("ppo-0", "base", "killed")] == ["2", "3", "1"]
    assert re.fullmatch(r"\d+ (s|min)", rows["base"]["age"])
    assert run("ls", "--quiet")[1].split() == ALL
    assert run("ls", ".lox/base", "-q")[1].split() == ["base"]


def test_ls_json(store, run):
    found = json.loads(run("ls", store, "--json")[1])
    assert found[4]["keys"] == ["loss", "norms", "eval/score"]
    assert found[0]["age"] >= 0
    on_disk = sum(f.stat().st_size for f in store.rglob("*") if f.is_file() and f.parent != store)
    assert abs(sum(r["size"] for r in found) - on_disk) < 10  # divided among the runs


def test_ls_shows_an_open_run(store, run):
    logger = lox.loggers.SaveLogger(store)
    logger.log(logger.init(jax.random.key(5), "live"), {"x": 1.0})
    assert table(run("ls")[1])[-1]["state"] == "open"
    logger.close()
    assert table(run("ls")[1])[-1]["state"] == "closed"


def test_damaged_folders_are_listed(store, run):
    flip(store / "base" / "manifest.json")
    (store / "killed" / "0.arrows").write_bytes((store / "killed" / "0.arrows").read_bytes()[1:])
    code, out, _ = run("ls")
    rows = {r["name"]: r for r in table(out)}
    assert code == 0
    assert rows["base"]["state"] == rows["killed"]["state"] == "damaged"
    assert rows["ppo-0"]["state"] == "closed"
    assert "checksum" in json.loads(run("ls", "--json")[1])[-1]["damage"][0]


def test_show(store, run):
    code, out, err = run("show", "base")
    assert (code, err) == (0, "")
    about, keys = out.split("\n\n")
    about = dict(line.split("\t", 1) for line in about.splitlines())
    assert (about["run"], about["state"], about["config.lr"]) == ("base", "closed", "0.5")
    assert about["folder"].endswith("base")
    rows = {r["key"]: r for r in table(keys)}
    assert list(rows) == ["loss", "norms", "eval/score"]
    assert [r["type"] for r in rows.values()][:2] == ["float32[]", "float32[3]"]
    assert [r["events"] for r in rows.values()] == ["21", "21", "4"]
    assert [r["steps"] for r in rows.values()] == ["0…20", "0…20", "0…15"]
    assert [r["nan"] for r in rows.values()] == ["1", "", ""]
    assert rows["eval/score"] | {"course": ""} == rows["eval/score"] | dict(
        last="15.0", min="0.0", mean="7.5", max="15.0", course=""
    )
    assert rows["eval/score"]["course"] == "▁▃▆█"


def test_show_json_and_keys(store, run):
    shown = json.loads(run("show", "ppo-3", "--json", "--keys", "ret*")[1])
    [key] = shown["keys"]
    assert key["name"] == "return"
    assert key["steps"] == {"step": [0, 49], "frames": [0, 392]}
    assert (key["min"], key["mean"], key["max"], key["last"]) == (0, 73.5, 147, 147)
    assert shown["shared_with"] == 3
    code, _, err = run("show", "base", "--keys", "nothing")
    assert code == 2
    assert "keys: loss, norms, eval/score" in err


def test_show_what_is_not_damaged(store, run):
    manifest = json.loads((store / "base" / "manifest.json").read_text())
    start, size, _ = manifest["content"]["tables"][0]["chunks"]["loss"][0]
    flip(store / "base" / "0.parquet", start + size // 2)
    code, out, err = run("show", "base")
    assert code == 0
    assert "column 'loss' does not fit its checksum" in err
    assert [r["key"] for r in table(out.split("\n\n")[1])] == ["norms", "eval/score"]


def test_show_of_a_run_without_rows(store, run):
    logger = lox.loggers.SaveLogger(store)
    logger.init(jax.random.key(5), "empty")
    assert run("show", "empty")[0] == 0
    assert "nothing has been logged" in run("show", "empty")[2]
    assert "nothing has been logged" in run("plot", "empty")[2]
    logger.close()


# --- tail -----------------------------------------------------------------------------------------


def fields(out: str) -> list[list[str]]:
    return [line.split("\t")[1:] for line in out.splitlines()]


def test_tail(store, run):
    code, out, err = run("tail", "base", "-n", "3")
    assert (code, err) == (0, "")
    assert fields(out)[1] == ["step=19", "loss=6.3333335", "norms=[0.0, 19.0, 38.0]"]
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z\t", out)
    assert len(run("tail", "base")[1].splitlines()) == 10
    assert run("tail", "base", "-n", "0")[1] == ""
    assert fields(run("tail", "base", "-k", "eval*", "-n", "2")[1])[-1] == [
        "step=15",
        "eval/score=15.0",
    ]
    assert run("tail", "base", "-k", "nothing")[0] == 2


def test_tail_in_the_order_of_writing(store, run):
    rows = fields(run("tail", "base", "-n", "100")[1])
    assert [r[0] for r in rows[:4]] == ["step=0", "step=0", "step=1", "step=2"]
    assert len(rows) == 25


def test_tail_of_several_runs(store, run):
    rows = fields(run("tail", "ppo", "-n", "6", "-k", "return")[1])
    assert [r[0] for r in rows] == ["ppo-2", "ppo-3", *PPO]
    assert rows[-1] == ["ppo-3", "step=49", "frames=392", "return=147.0"]


def test_tail_json(store, run):
    out = run("tail", "base", "-n", "2", "--json")[1]
    first, last = map(json.loads, out.splitlines())
    assert first["norms"] == [0, 19, 38]
    assert last["loss"] is None  # JSON has no NaN
    assert (first["run"], first["step"]) == ("base", 19)


def test_tail_of_a_damaged_run(store, run):
    flip(store / "killed" / "0.arrows", -10)
    code, out, err = run("tail", "killed")
    assert code == 1
    assert "a batch is damaged" in err
    assert len(out.splitlines()) == 4


WRITER = """
import sys, time, os, signal
import jax, numpy as np, lox
logger = lox.loggers.SaveLogger(sys.argv[1])
state = logger.init(jax.random.key(3), name="live")
print("ready", flush=True)
for i in range(60):
    logger.log(state, lox.logdict({"loss": np.float32(i)}, step=np.int32(i)))
    if i % 10 == 0:
        logger.log(state, lox.logdict({"eval": np.float32(i)}, step=np.int32(i)))
    time.sleep(0.01)
if sys.argv[2] == "crash":
    os.kill(os.getpid(), signal.SIGKILL)
logger.close()
"""


@pytest.mark.parametrize("end", ["closed", "crash"])
def test_follow_a_writer(tmp_path, run, end):
    env = {**ENV, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", WRITER, str(tmp_path / ".lox"), end]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        code, out, err = run("tail", "-f", "live", "-p", tmp_path / ".lox", "-n", "1000")
    assert code == 0
    rows = fields(out)
    assert [r for r in rows if "loss" in r[1]] == [[f"step={i}", f"loss={i}.0"] for i in range(60)]
    assert [r for r in rows if "eval" in r[1]] == [
        [f"step={i}", f"eval={i}.0"] for i in range(0, 60, 10)
    ]
    assert err.startswith(f"live: {'closed' if end == 'closed' else 'crashed'}")


def test_follow_until_interrupted(tmp_path):
    logger = lox.loggers.SaveLogger(tmp_path)
    logger.log(logger.init(jax.random.key(3), name="live"), {"x": 1.0})
    command = [sys.executable, "-m", "lox", "tail", "-f", "live", "-p", str(tmp_path)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command, env=ENV, **pipes) as follower:
        assert "x=1.0" in follower.stdout.readline()
        follower.send_signal(signal.SIGINT)
        out, err = follower.communicate(timeout=20)
    logger.close()
    assert (out, err, follower.returncode) == ("", "", 130)


# --- following, row by row ------------------------------------------------------------------------


def new_writer(path):
    return begin(str(path), [dict(name="live", config={})], "live", "error")


def steps_of(found) -> list[tuple[str, int]]:
    return [(next(iter(x.values)), int(x.steps["step"])) for x in _rows.lines(found)]


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("polled", [0, 1, 3])
def test_rows_come_once_whenever_it_is_closed(tmp_path, polled, compact):
    writer = new_writer(tmp_path)
    follower = Follower(writer.path, {0: "live"})
    seen = []
    for i in range(5):
        write(writer, i)
        write(writer, i, "other")
        if i < polled:
            seen += steps_of(follower.poll())
    writer.close(compact)
    while not follower.ended:
        seen += steps_of(follower.poll())
    assert sorted(seen) == sorted((k, i) for i in range(5) for k in ("loss", "other"))
    assert [i for k, i in seen if k == "loss"] == list(range(5))
    assert (follower.state, follower.damage, follower.poll()) == ("closed", [], [])


def test_only_what_is_new_is_read(tmp_path, monkeypatch):
    writer = new_writer(tmp_path)
    for i in range(100):
        write(writer, i)
    follower = Follower(writer.path, {0: "live"})
    assert len(steps_of(follower.poll())) == 100
    [stream] = follower._streams.values()
    checked = []
    real = lox.store._follow.size_at
    monkeypatch.setattr(
        "lox.store._follow.size_at", lambda d, at: checked.append(len(d)) or real(d, at)
    )
    assert follower.poll() == []
    assert checked == []
    write(writer, 100)
    assert steps_of(follower.poll()) == [("loss", 100)]
    assert max(checked) < stream.size / 20
    writer.close()


def test_a_message_comes_in_pieces(tmp_path):
    writer = new_writer(tmp_path)
    write(writer, 0)
    file = pathlib.Path(writer.path) / "0.arrows"
    before = file.read_bytes()
    write(writer, 1)
    whole = file.read_bytes()
    follower = Follower(writer.path, {0: "live"})
    seen = []
    for end in (0, 7, len(before) // 2, len(before), len(before) + 6, len(whole) - 1, len(whole)):
        file.write_bytes(whole[:end])
        seen.append(steps_of(follower.poll()))
    assert seen == [[], [], [], [("loss", 0)], [], [], [("loss", 1)]]
    file.write_bytes(whole + whole[-100:-50])
    writer._release()
    assert steps_of(follower.poll()) == []
    assert follower.ended
    assert follower.state == "crashed"


def test_a_torn_end_is_no_damage(tmp_path):
    writer = new_writer(tmp_path)
    for i in range(3):
        write(writer, i)
    writer._release()
    file = pathlib.Path(writer.path) / "0.arrows"
    file.write_bytes(file.read_bytes()[:-9])
    follower = Follower(writer.path, {0: "live"})
    assert steps_of(follower.poll()) == [("loss", 0), ("loss", 1)]
    assert (follower.state, follower.damage, follower.ended) == ("crashed", [], True)
    assert follower.torn > 0


def test_a_write_that_is_taken_back(tmp_path):
    writer = new_writer(tmp_path)
    write(writer, 0)
    stream = writer._all[0]
    size = stream.file.size
    write(writer, 1)
    follower = Follower(writer.path, {0: "live"})
    assert steps_of(follower.poll()) == [("loss", 0), ("loss", 1)]
    stream.file.cut(size)  # what a failing write does in the other streams of its rows
    write(writer, 2)
    write(writer, 3)
    assert steps_of(follower.poll()) == [("loss", 2), ("loss", 3)]
    write(writer, 4)
    writer.close()
    assert steps_of(follower.poll()) == [("loss", 4)]


def test_a_removed_run_ends(tmp_path):
    writer = new_writer(tmp_path)
    write(writer, 0)
    follower = Follower(writer.path, {0: "live"})
    assert steps_of(follower.poll()) == [("loss", 0)]
    writer.discard()
    assert follower.poll() == []
    assert (follower.ended, follower.state) == (True, "removed")


def test_following_a_fast_writer(tmp_path):
    """Rows of several tables, written as fast as can be, in order and once."""
    writer = new_writer(tmp_path)

    def work():
        for i in range(400):
            write(writer, i, f"key{i % 3}")
        writer.close()

    follower, seen = Follower(writer.path, {0: "live"}), []
    thread = threading.Thread(target=work)
    thread.start()
    while not follower.ended:
        seen += steps_of(follower.poll())
    thread.join()
    assert [i for _, i in seen] == list(range(400))


# --- plot -----------------------------------------------------------------------------------------


def test_plot_in_the_terminal(store, run):
    code, out, err = run("plot", "ppo", "return")
    assert (code, err) == (0, "")
    assert "return · ppo (4 runs)" in out
    assert "49 (step)" in out
    assert re.search("[⠁-⣿]{3}", out)
    assert "\x1b" not in out


def test_plot_compares_runs(store, run):
    out = run("plot", "ppo", "loss", "--run", "base", "--band", "minmax", "--log")[1]
    assert "ppo (4 runs)" in out
    assert "base" in out
    assert run("plot", "ppo", "loss", "--band", "none")[1] != run("plot", "ppo", "loss")[1]
    assert "392 (frames)" in run("plot", "ppo-1", "loss", "--x", "frames")[1]


def test_plot_without_keys_draws_the_numbers(store, run, monkeypatch):
    out = run("plot", "base")[1]
    assert "loss · base" in out
    assert "eval/score · base" in out
    assert "norms" not in out
    assert "norms · base" in run("plot", "base", "nor*")[1]
    monkeypatch.setattr("lox.cli._plot.LIMIT", 1)
    assert "others: eval/score" in run("plot", "base")[2]


def test_plot_a_picture(store, run, tmp_path):
    from PIL import Image

    code, out, _ = run("plot", "ppo", "return", "loss", "-o", "curves.png")
    assert (code, out) == (0, "curves.png\n")
    with Image.open("curves.png") as image:
        assert image.size[0] > 400
        assert len(np.unique(np.asarray(image))) > 5
    assert run("plot", "ppo", "loss", "--run", "base", "-o", "both.svg", "--log")[0] == 0
    assert (
        "ppo (4 runs)" in pathlib.Path("both.svg").read_text() or os.path.getsize("both.svg") > 5000
    )


def test_plot_mistakes(store, run):
    code, _, err = run("plot", "ppo", "nothing")
    assert code == 2
    assert "keys: loss, return" in err
    assert "Steps here: " in run("plot", "ppo", "loss", "--x", "nothing")[2]
    assert run("plot", "ppo", "loss", "-o", "no/where.png")[0] == 2
    assert run("plot", "ppo", "loss", "-o", "x.unknown")[0] == 2
    assert run("plot", "ppo", "loss", "--band", "wide")[0] == 2


# --- export ---------------------------------------------------------------------------------------


def read_csv(path: str) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_export_csv(store, run):
    assert run("export", "base", "--to", "csv", "-o", "base.csv")[:2] == (0, "base.csv\n")
    rows = read_csv("base.csv")
    assert len(rows) == 21
    assert rows[4] == {
        "step": "4",
        "loss": "1.3333334",
        "norms": "[0.0, 4.0, 8.0]",
        "eval/score": "",
    }
    assert rows[5]["eval/score"] == "5.0"
    assert run("export", "ppo", "base", "--to", "csv", "-o", "all", "--keys", "loss")[0] == 0
    names = sorted(f.name for f in pathlib.Path("all").glob("*.csv"))
    assert names == ["base.csv", *(f"{n}.csv" for n in PPO)]
    assert read_csv("all/ppo-1.csv")[9] == {
        "step": "9",
        "frames": "72",
        "loss": "11.0",
    }


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_export_tables(store, run, kind):
    read = pq.read_table if kind == "parquet" else (lambda f: pa.ipc.open_file(f).read_all())
    assert run("export", "base", "--to", kind)[1] == f"./base.{kind}\n"
    whole = read(f"base.{kind}")
    assert str(whole.to_pydict()) == str(lox.runs(store)["base"].to_arrow().to_pydict())
    assert json.loads(whole.schema.metadata[b"lox"])["config"] == {"lr": 0.5}
    assert run("export", "ppo-*", "--to", kind, "-o", "tables/", "-k", "loss")[0] == 0
    assert read(f"tables/ppo-3.{kind}").column_names == ["time", "step", "frames", "loss"]


def test_export_json(store, run):
    out = run("export", "base", "--to", "json", "-o", "-")[1]
    content = json.loads(out, parse_constant=pytest.fail)
    assert content["config"] == {"lr": 0.5}
    assert len(content["rows"]) == 25
    assert content["rows"][0].keys() == {"time", "step", "loss", "norms"}
    assert content["rows"][-1]["loss"] is None
    assert run("export", "base", "--to", "json")[1] == "./base.json\n"
    assert json.loads(pathlib.Path("base.json").read_text()) == content
    assert run("export", "ppo", "--to", "json", "-o", "-")[0] == 2


def test_export_tensorboard(store, run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    code, out, _ = run("export", "ppo", "--to", "tensorboard", "-o", "runs")
    assert (code, out.split()) == (0, [f"runs/{n}" for n in PPO])
    events = EventAccumulator("runs/ppo-3", size_guidance={"scalars": 0})
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("return")] == [(i, 3.0 * i) for i in STEPS]
    assert {"loss", "return", "frames"} <= set(events.Tags()["scalars"])


def test_export_wandb(store, run, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    code, out, _ = run("export", "base", "--to", "wandb", "-o", "out", "--project", "digits")
    assert (code, out) == (0, "out/wandb\n")
    records = wandb_records(pathlib.Path("out"), "base")
    [about] = (r.run for r in records if r.HasField("run"))
    assert (about.project, about.run_group) == ("digits", "base")
    rows = wandb_rows(pathlib.Path("out"), "base")
    assert [r["loss"] for r in rows if "loss" in r][3] == 1.0
    assert [r["eval/score"] for r in rows if "eval/score" in r] == [0, 5, 10, 15]


@pytest.mark.parametrize("kind", ["csv", "parquet", "arrow", "json", "tensorboard"])
def test_export_replaces_nothing_unasked(store, run, kind):
    assert run("export", "killed", "--to", kind, "-o", "out/")[0] == 0
    code, _, err = run("export", "killed", "--to", kind, "-o", "out/")
    assert code == 2
    assert "exists" in err
    assert "--force replaces it" in err
    assert run("export", "killed", "--to", kind, "-o", "out/", "--force")[0] == 0


def test_export_of_what_is_damaged(store, run):
    flip(store / "killed" / "0.arrows", -10)
    for kind in ("csv", "parquet", "json"):
        code, _, err = run("export", "killed", "--to", kind, "-o", "out/")
        assert code == 1
        assert "damaged" in err
    assert not list(pathlib.Path("out").glob("*.parquet"))


def test_export_names_a_missing_package(store, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    code, _, err = run("export", "base", "--to", "wandb")
    assert code == 2
    assert 'pip install "jaxlox[wandb]"' in err


# --- verify and compact ---------------------------------------------------------------------------


def test_verify(store, run):
    code, out, err = run("verify", store)
    assert (code, err[:21]) == (0, "3 folders, all good, ")
    lines = [line.split("\t") for line in out.splitlines()]
    assert [(line[0], pathlib.Path(line[1]).name, line[2]) for line in lines] == [
        ("ok", "ppo-0+3", "closed"),
        ("ok", "base", "closed"),
        ("ok", "killed", "crashed"),
    ]
    assert run("verify")[0] == 0
    assert run("verify", store / "base")[0] == 0
    assert run("verify", "--quiet") == (0, "", "")


@pytest.mark.parametrize("file", ["base/manifest.json", "base/0.parquet", "killed/0.arrows"])
def test_verify_finds_a_flipped_byte(store, run, file):
    flip(store / file)
    code, out, err = run("verify", store)
    assert code == 1
    assert "1 of 3 folders damaged" in err
    [line] = (line for line in out.splitlines() if line.startswith("damaged"))
    assert pathlib.Path(line.split("\t")[1]).name == file.split("/")[0]
    assert out.count("\nok\t") + out.startswith("ok\t") == 2
    assert run("verify", store, "--quiet")[1].startswith("damaged\t")
    assert python_m_lox("verify", store).returncode == 1


def test_a_torn_end_is_reported_and_good(store, run):
    file = store / "killed" / "0.arrows"
    file.write_bytes(file.read_bytes()[:-7])
    code, out, _ = run("verify", store)
    assert code == 0
    assert re.search(r"^ok\t\S*killed\tcrashed\t.*\ttorn: \d+ bytes", out, re.MULTILINE)


def test_compact(store, run):
    code, out, err = run("compact")
    assert code == 0
    assert re.fullmatch(r"\S*killed\t[\d.]+ k?B\t[\d.]+ k?B\n", out)
    assert err == "1 of 3 folders\n"
    assert [r.state for r in lox.runs(store)] == ["closed"] * 5 + ["crashed"]
    assert lox.runs(store)["killed"].load()["loss"].tolist() == [0, 1, 2, 3, 4]
    assert run("compact") == (0, "", "nothing to do\n")


def test_compact_leaves_what_is_written_and_what_is_damaged(store, run):
    crashed(store, "also killed", 3)
    flip(store / "killed" / "0.arrows")
    logger = lox.loggers.SaveLogger(store)
    logger.log(logger.init(jax.random.key(5), "live"), {"x": 1.0})
    code, out, err = run("compact", store)
    assert code == 1
    assert "also killed" in out
    assert "killed: 0.arrows: a batch is damaged" in err
    assert "1 being written" in err
    assert lox.runs(store)["live"].state == "open"
    logger.close()


# --- at a terminal --------------------------------------------------------------------------------


def at_terminal(folder, columns: int, script: str) -> str:
    """What a terminal of this width is sent."""
    main_end, other_end = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(other_end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    env = {k: v for k, v in ENV.items() if k not in ("COLUMNS", "NO_COLOR")} | {"TERM": "xterm"}
    command = [sys.executable, "-c", script]
    process = subprocess.Popen(command, cwd=folder, env=env, stdout=other_end, stderr=other_end)
    os.close(other_end)
    out = b""
    while True:
        try:
            piece = os.read(main_end, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        out += piece
    os.close(main_end)
    assert process.wait() == 0
    return out.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("columns", [60, 120])
def test_at_a_terminal(store, columns):
    flip(store / "killed" / "0.arrows")
    script = (
        "import lox.cli\n"
        "for args in (['ls'], ['show', 'base'], ['show', 'ppo-0'], ['plot', 'ppo', 'loss'],"
        " ['tail', 'ppo', '-n', '3'], ['verify']):\n"
        "    if args[0] == 'tail':\n"
        "        print('=====')\n"
        "    lox.cli.main(args)\n"
    )
    out = at_terminal(store.parent, columns, script)
    assert "\x1b[31mdamaged" in out
    text = re.sub(r"\x1b\[[0-9;]*m", "", out)
    tables, _ = text.split("=====")  # rows go on in the next line, tables do not
    widest = max(len(line) for line in tables.splitlines() if not line.startswith("created "))
    assert widest <= columns
    assert ("created" in text.splitlines()[0]) == (columns == 120)
    assert re.search(r"^norms +float32\[3\] +21 +0…20 ", text, re.MULTILINE)
    assert bool(re.search("^key .* mean ", text, re.MULTILINE)) == (columns == 120)
    assert "step=49  frames=392" in text


# --- text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (5e15, "5000.0 TB"),
    ],
)
def test_sizes(count, text):
    assert _output.size(int(count)) == text


def test_ages():
    assert [_output.age(s) for s in (-1, 59.9, 60, 7199, 86400)] == [
        "0 s",
        "59 s",
        "1 min",
        "1 h",
        "1 d",
    ]


def test_newest_rows_of_several_tables(tmp_path):
    writer = new_writer(tmp_path)
    for i in range(6):
        write(writer, i, f"key{i % 2}")
    found = Follower(writer.path, {0: "live"}).poll()
    assert [int(x.steps["step"]) for x in _rows.lines(found, 3)] == [3, 4, 5]
    assert _rows.lines(found, 0) == []
    assert len(_rows.lines(found, 99)) == len(_rows.lines(found)) == 6
    writer.close()
