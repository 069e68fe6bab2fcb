"""Write docs/reference.md from the docstrings of lox, logify and logix.

    python docs/build_reference.py            write it
    python docs/build_reference.py --check    fail if it is out of date

A docstring is a sentence, an example, arguments without types, and what is returned. Types come
from the signature.
"""

from __future__ import annotations

import inspect
import pathlib
import sys
import textwrap
import types
from typing import Any

import logify
import logix
import logix.evaluate
import logix.jax
import logix.store
import logix.utils
import lox
import lox.store
import lox.wandb

PATH = pathlib.Path(__file__).resolve().parent / "reference.md"
PACKAGES = (lox, lox.store, lox.wandb, logify, logix, logix.jax, logix.utils)
PACKAGES += (logix.evaluate, logix.store)
WIDTH = 92
# Parts of LogIX.
HIDDEN = ("logix._watching", "logix._analysing", "logix._taking", "logix._extracting")

HEAD = """\
# Reference

Every public name of `lox`, `logify` and `logix`. Loggers are also in `lox.loggers`;
`logix.huggingface`, `logix.lightning` and `logix.torch.rule` are told in [logix.md](logix.md).
Written from the docstrings by `make docs`; the examples run in the tests.
"""


def public(module: types.ModuleType) -> dict[str, Any]:
    """The public functions and classes of a package, in the order of its `__init__`."""
    names = getattr(module, "__all__", [n for n in vars(module) if not n.startswith("_")])
    top = module.__name__.split(".")[0]
    ours = lambda x: getattr(x, "__module__", "").split(".")[0] == top
    return {
        n: vars(module)[n] for n in names if callable(vars(module)[n]) and ours(vars(module)[n])
    }


def members(cls: type) -> dict[str, Any]:
    """The documented public methods and properties of a class, and of bases that no one sees."""
    hidden = [b for b in cls.__mro__[1:] if b.__module__ in HIDDEN]
    bases = [*reversed(hidden), cls]
    own = {n: x for b in bases for n, x in vars(b).items() if not n.startswith("_")}
    return {n: x for n, x in own.items() if isinstance(x, MEMBERS) and x.__doc__}


MEMBERS = (types.FunctionType, property)


def signature(name: str, fun: Any, drop_first: bool = False) -> str:
    """`name(a: int, b: str = "x") -> bool`, over several lines where it is long."""
    try:
        found = inspect.signature(fun)
    except ValueError:
        return name
    parameters = list(found.parameters.values())[int(drop_first) :]
    parts, star = [], False
    for i, p in enumerate(parameters):
        if p.kind is p.KEYWORD_ONLY and not star:
            parts.append("*")
        star = star or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        parts.append(parameter(p))
        next_kind = parameters[i + 1].kind if i + 1 < len(parameters) else None
        if p.kind is p.POSITIONAL_ONLY and next_kind is not p.POSITIONAL_ONLY:
            parts.append("/")
    returns = found.return_annotation
    tail = "" if returns in (found.empty, "None", None) else f" -> {annotation(returns)}"
    line = f"{name}({', '.join(parts)}){tail}"
    if len(line) <= WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {p},\n" for p in parts) + f"){tail}"


def parameter(p: inspect.Parameter) -> str:
    """One parameter of a signature, with its type and default."""
    stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
    kind = "" if p.annotation is p.empty else f": {annotation(p.annotation)}"
    if p.default is p.empty:
        return f"{stars}{p.name}{kind}"
    return f"{stars}{p.name}{kind} = {p.default!r}" if kind else f"{p.name}={p.default!r}"


def annotation(kind: Any) -> str:
    """A type as it was written."""
    return kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))


def body(doc: str) -> str:
    """A docstring as Markdown: its examples become blocks of code."""
    out, block = [], []
    for line in [*doc.splitlines(), ""]:
        if line.startswith(">>>") or (block and line.strip()):
            block.append(line)
            continue
        if block:
            out += ["```python", *block, "```"]
            block = []
        out.append(line)
    return "\n".join(out).strip()


def section(level: int, title: str, sign: str, doc: str) -> str:
    """A heading, a signature, a docstring."""
    return f"{'#' * level} {title}\n\n```text\n{sign}\n```\n\n{body(doc)}\n"


def symbol(package: str, name: str, thing: Any) -> list[str]:
    """The sections of one public name: its own, and those of its members."""
    full = f"{package}.{name}"
    doc = inspect.getdoc(thing) or ""
    if not isinstance(thing, type):
        return [section(3, f"`{full}`", signature(full, thing), doc)]
    if issubclass(thing, BaseException):
        return [section(3, f"`{full}`", f"class {full}({thing.__bases__[0].__name__})", doc)]
    out = [section(3, f"`{full}`", f"class {signature(full, thing).removesuffix(' -> None')}", doc)]
    for member, x in members(thing).items():
        if isinstance(x, property):
            out.append(f"#### `.{member}`\n\n{body(inspect.getdoc(x) or '')}\n")
        else:
            call = signature(f".{member}", x, drop_first=True)
            out.append(f"#### `{call}`\n\n{body(inspect.getdoc(x) or '')}\n")
    return out


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    for module in PACKAGES:
        intro = textwrap.dedent(inspect.getdoc(module) or "")
        parts.append(f"## {module.__name__}\n\n{intro}\n")
        for name, thing in public(module).items():
            parts += symbol(module.__name__, name, thing)
    return "\n".join(parts)


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PATH.read_text() == render() else f"{PATH.name} is out of date: make docs")
    PATH.write_text(render())
