"""EAGLE-style heads: what drafting predicts is what is trained and counted, and a directory holds them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import VOCAB_SIZE, left_padded, random_prompts, tiny_model
from safetensors.torch import load_file, save_file

from medusa import (
    CandidateTree,
    HeadsCheckpoint,
    HeadsConfig,
    MedusaHeads,
    MedusaModel,
    load_heads,
    save_heads,
)
from medusa.base.causal_lm import hidden_states, output_embedding
from medusa.cli.info import describe_heads
from medusa.drafters.eagle import EagleDrafter
from medusa.drafters.registry import DrafterSettings, available_drafters, drafter_named
from medusa.heads.calibration import AnsweredTokens, calibrate
from medusa.heads.eagle import EagleConfig, EagleHead, drafted_features
from medusa.trees.rank_counts import UNKNOWN

TREE = CandidateTree.from_paths([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])
DEPTH = 3


def new_head(hidden_size: int = 32, vocab_size: int = VOCAB_SIZE) -> EagleHead:
    """A head with random weights and scales."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        head = EagleHead(EagleConfig(hidden_size, vocab_size, num_attention_heads=4, max_depth=DEPTH))
        head.set_scales(3 * torch.randn(50, hidden_size), 0.2 * torch.randn(50, hidden_size))
        return head.eval()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_heads(HeadsCheckpoint(new_head(), "some/base", TREE, {"loss": 1.5}), tmp_path / "eagle")


def drafted_one_by_one(head: EagleHead, features, following, end: int, depth: int):
    """The prediction of entry ``end`` after a draft of ``depth`` entries, the head run afresh for each."""
    inputs = features[:, : end - depth + 2]
    for _ in range(depth):
        predicted = head(inputs, following[:, : inputs.shape[1]])
        inputs = torch.cat([inputs, predicted[:, -1:]], dim=1)
    return predicted[:, -1]


def test_unrolled_predictions_are_those_of_drafts_made_one_by_one():
    head, generator = new_head(), torch.Generator().manual_seed(0)
    features, following = torch.randn(2, 2, 9, 32, generator=generator)
    unrolled = drafted_features(head, features, following, torch.arange(9).expand(2, 9))
    assert len(unrolled) == DEPTH
    for depth in (1, 2, 3):
        for end in range(depth - 1, 9):
            alone = drafted_one_by_one(head, features, following, end, depth)
            torch.testing.assert_close(unrolled[depth - 1][:, end], alone, atol=1e-4, rtol=1e-4)


def test_documents_of_a_row_do_not_see_each_other():
    head, generator = new_head(), torch.Generator().manual_seed(0)
    features, following = torch.randn(2, 2, 9, 32, generator=generator)
    packed = torch.cat([torch.arange(4), torch.arange(5)])
    positions = torch.stack([packed, torch.arange(9)])
    together = drafted_features(head, features, following, positions)
    second = drafted_features(head, features[:1, 4:], following[:1, 4:], torch.arange(5)[None])
    whole = drafted_features(head, features[1:], following[1:], torch.arange(9)[None])
    for depth in (1, 2, 3):
        meaningful = together[depth - 1][0, 4 + depth - 1 :]
        torch.testing.assert_close(meaningful, second[depth - 1][0, depth - 1 :], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(together[depth - 1][1], whole[depth - 1][0], atol=1e-4, rtol=1e-4)


def test_scales_are_the_size_of_each_dimension_and_one_where_nothing_was_seen():
    head = EagleHead(EagleConfig(4, 9, num_attention_heads=1))
    head.set_scales(torch.tensor([[3.0, 0, 1, -2], [4.0, 0, 1, 2]]), torch.ones(2, 3, 4))
    torch.testing.assert_close(head.feature_scale, torch.tensor([12.5**0.5, 1, 1, 2]))
    torch.testing.assert_close(head.embedding_scale, torch.ones(4))


def test_features_are_read_and_predicted_in_the_unit_that_was_measured():
    head, larger, generator = new_head(), new_head(), torch.Generator().manual_seed(0)
    features, following = torch.randn(2, 2, 5, 32, generator=generator)
    larger.feature_scale.mul_(50)
    larger.embedding_scale.mul_(7)
    expected = 50 * head(features, following)
    torch.testing.assert_close(larger(50 * features, 7 * following), expected, rtol=1e-4, atol=1e-3)


def test_counted_ranks_are_those_of_the_true_token_among_the_drafts_guesses():
    base, head = tiny_model("llama"), new_head()
    ids = random_prompts(1, 14)
    row = AnsweredTokens.after_prompt(ids[0].tolist(), 6)
    (ranks,) = calibrate(base, head, [row, row], max_rank=VOCAB_SIZE).ranks[:1]
    assert ranks.shape == (8, DEPTH)
    with torch.no_grad():
        features = hidden_states(base, ids)
        following = base.get_input_embeddings()(ids[:, 1:])
        for position in range(8):
            root = 6 + position
            for depth in (1, 2, 3):
                if root + depth >= 14:
                    assert ranks[position, depth - 1] == UNKNOWN
                    continue
                end = root + depth - 2  # the entry that joins the token before the target
                predicted = drafted_one_by_one(head, features, following, end, depth)
                order = head.unembedded(predicted, output_embedding(base))[0].argsort(descending=True)
                assert order[ranks[position, depth - 1]] == ids[0, root + depth]


def test_what_is_saved_is_what_is_loaded(saved):
    loaded, head = load_heads(saved), new_head()
    assert json.loads((saved / "config.json").read_text())["kind"] == "eagle"
    assert loaded.heads.config == head.config
    assert loaded.tree == TREE and loaded.base_model == "some/base" and loaded.provenance == {"loss": 1.5}
    assert list(loaded.heads.state_dict()) == list(head.state_dict())
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.heads.state_dict()[name], tensor), name
    described = describe_heads(loaded)
    assert described["kind"] == "eagle" and described["max_depth"] == DEPTH
    assert described["num_parameters"] == sum(each.numel() for each in head.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "hydra"}, "says kind='hydra', this version of medusa reads 'medusa' or 'eagle'"),
        ({"max_dept": 3}, r"unknown key 'max_dept'; did you mean 'max_depth'\?"),
        ({"hidden_size": 64}, r"must have shape \(64\,\), got \(32\,\)"),
        (
            {"num_attention_heads": 5},
            "must divide hidden_size=32 into even parts, got 5",
        ),
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
    weights["joint.weight"] = weights.pop("join.weight")
    save_file(weights, saved / "model.safetensors")
    message = r"tensors of an 'eagle' head: missing \['join.weight'\], extra \['joint.weight'\]"
    with pytest.raises(ValueError, match=message):
        load_heads(saved)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_a_model_with_a_loaded_directory_decodes_exactly_with_its_tree(saved, architecture):
    base = tiny_model(architecture)
    model = MedusaModel.from_pretrained(base, saved)
    assert model.tree == TREE
    named = drafter_named("heads", model)
    assert isinstance(named, EagleDrafter)
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


