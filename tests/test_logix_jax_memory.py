"""Rows in memory that is used again; batches that are empty, on devices, or of grain."""

from __future__ import annotations

import gc
import io
import os
import random
import subprocess
import sys
import time
import weakref

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import logix
import logix.jax
from jax_run import N, as_rows, by_vmap, close, cut, examples, loss, make, parameters
from logix import _progress
from logix.jax._ready import Spare
from logix.store._writer import RowWriter

# --- memory that is used again -------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("slow", [False, True])
def test_rows_of_many_batches_of_all_sizes(tmp_path, workers, slow, monkeypatch):
    if slow:
        append = RowWriter.append
        later = lambda *args, **how: (time.sleep(0.01), append(*args, **how))[1]
        monkeypatch.setattr(RowWriter, "append", later)
    data, chance = examples(120), random.Random(0)
    batches, start = [], 0
    while start < 120:
        n = chance.choice([1, 4, 4, 4, 7])
        batches.append(jax.tree.map(lambda x, a=start, n=n: x[a : a + n], data))
        start += n
    run = make(tmp_path, {"save": "grad"}, logging={"num_workers": workers})
    run.extract(batches, range(120))
    run.finalize()
    assert run.store().ids == list(range(120))
    close(run.store().rows(), as_rows(by_vmap(loss, parameters(), data), run.layout))


def test_the_memory_of_written_rows_is_used_again():
    shapes, places = [jax.ShapeDtypeStruct((4, 3), jnp.float32)], frozenset()
    spare = Spare()
    first = spare.take(shapes, places)
    put = lambda old, x: jax.lax.dynamic_update_slice(old, x + 1, (0, 0))  # as a step does
    over = jax.jit(put, donate_argnums=0)
    made = over(first[0], jnp.zeros((4, 3)))
    assert first[0].is_deleted()  # its memory is that of another one now
    spare.give([made], places)
    [again] = spare.take(shapes, places)
    looked_at = np.asarray(again)
    new = over(again, -jnp.ones((4, 3)))
    assert (looked_at == 1).all()
    assert (np.asarray(new) == 0).all()
    spare.give([new], places)
    other = [jax.ShapeDtypeStruct((5, 3), jnp.float32)]
    assert spare.take(other, places)[0].shape == (5, 3)
    spare.give([new], places)
    spare.keep(0)
    assert spare.take(shapes, places)[0] is not new


def test_nothing_is_kept_of_a_pass_that_ended(tmp_path):
    run, data = make(tmp_path, {"save": "grad"}), examples()
    for k in range(3):
        run.extract(cut(data), [f"{k}-{i}" for i in range(N)])
        box = weakref.ref(run._saved._outbox)
        run.finalize()
        gc.collect()
        assert box() is None
        assert not run._program.spare._rows


# --- batches from elsewhere ----------------------------------------------------------------------


@pytest.mark.parametrize("words", [{"save": "grad"}, {"save": "grad", "statistic": "kfac"}])
def test_a_batch_of_no_examples(tmp_path, words):
    run, data = make(tmp_path, words), examples()
    none = jax.tree.map(lambda x: x[:0], data)
    assert run.extract([data, none], range(N)) == N
    run.finalize()
    assert run.store().ids == list(range(N))
    assert run.log(none, ids=[])[0] == []


def test_batches_on_several_devices_one_after_another(tmp_path):
    program = f"""
import jax, numpy as np
from jax_run import *
data = examples(24)
batches = [jax.device_put(b, jax.devices()[k % 3]) for k, b in enumerate(cut(data))]
run = make({str(tmp_path)!r}, {{"save": "grad"}})
run.extract(batches, range(24)); run.finalize()
close(run.store().rows(), as_rows(by_vmap(loss, parameters(), data), run.layout))
print(len(run.store()), "rows")
"""
    flags = "--xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**_environment(), "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert "24 rows" in done.stdout, done.stderr


def _environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def test_batches_of_grain(tmp_path):
    data = examples()
    source = [{"x": data["x"][i], "y": data["y"][i], "id": np.int64(i)} for i in range(N)]
    loader = grain.MapDataset.source(source).shuffle(seed=3).batch(4)
    run = make(tmp_path, {"save": "grad", "statistic": "ekfac"})
    run.extract(loader, ids="id")
    run.finalize()
    ids = run.store().ids
    assert sorted(ids) == list(range(N))
    assert ids != list(range(N))
    close(run.store().rows(), as_rows(by_vmap(loss, parameters(), data), run.layout)[ids])


def test_extract_shows_how_far_it_is(tmp_path, monkeypatch):
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(_progress, "PATIENCE", -1)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("LOGIX_PROGRESS", raising=False)
    run = make(tmp_path, {"save": "grad"})
    run.extract(cut(examples()), range(N))
    assert "batches" in screen.getvalue()
    assert "3/3" in screen.getvalue()


# --- small promises ------------------------------------------------------------------------------


def test_logix_jax_needs_no_import_of_its_own():
    program = "import logix, sys; assert 'logix.jax' not in sys.modules; print(logix.jax.capture)"
    done = subprocess.run(
        [sys.executable, "-c", program], env=_environment(), capture_output=True, text=True
    )
    assert "function capture" in done.stdout, done.stderr


def normalised(p, batch):
    x = batch["x"] - batch["x"].mean(0)
    return jnp.sum((x @ p["l1"]["w"]) ** 2)


ONE = {"l1": {"w": jnp.ones((4, 5))}}


@pytest.mark.parametrize("size", [1, 4])
def test_a_capture_refuses_examples_that_depend_on_each_other(size):
    capture = logix.jax.capture(normalised, ONE, batched=True)
    batch = {"x": examples()["x"][:size]}
    for call in (capture, capture.gradients, capture.check):
        with pytest.raises(ValueError, match="depend on each other"):
            call(ONE, batch)
    by_itself = logix.jax.capture(
        lambda p, b: jnp.sum((b["x"] @ p["l1"]["w"]) ** 2), ONE, batched=True
    )
    with jax.disable_jit():
        by_itself.check(ONE, batch)
    assert by_itself.gradients(ONE, batch)["l1"]["w"].shape == (size, 4, 5)


def test_batches_of_one_example_are_checked_too(tmp_path):
    run = make(tmp_path, {"save": "grad"}, normalised, ONE, how=dict(batched=True))
    with pytest.raises(ValueError, match="depend on each other"):
        run.extract([{"x": examples()["x"][:1]}], [0])
