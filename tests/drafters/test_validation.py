"""No drafter changes the text: hostile guesses are rejected, and drafts that are none are refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import VOCAB_SIZE, left_padded, random_prompts, tiny_model
from static_oracle import StaticOracle

from medusa import CandidateTree, HeadsConfig, MedusaHeads, MedusaModel
from medusa.acceptance.rules import RULES
from medusa.drafters.dynamic import DynamicHeadsDrafter
from medusa.drafters.heads import HeadsDrafter
from medusa.drafters.levels import LevelDrafter
from medusa.drafters.protocol import Draft, DraftContext
from medusa.drafters.union import UnionDrafter
from medusa.trees.candidate_tree import TreeTopology

TREE = CandidateTree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
LENGTHS = [9, 4, 1]
NAN, INF, HUGE = float("nan"), float("inf"), 3e38
POISONS = {
    "all NaN": lambda logits: logits * NAN,
    "one NaN": lambda logits: logits.index_fill(-1, torch.tensor([7]), NAN),
    "one infinity": lambda logits: logits.index_fill(-1, torch.tensor([7]), INF),
    "all infinite": lambda logits: torch.full_like(logits, INF),
    "nothing possible": lambda logits: torch.full_like(logits, -INF),
    "huge": lambda logits: logits.sign() * HUGE,
    "NaN in every other row": lambda logits: (
        logits.where(torch.arange(len(logits)).view(-1, 1) % 2 == 0, NAN)
        if logits.dim() == 2
        else logits * NAN
    ),
}
SETTINGS = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "temperature": 1.2, "seed": 3}}


class PoisonedHeads(MedusaHeads):
    """Heads whose logits at the second depth are ``poison`` of what they were."""

    def __init__(self, poison):
        torch.manual_seed(0)
        super().__init__(HeadsConfig(32, VOCAB_SIZE, num_heads=3))
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        self.poison = poison

    def forward(self, *args, **kwargs):
        logits = super().forward(*args, **kwargs)
        return torch.cat([logits[:, :1], self.poison(logits[:, 1:2]), logits[:, 2:]], dim=1)

    def logits_of(self, index, *args, **kwargs):
        logits = super().logits_of(index, *args, **kwargs)
        return self.poison(logits) if index == 1 else logits


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", [HeadsDrafter, DynamicHeadsDrafter])
@pytest.mark.parametrize("poison", POISONS)
def test_no_logits_of_heads_change_the_text(poison, kind, setting):
    base, heads = tiny_model("llama"), PoisonedHeads(POISONS[poison])
    model = MedusaModel(base)
    batch, options = left_padded(random_prompts(3, 9), LENGTHS), {**SETTINGS[setting], "max_new_tokens": 8}
    expected = model.generate(**batch, **options)
    for step in ("general", "static"):
        drafter = kind(heads, base.get_output_embeddings(), TREE)
        assert torch.equal(model.generate(**batch, **options, drafter=drafter, step=step), expected)


@pytest.mark.parametrize("poison", POISONS)
def test_dynamic_heads_keep_every_parent_and_the_best_of_what_can_be_told(poison):
    base, heads = tiny_model("llama"), PoisonedHeads(POISONS[poison])
    drafter = DynamicHeadsDrafter(heads, base.get_output_embeddings(), TREE)
    hidden = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    root = torch.zeros(4, dtype=torch.long)
    draft = drafter.draft(DraftContext(root, hidden, root[:, None], root + 1, None, None))
    parents, depths = draft.topology.parents, draft.topology.depths
    assert (parents[:, 1:] < torch.arange(1, parents.shape[1])).all()
    assert torch.equal(depths[:, 1:], depths.gather(1, parents)[:, 1:] + 1)
    best = heads.logits_of(0, hidden, base.get_output_embeddings()).argmax(-1)
    assert torch.equal(draft.tokens[:, 1], best)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("poison", POISONS)
def test_what_is_drawn_from_poisoned_logits_was_drawn_from_a_distribution(poison, rule):
    base, heads = tiny_model("llama"), PoisonedHeads(POISONS[poison])
    rule, tree = RULES[rule], TREE if not RULES[rule].only_chains else CandidateTree.chain(3)
    drafter = HeadsDrafter(heads, base.get_output_embeddings(), tree)
    root = torch.zeros(3, dtype=torch.long)
    kind = drafter.sampled_kind(rule.draft_kinds[0])
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    context = DraftContext(root, hidden, root[:, None], root + 1, None, None, sampled=kind, seeds=root)
    proposal = drafter.draft(context).proposal
    inner = [node for node, path in enumerate(tree.paths) if len(path) < tree.depth]
    torch.testing.assert_close(proposal[:, inner].sum(-1), torch.ones(3, len(inner)))
    assert (proposal >= 0).all()


class HostileOracle(StaticOracle):
    """An oracle whose every draft after the first goes through ``spoil``."""

    def __init__(self, spoil, tree=TREE):
        super().__init__([[5] * 40] * 3, tree)
        self.spoil, self.num_drafts = spoil, 0

    def reset(self, num_rows, after=None):
        self.num_drafts = 0

    def draft(self, context: DraftContext) -> Draft:
        self.num_drafts += 1
        draft = super().draft(context)
        return draft if self.num_drafts == 1 else self.spoil(draft)


def with_tokens(spoil):
    def spoiled(draft):
        tokens = draft.tokens.clone()
        return replace(draft, tokens=spoil(tokens))

    return spoiled


def with_entry(index, value):
    def spoil(tokens):
        tokens[index] = value
        return tokens

    return with_tokens(spoil)


def with_topology(**parts):
    def spoiled(draft):
        return replace(
            draft,
            topology=replace(draft.topology, **{name: make(draft.topology) for name, make in parts.items()}),
        )

    return spoiled


def with_parents(parents, depths, max_depth=3):
    topology = TreeTopology.from_parents(torch.tensor([parents]), torch.tensor([depths]), max_depth)
    return lambda draft: replace(draft, topology=topology)


SPOILS = {
    "a token past the vocabulary": (with_entry((1, 3), VOCAB_SIZE), "token ids of the base's vocabulary"),
    "a negative token": (with_entry((0, 6), -1), "token ids of the base's vocabulary"),
    "another root": (
        with_tokens(lambda tokens: torch.cat([(tokens[:, :1] + 1) % VOCAB_SIZE, tokens[:, 1:]], dim=1)),
        "the root token in node 0",
    ),
    "a node too few": (
        with_tokens(lambda tokens: tokens[:, :-1]),
        r"tokens of dtype long and shape \(3, 7\)",
    ),
    "a row too few": (with_tokens(lambda tokens: tokens[:-1]), r"got torch.int64 \(2, 7\)"),
    "tokens that are no integers": (with_tokens(lambda tokens: tokens.float()), "got torch.float32"),
    "a child before its parent": (
        with_parents([0, 0, 3, 0, 1, 2, 3], [0, 1, 2, 1, 2, 2, 2]),
        "parents come before their children",
    ),
    "depths that are none": (with_parents([0, 0, 0, 1, 1, 2, 3], [0, 1, 1, 2, 1, 2, 3]), "depths are the"),
    "ancestors of another tree": (
        with_topology(ancestors=lambda tree: tree.ancestors.flip(1)),
        "ancestors, lineage and is_chain follow from its parents",
    ),
    "a tree that says it is a chain": (with_topology(is_chain=lambda tree: True), "is_chain follow"),
    "trees for two of three rows": (
        with_topology(parents=lambda tree: tree.parents.repeat(2, 1)),
        "topology of 1 or 3 trees",
    ),
    "a tree deeper than it said": (
        with_parents([0, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6], 6),
        "no deeper than its max_depth, 3, got 6",
    ),
}


@pytest.mark.parametrize("step", ["general", "static"])
@pytest.mark.parametrize("spoil", SPOILS)
def test_a_draft_that_the_base_cannot_verify_is_refused_and_its_drafter_named(spoil, step):
    spoiled, message = SPOILS[spoil]
    model, batch = MedusaModel(tiny_model("llama")), left_padded(random_prompts(3, 9), LENGTHS)
    with pytest.raises(ValueError, match=rf"^HostileOracle.draft must return .*{message}"):
        model.generate(**batch, max_new_tokens=9, do_sample=False, drafter=HostileOracle(spoiled), step=step)


def test_a_part_of_a_union_is_held_to_the_same_rules():
    spoiled, message = SPOILS["depths that are none"]
    union = UnionDrafter([HostileOracle(spoiled), HostileOracle(lambda draft: draft)])
    with pytest.raises(ValueError, match=rf"^UnionDrafter.draft must return .*{message}"):
        MedusaModel(tiny_model("llama")).generate(
            random_prompts(3, 9), max_new_tokens=9, do_sample=False, drafter=union
        )


class WrongVocabulary(LevelDrafter):
    """Scores ten tokens more than the base has, and likes the last one best."""

    vocab_size = VOCAB_SIZE + 10

    def logits_after(self, context, tokens, nodes):
        return torch.arange(float(self.vocab_size)).expand(len(tokens), nodes.stop - nodes.start, -1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"do_sample": False}, "token ids of the base's vocabulary"),
        ({"do_sample": True, "acceptance": "token"}, r"the proposal .* of shape \(1, 3, 61\)"),
    ],
    ids=["ranked", "drawn"],
)
def test_a_drafter_of_another_vocabulary_is_refused(options, message):
    drafter = WrongVocabulary(CandidateTree.chain(2), "cpu")
    with pytest.raises(ValueError, match=rf"^WrongVocabulary.draft must return {message}"):
        MedusaModel(tiny_model("llama")).generate(
            random_prompts(1, 9), max_new_tokens=9, drafter=drafter, **options
        )


class FalseProposal(LevelDrafter):
    """Draws candidates, and says they came from something that is no distribution."""

    vocab_size = VOCAB_SIZE

    def logits_after(self, context, tokens, nodes):
        return torch.zeros(len(tokens), nodes.stop - nodes.start, VOCAB_SIZE)

    def draft(self, context):
        draft = super().draft(context)
        return replace(draft, proposal=draft.proposal * 2)


def test_a_proposal_that_is_no_distribution_is_refused():
    drafter = FalseProposal(CandidateTree.chain(2), "cpu")
    with pytest.raises(ValueError, match=r"^FalseProposal.draft .* that is a distribution"):
        MedusaModel(tiny_model("llama")).generate(
            random_prompts(1, 9), max_new_tokens=9, drafter=drafter, do_sample=True, acceptance="token"
        )


class DeeperThanItsNodes(StaticOracle):
    """Two guesses beside each other, in a topology that says it is as deep as ``max_depth``."""

    max_depth = 8

    def __init__(self, answers):
        super().__init__(answers, CandidateTree.from_paths([(0,), (1,)]), always=True)
        self.ranks = torch.tensor([0, 1, 0])  # the second is right, so its entry moves
        self.topology = TreeTopology.from_parents(
            torch.tensor([[0, 0, 0]]), torch.tensor([[0, 1, 1]]), self.max_depth
        )


@pytest.mark.parametrize("step", ["general", "static"])
@pytest.mark.parametrize("num_rows", [1, 2])
def test_a_depth_is_a_bound_also_where_the_cache_is_full_to_its_last_slot(num_rows, step):
    model, prompts = MedusaModel(tiny_model("llama")), random_prompts(num_rows, 240)
    options = {"max_new_tokens": 30, "do_sample": False, "step": step}
    plain = model.generate(prompts, **options).tolist()
    assert model.generate(prompts, drafter=DeeperThanItsNodes(plain), **options).tolist() == plain
