"""Who answers: the base model in this process, or any OpenAI-compatible chat endpoint, which is how
self-distillation scales to a serving cluster.

Both take conversations from a source as they get room for them, and hand back each with the next
message, in the order they end.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from medusa.base.causal_lm import end_ids
from medusa.conversations import (
    ANSWER_KEYS,
    Message,
    as_openai,
    as_template,
    check_keepable,
    read_messages,
)
from medusa.decoding.batch import Batch, BatchLimits
from medusa.decoding.state import DecodeRequest, Row
from medusa.model import MedusaModel
from medusa.prompts import encode_messages, split_reasoning
from medusa.training.endpoints import Endpoint, EndpointPool, Refusal

_ENDED = frozenset({"stop", "tool_calls", "function_call"})
"""Finish reasons of an answer that came to its own end."""


@dataclass(frozen=True)
class Reply:
    """The next message of a conversation."""

    message: Message
    """The whole message: role, content, and reasoning_content and tool_calls where there are any."""
    was_cut: bool
    """It did not come to its own end."""
    num_tokens: int
    """As the endpoint counts; 0 when it does not say."""

    @property
    def says_something(self) -> bool:
        """Whether it has more than white space, or calls a tool."""
        return any(str(self.message.get(key) or "").strip() for key in _SAYING)


class ChatEndpoint(Endpoint):
    """A server that speaks ``POST {url}/chat/completions``.

    Args:
        url: up to and including the version, for example ``http://localhost:8000/v1``.
        model: the server's name of the model.
        keep_states: have a server of vLLM that extracts hidden states write those of the answer too, beside
            the prompt's.
        say: called with a message when the server asks for a longer wait.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        keep_states: bool = False,
        say: Callable[[str], None] = lambda text: None,
    ):
        super().__init__(url, "/chat/completions", model, say=say)
        self.keep_states = keep_states

    def answer(
        self,
        messages: Sequence[Message],
        *,
        temperature: float,
        max_new_tokens: int,
        seed: int,
        template_options: Mapping[str, Any] | None = None,
    ) -> Reply:
        """The model's answer to ``messages``; ``template_options`` are tools, and what its template gets.

        Raises:
            Refusal, PermissionError, ConnectionError: see :meth:`medusa.training.endpoints.Endpoint.post`.
        """
        options = dict(template_options or {})
        request = {
            "model": self.model,
            "messages": as_openai(messages),
            "temperature": temperature,
            "max_tokens": max_new_tokens,
            "seed": seed,
            **({"tools": options.pop("tools")} if options.get("tools") else {}),
            **({"chat_template_kwargs": options} if options else {}),
            **({"kv_transfer_params": {"include_output_tokens": True}} if self.keep_states else {}),
        }
        return self.post(request, "an OpenAI-compatible chat server", _reply)


def _reply(response: httpx.Response) -> Reply | None:
    """The server's answer; None where it is no chat completion."""
    try:
        body: dict[str, Any] = response.json()
        choice = body["choices"][0]
        answer = choice["message"]
        fields = {key: answer.get(key) for key in ("content", *ANSWER_KEYS)}
        (message,) = read_messages([{"role": "assistant", **fields}], "the answer")
        for call in message.get("tool_calls", ()):
            call.pop("id", None)  # specific to this answer
        check_keepable(message, "the answer")
        counted = (body.get("usage") or {}).get("completion_tokens")
        num_tokens = counted if isinstance(counted, int) and 0 <= counted < 2**31 else 0
        return Reply(message, str(choice["finish_reason"]) not in _ENDED, num_tokens)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return None


# ------------------------------------------------------------------ who answers


MAX_PERIOD, MIN_REPEATED = 64, 48
"""Largest length of a repeated stretch, in tokens, and smallest length of its repetitions."""


