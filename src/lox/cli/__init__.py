"""The command `lox`: look at saved runs, draw them, send them elsewhere, check them.

_ls _show _tail _plot _export _verify _compact   a command each: its options, and what it does
_find _rows _output _errors                      which runs are meant; rows; text; mistakes
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from . import _compact, _export, _ls, _plot, _show, _tail, _verify
from ._errors import DAMAGED, FAILED, INTERRUPTED, MISTAKE, Mistake, message

COMMANDS = (_ls, _show, _tail, _plot, _export, _verify, _compact)


def parser() -> argparse.ArgumentParser:
    """The options of all commands."""
    from .. import __version__

    top = argparse.ArgumentParser(
        prog="lox",
        description="Look at saved runs, draw them, send them elsewhere, check them.",
        epilog="examples:\n  lox ls\n  lox show ppo-0\n  lox tail -f ppo-0\n"
        "  lox plot ppo return\n\n`lox COMMAND --help` has more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"lox {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        one = commands.add_parser(
            command.__name__.rpartition("_")[2],
            help=command.HELP,
            description=(command.__doc__ or "").strip(),
            epilog="examples:\n" + "\n".join(f"  {e}" for e in command.EXAMPLES),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.options(one)
        one.set_defaults(run=command.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns its exit code.

    >>> import jax, lox, lox.cli, tempfile
    >>> path = tempfile.mkdtemp()
    >>> with lox.loggers.SaveLogger(path) as logger:
    ...     logger.log(logger.init(jax.random.key(0), name="first"), {"loss": 0.5})
    >>> lox.cli.main(["ls", path, "--quiet"])
    first
    0

    0: done; 1: saved runs are damaged; 2: a mistake in what was asked for; 3: anything else.
    """
    debug = bool(os.environ.get("LOX_DEBUG"))
    try:
        args = parser().parse_args(argv)
    except SystemExit as stop:  # argparse has said why
        return stop.code if isinstance(stop.code, int) else MISTAKE
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read this has seen enough. Python would complain again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if debug:
            raise
        return _failed(error)


def _failed(error: Exception) -> int:
    from _loxio import Damaged

    text, code = message(error), FAILED
    if isinstance(error, Damaged):
        code = DAMAGED
    elif isinstance(error, Mistake | OSError) or "pip install" in text:
        code = MISTAKE
    else:
        text = f"{type(error).__name__}: {text}\n(LOX_DEBUG=1 shows where)"
    print(f"lox: {text}", file=sys.stderr)
    return code
