"""How large bases load and decode here: random Llama shapes of 1B, 3B and 8B, beside llama.cpp, transformers.

    python scripts/sizes.py --prepare          # writes runs/shapes/1B and 8B, 47 GB, and compiles for them
    python scripts/sizes.py                    # measures them, some 25 minutes on two cores
    python scripts/sizes.py --shapes 1B        # one of them; writes and compiles what is missing first

A random model has the speed and the memory of a trained one. Every contender runs in a process of its own, so
that its peak of memory is its own, and all take turns, round after round; what is printed are medians. The
tokens of an answer are greedy, after 64 tokens of prompt. "predicted" knows the right answer beforehand, so
that its steps accept as many guesses as those of very good heads would; "wrong" verifies three guesses in
each step, none of which is right, and "of four rows" decodes as many texts at once. llama.cpp takes part
where it is installed (`pip install '.[llama-cpp]'`); compiled for this processor, as pip does it from source
(`--no-binary llama-cpp-python`), it is at its best. The last line is one JSON object.

    python scripts/sizes.py --shapes 30B-A3B 20B-A4B   # mixtures, only as quantised files of 18 and 12 GB
    python scripts/sizes.py --shapes Qwen3.5-4B        # hybrids, whose layers keep states, as files
    python scripts/sizes.py --files MODEL.gguf # quantised files: these, or of a shape Q4_K_M.gguf
    python scripts/sizes.py --shapes 1B --contenders "file Q4_K_M" "llama-bench Q4_K_M" --llama-bench PATH

`--llama-bench` names that program of llama.cpp, or of a relative such as ik_llama.cpp, with its flags. It
decodes 24 tokens and reads 64 and 2,000, in a process of its own as the others. OpenVINO GenAI reads such
files too, where it is installed (`pip install openvino-genai`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bench.llama_bench import llama_bench
from bench.random_shapes import (
    HYBRIDS,
    MIXTURES,
    SHAPES,
    VOCABULARY,
    write_gguf,
    write_hybrid,
    write_mixture,
    write_shape,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from medusa import CandidateTree, MedusaModel
from medusa.assets import base_named
from medusa.base.gguf_file import GGUFFile
from medusa.base.passes import cache_argument
from medusa.console import log_console
from medusa.drafters.protocol import Draft, DraftContext, StatelessDrafter
from medusa.engine.views import packed_bytes
from medusa.engine.weights.experts import PackedExperts
from medusa.engine.weights.load import load_base
from medusa.engine.weights.products import PackedMatmul
from medusa.files import replaced_file
from medusa.heads.mtp import can_draft_itself
from medusa.measurement.llama_cpp import LlamaCpp, llama_cpp_unsupported_reason
from medusa.measurement.report import end_with_json
from medusa.trees.candidate_tree import TreeTopology

OURS = ("packed", "int8")
THEIRS = ("transformers bfloat16", "llama.cpp BF16", "llama.cpp Q8_0")
READERS = ("file", "llama.cpp", "llama-bench", "openvino")
"""What reads GGUF files."""
OF_FILES = tuple(f"{reader} {kind}" for kind in ("Q4_K_M", "Q8_0", "MXFP4") for reader in READERS)
"""Those that read a quantised file of a shape."""
ONLY_FILES: dict[str, Any] = {**MIXTURES, **HYBRIDS}
"""Shapes of which there are only quantised files."""
ROUNDS = {"1B": 2, "3B": 1, "8B": 1}
"""Turns of every contender, unless told otherwise; the larger the shape, the longer and steadier is each."""
SHORT, LONG, NEW_TOKENS = 64, 2000, 24
ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Rows of the passes whose products are timed."""


