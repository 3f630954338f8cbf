"""Medusa heads as other projects build and write them, at small size, from the structure they publish."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from damage import write_tensors
from refusals import pattern
from tiny_chat import chat_tokenizer
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from medusa.cli.main import main

REMEDY = re.compile(r"(?i)\b(add|copy|download|get|give|leave|mend|save|take|train|use|write) |: --\w")
"""A message says what to do, in one of these words."""


class ResBlock(nn.Module):
    """The block of FasterDecoding/Medusa: a linear layer of zero weight, SiLU, and the way around it."""

    def __init__(self, size: int):
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.linear(x))


def reference_heads(
    base: LlamaForCausalLM, num_heads: int = 3, num_layers: int = 1, repeats_block: bool = False
) -> nn.ModuleList:
    """What ``medusa_head`` is there, after some training: blocks and rows that have moved.

    ``repeats_block``: the published code puts one and the same block into a head ``num_layers`` times.
    """
    torch.manual_seed(5)
    rows = base.lm_head.weight
    vocab, size = rows.shape
    heads = nn.ModuleList()
    for _ in range(num_heads):
        blocks = [ResBlock(size) for _ in range(num_layers)]
        if repeats_block:
            blocks = blocks[:1] * num_layers
        heads.append(nn.Sequential(*blocks, nn.Linear(size, vocab, bias=False)))
    for head in heads:
        for block in head[:-1]:
            nn.init.normal_(block.linear.weight, std=0.2)
            nn.init.normal_(block.linear.bias, std=0.2)
        head[-1].weight.data.copy_(rows + 0.1 * torch.randn_like(rows))
    return heads.eval()


def use_base_rows(heads: nn.ModuleList, base: LlamaForCausalLM) -> nn.ModuleList:
    """The same heads with the LM head that they begin with."""
    for head in heads:
        head[-1].weight.data.copy_(base.lm_head.weight)
    return heads


def reference_logits(heads: nn.ModuleList, hidden: Tensor) -> Tensor:
    """(B, D) -> (B, K, V)."""
    return torch.stack([head(hidden) for head in heads], dim=1)


def write_heads(directory: Path, heads: nn.ModuleList, base: str, file: str = "medusa_lm_head.pt") -> Path:
    """A directory of heads as the reference code writes it; ``file`` chooses v1 or v2."""
    directory.mkdir(parents=True)
    config = {"medusa_num_heads": len(heads), "medusa_num_layers": len(heads[0]) - 1}
    (directory / "config.json").write_text(json.dumps({**config, "base_model_name_or_path": base}))
    write_tensors(directory / file, heads.state_dict())
    return directory


def write_whole_model(
    directory: Path, heads: nn.ModuleList, base: LlamaForCausalLM, layout: str = "one file"
) -> Path:
    """A Medusa-2 model: the base's tensors and ``medusa_head.*`` in the same files."""
    directory.mkdir(parents=True)
    chat_tokenizer().save_pretrained(directory)
    config = {**base.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    config |= {"medusa_num_heads": len(heads), "medusa_num_layers": len(heads[0]) - 1}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = base.state_dict() | {f"medusa_head.{name}": each for name, each in heads.state_dict().items()}
    if layout != "shards":
        name = {"one file": "model.safetensors", "pickle": "pytorch_model.bin"}[layout]
        write_tensors(directory / name, tensors)
        return directory
    names, index = sorted(tensors), {}
    for shard in range(3):
        file = f"model-0000{shard + 1}-of-00003.safetensors"
        held = names[shard::3]
        write_tensors(directory / file, {name: tensors[name] for name in held})
        index |= dict.fromkeys(held, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return directory


class VllmMedusa(nn.Module):
    """The parameters that vLLM's Medusa model asks of a checkpoint, and what it computes."""

    def __init__(self, config: dict):
        super().__init__()
        size, self.num_heads = config["hidden_size"], config["num_heads"]
        self.blocks = nn.ModuleList()
        for _ in range(self.num_heads):
            block = nn.Module()
            block.layers = nn.ModuleList(
                nn.Linear(size, size, bias=config.get("medusa_fc_bias", False))
                for _ in range(config["num_hidden_layers"])
            )
            self.blocks.append(block)
        if config.get("original_lm_head", False):
            self.lm_head = nn.Linear(size, config["vocab_size"], bias=False)
        else:
            self.lm_heads = nn.ModuleList(
                nn.Linear(size, config["vocab_size"], bias=False) for _ in range(self.num_heads)
            )

    def forward(self, hidden: Tensor) -> Tensor:
        logits = []
        for k, block in enumerate(self.blocks):
            x = hidden
            for layer in block.layers:
                x = x + nn.functional.silu(layer(x))
            logits.append((self.lm_heads[k] if hasattr(self, "lm_heads") else self.lm_head)(x))
        return torch.stack(logits, dim=1)


def vllm_heads(base: LlamaForCausalLM, is_shared: bool, num_layers: int = 1) -> tuple[VllmMedusa, dict]:
    """Heads for vLLM with their config.json."""
    torch.manual_seed(6)
    vocab, size = base.lm_head.weight.shape
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": size,
        "vocab_size": vocab,
        "num_heads": 3,
        "num_hidden_layers": num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": is_shared,
    }
    heads = VllmMedusa(config)
    for parameter in heads.parameters():
        nn.init.normal_(parameter, std=0.2)
    if is_shared:
        heads.lm_head.weight.data.copy_(base.lm_head.weight)
    return heads.eval(), config


def write_vllm_heads(directory: Path, heads: VllmMedusa, config: dict) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    write_tensors(directory / "model.safetensors", heads.state_dict())
    return directory


def refused(command: list[str], tmp_path: Path, capsys, words: str) -> None:
    """Hold a command to: status 1, one line that has the words and says what to do, no output."""
    before = sorted(tmp_path.iterdir())
    assert main([*command, "--output", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search(pattern(words), error), error
    assert REMEDY.search(error), error
    assert sorted(tmp_path.iterdir()) == before
