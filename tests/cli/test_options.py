from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import pytest
import tyro
from refusals import refusals

from medusa.cli.benchmark import BenchmarkOptions
from medusa.cli.option_types import ReplyOptions
from medusa.cli.options import (
    AnswerOptions,
    DrafterSettings,
    GrowingInts,
    PromptOptions,
    flag_types,
    parse,
)
from medusa.cli.serve import ServeOptions
from medusa.options import TemplateOptions


@dataclass(frozen=True)
class Options:
    """Some of everything."""

    answers: AnswerOptions = AnswerOptions(max_new_tokens=512)
    drafters: DrafterSettings = DrafterSettings()
    sizes: GrowingInts = (1,)
    """Sizes to compare."""
    names: list[str] = field(default_factory=list)
    """Names to compare."""
    layers: list[int] | None = None
    """Layers to read."""
    learning_rate: float = 1e-4
    """How fast to learn."""
    packing: bool = False
    """Pack several documents into a row."""
    precision: Literal["fp32", "bf16"] | None = None
    """Arithmetic."""


def read(*arguments, **more):
    return parse(Options, arguments, **more)


@pytest.fixture
def config(tmp_path):
    """Write a YAML file; its path."""

    def write(text):
        (tmp_path / "run.yaml").write_text(text)
        return str(tmp_path / "run.yaml")

    return write


def test_defaults_are_those_of_the_groups_as_the_program_gives_them():
    assert read() == Options()
    assert read().answers.max_new_tokens == 512


def test_a_file_is_read_as_flags_and_the_command_line_overrides_it(config):
    path = config(
        "learning_rate: 1e-3\nnames: [a, b]\nsizes: [8, 2]\npacking: true\ntop_k: 5\n"
        "temperature: 0.5\nprecision: bf16\nlayers: [8, 16]\n"
    )
    expected = Options(
        AnswerOptions(512, 0.5, top_k=5),
        sizes=(2, 8),
        names=["a", "b"],
        layers=[8, 16],
        learning_rate=1e-3,
        packing=True,
        precision="bf16",
    )
    assert read("--config", path) == expected
    assert read(f"--config={path}") == expected
    changed = read("--learning-rate", "2", "--config", path, "--names", "c", "--no-packing", "--sizes=4,3")
    assert (changed.learning_rate, changed.names, changed.packing, changed.sizes) == (2, ["c"], False, (3, 4))


def test_none_takes_an_optional_key_of_the_file_back(config):
    path = config("precision: bf16\nlayers: [8]\ntop_k: 4\ntemperature: 1\nexit_layer: null\n")
    options = read("--config", path, "--precision", "none", "--layers", "none", "--top_k", "None")
    assert (options.precision, options.layers, options.answers.top_k) == (None, None, None)


def test_underscores_and_hyphens_mean_the_same():
    assert read("--learning_rate", "3") == read("--learning-rate", "3")


def test_a_list_may_be_given_several_times_on_the_command_line(config):
    path = config("names: [of the file]\n")
    options = read("--config", path, "--names", "a", "b", "--sizes=4", "--names=c", "--sizes", "3")
    assert (options.names, options.sizes) == (["a", "b", "c"], (3, 4))


def test_presets_give_way_to_the_file_and_the_file_to_the_command_line(config):
    def presets():
        return {"precision": "bf16", "learning_rate": 7.0}

    assert read(presets=presets).precision == "bf16"
    options = read(
        "--config", config("precision: fp32\nlearning_rate: 8\n"), "--learning_rate", "9", presets=presets
    )
    assert (options.precision, options.learning_rate) == ("fp32", 9)


