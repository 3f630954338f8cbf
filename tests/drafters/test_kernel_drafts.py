"""The operators that grow dynamic trees draft what the tensor operations draft."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from conftest import GROUPED, VOCAB_SIZE, needs_kernels
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from medusa import CandidateTree, HeadsConfig, MedusaHeads
from medusa.acceptance.sampling import UpcomingNoise
from medusa.base.causal_lm import lm_head
from medusa.decoding.adaptive import OPTIONAL_NODE_PROB
from medusa.drafters.dynamic import DynamicHeadsDrafter
from medusa.drafters.protocol import DraftContext, topology_violations
from medusa.engine.engine_state import apply_engine
from medusa.engine.optimized_heads import optimized_heads

BASE = LlamaForCausalLM(LlamaConfig(**{**GROUPED, "num_hidden_layers": 1})).eval()
SIZE = BASE.config.hidden_size

pytestmark = needs_kernels


def drafter(num_nodes, depth, suffix_length, token_map_size=None):
    torch.manual_seed(1)
    mapped = {"unembedding": "token_map", "token_map_size": token_map_size} if token_map_size else {}
    config = HeadsConfig(SIZE, VOCAB_SIZE, num_heads=3, reads_path=True, **mapped)
    heads = MedusaHeads(config, range(3, 3 + token_map_size) if token_map_size else None)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    embedding = lm_head(apply_engine(BASE, "packed"))
    broad, deep = range(1, num_nodes - depth), range(1, depth + 1)
    tree = CandidateTree.from_paths([*((rank,) for rank in broad), *((0,) * length for length in deep)])
    made = DynamicHeadsDrafter(optimized_heads(heads, embedding), embedding, tree).with_suffix(suffix_length)
    assert made.has_kernels
    return made


def context(lengths, is_sampled, drafter, num_different):
    generator = torch.Generator().manual_seed(sum(lengths))
    rows, longest = len(lengths), max(lengths)
    tokens = torch.randint(num_different, (rows, longest), generator=generator)
    given = DraftContext(
        root=tokens.gather(1, torch.tensor(lengths)[:, None] - 1)[:, 0],
        hidden=torch.randn(rows, SIZE, generator=generator),
        tokens=tokens,
        lengths=torch.tensor(lengths),
        cache=None,
        noise=None,
    )
    if not is_sampled:
        return given
    seeds = torch.randint(2**62, (rows,), generator=generator)
    drawn = UpcomingNoise(seeds, given.lengths, VOCAB_SIZE)
    return replace(given, noise=drawn, temperature=torch.linspace(0, 1.5, rows)[:, None, None])


def both(made, given):
    with torch.no_grad():
        mine = made.draft(given)
        made.has_kernels = False
        theirs = made.draft(given)
        made.has_kernels = True
    return mine, theirs


@given(
    size=st.sampled_from([(2, 1), (4, 2), (9, 3), (30, 3)]),
    suffix_length=st.sampled_from([0, 1, 3, 8]),
    token_map_size=st.sampled_from([None, 30]),
    lengths=st.lists(st.sampled_from([1, 2, 3, 17, 60]), min_size=1, max_size=3),
    is_sampled=st.booleans(),
    num_different=st.sampled_from([2, 5, 50]),
    optional_nodes=st.sampled_from([0, 12]),
    min_accept_prob=st.sampled_from([0.0, 0.02, 0.2]),
)
@settings(max_examples=150, deadline=None)
def test_both_draft_the_same(
    size, suffix_length, token_map_size, lengths, is_sampled, num_different, optional_nodes, min_accept_prob
):
    made = drafter(*size, suffix_length, token_map_size).with_suffix(suffix_length, optional_nodes)
    given = replace(context(lengths, is_sampled, made, num_different), min_accept_prob=min_accept_prob)
    mine, theirs = both(made, given)
    is_likely = (theirs.path_logprob > math.log(OPTIONAL_NODE_PROB) - 1e-3).any(0)
    kept = max(theirs.tokens.shape[1] - theirs.num_optional_nodes, int(is_likely.sum()))
    mine, theirs = (
        replace(each.first(kept), path_logprob=each.path_logprob[:, :kept]) for each in (mine, theirs)
    )  # the others are not verified
    torch.testing.assert_close(mine.path_logprob, theirs.path_logprob, atol=1e-3, rtol=1e-3)
    is_clear = (theirs.path_logprob.diff(dim=1).abs() > 1e-3).all()  # equals may change places
    if is_clear:
        assert torch.equal(mine.tokens, theirs.tokens)
        for name in ("parents", "depths", "ancestors", "lineage"):
            assert torch.equal(getattr(mine.topology, name), getattr(theirs.topology, name)), name


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("suffix_length", [0, 8])
def test_nodes_that_are_likely_enough_are_found_without_looking_for_others(has_kernels, suffix_length):
    made, levels, num_levels = drafter(30, 3, suffix_length), [], []
    made.has_kernels = has_kernels
    logits_of = made.logits_after_beam

    def counted(context, paths, parents):
        levels.append(paths.shape[1])
        return logits_of(context, paths, parents)

    made.logits_after_beam = counted
    for length in range(20, 40):
        given = context([length], False, made, 50)
        whole = made.draft(given)
        every = sum(levels)
        levels.clear()
        for min_accept_prob in (0.02, 0.1, 0.5):
            likely = made.draft(replace(given, min_accept_prob=min_accept_prob))
            num_levels.append(len(levels))
            assert sum(levels) <= every - (every > 1 and min_accept_prob == 0.5)
            levels.clear()
            assert likely.tokens.shape == whole.tokens.shape
            num_likely = int((whole.path_logprob.exp() >= min_accept_prob).sum())
            assert torch.equal(likely.tokens[:, :num_likely], whole.tokens[:, :num_likely])
            parents = likely.topology.parents[:, :num_likely], whole.topology.parents[:, :num_likely]
            assert torch.equal(*parents)
    assert num_levels[0::3] != num_levels[2::3], "levels below what is likely enough are not looked at"


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_heads_that_are_no_numbers_still_draft_a_tree(broken):
    made = drafter(9, 3, 8)
    given = context([17, 9], False, made, 5)
    given.hidden[0, 3] = broken
    draft = made.draft(given)
    assert (draft.tokens >= 0).all() and (draft.tokens < VOCAB_SIZE).all()
    assert not draft.path_logprob.isnan().any() and (draft.path_logprob.diff(dim=1) <= 0).all()
    alone, _ = both(made, context([17, 9], False, made, 5))
    assert torch.equal(draft.tokens[1], alone.tokens[1]), "it spoils no other row"


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("suffix_length", [2, 16])
def test_nodes_below_levels_that_were_left_out_are_as_deep_as_they_stand(has_kernels, suffix_length):
    """Three tokens stood there before; what followed is likelier than all else, and not likely enough."""
    made = drafter(9, 3, suffix_length)
    made.has_kernels = has_kernels
    made.logits_after_beam = lambda context, paths, parents: torch.zeros(1, paths.shape[1], VOCAB_SIZE)
    row = torch.tensor([[*range(10, 50), 10, 11, 12]])
    given = replace(context([43], False, made, 7), tokens=row, root=row[:, -1], min_accept_prob=0.7)
    draft = made.draft(given)
    assert not topology_violations(draft.topology).any()
    assert int(draft.topology.depths.max()) == min(suffix_length, 8)
