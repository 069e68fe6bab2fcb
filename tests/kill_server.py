"""Processes to be killed: a server that forks one for every job, and what such a job needs.

Some packages take long to import. So a worker (`kill_worker.py`, `logix_kill_worker.py`) imports
them once, starts no thread, and forks a child for every job it is sent: a line of JSON on stdin, a
list of jobs that run at the same time. It answers with their process ids and, when all have ended,
with how they ended. After each call that returned, a child appends a word to its file of
acknowledgements, which outlives it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

# The calls that change files.
CHANGING = ("write", "fsync", "replace", "unlink", "mkdir", "ftruncate", "rmdir")


# --- in the worker -------------------------------------------------------------------------------


class Acknowledge:
    """Appends words to a file. They are there even if the process dies right after."""

    def __init__(self, path: str):
        self._write = os.write  # not one that a job replaces
        self._handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def __call__(self, word: object) -> None:
        self._write(self._handle, f"{word}\n".encode())


def die_at(at: int, half: bool = False) -> None:
    """Die before the call number `at` that changes a file. `half`: a write is done half first."""
    calls = 0

    def dying(name: str) -> Any:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > at:
                if half and name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in CHANGING:
        setattr(os, name, dying(name))


def serve(names: Mapping[str, Any]) -> None:
    """Run the functions `job_…` among these names, each in a child."""
    for line in sys.stdin:
        children = []
        for job in json.loads(line):
            child = os.fork()
            if child == 0:
                sys.stdout = sys.stderr  # what a job prints is no answer
                ack = Acknowledge(job.pop("ack"))
                names[f"job_{job.pop('job')}"](ack, **job)
                return  # the interpreter ends as it does for a program
            children.append(child)
        print(json.dumps(children), flush=True)
        ends = [os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children]
        print(json.dumps(ends), flush=True)


# --- in the test ---------------------------------------------------------------------------------


class Server:
    """Has a worker fork a child for every job."""

    def __init__(self, worker: str, **environment: str):
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed below)
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", worker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env={**os.environ, **environment},
            text=True,
        )
        self.running = []

    def start(self, *jobs):
        """The process ids of these jobs, once they run."""
        self.process.stdin.write(json.dumps([{"ack": os.devnull, **j} for j in jobs]) + "\n")
        self.process.stdin.flush()
        self.running = json.loads(self.process.stdout.readline())
        return self.running

    def wait(self):
        """How they ended: exit codes, or the negative number of a signal."""
        ends = json.loads(self.process.stdout.readline())
        self.running = []
        return ends

    def run(self, *jobs):
        self.start(*jobs)
        return self.wait()

    def end_jobs(self):
        """Kill what still runs, after a test that has failed half-way."""
        if self.running:
            for pid in self.running:
                kill(pid)
            self.wait()

    def close(self):
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()
        self.errors.close()


def kill(pid):
    with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
        os.kill(pid, signal.SIGKILL)
