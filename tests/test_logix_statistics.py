"""logix's statistics and preconditioners against dense matrices in float64."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logix import _array, _compress, _precondition, _statistics, _sums
from logix._compress import Compression, Projector
from logix._record import Lookup, Outer, Whole, row_gradients
from test_logix_engine import (
    FEW,
    IN,
    LIBRARIES,
    OUT,
    ROWS,
    B,
    T,
    all_grads,
    basis,
    cast,
    close,
    dense_curvature,
    fit,
    fit_ekfac,
    loop_grads,
    records,
    to_torch,
)

EVERYTHING = ["variance", "kfac", "raw", "forward_variance", "backward_variance"]

# ---- statistics


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("t", [1, T])
def test_statistics_are_dense_ones(library, t):
    f, tol = LIBRARIES[library], 1e-4 if library == "jax" else 1e-9
    state = _statistics.update(
        {}, [cast(r, f) for r in records(t=t)], ["mean", "variance", "kfac", "raw"]
    )
    found = _statistics.finalize(state)
    for record in records(t=t):
        own, grad = found[record.layer], loop_grads(record)
        close(own["mean"], grad.mean(0), tol)
        close(own["square"], (grad**2).mean(0), tol)
        close(own["variance"], grad.var(0), tol)
        flat = grad.reshape(B, -1)
        close(own["raw"], flat.T @ flat / B, tol)
        if isinstance(record, Outer):
            close(own["left"], np.einsum("bti,btj->ij", record.g, record.g) / B, tol)
            close(own["right"], np.einsum("bti,btj->ij", record.a, record.a) / (B * t), tol)
        elif isinstance(record, Lookup):
            close(own["left"], np.bincount(record.i.ravel(), minlength=ROWS) / B, tol)
            close(own["right"], np.einsum("bti,btj->ij", record.g, record.g) / (B * t), tol)


def test_kfac_has_the_scale_of_the_curvature():
    """With independent positions, left ⊗ right is the second moment of vec G itself."""
    rng = np.random.default_rng(0)
    outer = Outer("x", rng.normal(size=(60_000, 2, 2)), rng.normal(size=(60_000, 2, 2)) * 3)
    own = _statistics.finalize(_statistics.update({}, [outer], ["kfac", "raw"]))["x"]
    np.testing.assert_allclose(np.kron(own["left"], own["right"]), own["raw"], atol=0.8)


def batches(state, parts, what):
    for part in parts:
        state = _statistics.update(state, part, what)
    return state


@FEW
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_any_split_in_any_order_gives_the_same(sizes, random):
    """One batch, several batches, several workers, and their sums added in any order."""
    n, what = sum(sizes), [*EVERYTHING, "ekfac"]
    whole = [*records(b=n), *[cast(r, lambda x: x.repeat(n, 0)[:n]) for r in tied()]]
    start = _statistics.with_bases(_statistics.update({}, whole, ["kfac"]))
    bases = {k: {x: s[x] for x in _statistics.BASES if x in s} for k, s in start.items()}
    cuts = np.cumsum([0, *sizes])
    parts = [[cast(r, lambda x: x[a:b]) for r in whole] for a, b in itertools.pairwise(cuts)]  # noqa: B023
    random.shuffle(parts)
    fresh = lambda: {k: dict(s) for k, s in bases.items()}
    at = random.randrange(len(parts) + 1)
    workers = batches(fresh(), parts[:at], what), batches(fresh(), parts[at:], what)
    single = [batches(fresh(), [part], what) for part in parts]
    want = _statistics.update(fresh(), whole, what)
    for found in (
        batches(fresh(), parts, what),
        _statistics.merge(*workers),
        functools.reduce(_statistics.merge, single),
        functools.reduce(lambda a, b: _statistics.merge(b, a), single, {}),
    ):
        assert found.keys() == want.keys()
        for layer, stats in want.items():
            assert found[layer].keys() == stats.keys()
            for name, x in stats.items():
                if name.endswith("_n"):
                    assert found[layer][name] == x
                np.testing.assert_allclose(found[layer][name], x, rtol=1e-11, atol=1e-11)


def test_finalize_twice_gives_the_same():
    state = fit(["kfac", "variance"])
    a, b = _statistics.finalize(state), _statistics.finalize(state)
    for layer, stats in a.items():
        for name in stats:
            np.testing.assert_array_equal(stats[name], b[layer][name])


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("t", [1, T, 40])
def test_squares_in_the_eigenbasis(t, library):
    """With few places their vectors are rotated, with many the gradients."""
    f, tol = LIBRARIES[library], 1e-3 if library == "jax" else 1e-9
    batch = [cast(r, f) for r in records(t=t)]
    state = _statistics.with_bases(_statistics.update({}, batch, ["kfac"]))
    state = _statistics.update(state, batch, ["ekfac"])
    for record in records(t=t)[:2]:
        own = {n: _array.to_numpy(x) for n, x in state[record.layer].items()}
        left, right = (basis(own, side) for side in ("left", "right"))
        want = sum((left.T @ g @ right) ** 2 for g in loop_grads(record))
        close(own["eigen"] / want.max(), want / want.max(), tol)


def test_eigen_sums_are_the_exact_diagonal_in_the_eigenbasis():
    state = fit_ekfac()
    found = _statistics.finalize(state)
    for layer in ("fc.weight", "emb.weight"):
        grads = all_grads(layer)
        left, right = (basis(state[layer], side) for side in ("left", "right"))
        close(found[layer]["eigen"], np.mean([(left.T @ g @ right) ** 2 for g in grads], 0))
        # The eigenvalues are those of the exact second moment, seen along the basis.
        q, flat = np.kron(left, right), grads.reshape(len(grads), -1)
        exact = np.diagonal(q.T @ (flat.T @ flat / len(flat)) @ q)
        close(found[layer]["eigen"].ravel(), exact)


def test_sums_in_chunks_are_the_same(monkeypatch):
    want = fit_ekfac()["fc.weight"]["eigen"]
    monkeypatch.setattr(_sums, "_CHUNK", 2 * IN * OUT)
    close(fit_ekfac()["fc.weight"]["eigen"], want)


def test_different_bases_are_not_added():
    with pytest.raises(ValueError, match="different eigenbases"):
        _statistics.merge(fit_ekfac((0, 1)), fit_ekfac((1, 2)))
    with pytest.raises(ValueError, match="with_bases"):
        _statistics.update({}, records(), ["ekfac"])


def test_unknown_words_and_too_large_covariances_are_named():
    with pytest.raises(ValueError, match=r"'hessian'.*kfac"):
        _statistics.update({}, records(), ["hessian"])
    large = Whole("head", np.zeros((1, 40_000), np.float32))
    with pytest.raises(ValueError, match=r"'head'.*GiB"):
        _statistics.update({}, [large], ["raw"])
    assert set(_statistics.update({}, [large], ["kfac"])["head"]) == {"square", "square_n"}


def test_a_mask_says_how_many_positions_count():
    outer, lookup, _ = records()
    mask = np.ones((B, T))
    mask[:, -1] = 0
    keep = lambda x: x * mask[..., None]
    masked = [Outer("o", keep(outer.a), keep(outer.g)), Lookup("l", lookup.i, keep(lookup.g), ROWS)]
    cut = [
        Outer("o", outer.a[:, :-1], outer.g[:, :-1]),
        Lookup("l", lookup.i[:, :-1], lookup.g[:, :-1], ROWS),
    ]
    a = _statistics.finalize(_statistics.update({}, masked, ["kfac", "diagonal"], mask=mask))
    b = _statistics.finalize(_statistics.update({}, cut, ["kfac", "diagonal"]))
    for layer in "ol":
        for name in ("left", "right", "square"):
            close(a[layer][name], b[layer][name])


def test_statistics_are_saved_without_pickle(tmp_path):
    state = fit_ekfac()
    state["a:b/c"] = state.pop("fc.bias")
    _statistics.save(state, tmp_path / "s.npz")
    again = _statistics.load(tmp_path / "s.npz")
    assert [p.name for p in tmp_path.iterdir()] == ["s.npz"]
    assert again.keys() == state.keys()
    for layer, stats in state.items():
        assert again[layer].keys() == stats.keys()
        for name, x in stats.items():
            np.testing.assert_array_equal(again[layer][name], x)


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_bfloat16_is_summed_in_float32(library):
    half = {
        "torch": lambda x: to_torch(x).bfloat16() if x.dtype.kind == "f" else to_torch(x),
        "jax": lambda x: jnp.asarray(x, jnp.bfloat16 if x.dtype.kind == "f" else jnp.int32),
    }[library]
    whole = [cast(r, half) for r in records(b=64)]
    exact = [cast(r, lambda x: _array.to_numpy(half(x))) for r in records(b=64)]
    exact = [cast(r, lambda x: x.astype(float) if x.dtype.kind == "f" else x) for r in exact]
    what = ["mean", "variance", "kfac", "raw"]
    found, want = _statistics.update({}, whole, what), _statistics.update({}, exact, what)
    for layer, stats in want.items():
        for name, x in stats.items():
            assert name.endswith("_n") or "float32" in str(found[layer][name].dtype)
            np.testing.assert_allclose(_array.to_numpy(found[layer][name]), x, rtol=1e-5, atol=1e-4)
    small = Projector(Compression("logra", rank=2)).record(whole[0])
    assert "float32" in str(small.a.dtype)


@pytest.mark.parametrize("cpu", [False, True])
@pytest.mark.parametrize("library", LIBRARIES)
def test_sums_may_be_kept_on_the_host_and_in_float64(library, cpu):
    single = lambda x: x.astype(np.float32) if x.dtype.kind == "f" else x
    batch = [cast(r, lambda x: LIBRARIES[library](single(x))) for r in records()]
    state, usual = {}, _statistics.update({}, batch, EVERYTHING, cpu=cpu)
    for _ in range(2):
        state = _statistics.update(state, batch, EVERYTHING, cpu=cpu, double=True)
    for layer, stats in fit(EVERYTHING, (0, 0)).items():
        for name, x in stats.items():
            own = state[layer][name]
            close(own, x, 1e-4)
            if not name.endswith("_n"):
                assert isinstance(own, np.ndarray) or not cpu
                wide = cpu or library != "jax"  # JAX has no float64 here
                assert ("float64" in str(own.dtype)) == wide
                assert "float32" in str(usual[layer][name].dtype)


def test_autocast_does_not_round_the_engine():
    torch = pytest.importorskip("torch")
    own = [cast(r, to_torch) for r in records()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = _statistics.update({}, own, ["kfac", "raw"])
        small = Projector(Compression("logra", rank=2)).record(own[0])
    want = _statistics.update({}, records(), ["kfac", "raw"])
    close(state["fc.weight"]["raw"], want["fc.weight"]["raw"])
    close(small.a, Projector(Compression("logra", rank=2)).record(records()[0]).a)


# ---- sums in place


def where(x):
    return x.data_ptr() if hasattr(x, "data_ptr") else x.__array_interface__["data"][0]


@pytest.mark.parametrize("cpu", [False, True])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_sums_stay_where_they_are(library, cpu):
    f = LIBRARIES[library]
    state = _statistics.update({}, [cast(r, f) for r in records(0)], EVERYTHING, cpu=cpu)
    begun = {(k, n): where(x) for k, v in state.items() for n, x in v.items() if n[-2:] != "_n"}
    same = _statistics.update(state, [cast(r, f) for r in records(1)], EVERYTHING, cpu=cpu)
    assert same is state
    assert begun == {(k, n): where(state[k][n]) for k, n in begun}
    if cpu:
        assert all(isinstance(x, np.ndarray) for v in state.values() for x in v.values())
    want = fit(EVERYTHING, (0, 1))
    for layer, stats in want.items():
        assert stats.keys() == state[layer].keys()
        for name, x in stats.items():
            close(state[layer][name], x)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_merged_state_shares_nothing(library):
    f, tol = LIBRARIES[library], 1e-4 if library == "jax" else 1e-9
    a, b = (_statistics.update({}, [cast(r, f) for r in records(k)], EVERYTHING) for k in range(2))
    for pair in ((a, b), ({}, a), (b, {})):
        _statistics.update(_statistics.merge(*pair), [cast(r, f) for r in records(2)], EVERYTHING)
    for k, state in enumerate((a, b)):
        for layer, stats in fit(EVERYTHING, (k,)).items():
            for name, x in stats.items():
                close(state[layer][name], x, tol)


@pytest.mark.parametrize("cpu", [False, True])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_loaded_state_is_continued_where_the_data_are(library, cpu, tmp_path):
    f, tol = LIBRARIES[library], 1e-4 if library == "jax" else 1e-9
    _statistics.save(fit_ekfac((0, 1)), tmp_path / "s.npz")
    state = _statistics.load(tmp_path / "s.npz")
    state = _statistics.update(state, [cast(r, f) for r in records(2)], ["kfac", "ekfac"], cpu=cpu)
    want = _statistics.update(fit_ekfac((0, 1)), records(2), ["kfac", "ekfac"])
    for layer, stats in want.items():
        for name, x in stats.items():
            close(state[layer][name], x, tol)
    # JAX has no float64 here: sums that were in float64 stay on the host rather than be rounded.
    kind = "torch" if library == "torch" and not cpu else "numpy"
    assert type(state["fc.weight"]["left"]).__module__.split(".")[0] == kind
    assert "float64" in str(state["fc.weight"]["left"].dtype)


def test_more_precise_data_make_more_precise_sums():
    single = [cast(r, lambda x: x.astype("f4") if x.dtype.kind == "f" else x) for r in records()]
    for order in ((single, records()), (records(), single)):
        state = {}
        for batch in order:
            state = _statistics.update(state, batch, ["kfac"])
        parts = [_statistics.update({}, batch, ["kfac"]) for batch in order]
        for found in (state, _statistics.merge(*parts)):
            assert found["fc.weight"]["left"].dtype == np.float64


def test_what_can_not_be_added_changes_nothing():
    state, before = fit(["kfac"]), fit(["kfac"])
    outer = records()[0]
    wrong = {
        "not there": [outer, Outer("new", outer.a, outer.g)],
        "several shapes": [*records(), Outer("fc.weight", outer.a[..., :2], outer.g)],
        "another model": [records()[2], Outer("fc.weight", outer.a[..., :2], outer.g)],
    }
    for message, batch in wrong.items():
        what = ["kfac", "ekfac"] if message == "not there" else ["kfac"]
        with pytest.raises(ValueError, match=message):
            _statistics.update(state, batch, what)
    with pytest.raises(ValueError, match=r"\(examples, positions\), not \(6,\)"):
        _statistics.update(state, records(), ["kfac"], mask=np.ones(B))
    assert state.keys() == before.keys()
    for layer, stats in before.items():
        for name, x in stats.items():
            np.testing.assert_array_equal(state[layer][name], x)


@pytest.mark.parametrize("cpu", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(3, 300), (300, 3), (256, 256), (400, 301)])
def test_grams_are_whole_and_symmetric(rows, columns, cpu):
    rng = np.random.default_rng(0)
    a, g = rng.normal(size=(2, rows, 1, columns)), rng.normal(size=(2, rows, 1, 2))
    state = {}
    for k in range(2):
        own = Outer("x", to_torch(a[k]), to_torch(g[k]))
        state = _statistics.update(state, [own], ["kfac"], cpu=cpu)
    found = _array.to_numpy(state["x"]["right"])
    close(found, np.einsum("kbti,kbtj->ij", a, a))
    close(found, found.T, 1e-12)


def test_updates_trace_under_jit():
    outer, lookup, whole = (cast(r, LIBRARIES["jax"]) for r in records())
    what, mask = [*EVERYTHING, "ekfac"], np.ones((B, T))
    mask[0, 0] = 0

    @jax.jit
    def step(state, a, g, i, h, value, mask):
        batch = [Outer("o", a, g), Lookup("l", i, h, ROWS), Whole("w", value)]
        return _statistics.update(state, batch, what, mask=mask)

    arrays = (outer.a, outer.g, lookup.i, lookup.g, whole.value)
    batch = [Outer("o", *arrays[:2]), Lookup("l", *arrays[2:4], ROWS), Whole("w", arrays[4])]
    start = _statistics.with_bases(_statistics.update({}, batch, ["kfac"]))
    found = step(start, *arrays, jnp.asarray(mask))
    want = _statistics.update(_statistics.merge({}, start), batch, what, mask=mask)
    for layer, stats in want.items():
        for name, x in stats.items():
            close(found[layer][name], x, 1e-4)


# ---- several uses, large sides, masks, activations


def as_outer(record):
    """The same gradient, with one-hot vectors written out."""
    return record.outer() if isinstance(record, Lookup) else record


def tied(seed=0, layer="tied"):
    """A table that is looked up, and twice the matrix of an output."""
    rng = np.random.default_rng(seed)
    n = lambda *shape: rng.normal(size=shape)
    return [
        Lookup(layer, rng.integers(ROWS, size=(B, T)), n(B, T, OUT), ROWS),
        Outer(layer, n(B, T, OUT), n(B, T, ROWS)),
        Outer(layer, n(B, 1, OUT), n(B, 1, ROWS)),
    ]


def diagonal_of(x):
    return x if x.ndim == 1 else np.diagonal(x)


@pytest.mark.parametrize("limit", [4, 6, 100])
@pytest.mark.parametrize("chunk", [1, 2**24])
@pytest.mark.parametrize("library", LIBRARIES)
def test_tied_weights_are_those_of_one_matrix(library, chunk, limit, monkeypatch):
    """Sides 5 and 9: with the limit 4 both are large, with 6 the table's rows."""
    f, tol = LIBRARIES[library], 1e-3 if library == "jax" else 1e-9
    monkeypatch.setattr(_sums, "LARGEST_SIDE", limit)
    monkeypatch.setattr(_sums, "_CHUNK", chunk)
    what = ["mean", "diagonal", "raw", "kfac"]
    state = _statistics.update({}, [cast(r, f) for r in tied()], what)
    grads = sum(loop_grads(r) for r in tied())
    own, flat = state["tied"], grads.reshape(B, -1)
    close(own["sum"], grads.sum(0), tol)
    close(own["square"], (grads**2).sum(0), tol)
    close(own["raw"], flat.T @ flat, tol)
    outers = [as_outer(r) for r in tied()]
    for side, part, dim in (("left", "g", ROWS), ("right", "a", OUT)):
        vectors = [getattr(r, part).reshape(-1, dim) for r in outers]
        dense = sum(v.T @ v for v in vectors)
        close(own[side], dense if dim <= limit else np.diagonal(dense), tol)
    assert (own["left_n"], own["right_n"]) == (B, B * (2 * T + 1))
    assert own["sum_n"] == own["square_n"] == own["raw_n"] == B
    state = _statistics.with_bases(state)
    state = _statistics.update(state, [cast(r, f) for r in tied()], ["ekfac"])
    left, right = (
        np.eye(len(q)) if q.ndim == 1 else _array.to_numpy(q)
        for q in (state["tied"][name] for name in _statistics.BASES)
    )
    close(state["tied"]["eigen"], sum((left.T @ g @ right) ** 2 for g in grads), tol)


