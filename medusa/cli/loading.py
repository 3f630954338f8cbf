"""Loads the model, its drafter and the prompts of options; and answers the prompts.

Missing or wrong files are an OSError or a ValueError of one sentence.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

import medusa
from medusa.assets import DEFAULT_HEADS, EMBEDDED_BASE, name_in_reports
from medusa.base.causal_lm import CausalLM, end_ids
from medusa.base.loading import BaseSource, find_base, is_held_quantised, load_tokenizer
from medusa.base.profile import context_length
from medusa.cli.option_types import AnsweringOptions, CompileOptions
from medusa.cli.options import (
    EMBEDDED_HEADS,
    EMBEDDED_PROMPTS,
    NO_HEADS,
    AnswerOptions,
    ModelOptions,
    PromptOptions,
    answer_command,
    how_to_train,
    to_argv,
)
from medusa.console import counted, log_console, megabytes, track
from medusa.conversations import check_template_kwargs
from medusa.decoding.batch import BatchLimits
from medusa.decoding.statistics import DecodingStatistics
from medusa.drafters.protocol import Drafter
from medusa.drafters.registry import DrafterFactory, uses_model_heads
from medusa.engine.libraries import NO_COMPILER, found_compiler
from medusa.engine.views import packed_bytes, share_of_outliers
from medusa.engine.weights.load import load_base
from medusa.engine.weights.own_head import load_own_heads
from medusa.hardware import use_threads
from medusa.heads.adapter import apply_adapter
from medusa.heads.calibration import AnsweredTokens
from medusa.heads.checkpoint import OWN_HEADS, HeadsCheckpoint, check_heads_fit_source, load_heads
from medusa.heads.mtp import can_draft_itself
from medusa.heads.protocol import Heads
from medusa.learning.learned_heads import learned_home
from medusa.measurement.report import end_with_json
from medusa.model import MedusaModel
from medusa.options import Engine, StepKind, TemplateOptions
from medusa.prompts import (
    Prompt,
    check_chat_template,
    encode_prompt,
    has_same_template_kwargs,
    read_prompts,
    with_template_kwargs,
)


def load_model(
    options: ModelOptions,
    with_heads: bool = True,
    template: TemplateOptions | None = None,
    holds_weights: bool | None = False,
    for_chat: bool = False,
    source: BaseSource | None = None,
) -> MedusaModel:
    """The base and its heads, on the device asked for; says first which medusa is running.

    Without ``--base`` the base is the one that the heads record. Their adapter is put onto the base without
    heads too, so that the text is the same. Warns where heads were trained with other chat template options
    than ``template``. ``holds_weights`` keeps the base's own weights beside the engine's packed ones, for
    measuring ``transformers``; None does so unless they are quantised and held as they are. ``for_chat``
    refuses a base without a chat template before it is read. ``source`` is the base, where it was found
    before.
    """
    log = log_version()
    use_threads(options.threads)
    check_template_kwargs({} if template is None else template.template_kwargs)
    device = chosen_device(options.device)
    named = options.named_heads
    checkpoint = None if named in (OWN_HEADS, None) else load_heads(named)
    name = options.base or recorded_base(checkpoint, options.heads)
    try:
        source = source or find_base(name, trust_remote_code=options.trust_remote_code)
    except FileNotFoundError as error:
        if options.base is None and checkpoint is not None:
            raise FileNotFoundError(
                f"the heads in {options.heads!r} were trained on the base {name!r}, which is not here: give "
                f"--base ({error})"
            ) from error
        raise
    if checkpoint is not None:
        check_heads_fit_source(checkpoint.heads, source)
    tokenizer = load_tokenizer(options.tokenizer or source)
    if for_chat:
        check_chat_template(tokenizer, name)
    if holds_weights is None:
        holds_weights = not (is_held_quantised(source) and device.type == "cpu" and options.engine != "eager")
    has_adapter = checkpoint is not None and checkpoint.adapter is not None
    # an adapter changes the weights, so they are held as they are
    engine: Engine = "eager" if has_adapter or holds_weights else options.engine
    base = load_base(source, engine, device, options.dtype)
    if named is None and options.heads == DEFAULT_HEADS and _can_draft_itself(source):
        named = OWN_HEADS
    if named == OWN_HEADS and with_heads:
        checkpoint = _own_heads(base, is_default=options.heads == DEFAULT_HEADS)
        named = None if checkpoint is None else named
    if checkpoint is not None and checkpoint.adapter is not None:
        apply_adapter(base, checkpoint.adapter)
    num_beams = base.generation_config.num_beams or 1
    if num_beams > 1:
        base.generation_config.num_beams = 1
        log.print(
            f"the base's generation_config asks for num_beams={num_beams}; medusa decodes greedily or by "
            "sampling, without beams",
            style="dim",
            soft_wrap=not log.is_terminal,
        )
    base.generation_config.eos_token_id = sorted(end_ids(base, tokenizer)) or None
    model = MedusaModel.from_pretrained(
        base,
        checkpoint if with_heads else None,
        tokenizer=tokenizer,
        engine=options.engine,
    )
    set_step(model, options.step)
    if with_heads and template is not None and checkpoint is not None:
        _warn_of_other_template(checkpoint, tokenizer, template.template_kwargs)
    heads = "no heads"
    if model.heads is not None:
        nodes = counted(model.tree.num_nodes, "node")
        is_learned = learned_home() in Path(named or "").parents
        origin = " that it has learned (`medusa heads`)" if is_learned else ""
        heads = f"{counted(model.heads.num_heads, 'head')}{origin}, a tree of {nodes}"
        if named == OWN_HEADS:
            heads = f"its own layer for guesses, {model.heads.num_heads} deep, a tree of {nodes}"
    if has_adapter:
        heads += ", with the LoRA adapter that was trained with them: the text is the adapted model's"
    for number_format, size in packed_bytes(model.engine_base).items():
        heads += f", {megabytes(size)} of weights packed in {number_format}"
    share = share_of_outliers(model.engine_base)
    if share:
        heads += f"; {share:.2%} of those in 12 bits kept apart"
    log.print(f"{name} in {base.dtype} on {device}, {heads}", style="dim", soft_wrap=not log.is_terminal)
    if named is None and with_heads and options.heads != NO_HEADS:
        text = (
            f"no heads were given, so guesses are copied from the text; to train some: {how_to_train(name)}"
        )
        log.print(text, style="dim", soft_wrap=not log.is_terminal)
    return model


def _can_draft_itself(source: BaseSource) -> bool:
    """Whether the base brings layers that draft with nothing named."""
    is_quantised_directory = source.gguf is None and is_held_quantised(source)
    return can_draft_itself(source.config) and not is_quantised_directory


def _own_heads(base: CausalLM, is_default: bool) -> HeadsCheckpoint | None:
    """The layers that come with ``base``, as heads; where nobody asked for them and they cannot be had, this
    is said, and there are none.

    Raises:
        ValueError: they were asked for and cannot be had.
    """
    try:
        return load_own_heads(base)
    except ValueError as error:
        if not is_default:
            raise
        log_console().print(f"the base does not draft itself: {error}", style="dim", soft_wrap=True)
        return None


def _warn_of_other_template(
    checkpoint: HeadsCheckpoint, tokenizer: Any, template_kwargs: Mapping[str, Any]
) -> None:
    """Warn where ``template_kwargs`` render a question differently from the heads' training conversations."""
    known = checkpoint.template_options
    if known and not has_same_template_kwargs(tokenizer, template_kwargs, known):
        recorded, current = (
            " or ".join(json.dumps(each) for each in every) for every in (known, [template_kwargs])
        )
        warnings.warn(
            f"the heads were trained on conversations that tell the chat template {recorded}, and here it is "
            f"told {current}, which it renders otherwise: they may guess badly, as heads that saw no "
            "reasoning do while a model reasons; the text is the same",
            stacklevel=3,
        )


