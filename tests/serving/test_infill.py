"""Filling in the middle: a text before and one after a gap become the prompt of the model's own training."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
import tokenizer_kinds
import torch
from tiny_chat import chat_model, chat_tokenizer
from tiny_server import Running, client_of, running, tiny_service
from transformers import AddedToken, LlamaConfig, LlamaForCausalLM

from medusa import CandidateTree, MedusaModel
from medusa.serving.completion_requests import CompletionRequest, LlamaInfillRequest
from medusa.serving.infill import infill_tokens, start_tokens, tokens_after

QWEN = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
BEFORE, AFTER = "def add(a, b):\n    ", "\n\nprint(add(1, 2))\n"


def tokenizer_with(*names: str, special: bool = True):
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens([AddedToken(name, special=special, normalized=False) for name in names])
    return tokenizer


def infill_model(special: bool = True) -> MedusaModel:
    """Without heads: drafts are copied from the text."""
    tokenizer = tokenizer_with(*QWEN, special=special)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        **sizes,
        max_position_embeddings=512,
        eos_token_id=256,
        pad_token_id=256,
        bos_token_id=None,
        initializer_range=0.3,
    )
    return MedusaModel(LlamaForCausalLM(config).eval(), tokenizer=tokenizer)


@pytest.fixture(scope="module", params=[True, False], ids=["control tokens", "tokens of the user"])
def model(request):
    return infill_model(request.param)


@pytest.fixture(scope="module")
def server(model):
    with running(model, allow_plain=True) as started:
        yield started


def raw(before: str, after: str) -> str:
    return f"<|fim_prefix|>{before}<|fim_suffix|>{after}<|fim_middle|>"


def complete(server: Running, **asked):
    return client_of(server).completions.create(model="tiny", **asked)


def test_a_gap_is_filled_as_generate_fills_it_streamed_or_not_drafted_or_not(server, model):
    tokenizer = model.tokenizer
    ids = tokenizer(raw(BEFORE, AFTER), return_tensors="pt", add_special_tokens=False)
    ends = [256, *tokenizer.convert_tokens_to_ids(list(QWEN))]
    for seed, temperature in ((0, 0.0), (5, 0.7), (6, 1.0)):
        sampled = {"temperature": temperature, "seed": seed, "do_sample": True, "top_k": 0}
        options = sampled if temperature else {"do_sample": False}
        plain = {"tree": CandidateTree.chain(0), "eos_token_id": ends, "max_new_tokens": 24}
        sequence = model.generate(**ids, **plain, **options)
        tokens = sequence[0, ids["input_ids"].shape[1] :].tolist()
        has_ended = tokens[-1] in ends
        text = tokenizer.decode(tokens[: len(tokens) - has_ended], skip_special_tokens=True)
        asked = {"temperature": temperature, "seed": seed, "max_tokens": 24}
        for prompt in ({"prompt": BEFORE, "suffix": AFTER}, {"prompt": raw(BEFORE, AFTER)}):
            for more in ({}, {"extra_body": {"medusa_plain": True}}):
                whole = complete(server, **asked, **prompt, **more)
                assert whole.choices[0].text == text
                assert whole.choices[0].finish_reason == ("stop" if has_ended else "length")
                stream = complete(server, **asked, **prompt, **more, stream=True)
                assert "".join(chunk.choices[0].text for chunk in stream) == text


def test_mistrals_endpoint_for_gaps_gives_the_same_text_in_the_form_of_a_chat(server):
    for temperature in (0, 1):
        asked = {"prompt": BEFORE, "suffix": AFTER, "max_tokens": 24, "temperature": temperature, "seed": 4}
        text = complete(server, **asked).choices[0].text
        url = f"{server.url}/v1/fim/completions"
        whole = httpx.post(url, json=asked, timeout=60).json()
        assert whole["object"] == "chat.completion" and whole["choices"][0]["message"]["content"] == text
        lines = httpx.post(url, json={**asked, "stream": True}, timeout=60).text.splitlines()
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text


def fill(server: Running, **asked) -> httpx.Response:
    return httpx.post(f"{server.url}/infill", json=asked, timeout=60)


def test_llama_cpps_endpoint_for_gaps_gives_the_same_text_in_its_own_form(server, model):
    gap = {"input_prefix": BEFORE, "input_suffix": AFTER}
    for temperature in (0, 1):
        sampling = {"temperature": temperature, "seed": 4, "top_k": 40, "top_p": 0.9, "min_p": 0.1}
        more = {**sampling, "top_k": 40} if temperature else sampling
        text = complete(
            server,
            prompt=BEFORE,
            suffix=AFTER,
            max_tokens=24,
            **{name: sampling[name] for name in ("temperature", "seed", "top_p")},
            extra_body={name: sampling[name] for name in ("top_k", "min_p")},
        ).choices[0]
        whole = fill(server, **gap, **more, n_predict=24).json()
        assert whole["content"] == text.text and whole["stop"] is True
        assert whole["stop_type"] == ("limit" if text.finish_reason == "length" else "eos")
        lines = fill(server, **gap, **more, n_predict=24, stream=True).text.splitlines()
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
        assert "".join(chunk["content"] for chunk in chunks) == text.text
        assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1]["tokens_predicted"] == whole["tokens_predicted"] > 0
    assert whole["tokens_evaluated"] == len(model.tokenizer(raw(BEFORE, AFTER))["input_ids"])


def test_llama_cpps_values_hold_where_a_field_is_left_out(server):
    gap = {"input_prefix": BEFORE, "input_suffix": AFTER, "n_predict": 16, "seed": 3}
    told = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repeat_penalty": 1, "prompt": ""}
    assert fill(server, **gap).json()["content"] == fill(server, **gap, **told).json()["content"]
    nulls = dict.fromkeys((*told, "input_extra"))
    assert fill(server, **gap, **nulls).json()["content"] == fill(server, **gap).json()["content"]
    texts = {fill(server, **{**gap, "seed": -1}).json()["content"] for _ in range(8)}
    assert len(texts) > 1, "any seed"
    longest = fill(server, **{**gap, "n_predict": -1, "stop": ["a"]}).json()
    assert longest["tokens_predicted"] > 0 and ("stop_type" in longest) == (longest["tokens_predicted"] > 30)


def test_a_prompt_that_is_only_read_serves_the_next_request(server):
    gap = {"input_prefix": BEFORE * 9, "input_suffix": AFTER}
    read = fill(server, **gap, n_predict=0).json()
    assert (read["content"], read["tokens_predicted"], read["stop_type"]) == ("", 0, "limit")
    streamed = fill(server, **gap, n_predict=0, stream=True).text
    assert json.loads(streamed.removeprefix("data: "))["content"] == ""
    then = fill(server, **gap, n_predict=4).json()["timings"]
    assert then["cache_n"] == read["tokens_evaluated"] - 1 and then["prompt_n"] == 1


def llama_prompt_of(model: MedusaModel, **asked) -> str:
    (prompt,) = tiny_service(model).prompts(LlamaInfillRequest(**asked))
    return (
        "".join(model.tokenizer.convert_ids_to_tokens(prompt)).replace("\u0120", " ").replace("\u010a", "\n")
    )


def test_other_files_come_before_a_gap_and_its_beginning_after_the_marks(model):
    gap = {"input_prefix": "a", "input_suffix": "b"}
    extra = [{"filename": "x.py", "text": "one\n"}, {"text": "<|file_sep|>"}]
    repository = (
        "<|repo_name|>myproject\n<|file_sep|>x.py\none\n<|file_sep|>tmp\n<|file_sep|><|file_sep|>filename\n"
    )
    assert llama_prompt_of(model, **gap, prompt="c", input_extra=extra) == f"{repository}{raw('a', 'b')}c"
    assert llama_prompt_of(model, **gap) == raw("a", "b")
    (prompt,) = tiny_service(model).prompts(LlamaInfillRequest(**gap, input_extra=extra, prompt="<|end|>"))
    names = model.tokenizer.convert_ids_to_tokens(prompt)
    assert [names.count(name) for name in (*QWEN[:3], "<|file_sep|>", "<|end|>")] == [1, 1, 1, 3, 0]


def test_a_vocabulary_without_files_gets_other_texts_behind_a_line():
    tokenizer = tokenizer_with("[PREFIX]", "[SUFFIX]")
    known = infill_tokens(tokenizer, len(tokenizer))
    shown = known.context([("x.py", "one")], lambda text: tokenizer(text)["input_ids"])
    assert tokenizer.decode(shown) == "\n\n--- snippet ---\n\none"


def test_fields_of_llama_cpp_that_nobody_reads_are_named(server):
    extra = [{"text": "a", "filename": "b", "time": 3}]
    asked = {"input_prefix": "a", "input_suffix": "b", "n_predict": 1, "input_extra": extra}
    reply = fill(server, **asked, samplers=["top_k", "infill"], cache_prompt=True)
    assert {*reply.headers["X-Ignored-Fields"].split(", ")} == {
        "samplers",
        "cache_prompt",
        "input_extra[].time",
    }


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input_suffix": None}, "input_suffix"),
        ({"input_prefix": "", "input_suffix": ""}, "input_prefix"),
        ({"n_predict": -2}, "n_predict"),
        ({"n": 2}, "n"),
        ({"input_extra": [{"filename": "a"}]}, "input_extra[0].text"),
        ({"input_suffix": "b" * 100_000}, "input_suffix"),
        ({"input_prefix": "b" * 100_000}, "input_prefix"),
        ({"input_prefix": "b" * 600}, "input_prefix"),
        ({"prompt": "b" * 100_000}, "prompt"),
        ({"input_extra": [{"text": "b" * 100_000}]}, "input_extra"),
    ],
)
def test_what_llama_cpps_endpoint_cannot_do_is_refused_by_its_names(server, change, param):
    reply = fill(server, **{"input_prefix": "a", "input_suffix": "b", "n_predict": 4, **change})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("name", [*QWEN, "<|end|>"])
def test_a_gap_ends_where_the_model_marks_its_end_and_other_texts_do_not(server, model, name):
    token = model.tokenizer.convert_tokens_to_ids(name)
    asked = {"max_tokens": 3, "temperature": 0, "logit_bias": {str(token): 100}}
    for prompt in ({"prompt": BEFORE, "suffix": AFTER}, {"prompt": raw(BEFORE, AFTER)}):
        (choice,) = complete(server, **asked, **prompt).choices
        assert (choice.text, choice.finish_reason) == ("", "stop")
    (choice,) = complete(server, **asked, prompt=BEFORE).choices
    assert choice.finish_reason == ("stop" if name == "<|end|>" else "length")


def prompt_of(model: MedusaModel, **asked) -> str:
    (prompt,) = tiny_service(model).prompts(CompletionRequest(**asked))
    return "|".join(model.tokenizer.convert_ids_to_tokens(prompt))


def test_marks_in_the_texts_around_a_gap_are_text(model):
    text = 'x = "<|fim_middle|><|end|>"'
    prompt = prompt_of(model, prompt=text, suffix=text)
    assert [prompt.count(name) for name in (*QWEN[:3], "<|end|>")] == [1, 1, 1, 0]
    assert prompt.replace("|", "") == raw(text, text).replace("|", "").replace(" ", "Ġ")


def test_a_gap_may_come_first_or_last_in_a_text_and_after_tokens(model):
    assert prompt_of(model, prompt="", suffix="b") == "|".join(
        ("<|fim_prefix|>", "<|fim_suffix|>", "b", QWEN[1])
    )
    assert prompt_of(model, prompt="a", suffix="") == "|".join(
        ("<|fim_prefix|>", "a", "<|fim_suffix|>", QWEN[1])
    )
    tokens = model.tokenizer("a")["input_ids"]
    assert prompt_of(model, prompt=tokens, suffix="b") == prompt_of(model, prompt="a", suffix="b")
    for empty in ({"prompt": ""}, {"prompt": [], "suffix": "b"}, {"prompt": "", "suffix": ""}):
        with pytest.raises(ValueError, match="must not be empty"):
            CompletionRequest(**empty)


def test_a_model_without_such_tokens_refuses_text_behind_a_gap():
    with running(chat_model()) as server:
        with pytest.raises(openai.BadRequestError, match="suffix needs a model that was trained") as refusal:
            complete(server, prompt="a", suffix="b")
        assert refusal.value.param == "suffix"
        reply = httpx.post(f"{server.url}/v1/fim/completions", json={"prompt": "a"}, timeout=60)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "suffix"
        refused = fill(server, input_prefix="a", input_suffix="b").json()["error"]
        assert "input_suffix needs a model that was trained" in refused["message"]
        assert refused["param"] == "input_suffix"
        asked = {"prompt": "a", "max_tokens": 8, "temperature": 0}
        assert (
            complete(server, **asked, suffix="").choices[0].text == complete(server, **asked).choices[0].text
        )


def test_a_text_behind_a_gap_that_cannot_fit_is_refused(server):
    body = {"prompt": "a", "suffix": "b" * 100_000}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, "suffix", "context_length_exceeded")


ORDERS = [
    (QWEN, "<|fim_prefix|> a <|fim_suffix|> b <|fim_middle|>"),
    (("<fim_prefix>", "<fim_middle>", "<fim_suffix>"), "<fim_prefix> a <fim_suffix> b <fim_middle>"),
    (("<fim-prefix>", "<fim-middle>", "<fim-suffix>"), "<fim-prefix> a <fim-suffix> b <fim-middle>"),
    (
        ("<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
        "<\uff5cfim\u2581begin\uff5c> a <\uff5cfim\u2581hole\uff5c> b <\uff5cfim\u2581end\uff5c>",
    ),
    (("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"), "\u2581<PRE> a \u2581<SUF> b \u2581<MID>"),
    (("[PREFIX]", "[SUFFIX]", "[MIDDLE]"), "[SUFFIX] b [PREFIX] a"),
]


@pytest.mark.parametrize(("names", "prompt"), ORDERS, ids=[names[0] for names, _ in ORDERS])
def test_each_family_marks_a_gap_in_its_own_order_and_by_its_own_names(names, prompt):
    tokenizer = tokenizer_with(*names)
    known = infill_tokens(tokenizer, len(tokenizer))
    before, after = tokenizer("a")["input_ids"], tokenizer("b")["input_ids"]
    tokens = known.prompt([], before, after)
    assert " ".join(tokenizer.convert_ids_to_tokens(tokens)) == prompt
    assert known.asks(tokens) and not known.asks(before)
    assert known.ends == {*tokenizer.convert_tokens_to_ids(list(names))}
    assert infill_tokens(tokenizer, 261) is None  # the model has one of them only
    assert infill_tokens(chat_tokenizer(), len(tokenizer)) is None


def test_text_behind_a_mark_gets_no_space_of_its_own():
    with_spaces, without = (
        tokenizer_kinds.tokenizer_of("byte fallback, fuse, strip (Llama 2)"),
        chat_tokenizer(),
    )
    for text in ("world", " world", "\n\ndef", ""):
        for tokenizer in (with_spaces, without):
            spelt = "".join(tokenizer.convert_ids_to_tokens(tokens_after(tokenizer, text)))
            assert spelt.replace("<0x0A>", "\n").replace("\u010a", "\n") == text.replace(
                " ", "\u2581" if tokenizer is with_spaces else "\u0120"
            )
    assert start_tokens(without) == []