def test_a_table_may_be_multiplied_in_some_batches_only():
    lookup, *outers = tied()
    want = _statistics.update({}, tied(), ["kfac"])["tied"]["left"]
    for first, second in (([lookup], outers), (outers, [lookup])):
        both = _statistics.update(_statistics.update({}, first, ["kfac"]), second, ["kfac"])
        close(both["tied"]["left"], want)
        parts = [_statistics.update({}, part, ["kfac"]) for part in (first, second)]
        close(_statistics.merge(*parts)["tied"]["left"], want)


@FEW
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.integers(0, 10**6))
def test_gradients_of_rows_are_those_of_the_table(b, t, rows, seed):
    rng = np.random.default_rng(seed)
    lookup = Lookup("l", rng.integers(rows, size=(b, t)), rng.normal(size=(b, t, 2)), rows)
    index, grads = row_gradients(lookup)
    assert (len(index), grads.shape) == (b * t, (b * t, 2))
    want = np.sort(loop_grads(lookup)[loop_grads(lookup) != 0])
    close(np.sort(grads[grads != 0]), want)  # each once, for its own example
    total = np.zeros((rows, 2))
    np.add.at(total, index, grads)
    close(total, loop_grads(lookup).sum(0))


def test_a_large_table_is_never_written_out():
    rows = 10**9
    g, i = np.ones((2, 3, 4), np.float32), np.array([[5, 7, 5], [0, rows - 1, 0]])
    index, grads = row_gradients(Lookup("l", i, g, rows))
    assert sorted(zip(index.tolist(), grads[:, 0].tolist())) == [
        *[(0, 0.0), (0, 2.0), (5, 0.0), (5, 2.0), (7, 1.0), (rows - 1, 1.0)]
    ]


