"""What drafters have read of the text, while rows join, leave and change their drafter."""

import pytest
import torch
from conftest import VOCAB_SIZE, tiny_model

from medusa import CandidateTree
from medusa.base.cache import TreeCache
from medusa.drafters.autoregressive import AutoregressiveDrafter
from medusa.drafters.protocol import DraftContext, PlainDrafter
from medusa.drafters.suffix import SuffixDrafter
from medusa.drafters.union import UnionDrafter
from medusa.heads.eagle3 import Eagle3Config, Eagle3Head

BASE = tiny_model("llama")
SIZE = BASE.config.hidden_size


class Text:
    """A row that grows, with the states that a base might have had there."""

    def __init__(self, length: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.length = length
        self.tokens = torch.randint(3, VOCAB_SIZE, (64,), generator=generator)
        self.features = torch.randn(64, 3 * SIZE, generator=generator)


def context_of(texts: list[Text]) -> DraftContext:
    """Of a step, after each text has grown by 2 tokens."""
    for text in texts:
        text.length += 2
    lengths = torch.tensor([text.length for text in texts])
    tokens, features = (
        torch.stack([getattr(text, name) for text in texts]) for name in ("tokens", "features")
    )
    rows = torch.arange(len(texts))
    return DraftContext(
        root=tokens[rows, lengths - 1],
        hidden=features[rows, lengths - 2],
        tokens=tokens,
        lengths=lengths,
        cache=TreeCache(len(texts), 1, "cpu"),
        noise=None,
        features=features,
    )


class Counted:
    """Drafters of one set of weights, and the entries that their layer was run on."""

    def __init__(self):
        torch.manual_seed(3)
        self.heads = Eagle3Head(Eagle3Config.of_base(BASE, fused_layers=(1, 2))).eval()
        for parameter in self.heads.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        self.heads.midlayer.register_forward_pre_hook(lambda _, args: self.count(args[0]))
        self.num_entries = 0

    def count(self, features: torch.Tensor) -> None:
        self.num_entries += features.shape[0] * features.shape[1]

    def drafter(self, depth: int = 3):
        return AutoregressiveDrafter(self.heads, BASE, CandidateTree.chain(depth))


def check_as_if_new(counted: Counted, drafter, texts: list[Text]) -> int:
    """``drafter`` reads in the texts what a new one does; the entries that it ran its layer on."""
    context, new = context_of(texts), counted.drafter()
    new.reset(len(texts))
    expected = new.logits_after_root(context)
    before = counted.num_entries
    torch.testing.assert_close(drafter.logits_after_root(context), expected)
    return counted.num_entries - before


@pytest.fixture
def counted() -> Counted:
    return Counted()


def test_a_row_that_joins_is_read_alone_and_the_others_not_again(counted):
    texts = [Text(5, 1), Text(20, 2)]
    first, second = counted.drafter(3), counted.drafter(2)
    first.reset(2)
    check_as_if_new(counted, first, texts)
    texts.append(Text(30, 3))
    second.reset(3, first)
    # 31 entries of the new row; then its newest one again, and of the others that and two more.
    assert check_as_if_new(counted, second, texts) == 31 + 3 * 3
    assert check_as_if_new(counted, second, texts) == 3 * 3


def test_a_row_that_leaves_takes_only_its_own_along(counted):
    texts = [Text(9, 1), Text(20, 2), Text(7, 3)]
    first, second = counted.drafter(3), counted.drafter(2)
    first.reset(3)
    check_as_if_new(counted, first, texts)
    first.keep_rows(torch.tensor([2, 1]))
    texts = [texts[2], texts[1]]
    second.reset(2, first)
    assert check_as_if_new(counted, second, texts) == 2 * 3


def test_rows_join_and_leave_before_anything_of_them_is_read(counted):
    texts = [Text(9, 1), Text(12, 2)]
    first, second = counted.drafter(3), counted.drafter(2)
    first.reset(2)
    check_as_if_new(counted, first, texts)
    texts += [Text(15, 3), Text(6, 4)]
    first.keep_rows(torch.tensor([0, 1, 2]))  # the last one again, before it was read
    first.keep_rows(torch.tensor([0, 2]))
    texts = [texts[0], texts[2]]
    second.reset(2, first)
    check_as_if_new(counted, second, texts)
    texts += [Text(11, 5)]
    second.keep_rows(torch.tensor([2, 1]))  # the unread one takes the place of a read one
    texts = [texts[2], texts[1]]
    first.reset(2, second)
    check_as_if_new(counted, first, texts)


def test_a_drafter_that_has_read_nothing_yet_hands_nothing_over(counted):
    first, second = counted.drafter(3), counted.drafter(2)
    first.reset(1)
    second.reset(2, first)
    check_as_if_new(counted, second, [Text(9, 1), Text(12, 2)])


def test_nothing_is_taken_over_from_a_drafter_that_reads_nothing(counted):
    texts = [Text(9, 1), Text(12, 2)]
    first, second = counted.drafter(), counted.drafter()
    first.reset(2)
    check_as_if_new(counted, first, texts)
    idle = PlainDrafter()
    idle.reset(2, first)
    context_of(texts)  # a step without guesses
    second.reset(2, idle)
    check_as_if_new(counted, second, texts)


def test_the_parts_of_a_union_take_over_each_from_its_own_kind(counted):
    texts = [Text(9, 1), Text(12, 2)]
    first, second = (UnionDrafter([SuffixDrafter(3), counted.drafter()]) for _ in range(2))
    first.reset(2)
    check_as_if_new(counted, first.drafters[1], texts)
    second.reset(2, first)
    assert check_as_if_new(counted, second.drafters[1], texts) == 2 * 3
    alone = counted.drafter()
    alone.reset(2, second.drafters[1])
    assert check_as_if_new(counted, alone, texts) == 2 * 3
