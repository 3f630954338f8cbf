"""Prompt files: JSON lines, one prompt or conversation a row.

    {"prompt": "Name three rivers.", "category": "geography"}
    {"turns": ["Name three rivers.", "Which is the longest?"]}
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]}

Exactly one of ``prompt``, ``turns`` and ``messages`` per row. ``category`` is optional. ``system`` comes
before it, and before a prompt the pairs of question and answer in ``history``. ``tools`` and
``chat_template_kwargs`` go to the chat template, and other keys are ignored. This module knows nothing of
models; a tokenizer renders the prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jinja2
import torch
from torch import Tensor

from medusa.assets import named_file
from medusa.conversations import (
    Message,
    as_template,
    check_keepable,
    check_template_kwargs,
    exchange,
    opened,
    parsed_json,
    read_messages,
    template_options,
)

NO_CATEGORY = "uncategorised"
CONTENT_KEYS = ("prompt", "turns", "messages")
THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
"""Tags around reasoning: Qwen, DeepSeek and most others; Magistral; Seed-OSS."""
LAST_TOKENS = 16
"""Length of the end of a prompt, in tokens, in which a block of reasoning may begin."""
PROBE = ({"role": "user", "content": "a question"},)


@dataclass(frozen=True)
class Prompt:
    """A conversation that waits for an answer."""

    messages: tuple[Message, ...]
    """Up to and including the user turn to answer."""
    later_turns: tuple[str, ...] = ()
    """User turns to put after the answer, each waiting for its own."""
    answer: str | None = None
    """The answer in the file: the last message of ``messages`` when the assistant wrote it."""
    category: str = NO_CATEGORY
    origin: str = ""
    """File and row, for messages to the user."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Chat template options."""


def with_template_kwargs(prompts: Sequence[Prompt], template_kwargs: Mapping[str, Any]) -> list[Prompt]:
    """``prompts`` with default chat_template_kwargs; their own values win.

    Raises:
        ValueError: as :func:`medusa.conversations.check_template_kwargs`.
    """
    check_template_kwargs(template_kwargs)
    return [
        replace(prompt, template_options={**template_kwargs, **prompt.template_options}) for prompt in prompts
    ]


def has_same_template_kwargs(
    tokenizer: Any, template_kwargs: Mapping[str, Any], others: Sequence[Mapping[str, Any]]
) -> bool:
    """Whether ``template_kwargs`` render a question in the same way as one of ``others``."""

    def rendered(kwargs: Mapping[str, Any]) -> str:
        probe = as_template(PROBE, tokenizer)
        return tokenizer.apply_chat_template(probe, tokenize=False, add_generation_prompt=True, **kwargs)

    return tokenizer.chat_template is None or rendered(template_kwargs) in map(rendered, others)


def default_template(tokenizer: Any) -> str | None:
    """The chat template of ``tokenizer`` for a conversation without tools; None where it has none."""
    return tokenizer.get_chat_template() if tokenizer.chat_template else None


def reasoning_tags(template: str | None) -> tuple[str, str]:
    """The opening and closing tags of reasoning; empty where the template has none."""
    known = (pair for pair in THOUGHTS if template and (pair[0] in template or pair[1] in template))
    return next(known, ("", ""))


def in_reasoning(tokenizer: Any, prompt: Sequence[int], tags: tuple[str, str]) -> bool | None:
    """Whether ``prompt`` has opened the reasoning between ``tags``; False where it has closed it, None where
    it has neither."""
    begin, end = tags
    last = tokenizer.decode(prompt[-LAST_TOKENS:]).rstrip()
    return None if not end else True if last.endswith(begin) else False if last.endswith(end) else None


