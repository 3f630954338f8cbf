"""What would have an operator of the kernels read or write beside its memory is refused where it comes in."""

from __future__ import annotations

import pytest
import torch

from medusa.engine.kernels import kernels_unsupported_reason, pack

pytestmark = pytest.mark.skipif(
    kernels_unsupported_reason() is not None, reason="no C++ compiler is installed"
)
SEEN = torch.tensor([[[[0, 4, 1, 0], [0, 4, 1, 2]]]], dtype=torch.int32)
TWO_LENGTHS = torch.ones(2, dtype=torch.long)


def ids(*shape: int, value: int = 0) -> torch.Tensor:
    return torch.full(shape, value)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def reals(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0.1)


def flags(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bool)


GIVEN = {
    "continuations": {  # one row of 8 tokens
        **{"tokens": ids(1, 8), "lengths": ids(1, value=8), "predictions": [ids(4)]},
        **{"corpora": [ints(3, 64), ints(2, 32)], "totals": ids(1), "odds": reals(3, 17)},
        **{"usual": reals(3, 17), "trust": reals(3), "said": ids(1, 7), "depth": 4, "vocab_size": 9},
    },
    "grow": {  # a beam of two nodes, and 5 columns of a vocabulary of 9
        **{"logits": reals(1, 2, 5), "sharpness": reals(1), "noise": reals(1, 3, 9), "token_map": ids(5)},
        **{"column_of": ids(9), "expected": ids(1, 6), "children": ids(1, 6, 3), "chances": reals(1, 6)},
        **{"paths": ids(1, 2, 2), "at": ids(1, 2), "worth": reals(1, 2), "beam": ids(1, 2)},
        **{"leading": reals(1, 4), "wanted": 4, "first": 2, "fanout": 3, "width": 4},
        **{"is_expected": True, "least_worth": 0.0},
    },
    "tree_of": {  # one level of three candidates
        **{"root": ids(1), "levels": [ids(1, 3), reals(1, 3), ids(1, 3, value=-1)], "expected": ids(1, 6)},
        **{"children": ids(1, 6, 3), "chances": reals(1, 6), "at": ids(1, 2), "worth": reals(1, 2)},
        **{"beam": ids(1, 2), "nodes": 4, "max_depth": 3},
    },
    "tree_attention": {  # two nodes, 6 slots
        **{"query": reals(1, 4, 2, 16), "key": reals(1, 2, 6, 16), "value": reals(1, 2, 6, 16)},
        **{"seen": SEEN, "scale": 1.0, "cap": 0.0, "sinks": reals(4)},
    },
    "seen_slots": {
        **{"lengths": TWO_LENGTHS, "depths": ids(1, 3), "ancestors": flags(1, 3, 3)},
        **{"first": 0, "end": 3, "by_range": False, "window": None},
    },
    "hashed_bits": {"seeds": ids(2), "positions": ids(2, 3), "vocab_size": 5},
    "remember": {"ring": ints(3, 64), "latest": ints(2, 32), "total": 0, "text": ids(9)},
    "packed_product": {"x": reals(2, 40), "panels": None, "scales": None, "bias": reals(24), "width": 24},
}
"""What is right."""
BEYOND = {
    "continuations": [
        ("lengths", ids(1, value=9)),
        ("lengths", ids(1)),
        ("predictions", [ints(4)]),
        ("predictions", [ids(4)] * 2),
        ("corpora", [ints(3, 64)]),
        ("totals", ids(1, value=-1)),
        ("said", torch.tensor([[1, 17, 0, 0, 0, 0, 0]])),
        ("odds", reals(3, 9)),
        ("trust", reals(2)),
    ],
    "grow": [
        ("expected", ids(1, 6, value=9)),
        ("expected", ids(1, 6, value=-1)),
        ("children", ids(1, 6, 3, value=6)),
        ("chances", reals(1, 5)),
        ("at", ids(1, 2, value=6)),
        ("noise", reals(1, 3, 8)),
        ("noise", reals(1, 1, 9)),
        ("token_map", ids(5, value=9)),
        ("sharpness", reals(0)),
        ("worth", reals(1, 1)),
        ("leading", reals(1, 1)),
        ("fanout", 6),
        ("wanted", 0),
    ],
    "tree_of": [
        ("at", ids(1, 2, value=6)),
        ("beam", ids(1, 2, value=3)),
        ("levels", [ids(1, 3), reals(1, 3), ids(1, 3, value=3)]),
        ("levels", [ids(1, 3), reals(1, 2), ids(1, 3)]),
    ],
    "tree_attention": [
        ("seen", SEEN + 1),
        ("seen", SEEN - 1),
        ("seen", SEEN[:, :, :1].contiguous()),
        ("value", reals(1, 2, 5, 16)),
        ("key", reals(1, 3, 6, 16)),
        ("key", reals(1, 2, 6, 15)),
        ("sinks", reals(3)),
    ],
    "seen_slots": [("end", 4), ("ancestors", flags(1, 2, 2)), ("depths", ids(3, 3))],
    "hashed_bits": [("seeds", ids(1))],
    "remember": [("text", ids(9, value=2**31)), ("latest", ints(1, 32)), ("total", -1)],
    "packed_product": [("bias", reals(23)), ("scales", reals(23))],
}
"""Arguments that are not, one at a time."""


@pytest.mark.parametrize(
    "operator, name, wrong", [(op, *pair) for op, pairs in BEYOND.items() for pair in pairs]
)
def test_what_lies_beyond_a_tensor_is_refused(operator, name, wrong):
    call, given = getattr(torch.ops.medusa, operator), {**GIVEN[operator]}
    if operator == "packed_product":
        given["panels"] = pack([torch.zeros(24, 40)])[0]
    call(*given.values())
    with pytest.raises(RuntimeError, match=r"must|are wanted"):
        call(*{**given, name: wrong}.values())
