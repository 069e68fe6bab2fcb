"""How the source is built: who imports whom, what stays private, how large a file may be."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FILES = sorted((ROOT / "src").rglob("*.py"))

# Each file may import only what stands before it. A group is a folder, and its files in order.
ORDER = {
    "lox": [
        *("_errors", "_compat", "_event", "_primitive", "_probe", "_reduce", "_format", "_entry"),
        *("_optional", "_terminal", "_curves", "_plot", "_html", "_logdict", "_log"),
        *("_hidden", "_survey", "_interpret", "_rows", "_collect", "_rules", "_custom_rules"),
        "_shard_rule",
        *("_jax_batching", "_jax_derivatives", "_plan", "_spool", "_stream", "_cache", "_compile"),
        *("_host", "_save", "_transform"),
    ],
    "store": [
        *("_columns", "_frame", "_scan", "_table", "_homes"),
        *("_parquet", "_writer", "_folder", "_catalog", "_join", "_frames", "_run", "_follow"),
        *("_replay", "_verify", "__init__"),
    ],
    "loggers": [
        *("_state", "_names", "_lanes", "_queue", "_roster", "_exit", "_program", "_contract"),
        *("_backend", "_base", "_multi", "_save", "_rows", "_values", "_csv", "_tensorboard"),
        *("_mlflow", "_wandb", "_snapshot", "_board", "_board_view", "_live", "_screen"),
        *("_console", "__init__"),
    ],
    "lox, seen from outside": ["_runs", "wandb", "__init__"],
}
GROUPS = {"lox": "lox", "store": "lox.store", "loggers": "lox.loggers"}

# The same of logix: the engine, the store, runs; then what is for PyTorch, and for trainers.
LOGIX = {
    "logix": [
        *("_array", "_record", "_compress", "_norms", "_sums", "_statistics", "_precondition"),
    ],
    "logix.store": [
        *("_ids", "_rowtypes", "_commits", "_reader", "_verify", "_claim", "_writer", "_opened"),
        *("_rings", "_readahead", "__init__"),
    ],
    "logix, runs": [
        *("_result", "_influence", "_loader", "_beside", "_analysis", "evaluate", "_config"),
        *(
            "_rows",
            "_finite",
            "_outbox",
            "_group",
            "_saved",
            "_settings",
            "_analysing",
            "_watching",
            "_taking",
            "_block",
            "utils",
            "_extracting",
            "_run",
        ),
        *("_scheduler", "__init__"),
    ],
    "logix.torch": [
        *("_call", "_watch", "_layers", "_experts", "_units", "_parts", "_passes", "_scale"),
        *("_recompute", "_capture", "_context", "_coverage", "_ranks", "__init__"),
    ],
    "logix.jax": [
        *("_view", "_viewing", "_arrange", "_entrywise", "_ragged", "_site", "_known", "_picked"),
        *("_backward", "_products", "_convolution", "_lookup", "_custom", "_sites"),
        *(
            "_logged",
            "_shards",
            "_reached",
            "_closing",
            "_plan",
            "_planner",
            "_turned",
            "_found",
            "_follow",
        ),
        *("_names", "_coverage", "_assembled", "_stacks", "_shrunk", "_explicit", "_additive"),
        *("_capture", "_batches", "_ready", "_step", "_program"),
        *("_ranks", "__init__"),
    ],
    "logix.integrations": [
        *("_arguments", "_examples", "_extraction", "_losses", "_positions", "__init__"),
    ],
    "logix, for trainers": ["huggingface", "lightning"],
}
BEFORE_ALL = ["logix._progress"]


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


def places() -> list[str]:
    """All files of lox in order, as modules; and those of logix."""
    out = list(BEFORE_ALL)
    for group, names in [*ORDER.items(), *LOGIX.items()]:
        package = GROUPS.get(group) or (group.split(",")[0])
        out += [package if n == "__init__" else f"{package}.{n}" for n in names]
    return out


def module_of(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT / "src").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


OURS, LEFT_OUT = {"lox", "logix"}, {"cli", "cli.py", "__main__.py"}
ORDERED = [p for p in FILES if OURS & {*p.parts} and not LEFT_OUT & {*p.parts}]


def test_the_order_of_imports_is_complete():
    assert sorted(places()) == sorted(module_of(p) for p in ORDERED)


@pytest.mark.parametrize("path", ORDERED, ids=module_of)
def test_a_file_imports_only_what_stands_before_it(path):
    """Imports at the top of a file; what is imported when it is used may come later."""
    own, order = module_of(path), places()
    package = own if path.stem == "__init__" else own.rpartition(".")[0]
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
            base = f"{base}.{node.module}" if node.module else base
            for alias in node.names:
                name = f"{base}.{alias.name}"
                found = name if name in order else base
                assert order.index(found) < order.index(own), f"{own} imports {found}"


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
    assert set(out.stdout.split()) <= {
        "_loxio",
        "lox",
        "logify",
        "jax",
        "jaxlib",
        "numpy",
        "ml_dtypes",
    }
