"""Logs of programs on several devices: sharded arrays, shard_map, and two processes."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lox
from oracle import assert_same, by_lane

N = 8
AXIS_TYPES = [AxisType.Auto, AxisType.Explicit]
over_axis_types = pytest.mark.parametrize("kind", AXIS_TYPES, ids=["auto", "explicit"])


def mesh_of(kind, shape=(N,), names=("d",)):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def put(x, mesh, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


# --- arrays with a NamedSharding -----------------------------------------------------------------


def straight(x):
    lox.log({"a": x})
    lox.log({"a": x * 2})
    return x


def scan(x):
    def step(c, t):
        c = jnp.sin(c) + t
        lox.log({"a": c, "rows": c.sum(1)}, step=t)
        return c, None

    return lax.scan(step, x, jnp.arange(5.0))[0]


def one_sided(x):
    def step(c, t):
        def yes(c):
            lox.log({"a": c}, step=t)
            return c * 2

        return lax.cond(t > 1, yes, lambda c: c, c), None

    return lax.scan(step, x, jnp.arange(5.0))[0]


def unequal(x):
    def yes(c):
        lox.log({"a": c})
        lox.log({"a": c * 2})
        return c * 2

    def no(c):
        lox.log({"a": -c})
        return c

    return lax.cond(x.shape[0] * jnp.ones(()) > 1, yes, no, x)


def lanes(x):
    def g(r):
        def yes(r):
            lox.log({"a": r})
            return r * 2

        return lax.cond(r[0] > 20, yes, lambda r: r, r)

    return lax.scan(lambda c, _: (jax.vmap(g)(c), None), x, None, length=3)[0]


def loop(x):
    def body(c):
        lox.log({"a": c[1]}, step=c[0])
        return c[0] + 1, c[1] * 2

    return lax.while_loop(lambda c: c[0] < 3, body, (0, x))[1]


def gradient(x):
    return jax.grad(lambda x: (scan(x) ** 2).sum())(x)


CASES = [
    (straight, {}),
    (straight, dict(reduce="max")),
    (scan, {}),
    (scan, dict(interval=2)),
    (scan, dict(reduce="mean")),
    (scan, dict(reduce="std")),
    (scan, dict(reduce={"a": "last", "rows": "sum"})),
    (one_sided, {}),
    (one_sided, dict(reduce="sum")),
    (one_sided, dict(interval=2)),
    (unequal, {}),
    (lanes, {}),
    (lanes, dict(reduce="min")),
    (lanes, dict(interval=2)),
    (loop, dict(capacity=5)),
    (loop, dict(capacity=2)),
    (loop, dict(reduce="mean")),
    (gradient, {}),
]


@over_axis_types
@pytest.mark.parametrize(
    ("f", "options"), CASES, ids=lambda v: "-".join(map(str, v)) if isinstance(v, dict) else None
)
def test_logs_of_sharded_values_are_sharded_without_a_gather(f, options, kind):
    mesh = mesh_of(kind)
    plain = jnp.arange(64.0).reshape(16, 4)
    x = put(plain, mesh, "d")
    program = jax.jit(lox.spool(f, **options)).lower(x).compile()
    out, logs = program(x)
    assert "all-gather" not in program.as_text()
    assert logs
    for value in logs.values():
        assert value.sharding.shard_shape(value.shape) != value.shape
    want_out, want = lox.spool(f, **options)(plain)
    assert_same(out, want_out)
    assert_same(by_lane(logs), by_lane(want))
    assert_same(logs.mask, want.mask)
    assert_same(lox.spool(f, **options)(x)[1], want)


@over_axis_types
def test_masks_of_sharded_lanes_are_sharded(kind):
    mesh = mesh_of(kind)
    _, logs = lox.spool(lanes)(put(jnp.arange(64.0).reshape(16, 4), mesh, "d"))
    mask = logs.mask["a"]
    assert mask.shape == (16, 3)
    assert mask.sharding.shard_shape(mask.shape) == (2, 3)


@over_axis_types
def test_sharding_survives_inner_jits_with_their_own_shardings(kind):
    mesh = mesh_of(kind)
    sharding = NamedSharding(mesh, P("d"))

    @jax.jit
    def inner(x):
        lox.log({"a": x + 1})
        return x * 2

    outer = jax.jit(inner, in_shardings=sharding, out_shardings=sharding)
    x = put(jnp.arange(16.0), mesh, "d")
    out, logs = lox.spool(outer)(x)
    assert out.sharding.is_equivalent_to(sharding, 1)
    assert logs["a"].sharding.is_equivalent_to(sharding, 1)
    np.testing.assert_array_equal(logs["a"], np.arange(16) + 1)


def test_tap_of_a_sharded_value_is_one_call_with_the_whole_array():
    x = put(jnp.arange(64.0).reshape(16, 4), mesh_of(AxisType.Auto), "d")
    seen = []
    lox.tap(scan, seen.append)(x)
    _, logs = lox.spool(scan)(np.asarray(x))
    assert len(seen) == 5
    assert_same(np.stack([s["a"] for s in seen]), logs["a"])


# --- shard_map -----------------------------------------------------------------------------------

ROWS = np.arange(16.0, dtype=np.float32).reshape(N, 2)  # what each shard holds
SUMS = ROWS.sum(1)


BY_D = P("d")


def mapped(f, mesh, spec=BY_D, **options):
    return jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, **options)


def on(mesh):
    return put(ROWS.reshape(-1), mesh, "d")


def each(x):
    lox.log({"sum": x.sum(), "row": x}, step=1)
    return x * 2


@over_axis_types
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["bare", "jit"])
def test_each_shard_s_event_is_kept(kind, check_vma, wrap):
    mesh = mesh_of(kind)
    f = wrap(mapped(each, mesh, check_vma=check_vma))
    for spool in (lox.spool, lambda f: jax.jit(lox.spool(f))):
        out, logs = spool(f)(on(mesh))
        np.testing.assert_array_equal(out, ROWS.reshape(-1) * 2)
        np.testing.assert_array_equal(logs["sum"], SUMS)
        np.testing.assert_array_equal(logs["row"], ROWS)
        np.testing.assert_array_equal(logs.step["sum"], [1] * N)
        assert logs["row"].sharding.shard_shape((N, 2)) == (1, 2)
        assert not logs.mask


@over_axis_types
def test_logs_of_shards_need_no_gather(kind):
    mesh = mesh_of(kind)
    for f in (each, shard_scan):
        text = jax.jit(lox.spool(mapped(f, mesh))).lower(on(mesh)).compile().as_text()
        assert "all-gather" not in text


@over_axis_types
def test_replicated_values_are_kept_once(kind):
    def f(x):
        lox.log({"total": lax.psum(x.sum(), "d")})
        lox.log({"constant": 1.5})
        return x

    mesh = mesh_of(kind)
    _, logs = lox.spool(mapped(f, mesh))(on(mesh))
    assert_same(logs.data, {"total": SUMS.sum(), "constant": 1.5})


@over_axis_types
def test_replicated_values_are_kept_once_beside_others_of_the_same_call(kind):
    def f(x):
        lox.log({"sum": x.sum(), "total": lax.psum(x.sum(), "d"), "constant": 1.5})
        return x

    mesh = mesh_of(kind)
    _, logs = lox.spool(mapped(f, mesh))(on(mesh))
    assert_same(logs.data, {"sum": SUMS, "total": SUMS.sum(), "constant": 1.5})


@over_axis_types
def test_the_shard_axis_is_over_those_mesh_axes_a_value_differs_on(kind):
    def f(x):
        s = x.sum()
        lox.log({"both": s})
        lox.log({"a": lax.psum(s, "b")})
        lox.log({"b": lax.psum(s, "a")})
        lox.log({"none": lax.psum(s, ("a", "b"))})
        return x

    mesh = mesh_of(kind, (4, 2), ("a", "b"))
    spec = P(("a", "b"))
    x = put(ROWS.reshape(-1), mesh, ("a", "b"))
    _, logs = lox.spool(mapped(f, mesh, spec))(x)
    grid = SUMS.reshape(4, 2)
    want = {"both": SUMS, "a": grid.sum(1), "b": grid.sum(0), "none": grid.sum()}
    assert_same(logs.data, want)


def test_only_manual_axes_count():
    mesh = mesh_of(AxisType.Auto, (4, 2), ("a", "b"))

    def f(x):
        lox.log({"sum": x.sum()})
        return x

    g = mapped(f, mesh, P("a"), axis_names={"a"})
    _, logs = lox.spool(jax.jit(g))(jnp.arange(16.0))
    np.testing.assert_array_equal(logs["sum"], np.arange(16.0).reshape(4, 4).sum(1))


def shard_scan(x):
    def step(c, t):
        lox.log({"sum": c.sum()}, step=t)
        return c + t, None

    return lax.scan(step, x, jnp.arange(3.0))[0]


# The events of `shard_scan`, by shard and step.
SCANNED = SUMS[:, None] + np.array([0.0, 0.0, 2.0])
REDUCED = {
    "mean": SCANNED.mean(1),
    "sum": SCANNED.sum(1),
    "last": SCANNED[:, -1],
    "first": SCANNED[:, 0],
    "max": SCANNED.max(1),
    "count": np.full(N, 3),
}


@over_axis_types
@pytest.mark.parametrize("check_vma", [True, False])
def test_scan_in_shard_map(kind, check_vma):
    mesh = mesh_of(kind)
    _, logs = lox.spool(mapped(shard_scan, mesh, check_vma=check_vma))(on(mesh))
    np.testing.assert_array_equal(logs["sum"], SCANNED)
    np.testing.assert_array_equal(logs.step["sum"], [[0, 1, 2]] * N)
    assert logs.count["sum"] == 3


@over_axis_types
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", REDUCED)
def test_reduction_in_shard_map_is_that_of_each_shard(kind, check_vma, name):
    mesh = mesh_of(kind)
    f = mapped(shard_scan, mesh, check_vma=check_vma)
    _, logs = lox.spool(f, reduce=name)(on(mesh))
    assert_same(logs.data, {"sum": REDUCED[name]})
    np.testing.assert_array_equal(logs.step["sum"], [0 if name == "first" else 2] * N)


@over_axis_types
def test_interval_in_shard_map(kind):
    mesh = mesh_of(kind)
    _, logs = lox.spool(mapped(shard_scan, mesh), interval=2)(on(mesh))
    np.testing.assert_array_equal(logs["sum"], SCANNED[:, ::2])
    np.testing.assert_array_equal(logs.step["sum"], [[0, 2]] * N)


@over_axis_types
@pytest.mark.parametrize("reduce", [None, "mean"])
def test_shard_map_in_scan(kind, reduce):
    mesh = mesh_of(kind)
    f = mapped(each, mesh)
    g = lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=3)[0]
    out, logs = lox.spool(g, reduce=reduce)(on(mesh))
    np.testing.assert_array_equal(out, ROWS.reshape(-1) * 8)
    events = SUMS[:, None] * np.array([1.0, 2.0, 4.0])
    assert_same(logs["sum"], events if reduce is None else events.mean(1))


def shard_while(x):
    """Shard i runs i iterations."""

    def body(c):
        lox.log({"sum": c[1].sum()})
        return c[0] - 1, c[1] * 2

    return lax.while_loop(lambda c: c[0] > 0, body, (lax.axis_index("d"), x))[1]


WHILED = [[SUMS[i] * 2**k for k in range(i)] for i in range(N)]


@over_axis_types
@pytest.mark.parametrize("capacity", [3, 10])
def test_capacity_in_shard_map_is_that_of_each_shard(kind, capacity):
    mesh = mesh_of(kind)
    _, logs = lox.spool(mapped(shard_while, mesh), capacity=capacity)(on(mesh))
    np.testing.assert_array_equal(logs.count["sum"], np.arange(N))
    logs = jax.tree.map(np.asarray, logs)
    for i in range(N):
        one = jax.tree.map(lambda x, i=i: x[i], logs).compact()
        np.testing.assert_array_equal(one["sum"], WHILED[i][-capacity:])


@over_axis_types
def test_reduction_of_a_while_loop_in_shard_map(kind):
    mesh = mesh_of(kind)
    _, logs = lox.spool(mapped(shard_while, mesh), reduce="sum")(on(mesh))
    np.testing.assert_array_equal(logs["sum"], [sum(w) for w in WHILED])
    np.testing.assert_array_equal(logs.mask["sum"], np.arange(N) > 0)


def shard_cond(x):
    def yes(x):
        lox.log({"sum": x.sum()})
        return x * 2

    return lax.cond(lax.axis_index("d") > 3, yes, lambda x: x, x)


@over_axis_types
@pytest.mark.parametrize("reduce", [None, "sum"])
def test_cond_by_shard_has_a_mask_by_shard(kind, reduce):
    mesh = mesh_of(kind)
    _, logs = lox.spool(mapped(shard_cond, mesh), reduce=reduce)(on(mesh))
    np.testing.assert_array_equal(logs.mask["sum"], np.arange(N) > 3)
    np.testing.assert_array_equal(np.asarray(logs["sum"])[4:], SUMS[4:])


@over_axis_types
def test_shard_map_under_grad_logs_each_event_once(kind):
    mesh = mesh_of(kind)
    f = mapped(lambda x: shard_scan(jnp.sin(each(x))), mesh)
    loss = lambda x: f(x).sum()
    grad, logs = lox.spool(jax.grad(loss))(on(mesh))
    assert_same(grad, jax.jit(jax.grad(loss))(on(mesh)))
    _, want = lox.spool(f)(on(mesh))
    assert_same(by_lane(logs), by_lane(want))
    assert logs["sum"].shape == (N, 4)
    grad2, logs = jax.jit(jax.grad(lambda x: _summed(lox.spool(f)(x)), has_aux=True))(on(mesh))
    assert_same(grad2, grad)
    assert_same(by_lane(logs), by_lane(want))


def _summed(result):
    out, logs = result
    return out.sum(), logs


@over_axis_types
def test_grad_inside_shard_map_logs_each_event_once(kind):
    mesh = mesh_of(kind)
    f = mapped(jax.grad(lambda x: lax.psum(shard_scan(x).sum(), "d")), mesh)
    _, logs = lox.spool(f)(on(mesh))
    np.testing.assert_array_equal(logs["sum"], SCANNED)


def test_vmap_and_spool_of_shard_map_commute():
    mesh = mesh_of(AxisType.Auto)
    xs = jnp.stack([on(mesh), on(mesh) + 100])
    for f, options in ((each, {}), (shard_scan, {}), (shard_scan, dict(reduce="sum"))):
        _, inside = lox.spool(jax.vmap(mapped(f, mesh)), **options)(xs)
        _, outside = jax.vmap(lox.spool(mapped(f, mesh), **options))(xs)
        assert_same(inside, outside)
        assert inside["sum"].shape[:2] == (2, N)


def test_vmap_inside_shard_map_has_the_shards_first():
    mesh = mesh_of(AxisType.Auto)

    def g(r):
        lox.log({"r": r})
        return r * 2

    _, logs = lox.spool(mapped(jax.vmap(g), mesh))(on(mesh))
    np.testing.assert_array_equal(logs["r"], ROWS)


@over_axis_types
def test_spool_inside_shard_map_returns_the_logs_of_its_shard(kind):
    mesh = mesh_of(kind)

    def f(x):
        out, logs = lox.spool(shard_scan)(x)
        return out, logs["sum"][None]

    _, sums = jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=(P("d"), P("d")))(on(mesh))
    np.testing.assert_array_equal(sums, SCANNED)


# --- tap in shard_map ----------------------------------------------------------------------------


def tapped(f, kind=AxisType.Auto, check_vma=True, **options):
    mesh, seen = mesh_of(kind), []
    lox.tap(mapped(f, mesh, check_vma=check_vma), seen.append, **options)(on(mesh))
    return seen


by_sum = lambda seen: sorted(seen, key=lambda s: np.ravel(s["sum"])[0])


@over_axis_types
@pytest.mark.parametrize("check_vma", [True, False])
def test_tap_calls_once_per_shard(kind, check_vma):
    seen = by_sum(tapped(each, kind, check_vma))
    np.testing.assert_array_equal([s["sum"] for s in seen], SUMS)
    np.testing.assert_array_equal([s["row"] for s in seen], ROWS)


@over_axis_types
def test_tap_keeps_the_order_of_each_shard(kind):
    seen = tapped(shard_scan, kind)
    assert len(seen) == 3 * N
    got = sorted(float(s["sum"]) for s in seen)
    assert got == sorted(SCANNED.ravel())
    first = {}
    for s in seen:  # those of shard i are 4 i + 1 and 4 i + 3
        first.setdefault(int(s["sum"]) // 4, []).append(int(s.step["sum"]))
    assert first == {i: [0, 1, 2] for i in range(N)}


@over_axis_types
@pytest.mark.parametrize("check_vma", [True, False])
def test_windows_in_shard_map(kind, check_vma):
    seen = by_sum(tapped(shard_scan, kind, check_vma, every=2))
    whole = [s for s in seen if len(s["sum"]) == 2]
    rest = [s for s in seen if len(s["sum"]) == 1]
    np.testing.assert_array_equal([s["sum"] for s in whole], SCANNED[:, :2])
    np.testing.assert_array_equal([s["sum"] for s in rest], SCANNED[:, 2:])


@over_axis_types
def test_windows_of_a_while_loop_in_shard_map(kind):
    seen = tapped(shard_while, kind, every=3)
    got = sorted(float(v) for s in seen for v in s["sum"])
    assert got == sorted(v for w in WHILED for v in w)
    assert len(seen) == sum(-(-i // 3) for i in range(N))


@over_axis_types
@pytest.mark.parametrize("check_vma", [True, False])
def test_tap_reduces_each_shard(kind, check_vma):
    [logs] = tapped(shard_scan, kind, check_vma, reduce="sum")
    np.testing.assert_array_equal(logs["sum"], SCANNED.sum(1))


@over_axis_types
def test_tap_interval_in_shard_map(kind):
    seen = tapped(shard_scan, kind, interval=2)
    assert sorted(float(s["sum"]) for s in seen) == sorted(SCANNED[:, ::2].ravel())


# --- two processes -------------------------------------------------------------------------------

SCRIPT = """
import sys
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import lox

