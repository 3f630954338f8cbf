"""Every command ends with what to do next, in words that can be pasted."""

from __future__ import annotations

import shlex
import shutil
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import counting_heads, counting_model
from tiny_chat import chat_tokenizer
from tiny_training import counting_rows, write_rows

import medusa.hardware
from medusa import HeadsCheckpoint, MedusaModel, save_heads
from medusa.cli.main import COMMANDS, _named, main
from medusa.cli.option_types import ChatOptions, PushOptions
from medusa.cli.options import DrafterSettings, ModelOptions, answer_with, parse, print_next, to_argv
from medusa.cli.train import TrainOptions, next_steps

SIZE = 264  # tokens of the counting base, more than the tokenizer has; heads of an even size
HUB_BASE = "someone/counting"
RUNS = {
    "chat": "{model} --max-new-tokens 4 --prompts {prompts}",
    "generate": "{model} --max-new-tokens 4 Hello",
    "fetch": "smollm2-135m-instruct --output {base}",
    "compile": "{model}",
    "configs": "",
    "distill": "--base {base} --prompts {prompts} --max-new-tokens 24 --output {new}/answers.jsonl",
    "train": "--base {base} --data {data} --output_dir {new} --num_heads 1 --max_steps 1",
    "tune": "{measured} --sizes 2 --rounds 1 --no-save --plot {new}/picture.png",
    "evaluate": "{measured} --plot {new}/picture.png",
    "benchmark": "{measured} --systems heads --plot {new}/picture.png",
    "heads": "",
    "info": "{heads}",
    "export": "{heads} --to vllm-medusa --output {new}",
    "check": "{export} --as vllm-medusa --base {base} --prompts {prompts} --max-new-tokens 25",
    "import": "{export} --base {base} --output {new}/heads",
    "push": f"{{heads}} me/heads --base {HUB_BASE} --dry-run {{new}}",
}
"""A short run of each command. ``medusa serve`` alone ends when it is stopped; what it says first is where it
answers. ``medusa learn`` has its own tests."""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> dict[str, str]:
    """What the runs are about: paths and flags by name."""
    folder = tmp_path_factory.mktemp("place")
    base, heads = folder / "base", folder / "heads"
    counting_model(SIZE).save_pretrained(base)
    chat_tokenizer().save_pretrained(base)
    save_heads(HeadsCheckpoint(counting_heads(SIZE), str(base)), heads)
    (folder / "prompts.jsonl").write_text('{"prompt": "One"}\n{"prompt": "Two"}\n')
    write_rows(folder / "data.jsonl", counting_rows(30))
    assert main(["export", str(heads), "--to", "vllm-medusa", "--output", str(folder / "export")]) == 0
    names = {name: str(folder / name) for name in ("base", "heads", "export")}
    names |= {name: str(folder / f"{name}.jsonl") for name in ("prompts", "data")}
    names["model"] = f"--base {base} --heads {heads}"
    return names | {"measured": f"{names['model']} --prompts {names['prompts']} --max-new-tokens 12"}


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("serve", "learn")])
def test_a_command_ends_with_its_next_step(name, place, tmp_path, capsys, monkeypatch, fresh_accelerator):
    monkeypatch.setitem(medusa.hardware.PROBE_BYTES, "cpu", 2**20)
    monkeypatch.setitem(medusa.hardware.PROBE_WIDTH, "cpu", 64)
    monkeypatch.setattr(MedusaModel, "compile", lambda model: 0.0)
    monkeypatch.setattr("medusa.cli.fetch._is_fetched", lambda directory: True)
    monkeypatch.setattr("medusa.cli.options._own_name", lambda: "medusa")
    words = shlex.split(RUNS[name].format(**place, new=tmp_path / "new"))
    capsys.readouterr()
    assert main([name, *words]) == 0
    *_, title, last = capsys.readouterr().err.splitlines()
    assert title == "next:" or title.startswith("  medusa "), "one line for each command"
    check_usable(last.strip())


