"""Which runs an argument means: a name, a group, a pattern, or a path."""

from __future__ import annotations

import difflib
import os
from typing import Any

from ._errors import Mistake

DEFAULT = "./.lox"


def folder(path: str | None) -> str:
    """The folder of runs at a path: itself, or the `.lox` in it."""
    root = path or DEFAULT
    if not os.path.isdir(root):
        what = f"there is no folder {root}"
        raise Mistake(f"{what}. Name the folder that the runs are in." if path is None else what)
    inside = os.path.join(root, ".lox")
    if not _has_runs(root) and os.path.isdir(inside):
        return inside
    return root


def _has_runs(root: str) -> bool:
    manifest = "manifest.json"
    names = ["", *os.listdir(root)]
    return any(os.path.exists(os.path.join(root, name, manifest)) for name in names)


def find(name: str, path: str | None = None) -> Any:
    """The runs that an argument means. At least one."""

    from .._runs import runs

    known = runs(folder(path)) if path or os.path.isdir(DEFAULT) else None
    found = _named(known, name) if known is not None else []
    if not found and path is None:
        found = _at(name)
    if not found:
        raise Mistake(_unknown(name, known, path or DEFAULT))
    return found


def _named(known: Any, name: str) -> Any:
    exact = [r for r in known if r.name == name] or [r for r in known if r.group == name]
    return exact or known.select(name)


def _at(path: str) -> Any:
    """The runs of `folder`, of `folder/folder of a run`, or those of `folder/name`."""
    from .._runs import runs

    here = os.path.normpath(path)
    above, name = os.path.split(here)
    if os.path.exists(os.path.join(here, "manifest.json")):
        # All of the runs, if they go on in other folders too.
        return [r for r in runs(above or ".") if here in map(os.path.normpath, parts(r))]
    if os.path.isdir(here):
        return runs(folder(here))
    return _named(runs(folder(above)), name) if above and os.path.isdir(above) else []


def parts(run: Any) -> list[str]:
    """The folders of a run: several, if it was resumed."""
    return [folder.path for folder, _ in run._parts]


def _unknown(name: str, known: Any, root: str) -> str:
    if known is None:
        return f"there is no run {name!r}, nor a folder {root}. Name it with --path."
    if not known:
        return f"there is no run {name!r}: there are no runs in {root}"
    names = [r.name for r in known]
    groups = list(dict.fromkeys(r.group for r in known if r.group not in names))
    near = difflib.get_close_matches(name, [*groups, *names], 3)
    text = f"there is no run {name!r} in {root}"
    if near:
        text += f". Did you mean {' or '.join(near)}?"
    text += f"\nruns: {_listed(names)}"
    return text + (f"\ngroups: {_listed(groups)}" if groups else "")


def _listed(names: list[str], limit: int = 20) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def chosen_keys(run: Any, asked: list[str] | None) -> list[str] | None:
    """The keys that names and patterns mean."""
    import fnmatch

    if not asked:
        return None
    known = run.keys
    chosen: list[str] = []
    for key in asked:
        found = [key] if key in known else fnmatch.filter(known, key)
        if not found:
            raise Mistake(f"run {run.name!r} has no key {key!r}\nkeys: {_listed(known)}")
        chosen += [k for k in found if k not in chosen]
    return chosen
