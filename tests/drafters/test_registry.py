"""Drafters by name, the length of their chains, and what is counted while one works."""

from __future__ import annotations

import pytest
from conftest import VOCAB_SIZE, assert_exact, random_prompts, tiny_model
from refusals import refusals
from tiny_chat import chat_base, chat_model
from transformers import LlamaConfig, LlamaForCausalLM

from medusa import CandidateTree, HeadsConfig, MedusaHeads, MedusaModel
from medusa.acceptance.protocol import independent_chains
from medusa.drafters.draft_model import DraftModelDrafter, LowPrecisionDrafter, SelfDrafter
from medusa.drafters.dynamic import DynamicAutoregressiveDrafter, DynamicHeadsDrafter
from medusa.drafters.heads import HeadsDrafter
from medusa.drafters.protocol import PlainDrafter
from medusa.drafters.registry import DRAFTERS, DrafterFactory, DrafterSettings
from medusa.drafters.suffix import SuffixDrafter
from medusa.drafters.union import UnionDrafter
from medusa.engine.views import packed_unsupported_reason
from medusa.engine.weights.products import PackedMatmul
from medusa.heads.eagle3 import Eagle3Config, Eagle3Head
from medusa.trees.tuned_trees import TunedTree

BUSHY = CandidateTree.from_paths([(0,), (1,), (0, 0), (1, 0)])


def model_with_heads(tree=BUSHY) -> MedusaModel:
    base = tiny_model("llama")
    heads = MedusaHeads(HeadsConfig(base.config.hidden_size, VOCAB_SIZE, num_heads=3))
    return MedusaModel(base, heads, tree)


def test_heads_take_the_tree_tuned_for_the_rows_and_leave_a_union_where_they_do_not_pay():
    plain = model_with_heads()
    tuned = [
        TunedTree(plain.runtime, 4, CandidateTree.chain(0)),
        TunedTree(plain.runtime, 2, CandidateTree.chain(3)),
    ]
    model = MedusaModel(plain.base, plain.heads, BUSHY, tuned=tuned)
    drafters = DrafterFactory(model)
    assert drafters.make("heads", num_rows=2).tree == CandidateTree.chain(3)
    assert drafters.make("heads", num_rows=4).tree == CandidateTree.chain(3), "asked for alone, heads draft"
    assert isinstance(drafters.make("heads+suffix", num_rows=2), UnionDrafter)
    assert isinstance(drafters.make("heads+suffix", num_rows=4), SuffixDrafter)
    assert DrafterFactory(plain).make("heads", num_rows=4).tree == BUSHY


def test_every_name_gives_its_drafter_and_every_drafter_is_exact():
    model = model_with_heads()
    settings = DrafterSettings(draft_length=3, exit_layer=1, draft_model=tiny_model("llama"))
    kinds = {
        "plain": PlainDrafter,
        "heads": HeadsDrafter,
        "dynamic-heads": DynamicHeadsDrafter,
        "dynamic-heads+suffix": DynamicHeadsDrafter,
        "draft-model": DraftModelDrafter,
        "early-exit": SelfDrafter,
        "low-precision": LowPrecisionDrafter,
        "suffix": SuffixDrafter,
        "heads+suffix": UnionDrafter,
        "early-exit+suffix+heads": UnionDrafter,
    }
    names = dict.fromkeys([*kinds, *(name for name in DRAFTERS if name not in {"eagle3", "mtp"})])
    drafters = {name: DrafterFactory(model, settings).make(name) for name in names}
    assert {name: type(drafters[name]) for name in kinds} == kinds
    options = {"do_sample": True, "temperature": 0.9, "seed": 5, "max_new_tokens": 12}
    assert_exact(model, random_prompts(2, 7), *({"drafter": each} for each in drafters.values()), **options)


def test_models_that_draft_run_on_the_engine_of_the_base(tmp_path):
    base = tiny_model("llama")
    if packed_unsupported_reason(base):
        pytest.skip("this torch packs no weights")
    model = MedusaModel(base, engine="packed")
    base.save_pretrained(tmp_path)
    settings = DrafterSettings(exit_layer=1, draft_model=tmp_path)
    for name, attribute in (("early-exit", "cheaper"), ("draft-model", "draft_model")):
        drafter = DrafterFactory(model, settings).make(name)
        layers = getattr(drafter, attribute).modules()
        assert any(isinstance(layer, PackedMatmul) for layer in layers)
        call = {"do_sample": False, "max_new_tokens": 12}
        assert_exact(model, random_prompts(2, 7), {"drafter": drafter}, **call)


def test_chains_have_the_length_asked_for_and_heads_keep_their_tree():
    model = model_with_heads()
    settings = DrafterSettings(draft_length=7, exit_layer=1)
    assert DrafterFactory(model, settings).make("suffix").max_depth == 7
    assert DrafterFactory(model, settings).make("early-exit").tree == CandidateTree.chain(7)
    assert DrafterFactory(model, settings).make("heads").tree == BUSHY
    assert DrafterFactory(model, settings).make("heads", only_chain=True).tree == CandidateTree.chain(3)
    shorter = DrafterSettings(draft_length=2)
    assert DrafterFactory(model, shorter).make("heads", only_chain=True).tree == CandidateTree.chain(2)
    assert DrafterFactory(model, settings).make("heads+suffix").max_depth == 7


def test_heads_whose_tuned_tree_is_the_root_alone_draft_a_chain():
    assert DrafterFactory(model_with_heads(CandidateTree.chain(0))).make("heads").tree == CandidateTree.chain(
        3
    )


