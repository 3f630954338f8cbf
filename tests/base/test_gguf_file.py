import json
import re
import struct
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from huggingface_hub import constants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quantised_files import CHATML, SPECIAL, VOCAB_SIZE, write_model
from tokenizer_kinds import SCRIPTS
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from medusa.base import gguf_file
from medusa.base.gguf_file import GGUFFile
from medusa.base.loading import find_base, load_base, load_tokenizer
from medusa.serving.infill import infill_tokens

gguf_model = pytest.importorskip(
    "medusa.base.gguf_model", exc_type=ImportError, reason="needs a newer transformers"
)


CODE = [
    "for (int i = 0; i < 1024; i++) { sum += a[i] * b[i]; }",
    "#include <stdio.h>\n\nint main(void) {\n\treturn 0;\n}\n",
    'fn main() {\n    println!("{:>8.3}", 3.14159_f64);\n}',
    "SELECT name, COUNT(*) FROM users WHERE id IN (1, 22, 333) GROUP BY name;",
    "const f = async (x) => await fetch(`https://example.org/${x}?a=1&b=2`);",
    "<div class='a b'>\n  <p>1,234.50 &euro;</p>\n</div>",
    "package main\n\nfunc main() {\n\tfmt.Println(0xFF, 1e-9)\n}",
    "public static void main(String[] args) throws IOException {",
    'if [[ -n "$HOME" ]]; then echo ~/.bashrc | xargs -n1; fi',
    "let rec fact n = if n <= 1 then 1 else n * fact (n - 1)",
    "x = {'key': [1, 2, 3], \"other\": None}  # a comment\n",
    "\\begin{equation} e^{i\\pi} + 1 = 0 \\end{equation}",
    "   leading and trailing   ",
    "\n\n\n",
    "a\r\nb\r\n",
    "don't I'll we've they'RE",
    "2026-11-27T12:34:56Z",
    "12345678901234567890",
    "MixedCASE snake_case camelCase kebab-case",
    "<|im_start|>user\nhi<|im_end|>\n",
    "\u00a0non-breaking\u2003spaces\u200b",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_a_file_says_what_the_reader_of_its_authors_says(model):
    ours, theirs = GGUFFile.open(model), gguf.GGUFReader(model)
    assert ours.metadata["llama.embedding_length"] == 256
    assert ours.metadata["tokenizer.chat_template"] == CHATML
    assert ours.metadata["tokenizer.ggml.tokens"] == VOCAB_SIZE
    assert ours.strings("tokenizer.ggml.tokens", range(256, 259)) == list(SPECIAL)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        assert np.array_equal(ours.rows(tensor.name).numpy().ravel(), tensor.data.view(np.uint8).ravel())
        assert torch.equal(
            ours.floats(tensor.name).flatten(),
            torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)).flatten(),
        )


def split(model: Path, directory: Path) -> list[Path]:
    """The model in two files, as llama.cpp splits them."""
    read, parts = gguf.GGUFReader(model), []
    for number in (1, 2):
        path = directory / f"tiny-0000{number}-of-00002.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for field in read.fields.values():
            if number == 1 and not field.name.startswith(("GGUF.", "general.architecture")):
                inner = field.types[1] if len(field.types) > 1 else None
                writer.add_key_value(field.name, field.contents(), field.types[0], inner)
        for at, tensor in enumerate(read.tensors):
            if at % 2 == number - 1:
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        parts.append(path)
    return parts


def test_parts_of_a_model_are_one_and_each_names_all(model, tmp_path):
    parts = split(model, tmp_path)
    whole, expected = GGUFFile.open(parts[1]), GGUFFile.open(model)
    assert whole.path == parts[0] and whole.metadata["llama.embedding_length"] == 256
    assert set(whole.tensors) == set(expected.tensors)
    assert all(torch.equal(whole.rows(name), expected.rows(name)) for name in expected.tensors)
    parts[1].unlink()
    with pytest.raises(
        FileNotFoundError, match=r"tiny-00002-of-00002.gguf, a part of the model .* is not beside"
    ):
        GGUFFile.open(parts[0])


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_configuration_and_weights_are_those_that_transformers_reads(architecture, tmp_path):
    path = write_model(tmp_path / "tiny.gguf", architecture, is_tied=architecture != "qwen2")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32).eval()
    source = find_base(path)
    kept = source.config.to_dict()
    for name, value in theirs.config.to_dict().items():
        if name not in ("_name_or_path", "quantization_config", "dtype", "architectures"):
            assert kept[name] == value, name
    ids = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(0))
    assert torch.equal(load_base(source)(ids).logits, theirs(ids).logits)


