"""Grammars asked at every node of a tree give the text of plain decoding with the same grammar."""

from __future__ import annotations

import gc
import json
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_chat import chat_base, chat_model, chat_tokenizer
from transformers import LogitsProcessorList

from medusa.acceptance import grammar
from medusa.acceptance.grammar import GrammarCompiler, json_rule, lark_rule, pattern_rule
from medusa.base.causal_lm import vocab_size
from medusa.decoding.batch import BatchLimits, Row

pytest.importorskip("llguidance")

TOKENIZER = chat_tokenizer()
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yes", "yellow"]}, "c": {"type": "boolean"}},
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, vocab_size(chat_base()), [TOKENIZER.eos_token_id])


def answered(generate, grammar, prompt: str, **options) -> str:
    ids = TOKENIZER(prompt, return_tensors="pt")
    processors = LogitsProcessorList([grammar.processor(ids["input_ids"].shape[1])])
    sequence = generate(**ids, logits_processor=processors, **options)
    return TOKENIZER.decode(sequence[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_trees_write_what_transformers_writes_with_the_same_grammar(compiler, seed):
    grammar, model, base = compiler.compile([json_rule("answer", SCHEMA)]), chat_model(), chat_base()
    options = {"max_new_tokens": 80}
    sampled = {"do_sample": False} if seed is None else {"do_sample": True, "seed": seed, "top_k": 0}
    drafted = answered(model.generate, grammar, "Hello", **options, **sampled)
    assert set(json.loads(drafted)) == {"a", "b", "c"} or len(drafted) >= 80
    if seed is None:
        assert drafted == answered(base.generate, grammar, "Hello", **options, **sampled)
    plain = answered(
        lambda **kw: model.generate(**kw, drafter="plain"), grammar, "Hello", **options, **sampled
    )
    assert drafted == plain


def test_rows_with_grammars_share_passes_with_rows_without(compiler):
    model, grammar = chat_model(), compiler.compile(['answer: "<t>" text "</t>"', json_rule("text", SCHEMA)])
    batch, rows = model.continuous_batch(BatchLimits(max_rows=4)), []
    for index in range(4):
        ids = TOKENIZER(f"Hello {index}", return_tensors="pt")
        kept = [grammar.processor(ids["input_ids"].shape[1])] if index % 2 else []
        options = {"max_new_tokens": 60, "do_sample": True, "top_k": 0, "seed": index}
        request = model.request(**ids, logits_processor=LogitsProcessorList(kept), **options)
        alone = model.generate(**ids, logits_processor=LogitsProcessorList(kept), **options)
        rows.append((Row(request), alone[0, ids["input_ids"].shape[1] :].tolist()))
        batch.add(rows[-1][0])
    while batch.is_busy:
        batch.step()
    assert [row.tokens for row, _ in rows] == [alone for _, alone in rows]
    assert TOKENIZER.decode(rows[1][0].tokens).startswith('<t>{"a": ')


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=8))
def test_what_may_follow_depends_on_the_path_alone_whatever_was_asked_before(compiler, visits):
    grammar = compiler.compile([json_rule("answer", SCHEMA)])
    whole = TOKENIZER('{"a": -12, "b": "yellow", "c": true}')["input_ids"]
    used = grammar.processor(0)
    for length, is_wrong in visits:
        path = whole[:length] + ([TOKENIZER("~")["input_ids"][0]] * is_wrong)
        ids = torch.tensor([path], dtype=torch.long).view(1, -1)
        scores = torch.zeros(1, vocab_size(chat_base()))
        assert torch.equal(used(ids, scores), grammar.processor(0)(ids, scores))


def test_a_wrong_schema_is_refused(compiler):
    with pytest.raises(ValueError, match="Invalid type"):
        compiler.compile([json_rule("answer", {"type": "nonsense"})])
    with pytest.raises(ValueError, match="need a fast tokenizer"):
        GrammarCompiler(object(), 10, [1])


def test_a_schema_that_kills_the_trial_is_refused_and_the_next_one_is_compiled(compiler, monkeypatch):
    monkeypatch.setattr(grammar, "MAX_SCHEMA_DEPTH", 10**9)
    chain = {str(at): {"$ref": f"#/$defs/{at + 1}"} for at in range(5000)}
    with pytest.raises(ValueError, match="a deep stack; ask for a simpler form"):
        compiler.compile([json_rule("answer", {"$ref": "#/$defs/0", "$defs": {**chain, "5000": True}})])
    assert compiler.compile([json_rule("answer", SCHEMA)]).processor(0) is not None


def test_a_schema_that_takes_too_long_to_try_is_refused(compiler, monkeypatch):
    monkeypatch.setattr(compiler._trial, "seconds", 0.01)
    with pytest.raises(ValueError, match=r"more than 0\.01 seconds"):
        compiler.compile([json_rule("answer", {"type": "string", "pattern": "^(a{1000}){1000}$"})])


def test_a_grammar_that_was_compiled_is_not_compiled_again(compiler):
    assert compiler.compile([json_rule("answer", SCHEMA)]) is compiler.compile(
        [json_rule("answer", dict(SCHEMA))]
    )


def test_the_trial_ends_with_its_compiler():
    own = GrammarCompiler(TOKENIZER, vocab_size(chat_base()), [TOKENIZER.eos_token_id])
    own.compile([json_rule("answer", SCHEMA)])
    process = own._trial._process
    assert process.poll() is None
    del own
    gc.collect()
    assert process.poll() is not None


@pytest.mark.parametrize(
    "pattern, text", [("a\\\nb", "a\nb"), ("a\\\\\nb", "a\\\nb"), ("a\nb", "a\nb"), ("a/\\/b", "a//b")]
)
def test_a_pattern_means_in_a_rule_what_it_means_alone(compiler, pattern, text):
    assert re.fullmatch(pattern, text)
    processor = compiler.compile([pattern_rule("answer", pattern)]).processor(0)
    ids = chat_tokenizer()(text, add_special_tokens=False)["input_ids"]
    assert processor._moved_to(ids) and processor._matcher.is_accepting()


@pytest.mark.parametrize(
    "rule, says",
    [
        (lambda: json_rule("answer", {"type": "strin"}), r"Invalid type: strin"),
        (lambda: pattern_rule("answer", "a[b"), r'invalid regex "a\[b": .*unclosed character class'),
        (lambda: lark_rule("answer", "start: x"), r'unknown name: "x"'),
        (lambda: lark_rule("answer", 'root ::= "a" b'), r"nor GBNF \(Rule 'b' not found\)"),
    ],
)
def test_what_is_wrong_with_a_form_is_said_without_what_was_made_of_it(compiler, rule, says):
    with pytest.raises(ValueError, match=says) as refused:
        compiler.compile([rule()])
    assert "x-guidance" not in str(refused.value) and "\n" not in str(refused.value)
