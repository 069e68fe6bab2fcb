"""`extract`: ids, errors, resuming, and examples whose gradients are not finite."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import logix
import logix.jax
from jax_run import (
    B,
    N,
    as_rows,
    by_vmap,
    close,
    cut,
    engine,
    examples,
    loss,
    make,
    parameters,
    same_statistics,
    sequence_loss,
    sequences,
    spoiled,
    without,
)


@pytest.fixture
def params():
    return parameters()


# --- ids, errors, resuming ------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["range", "list", "array", "generator", "function", "key"])
def test_ids_in_every_form(tmp_path, form):
    run, data = make(tmp_path, {"save": "grad"}), examples()
    batches, names = cut(data), [f"n{i}" for i in range(N)]
    if form in ("range", "array"):
        names = list(range(N))
    given = {
        "range": range(N),
        "list": names,
        "array": np.arange(N),
        "generator": (name for name in names),
        "function": lambda batch: [
            names[int(np.flatnonzero((data["x"] == x).all(1))[0])] for x in batch["x"]
        ],
        "key": "name",
    }[form]
    if form == "key":
        batches = [{**b, "name": np.array(names[i * B : i * B + B])} for i, b in enumerate(batches)]
    run.extract(batches, given)
    run.finalize()
    assert run.store().ids == names


def test_ids_of_the_content_are_the_same_in_any_batch(tmp_path):
    run, data = make(tmp_path, {"save": "grad"}), examples()
    run.extract(cut(data))
    run.finalize()
    ids = run.store().ids
    again = make(tmp_path, {"save": "grad"}, resume=True)
    again.extract(cut(data, 5))
    again.finalize()
    assert again.store().ids == ids
    from logix.store._ids import content_ids

    assert content_ids(data) == ids


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (range(N - 1), "1 ids for batch 2, which has 2 examples"),
        (range(N + 2), "the ids are too many: 2 were left when the batches ended"),
        (lambda batch: [1, 2], "2 ids for batch 0, which has 4 examples"),
        ("id", r"ids='id': the batch has no such key; its keys are \['x', 'y'\]"),
        ([0, 1, 0, *range(4, 11)], "the id 0 is there already"),
    ],
)
def test_wrong_ids_are_told(tmp_path, ids, message):
    run, data = make(tmp_path, {"save": "grad", "statistic": "kfac"}), examples()
    with pytest.raises(ValueError, match=message):
        run.extract(cut(data), ids)
    there = int(run.statistics["l1/w"]["left_n"]) if run.statistics else 0
    run._fresh = {}
    run.flush()
    assert there == (len(run.store()) if there else 0)


@pytest.mark.parametrize("where", ["loss", "batches", "first batch", "shapes"])
def test_an_error_leaves_the_run_usable(tmp_path, params, where):
    broken = [where == "loss"]

    def fragile(p, e):
        if broken[0]:
            raise ZeroDivisionError
        return loss(p, e)

    def batches():
        for k, batch in enumerate(cut(data)):
            if (where, k) in (("batches", 2), ("first batch", 0)):
                raise ZeroDivisionError
            if where == "shapes" and k == 2:
                batch = {**batch, "x": batch["x"][:, :3]}
            yield batch

    data = examples()
    run = make(tmp_path, {"save": "grad", "statistic": "kfac"}, fragile)
    with pytest.raises(TypeError if where == "shapes" else ZeroDivisionError):
        run.extract(batches(), range(N))
    done = 2 * B if where in ("batches", "shapes") else 0
    assert (int(run.statistics["l1/w"]["left_n"]) if run.statistics else 0) == done
    broken[0] = False
    rest = jax.tree.map(lambda x: x[done:], data)
    run.extract(cut(rest), range(done, N))
    run.finalize()
    assert run.store().ids == list(range(N))
    close(run.store().rows(), as_rows(by_vmap(loss, params, data), run.layout))
    same_statistics(run.statistics, engine(logix.jax.capture(loss, params)(params, data), ["kfac"]))


def test_a_computation_that_fails_takes_the_sums_with_it(tmp_path):
    """They were given to it, to be changed in place; rows of other batches are not lost."""
    data = examples()

    def watchdog(x):
        if x > 50:
            raise RuntimeError("the device fell over")
        return np.float32(1)

    def fragile(p, e):
        how = jax.ShapeDtypeStruct((), jnp.float32)
        x = jax.lax.stop_gradient(e["x"][0])
        return loss(p, e) * jax.pure_callback(watchdog, how, x, vmap_method="sequential")

    bad = {**data, "x": np.where(np.arange(N)[:, None] == 5, 100, data["x"]).astype(np.float32)}
    run = make(tmp_path, {"save": "grad", "statistic": "kfac"}, fragile)
    with pytest.raises(Exception, match="the device fell over") as told:
        run.extract(cut(bad), range(N))
    assert "the statistics of this pass are lost" in told.value.__notes__[0]
    assert run.statistics == {}
    assert set(range(B)) <= set(run.store().ids) <= {*range(B), 8, 9}
    run.close()
    again = make(tmp_path, {"save": "grad", "statistic": "kfac"}, resume=True)
    again.extract(cut(data), range(N))
    again.finalize()
    assert sorted(again.store().ids) == list(range(N))
    assert int(again.statistics["l1/w"]["left_n"]) == N


@pytest.mark.parametrize("policy", ["error", "keep_first", "keep_all"])
def test_duplicates(tmp_path, policy):
    run, data = make(tmp_path, {"save": "grad"}, duplicates=policy), examples()
    ids = [0, 1, 2, 3, 3, 4, 5, 6, 7, 0]
    if policy == "error":
        with pytest.raises(ValueError, match="the id 3 is there already; nothing of this batch"):
            run.extract(cut(data), ids)
        assert run.store().ids == [0, 1, 2, 3]
        return
    run.extract(cut(data), ids)
    run.finalize()
    store = run.store()
    assert store.ids == ([*range(8)] if policy == "keep_first" else ids)
    rows = as_rows(by_vmap(loss, parameters(), data), run.layout)
    close(store.rows(), rows[[0, 1, 2, 3, 5, 6, 7, 8]] if policy == "keep_first" else rows)


def test_what_is_there_is_not_computed_again(tmp_path, params):
    data, computed = examples(), []

    def traced(p, e):
        jax.debug.callback(lambda x: computed.append(float(x)), e["x"][0])
        return loss(p, e)

    first = make(tmp_path, {"save": "grad"})
    first.extract(cut(data)[:2], range(8))
    first.close()
    again = make(tmp_path, {"save": "grad"}, traced, resume=True)
    again.extract(cut(data), range(N))
    again.finalize()
    jax.effects_barrier()
    assert sorted(set(computed)) == sorted(data["x"][8:, 0].tolist())
    assert again.store().ids == list(range(N))
    close(again.store().rows(), as_rows(by_vmap(loss, params, data), again.layout))


def test_ids_that_were_passed_over_are_not_lost_with_a_failed_batch(tmp_path):
    data = cut(examples(), 2)
    first = make(tmp_path, {"save": "grad"})
    first.extract([jax.tree.map(lambda x: x[:1], data[0])], [0])
    first.close()
    again = make(tmp_path, {"save": "grad"}, resume=True)
    with pytest.raises(ValueError, match="gradient of 1 is not finite"):
        again.extract([spoiled(data[0], 1)], [0, 1])
    again.extract(data, range(N))
    again.finalize()
    assert again.store().ids == list(range(N))


# --- examples that are not finite -----------------------------------------------------------------


@pytest.mark.parametrize("statistic", ["none", "kfac", "ekfac"])
@pytest.mark.parametrize("save", ["grad", "forward"])
def test_an_example_that_is_not_finite_is_an_error(tmp_path, params, statistic, save):
    run = make(tmp_path, {"save": save, "statistic": statistic})
    good = examples(16)
    with pytest.raises(ValueError, match=r"gradient of 5, 6 is not finite in layer 'l1/") as told:
        run.extract(cut(spoiled(good, 5, 6)), range(16))
    assert "Nothing of this batch was logged" in str(told.value)
    run.flush()
    done = run.store().ids  # those before it, and some that were begun beside it
    assert set(range(4)) <= set(done) <= {*range(4), *range(8, 16)}
    if statistic != "none":
        assert int(run.statistics["l1/w"]["left_n"]) == len(done)
    left = [i for i in range(16) if i not in done]
    run.extract(cut(jax.tree.map(lambda x: x[left], good)), left)
    run.finalize()
    assert sorted(run.store().ids) == list(range(16))
    if statistic == "kfac":
        same_statistics(
            run.statistics, engine(logix.jax.capture(loss, params)(params, good), ["kfac"])
        )


@pytest.mark.parametrize("statistic", ["none", "kfac", "ekfac", "variance"])
@pytest.mark.parametrize("policy", ["skip", "keep"])
def test_examples_that_are_not_finite_are_left_out(tmp_path, capsys, policy, statistic):
    words, data = {"save": "grad", "statistic": statistic}, examples()
    run = make(tmp_path, words, nonfinite=policy)
    run.extract(cut(spoiled(data, 0, 5, 9)), range(N))
    run.finalize()
    told = "left out" if policy == "skip" else "saved, and left out of statistics"
    assert (
        f"3 examples with gradients that are not finite: {told} (0, 5, 9)"
        in capsys.readouterr().out
    )
    clean = make(tmp_path, words, name="clean")
    kept = [i for i in range(N) if i not in (0, 5, 9)]
    clean.extract(cut(without(data, 0, 5, 9)), kept)
    clean.finalize()
    store = run.store()
    assert store.ids == (kept if policy == "skip" else list(range(N)))
    close(store.rows()[[store.find(i) for i in kept]], clean.store().rows())
    if policy == "keep":
        assert not np.isfinite(store.rows()[[0, 5, 9]]).all(1).any()
    drop = lambda s: {
        k: {n: x for n, x in v.items() if "basis" not in n and n != "eigen"} for k, v in s.items()
    }
    same_statistics(drop(run.statistics), drop(clean.statistics))


@pytest.mark.parametrize("masked", [False, True])
def test_tables_and_positions_without_what_is_not_finite(tmp_path, masked):
    params, data = sequences()
    spoiled = {**data, "scale": np.where(np.arange(N) == 3, np.nan, 1).astype(np.float32)}
    scaled = lambda p, e: sequence_loss(p, e) * e["scale"]
    mask = (lambda batch: batch["mask"]) if masked else None
    runs = []
    for name, content in (("a", spoiled), ("b", without({**spoiled, "scale": np.ones(N, "f")}, 3))):
        run = make(tmp_path, {"statistic": "kfac"}, scaled, params, name=name, nonfinite="skip")
        run.extract(cut(content), mask=mask)
        run.finalize()
        runs.append(run)
    same_statistics(runs[0].statistics, runs[1].statistics)
