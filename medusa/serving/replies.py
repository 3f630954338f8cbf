"""Replies: the bodies and the chunks of OpenAI's endpoints for chats and completions."""

from __future__ import annotations

import abc
import codecs
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from medusa.acceptance.sampling import TokenLogprobs
from medusa.serving.chat_requests import ChatRequest
from medusa.serving.completion_requests import CompletionRequest, InfillRequest, LlamaInfillRequest
from medusa.serving.output_parser import OutputParser, Part
from medusa.serving.worker import Answer, Update
from medusa.text_stream import token_bytes

DONE = "[DONE]"
"""The data of the last event of a stream, also of one that fails."""


def read(reader: OutputParser, update: Update) -> tuple[list[Part], str | None]:
    """The parts of an update, and the finish reason if the answer ends."""
    parts = reader.feed("".join(piece.text for piece in update.pieces))
    reason = update.finish_reason
    if reason is not None:
        parts += reader.finish(is_cut=reason != "stop" or update.stop_string is not None)
    has_called = reader.num_calls > 0 and not reader.is_call_open
    return parts, "tool_calls" if reason == "stop" and has_called else reason


class StreamedReplies(abc.ABC):
    """The objects of one reply, whole or as a stream."""

    is_lines: ClassVar[bool] = False
    """A stream is lines of JSON, and no server-sent events."""

    @abc.abstractmethod
    def whole(self, updates: Sequence[Sequence[Update]], usage: dict[str, Any]) -> dict[str, Any]:
        """The body of a reply that is not streamed, of all updates of each choice."""

    @abc.abstractmethod
    def start(self, num_answers: int) -> list[Any]:
        """The first chunks of a stream."""

    @abc.abstractmethod
    def part(self, index: int, update: Update) -> list[Any]:
        """The chunks of an update; none where there is nothing to tell yet."""

    def waiting(self) -> list[Any]:
        """The chunks of a stream that has nothing to tell yet, for clients that leave where none come;
        comments do for the others."""
        return []

    @abc.abstractmethod
    def end(self, usage: dict[str, Any]) -> list[Any]:
        """The last chunks of a stream."""

    @abc.abstractmethod
    def failed(self, error: RequestError) -> list[Any]:
        """The last chunks of a stream that cannot go on."""