@pytest.mark.parametrize("limit", [4, 6, 8])
@pytest.mark.parametrize("kind", ["kfac", "ekfac"])
def test_large_sides_are_diagonal(kind, limit, monkeypatch, tmp_path):
    """The sides of fc.weight have 5 and 7 entries, those of emb.weight 9 and 5."""
    dense = fit_ekfac()
    monkeypatch.setattr(_sums, "LARGEST_SIDE", limit)
    state = fit_ekfac()
    large = {"fc.weight": (limit < 5, limit < 7), "emb.weight": (limit < 9, limit < 5)}
    names = []
    for layer, sides in large.items():
        for side, is_large in zip(("left", "right"), sides):
            x, full = state[layer][side], dense[layer][side]
            close(x, diagonal_of(full) if is_large else full)
            if is_large and (layer, side) != ("emb.weight", "left"):  # that one has no more
                names.append(f"{layer} ({side})")
    assert _statistics.diagonal_sides(state) == names
    assert len(names) == {4: 3, 6: 1, 8: 0}[limit]
    _statistics.save(state, tmp_path / "s.npz")
    halves = _statistics.merge(_statistics.load(tmp_path / "s.npz"), state)
    grads = _compress.gradients(records(7))
    ready = _precondition.prepare(kind, state, 0.3)
    for found in (ready, _precondition.prepare(kind, halves, 0.3)):
        for layer, x in found.apply(grads).items():
            matrix = dense_curvature(kind, state, layer)
            flat = grads[layer].reshape(B, -1).T
            want = np.linalg.solve(matrix + 0.3 * np.eye(len(matrix)), flat).T
            close(x, want.reshape(x.shape), 1e-8)


