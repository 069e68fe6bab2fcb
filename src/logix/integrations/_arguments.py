"""`LogIXArguments`: what a patched trainer logs, how it names examples, and how it scores them.

LogIX's two forms say the same: `lora=True, ekfac=True` and `lora="random", hessian="ekfac"`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from .._influence import MODES
from .._rows import KINDS
from .._scheduler import HESSIAN, LORA
from ..store._ids import DUPLICATES

SAVE = ("none", *KINDS)
DATA_ID = ("detokenize", "hash", "index")
# Words of `type_filter`, each with the layers it stands for.
TYPES = {
    "lin": ("Linear", "Conv1D"),  # transformers' Conv1D is a linear layer
    "conv": ("Conv1d", "Conv2d", "Conv3d"),
    "emb": ("Embedding",),
    "norm": ("LayerNorm", "RMSNorm", "GroupNorm"),
}
LONG = {"linear": "lin", "embedding": "emb"}


@dataclasses.dataclass
class LogIXArguments:
    """What a patched trainer logs and how it scores. Both lines below say the same.

    >>> from logix.huggingface import LogIXArguments
    >>> LogIXArguments("news", lora=True, ekfac=True).hessian
    'ekfac'
    >>> LogIXArguments("news", lora="random", hessian="ekfac").lora
    'random'

    Arguments:

    - `project`, `config`: as in `logix.init`: the name of the run, its settings.
    - `lora`: `"none"`, `"random"` (or True), `"sparse"`, `"pca"`; `rank` is that of it.
    - `hessian`: `"none"`, `"diagonal"`, `"raw"`, `"kfac"`, `"ekfac"`. A boolean of that name says
      the same. If nothing is said, scores use what has been accumulated.
    - `save`: `"grad"`, which scores need; `"none"` for statistics alone; `"forward"`, `"backward"`.
    - `initialize_from_log`: score with what an earlier process has extracted.
    - `type_filter`, `name_filter`: the layers to log: types (`torch.nn.Linear`, or `"lin"`,
      `"conv"`, `"emb"`, `"norm"`), and words in their names.
    - `log_batch_size`, `log_num_workers`: of the pass over the data (transformers).
    - `input_key`, `label_key`, `attention_key`: the names of these in an example (transformers).
    - `data_id`: `"detokenize"` (the text), `"hash"` (of the tokens and labels), `"index"` (the
      place in the dataset), the name of a column, or a function of one example (transformers) or
      of a batch (Lightning, where `"detokenize"` means `"hash"`).
    - `duplicates`: what becomes of an example whose id was there: it is kept, unless `"error"` or
      `"keep_first"` is asked for.
    - `ignore_idx`: the label of places that do not count (transformers).
    - `influence_mode`, `influence_damping`, `influence_groups`, `top_k`: of the scores.
    - `resume`, `overwrite`: what becomes of a run that is there.
    - `model_key`: the attribute of a Lightning module that holds the model.
    """

    project: str
    config: Any = None
    lora: str | bool | None = None
    hessian: str | None = None
    save: str | bool | None = "grad"
    initialize_from_log: bool = False
    name_filter: str | Iterable[str] | None = None
    type_filter: Any = None
    log_batch_size: int = 16
    log_num_workers: int = 1
    input_key: str = "input_ids"
    label_key: str = "labels"
    attention_key: str = "attention_mask"
    data_id: str | Callable[[Any], Any] = "detokenize"
    ignore_idx: int = -100
    influence_damping: float | None = None
    influence_mode: str = "dot"
    influence_groups: Iterable[str] | None = None
    model_key: str = "model"
    rank: int | None = None
    top_k: int | None = None
    resume: bool = False
    overwrite: bool = False
    duplicates: str = "keep_all"
    # The other form of `hessian`.
    diagonal: dataclasses.InitVar[bool] = False
    raw: dataclasses.InitVar[bool] = False
    kfac: dataclasses.InitVar[bool] = False
    ekfac: dataclasses.InitVar[bool] = False

    def __post_init__(self, diagonal: bool, raw: bool, kfac: bool, ekfac: bool) -> None:
        flags = dict(diagonal=diagonal, raw=raw, kfac=kfac, ekfac=ekfac)
        self.lora = _word("lora", _default(self.lora, "random"), LORA)
        self.save = _word("save", _default(self.save, "grad"), SAVE)
        self.hessian = _hessian(self.hessian, [name for name, on in flags.items() if on])
        self.influence_mode = _word("influence_mode", self.influence_mode, MODES)
        self.duplicates = _word("duplicates", self.duplicates, DUPLICATES)
        self.name_filter = _words(self.name_filter)
        self.influence_groups = _words(self.influence_groups)
        self.type_filter = _types(self.type_filter)
        if self.log_batch_size < 1 or self.log_num_workers < 0:
            raise ValueError(
                f"log_batch_size={self.log_batch_size}, log_num_workers={self.log_num_workers}: "
                "at least 1 and 0 are needed"
            )
        if self.resume and self.overwrite:
            raise ValueError("resume=True keeps what is there, overwrite=True removes it: pass one")

    def layer_types(self) -> tuple[type, ...] | None:
        """The types that `type_filter` names, or None for all."""
        if self.type_filter is None:
            return None
        found: list[type] = []
        for one in self.type_filter:
            found += [one] if isinstance(one, type) else _named_types(one)
        return tuple(found)


def _default(value: Any, if_true: str) -> Any:
    if value is None or value is False:
        return "none"
    return if_true if value is True else value


def _word(name: str, value: Any, known: Iterable[str]) -> str:
    known = tuple(known)
    if value not in known:
        raise ValueError(f"{name}={value!r} is not known. Known are: {', '.join(known)}.")
    return value


def _hessian(said: str | None, flags: list[str]) -> str | None:
    if said is not None:
        _word("hessian", said, HESSIAN)
    if len({*flags, said} - {None}) > 1:
        given = [f"{name}=True" for name in flags] + ([f"hessian={said!r}"] if said else [])
        raise ValueError(f"{' and '.join(given)} contradict each other: pass one of them")
    return flags[0] if flags else said


def _words(several: str | Iterable[str] | None) -> list[str] | None:
    return [several] if isinstance(several, str) else None if several is None else list(several)


def _types(several: Any) -> list[Any] | None:
    if several is None:
        return None
    one = isinstance(several, str | type)
    found = []
    for kind in [several] if one else several:
        if isinstance(kind, str):
            kind = LONG.get(kind.lower(), kind.lower())
            if kind not in TYPES:
                known = ", ".join([*TYPES, *LONG])
                raise ValueError(f"type_filter: {kind!r} is not known. Known are: {known}.")
        elif not isinstance(kind, type):
            raise TypeError(f"type_filter takes types or words, and {kind!r} is neither")
        found.append(kind)
    return found


def _named_types(word: str) -> list[type]:
    import sys

    from torch import nn

    # transformers' layer exists only where transformers has been imported.
    other = sys.modules.get("transformers.pytorch_utils")
    homes = [getattr(nn, name, getattr(other, name, None)) for name in TYPES[word]]
    return [kind for kind in homes if kind is not None]
