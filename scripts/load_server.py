"""Load servers like many simultaneous users, one server after the other, and report how long the users
waited.

    medusa serve --port 8000
    medusa serve --port 8001 --plain
    python scripts/load_server.py --servers heads=http://127.0.0.1:8000 plain=http://127.0.0.1:8001

Each client asks one question after another for `--seconds`, with pauses of random length in between (a
Poisson process). Any server with OpenAI's protocol will do. The servers take turns, with the same questions
in the same order; each begins with a number of its own, so that no server has read it before. Over several
`--rounds` a machine that becomes slower slows all of them. Reported are the tokens that came in that time,
counted with one tokenizer for all, by how much every second round differs from the others, and the time to
the first token and between events.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from medusa.assets import EMBEDDED_BASE
from medusa.base.loading import load_tokenizer
from medusa.cli.loading import load_prompts
from medusa.cli.main import exit_status
from medusa.cli.options import GrowingInts, PromptOptions, ReportOptions, parse
from medusa.console import PERCENT, Column, log_console
from medusa.measurement.report import Report
from medusa.options import check_above, check_at_least

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class LoadTestOptions:
    """The options of this program."""

    servers: tuple[str, ...] = ("server=http://127.0.0.1:8000",)
    """NAME=URL of each; they take turns. NAME=URL,MODEL where a server does not tell its model's name."""
    api_key: str = "none"
    """Sent as Bearer key."""
    tokenizer: str = EMBEDDED_BASE
    """Counts the tokens of received text."""
    clients: GrowingInts = (1, 4)
    """How many ask at once; one run of each server for each number."""
    seconds: float = 30.0
    """Length of a turn. Unfinished answers count as far as they have come."""
    rounds: int = 1
    """Turns of each server for each number of clients."""
    pause: float = 0.0
    """Mean seconds between an answer and the client's next question."""
    max_new_tokens: tuple[int, int] = (32, 128)
    """The shortest and the longest requested answer; drawn for each question."""
    long_prompt: int = 0
    """Words of a prompt that one more client asks with, over and over, while the others are timed."""
    temperature: float = 0.0
    """Temperature of all answers."""
    seed: int = 0
    """Seed of lengths, pauses and sampling."""
    prompts: PromptOptions = PromptOptions()
    report: ReportOptions = ReportOptions()

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_new_tokens", "rounds")
        check_at_least(self, 0, "pause", "temperature", "long_prompt")
        check_above(self, 0, "seconds")
        for server in self.servers:
            if "=http" not in server:
                raise ValueError(f"servers must be NAME=URL, got {server!r}")


@dataclass
class Waits:
    """The measurements of one server."""

    texts: dict[int, str] = field(default_factory=dict)
    """The outcome of each answer, by the number of its question."""
    num_answers: int = 0
    """Answers that came to their end."""
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    """Between one event with text and the next."""
    refused: int = 0

    def num_tokens(self, tokenizer: Any) -> int:
        return sum(len(tokenizer(text)["input_ids"]) for text in self.texts.values())


def percentiles(values: list[float]) -> dict[str, float | None]:
    """The percentiles of :data:`PERCENTILES`; None without values."""
    return {f"p{each}": float(np.percentile(values, each)) if values else None for each in PERCENTILES}


async def ask(client: httpx.AsyncClient, number: int, body: dict[str, Any], waits: Waits) -> None:
    """One question and its streamed answer."""
    began = last = time.perf_counter()
    is_first = True
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.status_code == 503:
            waits.refused += 1
            await asyncio.sleep(float(reply.headers.get("Retry-After", 1)))
            return
        if reply.status_code != 200:
            await reply.aread()
            raise ValueError(f"the server answered {reply.status_code}: {reply.text[:300]}")
        async for line in reply.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise ValueError(f"the server failed midway: {chunk['error']['message']}")
            text = "".join((choice.get("delta") or {}).get("content") or "" for choice in chunk["choices"])
            if text:
                now = time.perf_counter()
                (waits.first if is_first else waits.between).append(now - (began if is_first else last))
                is_first, last = False, now
                waits.texts[number] = waits.texts.get(number, "") + text
    waits.num_answers += 1