def peak_bytes() -> int:
    """The most memory that this process has had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def _file_of(system: str, directory: Path) -> Path:
    """The GGUF file that a contender reads: ``directory`` itself where it is one."""
    return directory / f"{system.split()[1]}.gguf" if directory.is_dir() else directory


def measured(system: str, directory: Path, program: list[str]) -> dict[str, Any]:
    """Seconds to load, milliseconds to the first token and for each further one, peak memory."""
    prompts = {length: torch.arange(5, 5 + length)[None] % VOCABULARY for length in (SHORT, LONG)}
    began = time.perf_counter()
    if system in OURS:
        found = _of_ours(system, directory, prompts, began)
    elif system.startswith("file"):
        found = _of_ours("auto", _file_of(system, directory), prompts, began)
    elif system.startswith("llama-bench"):
        return _of_llama_bench(program, _file_of(system, directory))
    elif system.startswith("llama.cpp"):
        found = _of_llama_cpp(_file_of(system, directory), prompts, began)
    elif system.startswith("openvino"):
        found = _of_openvino(_file_of(system, directory), prompts, began)
    else:
        found = _of_transformers(directory, prompts, began)
    return found | {"peak_bytes": peak_bytes()}


def vocabulary_of(path: Path) -> int:
    """The number of tokens of the model in a GGUF file."""
    return GGUFFile.open(path).tensors["token_embd.weight"].shape[0]


def compiled(engine: Any, directory: Path) -> float:
    """Have the compiled steps of one of ours on disk: the seconds that this took."""
    return MedusaModel(load_base(directory, engine), engine=engine, step="compiled").compile()


def _of_ours(engine: Any, directory: Path, prompts: dict[int, Tensor], began: float) -> dict[str, Any]:
    model = MedusaModel(load_base(directory, engine), engine=engine, step="compiled")
    model.compile()
    found = {
        "load_seconds": time.perf_counter() - began,
        "weights_bytes": sum(packed_bytes(model.engine_base).values()),
    }
    greedy: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    plain: dict[str, Any] = {**greedy, "tree": CandidateTree.chain(0)}
    told = []
    found |= _times(
        lambda: (told.extend(step.tokens[0]) or None for step in model.stream(prompts[SHORT], **plain))
    )
    predicted = {**greedy, "prediction": [told]}
    times = _times(lambda: (len(step.tokens[0]) for step in model.stream(prompts[SHORT], **predicted)))
    found["predicted_ms_per_token"] = times["ms_per_token"]
    found["first_2000_ms"] = _first_ms(lambda: model.stream(prompts[LONG], **{**plain, "max_new_tokens": 1}))
    wrong = WrongGuesses(torch.tensor(told), SHORT)
    times = _times(lambda: (None for _ in model.stream(prompts[SHORT], **greedy, drafter=wrong)))
    found["wrong_ms_per_token"] = times["ms_per_token"]
    rows = prompts[SHORT].expand(4, -1)
    times = _times(lambda: (None for _ in model.stream(rows, **plain)))
    found["of_four_rows_ms_per_token"] = times["ms_per_token"] / len(rows)
    if can_draft_itself(model.base.config):
        found["three_drafts_ms"] = _own_drafts_ms(model, prompts[SHORT])
    return found | {"products_ms": _products_ms(model.engine_base)}


def _own_drafts_ms(model: MedusaModel, prompt: Tensor) -> float:
    """Milliseconds of a draft by the layers that come with the base, three deep, in a tree of four nodes
    beside the suffix match: the median of a step's."""
    own = MedusaModel.from_pretrained(model.base, "mtp", engine=model.engine, step="compiled")
    own.compile()
    drafter = own.drafter_for(1)
    times = []
    draft = drafter.draft

    def timed(context: DraftContext) -> Draft:
        before = time.perf_counter()
        drafted = draft(context)
        times.append(1000 * (time.perf_counter() - before))
        return drafted

    drafter.draft = timed  # type: ignore[method-assign]
    deque(own.stream(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, drafter=drafter), maxlen=0)
    return statistics.median(times[1:])


class WrongGuesses(StatelessDrafter):
    """Three guesses after the text, all of them wrong: what the base will write is known.

    Args:
        answer: (T,) long, after a prompt of ``num_before`` tokens.
    """

    max_depth = 3

    def __init__(self, answer: Tensor, num_before: int):
        self._wrong = torch.where(answer > 0, answer - 1, 1)
        self._num_before = num_before

    def draft(self, context: DraftContext) -> Draft:
        """A chain of three."""
        at = int(context.lengths[0]) - self._num_before
        guesses = self._wrong[at : at + 3]
        guesses = torch.cat([guesses, guesses.new_zeros(3 - len(guesses))])
        tokens = torch.cat([context.root[:, None], guesses[None]], dim=1)
        return Draft(tokens, TreeTopology.chain(4, tokens.device, is_draft=True))


def _products_ms(runner: Any) -> dict[str, float]:
    """Milliseconds of all matrix products of a pass, by its rows: medians of trials in turns. Each row of a
    mixture chooses experts of its own."""
    experts = [each for each in runner.modules() if isinstance(each, PackedExperts)]
    of_experts = {matrix for each in experts for matrix in each.children()}
    products = [
        each for each in runner.modules() if isinstance(each, PackedMatmul) and each not in of_experts
    ]
    inputs = {
        (rows, each.num_inputs): torch.randn(rows, each.num_inputs)
        for rows in ROWS
        for each in (*products, *(each.into for each in experts))
    }
    num_chosen = getattr(runner.config, "num_experts_per_tok", 0)
    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for trial in range(9):
        torch.manual_seed(trial)
        for rows in ROWS:
            choices = [torch.rand(rows, each.num_experts).topk(num_chosen).indices for each in experts]
            before = time.perf_counter()
            for product in products:
                product(inputs[rows, product.num_inputs])
            for each, chosen in zip(experts, choices, strict=True):
                each(inputs[rows, each.into.num_inputs], chosen, torch.ones(chosen.shape))
            times[rows].append(1000 * (time.perf_counter() - before))
    return {str(rows): statistics.median(each) for rows, each in times.items()}


