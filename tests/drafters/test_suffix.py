"""The suffix match finds the longest earlier occurrence of a row's end, whatever stands behind the row."""

from __future__ import annotations

import runpy

import pytest
import torch
from conftest import counting_model, random_prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_chat import chat_base, chat_heads, wide_tree

from medusa import CandidateTree, MedusaModel
from medusa.base.cache import TreeCache
from medusa.drafters import suffix
from medusa.drafters.protocol import DraftContext
from medusa.drafters.suffix import MAX_MATCH, SuffixDrafter, longest_match

NUM_TOKENS = 6
ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=45), min_size=1, max_size=4)


def padded_rows(rows: list[list[int]], width: int, seed: int) -> torch.Tensor:
    """The rows (B, width) long, with tokens behind each that belong to no row."""
    tokens = torch.randint(0, 3, (len(rows), width), generator=torch.Generator().manual_seed(seed))
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = torch.tensor(row)
    return tokens


def agreement(row: list[int], column: int) -> list[bool]:
    """Whether the tokens up to ``column`` are the last of the row, from there backwards."""
    before, end = row[: column + 1][::-1][:MAX_MATCH], row[::-1][:MAX_MATCH]
    return [mine == last for mine, last in zip(before, end, strict=False)]


def match_of(row: list[int]) -> tuple[int, list[int]]:
    """The length of the row's match and the tokens that follow it, found one column at a time."""

    def num_matched(column: int) -> int:
        return [*agreement(row, column), False].index(False)

    def rank(column: int) -> tuple:
        return num_matched(column), agreement(row, column), column

    best = max(range(len(row) - 1), key=rank, default=0)
    if len(row) == 1 or num_matched(best) == 0:
        return 0, []
    text = list(row)
    while len(text) < len(row) + NUM_TOKENS:
        text.append(text[len(text) - (len(row) - 1 - best)])
    return num_matched(best), text[best + 1 : best + 1 + NUM_TOKENS]


@settings(max_examples=150, derandomize=True, deadline=None)
@given(rows=ROWS, spare=st.integers(0, 20), seed=st.integers(0, 9))
def test_it_is_the_match_that_a_search_column_by_column_finds(rows, spare, seed):
    tokens = padded_rows(rows, max(map(len, rows)) + spare, seed)
    match = longest_match(tokens, torch.tensor([len(row) for row in rows]), NUM_TOKENS)
    for index, row in enumerate(rows):
        num_matched, follow = match_of(row)
        assert match.num_matched[index] == num_matched
        if num_matched:
            assert match.continuation[index].tolist() == follow


@pytest.mark.parametrize(
    ("row", "num_matched", "continuation"),
    [
        ([5, 6, 7, 8, 5, 6], 2, [7, 8, 5, 6, 7]),
        ([5, 6, 1, 5, 6, 2, 5, 6], 2, [2, 5, 6, 2, 5]),
        ([4, 5, 6, 1, 3, 5, 6, 2, 4, 5, 6], 3, [1, 3, 5, 6, 2]),
        ([9, 9], 1, [9, 9, 9, 9, 9]),
        ([3] * 40, MAX_MATCH, [3] * 5),
    ],
    ids=["text goes round", "the latest", "the longest", "one token again", "no longer than the most"],
)
def test_known_texts_are_continued_as_expected(row, num_matched, continuation):
    match = longest_match(torch.tensor([row]), torch.tensor([len(row)]), 5)
    assert (match.num_matched.tolist(), match.continuation.tolist()) == ([num_matched], [continuation])


def test_it_traces_in_one_piece_for_any_number_of_columns():
    torch._dynamo.reset()
    traced = torch.compile(longest_match, fullgraph=True, backend="eager", dynamic=True)
    for width in (20, 300):
        tokens, lengths = random_prompts(3, width) % 4, torch.tensor([width, 7, 1])
        found, expected = traced(tokens, lengths, 5), longest_match(tokens, lengths, 5)
        assert torch.equal(found.num_matched, expected.num_matched)
        assert torch.equal(found.continuation, expected.continuation)


