"""What holds for every rule: p = q, temperature 0, exact tokens, batches, refusals, discovery."""

from dataclasses import replace

import pytest
import torch
from verification_laws import toy_table

from medusa.acceptance.protocol import (
    DraftKind,
    SampledDraft,
    VerificationNoise,
    draw_tree,
    independent_chains,
)
from medusa.acceptance.rules import (
    RULES,
    TargetModification,
    division_factor,
    modified_target,
    path_log_ratio,
    rule_named,
)
from medusa.trees.candidate_tree import CandidateTree, TreeTopology


def tree_for(rule):
    return CandidateTree.chain(3) if rule.only_chains else independent_chains(3, 3)


def target_and_proposal(shape, seed, spread=1.0, zeros=0.0, same=False, sharp=False):
    """Fresh p and q for every node; ``sharp``: q is a point mass, ``same``: p = q."""
    q = toy_table(seed, *shape, spread=spread, zeros=zeros)
    if sharp:
        q = torch.nn.functional.one_hot(q.argmax(-1), shape[-1]).double()
    return (q if same else toy_table(seed + 1, *shape, spread=spread, zeros=zeros)), q


def random_step(rule, num_rows, vocab_size, seed=0, dtype=torch.float64, **distributions):
    """A draft for ``rule`` from fresh distributions, and noise for its verification."""
    tree, topology = tree_for(rule), tree_for(rule).topology()
    shape = (num_rows, tree.num_nodes, vocab_size)
    p, q = (side.to(dtype) for side in target_and_proposal(shape, seed, **distributions))
    if rule.draft_kinds[0] is DraftKind.WITH_REPLACEMENT:  # chains that agree share their distributions
        p, q = p[:, topology.depths[0]], q[:, topology.depths[0]]
    generator = torch.Generator().manual_seed(seed)
    gumbel = -torch.empty(shape, dtype=dtype).exponential_(generator=generator).log()
    root = torch.zeros(num_rows, dtype=torch.long)
    tokens, _ = draw_tree(tree, root, lambda tokens, nodes: q[:, nodes], gumbel)
    uniform = torch.rand(shape[:2], generator=generator, dtype=dtype)
    last = -torch.empty(num_rows, vocab_size, dtype=dtype).exponential_(generator=generator).log()
    return SampledDraft(tokens, topology, p, q), VerificationNoise(uniform, last)


def rows_of(draft, noise, index):
    return (
        replace(
            draft, tokens=draft.tokens[index], target=draft.target[index], proposal=draft.proposal[index]
        ),
        VerificationNoise(noise.uniform[index], noise.gumbel[index]),
    )


every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_drafter_that_equals_the_target_has_everything_accepted(rule, dtype):
    draft, noise = random_step(rule, 5000, 7, dtype=dtype, same=True)
    verdict = rule.verify(draft, noise)
    assert bool((verdict.num_accepted == draft.topology.max_depth).all())


def test_spectr_divides_by_1_where_drafter_and_target_agree():
    p = toy_table(0, 1000, 50).float()
    assert bool((division_factor(p, p, torch.full((1000,), 4)) == 1).all())


@every_rule
def test_a_drafter_that_never_meets_the_target_has_nothing_accepted(rule):
    draft, noise = random_step(rule, 500, 8)
    mine = torch.arange(8) < 4
    p = draft.target * mine
    draft = replace(draft, target=p / p.sum(-1, keepdim=True), proposal=draft.proposal * ~mine)
    draft = replace(draft, proposal=draft.proposal / draft.proposal.sum(-1, keepdim=True))
    draft = replace(draft, tokens=draft.tokens % 4 + 4)
    verdict = rule.verify(draft, noise)
    assert bool((verdict.num_accepted == 0).all())
    torch.testing.assert_close(verdict.residual, draft.target[:, 0])


