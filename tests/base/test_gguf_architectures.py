"""Files as the converter of llama.cpp writes them: each gives the model that was converted."""

import re

import pytest
import torch
from converted_gguf import MODELS, VOCAB_SIZE, made, write_converted

from medusa.base.loading import find_base, gguf_model
from medusa.engine.weights.load import load_base
from medusa.heads.mtp import MtpConfig, MtpHead, num_mtp_layers, own_head

pytest.importorskip("medusa.base.gguf_model", exc_type=ImportError, reason="needs a newer transformers")

PROMPT = torch.randint(3, VOCAB_SIZE, (1, 24), generator=torch.Generator().manual_seed(2))


def answer(model):
    return model.generate(PROMPT, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)


def mtp_head(base):
    base.config.mtp_num_hidden_layers = 1
    base.name_or_path = "made"
    head = MtpHead(MtpConfig.of_base(base))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return head


@pytest.mark.parametrize("kind", MODELS)
def test_each_tensor_and_each_token_of_a_converted_file_is_the_models_own(kind, tmp_path):
    theirs = made(kind)
    ours = load_base(write_converted(theirs, kind, tmp_path / "tiny.gguf"), dtype=torch.float32)
    assert type(ours) is type(theirs)
    given, held = theirs.state_dict(), ours.state_dict()
    assert given.keys() == held.keys()
    for name, value in given.items():
        # where a file has a number another way, it is rounded there: -exp(x), and x + 1
        torch.testing.assert_close(held[name], value, atol=2e-7, rtol=2e-7, msg=name)
        assert torch.equal(held[name], value) or re.search(r"A_log|norm", name), name
    torch.testing.assert_close(ours(PROMPT).logits, theirs(PROMPT).logits, atol=2e-5, rtol=1e-5)
    assert torch.equal(answer(ours), answer(theirs))


def test_a_file_without_a_buffer_that_the_model_needs_is_refused(tmp_path):
    theirs = made("Gemma 4 E2B")
    for layer in theirs.model.layers:
        del layer.layer_scalar
    path = write_converted(theirs, "Gemma 4 E2B", tmp_path / "tiny.gguf")
    with pytest.raises(ValueError, match=r"must have a tensor for 'model.layers.0.layer_scalar' \(8 in all"):
        load_base(path, dtype=torch.float32)


def test_a_file_with_layers_for_multi_token_prediction_says_how_many_there_are(tmp_path):
    theirs = made("Qwen3.5")
    plain = find_base(write_converted(theirs, "Qwen3.5", tmp_path / "plain.gguf")).config
    assert num_mtp_layers(plain) == 0
    with_layer = write_converted(theirs, "Qwen3.5", tmp_path / "mtp.gguf", mtp_head(theirs).layers)
    config = find_base(with_layer).config
    assert (num_mtp_layers(config), config.num_hidden_layers) == (1, 4)
    assert torch.equal(answer(load_base(with_layer, dtype=torch.float32)), answer(theirs))


@pytest.mark.parametrize("kind", ["Qwen3.5", "Qwen3.5 MoE"])
def test_the_layers_for_multi_token_prediction_come_from_the_file(kind, tmp_path):
    theirs = made(kind)
    head = mtp_head(theirs)
    path = write_converted(theirs, kind, tmp_path / "mtp.gguf", head.layers)
    held = own_head(load_base(path, dtype=torch.float32)).state_dict()
    given = head.state_dict()
    assert given.keys() == held.keys()
    for name, value in given.items():
        torch.testing.assert_close(held[name], value, atol=2e-7, rtol=2e-7, msg=name)


def test_a_file_that_lacks_a_tensor_of_these_layers_is_named(tmp_path):
    theirs = made("Qwen3.5")
    path = write_converted(theirs, "Qwen3.5", tmp_path / "mtp.gguf", mtp_head(theirs).layers)
    path.write_bytes(path.read_bytes().replace(b"nextn.enorm", b"nextn.enerm"))
    base = load_base(path, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"mtp.gguf must have a tensor for 'enorm.weight'"):
        own_head(base)


def test_rows_and_columns_that_a_file_has_in_another_order_are_found_by_number(tmp_path):
    source = find_base(write_converted(made("Qwen3.5"), "Qwen3.5", tmp_path / "tiny.gguf"))
    weights = gguf_model().named_weights(source.gguf, gguf_model().empty_model(source.gguf, source.config))
    tiled = torch.arange(6 * 32).view(3, 2, 32).transpose(0, 1).flatten()
    for name, shape in (("in_proj_z", (192, 32)), ("out_proj", (32, 192))):
        order = weights[f"model.layers.0.linear_attn.{name}.weight"].order([shape])
        moved = order.columns if name == "out_proj" else order.rows
        assert order.moves and torch.equal(moved, tiled)
    assert not weights["model.layers.0.mlp.up_proj.weight"].order([(64, 32)]).moves
    assert weights["model.norm.weight"].order([(32, 1)]) is None
