"""What patched trainers share: passes over data become a run's rows, statistics and scores.

A trainer gives a `Pass`: a function that goes once over some data and calls `step` for each batch.

    step(ids, mask, backward)       `backward()` is the batch's forward and backward pass
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .._result import Influence
from .._run import LogIX
from .._scheduler import LogIXScheduler
from ._arguments import LogIXArguments

Step = Callable[[list[Any], Any, Callable[[], None]], None]
Pass = Callable[[Step], None]
QUERY_BYTES = 1 << 29  # queries that are scored in one pass over the store


@dataclasses.dataclass(frozen=True)
class LogReport:
    """What an extraction has logged: examples, layers, where, and in how many passes.

    `shared_ids`: examples whose id another one has too. All of them have a row of their own, but
    their ids do not tell them apart.
    """

    rows: int
    layers: tuple[str, ...]
    path: str
    passes: int
    shared_ids: int = 0

    def __str__(self) -> str:
        text = f"{self.rows:,} examples, {len(self.layers)} layers, in {self.path}"
        if self.shared_ids:
            text += f"; {self.shared_ids:,} share their id with another example"
        return text


class Extraction:
    """A run and the passes of one trainer."""

    def __init__(self, args: LogIXArguments):
        self.args = args
        self.run: LogIX | None = None
        self.left_out: dict[str, Any] = {}  # parameters of which no example has a gradient

    def extract(self, model: Any, go: Pass, show: bool = True) -> LogReport:
        """All passes that the arguments ask for. What is there is replaced only if they say so."""
        args = self.args
        run = self._new(model, resume=args.resume, overwrite=args.overwrite)
        there = os.path.exists(os.path.join(run.path, "rows"))
        if there and args.save != "none" and not (args.resume or args.overwrite):
            raise FileExistsError(
                f"there is a run at {run.path}. Pass LogIXArguments(overwrite=True) to replace it, "
                "resume=True to go on with it, or initialize_from_log=True to score with it "
                "(without extract_log)."
            )
        barrier()  # before another process writes what this one would find
        named: dict[str, Any] = dict(lora=args.lora, hessian=args.hessian or "none", save=args.save)
        if args.rank is not None:
            named["rank"] = args.rank
        passes, ids = 0, Counter[Any]()

        def step(names: list[Any], mask: Any, backward: Callable[[], None]) -> None:
            with run(data_id=names, mask=mask):
                backward()
            ids.update(names)

        for _ in LogIXScheduler(run, **named):
            ids.clear()
            go(step)
            run.finalize()
            passes += 1
        barrier()
        self.run = run
        all_ids = sum(gathered(ids), Counter[Any]())
        shared = sum(n for n in all_ids.values() if n > 1)
        layers = tuple(run.statistics) if args.save == "none" else tuple(n for n, *_ in run.layout)
        report = LogReport(sum(all_ids.values()), layers, run.path, passes, shared)
        if show:
            print(f"logix: {report}")
        return report

    def influence(self, model: Any, go: Pass, top_k: int | None) -> Influence:
        """Scores of the pass's examples with all that is saved."""
        run, named = self._for_analysis(model), self._named()
        named |= dict(mode=self.args.influence_mode, top_k=top_k)
        self._saved(run)
        score = lambda log: run.influence.compute_influence_all(log, **named)
        return self._scored(run, go, score)

    def self_influence(self, model: Any, go: Pass | None) -> Influence:
        """The score of each example of the pass with itself, or of all that is saved."""
        run, named = self._for_analysis(model), self._named()
        if go is None:
            self._saved(run)
            return run.influence.compute_self_influence(**named)
        score = lambda log: run.influence.compute_self_influence(log, **named)
        return self._scored(run, go, score)

    def _named(self) -> dict[str, Any]:
        args = self.args
        return dict(
            hessian=args.hessian or "auto",
            damping=args.influence_damping,
            influence_groups=args.influence_groups,
        )

    def _new(self, model: Any, **how: Any) -> LogIX:
        args = self.args
        run = LogIX(args.project, args.config, duplicates=args.duplicates, **how)
        with _frozen(self.left_out):
            run.watch(model, type_filter=args.layer_types(), name_filter=args.name_filter)
        return run

    def _for_analysis(self, model: Any) -> LogIX:
        if self.run is None:
            if not self.args.initialize_from_log:
                raise RuntimeError(
                    "nothing has been extracted. Call trainer.extract_log() first, or pass "
                    "LogIXArguments(initialize_from_log=True) to use what an earlier run has saved."
                )
            run = self._new(model, resume=True)
            run.initialize_from_log()
            self.run = run
        self.run.setup({"log": "grad"})
        self.run.eval()
        return self.run

    def _saved(self, run: LogIX) -> None:
        if not os.path.exists(os.path.join(run.path, "rows")):
            raise RuntimeError(
                f"no rows are saved at {run.path}: extract with LogIXArguments(save='grad')"
            )

    def _scored(self, run: LogIX, go: Pass, score: Callable[[Any], Influence]) -> Influence:
        """A result for all examples of a pass. Small batches are scored together."""
        logs: list[tuple[list[Any], dict[str, Any]]] = []
        results: list[Influence] = []

        def flush() -> None:
            if logs:
                results.append(score(_merged(logs)))
                logs.clear()

        def step(names: list[Any], mask: Any, backward: Callable[[], None]) -> None:
            with run(data_id=names, mask=mask):
                backward()
            ids, layers = run.get_log()
            logs.append((list(ids), {name: kinds["grad"] for name, kinds in layers.items()}))
            if sum(g.nbytes for _, grads in logs for g in grads.values()) >= QUERY_BYTES:
                flush()

        go(step)
        flush()
        return _everywhere(results)


