import contextlib
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import CHECKOUT, tiny_model
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError
from reported import ran
from stateful_models import stateful_model, tiny_stateful_model
from tiny_chat import chat_heads, chat_tokenizer, save_chat_model, wide_tree
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase, T5Config

import medusa
from medusa import CandidateTree, HeadsCheckpoint, save_heads
from medusa.assets import EMBEDDED_BASE, base_named, shipped_files
from medusa.cli.info import info
from medusa.cli.main import COMMANDS, exit_status, main
from medusa.cli.option_types import InfoOptions
from medusa.console import track
from medusa.heads.fingerprint import BaseFingerprint
from medusa.trees.tuned_trees import Runtime, TunedTree

OTHER_DEVICE = "xpu" if torch.cuda.is_available() else "cuda"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    base, heads = save_chat_model(tmp_path_factory.mktemp("model"))
    return ["--base", base, "--heads", heads]


@pytest.mark.parametrize("heads", [[], ["--heads", "none"]])
def test_a_base_without_heads_answers_and_one_line_says_how_to_train_some_unless_none_were_wanted(
    saved, capsys, heads
):
    said = ran(capsys, ["generate", *saved[:2], *heads, "--max-new-tokens", "8", "Hello"]).err
    assert ("no heads were given, so guesses are copied from the text" in said) == (not heads)
    assert (f"medusa learn {saved[1]}" in said) == (not heads)


def test_heads_of_other_sizes_are_refused_before_the_base_is_loaded(saved, capsys, monkeypatch):
    monkeypatch.setattr("medusa.cli.loading.load_base", lambda *given, **more: pytest.fail("loaded"))
    said = ran(capsys, ["generate", *saved[:2], "--heads", "smollm2-135m-instruct", "Hello"], 1).err
    assert "heads were trained for hidden_size=576, base model" in said and "(--heads none)" in said


@pytest.mark.parametrize("command", ["tune", "evaluate"])
def test_what_is_about_heads_says_how_to_train_some_where_there_are_none(saved, capsys, command):
    with contextlib.suppress(SystemExit):
        main([command, *saved[:2]])
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "is about heads, and base" in said and "medusa learn " in said


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_by_example_and_names_no_file_that_only_a_checkout_has(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert f"\n    medusa {command}" in said
    assert not re.findall(r"(?<![\w/])(?:train|inference|scripts|configs)/\w+", said)
    assert f"medusa {command} " in ran(capsys, ["--help"]).out


def test_a_bare_medusa_prints_its_help(capsys):
    asked = ran(capsys, ["--help"])
    assert main([]) == 0
    assert capsys.readouterr() == asked


def test_the_version_help_and_mistakes_are_answered_without_torch():
    """Torch and transformers take seconds to import, the rest a few tenths of one."""
    script = """
import contextlib, sys
import medusa
from medusa.cli.main import main
assert main(["--version"]) == 0 and main(["--help"]) == 0 and main(["cht"]) == 2
for words in (["chat", "--help"], ["generate", "--temperature", "-1", "x"]):
    with contextlib.suppress(SystemExit):
        main(words)
loaded = {"torch", "transformers", "numpy"} & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.match(rf"medusa {re.escape(medusa.__version__)}(, commit \w+(-dirty)?)?\n", done.stdout)
    assert "got 'cht'; did you mean chat?" in done.stderr


@pytest.mark.parametrize("words", ["--help", "chat --help", "configs"])
def test_a_reader_that_goes_away_ends_a_command_quietly(words):
    """As in `medusa chat --help | head -1`; the pipe here is lost before the first line."""
    script = f"""
import os, subprocess, sys
reader, writer = os.pipe()
os.close(reader)
command = [sys.executable, "-m", "medusa", *{words.split()}]
done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE)
print(done.returncode, done.stderr)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "141 b''\n", done.stderr


def test_configs_lists_what_ships_and_says_where_it_is(capsys):
    assert main(["configs"]) == 0
    listed = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert set(listed) == {path.stem for path in shipped_files().iterdir()}
    assert "Heads worth keeping" in listed["smollm2"]
    assert ran(capsys, ["configs", "demo_prompts"]).out == f"{shipped_files() / 'demo_prompts.jsonl'}\n"
    assert "did you mean 'smollm2'?" in ran(capsys, ["configs", "smollm3"], 1).err


