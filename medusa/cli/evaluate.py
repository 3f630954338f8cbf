"""``medusa evaluate``: how good heads are, one set of them or several, and how true an engine is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch
import tyro
from torch import Tensor

from medusa.base.causal_lm import vocab_size
from medusa.base.loading import BaseSource, find_base, is_held_quantised
from medusa.cli.loading import (
    answered_prompts,
    decode_prompt,
    encode_prompts,
    heads_of,
    load_model,
    load_prompts,
    measured_on,
)
from medusa.cli.options import GrowingInts, ModelOptions, ProgramOptions, answer_command, command, to_argv
from medusa.console import counted, log_console, track
from medusa.drafters.registry import DrafterFactory
from medusa.engine.engine_state import resolved_engine
from medusa.engine.kernels import kernels_unsupported_reason
from medusa.engine.views import packed_as
from medusa.engine.weights.load import load_base
from medusa.heads.calibration import AnsweredTokens, calibrate
from medusa.measurement import comparison, evaluation
from medusa.measurement.comparison import COMPARED_SIZES, NamedHeads, ranked, read_named, split_label
from medusa.measurement.evaluation import TOP_KS, Evaluated, Reader, reader_of
from medusa.measurement.llama_cpp import LlamaCpp, llama_cpp_unsupported_reason
from medusa.measurement.report import Report
from medusa.measurement.systems import llama_cpp_files
from medusa.model import MedusaModel
from medusa.options import check_at_least
from medusa.plots import short_name
from medusa.prompts import read_prompts
from medusa.training.data.loading import held_out_answers

MAX_RANK = 16
"""Guesses of each head that a tree of --tree-nodes may use."""
ROWS_PER_PASS = 4
"""Answers that the base reads together."""


@dataclass(frozen=True)
class DecodingOptions:
    """Options of one set of heads, which decodes."""

    tree_nodes: int | None = None
    """Decode with the best tree of this number of nodes, root included, on the conversations of
    --calibrate-on."""
    calibrate_on: Path | None = None
    """Data to choose that tree on: JSON lines as for --prompts, but different ones; 50 rows are plenty.
    `messages` that end with an answer are read as they are, everything else is answered first."""
    drafter: str | None = None
    """Drafter of live decoding: dynamic-heads, or a union such as dynamic-heads+suffix, with the number of
    nodes of the tree; none is the heads in the tree itself."""
    also_at: tuple[float, ...] = ()
    """Other temperatures to answer every prompt at, with the same tree."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "tree_nodes")
        check_at_least(self, 0, "also_at")
        if (self.tree_nodes is None) != (self.calibrate_on is None):
            raise ValueError("tree_nodes and calibrate_on go together; give both or neither")


