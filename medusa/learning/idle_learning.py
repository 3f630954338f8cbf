"""A base learns from what it writes while nothing is asked of it.

What is written is kept (:mod:`medusa.learning.collected_texts`). Once there is enough that is new, and the
base has been idle for some seconds, a process of the lowest priority runs a round of ``medusa learn
--collected``. It stands still (SIGSTOP) from the moment that something is asked until the base is idle again,
so a round takes as long as it takes, and is judged by counts and not by time. When the heads in use change,
by this round or by any command, ``on_new_heads`` is told.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from medusa.hardware import is_on_battery
from medusa.learning.collected_texts import CollectedTexts
from medusa.learning.learned_heads import LearnedHeads

log = logging.getLogger("medusa.learning")

IDLE_SECONDS = 5.0
"""After these without work the base is idle."""
LOOK_SECONDS = 0.5
"""Between two looks at whether it is."""
ENOUGH_BYTES = 40_000
"""New text that is worth a round: some 10,000 tokens."""
ENOUGH_GROWTH = 0.25
"""The same as a part of all that was learned from before, so that rounds become rarer."""
LOWEST_PRIORITY = 19
CAN_PAUSE = hasattr(signal, "SIGSTOP")
LOG = "learning.log"
TIED = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
os.close(int(sys.argv[1]))
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Runs a command that the system ends (``PR_SET_PDEATHSIG``, ``SIGKILL``) where the process that started it
is killed: one that stands still cannot see to that itself. Closes a file once that is arranged."""

State = Literal["collecting", "learning", "paused", "failed", "off"]


class IdleLearning:
    """Learning of one base beside its use. Calls may come from any thread.

    Args:
        learned: where it is kept.
        tokenizer: the base's.
        command: runs a round.
        follows: whether better heads are taken into use here.
        is_busy: whether the base is at work now.
        on_new_heads: told of the directory of the heads in use when they are others, on a thread of this
            object.
    """

    def __init__(
        self,
        learned: LearnedHeads,
        tokenizer: Any,
        command: Sequence[str],
        follows: bool,
        is_busy: Callable[[], bool],
        on_new_heads: Callable[[Path], object],
    ):
        self.learned = learned
        self.command = command
        self.follows = follows
        self.is_busy = is_busy
        self.on_new_heads = on_new_heads
        self.collected: CollectedTexts | None = CollectedTexts(learned.directory, tokenizer)
        """None once nothing can be kept any more."""
        self.collected.read_known()
        self.version = learned.version
        """That in use when the record was read last; None where none was."""
        self._process: subprocess.Popen[bytes] | None = None
        self._is_paused = False
        self._num_failures = 0
        self._last_work = time.monotonic()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="medusa-learning", daemon=True)

    def start(self) -> None:
        """Look for idle time from here on."""
        if CAN_PAUSE:
            self._thread.start()
        else:
            log.warning("answers are kept, and learned from by `medusa learn`: no process can pause here")

    @property
    def state(self) -> State:
        """What goes on now: "failed" until there is more to learn from, "off" where nothing can be kept."""
        if self._process is not None:
            return "paused" if self._is_paused else "learning"
        if self.collected is None:
            return "off"
        return "failed" if self._num_failures else "collecting"

    def report(self) -> dict[str, Any]:
        """What goes on, in plain JSON values, without names of files: the state, bytes of new text, and the
        version in use, None for none."""
        version = self.version
        known = None
        if version is not None:
            known = {key: value for key, value in asdict(version).items() if key != "learned_from"}
        collected = self.collected
        return {
            "state": self.state,
            "new_bytes": 0 if collected is None else collected.num_new_bytes,
            "version": known,
        }

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Keep an answer, in tokens, with the end of its prompt. Where that cannot be done, it is said once,
        and answers go on without."""
        if self.collected is None:
            return
        try:
            self.collected.add(prompt, answer)
        except OSError as error:
            log.warning("nothing more is kept to learn from: %s", error)
            self.collected = None

    def pause(self) -> None:
        """Something is asked: learning stands still before this returns. Call it once :attr:`is_busy` says
        so."""
        self._last_work = time.monotonic()
        with self._lock:
            if self._process is not None and not self._is_paused:
                self._signal(self._process, signal.SIGSTOP)
                self._is_paused = True

    def close(self) -> None:
        """End a round that is under way; the next one goes on where it was."""
        self._closing.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    # -------------------------------------------------------------- on the thread

    def _run(self) -> None:
        reported = ""
        while not self._closing.wait(LOOK_SECONDS):
            try:
                self._look()
            # of the disk, of a damaged record, of heads that do not fit
            except (OSError, ValueError) as error:
                if str(error) != reported:
                    reported = str(error)
                    self._num_failures += 1
                    log.warning("learning waits: %s", error)
        self._end_round()  # here: the process is killed when the thread that started it ends

    def _end_round(self) -> None:
        with self._lock:
            process = self._process
            self._process = None
        if process is None:
            return
        self._signal(process, signal.SIGTERM)
        self._signal(process, signal.SIGCONT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            self._signal(process, signal.SIGKILL)
            process.wait()

    def _look(self) -> None:
        """Start, pause or go on with a round, and see what came of it."""
        with self._lock:
            if self.is_busy():
                self._last_work = time.monotonic()
            is_idle = time.monotonic() - self._last_work >= IDLE_SECONDS and not is_on_battery()
            process = self._process
            if self._closing.is_set():
                return
            if process is not None and process.poll() is not None:
                self._process = None
                self._ended(process.returncode)
            elif process is not None and self._is_paused and is_idle:
                self._signal(process, signal.SIGCONT)
                self._is_paused = False
            elif process is None and is_idle and self._is_due():
                self._begin()
        version = self.learned.version
        if version != self.version:
            self.version = version
            if version is not None and self.follows:
                self.on_new_heads(self.learned.heads_of(version))

    def _is_due(self) -> bool:
        """Whether a round was stopped, or there is enough that is new; after failures, much more."""
        if self.collected is None:
            return False
        if not self._num_failures and (self.learned.round / "plan.json").exists():
            return True
        num_new = self.collected.num_new_bytes
        earlier = self.collected.num_bytes - num_new
        return num_new >= max(ENOUGH_BYTES, ENOUGH_GROWTH * earlier) * 4**self._num_failures

    def _begin(self) -> None:
        """Start a round, in a process group of its own, so that a Ctrl-C here does not reach it."""
        with (self.learned.directory / LOG).open("wb") as output:
            is_tied, tied = os.pipe()
            with open(is_tied, "rb") as waited_for:
                try:
                    self._process = subprocess.Popen(
                        [sys.executable, "-c", TIED, str(tied), *self.command],
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        process_group=0,
                        pass_fds=[tied],
                    )
                finally:
                    os.close(tied)
                waited_for.read()
        self._is_paused = False
        with suppress(ProcessLookupError):  # it has ended already
            os.setpriority(os.PRIO_PROCESS, self._process.pid, LOWEST_PRIORITY)

    def _ended(self, code: int) -> None:
        if code == 0:
            self._num_failures = 0
            return
        self._num_failures += 1
        path = self.learned.directory / LOG
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        last = next((line for line in reversed(lines) if line.strip()), "nothing")
        log.warning("a round of learning has failed (exit %d; it said: %s; all of it: %s)", code, last, path)

    @staticmethod
    def _signal(process: subprocess.Popen[bytes], number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