def _merged(logs: Sequence[tuple[list[Any], dict[str, Any]]]) -> Any:
    import torch

    join = lambda name: torch.cat([grads[name] for _, grads in logs])
    ids = [i for names, _ in logs for i in names]
    return ids, {name: {"grad": join(name)} for name in logs[0][1]}


def _everywhere(results: Sequence[Influence]) -> Influence:
    """One result of the results of several blocks of queries, in all processes."""
    everyone = [one for several in gathered(list(results)) for one in several]
    if not everyone:
        raise ValueError("the dataset of the queries is empty")
    first = everyone[0]
    ids = [i for one in everyone for i in one.src_ids]
    if isinstance(first.influence, dict):
        join = lambda group: np.concatenate([one.influence[group] for one in everyone])
        values: Any = {group: join(group) for group in first.influence}
    else:
        values = np.concatenate([one.influence for one in everyone])
    return dataclasses.replace(first, src_ids=ids, influence=values, tgt_ids=_targets(everyone))


def _targets(results: Sequence[Influence]) -> Any:
    """One list for all queries; with `top_k`, a list for each."""
    first = results[0].tgt_ids
    if isinstance(first, dict):
        return {g: [row for one in results for row in one.tgt_ids[g]] for g in first}
    if first and isinstance(first[0], list):
        return [row for one in results for row in one.tgt_ids]
    return first


def barrier() -> None:
    """Wait for the other processes, if there are any."""
    if _processes() > 1:
        import torch

        torch.distributed.barrier()


def gathered(one: Any) -> list[Any]:
    """What all processes have, in their order."""
    count = _processes()
    if count == 1:
        return [one]
    import torch

    out: list[Any] = [None] * count
    torch.distributed.all_gather_object(out, one)
    return out


def _processes() -> int:
    from torch import distributed

    ready = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if ready else 1


@contextlib.contextmanager
def _frozen(parameters: dict[str, Any]) -> Iterator[None]:
    """What is not trained is not watched."""
    for p in parameters.values():
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in parameters.values():
            p.requires_grad_(True)


@contextlib.contextmanager
def untouched(model: Any) -> Iterator[None]:
    """The model in eval mode, without dropout. Afterwards modes and gradients are as before."""
    modes = {module: module.training for module in model.modules()}
    grads = [(p, p.grad) for p in model.parameters()]
    for p, _ in grads:
        p.grad = None
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for p, grad in grads:
            p.grad = grad
