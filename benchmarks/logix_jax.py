"""What the capture of a JAX loss costs, against the plain gradient of the batch's loss.

python benchmarks/logix_jax.py          CPU: MLP 784-512-256-10, batch 512
python benchmarks/logix_jax.py --gpu    GPT-2 small by its shape, in Flax NNX: 512 tokens, batch 16

Ratios of times that took turns in one run. Rows to the store are the time until all of them are
with the operating system. Memory is XLA's own count of temporary bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import _measure
import jax
import jax.numpy as jnp
import numpy as np
from _memory import touch_memory

import logix
from logix._compress import Compression, Projector
from logix.jax._batches import Spread
from logix.jax._ready import Spare
from logix.jax._step import Step, zeros_like

Row = tuple[str, str, str, bool | None]
WANT = "rows" if jax.default_backend() == "cpu" else "joined"


def race(variants: dict[str, Callable[[], Any]], rounds: int, calls: int = 1) -> dict[str, float]:
    """Median seconds of a call of each, in turns."""
    return dict(zip(variants, _measure.race(*variants.values(), rounds=rounds, calls=calls)))


class Batch:
    """The compiled step of a run, as a function of nothing."""

    def __init__(self, loss: Callable, params: Any, batch: Any, rank: int, want: str, what: str):
        how = Projector(Compression(kind="logra", rank=rank) if rank else Compression())
        self.capture = logix.jax.capture(loss, params, strict=True)
        self.arrays, self.batch = self.capture.watched.arrays(params), batch
        self.step, self.spread = Step(self.capture), Spread.of(batch, self.arrays)
        _, made = self.step.shapes(self.arrays, batch, how)
        self.given = {spot: jnp.asarray(x) for spot, x in made.items()}
        self.named: dict[str, Any] = dict(settings=how.settings, want=want, spread=self.spread)
        self.named["what"] = frozenset([what]) if what else frozenset()
        shapes = jax.eval_shape(lambda: self.step.run(*self.args(None), **self.named))
        self.sums = zeros_like(shapes.get("sums", {}), self.spread)
        self.parts, self.spare = shapes.get("rows", []) if want == "rows" else [], Spare()
        self.made: list[Any] = []

    def args(self, sums: Any) -> tuple[Any, ...]:
        old = self.spare.take(self.parts, None) if sums is not None else []
        return self.arrays, self.batch, self.given, sums or {}, {}, None, None, old

    def lower(self, step: Step | None = None) -> Any:
        return (step or self.step).run.lower(*self.args(self.sums), **self.named)

    def __call__(self) -> Any:
        """As in a run, rows are put where those of the batch before last were."""
        out = self.step.run(*self.args(self.sums), **self.named)
        self.sums = out.get("sums", self.sums)
        self.made.append(out.get("rows", ()))
        if len(self.made) > 2:
            self.spare.give(self.made.pop(0), None)
        return out


def plain(loss: Callable) -> Callable:
    total = lambda params, batch: jax.vmap(loss, in_axes=(None, 0))(params, batch).sum()
    return jax.jit(jax.grad(total))


def built(make: Callable[[], Any]) -> float:
    """Seconds to trace, lower and compile, with nothing of it known before."""
    jax.clear_caches()
    start = time.perf_counter()
    make().compile()
    return time.perf_counter() - start


def temp(lowered: Any) -> int:
    return lowered.compile().memory_analysis().temp_size_in_bytes


def row(what: str, ratio: float, target: str, limit: float, more: str = "") -> Row:
    return what, f"{ratio:.2f}×{more}", target, ratio <= limit


def cpu() -> Iterator[Row]:
    sizes, key = (784, 512, 256, 10), jax.random.key(0)
    make = lambda i, o: {"w": jax.random.normal(key, (i, o)) * i**-0.5, "b": jnp.zeros(o)}
    params = [make(i, o) for i, o in itertools.pairwise(sizes)]
    batch = {"x": jax.random.normal(key, (512, 784)), "y": jax.random.randint(key, (512,), 0, 10)}

    def loss(params: Any, example: Any) -> Any:
        x = example["x"]
        for k, layer in enumerate(params):
            x = (jax.nn.relu(x) if k else x) @ layer["w"] + layer["b"]
        return -jax.nn.log_softmax(x)[example["y"]]

    grad = plain(loss)
    whole = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))
    logra = Batch(loss, params, batch, 64, WANT, "")
    kfac = Batch(loss, params, batch, 0, "sums", "kfac")
    capture = logix.jax.capture(loss, params)
    norms = jax.jit(lambda p, b: logix.jax.squared_norms(capture(p, b)))
    took = race(
        {
            "plain": lambda: grad(params, batch),
            "logra": logra,
            "norms": lambda: norms(params, batch),
            "kfac": kfac,
        },
        rounds=30,
        calls=5,
    )
    slow = race({"plain": lambda: grad(params, batch), "whole": lambda: whole(params, batch)}, 2)
    base, shown = took["plain"], f" ({1e3 * took['plain']:.2f} ms plain)"
    whole_ratio = f"; vmap(grad) {slow['whole'] / slow['plain']:.0f}×"
    yield row("LoGra r64 rows", took["logra"] / base, "≤ 1.15×", 1.15, shown + whole_ratio)
    yield row("exact self-influence norms, no rows", took["norms"] / base, "≤ 0.9×", 0.9)
    yield row("K-FAC covariances", took["kfac"] / base, "≤ 2.0×", 2.0)
    bytes_plain = temp(grad.lower(params, batch))
    more = f" ({bytes_plain / 1e6:.1f} MB plain; vmap(grad) "
    more += f"{temp(whole.lower(params, batch)) / bytes_plain:.0f}× and its result)"
    yield row("temp memory, LoGra r64", temp(logra.lower()) / bytes_plain, "≤ 1.5×", 1.5, more)
    yield compile_row(loss, params, batch)


def compile_row(loss: Callable, params: Any, batch: Any, what: str = "") -> Row:
    """From a loss that was never seen; projections, which are no part of the program, are there."""
    ours, theirs = [], []
    known = Batch(loss, params, batch, 64, WANT, "")
    fresh = lambda: Step(logix.jax.capture(loss, params))
    for _ in range(3):
        theirs.append(built(lambda: plain(loss).lower(params, batch)))
        ours.append(built(lambda: known.lower(fresh())))
    a, b = min(ours), min(theirs)
    return row(f"trace + compile{what}", a / b, "≤ 2×", 2, f" ({a:.2f} s and {b:.2f} s)")


# --- GPU -----------------------------------------------------------------------------------------


def gpt2(
    scan: bool, layers: int = 12, width: int = 768, heads: int = 12, words: int = 50257
) -> Any:
    """The loss of one sequence, and parameters: modules of Flax NNX, in the shape of GPT-2."""
    from flax import nnx

    half = dict(dtype=jnp.bfloat16, param_dtype=jnp.float32)

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.ln_1 = nnx.LayerNorm(width, rngs=rngs, **half)
            self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs, **half)
            self.ln_2 = nnx.LayerNorm(width, rngs=rngs, **half)
            self.up = nnx.Linear(width, 4 * width, rngs=rngs, **half)
            self.down = nnx.Linear(4 * width, width, rngs=rngs, **half)

        def __call__(self, x: Any) -> Any:
            mask = nnx.make_causal_mask(jnp.ones(x.shape[:1]))
            x = x + self.attention(self.ln_1(x), mask=mask)
            return x + self.down(nnx.gelu(self.up(self.ln_2(x))))

    class Ends(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.words = nnx.Embed(words, width, rngs=rngs, **half)
            self.places = nnx.Embed(1024, width, rngs=rngs, **half)
            self.ln = nnx.LayerNorm(width, rngs=rngs, **half)

    rngs = nnx.Rngs(0)
    ends = Ends(rngs)
    end_graph, end_params = nnx.split(ends)
    block_graph = nnx.graphdef(Block(rngs))
    keys = jax.random.split(jax.random.key(0), layers)
    make = lambda key: nnx.state(Block(nnx.Rngs(key)))
    blocks = jax.vmap(make)(keys) if scan else [make(key) for key in keys]

    def loss(params: Any, tokens: Any) -> Any:
        ends = nnx.merge(end_graph, params["ends"])
        x = ends.words(tokens) + ends.places(jnp.arange(len(tokens)))
        body = lambda x, block: (nnx.merge(block_graph, block)(x), None)
        if scan:
            x, _ = jax.lax.scan(jax.checkpoint(body), x, params["blocks"])
        else:
            for block in params["blocks"]:
                x, _ = body(x, block)
        logits = ends.words.attend(ends.ln(x)).astype(jnp.float32)
        chosen = jax.nn.log_softmax(logits[:-1])
        return -jnp.take_along_axis(chosen, tokens[1:, None], 1).mean()

    return loss, {"ends": end_params, "blocks": blocks}


class Stored:
    """`run.extract` over some batches, into a run of its own, anew each time."""

    def __init__(self, loss: Callable, params: Any, batches: list[Any], folder: str | None):
        self.batches, self.root = batches, tempfile.mkdtemp(dir=folder)
        with contextlib.redirect_stdout(io.StringIO()):
            self.run = logix.LogIX("run", {"root_dir": self.root})
            self.run.setup({"log": "grad", "save": "grad"})
            self.run.watch(loss, params, strict=True)
            self.run.add_lora(rank=64)
            self.count = 0
            self()
        self.printed = self.run.coverage().summary()

    def __call__(self) -> Any:
        n = sum(len(b) for b in self.batches)
        self.run.extract(self.batches, ids=range(self.count, self.count + n))
        self.run.flush()
        self.count += n

    def remove(self) -> None:
        self.run.close()
        shutil.rmtree(self.root)


def gpu(folder: str | None) -> Iterator[Row]:
    touch_memory(folder, 24 << 30)
    yield from one_gpu(folder, False, "")
    yield from one_gpu(folder, True, ", scan over layers + remat")


def one_gpu(
    folder: str | None, scan: bool, what: str, size: int = 16, length: int = 512
) -> Iterator[Row]:
    loss, params = gpt2(scan)
    rng = np.random.default_rng(0)
    batches = [rng.integers(0, 50257, (size, length), dtype=np.int32) for _ in range(96)]
    grad, here = plain(loss), jnp.asarray(batches[0])
    stored = Stored(loss, params, batches[:32], folder)
    for count in 32, 96:  # in a long turn the store goes on to another part
        stored.batches = few = batches[:count]
        took = race({"plain": lambda few=few: [grad(params, b) for b in few], "ours": stored}, 5)
        speed = size * count / took["plain"]
        more = f" (plain {speed:.0f} sequences/s; {stored.printed})"
        ratio = took["ours"] / took["plain"]
        yield row(f"LoGra r64 + save, {count} batches{what}", ratio, "≤ 1.1×", 1.1, more)
    stored.remove()
    inside = Batch(loss, params, here, 64, WANT, "")
    grams = Batch(loss, params, here, 0, "sums", "kfac")
    took = race({"plain": lambda: grad(params, here), "rows": inside, "kfac": grams}, 10)
    yield f"the same without the store{what}", f"{took['rows'] / took['plain']:.2f}×", "", None
    yield f"K-FAC covariances{what}", f"{took['kfac'] / took['plain']:.2f}×", "", None
    small = temp(inside.lower()) / temp(grad.lower(params, here))
    yield f"temp memory, LoGra r64{what}", f"{small:.2f}×", "≤ 1.5×", small <= 1.5
    del inside, grams
    yield compile_row(loss, params, here, what)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--dir", help="where stores are written")
    arguments = parser.parse_args()
    print(
        f"Python {platform.python_version()}, JAX {jax.__version__}, {jax.devices()[0].device_kind}"
    )
    for what, value, target, met in gpu(arguments.dir) if arguments.gpu else cpu():
        print(f"| {what} | {value} | {target} | {'' if met is None else 'yes' if met else 'NO'} |")


if __name__ == "__main__":
    main()
