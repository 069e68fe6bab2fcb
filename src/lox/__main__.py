"""`python -m lox`: the command `lox`."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
