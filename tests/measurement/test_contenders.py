"""Who can take part in a benchmark, and that all of them say the same."""

import pytest
from tiny_chat import chat_model

from medusa.drafters.registry import DrafterSettings
from medusa.measurement.contenders import THEIRS, check_names, default_names, make_contenders, needs_heads


def test_every_contender_gives_the_same_tokens():
    model = chat_model()
    settings = DrafterSettings(draft_model=model.base)
    names = ["transformers", "prompt-lookup", "assisted", "plain", "heads", "default", "heads+suffix"]
    contenders, skipped = make_contenders(names, model, settings, seed=0)
    assert skipped == {}
    inputs = model.tokenizer("once upon a time, once upon a", return_tensors="pt")
    arguments = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True}
    answers = {name: c.answer(**inputs, **arguments).sequences.tolist() for name, c in contenders.items()}
    assert list(answers) == names
    assert all(answer == answers["plain"] for answer in answers.values())
    assert [name for name, c in contenders.items() if c.is_ours] == names[3:]


def test_what_cannot_run_here_is_left_out_with_the_reason(monkeypatch):
    monkeypatch.setattr("medusa.measurement.contenders.shutil.which", lambda name: None)
    contenders, skipped = make_contenders(THEIRS, chat_model(), DrafterSettings(), seed=0)
    assert list(contenders) == ["transformers", "prompt-lookup"]
    assert "needs a C++ compiler" in skipped["transformers-static"]
    assert "give --draft-model" in skipped["assisted"]


def test_by_default_our_default_takes_part_and_nothing_compiles_on_a_processor():
    model = chat_model()
    theirs = ["transformers", "prompt-lookup", "assisted", "llama.cpp"]
    assert default_names(model) == [*theirs, "plain", "heads", "default"]
    model.heads = None
    assert default_names(model) == [*theirs, "plain"]


def test_heads_are_needed_where_a_contender_drafts_with_them():
    assert needs_heads(None) and needs_heads(["plain", "suffix+heads"])
    assert not needs_heads(["plain", "suffix"])


def test_an_unknown_name_is_refused_with_those_there_are():
    check_names([*THEIRS, "plain", "heads", "heads+suffix"])
    with pytest.raises(
        ValueError, match=r"contender 'fast' is not one of transformers, .* there are .*suffix"
    ):
        check_names(["plain", "fast"])


@pytest.mark.slow
def test_the_compiled_static_cache_of_transformers_answers_on_a_processor():
    model = chat_model()
    contenders, skipped = make_contenders(["transformers-static", "plain"], model, DrafterSettings(), seed=0)
    if skipped:
        pytest.skip(str(skipped))
    inputs = model.tokenizer("hello", return_tensors="pt")
    arguments = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    static, plain = (contenders[name].answer(**inputs, **arguments).sequences for name in contenders)
    assert static.tolist() == plain.tolist()
