"""EAGLE-3 heads: what drafting predicts is what is trained and counted, and a directory holds them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import VOCAB_SIZE, left_padded, random_prompts, tiny_model
from safetensors.torch import load_file, save_file
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
from medusa.base.causal_lm import hidden_states, lm_head
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "hydra"}, "says kind='hydra', this version of medusa reads 'medusa' or 'eagle3' or 'mtp'"),
        ({"max_dept": 3}, r"unknown key 'max_dept'; did you mean 'max_depth'\?"),
        ({"hidden_size": 64}, r"tensor .fc.weight. must have shape \(64, 128\), got \(32, 64\)"),
        ({"num_attention_heads": 5}, "num_key_value_heads must divide num_attention_heads=5, got 2"),
        ({"head_dim": 7}, "head_dim must be even, got 7"),
        (
            {"fused_layers": [2, 1]},
            r"fused_layers must be .* in ascending order, at least 1, got \[2, 1\]",
        ),
        ({"fused_layers": []}, "fused_layers must be .*, at least 1, got"),
        ({"fused_layers": [1, 2, 3]}, r"tensor 'fc.weight' must have shape \(32, 96\), got \(32, 64\)"),
        (
            {"rope_parameters": {"rope_type": "dynamic"}},
            "rope_type must be one of default, linear, llama3, yarn",
        ),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta must be a number above 0, got None"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number between 0 and 1"),
        ({"fc_norm": 1}, "fc_norm must be true or false, got 1"),
        ({"fc_norm": True}, "lacks fc_norm.0.weight, fc_norm.1.weight, of"),
        ({"max_depth": 10**9}, "config.json: max_depth must be an int from 1 to 256, got 1000000000"),
        ({"intermediate_size": 10**12}, "intermediate_size must be an int from 1 to 16777216"),
        ({"intermediate_size": 2**24}, r"must have shape \(16777216, 32\), got"),
        ({"kind": "medusa"}, "unknown key 'num_attention_heads'"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_config_that_does_not_belong_is_refused(saved, change, message):
    raw = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**raw, **change}))
    with pytest.raises(ValueError, match=message):
        load_heads(saved)


def test_missing_and_left_over_tensors_are_named(saved):
    weights = load_file(saved / "model.safetensors")
    weights["fcs.weight"] = weights.pop("fc.weight")
    save_file(weights, saved / "model.safetensors")
    message = "lacks fc.weight, of an 'eagle3' head"
    with pytest.raises(ValueError, match=message):
        load_heads(saved)


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
            arguments = {**batch, **options, "max_new_tokens": 12}
            plain = model.generate(**arguments, tree=CandidateTree.chain(0))
            assert model.generate(**arguments).tolist() == plain.tolist()
            result = model.generate(**arguments, tree=TREE, return_dict_in_generate=True)
            assert result.sequences.tolist() == plain.tolist()
            by_name = model.generate(**arguments, drafter=named, return_dict_in_generate=True)
            assert by_name.sequences.tolist() == plain.tolist()
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
    arguments = {"do_sample": False, "max_new_tokens": 12}
    plain = model.generate(random_prompts(2, 7), **arguments, tree=CandidateTree.chain(0))
    for name in ("eagle3", "heads+eagle3"):
        drafter = DrafterFactory(model, settings).make(name)
        assert model.generate(random_prompts(2, 7), **arguments, drafter=drafter).tolist() == plain.tolist()


def test_by_name_it_must_be_there_fit_and_be_of_its_kind(saved, tmp_path):
    model = MedusaModel(tiny_model("llama"))
    with pytest.raises(
        ValueError, match="drafter 'eagle3' needs an EAGLE-3 head; give eagle3= to make_drafter"
    ):
        DrafterFactory(model).make("eagle3")
    small = HeadsCheckpoint(new_head(hidden_size=16), "some/base")
    with pytest.raises(ValueError, match="heads were trained for hidden_size=16"):
        DrafterFactory(model, DrafterSettings(eagle3=small)).make("eagle3")
    heads = MedusaHeads(HeadsConfig(32, VOCAB_SIZE))
    other = save_heads(HeadsCheckpoint(heads, "some/base"), tmp_path / "medusa")
    with pytest.raises(
        ValueError, match="must be an EAGLE-3 head, got Medusa heads for 'some/base'; give them as heads="
    ):
        DrafterFactory(model, DrafterSettings(eagle3=other)).make("eagle3")


def test_a_base_gives_the_head_its_attention_and_rotary_embedding():
    base = tiny_model("gemma3")
    text = base.config
    config = Eagle3Config.of_base(base, fused_layers=LAYERS)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (
        text.num_attention_heads,
        text.num_key_value_heads,
        text.head_dim,
    )
    assert config.rope_parameters == {
        "rope_type": "default",
        "rope_theta": text.rope_parameters["full_attention"]["rope_theta"],
    }
    with pytest.raises(ValueError, match=r"needs at least 7; name the layers: fused_layers"):
        Eagle3Config.of_base(base)


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
