"""Load a server as many users at once would, and say how long they waited.

    medusa serve --port 8000
    python scripts/load_server.py --clients 1 4 --requests 16 --prompts runs/data/prompts.jsonl
    python scripts/load_server.py --medusa-plain --clients 1 4 --json plain.json

Each client asks one question after another, with pauses of random length in between if `--pause` says so (a
Poisson process). Any server with OpenAI's protocol will do; `--medusa-plain` asks medusa's own to guess
nothing. Reported are tokens per second over all clients, and the time to the first token and between tokens.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from medusa.cli.options import GrowingInts, PromptOptions, ReportOptions, check_at_least, parse
from medusa.cli.program import load_prompts
from medusa.cli.reporting import exit_status, report_json, table_console
from medusa.progress import log_console
from medusa.tables import print_table

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class LoadTestOptions:
    """The options of this program."""

    url: str = "http://127.0.0.1:8000"
    """The server."""
    api_key: str = "none"
    """Sent as Bearer key."""
    model: str = ""
    """The model's name; none asks the server."""
    clients: GrowingInts = (1, 4)
    """How many ask at once; one run for each number."""
    requests: int = 16
    """Questions in a run, of all clients together."""
    pause: float = 0.0
    """Mean seconds between an answer and the client's next question."""
    max_new_tokens: tuple[int, int] = (32, 128)
    """The shortest and the longest answer that is asked for; drawn for each question."""
    temperature: float = 0.0
    """Of all answers."""
    seed: int = 0
    """Of lengths, pauses and sampling."""
    medusa_plain: bool = False
    """Ask medusa's server to decode without guessing."""
    prompts: PromptOptions = PromptOptions()
    report: ReportOptions = ReportOptions()

    def __post_init__(self) -> None:
        check_at_least(self, 1, "requests", "max_new_tokens")
        check_at_least(self, 0, "pause", "temperature")


@dataclass
class Waits:
    """What one run has seen."""

    seconds: float = 0.0
    num_tokens: int = 0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    """Between one event with text and the next."""
    refused: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "num_tokens": self.num_tokens,
            "tokens_per_second": self.num_tokens / self.seconds,
            "time_to_first_token": percentiles(self.first),
            "time_between_events": percentiles(self.between),
            "refused": self.refused,
        }


def percentiles(values: list[float]) -> dict[str, float | None]:
    """Those of :data:`PERCENTILES`; None without values."""
    if len(values) < 2:
        return {f"p{each}": values[0] if values else None for each in PERCENTILES}
    cut = statistics.quantiles(values, n=100, method="inclusive")
    return {f"p{each}": cut[each - 1] for each in PERCENTILES}


async def ask(client: httpx.AsyncClient, body: dict[str, Any], waits: Waits) -> None:
    """One question and its streamed answer."""
    began = last = time.perf_counter()
    is_first = True
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.status_code == 503:
            waits.refused += 1
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
            waits.num_tokens += (chunk.get("usage") or {}).get("completion_tokens", 0)
            if any((choice.get("delta") or {}).get("content") for choice in chunk["choices"]):
                now = time.perf_counter()
                (waits.first if is_first else waits.between).append(now - (began if is_first else last))
                is_first, last = False, now


async def run(options: LoadTestOptions, num_clients: int, messages: list[Any], model: str) -> Waits:
    """``num_clients`` at once until every question is answered."""
    chance, waits = random.Random(options.seed), Waits()
    shortest, longest = sorted(options.max_new_tokens)
    bodies = [
        {
            "model": model,
            "messages": messages[index % len(messages)],
            "max_tokens": chance.randint(shortest, longest),
            "temperature": options.temperature,
            "seed": options.seed + index,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"medusa_plain": True} if options.medusa_plain else {}),
        }
        for index in range(options.requests)
    ]
    left = iter(bodies)

    async def visitor(client: httpx.AsyncClient) -> None:
        for body in left:
            await ask(client, body, waits)
            if options.pause:
                await asyncio.sleep(chance.expovariate(1 / options.pause))

    headers = {"Authorization": f"Bearer {options.api_key}"}
    async with httpx.AsyncClient(base_url=options.url, timeout=None, headers=headers) as client:
        began = time.perf_counter()
        await asyncio.gather(*(visitor(client) for _ in range(num_clients)))
        waits.seconds = time.perf_counter() - began
    return waits


def load_server(options: LoadTestOptions) -> None:
    """Run, print a table, and report."""
    messages = [list(prompt.messages) for prompt in load_prompts(options.prompts)]
    headers = {"Authorization": f"Bearer {options.api_key}"}
    models = httpx.get(f"{options.url}/v1/models", headers=headers).raise_for_status().json()["data"]
    model = options.model or models[0]["id"]
    report: dict[str, Any] = {"url": options.url, "model": model, "medusa_plain": options.medusa_plain}
    rows = []
    for num_clients in options.clients:
        log_console().print(f"{num_clients} clients", style="dim")
        result = asyncio.run(run(options, num_clients, messages, model)).as_dict()
        report[f"clients_{num_clients}"] = result
        first, between = result["time_to_first_token"], result["time_between_events"]
        waits = [f"{1000 * (each[f'p{p}'] or 0):.0f}" for each in (first, between) for p in (50, 95)]
        rows.append([str(num_clients), f"{result['tokens_per_second']:.1f}", *waits])
    columns = ["clients", "tokens/s", "first p50 ms", "p95", "between p50 ms", "p95"]
    title = f"{model} at {options.url}, {options.requests} questions"
    print_table(table_console(), title, columns, rows)
    report_json(report, options.report)


if __name__ == "__main__":
    given = parse(LoadTestOptions, description=__doc__)
    sys.exit(exit_status(lambda: load_server(given), given.report.traceback))
