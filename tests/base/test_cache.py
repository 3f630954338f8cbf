"""The cache holds exactly what a fresh prefill of the same tokens would, after any commits."""

from __future__ import annotations

import copy
import gc
import itertools
import sys
import weakref
from pathlib import Path

import pytest
import torch
from conftest import ARCHITECTURES, VOCAB_SIZE, random_prompts, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from stateful_models import stateful_model
from test_causal_lm import TOLERANCE, tree_of

from medusa import CandidateTree
from medusa.acceptance.exact import accepted_up_to
from medusa.base.cache import GROWTH_STEP, TreeCache, TreeCacheLayer
from medusa.base.fixed_cache import CacheMemory
from medusa.base.passes import new_cache, prefill, verify
from medusa.trees.candidate_tree import TreeTopology


def filled(architecture: str, lengths: list[int], seed: int = 0) -> tuple[TreeCache, list[list[int]]]:
    """A cache that holds prompts of these lengths, and the prompts."""
    base = tiny_model(architecture)
    tokens = random_prompts(len(lengths), max(lengths), seed)
    cache = new_cache(base, len(lengths))
    with torch.no_grad():
        prefill(base, tokens, torch.tensor(lengths), cache)
    return cache, [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]


def committed(cache: TreeCache, row: int) -> list[torch.Tensor]:
    """Keys and values of every layer for the row's committed tokens."""
    length = int(cache.lengths[row])
    return [entries[row, :, :length] for layer in cache.tree_layers for entries in layer.entries]


