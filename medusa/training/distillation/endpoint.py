"""Answers from any OpenAI-compatible chat endpoint: how self-distillation scales to a serving cluster."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from medusa.prompts import Message, check_keepable

_RETRIED_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_REFUSED_CLIENT = frozenset({401, 402, 403, 404, 405})
"""Statuses that say something of whoever asks, and where; every other request would get them too."""


_ENDED = frozenset({"stop", "tool_calls", "function_call"})
"""Finish reasons of an answer that came to its own end."""


class Refusal(ValueError):
    """Why a conversation gets no next message, and asking again is no use."""


@dataclass(frozen=True)
class Reply:
    """The next message of a conversation."""

    message: Message
    """The whole message: role, content, and reasoning_content and tool_calls where there are any."""
    was_cut: bool
    """It did not come to its own end."""
    num_tokens: int
    """As the endpoint counts; 0 when it does not say."""


class ChatEndpoint:
    """A server that speaks ``POST {url}/chat/completions``. Safe to call from several threads.

    Args:
        url: up to and including the version, for example ``http://localhost:8000/v1``.
        model: the name the server knows the model by.
        max_attempts: tries per request; waits 1, 2, 4, ... seconds between them, or what the server asks.
        first_wait: seconds before the second try.
        longest_wait: seconds between two tries, whatever the server asks.
        api_key: sent as a bearer token; by default the environment's OPENAI_API_KEY, if set.
        say: is told when the server asks for a longer wait.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        timeout: float = 600.0,
        max_attempts: int = 6,
        first_wait: float = 1.0,
        longest_wait: float = 60.0,
        api_key: str | None = None,
        say: Callable[[str], None] = lambda text: None,
    ):
        if not url.startswith(("http://", "https://")):
            raise ValueError(
                f"endpoint must start with http:// or https://, got {url!r}; e.g. http://localhost:8000/v1"
            )
        self.url = url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
        self.model, self.max_attempts, self.first_wait = model, max_attempts, first_wait
        self.longest_wait, self.say = longest_wait, say
        key = os.environ.get("OPENAI_API_KEY") if api_key is None else api_key
        self._client = httpx.Client(
            timeout=timeout,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=None),
        )

    def close(self) -> None:
        self._client.close()

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
            Refusal: the server refuses this request (HTTP 4xx), for example as too long, or answers it
                ``max_attempts`` times with what is no answer.
            PermissionError: the server refuses whoever asks, or knows no such model.
            ConnectionError: no answer after ``max_attempts`` tries.
        """
        options = dict(template_options or {})
        request = {
            "model": self.model,
            "messages": list(messages),
            "temperature": temperature,
            "max_tokens": max_new_tokens,
            "seed": seed,
            **({"tools": options.pop("tools")} if options.get("tools") else {}),
            **({"chat_template_kwargs": options} if options else {}),
        }
        problem, wait, garbage = "", self.first_wait, ""
        for attempt in range(self.max_attempts):
            if attempt:
                if wait > self.longest_wait:
                    self.say(f"{self.url} asks to wait {wait:.0f} s; waiting {self.longest_wait:.0f} s")
                time.sleep(wait := min(wait, self.longest_wait))
                wait *= 2
            try:
                response = self._client.post(self.url, json=request)
            except httpx.DecodingError as error:
                problem = garbage = f"endpoint {self.url} sent a body that cannot be unpacked: {error}"
                continue
            except httpx.RequestError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if response.status_code in _RETRIED_STATUS:
                problem = f"HTTP {response.status_code}: {response.text[:300]}"
                asked = response.headers.get("retry-after", "")  # in seconds
                wait = float(asked) if re.fullmatch("[0-9]{1,9}", asked) else wait
                continue
            if response.status_code in _REFUSED_CLIENT:
                raise PermissionError(
                    f"{self.url} answered HTTP {response.status_code}: {response.text[:300]}; check "
                    f"OPENAI_API_KEY, the address and the model's name, {self.model!r}. The same command "
                    "goes on where it stopped"
                )
            if response.status_code != 200:
                raise Refusal(f"{self.url} answered HTTP {response.status_code}: {response.text[:300]}")
            reply = _reply(response)
            if reply is not None:
                return reply
            problem = garbage = (
                f"endpoint {self.url} did not answer as an OpenAI-compatible chat server does: "
                f"{response.text[:300]}"
            )
        if problem == garbage:
            raise Refusal(garbage)
        raise ConnectionError(
            f"endpoint {self.url} gave no answer in {self.max_attempts} tries, last {problem}; "
            "is it running? The same command goes on where it stopped"
        )


def _reply(response: httpx.Response) -> Reply | None:
    """What the server answered; None where it is no chat completion."""
    try:
        body: dict[str, Any] = response.json()
        choice = body["choices"][0]
        given = choice["message"]
        content = given.get("content") or ""
        if isinstance(content, list):
            content = "".join(part["text"] for part in content if part["type"] == "text")
        message: Message = {"role": "assistant", "content": content + ""}
        if reasoning := given.get("reasoning_content") or given.get("reasoning"):
            message["reasoning_content"] = reasoning + ""
        if given.get("tool_calls"):
            message["tool_calls"] = [_with_parsed_arguments(call) for call in given["tool_calls"]]
        check_keepable(message, "the answer")
        counted = (body.get("usage") or {}).get("completion_tokens")
        num_tokens = counted if isinstance(counted, int) and 0 <= counted < 2**31 else 0
        return Reply(message, str(choice["finish_reason"]) not in _ENDED, num_tokens)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return None


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call as chat templates take it: its arguments as an object, which servers send as text."""
    function = call["function"]
    arguments = function["arguments"]
    parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {"type": "function", "function": {"name": function["name"], "arguments": parsed}}
