"""What logging a batch costs, against a plain forward and backward pass.

python benchmarks/logix_extract.py          CPU, one thread: MLP 784-512-256-10, batch 512
python benchmarks/logix_extract.py --gpu    Pythia-160M by its shape: 512 tokens, batch 16

A variant is some batches, and the time until all of their rows are with the operating system. What
is done once at the end (`finalize` waits for the disk, and saves the statistics) is not in it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from _memory import touch_memory
from torch import nn

import logix

Row = tuple[str, str, str, bool | None]


def race(variants: dict[str, Any], rounds: int) -> dict[str, float]:
    """Median seconds of each, in turns, after a warm-up of each."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for i in range(-1, rounds):
        for name in list(variants) if i % 2 else list(variants)[::-1]:
            variant = variants[name]
            if isinstance(variant, Variant):
                variant.begin()
            _wait()
            start = time.perf_counter()
            variant()
            _wait()
            if i >= 0:
                times[name].append(time.perf_counter() - start)
            if isinstance(variant, Variant):
                variant.end()
    return {name: statistics.median(t) for name, t in times.items()}


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Variant:
    """Batches that are logged into a run of their own, anew each time."""

    def __init__(self, model: nn.Module, loss: Callable, batches: int, words: dict, **how: Any):
        self.model, self.loss, self.batches, self.words = model, loss, batches, words
        self.how, self.root, self.count = how, tempfile.mkdtemp(dir=how.pop("dir", None)), 0

    def begin(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            config = {"root_dir": self.root, "logging": self.how.get("logging", {})}
            self.count += 1
            run = logix.LogIX(f"run-{self.count}", config)
            run.watch(self.model, type_filter=self.how.get("type_filter"))
            if "rank" in self.how:
                run.add_lora(rank=self.how["rank"])
                run.compression = self.how.setdefault("projector", run.compression)
        run.setup(self.words)
        self.run = run
        self.log(-1)  # makes the store
        run.flush()

    def log(self, k: int) -> None:
        n = self.how["examples"]
        with self.run(data_id=list(range(k * n, (k + 1) * n))):
            self.loss()

    def __call__(self) -> None:
        for k in range(self.batches):
            self.log(k)
        self.run.flush()

    def end(self) -> None:
        self.run.close()
        shutil.rmtree(self.run.path, ignore_errors=True)

    def remove(self) -> None:
        shutil.rmtree(self.root)


def cpu(folder: str | None) -> Iterator[Row]:
    touch_memory(folder)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))
    )
    x, y = torch.randn(512, 784), torch.randint(0, 10, (512,))

    def loss() -> None:
        nn.functional.cross_entropy(model(x), y, reduction="sum").backward()

    def plain(batches: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(batches):
                model.zero_grad()
                loss()

        return run

    for what, target, batches, rounds, words, how in (
        ("LoGra r64 + save", 1.2, 16, 9, {"save": "grad"}, dict(rank=64)),
        ("K-FAC covariances", 1.95, 16, 9, {"statistic": "kfac"}, {}),
        ("full gradients + save", 20, 2, 5, {"save": "grad"}, {}),
        *(
            (
                f"full gradients + save, {dtype}",
                None,
                2,
                5,
                {"save": "grad"},
                dict(logging={"log_dtype": dtype}),
            )
            for dtype in ("bfloat16", "float16")
        ),
    ):
        variant = Variant(model, loss, batches, words, examples=512, dir=folder, **how)
        times = race({"plain": plain(batches), "logged": variant, "again": plain(batches)}, rounds)
        variant.remove()
        value = times["logged"] / times["plain"]
        plain_ms, noise = times["plain"] / batches * 1e3, times["again"] / times["plain"]
        detail = f"{value:.2f}× ({plain_ms:.1f} ms plain; noise {noise:.2f})"
        yield (
            f"CPU, one thread, MLP: {what}",
            detail,
            f"≤ {target}×" if target else "",
            target and value <= target,
        )


def pythia(layers: int = 12) -> Any:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=50304,
        hidden_size=768,
        num_hidden_layers=layers,
        num_attention_heads=12,
        intermediate_size=3072,
        max_position_embeddings=2048,
    )
    return GPTNeoXForCausalLM(config)


def gpu(folder: str | None) -> Iterator[Row]:
    torch.set_float32_matmul_precision("high")  # tf32
    torch.manual_seed(0)
    model = pythia().cuda().eval()
    tokens = torch.randint(0, 50304, (16, 512), device="cuda")

    def loss() -> None:
        logits = model(tokens).logits[:, :-1].flatten(0, 1)
        nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum").backward()

    def plain(batches: int = 16) -> None:
        for _ in range(batches):
            model.zero_grad()
            loss()

    linear = dict(type_filter=[nn.Linear])
    for what, target, words, how in (
        ("LoGra r64 + save", 1.0, {"save": "grad"}, linear),
        ("the same, of all layers and biases", None, {"save": "grad"}, {}),
        ("LoGra r64 + save + raw covariance", 1.6, {"save": "grad", "statistic": "raw"}, linear),
        ("the same, of all layers", None, {"save": "grad", "statistic": "raw"}, {}),
    ):
        torch.cuda.empty_cache()
        variant = Variant(model, loss, 16, words, examples=16, dir=folder, rank=64, **how)
        times = race({"plain": plain, "logged": variant, "again": plain}, 5)
        torch.cuda.reset_peak_memory_stats()
        variant.begin()
        variant()
        peak = torch.cuda.max_memory_allocated() / 2**30
        variant.end()
        variant.remove()
        value, noise = times["logged"] / times["plain"], times["again"] / times["plain"]
        speed = 16 * 16 / times["plain"]
        detail = f"{value:.2f}× ({speed:.0f} sequences/s plain; noise {noise:.2f}; {peak:.1f} GiB)"
        met = None if target is None else value <= target
        yield f"H200, Pythia-160M shape: {what}", detail, f"≤ {target}×" if target else "", met
    yield from ekfac(model, loss, plain, folder)


def ekfac(model: nn.Module, loss: Callable, plain: Callable, folder: str | None) -> Iterator[Row]:
    batches = 64
    torch.cuda.empty_cache()
    (once,) = race({"plain": lambda: plain(batches)}, 3).values()
    with tempfile.TemporaryDirectory(dir=folder) as root:
        run = logix.LogIX("run", {"root_dir": root})
        run.watch(model)
        took = []
        for _ in logix.LogIXScheduler(run, hessian="ekfac"):
            _wait()
            start = time.perf_counter()
            for k in range(batches):
                with run(data_id=list(range(16 * k, 16 * k + 16))):
                    loss()
            _wait()
            middle = time.perf_counter()
            run.finalize()
            _wait()
            took += [middle - start, time.perf_counter() - middle]
    value = sum(took) / once
    parts = ", ".join(f"{x / once:.2f}" for x in took)
    yield (
        f"H200, Pythia-160M shape: EK-FAC fit of all layers, {16 * batches} sequences",
        f"{value:.2f} plain passes ({parts}: pass, eigenvectors and saving, pass, saving; "
        f"a plain pass {once:.1f} s)",
        "≤ 8",
        value <= 8,
    )


def table(rows: Iterator[Row]) -> None:
    for what, measured, target, met in rows:
        answer = "" if met is None else "yes" if met else "NO"
        print(f"| {what} | {measured} | {target} | {answer} |", flush=True)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--gpu", action="store_true")
    options.add_argument("--dir", help="where the stores are written")
    given = options.parse_args()
    print(f"Python {platform.python_version()}, torch {torch.__version__}\n")
    table(gpu(given.dir) if given.gpu else cpu(given.dir))