@dataclass(frozen=True)
class ComparisonOptions:
    """Options for comparing several sets of heads on the same answers."""

    held_out: bool = False
    """Ask about the conversations that the training runs of all these heads held out."""
    sizes: GrowingInts = COMPARED_SIZES
    """Nodes of the trees, root included."""
    max_rank: int = 16
    """Guesses of each head that a tree may use."""
    rounds: int = 4
    """Answers on which steps are timed, after one to warm up; 0 times nothing."""
    step_nodes: int = 16
    """Nodes of the trees that are timed."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_rank", "step_nodes")
        check_at_least(self, 0, "rounds")


@dataclass(frozen=True)
class FidelityOptions:
    """Options of an engine, instead of heads."""

    fidelity: bool = False
    """Measure the distance between the distributions of --engine and of the float32 model."""
    llama_cpp: tuple[Path, ...] = ()
    """GGUF files of the base to read with llama.cpp: MODEL-q8_0.gguf is llama.cpp-q8_0."""
    tokens_per_pass: int | None = None
    """Tokens in a forward pass; none reads as in prefill."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "tokens_per_pass")


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(ProgramOptions):
    """How good are these heads? Decodes prompts with them, then asks each head about every token.

    Live decoding gives tokens per step and the acceptance rate by depth; reading the same answers again
    (teacher forcing) gives each head's top-k accuracy, whatever the tree. With --also-at the prompts are
    answered at other temperatures too. Prints a table, draws a PNG, and ends with a JSON report.

        medusa evaluate
        medusa evaluate --base BASE --heads HEADS --prompts FILE --max-new-tokens 256
        medusa evaluate --temperature 0.7 --seed 3 --json result.json --plot result.png
        medusa evaluate --prompts FILE --tree-nodes 64 --calibrate-on OTHER_FILE --also-at 1
        medusa evaluate --drafter dynamic-heads+suffix

    Several sets of one base are compared on the same answers, in one table: how often each head's first guess
    is right, tokens per step with trees of several sizes, each judged on answers that did not choose it,
    parameters, the times of drafting and of a step, and the cost of training. The first set is the baseline.
    The answers are the base's own to the prompts, the answers in the prompt file where it has some, or the
    conversations that the training runs held out. Intervals are 95 % bootstraps over answers.

        medusa evaluate runs/a/heads runs/b/heads runs/c/heads --held-out
        medusa evaluate one=runs/a/heads two=runs/b/heads --prompts FILE --sizes 4,32 --rounds 0

    With --fidelity a quantised engine, or llama.cpp with a quantised file, is compared with the float32
    model: the mean KL divergence of their distributions from float32's, in nats, and how often the likeliest
    token is the same, at each position of float32's own greedy answers. Answers in the prompt file are used
    unchanged; prompts without one are answered first, which takes longer than all the rest. The text is read
    as in prefill, many tokens in a pass; --tokens-per-pass 1 reads it as plain decoding does, which is slower
    and shows differences of engines between the two.

        medusa evaluate --fidelity --engine int8 --prompts ANSWERS.jsonl --llama-cpp MODEL-q8_0.gguf
    """

    sets: tyro.conf.Positional[tuple[str, ...]] = ()
    """[LABEL=]HEADS ...: sets of heads, directories, hub ids or names of heads that ship; none is --heads."""
    decoding: DecodingOptions = DecodingOptions()
    comparison: ComparisonOptions = ComparisonOptions()
    engines: FidelityOptions = FidelityOptions()
    plot: Path = Path("runs/plots/evaluate_heads.png")
    """Where the picture goes."""

    def __post_init__(self) -> None:
        if self.comparison.held_out and self.prompts.prompts is not None:
            raise ValueError("held_out and prompts both say what to ask about; give one of them")
        if self.sets and self.model.heads != ModelOptions.heads:
            raise ValueError(
                "heads are named one after the other, or one set with --heads, not both; leave --heads out"
            )
        question = "several sets of heads" if self.compares else "one set of heads"
        if self.engines.fidelity:
            question = "--fidelity"
            if self.sets:
                raise ValueError("fidelity is an engine's, and sets of heads are named; give one of them")
            if self.answers.temperature != 0:
                raise ValueError(
                    "temperature must be 0: answers are greedy here, and distributions not sampled"
                )
        unread = {
            "several sets of heads": (self.decoding, self.engines),
            "one set of heads": (self.engines,),
            "--fidelity": (self.decoding, self.comparison),
        }
        for group in unread[question]:
            for option in fields(group):
                if getattr(group, option.name) != option.default:
                    raise ValueError(f"{option.name} goes with other questions than {question}; leave it out")

    @property
    def compares(self) -> bool:
        """Whether sets of heads are compared on the same answers, without live decoding."""
        return len(self.sets) > 1 or self.comparison != ComparisonOptions()


def evaluate(options: EvaluationOptions) -> list[str]:
    """Measure; print, draw and write the results."""
    if options.engines.fidelity:
        return _evaluate_engine(options)
    sets = read_named(options.sets or [options.model.required_heads]) if options.compares else []
    heads = split_label(options.sets[0])[1] if options.sets else options.model.required_heads
    heads = sets[0].source if sets else heads
    options = replace(options, model=replace(options.model, heads=heads), sets=())
    return _compare_sets(sets, options) if sets else _evaluate_set(options)


# ------------------------------------------------------------------ one set of heads


