"""Converts a prepared call of ``transformers``' ``generate`` into a :class:`DecodeRequest`, and results back.

``generate`` merges configurations, builds processors and criteria and checks the arguments; this module takes
the result, refuses options that tree decoding cannot honour, and strips the left padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerationMode

from medusa.acceptance.rules import RULES
from medusa.acceptance.sampling import NODE_PROCESSORS, row_seeds
from medusa.base.causal_lm import CausalLM, embedding_weight, ids_of, lm_head_device
from medusa.base.passes import CACHE_ARGUMENTS, holds_text
from medusa.base.profile import check_positions
from medusa.decoding.state import DecodeRequest, is_exact
from medusa.hardware import sent

DROPPED_ARGUMENTS = {
    "assistant_model": "a model that drafts is a drafter here: pass drafter=",
    "streamer": "stream() yields the tokens itself; generate() takes a streamer",
    **dict.fromkeys(
        CACHE_ARGUMENTS, "a tree needs medusa's own cache, and would leave the caller's as it is"
    ),
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
    seed: Any = None,
    acceptance: str = "exact",
    **model_inputs: Any,
) -> DecodeRequest:
    """The request of a ``generate`` call.

    input_ids (B, T) long, left-padded where attention_mask (B, T) is 0.

    Raises:
        ValueError: a prompt is empty, right-padded or too long for the model's context, or the call asks for
            something a tree cannot honour (beams, a cache of the caller's, per-step outputs).
    """
    _check_supported(generation_config, acceptance, model_inputs)
    if input_ids.dtype == torch.bool or input_ids.is_floating_point() or input_ids.is_complex():
        raise ValueError(f"input_ids must be whole numbers, torch.long, got {input_ids.dtype}")
    ids, mask, positions = _on_host(input_ids, attention_mask, model_inputs.get("position_ids"))
    _check_ids(ids, base)
    padding = _padding(ids, mask)
    _check_positions(positions, padding, ids.shape[1])
    prompts = tuple(row[width:].tolist() for row, width in zip(ids, padding, strict=True))
    device = lm_head_device(base)
    input_ids = sent(input_ids.long(), device)
    do_sample = generation_config.do_sample
    ends = _Ends.of(stopping_criteria)
    max_new_tokens = max(1, ends.max_length - input_ids.shape[1])
    lengths = list(map(len, prompts))
    check_positions(base, lengths, max_new_tokens)
    processors, watching = _for_rows_alone(logits_processor, padding)
    in_lockstep = _needs_lockstep(watching, ends, len(prompts), do_sample, acceptance)
    tokens = input_ids
    if any(padding):  # rows are moved to column 0
        columns = torch.arange(tokens.shape[1], device=device) + sent(padding, device)[:, None]
        tokens = tokens.gather(1, columns.clamp(max=tokens.shape[1] - 1))
    return DecodeRequest(
        tokens=tokens,
        lengths=sent(lengths, device),
        known_prompts=prompts,
        max_new_tokens=max_new_tokens,
        seeds=row_seeds(seed, len(prompts), device) if do_sample else None,
        temperature=generation_config.temperature or 1.0 if do_sample else 1.0,
        processors=logits_processor if in_lockstep else processors,
        criteria=ends.others,
        in_lockstep=in_lockstep,
        rows_end_alone=ends.rows_end_alone or not in_lockstep,
        eos_ids=ends.eos_ids,
        pad_id=_pad_id(generation_config),
        padding=tuple(row[:width] for row, width in zip(input_ids, padding, strict=True)),
        acceptance=acceptance,
    )


def _on_host(
    input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The three as long tensors of the host, in one copy: it waits for the device once."""
    tensors = [input_ids, attention_mask, position_ids]
    present = [tensor for tensor in tensors if tensor is not None]
    flat = torch.cat([sent(tensor.long().flatten(), input_ids.device) for tensor in present]).cpu()
    parts = iter(flat.split([tensor.numel() for tensor in present]))
    ids, mask, positions = (None if tensor is None else next(parts).view(tensor.shape) for tensor in tensors)
    assert ids is not None
    return ids, mask, positions


def check_arguments(arguments: dict[str, Any]) -> None:
    """Raise ValueError for an argument that would be ignored, or would have ``generate`` ignore the rest."""
    config = arguments.get("generation_config")
    if arguments.get("token_healing", getattr(config, "token_healing", False)):
        raise ValueError(
            "token_healing has no tokenizer on its way here; heal the prompt first: pass "
            "base.heal_tokens(input_ids, tokenizer)"
        )
    if arguments.get("cache_implementation") == "paged":
        raise ValueError("cache_implementation='paged' has transformers decode by itself; leave it out")
    for name, advice in DROPPED_ARGUMENTS.items():
        if arguments.get(name) is not None:
            raise ValueError(f"{name} is not used here; {advice}")


def with_stop_strings(
    arguments: dict[str, Any], base: CausalLM, default_tokenizer: Callable[[], Any]
) -> dict[str, Any]:
    """The arguments with ``stop_strings`` as a criterion: ``generate`` hands a custom method no tokenizer."""
    arguments = dict(arguments)
    tokenizer = arguments.pop("tokenizer", None)
    of_config = getattr(arguments.get("generation_config"), "stop_strings", None)
    stop_strings = arguments.pop("stop_strings", None) or of_config or base.generation_config.stop_strings
    if not stop_strings:
        return arguments
    tokenizer = default_tokenizer() if tokenizer is None else tokenizer
    if tokenizer is None:
        raise ValueError("stop_strings needs a tokenizer; pass tokenizer= to from_pretrained or to generate")
    criteria = list(arguments.pop("stopping_criteria", None) or [])
    criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=stop_strings))
    return {**arguments, "stopping_criteria": StoppingCriteriaList(criteria), "stop_strings": None}


