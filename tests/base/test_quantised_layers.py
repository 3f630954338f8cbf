"""Quantised layers are tried: what mixes the rows of a pass is refused, what rounds is told."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from conftest import GROUPED, random_prompts, tiny_model
from torch import nn
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from medusa import MedusaModel
from medusa.engine.weights.load import load_base


class Int8Linear(nn.Module):
    """A linear layer with weights in 8 bits, as libraries that quantise have them."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("scale", linear.weight.detach().abs().amax(1, keepdim=True) / 127)
        self.register_buffer("weight", (linear.weight.detach() / self.scale).round().to(torch.int8))

    def forward(self, x):
        return x @ (self.weight * self.scale).to(x.dtype).T


class OneScale(Int8Linear):
    """Activations in 8 bits too, with one scale for all rows of a pass."""

    def forward(self, x):
        scale = x.abs().max() / 127
        return super().forward((x / scale).round() * scale)


class Outliers(Int8Linear):
    """LLM.int8: columns in which any row of a pass is large are not rounded."""

    def forward(self, x):
        is_large = x.abs().flatten(0, -2).amax(0) > 6
        scale = x.masked_fill(is_large, 0).abs().amax(-1, keepdim=True) / 127
        return super().forward(torch.where(is_large, x, (x / scale).round() * scale))


class ScaleOfEachRow(Int8Linear):
    def forward(self, x):
        scale = x.abs().amax(-1, keepdim=True) / 127
        return super().forward((x / scale).round() * scale)


class InBfloat16(Int8Linear):
    def forward(self, x):
        return super().forward(x.bfloat16()).to(x.dtype)


def with_layers(kind, dtype=torch.float32):
    base = copy.deepcopy(tiny_model("llama")).to(dtype)
    base.model.layers[1].mlp.down_proj = kind(base.model.layers[1].mlp.down_proj)
    return base


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [OneScale, Outliers])
def test_a_layer_that_mixes_the_rows_of_a_pass_is_refused_of_a_known_architecture_too(kind, dtype):
    name = (
        rf"what {kind.__name__} layers of \w+ \(model\.layers\.1\.mlp\.down_proj\) gives for a token depends"
    )
    with pytest.raises(ValueError, match=rf"{name} on the tokens beside it.* Int8WeightOnlyConfig"):
        MedusaModel(with_layers(kind, dtype))


@pytest.mark.parametrize("kind", [ScaleOfEachRow, InBfloat16])
def test_a_float32_base_with_layers_that_compute_in_less_is_told_of(kind):
    with pytest.warns(UserWarning, match=rf"^{kind.__name__} layers of \w+ compute in less than float32"):
        MedusaModel(with_layers(kind))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(Int8Linear, torch.float32), (Int8Linear, torch.bfloat16), (InBfloat16, torch.bfloat16)],
    ids=str,
)
def test_nothing_is_said_of_layers_whose_rounding_is_that_of_the_base(kind, dtype):
    base, drawn = with_layers(kind, dtype), torch.random.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = MedusaModel(base)
    assert torch.equal(torch.random.get_rng_state(), drawn), "nothing is drawn of the caller's numbers"
    model.generate(random_prompts(1, 9), max_new_tokens=3, do_sample=False)


@pytest.mark.parametrize("bits", [8, 4])
def test_bases_of_bitsandbytes_are_refused_in_8_bits_and_told_of_where_4_bits_round(tmp_path, bits):
    functional = pytest.importorskip("bitsandbytes").functional
    widths = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}  # as its kernels take them
    LlamaForCausalLM(LlamaConfig(**GROUPED | widths)).save_pretrained(tmp_path)
    how = {8: {"load_in_8bit": True}, 4: {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}[bits]
    base = load_base(tmp_path, dtype=torch.float32, quantization_config=BitsAndBytesConfig(**how))
    if bits == 8:
        with pytest.raises(ValueError, match="Linear8bitLt layers of bitsandbytes"):
            MedusaModel(base)
    elif functional.has_avx512bf16():  # else it computes in float32
        with pytest.warns(UserWarning, match="Linear4bit layers of bitsandbytes compute in less"):
            MedusaModel(base)
