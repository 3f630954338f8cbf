"""What every program that decodes shares: loading, progress, and the report at the end.

The programs in ``inference/`` and the ``medusa`` command build on this. Talk to the reader goes to
standard error; standard output carries answers, tables and, last, one line of JSON.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import medusa
from medusa.base.causal_lm import context_length
from medusa.cli.flags import (
    EMBEDDED_BASE,
    EMBEDDED_PROMPTS,
    ChatOptions,
    CutOptions,
    DrafterOptions,
    PlotOptions,
    ProgramOptions,
)
from medusa.decoding.statistics import DecodingStatistics
from medusa.drafters.protocol import Drafter
from medusa.drafters.registry import (
    DEFAULT_DRAFTER,
    DrafterSettings,
    default_drafter,
    draft_with_heads,
    drafter_named,
)
from medusa.files import write_json
from medusa.heads.adapter import Adapter, apply_adapter
from medusa.heads.calibration import AnsweredTokens
from medusa.heads.checkpoint import load_adapter
from medusa.heads.eagle import Heads
from medusa.model import MedusaModel
from medusa.progress import log_console
from medusa.prompts import Prompt, encode_messages, read_prompts


def table_console(width: int = 118) -> Console:
    """Where programs print tables: standard output, ``width`` columns wide where it is no terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width)


def log_picture(options: PlotOptions) -> None:
    """Say where the picture is."""
    log_console().print(f"picture: {options.plot}", soft_wrap=True)


def load_model(options: ProgramOptions, with_heads: bool = True) -> MedusaModel:
    """The base and its heads, on ``options.device``; says first which medusa is running.

    Raises:
        FileNotFoundError: an embedded default is not there yet; the message says what makes it.
    """
    log = log_console()
    log.print(f"medusa {medusa.__version__} from {Path(medusa.__file__).parent}", style="dim", soft_wrap=True)
    _check_embedded(options.base, EMBEDDED_BASE, "--base")
    device = torch.device(options.device)
    dtype = options.dtype or ("float32" if device.type == "cpu" else "auto")
    base: Any = AutoModelForCausalLM.from_pretrained(options.base, dtype=dtype)
    base.to(device)
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    adapter = _adapt(base, options)
    heads_given = options.heads if with_heads else None
    model = MedusaModel.from_pretrained(
        base, heads_given, tokenizer=tokenizer, engine=options.engine, step=options.step
    )
    heads = f"{model.heads.num_heads} heads, tree of {model.tree.num_nodes}" if model.heads else "no heads"
    if adapter is not None:
        heads += ", with the LoRA adapter that was trained with them: the text is the adapted model's"
    log.print(f"{options.base} in {base.dtype} on {device}, {heads}", style="dim", soft_wrap=True)
    return model


def _adapt(base: Any, options: ProgramOptions) -> Adapter | None:
    """Put the adapter of the heads onto ``base``, without heads too: the text is the same then."""
    adapter = load_adapter(options.heads)
    if adapter is not None:
        apply_adapter(base, adapter)
    return adapter


def heads_of(model: MedusaModel) -> Heads:
    """The model's heads, for programs that are about nothing else."""
    if model.heads is None:
        raise ValueError("this program measures heads, and the model was loaded without; give --heads")
    return model.heads


def drafter_settings(options: DrafterOptions) -> DrafterSettings:
    """What the flags tell drafters."""
    return DrafterSettings(
        draft_length=options.draft_length,
        draft_width=options.draft_width,
        draft_model=options.draft_model,
        exit_layer=options.exit_layer,
        eagle=options.eagle,
    )


def drafts_with_heads(options: ChatOptions) -> bool:
    """Whether to load heads for the drafter asked for.

    Raises:
        ValueError: there is no such drafter, or it comes with --plain.
    """
    needs_heads = draft_with_heads(options.drafter or DEFAULT_DRAFTER)
    if options.plain and options.drafter is not None:
        raise ValueError(f"--plain guesses nothing, and --drafter {options.drafter} does; give one of them")
    return not options.plain and needs_heads


def chosen_drafter(model: MedusaModel, options: ChatOptions) -> Drafter | None:
    """The drafter asked for; None leaves it to the model: its heads in their tuned tree, or nothing."""
    if options.plain or options.drafter == "heads":
        return None
    return drafter_named(options.drafter or default_drafter(model), model, drafter_settings(options))