def test_a_wider_draft_is_for_rules_that_take_a_tree():
    model = model_with_heads()
    settings = DrafterSettings(draft_length=4, draft_width=2, exit_layer=1)
    assert DrafterFactory(model, settings).make("early-exit").tree == independent_chains(2, 4)
    assert DrafterFactory(model, settings).make("early-exit", only_chain=True).tree == CandidateTree.chain(4)


@pytest.mark.parametrize("name", ["heads", "dynamic-heads", "suffix", "early-exit", "heads+suffix"])
def test_every_drafter_fills_the_tree_it_is_given_and_is_new_each_time(name):
    model = model_with_heads()
    drafters = DrafterFactory(model, DrafterSettings(exit_layer=1))
    tree = CandidateTree.from_paths([(0,), (0, 1)])
    drafter = drafters.make(name, tree)
    assert drafter.max_depth == 2 and drafters.make(name).max_depth != 1
    for part in getattr(drafter, "drafters", [drafter]):
        assert getattr(part, "tree", tree) == tree
    assert drafters.make(name, tree) is not drafter is not drafter.with_tree()
    assert type(drafters.make(name, CandidateTree.chain(0))) is PlainDrafter


def test_available_drafters_are_those_that_lack_nothing():
    bare = MedusaModel(tiny_model("llama"))
    lacking = set(DRAFTERS) - set(DrafterFactory(bare, DrafterSettings()).available())
    assert lacking == {"heads", "dynamic-heads", "eagle3", "mtp", "draft-model", "early-exit", "plain"}
    everything = DrafterSettings(exit_layer=1, draft_model="somewhere")
    lacking = set(DRAFTERS) - set(DrafterFactory(model_with_heads(), everything).available())
    assert lacking - {"eagle3"} == {"mtp", "plain"}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("early-exit", {"exit_layer": 1}),
        ("draft-model+suffix", {"draft_model": tiny_model("llama"), "draft_length": 2}),
        ("suffix", {}),
    ],
)
def test_a_model_makes_drafters_that_need_more_than_a_name(name, settings):
    model = model_with_heads()
    drafter = model.make_drafter(name, **settings)
    assert drafter.max_depth == settings.get("draft_length", drafter.max_depth)
    call = {"do_sample": False, "max_new_tokens": 8}
    assert_exact(model, random_prompts(2, 7), *[{"drafter": drafter}] * 2, **call)
    assert model.make_drafter(name, CandidateTree.chain(3), **settings).max_depth == 3


def made_of_a_base(name: str):
    return lambda: DrafterFactory(MedusaModel(tiny_model("llama"))).make(name)


def made(name: str, **settings):
    return lambda: model_with_heads().make_drafter(name, **settings)


test_a_drafter_that_cannot_be_is_refused_with_what_it_lacks = refusals(
    ("unknown", made_of_a_base("lookup"), "'lookup' is unknown; there are heads, ... plain, and unions"),
    ("a part of a union", made_of_a_base("heads+lookup"), "drafter 'lookup' is unknown"),
    ("one twice", made_of_a_base("suffix+suffix"), "names each drafter once, ... got 'suffix+suffix'"),
    ("nothing beside one", made_of_a_base("plain+suffix"), "'plain', ... got 'plain+suffix'"),
    ("no heads", made_of_a_base("heads"), "'heads' needs heads, ... give heads= (--heads)"),
    ("no layer", made_of_a_base("early-exit"), "1 to 1 ... exit_layer= to make_drafter (--exit-"),
    ("no model", made_of_a_base("draft-model"), "draft_model= to make_drafter (--draft-model)"),
    ("another's layer", made("suffix", exit_layer=1), "exit_layer goes with the drafter early-exit"),
    ("another's model", made("heads", draft_model="x"), "draft_model goes with the drafter draft-model"),
    ("layer 0", made("early-exit", exit_layer=0), "exit_layer must be at least 1, got 0"),
    ("no EAGLE-3 head", made("eagle3"), "an EAGLE-3 head; give eagle3= to make_drafter (--eagle3)"),
    ("length 0", lambda: DrafterSettings(draft_length=0), "draft_length must be at least 1, got 0"),
    ("width 0", lambda: DrafterSettings(draft_width=0), "draft_width must be at least 1, got 0"),
)


def test_a_draft_model_directory_is_loaded_and_its_tokens_checked(tmp_path):
    model = chat_model()
    chat_base(seed=3).save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    drafter = DrafterFactory(model, DrafterSettings(draft_model=tmp_path, draft_length=2)).make("draft-model")
    assert drafter.draft_model.config.num_hidden_layers == 2
    model.tokenizer.add_tokens(["<|new|>"])
    with pytest.raises(ValueError, match="draft model must share the base model's tokens, 1 differ"):
        DrafterFactory(model, DrafterSettings(draft_model=tmp_path)).make("draft-model")
    other = LlamaForCausalLM(LlamaConfig(**{**tiny_model("llama").config.to_dict(), "vocab_size": 500}))
    with pytest.raises(ValueError, match="draft model has vocab_size=500"):
        DrafterFactory(model_with_heads(), DrafterSettings(draft_model=other)).make("draft-model")


def test_the_default_is_a_dynamic_tree_with_copies_where_drafts_may_have_any_shape():
    base = tiny_model("llama")
    head = Eagle3Head(Eagle3Config.of_base(base, fused_layers=(1, 2), max_depth=3)).eval()
    drafters = DrafterFactory(MedusaModel(base, head, CandidateTree.chain(3)))
    for step in ("general", "compiled"):
        default = drafters.default(1, step)
        assert isinstance(default, DynamicAutoregressiveDrafter)
        assert default.suffix_length > 0
    assert drafters.default(1, "static").tree == CandidateTree.chain(3)