def set_step(model: MedusaModel, step: StepKind | None) -> None:
    """Have ``model`` run its steps as ``step`` says, or by :func:`default_step`."""
    model.use_step(step or default_step(model))


def default_step(model: MedusaModel) -> StepKind:
    """How steps run where nobody says: compiled, now if it must be, where that can be done; else "auto"."""
    if not model.can_compile:
        return "auto"
    try:
        model.compile()
    except ValueError as error:
        log_console().print(f"steps run general, which is slower: {error}", style="dim", soft_wrap=True)
        return "general"
    return "compiled"


def log_version() -> Console:
    """Say first which medusa is running; where programs talk."""
    log = log_console()
    log.print(
        f"medusa {medusa.__version__} from {Path(medusa.__file__).parent}",
        style="dim",
        soft_wrap=not log.is_terminal,
    )
    if not log.is_terminal:
        disable_progress_bar()
    return log


def chosen_device(name: str) -> torch.device:
    """The device called ``name``."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # which one, depends on the kind of device
        raise ValueError(
            f"device must be one that torch can use here, got {name!r}; give --device cpu or none"
        ) from error


def recorded_base(checkpoint: HeadsCheckpoint | None, heads: str) -> str:
    """The base that ``heads`` were trained on; the embedded one where none is to be loaded."""
    if heads in (EMBEDDED_HEADS, DEFAULT_HEADS, NO_HEADS):
        return EMBEDDED_BASE
    if checkpoint is None or not checkpoint.base_model:
        raise ValueError(f"the heads in {heads!r} do not say which base they were trained on; give --base")
    return checkpoint.base_model


def heads_of(model: MedusaModel) -> Heads:
    """The model's heads, for programs that are about nothing else."""
    if model.heads is None:
        raise ValueError("this program measures heads, and the model was loaded without; give --heads")
    return model.heads


def measured_on(model: MedusaModel) -> dict[str, Any]:
    """Where and with what something was measured, for its report."""
    return {
        **asdict(model.runtime),
        "num_threads": torch.get_num_threads(),
        "base": name_in_reports(model.base.name_or_path),
        "medusa": medusa.__version__,
    }


