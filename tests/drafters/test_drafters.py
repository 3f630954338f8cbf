"""Every drafter is exact under the default rule; every rule for sampled drafts keeps the law, in the loop."""

from __future__ import annotations

import copy
import functools
import math
from functools import partial

import pytest
import torch
from conftest import VOCAB_SIZE, assert_exact, left_padded, random_prompts, tiny_model
from refusals import refusals
from scipy.stats import chi2
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from medusa import CandidateTree, HeadsConfig, MedusaHeads, MedusaModel
from medusa.acceptance.rules import RULES
from medusa.acceptance.sampling import UpcomingNoise
from medusa.base.cache import TreeCache
from medusa.base.passes import hidden_states
from medusa.drafters.autoregressive import AutoregressiveDrafter
from medusa.drafters.draft_model import (
    DraftModelDrafter,
    LowPrecisionDrafter,
    SelfDrafter,
    check_draft_vocabulary,
    check_same_tokens,
    early_exit,
    low_precision,
)
from medusa.drafters.dynamic import DynamicAutoregressiveDrafter, DynamicHeadsDrafter
from medusa.drafters.heads import HeadsDrafter
from medusa.drafters.protocol import DraftContext
from medusa.drafters.suffix import MATCH_WEIGHTS, SuffixDrafter, longest_match
from medusa.drafters.union import UnionDrafter
from medusa.heads.eagle3 import Eagle3Config, Eagle3Head

PLAIN = CandidateTree.chain(0)
BUSHY = CandidateTree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0)])
CHAIN = CandidateTree.chain(3)


def noisy_copy(base, scale: float):
    """A draft model that agrees with ``base`` often, not always."""
    clone = copy.deepcopy(base)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in clone.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * scale * parameter.abs().mean())
    return clone


def eagle3_drafter(base, tree=BUSHY, token_map_size=None, **options):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = Eagle3Config.of_base(base, fused_layers=(1, 2), token_map_size=token_map_size, **options)
        head = Eagle3Head(config, torch.randperm(VOCAB_SIZE)[:token_map_size] if token_map_size else None)
    return AutoregressiveDrafter(head.eval(), base, tree)


def heads_drafter(base, tree=BUSHY):
    heads = MedusaHeads(HeadsConfig(base.config.hidden_size, VOCAB_SIZE, num_heads=3))
    return HeadsDrafter(heads, base.get_output_embeddings(), tree)


