"""`LogIXScheduler`: the passes over the data that a setup needs, in their order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ._rows import KINDS

LORA = ("none", "random", "sparse", "pca")
HESSIAN = ("none", "diagonal", "raw", "kfac", "ekfac")


class LogIXScheduler:
    """Iterate it, and go once over the data each time.

    >>> import tempfile, torch, logix
    >>> model, x = torch.nn.Linear(3, 2), torch.randn(8, 3)
    >>> run = logix.LogIX("example", config={"root_dir": tempfile.mkdtemp()})
    >>> run.watch(model)
    logix: watching 1 layer, 8 of 8 parameters (100.0%); a row has 8 values (32 B)
    >>> for _ in logix.LogIXScheduler(run, hessian="ekfac", save="grad"):
    ...     with run(data_id=list(range(8))):
    ...         model(x).square().sum().backward()
    ...     run.finalize()
    >>> len(run.store()), run.influence.compute_self_influence()["influence"].shape
    (8, (8,))

    Arguments:

    - `run`: the run to set up before each pass.
    - `lora`: `"none"`, `"random"`, `"sparse"`, or `"pca"`, which needs a pass of its own.
    - `hessian`: the statistics; `"ekfac"` needs a pass before, for the eigenvectors.
    - `save`: `"none"`, `"grad"`, `"forward"` or `"backward"`: saved in the last pass.
    - `rank`, `seed`: of the compression; by default those of the run's configuration.
    """

    def __init__(
        self,
        run: Any,
        lora: str = "none",
        hessian: str = "none",
        save: str = "none",
        rank: int | None = None,
        seed: int | None = None,
    ):
        words = (
            ("lora", lora, LORA),
            ("hessian", hessian, HESSIAN),
            ("save", save, ("none", *KINDS)),
        )
        for name, value, known in words:
            if value not in known:
                raise ValueError(f"{name}={value!r} is not known. Known are: {', '.join(known)}.")
        self.run, self.lora, self.hessian, self.save = run, lora, hessian, save
        self.rank, self.seed = rank, seed

    def __len__(self) -> int:
        return 1 + (self.lora == "pca") + (self.hessian == "ekfac")

    def __iter__(self) -> Iterator[int]:
        self.run._scheduled = True  # `extract` goes once over the data each time
        try:
            yield from self._passes()
        finally:
            self.run._scheduled = False

    def _passes(self) -> Iterator[int]:
        run, passes = self.run, 0
        if self.lora == "pca":
            run.setup({"statistic": "kfac"})
            yield passes
            self._ended()
            passes += 1
        if self.lora != "none":
            run.add_lora(init=self.lora, rank=self.rank, seed=self.seed)
        if self.hessian == "ekfac":
            run.setup({"statistic": "ekfac"})
            yield passes
            self._ended()
            passes += 1
        save = [] if self.save == "none" else self.save
        run.setup({"log": save, "save": save, "statistic": self.hessian})
        yield passes

    def _ended(self) -> None:
        """A pass whose end was not told would run into the next one."""
        if self.run.in_a_pass:
            self.run.finalize()