def joined_sequences(input_ids: Tensor, answers: list[list[int]], config: GenerationConfig) -> Tensor:
    """Prompts and answers side by side, (B, T + longest) long, short answers padded on the right."""
    pad_id = _pad_id(config)
    longest = max(len(answer) for answer in answers)
    rows = [answer + [pad_id] * (longest - len(answer)) for answer in answers]
    return torch.cat([input_ids, sent(rows, input_ids.device)], dim=1)


def _check_supported(
    config: GenerationConfig,
    acceptance: str,
    model_inputs: dict[str, Any],
) -> None:
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"medusa decodes greedily or by sampling, got generation mode {mode.value!r}; where the model's "
            "generation_config asks for that, pass num_beams=1 and penalty_alpha=None"
        )
    if acceptance not in ("exact", "typical", *RULES):
        raise ValueError(
            f"acceptance must be 'exact', 'typical' (lossy) or a rule for sampled drafts "
            f"({', '.join(RULES)}), got {acceptance!r}"
        )
    outputs = [name for name in UNAVAILABLE_OUTPUTS if getattr(config, name, False)]
    if outputs and config.return_dict_in_generate:  # transformers too reads them only with it
        raise ValueError(f"{', '.join(outputs)} not available: a verified tree has no single row per step")
    for name in CACHE_ARGUMENTS:
        cache = model_inputs.get(name)
        if cache is not None and holds_text(cache):
            raise ValueError(f"{name} must be left out: a tree needs medusa's own cache")
    if model_inputs.get("inputs_embeds") is not None:
        raise ValueError("inputs_embeds is not supported: drafts are tokens; pass input_ids")
    unread = [
        name
        for name, value in model_inputs.items()
        if isinstance(value, Tensor) and name not in POSITION_INPUTS and bool(value.any())
    ]
    if unread:
        raise ValueError(f"{', '.join(unread)} not supported: medusa decodes only from input_ids")


def _check_ids(input_ids: Tensor, base: CausalLM) -> None:
    """Raise ValueError for ids that are none: compiled and captured steps read memory by them unchecked."""
    num_known = embedding_weight(base.get_input_embeddings()).shape[0]
    if input_ids.numel():
        least, most = map(int, input_ids.aminmax())
        if least < 0 or most >= num_known:
            raise ValueError(
                f"input_ids must be token ids from 0 to {num_known - 1}, the rows of the base's embedding, "
                f"got ids from {least} to {most}; were they made by another tokenizer?"
            )


