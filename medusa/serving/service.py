"""One model of the server: from a checked request to running answers, its limits and its learning."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from medusa.acceptance.grammar import Grammar
from medusa.acceptance.sampling import OccurrencePenalty
from medusa.base.causal_lm import end_ids, vocab_size
from medusa.base.sampling_advice import SamplingAdvice, sampling_advice
from medusa.decoding.batch import BatchLimits
from medusa.decoding.scheduler import QueueFull
from medusa.decoding.state import DecodeRequest
from medusa.drafters.references import SuffixCorpus
from medusa.heads.checkpoint import load_heads
from medusa.model import MedusaModel
from medusa.prompts import in_reasoning
from medusa.serving.answer_grammars import AnswerGrammars
from medusa.serving.chat_requests import ChatRequest
from medusa.serving.completion_requests import CompletionRequest, InfillRequest
from medusa.serving.embedded_texts import EmbeddedTexts
from medusa.serving.embedding_requests import EmbeddingRequest
from medusa.serving.embeddings import EmbeddingQueue, EmbeddingTask
from medusa.serving.metrics import ServerMetrics
from medusa.serving.output_formats import OutputFormat
from medusa.serving.output_parser import OutputParser
from medusa.serving.prompts import TOO_LONG, PromptTokenizer
from medusa.serving.replies import RequestError
from medusa.serving.settings import ServiceOptions
from medusa.serving.shared_fields import SEEDS, SharedFields, sampling_arguments, text_of
from medusa.serving.worker import Answer, Update, Worker, WorkerEnded
from medusa.text_stream import AnswerText

log = logging.getLogger("medusa.serving")

RETRY_AFTER = 2
"""Seconds after which a client may ask again when there is no room."""
CHUNK_SECONDS = 0.25
"""The longest time of a part of a prompt, or of a text that is embedded: a request that comes meanwhile waits
for it."""
SHORT_CHUNK = 64
"""Prompt tokens at a time on a CPU: there a token costs no more in a short chunk than in a long one, and
running answers wait for the whole of it."""
PLAIN_SAMPLING = SamplingAdvice(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)
"""The distribution as it is, which clients of OpenAI's protocol expect."""
PLAIN_ROWS = 4
"""Answers without guessing that are under way at once, for comparison."""


def overloaded() -> RequestError:
    """The error without free capacity."""
    text = "the server is busy: the queue is full; try again later"
    return RequestError(text, 503, code="overloaded", retry_after=RETRY_AFTER)


def shutting_down() -> RequestError:
    """The error of a server that is about to end."""
    text = "the server is shutting down; ask again when it is back"
    return RequestError(text, 503, code="shutting_down", retry_after=RETRY_AFTER)


def _bytes(mib: int | None) -> int | None:
    return None if mib is None else mib * 2**20