def test_public_names_are_there_although_they_are_imported_late():
    assert all(getattr(medusa, name) is not None for name in medusa.__all__)
    assert set(medusa.__all__) <= set(dir(medusa))
    with pytest.raises(AttributeError, match="no attribute 'MedusaModl'"):
        medusa.MedusaModl  # noqa: B018


def test_chat_answers_piped_questions_and_logs_version_and_path_first(saved, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n/stats\n/exit\nnever asked\n"))
    report = tmp_path / "deep" / "session.json"
    printed = ran(capsys, ["chat", *saved, "--max-new-tokens", "9", "--json", str(report)])
    assert printed.err.startswith(f"medusa {medusa.__version__} from ")
    assert "> Hello\n" in printed.out
    assert "9 tokens in" in printed.err and "accepted once reached" in printed.err
    assert "never asked" not in printed.out
    assert json.loads(report.read_text())["num_answers"] == 1


def test_chat_answers_a_prompts_file_one_conversation_a_row(saved, capsys, tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"turns": ["One", "Two"]}\n{"prompt": "Three"}\n{"prompt": "Four"}\n')
    assert main(["chat", *saved, "--prompts", str(prompts), "--limit", "2", "--max-new-tokens", "5"]) == 0
    asked = [line for line in capsys.readouterr().out.splitlines() if line.startswith("> ")]
    assert asked == ["> One", "> Two", "> Three"]


def test_generate_prints_the_answer_alone_on_standard_output(saved, capsys, monkeypatch):
    with_heads = ran(capsys, ["generate", *saved, "--max-new-tokens", "12", "Hello"])
    assert "tokens per step" in with_heads.err
    assert main(["generate", *saved, "--max-new-tokens", "12", "--plain", "Hello"]) == 0
    assert capsys.readouterr().out == with_heads.out
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
    assert ran(capsys, ["generate", *saved, "--max-new-tokens", "12", "-"]).out == with_heads.out


@pytest.mark.parametrize(
    "how",
    [
        *(["--drafter", name] for name in ("suffix", "heads", "heads+suffix", "dynamic-heads")),
        ["--step", "static"],
    ],
    ids=lambda how: how[1],
)
def test_another_drafter_or_step_gives_the_same_text(saved, capsys, how):
    asked = ["generate", *saved, "--max-new-tokens", "24", "Hello Hello Hello"]
    expected = ran(capsys, [*asked, "--plain"]).out
    printed = ran(capsys, [*asked, *how])
    assert printed.out == expected
    assert ("no heads" in printed.err) == ("suffix" in how)


def test_chat_talks_with_another_drafter(saved, capsys, monkeypatch):
    answers = []
    for extra in (["--drafter", "heads"], ["--draft-length", "5", "--color-depth"]):
        monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
        assert main(["chat", *saved, "--max-new-tokens", "12", *extra]) == 0
        answers.append(capsys.readouterr().out)
    assert "depth 5" in answers[1], "a chain of five draft tokens beside the heads' tree of three"
    assert answers[0].splitlines()[1] in answers[1]


def test_generate_raw_leaves_the_chat_template_out(saved, capsys):
    outputs = []
    for extra in ([], ["--raw"], ["--system", "Be brief."]):
        assert main(["generate", *saved, "--max-new-tokens", "12", *extra, "Hello"]) == 0
        outputs.append(capsys.readouterr().out)
    assert len(set(outputs)) == 3


def test_generate_leads_to_chat_where_the_base_has_a_chat_template_alone(saved, capsys, tmp_path):
    plain = shutil.copytree(saved[1], tmp_path / "base")
    (plain / "chat_template.jinja").unlink()
    for base, leads in ((saved[1], True), (str(plain), False)):
        assert main(["generate", "--base", base, "--heads", "none", "--max-new-tokens", "4", "Hello"]) == 0
        assert ("chat --base" in capsys.readouterr().err) == leads


def test_info_says_what_a_heads_directory_holds(saved, capsys):
    table = ran(capsys, ["info", saved[3]]).out
    assert "num_heads" in table
    assert "nodes: the root, and guesses among the best 4 at depth 1" in " ".join(
        table.replace("│", " ").split()
    )
    assert json.loads(ran(capsys, ["info", "--json", saved[3]]).out)["num_heads"] == 3


@pytest.fixture
def embedded(tmp_path, monkeypatch):
    """The embedded base's directory, with a small model's configuration."""
    home = tmp_path / EMBEDDED_BASE
    tiny_model("llama").config.save_pretrained(home)
    chat_tokenizer().save_pretrained(home)
    monkeypatch.setattr("medusa.assets.embedded_base_homes", lambda: [home])
    return home


def test_info_describes_base_and_heads_where_a_name_stands_for_both(embedded, capsys):
    printed = " ".join(ran(capsys, ["info", EMBEDDED_BASE]).out.replace("│", " ").split())
    base, _, heads = printed.partition(f"Heads that ship for {EMBEDDED_BASE}")
    assert f"Base {EMBEDDED_BASE}" in base and "LlamaForCausalLM" in base and "num_heads" in heads
    described = json.loads(ran(capsys, ["info", "--json", EMBEDDED_BASE]).out)
    assert described["kind"] == "medusa" and described["base"]["decodes"] == "yes"


def test_info_says_how_to_fetch_the_base_of_heads_that_ship(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("medusa.assets.checkout", lambda: None)
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path))
    printed = ran(capsys, ["info", "qwen2.5-coder-1.5b"])
    assert "no: `medusa fetch qwen2.5-coder-1.5b` fetches it" in printed.out and "num_heads" in printed.out
    assert printed.err.rstrip().endswith("fetch qwen2.5-coder-1.5b")
    assert json.loads(ran(capsys, ["info", "--json", "qwen2.5-coder-1.5b"]).out)["base"] is None


