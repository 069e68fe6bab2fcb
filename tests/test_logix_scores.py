"""Scores from a store: against their definition, however the rows come to be read.

Run as a program, this file scores a store in a process with little memory, without torch.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
import threading
import types

import numpy as np
import pytest

from _loxio import Damaged
from logix import _progress, _result, _statistics
from logix._analysis import Analysis
from logix._array import to_numpy
from logix._compress import Compression, Projector, flatten, gradients, layout
from logix._influence import scores
from logix._loader import LogDataset, LogLoader
from logix._precondition import prepare
from logix._record import Lookup, Outer, Whole
from logix._result import All, Influence, Top, best_columns
from logix.store._readahead import ahead, plan
from logix.store._rowtypes import DTYPES
from logix.store._writer import RowStore, RowWriter

B, T, N, Q = 5, 4, 23, 3
TOLERANCE = dict(rtol=2e-3, atol=2e-3)


def records(seed, b=B, t=T):
    rng = np.random.default_rng(seed)
    n = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return [
        Outer("body.fc", n(b, t, 3), n(b, t, 4)),
        Whole("body.fc.bias", n(b, 4)),
        Lookup("emb", rng.integers(5, size=(b, t)), n(b, t, 2), 5),
    ]


def log_of(seed, b=B):
    """As a run gives it, but with the layers in another order, and one that has no gradient."""
    grads = gradients(records(seed, b))
    names = sorted(grads, reverse=True)
    ids = [f"s{seed}.{i}" for i in range(b)]
    return ids, {n: {"grad": grads[n], "forward": 0} for n in names} | {"act": {"forward": 1}}


WHERE = layout({n: g.shape[1:] for n, g in gradients(records(0)).items()})
D = sum(int(np.prod(s)) for _, s, _ in WHERE)
LAYOUT = [dict(name=n, shape=list(s), offset=o) for n, s, o in WHERE]
EXTRA = dict(name="emb", shape=[2, 3], offset=D, kind="forward")


def rows_of(seed, b=B):
    return flatten(gradients(records(seed, b)), WHERE)


def fill(path, n=N, append=5, dtype="float32", extra=False, **options):
    """A store of `n` rows in appends of `append`, in several parts."""
    options = {"shard_bytes": 9 * D} | options
    rows = rows_of(1, n)
    if extra:
        rows = np.concatenate([rows, np.full((n, 6), 7.0, np.float32)], 1)
    with RowWriter(path, [*LAYOUT, *([EXTRA] if extra else [])], dtype, **options) as writer:
        for i in range(0, n, append):
            writer.append([f"t{j}" for j in range(i, min(i + append, n))], rows[i : i + append])
    return rows


def run_of(path, statistics=None, batch=None):
    """What an analysis asks of a run."""
    return types.SimpleNamespace(
        store=lambda: RowStore(path),
        statistics=statistics or {},
        has_statistics=lambda: False,
        compression=Projector(Compression()),
        records=batch or [],
        ids=[f"b{i}" for i in range(B)],
    )


def fitted(what=("raw",)):
    return _statistics.update({}, records(1, N), what)


def dense_inverse(kind, damping=None):
    """Of the rows in the store, layer by layer, in float64."""
    out, train = np.zeros((D, D)), rows_of(1, N).astype(np.float64)
    for _, shape, o in WHERE:
        n = int(np.prod(shape))
        own = train[:, o : o + n]
        curvature = own.T @ own / N
        curvature = np.diag(np.diag(curvature)) if kind == "diagonal" else curvature
        lam = 0.1 * np.trace(curvature) / n if damping is None else damping
        out[o : o + n, o : o + n] = np.linalg.inv(curvature + lam * np.eye(n))
    return np.eye(D) if kind == "none" else out


def definition(q, t, mode, inverse, cut=slice(None)):
    q, t = q.astype(np.float64), t.astype(np.float64)
    p = inverse[cut, cut]
    dot = q[:, cut] @ p @ t[:, cut].T
    qq = np.einsum("qd,de,qe->q", q[:, cut], p, q[:, cut])
    tt = np.einsum("td,de,te->t", t[:, cut], p, t[:, cut])
    return {"dot": dot, "cosine": dot / np.sqrt(np.outer(qq, tt)), "l2": dot - tt / 2}[mode]


def to_torch(log):
    torch = pytest.importorskip("torch")
    ids, layers = log
    return ids, {n: {k: torch.as_tensor(x) for k, x in m.items()} for n, m in layers.items()}


# --- against the definition ----------------------------------------------------------------------


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("kind", ["none", "diagonal", "raw"])
@pytest.mark.parametrize("mode", ["dot", "cosine", "l2"])
def test_scores_of_a_store_are_the_definition(tmp_path, mode, kind, library):
    train = fill(tmp_path)
    log, q = log_of(5, Q), rows_of(5, Q)
    log = log if library == "numpy" else to_torch(log)
    analysis = Analysis(run_of(tmp_path, fitted(("raw", "diagonal"))))
    inverse = dense_inverse(kind)
    how = dict(mode=mode, precondition=kind != "none", hessian="auto" if kind == "none" else kind)
    plain = analysis.compute_influence_all(log, **how)
    want = definition(q, train, mode, inverse)
    np.testing.assert_allclose(plain.influence, want, **TOLERANCE)
    assert (plain.src_ids, plain.tgt_ids) == (log[0], [f"t{i}" for i in range(N)])

    each = analysis.compute_influence_all(log, influence_groups=["body"], per_layer=True, **how)
    assert list(each.influence) == ["total", "body", *(n for n, _, _ in WHERE)]
    ends = {n: (o, o + int(np.prod(s))) for n, s, o in WHERE}
    cuts = {"total": (0, D), "body": (0, 16), **ends}
    for name, (lo, hi) in cuts.items():
        part = definition(q, train, mode, inverse, slice(lo, hi))
        np.testing.assert_allclose(each.influence[name], part, **TOLERANCE)

    for largest in (True, False):
        best = analysis.compute_influence_all(
            log, influence_groups=["body"], top_k=4, largest=largest, **how
        )
        for name in ("total", "body"):
            sign = -1 if largest else 1
            order = np.argsort(sign * each.influence[name], 1, kind="stable")[:, :4]
            got, full = best.influence[name], each.influence[name]
            np.testing.assert_allclose(got, np.take_along_axis(full, order, 1), rtol=1e-5)
            assert best.tgt_ids[name] == [[f"t{i}" for i in row] for row in order]

    tgt = (
        [f"t{i}" for i in range(N)],
        {n: {"grad": g} for n, g in gradients(records(1, N)).items()},
    )
    there = analysis.compute_influence(log, tgt if library == "numpy" else to_torch(tgt), **how)
    np.testing.assert_allclose(there.influence, plain.influence, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["none", "raw"])
def test_self_influence_is_the_definition(tmp_path, kind):
    train = fill(tmp_path).astype(np.float64)
    analysis = Analysis(run_of(tmp_path, fitted()))
    inverse = dense_inverse(kind)
    for device in (None, *(["cpu"] if "torch" in sys.modules else [])):
        own = analysis.compute_self_influence(
            precondition=kind != "none", per_layer=True, device=device
        )
        assert own.src_ids == [f"t{i}" for i in range(N)]
        want = np.einsum("td,de,te->t", train, inverse, train)
        np.testing.assert_allclose(own.influence["total"], want, **TOLERANCE)
        total = sum(own.influence[n] for n, _, _ in WHERE)
        np.testing.assert_allclose(total, own.influence["total"], rtol=1e-4)
    log = log_of(5, Q)
    got = analysis.compute_self_influence(log, precondition=kind != "none").influence
    q = rows_of(5, Q).astype(np.float64)
    np.testing.assert_allclose(got, np.einsum("td,de,te->t", q, inverse, q), **TOLERANCE)


def test_a_second_query_and_another_damping(tmp_path):
    """Nothing of an earlier call is left in a later one, and what was learnt since counts."""
    fill(tmp_path)
    run = run_of(tmp_path, fitted())
    analysis, log, q, t = Analysis(run), log_of(5, Q), rows_of(5, Q), rows_of(1, N)
    ask = lambda **how: analysis.compute_influence_all(log, **how).influence
    first = ask()
    for damping in (0.5, 3.0):
        want = definition(q, t, "dot", dense_inverse("raw", damping))
        np.testing.assert_allclose(ask(damping=damping), want, **TOLERANCE)
    np.testing.assert_array_equal(ask(), first)
    run.statistics = _statistics.update(run.statistics, records(9, N), ["raw"])
    assert np.abs(ask() - first).max() > 1e-3
    with pytest.raises(ValueError, match="damping=-1"):
        ask(damping=-1)


def test_only_gradients_count(tmp_path):
    fill(tmp_path / "a")
    fill(tmp_path / "b", extra=True)
    for how in ({}, {"top_k": 3}, {"mode": "l2"}):
        a, b = (
            Analysis(run_of(tmp_path / x)).compute_influence_all(log_of(5, Q), **how) for x in "ab"
        )
        np.testing.assert_allclose(a.influence, b.influence, rtol=1e-6)
    query = rows_of(5, Q)
    assert scores(query, RowStore(tmp_path / "b")).influence.shape == (Q, N)


# --- reading ahead -------------------------------------------------------------------------------

WAYS = {"mapped": (None, None), "buffered": (0, None), "device": (None, "cpu")}


def read(path, way, **options):
    """All blocks, as copies: one is good until the next is asked for."""
    map_bytes, device = WAYS[way]
    if device is not None:
        pytest.importorskip("torch")
    store = RowStore(path, map_bytes=map_bytes)
    return [(ids, to_numpy(rows).copy()) for ids, rows in ahead(store, device=device, **options)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 3, 8, 100])
def test_reading_ahead_is_reading(tmp_path, dtype, way, size):
    """Blocks smaller than an append, and larger than a part."""
    fill(tmp_path, dtype=dtype)
    store = RowStore(tmp_path)
    assert len(store.spans) > 2
    ids, blocks = zip(*read(tmp_path, way, rows=size, workers=3))
    assert [i for part in ids for i in part] == store.ids
    assert [len(i) for i in ids] == [len(b) for b in blocks]
    assert max(map(len, blocks)) <= size
    np.testing.assert_array_equal(np.concatenate(blocks), store.rows())
    (_, cut), *_ = read(tmp_path, way, rows=size, width=3)
    np.testing.assert_array_equal(cut, blocks[0][:, :3])


@pytest.mark.parametrize("way", WAYS)
def test_reading_ahead_without_duplicates(tmp_path, way):
    """Rows that are passed over lie between those that are read."""
    for w in range(2):
        with RowWriter(tmp_path, LAYOUT, writer=w, run="r", duplicates="keep_first") as writer:
            for i in range(0, 12, 4):
                writer.append([j * (w + 1) for j in range(i, i + 4)], rows_of(w, 12)[i : i + 4])
    store = RowStore(tmp_path)
    assert 12 < len(store) < 24
    for size in (1, 5, 100):
        ids, blocks = zip(*read(tmp_path, way, rows=size))
        assert [i for part in ids for i in part] == store.ids
        np.testing.assert_array_equal(np.concatenate(blocks), store.rows())


def test_appends_are_cut_only_if_they_must_be(tmp_path):
    fill(tmp_path, append=5, shard_bytes=1 << 30)
    store = RowStore(tmp_path)
    sizes = lambda rows: [sum(hi - lo for _, lo, hi in p) for p in plan(store, rows)]
    assert sizes(12) == [10, 10, 3]
    assert sizes(5) == [5, 5, 5, 5, 3]
    assert sizes(3) == [3, 3, 3, 3, 3, 3, 2, 3]
    assert sizes(100) == [N]


def test_an_empty_store_is_read(tmp_path):
    fill(tmp_path, n=0)
    for way in WAYS:
        assert read(tmp_path, way) == []
    analysis = Analysis(run_of(tmp_path))
    assert analysis.compute_influence_all(log_of(5, Q)).influence.shape == (Q, 0)
    assert analysis.compute_influence_all(log_of(5, Q), top_k=2).influence.shape == (Q, 0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [2, 8, 100])
def test_damage_is_found_before_its_rows_are_used(tmp_path, way, size):
    fill(tmp_path)
    files = sorted(tmp_path.glob("*.rows"))
    want = RowStore(tmp_path).rows()
    map_bytes, device = WAYS[way]
    if device is not None:
        pytest.importorskip("torch")
    for file in files:
        data = file.read_bytes()
        for broken in (data[:-1] + bytes([data[-1] ^ 1]), bytes([data[0] ^ 64]) + data[1:]):
            store = RowStore(tmp_path, map_bytes=map_bytes)
            file.write_bytes(broken)
            got = []
            with pytest.raises(Damaged, match=rf"{file.name} is damaged: rows \d+–\d+ are not"):
                got.extend(to_numpy(rows).copy() for _, rows in ahead(store, size, device=device))
            got = np.concatenate([want[:0], *got])
            assert len(got) < len(want)
            np.testing.assert_array_equal(got, want[: len(got)])
            with pytest.raises(Damaged):
                Analysis(run_of(tmp_path)).compute_influence_all(log_of(5, Q), top_k=2)
        file.write_bytes(data)
        if way != "mapped":  # a map that loses its file can not be read at all
            store = RowStore(tmp_path, map_bytes=map_bytes)
            file.write_bytes(data[:-3])
            with pytest.raises(Damaged, match=file.name):
                list(ahead(store, size, device=device))
            file.write_bytes(data)
    assert len(read(tmp_path, way, rows=size)) >= 1


@pytest.mark.parametrize("way", WAYS)
def test_a_reader_that_is_left_ends(tmp_path, way):
    if way == "device":
        pytest.importorskip("torch")
    fill(tmp_path)
    before = set(threading.enumerate())
    map_bytes, device = WAYS[way]
    reader = ahead(
        RowStore(tmp_path, map_bytes=map_bytes), 2, device if map_bytes is None else None
    )
    next(reader)
    reader.close()
    assert set(threading.enumerate()) <= before


def test_with_little_memory(tmp_path):
    """The address space is limited: buffers instead of maps, and small blocks."""
    train = fill(tmp_path, dtype="float16")
    command = [sys.executable, "-W", "error", __file__, str(tmp_path)]
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    got = json.loads(done.stdout)
    assert not got["mapped"]
    assert got["block"] <= 4 << 20
    full = rows_of(5, Q) @ train.astype(np.float16).astype(np.float32).T
    order = np.argsort(-full, 1, kind="stable")[:, :3]
    assert got["ids"] == [[f"t{i}" for i in row] for row in order]


def with_little_memory(path):
    import resource

    from logix.store._rowtypes import block_bytes

    query = rows_of(5, Q)
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20),) * 2)
    store = RowStore(path)
    ids = scores(query, store, top_k=3).tgt_ids
    assert "torch" not in sys.modules
    # Without torch, logs are NumPy's.
    assert type(next(iter(LogLoader(store)))[1]["emb"]["grad"]) is np.ndarray
    print(json.dumps(dict(mapped=store.mapped, block=block_bytes(), ids=ids)))


# --- the best ------------------------------------------------------------------------------------


def tensor_top(*args):
    """As it works on a GPU."""
    torch = pytest.importorskip("torch")

    class OnDevice(Top):
        def _add_host(self, x):
            self._add_tensor(torch.as_tensor(x))

    return OnDevice(*args)


@pytest.mark.parametrize("make", [Top, tensor_top])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("k", [1, 4, 30])
def test_the_best_are_those_of_the_sorted_matrix(monkeypatch, make, largest, k):
    monkeypatch.setattr(_result, "_RECENT", 7)  # ids of rows that lost are dropped on the way
    rng = np.random.default_rng(k)
    for ties in (True, False):
        x = rng.normal(size=(Q, 40)).astype(np.float32)
        x = np.rint(x) * np.array(-0.0 if k == 4 else 1.0, np.float32) if ties else x
        x[0, 3] = np.inf if not ties else x[0, 3]
        top, all_of_it, at = make(Q, k, largest), All(Q), 0
        for size in (1, 6, 0, 13, 20):
            ids = [f"t{i}" for i in range(at, at + size)]
            top.add(ids, x[:, at : at + size])
            all_of_it.add(ids, x[:, at : at + size])
            at += size
        order = np.argsort(-x if largest else x, axis=1, kind="stable")[:, :k]
        assert top.names == [[f"t{i}" for i in row] for row in order]
        np.testing.assert_array_equal(top.values, np.take_along_axis(x, order, 1))
        np.testing.assert_array_equal(best_columns(x if largest else -x, k), order)
        full = Influence(["a", "b", "c"], all_of_it.values, all_of_it.names)
        assert full.top(k, largest).tgt_ids == top.names


@pytest.mark.parametrize("make", [Top, tensor_top])
@pytest.mark.parametrize("recent", [5, 1000])
def test_a_score_that_is_no_number_is_named(monkeypatch, make, recent):
    monkeypatch.setattr(_result, "_RECENT", recent)
    top = make(2, 3, True)
    x = np.zeros((2, 12), np.float32)
    x[1, 9] = x[0, 11] = np.nan

    def add_all():
        for start in range(0, 12, 4):
            top.add([f"t{i}" for i in range(start, start + 4)], x[:, start : start + 4])
        return top.names

    with pytest.raises(ValueError, match="score of row 't9' is not a number"):
        add_all()


def test_scores_wait_on_the_device_only_so_long(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(_result, "_PENDING", 100)
    kept, x = All(2), torch.arange(40.0).reshape(2, 20)
    for start in range(0, 20, 5):
        kept.add(range(start, start + 5), x[:, start : start + 5])
    assert any(isinstance(part, np.ndarray) for part in kept.parts)
    np.testing.assert_array_equal(kept.values, x.numpy())


# --- logs ----------------------------------------------------------------------------------------


def test_layers_are_matched_by_name(tmp_path):
    fill(tmp_path)
    analysis = Analysis(run_of(tmp_path))
    ids, layers = log_of(5, Q)
    missing = {n: m for n, m in layers.items() if n != "emb"}
    more = {**layers, "head": {"grad": np.zeros((Q, 2))}}
    other = {**layers, "emb": {"grad": np.zeros((Q, 2, 5))}}
    for bad, match in [
        (missing, r"missing: 'emb' \(5, 2\)"),
        (more, r"additional: 'head' \(2,\)"),
        (other, r"of another shape: 'emb' \(2, 5\) instead of \(5, 2\)"),
        ({"act": {"forward": 1}}, "no 'grad' of any layer"),
    ]:
        with pytest.raises(ValueError, match=match):
            analysis.compute_influence_all((ids, bad))
    with pytest.raises(ValueError, match=r"tgt_log are not those of src_log; missing: 'emb'"):
        analysis.compute_influence((ids, layers), (ids, missing))
    with pytest.raises(ValueError, match="2 ids for 3 rows"):
        analysis.compute_influence_all((ids[:2], layers))
    with pytest.raises(ValueError, match="rows of 7 values"):
        analysis.compute_influence_all((ids, np.zeros((Q, 7), np.float32)))
    with pytest.raises(TypeError, match=r"run.get_log\(\)"):
        analysis.compute_influence_all(layers)


def test_words_that_are_not_known(tmp_path):
    fill(tmp_path)
    analysis, log = Analysis(run_of(tmp_path)), log_of(5, Q)
    with pytest.raises(ValueError, match=r"unknown hessian 'kfca'. Known are: auto, none,"):
        analysis.compute_influence_all(log, hessian="kfca", precondition=False)
    with pytest.raises(ValueError, match=r"unknown mode 'dots'. Known are: dot, cosine, l2"):
        analysis.compute_influence_all(log, mode="dots")
    with pytest.raises(ValueError, match="no statistics for 'raw'"):
        Analysis(run_of(tmp_path, fitted(["diagonal"]))).compute_influence_all(log, hessian="raw")


def test_every_kind_of_loader(tmp_path):
    torch = pytest.importorskip("torch")
    fill(tmp_path, extra=True)
    store = RowStore(tmp_path)
    loader = LogLoader(store, batch_size=4)
    backwards = [(ids, dict(reversed(logs.items()))) for ids, logs in loader]
    flat = list(store.blocks(7))
    grads = [(ids, rows[:, :D]) for ids, rows in flat]
    collated = torch.utils.data.DataLoader(LogDataset(store), batch_size=4)
    analysis, nothing_saved = Analysis(run_of(tmp_path)), Analysis(run_of(tmp_path / "none"))
    want = analysis.compute_influence_all(log_of(5, Q))
    for log in (log_of(5, Q), to_torch(log_of(5, Q)), (list("abc"), rows_of(5, Q))):
        for source in (None, loader, LogDataset(store), backwards, flat, grads, collated):
            got = analysis.compute_influence_all(log, source)
            np.testing.assert_allclose(got.influence, want.influence, rtol=1e-4, atol=1e-5)
            assert (got.src_ids, got.tgt_ids) == (log[0], want.tgt_ids)
    got = nothing_saved.compute_influence_all(log_of(5, Q), backwards, top_k=2)
    assert got.tgt_ids == want.top(2).tgt_ids


# --- what was saved, as a dataset ----------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 3])
def test_batches_of_what_was_saved(tmp_path, workers):
    torch = pytest.importorskip("torch")
    rows = fill(tmp_path, extra=True)
    grads = gradients(records(1, N))
    store = RowStore(tmp_path)
    loader = LogLoader(store, batch_size=4, num_workers=workers, pin_memory=True)
    assert (len(loader), loader.batch_size, len(loader.dataset)) == (6, 4, N)
    for _ in range(2):
        at = 0
        for ids, logs in loader:
            assert ids == [f"t{i}" for i in range(at, min(at + 4, N))]
            assert set(logs) == set(grads)
            for name, grad in grads.items():
                assert isinstance(logs[name]["grad"], torch.Tensor)
                np.testing.assert_allclose(logs[name]["grad"], grad[at : at + 4], rtol=1e-6)
            assert logs["emb"]["forward"].shape == (len(ids), 2, 3)
            assert (logs["emb"]["forward"] == 7).all()
            at += len(ids)
        assert at == N
    flat = [x for _, x in LogLoader(store, batch_size=9, num_workers=workers, flatten=True)]
    np.testing.assert_array_equal(torch.cat(flat), rows)
    with pytest.raises(ValueError, match="batch_size=0"):
        LogLoader(store, batch_size=0)


def test_a_dataset_of_what_was_saved(tmp_path):
    pytest.importorskip("torch")
    rows = fill(tmp_path)
    here = LogDataset(RowStore(tmp_path))
    for data in (here, pickle.loads(pickle.dumps(here))):
        assert len(data) == N
        one, logs = data[-1]
        assert one == f"t{N - 1}"
        np.testing.assert_array_equal(logs["body.fc"]["grad"].reshape(-1), rows[-1, :12])
        with pytest.raises(IndexError):
            data[N]
    one, row = LogDataset(RowStore(tmp_path), flatten=True)[2]
    assert one == "t2"
    np.testing.assert_array_equal(row, rows[2])


# --- tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("kind", ["none", "raw"])
def test_tokens_and_the_rest_are_the_score(tmp_path, library, kind, monkeypatch):
    from logix import _influence

    monkeypatch.setattr(_influence, "_BETWEEN", 2 * B * T * 4)  # two queries at a time
    batch = records(3)
    real = np.ones((B, T), bool)
    real[:, -1] = real[1, 2] = False
    batch = [  # as with a mask: zero where nothing is real
        Outer("body.fc", batch[0].a * real[..., None], batch[0].g * real[..., None]),
        batch[1],
        Lookup("emb", batch[2].i, batch[2].g * real[..., None], 5),
    ]
    head = Outer("body.head", batch[0].a[:, :1], batch[0].g[:, :1])  # once for each example
    state = _statistics.update({}, [*records(1, N), _head(1, N)], ["raw"])
    log = log_of(5, Q)
    log[1]["body.head"] = {"grad": gradients([_head(5, Q)])["body.head"]}
    tgt = (list("vwxyz"), {n: {"grad": g} for n, g in gradients([*batch, head]).items()})
    if library == "torch":
        torch = pytest.importorskip("torch")
        log, tgt = to_torch(log), to_torch(tgt)
        as_tensors = lambda r: {
            k: torch.as_tensor(v) for k, v in vars(r).items() if isinstance(v, np.ndarray)
        }
        moved = [type(r)(**{**vars(r), **as_tensors(r)}) for r in [*batch, head]]
    else:
        moved = [*batch, head]
    analysis = Analysis(run_of(tmp_path, state, moved))
    how = dict(precondition=kind != "none")
    found = analysis.compute_token_influence(log, **how)
    want = analysis.compute_influence(log, tgt, per_layer=True, **how).influence
    assert found.influence.shape == (Q, B, T)
    total = found.influence.sum(-1) + found["rest"]
    np.testing.assert_allclose(total, want["total"], rtol=1e-4, atol=1e-4)
    rest = want["body.fc.bias"] + want["body.head"]
    np.testing.assert_allclose(found.rest, rest, rtol=1e-4, atol=1e-4)
    assert (found.influence[:, ~real] == 0).all()
    assert (found.influence[:, real] != 0).all()
    assert (found.src_ids, found.tgt_ids) == (log[0], [f"b{i}" for i in range(B)])
    frame = found.to_pandas()
    assert list(frame.columns) == ["src_id", "tgt_id", "position", "influence"]
    line = frame[(frame.src_id == log[0][1]) & (frame.tgt_id == "b2") & (frame.position == 1)]
    assert line.influence.tolist() == [found.influence[1, 2, 1]]
    given = analysis.compute_token_influence(log, (list("vwxyz"), moved), **how)
    assert given.tgt_ids == list("vwxyz")
    np.testing.assert_array_equal(given.influence, found.influence)


def _head(seed, b):
    first = records(seed, b)[0]
    return Outer("body.head", first.a[:, :1], first.g[:, :1])


def test_mistakes_with_tokens_are_named(tmp_path):
    long = Outer("body.fc", *(np.ones((B, 7, n), np.float32) for n in (3, 4)))
    mixed = [long, *records(3)[1:]]
    log = log_of(5, Q)
    with pytest.raises(ValueError, match=r"'body.fc' 7, 'emb' 4.*positions=7"):
        Analysis(run_of(tmp_path, batch=mixed)).compute_token_influence(log)
    got = Analysis(run_of(tmp_path, batch=mixed)).compute_token_influence(log, positions=4)
    want = Analysis(run_of(tmp_path, batch=mixed)).compute_influence(
        log, (list("vwxyz"), {n: {"grad": g} for n, g in gradients(mixed).items()})
    )
    np.testing.assert_allclose(got.influence.sum(-1) + got.rest, want.influence, rtol=1e-4)
    with pytest.raises(ValueError, match="no record has 5 positions"):
        Analysis(run_of(tmp_path, batch=mixed)).compute_token_influence(log, positions=5)
    with pytest.raises(ValueError, match=r"with run\(data_id=ids\): loss.backward\(\)"):
        Analysis(run_of(tmp_path)).compute_token_influence(log)
    with pytest.raises(ValueError, match=r"additional: 'body.fc'"):
        Analysis(run_of(tmp_path, batch=records(3)[1:])).compute_token_influence(log)
    with pytest.raises(ValueError, match="2 ids for a batch of 5"):
        Analysis(run_of(tmp_path)).compute_token_influence(log, (["a", "b"], records(3)))


# --- results -------------------------------------------------------------------------------------


def test_results_are_kept_when_asked(tmp_path):
    fill(tmp_path)
    analysis, log = Analysis(run_of(tmp_path)), log_of(5, Q)
    first = analysis.compute_influence_all(log, save=True)
    analysis.compute_influence_all(log)
    second = analysis.compute_self_influence(save=True)
    kept = analysis.get_influence_scores()
    assert [id(r) for r in kept] == [id(first), id(second)]
    kept.clear()
    assert len(analysis.get_influence_scores()) == 2


def test_a_result_says_what_it_is_in_a_line(tmp_path):
    fill(tmp_path)
    analysis, log = Analysis(run_of(tmp_path, batch=records(3))), log_of(5, Q)
    full = analysis.compute_influence_all(log)
    assert repr(full) == (
        "Influence(influence: (3, 23), src_ids: 3 ['s5.0', 's5.1', 's5.2'], "
        "tgt_ids: 23 ['t0', 't1', 't2', …])"
    )
    results = [
        full,
        full.top(4),
        analysis.compute_influence_all(log, per_layer=True, top_k=2),
        analysis.compute_self_influence(),
        analysis.compute_token_influence(log),
    ]
    for result in results:
        assert len(repr(result)) < 250
        assert set(result) >= {"src_ids", "influence"}
        assert len(dict(result)) == len(result)
    assert "best 4" in repr(results[1])


def test_the_best_of_a_result(tmp_path):
    fill(tmp_path)
    analysis, log = Analysis(run_of(tmp_path)), log_of(5, Q)
    for how in ({}, {"per_layer": True}):
        full = analysis.compute_influence_all(log, **how)
        best = analysis.compute_influence_all(log, top_k=3, **how)
        assert full.top(3).tgt_ids == best.tgt_ids
        assert full.top(3).to_pandas().equals(best.to_pandas())
    own = analysis.compute_self_influence()
    most = own.top(2)
    order = np.argsort(-own.influence, kind="stable")[:2]
    assert most.src_ids == [own.src_ids[i] for i in order]
    np.testing.assert_array_equal(most.influence, own.influence[order])
    with pytest.raises(ValueError, match="already the best"):
        best.top(1)
    with pytest.raises(ValueError, match="order of its own"):
        analysis.compute_self_influence(per_layer=True).top(1)
    with pytest.raises(ValueError, match="at least 1"):
        full.top(0)


# --- progress ------------------------------------------------------------------------------------


class Screen(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.isatty = lambda: terminal


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("show", [None, True, False])
@pytest.mark.parametrize("off", [True, False])
def test_a_bar_is_for_terminals(monkeypatch, terminal, show, off):
    screen = Screen(terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(_progress, "PATIENCE", -1)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("LOGIX_PROGRESS", "0" if off else "1")
    items = _progress.progress(["ab", "c"], 3, "letters", show, len)
    assert list(items) == ["ab", "c"]
    said = screen.getvalue()
    if off or show is False or (show is None and not terminal):
        assert said == ""
    elif terminal:
        assert "letters" in said
        assert "3/3" in said
    else:
        assert said.startswith("logix: letters: 3 in ")
        assert said.count("\n") == 1


def test_no_bar_for_what_is_quick(monkeypatch):
    screen = Screen(True)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.delenv("LOGIX_PROGRESS", raising=False)
    assert list(_progress.progress(range(3), what="quick")) == [0, 1, 2]
    assert screen.getvalue() == ""


def test_eigenvectors_of_many_layers_have_a_bar(monkeypatch):
    state = fitted(("kfac",))
    monkeypatch.setattr(_progress, "PATIENCE", -1)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("LOGIX_PROGRESS", raising=False)
    for find in (_statistics.with_bases, lambda state: prepare("kfac", state)):
        screen = Screen(True)
        monkeypatch.setattr(sys, "stderr", screen)
        find(state)
        assert f"{len(state)}/{len(state)}" in screen.getvalue()


if __name__ == "__main__":
    with_little_memory(sys.argv[1])