def refusal(capsys, *arguments) -> str:
    """What is said of a command line that is refused with status 2."""
    with pytest.raises(SystemExit) as ended:
        read(*arguments)
    printed = capsys.readouterr()
    assert ended.value.code == 2 and not printed.out
    return printed.err


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("learning_rat: 1\n", "unknown key 'learning_rat' in {path}; did you mean 'learning_rate'?"),
        ("zzz: 1\n", "unknown key 'zzz' in {path}; --help lists every key"),
        ("packing: maybe\n", "packing in {path} must be true or false, got 'maybe'"),
        ("names: {a: 1}\n", "names in {path} must have a plain value, got {{'a': 1}}"),
        ("learning_rate: null\n", "learning_rate in {path} must have a plain value, got None"),
        ("- a\n- b\n", "{path} must hold keys and values, got list"),
        ("a: [\n", "{path} is not valid YAML"),
        ("[" * 3000, "{path} is not valid YAML"),
        ("temperature: -1\n", "error: temperature must be at least 0, got -1.0\n(temperature in {path}: "),
        ("learning_rate: fast\n", "learning_rate in {path} must be a number, got 'fast'; change it there"),
        (
            "max_new_tokens: many\n",
            "max_new_tokens in {path} must be a whole number, got 'many'; change it there",
        ),
        ("sizes: many\n", "sizes in {path} cannot be 'many': invalid literal"),
        ("precision: fp8\n", "precision in {path} must be one of fp32, bf16, none, got 'fp8'"),
        ("learning_rate: [1, 2]\n", "learning_rate in {path} must have a plain value, got [1, 2]"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_status_2(config, capsys, text, complaint):
    path = config(text)
    said = refusal(capsys, "--config", path)
    assert complaint.format(path=path) in said
    assert path in said, "the user learns which file it was"
    assert "Error parsing" not in said and "│" not in said


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--learning-rat", "1"], "did you mean --learning-rate?"),
        (["--max-new-tokens", "0"], "max_new_tokens must be at least 1, got 0"),
        (["--temperature", "nan"], "temperature must be at least 0, got nan"),
        (["--temperature", "1", "--top-p", "2"], "top_p must be in (0, 1], got 2.0"),
        (["--temperature", "1", "--top-p", "0"], "top_p must be in (0, 1], got 0.0"),
        (["--temperature", "1", "--min-p", "1.5"], "min_p must be in [0, 1], got 1.5"),
        (["--top-p", "0.9"], "top_p goes with sampling, and temperature is 0"),
        (["--exit-layer", "0"], "exit_layer must be at least 1, got 0"),
        (["--sizes", "2,0"], "must be at least 1, got 0"),
        (["--precision", "fp8"], "'fp32'"),
        (["--model", "x"], "unknown option --model; "),
        (["--names", "--sizes", "1"], "--names must have a value, got none"),
        (["--config"], "--config takes one file and is given once"),
        (["--config", "nowhere.yaml"], "configuration file 'nowhere.yaml' does not exist"),
    ],
)
def test_a_command_line_that_cannot_be_used_is_refused_with_status_2(capsys, arguments, complaint):
    said = refusal(capsys, *arguments)
    assert complaint in said
    assert len(said.splitlines()) < 12


def test_a_value_of_the_file_is_named_with_what_to_do(config, capsys):
    path = config("max_new_tokens: 0\n")
    assert refusal(capsys, "--config", path) == (
        "error: max_new_tokens must be at least 1, got 0\n"
        f"(max_new_tokens in {path}: change that there, or give --max-new-tokens)\n"
    )


def test_a_value_of_the_command_line_is_not_blamed_on_the_file(config, capsys):
    path = config("temperature: 1\n")
    said = refusal(capsys, "--config", path, "--temperature", "-1")
    assert said == (
        f"error: temperature must be at least 0, got -1.0\n(the keys of {path} take the place of defaults)\n"
    )


test_groups_check_themselves_without_a_parser = refusals(
    ("limit", lambda: PromptOptions(limit=0), "limit must be at least 1, got 0"),
    ("system", lambda: ReplyOptions(system="Be brief \udcff"), "system must be UTF-8 text"),
    (
        "a list",
        lambda: TemplateOptions(chat_template_kwargs="[1]"),
        "chat_template_kwargs must be a JSON object",
    ),
    (
        "no JSON",
        lambda: TemplateOptions(chat_template_kwargs="{"),
        "chat_template_kwargs must be a JSON object",
    ),
    (
        "text",
        lambda: TemplateOptions(chat_template_kwargs='"a"'),
        "chat_template_kwargs must be a JSON object",
    ),
    *(
        (
            number,
            partial(TemplateOptions, chat_template_kwargs=f'{{"x": [{number}]}}'),
            "kwargs: numbers must be finite",
        )
        for number in ("1e400", "NaN", "-Infinity")
    ),
)


def test_help_shows_the_description_as_it_stands_and_fits_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    description = (
        "Compare things.\n\nMore words\nbelow.\n\n    compare --names a b\n    compare --sizes 1,2\n"
    )
    with pytest.raises(SystemExit) as ended:
        read("--help", description=description)
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(description)
    assert "--config FILE" in text
    assert "Names to compare." in text
    assert "(default: 0.0001)" in text
    assert max(map(len, text.splitlines())) <= 80


def test_positional_arguments_are_no_keys_of_a_file():
    @dataclass(frozen=True)
    class Asked:
        prompt: tyro.conf.Positional[str]
        raw: bool = False

    globals()["Asked"] = Asked
    assert set(flag_types(Asked)) == {"raw"}
    assert parse(Asked, ["Hello", "--raw"]) == Asked("Hello", True)


def test_flags_and_keys_of_earlier_versions_still_work(config):
    options = parse(ServeOptions, ["--config", config("remember: 3\n"), "--race"])
    assert (options.service.suffix_cache_mib, options.service.allow_plain) == (3, True)
    assert parse(ServeOptions, ["--remember=5"]).service.suffix_cache_mib == 5
    assert parse(BenchmarkOptions, ["--contenders", "heads", "plain"]).systems == ("heads", "plain")
