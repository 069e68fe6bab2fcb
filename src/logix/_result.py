"""What an analysis returns: scores with the ids they belong to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Influence(Mapping[str, Any]):
    """Scores with their ids, as attributes or `result["influence"]`.

    `influence` is (queries, train), (queries, k) with `top_k`, best first, or (rows,) for
    self-influence; `tgt_ids` is a list, one list per query with `top_k`, or None. With groups,
    `influence` (and with `top_k` also `tgt_ids`) is a dict: "total" and each group.
    """

    src_ids: list[Any]
    influence: Any
    tgt_ids: Any = None

    def __getitem__(self, key: str) -> Any:
        if key not in list(iter(self)):
            raise KeyError(f"{key!r} is not there; there are {', '.join(self)}")
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        fields = [f.name for f in dataclasses.fields(self)]
        return iter(f for f in fields if f != "tgt_ids" or self.tgt_ids is not None)

    def __len__(self) -> int:
        return sum(1 for _ in iter(self))

    def to_pandas(self) -> Any:
        """One line per score: src_id, tgt_id, rank (with `top_k`), group (with groups)."""
        import pandas

        if not isinstance(self.influence, dict):
            return pandas.DataFrame(self._columns(self.influence, self.tgt_ids))
        frames = []
        for group, x in self.influence.items():
            ids = self.tgt_ids[group] if isinstance(self.tgt_ids, dict) else self.tgt_ids
            frames.append(pandas.DataFrame({"group": group, **self._columns(x, ids)}))
        return pandas.concat(frames, ignore_index=True)

    def _columns(self, influence: np.ndarray, ids: Any) -> dict[str, Any]:
        if ids is None:
            return {"src_id": self.src_ids, "influence": influence}
        each = influence.shape[1]
        columns: dict[str, Any] = {"src_id": [i for i in self.src_ids for _ in range(each)]}
        if ids and isinstance(ids[0], list):
            columns["tgt_id"] = [i for row in ids for i in row]
            columns["rank"] = np.tile(np.arange(each), len(influence))
        else:
            columns["tgt_id"] = list(ids) * len(influence)
        return columns | {"influence": influence.reshape(-1)}
