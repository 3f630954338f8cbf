"""The one promise, over everything at once: whatever drafts, however steps run, the text is the base's own.

Greedy text is compared with ``transformers``' own ``generate``, sampled text with plain decoding. A case is
any architecture, batch, tree, drafter, kind of step, processors and criteria that go together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from conftest import (
    ARCHITECTURES,
    BUSHY,
    GROUPED,
    VOCAB_SIZE,
    OracleDrafter,
    RandomDrafting,
    left_padded,
    needs_kernels,
    random_heads,
    random_prompts,
    tiny_model,
)
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from static_oracle import StaticOracle
from transformers import (
    EosTokenCriteria,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)

from medusa import CandidateTree, MedusaHeads, MedusaModel
from medusa.decoding.executor import Executor
from medusa.drafters.draft_model import SelfDrafter, early_exit
from medusa.drafters.dynamic import DynamicHeadsDrafter
from medusa.drafters.heads import HeadsDrafter
from medusa.drafters.protocol import Drafter
from medusa.drafters.suffix import SuffixDrafter
from medusa.drafters.union import UnionDrafter

NUM_HEADS = 3
EOS = [11, 12, 13]
NEVER_CHOSEN = range(40, VOCAB_SIZE)
TOKENS = st.integers(3, VOCAB_SIZE - 1)


@dataclass
class Case:
    """One call, and the drafter that must not change what it returns."""

    architecture: str
    lengths: list[int]
    tree: CandidateTree
    drafter: str
    step: str
    seed: int
    options: dict
    reads: str
    """What processors and criteria read: a name of :data:`READING`."""
    pauses: bool
    """Whether the drafter is left out at random steps."""
    answers: list[list[int]] = field(default_factory=list)
    """Prompt and plain answer of every row, for drafters that know them."""

    @property
    def base(self):
        return tiny_model(self.architecture)

    @property
    def batch(self) -> dict:
        return left_padded(random_prompts(len(self.lengths), max(self.lengths), self.seed), self.lengths)


def heads_of(case: Case, poisoned: bool = False) -> MedusaHeads:
    """Random heads; the second may know nothing but NaN."""
    heads = random_heads(case.seed, num_heads=NUM_HEADS)
    if poisoned:
        for parameter in heads.parameters_of(1):
            torch.nn.init.constant_(parameter, float("nan"))
    return heads


def from_heads(kind: type, poisoned: bool = False) -> Callable[[Case], Drafter]:
    return lambda case: kind(heads_of(case, poisoned), case.base.get_output_embeddings(), case.tree)


def suffix(case: Case) -> Drafter:
    return SuffixDrafter(case.tree.depth, min_match=1)


def union(case: Case) -> Drafter:
    return UnionDrafter([from_heads(DynamicHeadsDrafter)(case), suffix(case), oracle(case)])


def oracle(case: Case) -> Drafter:
    return OracleDrafter(case.answers, case.tree, hit_rate=0.8, seed=case.seed)


def dynamic_and_suffix(poisoned: bool = False) -> Callable[[Case], Drafter]:
    return lambda case: from_heads(DynamicHeadsDrafter, poisoned)(case).with_suffix(case.seed % 9 + 1)


STATIC_DRAFTERS = {
    "suffix": suffix,
    "dynamic and suffix": dynamic_and_suffix(),
    "poisoned dynamic and suffix": dynamic_and_suffix(poisoned=True),
    "static union": lambda case: UnionDrafter([from_heads(HeadsDrafter)(case), suffix(case)]),
    "heads": from_heads(HeadsDrafter),
    "dynamic": from_heads(DynamicHeadsDrafter),
    "poisoned dynamic": from_heads(DynamicHeadsDrafter, poisoned=True),
    "static oracle": lambda case: StaticOracle(case.answers, case.tree),
}
DRAFTERS = {
    **STATIC_DRAFTERS,
    "poisoned heads": from_heads(HeadsDrafter, poisoned=True),
    "union": union,
    "oracle": oracle,
    "early exit": lambda case: SelfDrafter(early_exit(case.base, 1), case.tree),
}


class BansPerRow(LogitsProcessor):
    """Knows its rows by their place in the batch, as many processors of the caller's own do."""

    def __init__(self, banned: list[list[int]]):
        self.banned = banned

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row, banned in enumerate(self.banned):
            scores[row, banned] = -torch.inf
        return scores


