"""One model with the protocol: from a checked request to running answers, and the limits of the server."""

from __future__ import annotations

import functools
import itertools
import logging
import re
import secrets
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

from medusa.acceptance.grammar import (
    Grammar,
    GrammarCompiler,
    choice_rule,
    json_rule,
    lark_rule,
    pattern_rule,
)
from medusa.acceptance.sampling import OccurrencePenalty
from medusa.base.causal_lm import end_ids, hidden_size, vocab_size
from medusa.base.pooling import Pooling, stated_pooling
from medusa.base.sampling_advice import SamplingAdvice, sampling_advice
from medusa.conversations import as_template
from medusa.decoding.batch import BatchLimits
from medusa.decoding.scheduler import QueueFull
from medusa.decoding.state import DecodeRequest
from medusa.drafters.references import SuffixCorpus
from medusa.heads.checkpoint import load_heads
from medusa.model import MedusaModel
from medusa.prompts import in_reasoning
from medusa.serving.chat_template import TemplateLimitError
from medusa.serving.dialects import Dialect
from medusa.serving.embeddings import EmbeddingQueue, EmbeddingTask
from medusa.serving.infill import InfillTokens, start_tokens, tokens_after
from medusa.serving.metrics import ServerMetrics
from medusa.serving.output_formats import OutputFormat
from medusa.serving.output_parser import OutputParser
from medusa.serving.replies import RequestError
from medusa.serving.requests import (
    SEEDS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    InfillRequest,
    LlamaInfillRequest,
    SharedFields,
    TokenizeRequest,
    sampling_arguments,
    shortened,
    text_of,
)
from medusa.serving.settings import ServiceOptions
from medusa.serving.tokenized_model import TEMPLATE_ERRORS, TokenizedModel
from medusa.serving.worker import Answer, Update, Worker, WorkerEnded
from medusa.text_stream import AnswerText

log = logging.getLogger("medusa.serving")

RETRY_AFTER = 2
"""Seconds after which a client may ask again when there is no room."""
TEXT_RULES: dict[str, Callable[[str, Any], str]] = {
    "json": json_rule,
    "regex": pattern_rule,
    "choice": choice_rule,
    "grammar": lark_rule,
}
"""The grammar rule for each kind of structured output."""
CHUNK_SECONDS = 0.25
"""The longest time of a part of a prompt, or of a text that is embedded: a request that comes meanwhile waits
for it."""
CPU_CHUNK = 64
"""Prompt tokens at a time on a CPU: there a token costs no more in a short chunk than in a long one, and
running answers wait for the whole of it."""
PLAIN_SAMPLING = SamplingAdvice(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)
"""The distribution as it is, which clients of OpenAI's protocol expect."""
PLAIN_ROWS = 4
"""Answers without guessing that are under way at once, for comparison."""


_FULL = "This model's maximum context length is {} tokens"
"""OpenAI's words, by which clients know that they must shorten a conversation."""


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


