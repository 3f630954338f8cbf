"""``medusa distill``: the base model answers the prompts that its heads are then trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from medusa.assets import EMBEDDED_BASE
from medusa.base.loading import find_base, load_tokenizer
from medusa.cli.loading import chosen_device, log_version, set_step
from medusa.cli.options import ReportOptions, command
from medusa.console import ProgressReporter, log_console
from medusa.engine import QUANTISED
from medusa.engine.weights.load import load_base
from medusa.measurement.report import end_with_json
from medusa.model import MedusaModel
from medusa.options import Dtype, Engine, TemplateOptions, check_at_least
from medusa.prompts import Prompt, read_prompts, with_template_kwargs
from medusa.training.distillation.answering import Answerer, ChatEndpoint, EndpointAnswerer, LocalAnswerer
from medusa.training.distillation.distill import (
    AnswerFile,
    DistillationReport,
    TimeLimit,
    distill,
    prompt_free,
    unanswered,
)


@dataclass(frozen=True, kw_only=True)
class DistillOptions:
    """Self-distillation: the base model answers the prompts that its heads are then trained on.

        medusa distill --prompts prompts.jsonl --output runs/answers.jsonl
        medusa distill --prompts prompts.jsonl --output runs/answers.jsonl --temperatures 0.0 0.8
        medusa distill --prompt-free 1000 --output runs/answers.jsonl
        medusa distill --prompts prompts.jsonl --output runs/answers.jsonl \\
            --endpoint http://node1:8000/v1 http://node2:8000/v1 --model my-model --batch-size 256

    Rows are appended as answers end. A run that was stopped goes on with the same command and loses only
    the answers under way. Prompt i gets the i-th temperature (in turn) and the noise stream seed + i, so
    the rows are the same whatever the batch size, the order, or the number of runs; only answers that a
    time limit cuts depend on the machine. `--engine int8` is the fastest on a CPU; its
    answers are the int8 model's.
    """

    #  The device, its dtype, the step and the batch size may differ between runs.

    output: Path
    """JSON lines to append to."""
    prompts: Path | None = None
    """JSON lines with `prompt`, `turns` or `messages`."""
    prompt_free: int | None = None
    """Instead of prompts: number of questions that the chat model asks itself."""
    limit: int | None = None
    """Number of prompts to take from the start of the file."""
    max_new_tokens: int = 256
    """Longest answer, in tokens."""
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    """Prompts take these in turn; 0 is greedy."""
    seed: int = 0
    """Seed of sampling."""
    keep_loops: bool = False
    """Let an answer that repeats itself go on to --max-new-tokens, instead of cutting the repetition."""
    batch_size: int = 32
    """Answers under way at once; of each endpoint, where there are several."""
    max_minutes: float | None = None
    """Stop then; answers under way are kept as far as they are, marked as cut."""
    base: str = EMBEDDED_BASE
    """Who answers: a directory, a GGUF file, a hub id, as owner/name, owner/name@revision or
    owner/name:Q4_K_M, or smollm2-135m-instruct, which `medusa fetch` fetches."""
    tokenizer: str | None = None
    """Tokenizer, as the base is named; none is the base's own."""
    trust_remote_code: bool = False
    """Run the code that the base's repository comes with, which can do anything."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto is cuda where there is one."""
    dtype: Dtype | None = None
    """Precision of the base; none is float32 on a CPU and the checkpoint's own elsewhere."""
    engine: Engine = "auto"
    """How the base is executed; engines that quantise write other text."""
    step: Literal["general", "compiled"] | None = None
    """How steps run. compiled: layers compiled for this machine, half a minute once, then the fastest on a
    CPU. None is compiled with engine packed or int8; elsewhere captured as CUDA graphs on a card where they
    can be, else general."""
    endpoint: list[str] = field(default_factory=list)
    """Let OpenAI-compatible servers answer instead, one or several of the same model, such as
    http://localhost:8000/v1. One that dies is given up, and the others go on."""
    model: str | None = None
    """The name of the model on those servers."""
    keep_states: bool = False
    """Have servers of vLLM that extract hidden states write those of each answer, which train --states_from
    reads; they run the base once then, and not a second time for training."""
    template: TemplateOptions = TemplateOptions()
    report: ReportOptions = ReportOptions()

    def __post_init__(self) -> None:
        check_at_least(self, 1, "prompt_free", "limit", "max_new_tokens", "batch_size")
        check_at_least(self, 0, "temperatures", "max_minutes")
        if (self.prompts is None) == (self.prompt_free is None):
            raise ValueError("one of prompts and prompt_free must be given")