def _of_llama_bench(program: list[str], path: Path) -> dict[str, Any]:
    ms = llama_bench(program, path, [SHORT, LONG], NEW_TOKENS)
    read = {f"first_{length}_ms": ms[length, 0] for length in (SHORT, LONG)}
    return read | {"ms_per_token": ms[0, NEW_TOKENS] / NEW_TOKENS}


def _of_llama_cpp(path: Path, prompts: dict[int, Tensor], began: float) -> dict[str, Any]:
    model = LlamaCpp(path, vocabulary_of(path))
    found = {"load_seconds": time.perf_counter() - began}
    found |= _times(lambda: (None for _ in model.tokens(prompts[SHORT][0].tolist(), NEW_TOKENS, ())))
    found["first_2000_ms"] = _first_ms(lambda: model.tokens(prompts[LONG][0].tolist(), 1, ()))
    return found


def _of_openvino(path: Path, prompts: dict[int, Tensor], began: float) -> dict[str, Any]:
    import openvino
    import openvino_genai

    pipeline = openvino_genai.LLMPipeline(str(path), "CPU")
    found = {"load_seconds": time.perf_counter() - began}

    def answered(length: int, count: int) -> Any:
        config = openvino_genai.GenerationConfig(max_new_tokens=count, do_sample=False, ignore_eos=True)
        return pipeline.generate(openvino.Tensor(prompts[length].numpy()), config).perf_metrics

    answered(SHORT, 2)  # the first pass prepares the others
    metrics = answered(SHORT, NEW_TOKENS)
    found |= {"first_64_ms": metrics.get_ttft().mean, "ms_per_token": metrics.get_tpot().mean}
    return found | {"first_2000_ms": answered(LONG, 1).get_ttft().mean}


def _of_transformers(directory: Path, prompts: dict[int, Tensor], began: float) -> dict[str, Any]:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    found = {"load_seconds": time.perf_counter() - began}

    def tokens(prompt: Tensor, count: int) -> Iterator[None]:
        ids, kept = prompt, {cache_argument(model): DynamicCache(config=model.config)}
        for _ in range(count):
            with torch.inference_mode():
                output = model(input_ids=ids, use_cache=True, logits_to_keep=1, **kept)
            ids = output.logits[:, -1:].argmax(-1)
            yield None

    found |= _times(lambda: tokens(prompts[SHORT], NEW_TOKENS))
    found["first_2000_ms"] = _first_ms(lambda: tokens(prompts[LONG], 1))
    return found


def _times(steps: Any) -> dict[str, float]:
    """Milliseconds to the first step, and the median of a token of the others; a step may give several."""
    before, first, others = time.perf_counter(), 0.0, []
    for number, count in enumerate(steps()):
        now = time.perf_counter()
        if number == 0:
            first = now - before
        else:
            others.append((now - before) / (count or 1))
        before = now
    return {"first_64_ms": 1000 * first, "ms_per_token": 1000 * statistics.median(others)}


def _first_ms(steps: Any) -> float:
    before = time.perf_counter()
    next(iter(steps()))
    return 1000 * (time.perf_counter() - before)


# ------------------------------------------------------------------ all of them


def apart(contender: str, directory: Path, *flags: str) -> Any:
    """What :func:`measured` gives in a process of its own; with ``--prepare`` what :func:`compiled` does."""
    command = [sys.executable, __file__, "--one", contender, str(directory), *flags]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


def prepare(shape: str, directory: Path, contenders: list[str], tokenizer: Path) -> None:
    """Have the files of a shape on disk, and the steps compiled: what is there is left as it is."""
    log = log_console()
    if shape in ONLY_FILES:
        directory.mkdir(parents=True, exist_ok=True)
        write = write_mixture if shape in MIXTURES else write_hybrid
        for target in {_file_of(each, directory) for each in contenders}:
            if not target.exists():
                log.print(f"writing {target}")
                with replaced_file(target) as partial:
                    write(shape, partial)
    elif (directory.is_dir() and not (directory / "config.json").exists()) or not directory.exists():
        log.print(f"writing {directory}")
        write_shape(shape, directory, tokenizer)
    for contender in contenders:
        kind = contender.split()[-1]
        target = _file_of(contender, directory) if kind != contender else directory
        if contender.startswith(READERS) and not target.exists():
            log.print(f"writing {target}")
            with replaced_file(target) as partial:
                write_gguf(directory, partial, kind)
        if contender in OURS or contender.startswith("file"):
            log.print(f"{shape}, {contender}: compiled in {apart(contender, directory, '--prepare'):.0f} s")