def path_heads_drafter(base, tree=BUSHY):
    config = HeadsConfig(
        base.config.hidden_size,
        VOCAB_SIZE,
        num_heads=3,
        unembedding="token_map",
        token_map_size=40,
        reads_path=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(4)
        heads = MedusaHeads(config, torch.randperm(VOCAB_SIZE)[:40])
        for parameter in heads.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
    return HeadsDrafter(heads, base.get_output_embeddings(), tree)


def fusing_heads_drafter(base, *layers: int):
    heads = MedusaHeads(HeadsConfig(32, VOCAB_SIZE, num_heads=3, fused_layers=layers))
    with torch.random.fork_rng():
        torch.manual_seed(6)
        torch.nn.init.normal_(heads.fusion.weight)
    return HeadsDrafter(heads, base.get_output_embeddings(), BUSHY)


def dynamic(drafter):
    if isinstance(drafter, AutoregressiveDrafter):
        return DynamicAutoregressiveDrafter(drafter.head, drafter.base, drafter.tree)
    return DynamicHeadsDrafter(drafter.heads, drafter.lm_head, drafter.tree)


DRAFTERS = {
    "heads": heads_drafter,
    "path-reading heads": path_heads_drafter,
    "dynamic heads": lambda base: dynamic(heads_drafter(base)),
    "dynamic path-reading heads": lambda base: dynamic(path_heads_drafter(base)),
    "dynamic heads and suffix": lambda base: dynamic(heads_drafter(base)).with_suffix(8),
    "dynamic path-reading heads and suffix": lambda base: dynamic(path_heads_drafter(base)).with_suffix(2),
    "draft-model": lambda base: DraftModelDrafter(noisy_copy(base, 0.05), VOCAB_SIZE, BUSHY),
    "early-exit": lambda base: SelfDrafter(early_exit(base, 1), BUSHY),
    "low-precision": lambda base: LowPrecisionDrafter(low_precision(base), BUSHY),
    "suffix": lambda base: SuffixDrafter(length=5, min_match=1),
    "eagle3": eagle3_drafter,
    "eagle3 with a token map": lambda base: eagle3_drafter(base, token_map_size=40),
    "eagle3 of 3.1": lambda base: eagle3_drafter(base, fc_norm=True, norm_output=True, own_lm_head=True),
    "dynamic eagle3": lambda base: dynamic(eagle3_drafter(base)),
    "dynamic eagle3 and suffix": lambda base: dynamic(eagle3_drafter(base, token_map_size=40)).with_suffix(8),
    "union": lambda base: UnionDrafter([heads_drafter(base), SuffixDrafter(4, 1), SuffixDrafter(2, 2)]),
    "union of readers": lambda base: UnionDrafter(
        [eagle3_drafter(base), fusing_heads_drafter(base, 1, 2), fusing_heads_drafter(base, 2)]
    ),
}


BASES = ("llama", "qwen3", "gemma3")
ON_THE_BASES_LAYERS = ("draft-model", "early-exit", "low-precision", "eagle3", "union of readers")
PAIRS = [(name, BASES[index % 3]) for index, name in enumerate(DRAFTERS)]
PAIRS += [(name, each) for name in ON_THE_BASES_LAYERS for each in BASES if (name, each) not in PAIRS]


CALLS = [
    ([9], {"do_sample": False}),
    ([37, 1, 20], {"do_sample": False}),
    ([37, 1, 20], {"do_sample": True, "temperature": 0.8, "seed": 3, "top_p": 0.95}),
    ([37, 1, 20], {"do_sample": True, "temperature": 1.2, "seed": 4, "repetition_penalty": 1.2}),
]
"""Lengths of prompts, and options."""


def answered(architecture: str, call: int, **drafter) -> list[list[int]]:
    """What the base writes in one of :data:`CALLS`."""
    lengths, options = CALLS[call]
    batch = left_padded(random_prompts(len(lengths), max(lengths)), lengths)
    model = MedusaModel(tiny_model(architecture))
    return model.generate(**batch, **options, max_new_tokens=18, **drafter).tolist()


plain_answer = functools.cache(answered)


@pytest.mark.parametrize(("name", "architecture"), PAIRS)
def test_a_drafter_gives_plain_output_greedy_and_sampled(name, architecture):
    drafter = DRAFTERS[name](tiny_model(architecture))
    for call in range(len(CALLS)):
        assert answered(architecture, call, drafter=drafter) == plain_answer(architecture, call)


@torch.no_grad()
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("make", [heads_drafter, path_heads_drafter], ids=["heads", "path-reading heads"])
@pytest.mark.parametrize("suffix_length", [0, 2, 5])
def test_a_dynamic_tree_holds_the_paths_that_are_likeliest(make, suffix_length, sampled, monkeypatch):
    """Against all paths written out; with so small a vocabulary no beam loses one.

    One row has no match, one a match of one token, and one a match of three.
    """
    base, num_nodes = tiny_model("llama"), 24
    sized = CandidateTree.from_paths([*((rank,) for rank in range(num_nodes - 3)), (0, 0), (0, 0, 0)])
    monkeypatch.setattr("medusa.drafters.dynamic.MIN_BEAM", VOCAB_SIZE)
    monkeypatch.setattr("medusa.drafters.dynamic.MAX_BEAM", VOCAB_SIZE)
    drafter = dynamic(make(base, sized)).with_suffix(suffix_length)
    torch.manual_seed(8)
    for parameter in drafter.heads.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    known = range(40) if drafter.token_map is None else drafter.token_map.tolist()
    unknown = next(token for token in range(VOCAB_SIZE) if token not in (3, 4, 5, *known))
    rows = [[5, 6, 7, 8, 9], [5, 11, 6, 7, 8, 11], [3, 4, 5, 6, unknown, 8, 9, 3, 4, 5]]
    tokens = torch.tensor([[*row, *[5] * (12 - len(row))] for row in rows])
    lengths, root = torch.tensor([len(row) for row in rows]), torch.tensor([row[-1] for row in rows])
    noise = UpcomingNoise(torch.arange(3), lengths, VOCAB_SIZE) if sampled else None
    likely = base.get_output_embeddings().weight[[6, known[0]]]  # the match's token, and the first column's
    hidden = torch.randn(3, 32) + 3 * (likely / likely.norm(dim=1, keepdim=True).square()).sum(0)
    context = DraftContext(root, hidden, tokens, lengths, TreeCache(3, 1, "cpu"), noise, 0.7)
    draft = drafter.draft(context)
    assert draft.tokens.shape == (3, num_nodes)
    topology = draft.topology
    for row in range(3):
        found = {}
        for node in range(1, num_nodes):
            lineage = topology.lineage[row, node, : topology.depths[row, node] + 1]
            assert topology.parents[row, node] == lineage[-2] < node
            found[tuple(draft.tokens[row, lineage].tolist())] = None
        assert len(found) == num_nodes - 1
        assert set(found) == likeliest_paths(drafter, context, row, num_nodes - 1)


def likeliest_paths(drafter, context, row: int, count: int) -> set[tuple[int, ...]]:
    """The ``count`` paths of the highest probability, searched best first."""
    root = int(context.root[row])
    frontier, taken = [(0.0, (root,))], []
    while len(taken) <= count:
        frontier.sort()
        cost, path = frontier.pop(0)
        taken.append(path)
        if len(path) <= drafter.max_depth:
            for token, log_q in log_probabilities_after(drafter, context, row, path).items():
                frontier.append((cost - log_q, (*path, token)))
    return set(taken[1:])


def log_probabilities_after(drafter, context, row: int, path: tuple[int, ...]) -> dict[int, float]:
    """Of each token after ``path``: as the heads have it, mixed with the match where the path follows it."""
    depth = len(path)
    match = longest_match(context.tokens[row : row + 1], context.lengths[row : row + 1], 5)
    expected, chance = match.continuation[0].tolist(), 0.0
    if depth <= drafter.suffix_length and path[1:] == tuple(expected[: depth - 1]) and match.num_matched > 0:
        chance = MATCH_WEIGHTS[int(match.num_matched) + depth - 1]
    if depth > drafter.tree.depth:
        return {expected[depth - 1]: math.log(chance)} if chance else {}
    logits = drafter.heads.logits_of(depth - 1, context.hidden[row], drafter.lm_head, torch.tensor(path))
    is_sampled = context.noise is not None
    of_heads = (logits * (drafter.beta / context.temperature if is_sampled else 1)).softmax(-1)
    mixed = torch.zeros(VOCAB_SIZE)
    mixed[slice(None) if drafter.token_map is None else drafter.token_map] = of_heads * (1 - chance)
    if chance:
        mixed[expected[depth - 1]] += chance
    scores = mixed.log()
    scores = (scores + context.noise.until(depth)[row, depth - 1]).log_softmax(-1) if is_sampled else scores
    return {token: value for token, value in enumerate(scores.tolist()) if value > -math.inf}


def test_dynamic_heads_without_a_suffix_match_look_for_none(monkeypatch):
    base = tiny_model("llama")
    prompt = random_prompts(1, 9)
    options = {"max_new_tokens": 8, "do_sample": False}
    drafter = dynamic(heads_drafter(base))
    expected = MedusaModel(base).generate(prompt, **options)
    monkeypatch.setattr("medusa.drafters.dynamic.continuations", lambda *given: pytest.fail("it has looked"))
    assert torch.equal(MedusaModel(base).generate(prompt, **options, drafter=drafter), expected)


def test_in_a_union_every_drafter_reads_its_own_layers():
    base, batch = tiny_model("llama"), left_padded(random_prompts(2, 20), [20, 7])
    ways = {
        "heads": lambda: fusing_heads_drafter(base, 2),
        "heads of two": lambda: fusing_heads_drafter(base, 1, 2),
        "eagle3": lambda: eagle3_drafter(base),
    }
    seen = {name: [] for name in ways}

    def watched(name, drafter):
        draft = drafter.draft
        drafter.draft = lambda context: seen[name].append(draft(context)) or seen[name][-1]
        return drafter

    alone = {}
    for name, make in ways.items():
        seen[name].clear()
        answer = MedusaModel(base).generate(
            **batch, max_new_tokens=2, do_sample=False, drafter=watched(name, make())
        )
        alone[name] = seen[name][0].tokens.tolist()
        seen[name].clear()
    union = UnionDrafter([watched(name, make()) for name, make in ways.items()])
    together = MedusaModel(base).generate(**batch, max_new_tokens=2, do_sample=False, drafter=union)
    assert together.tolist() == answer.tolist()
    assert {name: drafts[0].tokens.tolist() for name, drafts in seen.items()} == alone
    assert len({str(tokens) for tokens in alone.values()}) == 3


def test_a_perfect_draft_model_is_always_accepted():
    base = tiny_model("qwen3")
    drafter = DraftModelDrafter(base, VOCAB_SIZE, CHAIN)
    for options in ({"do_sample": False}, {"do_sample": True, "temperature": 0.9, "seed": 0}):
        out = MedusaModel(base).generate(
            **left_padded(random_prompts(3, 12), [12, 5, 8]),
            **options,
            max_new_tokens=21,
            drafter=drafter,
            return_dict_in_generate=True,
        )
        assert out.statistics.accepted_histogram == [0, 0, 0, 15]


class WatchedEagle3(AutoregressiveDrafter):
    """Checks each step's guesses against the head run over the whole sequence from scratch."""

    num_checked = 0

    def logits_after(self, context, tokens, nodes):
        logits = super().logits_after(context, tokens, nodes)
        if nodes.start == 0:
            embed = self.base.get_input_embeddings()
            for row, length in enumerate(context.lengths.tolist()):
                known = context.tokens[row : row + 1, : length - 1]
                features = self.head.fuse(hidden_states(self.base, known, layers=(1, 2)))
                fresh = self.head(features, embed(context.tokens[row : row + 1, 1:length])).states[:, -1]
                assert torch.allclose(logits[row], self.base.get_output_embeddings()(fresh), atol=1e-3)
                self.num_checked += 1
        return logits


def test_an_eagle3_head_drafts_from_the_bases_states_however_ragged_the_batch():
    base = tiny_model("llama")
    drafter = WatchedEagle3(eagle3_drafter(base).head, base, BUSHY)
    batch = left_padded(random_prompts(3, 12), [12, 3, 7])
    MedusaModel(base).generate(**batch, do_sample=False, max_new_tokens=9, drafter=drafter)
    assert drafter.num_checked >= 3 * 2


def test_an_often_right_draft_model_is_sometimes_accepted():
    base = tiny_model("llama")
    out = MedusaModel(base).generate(
        random_prompts(1, 12),
        do_sample=False,
        max_new_tokens=40,
        drafter=DRAFTERS["draft-model"](base),
        return_dict_in_generate=True,
    )
    assert out.statistics.accepted_histogram[0] > 0
    assert out.statistics.num_accepted > 0


def test_an_early_exit_leaves_frozen_weights_frozen_and_trained_ones_trained():
    base = copy.deepcopy(tiny_model("llama")).requires_grad_(False)
    base.lm_head.requires_grad_(True)
    before = {name: each.requires_grad for name, each in base.named_parameters()}
    early_exit(base, 1)
    assert {name: each.requires_grad for name, each in base.named_parameters()} == before


def test_an_early_exit_shares_the_weights_and_equals_the_truncated_model():
    base = tiny_model("gemma3")
    shallow = early_exit(base, 1)
    assert (
        shallow.model.layers[0].mlp.up_proj.weight.data_ptr()
        == base.model.layers[0].mlp.up_proj.weight.data_ptr()
    )
    ids = random_prompts(1, 9)
    with torch.no_grad():
        truncated = base.model.norm(base(ids, output_hidden_states=True).hidden_states[1])
        assert torch.allclose(hidden_states(shallow, ids), truncated, atol=1e-5)


def test_a_low_precision_copy_is_near_the_base_and_leaves_it_alone():
    base = tiny_model("llama")
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    ids = random_prompts(1, 20)
    with torch.no_grad():
        logits, cheap = base(ids).logits, low_precision(base)(ids).logits
    assert 0 < (logits - cheap).abs().mean() < 0.15 * logits.std()
    assert all(torch.equal(before[name], tensor) for name, tensor in base.state_dict().items())


SAMPLED = {
    "draft-model": lambda base, tree: DraftModelDrafter(noisy_copy(base, 0.3), VOCAB_SIZE, tree),
    "early-exit": lambda base, tree: SelfDrafter(early_exit(base, 1), tree),
    "heads": heads_drafter,
    "path-reading heads": path_heads_drafter,
    "eagle3": eagle3_drafter,
    "eagle3 with a token map": lambda base, tree: eagle3_drafter(base, tree, token_map_size=40),
    "dynamic eagle3": lambda base, tree: dynamic(eagle3_drafter(base, tree)),
}


LAWS = [(rule, "draft-model") for rule in RULES]
LAWS += [("multi_draft", source) for source in SAMPLED if source != "draft-model"]
MORE_LAWS = [
    pytest.param(rule, source, marks=pytest.mark.slow)
    for rule in RULES
    for source in SAMPLED
    if (rule, source) not in LAWS
]


@pytest.mark.parametrize(("rule", "source"), [*LAWS, *MORE_LAWS])
def test_a_sampled_rule_keeps_the_exact_joint_law_through_the_loop(rule, source):
    """Chi-square over three tokens of 1,200 seeds; false alarm rate 1e-5 a case."""
    base = tiny_model("gpt-neox" if source != "early-exit" else "llama")
    tree = CHAIN if RULES[rule].only_chains else CandidateTree.from_paths([(0,), (1,), (0, 0), (1, 0)])
    drafter = SAMPLED[source](base, tree)
    if RULES[rule].context_only_proposal and not drafter.context_only:
        pytest.skip("refused, see test_impossible_pairs_are_refused_with_the_reason")
    check_the_law_of_three_tokens(base, drafter, rule, [TopKLogitsWarper(3)], {"top_k": 3}, min_cells=6)


@pytest.mark.parametrize("rule", ["token", "greedy_block", "multi_draft"])
def test_a_sampled_rule_keeps_the_law_where_every_flag_leaves_tokens_out(rule):
    base = tiny_model("gpt-neox")
    tree = CHAIN if RULES[rule].only_chains else CandidateTree.from_paths([(0,), (1,), (2,), (1, 0)])
    flags = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.2}
    warpers = [
        TemperatureLogitsWarper(0.7),
        TopKLogitsWarper(20),
        TopPLogitsWarper(0.8),
        MinPLogitsWarper(0.2),
    ]
    check_the_law_of_three_tokens(base, SAMPLED["draft-model"](base, tree), rule, warpers, flags, min_cells=3)


