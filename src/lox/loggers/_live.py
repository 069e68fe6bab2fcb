"""The live display of a terminal, with rich: tables that are drawn again in place.

What the program prints meanwhile appears above them.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from rich import get_console
from rich.console import Console, Group
from rich.file_proxy import FileProxy
from rich.live import Live

from ._board_view import Frame, frame
from ._snapshot import Snapshot

_shared: dict[int, LiveTables] = {}  # by the identity of the console


def live_for(file: Any) -> LiveTables:
    """The display of a terminal. rich has one at a time on each, so loggers share it."""
    # rich's own console for stdout: then what the user prints with rich is seen as well.
    console = get_console() if file is None else Console(file=file, highlight=False)
    for live in _shared.values():
        if live.console.file is console.file:
            return live
    return LiveTables(console)


class LiveTables:
    """Tables of several boards, one below the other."""

    def __init__(self, console: Console):
        self.console = console
        self._frames: dict[Any, Frame] = {}
        self._live: Live | None = None
        self._streams: list[tuple[str, Any, Above]] = []

    def show(self, who: Any, shot: Snapshot) -> None:
        """Draw a board, or draw it again."""
        width, height = self.console.size
        share = (height - 1) // len({*self._frames, who})
        self._frames[who] = frame(shot, width, share)
        if self._live is None:
            self._start()
        self._refresh()

    def end(self, who: Any, shot: Snapshot) -> None:
        """Take a board out of the display, and print it once more, for good."""
        self._frames.pop(who, None)
        if self._live is not None and self._frames:
            self._refresh()
        elif self._live is not None:
            self._stop()
        if shot.lines:
            self.console.print(frame(shot, self.console.size[0]))

    def _refresh(self) -> None:
        assert self._live is not None
        self._live.update(Group(*self._frames.values()), refresh=True)

    def _start(self) -> None:
        self._live = Live(
            console=self.console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self._live.start()
        # rich hides the cursor. Nothing would bring it back if the process were killed.
        self.console.show_cursor(True)
        ours = self.console.file in (sys.stdout, sys.stderr)
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if ours and stream.isatty() and not isinstance(stream, FileProxy):
                above = Above(self.console, stream)
                self._streams.append((name, stream, above))
                setattr(sys, name, above)
        _shared[id(self)] = self

    def _stop(self) -> None:
        live, self._live = self._live, None
        _shared.pop(id(self), None)
        for name, stream, above in self._streams:
            with contextlib.suppress(Exception):
                above.flush()
            if getattr(sys, name) is above:  # else somebody has replaced it since
                setattr(sys, name, stream)
        self._streams.clear()
        assert live is not None
        live.stop()


class Above(FileProxy):
    """A stream whose lines are printed above the tables, as they are.

    rich's own would take brackets in a line that has not ended for markup, and fail on some.
    """

    _partial = False

    def write(self, text: str) -> int:
        super().write(text)
        if text:
            self._partial = not text.endswith("\n")
        return len(text)

    def flush(self) -> None:
        if self._partial:
            self.write("\n")