def test_what_has_lost_all_but_its_diagonal_stays_so(monkeypatch):
    """A limit that differs between workers makes no covariance out of a diagonal."""
    whole = fit(["kfac"], (0,))
    monkeypatch.setattr(_sums, "LARGEST_SIDE", 6)
    cut = fit(["kfac"], (1,))
    monkeypatch.undo()
    want = np.diagonal(fit(["kfac"], (0, 1))["fc.weight"]["right"])
    assert _statistics.diagonal_sides(whole) == []
    for state in (_statistics.merge(whole, cut), _statistics.merge(cut, whole)):
        close(state["fc.weight"]["right"], want)
        assert _statistics.diagonal_sides(state) == ["fc.weight (right)"]
    close(_statistics.update(cut, records(0), ["kfac"])["fc.weight"]["right"], want)


def test_a_mask_repeats_with_the_calls_of_a_layer():
    """Two calls are two records, or the places of both in one."""
    rng = np.random.default_rng(0)
    mask = (rng.random((B, T)) < 0.6).astype(float)
    masked = lambda x: x * np.tile(mask, (1, x.shape[1] // T))[..., None]
    outer, lookup, _ = records(t=2 * T)
    outer = Outer("o", masked(outer.a), masked(outer.g))
    lookup = Lookup("l", lookup.i, masked(lookup.g), ROWS)
    image = Outer("image", *(rng.normal(size=(B, 2 * T + 1, 2)) for _ in range(2)))
    halves = [
        cast(r, lambda x, k=k: x[:, k * T : k * T + T]) for r in (outer, lookup) for k in (0, 1)
    ]
    what = ["kfac", "forward_mean", "backward_mean"]
    together = _statistics.update({}, [outer, lookup, image], what, mask=mask)
    apart = _statistics.update({}, [*halves, image], what, mask=mask)
    real = int(mask.sum())
    assert 0 < real < B * T
    for state in (together, apart):
        assert state["image"]["right_n"] == B * (2 * T + 1)
        for layer in "ol":
            name = "forward_sum_n" if layer == "o" else "lookup_forward_sum_n"
            assert state[layer]["right_n"] == state[layer][name] == 2 * real
            assert state[layer]["left_n"] == B
            for name, x in together[layer].items():
                close(state[layer][name], x)
        used = np.bincount(lookup.i.ravel(), np.tile(mask, (1, 2)).ravel(), ROWS)
        close(state["l"]["left"], used)


@pytest.mark.parametrize("library", LIBRARIES)
def test_moments_of_activations(library):
    f, tol = LIBRARIES[library], 1e-4 if library == "jax" else 1e-9
    what = ["forward_mean", "forward_variance", "backward_mean", "backward_variance"]
    rng = np.random.default_rng(0)
    mask = rng.random((B, T)) < 0.6
    outer, lookup, whole = records()
    keep = lambda x: x * mask[..., None]
    outer = Outer("o", keep(outer.a), keep(outer.g))
    lookup = Lookup("l", lookup.i, keep(lookup.g), ROWS)
    batch = [cast(r, f) for r in (outer, lookup, whole)]
    found = _statistics.finalize(_statistics.update({}, batch, what, mask=mask))
    onehot = np.eye(ROWS)[lookup.i]
    for layer, kind, x in (
        *[("o", "forward", outer.a), ("o", "backward", outer.g)],
        *[("l", "lookup_forward", onehot), ("l", "lookup_backward", lookup.g)],
    ):
        close(found[layer][f"{kind}_mean"], x[mask].mean(0), tol)
        close(found[layer][f"{kind}_variance"], x[mask].var(0), tol)
    assert set(found) == {"o", "l"}  # a bias has none
    one = _statistics.finalize(_statistics.update({}, batch, ["backward_mean"], mask=mask))
    assert set(one["o"]) == {"backward_mean"}


def test_covariances_of_one_side():
    whole = fit(["kfac"])
    for word, sides in (
        ("forward", {"fc.weight": "right", "emb.weight": "left"}),
        ("backward", {"fc.weight": "left", "emb.weight": "right"}),
    ):
        state = fit([word])
        for layer, side in sides.items():
            assert set(state[layer]) == {side, f"{side}_n"}
            for name, x in state[layer].items():
                close(x, whole[layer][name])
        assert _precondition.auto(state) == "none"
        # Beside gradients they are no gap in the statistics of those.
        other = {"activation": state["fc.weight"]}
        assert set(_precondition.prepare("kfac", whole | other).spectra) == set(whole)
        with pytest.raises(ValueError, match="no statistics for 'kfac'"):
            _precondition.prepare("kfac", state)


# ---- preconditioners

DAMPINGS = [None, 0.03, 2.0]


def state_for(kind):
    if kind == "ekfac":
        return fit_ekfac()
    return fit([kind])


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("damping", DAMPINGS)
@pytest.mark.parametrize("kind", ["diagonal", "kfac", "ekfac", "raw"])
def test_preconditioners_are_dense_inverses(kind, damping, library):
    f, tol = LIBRARIES[library], 2e-4 if library == "jax" else 1e-8
    state = state_for(kind)
    ready = _precondition.prepare(kind, state, damping)
    grads = _compress.gradients(records(7))
    found = ready.apply({k: f(v) for k, v in grads.items()})
    for layer, grad in grads.items():
        dense = dense_curvature(kind, state, layer)
        lam = 0.1 * np.trace(dense) / len(dense) if damping is None else damping
        want = np.linalg.solve(dense + lam * np.eye(len(dense)), grad.reshape(B, -1).T).T
        assert found[layer].shape == grad.shape
        close(found[layer], want.reshape(grad.shape), tol)


def test_kfac_of_a_linear_model_is_the_exact_inverse():
    """Gaussian inputs and independent errors: the curvature is a Kronecker product."""
    rng = np.random.default_rng(1)
    mix = rng.normal(size=(4, 4))
    outer = Outer("w", rng.normal(size=(200_000, 1, 4)) @ mix, rng.normal(size=(200_000, 1, 3)))
    state = _statistics.update({}, [outer], ["kfac"])
    exact = np.kron(np.eye(3), mix.T @ mix)
    g = rng.normal(size=(2, 3, 4))
    found = _precondition.prepare("kfac", state, 0.5).apply({"w": g})["w"]
    want = np.linalg.solve(exact + 0.5 * np.eye(12), g.reshape(2, 12).T).T.reshape(g.shape)
    np.testing.assert_allclose(found, want, atol=0.02)


def orthogonal(n, seed):
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(n, n)))[0]


