"""``medusa compare-engines``: quantised engines, and files for llama.cpp, held against float32."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import medusa
from medusa.base.causal_lm import vocab_size
from medusa.cli.options import ProgramOptions, check_at_least, words_of
from medusa.cli.program import answered_tokens, encode_prompts, load_model, load_prompts
from medusa.cli.reporting import command, report_json, table_console
from medusa.engine import resolved_engine
from medusa.heads.calibration import AnsweredTokens
from medusa.measurement.contenders import llama_cpp_files
from medusa.measurement.fidelity import Reader, compared, fidelity, print_fidelity, reader_of
from medusa.measurement.llama_cpp import LlamaCpp
from medusa.model import MedusaModel
from medusa.progress import track


@dataclass(frozen=True, kw_only=True)
class EnginesOptions(ProgramOptions):
    """How far is what a quantised engine says from the float32 model? And llama.cpp with a quantised
    file?

    All read the same text, the base's own greedy answers, and are asked for the next token at each of
    their positions: the mean KL divergence of their distributions from float32's, in nats, and how often
    the likeliest token is the same. Answers in the prompt file are taken as they are
    (`medusa distill` writes such files); prompts without one are answered first, which takes longer
    than all the rest. The text is read as prompts are, many tokens in a pass; --tokens-per-pass 1 reads
    it as plain decoding does, which is slower and tells engines apart that compute the two in different
    ways. Prints a table and ends with a JSON report.

        medusa compare-engines --engine int8
        medusa compare-engines --engine int8 --prompts ANSWERS.jsonl --llama-cpp MODEL-q8_0.gguf
        medusa compare-engines --engine int8 --limit 4 --tokens-per-pass 1
    """

    llama_cpp: tuple[Path, ...] = ()
    """GGUF files of the base to read with llama.cpp: MODEL-q8_0.gguf is llama.cpp-q8_0."""
    tokens_per_pass: int | None = None
    """Read so many tokens in a pass; none is as many as a prompt's."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "tokens_per_pass")
        if self.answers.temperature != 0:
            raise ValueError("temperature must be 0: answers are greedy here, and distributions not sampled")


def compare(options: EnginesOptions) -> list[str]:
    """Measure, and print and write what was found."""
    model = load_model(replace(options.model, dtype=options.model.dtype or "float32"))
    if model.base.dtype != torch.float32:
        raise ValueError(f"dtype must be float32, which all are held against, got {model.base.dtype}")
    others = readers(model, options)
    rows = answers(model, options)
    found = compared(reader_of(model.base), others, track(rows, "reading"))
    report = make_report(model, {name: fidelity(each) for name, each in found.items()}, len(rows), options)
    print_fidelity(report, table_console())
    report_json(report, options.report)
    return [command("benchmark", *words_of(options.model))]


def readers(model: MedusaModel, options: EnginesOptions) -> dict[str, Reader]:
    """Who is held against float32: the engine, then each GGUF file."""
    engine = resolved_engine(model.base, model.engine)
    found: dict[str, Reader] = {engine: reader_of(model.runner, options.tokens_per_pass)}
    for name, path in llama_cpp_files(model, options.llama_cpp).items():
        reader = LlamaCpp(path, vocab_size(model.base))
        found[name] = lambda tokens, reader=reader: reader.logits(tokens, options.tokens_per_pass)  # type: ignore[misc]
    return found


def answers(model: MedusaModel, options: EnginesOptions) -> list[AnsweredTokens]:
    """The base's own greedy answers, those in the prompt file where it has some."""
    prompts = load_prompts(options.prompts)
    pairs = list(zip(prompts, encode_prompts(model, prompts, options.answers.max_new_tokens), strict=True))
    if all(prompt.answer is not None for prompt in prompts):
        return [answered_tokens(model, *pair, options.answers) for pair in pairs]
    # Answers are float32's, whatever the engine: its own would be another model's.
    exact = MedusaModel(model.base, model.heads, model.tree, model.tokenizer, engine="auto")
    return [answered_tokens(exact, *pair, options.answers) for pair in track(pairs, "answering")]


def make_report(
    model: MedusaModel, engines: dict[str, Any], num_answers: int, options: EnginesOptions
) -> dict[str, Any]:
    """The JSON object of this program."""
    return {
        "engines": engines,
        "num_answers": num_answers,
        "num_tokens": next(iter(engines.values()))["num_tokens"],
        "tokens_per_pass": options.tokens_per_pass,
        "max_new_tokens": options.answers.max_new_tokens,
        "base": model.base.name_or_path,
        "device": str(model.device),
        "num_threads": torch.get_num_threads(),
        "medusa": medusa.__version__,
    }