def repeated_tail(tokens: Sequence[int]) -> int:
    """The number of tokens at the end that only repeat earlier ones; 0 when it is no loop.

    A loop is a stretch of tokens said at least three times, within the bounds above. Taking that many tokens
    off leaves the stretch said once.
    """
    for period in range(1, min(MAX_PERIOD, len(tokens) // 3) + 1):
        repeated = 0
        while repeated + period < len(tokens) and tokens[-1 - repeated] == tokens[-1 - repeated - period]:
            repeated += 1
        if repeated >= max(MIN_REPEATED, 2 * period):
            return repeated
    return 0


_QUESTION_TEMPERATURE = 1.0
"""How the model's own questions are sampled; greedy decoding would always give the same question."""


_SAYING = ("content", "reasoning_content", "tool_calls")
"""Keys of a message that say something."""


@dataclass(eq=False)
class Conversation:
    """A conversation under way. One without messages waits for a question of the model's own."""

    index: int
    messages: list[Message]
    later_turns: deque[str] = field(default_factory=deque)
    """User turns still to come."""
    temperature: float = 0.0
    seed: int = 0
    category: str | None = None
    origin: str = ""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Tools, and what else the chat template gets."""
    num_answers: int = 0
    """Given here; answers that were in the prompt do not count."""
    was_cut: bool = False
    """The last answer was; nothing follows it then."""

    def receive(self, outcome: Reply | Refusal) -> bool:
        """Take the next message in; true when the conversation waits for another one."""
        is_question = not self.messages
        if isinstance(outcome, Refusal) or not outcome.says_something or (is_question and outcome.was_cut):
            if self.messages:
                self.messages.pop()  # nobody answers this user turn
            return False
        message = outcome.message
        if is_question:
            self.messages.append({"role": "user", "content": message["content"].strip()})
            return True
        self.messages.append(message)
        self.num_answers += 1
        self.was_cut = outcome.was_cut
        if self.was_cut or message.get("tool_calls") or not self.later_turns:  # nobody runs the tools
            return False
        self.messages.append({"role": "user", "content": self.later_turns.popleft()})
        return True


NextConversation = Callable[[], Conversation | None]
CountTokens = Callable[[int], None]
IsTimeUp = Callable[[], bool]
Outcome = tuple[Conversation, Reply | Refusal]


class Answerer(Protocol):
    """Answers conversations until ``next_conversation`` gives None and all that were taken are done.

    When ``is_time_up`` running answers are returned as cut replies, or dropped.
    """

    def replies(
        self, next_conversation: NextConversation, count_tokens: CountTokens, is_time_up: IsTimeUp
    ) -> Iterator[Outcome]: ...


class LocalAnswerer:
    """The base of ``model`` itself, ``batch_size`` conversations at once."""

    def __init__(self, model: MedusaModel, batch_size: int, max_new_tokens: int, stop_loops: bool = True):
        self.model = model
        self.tokenizer = model.tokenizer
        self.batch_size = batch_size
        self.max_new_tokens = max_new_tokens
        self.stop_loops = stop_loops
        self._processors_by_temperature: dict[float, LogitsProcessorList] = {}
        self.stop_ids = end_ids(model.base, self.tokenizer)
        if not self.stop_ids:
            raise ValueError(
                f"{model.base.name_or_path!r} names no end-of-sequence token, so no answer would ever end; "
                "set generation_config.eos_token_id"
            )

    def replies(
        self, next_conversation: NextConversation, count_tokens: CountTokens, is_time_up: IsTimeUp
    ) -> Iterator[Outcome]:
        limits = BatchLimits(max_rows=self.batch_size, max_slots=sys.maxsize, chunk=512, prefix_bytes=0)
        batch = self.model.continuous_batch(limits, plain=True)
        under_way: list[Row] = []
        while True:
            if is_time_up():
                for row in under_way:
                    batch.cancel(row)
            ended = [row for row in under_way if row.finish_reason is not None]
            under_way = [row for row in under_way if row.finish_reason is None]
            for row in ended:
                yield row.tag, self._reply(row)
            while len(under_way) < self.batch_size and (conversation := next_conversation()) is not None:
                row = self._row(conversation)
                refusal = self._refusal(row)
                if refusal is not None:
                    yield conversation, refusal
                    continue
                batch.add(row)
                under_way.append(row)
            if not under_way:
                return
            for progress in batch.step():
                if progress.row.error is not None:
                    raise progress.row.take_error()
                count_tokens(len(progress.tokens))
                self._cut_loop(progress.row, batch)

    def _cut_loop(self, row: Row, batch: Batch) -> None:
        """End ``row`` where it began to repeat itself, if it did."""
        repeated = repeated_tail(row.tokens) if self.stop_loops else 0
        if repeated:
            batch.cancel(row)
            del row.tokens[-repeated:]

    def _row(self, conversation: Conversation) -> Row:
        if conversation.messages:
            encoded = encode_messages(
                self.tokenizer, conversation.messages, template_options=conversation.template_options
            )
            prompt = encoded["input_ids"][0].tolist()
            stops = self.stop_ids
            temperature = conversation.temperature
        else:
            prompt, stop = question_frame(self.tokenizer)
            stops = self.stop_ids | {stop}
            temperature = _QUESTION_TEMPERATURE
        device = self.model.device
        is_sampled = temperature > 0
        request = DecodeRequest(
            torch.tensor([prompt], device=device),
            torch.tensor([len(prompt)], device=device),
            self.max_new_tokens,
            seeds=torch.tensor([conversation.seed], device=device) if is_sampled else None,
            temperature=temperature if is_sampled else 1.0,
            processors=self._processors(temperature),
            eos_ids=stops,
        )
        return Row(request, conversation)

    def _processors(self, temperature: float) -> LogitsProcessorList:
        """One list for all rows of a temperature: a batch processes the scores of those at once."""
        if temperature not in self._processors_by_temperature:
            warpers = [TemperatureLogitsWarper(temperature)] if temperature > 0 else []
            self._processors_by_temperature[temperature] = LogitsProcessorList(warpers)
        return self._processors_by_temperature[temperature]

    def _refusal(self, row: Row) -> Refusal | None:
        context = self.model.profile.context
        length = len(row.prompt)
        if context is None or length + self.max_new_tokens <= context:
            return None
        return Refusal(
            f"{row.tag.origin}: prompt of {length} tokens + max_new_tokens={self.max_new_tokens} must fit "
            f"the base model's context of {context} positions"
        )

    def _reply(self, row: Row) -> Reply:
        was_cut = row.finish_reason != "stop"
        tokens = row.tokens if was_cut else row.tokens[:-1]  # the last one only ended it
        thoughts, text = split_reasoning(self.tokenizer, row.prompt, tokens)
        if was_cut:  # a character whose last bytes were cut off
            thoughts, text = (each.rstrip("\N{REPLACEMENT CHARACTER}") for each in (thoughts, text))
        reasoning = {"reasoning_content": thoughts} if thoughts else {}
        return Reply({"role": "assistant", "content": text, **reasoning}, was_cut, len(tokens))


class EndpointAnswerer:
    """Chat endpoints that serve one model, ``concurrency`` conversations at once to each."""

    def __init__(
        self,
        endpoints: Sequence[ChatEndpoint],
        concurrency: int,
        max_new_tokens: int,
        say: Callable[[str], None] = lambda text: None,
    ):
        """``say`` is called with a message for each endpoint that is given up."""
        self.max_new_tokens = max_new_tokens
        self.pool = EndpointPool(endpoints, concurrency, self._ask, say)

    def replies(
        self, next_conversation: NextConversation, count_tokens: CountTokens, is_time_up: IsTimeUp
    ) -> Iterator[Outcome]:
        """See :class:`Answerer`.

        Raises:
            ConnectionError, PermissionError: no endpoint is left; the error of the last one.
        """
        for conversation, outcome in self.pool.outcomes(next_conversation, is_time_up):
            if isinstance(outcome, Reply):
                count_tokens(outcome.num_tokens)
            yield conversation, outcome

    def _ask(self, endpoint: ChatEndpoint, conversation: Conversation) -> Reply | Refusal:
        try:
            return endpoint.answer(
                conversation.messages,
                temperature=conversation.temperature,
                max_new_tokens=self.max_new_tokens,
                seed=conversation.seed,
                template_options=conversation.template_options,
            )
        except Refusal as error:
            return Refusal(f"{conversation.origin}: {error}")


def question_frame(tokenizer: Any) -> tuple[list[int], int]:
    """The template's text before a user's first message, and the token after the message.

    A chat model that reads only the former writes a question of its own (Magpie, arXiv 2406.08464).

    Raises:
        ValueError: there is no chat template, or it does not show the message as it is.
    """
    marker = "MEDUSA-QUESTION"
    if tokenizer.chat_template is None:
        raise ValueError("prompt-free mode needs a chat model: this tokenizer has no chat template")
    message = as_template([{"role": "user", "content": marker}], tokenizer)
    parts = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=False).split(marker)
    if len(parts) != 2 or not parts[1].strip():
        raise ValueError(
            "prompt-free mode needs a chat template that shows a user message once and marks its end, "
            f"got {marker.join(parts)!r}"
        )
    before, after = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts)
    return before, after[0]