def _evaluate_set(options: EvaluationOptions) -> list[str]:
    """Decode with the heads, and ask each about every token of the answers."""
    model = load_model(options.model, template=options.prompts)
    drafter = options.decoding.drafter
    if drafter is not None:
        DrafterFactory(model).make(drafter)  # refused before anything is answered
    _use_tree_asked_for(model, options)
    prompts = load_prompts(options.prompts)
    encoded = encode_prompts(model, prompts, options.answers.max_new_tokens)
    evaluated = []
    for prompt, inputs in track(list(zip(prompts, encoded, strict=True)), "answering"):
        tokens, statistics = decode_prompt(model, inputs, options.answers, drafter)
        row = AnsweredTokens.after_prompt(tokens, prompt_length=inputs["input_ids"].shape[1])
        counts = calibrate(model.base, heads_of(model), [row], max_rank=max(TOP_KS))
        evaluated.append(Evaluated(prompt.category, statistics, counts))
    others = {}
    for temperature in options.decoding.also_at:
        answer_options = replace(options.answers, temperature=temperature)
        label = f"answering at temperature {temperature:g}"
        others[temperature] = [
            decode_prompt(model, each, answer_options, drafter)[1] for each in track(encoded, label)
        ]
    answers = {name: getattr(options.answers, name) for name in ("temperature", "max_new_tokens", "seed")}
    answers["drafter"] = drafter or "heads"
    settings = evaluation.made_by(model, options.model.heads, answers)
    values = {**evaluation.evaluation_report(evaluated, others), "made": settings}
    report = Report(values)
    evaluation.add_tables(report, options.answers.temperature)
    title = (
        f"{short_name(options.model.heads)}, {values['num_prompts']} prompts, "
        f"temperature {options.answers.temperature:g}"
    )
    report.add_picture(options.plot, partial(evaluation.plot_evaluation, values, title=title))
    report.publish(options.report.json)
    can_be_tuned = not model.tuned and Path(options.model.heads).is_dir()
    return [command("tune" if can_be_tuned else "benchmark", *to_argv(options.model))]


def _use_tree_asked_for(model: MedusaModel, options: EvaluationOptions) -> None:
    """Let ``model`` decode with the tree of --tree-nodes, if it is given."""
    tree_nodes = options.decoding.tree_nodes
    calibrate_on = options.decoding.calibrate_on
    if tree_nodes is None or calibrate_on is None:
        return
    rows = answered_prompts(model, read_prompts(calibrate_on), options.answers, "answering to calibrate")
    (counts,) = ranked(model, [heads_of(model)], rows, MAX_RANK)
    model.use_tree(counts.best_tree(tree_nodes))
    log_console().print(
        f"tree of {counted(model.tree.num_nodes, 'node')}, {model.tree.depth} deep, chosen on "
        f"{counted(len(rows), 'conversation')} of {calibrate_on}",
        style="dim",
        soft_wrap=True,
    )


# ------------------------------------------------------------------ several


def _compare_sets(sets: Sequence[NamedHeads], options: EvaluationOptions) -> list[str]:
    """Ask all sets of heads about the same answers."""
    comparison_options = options.comparison
    model = load_model(options.model, template=options.prompts)
    rows = sorted(_answers_to_compare_on(model, sets, options), key=lambda row: len(row.token_ids))
    modules = [each.checkpoint.heads.to(model.device).eval() for each in sets]
    counts = ranked(model, modules, rows, comparison_options.max_rank, ROWS_PER_PASS)
    times = {}
    if comparison_options.rounds:
        beginnings = [_beginning(row, model.device) for row in rows]
        chosen = [beginnings[place % len(rows)] for place in range(1 + comparison_options.rounds)]
        times = comparison.measured_steps(
            model, sets, counts, comparison_options.step_nodes, chosen, label="timing steps"
        )
    about = f"answers to {options.prompts.prompts or 'the prompts of the demo'}"
    values = {
        "against": sets[0].label,
        "heads": comparison.comparison_report(sets, counts, comparison_options.sizes, times),
        "num_answers": len(counts[0].ranks),
        "num_tokens": sum(len(ranks) for ranks in counts[0].ranks),
        **measured_on(model),
        "step_nodes": comparison_options.step_nodes,
        "asked_about": "conversations held out in training" if comparison_options.held_out else about,
    }
    report = Report(values)
    comparison.add_table(report)
    title = f"{short_name(model.base.name_or_path)}, {values['asked_about']}, {values['num_tokens']} tokens"
    report.add_picture(options.plot, partial(comparison.plot_heads, values["heads"], title=title))
    report.publish(options.report.json)
    largest = str(max(comparison_options.sizes))
    best = max(values["heads"], key=lambda row: row["tokens_per_step"][largest]["value"])
    return [answer_command(model.tokenizer, *to_argv(replace(options.model, heads=best["heads"])))]