class Replies(StreamedReplies):
    """The objects of one reply; its chunks share an id.

    Args:
        request: the request.
        tokenizer: names the tokens in log-probabilities.
        reader_of: makes the parser of one answer to a chat.
        echoed: the prompt that precedes each completion with ``echo``.
    """

    def __init__(
        self,
        request: ChatRequest | CompletionRequest,
        model_name: str,
        tokenizer: Any,
        reader_of: Callable[[], OutputParser] | None = None,
        echoed: Sequence[str] = (),
    ):
        self.is_chat = isinstance(request, ChatRequest | InfillRequest)
        self.tokenizer = tokenizer
        self.wants_logprobs = request.num_logprobs is not None
        options = request.stream_options
        self.wants_usage = bool(options and options.include_usage)
        self.wants_depths = bool(options and options.include_depths)
        self._shared = {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model_name,
        }
        self._before: dict[int, int] = {}  # the last token that was told, by choice
        self._texts: dict[int, tuple[int, Any]] = {}  # characters that were told, and how bytes become more
        self._echoed = echoed
        self._readers = defaultdict[int, OutputParser](reader_of)

    def whole(self, updates: Sequence[Sequence[Update]], usage: dict[str, Any]) -> dict[str, Any]:
        """The body of a reply that is not streamed, of all updates of each choice."""
        choices = []
        for index, of_choice in enumerate(updates):
            pieces = [piece for update in of_choice for piece in update.pieces]
            message, reason = self._message(index, replace(of_choice[-1], pieces=pieces))
            choice: dict[str, Any] = {"index": index, "finish_reason": reason}
            if self.is_chat:
                calls = message.get("tool_calls", ())
                for call in calls:
                    del call["index"]
                message = {"content": None if calls else "", **message}
                choice["message"] = {"role": "assistant", **message}
            else:
                choice["text"] = "".join(self._echoed[index : index + 1]) + message.get("content", "")
            entries = [entry for update in of_choice for entry in update.logprobs]
            choice["logprobs"] = self._logprobs(index, entries)
            choices.append(choice)
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self._shared, "object": kind, "choices": choices, "usage": usage}

    def start(self, num_answers: int) -> list[Any]:
        """The first chunks of a stream: who speaks, or the text that the answer goes on with."""
        firsts: list[dict[str, Any]]
        if self.is_chat:
            delta = {"role": "assistant", "content": ""}
            firsts = [{"index": at, "delta": delta, "finish_reason": None} for at in range(num_answers)]
        else:
            firsts = [
                {"index": at, "text": text, "finish_reason": None, "logprobs": None}
                for at, text in enumerate(self._echoed)
            ]
        return [self._chunk([first]) for first in firsts]

    def part(self, index: int, update: Update) -> list[Any]:
        """The chunk of an update; none where there is nothing to tell yet."""
        message, reason = self._message(index, update)
        logprobs = self._logprobs(index, update.logprobs) if update.logprobs else None
        shows = self.wants_depths and bool(update.pieces)
        if not message and not shows and logprobs is None and reason is None:
            return []
        choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": logprobs}
        if self.is_chat:
            choice["delta"] = message
        else:
            choice["text"] = message.get("content", "")
        if self.wants_depths:
            choice["medusa"] = {
                "pieces": [[piece.text, piece.depth] for piece in update.pieces],
                "num_tokens": update.num_tokens,
                "num_steps": update.num_steps,
            }
        return [self._chunk([choice])]

    def end(self, usage: dict[str, Any]) -> list[Any]:
        """The last chunks: usage, for clients that ask for it."""
        return [*([{**self._chunk([]), "usage": usage}] if self.wants_usage else []), DONE]

    def failed(self, error: RequestError) -> list[Any]:
        """The last chunks of a stream that cannot go on."""
        return [error.body, DONE]

    def _message(self, index: int, update: Update) -> tuple[dict[str, Any], str | None]:
        """The message or the delta of an update, and the finish reason if the answer ends."""
        if not self.is_chat:
            text = "".join(piece.text for piece in update.pieces)
            return ({"content": text} if text else {}), update.finish_reason
        parts, reason = read(self._readers[index], update)
        message: dict[str, Any] = {}
        for part in parts:
            if part.kind == "text":
                message["content"] = message.get("content", "") + part.text
            elif part.kind == "reasoning":
                message["reasoning_content"] = message["reasoning"] = message.get("reasoning", "") + part.text
            else:
                _add_to_calls(message.setdefault("tool_calls", []), part)
        return message, reason

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return {**self._shared, "object": kind, "choices": choices}

    def _logprobs(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self.wants_logprobs:
            return None
        behind = [self._before.get(index), *(entry.token for entry in entries)]
        if entries:
            self._before[index] = entries[-1].token
        if self.is_chat:
            content = [
                {
                    **self._named(entry.token, entry.logprob, before),
                    "top_logprobs": [self._named(*each, before) for each in entry.top],
                }
                for before, entry in zip(behind, entries, strict=False)
            ]
            return {"content": content}
        spelt = [self._bytes(entry.token, before) for before, entry in zip(behind, entries, strict=False)]
        return {
            "tokens": [_name(each) for each in spelt],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [
                self._by_name(entry, before) for before, entry in zip(behind, entries, strict=False)
            ],
            "text_offset": self._offsets(index, spelt),
        }

    def _offsets(self, index: int, spelt: Sequence[bytes]) -> list[int]:
        """Where in the text each token's first character begins."""
        offset, decoder = self._texts.get(index) or (0, codecs.getincrementaldecoder("utf-8")("replace"))
        offsets = []
        for spelling in spelt:
            offsets.append(offset)
            offset += len(decoder.decode(spelling))
        self._texts[index] = offset, decoder
        return offsets

    def _by_name(self, entry: TokenLogprobs, before: int | None) -> dict[str, float]:
        """The likeliest tokens, and the one that was chosen; of tokens of one name the likelier."""
        logprobs: dict[str, float] = {}
        for token, logprob in [*entry.top, (entry.token, entry.logprob)]:
            logprobs.setdefault(_name(self._bytes(token, before)), _finite(logprob))
        return logprobs

    def _named(self, token: int, logprob: float, before: int | None) -> dict[str, Any]:
        spelt = self._bytes(token, before)
        return {"token": _name(spelt), "logprob": _finite(logprob), "bytes": [*spelt]}

    def _bytes(self, token: int, before: int | None) -> bytes:
        return token_bytes(self.tokenizer, token, before)


class LlamaReplies(StreamedReplies):
    """The objects of one reply of llama.cpp's own form: flat, and a stream ends with the one that stops."""

    def __init__(self, request: LlamaInfillRequest, model_name: str):
        self._request = request
        self._model_name = model_name
        self._reason: str | None = None

    def whole(self, updates: Sequence[Sequence[Update]], usage: dict[str, Any]) -> dict[str, Any]:
        """The body of a reply that is not streamed."""
        parts = [part for update in updates[0] for part in self.part(0, update)]
        (last,) = self.end(usage)
        return {**last, "content": "".join(part["content"] for part in parts)}

    def start(self, num_answers: int) -> list[Any]:
        """Nothing: a stream begins with text."""
        return []

    def part(self, index: int, update: Update) -> list[Any]:
        """The chunk of an update; none where there is nothing to tell."""
        self._reason = update.finish_reason
        text = "".join(piece.text for piece in update.pieces)
        return [{"index": index, "content": text, "stop": False}] if text else []

    def end(self, usage: dict[str, Any]) -> list[Any]:
        """The last chunk, with the counts of tokens."""
        num_prompt = usage["prompt_tokens"]
        num_reused = usage["prompt_tokens_details"]["cached_tokens"]
        num_tokens = usage["completion_tokens"]
        last: dict[str, Any] = {
            "index": 0,
            "content": "",
            "stop": True,
            "model": self._model_name,
            "tokens_predicted": num_tokens,
            "tokens_evaluated": num_prompt,
            "tokens_cached": num_prompt + num_tokens,
            "truncated": False,
            "timings": {
                "cache_n": num_reused,
                "prompt_n": num_prompt - num_reused,
                "predicted_n": num_tokens,
            },
            "usage": usage,
        }
        if self._reason == "length":
            last["stop_type"] = "limit"
        elif not self._request.stops:  # else it may be a string of them
            last["stop_type"] = "eos"
        return [last]

    def failed(self, error: RequestError) -> list[Any]:
        """The last chunk of a stream that cannot go on."""
        return [error.body]


def _name(spelt: bytes) -> str:
    return spelt.decode(errors="replace")


def _add_to_calls(calls: list[dict[str, Any]], part: Part) -> None:
    if part.kind == "call":
        function = {"name": part.text, "arguments": ""}
        identity = f"call_{uuid.uuid4().hex[:24]}"
        calls.append({"index": part.number, "id": identity, "type": "function", "function": function})
    elif calls:
        calls[-1]["function"]["arguments"] += part.text
    else:
        calls.append({"index": part.number, "function": {"arguments": part.text}})


def usage_of(num_prompt: int, num_reused: int, answers: Sequence[Answer]) -> dict[str, Any]:
    """Numbers of prompt tokens, cached prompt tokens, tokens of all answers, and drafted and accepted tokens
    by depth from 1 on. Tokens of a prediction that appear in the answer count as accepted, the others as
    rejected, as OpenAI defines them."""
    num_tokens, num_steps = (
        sum(getattr(answer, name) for answer in answers) for name in ("num_tokens", "num_steps")
    )
    expected = [len(answer.prediction) for answer in answers]
    written = [common_subsequence_length(answer.prediction, answer.row.tokens) for answer in answers]
    drafted, accepted = (
        sum((getattr(answer, name) for answer in answers), Counter[int]()) for name in ("drafted", "accepted")
    )
    depths = range(1, max(drafted, default=0) + 1)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt + num_tokens,
        "prompt_tokens_details": {"cached_tokens": num_reused},
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(written),
            "rejected_prediction_tokens": sum(expected) - sum(written),
        },
        "medusa": {
            "num_steps": num_steps,
            "tokens_per_step": round(num_tokens / max(1, num_steps), 3),
            "drafted_per_depth": [drafted[depth] for depth in depths],
            "accepted_per_depth": [accepted[depth] for depth in depths],
        },
    }


