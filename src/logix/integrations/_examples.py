"""Examples of a dataset in order, in batches, with their ids. Each process takes a part of its own.

Ids are made of the examples as the dataset gives them, before they are padded or masked at random:
the same example has the same id in any batch, pass and process. No example comes twice, so each
counts once in the statistics.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, IterableDataset

from .._array import to_numpy
from ..store._ids import content_ids
from ._arguments import DATA_ID, LogIXArguments


class Collate:
    """Makes `(ids, batch)` of examples with their places in the dataset."""

    def __init__(self, args: LogIXArguments, inner: Callable[[list[Any]], Any], tokenizer: Any):
        self.inner, self.tokenizer, self.data_id = inner, tokenizer, args.data_id
        self.input_key = args.input_key
        self.keys = [args.input_key, args.label_key, "label", "label_ids"]
        if args.data_id == "detokenize" and not hasattr(tokenizer, "decode"):
            print(
                "logix: ids are hashes: data_id='detokenize' needs a tokenizer. Pass "
                "processing_class=tokenizer to the trainer for texts, or data_id='hash'."
            )
            self.data_id = "hash"

    def __call__(self, numbered: Sequence[tuple[int, Any]]) -> tuple[list[Any], Any]:
        ids = [self._id(place, example) for place, example in numbered]
        return ids, self.inner([example for _, example in numbered])

    def _id(self, place: int, example: Any) -> Any:
        if callable(self.data_id):
            return self.data_id(example)
        if self.data_id == "index":
            return place
        if self.data_id == "hash":
            return self._hash(place, example)
        fields = example if isinstance(example, Mapping) else {}
        if self.data_id == "detokenize":
            if self.input_key not in fields:
                raise KeyError(
                    f"example {place} has no {self.input_key!r} to detokenize; it has "
                    f"{_names(example)}. Pass LogIXArguments(input_key=…), or data_id='hash'."
                )
            return self.tokenizer.decode(fields[self.input_key], skip_special_tokens=True)
        if self.data_id not in fields:
            raise KeyError(
                f"data_id={self.data_id!r} is none of {', '.join(DATA_ID)}, and no column: example "
                f"{place} has {_names(example)}"
            )
        value = fields[self.data_id]
        return value.item() if hasattr(value, "item") else value

    def _hash(self, place: int, example: Any) -> str:
        """Of tokens and labels, where there are tokens; else of all that the example has."""
        if isinstance(example, Mapping) and self.input_key in example:
            example = {key: example[key] for key in self.keys if key in example}
        try:
            return content_ids(_with_axis(example))[0]
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"example {place} can't be hashed ({error}). Pass LogIXArguments(data_id='index'), "
                "the name of a column, or a function of an example."
            ) from None


def _names(example: Any) -> str:
    return ", ".join(map(repr, example)) if isinstance(example, Mapping) else type(example).__name__


def _with_axis(example: Any) -> Any:
    if isinstance(example, Mapping):
        return {k: _with_axis(v) for k, v in example.items() if v is not None}
    if isinstance(example, tuple):
        return tuple(_with_axis(v) for v in example)
    return to_numpy(example)[None]


def first_of(dataset: Any, size: int) -> list[tuple[int, Any]]:
    """Some examples, with their places."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return list(itertools.islice(enumerate(dataset), size))
    return [(place, dataset[place]) for place in range(min(size, len(dataset)))]


def loader_of(
    dataset: Any,
    collate: Collate,
    size: int,
    workers: int,
    pin: bool,
    process: int,
    processes: int,
) -> DataLoader:
    """This process's batches: a stretch of a dataset that has a length, else every n-th example."""
    named: dict[str, Any] = dict(collate_fn=collate, pin_memory=pin)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        stream = _Stream(dataset, process, processes)
        # Two workers would each go over all of it.
        return DataLoader(stream, batch_size=size, num_workers=min(workers, 1), **named)
    own = np.array_split(np.arange(len(dataset)), processes)[process].tolist()
    batches = [own[at : at + size] for at in range(0, len(own), size)]
    return DataLoader(_Numbered(dataset), batch_sampler=batches, num_workers=workers, **named)


class _Numbered(Dataset):
    """Examples with their places."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, place: int) -> tuple[int, Any]:
        return place, self.dataset[place]


class _Stream(IterableDataset):
    """Examples with their places, those of one process."""

    def __init__(self, dataset: Any, process: int, processes: int):
        self.dataset, self.process, self.processes = dataset, process, processes

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        for place, example in enumerate(self.dataset):
            if place % self.processes == self.process:
                yield place, example