def solved(curvature, damping, g):
    flat = g.reshape(len(g), -1)
    return np.linalg.solve(curvature + damping * np.eye(len(curvature)), flat.T).T.reshape(g.shape)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("damping", [0.0, 0.01, 3.0])
def test_kfac_and_ekfac_of_a_linear_model_are_its_exact_inverse(damping, library):
    """Every input meets every error: the curvature is a Kronecker product, without any noise."""
    f, tol = LIBRARIES[library], 1e-3 if library == "jax" else 1e-8
    signs = lambda n: np.array(np.meshgrid(*[[-1.0, 1.0]] * n)).reshape(n, -1).T
    a = signs(3) @ np.diag([1.0, 2.0, 0.5]) @ orthogonal(3, 0)
    g = signs(2) @ np.diag([0.7, 1.5]) @ orthogonal(2, 1)
    pairs = [(x, y) for x in a for y in g]
    outer = Outer("w", *(np.array(z)[:, None] for z in zip(*pairs)))
    flat = loop_grads(outer).reshape(len(pairs), -1)
    exact = flat.T @ flat / len(flat)
    state = _statistics.with_bases(_statistics.update({}, [cast(outer, f)], ["kfac"]))
    state = _statistics.update(state, [cast(outer, f)], ["ekfac"])
    query = np.random.default_rng(2).normal(size=(4, 2, 3))
    for kind in ("kfac", "ekfac"):
        found = _precondition.prepare(kind, state, damping).apply({"w": f(query)})["w"]
        close(found, solved(exact, damping, query), tol)


