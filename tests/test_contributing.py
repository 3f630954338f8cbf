"""The examples in CONTRIBUTING.md work as they stand, each as one added file."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from pathlib import Path

from conftest import assert_exact, counting_model, random_prompts, tiny_model
from tiny_training import configuration_of, counting_rows, save_tiny_base, write_rows

from medusa import MedusaModel
from medusa.acceptance.rules import RULES
from medusa.drafters.draft_model import SelfDrafter, early_exit
from medusa.drafters.protocol import PlainDrafter
from medusa.drafters.registry import DRAFTERS, DrafterFactory, NamedDrafter
from medusa.heads.checkpoint import KINDS
from medusa.training.config import TrainingConfiguration
from medusa.training.recipes.recipe import AutoregressiveRecipe
from medusa.training.run.job import RECIPES, train
from medusa.training.run.run_directory import RunDirectory
from medusa.trees.candidate_tree import CandidateTree

CONTRIBUTING = Path(__file__).parent.parent / "CONTRIBUTING.md"


def example(word: str) -> dict:
    """The names that the first code block which contains a word defines."""
    names: dict = {"__name__": f"example_{word}"}
    exec(textwrap.dedent(blocks_with(word)[0]), names)
    return names


def blocks_with(word: str) -> list[str]:
    blocks = re.findall(r"```python\n(.*?)```", CONTRIBUTING.read_text(), re.DOTALL)
    return [block for block in blocks if word in block.lower()]


def test_a_drafter_is_one_file_and_a_line_in_the_registry(monkeypatch):
    _, line = blocks_with("echo")
    named = eval(line.strip(), {**example("echo"), "NamedDrafter": NamedDrafter})
    monkeypatch.setitem(DRAFTERS, named.name, named)
    base = counting_model(16)
    base.lm_head.weight.data = base.lm_head.weight.data.roll(-1, dims=0)  # every token repeats itself
    model = MedusaModel(base)
    prompt = random_prompts(1, 3).clamp(max=15)
    options = {"do_sample": False, "max_new_tokens": 11, "return_dict_in_generate": True}
    out = model.generate(prompt, **options, drafter=DrafterFactory(model).make("echo"))
    plain = model.generate(prompt, **options, drafter=PlainDrafter())
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert out.statistics.accepted_histogram == [0, 5]


def test_a_kind_of_heads_is_one_file_with_its_options_and_two_lines(monkeypatch, tmp_path):
    names: dict = {"__name__": "example_matrix"}
    for block in blocks_with("matrix"):
        exec(compile(block, "matrix", "exec", dont_inherit=True), names)
    monkeypatch.setitem(KINDS, "matrix", names["MatrixHead"])
    monkeypatch.setitem(RECIPES, "matrix", AutoregressiveRecipe)
    options = names["MatrixOptions"]
    field = ("matrix", options, dataclasses.field(default_factory=options))
    extended = dataclasses.make_dataclass(
        "Extended", [field], bases=(TrainingConfiguration,), frozen=True, kw_only=True
    )
    run = {
        "base": save_tiny_base(tmp_path / "base"),
        "data": write_rows(tmp_path / "rows.jsonl", counting_rows(40)),
    }
    limits = {"max_steps": 30, "warmup_steps": 3, "learning_rate": 1e-2, "logging_steps": 1}
    train(configuration_of(extended, **run, output_dir=tmp_path / "run", head_kind="matrix", **limits))
    directory = RunDirectory(tmp_path / "run")
    losses = [entry["train/loss"] for entry in directory.logged_metrics() if "train/loss" in entry]
    assert losses[-1] < 0.9 * losses[0]
    model = MedusaModel.from_pretrained(run["base"], directory.heads)
    assert model.heads.kind == "matrix" and model.tree.depth
    prompt = model.tokenizer("Count from a, 1", return_tensors="pt")["input_ids"]
    for sampling in ({"do_sample": False}, {"do_sample": True, "seed": 1}):
        out = assert_exact(model, prompt, {}, {"drafter": "heads"}, max_new_tokens=40, **sampling)
    assert out.statistics.num_steps < out.statistics.num_tokens


def test_a_rule_is_one_file_and_a_line_in_the_registry(monkeypatch):
    monkeypatch.setitem(RULES, "sceptic", example("sceptic")["SCEPTIC"])
    base = tiny_model("llama")
    out = MedusaModel(base).generate(
        random_prompts(2, 4),
        do_sample=True,
        max_new_tokens=5,
        acceptance="sceptic",
        drafter=SelfDrafter(early_exit(base, 1), CandidateTree.chain(2)),
        return_dict_in_generate=True,
    )
    assert out.statistics.accepted_histogram == [8, 0, 0]
