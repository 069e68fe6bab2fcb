"""Bad input gets an error that names the key, the shapes, the line of the log, and the way out."""

from __future__ import annotations

import pathlib
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import logify
import lox

SOURCE = pathlib.Path(__file__).read_text().splitlines()
X = jnp.arange(4.0)


def line(mark):
    """file:line of the code that ends with this comment."""
    [number] = [n for n, text in enumerate(SOURCE, 1) if text.endswith(f"# {mark}")]
    return f"{__file__}:{number}"


def message(error, f, *args):
    """The message of what `f` raises; every part in it is one line for the user."""
    with pytest.raises(error) as caught:
        f(*args)
    assert isinstance(caught.value, error)
    return str(caught.value)


def assert_says(text, *parts):
    for part in parts:
        assert part in text, f"{part!r} is missing in: {text}"


# --- one log call --------------------------------------------------------------------------------
# These are checked in the call itself, so they are found without any transformation too.


def bad_values():
    return {
        "string": "hello",
        "object": object(),
        "function": len,
        "set": {1, 2},
        "array of strings": np.array(["a"]),
        "array of objects": np.array([object()]),
        "dates": np.array(["2024-01-01"], "datetime64[D]"),
        "shape": jax.ShapeDtypeStruct((2,), jnp.float32),
    }


def log_value(value):
    lox.log({"loss": value})  # a value


@pytest.mark.parametrize("kind", bad_values())
def test_value_that_is_no_array(kind):
    value = bad_values()[kind]
    for f in (log_value, lambda v: lox.spool(lambda: log_value(v))()):
        text = message(TypeError, f, value)
        assert_says(text, "'loss'", line("a value"), type(value).__name__, "jnp.asarray")


@pytest.mark.parametrize("value", [{"w": 1.0, "name": "x"}, [1.0, [2.0, object()]]])
def test_value_with_a_part_that_is_no_array(value):
    part = "str" if isinstance(value, dict) else "object"
    assert_says(message(TypeError, log_value, value), "'loss'", line("a value"), part)


@pytest.mark.parametrize("value", [None, {}, [], ((), {})])
def test_value_without_any_array(value):
    text = message(TypeError, log_value, value)
    assert_says(text, "'loss'", line("a value"), "no array at all", "lox.log({'loss': 0.0})")


def test_random_key_as_value():
    text = message(TypeError, log_value, jax.random.key(0))
    assert_says(text, "'loss'", line("a value"), "random key", "jax.random.key_data(key)")
    text = message(TypeError, lox.spool(log_value), jax.random.key(0))
    assert_says(text, "'loss'", line("a value"), "jax.random.key_data(key)")


@pytest.mark.parametrize("key", [1, ("a", "b"), None, 1.5])
def test_key_that_is_no_string(key):
    def f():
        lox.log({key: 1.0})  # a key

    assert_says(message(TypeError, f), repr(key), line("a key"), f"lox.log({{{str(key)!r}: ...}})")


@pytest.mark.parametrize("data", [1.0, [("a", 1.0)], "loss", None, X])
def test_data_that_is_no_mapping(data):
    def f():
        lox.log(data)  # no mapping

    text = message(TypeError, f)
    assert_says(text, type(data).__name__, line("no mapping"), 'lox.log({"name": value})')


@pytest.mark.parametrize("step", ["first", None, object(), (1, 2), np.array(["a"])])
def test_step_that_is_no_array(step):
    def f():
        lox.log({"loss": 1.0}, epoch=step)  # a step

    text = message(TypeError, f)
    assert_says(text, "epoch", line("a step"), type(step).__name__, "epoch=jnp.asarray(...)")


def test_random_key_as_step():
    def f():
        lox.log({"loss": 1.0}, epoch=jax.random.key(0))  # a random step

    text = message(TypeError, f)
    assert_says(text, line("a random step"), "random key", "epoch=jax.random.key_data(key)")


ARGUMENTS = {"data", "tags", "explicit", "prefix", "reduce"}  # of `log` itself
ATTRIBUTES = sorted(n for n in dir(lox.logdict({"a": 1.0})) if not n.startswith("__"))


@pytest.mark.parametrize("name", [n for n in ATTRIBUTES if n not in ARGUMENTS])
def test_step_named_like_an_attribute_of_logdict(name):
    def f():
        lox.log({"loss": 1.0}, **{name: 1})  # a taken name

    text = message(ValueError, f)
    assert_says(text, f"{name!r}", line("a taken name"), "logdict", f"{name.strip('_')}_=")
    assert_says(message(ValueError, lambda: lox.logdict({"a": 1.0}, **{name: 1})), f"{name!r}")