def _answers_to_compare_on(
    model: MedusaModel, sets: Sequence[NamedHeads], options: EvaluationOptions
) -> list[AnsweredTokens]:
    """The finished answers on which all heads are evaluated."""
    if options.comparison.held_out:
        provenance = {each.label: each.checkpoint.provenance for each in sets}
        return held_out_answers(provenance, model.tokenizer)[: options.prompts.limit]
    return answered_prompts(model, load_prompts(options.prompts), options.answers)


def _beginning(row: AnsweredTokens, device: torch.device) -> dict[str, Tensor]:
    """The text before the first answer of ``row``, as a prompt: (1, T) long each."""
    length = max(1, list(row.is_label).index(True))
    ids = torch.tensor([row.token_ids[:length]], device=device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


# ------------------------------------------------------------------ an engine


def _evaluate_engine(options: EvaluationOptions) -> list[str]:
    """Compare the engine, and llama.cpp, with float32; of a quantised file, with its widened weights."""
    model_options = replace(options.model, dtype=options.model.dtype or "float32")
    source = _quantised_base(options.model)
    if source is not None:
        model_options = replace(model_options, engine="eager", step="general")
    model = load_model(model_options, holds_weights=True, source=source)
    if model.base.dtype != torch.float32:
        raise ValueError(f"dtype must be float32, which all are held against, got {model.base.dtype}")
    others = _readers(model, options.engines, source)
    if source is not None:
        held = load_base(source, options.model.engine)
        reader = reader_of(held, options.engines.tokens_per_pass)
        del others["eager"]
        others = {packed_as(held) or "packed": reader, **others}
    prompts = load_prompts(options.prompts)
    exact = model
    if any(prompt.answer is None for prompt in prompts):
        # Answers are float32's, whatever the engine: its own would be another model's.
        exact = MedusaModel(model.base, model.heads, model.tree, model.tokenizer, engine="auto")
    rows = answered_prompts(exact, prompts, options.answers)
    distances = evaluation.compared(reader_of(model.base), others, track(rows, "reading"))
    engines = {name: evaluation.fidelity(each) for name, each in distances.items()}
    report = Report(
        {
            "engines": engines,
            "num_answers": len(rows),
            "num_tokens": next(iter(engines.values()))["num_tokens"],
            "tokens_per_pass": options.engines.tokens_per_pass,
            "max_new_tokens": options.answers.max_new_tokens,
            **measured_on(model),
        }
    )
    evaluation.add_fidelity_table(report)
    report.publish(options.report.json)
    return [command("benchmark", *to_argv(options.model))]


def _quantised_base(options: ModelOptions) -> BaseSource | None:
    """The base, where it is quantised and can be held in its own bits."""
    if options.base is None or options.engine == "eager":
        return None
    source = find_base(options.base, trust_remote_code=options.trust_remote_code)
    is_held = is_held_quantised(source) and kernels_unsupported_reason() is None
    return source if is_held else None


def _readers(model: MedusaModel, options: FidelityOptions, source: BaseSource | None) -> dict[str, Reader]:
    """Who is held against float32: the engine, then llama.cpp with each GGUF file, that of the base first."""
    engine = resolved_engine(model.base, model.engine)
    step = options.tokens_per_pass
    readers: dict[str, Reader] = {engine: reader_of(model.engine_base, step)}
    paths = [*options.llama_cpp]
    if source is not None and source.gguf is not None and source.gguf.path not in paths:
        lacks = llama_cpp_unsupported_reason()
        if lacks is None:
            paths.insert(0, source.gguf.path)
        elif not paths:
            log_console().print(f"llama.cpp is left out: {lacks}", style="dim", soft_wrap=True, markup=False)
    for name, path in llama_cpp_files(model, paths).items():
        readers[name] = partial(LlamaCpp(path, vocab_size(model.base)).logits, tokens_per_pass=step)
    return readers