def assert_holds(cache: TreeCache, row: int, architecture: str, tokens: list[int]) -> None:
    """The row holds what a fresh prefill of ``tokens`` alone holds."""
    base, fresh = tiny_model(architecture), new_cache(tiny_model(architecture), 1)
    with torch.no_grad():
        prefill(base, torch.tensor([tokens]), torch.tensor([len(tokens)]), fresh)
    assert cache.lengths[row] == len(tokens)
    for ours, theirs in zip(committed(cache, row), committed(fresh, 0), strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


def step(
    cache: TreeCache, architecture: str, tree: CandidateTree, generator: torch.Generator
) -> list[list[int]]:
    """Run a tree of random tokens, commit a random path of it in every row, and say which tokens that was."""
    rows, topology = cache.num_rows, tree.topology()
    tokens = torch.randint(0, VOCAB_SIZE, (rows, tree.num_nodes), generator=generator)
    best = torch.randint(0, tree.num_nodes, (rows,), generator=generator)
    with torch.no_grad():
        verify(tiny_model(architecture), tokens, topology, cache)
    accepted = accepted_up_to(best, torch.zeros(rows, dtype=torch.long), topology)
    cache.commit(accepted.path, accepted.num_accepted + 1)
    counts = (accepted.num_accepted + 1).tolist()
    return [tokens[row, accepted.path[row, : counts[row]]].tolist() for row in range(rows)]


@pytest.mark.parametrize("lengths", [[40], [33, 2, 17]], ids=["one row", "ragged rows"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_after_any_commits_the_cache_holds_what_a_fresh_prefill_does(architecture, lengths):
    generator = torch.Generator().manual_seed(1)
    cache, tokens = filled(architecture, lengths)
    for round_ in range(5):
        tree = tree_of(num_nodes=9, seed=round_)
        for row, new in zip(tokens, step(cache, architecture, tree, generator), strict=True):
            row.extend(new)
    assert cache.longest == max(len(row) for row in tokens)
    for row, row_tokens in enumerate(tokens):
        assert_holds(cache, row, architecture, row_tokens)


@pytest.mark.parametrize("lengths", [[40], [40, 40], [33, 2]], ids=["one row", "even rows", "ragged rows"])
def test_a_commit_never_touches_the_prefix(lengths):
    cache, _ = filled("llama", lengths)
    generator = torch.Generator().manual_seed(2)
    for round_ in range(6):
        before = [[entries.clone() for entries in committed(cache, row)] for row in range(len(lengths))]
        places = [entries.data_ptr() for layer in cache.tree_layers for entries in layer.entries]
        old_lengths = cache.lengths.clone()
        step(cache, "llama", tree_of(num_nodes=8, seed=round_), generator)
        assert places == [entries.data_ptr() for layer in cache.tree_layers for entries in layer.entries]
        assert (cache.lengths > old_lengths).all()
        for row, old in enumerate(before):
            for was, now in zip(old, committed(cache, row), strict=True):
                assert torch.equal(was, now[:, : was.shape[1]])


def test_a_fixed_cache_moves_the_path_of_a_tree_that_has_as_many_nodes_as_a_chain_of_its_depth():
    tree = CandidateTree.from_paths([(0,), (1,), (1, 0)])
    topology = TreeTopology.from_parents(
        torch.tensor([tree.parents]), torch.tensor([[0, 1, 1, 2]]), max_depth=3
    )
    source, (tokens,) = filled("llama", [9])
    memory = CacheMemory()
    memory.hold(source, 1, 32, 32)
    cache = memory.first(source.lengths.clone())
    cache.use_slots(32)
    nodes = random_prompts(1, 4, seed=3)
    with torch.no_grad():
        verify(tiny_model("llama"), nodes, topology, cache)
    accepted = accepted_up_to(torch.tensor([3]), torch.tensor([0]), topology)
    cache.commit(accepted.path, accepted.num_accepted + 1, topology.is_chain)
    assert_holds(cache, 0, "llama", tokens + nodes[0, [0, 2, 3]].tolist())


def test_a_path_in_order_moves_nothing():
    cache, _ = filled("llama", [12])
    with torch.no_grad():
        verify(tiny_model("llama"), random_prompts(1, 4), CandidateTree.chain(3).topology(), cache)
    for layer in cache.tree_layers:
        layer.move = None
    cache.commit(torch.tensor([[0, 1, 2, 3]]), torch.tensor([3]))
    assert cache.lengths.tolist() == [15] and cache.longest == 15


def test_what_a_pass_leaves_uncommitted_is_forgotten():
    """Two trees after the same tokens, nothing of the first committed: the second finds nothing of it."""
    tree = tree_of(num_nodes=9, seed=3)
    tokens = torch.randint(0, VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(5))
    used, _ = filled("gemma3", [35, 6])
    clean, _ = filled("gemma3", [35, 6])
    with torch.no_grad():
        verify(tiny_model("gemma3"), tokens.flip(1), tree_of(num_nodes=9, seed=4).topology(), used)
        _, dirty_logits = verify(tiny_model("gemma3"), tokens, tree.topology(), used)
        _, clean_logits = verify(tiny_model("gemma3"), tokens, tree.topology(), clean)
    torch.testing.assert_close(dirty_logits, clean_logits, **TOLERANCE)


def num_bytes(num_slots: int, num_rows: int) -> int:
    """Of the tiny Llama: 2 layers, keys and values, 2 heads of width 8, float32."""
    return 2 * 2 * num_rows * 2 * 8 * num_slots * 4


def test_memory_grows_in_steps_with_the_tokens_and_never_to_the_context():
    base, lengths = tiny_model("llama"), torch.tensor([1, 1])
    cache = new_cache(base, 2)
    assert cache.num_bytes == 0
    capacities = []
    with torch.no_grad():
        prefill(base, random_prompts(2, 1), lengths, cache)
        for _ in range(60):
            verify(base, random_prompts(2, 10), CandidateTree.chain(9).topology(), cache)
            cache.commit_prefix(torch.tensor([10, 9]))
            slots = -(-cache.num_slots // GROWTH_STEP) * GROWTH_STEP
            assert cache.num_bytes == num_bytes(slots, num_rows=2)
            capacities.append(slots)
    assert sorted(set(capacities)) == [GROWTH_STEP, 2 * GROWTH_STEP, 3 * GROWTH_STEP]
    assert max(capacities) < base.config.max_position_embeddings


def test_a_long_prompt_takes_the_steps_it_needs_at_once():
    cache, _ = filled("llama", [600])
    assert cache.num_bytes == num_bytes(3 * GROWTH_STEP, num_rows=1)


class Numbered:
    """A cache without a model beside what its rows must hold: each token is a number that occurs once."""

    def __init__(self, num_rows: int, random, numbers):
        self.random, self.numbers = random, numbers
        self.cache, self.held = TreeCache(num_rows, 2, "cpu"), [[] for _ in range(num_rows)]

    def run(self, num_nodes: int) -> list[list[int]]:
        """A pass over so many nodes: what each is, by row."""
        tokens = [[next(self.numbers) for _ in range(num_nodes)] for _ in self.held]
        states = torch.tensor(tokens, dtype=torch.float64)[:, None, :, None]
        self.cache.plan_pass(num_nodes)
        for layer in range(2):
            self.cache.update(states + layer, -states.repeat(1, 1, 1, 2) - layer, layer)
        self.cache.keep_features(states[:, 0], self.cache.lengths, self.cache.longest)
        return tokens

    def read(self, num_nodes: int) -> None:
        tokens = self.run(num_nodes)
        counts = [self.random.randint(1, num_nodes) for _ in self.held]
        self.cache.commit_prefix(torch.tensor(counts))
        for held, new, count in zip(self.held, tokens, counts, strict=True):
            held += new[:count]

    def accept(self) -> None:
        num_nodes = self.random.randint(1, 9)
        tokens = self.run(num_nodes)
        counts = [self.random.randint(0, num_nodes) for _ in self.held]
        drawn = [self.random.sample(range(num_nodes), num_nodes) for _ in self.held]
        if self.random.random() < 0.3:
            drawn = [[*range(num_nodes)] for _ in self.held]
        paths = [sorted(path[:count]) + path[count:] for path, count in zip(drawn, counts, strict=True)]
        self.cache.commit(torch.tensor(paths), torch.tensor(counts))
        for held, new, path, count in zip(self.held, tokens, paths, counts, strict=True):
            held += [new[node] for node in path[:count]]

    def do(self, operation: str) -> None:
        chance, cache, held = self.random, self.cache, self.held
        row = chance.randrange(len(held))
        if operation == "read":
            self.read(chance.choice([1, 5, GROWTH_STEP // 2]))
        elif operation == "accept":
            self.accept()
        elif operation == "forget":
            self.run(chance.randint(1, 9))
        elif operation == "uncommit" and all(held):
            cache.uncommit_last()
            self.held = [each[:-1] for each in held]
        elif operation == "keep":
            kept = chance.sample(range(len(held)), chance.randint(1, len(held)))
            cache.keep_rows(torch.tensor(kept))
            self.held = [held[each] for each in kept]
        elif operation == "join":
            other = Numbered(chance.randint(1, 2), chance, self.numbers)
            other.read(chance.choice([1, 20, GROWTH_STEP + 10]))
            cache.join(other.cache, chance.choice([0, 8]))
            self.held = held + other.held
        elif operation == "copy" and held[row]:
            length = chance.randint(1, len(held[row]))
            cache.join(cache.copy_of_row(row, length), chance.choice([0, 8]))
            self.held = [*held, held[row][:length]]
        elif operation in ("trim", "clear_uncommitted"):
            getattr(cache, operation)()

    def check(self) -> None:
        lengths = [len(each) for each in self.held]
        assert self.cache.lengths.tolist() == self.cache.known_lengths == lengths
        assert self.cache.longest == max(lengths)
        for row, held in enumerate(self.held):
            tokens = torch.tensor(held, dtype=torch.float64)
            for layer, (keys, values) in enumerate(each.entries for each in self.cache.tree_layers):
                assert torch.equal(keys[row, 0, : len(held), 0], tokens + layer)
                assert torch.equal(values[row, 0, : len(held)], -(tokens + layer)[:, None].expand(-1, 2))
            assert torch.equal(self.cache.features[row, : len(held), 0], tokens)


OPERATIONS = ["read", "accept", "forget", "uncommit", "keep", "join", "copy", "trim", "clear_uncommitted"]


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3), st.lists(st.sampled_from(OPERATIONS), max_size=12), st.randoms())
def test_after_any_operations_each_row_holds_its_own_tokens_in_order(num_rows, operations, random):
    rows = Numbered(num_rows, random, itertools.count(1))
    rows.read(5)
    for operation in operations:
        rows.do(operation)
        rows.check()


def test_a_batch_may_be_left_without_a_row():
    cache, _ = filled("llama", [9, 40])
    cache.keep_rows(torch.tensor([], dtype=torch.long))
    assert (cache.num_rows, cache.longest) == (0, 0)


def test_with_room_a_row_joins_and_leaves_without_a_copy_of_the_others():
    cache, _ = filled("llama", [9, 14])
    cache.join(filled("llama", [5])[0], most_rows=8)
    places = [buffer.data_ptr() for layer in cache.tree_layers for buffer in layer.buffers]
    cache.keep_rows(torch.tensor([2, 1]))
    cache.join(filled("llama", [7])[0], most_rows=8)
    assert places == [buffer.data_ptr() for layer in cache.tree_layers for buffer in layer.buffers]
    before = cache.num_bytes
    cache.trim()
    assert cache.num_bytes < before and cache.capacity == 14


def test_room_for_rows_doubles_and_never_exceeds_what_may_be():
    cache, _ = filled("llama", [5])
    rooms = []
    for seed in range(1, 6):
        cache.join(filled("llama", [5], seed)[0], most_rows=5)
        rooms.append(len(cache.tree_layers[0].buffers[0]))
    assert rooms == [2, 4, 4, 5, 6], "a row that joins all the same finds room"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_room_that_nobody_has_written_to_takes_no_memory():
    def resident():
        return 4096 * int(Path("/proc/self/statm").read_text().split()[1])

    cache, before = filled("llama", [5])[0], resident()
    cache.expect(2**20)
    for layer in cache.tree_layers:
        layer.reserve(6 * GROWTH_STEP)
    assert cache.num_bytes == 2 * 2 * 16 * 4 * 2**20, "keys and values of two layers"
    assert resident() - before < cache.num_bytes / 10
    assert not cache.tree_layers[0].entries[0][0, :, -3:].any()


def test_what_a_token_takes_is_known_before_there_is_room_for_it():
    cache, _ = filled("llama", [5])
    assert cache.bytes_per_token * cache.capacity == cache.num_bytes


def test_the_last_token_can_be_made_the_root_of_the_tree_to_come():
    cache, tokens = filled("gemma3", [34, 3])
    cache.uncommit_last()
    assert cache.lengths.tolist() == [33, 2] and cache.longest == 33
    roots = torch.tensor([[row[-1]] for row in tokens])
    with torch.no_grad():
        _, logits = verify(tiny_model("gemma3"), roots, TreeTopology.chain(1, "cpu"), cache)
        cache.commit_prefix(torch.tensor([1, 1]))
        for row, row_tokens in enumerate(tokens):
            alone = tiny_model("gemma3")(torch.tensor([row_tokens])).logits[0, -1]
            torch.testing.assert_close(logits[row, 0], alone, **TOLERANCE)
            assert_holds(cache, row, "gemma3", row_tokens)


def test_keys_and_values_may_differ_in_width():
    """As in latent attention (DeepSeek): nothing here may assume one shape for both."""
    cache = TreeCache(num_rows=2, num_layers=1, device="cpu")
    keys, values = torch.randn(2, 3, 5, 16), torch.randn(2, 3, 5, 8)
    cache.plan_pass(5)
    all_keys, all_values = cache.update(keys, values, 0)
    assert torch.equal(all_keys, keys) and torch.equal(all_values, values)
    cache.commit(torch.tensor([[0, 2, 4], [0, 1, 1]]), torch.tensor([3, 2]))
    held = committed(cache, 0), committed(cache, 1)
    assert torch.equal(held[0][0], keys[0][:, [0, 2, 4]]) and torch.equal(held[0][1], values[0][:, [0, 2, 4]])
    assert torch.equal(held[1][0], keys[1][:, [0, 1]]) and torch.equal(held[1][1], values[1][:, [0, 1]])


def test_the_cache_tells_transformers_how_long_it_is():
    cache, _ = filled("llama", [9, 14])
    assert cache.get_seq_length() == 14
    assert cache.get_mask_sizes(3, 0) == (17, 0)


def test_a_chat_of_4k_tokens_on_a_model_made_for_128k_allocates_for_4k():
    base = copy.deepcopy(tiny_model("llama"))
    base.config.max_position_embeddings = 131072
    cache, length = new_cache(base, 1), 4096
    with torch.no_grad():
        prefill(base, random_prompts(1, length), torch.tensor([length]), cache)
    config = base.config
    bytes_per_token = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 4
    assert length * bytes_per_token <= cache.num_bytes <= (length + GROWTH_STEP) * bytes_per_token


@pytest.mark.parametrize(("path", "num_kept"), [([0, 0, 0], 1), ([0, 1, 1], 2), ([0, 1, 2], 3)])
def test_nodes_that_stand_in_their_place_already_are_not_moved(path, num_kept, monkeypatch):
    cache, _ = filled("llama", [9])
    base = tiny_model("llama")
    with torch.no_grad():
        verify(base, random_prompts(1, 4), CandidateTree.chain(3).topology(), cache)
    monkeypatch.setattr(TreeCacheLayer, "move", lambda *_: pytest.fail("moved"))
    cache.commit(torch.tensor([path]), torch.tensor([num_kept]))
    assert cache.lengths.tolist() == [9 + num_kept]
    with pytest.raises(pytest.fail.Exception, match="moved"):
        cache.commit(torch.tensor([[0, 2, 2]]), torch.tensor([2]))


@pytest.mark.parametrize("kind", ["grown", "fixed", "with a state", "copied", "joined"])
def test_a_cache_is_given_back_when_it_is_let_go(kind):
    gc.disable()
    try:
        cache, _ = filled("llama", [9])
        if kind == "with a state":
            cache = new_cache(stateful_model("falcon_h1"), 1)
        elif kind == "fixed":
            memory = CacheMemory()
            memory.hold(cache, 1, 32, 32)
            cache = memory.first(torch.tensor([9]))
        elif kind == "copied":
            cache = cache.copy_of_row(0, 5)
        elif kind == "joined":
            cache.join(filled("llama", [5])[0])
        gone = weakref.ref(getattr(cache, "stateful_rows", [cache])[0])
        del cache
        assert gone() is None
    finally:
        gc.enable()
