"""Mistakes other people shipped in rules for sampled drafts, each caught by the test the rules pass.

Every mutant runs beside the rule it spoils, through the same ``sampled_law`` and the same chi-square at the
same false-alarm rate: the rule passes, the mutant does not.
"""

from dataclasses import replace

import pytest
import torch
from verification_laws import (
    FALSE_ALARM_RATE,
    DepthWise,
    exact_law,
    law_of,
    p_value,
    sampled_law,
    total_variation,
    toy_pair,
    toy_table,
)

from medusa.acceptance.chain_rules import prefix_weight
from medusa.acceptance.distributions import (
    conclude,
    deepest,
    drafted_probability,
    draw,
    excess,
    normalised,
    open_proposal,
    ratio,
    row_at,
)
from medusa.acceptance.rules import (
    DraftKind,
    VerificationNoise,
    VerificationRule,
    independent_chains,
    rule_named,
)
from medusa.trees.candidate_tree import CandidateTree

TARGET, DRAFTER = toy_pair(seed=31, vocab_size=3)
CHAIN = CandidateTree.chain(3)
NUM_ROWS = 40_000
BUSHY = CandidateTree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)])


def chance_of(rule, tree=CHAIN, **settings) -> float:
    """p-value of three tokens of text under ``rule``, several steps long."""
    counts = sampled_law(rule, TARGET, DRAFTER, tree, 3, num_rows=NUM_ROWS, **settings)
    return p_value(counts, law_of(TARGET, 3))


def mutant(verify, kind=DraftKind.CHAIN) -> VerificationRule:
    return VerificationRule("mutant", verify, (kind,), "wrong on purpose")


def assert_only_the_mutant_fails(rule, wrong, tree=CHAIN, replacement=True):
    assert chance_of(rule, tree, replacement=replacement) > FALSE_ALARM_RATE
    assert chance_of(wrong, tree, replacement=replacement) < FALSE_ALARM_RATE


@pytest.mark.parametrize(
    ("name", "tree", "replacement"),
    [
        ("token", CHAIN, True),
        ("block", CHAIN, True),
        ("multi_draft_without_replacement", BUSHY, False),
        ("traversal", BUSHY, False),
    ],
)
def test_a_ratio_rule_on_ranked_candidates_is_biased_and_refused(name, tree, replacement):
    rule = rule_named(name)
    assert chance_of(rule, tree, replacement=replacement) > FALSE_ALARM_RATE
    assert chance_of(rule, tree, replacement=replacement, ranked=True) < FALSE_ALARM_RATE
    with pytest.raises(ValueError, match="point mass, so a test on p/q is biased; use acceptance='exact'"):
        rule.require(DraftKind.RANKED)


def test_one_coin_a_leaf_path_instead_of_one_a_node_is_biased():
    generator = torch.Generator().manual_seed(0)

    def verify(draft, noise, state=None):
        """Token verification along each root-to-leaf path with coins of its own; the deepest outcome wins."""
        depth, best = torch.full_like(draft.tokens[:, 0], -1), torch.zeros_like(draft.tokens[:, 0])
        for leaf in (3, 4, 5):
            path = draft.topology.lineage[0, leaf]  # (L,)
            p = drafted_probability(draft.target[:, path], draft.tokens[:, path])
            q = drafted_probability(draft.proposal[:, path], draft.tokens[:, path])
            stays = torch.rand(p.shape, generator=generator) < p / q
            reached = torch.cumprod(stays.long(), dim=1).sum(1)
            best = torch.where(reached > depth, path[reached], best)
            depth = torch.maximum(reached, depth)
        left = excess(row_at(draft.target, best), row_at(draft.proposal, best))
        residual = torch.where((best >= 3)[:, None], row_at(draft.target, best), left)
        return conclude(draft, noise, best, residual, torch.ones_like(noise.uniform))

    rule, wrong = rule_named("multi_draft"), mutant(verify, DraftKind.WITH_REPLACEMENT)
    assert_only_the_mutant_fails(rule, wrong, BUSHY)


@pytest.mark.parametrize(
    ("name", "tree"),
    [
        ("token", CHAIN),
        ("block", CHAIN),
        ("greedy_block", CHAIN),
        ("multi_draft", independent_chains(2, 2)),
        ("spectr", independent_chains(2, 2)),
        ("multi_draft_without_replacement", BUSHY),
        ("traversal", BUSHY),
    ],
)
def test_sampling_again_from_the_full_target_after_a_miss_is_biased(name, tree):
    rule = rule_named(name)

    def verify(draft, noise, state=None):
        verdict = rule.verify(draft, noise, state)
        return replace(verdict, next_token=draw(row_at(draft.target, verdict.best), noise.gumbel))

    replacement = rule.draft_kinds[0] is not DraftKind.WITHOUT_REPLACEMENT
    assert_only_the_mutant_fails(rule, mutant(verify, rule.draft_kinds[0]), tree, replacement)