def check_usable(line: str) -> None:
    """The command that the line calls knows its words, and the paths in it are there or are written."""
    program, name, *words = shlex.split(line)
    if program == "medusa":
        kind = _named(COMMANDS[name].options)
        parse(kind, words, **getattr(kind, "PARSING", {}))
    for flag, word in pairwise(["", *words]):
        is_written = flag in ("--output", "--output_dir", "--dry-run")
        assert not word.startswith("/") or is_written or Path(word).exists(), line


def test_a_run_that_only_looked_goes_on_with_the_same_options():
    flags = ["--fused_layers", "4", "8", "--cache_hidden_states", "--inspect"]
    look = parse(TrainOptions, ["--config", "smollm2_demo", *flags])
    (again,) = next_steps(look)
    _, name, *words = shlex.split(again)
    assert name == "train"
    assert parse(TrainOptions, words) == replace(look, run=replace(look.run, inspect=False))
    stored = replace(look, run=replace(look.run, inspect=False, stop_after="states"))
    went_on = parse(TrainOptions, shlex.split(*next_steps(stored))[2:])
    assert went_on == replace(look, run=replace(look.run, inspect=False, resume="auto"))


def test_data_is_looked_at_before_anybody_says_how_long_to_train(capsys):
    words = ["--base", "base", "--data", "rows.jsonl", "--output_dir", "out"]
    look = parse(TrainOptions, [*words, "--inspect"])
    (again,) = next_steps(look)
    went_on = parse(TrainOptions, shlex.split(again)[2:])
    assert went_on.optimisation == replace(look.optimisation, num_epochs=1)


def test_an_eagle3_head_goes_on_to_other_engines():
    options = parse(TrainOptions, ["--config", "smollm2_eagle3", "--output_dir", "runs/mine"])
    assert next_steps(options)[-1] == (
        "medusa export runs/mine/heads --to vllm-eagle3 --output runs/mine/export"
    )


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (ModelOptions, ["--base", "a b", "--engine", "int8", "--trust-remote-code"]),
        (ChatOptions, ["--max-new-tokens", "128", "--plain", "--limit", "3"]),
        (
            PushOptions,
            ["runs/heads", "me/heads", "--exports", "speculators", "vllm-medusa", "--dry-run", "out"],
        ),
        (TrainOptions, ["--config", "smollm2_joint", "--checkpoint_minutes", "none", "--no-packing"]),
    ],
)
def test_options_come_back_from_their_words(kind, words):
    options = parse(kind, words)
    assert parse(kind, to_argv(options)) == options


def test_only_what_a_drafter_reads_goes_with_it():
    drafting = DrafterSettings(draft_length=3, draft_model="small", exit_layer=2)
    model, chats = ModelOptions(engine="int8"), chat_tokenizer()
    assert (
        answer_with(chats, "plain", model, drafting) == "medusa chat --plain --engine int8 --draft-length 3"
    )
    assert answer_with(chats, "default", model, DrafterSettings()) == "medusa chat --engine int8"
    expected = "medusa chat --drafter early-exit+suffix --draft-length 3 --exit-layer 2"
    assert answer_with(chats, "early-exit+suffix", ModelOptions(), drafting) == expected
    chats.chat_template = None
    assert answer_with(chats, "plain", model, drafting).startswith("medusa generate --plain --engine int8 ")


@pytest.mark.parametrize(
    ("found", "printed"),
    [
        ("bin/medusa", "medusa"),
        ("elsewhere/medusa", "bin/medusa"),
        (None, "bin/medusa"),
    ],
)
def test_the_command_is_named_as_this_shell_finds_it(found, printed, tmp_path, capsys, monkeypatch):
    for place in ("bin", "elsewhere"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "medusa").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setattr(shutil, "which", lambda name: found and str(tmp_path / found))
    print_next(["medusa chat --heads medusa", "vllm serve medusa"])
    expected = ["next:", f"  {printed} chat --heads medusa", "  vllm serve medusa"]
    assert capsys.readouterr().err.splitlines() == expected
