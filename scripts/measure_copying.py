"""The speed-up from drafts that are copied from a prediction, or from earlier answers.

    python scripts/measure_copying.py edits.jsonl --limit 24

The file is a prompt file; each row may have a ``prediction`` too, the expected answer. Four ways take
turns on each prompt: the default; the same with the prediction; with a corpus of the other prompts' answers
(``others``); and with a corpus that holds the answer to this prompt, asked in slightly other words
(``asked before``). The answers are the same, or the program ends with an error.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import tyro

from medusa import MedusaModel, SuffixCorpus
from medusa.options import Engine, StepKind
from medusa.prompts import encode_messages, read_prompts


def main(
    prompts: tyro.conf.Positional[Path],
    /,
    base: str = "smollm2-135m-instruct",
    heads: str = "default",
    engine: Engine = "packed",
    step: StepKind = "compiled",
    limit: int = 24,
    max_new_tokens: int = 256,
    fill: int = 0,
) -> None:
    """Time four ways to answer; ``fill`` is the number of random tokens put into each corpus first."""
    model = MedusaModel.from_pretrained(base, heads=heads, engine=engine, step=step)
    asked = [list(each.messages) for each in read_prompts(prompts, limit)]
    rows = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    questions = list(zip(asked, [row.get("prediction") for row in rows], strict=False))
    corpora = [SuffixCorpus(max(2**24, 24 * fill)) for _ in range(2)]
    noise = torch.randint(model.base.config.vocab_size, (fill,), generator=torch.Generator().manual_seed(0))
    for corpus in corpora:
        for text in noise.split(512):
            corpus.add(text)
    measured: dict[str, list[dict[str, float]]] = {}
    for number, (messages, prediction) in enumerate([*questions[:3], *questions]):  # three warm up
        greedy = {"max_new_tokens": max_new_tokens, "do_sample": False, "return_dict_in_generate": True}
        thanks = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + " Thank you!"}]
        call, other = (
            {**encode_messages(model.tokenizer, each, model.device), **greedy} for each in (messages, thanks)
        )
        answer = model.generate(**call).sequences[0]
        corpora[1].add(model.generate(**other).sequences[0])
        ways: dict[str, dict[str, Any]] = {"default": {}, "others": {"corpus": corpora[0]}}
        ways["asked before"] = {"corpus": corpora[1]}
        if prediction is not None:
            ways["prediction"] = {"prediction": prediction}
        names = [*ways]
        for name in names[number % len(names) :] + names[: number % len(names)]:
            began = time.perf_counter()
            out: Any = model.generate(**call, **ways[name])
            seconds = time.perf_counter() - began
            if not torch.equal(out.sequences[0], answer):
                raise SystemExit(f"{name} changed the answer to row {number}")
            if number >= 3:
                counted = out.statistics
                numbers = {
                    "ms_per_token": 1000 * seconds / counted.num_tokens,
                    "ms_per_token_after_prompt": 1000 * counted.decode_seconds / counted.num_tokens,
                    "tokens_per_step": counted.tokens_per_step,
                    "draft_ms_per_step": 1000 * counted.phase_seconds["draft"] / max(1, counted.num_steps),
                }
                measured.setdefault(name, []).append(numbers)
        if number >= 3:
            corpora[0].add(answer)
    found: list[dict[str, Any]] = []
    for name, rows_of in measured.items():
        medians = {key: statistics.median(row[key] for row in rows_of) for key in rows_of[0]}
        for key in ("ms_per_token", "ms_per_token_after_prompt"):
            pairs = zip(measured["default"], rows_of, strict=False)
            medians[key.replace("ms_per_token", "times_as_fast")] = statistics.median(
                before[key] / now[key] for before, now in pairs
            )
        found.append({"way": name, **{key: round(value, 3) for key, value in medians.items()}})
    for each in found:
        print("  ".join(f"{key} {value}" for key, value in each.items()))
    print(json.dumps({"num_prompts": len(measured["default"]), "ways": found}))


if __name__ == "__main__":
    tyro.cli(main)