# Distributions of one row, tokens 0, 1, 2; the draft is 1, 2, 0 after root 0.
P = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.2, 0.2], [0.1, 0.1, 0.8], [0.3, 0.3, 0.4]], dtype=torch.float64)
Q = torch.tensor([[0.1, 0.8, 0.1], [0.2, 0.3, 0.5], [0.5, 0.3, 0.2], [1.0, 0.0, 0.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "coins", "num_accepted", "next_token"),
    [
        # token: p/q = 5/8, 2/5, 1/5
        ("token", [0.62, 0.39, 0.19], 3, 2),  # all stay, then the likeliest of P[3]
        ("token", [0.62, 0.39, 0.21], 2, 2),  # P[2] - Q[2] is positive at token 2 alone
        ("token", [0.62, 0.41, 0.00], 1, 0),  # P[1] - Q[1] is positive at token 0 alone
        ("token", [0.63, 0.00, 0.00], 0, 2),  # P[0] - Q[0] = (0.1, -, 0.2)
        # block: a = 5/8, 1/4, 1/20; R_1 = 0.175, R_2 = 0; h = 7/22, 0, 1/20
        ("block", [0.31, 0.00, 0.04], 3, 2),
        ("block", [0.31, 0.00, 0.06], 1, 0),
        ("block", [0.32, 0.00, 0.06], 0, 2),
        # greedy block: the same here, no product exceeds 1
        ("greedy_block", [0.31, 0.00, 0.06], 1, 0),
        ("greedy_block", [0.32, 0.00, 0.04], 3, 2),
    ],
)
def test_a_chain_worked_out_by_hand(name, coins, num_accepted, next_token):
    draft = SampledDraft(torch.tensor([[0, 1, 2, 0]]), CandidateTree.chain(3).topology(), P[None], Q[None])
    noise = VerificationNoise(
        torch.tensor([[0.0, *coins]], dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64)
    )
    verdict = rule_named(name).verify(draft, noise)
    assert (verdict.num_accepted.item(), verdict.next_token.item()) == (num_accepted, next_token)


@pytest.mark.parametrize(
    ("name", "coins", "num_accepted", "next_token"),
    [
        # token 1 after p/q = 5/8; then p = (1/3, 0, 2/3), q = (1/2, 0, 1/2): token 0 with 2/3; then (0, 0, 1)
        # independent: token 0 is then accepted with (1/3) / (1/10), always
        ("multi_draft", [0.63, 0.99], 1, 0),
    ],
)
def test_two_drafts_of_one_token_worked_out_by_hand(name, coins, num_accepted, next_token):
    tree = CandidateTree.from_paths([(0,), (1,)])
    after = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64).expand(2, 3)
    draft = SampledDraft(
        torch.tensor([[2, 1, 0]]), tree.topology(), torch.cat([P[:1], after])[None], Q[None, :3]
    )
    noise = VerificationNoise(
        torch.tensor([[0.0, *coins]], dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64)
    )
    verdict = rule_named(name).verify(draft, noise)
    assert (verdict.num_accepted.item(), verdict.next_token.item()) == (num_accepted, next_token)
    second_was_tried = coins[0] > 0.625
    assert bool(verdict.acceptance[0, 2].isnan()) is not second_was_tried


@every_rule
@pytest.mark.parametrize("sharp_drafter", [False, True])
def test_temperature_0_walks_the_target(rule, sharp_drafter):
    draft, noise = random_step(rule, 2000, 3, dtype=torch.float32, sharp=sharp_drafter)
    one_hot = torch.nn.functional.one_hot(draft.target.argmax(-1), 3).float()
    draft = replace(draft, target=one_hot)
    verdict = rule.verify(draft, noise)

    choice, parents = draft.target.argmax(-1), draft.topology.parents[0].tolist()
    for row in range(200):
        reachable = {0}
        for node in range(1, len(parents)):
            drawn = draft.proposal[row, parents[node], draft.tokens[row, node]] > 0
            if drawn and parents[node] in reachable and draft.tokens[row, node] == choice[row, parents[node]]:
                reachable.add(node)
        deepest = max(int(draft.topology.depths[0, node]) for node in reachable)
        assert verdict.num_accepted[row] == deepest
        assert int(verdict.best[row]) in reachable
        assert verdict.next_token[row] == choice[row, verdict.best[row]]


@every_rule
@pytest.mark.parametrize(("spread", "zeros"), [(1.0, 0.0), (8.0, 0.5), (30.0, 0.9)])
def test_verdicts_are_finite_and_possible_under_the_target_in_float32(rule, spread, zeros):
    draft, noise = random_step(rule, 2000, 40, seed=5, dtype=torch.float32, spread=spread, zeros=zeros)
    verdict = rule.verify(draft, noise)
    assert bool((verdict.acceptance[:, 0] == 1).all())
    looked_at = verdict.acceptance[~verdict.acceptance.isnan()]
    assert bool(((looked_at >= 0) & (looked_at <= 1)).all())
    torch.testing.assert_close(verdict.residual.sum(-1), torch.ones(2000), atol=1e-5, rtol=0)
    rows = torch.arange(2000)
    assert bool((draft.target[rows, verdict.best, verdict.next_token] > 0).all())
    lineage = draft.topology.lineage[0, verdict.best]  # (B, L)
    for d in range(1, lineage.shape[1]):
        on_path = draft.target[rows, lineage[:, d - 1], draft.tokens[rows, lineage[:, d]]] > 0
        assert bool((on_path | (d > verdict.num_accepted)).all())


@every_rule
def test_a_row_of_a_batch_gets_the_verdict_it_gets_alone(rule):
    draft, noise = random_step(rule, 20, 5)
    together = rule.verify(draft, noise)
    for row in range(20):
        index = torch.tensor([row])
        alone = rule.verify(*rows_of(draft, noise, index))
        assert (alone.best, alone.next_token) == (together.best[row], together.next_token[row])
        torch.testing.assert_close(alone.residual[0], together.residual[row])


