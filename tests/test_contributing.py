"""The examples in CONTRIBUTING.md work as they stand, each as one added file."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from conftest import counting_model, random_prompts, tiny_model

from medusa import MedusaModel, drafters, verification
from medusa.drafters.choice import drafter_named
from medusa.drafters.plain import PlainDrafter
from medusa.drafters.self_draft import SelfDrafter, early_exit
from medusa.tree import CandidateTree

CONTRIBUTING = Path(__file__).parent.parent / "CONTRIBUTING.md"


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Puts the code block that contains a word into a package, as a file of its own."""

    def added(word: str, package) -> None:
        blocks = re.findall(r"```python\n(.*?)```", CONTRIBUTING.read_text(), re.DOTALL)
        (code,) = [block for block in blocks if word in block]
        (tmp_path / f"{word}.py").write_text(textwrap.dedent(code))
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])

    return added


def test_a_drafter_is_one_file(example):
    example("echo", drafters)
    base = counting_model(16)
    base.lm_head.weight.data = base.lm_head.weight.data.roll(-1, dims=0)  # every token repeats itself
    model = MedusaModel(base)
    prompt = random_prompts(1, 3).clamp(max=15)
    options = {"do_sample": False, "max_new_tokens": 11, "return_dict_in_generate": True}
    out = model.generate(prompt, **options, drafter=drafter_named("echo", model))
    plain = model.generate(prompt, **options, drafter=PlainDrafter())
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert out.statistics.accepted_histogram == [0, 5]


def test_a_rule_is_one_file(example):
    example("sceptic", verification)
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