class Service(TokenizedModel):
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
        super().__init__(model.tokenizer, vocab_size(model.base))
        self.template_options = template_options or {}
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
            chunk=options.chunk or (CPU_CHUNK if model.profile.is_on_cpu else BatchLimits.chunk),
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
            log.info("the base has no chat template: /v1/completions only, and no chat page")

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

    def chat_prompt(self, request: ChatRequest) -> list[int]:
        """The tokens of a conversation, as the chat template renders it."""
        if self.tokenizer.chat_template is None:
            raise RequestError("this model has no chat template; use /v1/completions", param="messages")
        speaks_of_tools = any(message.needs_tools for message in request.messages)
        if (request.offered or speaks_of_tools) and not self.knows_tools:
            raise RequestError(
                "the chat template of this model has no place for tools; leave them out",
                param="tools" if request.offered else "messages",
            )
        messages = [message.as_conversation for message in request.messages]
        if not self.takes_several_systems:
            messages = _with_one_system(messages)
        if not self.takes_late_systems:
            messages = _without_late_systems(messages)
        try:
            messages = as_template(messages, self._chat_template)
            arguments = {**self.template_options, **request.template_arguments}
            text = self._marked(messages, request.offered, arguments)
        except TemplateLimitError as error:
            raise RequestError(
                f"the model's chat template does not come to an end with these messages: {error}; send "
                "fewer, or serve a model with another template",
                param="messages",
            ) from error
        except TEMPLATE_ERRORS as error:
            raise RequestError(
                "the model's chat template refuses these messages: their roles or their order, or what "
                "chat_template_kwargs tells it",
                param="messages",
            ) from error
        self._check_length(text, "messages")
        parts = filter(None, text.split(self._mark))
        return [id for part in parts for id in self.tokenizer(part, add_special_tokens=False)["input_ids"]]

    def _marked(
        self, messages: list[dict[str, Any]], tools: Sequence[Any], arguments: Mapping[str, Any]
    ) -> str:
        """The conversation as text, with the mark inside of each control token that messages and tools spell:
        tokenised on either side of it, what users write is text."""
        text = self._rendered(messages, tools, arguments)
        cut, *others = self._cut([messages, [*tools], dict(arguments)])
        if [cut, *others] == [messages, [*tools], arguments]:
            return text
        # Some templates look for such text in earlier answers, such as the end of reasoning.
        kept_answers = [
            old if old["role"] == "assistant" else new for old, new in zip(messages, cut, strict=True)
        ]
        for candidate in (cut, kept_answers):
            marked = self._rendered(candidate, *others)
            if marked.replace(self._mark, "") == text:
                return marked
        raise RequestError(
            "a message holds the text of a control token, which the chat template does not leave as it is; "
            "leave it out",
            param="messages",
        )

    @functools.cached_property
    def _mark(self) -> str:
        """Text that nobody can guess."""
        return f"{secrets.randbits(128):039d}"

    @functools.cached_property
    def _controls(self) -> re.Pattern[str]:
        names = {*self._control_names.values(), *(self.infill.names if self.infill else ())}
        longest_first = sorted((name for name in names if len(name) > 1), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def _cut(self, value: Any) -> Any:
        """``value`` with the mark after the first character of each control token in its texts."""
        if isinstance(value, str):
            return self._controls.sub(lambda match: f"{match[0][0]}{self._mark}{match[0][1:]}", value)
        if isinstance(value, list):
            return [self._cut(item) for item in value]
        if isinstance(value, dict):
            return {self._cut(key): self._cut(item) for key, item in value.items()}
        return value

    @functools.cached_property
    def _grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer, vocab_size(self.model.base), self._end_ids)

    @property
    def _end_ids(self) -> list[int]:
        return sorted(end_ids(self.model.base, self.tokenizer))

    def grammar(self, request: ChatRequest | CompletionRequest, prompt: Sequence[int]) -> Grammar:
        """The grammar of the answer to ``prompt``, after its reasoning, where it ``is_formed``."""
        chat = request if isinstance(request, ChatRequest) else None
        text = request.text_form
        must_call = chat.must_call if chat else []
        name = "tool_choice" if must_call or text is None else text.field
        try:
            grammars = self._grammars
            output_format = self.output_format if chat else OutputFormat()
            rules = [f"answer: {output_format.text_around(grammars.as_terminals)} text"]
            if must_call:
                rules = ["answer: call", *output_format.call_rules(must_call, grammars.as_terminals)]
            elif chat and chat.may_call:
                functions = [tool["function"] for tool in chat.may_call]
                rules = [
                    f"{rules[0]} | {output_format.calls}",
                    *output_format.call_rules(functions, grammars.as_terminals),
                ]
            if text is not None and not must_call:
                rules.append(TEXT_RULES[text.kind]("text", text.constraint))
            before = output_format.reasoning_before(
                grammars.as_terminals, self._is_thinking(prompt) if chat else None
            )
            return grammars.compile(rules, *before)
        except (ImportError, ValueError) as error:
            raise RequestError(f"{name} cannot be kept: {error}", param=name) from error

    @functools.cached_property
    def _marks(self) -> dict[int, str]:
        """The control tokens that separate the parts of an answer, which are no text otherwise."""
        return {id: name for id, name in self._control_names.items() if name in self.output_format.marks}

    @functools.cached_property
    def _control_names(self) -> dict[int, str]:
        added = self.tokenizer.added_tokens_decoder.items()
        return {id: token.content for id, token in added if token.special}

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

    def unread(self, request: ChatRequest | CompletionRequest) -> list[str]:
        """The fields that a client gives and that nobody reads here, nor does the chat template."""
        unread = [*request.unread()]
        if isinstance(request, ChatRequest):
            names = ("reasoning_effort", "enable_thinking")
            template_fields = {name: name for name in names if getattr(request, name) is not None}
            template_fields |= {
                name: f"chat_template_kwargs.{shortened(name)}" for name in request.chat_template_kwargs or {}
            }
            if request.reasoning_effort == "none" and "enable_thinking" in self._template:
                template_fields.pop("reasoning_effort")
            beside = {
                key: f"messages[].{shortened(key)}" for message in request.messages for key in message.beside
            }
            template_fields |= {name: field for name, field in beside.items() if name not in template_fields}
            known = set(re.findall(r"\w+", self._template))
            unread += [field for name, field in template_fields.items() if name not in known]
        return unread

    def prompts(self, request: ChatRequest | CompletionRequest) -> list[list[int]]:
        """The tokens of a conversation, or of each text to continue."""
        if isinstance(request, ChatRequest):
            prompts = [self.chat_prompt(request)]
        else:
            prompts = [self._text_prompt(prompt, request) for prompt in request.prompts]
        if not all(prompts):
            raise RequestError("the prompt must not be empty", param="prompt")
        return prompts

    def _text_prompt(self, prompt: str | list[int], request: CompletionRequest) -> list[int]:
        if request.suffix is not None and self.infill is not None:
            return self._infill_prompt(self.infill, prompt, request.suffix, request)
        return self._ids_of(prompt, "prompt")

    def _ids_of(self, text: str | list[int], param: str) -> list[int]:
        """The tokens of a text, with the tokenizer's marks at its beginning and its end."""
        if isinstance(text, str):
            self._check_length(text, param)
            return self.tokenizer(text)["input_ids"]
        self._check_tokens(text, param)
        return text

    def _infill_prompt(
        self, infill: InfillTokens, prompt: str | list[int], suffix: str, request: CompletionRequest
    ) -> list[int]:
        """The tokens of a text with a gap before ``suffix``; control tokens that either spells are text."""
        after = self._tokens_after(suffix, request.suffix_name)
        start = start_tokens(self.tokenizer)
        if isinstance(prompt, str):
            self._check_length(prompt, request.prompt_name)
            first, *more = self._cut(prompt).split(self._mark)
            before = list(self.tokenizer(first, add_special_tokens=False)["input_ids"])
            before += [id for part in more for id in tokens_after(self.tokenizer, part)]
        else:
            self._check_tokens(prompt, request.prompt_name)
            before = prompt
        if not isinstance(request, LlamaInfillRequest):
            return infill.prompt(start, before, after)
        files = [(other.filename, other.text) for other in request.others]
        shown = infill.context(files, partial(self._tokens_after, param="input_extra"))
        begun = self._tokens_after(request.begun, "prompt")
        return [*infill.prompt([*start, *shown], before, after), *begun]

    def _tokens_after(self, text: str, param: str) -> list[int]:
        """The tokens of a text behind a mark; control tokens that it spells are text."""
        self._check_length(text, param)
        return [id for part in self._cut(text).split(self._mark) for id in tokens_after(self.tokenizer, part)]

    def _ends_of(self, request: SharedFields, prompt: Sequence[int]) -> list[int]:
        """The tokens that end an answer to ``prompt``: of one that fills a gap also those that mark gaps and
        files."""
        if isinstance(request, CompletionRequest) and self.infill is not None and self.infill.asks(prompt):
            return sorted({*self._end_ids, *self.infill.ends})
        return self._end_ids

    @functools.cached_property
    def max_characters(self) -> int:
        """Characters of the longest prompt that can fit, if all its tokens are the longest one."""
        return self.max_tokens * max(map(len, self.tokenizer.get_vocab()))

    @property
    def max_tokens(self) -> int:
        """Tokens that a prompt and its answer may have together at most."""
        return max(batch.max_tokens for batch in self.worker.batches.values())

    def _check_length(self, text: str, param: str) -> None:
        """Refuse a text that is too long before it is tokenised, which takes long."""
        if len(text) > self.max_characters:
            raise RequestError(
                f"{_FULL.format(self.max_tokens)}, and {param} has {len(text)} characters, of which at most "
                f"{self.max_characters} can fit; shorten it",
                param=param,
                code="context_length_exceeded",
            )

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
        self._check_tokens([int(key) for key in request.logit_bias or {}], "logit_bias")
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
            self._check_length(text, "prediction")
            expected = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(expected) > self.max_tokens:
                raise RequestError(
                    f"{_FULL.format(self.max_tokens)}, and prediction has {len(expected)}; shorten it",
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
                f"{_FULL.format(most)}, and the prompt has {num_prompt}, which leaves none for an answer; "
                "shorten it",
                param=request.prompt_name,
                code="context_length_exceeded",
                excess=(num_prompt, most),
            )
        longest = self.options.max_new_tokens if request.longest is None else request.longest
        return min(max(1, longest), self.options.max_new_tokens, most - num_prompt)

    def _check_tokens(self, ids: Sequence[int], param: str) -> None:
        size = vocab_size(self.model.base)
        for token in ids:
            if not 0 <= token < size:
                raise RequestError(
                    f"{param} must hold token ids of 0 to {size - 1}, got {token}", param=param
                )

    def tokens(self, request: TokenizeRequest) -> dict[str, Any]:
        """The tokens of a text or a conversation."""
        if request.prompt is None:
            ids = self.chat_prompt(request.chat)
        else:
            self._check_length(request.prompt, "prompt")
            ids = self.tokenizer(request.prompt, add_special_tokens=request.add_special_tokens)["input_ids"]
        names = self.tokenizer.convert_ids_to_tokens(ids) if request.return_token_strs else None
        return {"count": len(ids), "max_model_len": self.context, "tokens": ids, "token_strs": names}

    @functools.cached_property
    def pooling(self) -> Pooling:
        """How a text becomes a vector.

        Raises:
            RequestError: the base is not made for it.
        """
        try:
            stated = stated_pooling(self.model.base)
        except ValueError as error:
            log.info("no embeddings: %s", error)
            raise RequestError(
                "this model states a form of embeddings that is not computed here; serve another one, such "
                "as Qwen3-Embedding",
                code="no_embeddings",
            ) from error
        if stated is not None:
            return stated
        if self.options.embeddings is None:
            raise RequestError(
                "this model is not made for embeddings: its files state no pooling; serve one that is, such "
                "as Qwen3-Embedding, or have the server started with --embeddings last (or mean)",
                code="no_embeddings",
            )
        return Pooling(self.options.embeddings)

    def embedded_texts(self, request: EmbeddingRequest) -> list[list[int]]:
        """The tokens of each text, as the tokenizer reads one: with its marks at the beginning and the end.
        Texts that are too long are cut where the request says so, before the mark at the end."""
        _ = self.pooling  # refused, if at all, before anything is computed
        self._check_open()
        most = hidden_size(self.model.base)
        if request.dimensions is not None and request.dimensions > most:
            raise RequestError(
                f"dimensions must be at most {most}, those of this model, got {request.dimensions}; ask for "
                "fewer, or leave it out",
                param="dimensions",
            )
        texts = []
        for text in request.texts:
            if not text:
                raise RequestError("input must not hold empty texts; leave them out", param="input")
            ids = self._ids_of(text[: self.max_characters] if request.is_cut else text, "input")
            num_over = len(ids) - self.max_tokens
            if num_over > 0 and not request.is_cut:
                raise RequestError(
                    f"{_FULL.format(self.max_tokens)}, and input has a text of {len(ids)}; shorten it",
                    param="input",
                    code="context_length_exceeded",
                    excess=(len(ids), self.max_tokens),
                )
            num_marks = len(self._end_marks) if ids[-1:] == self._end_marks else 0
            if num_over > 0:
                ids = [*ids[: self.max_tokens - num_marks], *ids[len(ids) - num_marks :]]
            texts.append(ids)
        return texts

    @functools.cached_property
    def _end_marks(self) -> list[int]:
        """The token that the tokenizer puts behind a text; [] for none."""
        ids = self.tokenizer("a")["input_ids"]
        bare = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        return ids[-1:] if ids[-1:] != bare[-1:] else []

    def shortened(self, vectors: Sequence[Tensor], dimensions: int | None) -> list[Tensor]:
        """The first numbers of each vector, at length 1 where the whole one has it."""
        if dimensions is None:
            return [*vectors]
        first = [vector[:dimensions] for vector in vectors]
        if not self.pooling.is_normalised:
            return first
        return [torch.nn.functional.normalize(vector, dim=0) for vector in first]

    def embed(self, texts: Sequence[Sequence[int]]) -> Future[list[Tensor]]:
        """The embeddings, (D,) float32 each, of texts in tokens; to cancel it has the rest left out."""
        self._check_open()
        begin = partial(self.model.pooled_states, pooling=self.pooling)
        task = EmbeddingTask(texts, begin, time.monotonic() + self.options.timeout)
        with _refusals():
            self.worker.embed(task)
        self.metrics.embedded(sum(map(len, texts)))
        return task.vectors

    def num_tokens(self, request: Dialect) -> dict[str, Any]:
        """The number of tokens of a conversation, as Anthropic's clients read it."""
        return {"input_tokens": len(self.chat_prompt(request.chat))}

    def text(self, request: DetokenizeRequest) -> dict[str, Any]:
        """The text of tokens."""
        self._check_tokens(request.tokens, "tokens")
        return {"prompt": self.text_of(request.tokens)}

    def text_of(self, tokens: Sequence[int]) -> str:
        """Control tokens included."""
        return self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

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


def _with_one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``messages`` with the system messages at their head as one, a blank line between."""
    first = list(itertools.takewhile(lambda message: message["role"] == "system", messages))
    if len(first) < 2:
        return messages
    together = "\n\n".join(message["content"] for message in first)
    return [{**first[0], "content": together}, *messages[len(first) :]]


def _without_late_systems(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``messages`` where the user says what system messages behind others say, in one turn with what the user
    says before."""
    shown = list(itertools.takewhile(lambda message: message["role"] == "system", messages))
    for message in messages[len(shown) :]:
        if message["role"] != "system":
            shown.append(message)
        elif shown and shown[-1]["role"] == "user":
            shown[-1] = {**shown[-1], "content": f"{shown[-1]['content']}\n\n{message['content']}"}
        else:
            shown.append({**message, "role": "user"})
    return shown
