"""Layers that bases come with draft as transformers' own loop does, and everything that heads do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import left_padded, random_prompts, tiny_model
from mtp_models import FAMILIES, FEW_TOKENS, PROMPT, WITH_TREES, load_base, save_base
from stateful_models import turned_at_a_tie
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

from medusa import CandidateTree, MedusaModel
from medusa.drafters.ahead import AheadDrafter
from medusa.heads.ahead import drafted_states
from medusa.heads.mtp import num_mtp_layers, own_head

TREE = CandidateTree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)])
CASES = [(family, count) for family in WITH_TREES for count in (1, 2, 3)]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """The base of a family with so many layers, saved and loaded once."""
    made = {}

    def base_of(family: str, num_layers: int = 1):
        if (family, num_layers) not in made:
            directory = tmp_path_factory.mktemp("base") / family
            made[family, num_layers] = load_base(save_base(directory, family, num_layers))
        return made[family, num_layers]

    return base_of


def watched(monkeypatch) -> list[tuple[list[int], list[int]]]:
    """The text, up to the root, and the draft of each step to come."""
    drafts, draft = [], AheadDrafter.draft

    def kept(self, context):
        drafted = draft(self, context)
        text = context.tokens[0, : int(context.lengths[0])].tolist()
        drafts.append((text, drafted.tokens[0, 1:].tolist()))
        return drafted

    monkeypatch.setattr(AheadDrafter, "draft", kept)
    return drafts


@pytest.mark.parametrize(("family", "num_layers"), CASES)
def test_as_many_tokens_are_accepted_as_by_transformers_use_mtp(bases, monkeypatch, family, num_layers):
    base, prompt, theirs = bases(family, num_layers), PROMPT, []
    candidates = MTPCandidateGenerator.get_candidates

    def kept(self, input_ids, *args, **kwargs):
        tokens, logits = candidates(self, input_ids, *args, **kwargs)
        theirs.append((input_ids[0].tolist(), tokens[0, input_ids.shape[1] :].tolist()))
        return tokens, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", kept)
    ours = watched(monkeypatch)
    asked = {"max_new_tokens": 48, "do_sample": False, "return_dict_in_generate": True}
    expected = base.generate(prompt, use_mtp=True, **asked).sequences
    output = MedusaModel.from_pretrained(base).generate(prompt, drafter="mtp", **asked)
    assert torch.equal(output.sequences, expected)
    assert torch.equal(base.generate(prompt, **asked).sequences, expected)
    assert all(len(tokens) == num_layers for _, tokens in theirs[1:])
    assert [text for text, _ in ours] == [text for text, _ in theirs[1 : len(ours) + 1]]
    assert ours == theirs[1 : len(ours) + 1] and len(theirs) - 1 <= len(ours) + 1
    assert output.statistics.tokens_per_step > 1.2


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in WITH_TREES])
def test_bases_that_keep_a_state_draft_as_transformers_modules_do(bases, monkeypatch, family):
    base, prompt, drafts = bases(family), PROMPT, watched(monkeypatch)
    model, asked = MedusaModel.from_pretrained(base), {"max_new_tokens": 48, "do_sample": False}
    output = model.generate(prompt, drafter="mtp", return_dict_in_generate=True, **asked)
    assert not turned_at_a_tie(base, output.sequences, base.generate(prompt, **asked), prompt.shape[1])
    assert output.statistics.tokens_per_step > 1.2
    modules = MtpModel.from_pretrained(base)
    for text, draft in drafts:
        tokens = torch.tensor([text])
        states = base(tokens[:, :-1], output_hidden_states=True).hidden_states[-1]
        positions = torch.arange(1, len(text))[None]
        cache = MtpCache(config=base.config.get_mtp_config())
        assert modules(tokens[:, 1:], states, None, positions, cache)[0].tolist() == [draft]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_that_of_plain_decoding(bases, family):
    base = bases(family, 2 if family in WITH_TREES else 1)
    model, prompts = MedusaModel.from_pretrained(base, "mtp"), left_padded(random_prompts(3, 9) % FEW_TOKENS, [9, 4, 7])
    tree = TREE if family in WITH_TREES else CandidateTree.chain(3)
    for asked in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8, "seed": 5}):
        asked = {**prompts, "max_new_tokens": 24, **asked}
        expected = model.generate(tree=CandidateTree.chain(0), **asked)
        for how in ({}, {"drafter": "mtp", "tree": tree}, {"drafter": "mtp"}, {"drafter": "dynamic-heads"}):
            assert torch.equal(model.generate(**asked, **how), expected), how


@pytest.mark.parametrize(("family", "num_layers"), [*CASES, ("qwen3_5_text", 1)])
def test_unrolled_states_are_those_of_drafts(bases, monkeypatch, family, num_layers):
    """Deeper than there are layers, too: they take turns."""
    base, drafts, depth = bases(family, num_layers), watched(monkeypatch), 5
    model = MedusaModel.from_pretrained(base)
    model.generate(PROMPT, drafter="mtp", tree=CandidateTree.chain(depth), max_new_tokens=12)
    head = own_head(base, depth)
    assert {len(draft) for _, draft in drafts} == {depth}
    for text, draft in drafts:
        tokens = torch.tensor([text + draft])
        hidden = base(tokens, output_hidden_states=True).hidden_states[-1]
        following = base.get_input_embeddings()(tokens.roll(-1, dims=1))
        states = drafted_states(head, hidden, following, torch.arange(tokens.shape[1])[None])
        ends = range(len(text) - 2, len(text) - 2 + depth)
        guesses = [int(base.lm_head(each[0, end]).argmax()) for each, end in zip(states, ends, strict=True)]
        assert guesses == draft
