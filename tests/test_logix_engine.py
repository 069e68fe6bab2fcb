"""logix's engine against its definitions: loops and dense matrices in float64."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logix import _array, _compress, _influence, _precondition, _statistics, evaluate
from logix._beside import load_compression, save_compression
from logix._compress import Compression, Projector
from logix._record import Lookup, Outer, Whole

B, T, IN, OUT, ROWS = 6, 3, 7, 5, 9
GOLDEN = [
    [0.48269803208886586, -0.3780404588481529],
    [1.2351287317192874, 0.4199560717659506],
    [0.15688554509344554, -1.26198354000464],
    [-0.46566785549334744, 0.2968498846524054],
]
GOLDEN_INDEX = [3, 2, 4, 1, 0, 0]
GOLDEN_SIGNS = [-1.0, -1.0, -1.0, -1.0, -1.0, 0.0]
SOURCE = pathlib.Path(__file__).parent.parent / "src"
FEW = settings(max_examples=15, deadline=None)


def records(seed=0, b=B, t=T, scale=1.0):
    """One of each kind, float64."""
    rng = np.random.default_rng(seed)
    n = lambda *shape: scale * rng.normal(size=shape)
    return [
        Outer("fc.weight", n(b, t, IN), n(b, t, OUT)),
        Lookup("emb.weight", rng.integers(ROWS, size=(b, t)), n(b, t, OUT), ROWS),
        Whole("fc.bias", n(b, OUT)),
    ]


def loop_grads(record):
    """The definition, written as loops."""
    if isinstance(record, Whole):
        return record.value
    out = np.zeros((len(record.g), *record.shape))
    for b in range(record.g.shape[0]):
        for t in range(record.g.shape[1]):
            if isinstance(record, Lookup):
                out[b, record.i[b, t]] += record.g[b, t]
            else:
                out[b] += np.outer(record.g[b, t], record.a[b, t])
    return out


def cast(record, f):
    change = {k: f(v) for k, v in vars(record).items() if isinstance(v, np.ndarray)}
    return type(record)(**{**vars(record), **change})


def to_torch(x):
    torch = pytest.importorskip("torch")
    return torch.as_tensor(x)


LIBRARIES = {
    "numpy": lambda x: x,
    "torch": to_torch,
    "jax": lambda x: jnp.asarray(x, jnp.float32 if x.dtype.kind == "f" else jnp.int32),
}


def close(x, y, tol=1e-9):
    np.testing.assert_allclose(_array.to_numpy(x), y, rtol=tol, atol=tol)


def fit(what, batches=(0, 1, 2), **kwargs):
    state = {}
    for seed in batches:
        state = _statistics.update(state, records(seed), what, **kwargs)
    return state


def fit_ekfac(batches=(0, 1, 2)):
    state = _statistics.with_bases(fit(["kfac"], batches))
    for seed in batches:
        state = _statistics.update(state, records(seed), ["ekfac"])
    return state


def all_grads(layer, batches=(0, 1, 2)):
    return np.concatenate([loop_grads(r) for s in batches for r in records(s) if r.layer == layer])


def basis(own, side):
    """A vector in place of a matrix is the diagonal of one."""
    q = own[f"{side}_basis"]
    return q if q.ndim == 2 else np.diag(q)


def dense_curvature(kind, state, layer):
    """The matrix whose damped inverse is applied to vec G."""
    own = _statistics.finalize(state)[layer]
    grads = all_grads(layer).reshape(len(all_grads(layer)), -1)
    raw = grads.T @ grads / len(grads)
    if kind == "raw" or (layer == "fc.bias" and kind != "diagonal"):
        return raw
    if kind == "diagonal":
        return np.diag(np.diagonal(raw))
    if kind == "kfac":
        return np.kron(*(x if x.ndim == 2 else np.diag(x) for x in (own["left"], own["right"])))
    q = np.kron(basis(own, "left"), basis(own, "right"))
    return q @ np.diag(np.diagonal(q.T @ raw @ q)) @ q.T


# ---- gradients and compression


@pytest.mark.parametrize("library", LIBRARIES)
def test_gradients_are_those_of_a_loop(library):
    f, tol = LIBRARIES[library], 1e-5 if library == "jax" else 1e-12
    found = _compress.gradients(cast(r, f) for r in records())
    assert len(found) == 3
    for record in records():
        close(found[record.layer], loop_grads(record), tol)


@pytest.mark.parametrize("library", LIBRARIES)
def test_several_uses_of_a_layer_add_up(library):
    f, tol = LIBRARIES[library], 1e-4 if library == "jax" else 1e-9
    first, second = records(0), records(1, t=2)
    rng = np.random.default_rng(5)
    tied = Outer("emb.weight", rng.normal(size=(B, T, OUT)), rng.normal(size=(B, T, ROWS)))
    want = {a.layer: loop_grads(a) + loop_grads(b) for a, b in zip(first, second, strict=True)}
    want["emb.weight"] += loop_grads(tied)
    uses = [cast(r, f) for r in (*first, *second, tied)]
    found = _compress.gradients(uses)
    state = _statistics.update({}, uses, ["diagonal", "mean", "kfac", "raw"])
    for layer, grad in want.items():
        close(found[layer], grad, tol)
        close(state[layer]["square"], (grad**2).sum(0), tol)
        close(state[layer]["sum"], grad.sum(0), tol)
        close(state[layer]["raw"], (flat := grad.reshape(B, -1)).T @ flat, tol)


@pytest.mark.parametrize("kind", ["logra", "sparse"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_compression_is_a_product_from_both_sides(kind, library):
    f, tol = LIBRARIES[library], 2e-5 if library == "jax" else 1e-9
    projector = Projector(Compression(kind, rank=2, seed=3))
    for record in records():
        small = projector.record(cast(record, f))
        (found,) = _compress.gradients([small]).values()
        assert tuple(found.shape[1:]) == projector.settings.shape(record.shape)
        full = loop_grads(record)
        if isinstance(record, Whole):
            index, signs = _compress._fold(3, record.layer, "whole", OUT, 4)
            want = (full[:, index] * signs).reshape(B, 4, -1).sum(-1)
        else:
            left = projector.matrix(record.layer, "left", record.shape[0])
            right = projector.matrix(record.layer, "right", record.shape[1])
            want = np.stack([left.T @ g @ right for g in full])
        close(found, want, tol)


def test_a_whole_matrix_is_projected_like_any_other():
    projector = Projector(Compression("logra", rank=2))
    outer = records()[0]
    (a,) = _compress.gradients([projector.record(outer)]).values()
    (b,) = _compress.gradients([projector.record(Whole(outer.layer, loop_grads(outer)))]).values()
    close(a, b)


def test_a_rank_of_the_layers_own_size_loses_nothing():
    projector = Projector(Compression("logra", rank=100))
    for record in records():
        (found,) = _compress.gradients([projector.record(record)]).values()
        close(found, loop_grads(record))


def test_random_columns_are_orthonormal_and_scores_unbiased():
    p = Projector(Compression("logra", rank=4)).matrix("x", "left", 12)
    close(p.T @ p, np.eye(4) * 12 / 4)
    for kind in ("logra", "sparse"):
        projectors = [Projector(Compression(kind, rank=4, seed=s)) for s in range(2000)]
        mean = np.mean([(p := q.matrix("x", "left", 12)) @ p.T for q in projectors], 0)
        np.testing.assert_allclose(mean, np.eye(12), atol=0.15)


def test_projections_never_change():
    """These numbers are in stores on disk: they are for ever."""
    p = Projector(Compression("logra", rank=2, seed=1)).matrix("fc", "left", 4)
    close(p, GOLDEN, 1e-12)
    index, signs = _compress._fold(1, "fc", "left", 5, 2)
    assert index.tolist() == GOLDEN_INDEX
    assert signs.tolist() == GOLDEN_SIGNS


def test_projections_differ_by_seed_layer_and_side():
    make = lambda seed, layer, side: Projector(Compression("logra", rank=2, seed=seed)).matrix(
        layer, side, 6
    )
    found = [make(*k) for k in ((0, "a", "left"), (1, "a", "left"), (0, "b", "left"))]
    found.append(make(0, "a", "right"))
    for i, a in enumerate(found):
        assert not any(np.allclose(a, b) for b in found[i + 1 :])


def test_pca_keeps_the_main_directions_and_is_saved(tmp_path):
    settings_ = Compression("logra", "pca", rank=2)
    averages = _statistics.finalize(fit(["kfac"]))
    projector = Projector.from_covariances(settings_, averages)
    p = projector.matrix("fc.weight", "right", IN)
    values = np.linalg.eigvalsh(averages["fc.weight"]["right"])
    close(np.trace(p.T @ averages["fc.weight"]["right"] @ p), values[-2:].sum())
    close(p.T @ p, np.eye(2))
    save_compression(str(tmp_path), projector)
    again = load_compression(str(tmp_path))
    for record in records():
        (a,) = _compress.gradients([projector.record(record)]).values()
        (b,) = _compress.gradients([again.record(record)]).values()
        np.testing.assert_array_equal(a, b)
    with pytest.raises(KeyError, match="no layer 'other'"):
        projector.matrix("other", "right", IN)


def test_settings_are_json_and_mistakes_are_named():
    own = Compression("sparse", rank=3, seed=9)
    assert Compression.from_json(json.loads(json.dumps(own.to_json()))) == own
    shapes = [(1000, 2000), (50,), (3, 3, 3)]
    assert own.ratio(shapes) == (2_000_000 + 50 + 27) / 27
    assert Compression().ratio(shapes) == 1
    for wrong in (
        {"kind": "lora"},
        {"init": "svd"},
        {"rank": 0},
        {"kind": "sparse", "init": "pca"},
    ):
        with pytest.raises(ValueError, match=r"logra|random|at least"):
            Compression(**wrong)


def test_compression_traces_under_jit():
    projector = Projector(Compression("logra", rank=2))
    outer = cast(records()[0], LIBRARIES["jax"])

    @jax.jit
    def f(a, g):
        return _compress.gradients([projector.record(Outer("fc.weight", a, g))])["fc.weight"]

    want = _compress.gradients([projector.record(records()[0])])["fc.weight"]
    close(f(outer.a, outer.g), want, 2e-5)
    close(_compress.gradients([projector.record(outer)])["fc.weight"], want, 2e-5)


def test_rows_and_layout_are_inverse():
    grads = _compress.gradients(records())
    where = _compress.layout({k: v.shape[1:] for k, v in grads.items()})
    rows = _compress.flatten(grads, where)
    assert rows.shape == (B, OUT * IN + ROWS * OUT + OUT)
    for name, x in _compress.unflatten(rows, where).items():
        np.testing.assert_array_equal(x, grads[name])


# ---- influence


def rows_of(seed=0, b=B):
    grads = _compress.gradients(records(seed, b=b))
    where = _compress.layout({k: v.shape[1:] for k, v in grads.items()})
    return _compress.flatten(grads, where), where


def blocks(rows, size, f=lambda x: x):
    for start in range(0, len(rows), size):
        cut = rows[start : start + size]
        yield [f"t{start + i}" for i in range(len(cut))], f(cut)


def dense_inverse(state, where, kind, damping):
    size = sum(int(np.prod(s)) for _, s, _ in where)
    out = np.zeros((size, size))
    for name, shape, o in where:
        dense = dense_curvature(kind, state, name)
        n = int(np.prod(shape))
        lam = 0.1 * np.trace(dense) / n if damping is None else damping
        out[o : o + n, o : o + n] = np.linalg.inv(dense + lam * np.eye(n))
    return out


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", ["none", "kfac"])
@pytest.mark.parametrize("mode", ["dot", "cosine", "l2"])
def test_scores_are_the_definition(mode, kind, library):
    f, tol = LIBRARIES[library], 3e-4 if library == "jax" else 1e-8
    (q, where), (t, _) = rows_of(5, 3), rows_of(0, 10)
    state = fit(["kfac"])
    ready = _precondition.prepare(kind, state)
    p = np.eye(q.shape[1]) if kind == "none" else dense_inverse(state, where, "kfac", None)
    dot, qq, tt = q @ p @ t.T, np.einsum("qd,de,qe->q", q, p, q), np.einsum("td,de,te->t", t, p, t)
    want = {"dot": dot, "cosine": dot / np.sqrt(np.outer(qq, tt)), "l2": dot - tt / 2}[mode]
    # Blocks stay NumPy, like those of a store: they follow the query.
    result = _influence.scores(f(q), blocks(t, 4), mode, ready, layout=where, query_ids="abc")
    assert isinstance(result["influence"], np.ndarray)
    scale = np.abs(want).max()
    close(result["influence"] / scale, want / scale, tol)
    assert result.tgt_ids == [f"t{i}" for i in range(10)]
    assert result["src_ids"] == ["a", "b", "c"]
    own = _influence.self_influence(blocks(t, 4, f), ready, layout=where)
    close(own["influence"] / scale, tt / scale, tol)
    assert set(own) == {"src_ids", "influence"}
    again = _influence.scores(f(q), blocks(t, 3), mode, ready, layout=where)
    close(again.influence, result.influence, tol)


@FEW
@given(st.integers(0, 10**6), st.floats(1e-3, 1e3))
def test_cosine_is_symmetric_and_bounded(seed, scale):
    (q, where), (t, _) = rows_of(seed, 3), rows_of(seed + 1, 4)
    t = np.concatenate([t * scale, q[:1], 0 * q[:1]])
    ready = _precondition.prepare("ekfac", fit_ekfac((0, 1)))
    ask = lambda a, b: _influence.scores(a, blocks(b, 2), "cosine", ready, layout=where).influence
    there, back = ask(q, t), ask(t, q)
    close(there, back.T, 1e-9)
    assert np.abs(there).max() <= 1
    close(there[0, 4], 1)
    assert (there[:, 5] == 0).all()


@FEW
@given(st.integers(1, 12), st.integers(1, 5), st.booleans(), st.integers(0, 99), st.booleans())
def test_top_k_is_that_of_the_full_matrix(k, size, largest, seed, ties):
    rng = np.random.default_rng(seed)
    q, t = rng.normal(size=(3, 4)), rng.normal(size=(9, 4))
    if ties:
        q, t = np.rint(q), np.rint(t)
    full = _influence.scores(q, blocks(t, 4)).influence
    found = _influence.scores(q, blocks(t, size), top_k=k, largest=largest)
    order = np.argsort(-full if largest else full, axis=1, kind="stable")[:, :k]
    assert found.tgt_ids == [[f"t{i}" for i in row] for row in order]
    close(found.influence, np.take_along_axis(full, order, 1), 1e-12)


@pytest.mark.parametrize("mode", ["dot", "cosine"])
def test_groups_and_layers_add_up(mode):
    (q, where), (t, _) = rows_of(5, 3), rows_of(0, 10)
    result = _influence.scores(
        q, blocks(t, 4), mode, layout=where, groups=["fc", "emb", "weight"], per_layer=True
    ).influence
    assert list(result) == ["total", "fc", "emb", "weight", "fc.weight", "emb.weight", "fc.bias"]
    close(result["total"], _influence.scores(q, blocks(t, 4), mode).influence)
    for name, shape, o in where:
        cut = slice(o, o + int(np.prod(shape)))
        close(result[name], _influence.scores(q[:, cut], blocks(t[:, cut], 4), mode).influence)
    if mode == "dot":
        close(result["fc"] + result["emb"], result["total"])
        close(result["fc"], result["fc.weight"] + result["fc.bias"])
        own = _influence.self_influence(blocks(t, 4), layout=where, groups=["fc", "emb"]).influence
        close(own["fc"] + own["emb"], own["total"])
    top = _influence.scores(q, blocks(t, 4), mode, layout=where, groups=["fc"], top_k=2)
    close(top.influence["fc"], -np.sort(-result["fc"], 1)[:, :2])
    assert set(top.tgt_ids) == {"total", "fc"}


def test_positions_add_up_to_the_score():
    queries = _compress.gradients(records(5, b=2))
    found, rest = _influence.token_shares(queries, records())
    assert found.shape == (2, B, T)
    grads = _compress.gradients(records())
    score = lambda n: queries[n].reshape(2, -1) @ grads[n].reshape(B, -1).T
    close(found.sum(-1), score("fc.weight") + score("emb.weight"))
    close(rest, score("fc.bias"))


def test_a_half_precision_or_read_only_block_is_read(tmp_path):
    (q, _), (t, _) = rows_of(5, 3), rows_of(0, 10)
    t.astype(np.float16).tofile(tmp_path / "rows")
    mapped = np.memmap(tmp_path / "rows", np.float16, "r", shape=t.shape)
    for f in (LIBRARIES["jax"], *([to_torch] if importlib.util.find_spec("torch") else [])):
        found = _influence.scores(f(q), blocks(mapped, 4)).influence
        np.testing.assert_allclose(found, q @ t.T, rtol=0.01, atol=0.1)


def test_results_become_tables():
    pandas = pytest.importorskip("pandas")
    (q, where), (t, _) = rows_of(5, 2), rows_of(0, 3)
    full = _influence.scores(q, blocks(t, 2), query_ids=["a", "b"])
    frame = full.to_pandas()
    assert list(frame.columns) == ["src_id", "tgt_id", "influence"]
    wide = frame.pivot(index="src_id", columns="tgt_id", values="influence")
    close(wide.to_numpy(), full.influence)
    top = _influence.scores(q, blocks(t, 2), layout=where, groups=["fc"], top_k=2).to_pandas()
    assert list(top.columns) == ["group", "src_id", "tgt_id", "rank", "influence"]
    assert len(top) == 2 * 2 * 2
    own = _influence.self_influence(blocks(t, 2)).to_pandas()
    assert isinstance(own, pandas.DataFrame)
    assert own["src_id"].tolist() == ["t0", "t1", "t2"]


def test_mistakes_in_scoring_are_named():
    q, where = rows_of(5, 2)
    ready = _precondition.prepare("kfac", fit(["kfac"]))
    with pytest.raises(ValueError, match="dot, cosine, l2"):
        _influence.scores(q, [], "product")
    with pytest.raises(ValueError, match="give the layout"):
        _influence.scores(q, blocks(q, 2), preconditioner=ready)
    with pytest.raises(ValueError, match=r"contains \['attn'\].*fc.weight"):
        _influence.scores(q, blocks(q, 2), layout=where, groups=["attn"])
    with pytest.raises(ValueError, match="another compression"):
        _influence.scores(q[:, 1:], blocks(q, 2))
    with pytest.raises(ValueError, match="'t0' is not a number"):
        _influence.scores(q, blocks(q * np.nan, 2), top_k=1)
    with pytest.raises(KeyError, match="there are src_ids, influence"):
        _influence.self_influence(blocks(q, 2))["tgt_ids"]
    assert _influence.scores(q, []).influence.shape == (2, 0)


# ---- evaluation


def test_spearman_is_scipys():
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    x, y = rng.integers(5, size=(4, 30)).astype(float), rng.normal(size=(4, 30))
    want = [stats.spearmanr(a, b).statistic for a, b in zip(x, y)]
    close(evaluate._spearman(x, y), want)


def test_lds_and_its_ceiling():
    rng = np.random.default_rng(0)
    true = rng.normal(size=(30, 50))
    masks = rng.random((200, 50)) < 0.5
    clean = masks @ true.T
    assert evaluate.lds(true, masks, clean).mean == pytest.approx(1)
    assert evaluate.lds(-true, masks, clean).mean == pytest.approx(-1)
    assert evaluate.lds(true, masks, clean).ceiling is None
    noisy = clean[:, None] + 2 * clean.std() * rng.normal(size=(200, 5, 30))
    found = evaluate.lds(true, masks, noisy)
    # The true scores reach the ceiling, which was computed without them.
    assert found.mean == pytest.approx(found.ceiling, abs=0.04)
    assert found.low < found.mean < found.high
    assert found.high - found.low < 0.1
    assert abs(evaluate.lds(rng.normal(size=true.shape), masks, noisy).mean) < 0.1
    with pytest.raises(ValueError, match=r"\(Q, N\), \(M, N\)"):
        evaluate.lds(true, masks.T, clean)


def test_loo_and_mislabels():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 40))
    found = evaluate.loo_correlation(np.exp(x), x)
    assert found.spearman == pytest.approx(1)
    assert 0 < found.pearson < 1
    wrong = np.arange(40) < 10
    own = wrong + rng.integers(3, size=40) / 2
    found = evaluate.mislabel_detection(own, wrong, k=5)
    pairs = own[wrong][:, None] - own[~wrong][None]
    assert found.auroc == pytest.approx(((pairs > 0) + (pairs == 0) / 2).mean())
    assert found.k == 5
    assert found.recall == pytest.approx(found.precision * 5 / 10)
    with pytest.raises(ValueError, match="not all"):
        evaluate.mislabel_detection(own, wrong & False)


def test_the_engine_imports_no_framework():
    code = (
        "import sys; from logix import _influence, evaluate;"
        "assert not {'torch', 'jax', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=SOURCE)
