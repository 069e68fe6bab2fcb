"""Lightning modules and trainers that extract logs instead of training: `patch`.

    LogIXModule, LogIXTrainer = patch(Module, L.Trainer, logix_args=LogIXArguments("news", …))
    trainer.extract_log(module, train_dataloader); trainer.influence(module, test_dataloader)

Each batch goes through the module's own `training_step`, in Lightning's loop for predictions: on
its device, in its precision, in eval mode, without optimizers, loggers or checkpoints. A row is the
gradient of one example's own loss: torch's losses are summed instead of averaged, and on the first
batch it is checked that the losses of examples add up.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from ._array import to_numpy
from ._result import Influence
from ._run import LogIX
from .integrations._arguments import LogIXArguments as LogIXArguments
from .integrations._extraction import Extraction, LogReport, Pass, Step, untouched
from .integrations._losses import SummedLosses, check_sum
from .store._ids import content_ids


def patch(
    module_class: type,
    trainer_class: type,
    logix_args: LogIXArguments,
    data_id_extractor: Callable[[Any], Any] | None = None,
    mask_extractor: Callable[[Any], Any] | None = None,
) -> tuple[Any, Any]:
    """Classes of a module and a trainer with `extract_log`, `influence` and `self_influence`.

    >>> import lightning as L
    >>> from logix.lightning import LogIXArguments, patch
    >>> args = LogIXArguments("news", lora="random", hessian="ekfac")
    >>> LogIXModule, LogIXTrainer = patch(L.LightningModule, L.Trainer, args)
    >>> issubclass(LogIXModule, L.LightningModule), issubclass(LogIXTrainer, L.Trainer)
    (True, True)

    Arguments:

    - `module_class`: its `training_step` gives the loss; `logix_args.model_key` names the attribute
      that holds the model to log.
    - `trainer_class`: `lightning.Trainer` or a class derived from it.
    - `logix_args`: what to log and how to score.
    - `data_id_extractor`: a function of a batch, for the ids of its examples. Without it (and
      without a function as `data_id`) they are hashes of the batch's content; padding is content.
    - `mask_extractor`: a function of a batch, for the mask (examples, places) of what is real.

    Returns: the two classes. The trainer's methods take a module of the first one.
    """
    if callable(logix_args.data_id):
        data_id_extractor = data_id_extractor or logix_args.data_id
    own = dict(
        _logix_args=logix_args,
        _logix_ids=staticmethod(data_id_extractor or _content),
        _logix_mask=staticmethod(mask_extractor or (lambda batch: None)),
        __module__=__name__,
    )
    module = type(f"LogIX{module_class.__name__}", (_LogIXModule, module_class), dict(own))
    trainer = type(f"LogIX{trainer_class.__name__}", (_LogIXTrainer, trainer_class), dict(own))
    return module, trainer


class _LogIXModule:
    """What is added to a module: while a step is set, batches are logged instead of predicted."""

    _logix_step: Step | None = None
    _logix_checked = False
    _logix_ids: Callable[[Any], Any]
    _logix_mask: Callable[[Any], Any]

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._logix_step is None:
            return super().predict_step(*args, **kwargs)  # type: ignore[misc]
        batch, number = (*args, *kwargs.values())[:2]
        ids = self._logix_ids(batch)
        ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        with torch.enable_grad():
            if not self._logix_checked and len(ids) > 1:
                check_sum(lambda some: self._logix_loss(some, number), batch, len(ids))
                self._logix_checked = True
            backward = lambda: self._logix_loss(batch, number).backward()
            self._logix_step(ids, self._logix_mask(batch), backward)
        return ids

    def _logix_loss(self, batch: Any, number: int) -> Tensor:
        me: Any = self
        takes = inspect.signature(me.training_step).parameters
        with SummedLosses():
            out = (
                me.training_step(batch, number) if "batch_idx" in takes else me.training_step(batch)
            )
        loss = out.get("loss") if isinstance(out, dict) else out
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"training_step of batch {number} returned {type(out).__name__}: its rows would be "
                "missing. It must return a loss, or a dict with one under 'loss'."
            )
        return loss

    def log(self, *args: Any, **kwargs: Any) -> None:
        if self._logix_step is None:  # there is nothing to log metrics of a training to
            super().log(*args, **kwargs)  # type: ignore[misc]

    def log_dict(self, *args: Any, **kwargs: Any) -> None:
        if self._logix_step is None:
            super().log_dict(*args, **kwargs)  # type: ignore[misc]


class _LogIXTrainer:
    """What is added to a trainer."""

    _logix_args: LogIXArguments
    _logix_extraction: Extraction | None = None

    @property
    def logix(self) -> LogIX:
        """The run, once there is one."""
        if self._logix.run is None:
            raise RuntimeError("there is no run yet. Call trainer.extract_log(module, …) first.")
        return self._logix.run

    @property
    def _logix(self) -> Extraction:
        if self._logix_extraction is None:
            self._logix_extraction = Extraction(self._logix_args)
        return self._logix_extraction

    def extract_log(
        self, module: Any, train_dataloader: Any = None, datamodule: Any = None
    ) -> LogReport:
        """Log the training data: rows and the statistics that the arguments ask for."""
        loader = _train_loader(module, train_dataloader, datamodule)
        show: Any = self.is_global_zero  # type: ignore[attr-defined]
        return self._logix.extract(
            self._logix_model(module), self._logix_pass(module, loader), show
        )

    def influence(self, module: Any, dataloader: Any, top_k: int | None = None) -> Influence:
        """Scores of the dataloader's examples with all saved rows."""
        go = self._logix_pass(module, dataloader)
        top_k = self._logix_args.top_k if top_k is None else top_k
        return self._logix.influence(self._logix_model(module), go, top_k)

    def self_influence(self, module: Any, dataloader: Any = None) -> Influence:
        """The score of each example with itself: of all saved rows, or of a dataloader's."""
        go = None if dataloader is None else self._logix_pass(module, dataloader)
        return self._logix.self_influence(self._logix_model(module), go)

    def _logix_model(self, module: Any) -> Any:
        if not isinstance(module, _LogIXModule):
            raise TypeError(
                f"{type(module).__name__} is not the patched class. Make the module of the first "
                "class that patch returns: LogIXModule, LogIXTrainer = patch(…); LogIXModule(…)"
            )
        if not module.automatic_optimization:  # type: ignore[attr-defined]
            raise NotImplementedError(
                f"{type(module).__name__} optimizes by itself (automatic_optimization=False), so "
                "its training_step gives no loss to log. Use logix in your own loop."
            )
        key = self._logix_args.model_key
        try:
            return operator.attrgetter(key)(module) if key else module
        except AttributeError:
            names = ", ".join(repr(n) for n, _ in module.named_children())  # type: ignore[attr-defined]
            raise AttributeError(
                f"{type(module).__name__} has no attribute {key!r} with the model. Pass "
                f"LogIXArguments(model_key=…), one of {names}, or '' for the module itself."
            ) from None

    def _logix_pass(self, module: Any, dataloader: Any) -> Pass:
        me: Any = self

        def go(step: Step) -> None:
            with untouched(module), _quiet(me):
                module._logix_step = step
                try:
                    me.predict(module, _in_order(dataloader), return_predictions=False)
                finally:
                    module._logix_step = None

        return go


