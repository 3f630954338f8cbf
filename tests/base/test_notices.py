"""Notices of transformers that no user can act on are not shown, and all others are."""

import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from medusa.engine.weights.load import load_base


class Shown(logging.Handler):
    """Keeps the notices that are shown."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.texts: list[str] = []

    def emit(self, record):
        self.texts.append(record.getMessage())


@pytest.fixture
def shown():
    handler = Shown()
    logging.getLogger("transformers").addHandler(handler)
    yield handler.texts
    logging.getLogger("transformers").removeHandler(handler)


@pytest.mark.parametrize(
    "module, text, is_told",
    [
        ("integrations.hub_kernels", "`f` is falling back to its reference PyTorch implementation", False),
        ("integrations.hub_kernels", "the kernel cannot be fetched", True),
        (
            "configuration_utils",
            "`text_config` is None, initializing Config with default values.",
            False,
        ),
        ("configuration_utils", "`torch_dtype` is deprecated! Use `dtype` instead!", True),
        ("models.smolvlm.configuration_smolvlm", "`self.pad_token_id` is deprecated and might", False),
    ],
)
def test_a_notice_that_no_user_can_act_on_is_not_shown(shown, module, text, is_told):
    logging.getLogger(f"transformers.{module}").warning(text)
    assert shown == [text] * is_told


@pytest.mark.parametrize(
    "key, is_told",
    [("visual.blocks.0.weight", False), ("model.vision_tower.a.weight", False), ("model.other.weight", True)],
)
def test_weights_of_parts_that_read_images_are_no_news_and_other_unknown_ones_are(
    shown, tmp_path, key, is_told
):
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=32, **shape)).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, key: torch.zeros(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    load_base(tmp_path)
    assert any("LOAD REPORT" in text and "UNEXPECTED" in text for text in shown) == is_told