def test_info_names_the_heads_that_ship_for_a_base(embedded, tmp_path, capsys):
    assert "which are used for this base" in ran(capsys, ["info", "--json", str(embedded)]).out
    tiny_model("llama").config.save_pretrained(tmp_path)
    assert json.loads(ran(capsys, ["info", "--json", str(tmp_path)]).out)["shipped_heads"] == "none"


def test_info_lists_the_places_that_trees_were_tuned_at(capsys, tmp_path):
    tuned = (TunedTree(Runtime("a card", "bfloat16", "eager"), 8, CandidateTree.chain(2), step="captured"),)
    heads = save_heads(HeadsCheckpoint(chat_heads(), "tiny", wide_tree(), tuned=tuned), tmp_path / "heads")
    assert main(["info", "--json", str(heads)]) == 0
    place = {"device": "a card", "dtype": "bfloat16", "engine": "eager"}
    listed = json.loads(capsys.readouterr().out)["tuned_trees"]
    assert listed == [{**place, "step": "captured", "batch_size": 8, "num_nodes": 3}]
    assert main(["info", str(heads)]) == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "3 nodes at batch size 8 on a card, bfloat16, eager, captured steps" in printed


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        (lambda: tiny_model("llama"), {"layers": {"attention": 2}, "decodes": "yes"}),
        (
            lambda: stateful_model("lfm2"),
            {
                "layers": {"with a state": 1, "attention": 1},
                "decodes": "yes",
                "steps": "general, compiled",
            },
        ),
        (
            lambda: tiny_stateful_model("minimax"),
            {
                "decodes": "no: MiniMaxForCausalLM takes no cache but its own, so no draft can be verified "
                "on it; use its own generate"
            },
        ),
    ],
)
def test_a_base_is_described_without_its_weights(base, expected, tmp_path, capsys):
    base().config.save_pretrained(tmp_path)
    assert not info(InfoOptions(heads=str(tmp_path), json=True)), "nothing can be asked without a tokenizer"
    assert json.loads(capsys.readouterr().out)["chat_template"].startswith("no tokenizer")
    chat_tokenizer().save_pretrained(tmp_path)
    following = info(InfoOptions(heads=str(tmp_path), json=True))
    described = json.loads(capsys.readouterr().out)
    assert described["chat_template"] == "yes"
    assert {name: described[name] for name in expected} == expected
    assert bool(following) == (expected["decodes"] == "yes")