@contextlib.contextmanager
def _quiet(trainer: Any) -> Iterator[None]:
    """No files of loggers; and gradients can be had inside the loop."""
    loop, loggers = trainer.predict_loop, trainer.loggers
    before, trainer.loggers, loop.inference_mode = loop.inference_mode, [], False
    try:
        yield
    finally:
        trainer.loggers, loop.inference_mode = loggers, before


def _train_loader(module: Any, loader: Any, data: Any) -> Any:
    if loader is not None:
        return loader
    if data is not None:
        data.prepare_data()
        data.setup("fit")
        return data.train_dataloader()
    return module.train_dataloader()


def _in_order(loader: Any) -> Any:
    """A shuffled loader, not shuffled: several processes must divide one order among them."""
    if type(loader) is not DataLoader or not isinstance(loader.sampler, RandomSampler):
        return loader
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )


def _content(batch: Any) -> list[str]:
    """Hashes of the examples of a batch, wherever its tensors are."""
    if isinstance(batch, dict):
        return content_ids({key: _host(value) for key, value in batch.items()})
    if isinstance(batch, list | tuple):
        return content_ids([_host(value) for value in batch])
    return content_ids(_host(batch))


def _host(value: Any) -> Any:
    return to_numpy(value) if isinstance(value, Tensor) else value
