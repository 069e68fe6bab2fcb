"""Where boards are shown, and the one thread that shows them.

A target is a terminal (a rich table, drawn again in place), a notebook, or a file that gets a line
from time to time. rich has one live display at a time: all boards on a terminal share it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from . import _board_view
from ._board import Board

FASTEST = 0.25  # seconds between frames


def target_for(board: Board, refresh: float, interval: float, file: Any) -> Target:
    """How to show a board: what the file is tells."""
    # IPython is not imported for it: a notebook has it imported.
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if file is None and getattr(shell, "kernel", None) is not None:
        return Notebook(board, refresh)
    stream = sys.stdout if file is None else file
    if getattr(stream, "isatty", lambda: False)() and os.environ.get("TERM") != "dumb":
        return Terminal(board, refresh, file)
    return Plain(board, interval, file)


class Target:
    """A board, and a way to show it."""

    def __init__(self, board: Board, every: float):
        self.board, self.every = board, every
        self._version, self._painted = -1, time.monotonic()

    def begin(self) -> None:
        """Called where the first run begins."""

    def draw(self) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """Show the last state, for good."""
        raise NotImplementedError

    def paint(self) -> None:
        """Draw, if it is time to: nothing new is drawn once a second, for the clock."""
        now, new = time.monotonic(), self.board.version != self._version
        if now - self._painted >= (self.every if new else max(self.every, 1.0)) - 0.01:
            self._version, self._painted = self.board.version, now
            self.draw()


class Plain(Target):
    """Lines of text in a file."""

    def __init__(self, board: Board, every: float, file: Any):
        super().__init__(board, every)
        self.file = file
        self._written: int | None = None

    def draw(self) -> None:
        self._print(final=False)

    def finish(self) -> None:
        self._print(final=True)

    def _print(self, final: bool) -> None:
        version, shot = self.board.version, self.board.snapshot(final)
        stream = sys.stdout if self.file is None else self.file
        if version != self._written and shot.lines and stream is not None:
            self._written = version
            print(_board_view.line(shot), file=stream, flush=True)


class Notebook(Target):
    """A display of a notebook's cell, replaced in place."""

    def __init__(self, board: Board, every: float):
        super().__init__(board, every)
        self._id = uuid.uuid4().hex

    def begin(self) -> None:
        # Not in the thread: it belongs below the cell that runs.
        from IPython.display import HTML, display

        display(HTML(_board_view.html(self.board.snapshot())), display_id=self._id)

    def draw(self) -> None:
        self._update(final=False)

    def finish(self) -> None:
        self._update(final=True)

    def _update(self, final: bool) -> None:
        from IPython.display import HTML, update_display

        shot = self.board.snapshot(final)
        update_display(HTML(_board_view.html(shot)), display_id=self._id)


class Terminal(Target):
    """A part of the live display of a terminal."""

    def __init__(self, board: Board, every: float, file: Any):
        super().__init__(board, every)
        self.file = file
        self._live: Any = None

    def draw(self) -> None:
        from ._live import live_for

        self._live = self._live or live_for(self.file)
        self._live.show(self, self.board.snapshot())

    def finish(self) -> None:
        from ._live import live_for

        live = self._live or live_for(self.file)
        live.end(self, self.board.snapshot(final=True))


class Painter:
    """Paints all targets from one thread, which lives as long as there are any."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._targets: dict[Target, Callable[[BaseException], None]] = {}
        self._stop: threading.Event | None = None

    def add(self, target: Target, failed: Callable[[BaseException], None]) -> None:
        """Show a target from now on. What goes wrong in that is told to `failed`."""
        with self._lock:
            self._targets[target] = failed
            self._guarded(target, target.begin)
            if self._stop is None and self._targets:
                self._stop = threading.Event()
                run = threading.Thread(
                    target=self._run, args=(self._stop,), name="lox console", daemon=True
                )
                run.start()

    def remove(self, target: Target) -> None:
        """Show the last state of a target, and no more after it."""
        with self._lock:
            if target in self._targets:
                self._guarded(target, target.finish)
                self._targets.pop(target, None)
            if not self._targets and self._stop is not None:
                self._stop.set()
                self._stop = None

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(FASTEST):
            with self._lock:
                if stop.is_set():
                    return
                for target in list(self._targets):
                    self._guarded(target, target.paint)

    def _guarded(self, target: Target, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # a display must not stop the program, nor other displays
            failed = self._targets.pop(target)
            failed(error)


PAINTER = Painter()