rank, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)
assert jax.device_count() == 4
mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
whole = np.arange(8, dtype=np.float32)
x = jax.make_array_from_callback((8,), NamedSharding(mesh, P("d")), lambda i: whole[i])
mine = slice(4 * rank, 4 * rank + 4)


def local(x, axis):
    shards = sorted(x.addressable_shards, key=lambda s: s.index[axis].start)
    return np.concatenate([s.data for s in shards], axis)


def f(x):
    def step(c, t):
        lox.log({"c": c, "mean": c.mean()}, step=t)
        return c + t, None

    return jax.lax.scan(step, x, jnp.arange(3.0))[0]


rows = whole + np.array([[0.0], [0.0], [1.0]])
for spool in (lox.spool(f), jax.jit(lox.spool(f))):
    out, logs = spool(x)
    assert logs["c"].shape == (3, 8) and not logs["c"].is_fully_addressable
    np.testing.assert_array_equal(local(logs["c"], 1), rows[:, mine])
    np.testing.assert_array_equal(logs["mean"], rows.mean(1))
    np.testing.assert_array_equal(logs.step["c"], [0, 1, 2])
    assert "float32[3,8]" in repr(logs)
text = jax.jit(lox.spool(f)).lower(x).compile().as_text()
assert "all-gather" not in text
_, logs = lox.spool(f, reduce="sum")(x)
np.testing.assert_array_equal(local(logs["c"], 0), rows.sum(0)[mine])


def shard(x):
    lox.log({"sum": x.sum()})
    return x


g = jax.shard_map(shard, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
sums = whole.reshape(4, 2).sum(1)[2 * rank : 2 * rank + 2]
_, logs = lox.spool(g)(x)
np.testing.assert_array_equal(local(logs["sum"], 0), sums)
seen = []
lox.tap(g, seen.append)(x)
assert sorted(float(s["sum"]) for s in seen) == list(sums)
jax.distributed.shutdown()
print("all is well in process", rank)
"""


def test_two_processes_each_see_their_part(tmp_path):
    script = tmp_path / "process.py"
    script.write_text(SCRIPT)
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    source = pathlib.Path(lox.__file__).parents[1]
    env = os.environ | dict(
        PYTHONPATH=str(source),
        JAX_PLATFORMS="cpu",
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
    )
    start = lambda rank: subprocess.Popen(
        [sys.executable, str(script), str(rank), str(port)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    processes = [start(0), start(1)]
    try:
        texts = [p.communicate(timeout=120)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    for rank, (process, text) in enumerate(zip(processes, texts, strict=True)):
        assert process.returncode == 0, text
        assert f"all is well in process {rank}" in text
