"""Heads that are trained on a quantised base, with the states that decoding computes."""

import numpy as np
import pytest
import torch
from conftest import needs_kernels
from gguf import GGMLQuantizationType as Type
from quantised_directories import HIDDEN, write_directory
from quantised_files import write_model
from tiny_chat import chat_tokenizer
from tiny_training import configuration_of, counting_rows, write_rows

from medusa.base.causal_lm import lm_head
from medusa.engine.weights.load import load_base
from medusa.engine.weights.products import GroupQuantisedMatmul
from medusa.heads.checkpoint import load_heads
from medusa.model import MedusaModel
from medusa.training.config import BaseOptions
from medusa.training.data.batching import collate
from medusa.training.data.dataset import Documents
from medusa.training.run import job
from medusa.training.states.base import frozen_base, live_states

pytestmark = needs_kernels
pytest.importorskip("medusa.base.gguf_model", exc_type=ImportError, reason="needs a newer transformers")


@pytest.fixture
def file(tmp_path):
    return write_model(tmp_path / "tiny.gguf", "qwen2", Type.Q4_K, Type.Q6_K)


@pytest.mark.parametrize("is_stored", [False, True], ids=["live", "stored"])
@pytest.mark.parametrize("unembedding", ["shared", "token_map"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.usefixtures("fresh_accelerator")
def test_heads_learn_on_a_quantised_file_and_know_it(file, tmp_path, is_stored, unembedding, precision):
    rows = write_rows(tmp_path / "rows.jsonl", counting_rows(20))
    options = {"data": rows, "num_heads": 2, "max_steps": 3, "tokens_per_batch": 1024, "reads_path": True}
    options |= {"output_dir": tmp_path / "run", "cache_hidden_states": is_stored, "unembedding": unembedding}
    options |= {"precision": precision, "objective": "kl"}
    options |= {"token_map_size": 40} if unembedding == "token_map" else {}
    job.train(configuration_of(base=file, **options))
    checkpoint = load_heads(tmp_path / "run" / "heads")
    assert checkpoint.provenance["metrics"]["held_out/loss"] > 0
    model = MedusaModel.from_pretrained(file, tmp_path / "run" / "heads", engine="auto")
    assert model.generate(torch.arange(9)[None], max_new_tokens=4).shape == (1, 13)


def test_the_base_of_a_run_is_held_in_the_bits_of_its_file_and_computes_as_decoding_does(file):
    device = torch.device("cpu")
    live = live_states(BaseOptions(str(file)), device)
    assert any(isinstance(module, GroupQuantisedMatmul) for module in live.base.modules())
    ids = torch.arange(12)[None]
    assert torch.equal(live.base(ids).logits, load_base(file, "auto")(ids).logits)
    ends = frozen_base(BaseOptions(str(file)), device, layers=False)
    hidden = torch.randn(2, 256)
    assert torch.equal(lm_head(ends)(hidden), lm_head(live.base)(hidden))
    narrow = live_states(BaseOptions(str(file), base_dtype="bfloat16"), device)
    assert narrow.base.dtype == torch.bfloat16


def test_autocast_does_not_reach_the_base(file):
    live, ids = live_states(BaseOptions(str(file)), torch.device("cpu")), torch.arange(12)
    tokens = ids.numpy().astype(np.int32)
    batch = collate(Documents(tokens, tokens >= 0, np.array([0, len(tokens)])), [[0]])
    states = live(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(live(batch), states)


def test_the_loss_through_a_quantised_lm_head_has_the_gradient_of_its_numbers(file):
    head, widened = lm_head(load_base(file, "auto")), load_base(file).lm_head
    x = torch.randn(3, 256, requires_grad=True)
    direction = torch.randn(3, head.width)
    (ours,) = torch.autograd.grad((head(x) * direction).sum(), x)
    (theirs,) = torch.autograd.grad((widened(x) * direction).sum(), x)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_stored", [False, True], ids=["live", "stored"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.usefixtures("fresh_accelerator")
def test_heads_learn_on_a_quantised_directory_whose_lm_head_is_not(tmp_path, is_stored, precision):
    base = tmp_path / "base"
    write_directory(base, "w4a16", vocab_size=300)
    chat_tokenizer().save_pretrained(base)
    rows = write_rows(tmp_path / "rows.jsonl", counting_rows(20))
    options = {"data": rows, "num_heads": 2, "max_steps": 3, "tokens_per_batch": 1024}
    options |= {"output_dir": tmp_path / "run", "cache_hidden_states": is_stored, "unembedding": "shared"}
    options |= {"precision": precision, "objective": "kl"}
    job.train(configuration_of(base=base, **options))
    assert load_heads(tmp_path / "run" / "heads").provenance["metrics"]["held_out/loss"] > 0


def test_the_base_of_a_run_in_a_directory_computes_as_decoding_does_also_without_its_layers(tmp_path):
    expected, device = write_directory(tmp_path, "gptq, zeros"), torch.device("cpu")
    live = live_states(BaseOptions(str(tmp_path)), device)
    ids = torch.arange(12)[None]
    assert torch.equal(live.base(ids).logits, load_base(tmp_path, "auto")(ids).logits)
    ends = frozen_base(BaseOptions(str(tmp_path)), device, layers=False)
    hidden = torch.randn(2, HIDDEN)
    assert torch.equal(lm_head(ends)(hidden), lm_head(live.base)(hidden))
    narrow = live_states(BaseOptions(str(tmp_path), base_dtype="bfloat16"), device)
    assert narrow.base.dtype == torch.bfloat16
    x, direction = torch.randn(3, HIDDEN, requires_grad=True), torch.randn(3, 260)
    (ours,) = torch.autograd.grad((lm_head(live.base)(x) * direction).sum(), x)
    (theirs,) = torch.autograd.grad((expected.lm_head(x) * direction).sum(), x)
    torch.testing.assert_close(ours, theirs)
