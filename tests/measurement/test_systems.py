"""Who can take part in a benchmark, and that all of them say the same."""

import pytest
import torch
from tiny_chat import chat_heads, chat_model, save_chat_model

from medusa import HeadsCheckpoint, save_heads
from medusa.drafters.registry import DrafterSettings
from medusa.heads.adapter import Adapter
from medusa.measurement.systems import (
    THEIRS,
    check_names,
    default_names,
    make_systems,
    needs_heads,
    other_heads,
)


def test_every_system_gives_the_same_tokens():
    model = chat_model()
    names = ["transformers", "prompt-lookup", "assisted", "plain", "heads", "default", "heads+suffix"]
    systems, skipped = make_systems(names, model, DrafterSettings(draft_model=model.base))
    assert skipped == {}
    inputs = model.tokenizer("once upon a time, once upon a", return_tensors="pt")
    arguments = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True}
    answers = {name: c.answer(**inputs, **arguments).sequences.tolist() for name, c in systems.items()}
    assert list(answers) == names
    assert all(answer == answers["plain"] for answer in answers.values())
    assert [name for name, c in systems.items() if c.is_ours] == names[3:]


def test_what_cannot_run_here_is_left_out_with_the_reason(monkeypatch):
    monkeypatch.setattr("medusa.measurement.systems.shutil.which", lambda name: None)
    systems, skipped = make_systems(THEIRS, chat_model(), DrafterSettings())
    assert list(systems) == ["transformers", "prompt-lookup"]
    assert "needs a C++ compiler" in skipped["transformers-static"]
    assert "give --draft-model" in skipped["assisted"]


def test_by_default_our_default_takes_part_and_nothing_compiles_on_a_processor():
    model = chat_model()
    theirs = ["transformers", "prompt-lookup", "assisted", "llama.cpp"]
    assert default_names(model) == [*theirs, "plain", "heads", "default"]
    model.heads = None
    assert default_names(model) == [*theirs, "plain", "default"]


def test_heads_are_needed_where_a_system_drafts_with_them():
    assert needs_heads(None) and needs_heads(["plain", "suffix+heads"])
    assert not needs_heads(["plain", "suffix"])


def test_an_unknown_name_is_refused_with_those_there_are():
    check_names([*THEIRS, "plain", "heads", "heads+suffix"])
    with pytest.raises(ValueError, match=r"system 'fast' is not one of transformers, .* there are .*suffix"):
        check_names(["plain", "fast"])


@pytest.mark.slow
def test_the_compiled_static_cache_of_transformers_answers_on_a_processor():
    model = chat_model()
    systems, skipped = make_systems(["transformers-static", "plain"], model, DrafterSettings())
    if skipped:
        pytest.skip(str(skipped))
    inputs = model.tokenizer("hello", return_tensors="pt")
    arguments = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    static, plain = (systems[name].answer(**inputs, **arguments).sequences for name in systems)
    assert static.tolist() == plain.tolist()


def test_other_heads_are_computed_as_the_models_own_are(tmp_path):
    model, made = chat_model(), []
    _, heads = save_chat_model(tmp_path)
    model.generate = lambda drafter, **call: made.append(drafter)
    other_heads(f"others={heads}", model).answer()
    assert type(made[0].heads) is type(model.optimized_heads)


def test_heads_with_an_adapter_answer_for_another_base(tmp_path):
    adapter = Adapter({"peft_type": "LORA"}, {"x": torch.zeros(1)})
    save_heads(HeadsCheckpoint(chat_heads(), "base", adapter=adapter), tmp_path / "joint")
    with pytest.raises(ValueError, match="trained with an adapter, whose base gives other answers"):
        other_heads(f"joint={tmp_path / 'joint'}", chat_model())
