"""A base that heads are of no use for is refused before anything is written."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ARCHITECTURES, tiny_model
from stateful_models import DECODABLE, stateful_model
from tiny_training import chat_tokenizer, configuration_of, counting_rows, save_tiny_base, write_rows
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BioGptConfig,
    BioGptForCausalLM,
    BitsAndBytesConfig,
    CohereConfig,
    CohereForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    TorchAoConfig,
)

from medusa import HeadsCheckpoint, load_heads, save_heads
from medusa.base.causal_lm import hidden_size, lm_head
from medusa.base.passes import hidden_states, logit_scale
from medusa.training.config import BaseOptions, DataOptions
from medusa.training.data.batching import collate
from medusa.training.data.dataset import Document, Documents
from medusa.training.losses import teacher_of
from medusa.training.recipes.recipe import new_heads
from medusa.training.run import job
from medusa.training.states.base import (
    OnlineHiddenStates,
    check_causal,
    check_documents,
    check_packing,
    frozen_base,
    live_states,
)
from medusa.training.states.stored import HiddenStateSource

BASES = {
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    ),
    "bert": lambda: BertForMaskedLM(
        BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
        )
    ),
}
MESSAGES = {
    "t5": "a t5 model; choose a decoder-only one",
    "bert": "whose states depend on later tokens",
}


@pytest.mark.parametrize("name", BASES)
def test_a_base_that_is_not_causal_is_refused(tmp_path, name):
    BASES[name]().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"base must be a causal language model.*{MESSAGES[name]}"):
        live_states(BaseOptions(str(tmp_path)), torch.device("cpu"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_causal_base_is_not_refused(architecture):
    check_causal(OnlineHiddenStates(tiny_model(architecture)), architecture)


@pytest.mark.parametrize("attention", ["eager", pytest.param("flex_attention", marks=pytest.mark.slow)])
def test_the_training_pass_may_attend_otherwise_than_a_tree_is_verified(tmp_path, attention):
    save_tiny_base(tmp_path)
    padded = collate(Documents.of([Document(np.arange(2, 40, dtype=np.int32), np.ones(38, bool))]), [[0]])
    device, plain = torch.device("cpu"), BaseOptions(str(tmp_path), attention="sdpa")
    live = live_states(BaseOptions(str(tmp_path), attention=attention), device)
    assert live.base.config._attn_implementation == attention
    states = live(padded)
    torch.testing.assert_close(states, live_states(plain, device)(padded), rtol=1e-4, atol=1e-4)


def test_weights_go_straight_to_a_device_of_this_process(tmp_path, monkeypatch):
    given = []

    def load(source, dtype):
        given.append(source.arguments)
        return copy.deepcopy(tiny_model("llama"))  # the run freezes it

    monkeypatch.setattr("medusa.engine.weights.load.load_by_transformers", load)
    save_tiny_base(tmp_path)
    name = str(tmp_path)
    live_states(BaseOptions(name), torch.device("cuda:1"))
    live_states(BaseOptions(name, base_placement="auto"), torch.device("cuda:1"))
    assert [each["device_map"] for each in given] == [{"": torch.device("cuda:1")}, "auto"]


def quantised(directory: Path, library: str) -> Path:
    """The tiny base with weights in 8 bits, as ``library`` saves them."""
    pytest.importorskip(library)
    save_tiny_base(directory / "plain")
    if library == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        how = TorchAoConfig(Int8WeightOnlyConfig())
    else:
        how = BitsAndBytesConfig(load_in_8bit=True)
    base = AutoModelForCausalLM.from_pretrained(directory / "plain", quantization_config=how)
    base.save_pretrained(directory / "quantised")
    chat_tokenizer().save_pretrained(directory / "quantised")
    return directory / "quantised"


@pytest.mark.parametrize("is_stored", [False, True], ids=["live", "stored"])
@pytest.mark.parametrize("library", ["torchao", "bitsandbytes"])
@pytest.mark.usefixtures("fresh_accelerator")
def test_a_quantised_base_teaches_and_is_another_model_than_its_original(tmp_path, library, is_stored):
    base = quantised(tmp_path, library)
    rows = write_rows(tmp_path / "rows.jsonl", counting_rows(20))
    options = {"data": rows, "num_heads": 2, "max_steps": 2, "objective": "kl", "tokens_per_batch": 1024}
    options |= {"output_dir": tmp_path / "run", "cache_hidden_states": is_stored, "held_out_fraction": 0.2}
    job.train(configuration_of(base=base, **options))
    assert load_heads(tmp_path / "run" / "heads").provenance["metrics"]["held_out/loss"] > 0
    padded = collate(Documents.of([Document(np.arange(2, 40, dtype=np.int32), np.ones(38, bool))]), [[0]])
    ours = live_states(BaseOptions(str(base)), torch.device("cpu"))(padded).float()
    plain = live_states(BaseOptions(str(tmp_path / "plain")), torch.device("cpu"))(padded)
    assert 0 < (ours - plain).norm() / plain.norm() < 0.1


def test_a_quantised_base_without_its_library_is_refused_with_the_reason(tmp_path):
    save_tiny_base(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "hqq", "quant_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((ImportError, ValueError), match=r"(?i)hqq"):
        live_states(BaseOptions(str(tmp_path)), torch.device("cpu"))


@pytest.mark.parametrize(("asked", "given"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
def test_on_a_cpu_a_base_saved_in_bfloat16_teaches_in_float32_unless_told_otherwise(tmp_path, asked, given):
    ARCHITECTURES["llama"]().to(torch.bfloat16).save_pretrained(tmp_path)
    options, cpu = BaseOptions(str(tmp_path), base_dtype=asked), torch.device("cpu")
    assert live_states(options, cpu).base.dtype == frozen_base(options, cpu, layers=False).dtype == given


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_base_without_its_layers_teaches_as_the_whole_one(tmp_path, architecture):
    whole = tiny_model(architecture)
    whole.save_pretrained(tmp_path)
    bare = frozen_base(BaseOptions(str(tmp_path)), torch.device("cpu"), layers=False)
    states = torch.randn(5, hidden_size(whole), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(teacher_of(bare)(states), teacher_of(whole)(states))
    assert logit_scale(bare) == logit_scale(whole)
    ours, theirs = (each.config.get_text_config(decoder=True) for each in (bare, whole))
    assert ours.num_hidden_layers == theirs.num_hidden_layers


SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LEAKING = {
    "biogpt": lambda: BioGptForCausalLM(BioGptConfig(**SIZES)),
    "gpt-oss": lambda: GptOssForCausalLM(
        GptOssConfig(**SIZES, num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2)
    ),
}
SCALED = {
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0)),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.0625)),
}


def documents_of(largest: int = 60, length: int = 20) -> Documents:
    random = np.random.default_rng(0)
    lengths = (length, length // 2, length - 3)
    drawn = [random.integers(3, largest, each).astype(np.int32) for each in lengths]
    return Documents.of(Document(tokens, np.ones(len(tokens), dtype=bool)) for tokens in drawn)


@pytest.mark.parametrize("name", LEAKING)
def test_packing_on_a_base_that_lets_documents_see_each_other_is_refused(name):
    torch.manual_seed(0)
    base = LEAKING[name]().eval()
    check_packing(OnlineHiddenStates(base), documents_of(), DataOptions(data=["x"], packing=False))
    with pytest.raises(ValueError, match=r"packing must separate documents.*--packing false"):
        check_packing(OnlineHiddenStates(base), documents_of(), DataOptions(data=["x"], packing=True))


@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gemma3", "phi", "mixtral-moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packing_on_a_base_that_keeps_documents_apart_is_taken(name, dtype):
    base = type(tiny_model(name))(tiny_model(name).config)
    base.load_state_dict(tiny_model(name).state_dict())
    check_packing(
        OnlineHiddenStates(base.to(dtype).eval()), documents_of(), DataOptions(data=["x"], packing=True)
    )


def test_tokens_and_lengths_beyond_the_base_are_refused():
    base = tiny_model("llama")  # 61 tokens, 1,024 positions
    check_documents(base, documents_of(), "tiny")
    with pytest.raises(ValueError, match=r"token id \d\d, and its input embedding has 61 rows"):
        check_documents(base, documents_of(largest=99), "tiny")
    with pytest.raises(ValueError, match=r"max_length must be at most 1024.*has 1025 tokens"):
        check_documents(base, documents_of(length=1025), "tiny")


@pytest.mark.parametrize(("name", "scale"), [("granite", 0.125), ("cohere", 0.0625)])
@pytest.mark.parametrize("unembedding", ["shared", "full", "token_map"])
def test_new_heads_give_probabilities_of_the_size_of_the_bases_own(tmp_path, name, scale, unembedding):
    from tiny_training import configuration_of

    torch.manual_seed(0)
    base, documents = SCALED[name]().eval(), documents_of()
    size = {"token_map_size": 61} if unembedding == "token_map" else {}
    configuration = configuration_of(
        base="x", data="x", output_dir="x", max_steps=1, unembedding=unembedding, reads_path=False, **size
    )
    heads = new_heads(configuration, HiddenStateSource.of(base), documents)
    ids = torch.tensor([documents[0].tokens.tolist()])
    with torch.no_grad():
        states, own = hidden_states(base, ids), base(input_ids=ids).logits
        ours = [
            heads(states, lm_head(base))[:, :, 0],
            heads.logits_of(1, states, lm_head(base)),
        ]
    for logits in ours:  # untrained, a head is the base's own
        torch.testing.assert_close(logits, own, rtol=1e-4, atol=1e-4)
    assert (
        load_heads(save_heads(HeadsCheckpoint(heads, "x"), tmp_path / "h")).heads.config.logit_scale == scale
    )


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_base_that_does_not_scale_has_scale_1(name):
    assert logit_scale(tiny_model(name)) == 1  # gemma3 here caps its logits at 3


@pytest.mark.parametrize("model_type", DECODABLE)
def test_packed_documents_have_the_states_that_they_have_alone_where_the_base_keeps_a_state(model_type):
    """Ten documents in three rows, of which one fills its row, and short ones beside long ones."""
    live = OnlineHiddenStates(stateful_model(model_type))
    random = np.random.default_rng(1)
    lengths = (30, 2, 17, 1, 4, 9, 3, 26, 5, 12)
    drawn = [random.integers(3, 60, length).astype(np.int32) for length in lengths]
    documents = Documents.of(Document(tokens, np.ones(len(tokens), dtype=bool)) for tokens in drawn)
    check_packing(live, documents, DataOptions(data=["x"], packing=True))
    rows = [[0], [1, 2, 3, 4], [5, 6, 7, 8, 9]]
    packed = live(collate(documents, rows), layers=(1,))
    for row, states in zip(rows, packed, strict=True):
        start = 0
        for index in row:
            alone = live(collate(documents, [[index]]), layers=(1,))[0]
            torch.testing.assert_close(states[start : start + lengths[index]], alone, rtol=1e-3, atol=1e-4)
            start += lengths[index]


def test_packing_on_a_base_that_keeps_a_state_and_that_processes_share_is_refused(monkeypatch):
    live, packed = OnlineHiddenStates(stateful_model("lfm2")), DataOptions(data=["x"], packing=True)
    monkeypatch.setattr(live, "is_shared", True)
    with pytest.raises(ValueError, match="Lfm2ForCausalLM keeps a state, so each is read by itself"):
        check_packing(live, documents_of(), packed)
