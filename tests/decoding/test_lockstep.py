"""Processors and criteria of the caller's own are called as transformers calls them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import VOCAB_SIZE, OracleDrafter, left_padded, needs_newest, random_prompts, tiny_model
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
)

from medusa import CandidateTree, MedusaModel

TREE = CandidateTree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (0, 1, 0, 0)])
LENGTHS = [8, 3, 5]
WIDTH, PADDING = 8, 17
EOS = list(range(20, 30))


def batch_of(num_rows: int) -> dict[str, Tensor]:
    """Prompts padded with a token that is not ``pad_token_id``."""
    batch = left_padded(random_prompts(num_rows, WIDTH), LENGTHS[:num_rows])
    return {**batch, "input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, PADDING)}


def as_transformers(num_rows: int, options_of: Callable[[], dict], new: int = 14) -> tuple[float, Tensor]:
    """Tokens per step with a good drafter, and the text, which is that of ``transformers``."""
    base, batch = tiny_model("llama"), batch_of(num_rows)
    given = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    reference = base.generate(**batch, **{**given, **options_of()})
    answers = [row[WIDTH - n :].tolist() for row, n in zip(reference, LENGTHS[:num_rows], strict=True)]
    model, oracle = MedusaModel(base), OracleDrafter(answers, TREE, hit_rate=0.8)
    plain = model.generate(**batch, **{**given, **options_of()})
    assert plain.tolist() == reference.tolist()
    options = {**given, **options_of(), "drafter": oracle, "return_dict_in_generate": True}
    out = model.generate(**batch, **options)
    assert out.sequences.tolist() == reference.tolist()
    return out.statistics.tokens_per_step, reference


class Grammar(LogitsProcessor):
    """Keeps a state for each row, which every new token moves on, and has no rule for a token it forbade."""

    def __init__(self, calls: list[list[list[int]]]):
        self.calls, self.states = calls, None

    def __call__(self, input_ids, scores):
        self.calls.append(input_ids.tolist())
        if self.states is None:
            self.states = list(range(len(input_ids)))
        else:
            self.states = [
                self.after(*pair) for pair in zip(self.states, input_ids[:, -1].tolist(), strict=True)
            ]
        banned = torch.tensor([[token % 3 == s % 3 for token in range(VOCAB_SIZE)] for s in self.states])
        return scores.masked_fill(banned, -torch.inf)

    def after(self, state: int, token: int) -> int:
        if token % 3 == state % 3 and token != 0:  # rows that have ended are given 0
            raise KeyError(f"no rule for {token} in state {state}")
        return state + token


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("end", [{}, {"eos_token_id": EOS}], ids=["full length", "rows end apart"])
def test_a_processor_that_keeps_state_gets_the_calls_that_transformers_makes(num_rows, end):
    made: list[list] = []

    def options():
        made.append([])
        return {**end, "logits_processor": LogitsProcessorList([Grammar(made[-1])])}

    speed, _ = as_transformers(num_rows, options)
    assert made[0] == made[1] == made[2]
    assert made[0][0] == batch_of(num_rows)["input_ids"].tolist()
    assert speed > 1.5 if num_rows == 1 else speed > 1


class BansPerRow(LogitsProcessor):
    def __call__(self, input_ids, scores):
        for row in range(len(scores)):
            scores[row, row :: len(scores) + 1] = -torch.inf
        return scores


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_processor_finds_each_row_at_its_index(num_rows):
    as_transformers(num_rows, lambda: {"logits_processor": LogitsProcessorList([BansPerRow()])})


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_prefix_function_is_told_the_callers_row_and_never_asked_after_a_forbidden_token(num_rows):
    def allowed(row: int, ids: Tensor) -> list[int]:
        assert len(ids) == WIDTH or int(ids[-1]) % 3 == row
        return [token for token in range(VOCAB_SIZE) if token % 3 == row and token != int(ids[-1])]

    as_transformers(num_rows, lambda: {"prefix_allowed_tokens_fn": allowed})


def test_a_prefix_function_may_allow_nothing_where_the_text_cannot_get():
    """Here another processor keeps the text from getting there."""

    def allowed(_row: int, ids: Tensor) -> list[int]:
        is_out_of_reach = len(ids) > WIDTH and int(ids[-1]) % 2
        return [] if is_out_of_reach else list(range(VOCAB_SIZE))

    odd = list(range(1, VOCAB_SIZE, 2))
    speed, _ = as_transformers(1, lambda: {"prefix_allowed_tokens_fn": allowed, "suppress_tokens": odd})
    assert speed > 1.5


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"encoder_repetition_penalty": 1.5},
        {"encoder_no_repeat_ngram_size": 1},
        {"guidance_scale": 1.5},
        {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[5, 7, 11], ngram_len=3)},
        {"renormalize_logits": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_processors_of_transformers_that_know_the_batch_or_keep_state_give_its_text(options, num_rows):
    as_transformers(num_rows, lambda: options)


class StopsAfterEnough(StoppingCriteria):
    """Counts calls and tokens by itself; each row has a bound of its own."""

    def __init__(self, calls: list[list[list[int]]]):
        self.calls, self.counts = calls, [0, 0, 0]

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append(input_ids.tolist())
        for row, token in enumerate(input_ids[:, -1].tolist()):
            self.counts[row] += token % 3 > 0
        return torch.tensor([self.counts[row] > 3 + 2 * row for row in range(len(input_ids))])


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("end", [{}, {"eos_token_id": EOS[:3]}], ids=["rows wait", "rows end apart"])
def test_a_criterion_that_keeps_state_gets_the_calls_that_transformers_makes(num_rows, end):
    """Without an end-of-sequence token, rows that have ended go on until all have."""
    made: list[list] = []

    def options():
        made.append([])
        return {**end, "stopping_criteria": StoppingCriteriaList([StopsAfterEnough(made[-1])])}

    _, text = as_transformers(num_rows, options, new=30)
    assert made[0] == made[1] == made[2]
    assert text.shape[1] < WIDTH + 30


OWN_BOUNDS = {
    "shorter": (lambda: [MaxLengthCriteria(WIDTH + 5)], {}),
    "longer": (lambda: [MaxLengthCriteria(WIDTH + 20)], {}),
    "already reached": (lambda: [MaxLengthCriteria(WIDTH - 2)], {}),
    "other ends": (lambda: [EosTokenCriteria(EOS)], {"eos_token_id": 1}),
    "ends where there were none": (lambda: [EosTokenCriteria(EOS)], {}),
}


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("bounds", OWN_BOUNDS)
def test_the_callers_own_bounds_take_the_place_of_those_that_generate_makes(bounds, num_rows):
    criteria, options = OWN_BOUNDS[bounds]
    as_transformers(num_rows, lambda: {**options, "stopping_criteria": StoppingCriteriaList(criteria())})


@pytest.mark.parametrize("options", [{}, {"min_new_tokens": 2}], ids=["alone", "in place of another"])
def test_the_callers_own_least_length_is_kept(options):
    least = [MinLengthLogitsProcessor(WIDTH + 9, EOS)]
    given = {**options, "eos_token_id": EOS, "logits_processor": LogitsProcessorList(least)}
    speed, text = as_transformers(3, lambda: given)
    assert text.shape[1] >= WIDTH + 9
    assert speed > 1.5, "a bound that is known to keep no state lets rows advance apart"


@pytest.mark.parametrize(
    "ignored",
    [4, pytest.param(torch.tensor([4, 9, 1]), marks=needs_newest)],
    ids=["all rows alike", "row by row"],
)
def test_a_penalty_that_leaves_out_columns_of_the_callers_batch_leaves_out_those(ignored):
    penalty = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.8, prompt_ignore_length=ignored)])
    as_transformers(3, lambda: {"logits_processor": penalty})


@pytest.mark.parametrize("acceptance", ["typical", "token"])
def test_rules_that_look_at_all_nodes_refuse_what_must_be_called_once_for_each_position(acceptance):
    model = MedusaModel(tiny_model("llama"))
    options = {"max_new_tokens": 4, "do_sample": True, "acceptance": acceptance, "pad_token_id": 0}
    processor = LogitsProcessorList([BansPerRow()])
    with pytest.raises(ValueError, match=f"^BansPerRow must be called once .*'{acceptance}' looks"):
        model.generate(**batch_of(1), **options, logits_processor=processor)
    criteria = StoppingCriteriaList([StopsAfterEnough([])])
    with pytest.raises(ValueError, match="StopsAfterEnough must be called once for each position"):
        model.generate(**batch_of(3), **options, stopping_criteria=criteria)
    assert model.generate(**batch_of(1), **options, stopping_criteria=criteria).shape[1] <= WIDTH + 4
