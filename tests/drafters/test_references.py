"""What drafts copy from beside a row's own text: found where it stands, bounded, and never part of the answer."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from conftest import GROUPED, counting_model, left_padded, random_heads, random_prompts, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from medusa import MedusaModel, SuffixCorpus
from medusa.base.cache import TreeCache
from medusa.drafters.protocol import DraftContext
from medusa.drafters.references import LEAST_BYTES, References, references_of
from medusa.drafters.suffix import MAX_CHILDREN, MAX_MATCH, ODDS, SuffixDrafter, continuations
from medusa.engine.kernels import missing_kernels

pytestmark = pytest.mark.skipif(missing_kernels() is not None, reason="no C++ compiler is installed")

DEPTH, MAX_PLACES, SHORTEST_INDEXED = 6, 16, 2
TOKENS = st.lists(st.integers(0, 3), max_size=30)
SOURCES = {"itself": 0, "prediction": 1, "corpus": 2}


def context_of(row, prediction=None, corpus=None):
    tokens = torch.tensor([row])
    references = References(None if prediction is None else torch.tensor(prediction), corpus)
    cache = TreeCache(1, 1, torch.device("cpu"))
    return DraftContext(
        tokens[:, -1], torch.zeros(1, 4), tokens, torch.tensor([len(row)]), cache, None, references=[references]
    )


def agreement(text, place, row):
    """Whether the tokens up to ``place`` are the last of the row, from there backwards."""
    pairs = zip(text[place::-1] if place else text[:1], row[::-1], strict=False)
    return [mine == last for mine, last in pairs][:MAX_MATCH]


def places_of(row, prediction, remembered):
    """(agreement, source, what follows) of all places, those first that are to be asked first."""
    found = []
    for text, source in ((prediction, 1), (row, 0), *((text, 2) for text in remembered[::-1])):
        for place in range(len(text) - 2, -1, -1):
            agrees = agreement(text, place, row)
            pattern = [*agrees, *[False] * (MAX_MATCH - len(agrees))]
            num_matched = [*pattern, False].index(False)
            if num_matched >= (SHORTEST_INDEXED if source == 2 else 1):
                follows = text[place + 1 :]
                if text is row:
                    follows = list(itertools.islice(itertools.cycle(follows), DEPTH))
                found.append((pattern, num_matched, source, follows[:DEPTH]))
    return sorted(found, key=lambda each: each[0], reverse=True)[:MAX_PLACES]


def shares_of(places):
    """Path -> the share of its last token, counted path by path."""
    votes, kept = {}, {(): []}
    for _, num_matched, source, follows in places:
        for depth in range(len(follows)):
            above, path = tuple(follows[:depth]), tuple(follows[: depth + 1])
            if path not in votes:
                if len(kept[above]) == MAX_CHILDREN:
                    break
                kept[above].append(path)
                votes[path], kept[path] = 0.0, []
            votes[path] += float(ODDS[source, min(num_matched + depth, MAX_MATCH)])
    return {
        path: votes[path] / (1 + sum(votes[each] for each in siblings))
        for siblings in kept.values()
        for path in siblings
    }


@settings(max_examples=150, deadline=None)
@given(row=TOKENS.filter(bool), prediction=TOKENS, remembered=st.lists(TOKENS.filter(bool), max_size=3))
def test_what_is_expected_is_what_a_search_place_by_place_finds(row, prediction, remembered):
    corpus = SuffixCorpus(LEAST_BYTES)
    for text in remembered:
        corpus.add(text)
    found = continuations(context_of(row, prediction, corpus), DEPTH)
    expected = shares_of(places_of(row, prediction, remembered))
    paths, shares = {0: ()}, {}
    for node in range(found.tokens.shape[1]):
        for child in found.children[0, node].tolist():
            if child:
                assert found.parents[0, child] == node
                paths[child] = (*paths[node], int(found.tokens[0, child]))
                shares[paths[child]] = float(found.shares[0, child])
    assert shares == pytest.approx(expected)
