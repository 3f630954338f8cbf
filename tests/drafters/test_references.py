"""What drafts copy from beside a row's own text: found where it stands, bounded, never part of the answer."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from conftest import (
    GROUPED,
    VOCAB_SIZE,
    counting_model,
    left_padded,
    needs_kernels,
    random_heads,
    random_prompts,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from medusa import MedusaModel, SuffixCorpus
from medusa.base.cache import TreeCache
from medusa.drafters.protocol import DraftContext
from medusa.drafters.references import LEAST_BYTES, References, references_of
from medusa.drafters.suffix import (
    LEAST_OF_SEVERAL,
    MAX_CHILDREN,
    MAX_MATCH,
    ODDS,
    SPARE_CONTINUATIONS,
    SuffixDrafter,
    continuations,
)

pytestmark = needs_kernels

DEPTH, MAX_PLACES, SHORTEST_INDEXED, MOST_TRUST = 6, 16, LEAST_OF_SEVERAL, 1.5
TOKENS = st.lists(st.integers(0, 3), max_size=30)


def context_of(row, prediction=None, corpus=None):
    tokens = torch.tensor([row])
    references = References(None if prediction is None else torch.tensor(prediction), corpus)
    cache = TreeCache(1, 1, torch.device("cpu"))
    return DraftContext(
        tokens[:, -1],
        torch.zeros(1, 4),
        tokens,
        torch.tensor([len(row)]),
        cache,
        None,
        references=[references],
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
    has_best = False
    for _, num_matched, source, follows in places:
        if has_best and num_matched < LEAST_OF_SEVERAL:
            break
        has_best |= source != 2
        equal = [each for each in places if each[1:3] == (num_matched, source)] if source == 2 else [None]
        for depth in range(len(follows)):
            above, path = tuple(follows[:depth]), tuple(follows[: depth + 1])
            if path not in votes:
                if len(kept[above]) == MAX_CHILDREN or len(votes) + 1 == DEPTH + SPARE_CONTINUATIONS:
                    break
                kept[above].append(path)
                votes[path], kept[path] = 0.0, []
            votes[path] += float(ODDS[source, min(num_matched + depth, MAX_MATCH)]) / len(equal)
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


def test_a_source_is_believed_by_how_often_it_was_right():
    def trust_after(num_steps, is_right, trust):
        before, now = [7, 8], [7, 8, 9 if is_right else 5]
        for _ in range(num_steps):
            source_guesses = continuations(context_of(before, [7, 8, 9]), 1, trust).source_guesses
            continuations(context_of(now, [7, 8, 9]), 1, trust, source_guesses)
        return trust

    wrong = trust_after(200, False, torch.zeros(3))
    assert wrong[1] == -MOST_TRUST and wrong[2] == 0
    assert trust_after(40, True, wrong.clone())[1] > wrong[1] + 0.3, "it comes back"
    shares = [
        continuations(context_of([7, 8], [7, 8, 9]), 1, torch.tensor([0.0, trust, 0.0])).shares.max()
        for trust in (-1.0, 0.0, 1.0)
    ]
    odds = torch.stack(shares).logit()
    assert odds.diff().tolist() == pytest.approx([1, 1], abs=1e-4)


def test_rows_that_left_or_joined_teach_nothing():
    source_guesses = continuations(context_of([7, 7, 8], [7, 8, 9]), 1).source_guesses
    trust = torch.zeros(3)
    continuations(context_of([7, 8], [7, 8, 9]), 1, trust, source_guesses)
    continuations(context_of([7, 7, 8, 5], [7, 8, 9]), 1, trust, torch.cat([source_guesses, source_guesses]))
    assert trust.count_nonzero() == 0
    continuations(context_of([7, 7, 8, 5], [7, 8, 9]), 1, trust, source_guesses)
    assert trust[1] < 0


def answers_of(model, batch, **options):
    return model.generate(**batch, do_sample=options.pop("do_sample", False), max_new_tokens=24, **options)


@settings(max_examples=25, deadline=None)
@given(
    predicted=st.lists(st.integers(3, 60), max_size=60),
    kind=st.sampled_from(["nothing", "right", "edited", "any"]),
    remembered=st.lists(st.sampled_from(["right", "any"]), max_size=3),
    drafter=st.sampled_from([None, "suffix", "dynamic-heads+suffix"]),
    engine=st.sampled_from(["eager", "packed"]),
    do_sample=st.booleans(),
    seed=st.integers(0, 5),
)
def test_whatever_is_expected_or_remembered_the_text_is_the_same(
    predicted, kind, remembered, drafter, engine, do_sample, seed
):
    model = MODELS[engine]
    batch = left_padded(random_prompts(2, 9, seed), [9, 4])
    sampling = {"do_sample": do_sample, "seed": seed, **({"temperature": 0.8} if do_sample else {})}
    plain = answers_of(model, batch, drafter="plain", **sampling)
    right = plain[:, 9:].tolist()
    edited = [row[:7] + predicted[:3] + row[9:] for row in right]
    given_rows = {"nothing": [None, []], "right": right, "edited": edited, "any": [predicted, None]}
    corpus = SuffixCorpus(LEAST_BYTES) if remembered else None
    for each in remembered:
        corpus.add(plain[0] if each == "right" else predicted)
    found = answers_of(model, batch, prediction=given_rows[kind], corpus=corpus, drafter=drafter, **sampling)
    assert torch.equal(found, plain)


BASE = LlamaForCausalLM(LlamaConfig(**GROUPED)).eval()
MODELS = {
    engine: MedusaModel(BASE, random_heads(3, num_heads=3), engine=engine) for engine in ("eager", "packed")
}


NUM_READ = 400
"""Tokens of a padded input embedding, of which the output has :data:`VOCAB_SIZE`."""


@pytest.fixture(scope="module")
def padded_models():
    base = LlamaForCausalLM(LlamaConfig(**GROUPED)).eval()
    base.model.embed_tokens = torch.nn.Embedding(NUM_READ, GROUPED["hidden_size"])
    heads = random_heads(3, num_heads=3)
    return {engine: MedusaModel(base, heads, engine=engine) for engine in ("eager", "packed")}


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("step", ["general", "static"])
@pytest.mark.parametrize("engine", ["eager", "packed"])
@pytest.mark.parametrize("drafter", ["suffix", "dynamic-heads+suffix"])
def test_tokens_that_the_base_reads_and_cannot_write_are_no_guesses(
    padded_models, drafter, engine, step, do_sample
):
    """All that can be copied goes on in such tokens: the row itself, and a corpus, in ids beyond any."""
    model, options = padded_models[engine], {"max_new_tokens": 16, "do_sample": do_sample, "seed": 1}
    prompt = torch.tensor([[5, 6, 7, 8, 5, 300, 399, 7, 8, 5, 6]])
    plain = model.generate(prompt, drafter="plain", **options)
    corpus = SuffixCorpus(LEAST_BYTES)
    for end in range(5, plain.shape[1]):  # what is written is continued wrongly wherever it is searched
        corpus.add([*plain[0, :end].tolist(), 10**8, NUM_READ, VOCAB_SIZE])
    more = {} if step == "static" else {"corpus": corpus}
    found = model.generate(prompt, drafter=drafter, step=step, **more, **options)
    assert torch.equal(found, plain) and int(found[0, 11:].max()) < VOCAB_SIZE


@pytest.mark.parametrize("token", [-1, 2**31])
def test_a_corpus_takes_token_ids_alone(token):
    with pytest.raises(ValueError, match=rf"tokens must be token ids from 0 to \d+, got .*{token}"):
        SuffixCorpus(LEAST_BYTES).add([3, token])


def test_a_right_prediction_is_followed_without_any_heads():
    """Of a base that counts, the answer is the prediction."""
    model, expected = MedusaModel(counting_model(64)), [(4 + i) % 64 for i in range(40)]
    given_options = {"max_new_tokens": 40, "return_dict_in_generate": True, "do_sample": False}
    found = model.generate(torch.tensor([[3]]), prediction=expected, **given_options)
    assert found.sequences[0, 1:].tolist() == expected
    assert found.statistics.tokens_per_step > 4
    assert model.generate(torch.tensor([[3]]), **given_options).statistics.tokens_per_step == 1


def test_the_oldest_texts_go_out_first_and_memory_stays():
    corpus = SuffixCorpus(LEAST_BYTES)
    row = [1, 2, 3, 4]
    corpus.add([*row, 7])
    size = sum(part.nbytes for part in corpus.index)
    assert size <= LEAST_BYTES

    def follows():
        found = continuations(context_of(row, corpus=corpus), 1)
        return {int(found.tokens[0, child]) for child in found.children[0, 0].tolist() if child}

    assert follows() == {7}
    for _ in range(3):
        corpus.add([*range(100, 100 + corpus.capacity // 2)])
    assert follows() == set()
    corpus.add([*row, 8])
    assert follows() == {8}
    assert corpus.num_tokens == corpus.capacity
    assert sum(part.nbytes for part in corpus.index) == size


def test_a_text_longer_than_the_corpus_leaves_its_end():
    corpus = SuffixCorpus(LEAST_BYTES)
    corpus.add([1, 2, 3, 4, 5, *range(10, 10 + corpus.capacity)])
    last = 10 + corpus.capacity
    found = continuations(context_of([*range(last - 6, last - 1)], corpus=corpus), 1)
    assert int(found.tokens[0, found.children[0, 0, 0]]) == last - 1
    assert int(continuations(context_of([1, 2, 3, 4], corpus=corpus), 1).num_matched) == 0


def test_texts_in_a_corpus_do_not_go_on_in_one_another():
    corpus = SuffixCorpus(LEAST_BYTES)
    corpus.add([1, 2, 3, 4, 5])
    corpus.add([6, 7])
    row = [9, 2, 3, 4, 5]
    assert int(continuations(context_of(row, corpus=corpus), 4).children.sum()) == 0
    assert int(continuations(context_of(row[:-1], [], corpus), 4).children.sum()) == 0, "three tokens are few"
    assert int(continuations(context_of([1, *row[1:-1]], corpus=corpus), 4).children.sum()) == 1


def test_threads_may_share_a_corpus():
    corpus, failures = SuffixCorpus(LEAST_BYTES), []

    def add(start):
        for number in range(200):
            corpus.add([start, number, start, number])

    def look():
        for number in range(200):
            found = continuations(context_of([1, number], corpus=corpus), 4)
            if (found.tokens < 0).any():
                failures.append(number)

    threads = [threading.Thread(target=add, args=(start,)) for start in (1, 2)]
    threads += [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and corpus.total == 2 * 200 * 5


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        ([[1], [2], [3]], "one of these for each of the 2 rows, got 3 of them"),
        ({"content": "x"}, "prediction must be a text, its token ids in one dimension, or a list"),
        ([10**6], "token ids from 0 to 60, got 1000000 to 1000000; was it made by another"),
        (torch.rand(3), "prediction must hold token ids in one dimension"),
    ],
)
def test_what_is_no_prediction_is_refused_in_words(prediction, message):
    with pytest.raises(ValueError, match=message):
        answers_of(MODELS["packed"], {"inputs": random_prompts(2, 5)}, prediction=prediction)


def test_what_is_no_corpus_is_refused_in_words():
    with pytest.raises(ValueError, match=f"max_bytes must be at least {LEAST_BYTES}, got 10"):
        SuffixCorpus(10)
    with pytest.raises(TypeError, match=r"corpus must be a medusa\.SuffixCorpus, got list"):
        references_of(None, [1], [torch.tensor([1])], 61, list)


@pytest.mark.parametrize("expected", [None, [], "", [None, []]])
def test_an_empty_prediction_is_none(expected):
    """Rows that may copy are drafted for in batches where heads do not pay: nothing to copy is no reason."""
    prompts = [torch.tensor([1]), torch.tensor([2])]
    assert references_of(expected, None, prompts, 61, lambda text: [ord(letter) for letter in text]) == ()


def test_steps_of_fixed_shape_refuse_what_they_would_have_to_read_on_the_host():
    with pytest.raises(ValueError, match="cannot work with prediction or corpus"):
        answers_of(MODELS["eager"], {"inputs": random_prompts(1, 5)}, step="static", prediction=[4, 5])


def test_a_chain_follows_the_likeliest_path_and_stops_where_nothing_is_expected():
    corpus = SuffixCorpus(LEAST_BYTES)
    for _ in range(3):
        corpus.add([5, 6, 7, 8, 9, 10])
    corpus.add([5, 6, 7, 8, 11])
    draft = SuffixDrafter(length=4, min_match=2).draft(context_of([5, 6, 7, 8], corpus=corpus))
    assert draft.tokens.tolist() == [[8, 9, 10, 8, 8]]
    assert draft.path_logprob[0, 3] == -torch.inf