def _padding(input_ids: Tensor, attention_mask: Tensor | None) -> list[int]:
    """How much left padding each row of the host's ``input_ids`` (B, T) has."""
    num_rows, width = input_ids.shape
    if num_rows == 0:
        raise ValueError("input_ids must hold at least one row, got an empty batch")
    if width == 0:
        raise ValueError("input_ids must hold at least one token per row, got none: the prompt is empty")
    if attention_mask is None:
        return [0] * num_rows
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask must have the shape of input_ids, {tuple(input_ids.shape)}, "
            f"got {tuple(attention_mask.shape)}"
        )
    mask = attention_mask.bool()
    if (mask[:, 1:] < mask[:, :-1]).any():
        raise ValueError("prompts must be padded on the left: set tokenizer.padding_side = 'left'")
    padding = (~mask).sum(dim=1).tolist()
    if max(padding) == width:
        raise ValueError(f"row {padding.index(width)} of input_ids is all padding: the prompt is empty")
    return padding


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
        for row_positions, num_padding in zip(axis.tolist(), padding, strict=False):
            if row_positions[num_padding:] != list(range(width - num_padding)):
                raise ValueError("position_ids must count each prompt's tokens from 0; leave them out")


def _for_rows_alone(
    processors: LogitsProcessorList, padding: list[int]
) -> tuple[LogitsProcessorList, list[LogitsProcessor]]:
    """The processors for rows without padding, and those among them that must see the caller's batch."""
    alone = LogitsProcessorList()
    watching: list[LogitsProcessor] = []
    for processor in processors:
        if isinstance(processor, RepetitionPenaltyLogitsProcessor):
            ignored = processor.prompt_ignore_length
            if isinstance(ignored, Tensor) and ignored.tolist() == padding:
                processor = RepetitionPenaltyLogitsProcessor(processor.penalty)
            elif isinstance(ignored, Tensor) or (ignored is not None and any(padding)):
                watching.append(processor)
        if type(processor) not in NODE_PROCESSORS:
            watching.append(processor)
        alone.append(processor)
    return alone, watching


@dataclass(frozen=True)
class _Ends:
    """The stopping criteria of a row: the defaults of ``generate``, some replaced by the caller's own."""

    max_length: int
    """In columns of the caller's batch."""
    eos_ids: frozenset[int]
    others: StoppingCriteriaList
    """The criteria that the loop does not check by itself."""
    rows_end_alone: bool

    @classmethod
    def of(cls, criteria: StoppingCriteriaList) -> _Ends:
        max_lengths = []
        eos_ids: set[int] = set()
        others = StoppingCriteriaList()
        for criterion in criteria:
            if type(criterion) is MaxLengthCriteria:
                max_lengths.append(criterion.max_length)
            elif type(criterion) is EosTokenCriteria:
                eos_ids.update(criterion.eos_token_id.tolist())
            else:
                others.append(criterion)
        return cls(
            max_length=min(max_lengths),
            eos_ids=frozenset(eos_ids),
            others=others,
            rows_end_alone=any(hasattr(criterion, "eos_token_id") for criterion in criteria),
        )

    @property
    def watching(self) -> list[StoppingCriteria]:
        """The criteria that may keep state or know rows by their index."""
        stateless = (StopStringCriteria, MaxTimeCriteria)
        return [criterion for criterion in self.others if type(criterion) not in stateless]


def _needs_lockstep(
    watching: list[LogitsProcessor], ends: _Ends, num_rows: int, samples: bool, acceptance: str
) -> bool:
    """Whether ``transformers``' way of calling processors and criteria must be kept: see
    :func:`medusa.acceptance.exact.accept_in_lockstep`."""
    if is_exact(acceptance, samples):
        waits_for_all = num_rows > 1 and bool(ends.others) and not ends.rows_end_alone
        return bool(watching or ends.watching) or waits_for_all
    called_once = [*watching, *(ends.watching if num_rows > 1 else [])]
    if called_once:
        names = ", ".join(type(callback).__name__ for callback in called_once)
        raise ValueError(
            f"{names} must be called once for each position, and acceptance={acceptance!r} "
            "looks at all nodes of a tree; use acceptance='exact'"
        )
    return False


def _pad_id(config: GenerationConfig) -> int:
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    return next(iter(ids_of(config.eos_token_id)), 0)