def test_log_grad_is_checked_like_log():
    def f(x):
        return lox.log_grad(x, "dx", mask=1)  # a probe

    assert_says(message(ValueError, f, 1.0), "'mask'", line("a probe"))
    text = message(TypeError, lambda: lox.log_grad("text", "dx"))
    assert_says(text, "'dx'", "str", __file__)


# --- reductions ----------------------------------------------------------------------------------

KNOWN = ("append", "count", "first", "last", "max", "mean", "min", "std", "sum", "var")


def logged(x):
    lox.log({"loss": x})
    return x


@pytest.mark.parametrize("bad", ["average", "Mean", "", 3, ["mean"], len])
def test_unknown_reduction(bad):
    makers = (
        lambda: lox.spool(logged, reduce=bad),
        lambda: lox.spool(logged, reduce={"loss": bad}),
        lambda: lox.tap(logged, reduce=bad),
        lambda: lox.log({"loss": 1.0}, reduce=bad),
        lambda: lox.logdict({"loss": X}).reduce(bad),
    )
    for make in makers:
        text = message(ValueError, make)
        assert_says(text, repr(bad), *KNOWN, "lox.Reduction(init, update, merge, finish)")


def test_unknown_reduction_of_a_log_call_names_key_and_line():
    def f():
        lox.log({"loss": 1.0}, reduce="average")  # a reduction

    assert_says(message(ValueError, f), "'average'", "'loss'", line("a reduction"))


def test_unknown_reduction_of_logify():
    def f():
        logify.log("loss", 1.0, reduction="max")  # of logify

    text = message(ValueError, f)
    assert_says(text, "'loss'", "'max'", "replace", "append", "mean", "sum")


def test_two_reductions_of_one_key():
    def f(x):
        lox.log({"loss": x}, reduce="mean")  # mean
        lox.log({"loss": x}, reduce="max")  # max

    text = message(ValueError, lox.spool(f), 1.0)
    assert_says(text, "'loss'", "'mean'", "'max'", line("mean"), line("max"), "two names")


def test_extremes_of_complex_numbers():
    f = lambda x: lox.log({"z": x}) and x
    for name in ("min", "max"):
        assert_says(message(TypeError, lox.spool(f, reduce=name), 1j), repr(name), "complex")


# --- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, 1.5, 2.0, True, False, "3", np.float32(2), [1]])
@pytest.mark.parametrize(
    ("transform", "name"),
    [(lox.spool, "capacity"), (lox.spool, "interval"), (lox.tap, "every"), (lox.tap, "interval")],
)
def test_number_that_is_no_positive_integer(transform, name, value):
    text = message(ValueError, lambda: transform(logged, **{name: value}))
    assert_says(text, name, "positive integer", repr(value), f"{name}=100")


def test_integers_of_numpy_are_integers():
    for n in (1, 3, np.int64(2), np.uint8(2)):
        lox.spool(logged, capacity=n, interval=n)(1.0)
        lox.tap(logged, lambda _: None, every=n, interval=n)(1.0)


# --- one key, several calls ----------------------------------------------------------------------


def transformed(f, x=1.0):
    """Every transformation in which the events of a key must agree."""
    return (
        lambda: lox.spool(f)(x),
        lambda: jax.jit(lox.spool(f))(x),
        lambda: lox.spool(f, interval=2)(x),
        lambda: lox.spool(f, reduce="last")(x),
        lambda: lox.tap(f, lambda _: None, reduce="last")(x),
        lambda: lox.spool(jax.jit(jax.grad(lambda x: f(x) * x)))(x),
    )


def assert_all_say(f, *parts):
    for run in transformed(f):
        assert_says(message(ValueError, run), *parts)


def test_one_key_with_two_shapes():
    def f(x):
        lox.log({"loss": jnp.ones(3)})  # three
        lox.log({"loss": jnp.ones((4, 2))})  # four by two
        return x

    parts = ("float32[3]", "float32[4,2]", line("three"), line("four by two"))
    assert_all_say(f, "'loss'", *parts, "'loss_a'", "'loss_b'")


def test_one_key_with_two_shapes_in_branches_and_loops():
    def one(x):
        lox.log({"loss": x})  # scalar
        return x

    def two(x):
        step = lambda c, _: (lox.log({"loss": jnp.stack([c, c])}) and c, None)  # pair
        return lax.scan(step, x, None, length=2)[0]

    f = lambda x: lax.cond(x > 0, one, two, x)
    assert_all_say(f, "'loss'", "float32[]", "float32[2]", line("scalar"), line("pair"))


