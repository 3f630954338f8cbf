"""The decode thread: only it touches the batches, and it reports output to each request.

Requests come in as :class:`Answer` from any thread. Each has a listener, which this thread calls with new
output. Plain requests, if allowed, have a batch of their own; while both are busy they share the machine's
time evenly, so that two answers to one question can be raced. So do answers and texts that are embedded.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from medusa.acceptance.grammar import GrammarFailed
from medusa.acceptance.sampling import TokenLogprobs
from medusa.decoding.batch import Batch
from medusa.decoding.scheduler import QueueFull
from medusa.decoding.state import DecodeRequest, Row
from medusa.decoding.step import RowOutput
from medusa.hardware import release_threads
from medusa.learning.idle_learning import IdleLearning
from medusa.serving.embeddings import EmbeddingQueue, EmbeddingTask
from medusa.serving.metrics import ServerMetrics
from medusa.text_stream import AnswerText, Piece

log = logging.getLogger("medusa.serving")


@dataclass(frozen=True)
class Update:
    """New output of an answer."""

    pieces: list[Piece] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_tokens: int = 0
    """Tokens of the answer so far."""
    num_steps: int = 0
    """Forward passes that it took so far, the reading of the prompt included as one."""
    finish_reason: str | None = None
    """"stop", "length", "timeout", "overloaded", "form", "shutdown" or "error": the last update."""
    stop_string: str | None = None
    """The stop string that has ended the answer."""


class Answer:
    """One answer under way, from its request to its last update."""

    def __init__(
        self,
        request: DecodeRequest,
        text: AnswerText,
        listener: Callable[[Update], None],
        *,
        is_plain: bool = False,
        seconds: float = float("inf"),
        owner: Hashable = None,
        prediction: Sequence[int] = (),
        only_reads: bool = False,
    ):
        self.row = Row(request, tag=weakref.ref(self), owner=owner)  # no cycle: its memory goes with it
        self.text = text
        self.listener = listener
        self.is_plain = is_plain
        self.arrived = self.last = time.monotonic()
        self.deadline = self.arrived + seconds
        self.num_tokens = self.num_steps = 0
        self.drafted = Counter[int]()
        self.accepted = Counter[int]()
        """Draft tokens by depth, and emitted tokens by depth; 0 for the base model's own."""
        self._logprobs: list[TokenLogprobs] = []
        self._num_told = 0
        self.prediction = prediction
        """Tokens that the client expects."""
        self.only_reads = only_reads
        """The prompt is read for the next request, and the token behind it is told to nobody."""
        self.finish_reason: str | None = None
        """The finish reason of the last update."""

    def told_logprobs(self, new: Sequence[TokenLogprobs] = ()) -> list[TokenLogprobs]:
        """The log-probabilities that are not told yet, of ``new`` tokens too, as far as their text is out."""
        self._logprobs += new
        num_new = min(self.text.num_told - self._num_told, len(self._logprobs))
        logprobs = self._logprobs[:num_new]
        self._logprobs = self._logprobs[num_new:]
        self._num_told += num_new
        return logprobs


class WorkerEnded(RuntimeError):
    """Nothing is decoded any more."""


