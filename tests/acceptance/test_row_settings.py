"""Settings of rows as numbers: those that a captured step can read, and no others."""

import math

import pytest
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from medusa.acceptance.row_settings import row_numbers


def test_a_row_has_a_number_for_each_of_its_processors_and_a_neutral_one_for_others():
    assert row_numbers(LogitsProcessorList()) == [1.0, 1.0, math.inf, -1.0, 0.0]
    chain = (
        hf.RepetitionPenaltyLogitsProcessor(1.1),
        hf.TemperatureLogitsWarper(0.7),
        hf.TopPLogitsWarper(0.75),
    )
    assert row_numbers(LogitsProcessorList(chain)) == [1.1, 0.7, math.inf, 0.25, 0.0]


@pytest.mark.parametrize(
    "processors",
    [
        [hf.TopKLogitsWarper(5, min_tokens_to_keep=2)],
        [hf.TopPLogitsWarper(0.5, filter_value=-1e9)],
        [hf.MinPLogitsWarper(0.1, min_tokens_to_keep=2)],
        [hf.RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=3)],
        [hf.TopKLogitsWarper(5), hf.TemperatureLogitsWarper(0.5)],
        [hf.TemperatureLogitsWarper(0.5), hf.TemperatureLogitsWarper(0.5)],
        [hf.TypicalLogitsWarper(0.9)],
    ],
    ids=lambda processors: "-".join(type(each).__name__ for each in processors),
)
def test_what_one_number_does_not_say_has_none(processors):
    assert row_numbers(LogitsProcessorList(processors)) is None