def test_one_key_with_two_structures():
    def f(x):
        lox.log({"loss": {"a": x}})  # with a
        lox.log({"loss": {"b": x}})  # with b
        return x

    assert_all_say(f, "'loss'", "{'a': *}", "{'b': *}", line("with a"), line("with b"))


def test_one_key_inside_and_outside_of_vmap():
    def g(x):
        lox.log({"loss": x})  # inside
        return x

    def f(x):
        lox.log({"loss": x})  # outside
        return jax.vmap(g)(jnp.stack([x, x])).sum()

    assert_all_say(f, "'loss'", "batch", "(2,)", line("inside"), line("outside"))


def test_one_key_as_integers_and_as_floats():
    def f(x):
        lox.log({"loss": jnp.int32(1)})  # int
        lox.log({"loss": jnp.float32(x)})  # float
        return x

    assert_all_say(f, "'loss'", "int32", "float32", line("int"), line("float"), "astype(int32)")


def test_one_step_as_integers_and_as_floats():
    def f(x):
        lox.log({"loss": x}, step=jnp.int32(1))  # int step
        lox.log({"loss": x}, step=jnp.float32(1))  # float step
        return x

    assert_all_say(f, "'loss'", "int32", "float32", line("int step"), line("float step"))


def test_types_that_hold_each_other_are_no_conflict():
    def f(x):
        lox.log({"a": jnp.bfloat16(1.5), "b": jnp.int8(1), "c": True})
        lox.log({"a": jnp.float32(0.1), "b": jnp.int32(70000), "c": jnp.int32(5)})
        return x

    _, logs = lox.spool(f)(1.0)
    assert [v.dtype for v in logs.values()] == [jnp.float32, jnp.int32, jnp.int32]
    np.testing.assert_array_equal(logs["a"], np.float32([1.5, 0.1]))
    np.testing.assert_array_equal(logs["b"], [1, 70000])
    np.testing.assert_array_equal(logs["c"], [1, 5])


@pytest.mark.parametrize("values", [(1, 2.5), (2.5, 1), (1, np.float32(2.5)), (np.float16(2), 1)])
def test_python_numbers_take_the_type_of_the_others(values):
    def f():
        for v in values:
            lox.log({"a": v})

    _, logs = lox.spool(f)()
    np.testing.assert_array_equal(logs["a"], values)
    assert jnp.issubdtype(logs["a"].dtype, jnp.floating)


def test_one_key_with_and_without_a_step():
    def f(x):
        lox.log({"loss": x}, step=1)  # a step of one
        lox.log({"loss": x})  # no step
        return x

    parts = ("'loss'", "no step", line("a step of one"), line("no step"))
    assert_all_say(f, *parts, "lox.log({'loss': ...}, step=...)")


def test_one_key_with_two_names_of_steps():
    def f(x):
        lox.log({"loss": x}, step=1)  # by step
        lox.log({"loss": x}, epoch=1)  # by epoch
        return x

    assert_all_say(f, "'loss'", "with step", "with epoch", line("by step"), line("by epoch"))


def test_one_step_with_two_shapes():
    def f(x):
        lox.log({"loss": x}, step=jnp.int32(1))  # flat
        lox.log({"loss": x}, step=jnp.arange(2))  # long
        return x

    assert_all_say(f, "loss", "step", "int32[]", "int32[2]", line("flat"), line("long"))


def test_order_of_step_names_is_no_conflict():
    def f(x):
        lox.log({"loss": x}, step=1, epoch=10)
        lox.log({"loss": x}, epoch=20, step=2)
        return x

    _, logs = lox.spool(f)(1.0)
    np.testing.assert_array_equal(logs.step["loss"], [1, 2])
    np.testing.assert_array_equal(logs.epoch["loss"], [10, 20])


def test_adding_logdicts_that_do_not_fit():
    a = lox.logdict({"loss": jnp.ones(2)}, step=jnp.arange(2))
    text = message(ValueError, lambda: a + lox.logdict({"loss": 1.0}))
    assert_says(text, "'loss'", "step", "no step", "the left", "the right")
    wide = lox.logdict({"loss": jnp.ones((2, 3))}, step=jnp.arange(2))
    text = message(ValueError, lambda: a + wide)
    assert_says(text, "'loss'", "(3,)", "the left", "the right")


def test_errors_of_logify_name_the_user_s_line():
    def f(x):
        logify.log("loss", x, reduction="append")  # first of logify
        logify.log("loss", jnp.stack([x, x]), reduction="append")  # second of logify
        return x

    text = message(ValueError, logify.logify(f), 1.0)
    assert_says(text, "loss", line("first of logify"), line("second of logify"))