def load_for_replies(
    options: AnsweringOptions, template: TemplateOptions, for_chat: bool = False
) -> tuple[MedusaModel, Drafter | None]:
    """:func:`load_model`, with heads where the drafter asked for needs them; and that drafter, or None, which
    leaves the choice to the model."""
    name = options.replies.drafter
    is_plain = options.replies.plain
    with_heads = not is_plain and (name is None or uses_model_heads(name))
    model = load_model(options.model, with_heads, template, for_chat=for_chat)
    if options.replies.learn:
        learn_from_use(model, options.model, is_plain)
    limits = BatchLimits().in_memory(model.engine_base)
    store = model.prefix_store(2**20 * options.replies.prefix_store_mib, is_plain)
    model.keep_prefixes(limits.prefix_bytes, store)
    return model, None if name is None else DrafterFactory(model, options.drafters).make(name)


def compile_model(options: CompileOptions) -> list[str]:
    """Compile the pass of a model and its heads, or say that it is there."""
    model = load_model(replace(options.model, step="general"))  # by default loading compiles
    was_there = model.is_compiled
    seconds = model.compile()
    if not model.is_compiled and found_compiler() is None:
        raise ValueError(NO_COMPILER)
    num_bytes = sum(path.stat().st_size for path in model.library_paths if path.exists())
    text = f"{'was there' if was_there else 'compiled'}, ready after {seconds:.1f} s"
    log_console().print(f"{text}, {megabytes(num_bytes)}", soft_wrap=True)
    end_with_json({"was_there": was_there, "seconds": seconds, "bytes": num_bytes}, options.report.json)
    return [answer_command(model.tokenizer, *to_argv(options.model))]


def learn_from_use(model: MedusaModel, options: ModelOptions, is_plain: bool) -> None:
    """Have ``model`` learn from what it writes from here on; heads that were named stay in use.

    Raises:
        ValueError: the base is known by no files.
    """
    words = [] if options.tokenizer is None else ["--tokenizer", options.tokenizer]
    words += ["--trust-remote-code"] if options.trust_remote_code else []
    learning = model.learn(words, follow=options.heads == DEFAULT_HEADS and not is_plain)
    name = model.base.name_or_path
    log_console().print(
        f"answers, each with the end of its prompt, are kept in {learning.learned.directory}, and heads "
        f"learn from them while nothing is asked; `medusa heads` lists these, `medusa heads forget {name}` "
        "removes all of it",
        style="dim",
        soft_wrap=True,
    )


def load_prompts(options: PromptOptions, take_all: bool = False) -> list[Prompt]:
    """The prompts asked for, or the small set of our own that `make demo` is measured on.

    ``take_all`` leaves ``--limit`` out of account.
    """
    prompts = read_prompts(options.prompts or EMBEDDED_PROMPTS, None if take_all else options.limit)
    return with_template_kwargs(prompts, options.template_kwargs)


def encode_prompts(
    model: MedusaModel, prompts: Sequence[Prompt], max_new_tokens: int
) -> list[dict[str, Tensor]]:
    """``input_ids`` and ``attention_mask``, (1, T) long, of each prompt, on the model's device."""
    context = context_length(model.base)
    encoded = [encode_prompt(model.tokenizer, prompt, model.device) for prompt in prompts]
    for prompt, tensors in zip(prompts, encoded, strict=True):
        length = tensors["input_ids"].shape[1]
        if context is not None and length + max_new_tokens > context:
            raise ValueError(
                f"{prompt.origin} has {length} tokens, and with --max-new-tokens {max_new_tokens} that is "
                f"more than the model's context of {context}; shorten the prompt or the answer"
            )
    return encoded


def decode_prompt(
    model: MedusaModel, inputs: Mapping[str, Any], options: AnswerOptions, drafter: str | None = None
) -> tuple[list[int], DecodingStatistics]:
    """Prompt and answer as one list of tokens, and the statistics of decoding: with the drafter of that name,
    else with the heads in their tree."""
    guessing: dict[str, Any] = {"tree": model.tree} if drafter is None else {"drafter": drafter}
    output: Any = model.generate(
        **inputs,
        **options.sampling,
        **guessing,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
        return_dict_in_generate=True,
    )
    return output.sequences[0].tolist(), output.statistics


def answered_prompts(
    model: MedusaModel, prompts: Sequence[Prompt], options: AnswerOptions, label: str = "answering"
) -> list[AnsweredTokens]:
    """Prompts and answers as tokens: the answers in the file where there are some, else the model's own."""
    encoded = encode_prompts(model, prompts, options.max_new_tokens)
    rows = []
    for prompt, inputs in track(list(zip(prompts, encoded, strict=True)), label):
        prompt_tokens = inputs["input_ids"][0].tolist()
        if prompt.answer is None:
            tokens, _ = decode_prompt(model, inputs, options)
        else:
            answer = model.tokenizer(prompt.answer, add_special_tokens=False)["input_ids"]
            tokens = prompt_tokens + answer[: options.max_new_tokens]
        rows.append(AnsweredTokens.after_prompt(tokens, len(prompt_tokens)))
    return rows