def test_ekfac_is_exact_where_kfac_is_not():
    """Errors whose size depends on the input: the eigenvalues are no product of two."""
    left, right = orthogonal(3, 0), orthogonal(4, 1)
    sizes = 1 + np.random.default_rng(2).random((3, 4)) * [[1], [2], [4]] * [1, 2, 4, 8]
    pairs = [(right[:, j], sizes[i, j] * left[:, i]) for i in range(3) for j in range(4)]
    outer = Outer("w", *(np.array(z)[:, None] for z in zip(*pairs)))
    flat = loop_grads(outer).reshape(12, 12)
    exact = flat.T @ flat / 12
    # The right covariance is a multiple of the identity, and any basis is one of eigenvectors: this
    # one is chosen.
    weights = np.array([1.0, 2.0, 3.0, 4.0])
    state = _statistics.update({}, [outer], ["kfac"])
    state["w"]["right"] = (right * weights) @ right.T
    state = _statistics.update(_statistics.with_bases(state), [outer], ["ekfac"])
    query = np.random.default_rng(3).normal(size=(2, 3, 4))
    want = solved(exact, 0.1, query)
    close(_precondition.prepare("ekfac", state, 0.1).apply({"w": query})["w"], want)
    kfac = _precondition.prepare("kfac", state, 0.1).apply({"w": query})["w"]
    assert np.abs(kfac - want).max() > 0.01


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", ["diagonal", "kfac", "ekfac", "raw"])
def test_a_second_query_gives_what_the_first_gave(kind, library):
    f = LIBRARIES[library]
    state = state_for(kind)
    ready = _precondition.prepare(kind, state)
    grads = {k: f(v) for k, v in _compress.gradients(records(7)).items()}
    first = ready.apply(grads)
    ready.damped(5.0).apply(grads)
    ready.apply({k: f(v) for k, v in _compress.gradients(records(8)).items()})
    again = (ready.apply(grads), _precondition.prepare(kind, state).apply(grads))
    for layer, x in first.items():
        for other in again:
            np.testing.assert_array_equal(_array.to_numpy(other[layer]), _array.to_numpy(x))


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_preconditioner_is_not_changed_by_what_is_summed_later(library):
    f = LIBRARIES[library]
    batches = [[cast(r, f) for r in records(seed)] for seed in range(3)]
    state = {}
    for batch in batches:
        state = _statistics.update(state, batch, ["kfac"])
    state = _statistics.with_bases(state)
    for batch in batches:
        state = _statistics.update(state, batch, ["ekfac"])
    grads = {k: f(v) for k, v in _compress.gradients(records(7)).items()}
    for kind in ("kfac", "ekfac"):
        used, fresh = (_precondition.prepare(kind, state) for _ in range(2))
        before = used.apply(grads)
        state = _statistics.update(state, batches[0], ["kfac", "ekfac"])
        for ready in (used, fresh):
            for layer, x in ready.apply(grads).items():
                np.testing.assert_array_equal(_array.to_numpy(x), _array.to_numpy(before[layer]))


