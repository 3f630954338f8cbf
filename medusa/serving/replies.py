"""What clients get: the bodies and the chunks of OpenAI's two endpoints."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from medusa.acceptance.sampling import TokenLogprobs
from medusa.serving.answer_text import ToolCall, ToolCallReader
from medusa.serving.requests import ChatRequest, CompletionRequest
from medusa.serving.worker import Update
from medusa.text_stream import token_bytes


class Replies:
    """The objects of one reply; those of its chunks share an id.

    Args:
        asked: the request.
        tokenizer: names the tokens in log-probabilities.
    """

    def __init__(self, asked: ChatRequest | CompletionRequest, model_name: str, tokenizer: Any):
        self.is_chat, self.tokenizer = isinstance(asked, ChatRequest), tokenizer
        self.wants_logprobs = asked.num_logprobs is not None
        self.wants_depths = bool(asked.stream_options and asked.stream_options.include_depths)
        self._shared = {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model_name,
        }
        self._num_chars: dict[int, int] = {}
        offered = asked.offered if isinstance(asked, ChatRequest) else []
        self._names = [tool["function"]["name"] for tool in offered]
        self._most_calls = 1 if getattr(asked, "parallel_tool_calls", None) is False else None
        self._readers: dict[int, ToolCallReader] = {}

    def whole(self, updates: Sequence[Sequence[Update]], usage: dict[str, Any]) -> dict[str, Any]:
        """The body of a reply that is not streamed, of all updates of each choice."""
        choices = []
        for index, of_choice in enumerate(updates):
            pieces = [piece for update in of_choice for piece in update.pieces]
            text, calls, reason = self._read(index, replace(of_choice[-1], pieces=pieces))
            choice: dict[str, Any] = {"index": index, "finish_reason": reason}
            if self.is_chat:
                choice["message"] = {"role": "assistant", "content": text or (None if calls else "")}
                if calls:
                    choice["message"]["tool_calls"] = [call.as_json for call in calls]
            else:
                choice["text"] = text
            entries = [entry for update in of_choice for entry in update.logprobs]
            choice["logprobs"] = self._logprobs(index, entries)
            choices.append(choice)
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self._shared, "object": kind, "choices": choices, "usage": usage}

    def first(self, index: int) -> dict[str, Any]:
        """The chunk that says who speaks."""
        return self._chunk(
            [{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
        )

    def part(self, index: int, update: Update) -> dict[str, Any] | None:
        """The chunk of an update; None where there is nothing to tell yet."""
        num_before = self._readers[index].num_calls if index in self._readers else 0
        text, calls, reason = self._read(index, update)
        logprobs = self._logprobs(index, update.logprobs) if update.logprobs else None
        if not text and not calls and logprobs is None and reason is None:
            return None
        choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": logprobs}
        if self.is_chat:
            choice["delta"] = {"content": text} if text else {}
            if calls:
                numbered = enumerate(calls, start=num_before)
                choice["delta"]["tool_calls"] = [{"index": at, **call.as_json} for at, call in numbered]
        else:
            choice["text"] = text
        if self.wants_depths:
            choice["medusa"] = {
                "pieces": [[piece.text, piece.depth] for piece in update.pieces],
                "num_tokens": update.num_tokens,
                "num_steps": update.num_steps,
            }
        return self._chunk([choice])

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last chunk, for clients that ask for it."""
        return {**self._chunk([]), "usage": usage}

    def _read(self, index: int, update: Update) -> tuple[str, list[ToolCall], str | None]:
        """The text of an update, the tools that it calls, and how the answer ends, if it does."""
        text, reason = "".join(piece.text for piece in update.pieces), update.finish_reason
        if not self._names:
            return text, [], reason
        reader = self._readers.setdefault(index, ToolCallReader(self._names, self._most_calls))
        text, calls = reader.feed(text)
        if reason is not None:
            rest, more = reader.finish()
            text, calls = text + rest, calls + more
        return text, calls, "tool_calls" if reason == "stop" and reader.num_calls else reason

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return {**self._shared, "object": kind, "choices": choices}

    def _logprobs(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self.wants_logprobs:
            return None
        if self.is_chat:
            return {"content": [self._chat_entry(entry) for entry in entries]}
        offset, offsets = self._num_chars.get(index, 0), []
        tokens = [self._name(entry.token) for entry in entries]
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._num_chars[index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [
                {self._name(token): _finite(logprob) for token, logprob in entry.top} for entry in entries
            ],
            "text_offset": offsets,
        }

    def _chat_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._named(token, logprob) for token, logprob in entry.top]
        return {**self._named(entry.token, entry.logprob), "top_logprobs": top}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        name = self._name(token)
        spelt = self.tokenizer.convert_ids_to_tokens(token)
        return {"token": name, "logprob": _finite(logprob), "bytes": [*token_bytes(spelt, name)]}

    def _name(self, token: int) -> str:
        return self.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)


def usage_of(num_prompt: int, num_reused: int, num_tokens: int) -> dict[str, Any]:
    """Tokens of the prompt, how many of these were not read again, and tokens of all answers."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt + num_tokens,
        "prompt_tokens_details": {"cached_tokens": num_reused},
    }


def _finite(logprob: float) -> float:
    """What JSON can hold; clients know this number for a token that is never chosen."""
    return max(logprob, -9999.0)


class RequestError(Exception):
    """A request that is not answered; ``status`` is that of HTTP."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The body of the answer, or of an event of a stream."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
