"""Hugging Face trainers that extract logs instead of training: `patch_trainer`, `LogIXArguments`.

    LogIXTrainer = patch_trainer(Trainer)       # or Seq2SeqTrainer, or one of your own
    trainer = LogIXTrainer(logix_args=LogIXArguments("news", lora=True, ekfac=True), model=model, …)
    trainer.extract_log(); trainer.influence(); trainer.self_influence()

A row is the gradient of one example's own loss, the sum over its tokens that count. The loss is the
trainer's own `compute_loss` (an override is used too), with torch's losses summed instead of
averaged; on the first batch it is checked that the losses of examples add up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ._progress import progress
from ._result import Influence
from ._run import LogIX
from .integrations._arguments import LogIXArguments as LogIXArguments
from .integrations._examples import Collate, first_of, loader_of
from .integrations._extraction import Extraction, LogReport, Step, untouched
from .integrations._losses import SummedLosses, check_sum, summed_smoother
from .integrations._positions import called_once


def patch_trainer(trainer_class: type) -> Any:
    """A trainer class with `extract_log`, `influence` and `self_influence`.

    >>> from transformers import Trainer
    >>> from logix.huggingface import LogIXArguments, patch_trainer
    >>> LogIXTrainer = patch_trainer(Trainer)
    >>> LogIXTrainer.__name__, issubclass(LogIXTrainer, Trainer)
    ('LogIXTrainer', True)

    Arguments:

    - `trainer_class`: `transformers.Trainer` or a class derived from it. Its collator, its device,
      its precision and its `compute_loss` are used; its optimizer is not.

    Returns: a class that takes `logix_args=LogIXArguments(…)` beside the arguments of its base.
    """
    name = f"LogIX{trainer_class.__name__}"
    return type(name, (_LogIXTrainer, trainer_class), {"__module__": __name__})


class _LogIXTrainer:
    """What is added to a trainer class. Nothing of it runs before it is called."""

    def __init__(self, *args: Any, logix_args: LogIXArguments | None = None, **kwargs: Any):
        if args and isinstance(args[0], LogIXArguments):
            logix_args, *rest = args
            args = tuple(rest)
        if not isinstance(logix_args, LogIXArguments):
            raise TypeError(
                f"{type(self).__name__} needs logix_args=LogIXArguments(project, …), "
                f"and got {type(logix_args).__name__}"
            )
        super().__init__(*args, **kwargs)
        self.logix_args = logix_args
        self._logix = Extraction(logix_args)
        self._logix_checked = False

    @property
    def logix(self) -> LogIX:
        """The run, once there is one."""
        if self._logix.run is None:
            raise RuntimeError("there is no run yet. Call trainer.extract_log() first.")
        return self._logix.run

    def extract_log(self) -> LogReport:
        """Log the train dataset: its rows and the statistics that the arguments ask for."""
        train, show = self._logix_train(), self.is_world_process_zero()  # type: ignore[attr-defined]
        go = lambda step: self._logix_pass(train, step, "extract_log")
        return self._logix.extract(self._logix_model(train), go, show)

    def influence(self, dataset: Any = None, top_k: int | None = None) -> Influence:
        """Scores of queries with all saved rows.

        The queries are `dataset`; else the eval dataset; else the train dataset.
        """
        me: Any = self
        queries = dataset if dataset is not None else me.eval_dataset
        if isinstance(queries, dict):
            names = ", ".join(map(repr, queries))
            raise TypeError(
                f"eval_dataset has several datasets ({names}). Name one: "
                f"influence(trainer.eval_dataset[{next(iter(queries))!r}])"
            )
        queries = self._logix_train() if queries is None else queries
        go = lambda step: self._logix_pass(queries, step, "influence")
        top_k = self.logix_args.top_k if top_k is None else top_k
        return self._logix.influence(self._logix_model(queries), go, top_k)

    def self_influence(self, dataset: Any = None) -> Influence:
        """The score of each saved example with itself, or of those of a dataset."""
        if dataset is None and self.logix_args.save == "none":
            dataset = self._logix_train()
        go = None
        if dataset is not None:
            go = lambda step: self._logix_pass(dataset, step, "self_influence")
        return self._logix.self_influence(self._logix_model(dataset), go)

    # --- one pass over a dataset ---------------------------------------------------------------

    def _logix_train(self) -> Any:
        me: Any = self
        if me.train_dataset is None:
            raise ValueError(f"pass train_dataset=… to {type(self).__name__}")
        return me.train_dataset

    def _logix_model(self, dataset: Any) -> Any:
        """The model, after a look at its first examples."""
        me: Any = self
        if me.is_deepspeed_enabled or me.is_fsdp_enabled:
            raise NotImplementedError(
                "a model that DeepSpeed or FSDP has divided can't be logged through a Trainer. "
                "Use logix itself around your own loop: with run(data_id=…): loss.backward()"
            )
        if dataset is not None and not self._logix_checked:
            self._logix_check(dataset)
            self._logix_checked = True
        return me.model

    def _logix_check(self, dataset: Any) -> None:
        """Losses of examples must add up, and each must have gradients of its own."""
        me: Any = self
        collate = self._logix_collate()
        examples = first_of(dataset, min(self.logix_args.log_batch_size, 4))
        if not examples:
            return
        batch = lambda some: self._logix_inputs(collate(some)[1])
        with untouched(me.model), _summing(me):
            check_sum(self._logix_loss, batch(examples), len(examples))
            two, one = (batch(examples[:1] * n) for n in (2, 1))  # of one length
            loss = lambda inputs: lambda: self._logix_loss(inputs)
            found = called_once(me.model, loss(two), loss(one))
        if found:
            self._logix.left_out, self._logix.run = found, None  # which watched them
        if found and me.is_world_process_zero():
            print(f"logix: left out, as all examples share one gradient: {', '.join(found)}")

    def _logix_inputs(self, batch: Any) -> dict[str, Any]:
        me: Any = self
        return dict(self._logix_counted(me._prepare_inputs(batch)))

    def _logix_pass(self, dataset: Any, step: Step, title: str) -> None:
        me: Any = self
        args, collate = me.args, self._logix_collate()
        loader = loader_of(
            dataset,
            collate,
            self.logix_args.log_batch_size,
            self.logix_args.log_num_workers,
            pin=args.dataloader_pin_memory and torch.cuda.is_available(),
            process=args.process_index,
            processes=args.world_size,
        )
        total = len(loader) if hasattr(dataset, "__len__") else None
        silent = args.disable_tqdm or not me.is_local_process_zero()
        with untouched(me.model), _checkpointing(me.model, args), _summing(me):
            for ids, batch in progress(loader, total, title, show=False if silent else None):
                inputs = self._logix_inputs(batch)
                backward = lambda inputs=inputs: self._logix_loss(inputs).backward()
                step(ids, self._logix_mask(inputs), backward)

    def _logix_collate(self) -> Collate:
        me: Any = self
        tokenizer = getattr(me, "processing_class", None)
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
        inner = me._get_collator_with_removed_columns(me.data_collator, description="logix")
        return Collate(self.logix_args, inner, tokenizer)

    def _logix_loss(self, inputs: dict[str, Any]) -> Tensor:
        """The sum of the losses of the examples, each the sum over its tokens.

        With one item in the batch, what divides by the number of items gives the sum; what takes
        the mean nevertheless is caught by `SummedLosses`.
        """
        me: Any = self
        one = torch.ones((), device=me.args.device)
        with SummedLosses(), me.compute_loss_context_manager(), me.accelerator.autocast():
            return me.compute_loss(me.model, dict(inputs), num_items_in_batch=one)

    def _logix_counted(self, inputs: Any) -> Any:
        """Labels that do not count, as transformers' own losses know them."""
        key, ignored = self.logix_args.label_key, self.logix_args.ignore_idx
        if ignored == -100 or key not in inputs:
            return inputs
        labels = inputs[key]
        return {**inputs, key: labels.masked_fill(labels == ignored, -100)}

    def _logix_mask(self, inputs: dict[str, Any]) -> Tensor | None:
        """The places of a batch that are real.

        None if encoder and decoder have places of their own: gradients need no mask, since nothing
        comes back to padding; only covariances then count its activations.
        """
        me: Any = self
        mask = inputs.get(self.logix_args.attention_key)
        divided = getattr(getattr(me.model, "config", None), "is_encoder_decoder", False)
        if divided or not isinstance(mask, Tensor) or mask.ndim != 2:
            return None
        mask = mask.bool()
        labels = inputs.get(self.logix_args.label_key)
        if isinstance(labels, Tensor) and labels.shape == mask.shape:
            counts = labels != -100  # a place that has a loss is real, or predicts one that has
            mask = mask | counts
            mask[:, :-1] |= counts[:, 1:]
        return mask