@FEW
@given(st.lists(st.sampled_from([None, 0.0, 1e-3, 0.5]), min_size=2, max_size=5))
def test_damping_is_never_cached(dampings):
    state = fit_ekfac((0, 1))
    before = {k: {n: np.copy(x) for n, x in v.items()} for k, v in state.items()}
    grads = _compress.gradients(records(7))
    kept = _precondition.prepare("ekfac", state)
    for damping in dampings:
        fresh = _precondition.prepare("ekfac", fit_ekfac((0, 1)), damping).apply(grads)
        for found in (
            _precondition.prepare("ekfac", state, damping).apply(grads),
            kept.damped(damping).apply(grads),
            kept.damped(damping).apply(grads),
        ):
            for layer, x in fresh.items():
                np.testing.assert_array_equal(found[layer], x)
    for layer, stats in before.items():
        for name, x in stats.items():
            np.testing.assert_array_equal(state[layer][name], x)


def test_default_damping_is_that_of_each_layer():
    state = fit(["kfac"])
    state["large"] = {
        k: x * (1 if k.endswith("_n") else 100) for k, x in state["fc.weight"].items()
    }
    ready = _precondition.prepare("kfac", state)
    assert ready.damping_of("large") == pytest.approx(1e4 * ready.damping_of("fc.weight"))


