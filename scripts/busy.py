"""How fast a base decodes while other processes compute on the same cores.

    python scripts/busy.py --base qwen2.5-coder-1.5b
    LLAMA_BENCH="build/bin/llama-bench" python scripts/busy.py --base qwen2.5-coder-1.5b --transformers

The other processes only count, or one more decodes with the same base. They run in this session, so that the
system gives each as much of a core as each of the threads that decode, or less with a niceness. What is
measured takes turns, and so do the other processes. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from bench.llama_bench import llama_bench
from transformers import AutoModelForCausalLM

from medusa import CandidateTree, MedusaModel
from medusa.assets import DEFAULT_HEADS, base_named
from medusa.base.gguf_file import is_gguf
from medusa.console import log_console
from medusa.hardware import use_threads
from medusa.measurement.report import end_with_json
from medusa.prompts import encode_prompt, read_prompts

LEVELS = {
    "nothing": [],
    "one busy process": [0],
    "two": [0, 0],
    "one with nice 10": [10],
    "two with nice 10": [10, 10],
}
"""The niceness of each process that counts."""
ITSELF = "another of itself"
SECONDS_TO_LOAD = 12.0
"""For another of itself, whose libraries are compiled."""
NEW_TOKENS = {"transformers": 6, "llama-bench": 24}
"""Tokens of those that are slower."""


@contextmanager
def beside(commands: list[list[str]], seconds: float) -> Iterator[None]:
    """Other processes run meanwhile; ``seconds`` are left to them to begin."""
    others = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]
    try:
        time.sleep(seconds)
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def counting(niceness: int) -> list[str]:
    return [sys.executable, "-c", f"import os; os.nice({niceness})\nwhile True: pass"]


def loaded(base: str) -> MedusaModel:
    model = MedusaModel.from_pretrained(base, DEFAULT_HEADS, step="compiled")
    model.compile()
    return model


def ms_a_token(
    model: MedusaModel, prompt: dict[str, torch.Tensor], num_tokens: int, tree: CandidateTree | None
) -> float:
    started = time.perf_counter()
    output = model.generate(**prompt, max_new_tokens=num_tokens, tree=tree)
    seconds = time.perf_counter() - started
    return 1e3 * seconds / (output.shape[1] - prompt["input_ids"].shape[1])


def of_transformers(base: str) -> Callable[[dict[str, torch.Tensor]], float]:
    """The weights in bfloat16, or widened to it."""
    path = Path(base_named(base))
    where = (path.parent, {"gguf_file": path.name}) if is_gguf(path) else (path, {})
    model: Any = AutoModelForCausalLM.from_pretrained(where[0], dtype=torch.bfloat16, **where[1])

    def ms(prompt: dict[str, torch.Tensor]) -> float:
        times = []
        for num_tokens in (1, 1 + NEW_TOKENS["transformers"]):  # their difference has no prompt in it
            started = time.perf_counter()
            model.generate(**prompt, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)
            times.append(time.perf_counter() - started)
        return 1e3 * (times[1] - times[0]) / NEW_TOKENS["transformers"]

    return ms


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default="smollm2-135m-instruct", help="as every command names it")
    parser.add_argument("--prompts", default="demo_heldout", help="JSON lines with prompts, or their name")
    parser.add_argument("--limit", type=int, default=6, help="prompts, one after the other")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument(
        "--llama-bench",
        default=os.environ.get("LLAMA_BENCH"),
        help="that program of llama.cpp, for a base that is a GGUF file; else what LLAMA_BENCH says",
    )
    parser.add_argument("--transformers", action="store_true", help="measure it too, in bfloat16")
    parser.add_argument("--for-ever", action="store_true", help="only decode, for a parent")
    options = parser.parse_args()
    use_threads()
    log = log_console()
    model = loaded(options.base)
    prompts = [
        encode_prompt(model.tokenizer, prompt) for prompt in read_prompts(options.prompts, options.limit)
    ]
    while options.for_ever:
        ms_a_token(model, prompts[0], options.max_new_tokens, None)

    def decoding(tree: CandidateTree | None) -> Callable[[dict[str, torch.Tensor]], float]:
        return lambda prompt: ms_a_token(model, prompt, options.max_new_tokens, tree)

    def of_llama_bench(_: Any) -> float:
        count = NEW_TOKENS["llama-bench"]
        ms = llama_bench(shlex.split(options.llama_bench), base_named(options.base), [], count)
        return ms[0, count] / count

    contenders = {"plain": decoding(CandidateTree.chain(0)), "default": decoding(None)}
    if options.llama_bench:
        contenders["llama-bench"] = of_llama_bench
    if options.transformers:
        contenders["transformers"] = of_transformers(options.base)
    for measure in contenders.values():  # warm
        measure(prompts[0])
    levels = {level: [counting(niceness) for niceness in each] for level, each in LEVELS.items()}
    itself = [sys.executable, __file__, "--base", options.base, "--prompts", options.prompts, "--for-ever"]
    levels[ITSELF] = [itself]
    results: dict[str, dict[str, list[float]]] = {level: {} for level in levels}
    for number, prompt in enumerate(prompts, 1):
        for level, commands in levels.items():
            with beside(commands, SECONDS_TO_LOAD if level == ITSELF else 0.5):
                for name, measure in contenders.items():
                    results[level].setdefault(name, []).append(measure(prompt))
        log.print(f"{number} of {len(prompts)} prompts")
    medians = {
        level: {name: statistics.median(values) for name, values in found.items()}
        for level, found in results.items()
    }
    idle = medians["nothing"]
    for level, found in medians.items():
        each = (f"{name} {ms:.1f} ms a token ({ms / idle[name]:.2f}x of idle)" for name, ms in found.items())
        log.print(f"beside {level}: {'; '.join(each)}")
    end_with_json({"base": options.base, "threads": torch.get_num_threads(), "ms_per_token": medians}, None)


if __name__ == "__main__":
    main()