class Load:
    """What ``num_clients`` ask one server, round after round."""

    def __init__(self, options: LoadTestOptions, num_clients: int, messages: list[Any], model: str):
        self.options = options
        self.num_clients = num_clients
        self.messages = messages
        self.model = model
        self.chance = random.Random(options.seed)
        self.waits = Waits()
        self.beside = Waits()
        """Of the client with long prompts."""
        self.questions = enumerate(self._questions())  # one for all clients
        self.long_prompts = enumerate(self._long_prompts())
        self.tokens_by_round: list[int] = []

    def _questions(self) -> Iterator[dict[str, Any]]:
        """No two are alike, so that no server has read one before."""
        seed = self.options.seed
        for number in itertools.count():
            *earlier, last = self.messages[number % len(self.messages)]
            content = f"{seed}.{self.num_clients}.{number}: {last['content']}"
            yield {
                "messages": [*earlier, {**last, "content": content}],
                "max_tokens": self.chance.randint(*sorted(self.options.max_new_tokens)),
                "temperature": self.options.temperature,
                "seed": seed + number,
            }

    def _long_prompts(self) -> Iterator[dict[str, Any]]:
        for number in itertools.count():
            words = " word" * self.options.long_prompt
            prompt = f"{self.options.seed}.{self.num_clients}.{number}:{words}"
            yield {"messages": [{"role": "user", "content": prompt}], "max_tokens": 1}

    async def run(self, url: str) -> None:
        """One round: until its time is over."""
        options = self.options

        async def talk(asked: Iterator[tuple[int, dict[str, Any]]], seen: Waits, pause: float = 0.0) -> None:
            for number, body in asked:
                await ask(client, number, {**body, "model": self.model, "stream": True}, seen)
                if pause:
                    await asyncio.sleep(self.chance.expovariate(1 / pause))

        limits = httpx.Limits(max_connections=None)
        headers = {"Authorization": f"Bearer {options.api_key}"}
        async with httpx.AsyncClient(base_url=url, timeout=None, headers=headers, limits=limits) as client:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(options.seconds):
                    readers = [talk(self.long_prompts, self.beside)] if options.long_prompt else []
                    clients = (
                        talk(self.questions, self.waits, options.pause) for _ in range(self.num_clients)
                    )
                    await asyncio.gather(*clients, *readers)

    def end_round(self, tokenizer: Any) -> None:
        """Count what the round has brought."""
        self.tokens_by_round.append(self.waits.num_tokens(tokenizer) - sum(self.tokens_by_round))

    def as_dict(self) -> dict[str, Any]:
        seconds = self.options.seconds * len(self.tokens_by_round)
        num_tokens = sum(self.tokens_by_round)
        return {
            "seconds": seconds,
            "num_answers": self.waits.num_answers,
            "num_tokens": num_tokens,
            "tokens_per_second": num_tokens / seconds,
            "halves_differ_by": difference(self.tokens_by_round),
            "time_to_first_token": percentiles(self.waits.first),
            "time_between_events": percentiles(self.waits.between),
            "refused": self.waits.refused,
            "num_long": self.beside.num_answers,
        }


def difference(rounds: list[int]) -> float | None:
    """By which part of their mean every second round differs from the others, where there are as many of both
    and they brought anything."""
    total = sum(rounds)
    return 2 * abs(sum(rounds[::2]) - sum(rounds[1::2])) / total if total and len(rounds) % 2 == 0 else None


def named_server(given: str, api_key: str) -> tuple[str, str, str]:
    """Name, URL and model of a server.

    Raises:
        ValueError: the server names no model, and none was given.
    """
    name, _, rest = given.partition("=")
    url, _, model = rest.partition(",")
    if not model:
        try:
            reply = httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {api_key}"})
            model = reply.raise_for_status().json()["data"][0]["id"]
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise ValueError(
                f"--servers: {name} tells no model at {url}/v1/models ({error}); start it first, or name the "
                f"model: {name}={url},MODEL"
            ) from error
    return name, url, model


def load_server(options: LoadTestOptions) -> None:
    """Run, print a table, and report."""
    servers = [named_server(each, options.api_key) for each in options.servers]
    messages = [list(prompt.messages) for prompt in load_prompts(options.prompts)]
    tokenizer = load_tokenizer(options.tokenizer)
    report = Report({"servers": servers, "seconds": options.seconds})
    rows = []
    for num_clients in options.clients:
        loads = {name: Load(options, num_clients, messages, model) for name, _, model in servers}
        for number in range(1, options.rounds + 1):
            for name, url, _ in servers:
                log_console().print(f"{num_clients} clients, {name}, round {number}", style="dim")
                asyncio.run(loads[name].run(url))
                loads[name].end_round(tokenizer)
        found = {name: load.as_dict() for name, load in loads.items()}
        report.values[f"clients_{num_clients}"] = found
        rows += [{"clients": num_clients, "server": name, **each} for name, each in found.items()]

    def milliseconds(key: str) -> Column:
        form = " / ".join("{:.0f}" for _ in PERCENTILES)
        return lambda row: [each and 1000 * each for each in row[key].values()], form

    columns: dict[str, Column] = {
        "clients": ("clients", "{}"),
        "server": ("server", "{}"),
        "tokens/s": ("tokens_per_second", "{:.1f}"),
        "halves": ("halves_differ_by", PERCENT),
        "first token ms, p50 / p95 / p99": milliseconds("time_to_first_token"),
        "between events ms": milliseconds("time_between_events"),
    }
    report.add_table(f"{options.rounds} x {options.seconds:g} s each", columns, rows)
    report.publish(options.report.json)


if __name__ == "__main__":
    given = parse(LoadTestOptions, description=__doc__)
    sys.exit(exit_status(lambda: load_server(given), False))