def test_a_base_that_continues_text_is_told_from_one_that_chats(tmp_path, capsys):
    tiny_model("llama").config.save_pretrained(tmp_path)
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    (following,) = info(InfoOptions(heads=str(tmp_path)))
    assert following.startswith("medusa generate --base")
    assert "none: it continues text" in capsys.readouterr().out


def test_a_base_is_described_in_a_table(tmp_path, capsys):
    stateful_model("falcon_h1").config.save_pretrained(tmp_path)
    info(InfoOptions(heads=str(tmp_path)))
    assert "2 attention beside a state" in capsys.readouterr().out


def test_one_is_not_counted_as_many(capsys, tmp_path):
    heads = save_heads(HeadsCheckpoint(chat_heads(), "tiny", CandidateTree.chain(0)), tmp_path / "heads")
    printed = ran(capsys, ["info", str(heads)]).out
    assert "1 node" in printed and "1 nodes" not in printed


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["info", "./nowhere"], "no heads directory at './nowhere'"),
        (["generate", "  "], "the prompt is empty"),
        (["generate", "--drafter", "nobody", "x"], "drafter 'nobody' is unknown; there are "),
        (["chat", "--drafter", "draft-model"], "drafter 'draft-model' needs "),
        (["generate", "--device", "tpu", "x"], "device must be one that torch can use here, got 'tpu'"),
        (["generate", "--device", OTHER_DEVICE, "x"], f"got {OTHER_DEVICE!r}; give --device cpu or none"),
        (["generate", "--base", "./nowhere", "x"], "no base model at './nowhere'; give the directory"),
        (
            [
                *("generate", "--max-new-tokens", "9", "--step", "static"),
                *("--drafter", "early-exit", "--exit-layer", "1", "x"),
            ],
            "step='static' cannot work with",
        ),
        (["chat", "--prompts", "nowhere.jsonl"], "'nowhere.jsonl' does not exist here, nor among"),
    ],
)
def test_errors_are_one_sentence_on_standard_error(saved, capsys, arguments, complaint):
    model = saved if arguments[0] != "info" else []
    printed = ran(capsys, [arguments[0], *model, *arguments[1:]], 1)
    assert complaint in printed.err
    assert "Traceback" not in printed.err
    assert not printed.out


def test_traceback_shows_where_an_error_arose(capsys):
    assert "Traceback" in ran(capsys, ["info", "./nowhere", "--traceback"], 1).err


def test_a_missing_default_says_what_makes_it(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("medusa.assets.checkout", lambda: None)
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path))
    for words in (["generate", "Hello"], ["generate", "--base", EMBEDDED_BASE, "Hello"], ["evaluate"]):
        assert "fetch it once: `medusa fetch smollm2-135m-instruct`" in ran(capsys, words, 1).err


def test_the_name_of_the_embedded_base_is_the_directory_that_was_fetched(
    saved, capsys, monkeypatch, tmp_path
):
    """In the checkout first, then in the cache; a directory of that name here comes before both."""
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("medusa.assets.checkout", lambda: tmp_path / "checkout")
    monkeypatch.chdir(tmp_path)
    places = [tmp_path / "cache/models", tmp_path / "checkout/models", tmp_path]
    for place in places:
        shutil.copytree(saved[1], place / EMBEDDED_BASE)
        assert Path(base_named(EMBEDDED_BASE)).resolve() == place / EMBEDDED_BASE
    assert main(["generate", "--base", EMBEDDED_BASE, *saved[2:], "--max-new-tokens", "3", "Hello"]) == 0
    assert "3 tokens in" in capsys.readouterr().err


def test_the_base_is_the_one_that_the_heads_record(saved, capsys):
    for command in (["--max-new-tokens", "4", "Hello"], ["--plain", "--max-new-tokens", "4", "Hello"]):
        assert f"{saved[1]} in torch.float32 on cpu" in ran(capsys, ["generate", *saved[2:], *command]).err


def test_heads_that_record_no_base_ask_for_one(capsys, tmp_path):
    heads = save_heads(HeadsCheckpoint(chat_heads(), "", wide_tree()), tmp_path / "heads")
    assert main(["generate", "--heads", str(heads), "Hello"]) == 1
    assert "do not say which base they were trained on; give --base" in capsys.readouterr().err