@pytest.mark.parametrize("name", ["multi_draft", "spectr"])
def test_every_row_may_have_a_tree_of_its_own(name):
    rule = RULES[name]
    draft, noise = random_step(rule, 64, 5)
    size = draft.tokens.shape[1]
    chain = TreeTopology.from_parents(
        (torch.arange(size)[None] - 1).clamp(min=0), torch.arange(size)[None], max_depth=size - 1
    )
    deep = TreeTopology.from_parents(draft.topology.parents, draft.topology.depths, max_depth=size - 1)
    mixed = TreeTopology(
        *(
            torch.cat([getattr(deep, part), getattr(chain, part)]).repeat(32, *[1] * (dims - 1))
            for part, dims in (("parents", 2), ("depths", 2), ("ancestors", 3), ("lineage", 3))
        )
    )
    verdict = rule.verify(replace(draft, topology=mixed), noise)
    for first, topology in ((0, draft.topology), (1, chain)):
        index = torch.arange(first, 64, 2)
        part, part_noise = rows_of(draft, noise, index)
        alone = rule.verify(replace(part, topology=topology), part_noise)
        assert torch.equal(verdict.best[index], alone.best)
        assert torch.equal(verdict.next_token[index], alone.next_token)


@pytest.mark.parametrize(
    ("tree_rule", "chain_rule"),
    [
        ("multi_draft", "token"),
        ("spectr", "token"),
    ],
)
def test_on_a_chain_a_tree_rule_is_the_chain_rule_it_extends(tree_rule, chain_rule):
    draft, noise = random_step(RULES["token"], 5000, 4, zeros=0.2)
    by_tree, by_chain = (rule_named(name).verify(draft, noise) for name in (tree_rule, chain_rule))
    assert torch.equal(by_tree.best, by_chain.best)
    assert torch.equal(by_tree.next_token, by_chain.next_token)
    torch.testing.assert_close(by_tree.residual, by_chain.residual)


@pytest.mark.parametrize("name", ["token", "block", "multi_draft", "spectr"])
def test_a_row_of_zeros_in_q_ends_the_draft_there(name):
    draft, noise = random_step(RULES["token"], 5000, 4)
    proposal = draft.proposal.clone()
    proposal[:, 2] = 0
    cut = rule_named(name).verify(replace(draft, proposal=proposal), noise)
    short = SampledDraft(
        draft.tokens[:, :3], CandidateTree.chain(2).topology(), draft.target[:, :3], draft.proposal[:, :3]
    )
    expected = rule_named(name).verify(short, VerificationNoise(noise.uniform[:, :3], noise.gumbel))
    assert torch.equal(cut.best, expected.best)
    assert torch.equal(cut.next_token, expected.next_token)


@pytest.mark.parametrize("name", ["multi_draft", "spectr"])
def test_chains_that_agree_go_on_together(name):
    """Two chains share their first token; where the first one's second token misses, the other's is tried."""
    tree = independent_chains(2, 2)  # nodes: root, first tokens of both chains, second tokens of both
    p = torch.tensor([[0.0, 1, 0], [0, 0, 1], [0, 0, 1], [1, 0, 0], [1, 0, 0]], dtype=torch.float64)[None]
    q = torch.full((1, 5, 3), 1 / 3, dtype=torch.float64)
    draft = SampledDraft(torch.tensor([[0, 1, 1, 0, 2]]), tree.topology(), p, q)
    noise = VerificationNoise(
        torch.full((1, 5), 0.1, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64)
    )
    verdict = rule_named(name).verify(draft, noise)
    assert (verdict.best.item(), verdict.num_accepted.item(), verdict.next_token.item()) == (4, 2, 0)


@every_rule
def test_nothing_is_read_back_to_the_host(rule):
    """Tensors on the meta device have no values: reading one raises."""
    draft, noise = random_step(rule, 4, 5)
    topology = TreeTopology(
        *(getattr(draft.topology, part).to("meta") for part in ("parents", "depths", "ancestors", "lineage")),
        is_chain=draft.topology.is_chain,
    )
    draft = SampledDraft(
        draft.tokens.to("meta"), topology, draft.target.to("meta"), draft.proposal.to("meta")
    )
    noise = VerificationNoise(noise.uniform.to("meta"), noise.gumbel.to("meta"))
    verdict = rule.verify(draft, noise)
    verdict = rule.verify(draft, noise, verdict.state)
    assert verdict.best.shape == verdict.next_token.shape == verdict.num_accepted.shape == (4,)


