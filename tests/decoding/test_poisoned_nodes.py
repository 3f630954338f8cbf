"""A guess on which the base is not finite changes no other token."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import BUSHY, VOCAB_SIZE, left_padded, random_prompts, tiny_model
from static_oracle import StaticOracle
from transformers import GenerationConfig

from medusa import CandidateTree, HeadsConfig, MedusaHeads, MedusaModel
from medusa.acceptance.rules import RULES
from medusa.decoding.batch import Batch, BatchLimits, Row
from medusa.decoding.executor import Call, Executor
from medusa.drafters.levels import LevelDrafter
from medusa.drafters.protocol import Draft

POISON = 60
BATCH = left_padded(random_prompts(3, 14), [14, 5, 9])
OPTIONS = {"max_new_tokens": 24, "suppress_tokens": [POISON]}


def base_that_is_not_finite_after(token, value=float("nan")):
    base = copy.deepcopy(tiny_model("llama"))
    with torch.no_grad():
        base.get_input_embeddings().weight[token] = value
    return base


class PoisonedOracle(StaticOracle):
    """Knows the answer, and puts the poison beside it at some steps."""

    def draft(self, context):
        draft = super().draft(context)
        poisons = (self.ranks == 1) & (context.lengths[:, None] % 4 == 0)
        return Draft(torch.where(poisons, POISON, draft.tokens), draft.topology)


def answers_of(batch, sequences):
    return [
        row[mask.argmax() :].tolist() for row, mask in zip(sequences, batch["attention_mask"], strict=True)
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("engine", "step"),
    [("eager", "general"), ("packed", "general"), ("int8", "general"), ("eager", "static")],
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_guess_that_is_no_number_leaves_all_text_as_it_is(engine, step, temperature, value):
    model = MedusaModel(base_that_is_not_finite_after(POISON, value), engine=engine)
    options = {**OPTIONS, "do_sample": temperature > 0, "step": step}
    if temperature:
        options |= {"temperature": temperature, "seed": 3}
    plain = model.generate(**BATCH, **options)
    drafter = PoisonedOracle(answers_of(BATCH, plain), BUSHY, always=True)
    drafted = model.generate(**BATCH, **options, drafter=drafter, return_dict_in_generate=True)
    assert drafted.sequences.tolist() == plain.tolist()
    assert drafted.statistics.tokens_per_step > 1.2  # the steps without poison go on guessing


def test_a_step_that_was_run_again_costs_what_it_was_begun_for():
    """Its time holds both passes: as a step of one node it would make plain decoding look slow."""
    model = MedusaModel(base_that_is_not_finite_after(POISON))
    plain = model.generate(**BATCH, **OPTIONS, do_sample=False)
    drafter = PoisonedOracle(answers_of(BATCH, plain), BUSHY, always=True)
    request = model.request(**BATCH, **OPTIONS, do_sample=False)
    batch = Batch(Executor(model.base).plan(Call(request, "general", drafter)))
    batch.start(request)
    outputs = []
    batch._record = lambda burst, *rest: outputs.extend(burst.outputs)
    while batch.is_busy:
        batch.step()
    assert {output.num_drafted for output in outputs} == {0, BUSHY.num_nodes - 1}
    assert {output.num_nodes for output in outputs} == {BUSHY.num_nodes}


class PoisonedLevels(LevelDrafter):
    """Draws the poison as often as any other token."""

    vocab_size = VOCAB_SIZE

    def logits_after(self, context, tokens, nodes):
        return torch.zeros(len(tokens), nodes.stop - nodes.start, VOCAB_SIZE).index_fill(
            2, torch.tensor([POISON, 7]), 4.0
        )


def test_greedy_block_verification_cannot_leave_a_draft_out_and_says_so():
    model = MedusaModel(base_that_is_not_finite_after(POISON))
    options = {**OPTIONS, "do_sample": True, "seed": 1, "acceptance": "greedy_block"}
    with pytest.raises(ValueError, match=r"not finite .* acceptance='greedy_block'.* use another rule"):
        model.generate(**BATCH, **options, drafter=PoisonedLevels(CandidateTree.chain(3), "cpu"))


@pytest.mark.parametrize("rule", sorted(RULES.keys() - {"greedy_block"}))
def test_rules_for_sampled_drafts_go_on_after_such_a_guess(rule):
    model = MedusaModel(base_that_is_not_finite_after(POISON))
    drafter = PoisonedLevels(CandidateTree.chain(3), "cpu")
    options = {**OPTIONS, "do_sample": True, "seed": 1, "acceptance": rule, "drafter": drafter}
    out = model.generate(**BATCH, **options, return_dict_in_generate=True)
    answers = out.sequences[:, BATCH["input_ids"].shape[1] :]
    assert not (answers == POISON).any()
    assert len(answers.unique()) > 8, "one token over and over is what NaN gives"


def test_a_row_that_is_no_number_poisons_neither_its_neighbours_nor_the_row_that_takes_its_place():
    base = base_that_is_not_finite_after(POISON)
    model = MedusaModel(base, MedusaHeads(HeadsConfig(32, VOCAB_SIZE, num_heads=4)), BUSHY)
    batch = model.continuous_batch(BatchLimits(max_rows=3, prefix_bytes=0))
    prompts = [random_prompts(1, length, seed) for seed, length in enumerate((30, 8, 11))]
    config = GenerationConfig(max_new_tokens=20, do_sample=False, suppress_tokens=[POISON])

    def row(prompt):
        return Row(model.request(prompt, generation_config=config))

    rows, broken = [row(prompt) for prompt in prompts], row(torch.full((1, 3), POISON))
    for each in (rows[0], broken, rows[1]):
        batch.add(each)
    batch.step()
    batch.add(rows[2])
    while batch.is_busy:
        batch.step()
    assert isinstance(broken.error, ValueError) and "NaN" in str(broken.error)
    for each, prompt in zip(rows, prompts, strict=True):
        alone = model.generate(prompt, generation_config=config, tree=CandidateTree.chain(0))
        assert each.tokens == alone[0, prompt.shape[1] :].tolist()
