"""Work in a process of its own, bounded in time and memory: input that breaks it breaks nothing else.

The work is a Python file with a function ``prepared(settings)``, which returns a function from a question to
its answer, all of them values of JSON. The process runs this very file as a program. It imports nothing of
this package, so that a start is short.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

STACK_BYTES = 2**20
"""An eighth of what threads usually have: what fits here fits where it is done again."""
MEMORY_BYTES = 2**30
"""Memory that a process may use beyond its use when it is prepared."""


class OutOfBounds(Exception):
    """A question takes more time, memory or stack than there is for it."""


class BoundedProcess:
    """A process that answers questions: started for the first one, and again after one that ended it."""

    def __init__(self, work: Path, settings: Callable[[], Any], seconds: float):
        """``settings`` makes those of ``prepared`` in the file ``work`` when the process starts. An answer
        may take ``seconds``."""
        self.seconds = seconds
        self._work = work
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    @property
    def bounds(self) -> str:
        """The bounds, in words."""
        return f"{self.seconds:g} seconds, {MEMORY_BYTES >> 20} MiB or a deep stack"

    def start(self) -> None:
        """Start the process, if it is not there.

        Raises:
            OSError: it ended while it was prepared.
        """
        with self._lock:
            self._running()

    def ask(self, question: Any) -> Any:
        """The answer to ``question``. One is answered at a time. A process that was killed from outside, as a
        system does that runs out of memory, is asked once more.

        Raises:
            OutOfBounds: there is none within the bounds.
            OSError: the process ended while it was prepared.
        """
        with self._lock:
            for _ in range(2):
                process = self._running()
                answer = _exchange(process, [self.seconds, question])
                if answer.endswith(b"\n"):
                    return json.loads(answer)
                process.wait()
                if process.returncode != -signal.SIGKILL:  # it died of the question
                    break
        raise OutOfBounds(f"it takes more than {self.bounds}")

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        process = subprocess.Popen(
            [sys.executable, "-I", __file__],  # -I: neither this folder nor the environment changes imports
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the parent, which then ends it
        )
        weakref.finalize(self, _end, process)
        start = {"path": sys.path, "work": str(self._work), "settings": self._settings()}
        if not _exchange(process, start).endswith(b"\n"):
            _end(process)
            raise OSError(f"the process of {self._work.name} ended while it was prepared; is memory short?")
        self._process = process
        return process


def _exchange(process: subprocess.Popen[bytes], line: Any) -> bytes:
    """The line that ``process`` writes after it has got ``line``; cut, or empty, where it ends before."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(line).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        return b""
    return process.stdout.readline()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


# ------------------------------------------------------------------ the program


def main() -> None:
    """Answer questions until there are no more."""
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    sys.stdout = sys.stderr  # what libraries print is no answer
    start = json.loads(sys.stdin.readline())
    sys.path[:] = start["path"]
    specification = importlib.util.spec_from_file_location("work", start["work"])
    assert specification is not None and specification.loader is not None
    work = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(work)
    answer_to = work.prepared(start["settings"])
    print(json.dumps("prepared"), file=output, flush=True)
    _bound_memory()
    for line in sys.stdin:
        seconds, question = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)  # it ends the process, also where the parent has ended
        answer = json.dumps(answer_to(question))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(answer, file=output, flush=True)


def _bound_memory() -> None:
    if sys.platform != "linux":  # elsewhere the time limit has to do
        return
    import resource

    with open("/proc/self/statm") as sizes:
        taken = int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES, taken + MEMORY_BYTES))


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