def check_the_law_of_three_tokens(base, drafter, rule, warpers, flags, min_cells) -> None:
    num_rows = 1200
    prompt = random_prompts(1, 4, seed=1)
    rows = (
        MedusaModel(base)
        .generate(
            prompt.expand(num_rows, -1),
            do_sample=True,
            **flags,
            max_new_tokens=4,
            seed=[7919 * row for row in range(num_rows)],
            acceptance=rule,
            drafter=drafter,
        )[:, 4:7]
        .tolist()
    )
    counts: dict[tuple[int, ...], int] = {}
    for triple in rows:
        counts[tuple(triple)] = counts.get(tuple(triple), 0) + 1
    statistic, cells = 0.0, 0
    for path, probability in joint_law(base, prompt, warpers, depth=3).items():
        observed, expected = counts.pop(path, 0), num_rows * probability
        if expected >= 5:
            statistic, cells = statistic + (observed - expected) ** 2 / expected, cells + 1
    assert not counts, f"tokens outside the support: {counts}"
    assert cells >= min_cells
    assert statistic < chi2.isf(1e-5, cells)


def joint_law(base, prompt, warpers, depth: int) -> dict[tuple[int, ...], float]:
    laws = {(): 1.0}
    for _ in range(depth):
        longer = {}
        for path, probability in laws.items():
            ids = torch.cat([prompt, torch.tensor([path], dtype=torch.long)], dim=1)
            with torch.no_grad():
                scores = base(ids).logits[:, -1]
            for warper in warpers:
                scores = warper(ids, scores)
            for token in scores[0].isfinite().nonzero()[:, 0].tolist():
                longer[(*path, token)] = probability * scores[0].softmax(0)[token].item()
        laws = longer
    return laws


