"""logdict as a dict, as a pytree, and in a file."""

from __future__ import annotations

import copy
import os
import pickle
import stat
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import lox
from oracle import assert_same


def spooled(n=4, **options):
    def f(xs):
        lox.log({"once": xs.sum()})

        def step(c, x):
            lox.log({"c": c, "tree": {"a": x, "b": (x, [c])}}, step=x, epoch=x // 2)
            lax.cond(x > 1, lambda: (lox.log({"odd": x}), 0)[1], lambda: 0)
            return c + x, None

        return lax.scan(step, 0.0, xs)[0]

    return lox.spool(f, **options)(jnp.arange(float(n)))[1]


def test_it_is_a_dict():
    logs = spooled()
    assert isinstance(logs, dict)
    assert list(logs) == ["once", "c", "tree", "odd"]
    assert logs.data == dict(logs)
    del logs["c"]
    assert "c" not in logs
    assert "c" not in logs.step
    logs["new"] = jnp.ones(2)
    assert not logs.layouts["new"].events
    assert logs.pop("new").shape == (2,)
    assert "new" not in logs.layouts


def test_setting_a_key_keeps_its_steps():
    logs = spooled()
    logs["c"] = logs["c"] * 2
    assert logs.layouts["c"].events
    np.testing.assert_array_equal(logs.step["c"], [0, 1, 2, 3])


def test_it_shows_plain_values():
    logs = lox.logdict({"a": jnp.array([0.1, 2.5]), "b": 1, "t": (jnp.int32(1), {"x": True})})
    assert str(logs) == "{'a': [0.1, 2.5], 'b': 1, 't': (1, {'x': True})}"
    assert "..." in str(lox.logdict({"a": jnp.arange(5000)}))
    assert str(jax.eval_shape(lambda: lox.logdict({"a": jnp.ones(3)}))) == str(
        {"a": jax.ShapeDtypeStruct((3,), np.float32)}
    )


def test_unknown_steps_are_named():
    with pytest.raises(AttributeError, match="epoch, step"):
        _ = spooled().episode


def test_it_is_a_pytree():
    logs = spooled()
    leaves, tree = jax.tree.flatten(logs)
    again = tree.unflatten(leaves)
    assert_same(again, logs)
    doubled = jax.tree.map(lambda x: x * 2, logs)
    np.testing.assert_array_equal(doubled.step["c"], [0, 2, 4, 6])
    assert_same(jax.jit(lambda x: x)(logs), logs)
    assert hash(tree) == hash(jax.tree.structure(logs))


@pytest.mark.parametrize(
    "clone", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies(clone):
    logs = spooled()
    other = clone(logs)
    assert_same(other, logs)
    del other["c"]
    assert "c" in logs
    assert "c" in logs.step


def test_add_concatenates_events():
    a, b = spooled(3), spooled(2)
    both = a + b
    np.testing.assert_array_equal(both["c"], [0, 0, 1, 0, 0])
    np.testing.assert_array_equal(both.step["c"], [0, 1, 2, 0, 1])
    np.testing.assert_array_equal(both["once"], [3, 1])
    np.testing.assert_array_equal(both.mask["odd"], [False, False, True, False, False])
    assert both.count["odd"] == 1
    with_new = a + lox.logdict({"new": 1.0})
    assert with_new["new"] == 1.0
    with pytest.raises(ValueError, match="two shapes"):
        _ = a + lox.logdict({"once": jnp.ones(3)})


def test_or_merges():
    a, b = lox.logdict({"x": 1, "y": 2}), lox.logdict({"y": 3}, step=7)
    merged = a | b
    assert merged.data == {"x": 1, "y": 3}
    assert merged.step == {"y": 7}
    assert (a | {"z": 4}).data == {"x": 1, "y": 2, "z": 4}
    a |= b
    assert a.data == {"x": 1, "y": 3}


def test_filter_prefix_slice():
    logs = spooled()
    assert list(logs.filter(lambda key, value: key != "c")) == ["once", "tree", "odd"]
    assert list(logs.prefix("p/")) == ["p/once", "p/c", "p/tree", "p/odd"]
    cut = logs.slice[1:3]
    np.testing.assert_array_equal(cut["c"], [0, 1])
    np.testing.assert_array_equal(cut.step["c"], [1, 2])
    np.testing.assert_array_equal(cut["tree"]["b"][1][0], [0, 1])
    np.testing.assert_array_equal(cut.mask["odd"], [False, True])
    assert cut["once"] == logs["once"]
    np.testing.assert_array_equal(logs.slice[::-1]["c"], [3, 1, 0, 0])


def test_reduce_and_keep_steps():
    logs = spooled()
    assert logs.reduce("sum")["c"] == 4
    assert logs.reduce("last").step["c"] == 3
    assert logs.reduce("first").step["c"] == 0
    assert logs.reduce("sum", keep_steps=False).steps == {}
    assert logs.reduce("sum")["odd"] == 5
    assert logs.reduce("count")["odd"] == 2
    assert logs.reduce("sum").count["odd"] == 2
    some = logs.reduce(mode={"c": "max"})
    assert some["c"] == 3
    assert some.layouts["tree"].events


def test_batch_axes_stay_in_front():
    f = lambda x: lax.scan(
        lambda c, t: ((lox.log({"c": c + t}), c + t)[1], None), x, jnp.arange(3.0)
    )[0]
    _, logs = lox.spool(jax.vmap(f))(jnp.arange(2.0))
    assert logs["c"].shape == (2, 3)
    assert logs.slice[1:]["c"].shape == (2, 2)
    assert (logs + logs)["c"].shape == (2, 6)
    np.testing.assert_allclose(logs.reduce("mean")["c"], [4 / 3, 7 / 3], rtol=1e-6)
    np.testing.assert_allclose(jax.tree.map(lambda x: x[1], logs).slice[:1]["c"], [1.0])


def test_plain_data_with_steps():
    logs = lox.logdict({"a": np.ones((3, 2)), "b": np.ones(3)}, step=np.arange(3))
    assert logs.layouts["a"].events
    assert logs.reduce("sum")["a"].shape == (2,)
    single = lox.logdict({"a": np.ones(3)}, step=5)
    assert not single.layouts["a"].events


# --- files ---------------------------------------------------------------------------------------


def test_save_and_load(tmp_path):
    logs = spooled() | lox.logdict(
        {
            "half": jnp.ones(3, jnp.bfloat16),
            "h": jnp.bfloat16(1.5),
            "f8": jnp.ones(2, jnp.float8_e4m3fn),
            "n": 3,
            "c64": 1j,
        }
    )
    path = tmp_path / "a.lox"
    lox.save(logs, path)
    back = lox.load(path)
    assert list(back) == list(logs)
    assert back.layouts == logs.layouts
    for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(logs), strict=True):
        assert x.dtype == np.asarray(y).dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    assert jax.tree.structure(back) == jax.tree.structure(logs)


def test_a_saved_ring_keeps_its_count(tmp_path):
    f = lambda n: lax.while_loop(lambda c: c < n, lambda c: (lox.log({"c": c}), c + 1)[1], 0)
    _, logs = lox.spool(f, capacity=2)(5)
    lox.save(logs, tmp_path / "r")
    assert lox.load(tmp_path / "r").count["c"] == 5


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "a.lox"
    lox.save(lox.logdict({"a": 1}), path)

    class Bad:
        pass

    broken = lox.logdict({"a": np.ones(3)})
    broken._put("a", broken._entries["a"])
    dict.__setitem__(broken, "a", Bad())
    broken._entries["a"].value = Bad()
    with pytest.raises((TypeError, ValueError)):
        lox.save(broken, path)
    assert lox.load(path)["a"] == 1
    assert os.listdir(tmp_path) == ["a.lox"]


def test_saved_files_have_ordinary_rights(tmp_path):
    lox.save(lox.logdict({"a": 1}), tmp_path / "a")
    (tmp_path / "plain").write_text("")
    mode = lambda name: stat.S_IMODE((tmp_path / name).stat().st_mode)
    assert mode("a") == mode("plain")


def test_values_of_other_classes_are_refused(tmp_path):
    import collections

    Point = collections.namedtuple("Point", "x y")
    with pytest.raises(TypeError, match=r"'p'.*Point"):
        lox.save(lox.logdict({"p": Point(1, 2)}), tmp_path / "a")


def test_an_error_that_nobody_flushed_is_shown_at_exit(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import jax, lox\n"
        "def cb(logs): raise RuntimeError('lost?')\n"
        "jax.jit(lox.tap(lambda x: (lox.log({'x': x}), x)[1], cb))(1.0)\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env)
    assert "lox.flush() was never called" in run.stderr
    assert "RuntimeError: lost?" in run.stderr