# --- constructs ----------------------------------------------------------------------------------


def test_while_loop_without_capacity():
    def body(c):
        lox.log({"c": c})  # in a while loop
        return c + 1

    f = lambda x: lax.while_loop(lambda c: c < 3, body, x)
    g = lambda n: lax.fori_loop(0, n, lambda i, c: body(c), 0)
    for run in (
        lambda: lox.spool(f)(0),
        lambda: lox.spool(f, interval=2)(0),
        lambda: lox.spool(g)(3),
    ):
        text = message(lox.LogError, run)
        assert_says(
            text, "'c'", line("in a while loop"), "while_loop", "lox.spool(f, capacity=1000)"
        )
        assert_says(text, 'reduce="last"', "lox.tap(f)")
    assert lox.spool(f, capacity=5)(0)[1].count["c"] == 3


def pallas_program(x):
    def kernel(x_ref, o_ref):
        value = x_ref[...] * 2
        lox.log({"inside": value})  # in a kernel
        o_ref[...] = value

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=out, interpret=True)(x)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, lambda f: lambda x: jax.vmap(f)(x[None])])
def test_log_in_a_pallas_kernel(wrap):
    f = wrap(pallas_program)
    for transform in (lox.spool, lambda f: lox.tap(f, print), lambda f: lox.spool(f, reduce="sum")):
        text = message(lox.LogError, transform(f), X)
        assert_says(text, "'inside'", line("in a kernel"), "pallas_call", "lox.nolog(f)")
    np.testing.assert_array_equal(pallas_program(X), X * 2)
    np.testing.assert_array_equal(lox.spool(lox.nolog(pallas_program))(X)[0], X * 2)


def test_log_in_a_reducer():
    def add(a, b):
        lox.log({"a": a})  # in a reducer
        return a + b

    f = lambda x: lax.reduce(x, jnp.float32(0), add, (0,))
    assert f(X) == 6.0
    text = message(lox.LogError, lox.spool(f), X)
    assert_says(text, "'a'", line("in a reducer"), "reduce", "lox.nolog(f)")


def test_log_at_compile_time():
    def f(x):
        with jax.ensure_compile_time_eval():
            lox.log({"early": jnp.ones(2)})  # at compile time
        return x

    assert f(1.0) == 1.0
    for run in (lox.spool(f), jax.jit(lox.spool(f)), lox.tap(f, print)):
        text = message(lox.LogError, run, 1.0)
        assert_says(text, "'early'", line("at compile time"), "ensure_compile_time_eval")


@jax.custom_jvp
def halved(x):
    return x / 2


@halved.defjvp
def _halved_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    lox.log({"dx": dx})  # a tangent
    return halved(x), dx / 2


def test_log_of_a_tangent_in_reverse_mode():
    for derive in (jax.grad, lambda f: lambda x: jax.vjp(f, x)[1](1.0)):
        text = message(lox.LogError, lox.spool(derive(halved)), 3.0)
        assert_says(text, "'dx'", line("a tangent"), "jax.jvp", "lox.log_grad(x, name)")
    assert jax.grad(halved)(3.0) == 0.5
    _, logs = lox.spool(lambda x: jax.jvp(halved, (x,), (4.0,)))(3.0)
    assert logs["dx"] == 4.0


# --- logdicts ------------------------------------------------------------------------------------


def sometimes(x):
    def yes(x):
        lox.log({"positive": x})
        return x

    return lax.cond(x > 0, yes, lambda x: x, x)


def test_compact_of_ragged_lanes():
    twice = lambda x: sometimes(x) + sometimes(x - 2)
    _, logs = lox.spool(jax.vmap(twice))(X)
    text = message(ValueError, logs.compact)
    assert_says(text, "'positive'", "lanes", "jax.tree.map(lambda x: x[i], logs).compact()")
    counts = [jax.tree.map(lambda x, i=i: x[i], logs).compact().count["positive"] for i in range(4)]
    assert counts == [0, 1, 1, 2]


def test_compact_of_traced_values():
    @jax.jit
    def f(x):
        return lox.spool(sometimes)(x)[1].compact()

    assert_says(message(ValueError, f, 1.0), "'positive'", "traced", "logs.mask")


def test_step_that_was_never_logged():
    _, logs = lox.spool(lambda x: lox.log({"a": x}, step=1) and x)(1.0)
    assert_says(message(AttributeError, lambda: logs.epoch), "'epoch'", "step")
    assert not hasattr(logs, "epoch")


