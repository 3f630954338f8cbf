"""Random scenes on bases that keep a state: a text is that of plain decoding, whatever happens beside it.

A scene draws prompts, turns of conversations, trees, drafts of which every k-th token is wrong, chunks of
prompts, and when rows join a batch and are cancelled. Scores of the models all but tie, so that whatever
rounds otherwise writes another text.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from conftest import BUSHY, VOCAB_SIZE, needs_kernels, random_heads
from stateful_models import model_of_twins

from medusa import CandidateTree, MedusaModel
from medusa.decoding.batch import BatchLimits, Row
from medusa.drafters.protocol import Draft, DraftContext, StatelessDrafter

RULES = {
    "convolution": "lfm2",
    "gated delta": "qwen3_5_text",
    "KDA": "kimi_linear",
    "SSD": "mamba2",
    "selective scan": "jamba",
}
"""A type that has each rule."""
TREES = (
    *(CandidateTree.chain(depth) for depth in range(5)),
    BUSHY,
    CandidateTree.from_paths([(0,), (1,), (2,), (3,)]),
    CandidateTree.from_paths([(0,), (1,), (1, 0), (1, 1), (1, 1, 0)]),
)
NUM_SCENES = 200


class DraftsFromAnswers(StatelessDrafter):
    """Knows how the texts go on, and is wrong at every k-th place of them."""

    def __init__(self, texts: list[list[int]], tree: CandidateTree, wrong_every: int, seed: int):
        self.texts = texts
        self.tree = tree
        self.wrong_every = wrong_every
        self.drawn = random.Random(seed)
        self.topology = tree.topology()

    @property
    def max_depth(self) -> int:
        return self.tree.depth

    def draft(self, context: DraftContext) -> Draft:
        rows = [
            self._guesses(context.tokens[row, :length].tolist())
            for row, length in enumerate(context.lengths.tolist())
        ]
        tokens = torch.tensor(rows)
        tokens[:, 0] = context.root
        return Draft(tokens, self.topology)

    def _guesses(self, text: list[int]) -> list[int]:
        known = next((each for each in self.texts if each[: len(text)] == text), [])
        by_depth = []
        for depth, width in enumerate(self.tree.width_by_depth):
            guesses = [self.drawn.randrange(VOCAB_SIZE) for _ in range(width)]
            place = len(text) + depth
            if place < len(known) and place % self.wrong_every:
                guesses[self.drawn.randrange(width)] = known[place]
            by_depth.append(guesses)
        return [0] + [by_depth[len(path) - 1][path[-1]] for path in self.tree.paths[1:]]


@dataclass
class Asked:
    """A request of a scene."""

    prompt: list[int]
    options: dict[str, Any]
    arrives: int
    """The step before which it joins."""
    leaves: int
    """The step before which it is cancelled, if it has not ended."""
    answer: list[int] = field(default_factory=list)
    """What plain decoding writes."""
    row: Row | None = None


def inputs_of(prompt: list[int]) -> dict[str, torch.Tensor]:
    """One row, all of which is text."""
    return {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt)).long()}


@functools.cache
def model_of_rule(rule: str) -> MedusaModel:
    return MedusaModel(model_of_twins(RULES[rule]), random_heads(3), engine="packed")


def drawn_requests(model: MedusaModel, drawn: random.Random) -> list[Asked]:
    """One to five requests, some of which are the next turn of an earlier one."""
    requests: list[Asked] = []
    for _ in range(drawn.randint(1, 5)):
        prompt = [drawn.randrange(3, VOCAB_SIZE) for _ in range(drawn.choice([1, 2, 3, 7, 12, 30]))]
        arrives = drawn.randint(0, 12)
        if requests and drawn.random() < 0.4:
            earlier = drawn.choice(requests)
            prompt = earlier.prompt + earlier.answer + prompt
            arrives = earlier.arrives + drawn.randint(10, 40)
        options = {"max_new_tokens": drawn.randint(1, 20), "do_sample": drawn.random() < 0.5}
        if options["do_sample"]:
            options |= {"temperature": drawn.choice([0.7, 1.3]), "seed": drawn.randrange(1000)}
        leaves = arrives + (drawn.randint(1, 12) if drawn.random() < 0.2 else 10_000)
        plain = model.generate(**inputs_of(prompt), tree=CandidateTree.chain(0), **options)
        requests.append(Asked(prompt, options, arrives, leaves, plain[0, len(prompt) :].tolist()))
    return requests


def play(rule: str, seed: int) -> None:
    """Run the scene of this ``seed``, and compare its texts.

    Raises:
        AssertionError: a text is not that of plain decoding.
    """
    drawn = random.Random(seed)
    model = model_of_rule(rule)
    requests = drawn_requests(model, drawn)
    texts = [asked.prompt + asked.answer for asked in requests]
    drafter = DraftsFromAnswers(texts, drawn.choice(TREES), drawn.choice([1, 2, 3, 5, 1000]), seed)
    limits = BatchLimits(
        max_rows=drawn.randint(1, 4),
        chunk=drawn.choice([1, 2, 3, 5, 8, 13, 64]),
        prefix_bytes=drawn.choice([0, 2**28]),
    )
    batch = model.continuous_batch(limits)
    batch._make_drafter = lambda num_rows, has_references, step: (drafter, None)
    step = 0
    while step <= max(asked.arrives for asked in requests) or batch.is_busy:
        for asked in requests:
            if asked.arrives == step:
                asked.row = Row(model.request(**inputs_of(asked.prompt), **asked.options))
                batch.add(asked.row)
            if asked.leaves == step and asked.row is not None:
                batch.cancel(asked.row)
        batch.step()
        step += 1
    for asked in requests:
        assert asked.row is not None
        written = asked.row.tokens
        is_whole = asked.row.finish_reason != "cancelled"
        expected = asked.answer if is_whole else asked.answer[: len(written)]
        assert written == expected, f"scene {seed} of {rule}"
    together = model.generate(
        **inputs_of(requests[0].prompt),
        drafter=DraftsFromAnswers(texts[:1], drawn.choice(TREES), 3, seed),
        **requests[0].options,
    )
    assert together[0].tolist() == texts[0], f"generate in scene {seed} of {rule}"


@needs_kernels
@pytest.mark.parametrize("rule", RULES)
def test_a_few_random_scenes_write_the_texts_of_plain_decoding(rule):
    for seed in range(3):
        play(rule, seed)


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, NUM_SCENES, 50))
@pytest.mark.parametrize("rule", RULES)
def test_random_scenes_write_the_texts_of_plain_decoding(rule, first):
    for seed in range(first, first + 50):
        play(rule, seed)
