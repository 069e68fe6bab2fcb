"""A table: keys that are logged together, as columns of Arrow.

    run   int32         which of the folder's runs
    time  timestamp     when it was written; grows with every write, so it also tells the order
    a column for each step name, then one for each key (for each leaf, if its value is a pytree)

How columns, keys, dtypes and shapes belong together is kept as JSON in the schema's metadata.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pyarrow as pa

from .._entry import Entry, Layout
from .._event import structure
from .._save import decode, encode
from ._columns import column_type, from_column, to_column
from ._frame import BLANK

ROWS = (pa.field("run", pa.int32()), pa.field("time", pa.timestamp("ns")))
_META, _CHECK = "lox", "check"


@dataclasses.dataclass(frozen=True)
class Column:
    """One array of a table: its name there, the key or step it is of, dtype and shape of a row."""

    name: str
    of: str
    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Table:
    """The columns of a table. `trees` has for each key how its value is made of columns."""

    steps: tuple[Column, ...]
    values: tuple[Column, ...]
    trees: tuple[tuple[str, str], ...]

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key for key, _ in self.trees)

    def only(self, keys: Sequence[str]) -> Table:
        """The same with fewer keys."""
        values = tuple(c for c in self.values if c.of in keys)
        return Table(self.steps, values, tuple(t for t in self.trees if t[0] in keys))

    def columns_of(self, key: str) -> list[Column]:
        return [c for c in self.values if c.of == key]

    def schema(self) -> pa.Schema:
        fields = [
            pa.field(c.name, column_type(jax.numpy.dtype(c.dtype), c.shape))
            for c in (*self.steps, *self.values)
        ]
        meta = {_META: json.dumps(dataclasses.asdict(self)), _CHECK: BLANK}
        return pa.schema([*ROWS, *fields], metadata=meta)

    @classmethod
    def of_schema(cls, schema: pa.Schema) -> Table:
        content = json.loads(schema.metadata[_META.encode()])
        column = lambda c: Column(c["name"], c["of"], c["dtype"], tuple(c["shape"]))
        steps, values = (tuple(map(column, content[n])) for n in ("steps", "values"))
        return cls(steps, values, tuple((k, t) for k, t in content["trees"]))

    def entry(self, key: str, data: pa.Table) -> Entry:
        """One key of rows that were read: a row of events, with its steps."""
        pick = lambda c: from_column(data.column(c.name), c.dtype, c.shape)
        leaves = [pick(c) for c in self.columns_of(key)]
        value = decode(json.loads(dict(self.trees)[key]), leaves)
        steps = {c.of: pick(c) for c in self.steps}
        ndims = tuple(x.ndim - 1 for x in jax.tree.leaves(value))
        return Entry(value, steps, Layout(True, ndims, tuple(len(c.shape) for c in self.steps)))


@dataclasses.dataclass(frozen=True)
class Flat:
    """Some keys with the same rows, as arrays: what is written to one table at a time."""

    keys: tuple[tuple[str, str, tuple[np.ndarray, ...]], ...]  # key, tree, leaves
    steps: tuple[tuple[str, np.ndarray], ...]

    def signature(self) -> Any:
        form = lambda x: (x.dtype, x.shape[2:])
        keys = tuple((k, t, *map(form, leaves)) for k, t, leaves in self.keys)
        return keys, tuple((n, *form(s)) for n, s in self.steps)

    def table(self) -> Table:
        taken = {f.name for f in ROWS}

        def column(name: str, of: str, x: np.ndarray) -> Column:
            while name in taken:
                name += "_"
            taken.add(name)
            return Column(name, of, x.dtype.name, x.shape[2:])

        steps = tuple(column(n, n, s) for n, s in self.steps)
        values = []
        for key, _, leaves in self.keys:
            names = [key] if len(leaves) == 1 else [f"{key}/{i}" for i in range(len(leaves))]
            values += [column(n, key, x) for n, x in zip(names, leaves)]
        return Table(steps, tuple(values), tuple((k, t) for k, t, _ in self.keys))

    def batch(
        self, schema: pa.Schema, lanes: np.ndarray, time: int, keep: np.ndarray | None
    ) -> pa.RecordBatch:
        """The rows as a batch. `keep` tells which of the (runs, events) happened."""
        arrays = [s for _, s in self.steps]
        arrays += [x for _, _, leaves in self.keys for x in leaves]
        run = np.repeat(lanes, arrays[0].shape[1])
        rows = [x.reshape(len(run), *x.shape[2:]) for x in arrays]
        if keep is not None:
            keep = np.flatnonzero(keep.reshape(-1))
            run, rows = run[keep], [x[keep] for x in rows]
        times = pa.array(np.full(len(run), time, np.int64)).view(pa.timestamp("ns"))
        columns = [pa.array(run), times, *(to_column(x) for x in rows)]
        return pa.RecordBatch.from_arrays(columns, schema=schema)


def flat_tables(entries: list[tuple[str, Entry]]) -> list[tuple[Flat, np.ndarray | None]]:
    """The keys of a message in groups that have the same rows: the same steps and the same mask."""
    groups: list[tuple[Any, list[Any]]] = []
    for key, entry in entries:
        value, tree = entry.value, "0"
        if isinstance(value, np.ndarray):
            leaves = [value]
        else:
            leaves = []
            tree = json.dumps(encode(key, _plain_tree(value), _putter(leaves)))
        if not leaves:
            continue  # an empty pytree holds nothing
        rows = (leaves[0].shape[:2], tuple(entry.steps.items()), entry.mask)
        for known, members in groups:
            if _same_rows(known, rows):
                members.append((key, tree, tuple(leaves)))
                break
        else:
            groups.append((rows, [(key, tree, tuple(leaves))]))
    return [(Flat(tuple(members), steps), mask) for (_, steps, mask), members in groups]


def _putter(leaves: list[np.ndarray]) -> Any:
    def put(x: np.ndarray) -> int:
        leaves.append(x)
        return len(leaves) - 1

    return put


def _same_rows(a: Any, b: Any) -> bool:
    (shape_a, steps_a, mask_a), (shape_b, steps_b, mask_b) = a, b
    if shape_a != shape_b or len(steps_a) != len(steps_b) or (mask_a is None) != (mask_b is None):
        return False
    same = all(m == n and _equal(x, y) for (m, x), (n, y) in zip(steps_a, steps_b))
    return same and (mask_a is None or _equal(mask_a, mask_b))


def _equal(x: np.ndarray, y: np.ndarray) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and bool((x == y).all())


def _plain_tree(tree: Any) -> Any:
    """Containers that a file can't name become dicts from path to leaf."""
    plain = (dict, list, tuple)
    is_other = lambda x: type(x) not in plain and structure(x) != structure(0) and x is not None

    def named(x: Any) -> Any:
        if not is_other(x):
            return x
        paths = jax.tree_util.tree_flatten_with_path(x)[0]
        return {jax.tree_util.keystr(p, simple=True, separator="/"): v for p, v in paths}

    return jax.tree.map(named, tree, is_leaf=is_other)
