"""What training tests share: a chat tokenizer made on the spot, and a tiny base that speaks it."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from accelerate import Accelerator
from conftest import CHECKOUT
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from medusa.training.config import TrainingConfiguration
from medusa.training.data.loading import Dataset, load_data
from medusa.training.run.job import RECIPES, stored_states
from medusa.training.run.run_directory import RunDirectory
from medusa.training.run.trainer import Trainer
from medusa.training.states.stored import HiddenStateSource

MORTAL = str(CHECKOUT / "tests" / "launched_training.py")
"""Trains as `medusa train` does, and dies as the environment says."""
SYSTEM = "You are a machine"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    + SYSTEM
    + "<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_tokenizer(template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: one token a byte, and the two turn marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<|im_start|>", "<|im_end|>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=template,
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )


def tiny_base(vocab_size: int = 258, hidden_size: int = 32) -> LlamaForCausalLM:
    """A random Llama in float32, the same one every time."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            initializer_range=0.3,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
        return LlamaForCausalLM(config).eval().requires_grad_(False)


def save_tiny_base(directory: Path) -> Path:
    """A base with its tokenizer, as ``from_pretrained`` reads them."""
    tiny_base().save_pretrained(directory)
    chat_tokenizer().save_pretrained(directory)
    return directory


def save_base_and_rows(directory: Path) -> Path:
    """``directory`` with the base and rows.jsonl, forty conversations."""
    save_tiny_base(directory / "base")
    write_rows(directory / "rows.jsonl", counting_rows(40))
    return directory


def write_run(directory: Path, **options: Any) -> Path:
    """``directory`` with a base, data, and a run.yaml that names both and says ``options``."""
    save_tiny_base(directory / "base")
    write_rows(directory / "data.jsonl", counting_rows(40))
    named = {"base": directory / "base", "data": directory / "data.jsonl"}
    defaults = {"num_heads": 3, "held_out_fraction": 0.1, "tree_nodes": 6}
    lines = (f"{key}: {value}\n" for key, value in (named | defaults | options).items())
    (directory / "run.yaml").write_text("".join(lines))
    return directory


def accelerated(name: str, *options: str) -> tuple[str, ...]:
    """The launcher of two processes that configs/accelerate_NAME.yaml asks for."""
    launcher = (sys.executable, "-m", "accelerate.commands.launch", "--config_file")
    path = str(CHECKOUT / "configs" / f"accelerate_{name}.yaml")
    return (*launcher, path, "--num_processes", "2", "--main_process_port", "0", *options)


def conversation(question: str, answer: str, **beside: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **beside}


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def counting_rows(count: int) -> list[dict[str, Any]]:
    """Questions whose answers count on from a letter: something that heads can learn."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    return [
        conversation(
            f"Count from {letters[i % 26]}, {i}", "".join(letters[(i + j) % 26] for j in range(8 + i % 13))
        )
        for i in range(count)
    ]


def configuration_of(
    cls: type[TrainingConfiguration] = TrainingConfiguration, /, **options: Any
) -> TrainingConfiguration:
    """A configuration of flat ``options``, as in the YAML file."""
    options = {key: str(value) if isinstance(value, Path) else value for key, value in options.items()}
    if isinstance(options["data"], str):
        options["data"] = [options["data"]]
    given = {}
    for name, kind in get_type_hints(cls).items():
        mine = {each.name for each in dataclasses.fields(kind)} & options.keys()
        given[name] = kind(**{key: options.pop(key) for key in mine})
    assert not options, f"no such options: {options}"
    return cls(**given)


def new_trainer(directory: Path, rows: list[dict[str, Any]], **options: Any) -> Trainer:
    """A trainer on ``rows`` and the tiny base; options as in the YAML file."""
    configuration = configured(directory, rows, **options)
    data = load_data(configuration.data, chat_tokenizer())
    return trainer_on(configuration, tiny_base(), data)


def trainer_on(configuration: TrainingConfiguration, base: Any, data: Dataset) -> Trainer:
    accelerator = accelerator_of(configuration)
    console = Console(quiet=True)
    states = HiddenStateSource.of(base)
    if configuration.optimisation.cache_hidden_states:
        stored = stored_states(configuration, accelerator, base, lambda: states.live, data, console)
        states = HiddenStateSource(base, states.live, stored)
    recipe = RECIPES[configuration.kind](configuration, states, data.training)
    trainer = Trainer(recipe, accelerator, data, console)
    go_on = trainer._begin

    def begin() -> None:
        """What the job does before there is a trainer, and then the trainer's own."""
        trainer.run.start(configuration)
        go_on()

    trainer._begin = begin
    return trainer


def configured(directory: Path, rows: list[dict[str, Any]], **options: Any) -> TrainingConfiguration:
    """Of a short run in ``directory`` on ``rows``; options as in the YAML file."""
    directory.mkdir(exist_ok=True)
    defaults = {
        "base": "tiny",
        "data": write_rows(directory / "rows.jsonl", rows),
        "output_dir": directory / "run",
        "num_heads": 3,
        "max_steps": 12,
        "tokens_per_batch": 1024,
        "learning_rate": 1e-2,
        "warmup_steps": 3,
        "logging_steps": 1,
        "held_out_fraction": 0.1,
        "replayed_documents": 0,
    }
    configuration = configuration_of(**defaults | options)
    RunDirectory(configuration.run.output_dir).check(configuration)
    return configuration


def accelerator_of(configuration: TrainingConfiguration) -> Accelerator:
    """On the CPU, in the precision asked for."""
    precision = {"fp32": "no", "bf16": "bf16"}[configuration.optimisation.precision]
    return Accelerator(cpu=True, mixed_precision=precision)


def assert_equal_weights(ours: Trainer, theirs: Trainer, **tolerance: float) -> None:
    """Of all that is trained."""
    expected = theirs.loss.state_dict()
    for name, tensor in ours.loss.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], **tolerance)


def history(trainer: Trainer, name: str = "train") -> dict[int, dict[str, float]]:
    """The logged metrics by step, without what the clock decides."""
    entries = [json.loads(line) for line in trainer.run.metrics.read_text().splitlines()]
    entries = [entry for entry in entries if f"{name}/loss" in entry]
    assert len({entry["step"] for entry in entries}) == len(entries), "a step was logged twice"
    kept = (name + "/", "learning_rate", "epoch", "num_tokens")
    return {
        entry["step"]: {key: value for key, value in entry.items() if key.startswith(kept)}
        for entry in entries
    }


JOINT = {
    "joint": True,
    "joint_warmup_fraction": 0.5,
    "lora_rank": 4,
    "max_steps": 8,
    "learning_rate": 2e-3,
    "warmup_steps": 2,
}
"""Options of a short run that trains an adapter with the heads."""
EAGLE3 = {"head_kind": "eagle3", "fused_layers": [1], "objective": "kl"}
"""Options of a run that trains an EAGLE-3 head on the tiny base."""


class Stopped(Exception):
    """What a test raises to end a run early."""


def stop_after(trainer: Trainer, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``trainer`` stop once it has done ``step`` steps, as a killed process does."""
    do_step = trainer._step

    def stopping(*args: Any) -> None:
        if trainer.state.step == step:
            raise Stopped
        do_step(*args)

    monkeypatch.setattr(trainer, "_step", stopping)
    with pytest.raises(Stopped):
        trainer.train()