def watched(drafter):
    """``drafter``, and a list that each of its drafts is added to."""
    drafts, draft = [], drafter.draft
    drafter.draft = lambda context: drafts.append(draft(context)) or drafts[-1]
    return drafter, drafts


@pytest.mark.parametrize("rule", ["token", "block", "multi_draft"])
@pytest.mark.parametrize("cut", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.3}, {"temperature": 0.3}])
def test_a_drafter_leaves_out_what_the_base_leaves_out_so_a_perfect_one_is_always_accepted(rule, cut):
    base = tiny_model("llama")
    drafter, drafts = watched(DraftModelDrafter(base, VOCAB_SIZE, CHAIN))
    out = MedusaModel(base).generate(
        random_prompts(2, 9),
        do_sample=True,
        **{"top_k": 0, **cut},
        max_new_tokens=21,
        seed=5,
        drafter=drafter,
        acceptance=rule,
        return_dict_in_generate=True,
    )
    assert out.statistics.accepted_histogram == [0, 0, 0, 10]
    for draft in drafts:
        proposal, drawn = draft.proposal[:, :-1], draft.tokens[:, 1:]
        assert (proposal.gather(2, drawn[..., None]) > 0).all()
        assert torch.allclose(proposal.sum(-1), torch.ones(proposal.shape[:2]))
        if cut == {"top_k": 2}:
            assert ((proposal > 0).sum(-1) == 2).all()


