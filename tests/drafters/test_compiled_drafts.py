"""A compiled draft is the heads' own draft, for rows of any number and length, greedy and sampled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import GROUPED, VOCAB_SIZE
from transformers import LlamaConfig, LlamaForCausalLM

from medusa import CandidateTree, HeadsConfig, MedusaHeads
from medusa.acceptance.protocol import DraftKind
from medusa.base.causal_lm import output_embedding
from medusa.drafters.compiled import CompiledDrafter
from medusa.drafters.dynamic import DynamicHeadsDrafter
from medusa.drafters.heads import HeadsDrafter
from medusa.drafters.protocol import DraftContext
from medusa.engine import prepared_base
from medusa.engine.quick_heads import quick_heads
from medusa.engine.views import missing_for_kernels
from medusa.heads.causal_layer import LayerConfig

SIZES = {**GROUPED, "head_dim": 16, "num_hidden_layers": 1}
BASE = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
TREE = CandidateTree.from_paths([(0,), (1,), (0, 0), (0, 0, 0)])

pytestmark = pytest.mark.skipif(missing_for_kernels(BASE) is not None, reason="no C++ compiler is installed")


def heads_drafter(kind, engine="int8", tree=TREE, suffix_length=8, **config):
    torch.manual_seed(1)
    settings = {"num_heads": 3, "fused_layers": (1,), "reads_path": True, **config}
    token_map = range(3, 3 + settings["token_map_size"]) if "token_map_size" in settings else None
    heads = MedusaHeads(HeadsConfig(BASE.config.hidden_size, VOCAB_SIZE, **settings), token_map)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    embedding = output_embedding(prepared_base(BASE, engine))
    quick = quick_heads(heads, embedding)
    if kind == "fixed":
        return HeadsDrafter(quick, embedding, tree)
    return DynamicHeadsDrafter(quick, embedding, tree, suffix_length=suffix_length)


def context(lengths, is_sampled, drafter):
    generator = torch.Generator().manual_seed(sum(lengths))
    rows, longest = len(lengths), max(lengths)
    tokens = torch.randint(5, (rows, longest), generator=generator)
    given = DraftContext(
        root=tokens.gather(1, torch.tensor(lengths)[:, None] - 1)[:, 0],
        hidden=torch.randn(rows, 2 * BASE.config.hidden_size, generator=generator),
        tokens=tokens,
        lengths=torch.tensor(lengths),
        cache=None,
        noise=None,
        features=torch.randn(rows, longest, 2 * BASE.config.hidden_size, generator=generator),
    )
    if not is_sampled:
        return given
    noise = -torch.rand(rows, drafter.max_depth + 1, VOCAB_SIZE, generator=generator).log().neg().log()
    temperature = torch.linspace(0, 1.5, rows)[:, None, None] if rows > 1 else 0.7
    return replace(given, noise=noise, temperature=temperature)


def check(drafter, are_sampled):
    compiled = CompiledDrafter(drafter)
    for is_sampled in are_sampled:
        compiled.prepare(is_sampled)
        for lengths in ([30, 4, 17], [3], [100], [64, 65]):
            given = context(lengths, is_sampled, drafter)
            compiled.begin(len(lengths))
            with torch.no_grad():
                mine, theirs = compiled.draft(given), drafter.draft(given)
            assert torch.equal(mine.tokens, theirs.tokens)
            for field in ("parents", "depths", "ancestors", "lineage"):
                assert torch.equal(getattr(mine.topology, field), getattr(theirs.topology, field)), field
            if theirs.worth is not None:
                torch.testing.assert_close(mine.worth, theirs.worth, atol=1e-2, rtol=1e-2)
    again = CompiledDrafter(drafter)
    assert again.prepare(are_sampled[0]) < 5, "loaded, not compiled again"
    assert compiled.sampled_kind(DraftKind.WITH_REPLACEMENT) is drafter.sampled_kind(
        DraftKind.WITH_REPLACEMENT
    )


def test_a_compiled_draft_is_the_heads_own_and_kept():
    small = {"tree": CandidateTree.chain(1), "suffix_length": 2}
    check(heads_drafter("dynamic", **small, unembedding="token_map", token_map_size=40), [False])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "engine", "config"),
    [
        ("dynamic", "int8", {"unembedding": "token_map", "token_map_size": 40}),
        ("fixed", "int8", {}),
        ("dynamic", "int8", {"context": LayerConfig.of_base(BASE)}),
        ("dynamic", "packed", {"reads_path": False, "unembedding": "full"}),
        ("fixed", "packed", {"reads_path": False}),
    ],
    ids=["token-map", "shared", "text", "full", "no-path"],
)
def test_drafts_of_all_kinds_of_heads(kind, engine, config):
    check(heads_drafter(kind, engine, **config), [False, True])


def test_a_library_is_named_for_all_that_it_depends_on():
    dynamic, fixed = (heads_drafter(kind) for kind in ("dynamic", "fixed"))
    longer = dynamic.with_suffix(4)
    paths = {CompiledDrafter(each).path(False) for each in (dynamic, fixed, longer)}
    paths |= {CompiledDrafter(dynamic).path(True)}
    with torch.no_grad():
        next(dynamic.heads.parameters()).add_(1)
    assert len(paths | {CompiledDrafter(dynamic).path(False)}) == 4, "it serves heads of any weights"


def test_drawn_candidates_are_drafted_as_before():
    drafter = heads_drafter("fixed")
    compiled = CompiledDrafter(drafter)
    kind = drafter.sampled_kind(DraftKind.WITHOUT_REPLACEMENT)
    given = replace(context([9], False, drafter), sampled=kind, seeds=torch.tensor([3]))
    assert torch.equal(compiled.draft(given).tokens, drafter.draft(given).tokens)


def test_two_calls_that_read_the_text_keep_apart_what_they_have_read():
    first, second = (heads_drafter("dynamic", context=LayerConfig.of_base(BASE)) for _ in range(2))
    made = CompiledDrafter(first)
    mine, theirs = made.for_drafter(first), made.for_drafter(second)
    mine.begin(3)
    theirs.begin(1)
    assert mine.draft(context([9, 4, 7], False, first)).tokens.shape[0] == 3
    assert theirs.draft(context([9], False, second)).tokens.shape[0] == 1
    mine.keep_rows(torch.tensor([0, 2]))
    assert mine.draft(context([9, 7], False, first)).tokens.shape[0] == 2
