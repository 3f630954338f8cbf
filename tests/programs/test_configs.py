"""Every file in configs/ parses, and says what it is for and how to launch it."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

import pytest

from medusa.assets import FETCHABLE_FILES
from medusa.cli.options import parse
from medusa.training.config import TrainingConfiguration

CONFIGS = Path(__file__).parents[2] / "configs"
TRAINING = sorted(path for path in CONFIGS.glob("*.yaml") if "compute_environment" not in path.read_text())


def test_there_are_training_configurations():
    assert {"smollm2_demo.yaml", "smollm2.yaml", "smollm2_eagle3.yaml", "smollm2_joint.yaml"} <= {
        path.name for path in TRAINING
    }


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_the_first_lines_say_what_it_is_for_and_how_to_launch_it(path):
    comment = list(takewhile(lambda line: line.startswith("#"), path.read_text().splitlines()))
    assert len(comment[0]) > 30
    assert any(f"--config {path.stem}" in line or f"configs {path.stem}" in line for line in comment)


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.name)
def test_a_configuration_is_complete_and_runs_offline_as_it_stands(path):
    """No account of a tracker, no model from the hub: the base is the one that `medusa fetch` fetches."""
    read = parse(TrainingConfiguration, ["--config", str(path)])
    assert read.run.tracker == "none"
    if path.name not in ("medusa1_8b.yaml", "gemma3_270m.yaml"):
        assert read.base.base in ("smollm2-135m-instruct", *FETCHABLE_FILES)


def test_the_demo_leaves_its_heads_where_everything_expects_them():
    read = parse(TrainingConfiguration, ["--config", str(CONFIGS / "smollm2_demo.yaml")])
    assert read.run.output_dir == "runs/demo"
    assert read.base.base == "smollm2-135m-instruct"
    assert read.data.data == ["runs/demo/data.jsonl"]