def test_a_token_map_is_cut_before_it_is_spread_over_the_vocabulary():
    base = tiny_model("llama")
    drafter, drafts = watched(path_heads_drafter(base, CHAIN))
    options = {"do_sample": True, "top_k": 3, "max_new_tokens": 6, "seed": 0, "acceptance": "token"}
    MedusaModel(base).generate(random_prompts(2, 9), **options, drafter=drafter)
    drafted = drafts[0].proposal[:, :-1] > 0
    assert (drafted.sum(-1) == 3).all()
    assert set(drafted.nonzero()[:, 2].tolist()) <= set(drafter.token_map.tolist())


def test_a_sampled_rule_decodes_greedily_as_plain_decoding_does():
    base = tiny_model("llama")
    how = {"drafter": DraftModelDrafter(noisy_copy(base, 0.05), VOCAB_SIZE, CHAIN), "acceptance": "block"}
    assert_exact(MedusaModel(base), random_prompts(2, 7), how, do_sample=False, max_new_tokens=15)


def verified(drafter, acceptance: str):
    """``drafter``, made of a base, under this rule."""

    def call():
        base = tiny_model("llama")
        options = {"do_sample": True, "max_new_tokens": 3, "acceptance": acceptance}
        MedusaModel(base).generate(random_prompts(1, 4), **options, drafter=drafter(base))

    return call


