import os
import re
import struct
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quantised_files import CHATML, SPECIAL, VOCAB_SIZE, write_model
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from medusa.base import gguf_file
from medusa.base.gguf_file import GGUFFile
from medusa.base.loading import find_base, load_tokenizer
from medusa.engine.weights.load import load_base

gguf_model = pytest.importorskip(
    "medusa.base.gguf_model", exc_type=ImportError, reason="needs a newer transformers"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_a_file_says_what_the_reader_of_its_authors_says(model):
    ours, theirs = GGUFFile.open(model), gguf.GGUFReader(model)
    assert ours.metadata["llama.embedding_length"] == 256
    assert ours.metadata["tokenizer.chat_template"] == CHATML
    assert ours.metadata["tokenizer.ggml.tokens"] == VOCAB_SIZE
    assert ours.tokens[256:259] == list(SPECIAL)
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


@pytest.mark.parametrize("name", ["m-00001-of-00000", "m-00000-of-00002", "m-00005-of-00003"])
def test_a_name_that_numbers_no_part_is_that_of_a_whole_model(model, tmp_path, name):
    path = tmp_path / f"{name}.gguf"
    path.write_bytes(model.read_bytes())
    assert GGUFFile.open(path).path == path and find_base(tmp_path).gguf.path == path


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


def test_a_header_is_read_once(model, monkeypatch):
    read, opened = gguf_file._Header.read, []
    monkeypatch.setattr(gguf_file._Header, "read", lambda self: opened.append(self) or read(self))
    source = find_base(model)
    assert load_base(source).generation_config.eos_token_id == [256, 258]
    load_tokenizer(source)
    assert len(opened) == 1


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


def test_a_file_that_is_cut_while_it_is_held_says_so(model, tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(model.read_bytes())
    file = GGUFFile.open(path)
    size = path.stat().st_size
    os.truncate(path, size // 2)
    kept, lost = min(file.tensors.values(), key=place), max(file.tensors.values(), key=place)
    assert file.rows(kept.name).numel() == kept.num_bytes
    for read in (file.rows, file.floats):
        with pytest.raises(ValueError, match=rf"cut.gguf had {size} bytes .* was cut to {size // 2} since"):
            read(lost.name)
    with pytest.raises(ValueError, match="was cut to"):
        gguf_model.load_widened(file, gguf_model.gguf_config(file), torch.float32)


def place(entry):
    return entry.offset


def test_a_file_that_takes_the_name_of_one_that_is_held_changes_nothing(model, tmp_path):
    path = tmp_path / "held.gguf"
    path.write_bytes(model.read_bytes())
    file, expected = GGUFFile.open(path), GGUFFile.open(model)
    os.replace(write_model(tmp_path / "new.gguf", "qwen2", seed=1), path)
    assert all(torch.equal(file.rows(name), expected.rows(name)) for name in expected.tensors)


def test_a_cache_with_only_another_part_of_the_model_says_so(model, hub, tmp_path):
    first, second = split(model, tmp_path)
    hub.put("ada/tiny-GGUF", {first.name: first.read_bytes(), second.name: second.read_bytes()})
    source = find_base("ada/tiny-GGUF:tiny")
    source.gguf.path.unlink()
    hub.fails_at = "."
    with pytest.raises(FileNotFoundError, match=r"only other parts of ada/tiny-GGUF:tiny than tiny-00001-of"):
        find_base("ada/tiny-GGUF:tiny")


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
