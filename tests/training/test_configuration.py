"""YAML and command line: the latter wins, unknown keys are named with the nearest known one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from medusa.training.config.configuration import FIELDS, ConfigurationError, changed_keys, read_configuration

MINIMAL = ["--base", "some/model", "--data", "a.jsonl", "--output_dir", "out", "--max_steps", "5"]


def write(path: Path, text: str) -> list[str]:
    path.write_text(text, encoding="utf-8")
    return ["--config", str(path)]


@pytest.fixture
def config(tmp_path) -> list[str]:
    text = (
        "base: some/model\ndata: [a.jsonl, b.jsonl]\noutput_dir: out\nlearning_rate: 1e-3\nmax_minutes: 3\n"
    )
    return write(tmp_path / "run.yaml", text + "packing: true\n")


def test_the_file_fills_the_configuration_and_scientific_numbers_are_numbers(config):
    read = read_configuration(config)
    assert read.data.data == ["a.jsonl", "b.jsonl"]
    assert read.optimisation.learning_rate == 0.001
    assert read.optimisation.max_minutes == 3.0
    assert read.data.packing is True


@pytest.mark.parametrize(
    "arguments", [["--learning_rate", "5e-4"], ["--learning_rate=5e-4"], ["--learning-rate", "5e-4"]]
)
def test_the_command_line_overrides_the_file(config, arguments):
    assert read_configuration([*config, *arguments]).optimisation.learning_rate == 5e-4


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
    assert read_configuration([*config, *given]).optimisation.precision == precision


def test_a_launch_in_float16_is_refused(monkeypatch, config):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ConfigurationError, match="mixed_precision must be no or bf16 here, got 'fp16'"):
        read_configuration(config)


def test_lists_and_switches_are_overridden_too(config):
    read = read_configuration([*config, "--data", "c.jsonl", "--packing", "false", "--resume"])
    assert read.data.data == ["c.jsonl"]
    assert read.data.packing is False
    assert read.run.resume is True


def test_none_takes_an_optional_key_back(config):
    read = read_configuration([*config, "--max_minutes=9", "--max-minutes", "none", "--max_steps", "7"])
    assert read.optimisation.max_minutes is None
    assert read.optimisation.max_steps == 7


def test_a_null_in_the_file_is_the_default(tmp_path):
    arguments = write(tmp_path / "run.yaml", "max_minutes: null\nattention: null\n")
    assert read_configuration([*arguments, *MINIMAL]).optimisation.max_minutes is None


def test_what_was_resolved_reads_back_as_the_same_configuration(config, tmp_path):
    read = read_configuration(config)
    again = read_configuration(write(tmp_path / "resolved.yaml", read.as_yaml()))
    assert again == read


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [("learning_rat", "learning_rate"), ("num_head", "num_heads"), ("epochs", "num_epochs")],
)
def test_an_unknown_key_suggests_the_nearest(tmp_path, wrong, nearest):
    arguments = write(tmp_path / "run.yaml", f"{wrong}: 1\n")
    with pytest.raises(
        ConfigurationError, match=f"unknown key '{wrong}' in .*run.yaml; did you mean '{nearest}'"
    ):
        read_configuration([*arguments, *MINIMAL])
    with pytest.raises(
        ConfigurationError, match=f"unknown key '{wrong}' in command line; did you mean '{nearest}'"
    ):
        read_configuration([*MINIMAL, f"--{wrong}", "1"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--learning_rate", "fast"], "learning_rate.*invalid float value: 'fast'"),
        (["--unembedding", "huge"], "unembedding.*invalid choice: 'huge'"),
        (["--num_heads", "0"], "num_heads must be an int from 1 to 256, got 0"),
        (["--unembedding", "token_map"], "token_map_size goes with unembedding='token_map'"),
        (["--decay", "0"], r"decay must be in \(0, 1\], got 0.0"),
        (["--learning_rate", "0"], "learning_rate must be above 0, got 0.0"),
        (["--max_steps", "0"], "max_steps must be at least 1, got 0"),
        (["--max_steps", "none"], "one of num_epochs, max_steps, max_minutes must say how long"),
        (["--depth_weighting", "dpace", "--decay", "0.5"], "decay does not go with depth_weighting=dpace"),
        (["--dpace_smoothing", "0.1"], "dpace_smoothing does not go with depth_weighting=decay, got 0.1"),
        (["--train_on", "everything"], "train_on=everything goes with objective kl or lk, got 'ce'"),
        (["--overwrite", "--resume"], "overwrite and resume exclude each other"),
        (["stray"], "'stray' belongs to no key"),
    ],
)
def test_values_that_cannot_be_used_are_named(arguments, message):
    given = MINIMAL if arguments != ["stray"] else [*MINIMAL, "--packing", "true"]
    with pytest.raises(ValueError, match=message):
        read_configuration([*given, *arguments])


def test_required_keys_are_asked_for():
    with pytest.raises(ConfigurationError, match="required: --output_dir"):
        read_configuration(MINIMAL[:4])
    with pytest.raises(ConfigurationError, match="data must name at least one file or hub id"):
        read_configuration([*MINIMAL[:2], *MINIMAL[4:]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not valid YAML"),
        ("- base", "must hold keys and values, got list"),
        ("base: {name: x}", "base in .* must have a plain value"),
        ("num_heads: null", "num_heads in .* must have a plain value, got None"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, text, message):
    with pytest.raises(ConfigurationError, match=message):
        read_configuration([*MINIMAL, *write(tmp_path / "run.yaml", text)])


def test_a_missing_file_is_named():
    with pytest.raises(FileNotFoundError, match=r"configuration file 'nowhere.yaml' does not exist"):
        read_configuration(["--config", "nowhere.yaml"])


def test_help_explains_every_key(capsys):
    with pytest.raises(SystemExit, match="0"):
        read_configuration(["--help"], "what this does")
    shown = capsys.readouterr().out
    assert "what this does" in shown
    for name, field in FIELDS.items():
        assert f"--{name}" in shown
        assert len(field.metadata["help"]) > 10, name


def test_a_resumed_run_may_change_how_long_and_not_what(config):
    earlier = yaml.safe_load(read_configuration(config).as_yaml())
    longer = read_configuration([*config, "--max_minutes", "9", "--logging_steps", "1", "--resume"])
    assert changed_keys(earlier, longer) == []
    other = read_configuration([*config, "--num_heads", "3", "--seed", "8"])
    assert changed_keys(earlier, other) == ["num_heads: 4 -> 3", "seed: 0 -> 8"]
