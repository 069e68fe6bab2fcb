"""How runs are named, and what a backend is told of a run that begins."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import numpy as np

from .._event import structure
from ._state import BATCHED, SHARED, THREEFRY

EXISTS = ("error", "overwrite", "resume")


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """What is known of a run when it begins."""

    name: str
    group: str  # the same for all runs of one `init`: the experiment they belong to
    config: dict[str, Any]
    lane: int
    from_key: bool  # is it named by its key, or by the user

    def numbered(self, n: int) -> RunInfo:
        """The n-th run of this name."""
        return dataclasses.replace(self, name=f"{self.name}~{n}")


class RunExists(FileExistsError):
    """A run of this name is there already, and the logger was not told what to do with it.

    >>> import jax, lox, tempfile
    >>> path = tempfile.mkdtemp()
    >>> with lox.loggers.SaveLogger(path) as logger:
    ...     state = logger.init(jax.random.key(0), name="first")
    >>> try:
    ...     lox.loggers.SaveLogger(path).init(jax.random.key(0), name="first")
    ... except lox.loggers.RunExists as error:
    ...     print("exists='resume'" in str(error))
    True
    """


RunExists.__module__ = "lox.loggers"  # as users know it


def run_exists(logger: str, name: str, where: str, why: str = "") -> RunExists:
    if why:
        return RunExists(f"run {name!r} exists in {where}, and {why}.")
    return RunExists(
        f"run {name!r} exists in {where}. Choose what happens to it: {logger}(…, exists="
        f"'resume') appends to it, exists='overwrite' replaces it; or give the new run another "
        f"name: logger.init(key, name='…')."
    )


def name_runs(
    template: str | None,
    kind: str,
    ids: np.ndarray,
    configs: list[dict[str, Any]],
    group: str | None = None,
) -> list[RunInfo]:
    """A run for each row of `ids` (words of the key, lane, flags: see `_state.identity`).

    The name is that of the key, or the user's template. Lanes that would have the same name get
    their index behind it.
    """
    names = []
    for row, config in zip(ids, configs, strict=True):
        lane, flags = (int(x) for x in row[-2:])
        key = key_name(row[:-2], kind)
        if template is None:
            names.append(f"{key}-{lane}" if flags & SHARED else key)
        else:
            name = _fill(template, key, lane, config)
            fixed = name == template.replace("{{", "{").replace("}}", "}")
            names.append(f"{name}-{lane}" if fixed and flags & BATCHED else name)
    if len(set(names)) < len(names):
        names = [f"{name}-{int(row[-2])}" for name, row in zip(names, ids)]
    # The experiment: the template without what differs.
    group = group or re.sub(r"[-_/= ]*(?<!\{)\{[^{}]*\}(?!\})", "", template or "") or names[0]
    rows = zip(names, configs, ids)
    from_key = template is None
    return [RunInfo(n, group, config, int(row[-2]), from_key) for n, config, row in rows]


def key_name(words: np.ndarray, kind: str) -> str:
    """Words in hexadecimal of fixed width: no two keys have the same name."""
    text = "-".join(f"{int(w):08x}" for w in words)
    return text if kind == THREEFRY else f"{kind}-{text}"


def _fill(template: str, key: str, lane: int, config: dict[str, Any]) -> str:
    known = {**config, "key": key, "lane": lane}
    may = ", ".join("{" + k + "}" for k in known)
    try:
        return template.format(**known)
    except KeyError as error:
        raise ValueError(
            f"the name {template!r} asks for {error.args[0]!r}. It may use {may}."
        ) from None
    except (IndexError, ValueError, AttributeError) as error:
        raise ValueError(
            f"the name {template!r} is no template ({error}). It may use {may}; a brace is written "
            "{{ or }}."
        ) from None


def split_config(config: Any) -> tuple[list[Any], Any]:
    """A config as its arrays, which may be traced, and a function that puts values back."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = dataclasses.asdict(config)
    elif config is None:
        config = {}
    elif not isinstance(config, dict):
        try:
            config = dict(vars(config))
        except TypeError:
            raise TypeError(
                f"config is a {type(config).__name__}; give a dict: config=dict(lr=3e-4, …)"
            ) from None
    config = _with_string_keys(config)
    leaves, tree = jax.tree.leaves(config), structure(config)
    moving = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]

    def restore(values: list[np.ndarray]) -> dict[str, Any]:
        filled = list(leaves)
        for i, x in zip(moving, values, strict=True):
            filled[i] = x
        return plain(tree.unflatten(filled))

    return [leaves[i] for i in moving], restore


def _with_string_keys(x: Any) -> Any:
    """JAX sorts the keys of a dict, which must be of one type for that."""
    return {str(k): _with_string_keys(v) for k, v in x.items()} if type(x) is dict else x


def plain(x: Any) -> Any:
    """A config as what JSON can hold; of what it can't, the text."""
    if isinstance(x, dict):
        return {str(k): plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [plain(v) for v in x]
    if isinstance(x, np.ndarray | np.generic | jax.Array):
        x = np.asarray(x)
        if x.dtype.kind in "fV" and x.dtype.itemsize < 8:
            # The shortest number that reads back as the same: 0.1, not 0.10000000149011612.
            short = np.array([float(str(y)) for y in x.reshape(-1)], np.float64)
            return short.reshape(x.shape).tolist()
        return x.tolist() if x.dtype.kind in "biuf" else repr(x.tolist())
    if isinstance(x, bool | int | float | str) or x is None:
        return x
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return {f.name: plain(getattr(x, f.name)) for f in dataclasses.fields(x)}
    return repr(x)
