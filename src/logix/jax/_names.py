"""The parameters of a pytree: their paths, which of them are watched, and how to put them back."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BOX = jax.tree_util.GetAttrKey("value")


@dataclasses.dataclass(frozen=True)
class Watched:
    """The arrays of a pytree, in its order; other leaves (functions, words) stay where they are."""

    tree: Any
    leaves: tuple[Any, ...]  # None where there is an array
    at: tuple[int, ...]  # the numbers of the leaves that are arrays
    paths: tuple[str, ...]
    names: tuple[str, ...]  # under which they are logged
    chosen: tuple[int, ...]  # of the arrays, those that are watched

    def arrays(self, params: Any) -> list[Any]:
        leaves, tree = jax.tree.flatten(params)
        if tree != self.tree:
            raise ValueError(
                f"these parameters have another structure than those that are watched: {tree} "
                f"instead of {self.tree}. Call watch(loss, params) with them."
            )
        return [leaves[i] for i in self.at]

    def filled(self, arrays: Sequence[Any]) -> Any:
        leaves = list(self.leaves)
        for i, x in zip(self.at, arrays, strict=True):
            leaves[i] = x
        return self.tree.unflatten(leaves)


def watched(params: Any, filter: Any = None, names: Any = None) -> Watched:
    """The parameters that a filter chooses; `names`: instead of their paths, a dict or function."""
    flat, tree = jax.tree_util.tree_flatten_with_path(params)
    at = [i for i, (_, x) in enumerate(flat) if is_array(x)]
    paths = paths_of([flat[i][0] for i in at])
    keep = chooser(filter)
    chosen = [k for k, path in enumerate(paths) if keep(path)]
    if not chosen:
        raise ValueError(
            f"no parameter is left to watch: filter={filter!r}. The paths are: {', '.join(paths)}"
        )
    kinds = {paths[k]: jnp.result_type(flat[at[k]][1]) for k in chosen}
    odd = {path: dtype for path, dtype in kinds.items() if not jnp.issubdtype(dtype, jnp.floating)}
    if odd:
        which = ", ".join(f"{path!r} is of {dtype}" for path, dtype in odd.items())
        raise TypeError(
            f"only real floating-point numbers have a gradient here, and the parameter {which}. "
            "Keep what is no parameter out of `params` (nnx.split(model, nnx.Param, ...)), or "
            f"leave it out: filter=lambda path: path not in {list(odd)!r}"
        )
    leaves = tuple(None if is_array(x) else x for _, x in flat)
    called = _called(paths, names)
    return Watched(tree, leaves, tuple(at), tuple(paths), called, tuple(chosen))


def _called(paths: Sequence[str], names: Any) -> tuple[str, ...]:
    found = list(paths)
    if names is not None:
        if isinstance(names, Mapping) and (unknown := set(names) - {*paths}):
            raise ValueError(f"names= has no parameter {sorted(unknown)}. The paths are: {paths}")
        found = [names.get(p, p) if isinstance(names, Mapping) else names(p) for p in paths]
    if len(set(found)) != len(found):
        twice = sorted({n for n in found if found.count(n) > 1})
        raise ValueError(f"names= gives several parameters the same name: {twice}")
    for name in found:
        stem = re.sub(r"(\[\d+\])+$", "", name)
        if stem != name and stem in found:
            raise ValueError(
                f"{name!r} may also be a layer of {stem!r}. Give it another name: "
                f"names={{{paths[found.index(name)]!r}: ...}}"
            )
    return tuple(found)


def renamed(names: Sequence[str]) -> dict[str, str]:
    """Layers by what they are called."""
    out = {name: filled_in(name) for name in names}
    if len(set(out.values())) != len(out):
        twice = [n for n, times in Counter(out.values()).items() if times > 1]
        raise ValueError(f"names= gives several layers the same name: {sorted(twice)}")
    return out


def filled_in(name: str) -> str:
    """`h.{}.fc[3]` is `h.3.fc`: a layer of those that are stacked in a parameter."""
    if "{}" not in name:
        return name
    stem = re.sub(r"(\[\d+\])*$", "", name)
    index = name[len(stem) :]
    numbers = re.findall(r"\d+", index)
    if stem.count("{}") != len(numbers):
        raise ValueError(
            f"names={stem!r} has {stem.count('{}')} places for the numbers of stacked layers, and "
            f"this parameter has {len(numbers)}: {index or 'it is one layer'}"
        )
    return stem.format(*numbers)


def is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def paths_of(paths: Sequence[Any]) -> list[str]:
    """`layers/0/kernel`, of arrays.

    Flax puts an array into a box: `kernel.value`. Where nothing else is in it, the box is the name.
    """
    beside = Counter(path[:n] for path in paths for n in range(len(path)))
    boxed = lambda path: path[-1:] == (BOX,) and len(path) > 1 and beside[path[:-1]] == 1
    return [path_of(path[:-1] if boxed(path) else path) for path in paths]


def path_of(path: Any) -> str:
    """`layers/0/kernel`."""
    parts = [jax.tree_util.keystr((key,), simple=True) for key in path]
    return "/".join(parts)


def chooser(filter: Any) -> Callable[[str], bool]:
    """A filter is None for all, a function of the path, or patterns like `*/kernel`."""
    if filter is None:
        return lambda path: True
    if callable(filter):
        return lambda path: bool(filter(path))
    patterns = [filter] if isinstance(filter, str) else list(filter)
    if not all(isinstance(p, str) for p in patterns):
        raise TypeError(f"filter={filter!r}: a function of a path, or patterns like '*/kernel'")
    return lambda path: any(fnmatchcase(path, p) for p in patterns)