def test_the_tokenizer_is_the_one_that_transformers_reads(model):
    ours, theirs = load_tokenizer(model), AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
    for text in ("the thin man", "Ünïcode 你好 🙂\n\n  x=12", "<|im_start|>user\nhi<|im_end|>"):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
        assert ours.decode(ours(text)["input_ids"]) == text
    # Qwen's own tokenizer composes characters first, which the file does not say
    assert ours("e\u0301")["input_ids"] == ours("\u00e9")["input_ids"]
    asked = [{"role": "user", "content": "why?"}]
    assert ours.apply_chat_template(asked, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_every_token_that_ends_an_answer_is_known_and_no_other(model):
    assert gguf_model.end_tokens(GGUFFile.open(model)) == [256, 258]  # <|endoftext|> and <|im_end|>


def test_a_header_is_read_once(model, monkeypatch):
    read, opened = gguf_file._Header.read, []
    monkeypatch.setattr(gguf_file._Header, "read", lambda self: opened.append(self) or read(self))
    source = find_base(model)
    assert load_base(source).generation_config.eos_token_id == [256, 258]
    load_tokenizer(source)
    assert len(opened) == 1


def write_vocabulary(path: Path, tokens, types=None, merges=(), pre="default", **ids) -> Path:
    """A file with a vocabulary and nothing else."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types or [1] * len(tokens))
    writer.add_token_merges([*merges])
    for name, token in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_no_hub_is_asked_about_a_large_vocabulary(tmp_path):
    assert constants.is_offline_mode()
    tokens = [*(bytes_to_unicode()[byte] for byte in range(256)), *(f"t{n}" for n in range(100_000))]
    path = write_vocabulary(tmp_path / "large.gguf", tokens, merges=["t 1"], eos=5)
    tokenizer = load_tokenizer(path)
    assert len(tokenizer) == len(tokens) and tokenizer.name_or_path == str(path)


def test_a_vocabulary_gets_no_token_that_the_file_has_not(tmp_path):
    """transformers adds <|endoftext|>, of which the model would have no embedding."""
    letters = [bytes_to_unicode()[byte] for byte in range(256)]
    path = write_vocabulary(tmp_path / "a.gguf", [*letters, "th", "<s>"], merges=["t h"], bos=257)
    tokenizer = load_tokenizer(path)
    text = "the <|endoftext|> of <s>"
    ids = tokenizer(text)["input_ids"]
    assert max(ids) < len(tokenizer) == 258 and tokenizer.decode(ids) == text


def test_the_vocabulary_of_a_real_model_in_a_file_gives_the_token_ids_of_its_own_files(
    real_tokenizer, tmp_path
):
    described = json.loads(real_tokenizer.backend_tokenizer.to_str())
    tokens = real_tokenizer.convert_ids_to_tokens(range(len(real_tokenizer)))
    control = {each["content"] for each in described["added_tokens"] if each["special"]}
    types = [3 if token in control else 1 for token in tokens]
    merges = [" ".join(pair) for pair in described["model"]["merges"]]

    def in_a_file(split):
        return load_tokenizer(write_vocabulary(tmp_path / "smol.gguf", tokens, types, merges, split, eos=2))

    ours, texts = in_a_file("gpt-2"), [*SCRIPTS.values(), *CODE]
    assert len(texts) > 50
    for text in texts:
        ids = ours(text)["input_ids"]
        assert ids == real_tokenizer(text)["input_ids"], text
        assert ours.decode(ids) == text
    apart = [id for part in ("x =  ", "1", "2", " is") for id in real_tokenizer(part)["input_ids"]]
    assert in_a_file("smollm")("x =  12 is")["input_ids"] == apart != ours("x =  12 is")["input_ids"]


def test_tokens_that_mark_a_gap_are_those_that_the_file_names(tmp_path):
    letters = [bytes_to_unicode()[byte] for byte in range(256)]
    marks = ["<before>", "<behind>", "<between>", "<file>"]
    names = dict(zip(("fim_pre", "fim_suf", "fim_mid", "fim_sep"), range(256, 260), strict=True))
    tokens, types = [*letters, *marks, "th"], [1] * 256 + [3] * 4 + [1]
    path = write_vocabulary(tmp_path / "a.gguf", tokens, types, ["t h"], **names)
    tokenizer = load_tokenizer(path)
    tokenizer.save_pretrained(tmp_path / "saved")
    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "saved")):
        found = infill_tokens(each, len(each))
        assert (found.prefix, found.suffix, found.middle, found.file) == (256, 257, 258, 259)
        assert found.ends == {256, 257, 258, 259} and found.names == {*marks} and found.repository is None
    for change in ({"fim_mid": 999}, {"fim_mid": None}):  # one that is no token, or none
        told = {name: token for name, token in {**names, **change}.items() if token is not None}
        path = write_vocabulary(tmp_path / "b.gguf", tokens, types, ["t h"], **told)
        assert infill_tokens(load_tokenizer(path), len(tokens)) is None


def test_a_directory_with_one_file_is_a_base_and_one_with_several_is_not(model, tmp_path):
    (tmp_path / "a.gguf").write_bytes(model.read_bytes())
    assert find_base(tmp_path).gguf.path == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(model.read_bytes())
    with pytest.raises(
        ValueError, match=r"one GGUF file, got the directory .* with a.gguf, b.gguf; name one"
    ):
        find_base(tmp_path)
    with pytest.raises(FileNotFoundError, match="no GGUF file at"):
        find_base(tmp_path / "c.gguf")


def test_a_file_is_known_by_its_beginning_where_its_name_does_not_tell(model, tmp_path):
    (tmp_path / "sha256-5ee4f07c").write_bytes(model.read_bytes())
    assert find_base(tmp_path / "sha256-5ee4f07c").gguf.path == tmp_path / "sha256-5ee4f07c"


def test_rows_that_transformers_moves_are_found_by_number(model):
    source = find_base(model)
    weights = gguf_model.named_weights(source.gguf, gguf_model.empty_model(source.gguf, source.config))
    queries = weights["model.layers.0.self_attn.q_proj.weight"].order([(256, 256)]).rows
    assert not torch.equal(queries, torch.arange(256))
    assert torch.equal(queries.sort().values, torch.arange(256))
    assert not weights["model.layers.0.self_attn.o_proj.weight"].order([(256, 256)]).moves


def test_a_file_on_the_hub_is_named_by_its_quantisation(model, hub):
    raw = model.read_bytes()
    hub.put("ada/tiny-GGUF", {"tiny-Q4_K_M.gguf": raw, "tiny-q8_0.gguf": raw, "mmproj-q8_0.gguf": raw})
    source = find_base("ada/tiny-GGUF:q4_k_m")
    assert source.gguf.path.name == "tiny-Q4_K_M.gguf" and source.name == "ada/tiny-GGUF:q4_k_m"
    assert load_base(source).name_or_path == "ada/tiny-GGUF:q4_k_m", "heads record a name that loads again"
    assert load_tokenizer("ada/tiny-GGUF:Q8_0").eos_token == "<|im_end|>"
    with pytest.raises(
        ValueError, match=r"0 are called so; there are mmproj.*tiny-Q4_K_M.gguf, tiny-q8_0.gguf"
    ):
        find_base("ada/tiny-GGUF:Q5_K_M")
    with pytest.raises(ValueError, match=r"2 are called so; there are tiny-Q4.*tiny-q8"):
        find_base("ada/tiny-GGUF:tiny")
    with pytest.raises(
        ValueError, match=r"must name one GGUF file of ada/tiny-GGUF, as ada/tiny-GGUF:Q4_K_M"
    ):
        find_base("ada/tiny-GGUF")
    hub.fails_at = "."
    assert find_base("ada/tiny-GGUF:q4_k_m").gguf.path.name == "tiny-Q4_K_M.gguf", "from the cache"


def test_a_file_without_a_tokenizer_says_how_to_name_one(tmp_path):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(
        write_model(path).read_bytes().replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokans")
    )
    with pytest.raises(ValueError, match=r"tiny.gguf has no tokenizer; give one: --tokenizer DIRECTORY"):
        load_tokenizer(path)


# ------------------------------------------------------------------ files that are not what they say


def with_first_token_of(raw: bytes, num_bytes: int) -> bytes:
    key = b"tokenizer.ggml.tokens"
    at = raw.index(key) + len(key) + 16  # behind the types and the count of the array
    return raw[:at] + struct.pack("<Q", num_bytes) + raw[at + 8 :]


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda raw: b"", "shorter than a header"),
        (lambda raw: b"PK\3\4" + raw[4:], "does not begin as one"),
        (lambda raw: raw[:4] + struct.pack("<I", 9) + raw[8:], "version 2 or 3, got 9"),
        (lambda raw: raw[:8] + struct.pack("<Q", 2**40) + raw[16:], "it claims 1099511627776 tensors"),
        (lambda raw: raw[: len(raw) // 2], r"tensor '.*' has \d+ bytes from \d+ on, and the file"),
        (lambda raw: raw[:200], "it ends within its header"),
        (lambda raw: with_first_token_of(raw, 2**64 - 1), "it ends within its header"),
        (lambda raw: with_first_token_of(raw, 2**40), "it ends within its header"),
        (lambda raw: raw.replace(b"blk.1.attn_q.weight", b"blk.0.attn_q.weight", 1), "there twice"),
        (lambda raw: raw.replace(b"blk.1.attn_q.weight", b"blk.9.attn_q.weight", 1), "'blk.9.attn_q.weight'"),
        (
            lambda raw: raw.replace(b"general.name", b"general.arch", 1).replace(b"llama", b"lemma", 1),
            "lemma",
        ),
    ],
)
def test_a_damaged_file_is_named_with_its_fault(model, tmp_path, change, words):
    path = tmp_path / "damaged.gguf"
    path.write_bytes(change(model.read_bytes()))
    with pytest.raises(ValueError, match=words) as caught:
        load_base(path)
    assert "damaged.gguf" in str(caught.value)


@pytest.mark.parametrize("key", ["block_count", "embedding_length"])
def test_sizes_that_would_fill_the_memory_are_refused(model, tmp_path, key):
    raw, name = model.read_bytes(), f"llama.{key}".encode()
    at = raw.index(name) + len(name) + 4  # behind the number of its type
    path = tmp_path / "damaged.gguf"
    path.write_bytes(raw[:at] + struct.pack("<I", 2**31) + raw[at + 4 :])
    with pytest.raises(ValueError, match=rf"damaged.gguf is damaged: llama.{key} is 2147483648"):
        find_base(path)


def test_so_are_those_of_an_architecture_that_transformers_reads_in_its_newer_way(tmp_path):
    path = write_model(tmp_path / "tiny.gguf", "lfm2")  # a list of counts of heads has one for each layer
    with pytest.raises(ValueError, match=r"tiny\.gguf has metadata that describe no model"):
        find_base(path)


@pytest.mark.parametrize(
    "key, value",
    [
        *[("attention.head_count", 0), ("attention.head_count", 3), ("attention.head_count_kv", 0)],
        *[("vocab_size", 5), ("feed_forward_length", 0)],
    ],
)
def test_metadata_that_describe_no_model_are_refused_in_words(model, tmp_path, key, value):
    raw, name = model.read_bytes(), f"llama.{key}".encode()
    at = raw.index(name) + len(name) + 4
    path = tmp_path / "damaged.gguf"
    path.write_bytes(raw[:at] + struct.pack("<I", value) + raw[at + 4 :])
    with pytest.raises(ValueError, match=r"damaged.gguf(: tensor| has metadata that describe no model)"):
        load_base(path)


def test_a_matrix_of_another_shape_than_the_metadata_say_is_refused(tmp_path):
    path = write_model(tmp_path / "tiny.gguf", feed_forward_length=768)
    with pytest.raises(ValueError, match=r"'blk.0.ffn_gate.weight' must have shape \(768, 256\)"):
        load_base(path)


@pytest.mark.parametrize("name", ["zebra", "mistral"])  # transformers has settings of the second alone
def test_an_architecture_that_is_not_known_is_refused_with_those_that_are(model, tmp_path, name):
    path = tmp_path / "other.gguf"
    sized = struct.pack("<Q", len(name)) + name.encode()
    path.write_bytes(model.read_bytes().replace(b"\5\0\0\0\0\0\0\0llama", sized))
    with pytest.raises(ValueError, match=rf"architecture '{name}', which is read from no.*llama.*qwen2"):
        find_base(path)


GPT2_NAMES = {
    **{"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "h": "blk"},
    **{"ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output"},
    **{"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
}


@pytest.mark.parametrize("has_head", [False, True], ids=["tied", "with an LM head"])
def test_a_file_of_gpt_2_gives_the_logits_of_the_model_that_it_was_written_from(tmp_path, has_head):
    """``transformers`` takes neither its number of tokens nor that of positions from the file."""
    sizes = {"vocab_size": VOCAB_SIZE, "n_positions": 48, "n_embd": 32, "n_head": 4, "n_layer": 2}
    theirs = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    writer = gguf.GGUFWriter(tmp_path / "gpt2.gguf", "gpt2")
    writer.add_context_length(48)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_block_count(2)
    writer.add_layer_norm_eps(1e-5)
    for name, weight in theirs.transformer.named_parameters():
        stem, _, kind = name.rpartition(".")
        for ours, files in GPT2_NAMES.items():
            stem = re.sub(rf"(^|\.){re.escape(ours)}(\.|$)", rf"\1{files}\2", stem)
        is_matrix = weight.dim() == 2 and stem.startswith("blk")  # Conv1D has inputs first
        writer.add_tensor(f"{stem}.{kind}", (weight.T if is_matrix else weight).detach().numpy().copy())
    if has_head:
        writer.add_tensor("output.weight", theirs.lm_head.weight.detach().numpy().copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ids = torch.randint(0, VOCAB_SIZE, (1, 12), generator=torch.Generator().manual_seed(0))
    base = load_base(tmp_path / "gpt2.gguf")
    assert torch.equal(base(ids).logits, theirs(ids).logits)
    assert base.config.n_positions == 48


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_change_of_the_header_ends_in_anything_but_an_error_that_names_the_file(model, tmp_path, data):
    raw = bytearray(model.read_bytes())
    header = raw.index(b"ffn_down.weight", raw.index(b"blk.1")) + 60
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, header))
        raw[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw)))]
    path = tmp_path / "fuzzed.gguf"
    path.write_bytes(raw)
    try:
        file = GGUFFile.open(path)
    except (ValueError, FileNotFoundError) as error:
        assert "fuzzed.gguf" in str(error)
        return
    for name in file.tensors:
        assert file.rows(name).numel() == file.tensors[name].num_bytes


def test_where_transformers_is_too_old_the_version_that_is_needed_is_named(model, monkeypatch):
    monkeypatch.delattr("medusa.base.gguf_model")
    monkeypatch.setitem(sys.modules, "medusa.base.gguf_model", None)
    with pytest.raises(ValueError, match=r"needs transformers 5.18 or newer, got \d"):
        find_base(model)


def test_heads_are_as_wide_as_the_file_says(tmp_path):
    """``transformers`` takes 128 for every file of Qwen3."""
    base = load_base(write_model(tmp_path / "tiny.gguf", "qwen3", head_width=64), dtype=torch.float32)
    assert base.config.head_dim == 64
    with torch.no_grad():
        assert base(torch.tensor([[5, 9, 2]])).logits.isfinite().all()
