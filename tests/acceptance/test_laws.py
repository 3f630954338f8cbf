"""Every rule for sampled drafts gives the target's own law, over several steps."""

import pytest
import torch
from verification_laws import (
    FALSE_ALARM_RATE,
    DepthWise,
    Markov,
    exact_law,
    expected_accepted,
    law_of,
    p_value,
    sampled_law,
    total_variation,
    toy_pair,
    toy_table,
)

from medusa.acceptance.protocol import independent_chains, kind_drawn
from medusa.acceptance.rules import RULES, rule_named
from medusa.trees.candidate_tree import CandidateTree

BUSHY = CandidateTree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)])
UNEVEN = CandidateTree.from_paths([(0,), (1,), (2,), (1, 0)])
SHAPES = {
    "chain 1": CandidateTree.chain(1),
    "chain 3": CandidateTree.chain(3),
    "two chains": independent_chains(2, 2),
    "bushy": BUSHY,
    "uneven": UNEVEN,
}


def pairs_of_rule_and_draft():
    for name, rule in RULES.items():
        for shape, tree in SHAPES.items():
            if kind_drawn(tree) in rule.draft_kinds:
                yield pytest.param(name, tree, id=f"{name}, {shape}")


def usual_tree(name):
    return CandidateTree.chain(3) if RULES[name].only_chains else independent_chains(2, 2)


@pytest.mark.parametrize(("name", "tree"), pairs_of_rule_and_draft())
@pytest.mark.parametrize("zeros", [0.0, 0.3])
def test_the_joint_law_over_several_steps_is_the_targets_by_enumeration(name, tree, zeros):
    target, drafter = toy_pair(seed=tree.num_nodes, vocab_size=3, zeros=zeros)
    num_tokens = 4 if tree.num_nodes < 5 else 3
    law = exact_law(RULES[name], target, drafter, tree, num_tokens)
    assert law.sum().item() == pytest.approx(1, abs=1e-10)
    assert total_variation(law, law_of(target, num_tokens)) < 1e-10


def test_greedy_block_verification_is_exact_while_several_changes_of_the_target_overlap():
    target, drafter = toy_pair(seed=3, vocab_size=2)
    law = exact_law(RULES["greedy_block"], target, drafter, CandidateTree.chain(4), 6)
    assert total_variation(law, law_of(target, 6)) < 1e-10


@pytest.mark.parametrize("name", [name for name in RULES if not RULES[name].context_only_proposal])
def test_drafters_whose_q_depends_on_the_depth_alone_are_exact_too(name):
    target, _ = toy_pair(seed=11, vocab_size=3)
    heads = DepthWise(toy_table(12, 5, 3))
    tree = usual_tree(name)
    law = exact_law(RULES[name], target, heads, tree, 3)
    assert total_variation(law, law_of(target, 3)) < 1e-10


@pytest.mark.parametrize("name", RULES)
def test_sampled_texts_follow_the_law_in_float32(name):
    target, drafter = toy_pair(seed=21, vocab_size=4, zeros=0.2)
    tree = usual_tree(name)
    counts = sampled_law(RULES[name], target, drafter, tree, 4, num_rows=80_000)
    assert p_value(counts, law_of(target, 4)) > FALSE_ALARM_RATE


def test_the_published_toy_accepts_10_11_and_12_ninths():
    target = Markov(torch.tensor([1 / 3, 2 / 3], dtype=torch.float64).expand(2, 2, 2))
    drafter = Markov(torch.tensor([2 / 3, 1 / 3], dtype=torch.float64).expand(2, 2, 2))
    chain = CandidateTree.chain(2)
    accepted = {
        name: expected_accepted(RULES[name], target, drafter, chain)
        for name in ("token", "block", "greedy_block")
    }
    assert accepted == pytest.approx({"token": 10 / 9, "block": 11 / 9, "greedy_block": 12 / 9})


@pytest.mark.parametrize("seed", range(8))
def test_one_step_accepts_least_by_token_then_by_block_then_by_greedy_block(seed):
    target, drafter = toy_pair(seed, vocab_size=3, zeros=0.2 * (seed % 2))
    by_token, by_block, by_greedy = (
        expected_accepted(RULES[name], target, drafter, CandidateTree.chain(4))
        for name in ("token", "block", "greedy_block")
    )
    assert by_token <= by_block + 1e-12 <= by_greedy + 2e-12
    if seed == 0:
        assert by_token + 0.01 < by_block < by_greedy - 0.01


@pytest.mark.parametrize("name", ["multi_draft", "spectr"])
def test_a_second_draft_is_accepted_where_the_first_was_not(name):
    target, drafter = toy_pair(seed=2, vocab_size=3)
    one, two, three = (
        expected_accepted(RULES[name], target, drafter, independent_chains(k, 2)) for k in (1, 2, 3)
    )
    assert one + 0.05 < two < three


def test_the_best_spectr_division_accepts_as_often_as_its_equation_says():
    target, drafter = toy_pair(seed=2, vocab_size=3)
    p, q = target.table[0, 1], drafter.table[0, 1]
    best = 0.0  # over a fine grid of rho: P(accept) = 1 - (1 - beta)^2 where rho beta >= P(accept)
    for rho in torch.linspace(1, 2, 20001, dtype=torch.float64):
        beta = torch.minimum(p / rho, q).sum().item()
        accepts = 1 - (1 - beta) ** 2
        if rho.item() * beta >= accepts:
            best = max(best, accepts)
    found = expected_accepted(rule_named("spectr"), target, drafter, independent_chains(2, 1))
    assert found == pytest.approx(best, abs=1e-4)


def test_expected_tokens_predicts_token_verification_of_independent_tokens():
    p, q = toy_table(5, 3), toy_table(6, 3)
    rate = torch.minimum(p, q).sum().item()
    measured = 1 + expected_accepted(
        RULES["token"], Markov(p.expand(3, 3, 3)), Markov(q.expand(3, 3, 3)), CandidateTree.chain(4)
    )
    assert measured == pytest.approx((1 - rate**5) / (1 - rate))


# A false alarm rate is only worth something if the test can raise an alarm.
def test_the_chi_square_notices_a_target_that_is_slightly_off():
    target, drafter = toy_pair(seed=21, vocab_size=4)
    off = Markov(0.97 * target.table + 0.03 * torch.tensor([1.0, 0, 0, 0], dtype=torch.float64))
    counts = sampled_law(RULES["block"], off, drafter, CandidateTree.chain(3), 4)
    assert p_value(counts, law_of(target, 4)) < FALSE_ALARM_RATE
