"""Drawing drafts, the noise of a step, and the expected number of tokens."""

import pytest
import torch
from verification_laws import FALSE_ALARM_RATE, law_of, p_value, sampled_law, toy_pair

from medusa.acceptance import protocol as noise
from medusa.acceptance.protocol import (
    DraftKind,
    draft_noise,
    draw_tree,
    independent_chains,
    kind_drawn,
    verification_noise,
)
from medusa.acceptance.rules import rule_named
from medusa.trees.candidate_tree import CandidateTree


def gumbel(*shape, seed=0):
    return -torch.empty(*shape).exponential_(generator=torch.Generator().manual_seed(seed)).log()


def test_a_tree_is_drawn_from_the_q_of_each_nodes_own_path():
    """q after a token allows only the next two token ids, so every path can be checked by arithmetic."""
    tree = CandidateTree.from_paths([(0,), (3,), (0, 0), (3, 1), (3, 2), (0, 0, 5)])  # ranks with gaps
    allowed = torch.zeros(6, 6)
    for token in range(6):
        allowed[token, [(token + 1) % 6, (token + 2) % 6]] = 0.5
    asked = []

    def proposal_after(tokens, nodes):
        asked.append((nodes.start, nodes.stop))
        return allowed[tokens[:, nodes]]

    root = torch.arange(6).repeat(50)
    tokens, proposal = draw_tree(tree, root, proposal_after, gumbel(300, 7, 6))
    assert asked == [(0, 1), (1, 3), (3, 6)]
    parents = torch.tensor(tree.parents)
    assert bool(((tokens[:, 1:] - tokens[:, parents[1:]]) % 6 - 1 <= 1).all())
    assert torch.equal(proposal[:, :6], allowed[tokens[:, :6]])
    assert bool((proposal[:, 6] == 0).all())
    siblings_differ = (tokens[:, 1] != tokens[:, 2]) & (tokens[:, 4] != tokens[:, 5])
    assert not bool(siblings_differ.all())


def test_independent_chains_share_only_the_root():
    tree = independent_chains(3, 2)
    assert tree.parents == (0, 0, 0, 0, 1, 2, 3)
    assert independent_chains(1, 4).paths == CandidateTree.chain(4).paths
    with pytest.raises(ValueError, match="num_chains and length must be at least 1, got 0 and 4"):
        independent_chains(0, 4)


def test_the_kind_of_a_draft_follows_from_its_shape():
    assert kind_drawn(CandidateTree.chain(4)) is DraftKind.CHAIN
    assert kind_drawn(independent_chains(2, 2)) is DraftKind.WITH_REPLACEMENT


def test_counter_based_noise_is_reproducible_row_by_row_and_differs_between_streams():
    seeds, roots = torch.tensor([5, 6, 2**62]), torch.tensor([9, 100, 7])
    drafts, coins = draft_noise(seeds, roots, 4, 11), verification_noise(seeds, roots, 4, 11)
    assert drafts.shape == (3, 4, 11)
    assert coins.uniform.shape == (3, 4)
    assert coins.gumbel.shape == (3, 11)
    alone = verification_noise(seeds[1:2], roots[1:2], 4, 11)
    assert torch.equal(alone.uniform[0], coins.uniform[1])
    assert torch.equal(alone.gumbel[0], coins.gumbel[1])
    assert torch.equal(draft_noise(seeds[1:2], roots[1:2], 4, 11)[0], drafts[1])
    assert not torch.isclose(drafts, coins.gumbel[:, None]).any()


def test_coins_are_uniform_and_below_one():
    coins = verification_noise(torch.arange(2000), torch.full((2000,), 3), 100, 1).uniform
    assert coins.dtype == torch.float32
    assert bool(((coins >= 0) & (coins < 1)).all())
    counts = torch.bincount((coins * 50).long().flatten(), minlength=50)
    assert p_value(counts, torch.full((50,), 1 / 50, dtype=torch.float64)) > FALSE_ALARM_RATE


def test_a_coin_stays_below_one_where_the_noise_is_largest(monkeypatch):
    monkeypatch.setattr(noise, "gumbel_noise", lambda seeds, at, vocab: torch.full((*at.shape, vocab), 25.0))
    zero = torch.zeros(1, dtype=torch.long)
    coins = verification_noise(zero, zero, 4, 3).uniform
    assert bool((coins < 1).all())


def test_a_tree_beyond_the_spacing_of_the_counters_is_refused():
    with pytest.raises(ValueError, match="num_nodes must be at most 1024, got 1025"):
        draft_noise(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long), 1025, 2)


@pytest.mark.parametrize("name", ["block", "multi_draft"])
def test_texts_follow_the_law_with_counter_based_noise(name):
    """The three streams of a step are independent enough for the same chi-square as true random numbers."""
    target, drafter = toy_pair(seed=41, vocab_size=3)
    tree = CandidateTree.chain(2) if name == "block" else independent_chains(2, 1)
    seeds = torch.arange(100_000)

    def counted(step):
        sizes = (seeds, torch.full_like(seeds, step), tree.num_nodes, 3)
        return draft_noise(*sizes), verification_noise(*sizes)

    counts = sampled_law(
        rule_named(name),
        target,
        drafter,
        tree,
        3,
        num_rows=len(seeds),
        noise_source=counted,
    )
    assert p_value(counts, law_of(target, 3)) > FALSE_ALARM_RATE
