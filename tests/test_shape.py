"""The shape of the house in numbers: ceilings that only fall.

Each count is of places where several files must know the same thing. Whoever lowers a count lowers its
ceiling in the same commit; whoever needs a higher one finds the place that could know it for the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import pytest
from conftest import CHECKOUT, library_calls, random_heads, random_prompts, tiny_model

from medusa import MedusaModel
from medusa.decoding.step import decode_step

LIBRARY = CHECKOUT / "medusa"
TEXTS = [path.read_text() for path in sorted(LIBRARY.rglob("*.py"))]
SLACK = 0.97
"""A ceiling of what a run executes is too high where the count is below this share of it: the count differs a
little with the processor and the version of Python."""


@dataclass(frozen=True)
class Places:
    """Places of the library that a pattern finds."""

    pattern: str
    ceiling: int
    files: int | None
    """The ceiling for the number of files with such a place; None where a module that is split in two does no
    harm."""


PLACES = {
    "names of kinds of steps": Places(r'"(?:general|compiled|static|captured)"', 26, 11),
    "tests of the device": Places(r"device\.type|is_cpu|is_on_cpu", 47, 25),
    "branches on kinds of heads": Places(
        r'head_kind|"(?:eagle3|mtp)"|isinstance\([^()]*(?:AutoregressiveHead|MedusaHeads|MtpHead|Eagle3Head)',
        30,
        9,
    ),
    "tests of a type": Places(r"isinstance\(", 372, None),
    "names of functions that load a base": Places(
        r"\b(?:load_base|load_by_transformers|load_widened|load_blocks|frozen_base|live_states)\b", 42, 16
    ),
}

CALL_FILES = 34
"""Files with a function that a greedy call of twelve tokens with heads executes."""
CALL_FUNCTIONS = 360
"""Functions that it executes, when it is not the first of its model."""
STEP_STAYS = 18
"""Functions that get the state of the rows as an argument in the steps of such a call."""


@pytest.mark.parametrize("name", PLACES)
def test_no_more_places_know_the_same_thing(name: str):
    places = PLACES[name]
    counts = [len(re.findall(places.pattern, text)) for text in TEXTS]
    total = sum(counts)
    num_files = None if places.files is None else sum(count > 0 for count in counts)
    assert total <= places.ceiling and (num_files or 0) <= (places.files or 0), (
        f"{name}: {total} places in {num_files} files, at most {places.ceiling} in {places.files}; let one "
        "place know it for the others"
    )
    assert (total, num_files) == (places.ceiling, places.files), (
        f"{name} fell to {total} places in {num_files} files: lower the ceiling to it, in the same commit"
    )


def second_call(visit: Callable[[FrameType], object]) -> None:
    """Twelve greedy tokens with heads, under :func:`library_calls`, by a model that has answered before."""
    model = MedusaModel(tiny_model("llama"), random_heads())
    prompt = random_prompts(1, 9)
    model.generate(prompt, max_new_tokens=12, do_sample=False)
    with library_calls(visit):
        model.generate(prompt, max_new_tokens=12, do_sample=False)


def assert_below(count: int, ceiling: int, what: str) -> None:
    assert count <= ceiling, f"{what}: {count}, at most {ceiling}"
    assert count >= SLACK * ceiling, f"{what} fell to {count}: lower the ceiling to it, in the same commit"


def test_a_call_reads_no_more_files_and_functions():
    executed: set[CodeType] = set()
    second_call(lambda frame: executed.add(frame.f_code))
    assert_below(len({code.co_filename for code in executed}), CALL_FILES, "files of a call")
    assert_below(len(executed), CALL_FUNCTIONS, "functions of a call")


def test_the_state_of_the_rows_goes_through_no_more_functions():
    states: list[Any] = []
    stays: set[CodeType] = set()

    def visit(frame: FrameType) -> None:
        values = frame.f_locals
        if frame.f_code is decode_step.__code__:
            states.append(values["state"])
        if any(value is state for value in values.values() for state in states):
            stays.add(frame.f_code)

    second_call(visit)
    assert_below(len(stays), STEP_STAYS, "functions that get the state of the rows")
