"""Prompts at the end of a conversation of a given length: what earlier talk makes of decoding speed.

The earlier turns are other prompts with the model's own answers, so the text before a question is what such a
conversation really holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from medusa.model import MedusaModel
from medusa.prompts import Message, Prompt, encode_messages, encode_prompt

ANSWER_TOKENS = 128
"""Longest answer in the earlier turns."""
Exchange = tuple[Message, Message]
"""A question and its answer."""


def earlier_exchanges(model: MedusaModel, prompts: Sequence[Prompt], num_tokens: int) -> list[Exchange]:
    """Questions of ``prompts`` with answers, until they make ``num_tokens`` tokens; each question once.

    The answer is the one in the file where there is one, else the model's own, greedy.

    Raises:
        ValueError: the tokenizer has no chat template, so there is no conversation to lengthen.
    """
    if model.tokenizer is None or model.tokenizer.chat_template is None:
        raise ValueError(
            "a context length pads prompts with earlier turns, and this tokenizer has no chat template to "
            "render them; use a chat model, or leave the context lengths out"
        )
    exchanges: list[Exchange] = []
    length = 0
    for prompt in prompts:
        if length >= num_tokens:
            break
        question = prompt.messages[-1]
        answer: Message = {"role": "assistant", "content": prompt.answer or answered(model, question)}
        exchanges.append((question, answer))
        length += num_tokens_of(model, Prompt((question, answer)))
    return exchanges


def answered(model: MedusaModel, question: Message) -> str:
    """The model's own answer to a question, greedy and short."""
    inputs: dict[str, Any] = encode_messages(model.tokenizer, [question], model.device)
    out: Any = model.generate(**inputs, max_new_tokens=ANSWER_TOKENS, do_sample=False)
    return model.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def lengthened(model: MedusaModel, prompt: Prompt, exchanges: Sequence[Exchange], num_tokens: int) -> Prompt:
    """``prompt`` after as many earlier exchanges as fit into ``num_tokens`` tokens with it; none where it is
    longer by itself. They come around again when there are too few."""
    system = [message for message in prompt.messages[:1] if message["role"] == "system"]
    rest = list(prompt.messages[len(system) :])
    earlier: list[Message] = []
    for exchange in _others(exchanges, rest[-1]):
        longer = [*exchange, *earlier]
        if num_tokens_of(model, replace(prompt, messages=(*system, *longer, *rest))) > num_tokens:
            break
        earlier = longer
    return replace(prompt, messages=(*system, *earlier, *rest))


def num_tokens_of(model: MedusaModel, prompt: Prompt) -> int:
    """Length of a conversation that waits for an answer."""
    return encode_prompt(model.tokenizer, prompt)["input_ids"].shape[1]


def _others(exchanges: Sequence[Exchange], question: Message) -> Iterator[Exchange]:
    """The exchanges about other questions, again and again; nothing where there are none."""
    others = [exchange for exchange in exchanges if exchange[0] != question]
    return (others[number % len(others)] for number in count()) if others else iter(())