def test_a_base_that_is_nowhere_is_asked_for_once(saved, capsys, monkeypatch):
    asked = []

    def unreachable(self, name, **more):
        asked.append(name)
        raise HTTPError("name or service not known")

    monkeypatch.setattr(HfApi, "model_info", unreachable)
    printed = ran(capsys, ["generate", "--base", "no/such-model", *saved[2:], "x"], 1).err
    assert "no base model at 'no/such-model': it is no directory here, the hub's cache has none" in printed
    assert "name or service not known" in printed
    assert asked == ["no/such-model"]
    assert len(printed.splitlines()) == 2, "the version, and the error"


def test_a_base_that_only_continues_what_an_encoder_read_is_refused(saved, capsys, tmp_path):
    T5Config(d_model=8, num_layers=1, num_heads=1).save_pretrained(tmp_path)
    printed = ran(capsys, ["generate", "--base", str(tmp_path), *saved[2:], "x"], 1).err
    assert f"base must be a causal language model, got {str(tmp_path)!r}, a t5 model" in printed
    assert len(printed) < 500


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
@pytest.mark.parametrize("command", [["generate", "-"], ["chat"]])
def test_standard_input_that_is_not_utf8_is_one_sentence(saved, capsys, monkeypatch, command, errors):
    stdin = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8", errors=errors)
    monkeypatch.setattr("sys.stdin", stdin)
    printed = ran(capsys, [command[0], *saved, *command[1:]], 1)
    assert "standard input must be UTF-8 text, and is not" in printed.err
    assert "Traceback" not in printed.err


