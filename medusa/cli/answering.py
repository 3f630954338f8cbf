"""Prompts answered as options ask for it: greedily or sampled, and how decoding went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from medusa.cli.commands import AnsweringOptions
from medusa.cli.options import AnswerOptions
from medusa.decoding.statistics import DecodingStatistics
from medusa.heads.calibration import AnsweredTokens
from medusa.model import MedusaModel
from medusa.progress import track
from medusa.prompts import Prompt


def generation_arguments(options: AnswerOptions) -> dict[str, Any]:
    """For ``generate``, ours and ``transformers``': how long, and :func:`sampling_arguments`."""
    return {"max_new_tokens": options.max_new_tokens, **sampling_arguments(options)}


def sampling_arguments(options: AnswerOptions) -> dict[str, Any]:
    """Greedy or sampled, and which tokens sampling leaves out; what was not given is left out."""
    return {"do_sample": options.temperature > 0} | {
        name: value
        for name in ("temperature", "top_k", "top_p", "min_p")
        if (value := getattr(options, name))
    }


def reply_sampling(options: AnsweringOptions) -> dict[str, Any]:
    """:func:`sampling_arguments` with what only replies can be told."""
    penalty = options.replies.repetition_penalty
    extra = {} if penalty is None else {"repetition_penalty": penalty}
    return {**sampling_arguments(options.answers), **extra}


def decode_prompt(
    model: MedusaModel, inputs: Mapping[str, Any], options: AnswerOptions, drafter: str | None = None
) -> tuple[list[int], DecodingStatistics]:
    """Prompt and answer as one list of tokens, and how its decoding went: with the drafter of that name, else
    with the heads alone in their tree."""
    arguments = {**generation_arguments(options), "seed": options.seed, "return_dict_in_generate": True}
    arguments |= {"tree": model.tree} if drafter is None else {"drafter": drafter}
    output: Any = model.generate(**inputs, **arguments)
    return output.sequences[0].tolist(), output.statistics


def answered_prompts(
    model: MedusaModel,
    prompts: Sequence[Prompt],
    encoded: Sequence[Mapping[str, Any]],
    options: AnswerOptions,
    label: str = "answering",
) -> list[AnsweredTokens]:
    """Prompts and answers as tokens: the answers in the file where there are some, else the model's own."""
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