def _contenders(shape: str, options: argparse.Namespace) -> list[str]:
    """Those of the wanted ones that can read a shape, or one of ``--files``, and that are installed."""
    if shape in ONLY_FILES:
        able = [each for each in OF_FILES if each.endswith(ONLY_FILES[shape].kind)]
        default = able = [each for each in able if not each.startswith("openvino")]  # it reads none of these
    elif options.files:
        able, default = list(OF_FILES), ["file Q4_K_M"]
    else:
        able, default = [*OURS, *THEIRS, *OF_FILES], [*OURS, *THEIRS]
    wanted = [each for each in options.contenders or default if each in able]
    is_here = {
        "llama.cpp": not llama_cpp_unsupported_reason(),
        "llama-bench": bool(options.llama_bench),
        "openvino": importlib.util.find_spec("openvino_genai") is not None,
    }
    return [each for each in wanted if is_here.get(each.split()[0], True)]


def _median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each number of several runs, and of those in a dictionary."""
    found: dict[str, Any] = {}
    for key, value in runs[0].items():
        values = [run[key] for run in runs]
        found[key] = _median(values) if isinstance(value, dict) else statistics.median(values)
    return found


def main() -> None:
    """Write what is missing, measure all contenders in turns, and print the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes", nargs="+", choices=[*SHAPES, *ONLY_FILES], default=["1B", "8B"], help="which ones"
    )
    parser.add_argument(
        "--rounds", type=int, help="turns of every contender, by default 2 of 1B, 1 of others"
    )
    parser.add_argument("--prepare", action="store_true", help="write and compile, and measure nothing")
    parser.add_argument("--directory", type=Path, default=Path("runs/shapes"), help="where the models lie")
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=(*OURS, *THEIRS, *OF_FILES),
        help="by default those of the models as they were published; of files and mixtures those of files",
    )
    parser.add_argument(
        "--files",
        nargs="+",
        default=[],
        help="GGUF files in place of shapes, or names that medusa fetch knows",
    )
    parser.add_argument(
        "--llama-bench",
        default=os.environ.get("LLAMA_BENCH"),
        help="that program, with flags such as -rtr 1; else what LLAMA_BENCH in the environment says",
    )
    parser.add_argument("--tokenizer", type=Path, default=Path("models/smollm2-135m-instruct"))
    parser.add_argument("--one", nargs=2, metavar=("CONTENDER", "MODEL"), help="measure here, for a parent")
    options = parser.parse_args()
    if options.one:
        contender, directory = options.one[0], Path(options.one[1])
        if options.prepare:
            is_file = contender.startswith("file")
            found = compiled(
                "auto" if is_file else contender, _file_of(contender, directory) if is_file else directory
            )
        else:
            found = measured(contender, directory, shlex.split(options.llama_bench or ""))
        print(json.dumps(found))
        return
    log, results = log_console(), {}
    flags = ["--llama-bench", options.llama_bench] if options.llama_bench else []
    for shape in options.files or options.shapes:
        contenders = _contenders(shape, options)
        if not contenders:
            parser.error(f"none of {', '.join(options.contenders)} is here and can read {shape}")
        directory = Path(base_named(shape)) if options.files else options.directory / shape
        prepare(shape, directory, contenders, options.tokenizer)
        if options.prepare:
            continue
        rounds = options.rounds or ROUNDS.get(shape, 3)
        runs: dict[str, list[dict[str, float]]] = {each: [] for each in contenders}
        for number in range(rounds):
            for contender in contenders:
                log.print(f"{shape}, round {number + 1}: {contender}")
                runs[contender].append(apart(contender, directory, *flags))
        is_file = all(each in OF_FILES for each in contenders)
        files = (
            {_file_of(each, directory) for each in contenders} if is_file else directory.glob("*.safetensors")
        )
        size = sum(each.stat().st_size for each in files)
        medians = {system: _median(each) for system, each in runs.items()}
        results[shape] = {"file_bytes": size, "rounds": rounds, "contenders": medians}
        for contender, each in medians.items():
            told = (f"{key} {value:.4g}" for key, value in each.items() if key != "products_ms")
            log.print(f"{shape} {contender}: {', '.join(told)}")
    end_with_json({"shapes": results, "num_threads": torch.get_num_threads()}, None)


if __name__ == "__main__":
    main()
