"""Every example in the documentation runs, and the reference is that of the docstrings."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import importlib.util
import pathlib
import pkgutil
import re

import pytest

import logify
import lox
from lox._interpret import RULES
from lox._reduce import REDUCTIONS
from lox._survey import BODIES
from programs import TABLE

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
HAS_TORCH = importlib.util.find_spec("torch") is not None
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of Python in a page."""

    text: str
    line: int


def blocks(page: pathlib.Path) -> list[Block]:
    text = page.read_text()
    found = BLOCK.finditer(text)
    return [Block(m.group(2), text.count("\n", 0, m.start(2))) for m in found]


@pytest.fixture(autouse=True)
def unchanged_tables():
    """What an example registers is forgotten after it."""
    tables = (RULES, BODIES, REDUCTIONS)
    before, programs = [dict(t) for t in tables], list(TABLE)
    yield
    for table, old in zip(tables, before, strict=True):
        table.clear()
        table.update(old)
    TABLE[:] = programs


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_code_in_pages_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "__main__"}
    found = blocks(page)
    assert found, f"{page.name} has no example at all"
    if page.name == "logix.md":
        pytest.importorskip("torch")
    for block in found:
        if re.search(r"import .*\btorch\b", block.text) and not HAS_TORCH:
            continue  # stands by itself
        if ">>>" in block.text:
            run_doctest(block, page, names)
        else:
            code = "\n" * block.line + block.text  # so that a traceback shows the page's line
            exec(compile(code, str(page), "exec"), names)


def run_doctest(block: Block, page: pathlib.Path, names: dict) -> None:
    test = doctest.DocTestParser().get_doctest(block.text, names, page.name, str(page), block.line)
    run(test, clear=False)
    names.update(test.globs)  # the parser takes a copy


def run(test: doctest.DocTest, clear: bool = True) -> None:
    report: list[str] = []
    failed = doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(
        test, out=report.append, clear_globs=clear
    )
    assert not failed.failed, "".join(report)


def modules() -> list[str]:
    """The modules of both packages."""
    packages = [lox, logify]
    if importlib.util.find_spec("torch") is not None:  # which its examples use
        packages.append(importlib.import_module("logix"))
    found = [
        m.name
        for package in packages
        for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]
    return [*(p.__name__ for p in packages), *(name for name in found if "__main__" not in name)]


@pytest.mark.parametrize("name", modules())
def test_docstring_examples_run(name):
    module = importlib.import_module(name)
    for test in doctest.DocTestFinder().find(module, name):
        if test.examples:
            run(test)


def test_python_blocks_are_closed():
    for page in PAGES:
        fences = re.findall(r"^ *```", page.read_text(), re.MULTILINE)
        assert len(fences) % 2 == 0, page.name


def test_contributing_lists_every_file():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    listed = set(re.findall(r"^\| `((?:\w+/)*_\w+\.py)` \|", text, re.MULTILINE))
    source = ROOT / "src" / "lox"
    folders = [source, source / "store", source / "loggers"]
    files = {str(f.relative_to(source)) for folder in folders for f in folder.glob("_*.py")}
    files |= {str(f.relative_to(ROOT / "src")) for f in (ROOT / "src/logix").rglob("_*.py")}
    assert listed == {f for f in files if "__" not in f}


# --- the reference -------------------------------------------------------------------------------

spec = importlib.util.spec_from_file_location(
    "build_reference", ROOT / "docs" / "build_reference.py"
)
assert spec is not None
assert spec.loader is not None
build_reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build_reference)

SYMBOLS = {
    f"{package.__name__}.{name}": thing
    for package in build_reference.PACKAGES
    for name, thing in build_reference.public(package).items()
}


def test_reference_is_up_to_date():
    page = build_reference.PATH.read_text()
    assert page == build_reference.render(), "docs/reference.md is out of date: run `make docs`"


def test_symbols_are_found():
    for name in ("log", "log_grad", "spool", "tap", "nolog", "flush", "logdict", "save", "load"):
        assert f"lox.{name}" in SYMBOLS
    assert {"lox.Reduction", "lox.LogError"} <= set(SYMBOLS)
    assert {"logify.log", "logify.logify", "logify.Logs"} <= set(SYMBOLS)


@pytest.mark.parametrize("name", SYMBOLS)
def test_public_names_have_an_example(name):
    doc = SYMBOLS[name].__doc__
    assert doc, f"{name} has no docstring"
    assert ">>>" in doc, f"the docstring of {name} has no example"