class FavoursByPath(LogitsProcessor):
    """Favours the token that is (sum of the path) modulo V."""

    def __call__(self, input_ids, scores):
        favoured = input_ids.sum(dim=1, keepdim=True) % scores.shape[1]
        return scores.scatter_add(1, favoured, torch.full_like(favoured, 2, dtype=scores.dtype))


class EndsRowsApart(StoppingCriteria):
    """Ends each row of the batch after a number of tokens of its own."""

    def __init__(self, lengths: list[int]):
        self.lengths = lengths

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([input_ids.shape[1] >= length for length in self.lengths])


def allowed_tokens(_draw, lengths: list[int], new: int) -> dict:
    """A third of the tokens is forbidden after each, and nothing may follow one that is never chosen."""

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        if len(ids) > max(lengths) and int(ids[-1]) in NEVER_CHOSEN:
            return []
        return [token for token in range(VOCAB_SIZE) if (token + int(ids[-1]) + row) % 3]

    return {"prefix_allowed_tokens_fn": allowed, "suppress_tokens": list(NEVER_CHOSEN)}


def suppressed(draw, lengths: list[int], new: int) -> dict:
    return {"suppress_tokens": draw(st.lists(TOKENS, min_size=1, max_size=9, unique=True))}


def bans_per_row(draw, lengths: list[int], new: int) -> dict:
    banned = [draw(st.lists(TOKENS, min_size=9, max_size=30)) for _ in lengths]
    return {"logits_processor": LogitsProcessorList([BansPerRow(banned)])}