def context_of(rows: list[list[int]], fixed_shape: bool) -> DraftContext:
    tokens, lengths = padded_rows(rows, 12, 0), torch.tensor([len(row) for row in rows])
    root = tokens.gather(1, lengths[:, None] - 1)[:, 0]
    cache = TreeCache(len(rows), 1, torch.device("cpu"))
    return DraftContext(
        root, torch.zeros(len(rows), 4), tokens, lengths, cache, None, fixed_shape=fixed_shape
    )


@pytest.mark.parametrize("fixed_shape", [True, False])
def test_a_row_without_a_match_drafts_its_root_and_the_others_their_match(fixed_shape):
    context = context_of([[5, 6, 7, 5, 6], [1, 2, 3], [4, 1, 2, 4]], fixed_shape)
    draft = SuffixDrafter(length=3, min_match=2).draft(context)
    assert draft.tokens.tolist() == [[6, 7, 5, 6], [3, 3, 3, 3], [4, 4, 4, 4]]
    expected = CandidateTree.chain(3).topology()
    for name in ("parents", "depths", "ancestors", "lineage"):
        assert torch.equal(getattr(draft.topology, name), getattr(expected, name))
    assert draft.topology.is_chain


def test_without_any_match_a_draft_is_the_root_alone_unless_its_shape_is_fixed():
    rows = [[5, 6, 7], [1, 2, 1]]
    free, fixed = (SuffixDrafter(4).draft(context_of(rows, is_fixed)) for is_fixed in (False, True))
    assert free.tokens.tolist() == [[7], [1]] and free.topology.num_nodes == 1
    assert fixed.tokens.tolist() == [[7] * 5, [1] * 5] and fixed.topology.num_nodes == 5


def test_repeated_text_is_drafted_from_its_last_occurrence():
    """A base that counts modulo 16 repeats itself after 16 tokens; from then on every draft is right."""
    model = MedusaModel(counting_model(16))
    options = {"do_sample": False, "max_new_tokens": 61, "return_dict_in_generate": True}
    out = model.generate(torch.tensor([[3]]), **options, drafter=SuffixDrafter(length=5, min_match=1))
    assert out.sequences[0].tolist() == [(3 + i) % 16 for i in range(62)]
    assert out.statistics.accepted_histogram == [15, 0, 1, 0, 0, 7]


@pytest.mark.parametrize(("length", "min_match"), [(0, 2), (4, 0), (4, MAX_MATCH + 1)])
def test_lengths_that_cannot_be_are_refused(length, min_match):
    with pytest.raises(ValueError, match=rf"min_match in \[1, {MAX_MATCH}\], got {length} and {min_match}"):
        SuffixDrafter(length, min_match)


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def other_default(request):
    """Another default type of torch's, as programs set it that load models in it."""
    default = torch.get_default_dtype()
    yield lambda: torch.set_default_dtype(request.param)
    torch.set_default_dtype(default)


@pytest.mark.parametrize("engine", ["eager", "packed"])
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "seed": 3}], ids=["greedy", "sampled"])
def test_the_default_drafter_computes_in_float32_whatever_the_default_type_is(
    other_default, engine, sampling
):
    base, heads, ids = chat_base(), chat_heads(), torch.tensor([[1, 2, 3, 4, 5, 2, 3, 4, 5]])
    expected = MedusaModel(base, engine=engine).generate(ids, max_new_tokens=24, drafter="plain", **sampling)
    other_default()
    model = MedusaModel(base, heads, wide_tree(), engine=engine)
    assert torch.equal(model.generate(ids, max_new_tokens=24, **sampling), expected)


def test_what_the_kernel_reads_is_float32_whatever_the_default_type_is(other_default):
    """It reads memory as float32, and learns in it."""
    other_default()
    names = runpy.run_path(suffix.__file__)
    assert {names["ODDS"].dtype, names["USUAL"].dtype, suffix.no_trust().dtype} == {torch.float32}
