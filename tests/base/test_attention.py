"""Masks and positions of tree nodes against a loop over (row, node, slot)."""

from __future__ import annotations

import pytest
import torch
from conftest import ARCHITECTURES, SLIDING_WINDOW, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from test_candidate_tree import trees
from transformers import (
    GPTNeoConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from medusa import CandidateTree
from medusa.base.attention import (
    MOST_TREE_NODES,
    grouped_attention,
    layer_windows,
    mask_dtype,
    node_positions,
    pinned_attention,
    seen_slots,
    tree_attention_masks,
)
from medusa.engine.kernels import kernels_unsupported_reason
from medusa.trees.candidate_tree import TreeTopology

needs_kernels = pytest.mark.skipif(
    kernels_unsupported_reason() is not None, reason="no C++ compiler is installed"
)

WINDOWS = {
    "llama": {"full_attention": None},
    "qwen3": {"full_attention": None},
    "mistral-sliding": {"sliding_attention": SLIDING_WINDOW},
    "gemma3": {"sliding_attention": SLIDING_WINDOW, "full_attention": None},
    "gpt-neox": {"full_attention": None},
    "phi": {"full_attention": None},
    "mixtral-moe": {"full_attention": None},
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_layer_types_and_windows_are_read_from_the_configuration(architecture):
    assert layer_windows(tiny_model(architecture).config) == WINDOWS[architecture]


def test_a_window_that_is_switched_off_is_none():
    sizes = {"num_hidden_layers": 2, "sliding_window": 8, "max_window_layers": 1}
    assert layer_windows(Qwen2Config(**sizes, use_sliding_window=False)) == {"full_attention": None}
    both = layer_windows(Qwen2Config(**sizes, use_sliding_window=True))
    assert both == {"full_attention": None, "sliding_attention": 8}
    assert layer_windows(MistralConfig(sliding_window=None)) == {"full_attention": None}
    assert layer_windows(LlamaConfig()) == {"full_attention": None}


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (Llama4TextConfig(num_hidden_layers=4), "chunked_attention"),
        (GPTNeoConfig(num_layers=2, attention_types=[[["global", "local"], 1]]), "local"),
    ],
    ids=["llama4", "gpt-neo"],
)
def test_layers_that_mask_otherwise_are_refused(config, kind):
    with pytest.raises(ValueError, match=f"layers of type {kind}: .* full and sliding-window attention only"):
        layer_windows(config)


def naive_masks(lengths: list[int], num_slots: int, tree: CandidateTree, window: int | None) -> torch.Tensor:
    """(B, N, S) bool: a node sees the row's committed tokens, its ancestors and itself, if near enough."""
    mask = torch.zeros(len(lengths), tree.num_nodes, num_slots, dtype=torch.bool)
    for row, length in enumerate(lengths):
        for node, path in enumerate(tree.paths):
            position = length + len(path)
            for slot in range(num_slots):
                if slot < length:
                    is_before, slot_position = True, slot
                elif slot < length + tree.num_nodes:
                    other = tree.paths[slot - length]
                    is_before, slot_position = path[: len(other)] == other, length + len(other)
                else:
                    is_before, slot_position = False, 0
                mask[row, node, slot] = is_before and (window is None or position - slot_position < window)
    return mask


@settings(max_examples=80, deadline=None)
@given(
    tree=trees(max_nodes=10),
    lengths=st.lists(st.integers(0, 14), min_size=1, max_size=3),
    window=st.integers(1, 9),
    first=st.integers(0, 9),
    last=st.integers(1, 10),
)
def test_masks_are_those_of_the_loop_for_every_row_node_and_slot(tree, lengths, window, first, last):
    num_slots = max(lengths) + tree.num_nodes
    some = torch.tensor(lengths)
    windows = {"full_attention": None, "sliding_attention": window}
    masks = tree_attention_masks(some, num_slots, tree.topology(), windows)
    full, near = naive_masks(lengths, num_slots, tree, None), naive_masks(lengths, num_slots, tree, window)
    assert torch.equal(masks["full_attention"], full[:, None])
    assert torch.equal(masks["sliding_attention"], near[:, None])
    nodes = slice(min(first, tree.num_nodes - 1), max(first + 1, last))
    part = tree_attention_masks(some, num_slots, tree.topology(), windows, nodes=nodes)
    assert torch.equal(part["full_attention"], full[:, None, nodes])
    assert torch.equal(part["sliding_attention"], near[:, None, nodes])


def test_rows_may_have_trees_of_their_own():
    one, other = CandidateTree.chain(3), CandidateTree.from_paths([(0,), (1,), (1, 0)])
    topology = TreeTopology.from_parents(
        torch.tensor([one.parents, other.parents]), torch.tensor([[0, 1, 2, 3], [0, 1, 1, 2]]), max_depth=3
    )
    mask = tree_attention_masks(torch.tensor([2, 5]), 9, topology, {"sliding_attention": 3})
    assert torch.equal(mask[0, 0], naive_masks([2], 9, one, 3)[0])
    assert torch.equal(mask[1, 0], naive_masks([5], 9, other, 3)[0])
    assert node_positions(torch.tensor([2, 5]), topology).tolist() == [[2, 3, 4, 5], [5, 6, 6, 7]]