def test_another_base_is_refused(saved):
    head = new_head(hidden_size=16)
    with pytest.raises(ValueError, match=r"heads were trained for hidden_size=16, base model .* has 32"):
        MedusaModel(tiny_model("llama"), head)
    head = new_head(vocab_size=VOCAB_SIZE + 1)
    with pytest.raises(ValueError, match=rf"trained for vocab_size={VOCAB_SIZE + 1}, base model .* has"):
        MedusaModel(tiny_model("llama"), head)


def test_a_tree_deeper_than_it_is_made_for_is_refused(saved):
    with pytest.raises(ValueError, match=r"tree has depth 4, the heads are 3: .*use tree.subtree\(3\)"):
        MedusaModel(tiny_model("llama"), new_head(), CandidateTree.chain(4))


def test_by_name_it_drafts_beside_other_heads_in_its_own_tree(saved):
    base = tiny_model("llama")
    model = MedusaModel(base, MedusaHeads(HeadsConfig(32, VOCAB_SIZE, num_heads=2)))
    settings = DrafterSettings(eagle=saved)
    assert "eagle" in available_drafters(model, settings)
    assert "eagle" not in available_drafters(model, DrafterSettings())
    drafter = drafter_named("eagle", model, settings)
    assert isinstance(drafter, EagleDrafter) and drafter.tree == TREE
    assert drafter_named("eagle", model, settings, only_chain=True).tree == CandidateTree.chain(DEPTH)
    arguments = {"do_sample": False, "max_new_tokens": 12}
    plain = model.generate(random_prompts(2, 7), **arguments, tree=CandidateTree.chain(0))
    for name in ("eagle", "heads+eagle"):
        drafter = drafter_named(name, model, settings)
        assert model.generate(random_prompts(2, 7), **arguments, drafter=drafter).tolist() == plain.tolist()


def test_by_name_it_must_be_there_fit_and_be_of_its_kind(saved, tmp_path):
    model = MedusaModel(tiny_model("llama"))
    with pytest.raises(ValueError, match="drafter 'eagle' needs an EAGLE-style head; give --eagle"):
        drafter_named("eagle", model)
    small = HeadsCheckpoint(new_head(hidden_size=16), "some/base")
    with pytest.raises(ValueError, match="heads were trained for hidden_size=16"):
        drafter_named("eagle", model, DrafterSettings(eagle=small))
    heads = MedusaHeads(HeadsConfig(32, VOCAB_SIZE))
    other = save_heads(HeadsCheckpoint(heads, "some/base"), tmp_path / "medusa")
    with pytest.raises(
        ValueError, match="must be an EAGLE-style head, got Medusa heads for 'some/base'; use --heads"
    ):
        drafter_named("eagle", model, DrafterSettings(eagle=other))
