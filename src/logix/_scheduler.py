"""`LogIXScheduler`: the passes over the data that a setup needs, in their order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ._compress import Compression, Projector
from ._statistics import finalize

LORA = ("none", "random", "pca")
HESSIAN = ("none", "diagonal", "raw", "kfac", "ekfac")


class LogIXScheduler:
    """Iterate it, and go once over the data each time.

    >>> import tempfile, torch, logix
    >>> model, x = torch.nn.Linear(3, 2), torch.randn(8, 3)
    >>> run = logix.LogIX("example", config={"root_dir": tempfile.mkdtemp()})
    >>> run.watch(model)
    logix: watching 1 layers, 8 of 8 parameters (100.0%)
    >>> for _ in logix.LogIXScheduler(run, hessian="ekfac", save="grad"):
    ...     with run(data_id=list(range(8))):
    ...         model(x).square().sum().backward()
    ...     run.finalize()
    >>> len(run.store()), run.influence.compute_self_influence()["influence"].shape
    (8, (8,))

    Arguments:

    - `run`: the run to set up before each pass.
    - `lora`: `"none"`, `"random"`, or `"pca"`, which needs a pass of its own.
    - `hessian`: the statistics; `"ekfac"` needs a pass before, for the eigenvectors.
    - `save`: `"none"`, or `"grad"`: saved in the last pass.
    - `rank`: of the compression, on either side.
    """

    def __init__(
        self,
        run: Any,
        lora: str = "none",
        hessian: str = "none",
        save: str = "none",
        rank: int = 64,
        seed: int = 0,
    ):
        for name, value, known in (("lora", lora, LORA), ("hessian", hessian, HESSIAN)):
            if value not in known:
                raise ValueError(f"{name}={value!r} is not known. Known are: {', '.join(known)}.")
        self.run, self.lora, self.hessian, self.save = run, lora, hessian, save
        self.settings = Compression("logra", "pca" if lora == "pca" else "random", rank, seed)

    def __len__(self) -> int:
        return 1 + (self.lora == "pca") + (self.hessian == "ekfac")

    def __iter__(self) -> Iterator[int]:
        run, passes = self.run, 0
        if self.lora == "pca":
            run.setup({"log": "grad", "statistic": "kfac"})
            yield passes
            passes += 1
            run.compression = Projector.from_covariances(self.settings, finalize(run.statistics))
            run.statistics = {}  # those of the layers as they are; from here on they are compressed
        elif self.lora == "random":
            run.compression = Projector(self.settings)
        if self.hessian == "ekfac":
            run.setup({"log": "grad", "statistic": "ekfac"})
            yield passes
            passes += 1
        words = {"log": "grad", "statistic": self.hessian}
        run.setup(words if self.save == "none" else {**words, "save": self.save})
        yield passes
