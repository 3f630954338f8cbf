"""What a pass over several tokens costs, here and in other programs: whether guesses are worth verifying.

    python scripts/rows_of_a_pass.py --plot rows.png
    LLAMA_BENCH="build/bin/llama-bench" python scripts/rows_of_a_pass.py

One forward pass of a base in a GGUF file, over 1 to 16 tokens behind 64 others, in milliseconds: here the
nodes of a tree, with the logits of all; elsewhere tokens of a prompt, with the logits of the last. All take
turns. llama.cpp takes part where llama-cpp-python is installed, and ``llama-bench`` of another build where
LLAMA_BENCH names it; `transformers` computes the widened weights in bfloat16. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from bench.llama_bench import llama_bench

from medusa import MedusaModel
from medusa.assets import base_named
from medusa.base.passes import cache_argument, new_cache, prefill
from medusa.console import log_console
from medusa.engine.compiled import CompiledPass
from medusa.hardware import use_threads
from medusa.measurement.llama_cpp import llama_cpp_unsupported_reason
from medusa.measurement.report import end_with_json
from medusa.plots import BLUE, FAINT, GREEN, INK, ORANGE, figure_of
from medusa.trees.candidate_tree import TreeTopology

ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
BEHIND = 64
"""Tokens of the text before."""
RunPass = Callable[[int], None]
"""Runs a pass over so many tokens."""


@torch.no_grad()
def of_medusa(base: str) -> RunPass:
    model = MedusaModel.from_pretrained(base, None, step="compiled")
    view = model.engine_base
    compiled = CompiledPass(view)
    tokens = torch.arange(BEHIND)[None] + 1000
    cache = new_cache(view, 1)
    prefill(view, tokens, torch.tensor([BEHIND]), cache, run=compiled.verify)

    def run(rows: int) -> None:
        with torch.inference_mode():
            compiled.verify(view, tokens[:, :rows], TreeTopology.chain(rows, torch.device("cpu")), cache)

    return run


def of_llama_cpp(path: str) -> RunPass:
    import llama_cpp

    threads = torch.get_num_threads()
    model = llama_cpp.Llama(path, n_ctx=256, n_threads=threads, n_threads_batch=threads, verbose=False)
    model.eval(list(range(1000, 1000 + BEHIND)))

    def run(rows: int) -> None:
        model.n_tokens = BEHIND  # what follows is replaced
        model.eval(list(range(1000, 1000 + rows)))

    return run


def of_transformers(path: str) -> RunPass:
    from transformers import AutoModelForCausalLM, DynamicCache

    file = Path(path)
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    tokens = torch.arange(BEHIND)[None] + 1000
    cache = DynamicCache(config=model.config)
    arguments: dict[str, Any] = {cache_argument(model): cache, "use_cache": True}
    with torch.inference_mode():
        model(input_ids=tokens, **arguments)

    def run(rows: int) -> None:
        with torch.inference_mode():
            model(input_ids=tokens[:, :rows], logits_to_keep=1, **arguments)
        cache.crop(-rows)

    return run


def plot(ms: Mapping[str, Mapping[str, float]], path: Path, title: str) -> None:
    """The time of a pass by its tokens, in passes over one token."""
    colors = {"medusa": BLUE, "llama.cpp": ORANGE, "llama-bench": GREEN, "transformers, bfloat16": INK}
    with figure_of(path, title, [1.5]) as (ax,):
        ax.plot(ROWS, ROWS, color=FAINT, linestyle="--", label="a pass for each token")
        for name, times in ms.items():
            relative = [times[str(rows)] / times["1"] for rows in ROWS]
            ax.plot(ROWS, relative, color=colors[name], marker="o", markersize=4, label=name)
        ax.set_xticks(ROWS, [str(rows) for rows in ROWS])
        ax.set_ylim(0, 4)
        ax.set_xlabel("tokens in a pass")
        ax.set_ylabel("time, in passes over one token")
        ax.legend()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default="qwen2.5-coder-1.5b", help="a base in a GGUF file")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--plot", type=Path, help="write a picture to this file")
    parser.add_argument("--llama-bench", default=os.environ.get("LLAMA_BENCH"), help="default: LLAMA_BENCH")
    options = parser.parse_args()
    use_threads()
    log = log_console()
    path = str(base_named(options.base))
    if not path.endswith(".gguf") or not Path(path).is_file():
        raise SystemExit(
            f"--base must be in a GGUF file, got {path}; get one with: medusa fetch {options.base}"
        )
    systems = {"medusa": of_medusa(options.base), "transformers, bfloat16": of_transformers(path)}
    lacks = llama_cpp_unsupported_reason()
    if lacks is None:
        systems["llama.cpp"] = of_llama_cpp(path)
    else:
        log.print(lacks)
    times: dict[str, dict[str, list[float]]] = {}
    for round_number in range(options.rounds + 1):
        for name, run in systems.items():
            run(1)  # the pass before was another program's, whose threads still wait for work
            for rows in ROWS if round_number % 2 else reversed(ROWS):
                began = time.perf_counter()
                run(rows)
                seconds = time.perf_counter() - began
                if round_number:  # the first one warms
                    times.setdefault(name, {}).setdefault(str(rows), []).append(1e3 * seconds)
        log.print(f"round {round_number} of {options.rounds}")
    ms = {
        name: {rows: statistics.median(measured) for rows, measured in by_rows.items()}
        for name, by_rows in times.items()
    }
    if options.llama_bench:
        found = llama_bench(shlex.split(options.llama_bench), path, ROWS, 0, repeats=5)
        ms["llama-bench"] = {str(rows): found[rows, 0] for rows in ROWS}
    for name, by_rows in ms.items():
        log.print(name, ", ".join(f"{rows}: {value:.1f} ms" for rows, value in by_rows.items()))
    if options.plot:
        plot(ms, options.plot, f"{options.base}, {torch.get_num_threads()} threads")
    end_with_json({"base": options.base, "ms": ms}, None)


if __name__ == "__main__":
    main()