class Service(PromptTokenizer):
    """Answers requests with one model. Requests that cannot be served raise a :class:`RequestError`.

    Args:
        template_options: default chat template options.
        num_owners: clients with a key of their own, among whom the suffix cache is divided.
        metrics: counters that go on here.

    Raises:
        ValueError: the model has no tokenizer, or its steps cannot be shared.
    """

    def __init__(
        self,
        model: MedusaModel,
        options: ServiceOptions,
        template_options: Mapping[str, Any] | None = None,
        num_owners: int = 1,
        metrics: ServerMetrics | None = None,
    ):
        if model.tokenizer is None:
            raise ValueError("a server needs a tokenizer; pass tokenizer= to MedusaModel.from_pretrained")
        self.model = model
        self.options = options
        super().__init__(model.tokenizer, vocab_size(model.base), template_options or {})
        self.embedded = EmbeddedTexts(model.base, self, options.embeddings)
        """The texts of requests for embeddings."""
        self.num_owners = num_owners
        self.names = options.served_model_name or (PurePath(model.base.name_or_path or "model").name,)
        """Model names that clients may use; the first is the official one."""
        flags = SamplingAdvice(
            options.temperature, options.top_p, options.top_k, options.min_p, options.repeat_penalty
        )
        advice = sampling_advice(model.base)
        self.sampling = flags.over(advice).over(PLAIN_SAMPLING)
        """Sampling options of requests that leave them out."""
        sources = {"flags": flags, "what the base comes with": advice}
        self.sampling_sources = [name for name, source in sources.items() if source != SamplingAdvice()]
        """Where they are from."""
        self.limits = BatchLimits(
            max_rows=options.max_rows,
            max_waiting=options.max_waiting,
            chunk=options.chunk or (SHORT_CHUNK if model.profile.is_on_cpu else BatchLimits.chunk),
            by_time=options.chunk is None and model.profile.is_on_cpu,
            chunk_seconds=CHUNK_SECONDS,
        ).in_memory(model.engine_base, *(_bytes(mib) for mib in (options.cache_mib, options.prefix_mib)))
        batches = {False: model.continuous_batch(self.limits, plain=options.plain)}
        self.store = None
        if self.limits.prefix_bytes:
            self.store = model.prefix_store(2**20 * options.prefix_store_mib, options.plain)
        batches[False].prefixes.store = self.store
        if options.allow_plain:
            few = replace(self.limits, max_rows=PLAIN_ROWS, max_waiting=PLAIN_ROWS, prefix_bytes=0)
            batches[True] = model.continuous_batch(few, plain=True)
        self.metrics = metrics or ServerMetrics()
        texts = EmbeddingQueue(self.limits.chunk, CHUNK_SECONDS, options.max_waiting)
        self.worker = Worker(batches, self.metrics, texts, model.learning)
        self.metrics.watch(batches, lambda: self.worker.num_added, model.learning, self.store)
        self.count_as_busy(lambda: False)
        if model.learning is not None:
            model.learning.on_new_heads = self.use_heads
        self._corpora: dict[Hashable, SuffixCorpus] = {}
        if options.suffix_cache_mib:
            self.corpus_of(None)  # refused, if at all, at the start
        self.began_at = datetime.now(UTC).isoformat()
        self.is_draining = False
        """New requests are refused."""

    def start(self) -> None:
        """Decode from here on; the log says how."""
        log.info(
            "key-value cache: room for %s tokens, and %s MiB for texts that have ended",
            f"{self.limits.max_slots:,}",
            f"{self.limits.prefix_bytes / 2**20:,.0f}",
        )
        self._chat_template.start()
        self.worker.start()
        log.info("clients call the model %r", self.names[0])
        sources = " and ".join(self.sampling_sources) or "OpenAI's defaults"
        log.info("sampling where a request leaves it out: %s (%s)", self.sampling, sources)
        if self.tokenizer.chat_template is None:
            log.info(
                "the base has no chat template: only /v1/completions answers, and no chat does, nor the page"
            )

    def count_as_busy(self, is_other_work: Callable[[], bool]) -> None:
        """Have heads learn only while this model does nothing, nor is there other work."""
        if self.model.learning is not None:
            self.model.learning.is_busy = lambda: self.worker.num_active > 0 or is_other_work()

    def pause_learning(self) -> None:
        """Have learning stand still: something is asked, perhaps of another model."""
        if self.model.learning is not None:
            self.model.learning.pause()

    def use_heads(self, directory: Path) -> None:
        """Draft with the heads in ``directory`` once no answer is under way; prefixes that were read stay."""
        take = self.model.prepared_heads(load_heads(directory))

        def change() -> None:
            take()
            batch = self.model.continuous_batch(self.limits, plain=self.options.plain)
            batch.go_on_from(self.worker.batches[False])
            self.worker.batches[False] = batch

            log.info("heads in use from here on: %s", directory)

        self.worker.when_idle(change)

    @property
    def is_ready(self) -> bool:
        return self.worker.is_alive and not self.is_draining

    @property
    def context(self) -> int | None:
        """Tokens that prompt and answer may have together."""
        return self.model.profile.context

    @functools.cached_property
    def _grammars(self) -> AnswerGrammars:
        return AnswerGrammars(self.tokenizer, vocab_size(self.model.base), self._end_ids)

    @property
    def _end_ids(self) -> list[int]:
        return sorted(end_ids(self.model.base, self.tokenizer))

    def grammar(self, request: SharedFields, prompt: Sequence[int]) -> Grammar:
        """The grammar of the answer to ``prompt``, after its reasoning, where it ``is_formed``."""
        if isinstance(request, ChatRequest):
            return self._grammars.of(request, self.output_format, self._is_thinking(prompt))
        return self._grammars.of(request, OutputFormat(), is_thinking=None)

    @functools.cached_property
    def _marks(self) -> dict[int, str]:
        """The control tokens that separate the parts of an answer, which are no text otherwise."""
        return {id: name for id, name in self._control_names.items() if name in self.output_format.marks}

    def _is_thinking(self, prompt: Sequence[int]) -> bool | None:
        """Whether the model goes on with its reasoning where the prompt of a chat ends; False where the
        prompt has ended it, None where the model may begin it or not."""
        return in_reasoning(self.tokenizer, prompt, self.output_format.reasoning_tags)

    def reader(self, request: ChatRequest | CompletionRequest, prompt: Sequence[int]) -> OutputParser:
        """The output parser of an answer to ``prompt``."""
        if isinstance(request, CompletionRequest):  # all of it is text
            return OutputParser(OutputFormat())
        tools = {tool["function"]["name"]: tool["function"] for tool in request.may_call}
        most = 1 if request.parallel_tool_calls is False else None
        return OutputParser(self.output_format, tools, most, bool(self._is_thinking(prompt)))

    def _ends_of(self, request: SharedFields, prompt: Sequence[int]) -> list[int]:
        """The tokens that end an answer to ``prompt``: of one that fills a gap also those that mark gaps and
        files."""
        if isinstance(request, CompletionRequest) and self.infill is not None and self.infill.asks(prompt):
            return sorted({*self._end_ids, *self.infill.ends})
        return self._end_ids

    @property
    def max_tokens(self) -> int:
        """Tokens that a prompt and its answer may have together at most."""
        return max(batch.max_tokens for batch in self.worker.batches.values())

    def check(self, request: SharedFields) -> None:
        """Checks a request before anything is computed for it."""
        if request.medusa_plain and not self.options.allow_plain:
            raise RequestError(
                "this server has no medusa_plain, which takes time from all others; leave it out, or have "
                "the server started with --allow-plain",
                param="medusa_plain",
            )
        refusal = request.refused()
        if refusal is not None:
            raise RequestError(refusal[1], param=refusal[0])
        is_gap = isinstance(request, CompletionRequest) and (
            request.suffix or isinstance(request, InfillRequest)
        )
        if is_gap and self.infill is None:
            name = request.suffix_name
            can_do_without = not isinstance(request, InfillRequest)
            advice = f"leave {name} out" if can_do_without else "ask /v1/completions to go on with a text"
            raise RequestError(
                f"{name} needs a model that was trained to fill in the middle, and the tokenizer of this one "
                f"has no tokens for it, such as <|fim_prefix|>; {advice}, or serve a model for code, "
                "such as Qwen2.5-Coder",
                param=name,
            )
        self.check_tokens([int(key) for key in request.logit_bias or {}], "logit_bias")
        self._check_open()
        most = self.limits.max_rows + self.limits.max_waiting
        if request.num_answers > most:
            raise RequestError(
                f"a request may want {most} answers here, got {request.num_answers}; ask for fewer at once",
                param="n",
            )
        try:
            self.worker.check_room(request.medusa_plain, request.num_answers)
        except QueueFull as error:
            raise overloaded() from error

    def answers(
        self,
        request: SharedFields,
        prompts: Sequence[Sequence[int]],
        listener_of: Callable[[int], Callable[[Update], None]],
        grammar: Grammar | None = None,
        owner: Hashable = None,
    ) -> list[Answer]:
        """The ``n`` answers to each of ``prompts``, not yet started; choice i draws from ``seed + i``, and
        reports to the listener with its number among all. Their prefixes are not shared with other owners."""
        expected: list[int] = []
        if request.prediction is not None:
            text = text_of(request.prediction.content)
            self.check_length(text, "prediction")
            expected = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(expected) > self.max_tokens:
                raise RequestError(
                    f"{TOO_LONG.format(self.max_tokens)}, and prediction has {len(expected)}; shorten it",
                    param="prediction",
                    code="context_length_exceeded",
                )
        known: dict[str, Any] = {"is_plain": request.medusa_plain, "seconds": self.options.timeout}
        known |= {"owner": owner, "prediction": expected, "only_reads": request.longest == 0}
        decode_requests = [
            (prompt, decode_request)
            for prompt in prompts
            for decode_request in self._decode_requests(request, prompt, expected, grammar, owner)
        ]
        return [
            Answer(decode_request, self._answer_text(request, prompt), listener_of(number), **known)
            for number, (prompt, decode_request) in enumerate(decode_requests)
        ]

    def _answer_text(self, request: SharedFields, prompt: Sequence[int]) -> AnswerText:
        """The text of an answer to ``prompt``, not yet begun."""
        controls = self._control_names if request.stops else None
        if not isinstance(request, ChatRequest):
            return AnswerText(self.tokenizer, request.stops, controls=controls)
        return AnswerText(
            self.tokenizer,
            request.stops,
            self._marks,
            controls,
            self.output_format.unsearched,
            bool(self._is_thinking(prompt)),
        )

    def _decode_requests(
        self,
        request: SharedFields,
        prompt: Sequence[int],
        expected: Sequence[int],
        grammar: Grammar | None,
        owner: Hashable,
    ) -> Iterator[DecodeRequest]:
        """The decode request of each choice."""
        arguments: dict[str, Any] = {
            **sampling_arguments(request, self.sampling),
            "max_new_tokens": self._longest(request, len(prompt)),
            "eos_token_id": self._ends_of(request, prompt) or None,
            "num_logprobs": request.num_logprobs,
        }
        processors = LogitsProcessorList()
        if request.frequency_penalty or request.presence_penalty:
            frequency = request.frequency_penalty or 0.0
            presence = request.presence_penalty or 0.0
            processors.append(OccurrencePenalty(len(prompt), frequency, presence))
        if self.model.base.generation_config.pad_token_id is None:
            arguments["pad_token_id"] = 0  # fills nothing here, and without it transformers warns
        first = int(torch.randint(SEEDS, ())) if request.seed is None else request.seed % SEEDS
        ids = torch.tensor([list(prompt)], device=self.model.device)
        references = self.model.references(expected, self.corpus_of(owner), [ids[0]])
        for choice in range(request.n):
            kept = [] if grammar is None else [grammar.processor(len(prompt))]
            arguments["logits_processor"] = LogitsProcessorList([*processors, *kept])
            try:
                decode_request = self.model.request(
                    ids, attention_mask=torch.ones_like(ids), seed=(first + choice) % SEEDS, **arguments
                )
                decode_request = replace(decode_request, references=references)
                if request.ignore_eos:
                    decode_request = replace(decode_request, eos_ids=frozenset())
                self.worker.batches[request.medusa_plain].check(decode_request)
            except ValueError as error:
                raise RequestError(str(error)) from error
            yield decode_request

    def corpus_of(self, owner: Hashable) -> SuffixCorpus | None:
        """The suffix cache of ``owner``; None where it is switched off.

        Raises:
            ValueError: the memory is too small for the number of owners, or cannot be searched here.
        """
        if not self.options.suffix_cache_mib:
            return None
        if owner not in self._corpora:
            self._corpora[owner] = SuffixCorpus(
                self.options.suffix_cache_mib * 2**20 // max(1, self.num_owners)
            )
        return self._corpora[owner]

    def submit(self, answers: Sequence[Answer]) -> None:
        """Have ``answers`` decoded."""
        self._check_open()
        with _refusals():
            self.worker.submit(answers)

    def _check_open(self) -> None:
        if self.is_draining:
            raise shutting_down()

    def _longest(self, request: SharedFields, num_prompt: int) -> int:
        """Tokens that the answer may have: what a client asks for, as far as there is room."""
        most = self.worker.batches[request.medusa_plain].max_tokens
        if num_prompt >= most:
            raise RequestError(
                f"{TOO_LONG.format(most)}, and the prompt has {num_prompt}, which leaves none for an answer; "
                "shorten it",
                param=request.prompt_name,
                code="context_length_exceeded",
                excess=(num_prompt, most),
            )
        longest = self.options.max_new_tokens if request.longest is None else request.longest
        return min(max(1, longest), self.options.max_new_tokens, most - num_prompt)

    def embedded_texts(self, request: EmbeddingRequest) -> list[list[int]]:
        """The tokens of each text: see :meth:`medusa.serving.embedded_texts.EmbeddedTexts.tokens`."""
        self._check_open()
        return self.embedded.tokens(request)

    def embed(self, texts: Sequence[Sequence[int]]) -> Future[list[Tensor]]:
        """The embeddings, (D,) float32 each, of texts in tokens; to cancel it has the rest left out."""
        self._check_open()
        begin = partial(self.model.pooled_states, pooling=self.embedded.pooling)
        task = EmbeddingTask(texts, begin, time.monotonic() + self.options.timeout)
        with _refusals():
            self.worker.embed(task)
        self.metrics.embedded(sum(map(len, texts)))
        return task.vectors

    def heads_card(self) -> dict[str, Any]:
        """What ``GET /v1/heads`` says: the heads that guess, and what the base has learned here. It names no
        files."""
        learning = self.model.learning
        heads = self.model.heads
        in_use = None
        if heads is not None:
            in_use = {"num_heads": heads.num_heads, "num_nodes": self.model.tree.num_nodes}
        return {
            "object": "heads",
            "in_use": in_use,
            "learning": None if learning is None else learning.report(),
        }

    def close(self) -> None:
        """Decode and learn nothing more; what is to be stored is written."""
        self.worker.close()
        self.metrics.unwatch()
        if self.store is not None:
            self.store.close()
        learning = self.model.learning
        if learning is not None:
            learning.close()
            learning.is_busy = lambda: False  # what is held by it would stay as long as the model
            learning.on_new_heads = lambda directory: None


@contextmanager
def _refusals() -> Iterator[None]:
    """Tells clients why the decode thread takes no work."""
    try:
        yield
    except QueueFull as error:
        raise overloaded() from error
    except WorkerEnded as error:
        raise RequestError("the server cannot answer any more", 503, code="not_ready") from error