def test_ctrl_c_while_the_model_loads_says_stopped(saved, capsys, monkeypatch):
    def pressed(*given, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr("medusa.cli.loading.load_base", pressed)
    printed = ran(capsys, ["chat", *saved], 130).err
    assert printed.endswith("stopped\n")
    assert "Traceback" not in printed


def test_flags_can_come_from_a_file(saved, capsys, tmp_path):
    config = tmp_path / "answer.yaml"
    config.write_text(f"base: {saved[1]}\nheads: {saved[3]}\nmax_new_tokens: 5\n")
    assert "5 tokens in" in ran(capsys, ["generate", "--config", str(config), "Hello"]).err


def test_a_chat_that_no_terminal_reads_prints_text_alone_and_json_where_it_is_asked_to(
    saved, capsys, monkeypatch
):
    words = ["chat", *saved, "--max-new-tokens", "3"]
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    text = ran(capsys, words)
    assert text.out.startswith("> Hello\n") and "{" not in text.out and "3 tokens in" not in text.out
    assert "3 tokens in" in text.err
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    *before, last = ran(capsys, [*words, "--json", "-"]).out.splitlines()
    assert before == text.out.splitlines() and json.loads(last)["num_answers"] == 1


def test_statistics_of_an_answer_begin_a_line_where_both_streams_go_to_one_place(saved):
    answers = f"medusa generate {' '.join(map(str, saved))} --step general --max-new-tokens 3 Hello"
    lines = shell(f"{answers} 2>&1").stdout.splitlines()
    assert [line for line in lines if line.startswith("3 tokens in ")], lines


# ------------------------------------------------------------------ what commands share


DOORS = sorted(path for folder in ("train", "inference") for path in (CHECKOUT / folder).glob("*.py"))


@pytest.mark.parametrize("path", DOORS, ids=lambda path: path.name)
def test_a_program_is_another_door_to_a_command(path, monkeypatch):
    given = []
    monkeypatch.setattr("medusa.cli.main.main", lambda words: given.append(words) or 3)
    monkeypatch.setattr("sys.argv", [str(path), "--some", "flag"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 3
    ((command, *words),) = given
    assert words == ["--some", "flag"]
    assert command in COMMANDS and f"`medusa {command}`" in path.read_text()


def test_the_package_itself_is_a_door(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["medusa", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("medusa", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"medusa {medusa.__version__}")


TOOL = {"type": "function", "function": {"name": "clock"}}
ASKED = {"role": "user", "content": "What time is it?"}
TOOL_ROW = {
    "messages": [ASKED, {"role": "tool", "content": "noon"}],
    "tools": [TOOL],
    "chat_template_kwargs": {"mood": "glad"},
}


@pytest.mark.parametrize("command", ["evaluate", "tune", "benchmark", "chat"])
def test_every_command_that_reads_prompts_shows_tools_and_template_arguments_to_the_template(
    command, saved, monkeypatch, tmp_path
):
    path = tmp_path / "tools.jsonl"
    path.write_text(json.dumps(TOOL_ROW) + "\n")

    class Seen(Exception):
        pass

    def seen(self, conversation, **options):
        if "tools" in options:  # before it, the template is asked in which form it takes content
            raise Seen({"messages": list(conversation)} | options)
        return ""

    monkeypatch.setattr(PreTrainedTokenizerBase, "apply_chat_template", seen)
    with pytest.raises(Seen) as rendered:
        main([command, *saved, "--prompts", str(path)])
    told = rendered.value.args[0]
    assert [message["role"] for message in told["messages"]] == ["user", "tool"]
    assert told["tools"] == [TOOL] and told["mood"] == "glad"


def test_a_prompt_beyond_the_context_is_refused_by_row_before_any_work(saved, capsys, tmp_path):
    prompts = tmp_path / "long.jsonl"
    prompts.write_text(json.dumps({"prompt": "fine"}) + "\n" + json.dumps({"prompt": "x" * 500}) + "\n")
    printed = ran(capsys, ["benchmark", *saved, "--prompts", str(prompts), "--max-new-tokens", "24"], 1)
    assert f"{prompts} row 2 has 503 tokens" in printed.err
    assert "context of 512" in printed.err


def test_progress_without_a_terminal_is_lines_with_the_time_left(capsys, monkeypatch):
    monkeypatch.setattr("medusa.console.SECONDS_BETWEEN_LINES", 0.0)
    assert list(track(["a", "b", "c"], "answering")) == ["a", "b", "c"]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "answering  33%: 1/3",
        "answering  67%: 2/3",
        "answering 100%: 3/3",
    ]
    assert lines[-1].endswith("about 0:00 left")


def test_errors_and_ctrl_c_become_exit_statuses(capsys):
    def failing():
        raise ValueError("limit must be at least 1, got 0 [not markup]")

    def interrupted():
        raise KeyboardInterrupt

    assert exit_status(lambda: None, show_traceback=False) == 0
    assert exit_status(failing, show_traceback=False) == 1
    assert capsys.readouterr().err == "error: limit must be at least 1, got 0 [not markup]\n"
    assert exit_status(interrupted, show_traceback=False) == 130


def test_a_mistake_of_ours_is_not_dressed_up_as_a_user_error():
    with pytest.raises(ZeroDivisionError):
        exit_status(lambda: 1 / 0, show_traceback=False)


def test_heads_that_were_carried_elsewhere_ask_for_their_base(tmp_path, capsys):
    heads = save_heads(HeadsCheckpoint(chat_heads(), "runs/base", CandidateTree.chain(1)), tmp_path / "heads")
    printed = ran(capsys, ["generate", "--heads", str(heads), "Hello"], 1)
    assert "were trained on the base 'runs/base', which is not here: give --base" in printed.err


def test_info_says_whether_heads_fit_a_base(tmp_path, capsys):
    model, _ = save_chat_model(tmp_path / "model")
    base = LlamaForCausalLM.from_pretrained(model)
    parts = {
        "fingerprint": BaseFingerprint.of(base),
        "provenance": {"metrics": {"held_out/tokens_per_step": 2.8071}},
    }
    heads = save_heads(HeadsCheckpoint(chat_heads(), "tiny", **parts), tmp_path / "heads")
    printed = ran(capsys, ["info", str(heads), "--base", model, "--json"])
    described = json.loads(printed.out)
    assert "is the base that they were trained on" in described["fit"]
    assert described["worth"].startswith("2.81 tokens a step on text that tiny wrote")
    tiny_model("llama").save_pretrained(tmp_path / "other")
    printed = ran(capsys, ["info", str(heads), "--base", str(tmp_path / "other"), "--json"])
    assert json.loads(printed.out)["fit"].startswith("none: heads were trained for vocab_size=260")
    assert f"medusa learn {tmp_path / 'other'}" in printed.err


def test_info_tells_the_metrics_of_training_in_words(tmp_path, capsys):
    made = {"command": "medusa train", "metrics": {"held_out/top1_1": 0.48264, "documents": {"training": 9}}}
    saved_heads = HeadsCheckpoint(chat_heads(), "tiny", CandidateTree.chain(1), provenance=made)
    heads = save_heads(saved_heads, tmp_path / "heads")
    printed = " ".join(ran(capsys, ["info", str(heads)]).out.replace("│", " ").split())
    assert "made: command medusa train" in printed
    assert "made: metrics held_out/top1_1 0.483, documents training 9" in printed


COMMAND = "import sys; from medusa.cli.main import main; sys.exit(main())"


def shell(command: str, **given) -> subprocess.CompletedProcess:
    """A line for bash in which ``medusa`` is the command."""
    alias = f'medusa() {{ "{sys.executable}" -c "{COMMAND}" "$@"; }}'
    return subprocess.run(["bash", "-c", f"{alias}; {command}"], capture_output=True, text=True, **given)


def test_a_reader_that_goes_away_ends_a_chat_with_141_and_no_word(saved):
    questions = "".join(f"question {number}\\n" for number in range(40))
    chat = f"medusa chat {' '.join(map(str, saved))} --step general --max-new-tokens 4"
    ended = shell(f"printf '{questions}' | {chat} | head -1; echo ${{PIPESTATUS[1]}}")
    assert ended.stdout.splitlines()[-1] == "141", ended
    assert "Traceback" not in ended.stderr and "error" not in ended.stderr


@pytest.mark.parametrize("closed", [">&-", "<&-", "2>&-", ">&- <&-", ">&- 2>&-"])
@pytest.mark.parametrize(
    "command",
    ["--version", pytest.param("generate", marks=pytest.mark.slow)],  # this one starts torch
)
def test_a_standard_stream_that_is_closed_is_no_traceback(saved, command, closed):
    words = [*map(str, saved), "--step", "general", "--max-new-tokens", "3", "Hello"]
    ended = shell(" ".join(["medusa", command, *(words if command == "generate" else []), closed]))
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr


def test_a_system_message_that_the_template_refuses_is_its_words(saved, capsys, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(saved[1], base)
    refusing = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    )
    (base / "chat_template.jinja").write_text(refusing)
    for command in (["chat", "--prompts", tmp_path / "prompts.jsonl"], ["generate", "Hello"]):
        (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hello"}')
        words = [command[0], "--base", base, "--heads", "none", "--max-new-tokens", "2", *command[1:]]
        ran(capsys, map(str, words))
        said = ran(capsys, map(str, [*words, "--system", "Be brief."]), 1).err
        assert "refuses the conversation: System role not supported; leave the system message out" in said
        assert "Traceback" not in said


@pytest.mark.parametrize("command", ["chat", "--version"])
@pytest.mark.parametrize("started", ["as a module", "as a script"])
def test_a_command_on_windows_says_in_one_line_that_it_needs_linux(tmp_path, started, command):
    script = tmp_path / "medusa"
    script.write_text("import sys; from medusa.cli.main import main; sys.exit(main())")
    words = ["-m", "medusa"] if started == "as a module" else [str(script)]
    result = run_without_fcntl(tmp_path, *words, command)
    assert result.returncode == 1 and not result.stdout
    assert re.fullmatch(r"error: medusa needs Linux \(on Windows: WSL\).*\n", result.stderr)


def test_an_import_on_windows_raises_an_import_error_that_says_the_same(tmp_path):
    code = "try: import medusa\nexcept ImportError as error: print(error)"
    assert run_without_fcntl(tmp_path, "-c", code).stdout.startswith("medusa needs Linux (on Windows: WSL)")


def run_without_fcntl(directory, *words):
    """Python with ``words``, which has no module fcntl, as on Windows."""
    (directory / "sitecustomize.py").write_text("import sys; sys.modules['fcntl'] = None")
    environment = {**os.environ, "PYTHONPATH": f"{directory}{os.pathsep}{CHECKOUT}"}
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)