@contextlib.contextmanager
def _summing(trainer: Any) -> Iterator[None]:
    """Losses are not multiplied by the number of processes, and smoothed labels are summed too."""
    args, smoother = trainer.args, trainer.label_smoother
    across = args.average_tokens_across_devices
    args.average_tokens_across_devices = False
    if smoother is not None:
        trainer.label_smoother = summed_smoother(smoother.epsilon, smoother.ignore_index)
    try:
        yield
    finally:
        args.average_tokens_across_devices, trainer.label_smoother = across, smoother


@contextlib.contextmanager
def _checkpointing(model: Any, args: Any) -> Iterator[None]:
    """Gradient checkpointing in eval mode, if the arguments ask for it.

    transformers' layers do it only in training mode. So they are in that mode when they are called,
    and in eval mode (no dropout) while they compute.
    """
    if not args.gradient_checkpointing:
        yield
        return
    from transformers.modeling_layers import GradientCheckpointingLayer

    before = getattr(model, "is_gradient_checkpointing", False)
    if not before:
        # The other kind needs weights that have gradients, which are off here.
        how = {**(args.gradient_checkpointing_kwargs or {}), "use_reentrant": False}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)

    def set_mode(mode: bool) -> Any:
        return lambda layer, *_: setattr(layer, "training", mode)

    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    handles = [m.register_forward_pre_hook(set_mode(False)) for m in layers]
    handles += [m.register_forward_hook(set_mode(True), always_call=True) for m in layers]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        if not before:
            model.gradient_checkpointing_disable()
