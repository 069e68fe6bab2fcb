"""What logix's statistics cost, against a plain forward and backward pass of the same model.

python benchmarks/logix_statistics.py

On the CPU with one thread: an MLP 784-512-256-10 and 512 images. On a GPU: the two layers of a
transformer's block, 768-3072-768, and 16 sequences of 512 tokens. "By hand" takes records with
four lines of hooks and gives them to the engine; "by LogIX" is a user's own loop.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import platform
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from _measure import race
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import logix
from logix import _statistics
from logix._record import Outer, Record, Whole

Row = tuple[str, str, str, bool | None]  # what, measured, target, met
TARGET = 1.95
MLP = "MLP, one thread"


def mlp(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def waited(fun: Callable[[], Any]) -> Callable[[], None]:
    """The function, and all that it has left to the GPU."""

    def run() -> None:
        fun()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return run


def taken(model: nn.Sequential, loss: Callable[[], Tensor]) -> list[Record]:
    """Records of one pass, without gradients of weights."""
    found: list[Record] = []

    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        name, x = names[module], inputs[0].detach()

        def seen(g: Tensor) -> None:
            g = g.detach().reshape(len(g), -1, g.shape[-1])
            found.append(Outer(name, x.reshape(len(x), -1, x.shape[-1]), g))
            found.append(Whole(f"{name}.bias", g.sum(1)))

        output.requires_grad_().register_hook(seen)

    names = {m: n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    handles = [m.register_forward_hook(hook) for m in names]
    model.requires_grad_(False)
    loss().backward()
    model.requires_grad_(True)
    for handle in handles:
        handle.remove()
    return found


def plain(model: nn.Module, loss: Callable[[], Tensor]) -> None:
    model.zero_grad()
    loss().backward()


def summed(what: str, model: nn.Sequential, loss: Callable[[], Tensor]) -> Callable[[], Any]:
    state: dict[str, dict[str, Any]] = {}
    if what == "ekfac":
        state = _statistics.with_bases(_statistics.update({}, taken(model, loss), ["kfac"]))
    return lambda: _statistics.update(state, taken(model, loss), [what])


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def images() -> tuple[nn.Sequential, Callable[[], Tensor]]:
    model, x, y = mlp(784, 512, 256, 10), torch.randn(512, 784), torch.randint(10, (512,))
    return model, lambda: cross_entropy(model(x), y, reduction="sum")


def mlp_by_logix() -> Iterator[Row]:
    model, loss = images()
    ids = [str(i) for i in range(512)]
    with tempfile.TemporaryDirectory() as folder, one_thread():
        run = logix.LogIX("statistics", config={"root_dir": folder})
        with contextlib.redirect_stdout(io.StringIO()):
            run.setup({"statistic": "kfac"})
            run.watch(model)

        def extract() -> None:
            with run(data_id=ids):
                loss().backward()

        base, own = race(lambda: plain(model, loss), extract, rounds=31)
    detail = f"{own / base:.2f} ({base * 1e3:.1f} ms without)"
    yield f"{MLP}: K-FAC by LogIX / plain", detail, f"≤ {TARGET}", own / base <= TARGET


def mlp_by_hand() -> Iterator[Row]:
    model, loss = images()
    words = ("kfac", "diagonal", "ekfac")
    with one_thread():
        base, bare, *found = race(
            lambda: plain(model, loss),
            lambda: taken(model, loss),
            *(summed(what, model, loss) for what in words),
            rounds=31,
        )
    kfac, diagonal, ekfac = (x / base for x in found)
    detail = f"{kfac:.2f} ({base * 1e3:.1f} ms without)"
    yield f"{MLP}: K-FAC by hand / plain", detail, f"≤ {TARGET}", kfac <= TARGET
    yield f"{MLP}: the pass for it, nothing summed / plain", f"{bare / base:.2f}", "", None
    yield f"{MLP}: squares by hand / plain", f"{diagonal:.2f}", "", None
    yield f"{MLP}: EK-FAC's second pass by hand / plain", f"{ekfac:.2f}", "", None


def block_on_a_gpu() -> Iterator[Row]:
    if not torch.cuda.is_available():
        return
    torch.backends.cuda.matmul.allow_tf32 = True
    model = mlp(768, 3072, 768).cuda()
    x = torch.randn(16, 512, 768, device="cuda")
    loss = lambda: model(x).square().sum()
    base, bare, kfac, ekfac = race(
        waited(lambda: plain(model, loss)),
        waited(lambda: taken(model, loss)),
        *(waited(summed(what, model, loss)) for what in ("kfac", "ekfac")),
        rounds=21,
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    summed("ekfac", model, loss)()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    scale = f" ({base * 1e3:.2f} ms)"
    name = "768-3072-768, 16 × 512 tokens, GPU"
    yield f"{name}: the pass for it, nothing summed / plain", f"{bare / base:.2f}{scale}", "", None
    yield f"{name}: K-FAC by hand / plain", f"{kfac / base:.2f}", "", None
    yield f"{name}: EK-FAC's second pass by hand / plain", f"{ekfac / base:.2f}", "", None
    yield f"{name}: memory for EK-FAC, beside the model", f"{peak:.0f} MiB", "", None


ROWS = [mlp_by_hand, mlp_by_logix, block_on_a_gpu]


def main() -> None:
    print(f"Python {platform.python_version()}, PyTorch {torch.__version__}\n")
    print("| what | measured | target | |\n| --- | --- | --- | --- |", flush=True)
    for rows in ROWS:
        for what, measured, target, met in rows():
            mark = {True: "yes", False: "NO", None: ""}[met]
            print(f"| {what} | {measured} | {target} | {mark} |", flush=True)


if __name__ == "__main__":
    main()