def test_the_state_of_a_batch_can_lose_rows():
    rule = RULES["greedy_block"]
    draft, noise = random_step(rule, 50, 3)
    state = rule.verify(draft, noise).state
    assert bool((state.remaining > 0).any())
    after, after_noise = random_step(rule, 50, 3, seed=9)
    index = torch.tensor([3, 40, 7])
    together = rule.verify(after, after_noise, state)
    alone = rule.verify(*rows_of(after, after_noise, index), state.rows(index))
    assert torch.equal(together.best[index], alone.best)
    torch.testing.assert_close(together.residual[index], alone.residual)


def test_the_state_of_greedy_block_stays_free_of_nan_where_texts_are_impossible():
    """Half of all tokens cannot occur, so ratios of 0 and infinity meet along the drafts."""
    rule, state = RULES["greedy_block"], None
    for seed in range(6):
        draft, noise = random_step(rule, 2000, 4, seed=seed, zeros=0.5)
        verdict = rule.verify(draft, noise, state)
        state = verdict.state
        assert not bool(verdict.acceptance.isnan().any())
        assert not bool(state.log_ratio.isnan().any())
        assert bool((state.log_ratio[state.remaining == 0] == 0).all())
    assert bool((state.log_ratio == torch.inf).any())


def test_a_token_the_target_cannot_write_decides_over_text_the_drafter_cannot_write():
    p = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    draft = SampledDraft(
        torch.tensor([[0, 0]]), CandidateTree.chain(1).topology(), p, torch.full_like(p, 0.5)
    )
    log_ratio = path_log_ratio(draft, p, draft.proposal, start=torch.tensor([torch.inf]))
    assert log_ratio.tolist() == [[torch.inf, -torch.inf]]


def test_a_changed_target_without_mass_falls_back_to_the_target():
    draft, _ = random_step(RULES["greedy_block"], 20, 3, same=True)
    state = TargetModification(torch.zeros(20, 2, dtype=torch.float64), torch.ones(20, 2, dtype=torch.long))
    target, _ = modified_target(draft, draft.proposal, state)
    assert torch.equal(target, draft.target)


def test_greedy_block_refuses_another_draft_length_while_its_state_is_alive():
    rule = RULES["greedy_block"]
    draft, noise = random_step(rule, 2, 3)
    state = rule.verify(draft, noise).state
    short = SampledDraft(
        draft.tokens[:, :3], CandidateTree.chain(2).topology(), draft.target[:, :3], draft.proposal[:, :3]
    )
    with pytest.raises(ValueError, match="same draft length at every step: the state is of length 3, this"):
        rule.verify(short, VerificationNoise(noise.uniform[:, :3], noise.gumbel), state)


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        ("token", DraftKind.RANKED, "acceptance='token' cannot verify ranked .* acceptance='exact'"),
        ("block", DraftKind.WITH_REPLACEMENT, "walks one path; draft a chain, or use a tree rule"),
    ],
)
def test_an_impossible_pair_is_refused_with_the_reason(name, kind, reason):
    with pytest.raises(ValueError, match=reason):
        rule_named(name).require(kind)


@every_rule
def test_a_rule_takes_every_kind_it_names_and_a_chain(rule):
    for kind in (*rule.draft_kinds, DraftKind.CHAIN):
        rule.require(kind)


@pytest.mark.parametrize("name", ["token", "block", "greedy_block"])
def test_a_chain_rule_refuses_a_tree(name):
    draft, noise = random_step(RULES["multi_draft"], 2, 5)
    with pytest.raises(ValueError, match=f"acceptance='{name}' walks one chain, got a tree of 10 nodes"):
        rule_named(name).verify(draft, noise)


def test_tensors_that_do_not_fit_are_named():
    rule = RULES["block"]
    draft, noise = random_step(rule, 2, 5)
    wrong = [
        (replace(draft, proposal=draft.proposal[:, 1:]), noise, r"proposal .* \(2, 4, 5\).*got \(2, 3, 5\)"),
        (draft, replace(noise, uniform=noise.uniform[:, 1:]), r"uniform must be \(2, 4\)"),
        (draft, replace(noise, gumbel=noise.gumbel[:, 1:]), r"gumbel must be \(2, 5\)"),
        (replace(draft, target=draft.target.bfloat16()), noise, "target must be float32 or float64"),
        (replace(draft, proposal=draft.proposal.float()), noise, "proposal must be.*the same as target"),
        (replace(draft, topology=CandidateTree.chain(2).topology()), noise, "topology .* 1 or 2 trees of 4"),
    ]
    for bad_draft, bad_noise, message in wrong:
        with pytest.raises(ValueError, match=message):
            rule.verify(bad_draft, bad_noise)


def test_an_unknown_rule_is_named_beside_those_there_are():
    with pytest.raises(ValueError, match=r"acceptance='blok' is not a rule.*there are token, block"):
        rule_named("blok")
