"""EAGLE-3 heads: what drafting predicts is what is trained and counted, and a directory holds them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import VOCAB_SIZE, assert_exact, left_padded, random_prompts, tiny_model
from refusals import refusals
from transformers import LlamaConfig

from medusa import (
    CandidateTree,
    HeadsCheckpoint,
    HeadsConfig,
    MedusaHeads,
    MedusaModel,
    load_heads,
    save_heads,
)
from medusa.base.causal_lm import lm_head
from medusa.base.passes import hidden_states
from medusa.cli.info import describe_heads
from medusa.drafters.autoregressive import AutoregressiveDrafter
from medusa.drafters.dynamic import DynamicAutoregressiveDrafter
from medusa.drafters.registry import DrafterFactory, DrafterSettings
from medusa.engine.optimized_heads import optimized_heads
from medusa.heads.autoregressive_head import unroll
from medusa.heads.calibration import AnsweredTokens, calibrate
from medusa.heads.eagle3 import Eagle3Config, Eagle3Head, default_layers
from medusa.trees.rank_counts import UNKNOWN

TREE = CandidateTree.from_paths([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])
DEPTH = 3


LAYERS = (1, 2)
FLAGS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")


def new_config(hidden_size: int = 32, vocab_size: int = VOCAB_SIZE, **options) -> Eagle3Config:
    given = {"vocab_size": vocab_size, "fused_layers": LAYERS, "max_depth": DEPTH, **options}
    return Eagle3Config(hidden_size, 4, 2, 8, 48, **given)


def new_head(hidden_size: int = 32, vocab_size: int = VOCAB_SIZE, **options) -> Eagle3Head:
    """A head with random weights, norms included."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        head = Eagle3Head(new_config(hidden_size, vocab_size, **options))
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        return head.eval()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_heads(HeadsCheckpoint(new_head(), "some/base", TREE, {"loss": 1.5}), tmp_path / "eagle3")


def drafted_one_by_one(head: Eagle3Head, hidden, following, end: int, depth: int):
    """The state of entry ``end`` after a draft of ``depth`` entries, the head run afresh for each."""
    inputs = head.fuse(hidden[:, : end - depth + 2])
    for _ in range(depth):
        drafted = head(inputs, following[:, : inputs.shape[1]])
        inputs = torch.cat([inputs, drafted.features[:, -1:]], dim=1)
    return drafted.states[:, -1]


@pytest.mark.parametrize("flag", [None, *FLAGS])
def test_unrolled_states_are_those_of_drafts_made_one_by_one(flag):
    head, generator = new_head(**({flag: True} if flag else {})), torch.Generator().manual_seed(0)
    hidden, following = torch.randn(2, 9, 96, generator=generator), torch.randn(2, 9, 32, generator=generator)
    unrolled = unroll(head, hidden, following, torch.arange(9).expand(2, 9))
    assert len(unrolled) == DEPTH
    for depth in (1, 2, 3):
        for end in range(depth - 1, 9):
            alone = drafted_one_by_one(head, hidden, following, end, depth)
            torch.testing.assert_close(unrolled[depth - 1][:, end], alone, atol=1e-4, rtol=1e-4)


def test_documents_of_a_row_do_not_see_each_other():
    head, generator = new_head(), torch.Generator().manual_seed(0)
    hidden, following = torch.randn(2, 9, 96, generator=generator), torch.randn(2, 9, 32, generator=generator)
    packed = torch.cat([torch.arange(4), torch.arange(5)])
    positions = torch.stack([packed, torch.arange(9)])
    together = unroll(head, hidden, following, positions)
    second = unroll(head, hidden[:1, 4:], following[:1, 4:], torch.arange(5)[None])
    whole = unroll(head, hidden[1:], following[1:], torch.arange(9)[None])
    for depth in (1, 2, 3):
        meaningful = together[depth - 1][0, 4 + depth - 1 :]
        torch.testing.assert_close(meaningful, second[depth - 1][0, depth - 1 :], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(together[depth - 1][1], whole[depth - 1][0], atol=1e-4, rtol=1e-4)


def test_counted_ranks_are_those_of_the_true_token_among_the_drafts_guesses():
    base, head = tiny_model("llama"), new_head()
    ids = random_prompts(1, 14)
    row = AnsweredTokens.after_prompt(ids[0].tolist(), 6)
    (ranks,) = calibrate(base, head, [row, row], max_rank=VOCAB_SIZE).ranks[:1]
    assert ranks.shape == (8, DEPTH)
    with torch.no_grad():
        hidden = hidden_states(base, ids, layers=LAYERS)
        following = base.get_input_embeddings()(ids[:, 1:])
        for position in range(8):
            root = 6 + position
            for depth in (1, 2, 3):
                if root + depth >= 14:
                    assert ranks[position, depth - 1] == UNKNOWN
                    continue
                end = root + depth - 2  # the entry that joins the token before the target
                state = drafted_one_by_one(head, hidden, following, end, depth)
                order = head.unembedded(state, lm_head(base))[0].argsort(descending=True)
                assert order[ranks[position, depth - 1]] == ids[0, root + depth]


def test_info_describes_the_head(saved):
    described = describe_heads(load_heads(saved))
    assert described["kind"] == "eagle3" and described["max_depth"] == DEPTH
    assert described["num_parameters"] == sum(each.numel() for each in new_head().parameters())


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_a_model_with_a_loaded_directory_decodes_exactly_with_its_tree(saved, architecture):
    base = tiny_model(architecture)
    model = MedusaModel.from_pretrained(base, saved)
    assert model.tree == TREE
    assert isinstance(model.drafter_for(1), DynamicAutoregressiveDrafter)
    named = DrafterFactory(model).make("heads")
    assert isinstance(named, AutoregressiveDrafter)
    for lengths in ([9], [20, 1, 7]):
        batch = left_padded(random_prompts(len(lengths), max(lengths)), lengths)
        for options in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8, "seed": 3}):
            result = assert_exact(model, batch, {}, {"tree": TREE}, max_new_tokens=12, **options)
            by_name = assert_exact(model, batch, {"drafter": named}, max_new_tokens=12, **options)
            assert result.statistics.accepted_histogram == by_name.statistics.accepted_histogram