def common_subsequence_length(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of the longest common subsequence of ``first`` and ``second``: bit-parallel, with a row of
    the table in an integer (Hyyrö, 2004)."""
    tokens = np.asarray(first)
    places = {
        token: int.from_bytes(np.packbits(tokens == token, bitorder="little").tobytes(), "little")
        for token in {*first} & {*second}
    }
    every = unmatched = (1 << len(first)) - 1
    for token in second if first else ():
        matched = unmatched & places.get(token, 0)
        unmatched = (unmatched + matched | unmatched - matched) & every
    return len(first) - unmatched.bit_count()


def _finite(logprob: float) -> float:
    """``logprob`` as a finite number for JSON; clients know this value for a token that is never chosen."""
    return max(logprob, -9999.0)


class RequestError(Exception):
    """A request that is not answered; ``status`` is the HTTP status, ``excess`` the tokens of a prompt that
    is too long and the most that fit."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        excess: tuple[int, int] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.excess = excess

    @property
    def body(self) -> dict[str, Any]:
        """The body of the answer, or of an event of a stream."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


ANTHROPIC_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Names of errors in Anthropic's protocol, by status."""
ANTHROPIC_STATUS = {503: 529}
"""Statuses that this protocol has others for."""


def anthropic_error(error: RequestError) -> dict[str, Any]:
    """The body of ``error`` in Anthropic's form. Of a prompt that is too long it says so in the words by
    which clients know that they must shorten a conversation."""
    kind = ANTHROPIC_ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    text = str(error)
    if error.excess is not None:
        text = "prompt is too long: {} tokens > {} maximum; shorten it".format(*error.excess)
    elif error.code == "context_length_exceeded":
        text = f"prompt is too long: {text}"
    return {"type": "error", "error": {"type": kind, "message": text}}
