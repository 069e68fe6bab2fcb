"""`python -m logix`: the command `logix`."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