class _AnswerProgress:
    """Answers done, tokens a second, and the time left by the rate of answers or by the time limit."""

    def __init__(self, reporter: ProgressReporter, num_conversations: int, limit: TimeLimit):
        self.reporter = reporter
        self.num_conversations = num_conversations
        self.limit = limit
        self.num_tokens = self.num_ended = 0

    def count_tokens(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self.show()

    def ended(self, report: DistillationReport) -> None:
        self.num_ended = report.num_ended
        self.show()

    def show(self) -> None:
        elapsed = max(self.limit.elapsed, 1e-9)
        of_time = 0.0 if self.limit.seconds is None else min(1.0, elapsed / self.limit.seconds)
        of_answers = self.num_ended / self.num_conversations
        note = f"{self.num_ended}/{self.num_conversations} answers, {self.num_tokens / elapsed:.0f} tokens/s"
        if self.limit.seconds is not None and of_time > of_answers:
            note += f", ends after {self.limit.seconds / 60:g} minutes"
        self.reporter.show(max(of_time, of_answers), note, elapsed)


def _configuration(options: DistillOptions) -> dict[str, Any]:
    """The settings on which the answers depend."""
    template_kwargs = options.template.template_kwargs
    return {
        "base": options.model if options.endpoint else options.base,
        "endpoint": options.endpoint,
        "max_new_tokens": options.max_new_tokens,
        "temperatures": options.temperatures,
        "seed": options.seed,
        "prompt_free": options.prompt_free is not None,
        "keep_loops": options.keep_loops,
        **({"template": template_kwargs} if template_kwargs else {}),
        "engine": options.engine if options.engine in QUANTISED else None,  # the others give one text
    }


def check(options: DistillOptions) -> None:
    if bool(options.endpoint) != (options.model is not None):
        raise ValueError(
            "--endpoint and --model go together: the server's address, and its name of the model"
        )
    for name, default in (("engine", "auto"), ("step", None)):
        value = getattr(options, name)
        if options.endpoint and value != default:
            raise ValueError(f"--{name} {value} is for a base in this process; --endpoint has its own")
    if options.keep_states and not options.endpoint:
        raise ValueError(
            "--keep-states is for servers of vLLM (--endpoint); a base in this process keeps its states in "
            "training, by --cache_hidden_states true"
        )
    if options.endpoint and options.prompt_free:
        raise ValueError(
            "--prompt-free needs the model itself: a chat endpoint writes answers, not questions"
        )


def wanted_prompts(options: DistillOptions) -> list[Prompt]:
    if options.prompt_free:
        prompts = prompt_free(min(options.prompt_free, options.limit or options.prompt_free))
    else:
        assert options.prompts is not None
        prompts = read_prompts(options.prompts, options.limit)
    return with_template_kwargs(prompts, options.template.template_kwargs)


def _load_answerer(options: DistillOptions, log: Console) -> Answerer:
    if options.endpoint and options.model:
        say = partial(log.print, soft_wrap=True, markup=False)
        endpoints = [
            ChatEndpoint(url, options.model, keep_states=options.keep_states, say=say)
            for url in dict.fromkeys(options.endpoint)
        ]
        return EndpointAnswerer(endpoints, options.batch_size, options.max_new_tokens, say)
    device = chosen_device(options.device)
    source = find_base(options.base, trust_remote_code=options.trust_remote_code)
    base = load_base(source, options.engine, device, options.dtype)
    tokenizer = load_tokenizer(options.tokenizer or source)
    model = MedusaModel(base, tokenizer=tokenizer, engine=options.engine)
    set_step(model, options.step)
    return LocalAnswerer(model, options.batch_size, options.max_new_tokens, stop_loops=not options.keep_loops)


def run(options: DistillOptions) -> list[str]:
    log = log_version()
    check(options)
    with AnswerFile(options.output, _configuration(options)) as answers:
        report, seconds = answer(
            wanted_prompts(options),
            answers,
            lambda: _load_answerer(options, log),
            options.temperatures,
            options.seed,
            options.max_minutes,
        )
        if seconds:
            summarise(report, seconds, options.output, log)
    end_with_json({**vars(report), "seconds": seconds}, options.report.json)
    base = "BASE" if options.endpoint else options.base  # a server's name of it is none of ours
    states = ("--cache_hidden_states", "true", "--states_from", "DIR", *options.endpoint)
    return [
        command(
            "train", "--config", "smollm2_demo", "--base", base, "--data", options.output,
            "--output_dir", "runs/mine", *(states if options.keep_states else ()),
        )
    ]  # fmt: skip


def answer(
    prompts: Sequence[Prompt],
    answers: AnswerFile,
    load_answerer: Callable[[], Answerer],
    temperatures: Sequence[float],
    seed: int,
    max_minutes: float | None,
) -> tuple[DistillationReport, float]:
    """Answer those of ``prompts`` that ``answers`` holds no answer to, with progress and time left; what came
    out, and the seconds."""
    log = log_console()
    conversations = unanswered(prompts, answers, temperatures, seed)
    log.print(f"{len(prompts)} prompts, {len(prompts) - len(conversations)} answered before")
    if not conversations:
        return DistillationReport(), 0.0
    answerer = load_answerer()
    limit = TimeLimit(max_minutes)
    with ProgressReporter("answers", log) as reporter:
        progress = _AnswerProgress(reporter, len(conversations), limit)
        report = distill(conversations, answerer, answers, limit, progress.count_tokens, progress.ended)
    return report, limit.elapsed


def summarise(report: DistillationReport, seconds: float, output: Path, log: Console) -> None:
    log.print(
        f"{report.num_written} rows written to {output}: {report.num_answers} answers ({report.num_cut} cut) "
        f"of {report.num_tokens} tokens in {seconds:.0f} s, {report.num_tokens / seconds:.0f} a second",
        soft_wrap=True,
    )
    if report.num_reasoned:
        log.print(
            f"{report.num_reasoned} answers reason first: {report.reasoning_share:.0%} of all text, "
            "kept apart in reasoning_content",
            soft_wrap=True,
        )
    if report.num_refused:
        log.print(
            f"{report.num_refused} could not be answered, the first: {report.first_refusal}",
            soft_wrap=True,
            markup=False,
        )
    if report.num_unasked:
        log.print(f"{report.num_unasked} prompts left for another run: the time was up")
    if output.stat().st_size == 0:
        raise ValueError(_why_nothing(report))


def _why_nothing(report: DistillationReport) -> str:
    """The reasons for which a run wrote no rows, and what to do."""
    causes = []
    if report.num_empty:
        causes.append(
            f"{report.num_empty} of {report.num_ended} answers hold no text, and were left out; choose "
            "another base, other --temperatures or other prompts"
        )
    if report.num_cut_questions:
        causes.append(
            f"{report.num_cut_questions} of {report.num_ended} questions of the model's own did not end "
            "within --max-new-tokens, and were left out; raise it"
        )
    if report.num_refused:
        causes.append(f"{report.num_refused} could not be answered, the first: {report.first_refusal}")
    if report.num_unasked and causes:
        causes.append(f"for {report.num_unasked} the time was up; give more (--max-minutes)")
    if not causes:
        return "nothing was answered; give more time (--max-minutes) or other prompts"
    return f"nothing was written: {'; '.join(causes)}"
