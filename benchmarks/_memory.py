"""What has to be done to a machine's memory before anything is measured that writes files."""

from __future__ import annotations

import tempfile


def touch_memory(folder: str | None, size: int = 4 << 30) -> None:
    """Write and remove a file: a virtual machine gets its memory at the first use of each page,
    which takes longer than writing it, and is not what is measured."""
    block = bytes(1 << 24)
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(size // len(block)):
            file.write(block)
