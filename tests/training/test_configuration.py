"""YAML and command line fill one checked configuration, resumed runs compared."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from refusals import refusals
from tiny_training import JOINT, configuration_of

from medusa.cli.options import flag_types, parse
from medusa.cli.train import TrainOptions
from medusa.heads.checkpoint import KINDS
from medusa.training.config import (
    HeadKind,
    KindOptions,
    TrainingConfiguration,
    changed_keys,
    launched_precision,
)
from medusa.training.run.job import RECIPES

MINIMAL: dict[str, Any] = {"base": "some/model", "data": "a.jsonl", "output_dir": "out", "max_steps": 5}
REQUIRED = ["--base", "some/model", "--output_dir", "out", "--data", "a.jsonl", "--max_steps", "5"]


def read(*arguments: str) -> TrainingConfiguration:
    return parse(TrainingConfiguration, arguments)


def write(path: Path, text: str) -> list[str]:
    path.write_text(text, encoding="utf-8")
    return ["--config", str(path)]


@pytest.fixture
def config(tmp_path) -> list[str]:
    text = (
        "base: some/model\ndata: [a.jsonl, b.jsonl]\noutput_dir: out\nlearning_rate: 1e-3\nmax_minutes: 3\n"
    )
    return write(tmp_path / "run.yaml", text + "packing: true\nfused_layers: [1, 2]\n")


def test_the_file_fills_the_configuration_and_scientific_numbers_are_numbers(config):
    found = read(*config)
    assert found.data.data == ["a.jsonl", "b.jsonl"]
    assert found.optimisation.learning_rate == 0.001
    assert found.optimisation.max_minutes == 3.0
    assert found.data.packing is True
    assert found.heads.fused_layers == [1, 2]


@pytest.mark.parametrize(
    ("launched", "given", "precision"),
    [
        (None, [], "fp32"),
        ("no", [], "fp32"),
        ("bf16", [], "bf16"),
        ("bf16", ["--precision", "fp32"], "fp32"),
        ("no", ["--precision", "bf16"], "bf16"),
    ],
)
def test_the_launch_decides_the_precision_that_nobody_gives(monkeypatch, config, launched, given, precision):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    if launched is not None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    asked = parse(TrainOptions, [*config, *given], **TrainOptions.PARSING)
    assert asked.optimisation.precision == precision


def launched_in_float16(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    launched_precision()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "never"),
        (["--resume"], "always"),
        (["--resume", "auto"], "auto"),
        (["--resume=auto"], "auto"),
        (["--resume", "true"], "always"),
        (["--resume=false"], "never"),
    ],
    ids=str,
)
def test_resume_stands_alone_or_takes_a_word(config, words, expected):
    assert read(*config, *words, "--data", "c.jsonl").run.resume == expected


@pytest.mark.parametrize(("written", "expected"), [("auto", "auto"), ("true", "always"), ("no", "never")])
def test_resume_may_stand_in_the_file(tmp_path, written, expected):
    found = read(*write(tmp_path / "run.yaml", f"resume: {written}\n"), *REQUIRED)
    assert found.run.resume == expected


def test_what_was_resolved_reads_back_as_the_same_configuration(config, tmp_path):
    found = read(*config)
    assert read(*write(tmp_path / "resolved.yaml", found.as_yaml())) == found


@pytest.mark.parametrize(("wrong", "nearest"), [("learning_rat", "learning_rate"), ("epochs", "num_epochs")])
def test_an_unknown_key_suggests_the_nearest(tmp_path, capsys, wrong, nearest):
    with pytest.raises(SystemExit):
        read(*write(tmp_path / "run.yaml", f"{wrong}: 1\n"), *REQUIRED)
    assert f"run.yaml; did you mean '{nearest}'" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(SystemExit):
        read(*REQUIRED, f"--{wrong}", "1")
    assert nearest.replace("_", "-") in capsys.readouterr().err.replace("_", "-")


REFUSED = [
    ({"num_heads": 0}, "num_heads must be an int from 1 to 256, got 0"),
    ({"unembedding": "token_map"}, "token_map_size goes with unembedding='token_map'"),
    ({"decay": 0.0}, "decay must be in (0, 1], got 0.0"),
    ({"objective": "mse"}, "objective must be one of ... got 'mse'"),
    ({"kl_weight": 1.5}, "kl_weight must be in [0, 1], got 1.5"),
    ({"block_elements": 0}, "block_elements must be at least 1, got 0"),
    ({"max_length": 1}, "max_length must be at least 2, got 1"),
    ({"tokens_per_batch": 0}, "tokens_per_batch must be at least 1, got 0"),
    ({"max_repeated_fraction": 0.0}, "max_repeated_fraction must be in (0, 1], got 0.0"),
    ({"learning_rate": 0.0}, "learning_rate must be above 0, got 0.0"),
    ({"max_steps": 0}, "max_steps must be at least 1, got 0"),
    ({"max_steps": None}, "one of num_epochs, max_steps, max_minutes must say how long"),
    ({"train_on": "everything"}, "train_on=everything goes with objective kl, got 'ce'"),
    ({"overwrite": True, "resume": True}, "overwrite and resume exclude each other"),
    ({"data": []}, "data must name at least one file or hub id"),
    ({"held_out_fraction": 1.0}, "held_out_fraction must be in [0, 1), got 1.0"),
    ({"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
    ({"reads_path": False, "head_kind": "eagle3"}, "reads_path goes with head_kind=medusa, got False"),
    ({"unembedding": "full", "head_kind": "eagle3"}, "unembedding goes with head_kind=medusa, got 'full'"),
    ({"fc_norm": True}, "fc_norm goes with head_kind=eagle3, got True"),
    ({"head_kind": "eagle3", "intermediate_size": -1}, "intermediate_size must be at least 0, got -1"),
    ({**JOINT, "cache_hidden_states": True}, "cache_hidden_states and joint exclude each other"),
    ({**JOINT, "head_kind": "eagle3"}, "joint=true goes with head_kind=medusa, got 'eagle3'"),
    ({**JOINT, "joint": False}, "joint_warmup_fraction goes with joint=true, got 0.5"),
    ({**JOINT, "joint_warmup_fraction": 1.0}, "joint_warmup_fraction must be in [0, 1), got 1.0"),
    ({**JOINT, "lora_dropout": -0.1}, "lora_dropout must be in [0, 1), got -0.1"),
    ({**JOINT, "lora_rank": 0}, "lora_rank must be above 0, got 0"),
    ({**JOINT, "heads_weight": 0}, "heads_weight must be above 0, got 0"),
    *(
        ({name: math.inf}, f"{name} must be ... got inf")
        for name in ("num_epochs", "max_steps", "max_minutes")
    ),
    *(
        ({name: math.nan}, f"{name} must be ... got nan")
        for name in ("num_epochs", "max_steps", "max_minutes")
    ),
    *(
        ({name: 10**40}, f"{name} must be below 2**63, got 1000")
        for name in ("seed", "tokens_per_batch", "max_steps")
    ),
]
test_values_that_cannot_be_used_are_named = refusals(
    ("float16", launched_in_float16, "mixed_precision must be no or bf16 here, got 'fp16'"),
    *((f"{given}"[:40], partial(configuration_of, **MINIMAL | given), words) for given, words in REFUSED),
)


def test_help_explains_every_key(capsys):
    with pytest.raises(SystemExit, match="0"):
        parse(TrainOptions, ["--help"], **TrainOptions.PARSING)
    shown = capsys.readouterr().out
    assert "medusa train --config" in shown
    assert "accelerate launch --num_processes 2 -m medusa train --config" in shown
    for name in flag_types(TrainingConfiguration):
        assert f"-{name.replace('_', '-')}" in shown, name


def test_every_kind_of_training_has_a_recipe():
    made = [{}, {"head_kind": "eagle3"}, {"head_kind": "mtp"}, {"joint": True}]
    assert [configuration_of(**MINIMAL | options).kind for options in made] == list(RECIPES)


def test_every_kind_of_heads_has_its_name_and_its_options():
    assert get_args(HeadKind) == tuple(KINDS)
    configuration = configuration_of(**MINIMAL)
    assert all(isinstance(getattr(configuration, name), KindOptions) for name in KINDS)


def test_no_two_groups_have_a_key_of_the_same_name():
    groups = dataclasses.fields(TrainingConfiguration)
    configuration = configuration_of(**MINIMAL)
    names = [each.name for group in groups for each in dataclasses.fields(getattr(configuration, group.name))]
    assert len(set(names)) == len(names)


def test_a_resumed_run_may_change_how_long_and_not_what(config):
    earlier = yaml.safe_load(read(*config).as_yaml())
    longer = read(*config, "--max_minutes", "9", "--logging_steps", "1", "--resume")
    assert changed_keys(earlier, longer) == []
    other = read(*config, "--num_heads", "3", "--seed", "8")
    assert sorted(changed_keys(earlier, other)) == ["num_heads was 4 and is 3", "seed was 0 and is 8"]
