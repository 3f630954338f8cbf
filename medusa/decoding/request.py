"""From what ``transformers``' ``generate`` has prepared to what the decode loop reads, and back.

``generate`` merges configurations, builds processors and criteria and checks the arguments; this
module takes the outcome, refuses what a tree cannot honour, and strips the left padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerationMode

from medusa.acceptance.rules import RULES
from medusa.acceptance.sampling import check_processors, row_seeds
from medusa.base.causal_lm import CausalLM, home_device
from medusa.base.position_limits import check_positions
from medusa.decoding.state import DecodeRequest

DROPPED_ARGUMENTS = {
    "assistant_model": "a model that drafts is a drafter here: pass drafter=",
    "streamer": "stream() yields the tokens itself; generate() takes a streamer",
}
"""Arguments that ``generate`` would drop without a word on its way to a custom method."""
UNAVAILABLE_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")

POSITION_INPUTS = ("position_ids", "cache_position")
"""Tensors that ``generate`` prepares for a model, and a tree has its own of."""


def decode_request(
    base: CausalLM,
    input_ids: Tensor,
    generation_config: GenerationConfig,
    *,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    attention_mask: Tensor | None = None,
    seed: int | Sequence[int] | None = None,
    acceptance: str = "exact",
    **model_inputs: Any,
) -> DecodeRequest:
    """The request behind a ``generate`` call.

    input_ids (B, T) long, left-padded where attention_mask (B, T) is 0.

    Raises:
        ValueError: a prompt is empty, right-padded or too long for the model's context, or the call asks for
            something a tree cannot honour (beams, a cache of the caller's, per-step outputs).
    """
    _check_supported(generation_config, acceptance, model_inputs)
    check_processors(logits_processor, len(input_ids))
    tokens, padding = _without_padding(input_ids.to(home_device(base)), attention_mask)
    _check_positions(model_inputs.get("position_ids"), padding, input_ids.shape[1])
    processors = _for_unpadded_rows(logits_processor, padding, generation_config)
    max_new_tokens = generation_config.max_length - input_ids.shape[1]
    lengths = tokens.shape[1] - torch.tensor(padding, device=tokens.device)
    check_positions(base, lengths.tolist(), max_new_tokens)
    do_sample = generation_config.do_sample
    return DecodeRequest(
        tokens=tokens,
        lengths=lengths,
        max_new_tokens=max_new_tokens,
        seeds=row_seeds(seed, len(tokens), tokens.device) if do_sample else None,
        temperature=generation_config.temperature or 1.0 if do_sample else 1.0,
        processors=processors,
        criteria=_other_criteria(stopping_criteria),
        eos_ids=frozenset(_ids(generation_config.eos_token_id)),
        pad_id=_pad_id(generation_config),
        padding=tuple(padding),
        acceptance=acceptance,
    )


def check_arguments(arguments: dict[str, Any]) -> None:
    """Raise ValueError for an argument that would be ignored."""
    for name, advice in DROPPED_ARGUMENTS.items():
        if arguments.get(name) is not None:
            raise ValueError(f"{name} is not used here; {advice}")


def with_stop_strings(arguments: dict[str, Any], base: CausalLM, tokenizer: Any) -> dict[str, Any]:
    """The arguments with ``stop_strings`` as a criterion: ``generate`` hands a custom method no tokenizer."""
    arguments = dict(arguments)
    tokenizer = arguments.pop("tokenizer", None) or tokenizer
    given = getattr(arguments.get("generation_config"), "stop_strings", None)
    stop_strings = arguments.pop("stop_strings", None) or given or base.generation_config.stop_strings
    if not stop_strings:
        return arguments
    if tokenizer is None:
        raise ValueError("stop_strings needs a tokenizer; pass tokenizer= to from_pretrained or to generate")
    criteria = list(arguments.pop("stopping_criteria", None) or [])
    criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=stop_strings))
    return {**arguments, "stopping_criteria": StoppingCriteriaList(criteria), "stop_strings": None}


def joined_sequences(input_ids: Tensor, answers: list[list[int]], pad_id: int) -> Tensor:
    """Prompts and answers side by side, (B, T + longest) long, short answers padded on the right."""
    longest = max(len(answer) for answer in answers)
    rows = [answer + [pad_id] * (longest - len(answer)) for answer in answers]
    return torch.cat([input_ids, input_ids.new_tensor(rows)], dim=1)


def _check_supported(
    config: GenerationConfig,
    acceptance: str,
    model_inputs: dict[str, Any],
) -> None:
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(f"medusa decodes greedily or by sampling, got generation mode {mode.value!r}")
    if acceptance not in ("exact", "typical", *RULES):
        raise ValueError(
            f"acceptance must be 'exact', 'typical' (lossy) or a rule for sampled drafts "
            f"({', '.join(RULES)}), got {acceptance!r}"
        )
    asked = [name for name in UNAVAILABLE_OUTPUTS if getattr(config, name, False)]
    if asked:
        raise ValueError(f"{', '.join(asked)} not available: a verified tree has no single row per step")
    cache = model_inputs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError("past_key_values must be left out: a tree needs medusa's own cache")
    if model_inputs.get("inputs_embeds") is not None:
        raise ValueError("inputs_embeds is not supported: drafts are tokens; pass input_ids")
    unread = [
        name
        for name, value in model_inputs.items()
        if isinstance(value, Tensor) and name not in POSITION_INPUTS and bool(value.any())
    ]
    if unread:
        raise ValueError(f"{', '.join(unread)} not supported: medusa decodes from input_ids alone")


def _without_padding(input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, list[int]]:
    """Rows moved to column 0, (B, T) long, and how much left padding each had."""
    num_rows, width = input_ids.shape
    if width == 0:
        raise ValueError("input_ids must hold at least one token per row, got none: the prompt is empty")
    if attention_mask is None:
        return input_ids, [0] * num_rows
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask must have the shape of input_ids, {tuple(input_ids.shape)}, "
            f"got {tuple(attention_mask.shape)}"
        )
    mask = attention_mask.to(input_ids.device).bool()
    if bool((mask[:, 1:] < mask[:, :-1]).any()):
        raise ValueError("prompts must be padded on the left: set tokenizer.padding_side = 'left'")
    padding = (~mask).sum(dim=1)
    if int(padding.max()) == width:
        raise ValueError(f"row {int(padding.argmax())} of input_ids is all padding: the prompt is empty")
    columns = torch.arange(width, device=input_ids.device) + padding[:, None]
    return input_ids.gather(1, columns.clamp(max=width - 1)), padding.tolist()


def _check_positions(position_ids: Tensor | None, padding: list[int], width: int) -> None:
    """Refuse positions (B, T) or (1, T) of the caller's own; ``generate`` prepares the natural ones.

    Models of images (the Qwen2-VL family) have several axes of them, (axes, B, T), all alike for text.
    """
    if position_ids is None:
        return
    if position_ids.shape[-1] != width:
        raise ValueError(
            f"attention_mask and position_ids must have the width of input_ids, {width}, "
            f"got {position_ids.shape[-1]}"
        )
    for axis in position_ids if position_ids.dim() == 3 else position_ids[None]:
        for row, given in enumerate(axis.tolist()):
            if given[padding[row] :] != list(range(width - padding[row])):
                raise ValueError("position_ids must count each prompt's tokens from 0; leave them out")


def _for_unpadded_rows(
    processors: LogitsProcessorList, padding: list[int], config: GenerationConfig
) -> LogitsProcessorList:
    """The processors, those that count or skip each row's padding replaced: rows here have none."""
    unpadded = LogitsProcessorList()
    for processor in processors:
        if isinstance(processor, MinLengthLogitsProcessor) and config.min_new_tokens is not None:
            continue  # generate derived it from the padded width; min_new_tokens has its own processor
        ignored = getattr(processor, "prompt_ignore_length", None)
        if isinstance(processor, RepetitionPenaltyLogitsProcessor) and isinstance(ignored, Tensor):
            if ignored.tolist() != padding:
                raise ValueError(
                    "prompt_ignore_length per row must be each row's padding, "
                    f"{padding} here, got {ignored.tolist()}; use one int for all rows"
                )
            processor = RepetitionPenaltyLogitsProcessor(processor.penalty)
        unpadded.append(processor)
    return unpadded


def _other_criteria(criteria: StoppingCriteriaList) -> StoppingCriteriaList:
    """Those that the loop does not check by itself."""
    return StoppingCriteriaList(
        c for c in criteria if not isinstance(c, (MaxLengthCriteria, EosTokenCriteria))
    )


def _ids(eos: int | list[int] | Tensor | None) -> list[int]:
    if eos is None:
        return []
    if isinstance(eos, Tensor):
        eos = eos.tolist()
    return [eos] if isinstance(eos, int) else list(eos)


def _pad_id(config: GenerationConfig) -> int:
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    return next(iter(_ids(config.eos_token_id)), 0)
