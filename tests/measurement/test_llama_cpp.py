"""llama.cpp as a system: by a stand-in everywhere, and in earnest where llama-cpp-python is installed."""

import gc
import sys

import pytest
import torch
from bench.llama_bench import llama_bench
from fake_llama_cpp import FakeLlamaCpp, next_token
from tiny_chat import VOCAB_SIZE, chat_base, chat_model
from tiny_gguf import written_gguf

from medusa.drafters.registry import DrafterSettings
from medusa.measurement.llama_cpp import LEAST_SLOTS, LlamaCpp, answered_by
from medusa.measurement.systems import make_systems

PROMPT = [5, 9, 2, 7, 1, 8]


@pytest.fixture
def fake(monkeypatch):
    module = FakeLlamaCpp(VOCAB_SIZE)
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    return module


@pytest.fixture
def gguf_file(tmp_path):
    path = tmp_path / "tiny-q8_0.gguf"
    path.write_bytes(b"GGUF and more")
    return path


def expected_answer(count, ends=()):
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(next_token(tokens, VOCAB_SIZE))
        if tokens[-1] in ends:
            break
    return tokens[len(PROMPT) :]


def test_an_answer_is_greedy_and_ends_after_so_many_tokens_or_the_token_that_ends_it(fake, gguf_file):
    model = LlamaCpp(gguf_file, VOCAB_SIZE)
    answer = expected_answer(6)
    assert list(model.tokens(PROMPT, 6, ends={-1})) == answer
    assert fake.read == [PROMPT[:4], PROMPT[4:], *([token] for token in answer[:-1])], "no token too many"
    assert list(model.tokens(PROMPT, 6, ends={answer[2]})) == expected_answer(6, {answer[2]})


def test_each_answer_starts_from_nothing(fake, gguf_file):
    model = LlamaCpp(gguf_file, VOCAB_SIZE)
    first = list(model.tokens(PROMPT, 4, ends=()))
    fake.read.clear()
    assert list(model.tokens(PROMPT, 4, ends=())) == first
    assert fake.read[:2] == [PROMPT[:4], PROMPT[4:]], "the prompt is read again, none of it was kept"


def test_it_gets_the_threads_of_torch_and_a_context_that_grows(fake, gguf_file):
    model = LlamaCpp(gguf_file, VOCAB_SIZE)
    list(model.tokens(PROMPT, 1, ends=()))
    threads = torch.get_num_threads()
    assert (fake.parameters.n_threads, fake.parameters.n_threads_batch) == (threads, threads)
    assert (fake.parameters.n_ctx, fake.freed) == (LEAST_SLOTS, [])
    list(model.tokens([1] * LEAST_SLOTS, 5, ends=()))
    assert (fake.parameters.n_ctx, fake.freed) == (LEAST_SLOTS + 5, ["context"])
    del model
    gc.collect()
    assert fake.freed == ["context", "context", "model"]


@pytest.mark.parametrize("tokens_per_pass", [None, 1, 4])
def test_logits_follow_every_token_whatever_is_read_in_one_pass(fake, gguf_file, tokens_per_pass):
    model = LlamaCpp(gguf_file, VOCAB_SIZE)
    logits = torch.cat(list(model.logits(PROMPT, tokens_per_pass)))
    wanted = [next_token(PROMPT[: end + 1], VOCAB_SIZE) for end in range(len(PROMPT))]
    assert (logits.shape, logits.argmax(dim=1).tolist()) == ((len(PROMPT), VOCAB_SIZE), wanted)
    assert max(map(len, fake.read)) == (tokens_per_pass or len(PROMPT))


def test_as_a_system_it_ends_where_the_base_does_and_hands_on_every_token(fake, gguf_file):
    model = chat_model()
    end = expected_answer(3)[2]
    model.base.generation_config.eos_token_id = [end, 3]
    systems, skipped = make_systems(["llama.cpp"], model, DrafterSettings(), [gguf_file])
    assert (list(systems), skipped) == (["llama.cpp-q8_0"], {})
    system = systems["llama.cpp-q8_0"]
    puts = []

    class Streamer:
        def put(self, value):
            puts.append(value.tolist())

    ids = torch.tensor([PROMPT])
    output = system.answer(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=20,
        do_sample=False,
        streamer=Streamer(),
        return_dict_in_generate=True,
    )
    answer = expected_answer(20, {end, 3})
    assert output.sequences.tolist() == [PROMPT + answer]
    assert puts == [[PROMPT], *([token] for token in answer)]
    assert not system.is_ours
    assert "one row at a time" in system.refusal(2) and system.refusal(1) is None


def test_sampling_is_refused(fake, gguf_file):
    answer = answered_by(LlamaCpp(gguf_file, VOCAB_SIZE), ends=())
    with pytest.raises(ValueError, match="compare it at temperature 0"):
        answer(input_ids=torch.tensor([PROMPT]), max_new_tokens=2, do_sample=True)