@pytest.mark.parametrize("name", ["token", "block"])
def test_drawing_the_next_token_with_the_noise_of_the_draft_is_biased_and_refused(name):
    rule = rule_named(name)

    def share(draft, noise, draft_gumbel, rule):
        """Noise keyed by position: the token after the last accepted one meets the noise of its own draft."""
        best = rule.verify(draft, noise).best
        by_position = torch.cat([draft_gumbel[:, 1:], noise.gumbel[:, None]], dim=1)
        return VerificationNoise(noise.uniform, row_at(by_position, best))

    assert chance_of(rule) > FALSE_ALARM_RATE
    assert chance_of(rule, tamper=share) < FALSE_ALARM_RATE


def test_tossing_coins_with_the_noise_of_the_draft_is_biased():
    def share(draft, noise, draft_gumbel, rule):
        of_token = draft_gumbel.gather(2, draft.tokens[..., None])[..., 0]
        return VerificationNoise(torch.exp(-torch.exp(-of_token)).clamp(max=1 - 2**-24), noise.gumbel)

    assert chance_of(rule_named("token")) > FALSE_ALARM_RATE
    assert chance_of(rule_named("token"), tamper=share) < FALSE_ALARM_RATE


def block_over_draft_positions_only(draft, noise, state=None):
    """h_i from the g rows before the X_i: the row after the last draft token is never used."""
    proposal = open_proposal(draft.proposal)
    a = prefix_weight(draft, proposal)
    left = (a[:, 1:, None] * draft.target[:, :-1] - proposal[:, :-1]).clamp(min=0).sum(-1)
    acceptance = torch.cat([torch.ones_like(left[:, :1]), ratio(left, left + 1 - a[:, 1:])], dim=1)
    best = deepest(noise.uniform < acceptance)
    weights = (a[..., None] * draft.target - proposal).clamp(min=0)
    residual = normalised(row_at(weights, best), fallback=row_at(draft.target, best))
    return conclude(draft, noise, best, residual, acceptance)


def test_block_verification_over_g_positions_instead_of_g_plus_1_is_biased():
    assert_only_the_mutant_fails(rule_named("block"), mutant(block_over_draft_positions_only))


def test_block_verification_that_stops_at_the_first_failed_coin_is_biased():
    rule = rule_named("block")

    def verify(draft, noise, state=None):
        """A prefix must pass every coin up to its end, as in token verification."""
        acceptance = rule.verify(draft, noise).acceptance
        passed = torch.cumprod((noise.uniform < acceptance).long(), dim=1)
        return rule.verify(draft, VerificationNoise(torch.where(passed > 0, 0.0, 1.0), noise.gumbel))

    assert_only_the_mutant_fails(rule, mutant(verify))


def test_the_ratio_upside_down_is_biased():
    rule = rule_named("token")

    def verify(draft, noise, state=None):
        proposal = open_proposal(draft.proposal)
        p = drafted_probability(draft.target, draft.tokens)
        q = drafted_probability(proposal, draft.tokens)
        acceptance = torch.cat([torch.ones_like(p[:, :1]), (q / p).clamp(max=1)], dim=1)
        best = torch.cumprod((noise.uniform < acceptance).long(), dim=1).sum(1) - 1
        residual = excess(row_at(draft.target, best), row_at(proposal, best))
        return conclude(draft, noise, best, residual, acceptance)

    assert_only_the_mutant_fails(rule, mutant(verify))


def test_greedy_block_verification_without_its_state_is_biased_over_several_steps_only():
    rule = rule_named("greedy_block")
    assert chance_of(rule) > FALSE_ALARM_RATE
    assert chance_of(rule, carry=False) < FALSE_ALARM_RATE
    first = exact_law(rule, TARGET, DRAFTER, CHAIN, 1, carry=False)
    assert total_variation(first, law_of(TARGET, 1)) < 1e-10


def test_greedy_block_verification_on_depth_wise_drafts_is_biased_and_refused():
    rule, heads = rule_named("greedy_block"), DepthWise(toy_table(32, 5, 3))
    counts = sampled_law(rule, TARGET, heads, CHAIN, 3, num_rows=NUM_ROWS)
    assert p_value(counts, law_of(TARGET, 3)) < FALSE_ALARM_RATE
    with pytest.raises(ValueError, match=r"q depends on the text alone.*use acceptance='block'"):
        rule.require(DraftKind.CHAIN, context_only=False)


@pytest.mark.parametrize("name", ["multi_draft", "spectr"])
def test_rules_for_independent_drafts_are_biased_on_drafts_that_differ_and_refuse_them(name):
    rule = rule_named(name)
    assert chance_of(rule, BUSHY, replacement=True) > FALSE_ALARM_RATE
    assert chance_of(rule, BUSHY, replacement=False) < FALSE_ALARM_RATE
    with pytest.raises(ValueError, match=r"a sibling depends on those drawn before it.*with replacement"):
        rule.require(DraftKind.WITHOUT_REPLACEMENT)
