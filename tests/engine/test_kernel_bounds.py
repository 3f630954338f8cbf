"""What would have an operator of the kernels read or write beside its memory is refused where it comes in."""

from __future__ import annotations

import pytest
import torch

from medusa.engine.kernels import kernels_unsupported_reason
from medusa.engine.weights.forms import packed
from medusa.engine.weights.products import GroupQuantisedMatmul
from medusa.engine.weights.stored import QuantisedRows

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


def quantised_panels(num_rows: int) -> torch.Tensor:
    """Packed rows of Q8_0 with 64 inputs: of another number than is asked for."""
    rows = torch.zeros(num_rows, 68, dtype=torch.uint8)
    return GroupQuantisedMatmul([QuantisedRows(rows, 8, 64)], None, True).panels


GIVEN = {
    "continuations": {  # one row of 8 tokens
        **{"tokens": ids(1, 8), "lengths": ids(1, value=8), "predictions": [ids(4)]},
        **{"corpora": [ints(3, 64), ints(2, 32)], "totals": ids(1), "odds": reals(3, 17)},
        **{
            "usual": reals(3, 17),
            "trust": reals(3),
            "source_guesses": ids(1, 7),
            "depth": 4,
            "vocab_size": 9,
        },
    },
    "grow": {  # a beam of two nodes, and 5 columns of a vocabulary of 9
        **{"logits": reals(1, 2, 5), "sharpness": reals(1), "noise": reals(1, 5)},
        **{"expected_noise": reals(1, 6), "token_map": ids(5), "columns": ids(9)},
        **{"expected_tokens": ids(1, 6), "children": ids(1, 6, 3), "shares": reals(1, 6)},
        **{
            "paths": ids(1, 2, 2),
            "match_nodes": ids(1, 2),
            "path_logprob": reals(1, 2),
            "candidate_numbers": ids(1, 2),
        },
        **{"largest_values": reals(1, 4), "num_wanted": 4, "num_candidates": 2, "fanout": 3, "beam_width": 4},
        **{"has_match": True, "min_accept_prob": 0.0},
    },
    "tree_of": {  # one level of three candidates
        **{
            "root": ids(1),
            "levels": [ids(1, 3), reals(1, 3), ids(1, 3, value=-1)],
            "expected_tokens": ids(1, 6),
        },
        **{
            "children": ids(1, 6, 3),
            "shares": reals(1, 6),
            "match_nodes": ids(1, 2),
            "path_logprob": reals(1, 2),
        },
        **{"candidate_numbers": ids(1, 2), "num_nodes": 4, "max_depth": 3},
    },
    "tree_attention": {  # two nodes, 6 slots
        **{"query": reals(1, 4, 2, 16), "key": reals(1, 2, 6, 16), "value": reals(1, 2, 6, 16)},
        **{"seen": SEEN, "scale": 1.0, "cap": 0.0, "sinks": reals(4)},
    },
    "seen_slots": {
        **{"lengths": TWO_LENGTHS, "depths": ids(1, 3), "ancestors": flags(1, 3, 3)},
        **{"first": 0, "end": 3, "by_range": False, "window": None},
    },
    "hashed_bits": {"seeds": ids(2), "positions": ids(2, 3), "vocab_size": 5, "tokens": ints(2, 4)},
    "largest": {"scores": reals(2, 5), "count": 5},
    "cut_below": {"scores": reals(2, 5), "edges": reals(2, 1), "filler": 0.0},
    "noisy_argmax": {"scores": reals(2, 5), "seeds": ids(2), "positions": ids(2)},
    "remember": {"ring": ints(3, 64), "latest": ints(2, 32), "total": 0, "text": ids(9)},
    "packed_product": {"x": reals(2, 40), "panels": None, "scales": None, "bias": reals(24), "width": 24},
    "expert_products": {  # two rows, each with two of three experts of 32 outputs
        **{"x": reals(2, 64), "choices": ids(2, 2, value=2), "panels": None, "scales": None},
        **{"bias": reals(96), "num_experts": 3, "width": 32},
    },
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
        ("source_guesses", torch.tensor([[1, 17, 0, 0, 0, 0, 0]])),
        ("odds", reals(3, 9)),
        ("trust", reals(2)),
    ],
    "grow": [
        ("expected_tokens", ids(1, 6, value=9)),
        ("expected_tokens", ids(1, 6, value=-1)),
        ("children", ids(1, 6, 3, value=6)),
        ("shares", reals(1, 5)),
        ("match_nodes", ids(1, 2, value=6)),
        ("noise", reals(1, 4)),
        ("noise", None),
        ("expected_noise", reals(1, 5)),
        ("token_map", ids(5, value=9)),
        ("sharpness", reals(0)),
        ("path_logprob", reals(1, 1)),
        ("largest_values", reals(1, 1)),
        ("fanout", 6),
        ("num_wanted", 0),
    ],
    "tree_of": [
        ("match_nodes", ids(1, 2, value=6)),
        ("candidate_numbers", ids(1, 2, value=3)),
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
    "hashed_bits": [("seeds", ids(1)), ("tokens", ids(2, 4)), ("tokens", ints(1, 4))],
    "largest": [("count", 6), ("count", 0), ("scores", reals(5))],
    "cut_below": [("edges", reals(1, 1)), ("edges", reals(2)), ("scores", reals(5, 2).T)],
    "noisy_argmax": [
        ("scores", reals(2, 0)),
        ("scores", reals(3, 5)),
        ("seeds", ids(1)),
        ("positions", ids(3)),
    ],
    "remember": [("text", ids(9, value=2**31)), ("latest", ints(1, 32)), ("total", -1)],
    "packed_product": [("bias", reals(23)), ("scales", reals(23))],
    "expert_products": [
        ("choices", ids(2, 2, value=3)),
        ("choices", ids(2, 2, value=-1)),
        ("choices", ids(3, 2)),
        ("x", reals(2, 3, 64)),
        ("x", reals(2, 61)),
        ("bias", reals(95)),
        ("num_experts", 4),
        ("panels", quantised_panels(128)),
        ("width", 64),
        ("width", 33),
    ],
}
"""Arguments that are not, one at a time."""


@pytest.mark.parametrize(
    "operator, name, wrong", [(op, *pair) for op, pairs in BEYOND.items() for pair in pairs]
)
def test_what_lies_beyond_a_tensor_is_refused(operator, name, wrong):
    call, given = getattr(torch.ops.medusa, operator), {**GIVEN[operator]}
    if operator == "packed_product":
        given["panels"] = packed([torch.zeros(24, 40)])[1][0]
    if operator == "expert_products":
        given["panels"] = packed([torch.zeros(96, 64)])[1][0]
    call(*given.values())
    with pytest.raises(RuntimeError, match="must"):
        call(*{**given, name: wrong}.values())