def test_an_additive_mask_is_zero_where_visible_and_the_smallest_number_elsewhere():
    tree = CandidateTree.from_paths([(0,), (1,)])
    arguments = (torch.tensor([2, 1]), 5, tree.topology(), {"full_attention": None})
    visible = tree_attention_masks(*arguments)
    for dtype in (torch.float32, torch.bfloat16):
        additive = tree_attention_masks(*arguments, dtype)
        assert additive.dtype == dtype and additive.shape == (2, 1, 3, 5)
        assert torch.equal(additive == 0, visible)
        assert (additive[~visible] == torch.finfo(dtype).min).all()


def test_one_layer_type_gives_one_mask_and_two_give_a_dictionary():
    arguments = (torch.tensor([3]), 4, CandidateTree.chain(0).topology())
    assert isinstance(tree_attention_masks(*arguments, {"full_attention": None}), torch.Tensor)
    both = tree_attention_masks(*arguments, {"full_attention": None, "sliding_attention": 2})
    assert list(both) == ["full_attention", "sliding_attention"]


def test_a_position_is_the_committed_length_plus_the_depth_and_ends_with_the_context():
    topology = CandidateTree.from_paths([(0,), (1,), (0, 0)]).topology()
    lengths = torch.tensor([4, 0])
    assert node_positions(lengths, topology).tolist() == [[4, 5, 5, 6], [0, 1, 1, 2]]
    assert node_positions(lengths, topology, context=6).tolist() == [[4, 5, 5, 5], [0, 1, 1, 2]]
    assert node_positions(lengths, topology, nodes=slice(2, 4)).tolist() == [[5, 6], [1, 2]]


def expanded(seen, num_slots):
    """What :func:`seen_slots` says, as a mask (B, 1, M, S) bool."""
    starts, ends, marks = seen[..., :1], seen[..., 1:2], seen[..., 2:]
    slots = torch.arange(num_slots)
    visible = (slots >= starts) & (slots < ends)
    for node in range(marks.shape[3]):
        visible |= (marks[..., node : node + 1] > 0) & (slots == ends + node)
    return visible


@needs_kernels
@given(tree=trees(), lengths=st.lists(st.integers(0, 12), min_size=1, max_size=3), data=st.data())
@settings(max_examples=60, deadline=None)
def test_seen_slots_say_what_the_masks_say(tree, lengths, data):
    topology, lengths = tree.topology("cpu"), torch.tensor(lengths)
    first = data.draw(st.integers(0, tree.num_nodes - 1))
    nodes = slice(first, data.draw(st.integers(first + 1, tree.num_nodes)))
    num_slots = int(lengths.max()) + nodes.stop
    windows = {"full_attention": None, "sliding_attention": data.draw(st.integers(1, 8))}
    seen = seen_slots(lengths, topology, windows, nodes)
    masks = tree_attention_masks(lengths, num_slots, topology, windows, None, nodes)
    for kind, mask in masks.items():
        assert seen[kind].dtype == torch.int32 and torch.equal(expanded(seen[kind], num_slots), mask)
        marked = seen[kind][..., 2:]
        depths = (marked - 1)[marked > 0]
        assert set(depths.tolist()) <= set(topology.depths[0, : nodes.stop].tolist())


@needs_kernels
@pytest.mark.parametrize("window", [None, 7])
def test_a_long_chain_is_seen_as_ranges_of_slots(window):
    num_nodes, lengths = MOST_TREE_NODES + 1, torch.tensor([9, 0])
    chain, windows = TreeTopology.chain(num_nodes, "cpu"), {"full_attention": window}
    seen = seen_slots(lengths, chain, windows, slice(0, num_nodes))
    assert seen.shape == (2, 1, num_nodes, 2)
    mask = tree_attention_masks(lengths, 9 + num_nodes, chain, windows)
    assert torch.equal(expanded(seen, 9 + num_nodes), mask)


def config_with(attention: str) -> LlamaConfig:
    config = LlamaConfig(hidden_size=48, num_attention_heads=6, num_key_value_heads=2)
    config._attn_implementation = attention
    return config


def test_a_mask_is_boolean_for_sdpa_and_added_to_scores_elsewhere():
    dtypes = {name: mask_dtype(config_with(name), torch.bfloat16) for name in ("sdpa", "eager")}
    assert dtypes == {"sdpa": None, "eager": torch.bfloat16}


def test_on_a_card_heads_attend_in_groups_while_any_pass_runs_unless_somebody_chose_otherwise(monkeypatch):
    card, of_cudnn = torch.device("cuda"), torch.backends.cuda.cudnn_sdp_enabled
    before = of_cudnn()
    with pinned_attention(torch.device("cpu")):
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    with pinned_attention(card):
        with pinned_attention(card):
            pass
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is grouped_attention and not of_cudnn()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward and of_cudnn() == before
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", mask_dtype)
    with pinned_attention(card):
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is mask_dtype and not of_cudnn()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is mask_dtype