def own_bounds(draw, lengths: list[int], new: int) -> dict:
    """The caller's own objects of classes that ``generate`` also makes by itself, with other bounds."""
    width = max(lengths)
    bounds = [MaxLengthCriteria(width + max(1, new - 2)), EosTokenCriteria(EOS)]
    least = MinLengthLogitsProcessor(width + new // 2, EOS)
    return {
        "stopping_criteria": StoppingCriteriaList(bounds),
        "logits_processor": LogitsProcessorList([least]),
        "eos_token_id": EOS[0],
    }


def row_lengths(draw, lengths: list[int], new: int) -> dict:
    ends = [max(lengths) + draw(st.integers(1, new)) for _ in lengths]
    return {"stopping_criteria": StoppingCriteriaList([EndsRowsApart(ends)]), "eos_token_id": EOS}


READING: dict[str, Callable[..., dict]] = {
    "nothing": lambda *_: {},
    "the logits": suppressed,
    "the path": lambda *_: {"no_repeat_ngram_size": 2, "bad_words_ids": [[5], [6, 7]]},
    "the length": lambda draw, lengths, new: {"min_new_tokens": new // 2, "eos_token_id": EOS},
    "the path, by the caller's own": lambda *_: {"logits_processor": LogitsProcessorList([FavoursByPath()])},
    "allowed tokens": allowed_tokens,
    "the row's index": bans_per_row,
    "the row's length": row_lengths,
    "other bounds": own_bounds,
}
"""What processors and criteria read -> the options that make them, for rows of these lengths."""


@st.composite
def candidate_trees(draw) -> CandidateTree:
    """At least 1 deep; chains often, since they are treated apart."""
    if draw(st.booleans()):
        return CandidateTree.chain(draw(st.integers(1, NUM_HEADS)))
    paths = {(0,)}
    for _ in range(draw(st.integers(0, 11))):
        parent = draw(st.sampled_from(sorted(path for path in {(), *paths} if len(path) < NUM_HEADS)))
        paths.add((*parent, draw(st.integers(0, 2))))
    return CandidateTree.from_paths(paths)


@st.composite
def cases(draw, reads: str, step: str = "general") -> Case:
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    new = draw(st.integers(4, 16))
    options = {**READING[reads](draw, lengths, new), "max_new_tokens": new, "pad_token_id": 0}
    if draw(st.booleans()):
        options |= {"do_sample": True, "temperature": draw(st.sampled_from([0.7, 1.3])), "seed": 5}
        options |= draw(st.sampled_from([{}, {"top_k": 20}, {"top_p": 0.9, "min_p": 0.01}]))
    else:
        options["do_sample"] = False
    return Case(
        architecture=draw(st.sampled_from(sorted(ARCHITECTURES))),
        lengths=lengths,
        tree=draw(candidate_trees()),
        drafter=draw(st.sampled_from(sorted(STATIC_DRAFTERS if step == "static" else DRAFTERS))),
        step=step,
        seed=draw(st.integers(0, 1000)),
        options=options,
        reads=reads,
        pauses=draw(st.booleans()),
    )


def plain_answer(case: Case) -> torch.Tensor:
    """What the base itself writes: (B, T) long, unequal rows padded on the right.

    ``transformers``' own processors take padding for text; a row here is what it is alone.
    """
    if case.options["do_sample"]:
        return MedusaModel(case.base).generate(**case.batch, **case.options)
    if case.reads in ("the path", "the length"):
        ids = case.batch["input_ids"]
        rows = [ids[row : row + 1, -length:] for row, length in enumerate(case.lengths)]
        answers = [case.base.generate(row, **case.options)[0, row.shape[1] :] for row in rows]
        return torch.cat([ids, torch.nn.utils.rnn.pad_sequence(answers, batch_first=True)], dim=1)
    return case.base.generate(**case.batch, **case.options)


def holds(case: Case) -> None:
    note(str(case))
    expected = plain_answer(case)
    width = max(case.lengths)
    case.answers = [row[width - n :].tolist() for row, n in zip(expected, case.lengths, strict=True)]
    drafter, model = DRAFTERS[case.drafter](case), MedusaModel(case.base, step=case.step)
    if case.pauses:
        executor = model._executor
        guide = drafter, RandomDrafting(case.seed)
        executor.plan = lambda call: replace(Executor.plan(executor, call), make_drafter=lambda *_: guide)
    assert model.generate(**case.batch, **case.options, drafter=drafter).tolist() == expected.tolist()
    if not case.options["do_sample"]:
        assert MedusaModel(case.base).generate(**case.batch, **case.options).tolist() == expected.tolist()


LASTING = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
PATH_FREE = ["nothing", "the logits"]


@pytest.mark.parametrize("reads", READING)
@settings(max_examples=6, derandomize=True, **LASTING)
@given(data=st.data())
def test_any_call_gives_the_text_of_the_base(reads, data):
    holds(data.draw(cases(reads)))


@pytest.mark.parametrize("reads", PATH_FREE)
@settings(max_examples=15, derandomize=True, **LASTING)
@given(data=st.data())
def test_any_call_in_static_steps_gives_the_text_of_the_base(reads, data):
    holds(data.draw(cases(reads, "static")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reads", "step"), [(each, "general") for each in READING] + [(each, "static") for each in PATH_FREE]
)
@settings(max_examples=500, **LASTING)
@given(data=st.data())
def test_thousands_of_calls_give_the_text_of_the_base(reads, step, data):
    holds(data.draw(cases(reads, step)))


@needs_kernels
@pytest.mark.parametrize("engine", ["packed", "int8"])
def test_of_two_tokens_with_equal_logits_the_kernels_write_the_same_whatever_is_guessed(engine):
    """Each token has a twin. Torch rounds the two differently in six of twelve such texts."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**{**GROUPED, "hidden_size": 64})).eval()
    with torch.no_grad():
        base.lm_head.weight[31:] = base.lm_head.weight[1:31]
    model, options = MedusaModel(base, engine=engine), {"max_new_tokens": 40, "do_sample": False}
    for seed in range(6):
        prompt = random_prompts(1, 9, seed)
        plain = model.generate(prompt, drafter="plain", **options)
        drafter = OracleDrafter(plain.tolist(), BUSHY, 0.7, seed)
        assert torch.equal(model.generate(prompt, drafter=drafter, **options), plain)
