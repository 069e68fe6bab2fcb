"""A bounded queue and a thread, in front of a backend that is slow (a network, a database).

When the backend can't keep up and the queue is full, `overflow` says what happens:

    block        the program waits
    drop_oldest  the oldest write that waits is given up
    decimate     every second write that waits is given up, and from then on only every second is
                 taken (every fourth, and so on) until the backend has caught up

What is given up is counted. A backend that makes no progress for `timeout` seconds while the
program waits for it is taken for dead: what comes after is counted, and nothing waits any more.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from typing import Any

POLICIES = ("block", "drop_oldest", "decimate")


def within(timeout: float, name: str, work: Callable[[], Any]) -> Any:
    """The result of `work`, which is given so many seconds and then left to itself."""
    done: list[Any] = []

    def run() -> None:
        try:
            done.append((work(), None))
        except BaseException as error:
            done.append((None, error))

    thread = threading.Thread(target=run, name=f"lox {name}", daemon=True)
    thread.start()
    thread.join(timeout)
    if not done:
        raise TimeoutError(f"{name} could not begin a run within {timeout:g} s (timeout=…)")
    result, error = done[0]
    if error is not None:
        raise error
    return result


class Worker:
    """Runs `work(item)` in a thread, in order. `work` must not raise."""

    def __init__(
        self, work: Callable[[Any], None], overflow: str, capacity: int, timeout: float, name: str
    ):
        self.work, self.overflow, self.capacity, self.timeout = work, overflow, capacity, timeout
        self.name = name
        self.dropped = 0
        self.dead = False
        self._items: collections.deque[Any] = collections.deque()
        self._busy = False
        self._done = 0
        self._stride, self._phase = 1, 0
        self._change = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=f"lox {name}", daemon=True)
        self._thread.start()

    def put(self, item: Any) -> None:
        """Queue an item, or do as `overflow` says. TimeoutError if the backend hangs."""
        with self._change:
            if self.dead:
                self.dropped += 1
                return
            if self._stride > 1:
                self._phase = (self._phase + 1) % self._stride
                if self._phase:
                    self.dropped += 1
                    return
            if len(self._items) >= self.capacity:
                if self.overflow == "block":
                    try:
                        self._wait(lambda: len(self._items) < self.capacity)
                    except TimeoutError:
                        self.dropped += 1
                        raise
                elif self.overflow == "drop_oldest":
                    self._items.popleft()
                    self.dropped += 1
                else:
                    kept = list(self._items)[::2]
                    self.dropped += len(self._items) - len(kept)
                    self._items = collections.deque(kept)
                    self._stride *= 2
            self._items.append(item)
            self._change.notify_all()

    def drain(self) -> None:
        """Wait until all is done. Raises TimeoutError if the backend hangs."""
        with self._change:
            if not self.dead:
                self._wait(lambda: not self._items and not self._busy)

    def stop(self) -> None:
        with self._change:
            self._stopped = True
            self._change.notify_all()
        if not self.dead:
            self._thread.join(self.timeout)

    def _wait(self, ready: Callable[[], bool]) -> None:
        done, since = self._done, time.monotonic()
        while not ready():
            self._change.wait(min(0.1, self.timeout))
            if self._done != done:
                done, since = self._done, time.monotonic()
            elif time.monotonic() - since > self.timeout and not ready():
                self.dead = True
                self.dropped += len(self._items) + self._busy
                self._items.clear()
                raise TimeoutError(
                    f"{self.name} has made no progress for {self.timeout:g} s and is given up. "
                    "What it was sent from then on is not written; other loggers go on. A slow "
                    "backend can be given more time with timeout=…"
                )

    def _run(self) -> None:
        while True:
            with self._change:
                while not self._items and not self._stopped:
                    self._change.wait()
                if not self._items:
                    return
                item, self._busy = self._items.popleft(), True
                if self._stride > 1 and len(self._items) < self.capacity // 4:
                    self._stride //= 2
                self._change.notify_all()
            try:
                self.work(item)
            finally:
                with self._change:
                    self._busy = False
                    self._done += 1
                    self._change.notify_all()