def test_files_in_the_directory_of_the_base_take_part_by_themselves(fake, tmp_path):
    model = chat_model()
    model.base.config._name_or_path = model.base.name_or_path = str(tmp_path)
    for name in ("f32.gguf", "Tiny.Q4_1.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    systems, _ = make_systems(["plain", "llama.cpp"], model, DrafterSettings())
    assert list(systems) == ["plain", "llama.cpp-q4_1", "llama.cpp-f32"]
    systems, skipped = make_systems(["llama.cpp-f32", "llama.cpp-q8_0"], model, DrafterSettings())
    assert list(systems) == ["llama.cpp-f32"]
    assert skipped["llama.cpp-q8_0"].endswith("--llama-cpp; there are llama.cpp-q4_1, llama.cpp-f32")
    systems, _ = make_systems(["llama.cpp"], model, DrafterSettings(), [tmp_path / "f32.gguf"])
    assert list(systems) == ["llama.cpp-f32"], "files that are named take the place of those"


def test_without_a_file_or_without_llama_cpp_it_is_left_out_with_the_remedy(monkeypatch, gguf_file):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    systems, skipped = make_systems(["llama.cpp"], chat_model(), DrafterSettings())
    assert (systems, list(skipped)) == ({}, ["llama.cpp"])
    assert skipped["llama.cpp"] == "it needs a GGUF file of the base; give one with --llama-cpp"
    systems, skipped = make_systems(["llama.cpp"], chat_model(), DrafterSettings(), [gguf_file])
    assert systems == {} and "pip install '.[llama-cpp]'" in skipped["llama.cpp-q8_0"]
    with pytest.raises(ImportError, match=r"pip install '\.\[llama-cpp\]'"):
        LlamaCpp(gguf_file, VOCAB_SIZE)


def test_a_file_that_is_not_there_not_whole_or_of_another_model_is_refused_by_name(fake, gguf_file, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.gguf', which is no file; give a GGUF file"):
        LlamaCpp(tmp_path / "absent.gguf", VOCAB_SIZE)
    with pytest.raises(ValueError, match=r"tiny-q8_0\.gguf has 260 tokens and the base has 7"):
        LlamaCpp(gguf_file, vocab_size=7)
    gguf_file.write_bytes(b"what")
    with pytest.raises(ValueError, match=r"cannot load .*tiny-q8_0\.gguf.* convert or download it again"):
        LlamaCpp(gguf_file, VOCAB_SIZE)


def test_two_files_of_one_name_are_refused(gguf_file, tmp_path):
    with pytest.raises(ValueError, match=r"both llama\.cpp-q8_0; rename one"):
        make_systems(["llama.cpp"], chat_model(), DrafterSettings(), [gguf_file, tmp_path / "b.Q8_0.gguf"])


# ------------------------------------------------------------------ in earnest


@pytest.fixture
def tiny_gguf(tmp_path):
    """(base, its GGUF file in float32)."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    pytest.importorskip("gguf", reason="gguf is not installed")
    base = chat_base()
    return base, written_gguf(base, tmp_path / "tiny-f32.gguf")


def test_llama_cpp_computes_what_the_base_computes_but_for_its_half_precision_cache(tiny_gguf):
    base, path = tiny_gguf
    model = LlamaCpp(path, VOCAB_SIZE)
    tokens = torch.randint(VOCAB_SIZE, (1, 300), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = base(input_ids=tokens).logits[0]
    found = torch.cat(list(model.logits(tokens[0].tolist())))
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()
    answer = list(model.tokens(PROMPT, 12, ends=()))
    assert len(answer) == 12
    read_again = torch.cat(list(model.logits(PROMPT + answer, tokens_per_pass=1)))
    assert read_again[len(PROMPT) - 1 : -1].argmax(dim=1).tolist() == answer


def test_a_file_cut_short_is_refused(tiny_gguf):
    _, path = tiny_gguf
    path.write_bytes(path.read_bytes()[:20000])
    with pytest.raises(ValueError, match=r"cannot load .*tiny-f32\.gguf.* convert or download it again"):
        LlamaCpp(path, VOCAB_SIZE)


def test_what_llama_bench_prints_is_read_by_the_tokens_of_each_run(tmp_path):
    program = tmp_path / "llama-bench"
    program.write_text(BENCH)
    ms = llama_bench([sys.executable, str(program), "-rtr", "1"], "a.gguf", [64, 2000], 24, repeats=3)
    flags = "-rtr 1 -m a.gguf -p 64,2000 -n 24 -r 3 -t"
    assert ms == {(64, 0): 64.0, (2000, 0): 2000.0, (0, 24): 240.0}
    assert (tmp_path / "flags").read_text().startswith(flags)


BENCH = """
import json, pathlib, sys
pathlib.Path(__file__).with_name("flags").write_text(" ".join(sys.argv[1:]))
print("a line that is no JSON")
read = [{"n_prompt": count, "n_gen": 0, "avg_ns": count * 1_000_000} for count in (64, 2000)]
print(json.dumps([*read, {"n_prompt": 0, "n_gen": 24, "avg_ns": 240_000_000}]))
"""
