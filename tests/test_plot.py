"""Curves over steps against NumPy, and what is drawn of them: pictures, terminal charts, HTML."""

from __future__ import annotations

import re
import sys
import time

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest

import lox
from lox import logdict
from lox._html import html_table, svg_sparkline
from lox._plot import curves, plot
from lox._terminal import chart, number, sparkline

matplotlib.use("Agg")
import matplotlib.pyplot as plt


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def train(x):
    def body(x, i):
        lox.log({"loss": x, "pair": jnp.stack([x, -x]), "big": jnp.full((4, 5), x)}, step=10 * i)
        return 0.9 * x, None

    return jax.lax.scan(body, x, jnp.arange(20))[0]


@pytest.fixture(scope="module")
def batch() -> logdict:
    return jax.vmap(lox.spool(train))(jnp.array([1.0, 2.0, 4.0]))[1]


def masked() -> logdict:
    """Three lanes, which logged at the steps that their numbers say."""

    def f(xs):
        for i in range(4):
            jax.lax.cond(
                xs[i] > 0, lambda x, i=i: lox.log({"x": x}, step=i) and None, lambda x: None, xs[i]
            )

    xs = jnp.array([[1.0, 2.0, 3.0, 4.0], [3.0, 0.0, 5.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    return jax.vmap(lox.spool(f))(xs)[1]


# --- curves --------------------------------------------------------------------------------------


def test_a_batch_gives_mean_and_band(batch):
    x, mean, low, high = curves(batch, "loss")
    values = np.asarray(batch["loss"], float)
    np.testing.assert_array_equal(x, 10 * np.arange(20))
    np.testing.assert_allclose(mean, values.mean(0), rtol=1e-6)
    np.testing.assert_allclose(high - low, 2 * values.std(0), rtol=1e-6)


@pytest.mark.parametrize(
    ("band", "low", "high"),
    [
        ("minmax", lambda v: v.min(0), lambda v: v.max(0)),
        ((25, 75), lambda v: np.percentile(v, 25, 0), lambda v: np.percentile(v, 75, 0)),
        (None, lambda v: v.mean(0), lambda v: v.mean(0)),
    ],
)
def test_bands(batch, band, low, high):
    values = np.asarray(batch["loss"], float)
    curve = curves(batch, "loss", band=band)
    np.testing.assert_allclose(curve.low, low(values), rtol=1e-6)
    np.testing.assert_allclose(curve.high, high(values), rtol=1e-6)


def test_an_unknown_band_is_named(batch):
    with pytest.raises(ValueError, match=r"band='sem' is not known. Choose 'std'"):
        curves(batch, "loss", band="sem")


def test_runs_of_different_lengths_are_aligned_by_their_steps():
    a = logdict({"x": np.array([0.0, 2.0])}, step=np.array([0, 20]))
    b = logdict({"x": np.array([4.0, 6.0, 8.0])}, step=np.array([0, 10, 30]))
    x, mean, *_ = curves([a, b, logdict({"other": 1.0})], "x")
    assert x.tolist() == [0, 10, 20, 30]
    # Between its own steps a run is interpolated; beyond them it does not count.
    np.testing.assert_allclose(mean, [2.0, 3.5, 4.5, 8.0])


def test_masked_rows_do_not_count():
    x, mean, low, _ = curves(masked(), "x", band="minmax")
    assert x.tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(mean, [2.0, 3.0, 4.0, 4.0])
    np.testing.assert_allclose(low, [1.0, 2.0, 3.0, 4.0])


def test_what_is_not_finite_is_left_out():
    rows = np.array([[1.0, np.nan, 3.0, np.nan], [3.0, 4.0, np.inf, np.nan]])
    runs = [logdict({"x": row}, step=np.arange(4)) for row in rows]
    for band in ("std", "minmax", (10, 90)):
        curve = curves(runs, "x", band=band)
        np.testing.assert_allclose(curve.mean, [2.0, 4.0, 3.0, np.nan])
        assert np.isnan(curve.low[3])
        assert np.isnan(curve.high[3])


def test_steps_that_repeat_or_go_back_are_averaged_and_sorted():
    logs = logdict({"x": np.array([1.0, 2.0, 9.0, 4.0])}, step=np.array([0, 5, 5, 2]))
    x, mean, *_ = curves(logs, "x")
    assert x.tolist() == [0, 2, 5]
    assert mean.tolist() == [1.0, 4.0, 5.5]


def test_the_x_axis():
    steps = dict(time=np.array([0.5, 1.0]), episode=np.array([3, 4]))
    logs = logdict({"x": np.array([1.0, 2.0])}, **steps)
    assert curves(logs, "x").x.tolist() == [0.5, 1.0]
    assert curves(logs, "x", "episode").x.tolist() == [3, 4]
    assert curves(logs, "x", "index").x.tolist() == [0, 1]
    with pytest.raises(KeyError, match=r"no step 'epoch'. Steps here: time, episode"):
        curves(logs, "x", "epoch")
    with pytest.raises(KeyError, match=r"no key 'y' was logged. Keys here: x"):
        curves(logs, "y")


def test_arrays_are_averaged(batch):
    np.testing.assert_allclose(curves(batch, "big").mean, curves(batch, "loss").mean, rtol=1e-6)
    np.testing.assert_allclose(curves(batch, "pair").mean, 0.0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "bool", "complex64"])
def test_any_type_is_drawn(dtype):
    logs = logdict({"x": jnp.ones((3, 2), dtype)}, step=jnp.arange(3))
    assert curves(logs, "x").mean.tolist() == [1.0, 1.0, 1.0]
    assert len(plot(logs).axes[0].lines) == 2
    assert html_table(logs)


def test_traced_values_can_not_be_drawn():
    def f(x):
        logdict({"x": x}, step=x).plot()

    with pytest.raises(TypeError, match="'x' is traced"):
        jax.jit(f)(jnp.arange(3.0))


# --- pictures ------------------------------------------------------------------------------------


def test_a_panel_for_each_key(batch):
    figure = batch.plot()
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["loss", "pair", "big"]
    loss, pair, big = figure.axes
    np.testing.assert_allclose(loss.lines[0].get_ydata(), np.mean(batch["loss"], 0), rtol=1e-6)
    assert len(loss.collections) == 1, "the band"
    assert [t.get_text() for t in pair.get_legend().get_texts()] == ["[0]", "[1]"]
    assert len(big.lines) == 1
    assert loss.get_xlabel() == "step"
    figure.savefig("/dev/null", format="png")


def test_keys_by_name_and_by_pattern(batch):
    titles = lambda figure: [ax.get_title(loc="left") for ax in figure.axes]
    assert titles(batch.plot("big", "loss")) == ["big", "loss"]
    assert titles(batch.plot("*i*")) == ["pair", "big"]
    with pytest.raises(KeyError, match=r"no key 'los' was logged. Keys here: loss, pair, big"):
        batch.plot("los")


def test_own_axes_labels_and_scale(batch):
    figure, ax = plt.subplots()
    assert batch.plot("loss", ax=ax, label="first", log=True) is figure
    batch.plot("loss", ax=ax, label="second", band=None)
    assert ax.get_yscale() == "log"
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["first", "second"]
    assert len({line.get_color() for line in ax.lines}) == 2
    with pytest.raises(ValueError, match="2 keys are to be drawn, but ax has 1 axes"):
        batch.plot("loss", "big", ax=ax)


def test_groups_and_ready_curves_are_compared(batch):
    figure = plot({"one": batch, "two": [batch, batch]}, "loss")
    assert [t.get_text() for t in figure.axes[0].get_legend().get_texts()] == ["one", "two"]
    figure = plot({"reward": curves(batch, "loss")})
    assert figure.axes[0].get_title(loc="left") == "reward"


@pytest.mark.parametrize(
    "logs",
    [
        logdict(),
        logdict({"x": np.zeros(0)}, step=np.zeros(0)),
        logdict({"x": 3.0}, step=2),
        logdict({"x": np.full(3, np.nan)}, step=np.arange(3)),
        logdict({"x": np.array([1.0, np.nan, 2.0])}, step=np.arange(3)),
        logdict({"x": {"a": np.ones(3), "b": np.ones((3, 2))}}, step=np.arange(3)),
        logdict({"x": np.sin(np.arange(30.0))}),
        logdict({"x": np.zeros((3, 0))}, step=np.arange(3)),
    ],
    ids=["no key", "no event", "one event", "nan", "gap", "pytree", "vector", "no element"],
)
def test_what_is_out_of_the_ordinary_is_drawn(logs):
    plot(logs).savefig("/dev/null", format="png")
    assert html_table(logs).count("<tr>") >= 1


def test_one_event_of_each_lane_is_a_point_with_its_spread():
    _, logs = jax.vmap(lox.spool(lambda x: lox.log({"x": x}) and None))(jnp.arange(3.0))
    curve = curves(logs, "x")
    assert curve.mean.tolist() == [1.0]
    figure = logs.plot()
    assert figure.axes[0].lines[0].get_marker() == "o"
    assert figure.axes[0].collections


def test_a_vector_alone_is_drawn_over_its_index():
    curve = curves(logdict({"x": np.arange(30.0)}), "x")
    assert curve.x.tolist() == curve.mean.tolist() == list(range(30))


def test_a_missing_matplotlib_is_named(monkeypatch, batch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r'pip install "jaxlox\[plot\]"'):
        batch.plot()


# --- the terminal --------------------------------------------------------------------------------


def test_sparkline():
    assert sparkline([0, 7], 5) == "▁█"
    assert sparkline([1.0, np.nan, 3.0]) == "▁ █"
    assert sparkline([2, 2, 2]) == "▄▄▄"
    assert sparkline([]) == ""
    assert sparkline([np.nan]) == " "
    assert sparkline(np.arange(1000), 8) == "▁▂▃▄▅▆▇█"


def test_numbers_are_short():
    assert [number(x) for x in (0.5, 12345.6, 3, -0.034)] == ["0.5000", "12,346", "3", "-0.0340"]
    assert [number(x) for x in (1e-9, 1e12, np.nan)] == ["1.00e-09", "1.00e+12", "nan"]


def test_a_chart_has_axes_and_a_line():
    x = np.arange(50)
    text = chart([("up", x, x / 49, x / 49, x / 49)], 40, 8, title="up", x_label="step")
    lines = text.splitlines()
    assert lines[0].strip() == "up"
    assert lines[1].startswith(" 1.000 ┤")
    assert lines[8].startswith("0.000 ┤".rjust(8))
    assert lines[-1].split() == ["0", "49", "(step)"]
    assert max(map(len, lines)) <= 40
    # It goes up: the first dots of each row are further and further left.
    starts = [re.search("[⠁-⣿]", row).start() for row in lines[1:9]]
    assert starts == sorted(starts, reverse=True)
    assert all(re.search("[⠁-⣿]", row) for row in lines[1:9])


def test_a_chart_shows_the_band_and_the_names():
    x, flat = np.arange(50), np.full(50, 0.5)
    plain = chart([("a", x, flat, flat, flat)], 40, 8)
    band = chart([("a", x, flat, flat - 0.5, flat + 0.5)], 40, 8)
    dots = lambda text: sum(bin(ord(c) - 0x2800).count("1") for c in text if "⠁" <= c <= "⣿")
    assert dots(band) > 2 * dots(plain)
    two = chart([("loss", x, flat, flat, flat), ("reward", x, flat, flat, flat)], 60, 8)
    assert sum("loss" in row or "reward" in row for row in two.splitlines()) == 2
    assert "\x1b[" not in two
    assert "\x1b[34m" in chart([("a", x, flat, flat, flat)], 40, 8, color=True)


@pytest.mark.parametrize("values", [[], [3.0], [np.nan, np.nan], [1.0, np.nan, 2.0], [-1.0, 0.0]])
def test_a_chart_of_little(values):
    x = np.arange(len(values))
    for log in (False, True):
        assert chart([("x", x, values, values, values)], 30, 4, log=log)


def test_a_gap_is_left_open():
    values = np.where((np.arange(100) > 30) & (np.arange(100) < 70), np.nan, 1.0)
    text = chart([("x", np.arange(100), values, values, values)], 60, 3)
    [row] = [r for r in text.splitlines() if re.search("[⠁-⣿]", r)]
    assert re.search("[⠁-⣿] {10,}[⠁-⣿]", row)


# --- HTML ----------------------------------------------------------------------------------------


def cells(logs) -> dict[str, list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", html_table(logs).split("<tbody>")[1])
    split = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]
    return {row[0]: row[1:] for row in split}


def test_html_of_a_batch(batch):
    row = cells(batch)["loss"]
    values = np.asarray(batch["loss"], float)
    assert row[:4] == ["3 × scalar", "float32", "20", "step 0 … 190"]
    last = f"{number(values[:, -1].mean())} (mean)"
    assert row[4:8] == [last, *map(number, (values.min(), values.mean(), values.max()))]
    assert row[8].startswith("<svg")
    assert cells(batch)["big"][0] == "3 × (4, 5)"


def test_html_respects_masks():
    row = cells(masked())["x"]
    assert row[2] == "0 … 4"
    assert row[5:8] == ["1.000", "3.000", "5.000"]


def test_html_is_escaped():
    text = html_table(logdict({"<script>": {"<b>": 1.0}}))
    assert "<script>" not in text
    assert "<b>" not in text


def test_html_of_what_is_not_finite():
    row = cells(logdict({"x": np.array([1.0, np.nan])}, step=np.arange(2)))["x"]
    assert row[4] == '<span class="bad">nan</span>'
    assert row[5] == "1.000"
    assert "1 not finite" in row[7]


def test_html_of_traced_values_and_keys():
    seen = []
    jax.jit(lambda x: seen.append(cells(logdict({"x": x}, step=x))["x"]))(jnp.arange(3))
    assert seen[0][4] == "int32[3]"
    assert "key<fry>[]" in cells(logdict({"k": jax.random.key(0)}))["k"][4].replace(
        "&lt;", "<"
    ).replace("&gt;", ">")
    assert logdict({"x": 1.0})._repr_html_() == html_table(logdict({"x": 1.0}))


def test_html_of_large_arrays_is_quick():
    large = np.zeros((400, 300, 300), np.float32)
    large[-1] = 1.0
    logs = logdict({"x": large}, step=np.arange(400))
    start = time.perf_counter()
    row = cells(logs)["x"]
    assert time.perf_counter() - start < 1.0
    assert row[4] == "≈1.000 (mean)"


def test_svg_has_gaps():
    assert svg_sparkline([1.0, 2.0, np.nan, 1.0, 3.0]).count("<polyline") == 2
    assert svg_sparkline([1.0]) == ""