def test_slice_takes_a_slice():
    logs = lox.logdict({"a": X}, step=X)
    assert_says(message(TypeError, lambda: logs.slice[1]), "logs.slice[a:b:c]", "1")


def test_save_takes_a_logdict_of_arrays(tmp_path):
    path = tmp_path / "logs"
    assert_says(message(TypeError, lambda: lox.save({"a": 1.0}, path)), "logdict", "dict")
    assert not list(tmp_path.iterdir())


# --- callbacks -----------------------------------------------------------------------------------


class DiskFull(Exception):
    pass


def looped(x):
    def step(c, t):
        lox.log({"t": t})
        return c + t, None

    return lax.scan(step, x, jnp.arange(3.0))[0]


def fails(logs):
    raise DiskFull(f"no room for {logs}")  # the cause


def assert_own_error(error):
    """It is the callback's own exception, with the callback's frame in its traceback."""
    assert type(error) is DiskFull
    assert "no room for {'t': 0.0}" in str(error)
    frames = traceback.extract_tb(error.__traceback__)
    assert any(f"{f.filename}:{f.lineno}" == line("the cause") for f in frames)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
@pytest.mark.parametrize("options", [{}, dict(interval=2)])
def test_exception_in_a_callback_is_raised_at_the_end_of_an_eager_call(wrap, options):
    seen = []

    def callback(logs):
        seen.append(logs)
        fails(logs)

    with pytest.raises(DiskFull) as caught:
        lox.tap(wrap(looped), callback, **options)(0.0)
    assert_own_error(caught.value)
    assert len(seen) == (2 if options else 3)  # the program went on
    assert any(f"{len(seen) - 1} more" in note for note in caught.value.__notes__)
    lox.flush()
    assert lox.tap(looped, seen.append)(0.0) == 3.0


@pytest.mark.parametrize(
    "wrap", [jax.jit, jax.grad, lambda f: lambda x: jax.vmap(f)(jnp.stack([x]))]
)
def test_exception_in_a_callback_is_raised_by_flush(wrap):
    calls = []

    def callback(logs):
        calls.append(logs)
        raise DiskFull(f"no room for {len(calls)}")

    wrap(lox.tap(looped, callback))(0.0)
    with pytest.raises(DiskFull, match="no room for 1"):
        lox.flush()
    assert len(calls) == 3
    lox.flush()


def test_exception_at_flush_has_its_own_traceback():
    jax.jit(lox.tap(looped, fails))(0.0)
    with pytest.raises(DiskFull) as caught:
        lox.flush()
    assert_own_error(caught.value)


def test_exception_in_a_window_s_callback():
    with pytest.raises(DiskFull, match=r"no room for \{'t': \[0.0, 1.0\]\}"):
        lox.tap(looped, fails, every=2)(0.0)


def test_error_of_the_program_is_not_hidden_by_that_of_the_callback():
    def f(x):
        lox.log({"t": x})
        raise KeyError("in the program")

    with pytest.raises(KeyError, match="in the program"):
        lox.tap(f, fails)(0.0)
    assert lox.tap(looped, lambda _: None)(0.0) == 3.0


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: lox.spool(lambda: lox.log({"n": 2**40}))(), "'n'"),
        (lambda: lox.spool(lambda x: lox.log({"c": x * 1j}), reduce="min")(1.0), "'c'"),
        (lambda: lox.tap(lambda x: x, "no"), "callable"),
        (lambda: lox.spool(lambda x: x, prefix=3), "prefix"),
        (lambda: lox.log({"a": 1}, prefix=None), "prefix"),
        (lambda: lox.log({"a": 1}, _step=2), "_step"),
        (lambda: lox.log(lox.logdict({"a": 1}, step=2)), "logs.data, step="),
        (lambda: lox.spool(lambda a, x: x)({1, 2}, 1.0), "set"),
    ],
)
def test_other_mistakes_are_named(call, says):
    with pytest.raises((TypeError, ValueError), match=says):
        call()


def test_a_log_in_a_nested_shard_map_is_refused():
    mesh = jax.make_mesh((4, 2), ("i", "j"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec

    def inner(x):
        lox.log({"in": x.sum()})
        return x

    def outer(x):
        return jax.shard_map(inner, in_specs=spec("j"), out_specs=spec("j"), axis_names={"j"})(x)

    f = jax.shard_map(outer, mesh=mesh, in_specs=spec("i"), out_specs=spec("i"), axis_names={"i"})
    with pytest.raises(lox.LogError, match=r"'in'.*another shard_map"):
        jax.jit(lox.spool(f))(jnp.arange(16.0))
