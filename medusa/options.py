"""Types and checks of options: choices, numbers within bounds; and the differences of two sets of options.

They are in a module of their own so that a program can show its help without importing torch.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

Engine = Literal["auto", "eager", "packed", "int8"]
"""How the base model's layers are executed; the table is in :mod:`medusa.engine`."""
StepKind = Literal["auto", "general", "static", "compiled", "captured"]
"""How decode steps are run; the table is in :mod:`medusa.decoding.executor`."""
ForeignName = Literal["vllm-medusa", "vllm-eagle3", "speculators"]
"""Formats that heads are written in for other projects, and checked as; see :mod:`medusa.interop`."""
Dtype = Literal["float32", "bfloat16", "float16"]
"""Precision of a base model."""


class StepTraits(NamedTuple):
    """The properties of a kind of steps."""

    has_any_shape: bool
    """Whether drafts may have another number of nodes at every step; the host reads each step's tokens."""
    is_compiled: bool = False
    """Whether passes are compiled ahead."""
    is_captured: bool = False
    """Whether a step is a CUDA graph."""


STEPS: dict[StepKind, StepTraits] = {
    "general": StepTraits(has_any_shape=True),
    "static": StepTraits(has_any_shape=False),
    "compiled": StepTraits(has_any_shape=True, is_compiled=True),
    "captured": StepTraits(has_any_shape=False, is_captured=True),
}
"""All kinds that a step can be; "auto" stands for one of them."""
FALLBACK_STEP: StepKind = "general"
"""The kind that decodes whatever a call asks for, on any base."""

NOT_UTF8 = "must be UTF-8 text, and is not; convert it first, for example with iconv"
SETTING_OF = {"draft_model": "draft-model", "exit_layer": "early-exit", "eagle3": "eagle3"}
"""Setting of a single drafter -> that drafter."""


@dataclass(frozen=True)
class DrafterSettings:
    """Options of drafters other than heads."""

    draft_length: int | None = None
    """Draft tokens of a chain; none is the drafter's own. Heads keep their own tree, and are a chain only for
    rules that take nothing else."""
    draft_width: int = 1
    """Chains side by side, where the rule takes a tree."""
    draft_model: str | None = None
    """For draft-model: a smaller model with the same tokenizer, a directory or a hub id."""
    exit_layer: int | None = None
    """For early-exit: layers of the base to run."""
    eagle3: str | None = None
    """For eagle3: a heads directory or hub id of an EAGLE-3 head."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "draft_length", "draft_width", "exit_layer")

    def read_by(self, *drafters: str) -> DrafterSettings:
        """Without the options that none of ``drafters``, names or unions of them, reads."""
        parts = {part for name in drafters for part in name.split("+")}
        unread: dict[str, Any] = {name: None for name, drafter in SETTING_OF.items() if drafter not in parts}
        return replace(self, **unread)


@dataclass(frozen=True)
class TemplateOptions:
    """Default chat template options for conversations without their own."""

    enable_thinking: bool | None = None
    """Whether the model reasons before it answers (--no-enable-thinking: not), for templates that ask; none
    leaves it to the template."""
    chat_template_kwargs: str | None = None
    """Other variables of the chat template, as a JSON object: '{"reasoning_effort": "low"}'."""

    def __post_init__(self) -> None:
        if not isinstance(self._kwargs, dict):
            raise ValueError(f"chat_template_kwargs must be a JSON object, got {self.chat_template_kwargs!r}")
        if self._kwargs:
            from medusa.conversations import check_finite  # which imports a library of templates

            check_finite(self._kwargs, "chat_template_kwargs")

    @property
    def _kwargs(self) -> Any:
        try:
            return json.loads(self.chat_template_kwargs or "{}")
        except ValueError as error:
            raise ValueError(
                f"chat_template_kwargs must be a JSON object, got {self.chat_template_kwargs!r}: {error}"
            ) from error

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """All of it, by the names that templates know."""
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return {**thinking, **self._kwargs}


def checked_utf8(text: str, where: str) -> str:
    """``text``, which came from outside the program."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} {NOT_UTF8}") from error
    return text


def check_at_least(options: Any, lowest: float, *names: str) -> None:
    """Raise ValueError for the first of the fields ``names`` of ``options`` that is given and below
    ``lowest``, or infinite.

    A list passes when each of its values does; so in all checks here.
    """
    _check(options, f"at least {lowest:g}", lambda value: lowest <= value < math.inf, names)
    _check(options, "below 2**63", lambda value: value < 2**63, names)  # what arrays and generators take


def check_at_most(options: Any, highest: float, *names: str) -> None:
    """Raise ValueError for the first of ``names`` that is given and above ``highest``."""
    _check(options, f"at most {highest:g}", lambda value: value <= highest, names)


def check_above(options: Any, lowest: float, *names: str) -> None:
    """Raise ValueError for the first of ``names`` that is given and not above ``lowest``, or infinite."""
    _check(options, f"above {lowest:g}", lambda value: lowest < value < math.inf, names)


def check_within(options: Any, interval: str, *names: str) -> None:
    """Raise ValueError for the first of ``names`` that is given and outside of ``interval``: "[0, 1)"."""
    lowest, highest = map(float, interval[1:-1].split(","))

    def is_inside(value: float) -> bool:
        is_end = (value == lowest and interval[0] == "[") or (value == highest and interval[-1] == "]")
        return lowest < value < highest or is_end

    _check(options, f"in {interval}", is_inside, names)


def check_read_by(settings: Any, *drafters: str) -> None:
    """Raise ValueError for the first of ``settings`` that none of ``drafters``, names or unions of them,
    reads."""
    parts = {part for name in drafters for part in name.split("+")}
    for setting, drafter in SETTING_OF.items():
        if getattr(settings, setting) is not None and drafter not in parts:
            raise ValueError(
                f"{setting} goes with the drafter {drafter}, which is not asked for; ask for it, or leave "
                f"{setting} out"
            )


def check_counts(options: Any, largest: int, *names: str) -> None:
    """Raise ValueError for the first of ``names`` that is no int from 1 to ``largest``: of whatever type, so
    for what comes from a file too."""
    for name in names:
        value = getattr(options, name)
        if not is_count(value, largest):
            raise ValueError(f"{name} must be an int from 1 to {largest}, got {reprlib.repr(value)}")


def is_count(value: Any, largest: int) -> bool:
    """Whether ``value`` is an int from 1 to ``largest``."""
    return type(value) is int and 1 <= value <= largest


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """``key was X and is Y`` for every key whose values differ, by name."""
    return [
        f"{key} was {before.get(key)!r:.80} and is {now.get(key)!r:.80}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]


def _check(options: Any, rule: str, is_kept: Callable[[Any], bool], names: tuple[str, ...]) -> None:
    for name in names:
        option = getattr(options, name)
        for value in option if isinstance(option, list | tuple) else [option]:
            if value is not None and not is_kept(value):
                raise ValueError(f"{name} must be {rule}, got {value}")