def test_no_damping_is_the_pseudo_inverse():
    flat = np.random.default_rng(0).normal(size=(3, 8))
    state = _statistics.update({}, [Whole("w", flat)], ["raw"])
    found = _precondition.prepare("raw", state, 0.0).apply({"w": flat})["w"]
    close(found, flat @ np.linalg.pinv(flat.T @ flat / 3), 1e-8)
    dead = _statistics.update({}, [Whole("w", 0 * flat)], ["diagonal"])
    close(_precondition.prepare("diagonal", dead).apply({"w": flat})["w"], 0 * flat)


def test_mistakes_in_preconditioning_are_named():
    with pytest.raises(ValueError, match="unknown preconditioner 'hessian'"):
        _precondition.prepare("hessian", {})
    with pytest.raises(ValueError, match="best these allow is 'kfac'"):
        _precondition.prepare("raw", _statistics.update({}, records()[:1], ["kfac"]))
    ready = _precondition.prepare("kfac", fit(["kfac"]))
    with pytest.raises(KeyError, match="layer 'other'"):
        ready.apply({"other": np.zeros((1, 2))})
    with pytest.raises(ValueError, match="same compression"):
        ready.apply({"fc.weight": np.zeros((1, 2, 2))})
    with pytest.raises(ValueError, match="not negative"):
        _precondition.prepare("kfac", fit(["kfac"]), -1.0)
    with pytest.raises(ValueError, match="not negative"):
        ready.damped(relative=-1.0)
    for word in ("diagonal", "mean"):
        with pytest.raises(ValueError, match="no statistics for 'kfac'"):
            _precondition.prepare("kfac", fit([word]))


def test_the_best_kind_is_found():
    for kind in ("diagonal", "raw", "kfac", "ekfac"):
        assert _precondition.auto(state_for(kind)) == kind
    assert _precondition.auto({}) == _precondition.auto(fit(["mean"])) == "none"
    # Biases alone: K-FAC keeps the covariance of the short one, and the squares of the long one.
    rng = np.random.default_rng(0)
    short, long = rng.normal(size=(B, 3)), rng.normal(size=(B, 300))
    state = _statistics.update({}, [Whole("short", short), Whole("long", long)], ["kfac"])
    assert _precondition.auto(state) == "kfac"
    found = _precondition.prepare("kfac", state, 0.1).apply({"short": short, "long": long})
    close(found["short"], solved(short.T @ short / B, 0.1, short))
    close(found["long"], long / ((long**2).mean(0) + 0.1))


def test_select_damping_finds_the_best():
    ready = _precondition.prepare("kfac", fit(["kfac"]))
    best, tried = _precondition.select_damping(
        ready, lambda p: -abs(np.log(p.relative / 0.03)), refine=3
    )
    assert abs(np.log(best.relative / 0.03)) < 0.3
    assert tried[best.relative] == max(tried.values())
    assert len(tried) > 6


def test_places_that_only_fill_up_do_not_count():
    """An expert sees another number of tokens of each example."""
    rng = np.random.default_rng(0)
    a, g = rng.standard_normal((3, 4, 5)), rng.standard_normal((3, 4, 2))
    real = np.arange(4) < np.array([[1], [4], [0]])
    a, g = a * real[..., None], g * real[..., None]
    found = _statistics.finalize(_statistics.update({}, [Outer("e", a, g, real)], ["kfac"]))["e"]
    rows = a[real]
    np.testing.assert_allclose(found["right"], rows.T @ rows / 5)
    np.testing.assert_allclose(found["left"], g[real].T @ g[real] / 3)