class Tokens(str):
    def get_vocab(self):
        return {token: index for index, token in enumerate(self)}


def test_a_draft_model_of_the_same_tokens_passes():
    check_same_tokens(Tokens("ab"), Tokens("ab"))


def int8_chain(base):
    return LowPrecisionDrafter(low_precision(base), CHAIN)


def wider():
    base = tiny_model("llama")
    return base, LlamaForCausalLM(LlamaConfig(**{**base.config.to_dict(), "vocab_size": 500}))


test_impossible_pairs_are_refused_with_the_reason = refusals(
    ("a match", verified(lambda _: SuffixDrafter(), "token"), "point mass, so a test on p/q is biased"),
    ("a tree", verified(heads_drafter, "block"), "the rule walks one path; draft a chain"),
    ("heads", verified(partial(heads_drafter, tree=CHAIN), "greedy_block"), "q depends only on the text"),
    ("int8", verified(int8_chain, "greedy_block"), "q depends only on the text"),
    ("no rule", verified(heads_drafter, "lucky"), "acceptance must be ... got 'lucky'"),
    ("other sizes", lambda: check_draft_vocabulary(*wider()), "draft model has vocab_size=500, the base 61"),
    ("other tokens", lambda: check_same_tokens(Tokens("abc"), Tokens("acb")), "2 differ (for example 'b')"),
    ("too deep", lambda: early_exit(tiny_model("gemma3"), 2), "num_layers ... must be in [1, 1], got 2"),
)


def test_a_draft_model_with_a_wider_or_narrower_embedding_still_drafts():
    base = tiny_model("llama")
    configs = ({**base.config.to_dict(), "vocab_size": size} for size in (VOCAB_SIZE - 3, VOCAB_SIZE + 3))
    drafts = [LlamaForCausalLM(LlamaConfig(**config)).eval() for config in configs]
    hows = [{"drafter": DraftModelDrafter(draft, VOCAB_SIZE, CHAIN)} for draft in drafts]
    assert_exact(MedusaModel(base), random_prompts(2, 6), *hows, do_sample=False, max_new_tokens=9)