class Worker:
    """Runs ``batches``, drafted (False) and perhaps plain (True), on a thread of its own; ``learning`` gets
    what was written."""

    def __init__(
        self,
        batches: dict[bool, Batch],
        metrics: ServerMetrics,
        embeddings: EmbeddingQueue,
        learning: IdleLearning | None = None,
    ):
        self.batches = batches
        self.learning = learning
        self.metrics = metrics
        self.embeddings = embeddings
        self._is_embedding = False
        self.seconds = dict.fromkeys(self._kinds, 0.0)
        self._changed = threading.Condition()
        self._added: list[Answer] = []
        self._cancelled: list[Answer] = []
        self._active: set[Answer] = set()
        self._when_idle: list[Callable[[], None]] = []
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="medusa-decoding", daemon=True)

    def start(self) -> None:
        release_threads()  # threads that loaded the model
        self._thread.start()

    def end(self) -> None:
        """Have the thread end after the running step; unfinished answers get an error."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()

    def close(self) -> None:
        """:meth:`end`, and wait for it."""
        self.end()
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._is_closing

    @property
    def num_active(self) -> int:
        """Answers that have not ended."""
        return len(self._active) + len(self._added) + len(self.embeddings)

    @property
    def num_added(self) -> int:
        """Answers that the batches do not know of yet."""
        return len(self._added)

    def submit(self, answers: Sequence[Answer]) -> None:
        """Have ``answers``, of one request, decoded; all of them or none.

        Raises:
            QueueFull: there is no room in the queue.
            WorkerEnded: the thread has ended.
        """
        with self._taking():
            for is_plain in self.batches:
                self.check_room(is_plain, sum(answer.is_plain is is_plain for answer in answers))
            self._added.extend(answers)

    def embed(self, task: EmbeddingTask) -> None:
        """Have ``task`` computed between the steps of answers.

        Raises:
            QueueFull: there is no room in the queue.
            WorkerEnded: the thread has ended.
        """
        with self._taking():
            self.embeddings.add(task)

    @contextmanager
    def _taking(self) -> Iterator[None]:
        """Within this context work is added for the thread, which then sees it; learning stands still."""
        with self._changed:
            if not self.is_alive:
                raise WorkerEnded("the decoding thread has ended")
            yield
            self._changed.notify()
        if self.learning is not None:
            self.learning.pause()

    def when_idle(self, change: Callable[[], None]) -> None:
        """Have the thread call ``change`` between requests, when no answer is under way."""
        with self._changed:
            self._when_idle.append(change)
            self._changed.notify()

    def check_room(self, is_plain: bool, num_answers: int) -> None:
        """Raise QueueFull where ``num_answers`` more answers have no room."""
        batch = self.batches[is_plain]
        with self._changed:  # also held by submitters
            num_added = sum(answer.is_plain is is_plain for answer in self._added)
            if num_answers and num_added + num_answers > max(0, batch.free_capacity):
                raise QueueFull(f"{len(batch.waiting)} requests wait already")

    def cancel(self, answers: Sequence[Answer]) -> None:
        """Drop ``answers`` before the next step; finished ones are ignored."""
        with self._changed:
            self._cancelled.extend(answers)
            self._changed.notify()

    def _run(self) -> None:
        while not self._is_closing:
            try:
                self._decode()
            except BaseException:  # whatever it was: later requests are answered
                log.exception("decoding has failed; the answers under way are lost")
            self._lose_answers()

    def _decode(self) -> None:
        while self._take_changes():
            self._end_overdue()
            busy: list[bool | None] = [kind for kind, batch in self.batches.items() if batch.is_busy]
            is_embedding = len(self.embeddings) > 0
            if is_embedding and not self._is_embedding:  # as who comes later, below
                self.seconds[None] = max(self.seconds.values())
            self._is_embedding = is_embedding
            busy += [None] if is_embedding else []
            if busy:
                self._step(min(busy, key=lambda kind: self.seconds[kind]))

    def _lose_answers(self) -> None:
        """End running answers with an error, and at the end waiting ones too."""
        with self._changed:
            lost = self._active
            self._active = set()
            reason = "shutdown" if self._is_closing else "error"
            if self._is_closing:
                lost = lost.union(self._added)
                self._added = []
        for batch in self.batches.values():
            batch.clear()
        self.embeddings.lose(reason)
        for answer in lost:
            self._end(answer, reason)

    def _take_changes(self) -> bool:
        """Take in submissions and cancellations, waiting while there is nothing to do; false to end."""
        with self._changed:
            while not (self._is_closing or self._added or self._cancelled or self._is_busy):
                while self._when_idle:
                    self._when_idle.pop(0)()
                self._changed.wait()
            added = self._added
            self._added = []
            cancelled = self._cancelled
            self._cancelled = []
            if self._is_closing:
                self._added = added
                return False
            self._active.update(added)
        if not self._is_busy:  # both begin together
            self.seconds = dict.fromkeys(self._kinds, 0.0)
        for answer in added:
            batch = self.batches[answer.is_plain]
            if not batch.is_busy:  # who comes later does not make up for having been idle
                self.seconds[answer.is_plain] = max(self.seconds.values())
            try:
                batch.add(answer.row)
            except QueueFull:  # rows have stepped back into the queue since there was room
                self._end(answer, "overloaded")
        for answer in cancelled:
            if answer in self._active:
                self._drop(answer)
                self.metrics.ended("cancelled")
        return True

    @property
    def _is_busy(self) -> bool:
        return len(self.embeddings) > 0 or any(batch.is_busy for batch in self.batches.values())

    @property
    def _kinds(self) -> list[bool | None]:
        """Kinds of work that share the time: the batches, and embeddings."""
        return [*self.batches, None]

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for answer in [answer for answer in self._active if now > answer.deadline]:
            self._drop(answer)
            self._end(answer, "timeout")

    def _step(self, kind: bool | None) -> None:
        """A step of the batch of this kind; None reads a part of a text that is embedded."""
        began = time.perf_counter()
        outputs: list[RowOutput] = []
        if kind is None:
            self.embeddings.step()
        else:
            outputs = self.batches[kind].step()
        self.seconds[kind] += time.perf_counter() - began
        for output in outputs:
            self._tell(output)

    def _tell(self, output: RowOutput) -> None:
        row = output.row
        reason = output.finish_reason
        answer = row.tag()
        error = None if row.error is None else row.take_error()
        if answer not in self._active:  # a stop string has ended it earlier in the step
            return
        text = answer.text
        if isinstance(error, GrammarFailed):
            self._end(answer, "form")
            return
        if reason == "error":
            log.error("an answer failed: %s", type(error).__name__, exc_info=error)
            self._end(answer, "error")
            return
        tokens = output.tokens
        if answer.only_reads:
            tokens = []
            reason = "length"
        num_text = len(tokens) - (reason == "stop" and tokens[-1] in row.request.eos_ids)
        now = time.monotonic()
        num_prompt = int(row.request.lengths[0])
        num_fed, pieces = text.feed(tokens[:num_text], output.depths[:num_text])
        num_new = num_fed if text.is_stopped else len(tokens)
        if answer.num_steps == 0:
            self.metrics.began(now - answer.arrived, num_new, num_prompt, row.num_reused)
        else:
            self.metrics.went_on(now - answer.last, num_new)
        answer.last = now
        answer.num_steps += 1
        answer.num_tokens += num_new
        answer.drafted.update(output.drafted)
        answer.accepted.update(output.depths[:num_new])
        self.metrics.drafted(output.num_drafted, filter(None, output.depths[:num_new]))
        if text.is_stopped:
            del row.tokens[answer.num_tokens :]  # the same step, or those of one burst, may have gone on
        if text.is_stopped and reason is None:
            self.batches[answer.is_plain].cancel(row)
        if text.is_stopped:
            reason = "stop"
        elif reason is not None:
            pieces += text.finish()
            reason = "stop" if text.is_stopped else reason
        self._send(answer, pieces, answer.told_logprobs((output.logprobs or [])[:num_fed]), reason)

    def _drop(self, answer: Answer) -> None:
        self._active.discard(answer)
        self.batches[answer.is_plain].cancel(answer.row)

    def _end(self, answer: Answer, reason: str) -> None:
        """End an answer that has no more tokens."""
        pieces = answer.text.finish()
        self._send(answer, pieces, answer.told_logprobs(), reason)

    def _send(
        self, answer: Answer, pieces: list[Piece], logprobs: list[TokenLogprobs], reason: str | None
    ) -> None:
        if reason is not None:
            self._active.discard(answer)
            self.metrics.ended(reason)
            answer.finish_reason = reason
            if reason in ("stop", "length"):
                self._remember(answer.row)
                if self.learning is not None and not answer.only_reads:
                    self.learning.add(answer.row.prompt, answer.row.tokens)
        stop = answer.text.stop_string
        answer.listener(Update(pieces, logprobs, answer.num_tokens, answer.num_steps, reason, stop))

    def _remember(self, row: Row) -> None:
        """Add prompt and answer to what later answers to the same owner are guessed from."""
        corpus = row.request.references[0].corpus if row.request.references else None
        if corpus is not None:
            corpus.add(row.prompt + row.tokens)
