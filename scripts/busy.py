"""How fast a base decodes while other processes compute on the same cores.

    python scripts/busy.py --base qwen2.5-coder-1.5b
    LLAMA_BENCH="build/bin/llama-bench" python scripts/busy.py --base qwen2.5-coder-1.5b

The other processes only count. They run in this session, so that the system gives each as much of a core as
each of the threads that decode, or less with a niceness. Plain and default decoding take turns, and so do the
numbers of processes. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from medusa import CandidateTree, MedusaModel
from medusa.assets import DEFAULT_HEADS, base_named
from medusa.console import log_console
from medusa.hardware import use_threads
from medusa.measurement.llama_cpp import llama_bench
from medusa.measurement.report import end_with_json
from medusa.prompts import encode_prompt, read_prompts

LEVELS = ((0, 0), (1, 0), (2, 0), (1, 10), (2, 10))
"""How many other processes there are, and their niceness."""


@contextmanager
def busy_processes(count: int, niceness: int) -> Iterator[None]:
    code = f"import os; os.nice({niceness})\nwhile True: pass"
    others = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        time.sleep(0.5)  # until they count
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def ms_a_token(
    model: MedusaModel, prompt: dict[str, torch.Tensor], num_tokens: int, tree: CandidateTree | None
) -> float:
    started = time.perf_counter()
    output = model.generate(**prompt, max_new_tokens=num_tokens, tree=tree)
    seconds = time.perf_counter() - started
    return 1e3 * seconds / (output.shape[1] - prompt["input_ids"].shape[1])


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
    options = parser.parse_args()
    use_threads()
    log = log_console()
    model = MedusaModel.from_pretrained(options.base, DEFAULT_HEADS, step="compiled")
    model.compile()
    prompts = [
        encode_prompt(model.tokenizer, prompt) for prompt in read_prompts(options.prompts, options.limit)
    ]
    contenders = {"plain": CandidateTree.chain(0), "default": None}
    for tree in contenders.values():  # warm
        ms_a_token(model, prompts[0], options.max_new_tokens, tree)
    results: dict[str, dict[str, list[float]]] = {}
    for number, prompt in enumerate(prompts, 1):
        for count, niceness in LEVELS:
            level = f"{count} busy" + f", nice {niceness}" * bool(niceness)
            found = results.setdefault(level, {})
            with busy_processes(count, niceness):
                for name, tree in contenders.items():
                    found.setdefault(name, []).append(ms_a_token(model, prompt, options.max_new_tokens, tree))
                if options.llama_bench:
                    ms = llama_bench(shlex.split(options.llama_bench), base_named(options.base), [], 24)
                    found.setdefault("llama-bench", []).append(ms[0, 24] / 24)
        log.print(f"{number} of {len(prompts)} prompts")
    medians = {
        level: {name: statistics.median(values) for name, values in found.items()}
        for level, found in results.items()
    }
    idle = medians["0 busy"]
    for level, found in medians.items():
        told = (f"{name} {ms:.1f} ms a token ({ms / idle[name]:.2f}x of idle)" for name, ms in found.items())
        log.print(f"{level}: {'; '.join(told)}")
    end_with_json({"base": options.base, "threads": torch.get_num_threads(), "ms_per_token": medians}, None)


if __name__ == "__main__":
    main()