def test_by_name_it_drafts_beside_other_heads_in_its_own_tree(saved):
    base = tiny_model("llama")
    model = MedusaModel(base, MedusaHeads(HeadsConfig(32, VOCAB_SIZE, num_heads=2)))
    settings = DrafterSettings(eagle3=saved)
    assert "eagle3" in DrafterFactory(model, settings).available()
    assert "eagle3" not in DrafterFactory(model, DrafterSettings()).available()
    drafter = DrafterFactory(model, settings).make("eagle3")
    assert isinstance(drafter, AutoregressiveDrafter) and drafter.tree == TREE
    assert DrafterFactory(model, settings).make("eagle3", only_chain=True).tree == CandidateTree.chain(DEPTH)
    hows = ({"drafter": DrafterFactory(model, settings).make(name)} for name in ("eagle3", "heads+eagle3"))
    assert_exact(model, random_prompts(2, 7), *hows, do_sample=False, max_new_tokens=12)


def made_by_name(checkpoint=None):
    return DrafterFactory(MedusaModel(tiny_model("llama")), DrafterSettings(eagle3=checkpoint)).make("eagle3")


SMALL = HeadsCheckpoint(new_head(hidden_size=16), "some/base")
OTHERS = HeadsCheckpoint(MedusaHeads(HeadsConfig(32, VOCAB_SIZE)), "some/base")
test_a_head_that_cannot_be_taken_is_refused = refusals(
    ("none by name", made_by_name, "'eagle3' needs an EAGLE-3 head; give eagle3="),
    ("another size", lambda: made_by_name(SMALL), "trained for hidden_size=16"),
    (
        "other heads",
        lambda tmp_path: made_by_name(save_heads(OTHERS, tmp_path / "medusa")),
        "must be an EAGLE-3 head, got heads of kind 'medusa' for 'some/base'; give them as heads=",
    ),
    (
        "too few layers",
        lambda: Eagle3Config.of_base(tiny_model("gemma3")),
        "at least 7 ... fused_layers",
    ),
)


def test_a_base_gives_the_head_its_attention_and_rotary_embedding():
    text = tiny_model("gemma3").config
    config = Eagle3Config.of_base(tiny_model("gemma3"), fused_layers=LAYERS)
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim"):
        assert getattr(config, name) == getattr(text, name)
    theta = text.rope_parameters["full_attention"]["rope_theta"]
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": theta}


def test_the_default_layers_are_those_that_engines_take():
    base = tiny_model("llama")
    base.config.num_hidden_layers = 30
    try:
        assert default_layers(base) == (2, 15, 27)
    finally:
        base.config.num_hidden_layers = 2


def test_rotary_scaling_of_the_base_is_kept_and_what_depends_on_the_length_is_not():
    head = new_head()
    scaled = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    stretched = Eagle3Head(new_config(rope_parameters=scaled))
    stretched.load_state_dict(head.state_dict())
    features, following = torch.randn(2, 1, 5, 32, generator=torch.Generator().manual_seed(0))
    at = torch.arange(5)[None]
    expected = head(features, following, position_ids=at).states
    torch.testing.assert_close(stretched.eval()(features, following, position_ids=4 * at).states, expected)
    base = tiny_model("llama")
    text = LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 2.0})
    given, base.config.rope_parameters = base.config.rope_parameters, text.rope_parameters
    try:
        kept = Eagle3Config.of_base(base, fused_layers=LAYERS).rope_parameters
    finally:
        base.config.rope_parameters = given
    assert kept == {"rope_type": "default", "rope_theta": 5000.0}


def test_rows_of_its_own_score_in_place_of_the_bases():
    base, head = tiny_model("llama"), new_head(own_lm_head=True)
    states = torch.randn(2, 32)
    assert torch.equal(head.unembedded(states, lm_head(base)), head.lm_head(states))
    assert optimized_heads(head, lm_head(base)) is head
