"""How the source is built: who imports whom, what stays private, how large a file may be."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FILES = sorted((ROOT / "src").rglob("*.py"))

# Each file of lox may import only what stands before it.
ORDER = [
    *("_errors", "_compat", "_event", "_primitive", "_probe", "_reduce", "_format", "_entry"),
    *("_terminal", "_curves", "_plot", "_html"),
    *(
        "_logdict",
        "_log",
        "_hidden",
        "_survey",
        "_interpret",
        "_rows",
        "_collect",
        "_rules",
        "_custom_rules",
    ),
    *("_shard_rule", "_jax_batching", "_jax_derivatives", "_plan", "_spool", "_stream", "_cache"),
    *("_compile", "_host", "_save", "_transform", "__init__"),
]


def imports(path: pathlib.Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            found |= {base} | {f"{base}.{alias.name}".replace("..", ".") for alias in node.names}
    return found


def test_private_jax_is_imported_in_one_file():
    users = [p.name for p in FILES if any(i.startswith("jax._src") for i in imports(p))]
    assert users == ["_compat.py"]


def test_the_order_of_imports_is_complete():
    assert sorted(ORDER) == sorted(p.stem for p in FILES if p.parent.name == "lox")


@pytest.mark.parametrize("path", [p for p in FILES if p.parent.name == "lox"], ids=lambda p: p.stem)
def test_a_file_imports_only_what_stands_before_it(path):
    before = set(ORDER[: ORDER.index(path.stem)])
    own = {i.lstrip(".").split(".")[0] for i in imports(path) if i.startswith(".")} - {""}
    assert own <= before


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_file_holds_one_concept(path):
    assert len(path.read_text().splitlines()) <= 300
    assert ast.get_docstring(ast.parse(path.read_text())), "says what it is for"


def test_importing_lox_starts_no_backend():
    code = (
        "import lox, logify; from jax._src import xla_bridge;"
        "assert not xla_bridge.backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT / "src")


def test_importing_lox_needs_jax_and_numpy_alone():
    code = (
        "import sys, jax, jax.numpy, jax.export; before = set(sys.modules); import lox, logify;"
        "new = {m.split('.')[0] for m in set(sys.modules) - before};"
        "print(*sorted(new - set(sys.stdlib_module_names)))"
    )
    run = [sys.executable, "-c", code]
    out = subprocess.run(run, capture_output=True, text=True, check=True, cwd=ROOT / "src")
    assert set(out.stdout.split()) <= {"lox", "logify", "jax", "jaxlib", "numpy", "ml_dtypes"}