def load_prompts(options: ProgramOptions, take_all: bool = False) -> list[Prompt]:
    """The prompts asked for, or the small set of our own that `make demo` is measured on.

    ``take_all`` leaves ``--limit`` out of account.
    """
    if options.prompts is None:
        _check_embedded(str(EMBEDDED_PROMPTS), EMBEDDED_PROMPTS, "--prompts")
    return read_prompts(options.prompts or EMBEDDED_PROMPTS, None if take_all else options.limit)


def encode_prompts(
    model: MedusaModel, prompts: Sequence[Prompt], max_new_tokens: int
) -> list[dict[str, Tensor]]:
    """``input_ids`` and ``attention_mask``, (1, T) long, of each prompt, on the model's device.

    Raises:
        ValueError: a prompt and its answer do not fit the model's context; the message names the row.
    """
    context = context_length(model.base)
    encoded = [encode_messages(model.tokenizer, prompt.messages, model.device) for prompt in prompts]
    for prompt, tensors in zip(prompts, encoded, strict=True):
        length = tensors["input_ids"].shape[1]
        if context is not None and length + max_new_tokens > context:
            raise ValueError(
                f"{prompt.origin} has {length} tokens, and with --max-new-tokens {max_new_tokens} that is "
                f"more than the model's context of {context}; shorten the prompt or the answer"
            )
    return encoded


def generation_arguments(options: ProgramOptions) -> dict[str, Any]:
    """For ``generate``, ours and ``transformers``': how long, and greedy or sampled."""
    if options.temperature == 0:
        return {"max_new_tokens": options.max_new_tokens, "do_sample": False}
    return {
        "max_new_tokens": options.max_new_tokens,
        "do_sample": True,
        "temperature": options.temperature,
    }


def sampling_cuts(options: CutOptions) -> dict[str, Any]:
    """What --top-k, --top-p and --min-p say, for ``generate``; those not given are left out.

    Raises:
        ValueError: one of them with temperature 0.
    """
    flags = {name: getattr(options, name) for name in ("top_k", "top_p", "min_p")}
    given = {name: value for name, value in flags.items() if value is not None}
    if given and options.temperature == 0:
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(f"{names} goes with sampling, and --temperature is 0 (greedy); give a --temperature")
    return given


def decode_prompt(
    model: MedusaModel, inputs: Mapping[str, Any], options: ProgramOptions
) -> tuple[list[int], DecodingStatistics]:
    """Prompt and answer as one list of tokens, and how its decoding went."""
    arguments = {**generation_arguments(options), "seed": options.seed, "return_dict_in_generate": True}
    output: Any = model.generate(**inputs, **arguments)
    return output.sequences[0].tolist(), output.statistics


def answered_tokens(
    model: MedusaModel, prompt: Prompt, inputs: Mapping[str, Any], options: ProgramOptions
) -> AnsweredTokens:
    """Prompt and answer as tokens: the answer in the file where there is one, else the model's own."""
    prompt_tokens = inputs["input_ids"][0].tolist()
    if prompt.answer is None:
        tokens, _ = decode_prompt(model, inputs, options)
    else:
        answer = model.tokenizer(prompt.answer, add_special_tokens=False)["input_ids"]
        tokens = prompt_tokens + answer[: options.max_new_tokens]
    return AnsweredTokens.after_prompt(tokens, len(prompt_tokens))


def report_json(report: Mapping[str, Any], options: ProgramOptions) -> None:
    """End standard output with ``report`` as one line of JSON, and write it to ``--json`` when asked."""
    write_report(report, options)
    sys.stdout.write(json.dumps(report, allow_nan=False) + "\n")
    sys.stdout.flush()


def write_report(report: Mapping[str, Any], options: ProgramOptions) -> None:
    """Write ``report`` to the file of ``--json``, if one is given."""
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.json, report)


def exit_status(program: Callable[[], object], show_traceback: bool) -> int:
    """Run a program: 0, or 1 with the error as one sentence on standard error, or 130 when it was stopped."""
    try:
        program()
    except (ValueError, OSError, ImportError, FloatingPointError, MemoryError) as error:
        if show_traceback:
            traceback.print_exc()
        log_console().print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        log_console().print("stopped", style="bold red")
        return 130
    return 0


def _check_embedded(given: str, embedded: Path, flag: str) -> None:
    if given == str(embedded) and not embedded.exists():
        raise FileNotFoundError(
            f"{flag} was not given, and its default {embedded} is not there; run `make models` in a checkout "
            f"of medusa, or give {flag}"
        )