def split_reasoning(tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[str, str]:
    """The text of an answer of ``tokens`` to ``prompt``: (reasoning, answer), without the tags and blanks
    between them. Text that does not begin with reasoning is all answer."""
    begin, end = reasoning_tags(default_template(tokenizer))
    if not tokenizer.chat_template:
        return "", _continuation(tokenizer, prompt, tokens)
    text, whole = (tokenizer.decode(tokens, skip_special_tokens=skips) for skips in (True, False))
    if not in_reasoning(tokenizer, prompt, (begin, end)):
        _, mark, whole = whole.partition(begin) if end and whole.lstrip().startswith(begin) else ("",) * 3
        if not mark:
            return "", text
    reasoning, _, answer = whole.partition(end)  # some marks are special tokens, so these are left out last
    for special in tokenizer.all_special_tokens:
        reasoning = reasoning.replace(special, "")
        answer = answer.replace(special, "")
    return (reasoning.strip(), answer.lstrip()) if reasoning.strip() else ("", text)


def _continuation(tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text of ``tokens`` behind that of ``prompt``: many tokenizers leave out a space at the start."""
    before = [*prompt[-LAST_TOKENS:]]
    text, both = (tokenizer.decode(each, skip_special_tokens=True) for each in (before, [*before, *tokens]))
    return (
        both.removeprefix(text)
        if both.startswith(text)
        else tokenizer.decode(tokens, skip_special_tokens=True)
    )


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """The first ``limit`` prompts of a file, or of the shipped file of this name; all when it is None.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a row cannot be read (the message names file and row), or there is none.
    """
    source = named_file(path, ".jsonl", "prompts file")
    prompts: list[Prompt] = []
    for origin, line in _rows(source):
        if limit is not None and len(prompts) >= limit:
            break
        prompts.append(_parsed(line, origin))
    if not prompts:
        raise ValueError(f"{source} holds no prompts; give one JSON object a line, such as {_EXAMPLE}")
    return prompts


def check_chat_template(tokenizer: Any, name: str) -> None:
    """Refuse the base called ``name`` where a conversation is to be rendered and it has no chat template.

    Raises:
        ValueError: it has none.
    """
    if tokenizer is None or tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer of {name!r} has no chat template, so there is no way to render a conversation; "
            f"use a chat (instruct) model, or let this one continue text: `medusa generate --base {name}`"
        )


def encode_messages(
    tokenizer: Any,
    messages: Sequence[Message],
    device: torch.device | str = "cpu",
    template_options: Mapping[str, Any] | None = None,
    origin: str = "",
) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask``, (1, T) long, of a conversation that waits for an answer.

    ``origin`` names its file and row in messages.

    A tokenizer without a chat template belongs to a model that continues text: it gets the text of
    the only message.

    Raises:
        ValueError: no chat template, and more than one message; or the template refuses the conversation.
    """
    if tokenizer.chat_template is None:
        if len(messages) > 1:
            raise ValueError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no chat template, so it cannot render a "
                f"conversation of {len(messages)} messages; use a chat model, or prompts of one message"
            )
        return encode_text(tokenizer, messages[0]["content"], device)
    try:
        encoded = tokenizer.apply_chat_template(
            as_template(messages, tokenizer),
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
            **(template_options or {}),
        )
    except (jinja2.TemplateError, TypeError) as error:  # TypeError: a variable is of another type
        has_system = any(message["role"] == "system" for message in messages)
        advice = "; leave the system message out, or put it into the question" if has_system else ""
        raise ValueError(
            f"{origin}{': ' if origin else ''}the chat template refuses the conversation: {error}{advice}"
        ) from error
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def encode_prompt(tokenizer: Any, prompt: Prompt, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """:func:`encode_messages` for a row of a prompt file, with what its chat template gets beside the
    messages.

    Raises:
        ValueError: the template refuses the conversation; the message names the row.
    """
    return encode_messages(tokenizer, prompt.messages, device, prompt.template_options, prompt.origin)


def encode_text(tokenizer: Any, text: str, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask``, (1, T) long, of text to continue."""
    encoded = tokenizer(text, return_tensors="pt")
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def padded_batch(rows: Sequence[Mapping[str, Tensor]], pad_id: int = 0) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask``, (B, T) long and left-padded, of prompts encoded one by one."""
    longest = max(row["input_ids"].shape[1] for row in rows)

    def padded(name: str, value: int) -> Tensor:
        return torch.cat(
            [
                torch.nn.functional.pad(row[name], (longest - row[name].shape[1], 0), value=value)
                for row in rows
            ]
        )

    return {"input_ids": padded("input_ids", pad_id), "attention_mask": padded("attention_mask", 0)}


_EXAMPLE = '{"prompt": "Name three rivers."}'


def _rows(source: Path) -> Iterator[tuple[str, str]]:
    """(origin, line) of every line that is not blank."""
    try:
        with source.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{source} row {number}", line
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text ({error}); prompts are JSON lines") from error


def _parsed(line: str, origin: str) -> Prompt:
    row = parsed_json(line, origin)
    check_keepable(row, origin)
    if not isinstance(row, dict):
        raise ValueError(f"{origin} must be a JSON object such as {_EXAMPLE}, got {type(row).__name__}")
    content_keys = [key for key in CONTENT_KEYS if key in row]
    if len(content_keys) != 1:
        raise ValueError(f"{origin} must hold exactly one of {', '.join(CONTENT_KEYS)}, got {sorted(row)}")
    category = row.get("category", NO_CATEGORY)
    if not isinstance(category, str):
        raise ValueError(f"{origin}: category must be text, got {category!r}")
    options = template_options(row, origin)
    if content_keys == ["messages"]:
        messages, answer = _question_and_answer(row, origin)
        return Prompt(messages, (), answer, category, origin, options)
    turns = [row["prompt"]] if content_keys == ["prompt"] else row["turns"]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{origin}: turns must be a list of at least one text, got {turns!r}")
    for turn in turns:
        _check_text(turn, content_keys[0], origin)
    opening = exchange(row, turns[0], None, origin)
    return Prompt(opening, tuple(turns[1:]), None, category, origin, options)


def _question_and_answer(row: dict[str, Any], origin: str) -> tuple[tuple[Message, ...], str | None]:
    """The messages up to the last user turn, and the answer that follows it, if one does."""
    kept = list(opened(row, read_messages(row["messages"], origin), origin))
    for message in kept:
        if not (message["role"] == "assistant" and message.get("tool_calls")):
            _check_text(message["content"], "content", origin)
    answer = kept.pop()["content"] or None if kept and kept[-1]["role"] == "assistant" else None
    if not kept or kept[-1]["role"] not in ("user", "tool"):
        raise ValueError(
            f"{origin}: messages must end with a user message or a tool's, or with one and its answer"
        )
    return tuple(kept), answer


def _check_text(value: Any, name: str, origin: str) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{origin}: {name} must be text that is not empty, got {value!r}")
